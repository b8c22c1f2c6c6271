//! `ferrite image convert` onto a file system that is full. Needs root, or user namespaces; passes
//! without them, saying so.

mod images;

use std::process::Command;

use images::{MIB, Place, engine};

/// Runs a script in a file system of 8 MiB that is its own, in which `$F` is `ferrite image` and
/// `$SRC` the source; what it said. None: this user cannot mount one.
fn on_a_small_disk(place: &Place, script: &str) -> Option<String> {
    let root = rustix::process::geteuid().is_root();
    let private: &[&str] = if root { &["-m"] } else { &["-r", "-m"] };
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(private).args(["sh", "-ec", script]).current_dir(place.path("."));
        command.env("SRC", place.path("a.img")).env_remove("RUST_LOG");
        command.env("F", format!("{} image --engine {}", env!("CARGO_BIN_EXE_ferrite"), engine()));
        command.output()
    };
    std::fs::create_dir(place.path("small")).unwrap();
    let mount = "mount -t tmpfs -o size=8m tmpfs small; cd small;";
    if !unshare(mount).is_ok_and(|output| output.status.success()) {
        let demanded = std::env::var_os("FERRITE_TEST_REQUIRE_PEERS").is_some();
        assert!(!(demanded && root), "no mounts for root");
        eprintln!("skipped: no mounts for this user");
        return None;
    }
    let output = unshare(&format!("{mount} exec 2>&1; {script}")).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    Some(text)
}

#[test]
fn a_conversion_that_fills_the_disk_goes_on_when_there_is_room() {
    for to in ["b.img", "b.vhd", "b.qcow2"] {
        let place = Place::new();
        place.pattern("a.img", 24 * MIB, &[(0, 24 * MIB)]);
        let script = format!(
            "if $F convert $SRC {to}; then exit 9; fi
             echo full
             mount -o remount,size=64m .
             $F convert --resume $SRC {to}
             $F compare $SRC {to}
             ls -A"
        );
        let Some(text) = on_a_small_disk(&place, &script) else { return };
        let (failed, went_on) = text.split_once("full\n").unwrap();
        assert!(failed.contains("o space left") && failed.contains("--resume"), "{text}");
        assert!(!went_on.contains("partial"), "{text}");
    }
}

/// Nothing is promised where not even a beginning was possible, and nothing is left.
#[test]
fn a_conversion_that_cannot_begin_leaves_nothing() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(0, MIB)]);
    let script = "head -c 9m /dev/zero > filler || true
                  if $F convert $SRC b.img; then exit 9; fi
                  ls -A";
    let Some(text) = on_a_small_disk(&place, script) else { return };
    assert!(!text.contains("--resume") && text.contains("make room"), "{text}");
    assert!(text.ends_with("filler\n") && !text.contains("b.img.partial\n"), "{text}");
}
