//! Volumes of a store with usual programs: by NBD across a kill of the server, and copied in and out.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ferrite_testkit::bytes;
use ferrite_testkit::places;
use ferrite_testkit::programs::peer;
use rustix::process::{Pid, Signal, kill_process};

const BUSY: i32 = 4;

fn ferrite(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(args).current_dir(dir).env_remove("RUST_LOG");
    command
}

#[track_caller]
fn works(dir: &Path, args: &[&str]) -> Output {
    let output = ferrite(dir, args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    output
}

/// A server, which is killed when this is dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An export of a volume that listens.
fn export(dir: &Path, volume: &str) -> Server {
    let args = ["export", "nbd", volume, "--socket", "nbd.sock", "--index-memory", "1M"];
    let mut child = ferrite(dir, &args).stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    while !said.contains("listening at") {
        assert!(log.read_line(&mut said).unwrap() > 0, "it does not start: {said}");
    }
    std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
    Server(child)
}

fn end(mut server: Server, signal: Signal) {
    kill_process(Pid::from_child(&server.0), signal).unwrap();
    let ended = server.0.wait().unwrap();
    assert_eq!(ended.success(), signal == Signal::TERM, "{ended:?}");
}

#[track_caller]
fn qemu_io(dir: &Path, commands: &[&str]) {
    let uri = "nbd+unix:///?socket=nbd.sock";
    let mut qemu = Command::new("qemu-io");
    qemu.current_dir(dir).args(["-f", "raw", "-t", "writeback", uri]);
    for command in commands {
        qemu.args(["-c", command]);
    }
    let output = qemu.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = said.contains("failed") || said.contains("rror");
    assert!(output.status.success() && !failed, "{commands:?}: {output:?}");
}

#[test]
fn what_nbd_clients_were_told_is_there_after_a_death_of_the_server() {
    if peer("qemu-io", &["--version"]).is_none() {
        return;
    }
    let dir = places::dir_in_memory();
    let dir = dir.path();
    works(dir, &["store", "create", "s", "--size", "64M"]);
    for volume in ["s#a", "s#b"] {
        works(dir, &["store", "create", volume, "32M"]);
    }
    let mut server = export(dir, "store:s#a");
    // Another reader of a volume that a disk writes to gets that it is in use.
    let refused = ferrite(dir, &["image", "info", "store:s#a"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(BUSY), "{refused:?}");
    for round in 1..6u32 {
        let at = round * 3;
        // With any alignment, and the same content twice.
        let writes = [
            format!("write -P {round} {at}M 1M"),
            format!("write -P {round} {}K 1M", at * 1024 + 1536),
            format!("write -P {} {}K 512", round + 100, at * 1024 + 4),
            format!("discard {}K 64K", at * 1024 + 128),
        ];
        qemu_io(dir, &writes.each_ref().map(String::as_str));
        end(server, Signal::KILL);
        server = export(dir, "store:s#a");
        let reads = [
            format!("read -P {round} {at}M 4K"),
            format!("read -P {} {}K 512", round + 100, at * 1024 + 4),
            format!("read -P 0 {}K 64K", at * 1024 + 128),
            format!("read -P {round} {}K 832K", at * 1024 + 192),
            format!("read -P {round} {}K 1M", at * 1024 + 1536),
            format!("read -P 0 {}K 512K", at * 1024 + 1024),
        ];
        qemu_io(dir, &reads.each_ref().map(String::as_str));
    }
    end(server, Signal::TERM);
    works(dir, &["store", "check", "s", "--deep"]);
    // The other volume has none of it.
    let server = export(dir, "store:s#b");
    qemu_io(dir, &["read -P 0 0 32M"]);
    end(server, Signal::TERM);
}

#[test]
fn a_volume_that_is_copied_in_and_out_is_what_qemu_reads() {
    if peer("qemu-img", &["--version"]).is_none() {
        return;
    }
    let dir = places::dir_in_memory();
    let dir = dir.path();
    let image = bytes::words(0..4300, 350);
    std::fs::write(dir.join("a.img"), &image[..11 << 20]).unwrap();
    works(dir, &["store", "create", "s", "--size", "64M"]);
    works(dir, &["image", "convert", "a.img", "store:s#web"]);
    works(dir, &["image", "compare", "a.img", "store:s#web"]);
    works(dir, &["image", "convert", "store:s#web", "b.qcow2"]);
    let compare = ["compare", "-f", "raw", "-F", "qcow2", "a.img", "b.qcow2"];
    let output = Command::new("qemu-img").args(compare).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let info = works(dir, &["image", "info", "store:s#web"]);
    assert!(String::from_utf8_lossy(&info.stdout).contains("store"), "{info:?}");
    // Commands on files refuse a volume.
    let refused = ferrite(dir, &["image", "coalesce", "store:s#web"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    works(dir, &["store", "check", "s", "--deep"]);
}

/// A store, and an image of 8 MiB without two equal blocks.
fn store_and_image(dir: &Path, image: &str) {
    std::fs::write(dir.join(image), bytes::words(1..=2048, 512)).unwrap();
    works(dir, &["store", "create", "s", "--size", "64M"]);
}

#[test]
fn what_a_scrub_has_found_damaged_is_written_back_from_a_backup() {
    let dir = places::dir_in_memory();
    let dir = dir.path();
    store_and_image(dir, "backup.raw");
    works(dir, &["image", "convert", "raw:backup.raw", "store:s#a"]);
    let store = std::fs::read(dir.join("s")).unwrap();
    let content = u64::to_le_bytes(1000).repeat(512);
    let at = store.chunks(4096).position(|block| block == content).unwrap() as u64 * 4096;
    let file = std::fs::File::options().write(true).open(dir.join("s")).unwrap();
    file.write_all_at(&[0x5a], at + 9).unwrap();
    let copied = ferrite(dir, &["image", "convert", "store:s#a", "copy.raw"]).output().unwrap();
    let text = String::from_utf8_lossy(&copied.stderr);
    assert_eq!(copied.status.code(), Some(5), "{text}");
    // A repair changes the store, and so does reading it.
    assert!(text.contains("--force") && !text.contains("--resume"), "{text}");
    let resumed = ferrite(dir, &["image", "convert", "--resume", "store:s#a", "copy.raw"]).output();
    let text = String::from_utf8_lossy(&resumed.as_ref().unwrap().stderr).into_owned();
    assert!(text.contains("in a store or on a server, which do not tell"), "{text}");
    let scrub = ferrite(dir, &["store", "scrub", "s"]).output().unwrap();
    let text = String::from_utf8_lossy(&scrub.stdout);
    assert_eq!(scrub.status.code(), Some(2), "{scrub:?}");
    assert!(text.contains("a at byte 4091904, 4096 bytes"), "{text}");
    works(dir, &["image", "convert", "raw:backup.raw", "store:s#b"]);
    works(dir, &["image", "compare", "raw:backup.raw", "store:s#b"]);
    works(dir, &["store", "delete", "s#a"]);
    works(dir, &["store", "gc", "s"]);
    works(dir, &["store", "check", "--deep", "s"]);
}

#[test]
fn a_name_that_has_no_room_for_what_is_behind_it_meanwhile_is_refused() {
    let dir = places::dir_in_memory();
    let dir = dir.path();
    std::fs::write(dir.join("a.img"), [1; 4096]).unwrap();
    works(dir, &["store", "create", "s", "--size", "64M"]);
    let to = |len| format!("store:s#{}", "n".repeat(len));
    let refused = ferrite(dir, &["image", "convert", "a.img", &to(56)]).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && text.contains("1 to 55 letters"), "{refused:?}");
    works(dir, &["image", "convert", "a.img", &to(55)]);
}

/// Each command opens the store again, and finds the content that earlier ones have written.
#[test]
fn an_image_that_is_copied_in_twice_is_there_once() {
    let dir = places::dir_in_memory();
    let dir = dir.path();
    store_and_image(dir, "disk.raw");
    for volume in ["store:s#a", "store:s#b"] {
        works(dir, &["image", "convert", "raw:disk.raw", volume]);
    }
    let stats = works(dir, &["store", "stats", "s", "--json"]).stdout;
    let stats: serde_json::Value = serde_json::from_slice(&stats).unwrap();
    assert_eq!(stats["mapped_bytes"], 16 << 20);
    assert_eq!(stats["stored_bytes"], 8 << 20, "{stats}");
    assert_eq!(stats["garbage_bytes"], 0, "{stats}");
}
