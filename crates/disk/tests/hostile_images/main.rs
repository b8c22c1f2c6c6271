//! Images that were made to harm (threats.md T17): a clear error, bounded time and memory, and
//! nothing written.

mod chains;
#[path = "../common/mod.rs"]
mod common;
mod qcow2;
mod vhd;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_disk::{Disk, DiskError, Format, ImageName, OnDamage, OpenOptions, Session};
use ferrite_hostile_inputs::images::Sketch;
use ferrite_simio::SimWorld;
use ferrite_testkit::proc::Memory;
use rustix::time::{ClockId, clock_gettime};
use tempfile::TempDir;

/// The processor time that looking at an image may take; a busy machine is no finding.
const LIMIT: Duration = Duration::from_secs(10);
const LIMIT_KIB: u64 = 64 << 10;

/// Of this thread, which does all that there is to do.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A directory of images. One at a time, since the memory of the whole process is measured.
struct Den {
    dir: TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Den {
    fn new() -> Den {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Den { dir: TempDir::new_in("/dev/shm").unwrap(), _alone: alone }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn put(&self, name: &str, image: &Sketch) -> PathBuf {
        image.save(&self.path(name)).unwrap();
        self.path(name)
    }

    /// Everything about the files that a write would change.
    fn fingerprint(&self) -> Vec<(PathBuf, u64, u64, i64, i64, Vec<u8>)> {
        let mut all = Vec::new();
        for entry in fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let whole = meta.is_file() && meta.len() <= 1 << 20;
            let bytes = if whole { fs::read(&path).unwrap() } else { Vec::new() };
            all.push((path, meta.len(), meta.blocks(), meta.mtime(), meta.mtime_nsec(), bytes));
        }
        all.sort();
        all
    }

    /// Opens an image, reads it if that goes, and sees to it that this costs what it may.
    fn judge(&self, path: &Path, format: Format, read_only: bool) -> Verdict {
        self.judge_within(path, format, read_only, LIMIT_KIB)
    }

    fn judge_within(&self, path: &Path, format: Format, read_only: bool, kib: u64) -> Verdict {
        let verdict = self.judge_open(path, format, read_only, OnDamage::Refuse, kib);
        for on_damage in [OnDamage::Serve, OnDamage::Salvage] {
            let in_spite = self.judge_open(path, format, true, on_damage, kib);
            let is_refused = matches!(in_spite, Verdict::Refused(_));
            let opens = read_only && !matches!(verdict, Verdict::Refused(_));
            assert!(!(opens && is_refused), "in spite of damage it {in_spite}");
        }
        verdict
    }

    fn judge_open(
        &self,
        path: &Path,
        format: Format,
        read_only: bool,
        on_damage: OnDamage,
        kib: u64,
    ) -> Verdict {
        let before = self.fingerprint();
        let memory = Memory::watch();
        let began = processor_time();
        let options = OpenOptions { read_only, on_damage, ..OpenOptions::default() };
        let verdict = match open_by(path, format, &options) {
            Err(e) => Verdict::Refused(e),
            Ok(disk) => match read_some(disk) {
                Err(e) => Verdict::Fails(e),
                Ok(bytes) => Verdict::Reads(bytes),
            },
        };
        let took = processor_time() - began;
        assert!(took < LIMIT, "{} took {took:?}", path.display());
        let taken_kib = memory.taken_kib();
        assert!(taken_kib <= kib, "{} took {taken_kib} KiB", path.display());
        assert_eq!(self.fingerprint(), before, "{} was written to", path.display());
        verdict
    }

    /// The error is clear, whatever the image was opened for.
    fn refuses(&self, path: &Path, format: Format, why: &str) {
        for read_only in [true, false] {
            match self.judge(path, format, read_only) {
                Verdict::Refused(e) => check_text(&e, why),
                other => panic!("{why:?} was expected, and it {other}"),
            }
        }
    }

    fn refuses_image(&self, format: Format, image: &Sketch, why: &str) {
        let path = self.put(&format!("image.{format}"), image);
        self.refuses(&path, format, why);
    }

    /// It opens, and a read of a part that makes no sense is an error.
    fn fails(&self, format: Format, image: &Sketch) {
        let path = self.put(&format!("image.{format}"), image);
        for read_only in [true, false] {
            match self.judge(&path, format, read_only) {
                Verdict::Fails(_) => {}
                other => panic!("an error of reading was expected, and it {other}"),
            }
        }
    }

    fn reads(&self, format: Format, image: &Sketch) -> Vec<u8> {
        let path = self.put(&format!("image.{format}"), image);
        match self.judge(&path, format, false) {
            Verdict::Reads(bytes) => bytes,
            other => panic!("a good image was expected to be read, and it {other}"),
        }
    }
}

fn check_text(e: &DiskError, why: &str) {
    let text = e.to_string();
    assert!(text.contains(why), "{why:?} was expected: {text}");
    assert!(!e.help().is_empty() && text.len() < 4096, "{text}");
}

/// The outcome of opening and reading an image.
enum Verdict {
    Refused(DiskError),
    Fails(io::Error),
    Reads(Vec<u8>),
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Verdict::Refused(e) => write!(f, "was refused: {e}"),
            Verdict::Fails(e) => write!(f, "opens, but cannot be read: {e}"),
            Verdict::Reads(bytes) => write!(f, "opens, and {} bytes are read", bytes.len()),
        }
    }
}

fn open(path: &Path, format: Format, read_only: bool) -> Result<Disk, DiskError> {
    open_by(path, format, &OpenOptions { read_only, ..OpenOptions::default() })
}

fn open_by(path: &Path, format: Format, options: &OpenOptions) -> Result<Disk, DiskError> {
    Disk::open_image(&ImageName { format, path: path.to_owned() }, options)
}

/// The first 64 KiB, or all.
fn read_some(disk: Disk) -> io::Result<Vec<u8>> {
    let world = SimWorld::new(1);
    let mut session = Session::new(disk.into(), |arena| Ok(world.engine(arena)))?;
    let end = (session.disk().sectors() * 512).min(64 << 10);
    let mut bytes = vec![0; end as usize];
    session.read(0, &mut bytes)?;
    Ok(bytes)
}
