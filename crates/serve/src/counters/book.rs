//! The file of a disk's counters.
//!
//! It exists from the disk's first connection to its removal: the next process opens it and goes on
//! counting. Without the file the counters are in memory of this process, since a disk without
//! statistics is better than none.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use ferrite_host::names;
use ferrite_host::shm::Shm;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::counts::Counts;
use super::layout::{
    BOOT_AT, DISK_TEXT_AT, DISK_TEXT_MAX, IMAGE_CHANGES_AT, IMAGE_TEXT_AT, IMAGE_TEXT_MAX,
    LIMITS_AT, MADE_AT, MAGIC, MAGIC_AT, PAGE_BYTES, PAGES, PID_AT, SIZE_AT, STARTED_AT, USED_AT,
};
use super::page::{Page, WeakPage};
use super::snapshot::{self, Boot};
use crate::path::limit::{KINDS, Limits};

/// The directory of all counters, beside the run directories of the disks.
pub const FOLDER: &str = "stats";

/// The path of the counters of the disk with this run directory.
pub fn stats_file(run_dir: &Path) -> PathBuf {
    let name = run_dir.file_name().unwrap_or_default();
    run_dir.parent().unwrap_or(Path::new(".")).join(FOLDER).join(name)
}

/// A disk's counters. They go on from connection to connection.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<Mutex<Book>>);

#[derive(Debug, Default)]
struct Book {
    /// The path of the file, if there is to be one.
    place: Option<PathBuf>,
    /// The path of the served image.
    image: String,
    /// The disk's limits in a second.
    limits: [u64; KINDS],
    file: Option<Kept>,
    /// Pages of the current paths, by index.
    pages: Vec<WeakPage>,
    /// Pages in memory, for paths that have none in the file.
    private: Vec<Option<Page>>,
    /// The counts in the file by earlier processes.
    others: Counts,
    /// The counts of this process in earlier files.
    earlier: Counts,
    /// Whether a missing file was logged.
    told: bool,
}

/// The open file.
#[derive(Debug)]
struct Kept {
    file: File,
    header: Shm,
}

impl Counters {
    /// Keeps the counters in the disk's file from now on, if possible.
    pub fn keep_in(&self, run_dir: &Path, image: &str) {
        self.place(run_dir, image);
        self.open();
    }

    /// Keeps the counters in the disk's file from the next connection on. The file also names the
    /// image.
    pub(crate) fn place(&self, run_dir: &Path, image: &str) {
        let mut book = self.book();
        book.place = Some(stats_file(run_dir));
        book.serves(image);
    }

    /// Changes the image's name.
    pub(crate) fn serves(&self, image: &str) {
        self.book().serves(image);
    }

    /// Tells readers of the disk's limits.
    pub(crate) fn limit(&self, limits: &Limits) {
        let mut book = self.book();
        book.limits = limits.rates().map(|rate| rate.map_or(0, |rate| rate.per_s));
        if let Some(kept) = &book.file {
            kept.name_limits(&book.limits);
        }
    }

    /// Opens or creates the file, if it is not open. Counting goes on without it.
    pub(crate) fn open(&self) {
        let mut book = self.book();
        if let Err(e) = book.open()
            && !std::mem::replace(&mut book.told, true)
        {
            let place = book.place.as_deref().unwrap_or(Path::new("")).display();
            tracing::warn!("cannot keep counters in {place}: {e}; this disk cannot be watched");
        }
    }

    /// The page of the path at index `path` among all current paths of the disk.
    ///
    /// # Errors
    /// There is no memory.
    pub(crate) fn page(&self, path: usize) -> io::Result<Page> {
        self.book().page(path)
    }

    /// The counts of all queues since this value was made.
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

    /// The counts of this process in the file. They are read from the file, since pages are not
    /// mapped without a path.
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
        kept.name_limits(&self.limits);
        let mut others = Counts::default();
        for path in 0..kept.used() {
            let page = kept.page(path)?;
            page.begin();
            others.add(&page.copy());
        }
        self.earlier = self.earlier.plus(&self.in_file());
        (self.file, self.others) = (Some(kept), others);
        self.pages.clear();
        Ok(())
    }

    fn page(&mut self, path: usize) -> io::Result<Page> {
        if let Some(page) = self.pages.get(path).and_then(WeakPage::upgrade) {
            return Ok(page);
        }
        let kept = self.file.as_ref().filter(|_| path < PAGES);
        match kept.map(|kept| kept.page(path)) {
            Some(Ok(page)) => {
                let len = self.pages.len().max(path + 1);
                self.pages.resize_with(len, WeakPage::default);
                self.pages[path] = page.downgrade();
                return Ok(page);
            }
            Some(Err(e)) if !std::mem::replace(&mut self.told, true) => {
                tracing::warn!("cannot count a queue's requests where they can be seen: {e}");
            }
            Some(Err(_)) | None => {}
        }
        if self.private.len() <= path {
            self.private.resize(path + 1, None);
        }
        let page = &mut self.private[path];
        Ok(match page {
            Some(page) => page.clone(),
            None => page.insert(Page::private()?).clone(),
        })
    }
}

impl Kept {
    /// Opens a predecessor's file, if it is of this disk, this version and this boot.
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

    /// Creates the file complete or not at all, in place of an old one. Readers of the old one keep
    /// it.
    fn make(place: &Path, disk: &str) -> io::Result<Kept> {
        let new = place.with_extension("new");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
        let open = || names::open(&new, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(match open() {
            // This is the first disk of the host. For a worker the keeper has made the directory,
            // and a worker may not.
            Err(Errno::NOENT) => {
                names::create_dir_all(place.parent().unwrap_or(Path::new(".")), Mode::RWXU)?;
                open()?
            }
            file => file?,
        });
        // An old file may be readable for others. A worker does not own it, and may not change its
        // mode.
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

    /// Whether this file is still the one at the path.
    fn is_at(&self, place: &Path) -> bool {
        let (Ok(own), Ok(there)) = (self.file.metadata(), names::symlink_metadata(place)) else {
            return false;
        };
        (own.dev(), own.ino()) == (there.dev(), there.ino())
    }

    fn used(&self) -> usize {
        (self.header.load_u64(8 * USED_AT) as usize).min(PAGES)
    }

    fn page(&self, path: usize) -> io::Result<Page> {
        let page = Page::of(Shm::part(&self.file, ((1 + path) * PAGE_BYTES) as u64, PAGE_BYTES)?);
        // The page is complete before readers may read it.
        if path >= self.used() {
            self.header.store_u64(8 * USED_AT, path as u64 + 1);
        }
        Ok(page)
    }

    fn name_limits(&self, limits: &[u64; KINDS]) {
        for (i, limit) in limits.iter().enumerate() {
            self.header.store_u64(8 * (LIMITS_AT + i), *limit);
        }
    }

    fn name_process(&self) {
        let me = whoami();
        self.header.store_u64(8 * STARTED_AT, me.started);
        self.header.store_u64(8 * PID_AT, u64::from(std::process::id()));
    }

    /// Changes the image's name. A reader that finds an odd number, or another one afterwards,
    /// reads again.
    fn name_image(&self, image: &str) {
        let changes = self.header.load_u64(8 * IMAGE_CHANGES_AT) | 1;
        self.header.store_u64(8 * IMAGE_CHANGES_AT, changes);
        store_text(&self.header, IMAGE_TEXT_AT, IMAGE_TEXT_MAX, image);
        self.header.store_u64(8 * IMAGE_CHANGES_AT, changes.wrapping_add(1));
    }
}

/// Stores a text, cut to `max` bytes.
fn store_text(header: &Shm, at: usize, max: usize, text: &str) {
    let mut len = text.len().min(max);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    header.copy_in(at + 8, &text.as_bytes()[..len]);
    header.store_u64(at, len as u64);
}

/// The identity of this process for readers.
struct Process {
    boot: Boot,
    started: u64,
}

/// Reads the identity of this process from the kernel. Call it before a sandbox forbids that.
pub fn remember_process() {
    whoami();
}

/// The identity of this process, which is read once.
fn whoami() -> &'static Process {
    static PROCESS: OnceLock<Process> = OnceLock::new();
    PROCESS.get_or_init(|| Process {
        boot: Boot::now(),
        started: snapshot::process(std::process::id()).map_or(0, |process| process.started),
    })
}

#[cfg(test)]
mod tests;
