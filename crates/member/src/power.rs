//! Machines of servers whose power is cut, for tests: real files, and beside them what a medium might have instead.
//!
//! A write can be read at once. Until the file's next sync a power cut leaves any content that each sector of 512 bytes had since
//! the last one, each sector by itself. A power cut that comes in the middle of a write leaves a part of it. New names of files are
//! durable at once.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_host::clock::{Random as _, SplitMix64};

const SECTOR: usize = 512;

type Sector = [u8; SECTOR];

/// The machine of a server. Clones are the same machine.
#[derive(Clone, Debug)]
pub struct Power(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    random: SplitMix64,
    /// Counts the processes: files of earlier ones do nothing any more.
    process: u64,
    boot: u64,
    /// Writes and syncs until the power is cut.
    left: Option<u64>,
    is_off: bool,
    /// A medium that answers syncs and does nothing.
    lies: bool,
    /// By inode: the earlier contents of each sector since the last sync, the oldest first.
    files: BTreeMap<u64, (File, BTreeMap<u64, Vec<Sector>>)>,
}

/// A file of the machine's present process.
#[derive(Debug)]
pub(crate) struct SimulatedFile {
    power: Power,
    file: File,
    inode: u64,
    process: u64,
}

impl Power {
    /// A machine that runs.
    pub fn new(seed: u64) -> Power {
        let (random, files) = (SplitMix64::new(seed), BTreeMap::new());
        let state =
            State { random, process: 0, boot: 1, left: None, is_off: false, lies: false, files };
        Power(Arc::new(Mutex::new(state)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts the power in the middle of the write or sync that is the `steps`-th from now on, from 1.
    pub fn cut_after(&self, steps: u64) {
        self.state().left = Some(steps);
    }

    /// Cuts the power now.
    pub fn cut(&self) {
        self.state().is_off = true;
    }

    /// Whether the power is cut.
    pub fn is_off(&self) -> bool {
        self.state().is_off
    }

    /// Has all syncs do nothing from now on.
    pub fn lie(&self) {
        self.state().lies = true;
    }

    /// The number of this start of the machine.
    pub fn boot(&self) -> u64 {
        self.state().boot
    }

    /// The process ends.
    pub fn end_process(&self) {
        self.state().process += 1;
    }

    /// Cuts the power, if it is on, and starts the machine again. Files have what the medium has.
    ///
    /// # Errors
    /// The real files cannot be written.
    pub fn restart(&self) -> io::Result<()> {
        let state = &mut *self.state();
        state.process += 1;
        state.boot += 1;
        (state.is_off, state.left) = (false, None);
        // All the newest contents, all the oldest, nearly so, or any mixture.
        let newest = [0, 3, 50, 97, 100][state.random.below(5) as usize];
        for (file, sectors) in std::mem::take(&mut state.files).into_values() {
            for (sector, versions) in sectors {
                if state.random.below(100) < newest {
                    continue;
                }
                let which = state.random.below(versions.len() as u64) as usize;
                file.write_all_at(&versions[which], sector * SECTOR as u64)?;
            }
        }
        Ok(())
    }

    pub(crate) fn file(&self, file: File) -> SimulatedFile {
        // A file that was just opened is there.
        let inode = file.metadata().map_or(0, |found| found.ino());
        let process = self.state().process;
        SimulatedFile { power: self.clone(), file, inode, process }
    }
}

impl State {
    /// Counts a step. The error: nothing is done any more. `true`: the power is cut in the middle of this one.
    fn step(&mut self, process: u64) -> io::Result<bool> {
        if self.is_off || process != self.process {
            return Err(io::Error::other("the machine has no power"));
        }
        self.left = self.left.map(|left| left.saturating_sub(1));
        self.is_off = self.left == Some(0);
        Ok(self.is_off)
    }
}

impl SimulatedFile {
    pub(crate) fn has_gone(&self) -> bool {
        let state = self.power.state();
        state.is_off || self.process != state.process
    }

    pub(crate) fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        if self.has_gone() {
            return Err(io::Error::other("the machine has no power"));
        }
        self.file.read_exact_at(bytes, at)
    }

    /// Writes whole sectors.
    pub(crate) fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let state = &mut *self.power.state();
        let is_cut = state.step(self.process)?;
        let mut before = vec![0; bytes.len()];
        self.file.read_exact_at(&mut before, at)?;
        let entry = match state.files.entry(self.inode) {
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert((self.file.try_clone()?, BTreeMap::new()))
            }
        };
        let first = at / SECTOR as u64;
        for (sector, old) in (first..).zip(before.as_chunks::<SECTOR>().0) {
            let versions = entry.1.entry(sector).or_default();
            if versions.last() != Some(old) {
                versions.push(*old);
            }
        }
        self.file.write_all_at(bytes, at)?;
        // The restart leaves any part of it.
        match is_cut {
            true => Err(io::Error::other("the machine has no power")),
            false => Ok(()),
        }
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        let state = &mut *self.power.state();
        if state.step(self.process)? {
            return Err(io::Error::other("the machine has no power"));
        }
        if !state.lies {
            state.files.remove(&self.inode);
        }
        Ok(())
    }
}
