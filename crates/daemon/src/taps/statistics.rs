//! The files in shared memory by which XAPI's monitoring reads a disk's counters.
//!
//! `td3-PID/vbd-D-N` is tapdisk's and `vbd3-D-N/statistics` its backend's. A reader maps each file
//! once and keeps the mapping, so a file stays the same one for as long as the guest has the disk:
//! over deaths and upgrades of all processes. They are written once a second, from the worker's
//! counters. The thread that does it runs while there are guests that have joined taps.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_serve::counters::snapshot::{self, KindCounts};
use ferrite_serve::counters::stats_file;

use crate::Shared;
use crate::state::DiskId;
use crate::table::Entry;

/// The pause between two writes. Readers look every five seconds.
const PERIOD: Duration = Duration::from_secs(1);
/// The version of tapdisk's file.
const VERSION: u64 = 1;

/// A guest's disk that has joined a tap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Joined {
    tap: DiskId,
    guest: DiskId,
    /// The process number of the tap's keeper when the guest joined.
    pid: u32,
}

impl Joined {
    fn paths(&self, shared_memory: &Path) -> [PathBuf; 2] {
        let DiskId { domid, devid } = self.guest;
        let [tap, backend] = [format!("td3-{}", self.pid), format!("vbd3-{domid}-{devid}")];
        let of_tap = shared_memory.join(tap).join(format!("vbd-{domid}-{devid}"));
        [of_tap, shared_memory.join(backend).join("statistics")]
    }
}

/// Whether the thread runs.
#[derive(Default)]
pub(super) struct Publishing(Mutex<bool>);

impl Publishing {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Starts the thread if a guest has joined a tap and it does not run.
pub(super) fn begin(shared: &Arc<Shared>) {
    let mut runs = shared.taps.publishing.lock();
    if *runs || !shared.table.has_guests_of_taps() {
        return;
    }
    let thread = std::thread::Builder::new().name("statistics".to_owned());
    let of_thread = shared.clone();
    match thread.spawn(move || publish(&of_thread)) {
        Ok(_) => *runs = true,
        Err(e) => {
            tracing::warn!("counters are not published for XAPI: cannot start a thread: {e}");
        }
    }
}

/// Writes the files of all joined guests until the last one has left, or the daemon stops.
fn publish(shared: &Arc<Shared>) {
    let shared_memory = shared.paths.shared_memory();
    let mut open: BTreeMap<DiskId, (Joined, [Option<File>; 2])> = BTreeMap::new();
    while !shared.is_stopped(PERIOD) {
        let joined = joined(shared);
        open.retain(|guest, (of, _)| {
            let stays = joined.contains_key(guest);
            if !stays {
                remove(&of.paths(&shared_memory));
            }
            stays
        });
        for (guest, of) in joined {
            let (of, files) = open.entry(guest).or_insert_with(|| {
                (of, of.paths(&shared_memory).map(|path| open_file(&path).ok()))
            });
            let run_dir = shared.paths.run.join(of.tap.file_name());
            if let Ok(seen) = snapshot::read(&stats_file(&run_dir)) {
                write(files, &seen);
            }
        }
        // A guest that joins from here on starts the next thread.
        let mut runs = shared.taps.publishing.lock();
        if open.is_empty() && !shared.table.has_guests_of_taps() {
            *runs = false;
            return;
        }
    }
}

/// The guests that have joined taps now.
fn joined(shared: &Shared) -> BTreeMap<DiskId, Joined> {
    shared.table.read(|disks| {
        let of = |(tap, entry): (&DiskId, &Entry)| {
            let guest = entry.tap.as_ref()?.guest?;
            Some((guest, Joined { tap: *tap, guest, pid: entry.pid? }))
        };
        disks.iter().filter_map(of).collect()
    })
}

/// Opens a file as it is, since a reader may have mapped it.
fn open_file(path: &Path) -> io::Result<File> {
    if let Some(folder) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    }
    let mut options = OpenOptions::new();
    let file =
        options.read(true).write(true).create(true).truncate(false).mode(0o644).open(path)?;
    file.set_len(4096)?;
    Ok(file)
}

fn write(files: &[Option<File>; 2], seen: &snapshot::Snapshot) {
    let kinds = [&seen.reads, &seen.writes, &seen.flushes, &seen.discards];
    for (file, words) in files.iter().zip(words(kinds)) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        if let Some(file) = file {
            // Shared memory is full. The next second may have room.
            let _ = file.write_all_at(&bytes, 0);
        }
    }
}

/// The words of both files, by reads, writes, flushes and discards.
fn words([reads, writes, flushes, discards]: [&KindCounts; 4]) -> [Vec<u64>; 2] {
    let micros = |ns: u64| ns / 1000;
    let mut tap = vec![VERSION, 0];
    let mut backend = vec![discards.completed, flushes.completed, 0];
    for counts in [reads, writes] {
        let base = [counts.submitted, counts.completed, counts.sectors, micros(counts.sum_ns)];
        tap.extend(base);
        backend.extend(base);
        backend.push(micros(counts.max_ns));
    }
    tap.extend([reads.errors + writes.errors, 0]);
    backend.push(0);
    [tap, backend]
}

/// Removes the files of a guest that has left. Folders of other disks' files stay.
fn remove(paths: &[PathBuf; 2]) {
    for path in paths {
        let _ = fs::remove_file(path);
        path.parent().map(fs::remove_dir);
    }
}

#[cfg(test)]
mod tests {
    use ferrite_serve::counters::histogram::BUCKETS;

    use super::*;

    /// Counts that differ in each field.
    fn counts(n: u64) -> KindCounts {
        let (submitted, completed, errors, sectors) = (n, n + 1, n + 2, n + 3);
        let (sum_ns, max_ns, histogram) = ((n + 4) * 1000, (n + 5) * 1000, [0; BUCKETS]);
        KindCounts { submitted, completed, errors, sectors, sum_ns, max_ns, histogram }
    }

    #[test]
    fn the_files_have_the_words_that_monitoring_reads() {
        let [reads, writes, flushes, discards] = [10, 20, 30, 40].map(counts);
        let [tap, backend] = words([&reads, &writes, &flushes, &discards]);
        assert_eq!(tap, [1, 0, 10, 11, 13, 14, 20, 21, 23, 24, 34, 0]);
        assert_eq!(backend, [41, 31, 0, 10, 11, 13, 14, 15, 20, 21, 23, 24, 25, 0]);
    }
}
