//! Stories of backups of a disk that a guest writes to: the power is cut, or the process dies, at any step.
//!
//! The stories run all of `ImageTools::back_up_live`. The guest writes after each snapshot and before each map is
//! ended. Every backup that is complete, whatever was cut, has to be the disk as it was when its snapshot was made.
//! So no change is lost between two backups. After each cut the disk has all that its guest has flushed.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use ferrite_disk::{Disk, DiskError, ErrorKind, Format as Kind, ImageName, OpenOptions, Session};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_image_tools::{AtRest, BackUp, BackupKind, ImageTools, LiveDisk, NewImage};

use crate::machine::Machine;

const ROUNDS: u32 = 6;
/// Writes of the guest at a time, at most.
const WRITES: u64 = 4;
/// Steps of one backup, about: the world may stop in one of them.
const STEPS: u64 = 900;

/// The events of a story, counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Told {
    /// Power cuts.
    pub cuts: u64,
    /// Deaths of the process.
    pub deaths: u64,
    /// Backups that are complete, although what made them was cut.
    pub cut_late: u64,
    /// Complete backups.
    pub complete: u64,
    /// Those of them that continue one that was interrupted.
    pub continued: u64,
    /// Those that are incremental.
    pub incremental: u64,
    /// Snapshots that a backup found and merged.
    pub merged: u64,
    /// Backups that were interrupted in good order.
    pub interrupted: u64,
}

struct Story {
    machine: Machine,
    random: RefCell<SplitMix64>,
    image: ImageName,
    folder: PathBuf,
    bytes: u64,
    /// The content that the guest's disk has for certain.
    disk: RefCell<Vec<u8>>,
    /// Writes of the guest of which it is not known whether the disk has them: sector and data.
    doubtful: RefCell<Vec<(usize, Vec<u8>)>>,
    /// The content that each complete backup has to have.
    expected: BTreeMap<String, Vec<u8>>,
    /// How often a backup still reports its progress before it is interrupted.
    patience: Cell<u64>,
    told: Told,
}

/// Tells the story of this seed, of an image of this format.
///
/// # Errors
/// A backup lacks content.
pub fn tell(kind: Kind, seed: u64) -> Result<Told, String> {
    let machine = Machine::new(seed).map_err(|e| e.to_string())?;
    let mut random = SplitMix64::new(seed ^ 0xBACC);
    let bytes = (4 << 20) + random.below(6) * (1 << 20) + 8 * 512;
    let image = ImageName { format: kind, path: machine.place.image("disk") };
    let folder = machine.place.images.join("b");
    std::fs::create_dir(&folder).map_err(|e| e.to_string())?;
    let (expected, told, random) = (BTreeMap::new(), Told::default(), RefCell::new(random));
    let patience = Cell::new(u64::MAX);
    let (disk, doubtful) = (RefCell::new(vec![0; bytes as usize]), RefCell::default());
    let mut story =
        Story { machine, random, image, folder, bytes, disk, doubtful, expected, patience, told };
    let new = NewImage { bytes: Some(bytes), ..NewImage::default() };
    story.tools(|tools| tools.create(&story.image, &new)).map_err(|e| e.to_string())?;
    for round in 0..ROUNDS {
        story.keeps_all()?;
        story.write().map_err(|e| format!("the guest: {e}"))?;
        story.back_up(round + 1 < ROUNDS)?;
    }
    story.keeps_all()?;
    story.examine(true)?;
    match story.machine.place.images.join("disk.ferrite-backup-record").exists() {
        true => Err("the record is left after a backup that nothing has interrupted".into()),
        false => Ok(story.told),
    }
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
            progress: &|_| {
                let left = self.patience.get().saturating_sub(1);
                self.patience.set(left);
                left > 0
            },
        })
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.borrow_mut().below(bound)
    }

    fn session(&self, name: &ImageName, read_only: bool) -> io::Result<Session> {
        let state_dir = Some(self.machine.place.state.clone());
        let options = OpenOptions { read_only, state_dir, ..OpenOptions::default() };
        let disk = Disk::open_image(name, &options).map_err(io::Error::other)?;
        Session::new(Arc::new(disk), |arena| Ok(self.machine.world.engine(arena)))
    }

    /// The contents of a disk.
    fn read(&self, name: &ImageName) -> io::Result<Vec<u8>> {
        let mut session = self.session(name, true)?;
        let mut bytes = vec![0; (session.disk().sectors() * 512) as usize];
        for (i, part) in bytes.chunks_mut(1 << 20).enumerate() {
            session.read((i << 20) as u64, part)?;
        }
        Ok(bytes)
    }

    /// The guest writes here and there.
    fn write(&self) -> io::Result<()> {
        let mut session = self.session(&self.image, false)?;
        for _ in 0..=self.below(WRITES) {
            let len = 1 + self.below(200);
            let first = self.below(self.bytes / 512 - len);
            let stamp = self.random.borrow_mut().next_u64() | 1;
            let words = (0..len * 64).flat_map(|i| stamp.wrapping_mul(i | 1).to_le_bytes());
            let data = words.collect::<Vec<u8>>();
            self.doubtful.borrow_mut().push((first as usize, data.clone()));
            session.write(first * 512, &data)?;
        }
        session.close()?;
        let mut disk = self.disk.borrow_mut();
        for (first, data) in self.doubtful.take() {
            disk[first * 512..][..data.len()].copy_from_slice(&data);
        }
        Ok(())
    }

    /// The disk has all that its guest has written and flushed. Of the other writes it has some sectors.
    fn keeps_all(&self) -> Result<(), String> {
        let found = self.read(&self.image).map_err(|e| format!("the guest's disk: {e}"))?;
        let (mut disk, doubtful) = (self.disk.borrow_mut(), self.doubtful.take());
        let sectors = found.chunks(512).zip(disk.chunks(512));
        for (sector, (is, _)) in sectors.enumerate().filter(|(_, (is, was))| is != was) {
            let mut newer = doubtful
                .iter()
                .filter_map(|(first, data)| data.chunks(512).nth(sector.checked_sub(*first)?));
            if !newer.any(|new| new == is) {
                return Err(format!(
                    "the disk has lost what its guest has written: sector {sector}"
                ));
            }
        }
        *disk = found;
        Ok(())
    }

    /// A backup, in which the world may stop.
    fn back_up(&mut self, may_stop: bool) -> Result<(), String> {
        let world = self.machine.world.clone();
        let stops = may_stop && self.below(4) > 0;
        let stop = stops.then(|| world.step() + 1 + self.below(STEPS));
        world.stop_at(stop);
        let is_interrupted = may_stop && self.below(3) == 0;
        self.patience.set(if is_interrupted { 1 + self.below(6) } else { u64::MAX });
        let kind = if self.below(8) == 0 { BackupKind::Full } else { BackupKind::Auto };
        let how = BackUp { name: None, map: Some("m".into()), kind, speed: 0 };
        let frozen = RefCell::new(None);
        let done = self.tools(|tools| {
            let rest = AtRest { tools, leaf: self.image.clone() };
            let disk = Guest { story: self, rest, frozen: &frozen, merges: Cell::new(0) };
            let done = tools.back_up_live(&disk, &self.folder, &how);
            (done, disk.merges.get())
        });
        let (done, merges) = done;
        let stopped = world.stopped();
        world.stop_at(None);
        self.patience.set(u64::MAX);
        self.told.merged += u64::from(merges > 1);
        match done {
            Ok(done) if !stopped => {
                self.told.continued += u64::from(done.resumed);
                self.told.incremental += u64::from(done.backup.parent.is_some());
            }
            Err(e) if !stopped && e.kind() == ErrorKind::Interrupted => self.told.interrupted += 1,
            Err(e) if !stopped => return Err(format!("a backup: {e}; {}", e.help())),
            _ => self.end()?,
        }
        let before = self.expected.len();
        self.add(frozen.into_inner())?;
        self.told.cut_late += u64::from(stopped && self.expected.len() > before);
        self.examine(false)
    }

    fn end(&mut self) -> Result<(), String> {
        let ended = match self.below(2) {
            0 => {
                self.told.deaths += 1;
                self.machine.kill_process()
            }
            _ => {
                self.told.cuts += 1;
                self.machine.cut_power()
            }
        };
        ended.map_err(|e| format!("the simulator: {e}"))
    }

    /// Adds the content that the new complete backup has to have.
    fn add(&mut self, frozen: Option<Vec<u8>>) -> Result<(), String> {
        let all = self.tools(|tools| tools.backups(&self.folder)).map_err(|e| e.to_string())?;
        if let Some(bad) = all.iter().find(|backup| backup.state == "damaged") {
            return Err(format!("backup {} is damaged: {:?}", bad.name, bad.why));
        }
        let complete = all.iter().filter(|backup| backup.state == "complete");
        let mut new: Vec<&str> = complete.map(|backup| backup.name.as_str()).collect();
        new.retain(|name| !self.expected.contains_key(*name));
        match (&new[..], frozen) {
            ([], _) => Ok(()),
            ([name], Some(frozen)) => {
                self.told.complete += 1;
                self.expected.insert((*name).to_owned(), frozen);
                Ok(())
            }
            (new, _) => Err(format!("backups from nowhere: {new:?}")),
        }
    }

    /// Compares the newest backup, or all, with what they have to have.
    fn examine(&self, all: bool) -> Result<(), String> {
        let skipped = if all { 0 } else { self.expected.len().saturating_sub(1) };
        for (name, expected) in self.expected.iter().skip(skipped) {
            let path = self.folder.join(format!("{name}.qcow2"));
            let found = self.read(&ImageName { format: Kind::Qcow2, path });
            let found = found.map_err(|e| format!("backup {name}: {e}"))?;
            if found != *expected {
                let at = found.iter().zip(expected).position(|(is, was)| is != was);
                return Err(format!("backup {name} is not what the disk was, at byte {at:?}"));
            }
        }
        if !all {
            return Ok(());
        }
        let verified = self.tools(|tools| tools.verify_backups(&self.folder, None));
        let verified = verified.map_err(|e| e.to_string())?;
        match verified.iter().find(|one| !one.is_good()) {
            Some(bad) => Err(format!("{bad:?}")),
            None => Ok(()),
        }
    }
}

/// The disk while its guest writes.
struct Guest<'a> {
    story: &'a Story,
    rest: AtRest<'a>,
    /// The contents at the last snapshot.
    frozen: &'a RefCell<Option<Vec<u8>>>,
    merges: Cell<u32>,
}

impl Guest<'_> {
    fn writes(&self) -> Result<(), DiskError> {
        self.story.write().map_err(|e| {
            DiskError::new(ErrorKind::Io, "the guest cannot write", e.to_string(), "none")
        })
    }
}

impl LiveDisk for Guest<'_> {
    fn leaf(&self) -> Result<Option<ImageName>, DiskError> {
        self.rest.leaf()
    }

    fn snapshot(&self, to: &ImageName, begin_map: Option<&str>) -> Result<(), DiskError> {
        self.rest.snapshot(to, begin_map)?;
        if let Ok(bytes) = self.story.read(to) {
            self.frozen.replace(Some(bytes));
        }
        self.writes()
    }

    fn end_map(&self, map: &str) -> Result<(), DiskError> {
        self.writes()?;
        self.rest.end_map(map)
    }

    fn remove_snapshot(&self, snapshot: &ImageName) -> Result<(), DiskError> {
        self.rest.remove_snapshot(snapshot)
    }

    fn merge(&self, leaf: &ImageName, snapshot: &ImageName) -> Result<(), DiskError> {
        self.merges.set(self.merges.get() + 1);
        self.rest.merge(leaf, snapshot)
    }
}
