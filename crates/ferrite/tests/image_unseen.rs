//! A user who may not read the folder of journals is warned, if there may be one of the image.

mod images;

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use ferrite_disk::{Disk, ImageName, OpenOptions, Session};
use ferrite_io::engines::test_engine;
use images::{MIB, Place};
use rustix::process::geteuid;

/// The user `nobody`.
const USER: u32 = 65534;
const SAYS: &str = "may be in a journal";

/// An image that a killed backend has left with a journal.
fn killed(image: &str, state: &Path) {
    let name = ImageName::parse(image).unwrap();
    let options = OpenOptions { state_dir: Some(state.to_owned()), ..OpenOptions::default() };
    let disk = Arc::new(Disk::open_image(&name, &options).unwrap());
    let mut session = Session::new(disk, |arena| test_engine().open(arena, 8)).unwrap();
    session.write(MIB, &[1; 512]).unwrap();
}

/// The output of `ferrite image` for a user who may only read the image.
fn told(place: &Place, args: &[&str]) -> String {
    let output = place.command(args).uid(USER).gid(USER).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{args:?}: {text}");
    text
}

/// A ring releases its files some time after its end.
fn wait_for_release(place: &Place, image: &str) {
    let end = Instant::now() + Duration::from_secs(30);
    while !place.image(&["info", image]).status.success() {
        assert!(Instant::now() < end, "{image} is not released");
    }
}

#[test]
fn a_copy_that_lacks_what_a_killed_backend_has_answered_is_told_of_once() {
    if !geteuid().is_root() {
        eprintln!("skipped: the journals are root's");
        return;
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create("/run/ferrite").unwrap();
    let place = Place::new();
    for name in ["a.vhd", "a.qcow2"] {
        place.ok(&["create", name, "4M"]);
        killed(&place.path(name), Path::new("/run/ferrite/images"));
        wait_for_release(&place, name);
        fs::copy(place.path(name), place.path("copy")).unwrap();
        let format = name.split_once('.').unwrap().1;
        for args in [["info", &format!("{format}:copy")], ["map", &format!("{format}:copy")]] {
            let output = place.image(&args);
            let text = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{args:?}: {text}");
            assert_eq!(text.matches("copy is a copy of").count(), 1, "{args:?}: {text}");
            assert!(text.contains(name), "{args:?}: {text}");
        }
        // The image is complete now.
        place.ok(&["repair", "--force", name]);
        let output = place.image(&["info", &format!("{format}:copy")]);
        assert_eq!(String::from_utf8(output.stderr).unwrap(), "", "{name}");
    }
}

#[test]
fn only_images_of_which_something_may_be_left_are_warned_of() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can run a program as another user");
        return;
    }
    // With the mode that a backend uses.
    fs::DirBuilder::new().recursive(true).mode(0o700).create("/run/ferrite").unwrap();
    let (place, state) = (Place::new(), tempfile::tempdir().unwrap());
    fs::set_permissions(place.path("."), Permissions::from_mode(0o755)).unwrap();
    place.pattern("raw.img", MIB, &[(0, 512)]);
    for name in ["idle.qcow2", "left.qcow2", "recent.vhd", "ancient.vhd"] {
        place.ok(&["create", name, "4M"]);
        fs::set_permissions(place.path(name), Permissions::from_mode(0o644)).unwrap();
    }
    killed(&place.path("left.qcow2"), state.path());
    wait_for_release(&place, "left.qcow2");
    let ancient = File::options().write(true).open(place.path("ancient.vhd")).unwrap();
    ancient.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();
    for name in ["raw.img", "idle.qcow2", "ancient.vhd"] {
        assert_eq!(told(&place, &["info", name]), "", "{name}");
    }
    for name in ["left.qcow2", "recent.vhd"] {
        let text = told(&place, &["info", name]);
        assert!(text.contains(SAYS) && text.contains(name) && text.contains("root"), "{text}");
        // A command that reads images in use never has these data, and was warned of that.
        assert!(!told(&place, &["info", "-U", name]).contains(SAYS));
    }
    assert!(!place.ok(&["info", "recent.vhd"]).is_empty());
}
