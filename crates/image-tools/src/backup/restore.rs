//! Restores a disk from a backup. Each region is compared with its hash before it counts as restored.

use std::io::Read;
use std::path::Path;

use ferrite_disk::Disk;
use ferrite_disk_base::{DiskError, ErrorKind, ImageName, SECTOR_BYTES, plain};

use super::create::info;
use super::folder::{Folder, Use, hashes};
use super::manifest::{Manifest, Reference};
use super::regions::{Plan, Regions, To};
use super::{BackupInfo, Verified};
use crate::files::{Over, check_apart};
use crate::formats::{self, Blank};
use crate::{Convert, Done, ImageTools, NewImage, broken, refused};

/// The options of restoring.
#[derive(Clone, Debug, Default)]
pub struct Restore {
    /// The backup; `None`: the newest.
    pub name: Option<String>,
    /// A file at the destination may be overwritten.
    pub force: bool,
    /// The destination is a disk that is there, and its content is overwritten.
    pub existing: bool,
    /// Allocate all of the destination's space at once.
    pub fixed: bool,
}

/// A stream to restore.
pub struct RestoreStream<'a> {
    /// The bytes. A read that ends with `Interrupted` stops the restore.
    pub from: &'a mut dyn Read,
    /// A file at the destination may be overwritten.
    pub force: bool,
}

impl ImageTools<'_> {
    /// Restores a disk into a new image of any format, a device, a new volume of a store, or over a disk that is there.
    ///
    /// # Errors
    /// There is no such backup; one of its chain is damaged or missing; the destination is there, or is too small.
    pub fn restore(&self, folder: &Path, to: &ImageName, how: &Restore) -> Result<Done, DiskError> {
        Folder::check_readable(folder)?;
        let folder = Folder::open(folder, Use::Read)?;
        let entries = folder.entries()?;
        let chain = folder.chain(&entries, how.name.as_deref())?;
        let source = self.open_chain(&folder, &chain)?;
        let data = folder.data(&chain[0].name);
        let is_direct = !how.existing && to.volume().is_none() && to.export().is_none();
        if is_direct && !self.is_device(&to.path) {
            return self.restore_file(&source, &chain, to, how);
        }
        check_apart(format!("cannot restore {}", to.path.display()), &source, &to.path)?;
        if !how.force && !how.existing && self.is_device(&to.path) {
            let what = format!("cannot restore to {}", to.path.display());
            let help = "name another device, or overwrite it with --force";
            return Err(refused(what, "all that is on the device would be lost", help));
        }
        // All is compared first: these destinations cannot be taken back.
        let wrong = self.compare_all(&source, &chain)?;
        if !wrong.is_empty() {
            return Err(damaged(&chain, &wrong));
        }
        drop(source);
        let convert = Convert { force: how.force, fixed: how.fixed, ..Convert::default() };
        match how.existing {
            true => self.convert_over(&data, to),
            false => self.convert(&data, to, &convert),
        }
    }

    fn restore_file(
        &self,
        source: &Disk,
        chain: &[&Manifest],
        to: &ImageName,
        how: &Restore,
    ) -> Result<Done, DiskError> {
        let what = || format!("cannot restore {}", to.path.display());
        let cannot = |e| broken(what(), e);
        check_apart(what(), source, &to.path)?;
        let bytes = source.sectors() * SECTOR_BYTES;
        let new = NewImage { fixed: how.fixed, ..NewImage::default() };
        formats::check_new(to, &new, None, bytes)?;
        let mut file = self.new_file(&to.path, Over::forced(how.force))?;
        self.write_new(&mut file, to.format, &new, (None, Blank::Zeros), bytes)?;
        let target = file.open_disk(to.format)?;
        let expected = hashes(chain);
        let mut context = Regions::context(self).map_err(cannot)?;
        let plan = of_whole(source, Some(&target), &expected);
        let regions = Regions::new(self, &mut context, plan).map_err(cannot)?;
        context.run(regions.run(u64::MAX)).map_err(cannot)?;
        let wrong = regions.wrong();
        if !wrong.is_empty() {
            return Err(damaged(chain, &wrong));
        }
        context.run(regions.close()).map_err(cannot)?;
        drop(regions);
        drop(target);
        file.finish()?;
        let notes = formats::warnings(to, &new, None, bytes);
        Ok(crate::create::done(to, bytes, notes))
    }

    /// The offsets of the regions of a chain's disk that are not what was backed up.
    fn compare_all(&self, source: &Disk, chain: &[&Manifest]) -> Result<Vec<u64>, DiskError> {
        let cannot = |e| broken(format!("cannot read backup {}", chain[0].name), e);
        let expected = hashes(chain);
        let mut context = Regions::context(self).map_err(cannot)?;
        let plan = of_whole(source, None, &expected);
        let regions = Regions::new(self, &mut context, plan).map_err(cannot)?;
        context.run(regions.run(u64::MAX)).map_err(cannot)?;
        Ok(regions.wrong())
    }

    /// Opens the disk of a chain, whose data have to stand on each other as the manifests say. A backup that was merged
    /// may stand on fewer.
    pub(super) fn open_chain(
        &self,
        folder: &Folder,
        chain: &[&Manifest],
    ) -> Result<Disk, DiskError> {
        let name = folder.data(&chain[0].name);
        let disk = self.open(&name, true)?;
        let what = format!("cannot use backup {}", name.path.display());
        let wrong = |why: String| {
            let help =
                "restore an earlier one (ferrite backup list), or get the folder back as it was";
            Err(DiskError::new(ErrorKind::Damaged, what.clone(), why, help))
        };
        let bytes = disk.sectors() * SECTOR_BYTES;
        if bytes != chain[0].disk.virtual_bytes {
            let said = chain[0].disk.virtual_bytes;
            return wrong(format!("its disk has {bytes} bytes, and its manifest says {said}"));
        }
        for (medium, manifest) in disk.media().iter().zip(chain) {
            let expected = folder.data(&manifest.name);
            if !crate::files::same_file(medium.path(), &expected.path).unwrap_or(false) {
                let path = medium.path().display();
                return wrong(format!("it stands on {path} instead of backup {}", manifest.name));
            }
        }
        if disk.media().len() > chain.len() {
            return wrong("its data stand on more than its manifest says".into());
        }
        Ok(disk)
    }

    /// Verifies a backup and those that it stands on; without a name, all that can be used. The result has one entry for
    /// each.
    ///
    /// # Errors
    /// The folder cannot be read; there is no such backup; `Interrupted` if the progress callback stopped it.
    pub fn verify_backups(
        &self,
        folder: &Path,
        name: Option<&str>,
    ) -> Result<Vec<Verified>, DiskError> {
        Folder::check_readable(folder)?;
        let folder = Folder::open(folder, Use::Read)?;
        let entries = folder.entries()?;
        let names: Vec<String> = match name {
            Some(name) => {
                let chain = folder.chain(&entries, Some(name))?;
                chain.iter().map(|manifest| manifest.name.clone()).collect()
            }
            None => entries.keys().cloned().collect(),
        };
        self.verify_each(&folder, &entries, &names)
    }

    /// All backups of a folder, the oldest first.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn backups(&self, folder: &Path) -> Result<Vec<BackupInfo>, DiskError> {
        Folder::check_readable(folder)?;
        let folder = Folder::open(folder, Use::Read)?;
        let entries = folder.entries()?;
        let mut all: Vec<(usize, BackupInfo)> = Vec::new();
        for (name, entry) in &entries {
            let chain = folder.chain(&entries, Some(name));
            let (depth, found) = match (entry, chain) {
                (Ok(manifest), Ok(chain)) => (chain.len(), info(&folder, manifest, "complete")),
                (Ok(manifest), Err(e)) => {
                    let found = info(&folder, manifest, "damaged");
                    (0, BackupInfo { why: Some(e.why().to_owned()), ..found })
                }
                (Err(e), _) => (0, unusable(name, e)),
            };
            all.push((depth, found));
        }
        all.sort_by_key(|(depth, found)| (found.created_unix_s, *depth));
        let mut all: Vec<BackupInfo> = all.into_iter().map(|(_, found)| found).collect();
        for name in folder.names(super::folder::UNFINISHED)? {
            // One that was killed in step 6 is complete.
            if !entries.contains_key(&name) {
                all.push(match Manifest::read(&folder.unfinished(&name), &name) {
                    Ok(manifest) => info(&folder, &manifest, "unfinished"),
                    Err(e) => BackupInfo { state: "unfinished", ..unusable(&name, &e) },
                });
            }
        }
        for map in folder.names(super::folder::BEGUN)? {
            add_snapshot(&folder, &map, &mut all);
        }
        Ok(all)
    }
}

/// Adds the snapshot that a backup with this map copies, or has left.
fn add_snapshot(folder: &Folder, map: &str, all: &mut Vec<BackupInfo>) {
    let text = plain::read(&folder.begun(map), super::live::MAX_RECORD);
    // That of a disk at rest is empty.
    let record = text.and_then(|text| super::live::BackupRecord::parse(&text));
    let Some(record) = record.ok().filter(super::live::BackupRecord::is_left) else { return };
    let snapshot = record.snapshot.display().to_string();
    let maps = [format!("{map}.1"), format!("{map}.2")];
    let is_it = |found: &&mut BackupInfo| {
        found.state == "unfinished" && found.map.as_ref().is_some_and(|map| maps.contains(map))
    };
    match all.iter_mut().find(is_it) {
        Some(unfinished) => unfinished.snapshot = Some(snapshot),
        None => all.push(BackupInfo {
            disk: record.image.display().to_string(),
            state: "begun",
            snapshot: Some(snapshot),
            why: None,
            ..unusable(map, &std::io::ErrorKind::Other.into())
        }),
    }
}

/// Reads a whole disk, compares it with the hashes, and copies it to the target, if there is one.
fn of_whole<'a>(
    from: &'a Disk,
    to: Option<&'a Disk>,
    expected: &'a std::collections::BTreeMap<u32, super::manifest::Hash>,
) -> Plan<'a> {
    let bytes = from.sectors() * SECTOR_BYTES;
    Plan {
        from,
        to: to.map(|disk| To { disk, zeros: false }),
        ranges: std::iter::once(0..bytes).collect(),
        done: Default::default(),
        expected: Some(expected),
        same: None,
        zeros_have_hashes: false,
        total: (0, bytes),
    }
}

fn unusable(name: &str, e: &std::io::Error) -> BackupInfo {
    BackupInfo {
        name: name.to_owned(),
        id: String::new(),
        parent: None,
        created_unix_s: 0,
        disk: String::new(),
        virtual_bytes: 0,
        data_bytes: 0,
        map: None,
        state: "damaged",
        snapshot: None,
        why: Some(e.to_string()),
    }
}

fn damaged(chain: &[&Manifest], wrong: &[u64]) -> DiskError {
    let what = format!("cannot restore backup {}", chain[0].name);
    let why = format!(
        "{} regions are not what was backed up: the first begins at byte {} of the disk",
        wrong.len(),
        wrong[0]
    );
    let help = "ferrite backup verify names the damaged backups; restore an earlier one, or get the files back from a \
                copy of the folder";
    DiskError::new(ErrorKind::Damaged, what, why, help)
}

/// Whether a backup stands on this one.
pub(super) fn stands_on(manifest: &Manifest, parent: &Reference) -> bool {
    manifest.parent.as_ref().is_some_and(|found| found.id == parent.id)
}
