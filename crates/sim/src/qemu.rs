//! qcow2 images by qemu-img.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use crate::format::{Operation, Place};

/// Where an image's parent is, seen from its own directory: so a chain can be moved as it grows.
const BELOW: &str = "below";

const LEAF: &str = "disk.qcow2";

/// New images by size, alone or with a parent: making one takes longer than a story.
static NEW: Mutex<BTreeMap<(u64, bool), Vec<u8>>> = Mutex::new(BTreeMap::new());

/// Makes an image, or a snapshot, durably and at once.
pub(crate) fn operate(
    place: &Place,
    operation: Operation,
    sectors: u64,
    cluster_sectors: u64,
) -> Result<(), String> {
    let parent = matches!(operation, Operation::Snapshot(_));
    let below = place.image(BELOW);
    let move_down = || -> std::io::Result<()> {
        let new = place.image("new");
        fs::create_dir(&new)?;
        if below.exists() {
            fs::rename(&below, new.join(BELOW))?;
        }
        fs::rename(place.image(LEAF), new.join(LEAF))?;
        fs::rename(&new, &below)
    };
    if parent {
        move_down().map_err(|e| e.to_string())?;
    }
    fs::write(place.image(LEAF), new(sectors, cluster_sectors, parent)?).map_err(|e| e.to_string())
}

fn new(sectors: u64, cluster_sectors: u64, parent: bool) -> Result<Vec<u8>, String> {
    let mut images = NEW.lock().map_err(|e| e.to_string())?;
    if let Some(made) = images.get(&(sectors, parent)) {
        return Ok(made.clone());
    }
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let bytes = (sectors * 512).to_string();
    let cluster = format!("cluster_size={}", cluster_sectors * 512);
    let base = format!("{BELOW}/{LEAF}");
    let mut create = vec!["create", "-q", "-f", "qcow2", "-o", &cluster];
    if parent {
        create.extend(["-b", &base, "-F", "qcow2", "-u"]);
    }
    create.extend([LEAF, &bytes]);
    run(dir.path(), &create)?;
    let made = fs::read(dir.path().join(LEAF)).map_err(|e| e.to_string())?;
    images.insert((sectors, parent), made.clone());
    Ok(made)
}

/// Checks the leaf. What nothing refers to is allowed: a power cut may leave it.
pub(crate) fn check(place: &Place) -> Result<(), String> {
    let found = run(&place.images, &["check", "-q", LEAF]);
    found.or_else(|e| if e.contains("exit status: 3") { Ok(()) } else { Err(e) })
}

fn run(dir: &Path, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("qemu-img").args(arguments).current_dir(dir).output();
    let output = output.map_err(|e| format!("qemu-img cannot be started: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).trim().to_owned();
    Err(format!("qemu-img {}: {}: {said}", arguments.join(" "), output.status))
}
