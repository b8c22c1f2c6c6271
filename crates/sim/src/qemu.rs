//! Checks qcow2 images with qemu-img.

use std::path::Path;
use std::process::Command;
use std::sync::Once;

use crate::format::Place;

const LEAF: &str = "disk.qcow2";

/// The exit code of `qemu-img check` for leaked clusters and nothing worse.
const LEAKS: i32 = 3;

/// If this is set, a missing peer is an error: of this machine, not of an image.
const REQUIRE: &str = "FERRITE_TEST_REQUIRE_PEERS";

/// Checks the leaf. Leaked clusters are allowed: a power cut may leave them. Without qemu-img nothing is checked, which
/// is reported once.
pub(crate) fn check(place: &Place) -> Result<(), String> {
    check_with("qemu-img", &place.images, std::env::var_os(REQUIRE).is_some())
}

fn check_with(program: &str, dir: &Path, required: bool) -> Result<(), String> {
    static SAID: Once = Once::new();
    let arguments = ["check", "-q", LEAF];
    let output = match Command::new(program).args(arguments).current_dir(dir).output() {
        Ok(output) => output,
        Err(e) if required => return Err(format!("{program} cannot be started: {e}")),
        Err(e) => {
            SAID.call_once(|| println!("skipped: images are not checked by {program}: {e}"));
            return Ok(());
        }
    };
    if output.status.success() || output.status.code() == Some(LEAKS) {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).trim().to_owned();
    Err(format!("{program} {}: {}: {said}", arguments.join(" "), output.status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_fails_no_story_unless_it_is_required() {
        let dir = tempfile::tempdir().unwrap();
        let missing = "/nonexistent/qemu-img";
        assert_eq!(check_with(missing, dir.path(), false), Ok(()));
        let error = check_with(missing, dir.path(), true).unwrap_err();
        assert!(error.contains("cannot be started"), "{error}");
        // A result of an installed program counts.
        let error = check_with("false", dir.path(), false).unwrap_err();
        assert!(error.contains("exit status: 1"), "{error}");
    }
}
