//! `ferrite image` on a full file system. Needs root, or user namespaces; otherwise it passes and reports that.

use std::process::Command;

use crate::images::{MIB, Place, engine};

/// Runs a script in a file system of 8 MiB of its own, in which `$F` is `ferrite image` and `$SRC` the source; returns
/// the output. `None`: this user cannot mount one.
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
             test $(stat -f -c %a .) -ge 128
             grep done_bytes {to}.partial.json
             mount -o remount,size=64m .
             $F convert --resume $SRC {to}
             $F compare $SRC {to}
             ls -A"
        );
        let Some(text) = on_a_small_disk(&place, &script) else { return };
        let (failed, went_on) = text.split_once("full\n").unwrap();
        assert!(failed.contains("o space left") && failed.contains("--resume"), "{text}");
        assert!(failed.contains("MiB of data are not copied yet: make room for them"), "{text}");
        assert!(!went_on.contains("partial"), "{text}");
        // Images have metadata of their own to write before any data count as done.
        let from_the_start = went_on.starts_with("  \"done_bytes\": 0\n");
        assert!(to != "b.img" || !from_the_start, "{text}");
    }
}

/// The room of a file system is that of others, too: nothing is begun that cannot end, and the text has the sizes.
#[test]
fn a_merge_without_room_is_refused_before_it_begins() {
    for format in ["vhd", "qcow2"] {
        let place = Place::new();
        place.pattern("a.img", 24 * MIB, &[(MIB, 3 * MIB)]);
        let script = format!(
            "mount -o remount,size=24m .
             $F convert $SRC a.{format}; $F create b.{format} 24M; $F clone a.{format} c.{format}
             $F rebase c.{format} -b b.{format}; rm a.{format}
             head -c $(( ($(stat -f -c %a .) - 512) * 4096 )) /dev/zero > filler
             stat -f -c %a . > ../before
             echo full
             if $F coalesce c.{format}; then exit 9; fi
             stat -f -c %a . | cmp - ../before
             $F compare $SRC c.{format}
             rm filler
             $F coalesce c.{format}
             $F compare $SRC c.{format}"
        );
        let Some(text) = on_a_small_disk(&place, &script) else { return };
        let (_, text) = text.split_once("full\n").unwrap();
        assert!(text.contains("it takes 3 MiB or more on the file system of"), "{text}");
        assert!(text.contains("has 2 MiB free; 1 MiB of these are left to others"), "{text}");
    }
}

/// Data that the parent has a place for take no room: a merge must work on a full file system, as it frees space.
#[test]
fn a_merge_that_takes_no_room_works_on_a_full_file_system() {
    for format in ["vhd", "qcow2"] {
        let place = Place::new();
        place.pattern("a.img", 24 * MIB, &[(0, 2 * MIB)]);
        let script = format!(
            "mount -o remount,size=24m .
         $F convert $SRC a.{format}; $F create e.{format} 24M
         $F clone a.{format} c.{format}
         $F rebase c.{format} -b e.{format}; $F rebase -u c.{format} -b a.{format}
         rm e.{format}
         head -c $(( ($(stat -f -c %a .) - 48) * 4096 )) /dev/zero > filler
         echo full
         $F coalesce c.{format}
         $F compare $SRC c.{format}"
        );
        let Some(text) = on_a_small_disk(&place, &script) else { return };
        assert!(text.contains("they read the same"), "{text}");
    }
}

#[test]
fn space_that_is_taken_at_once_is_there_or_nothing_is_taken() {
    let place = Place::new();
    place.pattern("a.img", 24 * MIB, &[(0, MIB)]);
    let script = "$F create --fixed small.vhd 2M
                  for a in 'create --fixed x.vhd 24M' 'create --fixed x.img 24M' \
                           'convert --fixed '$SRC' x.vhd' 'resize small.vhd 24M'; do
                      echo \"== $a\"
                      if $F $a; then exit 9; fi
                  done
                  $F check small.vhd
                  ls -A";
    let Some(text) = on_a_small_disk(&place, script) else { return };
    assert_eq!(text.matches("or more on the file system of").count(), 4, "{text}");
    assert!(text.ends_with("small.vhd: in order\nsmall.vhd\n"), "{text}");
}

/// If a conversion cannot begin, it offers no resume, and leaves nothing.
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

/// Without the image that it was protected for, it can be used again.
#[test]
fn a_parent_is_as_it_was_when_the_disk_is_too_full_for_its_child() {
    for format in ["vhd", "qcow2"] {
        let place = Place::new();
        let script = format!(
            "$F create ../base.{format} 64M; $F create ../other.{format} 64M
             chmod 660 ../base.{format}
             $F create --parent ../other.{format} leaf.{format}; chmod u+w ../other.{format}
             $F --parents .. rebase leaf.{format} -b ../base.{format}
             chmod 660 ../base.{format}; rm leaf.{format}; $F clone ../other.{format} leaf.{format}
             head -c 9m /dev/zero > filler || true
             echo full
             ! $F clone ../base.{format} x.{format}
             ! $F --parents .. rebase leaf.{format} -b ../base.{format}
             stat -c 'mode %a' ../base.{format}
             cat ../base.{format}.ferrite-children || echo no list
             $F resize ../base.{format} 128M
             $F clone ../base.{format} ../good.{format}
             chmod 640 ../base.{format}
             ! $F clone ../base.{format} x.{format}
             stat -c 'mode %a' ../base.{format}"
        );
        let Some(text) = on_a_small_disk(&place, &script) else { return };
        let (_, text) = text.split_once("full\n").unwrap();
        let modes: Vec<&str> = text.lines().filter(|line| line.starts_with("mode")).collect();
        assert_eq!(modes, ["mode 660", "mode 440"], "{text}");
        assert!(text.contains("no list"), "{text}");
    }
}

#[test]
fn a_snapshot_that_there_is_no_space_for_leaves_one_name() {
    for format in ["vhd", "qcow2"] {
        let place = Place::new();
        let script = format!(
            "$F create disk.{format} 64M
             head -c 9m /dev/zero > filler || true
             ! $F snapshot disk.{format} old.{format}
             echo after; ls; echo end
             rm filler
             $F check disk.{format}
             $F snapshot disk.{format} old.{format}"
        );
        let Some(text) = on_a_small_disk(&place, &script) else { return };
        assert!(text.contains(&format!("after\ndisk.{format}\nfiller\nend\n")), "{text}");
    }
}

/// As for a user other than root.
#[test]
fn journals_that_cannot_be_read_are_not_none() {
    let place = Place::new();
    let script = "mount -t tmpfs tmpfs /run
                  $F journal list
                  rm -r /run/ferrite/images; touch /run/ferrite/images
                  $F journal list || echo failed with $?";
    let Some(text) = on_a_small_disk(&place, script) else { return };
    assert!(text.starts_with("no journals"), "{text}");
    assert!(
        text.ends_with("failed with 1\n") && text.matches("no journals").count() == 1,
        "{text}"
    );
}
