//! Where a file has data and where it has holes, as its file system tells.
//!
//! For the end of a run of data a file system walks all extents of the run, and most files are one run. A question for
//! each cluster of an image would make it walk most of the file each time. So answers are remembered. An outdated answer
//! "data" does no harm: a read there returns zeros. An outdated answer "hole" would hide data that was written since. So
//! holes are remembered only for a file that this process cannot write and that is locked against others, and only
//! while the file's times and space stay the same.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrite_io::engine::FileId;
use ferrite_io::reactor::Io;
use rustix::fs::{SeekFrom, Stat, fstat, seek};
use rustix::io::Errno;

use super::Raw;

/// Only holes of whole blocks of this size count, so that the data beside them can be read in whole blocks, too.
const BLOCK: u64 = 4096;

/// The most runs that are remembered of a file.
const MOST_RUNS: usize = 4096;

/// The first step back from a place that is asked for before what is known of its run.
const FIRST_STEP_BACK: u64 = 1 << 20;

/// The data or hole of a file from a place on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Data, up to this place.
    Data(u64),
    /// A hole up to this place, which may be behind the end of the file.
    Hole(u64),
}

/// A run that is remembered, by the place that it was found from.
#[derive(Clone, Copy)]
struct Known {
    /// The file was not asked for the runs behind this place.
    end: u64,
    run: Run,
}

/// The state of a file that tells whether it was written.
type Witness = (i64, i64, i64, i64, i64, i64);

#[derive(Default)]
struct Memory {
    known: BTreeMap<u64, Known>,
    /// The state of the file when its holes were found.
    witness: Option<Witness>,
    /// Grows with each change by this process that may make data a hole.
    changes: u64,
    /// The next step back; it doubles, so a file that is read backwards is walked few times.
    step_back: u64,
}

/// The known runs of a file.
pub(super) struct Runs {
    memory: Mutex<Memory>,
    keeps_holes: bool,
}

impl std::fmt::Debug for Runs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runs").field("keeps_holes", &self.keeps_holes).finish_non_exhaustive()
    }
}

impl Runs {
    pub(super) fn new(keeps_holes: bool) -> Runs {
        Runs { memory: Mutex::default(), keeps_holes }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Called when this process has made a part of the file a hole.
    pub(super) fn forget(&self) {
        let mut memory = self.memory();
        memory.known.clear();
        memory.changes += 1;
    }

    fn at(&self, file: &OwnedFd, offset: u64) -> Option<Run> {
        let (changes, from) = {
            let mut memory = self.memory();
            match memory.find(offset) {
                Some(run @ Run::Data(_)) => return Some(run),
                Some(run @ Run::Hole(_)) if memory.witness == witness(file) => return Some(run),
                Some(Run::Hole(_)) => memory.known.clear(),
                None => {}
            }
            (memory.changes, memory.back_from(offset))
        };
        // With the run's beginning, places before this one are known, too.
        let told = match from {
            Some(from) => ask(file, from).filter(|told| from < offset && told.known.end > offset),
            None => None,
        };
        let (from, told) = match (from, told) {
            (Some(from), Some(told)) => (from, told),
            _ => (offset, ask(file, offset)?),
        };
        let mut memory = self.memory();
        let is_kept = match told.known.run {
            Run::Data(_) => true,
            Run::Hole(_) => self.keeps_holes,
        };
        if is_kept && memory.changes == changes {
            memory.keep(from, told);
        }
        Some(told.known.run)
    }
}

impl Memory {
    fn find(&self, offset: u64) -> Option<Run> {
        let (_, known) = self.known.range(..=offset).next_back()?;
        (offset < known.end).then_some(known.run)
    }

    /// A place before `offset` to ask from: the run that is known next behind it may begin there. `None`: ask from
    /// `offset` on.
    fn back_from(&mut self, offset: u64) -> Option<u64> {
        let (next, _) = self.known.range(offset..).next()?;
        if next - offset > self.step_back.max(FIRST_STEP_BACK) {
            return None;
        }
        let before = self.known.range(..offset).next_back().map_or(0, |(_, known)| known.end);
        let from = offset.saturating_sub(self.step_back).max(before) / BLOCK * BLOCK;
        self.step_back = self.step_back.saturating_mul(2).max(FIRST_STEP_BACK);
        (from < offset).then_some(from)
    }

    fn keep(&mut self, from: u64, told: Told) {
        if self.known.len() >= MOST_RUNS {
            self.known.clear();
        }
        if let Some(witness) = told.witness
            && self.witness != Some(witness)
        {
            self.known.retain(|_, known| matches!(known.run, Run::Data(_)));
            self.witness = Some(witness);
        }
        self.known.insert(from, told.known);
    }
}

/// An answer of the file system.
#[derive(Clone, Copy)]
struct Told {
    known: Known,
    /// Of a hole: the state of the file before it was asked.
    witness: Option<Witness>,
}

/// Asks the file system. `None`: it does not tell.
fn ask(file: &OwnedFd, offset: u64) -> Option<Told> {
    let stat = fstat(file).ok()?;
    let data = match lseek(file, SeekFrom::Data(offset)) {
        Ok(at) => at / BLOCK * BLOCK,
        // Only a hole up to the end, or the file system has no holes.
        Err(Errno::NXIO) => u64::MAX,
        Err(_) => return None,
    };
    if data > offset {
        // Past the end of a file there is no hole: reading there is left to the format.
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let known = Known { end: data.min(size), run: Run::Hole(data) };
        return (offset < size).then_some(Told { known, witness: Some(state(&stat)) });
    }
    let hole = lseek(file, SeekFrom::Hole(offset)).ok()?.next_multiple_of(BLOCK);
    let known = Known { end: hole, run: Run::Data(hole) };
    (hole > offset).then_some(Told { known, witness: None })
}

fn witness(file: &OwnedFd) -> Option<Witness> {
    fstat(file).ok().map(|stat| state(&stat))
}

fn state(stat: &Stat) -> Witness {
    let times =
        (stat.st_mtime, stat.st_mtime_nsec as i64, stat.st_ctime, stat.st_ctime_nsec as i64);
    (stat.st_size, stat.st_blocks, times.0, times.1, times.2, times.3)
}

pub(super) fn lseek(file: &OwnedFd, to: SeekFrom) -> rustix::io::Result<u64> {
    #[cfg(feature = "testing")]
    testing::QUESTIONS.with(|questions| questions.set(questions.get() + 1));
    seek(file, to)
}

impl Raw {
    /// The data or hole of a file from a place on. `None`: it is no file that has holes, or its file system does not
    /// tell.
    pub fn run_at(&self, offset: u64) -> Option<Run> {
        if !self.is_file() {
            return None;
        }
        self.runs.at(&self.file, offset)
    }
}

/// Space that was reserved and never written is given back in holes of at least this many bytes.
const LEAST_GIVEN_BACK: u64 = 64 << 10;
/// The most runs of a file that are looked at to give space back, so that closing an image takes little time.
const MOST_LOOKED_AT: usize = 1 << 13;

impl Raw {
    /// Gives space back that was reserved between two places of a file and never written: it reads as zeros before and
    /// after. The caller has synced all that it wrote there, and nothing is written there meanwhile.
    pub async fn give_back(&self, io: &Io, files: &[FileId], from: u64, to: u64) {
        let keeps = self.keeps_allocated() || !self.reserves_space();
        if keeps || !self.is_file() {
            return;
        }
        let mut at = from.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
        for _ in 0..MOST_LOOKED_AT {
            let Some(told) = (at < to).then(|| ask(&self.file, at)).flatten() else { break };
            at = match told.known.run {
                Run::Data(end) => end,
                Run::Hole(end) => {
                    let end = end.min(to / BLOCK * BLOCK);
                    // An error leaves the space reserved, which does no harm.
                    if end.saturating_sub(at) >= LEAST_GIVEN_BACK {
                        let _ = io.punch_hole(files[0], at, end - at).await;
                    }
                    end.max(at + BLOCK)
                }
            };
        }
    }
}

/// Counts questions, for tests.
#[cfg(feature = "testing")]
pub(super) mod testing {
    use std::cell::Cell;

    thread_local! {
        pub(super) static QUESTIONS: Cell<u64> = const { Cell::new(0) };
    }

    /// How often this thread has asked a file system where data or holes begin.
    pub fn questions() -> u64 {
        QUESTIONS.with(Cell::get)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn file(bytes: u64, data: &[(u64, u64)]) -> (tempfile::TempDir, File, OwnedFd) {
        let dir = tempfile::TempDir::new().unwrap();
        let file = File::create_new(dir.path().join("file")).unwrap();
        file.set_len(bytes).unwrap();
        for (at, len) in data {
            file.write_all_at(&vec![1; *len as usize], *at).unwrap();
        }
        let fd = file.try_clone().unwrap().into();
        (dir, file, fd)
    }

    #[test]
    fn a_remembered_run_is_told_from_each_place_in_it() {
        let (_dir, _file, fd) = file(8 * MIB, &[(2 * MIB, 4 * MIB)]);
        let runs = Runs::new(true);
        for at in [0, 1, 2, 3, 5, 4, 6, 7, 2, 1] {
            let expected = match at {
                0 | 1 => Run::Hole(2 * MIB),
                2..6 => Run::Data(6 * MIB),
                _ => Run::Hole(u64::MAX),
            };
            assert_eq!(runs.at(&fd, at * MIB), Some(expected), "at {at} MiB");
        }
        assert_eq!(runs.at(&fd, 8 * MIB), None);
        assert_eq!(runs.at(&fd, 9 * MIB), None);
    }

    #[test]
    fn a_file_that_is_asked_about_backwards_is_walked_few_times() {
        let (_dir, _file, fd) = file(8 * MIB, &[(0, 8 * MIB)]);
        let runs = Runs::new(false);
        let mut kept = 0;
        for at in (0..2048).rev() {
            kept += usize::from(runs.memory().find(at * 4096).is_none());
            assert_eq!(runs.at(&fd, at * 4096), Some(Run::Data(8 * MIB)));
        }
        assert!(kept < 16, "{kept} questions for 2048 places");
    }

    #[test]
    fn a_hole_is_not_remembered_when_the_file_was_written() {
        let (_dir, file, fd) = file(8 * MIB, &[]);
        let runs = Runs::new(true);
        assert_eq!(runs.at(&fd, 0), Some(Run::Hole(u64::MAX)));
        file.write_all_at(&[1; 4096], MIB).unwrap();
        assert_eq!(runs.at(&fd, 4096), Some(Run::Hole(MIB)));
        assert_eq!(runs.at(&fd, MIB), Some(Run::Data(MIB + 4096)));
        let writable = Runs::new(false);
        assert_eq!(writable.at(&fd, 2 * MIB), Some(Run::Hole(u64::MAX)));
        assert!(writable.memory().known.is_empty());
    }

    #[test]
    fn what_this_process_has_punched_is_a_hole() {
        let (_dir, file, fd) = file(2 * MIB, &[(0, 2 * MIB)]);
        let runs = Runs::new(false);
        assert_eq!(runs.at(&fd, 0), Some(Run::Data(2 * MIB)));
        file.set_len(0).unwrap();
        file.set_len(2 * MIB).unwrap();
        runs.forget();
        assert_eq!(runs.at(&fd, 0), Some(Run::Hole(u64::MAX)));
    }
}
