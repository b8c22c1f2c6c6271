//! `ferrite image convert --salvage`, and disks that are served read-only in spite of damage.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::thread::JoinHandle;

use ferrite_testkit::nbd::{Client, command};

use crate::images::{self, MIB, Place, json, qemu_img};

const BLOCK: u64 = 2 * MIB;
const EIO: u32 = 5;

/// A full disk in a VHD with a bad entry in its table, and in a qcow2 image with a bad L2 entry. Both have lost what is at
/// 6 MiB: a block, or a cluster.
fn damaged() -> Place {
    let place = Place::new();
    place.pattern("a.img", 12 * MIB, &[(0, 12 * MIB)]);
    place.ok(&["convert", "a.img", "c.vhd"]);
    place.ok(&["convert", "a.img", "c.qcow2"]);
    let open = |name| File::options().read(true).write(true).open(place.path(name)).unwrap();
    // Behind the end of the file, and over no other block: which block a copy writes first is not fixed.
    open("c.vhd").write_all_at(&[0x10, 0, 0, 0], 1536 + 3 * 4).unwrap();
    let file = open("c.qcow2");
    let number = |at| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let table = number(number(40)) & !(1 << 63);
    file.write_all_at(&(1u64 << 40).to_be_bytes(), table + 96 * 8).unwrap();
    place
}

/// What is lost of each: first byte and length.
const LOST: [(&str, u64, u64); 2] = [("c.vhd", 3 * BLOCK, BLOCK), ("c.qcow2", 6 * MIB, 64 << 10)];

#[test]
fn what_can_be_read_of_a_damaged_image_is_copied_and_the_rest_is_listed() {
    let place = damaged();
    for (image, start, len) in LOST {
        let before = fs::read(place.path(image)).unwrap();
        place.fails(5, &["convert", image, "whole.img", "--force"]);
        let output = place.image(&["convert", "--salvage", image, "saved.img", "--json"]);
        let error = json(&String::from_utf8(output.stderr).unwrap());
        assert_eq!((output.status.code(), &error["code"]), (Some(6), &6.into()), "{error}");
        let told = json(&String::from_utf8(output.stdout).unwrap());
        assert_eq!(told["damaged_bytes"], len, "{told}");
        let range = &told["ranges"][0];
        assert_eq!((&range["start_bytes"], &range["length_bytes"]), (&start.into(), &len.into()));
        assert_eq!(
            (told["ranges"].as_array().unwrap().len(), &told["more_ranges"]),
            (1, &0.into())
        );
        let (mut wanted, saved) =
            (fs::read(place.path("a.img")).unwrap(), fs::read(place.path("saved.img")).unwrap());
        wanted[start as usize..(start + len) as usize].fill(0);
        assert!(saved == wanted, "{image}");
        assert!(fs::read(place.path(image)).unwrap() == before, "{image}");
        // As text, and into an image.
        let text = place.image(&["convert", "--salvage", image, "saved.qcow2"]);
        let line = format!("{start:>18} {len:>16}  {image}: ");
        assert!(String::from_utf8(text.stdout).unwrap().contains(&line), "{line}");
        place.ok(&["compare", "saved.img", "saved.qcow2"]);
        // QEMU reads the same of the image, where it is not damaged.
        if image == "c.qcow2"
            && qemu_img(&[
                "convert",
                "--salvage",
                "-q",
                "-f",
                "qcow2",
                "-O",
                "raw",
                &place.path(image),
                &place.path("theirs.img"),
            ])
            .is_some()
        {
            place.ok(&["compare", "saved.img", "theirs.img"]);
        }
        for left in ["partial", "partial.json", "partial.json.new"] {
            let _ = fs::remove_file(place.path(&format!("whole.img.{left}")));
        }
        fs::remove_file(place.path("saved.img")).unwrap();
        fs::remove_file(place.path("saved.qcow2")).unwrap();
        place.has_no_leftovers();
    }
}

#[test]
fn a_salvage_of_an_image_in_order_is_a_copy() {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(MIB, MIB)]);
    place.ok(&["convert", "a.img", "a.vhd"]);
    assert!(!place.ok(&["convert", "--salvage", "a.vhd", "b.img"]).contains("start"));
    place.ok(&["compare", "a.img", "b.img"]);
    for more in [&["--resume"][..], &["-B", "a.img"], &["-n"]] {
        let refused = place.image(&[&["convert", "--salvage", "a.vhd", "c.vhd"], more].concat());
        assert_eq!(refused.status.code(), Some(2), "{more:?}");
    }
}

/// A server that ends with the test, and what it says after its beginning: shown if the test fails.
struct Export(Child, Option<JoinHandle<String>>);

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        let said = self.1.take().and_then(|log| log.join().ok());
        eprintln!("{}", said.unwrap_or_default());
    }
}

fn export(place: &Place, image: &str, more: &[&str]) -> (Export, String) {
    let socket = place.path(&format!("{image}.sock"));
    let mut command = images::listening();
    command.args(["export", "nbd", &place.path(image), "--socket", &socket]).args(more);
    let mut child = command.env_remove("RUST_LOG").stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("listening at") && log.read_line(&mut said).unwrap() > 0 {}
    // So that its pipe is never full.
    let rest = std::thread::spawn(move || {
        let mut rest = String::new();
        let _ = log.read_to_string(&mut rest);
        rest
    });
    (Export(child, Some(rest)), said)
}

#[test]
fn a_damaged_image_is_exported_for_reading_and_only_reads_of_what_is_damaged_fail() {
    let place = damaged();
    let data = fs::read(place.path("a.img")).unwrap();
    for (image, start, len) in LOST {
        let (_server, said) = export(&place, image, &["--read-only"]);
        assert!(said.contains("listening at"), "{said}");
        if image == "c.vhd" {
            let named = format!("the block at byte {start} of the disk");
            assert!(said.contains("WARN") && said.contains(&named), "{said}");
        }
        let stream = UnixStream::connect(place.path(&format!("{image}.sock"))).unwrap();
        let mut client = Client::over(stream);
        client.go(true);
        let mut read = |at: u64| {
            client.send(command::READ, 0, at, 64 << 10, &[]);
            client.reply()
        };
        for at in (0..12 * MIB).step_by(64 << 10) {
            let reply = read(at);
            match (start..start + len).contains(&at) {
                true => assert_eq!(reply.error, EIO, "{image}: {at}"),
                false => {
                    assert_eq!(reply.error, 0, "{image}: {at}");
                    let wanted = &data[at as usize..at as usize + (64 << 10)];
                    assert!(reply.data == wanted, "{image}: {at}");
                }
            }
        }
    }
}

#[test]
fn a_damaged_image_is_not_exported_for_writing_and_what_can_be_done_is_said() {
    let place = damaged();
    let (mut server, said) = export(&place, "c.vhd", &[]);
    assert!(!said.contains("listening at"), "{said}");
    assert_eq!(server.0.wait().unwrap().code(), Some(5), "{said}");
    assert!(said.contains("--read-only") && said.contains("convert --salvage"), "{said}");
}
