//! Block devices of the simulated machine: files of a fixed size, with old content.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use ferrite_disk::{Disk, ImageName, OpenOptions, Session};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_image_tools::{ImageTools, NewImage};
use ferrite_simio::{Device, SimWorld};

use crate::format::Place;
use crate::stamp;

/// The most bytes of a device that are not zeros at first: more costs time and tests nothing more.
const OLD_BYTES: u64 = 14 << 20;

/// Requests that an older image has executed.
const OLD_WRITES: u64 = 60;

/// The old content of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remains {
    Nothing,
    /// Any bytes.
    Noise,
    /// The data of a guest.
    Guest,
    /// An image of the same kind, with data in it.
    Image,
}

/// The devices of a story.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Devices {
    pub(crate) device: Device,
    pub(crate) remains: Remains,
}

impl Devices {
    pub(crate) fn choose(random: &mut SplitMix64) -> Devices {
        let device = Device { discards: random.below(2) == 0, zeroes: random.below(3) > 0 };
        let remains = match random.below(8) {
            0 => Remains::Nothing,
            1 => Remains::Noise,
            2 | 3 => Remains::Guest,
            _ => Remains::Image,
        };
        Devices { device, remains }
    }

    /// Provides a device of at least so many bytes, or enlarges it.
    pub(crate) fn provide(&self, place: &Place, path: &Path, bytes: u64) -> io::Result<()> {
        self.enlarge(&place.world, place.seed, path, bytes)
    }

    /// Enlarges a device on a running machine.
    pub(crate) fn enlarge(
        &self,
        world: &SimWorld,
        seed: u64,
        path: &Path,
        bytes: u64,
    ) -> io::Result<()> {
        let file =
            File::options().create(true).truncate(false).read(true).write(true).open(path)?;
        let old = file.metadata()?.len();
        if old < bytes {
            file.set_len(bytes)?;
            self.fill(seed, &file, old, bytes.min(old + OLD_BYTES))?;
        }
        world.set_device(&file, self.device)
    }

    fn fill(&self, seed: u64, file: &File, from: u64, to: u64) -> io::Result<()> {
        let mut bytes = vec![0; 1 << 20];
        let mut random = SplitMix64::new(seed ^ from);
        match self.remains {
            Remains::Nothing => return Ok(()),
            Remains::Noise => {
                bytes.chunks_exact_mut(8).for_each(|word| {
                    word.copy_from_slice(&random.next_u64().to_le_bytes());
                });
            }
            Remains::Guest | Remains::Image => {
                for (sector, to) in bytes.chunks_exact_mut(stamp::SECTOR).enumerate() {
                    stamp::write(to, !seed, sector as u64, 1);
                }
            }
        }
        for at in (from..to).step_by(bytes.len()) {
            let len = bytes.len().min((to - at) as usize);
            file.write_all_at(&bytes[..len], at)?;
        }
        Ok(())
    }
}

/// Makes an image on a device and uses it, on another machine. Its process was killed, or closed it in good order; its
/// state in memory exists or not.
pub(crate) fn leave_image(place: &Place, name: &ImageName, new: &NewImage) -> Result<(), String> {
    let seed = !place.seed;
    let mut random = SplitMix64::new(seed);
    let world = SimWorld::new(seed);
    let device = File::open(&name.path).map_err(|e| e.to_string())?;
    let able = Device { discards: false, zeroes: false };
    world.set_device(device, able).map_err(|e| e.to_string())?;
    let state_dir = (random.below(2) == 0).then(|| place.state.clone());
    let tools = ImageTools {
        directory: &place.directory,
        unlocked: false,
        engine: &|arena| Ok(world.engine(arena)),
        state_dir: state_dir.clone(),
        fixed_size: true,
        parents: ferrite_disk::Parents::default(),
        progress: &|_| true,
    };
    let new = NewImage { force: true, ..new.clone() };
    tools.create(name, &new).map_err(|e| e.to_string())?;
    let options = OpenOptions { state_dir, fixed_size: true, ..OpenOptions::default() };
    let disk = Disk::open_image(name, &options).map_err(|e| e.to_string())?;
    let sectors = disk.sectors();
    let session = Session::new(Arc::new(disk), |arena| Ok(world.engine(arena)));
    let mut session = session.map_err(|e| e.to_string())?;
    let work = || -> io::Result<()> {
        for number in 0..OLD_WRITES {
            let len = (1 + random.below(64)).min(sectors);
            let first = random.below(sectors - len + 1);
            let mut bytes = vec![0; len as usize * stamp::SECTOR];
            for (i, to) in bytes.chunks_exact_mut(stamp::SECTOR).enumerate() {
                stamp::write(to, seed, first + i as u64, number);
            }
            session.write(first * 512, &bytes)?;
            if random.below(10) == 0 {
                session.flush()?;
            }
        }
        if random.below(2) == 0 { session.close() } else { Ok(()) }
    };
    work().map_err(|e| format!("an older image: {e}"))
}
