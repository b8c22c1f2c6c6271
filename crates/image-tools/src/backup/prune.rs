//! Removes backups, and makes incremental ones full ones.
//!
//! The order of removing a backup:
//! 1. Its manifest gets another name, and the folder is synced.
//! 2. Its data are removed.
//! 3. That manifest is removed.
//!
//! So data without a manifest are never taken for a backup, and the next command goes on.
//!
//! The order of a merge:
//! 1. The new data are durable and replace the old ones under their name, which have the same content.
//! 2. The manifest without a parent is durable and replaces the old one.
//!
//! Between the two the manifest still names the parent, which is kept.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ferrite_disk_base::{DiskError, ErrorKind, SECTOR_BYTES};
use ferrite_images::children::PARTIAL;

use super::folder::{Entries, Folder, MANIFEST, REMOVED, UNFINISHED, Use, depth, hashes};
use super::manifest::Manifest;
use super::regions::{Plan, Regions, To};
use super::restore::stands_on;
use super::{BackupInfo, Pruned};
use crate::files::{Over, beside, protect};
use crate::formats::Blank;
use crate::io_context::IoContext;
use crate::{ImageTools, NewImage, broken, refused};

/// The backups that are removed.
#[derive(Clone, Debug, Default)]
pub struct Prune {
    /// Of each disk all but so many of the newest.
    pub keep: Option<usize>,
    /// The backups of these names.
    pub names: Vec<String>,
    /// The rests of interrupted backups.
    pub unfinished: bool,
    /// A backup that is kept and stands on one that is removed becomes a full one first.
    pub merge: bool,
}

impl ImageTools<'_> {
    /// Removes backups, also those that an interrupted command has begun to remove.
    ///
    /// # Errors
    /// Another command uses the folder; there is no such backup; one that is kept stands on one that would be removed.
    pub fn prune_backups(&self, folder: &Path, how: &Prune) -> Result<Pruned, DiskError> {
        let folder = Folder::open(folder, Use::Remove)?;
        let mut pruned = Pruned::default();
        for name in folder.names(REMOVED)? {
            self.end_removal(&folder, &name)?;
        }
        if how.unfinished {
            self.remove_unfinished(&folder, &mut pruned)?;
        }
        let entries = folder.entries()?;
        let gone = chosen(&folder, &entries, how)?;
        let orphans = orphans(&entries, &gone);
        if let (Some((kept, parent)), false) = (orphans.first(), how.merge) {
            let what = format!("cannot remove backup {parent} of {}", folder.path().display());
            let why = format!("backup {kept}, which is kept, stands on it");
            let help =
                "add --merge, which makes that one a full one first; or keep more, or remove both";
            return Err(refused(what, why, help));
        }
        for (kept, _) in &orphans {
            self.merge_one(&folder, &entries, kept)?;
            pruned.merged.push(kept.clone());
        }
        let deepest = |name: &String| match entries.get(name) {
            Some(Ok(manifest)) => depth(&entries, manifest),
            _ => usize::MAX,
        };
        let mut order: Vec<&String> = gone.iter().collect();
        order.sort_by_key(|name| std::cmp::Reverse(deepest(name)));
        for name in order {
            self.remove_one(&folder, name)?;
            pruned.removed.push(name.clone());
        }
        pruned.kept = entries.into_keys().filter(|name| !gone.contains(name)).collect();
        Ok(pruned)
    }

    /// Makes an incremental backup a full one. Those that stand on it stay as they are.
    ///
    /// # Errors
    /// Another command uses the folder; there is no such backup; it is a full one; one of its chain is damaged; there
    /// is no room.
    pub fn merge_backup(&self, folder: &Path, name: &str) -> Result<BackupInfo, DiskError> {
        let folder = Folder::open(folder, Use::Remove)?;
        let entries = folder.entries()?;
        if folder.chain(&entries, Some(name))?.len() == 1 {
            let what = format!("cannot merge backup {name} of {}", folder.path().display());
            return Err(refused(what, "it is a full one already", "nothing has to be done"));
        }
        self.merge_one(&folder, &entries, name)?;
        let manifest = Manifest::read(&folder.manifest(name), name);
        let manifest = manifest.map_err(|e| broken(format!("cannot read backup {name}"), e))?;
        Ok(super::create::info(&folder, &manifest, "complete"))
    }

    /// See the module text for the order.
    fn merge_one(&self, folder: &Folder, entries: &Entries, name: &str) -> Result<(), DiskError> {
        let what = || format!("cannot merge backup {name} of {}", folder.path().display());
        let cannot = |e| broken(what(), e);
        let chain = folder.chain(entries, Some(name))?;
        let source = self.open_chain(folder, &chain)?;
        let (to, bytes) = (folder.data(name), source.sectors() * SECTOR_BYTES);
        let expected = hashes(&chain);
        let mut file = self.new_file(&to.path, Over::Mine)?;
        let below = (None, Blank::Zeros);
        self.write_new(&mut file, to.format, &NewImage::default(), below, bytes)?;
        let target = file.open_disk(to.format)?;
        let mut context = Regions::context(self).map_err(cannot)?;
        let plan = Plan {
            from: &source,
            to: Some(To { disk: &target, zeros: false }),
            ranges: std::iter::once(0..bytes).collect(),
            done: BTreeMap::new(),
            expected: Some(&expected),
            same: None,
            zeros_have_hashes: false,
            total: (0, bytes),
        };
        let regions = Regions::new(self, &mut context, plan).map_err(cannot)?;
        context.run(regions.run(u64::MAX)).map_err(cannot)?;
        if !regions.wrong().is_empty() {
            let why = "a region is not what was backed up";
            let help = "ferrite backup verify says which; nothing was changed";
            return Err(DiskError::new(ErrorKind::Damaged, what(), why, help));
        }
        context.run(regions.close()).map_err(cannot)?;
        drop(regions);
        drop(target);
        file.finish()?;
        protect(&to.path, true).map_err(cannot)?;
        let mut manifest = chain[0].clone();
        manifest.parent = None;
        manifest.regions = expected.into_iter().collect();
        let text = manifest.sealed().map_err(cannot)?;
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        self.replace_file(&mut context, &folder.manifest(name), &text).map_err(cannot)
    }

    /// See the module text for the order.
    fn remove_one(&self, folder: &Folder, name: &str) -> Result<(), DiskError> {
        let cannot = |e| broken(format!("cannot remove backup {name}"), e);
        let renamed = self.directory.rename(&folder.manifest(name), &folder.removed(name));
        renamed.and_then(|()| self.directory.sync(folder.path())).map_err(cannot)?;
        self.end_removal(folder, name)
    }

    fn end_removal(&self, folder: &Folder, name: &str) -> Result<(), DiskError> {
        let removed = || {
            if !folder.manifest(name).exists() {
                self.remove_if_there(&folder.data(name).path)?;
            }
            self.directory.sync(folder.path())?;
            self.remove_if_there(&folder.removed(name))?;
            self.directory.sync(folder.path())
        };
        removed().map_err(|e| broken(format!("cannot remove backup {name}"), e))
    }

    /// Removes what is left of interrupted backups: the maps that they have begun are ended by the next backup.
    fn remove_unfinished(&self, folder: &Folder, pruned: &mut Pruned) -> Result<(), DiskError> {
        let whole: BTreeSet<String> = folder.names(MANIFEST)?.into_iter().collect();
        let mut names: BTreeSet<String> = folder.names(UNFINISHED)?.into_iter().collect();
        names.extend(folder.names(".qcow2.partial")?);
        for name in names {
            let cannot = |e| broken(format!("cannot remove what is left of backup {name}"), e);
            let data = folder.data(&name).path;
            self.remove_if_there(&beside(&data, PARTIAL)).map_err(cannot)?;
            if !whole.contains(&name) && folder.unfinished(&name).exists() {
                self.remove_if_there(&data).map_err(cannot)?;
                pruned.removed.push(name.clone());
            }
            self.directory.sync(folder.path()).map_err(cannot)?;
            self.remove_if_there(&folder.unfinished(&name)).map_err(cannot)?;
        }
        Ok(())
    }
}

/// The backups that are removed.
fn chosen(folder: &Folder, entries: &Entries, how: &Prune) -> Result<BTreeSet<String>, DiskError> {
    let mut gone = BTreeSet::new();
    for name in &how.names {
        if !entries.contains_key(name) {
            let what = format!("cannot remove backup {name} of {}", folder.path().display());
            let help = "ferrite backup list shows the backups that there are";
            return Err(DiskError::new(ErrorKind::NotFound, what, "there is no such backup", help));
        }
        gone.insert(name.clone());
    }
    let Some(keep) = how.keep else { return Ok(gone) };
    let mut disks: BTreeMap<&str, Vec<&Manifest>> = BTreeMap::new();
    for manifest in entries.values().filter_map(|entry| entry.as_ref().ok()) {
        disks.entry(&manifest.disk.name).or_default().push(manifest);
    }
    for mut all in disks.into_values() {
        all.sort_by_key(|manifest| (manifest.created_unix_s, depth(entries, manifest)));
        let old = all.len().saturating_sub(keep);
        gone.extend(all[..old].iter().map(|manifest| manifest.name.clone()));
    }
    Ok(gone)
}

/// The backups that are kept and stand on one that is removed, with the name of that.
fn orphans(entries: &Entries, gone: &BTreeSet<String>) -> Vec<(String, String)> {
    let good = || entries.values().filter_map(|entry| entry.as_ref().ok());
    let kept = good().filter(|manifest| !gone.contains(&manifest.name));
    let mut orphans = Vec::new();
    for manifest in kept {
        let parent = good().find(|p| gone.contains(&p.name) && stands_on(manifest, &p.reference()));
        orphans.extend(parent.map(|parent| (manifest.name.clone(), parent.name.clone())));
    }
    orphans
}
