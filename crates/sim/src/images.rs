//! Images in the formats of this project, alone or in chains, in files or on devices.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::open_medium;
use ferrite_disk::{
    Disk, DiskError, ErrorKind, Format as Kind, ImageName, OpenOptions, ProblemKind, Session,
};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_image_tools::{Convert, ImageTools, MergeCopy, NewImage, Stretch};
use ferrite_images::{qcow2, vhd};

use crate::devices::{self, Devices, Remains};
use crate::format::{Format, Operation, Place};
use crate::{packed, past, qemu, tails};

mod live;

/// Units of allocation in bytes, the likelier ones more than once. They are small, so that small disks have several
/// tables.
const BLOCKS: [u32; 8] =
    [2 << 20, 2 << 20, 2 << 20, 512 << 10, 512 << 10, 512 << 10, 64 << 10, 4 << 10];
const CLUSTERS: [u32; 8] = [4 << 10, 4 << 10, 4 << 10, 512, 512, 16 << 10, 64 << 10, 2 << 20];

/// The block size of a new layer, on any parent.
const USUAL_BLOCK: u32 = 2 << 20;
const USUAL_CLUSTER: u32 = 64 << 10;

/// The medium of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Files, which can grow and have holes.
    Files,
    /// Block devices.
    Devices,
}

/// The images of one format other than [`Kind::Store`]: a volume is no image.
#[derive(Clone, Copy, Debug)]
pub struct Images {
    kind: Kind,
    medium: Medium,
    unit_bytes: Option<u32>,
}

/// The seed's choices for the images of a story.
struct Shape {
    /// The unit of the first image: blocks, or clusters.
    unit_bytes: u32,
    /// All space is allocated at once.
    fixed: bool,
    devices: Devices,
}

impl Images {
    /// Images in files.
    pub const fn new(kind: Kind) -> Images {
        Images { kind, medium: Medium::Files, unit_bytes: None }
    }

    /// Images on another medium.
    pub const fn on(self, medium: Medium) -> Images {
        Images { medium, ..self }
    }

    /// The first image has blocks or clusters of this size, instead of the seed's choice.
    pub const fn in_units(self, unit_bytes: u32) -> Images {
        Images { unit_bytes: Some(unit_bytes), ..self }
    }

    fn on_devices(&self) -> bool {
        self.medium == Medium::Devices
    }

    fn shape(&self, place: &Place) -> Shape {
        let mut random = SplitMix64::new(place.seed ^ 0x5AFE);
        let units = if self.kind == Kind::Vhd { BLOCKS } else { CLUSTERS };
        let unit_bytes = units[random.below(units.len() as u64) as usize];
        let usual = if self.kind == Kind::Vhd { USUAL_BLOCK } else { USUAL_CLUSTER };
        let unit_bytes = if place.usual_units { usual } else { unit_bytes };
        let fixed = random.below(10) == 0 && self.unit_bytes.is_none();
        let fixed = fixed && self.kind == Kind::Vhd;
        let unit_bytes = self.unit_bytes.unwrap_or(unit_bytes);
        Shape { unit_bytes, fixed, devices: Devices::choose(&mut random) }
    }

    fn name(&self, place: &Place, name: &str) -> ImageName {
        named(place, name, self.kind)
    }

    fn leaf(&self, place: &Place) -> ImageName {
        self.name(place, "disk")
    }

    fn copy(&self, place: &Place, operation: Operation) -> ImageName {
        let of = |number: u64, kinds: &[Kind]| kinds[number as usize % kinds.len()];
        match operation {
            Operation::Convert(n) => {
                let kind = of(n + place.seed, &[Kind::Raw, Kind::Vhd, Kind::Qcow2]);
                named(place, &format!("copy-{n}"), kind)
            }
            Operation::Clone(n) => {
                let kind = match self.kind {
                    // A VHD's parents are VHDs and raw images only.
                    Kind::Qcow2 => Kind::Qcow2,
                    _ => of(n + place.seed, &[Kind::Vhd, Kind::Qcow2]),
                };
                named(place, &format!("clone-{n}"), kind)
            }
            _ => self.leaf(place),
        }
    }

    /// The file that marks an image on a device as complete: the device always exists.
    fn mark(&self, name: &ImageName) -> PathBuf {
        let mut path = name.path.clone().into_os_string();
        path.push(".made");
        path.into()
    }

    fn is_made(&self, name: &ImageName) -> bool {
        if self.on_devices() { self.mark(name).exists() } else { name.path.exists() }
    }

    fn options(&self, place: &Place, read_only: bool) -> OpenOptions {
        OpenOptions {
            read_only,
            // A story uses its disk while a clone of it is checked.
            even_parent: true,
            state_dir: Some(place.state.clone()),
            fixed_size: self.on_devices(),
            ..OpenOptions::default()
        }
    }

    fn check_image(&self, name: &ImageName) -> Result<(), String> {
        let options = OpenOptions {
            read_only: true,
            fixed_size: self.on_devices(),
            ..OpenOptions::default()
        };
        let medium = || open_medium(&name.path, &options).map_err(|e| e.to_string());
        let bad = match name.format {
            Kind::Raw | Kind::Store | Kind::Nbd | Kind::Rbd | Kind::Pool => None,
            Kind::Vhd => {
                let report = vhd::check(&medium()?).map_err(|e| e.to_string())?;
                let bad = report.findings.iter().find(|finding| !finding.problem.is_harmless());
                bad.map(ToString::to_string)
            }
            Kind::Qcow2 => {
                let report = qcow2::check(&medium()?).map_err(|e| e.to_string())?;
                let bad = report.findings.iter().find(|finding| !finding.problem.is_harmless());
                bad.map(ToString::to_string)
            }
        };
        bad.map_or(Ok(()), Err)
    }

    /// The bytes of a device that is too small: about half of it can be written. `None`: it is large enough.
    fn tight_bytes(&self, place: &Place, sectors: u64) -> Option<u64> {
        let Shape { unit_bytes, fixed, .. } = self.shape(place);
        if !place.tight || fixed || !self.on_devices() {
            return None;
        }
        let (bytes, unit) = (sectors * 512, u64::from(unit_bytes));
        match self.kind {
            Kind::Raw | Kind::Store | Kind::Nbd | Kind::Rbd | Kind::Pool => None,
            // A block has a bitmap before it, and is aligned.
            Kind::Vhd => Some((64 << 10) + (bytes.div_ceil(unit) / 2).max(1) * (unit + (8 << 10))),
            Kind::Qcow2 => Some((64 << 10) + 8 * unit + (bytes / 2).next_multiple_of(unit)),
        }
    }

    /// The most bytes that an image may take.
    fn room_bytes(&self, kind: Kind, sectors: u64) -> u64 {
        let bytes = sectors * 512;
        match kind {
            Kind::Raw | Kind::Store | Kind::Nbd | Kind::Rbd | Kind::Pool => bytes,
            // Blocks keep their places. The smallest have a sector for a bitmap, and are aligned. A fixed image has its
            // footer at the end of its device, which cannot grow then.
            Kind::Vhd => 2 * bytes + (48 << 20),
            // Clusters that are replaced, or leaked, are not reused at once.
            Kind::Qcow2 => 3 * bytes + (64 << 20),
        }
    }

    /// Provides the device of a new image, if it is to be on one.
    fn provide(
        &self,
        place: &Place,
        name: &ImageName,
        new: &NewImage,
        sectors: u64,
    ) -> Result<(), String> {
        if !self.on_devices() || name.path.exists() {
            return Ok(());
        }
        let devices = self.shape(place).devices;
        let tight = self.tight_bytes(place, sectors);
        let bytes = tight.unwrap_or(self.room_bytes(name.format, sectors));
        devices.provide(place, &name.path, bytes).map_err(|e| e.to_string())?;
        if devices.remains == Remains::Image && name.format != Kind::Raw && tight.is_none() {
            let old = NewImage { bytes: Some(sectors * 512), parent: None, ..new.clone() };
            devices::leave_image(place, name, &old)?;
        }
        Ok(())
    }

    fn tools<T>(&self, place: &Place, work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
        work(&ImageTools {
            directory: &place.directory,
            unlocked: false,
            engine: &|arena| Ok(place.world.engine(arena)),
            state_dir: Some(place.state.clone()),
            fixed_size: self.on_devices(),
            parents: ferrite_disk::Parents::default(),
            progress: &|_| true,
        })
    }

    /// Makes an image, with a device for it.
    fn make(
        &self,
        place: &Place,
        name: &ImageName,
        new: &NewImage,
        sectors: u64,
    ) -> Result<(), String> {
        let new = NewImage { force: self.on_devices(), ..new.clone() };
        self.provide(place, name, &new, sectors)?;
        self.tools(place, |tools| tools.create(name, &new)).map_err(|e| e.to_string())?;
        if self.on_devices() {
            fs::write(self.mark(name), "").map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    fn create(&self, place: &Place, sectors: u64) -> Result<(), String> {
        let shape = self.shape(place);
        let new = NewImage {
            bytes: Some(sectors * 512),
            unit_bytes: (self.kind != Kind::Raw && !shape.fixed).then_some(shape.unit_bytes),
            fixed: shape.fixed,
            ..NewImage::default()
        };
        self.make(place, &self.leaf(place), &new, sectors)
    }

    /// A device cannot get another one's name. But its administrator can rename it, as XAPI does; if the new leaf is
    /// not made, the rename is undone.
    fn snapshot_device(&self, place: &Place, number: u64) -> Result<(), String> {
        let (leaf, parent) = (self.leaf(place), self.name(place, &format!("layer-{number}")));
        let sectors = self.tools(place, |tools| tools.info(&leaf)).map_err(|e| e.to_string())?;
        let sectors = sectors.virtual_bytes / 512;
        let files = |e: std::io::Error| e.to_string();
        fs::rename(&leaf.path, &parent.path).map_err(files)?;
        fs::remove_file(self.mark(&leaf)).map_err(files)?;
        let new = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
        let made = self.make(place, &leaf, &new, sectors);
        if made.is_err() {
            fs::remove_file(&leaf.path).map_err(files)?;
            fs::rename(&parent.path, &leaf.path).map_err(files)?;
            fs::write(self.mark(&leaf), "").map_err(files)?;
        }
        made
    }

    fn grow(&self, place: &Place, sectors: u64) -> Result<(), String> {
        let leaf = self.leaf(place);
        let shape = self.shape(place);
        if self.on_devices() && !shape.fixed {
            let bytes = self.room_bytes(self.kind, sectors);
            self.enlarge(place, &leaf.path, bytes).map_err(|e| e.to_string())?;
        }
        if self.kind != Kind::Raw && !shape.fixed {
            let now = self.tools(place, |tools| tools.info(&leaf)).map_err(|e| e.to_string())?;
            let file = File::options().read(true).write(true).open(&leaf.path);
            let mut random = SplitMix64::new(place.seed ^ sectors);
            let scribbled = file.and_then(|file| match self.kind {
                Kind::Vhd => tails::of_vhd(&file, now.virtual_bytes, &mut random),
                _ => tails::of_qcow2(&file, &mut random),
            });
            scribbled.map_err(|e| e.to_string())?;
        }
        let done = self.tools(place, |tools| tools.resize(&leaf, sectors * 512, false));
        done.map(drop).map_err(|e| e.to_string())
    }

    /// Makes a device larger, and copies a VHD's footer to the new end.
    fn enlarge(&self, place: &Place, path: &Path, bytes: u64) -> io::Result<()> {
        let device = File::options().read(true).write(true).open(path)?;
        let mut footer = [0; 512];
        device.read_exact_at(&mut footer, device.metadata()?.len() - 512)?;
        self.shape(place).devices.provide(place, path, bytes)?;
        match self.kind {
            Kind::Vhd => device.write_all_at(&footer, device.metadata()?.len() - 512),
            _ => Ok(()),
        }
    }

    fn coalesce(&self, place: &Place) -> Result<(), String> {
        let leaf = self.leaf(place);
        // If it is repeated after an interruption after its last step, nothing is left to merge.
        let alone =
            |tools: &ImageTools<'_>| tools.info(&leaf).is_ok_and(|info| info.chain.len() == 1);
        let done = self.tools(place, |tools| match alone(tools) {
            true => Ok(()),
            false => tools.coalesce(&leaf, false).map(drop),
        });
        done.map_err(|e| e.to_string())
    }

    /// Merges the leaf's parent into its own parent, unless that was done before, unreported.
    /// Acts as another program: renames the image, whose process was killed, and makes a new leaf on it. Image and
    /// journal stay unchanged. Our own tools complete an image that gets a child, so they get a copy.
    fn overlay(&self, place: &Place, number: u64) -> Result<(), String> {
        let (leaf, parent) = (self.leaf(place), self.name(place, &format!("layer-{number}")));
        let real = place.image("real");
        let files = |e: io::Error| e.to_string();
        fs::rename(&leaf.path, &real).map_err(files)?;
        fs::copy(&real, &parent.path).map_err(files)?;
        let new = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
        let tools = ImageTools {
            directory: &place.directory,
            engine: &|arena| Ok(place.world.engine(arena)),
            state_dir: None,
            fixed_size: false,
            unlocked: false,
            parents: ferrite_disk::Parents::default(),
            progress: &|_| true,
        };
        tools.create(&leaf, &new).map_err(|e| e.to_string())?;
        fs::rename(&real, &parent.path).map_err(files)
    }

    fn clone_leaf(&self, place: &Place, operation: Operation) -> Result<(), String> {
        let (leaf, clone) = (self.leaf(place), self.copy(place, operation));
        if !self.on_devices() && clone.path.exists() {
            return Ok(());
        }
        let info = self.tools(place, |tools| tools.info(&leaf)).map_err(|e| e.to_string())?;
        let new = NewImage { parent: Some(leaf.clone()), ..NewImage::default() };
        let done = self.make(place, &clone, &new, info.virtual_bytes / 512);
        // The story continues with the leaf.
        if !self.on_devices() {
            let mode = fs::Permissions::from_mode(0o644);
            fs::set_permissions(&leaf.path, mode).map_err(|e| e.to_string())?;
        }
        done
    }

    /// Converts the image. At times it is interrupted and resumed.
    fn convert(&self, place: &Place, operation: Operation) -> Result<(), String> {
        let (leaf, copy) = (self.leaf(place), self.copy(place, operation));
        let info = self.tools(place, |tools| tools.info(&leaf)).map_err(|e| e.to_string())?;
        let shape = self.shape(place);
        let new = NewImage::default();
        self.provide(place, &copy, &new, info.virtual_bytes / 512)?;
        let patience = std::cell::Cell::new(place.world.below(24));
        let asked = |_| {
            patience.set(patience.get().saturating_sub(1));
            patience.get() != 1
        };
        let tools = ImageTools {
            directory: &place.directory,
            unlocked: false,
            engine: &|arena| Ok(place.world.engine(arena)),
            state_dir: Some(place.state.clone()),
            fixed_size: self.on_devices(),
            parents: ferrite_disk::Parents::default(),
            progress: &asked,
        };
        let (mut resume, mut force) = (!self.on_devices(), self.on_devices());
        let done = loop {
            let fixed = shape.fixed && copy.format != Kind::Qcow2;
            let how = Convert { force, resume, fixed, ..Convert::default() };
            match tools.convert(&leaf, &copy, &how) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // There is nothing to resume, or it is done, unreported.
                Err(e) if e.kind() == ErrorKind::Refused && !force => {
                    (resume, force) = (false, true)
                }
                done => break done,
            }
        };
        done.map_err(|e| e.to_string())?;
        if self.on_devices() {
            fs::write(self.mark(&copy), "").map_err(|e| e.to_string())?;
        }
        Ok(())
    }
}

fn named(place: &Place, name: &str, format: Kind) -> ImageName {
    ImageName { format, path: place.image(&format!("{name}.{format}")) }
}

impl Format for Images {
    type Disk = Disk;

    fn name(&self) -> String {
        let unit = self.unit_bytes.map_or(String::new(), |unit| format!(" --unit {unit}"));
        let medium = if self.on_devices() { " --medium device" } else { "" };
        format!("--format {}{medium}{unit}", self.kind)
    }

    fn create(&self, place: &Place, sectors: u64) -> Result<(), String> {
        self.operate(place, Operation::Create(sectors))
    }

    fn open(&self, place: &Place) -> Result<Disk, String> {
        Disk::open_image(&self.leaf(place), &self.options(place, false)).map_err(|e| e.to_string())
    }

    fn check(&self, place: &Place, thorough: bool) -> Result<(), String> {
        let leaf = self.leaf(place);
        self.check_image(&leaf)?;
        if thorough && self.kind == Kind::Qcow2 { qemu::check(place) } else { Ok(()) }
    }

    fn open_copy(&self, place: &Place, operation: Operation) -> Result<Option<Disk>, String> {
        let copy = self.copy(place, operation);
        if !self.is_made(&copy) {
            return Ok(None);
        }
        self.check_image(&copy)?;
        let disk = Disk::open_image(&copy, &self.options(place, true));
        disk.map(Some).map_err(|e: DiskError| e.to_string())
    }

    fn remove_copy(&self, place: &Place, operation: Operation) -> Result<(), String> {
        let copy = self.copy(place, operation);
        for path in [copy.path.clone(), self.mark(&copy)] {
            if path.exists() {
                fs::remove_file(path).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }

    fn change_by_others(&self, place: &Place, random: &mut SplitMix64) -> Result<(), String> {
        match self.kind {
            Kind::Qcow2 => packed::pack(&self.leaf(place).path, random).map_err(|e| e.to_string()),
            _ => Ok(()),
        }
    }

    fn give_past(&self, place: &Place) -> Result<bool, String> {
        if self.kind != Kind::Qcow2 {
            return Ok(false);
        }
        let path = self.leaf(place).path;
        let given = || -> std::io::Result<()> {
            let file = fs::File::options().read(true).write(true).open(path)?;
            past::give(file.try_clone()?, &mut SplitMix64::new(place.seed ^ 0x9A57))?;
            place.world.changed_outside(&file)
        };
        given().map(|()| true).map_err(|e| e.to_string())
    }

    fn fill_up(&self, place: &Place) -> Result<bool, String> {
        if self.kind != Kind::Qcow2 || !self.on_devices() {
            return Ok(false);
        }
        let path = self.leaf(place).path;
        let filled = || -> io::Result<()> {
            let device = File::options().read(true).write(true).open(path)?;
            let mut random = SplitMix64::new(place.seed ^ 0xF011);
            let end = past::give_full(device.try_clone()?, &mut random)?;
            device.set_len(end)?;
            place.world.changed_outside(&device)
        };
        filled().map(|()| true).map_err(|e| e.to_string())
    }

    fn begin_use(&self, place: &Place, disk: Disk) -> io::Result<Disk> {
        if !disk.is_unrecovered() {
            return Ok(disk);
        }
        let disk = Arc::new(disk);
        Session::new(disk.clone(), |arena| Ok(place.world.engine(arena)))?.recover_parents()?;
        Arc::into_inner(disk).ok_or_else(|| io::Error::other("the disk is still in use"))
    }

    fn can_go_on(&self, place: &Place) -> bool {
        // A raw disk on a device has no memory of a failed sync: there the backend remembers it.
        self.kind != Kind::Raw && !self.shape(place).fixed
    }

    fn live_copy(&self, place: &Place, layers: u64) -> Option<Box<dyn Fn() -> io::Result<()>>> {
        live::copy(self, place, layers)
    }

    fn enlarger(&self, place: &Place, sectors: u64) -> Option<Box<dyn Fn() -> io::Result<()>>> {
        let leaf = self.leaf(place);
        let small = self.tight_bytes(place, sectors)?;
        let bytes = small + self.room_bytes(self.kind, sectors);
        let (devices, world, seed) = (self.shape(place).devices, place.world.clone(), place.seed);
        Some(Box::new(move || devices.enlarge(&world, seed, &leaf.path, bytes)))
    }

    /// Copies the footer of a VHD on a device that was enlarged to the new end, if it is not there.
    fn administer(&self, place: &Place) -> io::Result<()> {
        let leaf = self.leaf(place);
        if self.kind != Kind::Vhd || !self.on_devices() || !place.tight || !self.is_made(&leaf) {
            return Ok(());
        }
        let device = File::options().read(true).write(true).open(&leaf.path)?;
        let sector = |at: u64| -> io::Result<[u8; 512]> {
            let mut sector = [0; 512];
            device.read_exact_at(&mut sector, at)?;
            Ok(sector)
        };
        let mut header = [0; 8];
        device.read_exact_at(&mut header, 48)?;
        let small = self.tight_bytes(place, u64::from_be_bytes(header) / 512);
        let (end, cookie) = (device.metadata()?.len() - 512, b"conectix");
        let Some(old) = small.map(|small| small - 512).filter(|old| *old < end) else {
            return Ok(());
        };
        let footer = sector(old)?;
        if sector(end)?.starts_with(cookie) || !footer.starts_with(cookie) {
            return Ok(());
        }
        // No process has written there, so the world has nothing to revert.
        device.write_all_at(&footer, end)
    }

    fn first_table(&self) -> Range<u64> {
        match self.kind {
            // After the copy of the footer and the header.
            Kind::Vhd => 1536..2048,
            _ => 0..16 << 10,
        }
    }

    fn hot_spots(&self, place: &Place, sectors: u64) -> Vec<u64> {
        let unit_bytes = u64::from(self.shape(place).unit_bytes);
        let tables = |cluster: u64| cluster / 512 * cluster / 8;
        let units = match self.kind {
            Kind::Raw | Kind::Store | Kind::Nbd | Kind::Rbd | Kind::Pool => {
                vec![sectors.max(2) / 2]
            }
            Kind::Vhd => vec![unit_bytes / 512, u64::from(USUAL_BLOCK) / 512],
            // The range that an L2 table of one cluster maps.
            Kind::Qcow2 => vec![tables(unit_bytes), tables(u64::from(USUAL_CLUSTER)) / 64],
        };
        let spots = units.iter().flat_map(|unit| (0..=sectors / unit).map(move |i| i * unit));
        spots.chain([8, sectors]).collect()
    }

    fn can(&self, operation: Operation) -> bool {
        match operation {
            Operation::Create(_) | Operation::Clone(_) | Operation::Convert(_) => true,
            Operation::Grow(_) => self.kind != Kind::Raw || !self.on_devices(),
            Operation::Snapshot(_) => self.kind != Kind::Raw,
            _ => self.kind != Kind::Raw && !self.on_devices(),
        }
    }

    fn exists(&self, place: &Place) -> bool {
        self.is_made(&self.leaf(place))
    }

    fn operate(&self, place: &Place, operation: Operation) -> Result<(), String> {
        match operation {
            Operation::Create(sectors) => self.create(place, sectors),
            Operation::Snapshot(number) if self.on_devices() => self.snapshot_device(place, number),
            Operation::Snapshot(number) => {
                let (leaf, layer) = (self.leaf(place), format!("layer-{number}"));
                let done =
                    self.tools(place, |tools| tools.snapshot(&leaf, &self.name(place, &layer)));
                done.map(drop).map_err(|e| e.to_string())
            }
            Operation::Grow(sectors) => self.grow(place, sectors),
            Operation::Coalesce => self.coalesce(place),
            Operation::CoalesceInner(layers) => self.coalesce_inner(place, layers),
            Operation::MergeStretch(layers) => self.merge_stretch(place, layers),
            Operation::Overlay(number) => self.overlay(place, number),
            Operation::Clone(_) => self.clone_leaf(place, operation),
            Operation::Convert(_) => self.convert(place, operation),
        }
    }
}
