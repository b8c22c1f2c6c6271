//! Stories of the maps of what has changed on a disk: a disk is used and backed up, and the power is cut at any step.
//!
//! A backup is kept outside of the machine, and what is in it stays. It takes these steps, each of which may be cut:
//! 1. The next map is begun.
//! 2. The blocks that the last map names are copied. From here on the backup counts.
//! 3. The last map is ended.
//!
//! After each step of use the last map has to name all blocks that differ from the backup. After each backup the
//! restored chain is the disk.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ferrite_disk::{Disk, Format as Kind, ImageName, OpenOptions, Session};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_image_tools::{DirtyMap, DirtyMaps, ImageTools, MapChange, NewImage};

use crate::format::{self, Queue};
use crate::load::MAX_REQUEST_SECTORS;
use crate::machine::{Machine, Thread};

/// The unit that is compared: of the bits in memory.
const BLOCK: usize = 64 << 10;
const ROUNDS: u32 = 8;
const REQUESTS: u32 = 12;

/// The end of a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Close,
    Death,
    PowerCut,
}

/// The events of a story, counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Told {
    /// Power cuts.
    pub cuts: u64,
    /// Deaths of the process.
    pub deaths: u64,
    /// Backups that were interrupted.
    pub interrupted: u64,
    /// Blocks that differed from the backup after a use.
    pub differing: u64,
    /// Blocks that the map named then.
    pub named: u64,
    /// The same after uses that no power cut ended: differing blocks and named ones.
    pub kept: (u64, u64),
    /// Times that the maps were void.
    pub voids: u64,
}

struct Story {
    machine: Machine,
    random: SplitMix64,
    image: ImageName,
    bytes: u64,
    /// The restored chain of backups.
    chain: Vec<u8>,
    /// The map that was begun with the last backup.
    number: u64,
    told: Told,
}

/// Tells the story of this seed, of an image of this format.
///
/// # Errors
/// The map lacks blocks, or the backup lacks content.
pub fn tell(kind: Kind, seed: u64) -> Result<Told, String> {
    let machine = Machine::new(seed).map_err(|e| e.to_string())?;
    let path = machine.place.image("disk");
    let mut random = SplitMix64::new(seed ^ 0xD127);
    // The last region is no whole one.
    let bytes = (8 << 20) + random.below(12) * (1 << 20) + 8 * 512;
    let image = ImageName { format: kind, path };
    let chain = vec![0; bytes as usize];
    let mut story =
        Story { machine, random, image, bytes, chain, number: 0, told: Told::default() };
    let new = NewImage { bytes: Some(bytes), ..NewImage::default() };
    story.tools(|tools| tools.create(&story.image, &new)).map_err(|e| e.to_string())?;
    story.change(MapChange::Begin("m0".into()))?;
    for _ in 0..ROUNDS {
        if story.random.below(3) > 0 {
            story.use_disk()?;
        } else {
            story.back_up()?;
        }
        story.compare()?;
    }
    Ok(story.told)
}

impl Story {
    fn tools<T>(&self, work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
        let place = &self.machine.place;
        work(&ImageTools {
            directory: &place.directory,
            unlocked: false,
            engine: &|arena| Ok(place.world.engine(arena)),
            state_dir: Some(place.state.clone()),
            fixed_size: false,
            parents: ferrite_disk::Parents::default(),
            progress: &|_| true,
        })
    }

    fn change(&self, change: MapChange) -> Result<(), String> {
        let done = self.tools(|tools| tools.change_maps(&self.image, &change));
        done.map(drop).map_err(|e| format!("{change:?}: {e}"))
    }

    fn maps(&self) -> Result<DirtyMaps, String> {
        self.tools(|tools| tools.dirty_maps(&self.image)).map_err(|e| format!("the maps: {e}"))
    }

    fn open(&self, read_only: bool) -> Result<Disk, String> {
        let options = OpenOptions {
            read_only,
            state_dir: Some(self.machine.place.state.clone()),
            ..OpenOptions::default()
        };
        Disk::open_image(&self.image, &options).map_err(|e| e.to_string())
    }

    /// The disk's contents.
    fn read(&self) -> Result<Vec<u8>, String> {
        let disk = Arc::new(self.open(true)?);
        let world = &self.machine.world;
        let session = Session::new(disk, |arena| Ok(world.engine(arena)));
        let mut session = session.map_err(|e| e.to_string())?;
        let mut bytes = vec![0; self.bytes as usize];
        for (i, part) in bytes.chunks_mut(1 << 20).enumerate() {
            session.read((i << 20) as u64, part).map_err(|e| format!("reading: {e}"))?;
        }
        Ok(bytes)
    }

    /// Stops the world within the next so many steps, or not at all.
    fn may_stop(&mut self, steps: u64) {
        let stop = (self.random.below(3) > 0).then(|| 1 + self.random.below(steps));
        let world = &self.machine.world;
        world.stop_at(stop.map(|stop| world.step() + stop));
    }

    fn end(&mut self, end: End) -> Result<(), String> {
        let world = &self.machine.world;
        world.stop_at(None);
        match end {
            End::Close => Ok(()),
            End::Death => {
                self.told.deaths += 1;
                self.machine.kill_process()
            }
            End::PowerCut => {
                self.told.cuts += 1;
                self.machine.cut_power()
            }
        }
        .map_err(|e| format!("the simulator: {e}"))
    }

    /// A guest uses the disk, until it is closed or ends at any step.
    fn use_disk(&mut self) -> Result<(), String> {
        let disk = Rc::new(self.open(false)?);
        let queues = 1 + self.random.below(3) as usize;
        let files = disk.files();
        let mut threads = self.machine.queues(queues, &files).map_err(|e| e.to_string())?;
        self.may_stop(400);
        let left = Rc::new(Cell::new(0));
        for thread in &threads {
            for task in 0..2 {
                left.set(left.get() + 1);
                let guest = Guest {
                    disk: disk.clone(),
                    queue: thread.queue.clone(),
                    buffer: thread.buffer(task),
                    random: SplitMix64::new(self.random.next_u64()),
                    bytes: self.bytes,
                };
                let left = left.clone();
                thread.reactor.spawn(async move {
                    guest.run().await;
                    left.set(left.get() - 1);
                });
            }
        }
        self.machine.drive(&mut threads, || left.get() == 0)?;
        let closes = !self.machine.world.stopped() && self.random.below(2) == 0;
        let closed = closes && self.close(&disk, &mut threads[0])?;
        let end = match self.random.below(2) {
            _ if closed && self.random.below(3) > 0 => End::Close,
            0 => End::Death,
            _ => End::PowerCut,
        };
        if end == End::Death {
            self.machine.set_aside().map_err(|e| e.to_string())?;
        }
        drop((threads, disk));
        self.end(end)
    }

    fn close(&self, disk: &Rc<Disk>, thread: &mut Thread) -> Result<bool, String> {
        let (disk, queue) = (disk.clone(), thread.queue.clone());
        let work = async move { disk.close(&queue.port).await };
        Ok(matches!(self.machine.run(thread, work)?, Some(Ok(()))))
    }

    /// The last map; `None`: it is void.
    fn last(&self) -> Result<Option<DirtyMap>, String> {
        let maps = self.maps()?;
        let name = format!("m{}", self.number);
        let last = maps.maps.into_iter().find(|map| map.name == name);
        match maps.void {
            Some(_) => Ok(None),
            None => last.map(Some).ok_or(format!("there is no map {name}")),
        }
    }

    /// The last map has to name what differs from the backup.
    fn compare(&mut self) -> Result<(), String> {
        let Some(map) = self.last()? else {
            self.told.voids += 1;
            return self.begin_anew();
        };
        let now = self.read()?;
        let is_named = |block: Range<u64>| {
            map.changed.iter().any(|part| {
                part.start_bytes <= block.start && block.end <= part.start_bytes + part.length_bytes
            })
        };
        let mut differing = 0;
        for (i, (is, was)) in now.chunks(BLOCK).zip(self.chain.chunks(BLOCK)).enumerate() {
            let start = (i * BLOCK) as u64;
            if is != was {
                differing += 1;
                if !is_named(start..start + is.len() as u64) {
                    return Err(format!("block {i} has changed, and map {} lacks it", map.name));
                }
            }
        }
        let named = map.changed_bytes.div_ceil(BLOCK as u64);
        self.told.differing += differing;
        self.told.named += named;
        if self.told.cuts == 0 {
            self.told.kept.0 += differing;
            self.told.kept.1 += named;
        }
        Ok(())
    }

    /// A full backup, and no map but a new one.
    fn begin_anew(&mut self) -> Result<(), String> {
        self.number += 1;
        self.change(MapChange::Begin(format!("m{}", self.number)))?;
        self.chain = self.read()?;
        Ok(())
    }

    /// A backup, which may be interrupted. Then it is begun again, or completed.
    fn back_up(&mut self) -> Result<(), String> {
        self.may_stop(40);
        let before = self.number;
        let done = self.back_up_steps();
        let stopped = self.machine.world.stopped();
        if !stopped {
            self.machine.world.stop_at(None);
            return done;
        }
        self.told.interrupted += 1;
        let end = if self.random.below(2) == 0 { End::Death } else { End::PowerCut };
        self.end(end)?;
        // The map of a backup that does not count, or that was followed.
        let other = if self.number == before { before + 1 } else { before };
        let maps = self.maps()?;
        let name = format!("m{other}");
        match maps.void.is_none() && maps.maps.iter().any(|map| map.name == name) {
            true => self.change(MapChange::End(name)),
            false => Ok(()),
        }
    }

    fn back_up_steps(&mut self) -> Result<(), String> {
        let next = self.number + 1;
        self.change(MapChange::Begin(format!("m{next}")))?;
        let Some(map) = self.last()? else { return Ok(()) };
        let now = self.read()?;
        for part in &map.changed {
            let end = part.start_bytes + part.length_bytes;
            let part = part.start_bytes as usize..end as usize;
            self.chain[part.clone()].copy_from_slice(&now[part]);
        }
        self.number = next;
        if self.chain != now {
            return Err("the restored chain is not the disk".into());
        }
        self.change(MapChange::End(format!("m{}", next - 1)))
    }
}

/// One task of a guest.
pub(crate) struct Guest {
    pub(crate) disk: Rc<Disk>,
    pub(crate) queue: Queue,
    pub(crate) buffer: ferrite_io::arena::Span,
    pub(crate) random: SplitMix64,
    pub(crate) bytes: u64,
}

impl Guest {
    pub(crate) async fn run(mut self) {
        for _ in 0..REQUESTS {
            if self.request().await.is_err() {
                return;
            }
        }
    }

    async fn request(&mut self) -> io::Result<()> {
        let sectors = self.bytes / 512;
        let len = 1 + self.random.below(MAX_REQUEST_SECTORS);
        let first = self.random.below(sectors - len + 1);
        let (offset, len) = (first * 512, len * 512);
        match self.random.below(10) {
            0 => self.disk.flush(&self.queue.port).await,
            1 => self.disk.discard(&self.queue.port, offset, len).await,
            2 => {
                let Queue { port, zeros } = &self.queue;
                self.disk.write_zeroes(port, offset, len, *zeros).await
            }
            _ => {
                let data = self.buffer.slice(0, len as usize);
                let number = self.random.next_u64() | 1;
                let mut bytes = Vec::with_capacity(len as usize);
                for i in 0..len / 8 {
                    bytes.extend_from_slice(&number.wrapping_mul(i | 1).to_le_bytes());
                }
                self.queue.memory().copy_in(data, &bytes);
                format::Disk::write(&*self.disk, &self.queue, offset, data).await
            }
        }
    }
}
