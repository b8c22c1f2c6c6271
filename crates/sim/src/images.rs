//! Images with metadata: VHD and qcow2, alone or on top of others.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use ferrite_disk::{Disk, ImageName, OpenOptions};

use crate::format::{Format, Place};

/// Clusters of qcow2 images: small ones, so that small disks have several tables.
const CLUSTER_SECTORS: u64 = 8;

/// Blocks of VHD images.
const BLOCK_SECTORS: u64 = 4096;

/// Where an image's parent is, seen from its own directory: so a chain can be moved as it grows.
const BELOW: &str = "below";

/// New images by format and size: making one takes longer than a story.
static TEMPLATES: Mutex<BTreeMap<(&'static str, u64, bool), Vec<u8>>> = Mutex::new(BTreeMap::new());

/// The images of one format.
pub struct Images(pub ferrite_disk::Format);

impl Images {
    fn leaf(&self) -> String {
        format!("disk.{}", self.0)
    }

    /// An empty image of `sectors`; with a parent, that one's name is in it.
    fn template(&self, sectors: u64, parent: bool) -> Result<Vec<u8>, String> {
        let mut templates = TEMPLATES.lock().map_err(|e| e.to_string())?;
        let key = (self.0.name(), sectors, parent);
        if let Some(made) = templates.get(&key) {
            return Ok(made.clone());
        }
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let bytes = (sectors * 512).to_string();
        let cluster = format!("cluster_size={}", CLUSTER_SECTORS * 512);
        let options = match self.0 {
            ferrite_disk::Format::Vhd => ["-f", "vpc", "-o", "subformat=dynamic,force_size=on"],
            _ => ["-f", "qcow2", "-o", &cluster],
        };
        let mut create = vec!["create", "-q"];
        create.extend(options);
        let leaf = self.leaf();
        let base = format!("{BELOW}/{leaf}");
        if parent {
            create.extend(["-b", &base, "-F", "qcow2", "-u"]);
        }
        run(dir.path(), "qemu-img", &[&create[..], &[&leaf, &bytes]].concat())?;
        let made = fs::read(dir.path().join(leaf)).map_err(|e| e.to_string())?;
        templates.insert(key, made.clone());
        Ok(made)
    }
}

impl Format for Images {
    type Disk = Disk;

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn create(&self, place: &Place, sectors: u64) -> Result<(), String> {
        fs::write(place.image(&self.leaf()), self.template(sectors, false)?)
            .map_err(|e| e.to_string())
    }

    fn open(&self, place: &Place) -> Result<Disk, String> {
        let options =
            OpenOptions { state_dir: Some(place.state.clone()), ..OpenOptions::default() };
        let name = ImageName { format: self.0, path: place.image(&self.leaf()) };
        Disk::open_image(&name, &options).map_err(|e| e.to_string())
    }

    fn check(&self, place: &Place, thorough: bool) -> Result<(), String> {
        if thorough && self.0 == ferrite_disk::Format::Qcow2 {
            // 3: space that nothing refers to, which a power cut may leave.
            let found = run(&place.images, "qemu-img", &["check", "-q", &self.leaf()]);
            return found.or_else(|e| if e.contains("exit status: 3") { Ok(()) } else { Err(e) });
        }
        Ok(())
    }

    fn hot_spots(&self, sectors: u64) -> Vec<u64> {
        let unit = match self.0 {
            ferrite_disk::Format::Vhd => BLOCK_SECTORS,
            // An L2 table of one cluster maps so many sectors.
            _ => CLUSTER_SECTORS * CLUSTER_SECTORS * 512 / 8,
        };
        (0..=sectors / unit).map(|i| i * unit).chain([8, sectors]).collect()
    }

    fn has_snapshots(&self) -> bool {
        self.0 == ferrite_disk::Format::Qcow2
    }

    fn snapshot(&self, place: &Place, sectors: u64) -> Result<(), String> {
        let (leaf, below) = (self.leaf(), place.image(BELOW));
        let work = || -> std::io::Result<()> {
            let new = place.image("new");
            fs::create_dir(&new)?;
            if below.exists() {
                fs::rename(&below, new.join(BELOW))?;
            }
            fs::rename(place.image(&leaf), new.join(&leaf))?;
            fs::rename(&new, &below)
        };
        work().map_err(|e| e.to_string())?;
        fs::write(place.image(&leaf), self.template(sectors, true)?).map_err(|e| e.to_string())
    }
}

/// Runs a program of other people's.
fn run(dir: &Path, program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).current_dir(dir).output();
    let output = output.map_err(|e| format!("{program} cannot be started: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).trim().to_owned();
    Err(format!("{program} {}: {}: {said}", arguments.join(" "), output.status))
}
