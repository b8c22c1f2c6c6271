//! Stories of a mirror: a disk is used while its writes go to a second one, too, and the process dies or the power is cut
//! at any step.
//!
//! Each use ends by closing both disks, by a death, which leaves the map on tmpfs, or by a power cut, which leaves the
//! dirty map alone. After each the maps that are left have to name all blocks in which the disks differ. If the mirror
//! says that both are equal and durable, they are, also after a power cut at this moment: so the guest could go on with
//! the target. Sometimes the target is away.

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use ferrite_disk::{
    Disk, Format as Kind, ImageName, MirrorFile, MirrorOptions, OpenOptions, Session,
};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_image_tools::{ImageTools, MapChange, NewImage};

use crate::dirty::Guest;
use crate::machine::{MAX_QUEUES, Machine, Thread};

/// The unit that is compared.
const BLOCK: usize = 64 << 10;
const ROUNDS: u32 = 8;
const NAME: &str = "mirror-story";

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
    /// Uses at whose end both disks were equal and durable.
    pub complete: u64,
    /// Uses without a target.
    pub away: u64,
    /// Blocks that differed after a use.
    pub differing: u64,
    /// Regions of the copy that were to be copied at the begin of a use after a power cut, and all of them.
    pub begun: (u64, u64),
    /// Times that the dirty map was void.
    pub voids: u64,
}

struct Story {
    machine: Machine,
    random: SplitMix64,
    source: ImageName,
    target: ImageName,
    bytes: u64,
    told: Told,
}

/// Tells the story of this seed, of two disks of these formats.
///
/// # Errors
/// The maps lack blocks.
pub fn tell(kinds: [Kind; 2], seed: u64) -> Result<Told, String> {
    let machine = Machine::new(seed).map_err(|e| e.to_string())?;
    let mut random = SplitMix64::new(seed ^ 0x3177);
    let bytes = (8 << 20) + random.below(12) * (1 << 20) + 8 * 512;
    let name = |i: usize, name| ImageName { format: kinds[i], path: machine.place.image(name) };
    let (source, target) = (name(0, "source"), name(1, "target"));
    let mut story = Story { machine, random, source, target, bytes, told: Told::default() };
    let new = NewImage { bytes: Some(bytes), ..NewImage::default() };
    for name in [&story.source, &story.target] {
        story.tools(|tools| tools.create(name, &new)).map_err(|e| e.to_string())?;
    }
    story.begin()?;
    for _ in 0..ROUNDS {
        story.use_disk()?;
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

    /// The map on tmpfs: it is there as long as no power cut was.
    fn map(&self) -> PathBuf {
        self.machine.place.state.join("mirror.map")
    }

    /// A mirror whose target lacks everything.
    fn begin(&mut self) -> Result<(), String> {
        let change = MapChange::Mirror(NAME.to_owned());
        let done = self.tools(|tools| tools.change_maps(&self.source, &change));
        done.map_err(|e| format!("{change:?}: {e}"))?;
        self.make_map()
    }

    fn make_map(&self) -> Result<(), String> {
        let made = MirrorFile::create(&self.map(), self.bytes);
        made.and_then(|map| map.set_name(Some(NAME))).map_err(|e| format!("the map: {e}"))
    }

    fn status(&self) -> Result<(u64, u64, bool), String> {
        let map = MirrorFile::open(&self.map()).map_err(|e| format!("the map: {e}"))?;
        let status = map.status().map_err(|e| format!("the map: {e}"))?;
        Ok((status.left, status.regions, map.is_complete().map_err(|e| e.to_string())?))
    }

    fn options(&self, read_only: bool) -> OpenOptions {
        let state_dir = Some(self.machine.place.state.clone());
        OpenOptions { read_only, state_dir, ..OpenOptions::default() }
    }

    fn open(&self, is_away: bool) -> Result<Disk, String> {
        let options = self.options(false);
        let mut target = self.target.clone();
        if is_away {
            target.path = self.machine.place.image("nowhere");
        }
        let disk = Disk::open_image(&self.source, &options).map_err(|e| e.to_string())?;
        let mirror = MirrorOptions { target, map: self.map() };
        disk.mirrored(&mirror, &options).map_err(|e| e.to_string())
    }

    /// A disk's contents.
    fn read(&self, name: &ImageName) -> Result<Vec<u8>, String> {
        let disk = Disk::open_image(name, &self.options(true)).map_err(|e| e.to_string())?;
        let world = &self.machine.world;
        let session = Session::new(Arc::new(disk), |arena| Ok(world.engine(arena)));
        let mut session = session.map_err(|e| e.to_string())?;
        let mut bytes = vec![0; self.bytes as usize];
        for (i, part) in bytes.chunks_mut(1 << 20).enumerate() {
            session.read((i << 20) as u64, part).map_err(|e| format!("reading: {e}"))?;
        }
        Ok(bytes)
    }

    /// A guest uses the disk while the target gets what it lacks, until both are closed or the process ends at any step.
    fn use_disk(&mut self) -> Result<(), String> {
        let is_away = self.random.below(8) == 0;
        self.told.away += u64::from(is_away);
        let disk = Rc::new(self.open(is_away)?);
        let (left, all, _) = self.status()?;
        if self.told.cuts > 0 {
            self.told.begun.0 += left;
            self.told.begun.1 += all;
        }
        let files = disk.files();
        let mut threads = self.machine.queues(MAX_QUEUES, &files).map_err(|e| e.to_string())?;
        let world = &self.machine.world;
        let stop = (self.random.below(3) > 0).then(|| 1 + self.random.below(600));
        world.stop_at(stop.map(|stop| world.step() + stop));
        self.drive(&disk, &mut threads)?;
        let stopped = self.machine.world.stopped();
        let closes = !stopped && self.random.below(3) > 0;
        let closed = closes && self.close(&disk, &mut threads[0])?;
        let end = match self.random.below(2) {
            _ if closed && self.random.below(2) > 0 => End::Close,
            0 => End::Death,
            _ => End::PowerCut,
        };
        if end == End::Death {
            self.machine.set_aside().map_err(|e| e.to_string())?;
        }
        let is_complete = closed && self.status()?.2;
        drop((threads, disk, files));
        self.end(end)?;
        self.compare(end, is_complete)
    }

    /// Two queues of the guest, and a third thread that copies.
    fn drive(&mut self, disk: &Rc<Disk>, threads: &mut [Thread]) -> Result<(), String> {
        let left = Rc::new(Cell::new(0));
        let (copies, guests) = threads.split_last().expect("there are threads");
        for thread in guests {
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
        let done = Rc::new(Cell::new(false));
        let (disk, queue, busy, end) = (disk.clone(), copies.queue.clone(), left, done.clone());
        let buffers: Vec<_> = (0..2).map(|i| copies.buffer(i)).collect();
        let mut random = SplitMix64::new(self.random.next_u64());
        let more = self.random.below(5);
        copies.reactor.spawn(async move {
            let Disk::Mirror(mirror) = &*disk else { return };
            let mut rounds = more;
            while busy.get() > 0 || rounds > 0 {
                rounds -= u64::from(busy.get() == 0);
                let settles = random.below(2) == 0;
                mirror.work_once(&queue.port, queue.zeros, &buffers, settles).await;
                queue.port.io.yield_to_others().await;
            }
            end.set(true);
        });
        self.machine.drive(threads, || done.get())
    }

    fn close(&self, disk: &Rc<Disk>, thread: &mut Thread) -> Result<bool, String> {
        let (disk, queue) = (disk.clone(), thread.queue.clone());
        let work = async move { disk.close(&queue.port).await };
        Ok(matches!(self.machine.run(thread, work)?, Some(Ok(()))))
    }

    fn end(&mut self, end: End) -> Result<(), String> {
        self.machine.world.stop_at(None);
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

    /// The dirty map, and after a death the other one, too, have to name what differs.
    fn compare(&mut self, end: End, is_complete: bool) -> Result<(), String> {
        self.told.complete += u64::from(is_complete);
        let maps = self.tools(|tools| tools.dirty_maps(&self.source));
        let maps = maps.map_err(|e| format!("the maps: {e}"))?;
        let [source, target] = [self.read(&self.source)?, self.read(&self.target)?];
        let differs = |(i, (a, b)): (usize, (&[u8], &[u8]))| (a != b).then_some(i * BLOCK);
        let blocks = source.chunks(BLOCK).zip(target.chunks(BLOCK)).enumerate();
        let differing: Vec<usize> = blocks.filter_map(differs).collect();
        self.told.differing += differing.len() as u64;
        if is_complete && !differing.is_empty() {
            return Err(format!("after {end:?}: complete, and {} blocks differ", differing.len()));
        }
        let (None, Some(map)) = (maps.void, maps.maps.iter().find(|map| map.name == NAME)) else {
            self.told.voids += 1;
            return self.begin();
        };
        for at in differing.iter().map(|at| *at as u64) {
            let is_in = |start: u64, len: u64| start <= at && at < start + len;
            if !map.changed.iter().any(|part| is_in(part.start_bytes, part.length_bytes)) {
                return Err(format!("after {end:?}: the disks differ at {at}, and no map says so"));
            }
        }
        match end {
            End::PowerCut => self.make_map(),
            End::Close | End::Death => self.is_in_memory(&differing),
        }
    }

    /// The map on tmpfs has to name what differs.
    fn is_in_memory(&self, differing: &[usize]) -> Result<(), String> {
        const BITS_AT: usize = 4096;
        let map = std::fs::read(self.map()).map_err(|e| format!("the map: {e}"))?;
        let is_set = |region: usize| map[BITS_AT + region / 8] >> (region % 8) & 1 != 0;
        match differing.iter().find(|at| !is_set(*at >> 20)) {
            Some(at) => Err(format!("the disks differ at {at}, and the map on tmpfs lacks it")),
            None => Ok(()),
        }
    }
}
