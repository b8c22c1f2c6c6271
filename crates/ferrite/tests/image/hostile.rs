//! Hostile images (threats.md T17): every command that reads one reports the damage within two seconds of processor
//! time and 64 MiB, and writes nothing.

use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::process::Command;

use crate::images::{MIB, Place, engine};

/// Changes an image's file.
type Bend = fn(&mut File);

fn put(file: &mut File, at: u64, bytes: &[u8]) {
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(bytes).unwrap();
}

/// Runs with two seconds of processor time and 64 MiB of memory besides the program itself; returns the exit code.
fn limited(place: &Place, args: &[&str]) -> (Option<i32>, String) {
    let program = env!("CARGO_BIN_EXE_ferrite");
    // Data only: an image cannot enlarge code or the kernel's rings.
    let limits = r#"ulimit -t 2; ulimit -d 65536; exec "$0" image --engine "$@""#;
    // The journals of other tests are no part of the image: root gets a folder of journals without them.
    let alone = r#"[ "$(id -u)" = 0 ] && [ -d /run/ferrite ] && unshare --mount true && \
        exec unshare --mount sh -c "mount -t tmpfs none /run/ferrite; $LIMITS" "$0" "$@""#;
    let script = format!("{alone}; {limits}");
    let mut command = Command::new("sh");
    command.args(["-c", &script, program, &engine()]).args(args).current_dir(place.path("."));
    command.env("LIMITS", limits);
    let output = command.env_remove("RUST_LOG").output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn bent_images_are_refused_in_time_and_stay_as_they_are() {
    let bends: [(&str, &str, Bend); 8] = [
        ("no footer", "a.vhd", |f| f.set_len(100).unwrap()),
        ("nothing at all", "a.vhd", |f| f.set_len(0).unwrap()),
        ("an absurd size", "a.vhd", |f| put(f, 48, &[0xff; 8])),
        ("an absurd table", "a.vhd", |f| put(f, 512 + 28, &[0xff; 4])),
        ("absurd blocks", "a.vhd", |f| put(f, 1536, &[0x7f; 64])),
        ("no header", "a.qcow2", |f| f.set_len(60).unwrap()),
        ("an absurd size", "a.qcow2", |f| put(f, 24, &[0x7f; 8])),
        ("absurd tables", "a.qcow2", |f| put(f, 36, &[0x7f; 28])),
    ];
    for (what, name, bend) in bends {
        let place = Place::new();
        place.pattern("a.img", 8 * MIB, &[(0, MIB)]);
        place.ok(&["convert", "a.img", name]);
        let mut file = File::options().write(true).open(place.path(name)).unwrap();
        bend(&mut file);
        if name.ends_with("vhd") && file.metadata().unwrap().len() > MIB {
            // Without its other footer, so that this one counts.
            let end = file.metadata().unwrap().len();
            put(&mut file, end - 512, &[0; 512]);
        }
        let before = fs::read(place.path(name)).unwrap();
        for command in ["info", "map", "du", "check", "repair"] {
            let (code, text) = limited(&place, &[command, name]);
            assert!(matches!(code, Some(0 | 1 | 2 | 5)), "{what}: {command}: {code:?} {text}");
            if matches!(command, "info" | "map" | "du") {
                assert!(matches!(code, Some(1 | 5)), "{what}: {command}: {code:?}");
            }
            assert!(!text.contains("panicked"), "{what}: {text}");
        }
        let code = limited(&place, &["convert", name, "copy.img"]).0;
        assert!(matches!(code, Some(1 | 5)), "{what}: {code:?}");
        assert_eq!(fs::read(place.path(name)).unwrap(), before, "{what}");
        place.has_no_leftovers();
    }
}

#[test]
fn a_chain_that_bites_its_own_tail_is_refused() {
    let place = Place::new();
    for (one, two) in [("one.vhd", "two.vhd"), ("one.qcow2", "two.qcow2")] {
        place.ok(&["create", one, "1M"]);
        place.ok(&["clone", one, two]);
        fs::remove_file(place.path(one)).unwrap();
        fs::hard_link(place.path(two), place.path(one)).unwrap();
        let (code, text) = limited(&place, &["info", two]);
        assert_eq!(code, Some(1), "{text}");
    }
}

#[test]
fn a_chain_of_a_thousand_is_looked_at_and_nothing_is_put_on_it() {
    let place = Place::new();
    place.ok(&["create", "0.qcow2", "1M"]);
    place.ok(&["clone", "0.qcow2", "1.qcow2"]);
    let text = fs::read(place.path("1.qcow2")).unwrap();
    let at = text.windows(7).position(|w| w == b"0.qcow2").expect("the parent's name");
    for i in 2..1000u32 {
        // Names of the same length, so that nothing else changes.
        let (parent, child) = (format!("{:03}.qco", i - 1), format!("{i:03}.qco"));
        let mut bytes = text.clone();
        bytes[at..at + 7].copy_from_slice(parent.as_bytes());
        fs::write(place.path(&child), bytes).unwrap();
    }
    fs::rename(place.path("1.qcow2"), place.path("001.qco")).unwrap();
    let (code, text) = limited(&place, &["info", "qcow2:999.qco"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = limited(&place, &["clone", "qcow2:999.qco", "leaf.qcow2"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("its chain would have 1001 images"), "{text}");
    let (code, text) = limited(&place, &["info", "qcow2:100.qco"]);
    assert_eq!(code, Some(0), "{text}");
}
