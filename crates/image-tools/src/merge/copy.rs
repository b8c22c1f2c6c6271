//! The first step: the data of a stretch are written into its lower end.
//!
//! Beside readers, this must change nothing that they read. They have the tables of the lower end in memory, as these
//! were when they opened it, or read parts of them again. So:
//! * Only parts are written that an image above has. Readers never look for those in the lower end.
//! * Nothing else of the lower end moves. A VHD gets new blocks at its end, and bits in bitmaps of sectors that were
//!   written. The footer at the end goes away meanwhile; a reader that opens the image goes by the copy at its beginning.
//! * In qcow2 a write may replace a whole cluster, and free its place for other data. A reader that has the old entry
//!   would read these. So clusters of the lower end must not be larger than those of the images above, nor may any have
//!   subclusters: then a cluster that is replaced is hidden as a whole.
//! * The lower end does not grow to a larger disk: that moves tables and blocks. This is a step of its own
//!   ([`ImageTools::merge_grow`]), while nothing has it open.
//!
//! The lower end has no journal here: after a kill its tables are those of the last commit, and the copy goes on from
//! what was durable by its own note.

use ferrite_disk::Disk;
use ferrite_disk_base::{ErrorKind, SECTOR_BYTES};
use ferrite_images::Layer;

use super::*;
use crate::copy::{Copying, Mode};
use crate::files::Protected;
use crate::formats::leaf;
use crate::io_context::IoContext;
use crate::rebase::{check_snapshots, note_bitmaps};
use crate::resume::Source;
use crate::room::{self, Room};
use crate::speed::Speed;

impl ImageTools<'_> {
    /// Writes the data of a stretch into its lower end, while processes may have the chain open, and write to the leaf.
    /// It goes on from where an earlier copy was durable.
    ///
    /// # Errors
    /// `InUse`: a process writes to one of the images, or reads one of them for itself. `Refused`; `Unsuitable`: it can
    /// be merged at rest only, or has to grow first. `Interrupted`. The chain reads the same in any case.
    pub fn merge_copy(&self, stretch: &Stretch, how: &MergeCopy) -> Result<Done, DiskError> {
        let found = self.find(stretch)?;
        self.copy_into(&found, how, true)
    }

    /// Makes the lower end of a stretch as large as the upper one, while nothing has it open.
    ///
    /// # Errors
    /// The errors of a resize, and `InUse` if another process has the lower end open.
    pub fn merge_grow(&self, stretch: &Stretch, force: bool) -> Result<Done, DiskError> {
        let found = self.find(stretch)?;
        let mut notes = self.check_apart_from(&found, force)?;
        match found.to.bytes < found.from().bytes {
            true => drop(self.open_lower(&found, false)?),
            false => notes.push("nothing to do: it is large enough".into()),
        }
        Ok(done(&found, notes))
    }

    /// The least space that the lower end takes for the data.
    pub(super) fn merge_needs(&self, found: &Found) -> Result<u64, DiskError> {
        let cannot = |e| broken(found.what(), e);
        // This is an estimate before any lock is taken.
        let disk = self.open_unlocked(found)?;
        let count = found.images.len();
        let Disk::Image(image) = &disk else { return Ok(0) };
        let mut context = IoContext::new(self, 0).map_err(cannot)?;
        let port = context.port(&disk).map_err(cannot)?;
        let bytes = found.from().bytes;
        context.run(room::merged(image.layers(), count, &port, bytes)).map_err(cannot)
    }

    pub(super) fn copy_into(
        &self,
        found: &Found,
        how: &MergeCopy,
        beside: bool,
    ) -> Result<Done, DiskError> {
        let cannot = |e| broken(found.what(), e);
        let mut notes = self.check_apart_from(found, how.force)?;
        let upper = self.open_upper(found)?;
        let noted = self.progress_of(found)?;
        if noted.done_bytes == noted.virtual_bytes {
            notes.push(format!("nothing to do: {} has all", found.to.name.path.display()));
            return Ok(done(found, notes));
        }
        if noted.done_bytes == 0 {
            let below = &found.to.name.path;
            let needed = self.merge_needs(found)?;
            Room::at(below).map_err(cannot)?.check(found.what(), needed, below)?;
        }
        let lower = self.open_lower(found, beside)?;
        if beside {
            check_units(found, upper.layers(), leaf(&lower))?;
        }
        // Another command may have made a child before the locks were taken.
        self.check_apart_from(found, how.force)?;
        self.note_lost_bitmaps(found, &upper, &lower, &mut notes);
        noted.begin(&found.note()).map_err(cannot)?;
        let upper = Disk::Image(upper);
        let mut context = Copying::context(self).map_err(cannot)?;
        let mut copying =
            Copying::new(self, &mut context, Mode::Merge, &upper, &lower).map_err(cannot)?;
        let note = found.note();
        copying.keep_to(Speed::new(how.speed.clone()));
        copying.go_on(noted.clone(), &note);
        context.run(copying.run()).map_err(cannot)?;
        drop(copying);
        drop(context);
        // The lower end was synced by its close: from here on it may take the place of the stretch.
        Resume { done_bytes: noted.virtual_bytes, ..noted }.save(&note).map_err(cannot)?;
        Ok(done(found, notes))
    }

    /// Opens the images that are merged, locked against writers, and against readers of their own content where that
    /// changes.
    fn open_upper(&self, found: &Found) -> Result<Image, DiskError> {
        let what = || found.what();
        let options = self.chain_options(found, self.options(true));
        let image = Image::open_stretch(&found.from().name, &options, found.images.len())?;
        let same = |(layer, link): (&Layer, &Link)| {
            same_file(layer.medium().path(), &link.name.path).unwrap_or(false)
                && layer.bytes() == link.bytes
        };
        if image.layers().len() != found.images.len()
            || !image.layers().iter().zip(&found.images).all(same)
        {
            return Err(changed(what()));
        }
        for layer in image.layers() {
            check_snapshots(layer, what())?;
            self.check_no_journal(found, layer)?;
        }
        for layer in &image.layers()[1..] {
            if !layer.medium().claim_merged().map_err(|e| broken(what(), e))? {
                let path = layer.medium().path().display();
                let why = format!("a process reads {path} for itself, and it would change");
                let help = "stop that first (fuser -v shows it)";
                return Err(DiskError::new(ErrorKind::InUse, what(), why, help));
            }
        }
        Ok(image)
    }

    /// Opens the lower end for writing, as large as the upper one.
    fn open_lower(&self, found: &Found, beside: bool) -> Result<Disk, DiskError> {
        let path = &found.to.name.path;
        let options = match beside {
            true => OpenOptions { beside_readers: true, ..self.medium_options(false) },
            false => self.options(false),
        };
        let options = self.chain_options(found, ImageTools::even_parents(options));
        let open = || {
            // A file that is open for writing can be written to; other processes go by the mode, also after a crash.
            let protected = Protected::lift(path).map_err(|e| broken(found.what(), e))?;
            let disk = Disk::open_image(&found.to.name, &options)?;
            protected.restore().map_err(|e| broken(found.what(), e))?;
            Ok(disk)
        };
        let disk = open()?;
        if let (Some(layer), true) = (leaf(&disk), beside) {
            self.check_no_journal(found, layer)?;
        }
        if disk.sectors() * SECTOR_BYTES >= found.from().bytes {
            return Ok(disk);
        }
        if beside {
            let why = format!("{} has to grow to {}", path.display(), Human(found.from().bytes));
            let help = "grow it first (ferrite image merge-step grow), while the disk is paused";
            return Err(unsuitable(found.what(), why, help));
        }
        self.set_size(disk, &found.to.name, found.from().bytes)?;
        open()
    }

    /// Refuses an image with answered writes of a killed process that only its journal has.
    fn check_no_journal(&self, found: &Found, layer: &Layer) -> Result<(), DiskError> {
        if !layer.has_journal(self.readable_state())? {
            return Ok(());
        }
        let path = layer.medium().path().display();
        let why = format!("what a killed backend has answered is not in {path} yet");
        let help = format!("while nothing uses it: ferrite image repair --force {path}");
        Err(DiskError::new(ErrorKind::InUse, found.what(), why, help))
    }

    /// How far an earlier copy of the same images is durable, or that none is. The images above the lower end are
    /// parents, which do not change.
    pub(super) fn progress_of(&self, found: &Found) -> Result<Resume, DiskError> {
        let source = |link: &Link| Source::of(&link.name.path);
        let sources = found.images.iter().map(source);
        let lower = source(&found.to).map(Source::only_identity);
        let sources = sources.chain([lower]).collect::<std::io::Result<Vec<_>>>();
        let none = Resume {
            sources: sources.map_err(|e| broken(found.what(), e))?,
            journal: false,
            format: found.to.name.format.name().into(),
            virtual_bytes: found.from().bytes,
            done_bytes: 0,
        };
        let noted = Resume::load(&found.note()).filter(|noted| {
            let then = Resume { done_bytes: 0, ..(*noted).clone() };
            then == none && noted.done_bytes <= noted.virtual_bytes
        });
        Ok(noted.unwrap_or(none))
    }

    fn note_lost_bitmaps(&self, found: &Found, upper: &Image, lower: &Disk, to: &mut Vec<String>) {
        for (layer, link) in upper.layers().iter().zip(&found.images) {
            note_bitmaps(Some(layer), &link.name.path, to);
        }
        note_bitmaps(leaf(lower), &found.to.name.path, to);
    }
}

/// Refuses a merge beside readers that would replace clusters which they see in part; see the module text.
pub(super) fn check_units(
    found: &Found,
    upper: &[Layer],
    lower: Option<&Layer>,
) -> Result<(), DiskError> {
    let Some(lower) = lower.filter(|lower| lower.format() == Format::Qcow2) else { return Ok(()) };
    let is_split = |layer: &Layer| formats::like(layer).extended_l2;
    let unit = formats::unit_bytes(lower);
    let smaller = |layer: &&Layer| is_split(layer) || formats::unit_bytes(layer) < unit;
    let which = upper.iter().find(smaller).or(Some(lower).filter(|l| is_split(l)));
    let Some(which) = which else { return Ok(()) };
    let why = format!(
        "{} has smaller clusters than {}, or subclusters: a reader would see a part of what is \
         replaced",
        which.medium().path().display(),
        lower.medium().path().display()
    );
    let help = "merge them while nothing uses the disk: ferrite image coalesce --from --to";
    Err(unsuitable(found.what(), why, help))
}
