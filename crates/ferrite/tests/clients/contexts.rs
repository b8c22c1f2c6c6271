//! Dirty maps as contexts of NBD, for the programs of others: libnbd's, QEMU's, and the recipe of docs/access.md.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use ferrite_testkit::places;
use ferrite_testkit::programs::{installed, peer};
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::pages;

const PAGE: &str = include_str!("../../../../docs/access.md");
const KIB: u64 = 1 << 10;

/// A program's output, which has to succeed.
#[track_caller]
fn ok(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).env_remove("RUST_LOG").output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn ferrite(args: &[&str]) -> String {
    ok(env!("CARGO_BIN_EXE_ferrite"), args)
}

/// A server, which is ended in good order.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        Place(places::dir_in_memory())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path("nbd.sock"))
    }

    /// Exports an image by our server.
    fn export(&self, image: &str, more: &[&str]) -> Server {
        let socket = self.path("nbd.sock");
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["export", "nbd", image, "--socket", &socket]).args(more);
        let mut child = command.env_remove("RUST_LOG").stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("listening at") {
            assert!(log.read_line(&mut said).unwrap() > 0, "it does not start: {said}");
        }
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Server(child)
    }

    /// The changed parts of the export by a context, as nbdinfo tells them, in KiB.
    fn changed(&self, context: &str) -> Vec<(u64, u64)> {
        let text = ok("nbdinfo", &["--json", &format!("--map={context}"), &self.uri()]);
        let extents: Value = serde_json::from_str(&text).unwrap();
        let number = |extent: &Value, name: &str| extent[name].as_u64().unwrap();
        let dirty = |extent: &&Value| number(extent, "type") & 1 != 0;
        let part =
            |extent: &Value| (number(extent, "offset") / KIB, number(extent, "length") / KIB);
        joined(extents.as_array().unwrap().iter().filter(dirty).map(part))
    }

    /// The same as qemu-img tells it: what is dirty has no data for it.
    fn changed_for_qemu(&self, context: &str) -> Vec<(u64, u64)> {
        let socket = self.path("nbd.sock");
        let image =
            format!("driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap={context}");
        let text = ok("qemu-img", &["map", "--output=json", "--image-opts", &image]);
        let extents: Value = serde_json::from_str(&text).unwrap();
        let number = |extent: &Value, name: &str| extent[name].as_u64().unwrap();
        let dirty = |extent: &&Value| extent["data"] == false;
        let part = |extent: &Value| (number(extent, "start") / KIB, number(extent, "length") / KIB);
        joined(extents.as_array().unwrap().iter().filter(dirty).map(part))
    }
}

/// Parts of which none touches the next.
fn joined(parts: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut all = Vec::<(u64, u64)>::new();
    for (start, len) in parts {
        match all.last_mut() {
            Some(last) if last.0 + last.1 == start => last.1 += len,
            _ => all.push((start, len)),
        }
    }
    all
}

fn are_installed(programs: &[&str]) -> bool {
    programs.iter().all(|program| peer(program, &["--version"]).is_some())
}

/// Writes by qemu-io: offsets and lengths in KiB.
fn write(place: &Place, parts: &[(u64, u64)]) {
    let words = |(at, len): &(u64, u64)| ["-c".to_owned(), format!("write -P 7 {at}k {len}k")];
    let commands: Vec<String> = parts.iter().flat_map(words).collect();
    let mut args = vec!["-f", "raw", "-t", "none"];
    args.extend(commands.iter().map(String::as_str));
    ok("qemu-io", &[&args[..], &[&place.uri()]].concat());
}

#[test]
fn the_programs_of_others_read_the_same_of_our_map_as_of_qemus_bitmap() {
    if !are_installed(&["nbdinfo", "qemu-img", "qemu-io", "qemu-nbd"]) {
        return;
    }
    let writes = [(0, 4), (60, 8), (5 * 1024 - 4, 8), (9 * 1024, 3 * 1024), (63 * 1024, 1024)];
    let context = "qemu:dirty-bitmap:m";
    let theirs = Place::new();
    let image = theirs.path("disk.qcow2");
    ok("qemu-img", &["create", "-q", "-f", "qcow2", &image, "64M"]);
    ok("qemu-img", &["bitmap", "--add", "-g", "65536", &image, "m"]);
    let serve = |more: &[&str]| {
        let socket = theirs.path("nbd.sock");
        let _ = std::fs::remove_file(&socket);
        let args = ["--persistent", "--shared", "8", "-f", "qcow2", "--socket", &socket];
        let child = Command::new("qemu-nbd").args(args).args(more).arg(&image).spawn().unwrap();
        wait_until("qemu-nbd", || Path::new(&socket).exists());
        Server(child)
    };
    let server = serve(&[]);
    write(&theirs, &writes);
    drop(server);
    let _server = serve(&["--read-only", "--bitmap", "m"]);
    let expected = theirs.changed(context);
    assert_eq!(theirs.changed_for_qemu(context), expected);
    assert_eq!(expected.len(), 4, "{expected:?}");
    for format in ["qcow2", "vhd", "raw"] {
        let ours = Place::new();
        let image = ours.path(&format!("disk.{format}"));
        ferrite(&["image", "create", &image, "64M"]);
        ferrite(&["image", "dirty", "add", &image, "m"]);
        let server = ours.export(&image, &[]);
        write(&ours, &writes);
        let check = |when: &str| {
            assert_eq!(ours.changed(context), expected, "{format} {when}");
            assert_eq!(ours.changed("ferrite:dirty-m"), expected, "{format} {when}");
            assert_eq!(ours.changed_for_qemu(context), expected, "{format} {when}");
        };
        check("while it is written");
        drop(server);
        let _server = ours.export(&image, &["--read-only"]);
        check("at rest");
        let told = ok("nbdinfo", &["--json", &ours.uri()]);
        assert!(told.contains("\"ferrite:dirty-m\"") && told.contains(&format!("{context:?}")));
    }
}

#[test]
fn a_snapshot_is_exported_with_its_maps_as_they_were() {
    if !are_installed(&["nbdinfo", "qemu-io"]) {
        return;
    }
    let place = Place::new();
    let (image, snapshot) = (place.path("disk.qcow2"), place.path("then.qcow2"));
    ferrite(&["image", "create", &image, "64M"]);
    ferrite(&["image", "dirty", "add", &image, "a"]);
    let server = place.export(&image, &[]);
    write(&place, &[(1024, 4)]);
    drop(server);
    ferrite(&["image", "snapshot", &image, &snapshot, "--begin-map", "b"]);
    // The disk goes on beside its snapshot, and has both maps.
    let server = place.export(&image, &[]);
    write(&place, &[(8 * 1024, 4)]);
    assert_eq!(place.changed("ferrite:dirty-a"), [(1024, 64), (8 * 1024, 64)]);
    assert_eq!(place.changed("ferrite:dirty-b"), [(8 * 1024, 64)]);
    drop(server);
    let server = place.export(&snapshot, &["--read-only"]);
    assert_eq!(place.changed("qemu:dirty-bitmap:a"), [(1024, 64)]);
    let none = Command::new("nbdinfo").args(["--map=ferrite:dirty-b", &place.uri()]).output();
    assert!(!none.unwrap().status.success());
    drop(server);
    // A disk that has grown has changed there.
    ferrite(&["image", "resize", &image, "96M"]);
    let _server = place.export(&image, &["--read-only"]);
    let end = (64 * 1024, 32 * 1024);
    assert_eq!(place.changed("ferrite:dirty-b"), [(8 * 1024, 64), end]);
}

#[test]
fn void_maps_are_named_in_the_log_and_not_offered() {
    let place = Place::new();
    let image = place.path("disk.raw");
    ferrite(&["image", "create", &image, "64M"]);
    ferrite(&["image", "dirty", "add", &image, "m"]);
    std::fs::write(&image, vec![1; 64 << 20]).unwrap();
    let socket = place.path("nbd.sock");
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(["export", "nbd", &image, "--read-only", "--socket", &socket]);
    let log = std::fs::File::create(place.path("log")).unwrap();
    let server = Server(command.env_remove("RUST_LOG").stderr(log).spawn().unwrap());
    wait_until("the server", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    for _ in 0..3 {
        let mut client = ferrite_testkit::nbd::Client::over(
            std::os::unix::net::UnixStream::connect(&socket).unwrap(),
        );
        let list = ferrite_testkit::nbd::contexts("", &["ferrite:"]);
        let answers = client.option(ferrite_testkit::nbd::option::LIST_META_CONTEXT, &list);
        assert_eq!(answers.len(), 1, "{answers:?}");
    }
    drop(server);
    let log = std::fs::read_to_string(place.path("log")).unwrap();
    let why = "another program has changed the image";
    assert!(log.matches("are void").count() == 1 && log.contains(why), "{log}");
}

#[test]
fn the_recipe_for_a_client_that_knows_only_libnbd_works() {
    let title = "Back up by NBD with a client that knows only libnbd";
    let python = Command::new("/usr/bin/python3").args(["-c", "import nbd; nbd.NBD()"]).output();
    if installed("python3-libnbd", python).is_none() {
        return;
    }
    let (_, section) = PAGE.split_once(&format!("\n## {title}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap();
    // The system's Python has the module of nbdsh.
    let script = pages::commands(section).replace("nbdsh -c", "/usr/bin/nbdsh -c");
    assert!(script.contains("--begin-map") && script.contains("block_status"));
    pages::run(&format!("PATH=$(echo $PATH | cut -d: -f1):/usr/bin:/bin\n{script}"));
}
