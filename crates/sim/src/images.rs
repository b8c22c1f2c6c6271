//! Images in the formats of this project, alone or on top of others.

use ferrite_disk::tools::{NewImage, Workshop};
use ferrite_disk::{Disk, DiskError, Format as Kind, ImageName, OpenOptions, vhd};

use crate::format::{Format, Operation, Place};
use crate::qemu;

/// Clusters of qcow2 images: small ones, so that small disks have several tables.
const CLUSTER_SECTORS: u64 = 8;

/// Blocks of VHD images.
const BLOCK_SECTORS: u64 = 4096;

/// The images of one format.
pub struct Images(pub Kind);

impl Images {
    fn name(&self, place: &Place, name: &str) -> ImageName {
        ImageName { format: self.0, path: place.image(&format!("{name}.{}", self.0)) }
    }

    fn leaf(&self, place: &Place) -> ImageName {
        self.name(place, "disk")
    }

    fn unit_sectors(&self) -> u64 {
        match self.0 {
            Kind::Raw => 0,
            Kind::Vhd => BLOCK_SECTORS,
            Kind::Qcow2 => CLUSTER_SECTORS,
        }
    }
}

impl Format for Images {
    type Disk = Disk;

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn create(&self, place: &Place, sectors: u64) -> Result<(), String> {
        self.operate(place, Operation::Create(sectors))
    }

    fn open(&self, place: &Place) -> Result<Disk, String> {
        let options =
            OpenOptions { state_dir: Some(place.state.clone()), ..OpenOptions::default() };
        Disk::open_image(&self.leaf(place), &options).map_err(|e| e.to_string())
    }

    fn check(&self, place: &Place, thorough: bool) -> Result<(), String> {
        match self.0 {
            Kind::Qcow2 if thorough => qemu::check(place),
            Kind::Vhd => check_vhd(&self.leaf(place)),
            Kind::Raw | Kind::Qcow2 => Ok(()),
        }
    }

    fn hot_spots(&self, sectors: u64) -> Vec<u64> {
        let unit = match self.0 {
            Kind::Raw => sectors.max(2) / 2,
            Kind::Vhd => BLOCK_SECTORS,
            // An L2 table of one cluster maps so many sectors.
            Kind::Qcow2 => CLUSTER_SECTORS * CLUSTER_SECTORS * 512 / 8,
        };
        (0..=sectors / unit).map(|i| i * unit).chain([8, sectors]).collect()
    }

    fn can(&self, operation: Operation) -> bool {
        match operation {
            Operation::Create(_) => true,
            Operation::Grow(_) => true,
            Operation::Snapshot(_) | Operation::Coalesce => self.0 != Kind::Raw,
        }
    }

    fn exists(&self, place: &Place) -> bool {
        self.leaf(place).path.exists()
    }

    fn operate(&self, place: &Place, operation: Operation) -> Result<(), String> {
        let shop = Workshop {
            directory: &place.directory,
            engine: &|arena| Ok(place.world.engine(arena)),
            state_dir: Some(place.state.clone()),
            progress: &|_| true,
        };
        let leaf = self.leaf(place);
        let done: Result<_, DiskError> = match operation {
            Operation::Create(sectors) => {
                let unit_bytes = u32::try_from(self.unit_sectors() * 512).ok().filter(|n| *n > 0);
                let bytes = Some(sectors * 512);
                shop.create(&leaf, &NewImage { bytes, unit_bytes, ..NewImage::default() })
            }
            Operation::Snapshot(number) => {
                shop.snapshot(&leaf, &self.name(place, &format!("layer-{number}")))
            }
            Operation::Grow(sectors) => shop.resize(&leaf, sectors * 512, false),
            // Done again after an interruption that came behind its last step, there is nothing to
            // merge left.
            Operation::Coalesce if shop.info(&leaf).is_ok_and(|info| info.chain.len() == 1) => {
                return Ok(());
            }
            Operation::Coalesce => shop.coalesce(&leaf, false),
        };
        done.map(drop).map_err(|e| e.to_string())
    }
}

fn check_vhd(leaf: &ImageName) -> Result<(), String> {
    let name = ImageName { format: Kind::Raw, path: leaf.path.clone() };
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let medium = Disk::open_image(&name, &options).map_err(|e| e.to_string())?;
    let Disk::Raw(medium) = medium else { return Err("it is no file".into()) };
    let report = vhd::check(&medium).map_err(|e| e.to_string())?;
    match report.findings.iter().find(|finding| !finding.problem.is_harmless()) {
        Some(finding) => Err(finding.to_string()),
        None => Ok(()),
    }
}
