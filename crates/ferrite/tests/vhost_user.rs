//! `ferrite export vhost-user`, as a process: a front end goes on with the next one when it is killed, hears of growth, and
//! finds all that was answered.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use ferrite_testkit::programs::peer;
use ferrite_testkit::vhost::{Ask, Driver, FrontEnd, Guest, kind, message};
use ferrite_testkit::{PATIENCE, images, places, wait_until};
use rustix::process::{Pid, Signal, kill_process};

const BYTES: u64 = 32 << 20;
const ENTRIES: u16 = 64;

/// An export, which is killed when this is dropped.
struct Export(Child);

impl Export {
    fn start(dir: &Path, image: &Path, more: &[&str]) -> Export {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command
            .args(["export", "vhost-user"])
            .arg(image)
            .arg("--socket")
            .arg(dir.join("vhost.sock"));
        command.args(more).env("XDG_RUNTIME_DIR", dir).env("XDG_STATE_HOME", dir);
        Export(command.stderr(Stdio::piped()).spawn().unwrap())
    }

    /// Ends it by a signal; returns what it has logged.
    fn end(&mut self) -> String {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, Signal::TERM).unwrap();
        assert!(self.0.wait().unwrap().success());
        let mut log = String::new();
        std::io::Read::read_to_string(&mut self.0.stderr.take().unwrap(), &mut log).unwrap();
        log
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn connect(dir: &Path, guest: &Arc<Guest>) -> (FrontEnd, u64) {
    let front = FrontEnd::connect(&dir.join("vhost.sock"));
    let features = front.agree(0);
    front.give(guest);
    (front, features)
}

#[test]
fn a_guest_finds_what_was_answered_by_a_killed_export() {
    let dir = places::dir_in_memory();
    let image = images::make(dir.path(), "qcow2", BYTES);
    let guest = Guest::new(Driver::memory_bytes(1, ENTRIES));
    let export = Export::start(dir.path(), &image, &["--serial", "disk-7"]);
    let (front, features) = connect(dir.path(), &guest);
    let mut driver = Driver::new(&guest, 0, ENTRIES, features);
    assert!(front.start(&driver, 0));
    let name = Ask { kind: kind::GET_ID, room: 20, ..Ask::flush() };
    assert_eq!(driver.call(&name).1, b"disk-7\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(driver.call(&Ask::write(100, &[7; 64 << 10])).0, 0);
    export.kill();
    let mut export = Export::start(dir.path(), &image, &[]);
    let (front, _) = connect(dir.path(), &guest);
    assert!(front.start(&driver, driver.used_index()));
    assert_eq!(driver.call(&Ask::read(100, 64 << 10)), (0, vec![7; 64 << 10]));
    // Without a name of its own the disk has the file's.
    let stem = image.file_stem().unwrap().to_str().unwrap();
    assert_eq!(driver.call(&name).1[..=stem.len()], format!("{stem}\0").as_bytes()[..]);
    let log = export.end();
    assert!(!log.contains("panicked"), "{log}");
    images::check(&image);
}

#[test]
fn a_front_end_hears_of_growth_and_its_guest_uses_it() {
    let dir = places::dir_in_memory();
    let image = images::make(dir.path(), "raw", BYTES);
    let guest = Guest::new(Driver::memory_bytes(1, ENTRIES));
    let _export = Export::start(dir.path(), &image, &[]);
    let (front, features) = connect(dir.path(), &guest);
    let (ours, theirs) = UnixStream::pair().unwrap();
    assert!(front.order(message::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]));
    let mut driver = Driver::new(&guest, 0, ENTRIES, features);
    assert!(front.start(&driver, 0));
    assert_ne!(driver.call(&Ask::write(BYTES / 512, &[1; 512])).0, 0);
    File::options().write(true).open(&image).unwrap().set_len(2 * BYTES).unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut told = [0; 12];
    std::io::Read::read_exact(&mut (&ours), &mut told).unwrap();
    assert_eq!(told[..4], 2u32.to_le_bytes());
    let mut body = [0u32, 8, 0].map(u32::to_le_bytes).concat();
    body.extend([0; 8]);
    let config = front.ask(message::GET_CONFIG, &body).body;
    assert_eq!(config[12..], (2 * BYTES / 512).to_le_bytes());
    assert_eq!(driver.call(&Ask::write(BYTES / 512, &[1; 512])).0, 0);
}

#[test]
fn the_socket_goes_with_the_export_and_wrong_names_are_refused() {
    let dir = places::dir_in_memory();
    let image = images::make(dir.path(), "raw", BYTES);
    let socket = dir.path().join("vhost.sock");
    let mut export = Export::start(dir.path(), &image, &["--queues", "1"]);
    wait_until("the socket", || socket.exists());
    export.end();
    assert!(!socket.exists());
    for wrong in
        [["--serial", "a name that is much too long"], ["--queues", "0"], ["--queues", "65536"]]
    {
        let mut refused = Export::start(dir.path(), &image, &wrong);
        assert_eq!(refused.0.wait().unwrap().code(), Some(2), "{wrong:?}");
    }
}

/// The commands of docs/access.md about QEMU, as printed there.
#[test]
fn the_recipe_for_a_machine_of_qemu_works() {
    if peer("qemu-system-x86_64", &["--version"]).is_none() {
        return;
    }
    let page = include_str!("../../../docs/access.md");
    let section = page.split_once("\n## The same image under QEMU\n").expect("the section").1;
    let commands = section.split_once("```sh\n").expect("the commands").1;
    let commands = commands.split("```").next().unwrap_or_default();
    let dir = places::dir_in_memory();
    let script = format!("trap 'kill $(jobs -p) || true' EXIT\n{commands}");
    let program = Path::new(env!("CARGO_BIN_EXE_ferrite"));
    let others = std::env::var("PATH").unwrap();
    let path = format!("{}:{others}", program.parent().unwrap().display());
    let mut sh = Command::new("bash");
    sh.args(["-eux", "-c", &script])
        .current_dir(dir.path())
        .env("PATH", path)
        .env("XDG_STATE_HOME", dir.path());
    let output = sh.env("XDG_RUNTIME_DIR", dir.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(!text.contains("disconnected"), "{text}");
    assert!(!dir.path().join("disk.sock").exists());
}
