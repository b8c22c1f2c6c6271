//! The file that a disk's counters are in.
//!
//! It is there from the first connection of a disk to the disk's removal: the next process opens it and
//! counts on. Without the file the counters are in memory of this process, since a disk that nobody can
//! watch is better than none.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use ferrite_io::names;
use ferrite_io::shm::Shm;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::counts::Counts;
use super::layout::{
    BOOT_AT, DISK_TEXT_AT, DISK_TEXT_MAX, IMAGE_CHANGES_AT, IMAGE_TEXT_AT, IMAGE_TEXT_MAX, MADE_AT,
    MAGIC, MAGIC_AT, PAGE_BYTES, PAGES, PID_AT, SIZE_AT, STARTED_AT, USED_AT,
};
use super::page::{Page, WeakPage};
use super::snapshot::{self, Boot};

/// Beside the run directories of all disks: the folder of their counters.
pub const FOLDER: &str = "stats";

/// The file of the disk that has this run directory.
pub fn stats_file(run_dir: &Path) -> PathBuf {
    let name = run_dir.file_name().unwrap_or_default();
    run_dir.parent().unwrap_or(Path::new(".")).join(FOLDER).join(name)
}

/// A disk's counters; they go on from connection to connection.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<Mutex<Book>>);

#[derive(Debug, Default)]
struct Book {
    /// Where the file belongs, if there is to be one.
    place: Option<PathBuf>,
    /// The image that is served.
    image: String,
    file: Option<Kept>,
    /// Pages of paths that there are now, by seat.
    pages: Vec<WeakPage>,
    /// In memory, for paths that have no page in the file.
    private: Vec<Option<Page>>,
    /// What others had counted in the file before us,
    others: Counts,
    /// and we in other files before this one.
    earlier: Counts,
    /// That there is no file has been told.
    told: bool,
}

/// The file, open.
#[derive(Debug)]
struct Kept {
    file: File,
    header: Shm,
}

impl Counters {
    /// Has the counters in the disk's file from now on, if there can be one.
    pub fn keep_in(&self, run_dir: &Path, image: &str) {
        self.place(run_dir, image);
        self.open();
    }

    /// From the next connection on, the counters are in the disk's file. It is named by what it serves.
    pub(crate) fn place(&self, run_dir: &Path, image: &str) {
        let mut book = self.book();
        book.place = Some(stats_file(run_dir));
        book.serves(image);
    }

    /// The image is another one.
    pub(crate) fn serves(&self, image: &str) {
        self.book().serves(image);
    }

    /// Opens the file, if it is not open, or makes it. Counting goes on without it.
    pub(crate) fn open(&self) {
        let mut book = self.book();
        if let Err(e) = book.open()
            && !std::mem::replace(&mut book.told, true)
        {
            let place = book.place.as_deref().unwrap_or(Path::new("")).display();
            tracing::warn!("cannot keep counters in {place}: {e}; this disk cannot be watched");
        }
    }

    /// A path's page. `seat` is its number among all that the disk has now.
    ///
    /// # Errors
    /// Out of memory.
    pub(crate) fn page(&self, seat: usize) -> io::Result<Page> {
        self.book().page(seat)
    }

    /// All queues' together, since these counters were made.
    pub fn counts(&self) -> Counts {
        let book = self.book();
        let mut counts = book.earlier.plus(&book.in_file());
        book.private.iter().flatten().for_each(|page| counts.add(&page.copy()));
        counts
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn serves(&mut self, image: &str) {
        self.image = image.to_owned();
        if let Some(kept) = &self.file {
            kept.name_image(image);
        }
    }

    /// What we have counted in the file. Not by the pages' mappings: without a path they are not there.
    fn in_file(&self) -> Counts {
        let seen = self.file.as_ref().and_then(|kept| snapshot::of(&kept.file).ok());
        seen.map_or(Counts::default(), |seen| seen.counts.since(&self.others))
    }

    fn open(&mut self) -> io::Result<()> {
        let Some(place) = &self.place else { return Ok(()) };
        if self.file.as_ref().is_some_and(|kept| kept.is_at(place)) {
            return Ok(());
        }
        let disk = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let kept = match Kept::existing(place, &disk) {
            Some(kept) => kept,
            None => Kept::make(place, &disk)?,
        };
        kept.name_image(&self.image);
        kept.name_process();
        let mut others = Counts::default();
        for seat in 0..kept.used() {
            let page = kept.page(seat)?;
            page.begin();
            others.add(&page.copy());
        }
        self.earlier = self.earlier.plus(&self.in_file());
        (self.file, self.others) = (Some(kept), others);
        self.pages.clear();
        Ok(())
    }

    fn page(&mut self, seat: usize) -> io::Result<Page> {
        if let Some(page) = self.pages.get(seat).and_then(WeakPage::upgrade) {
            return Ok(page);
        }
        let kept = self.file.as_ref().filter(|_| seat < PAGES);
        match kept.map(|kept| kept.page(seat)) {
            Some(Ok(page)) => {
                let len = self.pages.len().max(seat + 1);
                self.pages.resize_with(len, WeakPage::default);
                self.pages[seat] = page.downgrade();
                return Ok(page);
            }
            Some(Err(e)) if !std::mem::replace(&mut self.told, true) => {
                tracing::warn!("cannot count a queue's requests where they can be seen: {e}");
            }
            Some(Err(_)) | None => {}
        }
        if self.private.len() <= seat {
            self.private.resize(seat + 1, None);
        }
        let page = &mut self.private[seat];
        Ok(match page {
            Some(page) => page.clone(),
            None => page.insert(Page::private()?).clone(),
        })
    }
}

impl Kept {
    /// The file that a predecessor has left, if it is one of this disk, this version and this start of
    /// the machine.
    fn existing(place: &Path, disk: &str) -> Option<Kept> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::from(names::open(place, flags, Mode::empty()).ok()?);
        let seen = snapshot::of(&file).ok()?;
        if seen.disk != disk || seen.boot != whoami().boot {
            return None;
        }
        let header = Shm::part(&file, 0, PAGE_BYTES).ok()?;
        Some(Kept { file, header })
    }

    /// It appears complete or not at all, in place of what is there. Readers of that keep what they had.
    fn make(place: &Path, disk: &str) -> io::Result<Kept> {
        let new = place.with_extension("new");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
        let open = || names::open(&new, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(match open() {
            // The first disk here. A worker's keeper has made the folder, and lets nobody else.
            Err(Errno::NOENT) => {
                names::create_dir_all(place.parent().unwrap_or(Path::new(".")), Mode::RWXU)?;
                open()?
            }
            file => file?,
        });
        // One that was there may be open to others. A worker is not the owner, and may not ask.
        if file.metadata()?.permissions().mode() & 0o7777 != 0o600 {
            file.set_permissions(PermissionsExt::from_mode(0o600))?;
        }
        let header = Shm::part(&file, 0, PAGE_BYTES)?;
        header.store_u64(8 * SIZE_AT, PAGE_BYTES as u64);
        let made = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        header.store_u64(8 * MADE_AT, made.as_secs());
        let Boot(boot) = whoami().boot;
        header.copy_in(8 * BOOT_AT, &boot);
        store_text(&header, DISK_TEXT_AT, DISK_TEXT_MAX, disk);
        header.store_u64(8 * MAGIC_AT, u64::from_ne_bytes(MAGIC));
        names::rename(&new, place)?;
        Ok(Kept { file, header })
    }

    /// Whether this file still stands there.
    fn is_at(&self, place: &Path) -> bool {
        let (Ok(own), Ok(there)) = (self.file.metadata(), names::symlink_metadata(place)) else {
            return false;
        };
        (own.dev(), own.ino()) == (there.dev(), there.ino())
    }

    fn used(&self) -> usize {
        (self.header.load_u64(8 * USED_AT) as usize).min(PAGES)
    }

    fn page(&self, seat: usize) -> io::Result<Page> {
        let page = Page::of(Shm::part(&self.file, ((1 + seat) * PAGE_BYTES) as u64, PAGE_BYTES)?);
        // Readers look at a page after it is there.
        if seat >= self.used() {
            self.header.store_u64(8 * USED_AT, seat as u64 + 1);
        }
        Ok(page)
    }

    fn name_process(&self) {
        let me = whoami();
        self.header.store_u64(8 * STARTED_AT, me.started);
        self.header.store_u64(8 * PID_AT, u64::from(std::process::id()));
    }

    /// Who reads an odd number, or another one afterwards, reads again.
    fn name_image(&self, image: &str) {
        let changes = self.header.load_u64(8 * IMAGE_CHANGES_AT) | 1;
        self.header.store_u64(8 * IMAGE_CHANGES_AT, changes);
        store_text(&self.header, IMAGE_TEXT_AT, IMAGE_TEXT_MAX, image);
        self.header.store_u64(8 * IMAGE_CHANGES_AT, changes.wrapping_add(1));
    }
}

/// What does not fit is cut off.
fn store_text(header: &Shm, at: usize, max: usize, text: &str) {
    let mut len = text.len().min(max);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    header.copy_in(at + 8, &text.as_bytes()[..len]);
    header.store_u64(at, len as u64);
}

/// What this process is to those who look for it.
struct Process {
    boot: Boot,
    started: u64,
}

/// Asks the kernel what others will know this process by. To be done before a sandbox forbids it.
pub fn remember_process() {
    whoami();
}

/// Asked for once.
fn whoami() -> &'static Process {
    static PROCESS: OnceLock<Process> = OnceLock::new();
    PROCESS.get_or_init(|| Process {
        boot: Boot::now(),
        started: snapshot::process(std::process::id()).map_or(0, |process| process.started),
    })
}

#[cfg(test)]
mod tests;
