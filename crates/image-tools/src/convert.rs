//! Copies of disks, in any format.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};

use ferrite_disk::Disk;
use ferrite_disk_base::size::Human;
use ferrite_disk_base::{
    DiskError, ErrorKind, Format, ImageName, OnDamage, OpenOptions, SECTOR_BYTES,
};
use ferrite_images::children::PARTIAL;

use super::copy::{Copying, Mode};
use super::create::done;
use super::files::{NewFile, Over, beside, check_apart, check_regular, same_file};
use super::formats::{Blank, shows_medium};
use super::resume::{Resume, Source};
use super::salvage::Lost;
use super::{DAMAGED, Done, ImageTools, NewImage, Salvaged, broken, formats, refused, unsuitable};

/// The options of a conversion.
#[derive(Clone, Debug, Default)]
pub struct Convert {
    /// The file at the destination may be overwritten.
    pub force: bool,
    /// Resume an interrupted conversion.
    pub resume: bool,
    /// Allocate all of the destination's space at once.
    pub fixed: bool,
    /// The unit of allocation; `None`: the default.
    pub unit_bytes: Option<u32>,
    /// A qcow2 image gets L2 entries with a bitmap of subclusters.
    pub extended_l2: bool,
    /// Copies the disk as it was at the snapshot inside of the source with this identifier or name. Such a copy is not
    /// resumed.
    pub snapshot: Option<Vec<u8>>,
    /// A run of so many zero bytes in the source's data is not written; `None`: 64 KiB.
    pub zero_bytes: Option<u32>,
}

impl Convert {
    pub(super) fn new_image(&self) -> NewImage {
        let Convert { fixed, unit_bytes, extended_l2, .. } = *self;
        NewImage { fixed, unit_bytes, extended_l2, ..NewImage::default() }
    }
}

impl ImageTools<'_> {
    /// Copies the content of `from` into a new image `to`, without parents. Known zeros are not read, and zeros are not
    /// written.
    ///
    /// The image is called `to` when it is complete and durable. Until then it is `to.partial`, with a state file
    /// beside it from which [`Convert::resume`] continues.
    ///
    /// # Errors
    /// `Refused`: `to` exists, or an earlier conversion's remains. `Io` with `Interrupted` if the progress callback
    /// stopped it: it can be resumed. Those of the two images.
    pub fn convert(
        &self,
        from: &ImageName,
        to: &ImageName,
        how: &Convert,
    ) -> Result<Done, DiskError> {
        self.convert_reading(from, to, how, None)
    }

    /// [`convert`](Self::convert) of a disk that may be damaged: what cannot be read is zeros in the copy. It cannot be
    /// resumed.
    ///
    /// # Errors
    /// The headers of an image of the chain are damaged, or a parent is missing. Those of [`convert`](Self::convert).
    pub fn salvage(
        &self,
        from: &ImageName,
        to: &ImageName,
        how: &Convert,
    ) -> Result<Salvaged, DiskError> {
        let options = OpenOptions { on_damage: OnDamage::Salvage, ..self.options(true) };
        let source = Disk::open_image(from, &options)?;
        let lost = Lost::default();
        let done = self.convert_reading(from, to, how, Some((&source, &lost)))?;
        let (damaged_bytes, ranges, more_ranges) = lost.told(&source);
        Ok(Salvaged { done, damaged_bytes, ranges, more_ranges })
    }

    /// Opens the disk that is copied.
    fn source(&self, from: &ImageName, how: &Convert) -> Result<Disk, DiskError> {
        let Some(snapshot) = &how.snapshot else { return self.open(from, true) };
        if from.format != Format::Qcow2 {
            let what = format!("cannot read a snapshot inside of {}", from.path.display());
            let why = format!("format {} has none", from.format);
            let help = "ferrite image info shows the images that it stands on";
            return Err(unsuitable(what, why, help));
        }
        let inner_snapshot = Some(snapshot.clone());
        Disk::open_image(from, &OpenOptions { inner_snapshot, ..self.options(true) })
    }

    /// Converts the disk `from`. With `damaged` that is open already, and may be damaged.
    fn convert_reading(
        &self,
        from: &ImageName,
        to: &ImageName,
        how: &Convert,
        damaged: Option<(&Disk, &Lost)>,
    ) -> Result<Done, DiskError> {
        if let Some((store, volume)) = to.volume() {
            return self.convert_into(from, (store, volume), how, damaged);
        }
        let what = || format!("cannot convert {} to {}", from.path.display(), to.path.display());
        if to.export().is_some() {
            let why = "an export is there, and a copy replaces its content";
            let help = "add -n, if that may be";
            return Err(refused(what(), why, help));
        }
        let cannot = |e| broken(what(), e);
        let opened;
        let source = match damaged {
            Some((source, _)) => source,
            None => {
                opened = self.source(from, how)?;
                &opened
            }
        };
        check_apart(what(), source, &to.path)?;
        check_apart(what(), source, &beside(&to.path, PARTIAL))?;
        let bytes = source.sectors() * SECTOR_BYTES;
        let new = how.new_image();
        formats::check_new(to, &new, None, bytes)?;
        let fresh = Resume {
            sources: sources(source, from).map_err(cannot)?,
            journal: match damaged {
                Some(_) => false,
                None => self.info_of(source)?.chain.iter().any(|layer| layer.journal),
            },
            format: to.format.name().into(),
            virtual_bytes: bytes,
            done_bytes: 0,
        };
        // The ranges that were lost before an interruption would be forgotten.
        let is_whole = damaged.is_none() && how.snapshot.is_none();
        let is_resumable = is_whole && !self.is_device(&to.path);
        let is_untold = fresh.is_untold() || damaged.is_some();
        let too_small = |e| self.too_small(to, bytes, e);
        let (file, state) = self.destination(to, how, fresh, is_resumable).map_err(too_small)?;
        // No journal: data that are not durable are written again.
        let target = file.open_disk(to.format)?;
        let mut context = Copying::context(self).map_err(cannot)?;
        let mode = match self.is_device(&to.path) && shows_medium(to.format, &new) {
            true => Mode::Replace,
            false => Mode::Fill,
        };
        let copying = Copying::new(self, &mut context, mode, source, &target);
        let mut copying = copying.map_err(cannot)?;
        copying.skip_zeros_of(how.zero_bytes);
        if is_resumable {
            copying.go_on(state, &to.path);
        }
        if let Some((_, lost)) = damaged {
            copying.tolerate(lost);
        }
        let copied = context.run(copying.run());
        let is_full = copied.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::StorageFull);
        let left = is_full.then(|| context.run(copying.left_bytes()).ok()).flatten();
        drop(copying);
        if let Err(e) = copied {
            return Err(match self.is_device(&to.path) {
                true => too_small(broken(what(), e)),
                false => interrupted(what(), e, is_untold, left),
            });
        }
        drop(target);
        file.finish()?;
        self.forget(to)?;
        Ok(done(to, bytes, formats::warnings(to, &new, None, bytes)))
    }

    /// The error for a device that has no room for a thin image of a disk of so many bytes, if `e` says that. The
    /// size of such an image is known only when it is written.
    fn too_small(&self, to: &ImageName, bytes: u64, e: DiskError) -> DiskError {
        let cause = std::error::Error::source(&e).and_then(|e| e.downcast_ref::<io::Error>());
        let is_full = cause.is_some_and(|e| e.kind() == io::ErrorKind::StorageFull);
        if !is_full || !self.is_device(&to.path) {
            return e;
        }
        let device = File::open(&to.path).and_then(|mut file| file.seek(SeekFrom::End(0)));
        let Ok(device) = device else { return e };
        let format = to.format;
        let why = format!(
            "the device has {device} bytes, and a {format} of this disk of {bytes} bytes takes more"
        );
        DiskError::new(ErrorKind::Unsuitable, e.what(), why, "take a larger device")
    }

    /// Removes the state of an earlier copy, durably: it would pass for this one's.
    fn forget(&self, to: &ImageName) -> Result<(), DiskError> {
        let what = || format!("cannot make {}", to.path.display());
        Resume::remove(&to.path).map_err(|e| broken(what(), e))?;
        self.sync_dir(&to.path)
    }

    /// The file to write to, and the state, which is noted if the copy can be resumed. From here on the file stays, even
    /// after a failure.
    fn destination(
        &self,
        to: &ImageName,
        how: &Convert,
        fresh: Resume,
        is_resumable: bool,
    ) -> Result<(NewFile<'_>, Resume), DiskError> {
        let what = || format!("cannot convert to {}", to.path.display());
        let mut file = self.old_file(&to.path, PARTIAL, Over::forced(how.force))?;
        let mut exists = !self.is_device(&to.path) && file.path().symlink_metadata().is_ok();
        if exists && same_file(file.path(), &to.path).unwrap_or(false) {
            // After a crash this may be a second name of a finished image.
            self.directory.remove(file.path()).map_err(|e| broken(what(), e))?;
            exists = false;
        }
        if !self.is_device(&to.path) {
            check_regular(file.path(), what())?;
            check_regular(&Resume::next(&to.path), what())?;
        }
        let refuse =
            |why: String, help: &str| Err(DiskError::new(ErrorKind::Refused, what(), why, help));
        if how.resume && exists {
            let (why, help) = match Resume::load(&to.path) {
                Some(_) if fresh.is_untold() => (
                    "the source is on a block device, in a store or on a server, which do not tell whether it \
                     has changed since"
                        .into(),
                    "start again with --force",
                ),
                Some(state) if (Resume { done_bytes: 0, ..state.clone() }) == fresh => {
                    file.open()?;
                    if !file.is_there() {
                        let why = format!("{} is a link to another file", file.path().display());
                        return refuse(why, "remove that, and start again");
                    }
                    state.reserve(&to.path).map_err(|e| broken(what(), e))?;
                    return Ok((file, state));
                }
                Some(_) => (
                    "the source has changed since, or it was another conversion".into(),
                    "start again with --force",
                ),
                None => (
                    format!("{} does not say how far it is", file.path().display()),
                    "start again with --force",
                ),
            };
            return refuse(why, help);
        }
        if exists && !how.force {
            if let Err(e) = file.open()
                && e.kind() == ErrorKind::InUse
            {
                return Err(e);
            }
            let why =
                format!("{} is there, of a conversion that was interrupted", file.path().display());
            return refuse(why, "go on with --resume, or start again with --force");
        }
        if !how.force && Resume::is_foreign(&to.path).map_err(|e| broken(what(), e))? {
            let why =
                format!("what is at {}.json is no note of a conversion", file.path().display());
            return refuse(why, "move it away, or choose another name; --force overwrites it");
        }
        let cannot = |e| broken(what(), e);
        if exists {
            // Locked, if another process works on it.
            file.open()?;
        }
        self.forget(to)?;
        if !self.is_device(&to.path) {
            if exists {
                self.directory.remove(file.path()).map_err(cannot)?;
            }
            file.create().map_err(|e| file.not_made(e))?;
        }
        let below = (None, Blank::Anything);
        self.write_new(&mut file, to.format, &how.new_image(), below, fresh.virtual_bytes)?;
        if is_resumable && let Err(e) = fresh.begin(&to.path) {
            let _ = Resume::remove(&to.path);
            return Err(cannot(e));
        }
        file.keep();
        Ok((file, fresh))
    }
}

/// The files of the source.
fn sources(disk: &Disk, name: &ImageName) -> io::Result<Vec<Source>> {
    match disk {
        Disk::Image(image) => {
            image.layers().iter().map(|layer| Source::of(layer.medium().path())).collect()
        }
        Disk::Store(volume) => Ok(vec![Source::of(volume.medium().path())?.untold()]),
        Disk::Elsewhere(volume) => Ok(vec![Source::of(volume.store())?.untold()]),
        Disk::Remote(remote) => Ok(vec![Source::of_export(&remote.facts().name)]),
        Disk::Mirror(mirror) => sources(mirror.source(), name),
        Disk::Raw(_) | Disk::Null(_) => Ok(vec![Source::of(&name.path)?]),
    }
}

/// The error of a copy that is not complete; `left` bytes of data do not fit.
fn interrupted(what: String, e: io::Error, is_untold: bool, left: Option<u64>) -> DiskError {
    let kind = match e.kind() {
        io::ErrorKind::Interrupted => ErrorKind::Interrupted,
        io::ErrorKind::InvalidData => ErrorKind::Damaged,
        _ => ErrorKind::Io,
    };
    let why = match e.kind() {
        io::ErrorKind::Interrupted => "interrupted".to_owned(),
        _ => e.to_string(),
    };
    let help = match is_untold {
        true => "start again with --force when the cause is mended",
        false => {
            "go on with --resume when the cause is mended; what is done so far is beside the \
             destination, with .partial behind its name"
        }
    };
    match kind {
        ErrorKind::Damaged => DiskError::new(kind, what, why, format!("{DAMAGED}; {help}")),
        _ if let Some(left) = left => {
            let room =
                format!("up to {} of data are not copied yet: make room for them", Human(left));
            DiskError::new(kind, what, why, format!("{room}; {help}"))
        }
        _ => DiskError::new(kind, what, why, help),
    }
    .with_source(e)
}
