//! `ferrite export nbd` with usual clients, and its ends.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ferrite_testkit::programs::{installed, peer};
use ferrite_testkit::{bytes, places};
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

const MIB: usize = 1 << 20;

fn ferrite(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(args).env_remove("RUST_LOG");
    command
}

/// A server, and the folder of its image and socket.
struct Export {
    dir: TempDir,
    image: PathBuf,
    child: Option<Child>,
}

impl Export {
    /// With a new image.
    fn new(name: &str) -> Export {
        let dir = places::dir_in_memory();
        let image = dir.path().join(name);
        let made = ferrite(&["image", "create", image.to_str().unwrap(), "64M"]).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        let mut export = Export { dir, image, child: None };
        export.start(&[]);
        export
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    fn command(&self, more: &[&str]) -> Command {
        let (image, socket) = (self.image.to_str().unwrap(), self.socket());
        let mut command = ferrite(&["export", "nbd", image, "--socket", socket.to_str().unwrap()]);
        command.args(more).stderr(Stdio::piped());
        command
    }

    /// Starts it, and waits until it listens.
    fn start(&mut self, more: &[&str]) {
        self.run(self.command(more));
    }

    fn run(&mut self, mut command: Command) {
        let mut child = command.spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("listening at") {
            assert!(log.read_line(&mut said).unwrap() > 0, "it does not start: {said}");
        }
        // Its log is read all the time, so that the pipe is never full.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        self.child = Some(child);
    }

    fn signal(&mut self, signal: Signal) -> std::process::ExitStatus {
        let mut child = self.child.take().unwrap();
        kill_process(Pid::from_child(&child), signal).unwrap();
        child.wait().unwrap()
    }

    /// A start that fails: its exit code, and its output.
    fn fails(&self) -> (Option<i32>, String) {
        let output = self.command(&[]).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn check(&self) {
        let output = ferrite(&["image", "check", self.image.to_str().unwrap()]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Runs a script of nbdsh, with `h` a connected handle and `uri` replaced. `false`: not installed.
#[track_caller]
fn nbdsh(uri: &str, script: &str) -> bool {
    let script = format!("uri = '{uri}'\n{script}");
    let mut command = Command::new("/usr/bin/nbdsh");
    // The system's Python has the module.
    command.env("PATH", "/usr/bin:/bin").args(["-c", &script]);
    let Some(output) = installed("nbdsh", command.output()) else { return false };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    true
}

fn data(bytes: usize) -> Vec<u8> {
    bytes::runs(bytes, 512, |n| (n * 7 + n * 512 / MIB) as u8 | 1)
}

#[test]
fn nbdinfo_reads_what_there_is_to_know() {
    let export = Export::new("disk.qcow2");
    let Some(info) = peer("nbdinfo", &["--json", &export.uri()]) else { return };
    for line in [
        "\"export-size\": 67108864",
        "\"block_size_minimum\": 1",
        "\"block_size_maximum\": 33554432",
        "\"can_multi_conn\": true",
        "\"can_fua\": true",
        "\"can_zero\": true",
        "\"can_fast_zero\": true",
        "\"can_cache\": true",
        "\"base:allocation\"",
        "\"qemu:allocation-depth\"",
    ] {
        assert!(info.contains(line), "{line}: {info}");
    }
    assert!(peer("nbdinfo", &["--list", &export.uri()]).unwrap().contains("export=\"disk\""));
    let depths =
        peer("nbdinfo", &["--map=qemu:allocation-depth", "--totals", &export.uri()]).unwrap();
    assert!(depths.split_whitespace().take(3).eq(["67108864", "100.0%", "0"]), "{depths}");
    let map = peer("nbdinfo", &["--map", &export.uri()]).unwrap();
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "67108864", "3", "hole,zero"]);
}

#[test]
fn nbdcopy_and_qemu_img_copy_into_every_format_and_out_of_it() {
    for name in ["disk.img", "disk.vhd", "disk.qcow2"] {
        let mut export = Export::new(name);
        let at = |name: &str| export.dir.path().join(name).to_str().unwrap().to_owned();
        // Data with a hole in the middle.
        let mut bytes = data(64 * MIB);
        bytes[20 * MIB..40 * MIB].fill(0);
        fs::write(at("in"), &bytes).unwrap();
        if peer("nbdcopy", &[&at("in"), &export.uri()]).is_none() {
            return;
        }
        peer("nbdcopy", &[&export.uri(), &at("out")]).unwrap();
        assert!(fs::read(at("out")).unwrap() == bytes, "{name}");
        let compare = ["compare", "-f", "raw", "-F", "raw", &at("in"), &export.uri()];
        peer("qemu-img", &compare).unwrap();
        peer("qemu-img", &["convert", "-O", "raw", "-f", "raw", &export.uri(), &at("out2")])
            .unwrap();
        assert!(fs::read(at("out2")).unwrap() == bytes, "{name}");
        let convert = ["convert", "-n", "-f", "raw", "-O", "raw", &at("out"), &export.uri()];
        peer("qemu-img", &convert).unwrap();
        assert!(export.signal(Signal::TERM).success(), "{name}");
        export.check();
    }
}

#[test]
fn qemu_io_writes_zeroes_discards_and_flushes() {
    let export = Export::new("disk.vhd");
    let commands = [
        "write -P 7 0 3M",
        "write -P 8 -f 1M 64k",
        "read -P 8 1M 64k",
        "write -z 0 64k",
        "write -z -u 128k 64k",
        "read -P 0 0 64k",
        "read -P 0 128k 64k",
        "read -P 7 64k 64k",
        "discard 2M 512k",
        "write -P 9 512 512",
        "read -P 9 512 512",
        "flush",
    ];
    let uri = export.uri();
    let mut args = vec!["-f", "raw"];
    commands.iter().for_each(|command| args.extend(["-c", command]));
    args.push(&uri);
    let Some(said) = peer("qemu-io", &args) else { return };
    assert!(!said.contains("failed"), "{said}");
    // Many requests in flight.
    let many = ["bench", "-f", "raw", "-c", "2000", "-d", "32", "-s", "4096", "-w", &uri];
    peer("qemu-img", &many).unwrap();
}

#[test]
fn nbdsh_finds_each_option_and_each_error() {
    let export = Export::new("disk.qcow2");
    nbdsh(
        &export.uri(),
        r#"
import errno
def fails(code, call):
    try:
        call()
    except nbd.Error as e:
        assert e.errnum == code, (e.errnum, code)
    else:
        raise AssertionError("no error")
for structured in [True, False]:
    for contexts in [True, False]:
        h = nbd.NBD()
        h.set_request_structured_replies(structured)
        if contexts:
            h.add_meta_context("base:allocation")
            h.add_meta_context("qemu:allocation-depth")
        h.connect_uri(uri)
        assert h.get_structured_replies_negotiated() == structured
        for name in ["base:allocation", "qemu:allocation-depth"]:
            assert h.can_meta_context(name) == (structured and contexts)
        assert h.can_cache() and h.can_fast_zero()
        assert h.can_df() == structured and h.can_multi_conn() and not h.is_read_only()
        # What the library would not send.
        h.set_strict_mode(0)
        h.pwrite(b"a" * 4096, 0, nbd.CMD_FLAG_FUA)
        assert h.pread(4096, 0) == b"a" * 4096
        assert h.pread(1, 0) == b"a" and h.pread(512, 100) == b"a" * 512
        h.pwrite(b"b" * 5, 510)
        assert h.pread(7, 509) == b"abbbbba"
        fails(errno.EINVAL, lambda: h.pread(512, 64 << 20))
        fails(errno.ENOSPC, lambda: h.pwrite(b"b" * 512, 64 << 20))
        fails(errno.ENOSPC, lambda: h.zero(1024, (64 << 20) - 512))
        fails(errno.EINVAL, lambda: h.trim(1024, (64 << 20) - 512))
        fails(errno.ENOSPC, lambda: h.pwrite(b"b" * 100, (64 << 20) - 99))
        h.cache(512, 0)
        fails(errno.EINVAL, lambda: h.cache(512, 64 << 20))
        h.zero(65536, 1 << 20, nbd.CMD_FLAG_FAST_ZERO)
        fails(errno.ENOTSUP, lambda: h.zero(500, 0, nbd.CMD_FLAG_FAST_ZERO))
        slow = nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE
        fails(errno.ENOTSUP, lambda: h.zero(65536, 0, slow))
        if structured:
            fails(errno.EOVERFLOW, lambda: h.pread(4 << 20, 0, nbd.CMD_FLAG_DF))
            assert len(h.pread(65536, 0, nbd.CMD_FLAG_DF)) == 65536
        h.zero(8192, 0, nbd.CMD_FLAG_NO_HOLE)
        h.zero(8192, 8192)
        h.trim(65536, 0, nbd.CMD_FLAG_FUA)
        h.flush()
        assert h.pread(65536, 0) == bytes(65536)
        if structured and contexts:
            found = []
            h.block_status(1 << 20, 0, lambda *a: found.append(a) or 0)
            names = [name for name, *_ in found]
            assert names == ["base:allocation", "qemu:allocation-depth"], found
        h.shutdown()
# One of several names, in the negotiation that goes on.
h = nbd.NBD()
h.set_opt_mode(True)
h.connect_uri(uri)
names = []
assert h.opt_list(lambda name, text: names.append(name) or 0) == 1 and names == ["disk"]
for name in ["anything", "Disk", "disk.qcow2"]:
    h.set_export_name(name)
    fails(errno.ENOENT, h.opt_info)
    fails(errno.ENOENT, h.opt_go)
h.set_export_name("disk")
h.opt_info()
assert h.get_size() == 64 << 20
assert h.get_block_size(nbd.SIZE_MINIMUM) == 1
assert h.opt_list_meta_context(lambda name: 0) == 2
h.opt_go()
assert h.get_size() == 64 << 20
h.shutdown()
h = nbd.NBD()
h.set_opt_mode(True)
h.connect_uri(uri)
h.opt_abort()
"#,
    );
}

#[test]
fn names_are_not_told_if_they_are_not_to_be() {
    let mut export = Export::new("disk.img");
    assert!(export.signal(Signal::TERM).success());
    export.start(&["--no-list"]);
    nbdsh(
        &export.uri(),
        r#"
import errno
h = nbd.NBD()
h.set_opt_mode(True)
h.connect_uri(uri)
try:
    h.opt_list(lambda name, text: 0)
except nbd.Error as e:
    assert e.errnum == errno.ENOTSUP, e.errnum
else:
    raise AssertionError("a list")
h.set_export_name("disk")
h.opt_go()
assert h.pread(512, 0) == bytes(512)
h.shutdown()
"#,
    );
}

#[test]
fn fio_finds_by_their_checksums_that_blocks_are_what_it_has_written() {
    for name in ["disk.img", "disk.vhd", "disk.qcow2"] {
        let mut export = Export::new(name);
        let uri = format!("--uri={}", export.uri());
        let aux = format!("--aux-path={}", export.dir.path().display());
        let args = [
            "--name=verify",
            "--ioengine=nbd",
            "--rw=randrw",
            "--bsrange=512-64k",
            "--bs_unaligned=1",
            "--size=32M",
            "--iodepth=16",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--randseed=7",
            &uri,
            &aux,
        ];
        let Some(said) = peer("fio", &args) else { return };
        assert!(said.contains("err= 0"), "{name}: {said}");
        assert!(export.signal(Signal::TERM).success(), "{name}");
        export.check();
    }
}

#[test]
fn two_connections_see_what_each_has_written_through_all_caches() {
    let export = Export::new("disk.qcow2");
    nbdsh(
        &export.uri(),
        r#"
a, b = nbd.NBD(), nbd.NBD()
a.connect_uri(uri)
b.connect_uri(uri)
for i in range(50):
    w, r = (a, b) if i % 2 else (b, a)
    w.pwrite(bytes([i + 1]) * 65536, i * 65536)
    r.flush()
    assert r.pread(65536, i * 65536) == bytes([i + 1]) * 65536
"#,
    );
}

/// Answers come late, in another order, or not at all, between the client and the server.
#[test]
fn clients_behind_nbdkits_filters_are_served() {
    let export = Export::new("disk.qcow2");
    let input = export.dir.path().join("in");
    fs::write(&input, data(8 * MIB)).unwrap();
    let (socket, input) = (export.socket(), input.to_str().unwrap().to_owned());
    let socket = format!("socket={}", socket.display());
    let copy = format!("nbdcopy {input} $uri && nbdcopy $uri {input}.out");
    let slow = [
        "-U",
        "-",
        "--filter=delay",
        "nbd",
        &socket,
        "delay-read=1ms",
        "delay-write=1ms",
        "--run",
        &copy,
    ];
    if peer("nbdkit", &slow).is_none() {
        return;
    }
    let out = fs::read(format!("{input}.out")).unwrap();
    assert!(out[..8 * MIB] == data(8 * MIB)[..]);
    // Successful requests between errors are correct. One at a time: nbdkit 1.32 crashes if a client disconnects with
    // several in flight.
    let script = "n = 0\nfor i in range(200):\n    try:\n        b = h.pread(4096, i * 4096)\n    \
                  except nbd.Error:\n        n += 1\n    else:\n        \
                  assert b == open(\"INPUT\", \"rb\").read()[i * 4096:][:4096]\nassert 0 < n < 200";
    let script = script.replace("INPUT", &input);
    let run = format!("PATH=/usr/bin:/bin nbdsh -u $uri -c '{script}'");
    let errors =
        ["-U", "-", "--filter=error", "nbd", &socket, "error-pread-rate=30%", "--run", &run];
    peer("nbdkit", &errors).unwrap();
    // A client that is killed with requests in flight.
    let late = format!(
        "timeout -s KILL 0.3 nbdkit -U - --filter=delay nbd {socket} delay-read=20ms --run \
         'timeout 20 nbdcopy $uri null:'; true"
    );
    peer("sh", &["-c", &late]).unwrap();
    peer("nbdcopy", &[&export.uri(), "null:"]).unwrap();
}

#[test]
fn a_server_that_is_told_to_end_leaves_a_whole_image_and_no_socket() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut export = Export::new("disk.qcow2");
        let mode = fs::symlink_metadata(export.socket()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let there = nbdsh(
            &export.uri(),
            "h = nbd.NBD()\nh.connect_uri(uri)\nh.pwrite(b'x' * 65536, 1 << 20)",
        );
        let idle = UnixStream::connect(export.socket()).unwrap();
        assert!(export.signal(signal).success());
        drop(idle);
        let left: Vec<_> = fs::read_dir(export.dir.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        export.check();
        if there {
            export.start(&["--read-only"]);
            let script = "h = nbd.NBD()\nh.connect_uri(uri)\nassert h.is_read_only()\n\
                          assert h.pread(65536, 1 << 20) == b'x' * 65536";
            nbdsh(&export.uri(), script);
        }
    }
}

#[test]
fn a_server_that_was_killed_has_lost_nothing_that_it_had_answered() {
    for name in ["disk.qcow2", "disk.vhd"] {
        let mut export = Export::new(name);
        let write = "h = nbd.NBD()\nh.connect_uri(uri)\n\
                     for i in range(64): h.pwrite(bytes([i + 1]) * 4096, i << 20)";
        if !nbdsh(&export.uri(), write) {
            return;
        }
        export.signal(Signal::KILL);
        assert!(fs::symlink_metadata(export.socket()).unwrap().file_type().is_socket());
        export.start(&[]);
        let read = "h = nbd.NBD()\nh.connect_uri(uri)\n\
                    for i in range(64): assert h.pread(4096, i << 20) == bytes([i + 1]) * 4096";
        nbdsh(&export.uri(), read);
        assert!(export.signal(Signal::TERM).success());
        export.check();
    }
}

#[test]
fn a_name_that_is_taken_is_left_alone() {
    let mut export = Export::new("disk.img");
    let other = Export::new("other.img");
    let refused = |export: &Export, code: i32, why: &str| {
        let (is, said) = export.fails();
        assert_eq!(is, Some(code), "{said}");
        assert!(said.contains(why) && said.contains("help: "), "{said}");
    };
    // The path is taken by a server of ours.
    refused(&export, 4, "listens there already");
    peer("nbdinfo", &["--size", &export.uri()]);
    assert!(export.signal(Signal::TERM).success());
    // The path is taken by any other program.
    let listener = UnixListener::bind(export.socket()).unwrap();
    refused(&export, 4, "listens there already");
    drop(listener);
    // The path has a socket that no program listens at: it is replaced.
    export.start(&[]);
    assert!(export.signal(Signal::TERM).success());
    // The path is a file.
    fs::write(export.socket(), "precious").unwrap();
    refused(&export, 1, "no socket");
    assert_eq!(fs::read(export.socket()).unwrap(), b"precious");
    // The path is a link to another user's socket, or the lock is one.
    fs::remove_file(export.socket()).unwrap();
    symlink(other.socket(), export.socket()).unwrap();
    refused(&export, 1, "no socket");
    assert!(UnixStream::connect(other.socket()).is_ok());
    fs::remove_file(export.socket()).unwrap();
    let target = export.dir.path().join("target");
    symlink(&target, export.dir.path().join("nbd.sock.lock")).unwrap();
    refused(&export, 1, "cannot listen");
    assert!(!target.exists());
}

#[test]
fn an_image_that_is_in_use_or_missing_is_told_of_and_no_socket_is_left() {
    let export = Export::new("disk.qcow2");
    let second = export.dir.path().join("second.sock");
    let args = |image: &Path| {
        let (image, socket) =
            (image.to_str().unwrap().to_owned(), second.to_str().unwrap().to_owned());
        ferrite(&["export", "nbd", &image, "--socket", &socket]).output().unwrap()
    };
    assert_eq!(args(&export.image).status.code(), Some(4));
    assert_eq!(args(&export.dir.path().join("no.qcow2")).status.code(), Some(3));
    assert!(!second.exists() && !export.dir.path().join("second.sock.lock").exists());
    assert!(UnixStream::connect(export.socket()).is_ok());
}

/// The user `nobody`.
const USER: u32 = 65534;

#[test]
fn a_user_may_export_what_takes_no_journal_and_is_told_who_may_export_the_rest() {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can run a program as another user");
        return;
    }
    // With the mode that a backend uses.
    fs::DirBuilder::new().recursive(true).mode(0o700).create("/run/ferrite/images").unwrap();
    for (name, more, starts) in [
        ("disk.qcow2", &["--read-only"][..], true),
        ("disk.vhd", &["--read-only"], true),
        ("disk.img", &[], true),
        ("disk.qcow2", &[], false),
        ("disk.vhd", &[], false),
    ] {
        let mut export = Export::new(name);
        assert!(export.signal(Signal::TERM).success());
        fs::set_permissions(export.dir.path(), Permissions::from_mode(0o777)).unwrap();
        fs::set_permissions(&export.image, Permissions::from_mode(0o666)).unwrap();
        let mut command = export.command(more);
        command.uid(USER).gid(USER).env_remove("XDG_RUNTIME_DIR");
        if !starts {
            let output = command.output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!output.status.success() && text.contains("run it as root"), "{name}: {text}");
            assert!(text.contains("XDG_RUNTIME_DIR"), "{text}");
            continue;
        }
        export.run(command);
        assert!(export.signal(Signal::TERM).success(), "{name}");
    }
}
