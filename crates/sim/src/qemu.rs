//! qcow2 images in the eyes of qemu-img.

use std::path::Path;
use std::process::Command;

use crate::format::Place;

const LEAF: &str = "disk.qcow2";

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
