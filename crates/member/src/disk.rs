//! A file of a copy: one of the kernel's, or of a simulated machine in tests.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate};

/// Where a server's files are.
#[derive(Clone, Debug, Default)]
pub(crate) struct Machine {
    #[cfg(feature = "testing")]
    power: Option<crate::power::Power>,
}

/// An open file.
pub(crate) enum Disk {
    File(File),
    #[cfg(feature = "testing")]
    Simulated(crate::power::SimulatedFile),
}

impl Machine {
    #[cfg(feature = "testing")]
    pub(crate) fn simulated(power: crate::power::Power) -> Machine {
        Machine { power: Some(power) }
    }

    /// A file of this machine. It was opened, and nothing of it is under way.
    pub(crate) fn disk(&self, file: File) -> Disk {
        #[cfg(feature = "testing")]
        if let Some(power) = &self.power {
            return Disk::Simulated(power.file(file));
        }
        Disk::File(file)
    }

    /// Whether processes have to lock what they have. Those of a simulated machine end without a word.
    pub(crate) fn has_locks(&self) -> bool {
        #[cfg(feature = "testing")]
        return self.power.is_none();
        #[cfg(not(feature = "testing"))]
        true
    }
}

impl Disk {
    pub(crate) fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        match self {
            Disk::File(file) => file.read_exact_at(bytes, at),
            #[cfg(feature = "testing")]
            Disk::Simulated(file) => file.read(bytes, at),
        }
    }

    pub(crate) fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        match self {
            Disk::File(file) => file.write_all_at(bytes, at),
            #[cfg(feature = "testing")]
            Disk::Simulated(file) => file.write(bytes, at),
        }
    }

    pub(crate) fn zero(&self, at: u64, len: u64) -> io::Result<()> {
        match self {
            Disk::File(file) => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(fallocate(file, hole, at, len)?)
            }
            #[cfg(feature = "testing")]
            Disk::Simulated(file) => file.write(&vec![0; len as usize], at),
        }
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        match self {
            Disk::File(file) => file.sync_data(),
            #[cfg(feature = "testing")]
            Disk::Simulated(file) => file.sync(),
        }
    }

    /// Whether its process has ended, in a simulation.
    pub(crate) fn has_gone(&self) -> bool {
        match self {
            Disk::File(_) => false,
            #[cfg(feature = "testing")]
            Disk::Simulated(file) => file.has_gone(),
        }
    }

    /// Drops what is in the kernel's memory.
    pub(crate) fn forget_memory(&self) {
        match self {
            Disk::File(file) => {
                let _ = fadvise(file, 0, None, Advice::DontNeed);
            }
            #[cfg(feature = "testing")]
            Disk::Simulated(_) => {}
        }
    }
}
