//! The counters of all disks of this host: one file per disk (`serve/src/counters/`).

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ferrite_serve::counters::snapshot::{Boot, Problem, Process, Snapshot, read};
use rustix::param::clock_ticks_per_second;

/// The most files that are read: far more than a host has disks.
const MOST: usize = 10_000;

/// The state of a disk at one time.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Its counters.
    pub snapshot: Snapshot,
    /// The process that counts, if it is running.
    pub process: Option<Process>,
    /// The time of the sample.
    pub at: Instant,
    /// Seconds since the counters began.
    pub age_s: f64,
    /// Seconds since the process was started.
    pub process_age_s: f64,
}

impl Sample {
    /// The numbers of the guest and of the device.
    pub fn ids(&self) -> (u16, u32) {
        ids(&self.snapshot.disk).unwrap_or_default()
    }
}

/// The result of one reading of the folder.
#[derive(Debug, Default)]
pub struct Seen {
    /// The disks, by guest and device.
    pub disks: Vec<Sample>,
    /// Files that cannot be shown as disks, unless they were reported before.
    pub problems: Vec<String>,
}

/// The folder, with its state between readings.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    boot: Boot,
    /// The last problem that was reported for each file.
    told: BTreeMap<String, String>,
}

/// The guest and the device from a file name.
fn ids(name: &str) -> Option<(u16, u32)> {
    let (domid, devid) = name.strip_prefix("vbd-")?.split_once('-')?;
    Some((domid.parse().ok()?, devid.parse().ok()?))
}

impl Folder {
    /// The folder at this path, which may not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> Folder {
        Folder { path: path.into(), boot: Boot::now(), told: BTreeMap::new() }
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads all files. A missing folder has no disks.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn look(&mut self) -> io::Result<Seen> {
        let mut names = Vec::new();
        match std::fs::read_dir(&self.path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            entries => {
                for entry in entries?.take(MOST) {
                    names.push(entry?.file_name());
                }
            }
        }
        let mut seen = Seen::default();
        let mut problems = BTreeMap::new();
        for name in names {
            let text = name.to_string_lossy();
            // A file that is being made.
            if text.strip_suffix(".new").is_some_and(|name| ids(name).is_some()) {
                continue;
            }
            match self.sample(&text) {
                Ok(sample) => seen.disks.push(sample),
                // It was removed meanwhile.
                Err(Problem::Io(e)) if e.kind() == io::ErrorKind::NotFound => {}
                Err(problem) => {
                    problems.insert(text.into_owned(), problem.to_string());
                }
            }
        }
        seen.disks.sort_by_key(|disk| ids(&disk.snapshot.disk));
        for (name, problem) in &problems {
            if self.told.get(name) != Some(problem) {
                seen.problems.push(format!("{}: {problem}", self.path.join(name).display()));
            }
        }
        self.told = problems;
        Ok(seen)
    }

    fn sample(&self, name: &str) -> Result<Sample, Problem> {
        if ids(name).is_none() {
            return Err(Problem::Foreign);
        }
        let snapshot = read(&self.path.join(name))?;
        let at = Instant::now();
        if snapshot.disk != name {
            return Err(Problem::Invalid("the name of its disk"));
        }
        // A process without permission to read the boot id has written zeros.
        if snapshot.boot != self.boot && snapshot.boot != Boot::default() {
            return Err(Problem::Invalid("the start of this machine"));
        }
        let process = snapshot.process();
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let made = std::time::Duration::from_secs(snapshot.made_unix_s);
        let age_s = now.saturating_sub(made).as_secs_f64();
        let process_age_s = process.map_or(0.0, |process| {
            (uptime_s() - process.started as f64 / clock_ticks_per_second() as f64).max(0.0)
        });
        Ok(Sample { snapshot, process, at, age_s, process_age_s })
    }
}

/// Seconds since the machine's start.
fn uptime_s() -> f64 {
    let text = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    text.split(' ').next().and_then(|seconds| seconds.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use ferrite_serve::counters::{Counters, FOLDER, stats_file};

    use super::*;

    fn names(seen: &Seen) -> Vec<&str> {
        seen.disks.iter().map(|disk| disk.snapshot.disk.as_str()).collect()
    }

    #[test]
    fn disks_come_and_go_in_the_order_of_their_numbers() {
        let base = tempfile::tempdir().unwrap();
        let mut folder = Folder::new(base.path().join(FOLDER));
        assert!(folder.look().unwrap().disks.is_empty(), "there is no folder yet");
        for name in ["vbd-10-1", "vbd-2-51728", "vbd-2-51712"] {
            Counters::default().keep_in(&base.path().join(name), "/a");
        }
        let seen = folder.look().unwrap();
        assert_eq!(names(&seen), ["vbd-2-51712", "vbd-2-51728", "vbd-10-1"]);
        assert!(seen.problems.is_empty() && seen.disks.iter().all(|d| d.process.is_some()));
        std::fs::remove_file(stats_file(&base.path().join("vbd-10-1"))).unwrap();
        assert_eq!(names(&folder.look().unwrap()), ["vbd-2-51712", "vbd-2-51728"]);
    }

    #[test]
    fn what_is_no_disk_is_told_once_and_skipped() {
        let base = tempfile::tempdir().unwrap();
        let place = |name: &str| base.path().join(FOLDER).join(name);
        let mut folder = Folder::new(base.path().join(FOLDER));
        Counters::default().keep_in(&base.path().join("vbd-1-1"), "/a");
        let whole = std::fs::read(place("vbd-1-1")).unwrap();
        let mut newer = whole.clone();
        newer[7] += 1;
        std::fs::write(place("vbd-1-2"), b"short").unwrap();
        std::fs::write(place("vbd-1-3"), newer).unwrap();
        std::fs::write(place("vbd-1-4"), &whole).unwrap();
        std::fs::write(place("vbd-1-5"), vec![0; 9000]).unwrap();
        std::fs::write(place("theirs"), &whole).unwrap();
        std::fs::write(place("vbd-1-9.new"), b"").unwrap();
        symlink("/dev/zero", place("vbd-1-6")).unwrap();
        std::fs::create_dir(place("vbd-1-7")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            place("vbd-1-8"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        let seen = folder.look().unwrap();
        assert_eq!((names(&seen), seen.problems.len()), (vec!["vbd-1-1"], 8));
        let told = |name: &str| seen.problems.iter().find(|text| text.contains(name)).unwrap();
        assert!(told("vbd-1-2").contains("too short: 5 bytes"));
        assert!(told("vbd-1-3").contains("another version"));
        assert!(told("vbd-1-4").contains("the name of its disk"));
        assert!(told("vbd-1-5").contains("no file of counters"));
        assert!(folder.look().unwrap().problems.is_empty(), "once");
        std::fs::write(place("vbd-1-2"), b"shorter").unwrap();
        assert_eq!(folder.look().unwrap().problems.len(), 1, "it is another problem now");
        std::fs::remove_file(place("vbd-1-2")).unwrap();
        folder.look().unwrap();
        std::fs::write(place("vbd-1-2"), b"short").unwrap();
        assert_eq!(folder.look().unwrap().problems.len(), 1, "it had gone");
    }
}
