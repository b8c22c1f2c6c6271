//! Disks by vhost-user, beside those of qemu-storage-daemon. One guest of QEMU has four: raw and qcow2 of each. It measures
//! them in turn, so that all have the same guest, emulator and load of the machine. The guest's kernel and programs are those
//! of the Xen host.
//!
//! And the instructions of a request of the export's own code, beside those of a Xen ring (`count.rs`).

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ferrite_xenhost::packages::{self, Need};
use ferrite_xenhost::root::{self, Root, TRIXIE};
use ferrite_xenhost::steps::{self, say, step};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use tempfile::TempDir;

use super::Setup;
use super::image::filled;
use super::result::{Measurement, Target};

mod count;

const PART: &str = "vhost";
const INIT: &str = include_str!("init.sh");
const IMAGE_MIB: usize = 256;
const GUEST_MIB: u32 = 640;
const NEEDS: &[Need] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("qemu-storage-daemon", "qemu-utils"),
    ("cpio", "cpio"),
    ("valgrind", "valgrind"),
];
/// How long a server may take to listen, and to end.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long the guest may take to start, and how many times longer than it measures it may take for a measurement: fio
/// itself is slow in an emulator.
const START: Duration = Duration::from_secs(300);
const SLOWER: f64 = 10.0;
/// The least ratio of our rate to theirs.
const LEAST: f64 = 0.9;

/// A load: fio's mode, block and depth, and the name of its row.
struct Load {
    name: &'static str,
    mode: &'static str,
    block: &'static str,
    depth: u32,
}

const LOADS: [Load; 6] = [
    Load { name: "randread 4k QD1", mode: "randread", block: "4k", depth: 1 },
    Load { name: "randread 4k QD32", mode: "randread", block: "4k", depth: 32 },
    Load { name: "randwrite 4k QD1", mode: "randwrite", block: "4k", depth: 1 },
    Load { name: "randwrite 4k QD32", mode: "randwrite", block: "4k", depth: 32 },
    Load { name: "read 1m QD8", mode: "read", block: "1m", depth: 8 },
    Load { name: "write 1m QD8", mode: "write", block: "1m", depth: 8 },
];

impl Load {
    /// Its name for the guest.
    fn key(&self) -> String {
        format!("{}-{}-{}", self.mode, self.block, self.depth)
    }

    /// The unit of its figures, and the figure of a line of fio's: KiB/s and requests a second of reads, then of writes.
    fn figure(&self, fields: [f64; 4]) -> f64 {
        let [read_kib, reads, written_kib, writes] = fields;
        match self.unit() {
            "MB/s" => (read_kib + written_kib) * 1024.0 / 1e6,
            _ => reads + writes,
        }
    }

    fn unit(&self) -> &'static str {
        if self.block == "1m" { "MB/s" } else { "IOPS" }
    }
}

const FORMATS: [&str; 2] = ["raw", "qcow2"];
/// The guest's disks, in the order in which the machine has them: ours and theirs of each format.
const DISKS: [&str; 4] = ["vda", "vdb", "vdc", "vdd"];

/// Runs all measurements.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    packages::ensure(&[NEEDS])?;
    let counts = count::rows(setup.runs)?;
    let root = root::ensure(TRIXIE)?;
    let dir = TempDir::new_in("/dev/shm")?;
    step(&format!("images of {IMAGE_MIB} MiB on tmpfs"), || make(dir.path()))?;
    let what = format!("a guest of QEMU measures its disks, {} rounds", setup.runs);
    let figures = step(&what, || by_guest(setup, &root, dir.path()))?;
    drop(dir);
    let mut rows = figures.rows()?;
    rows.extend(counts);
    Ok(rows)
}

/// Each format twice, with the same content.
fn make(dir: &Path) -> Result<()> {
    let [ours, theirs] = ["ours", "theirs"].map(|whose| dir.join(format!("{whose}.raw")));
    filled(&ours, IMAGE_MIB)?;
    fs::copy(&ours, theirs)?;
    let qcow2 = ours.with_extension("qcow2");
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "raw", "-O", "qcow2"]);
    steps::output(convert.args([&ours, &qcow2]))?;
    fs::copy(&qcow2, dir.join("theirs.qcow2"))?;
    Ok(())
}

/// A process that is ended when this is dropped.
struct Process(Child);

impl Process {
    fn start(command: &mut Command, log: &Path) -> Result<Process> {
        let log = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stderr(log.try_clone()?).stdout(log);
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        Ok(Process(child))
    }

    /// Waits for the socket of a server, without a connection: it serves one at a time.
    fn listens(&mut self, socket: &Path, log: &Path) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !socket.exists() {
            let ended = self.0.try_wait()?;
            let said = || fs::read_to_string(log).unwrap_or_default();
            ensure!(ended.is_none(), "a server has ended: {}", said());
            ensure!(Instant::now() < end, "{} does not come: {}", socket.display(), said());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Asks it to end, and waits until it has.
    fn end(&mut self) -> Result<()> {
        if self.0.try_wait()?.is_none() {
            kill_process(Pid::from_child(&self.0), Signal::TERM)?;
        }
        let end = Instant::now() + PATIENCE;
        while self.0.try_wait()?.is_none() {
            if Instant::now() > end {
                self.0.kill()?;
                bail!("it did not end in {} s", PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // By a signal that it can catch: otherwise a journal of a removed image would stay.
        let _ = self.end();
    }
}

/// Starts the four servers and the guest, and waits until it has measured.
fn by_guest(setup: &Setup, root: &Root, dir: &Path) -> Result<Figures> {
    let log = dir.join("servers.log");
    let mut servers = Vec::new();
    let mut sockets = Vec::new();
    for format in FORMATS {
        let socket = |whose: &str| dir.join(format!("{whose}-{format}.sock"));
        let image = |whose: &str| dir.join(format!("{whose}.{format}"));
        let (ours, theirs) = (socket("ours"), socket("theirs"));
        let mut export = Command::new(setup.ferrite.program());
        export.args(["export", "vhost-user"]).arg(image("ours")).arg("--socket").arg(&ours);
        export.args(["--queues", "1", "--serial", &format!("ours-{format}")]);
        let mut daemon = peer(format, &image("theirs"), &theirs);
        for (command, socket) in [(&mut export, ours), (&mut daemon, theirs)] {
            let mut server = Process::start(command, &log)?;
            server.listens(&socket, &log)?;
            servers.push(server);
            sockets.push(socket);
        }
    }
    let console = dir.join("console.log");
    let mut machine = machine(root, &initrd(setup, root, dir)?, &sockets);
    let mut guest = Process::start(&mut machine, &console)?;
    let measured = f64::from(setup.runs) * setup.seconds * (LOADS.len() * DISKS.len()) as f64;
    let limit = START + Duration::from_secs_f64(measured * SLOWER);
    let end = Instant::now() + limit;
    loop {
        let text = String::from_utf8_lossy(&fs::read(&console)?).into_owned();
        if text.contains("GUEST DONE") {
            return Figures::parse(&text);
        }
        let servers = || fs::read_to_string(&log).unwrap_or_default();
        let tail = || text.get(text.len().saturating_sub(2000)..).unwrap_or(&text);
        ensure!(!text.contains("GUEST FAILED"), "the guest has failed: {}\n{}", tail(), servers());
        ensure!(guest.0.try_wait()?.is_none(), "the guest has ended: {}\n{}", tail(), servers());
        ensure!(Instant::now() < end, "the guest is not done in {limit:?}: {}", tail());
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// qemu-storage-daemon's export of an image. On tmpfs there is no direct input and output.
fn peer(format: &str, image: &Path, socket: &Path) -> Command {
    let file = json!({
        "driver": "file", "node-name": "file", "filename": image, "aio": "io_uring",
        "discard": "unmap",
    });
    let disk = json!({ "driver": format, "node-name": "disk", "file": "file", "discard": "unmap" });
    let export = json!({
        "type": "vhost-user-blk", "id": "export", "node-name": "disk", "writable": true,
        "num-queues": 1, "addr": { "type": "unix", "path": socket },
    });
    let mut command = Command::new("qemu-storage-daemon");
    for (option, value) in [("--blockdev", file), ("--blockdev", disk), ("--export", export)] {
        command.arg(option).arg(value.to_string());
    }
    command
}

/// The guest's initial RAM disk, with its first process.
fn initrd(setup: &Setup, root: &Root, dir: &Path) -> Result<PathBuf> {
    let tree = dir.join("root");
    fs::create_dir(&tree)?;
    let line = |load: &Load| format!("{} {} {} {}", load.key(), load.mode, load.block, load.depth);
    let loads = LOADS.iter().map(line).collect::<Vec<_>>().join("\n");
    let ms = (setup.seconds * 1000.0).round().to_string();
    let init = INIT.replace("@LOADS@", &loads).replace("@MS@", &ms);
    fs::write(tree.join("init"), init.replace("@ROUNDS@", &setup.runs.to_string()))?;
    let pack =
        "chmod 755 root/init; cd root && echo init | cpio --quiet -o -H newc -R 0:0 >../init.cpio";
    steps::output(Command::new("sh").current_dir(dir).args(["-ec", pack]))?;
    let (all, own) = (dir.join("initrd"), dir.join("init.cpio"));
    let mut bytes = Vec::new();
    for part in [root.initrd(), root.guest_base(), own] {
        bytes.extend(fs::read(&part).with_context(|| format!("cannot read {}", part.display()))?);
        // An archive that is not packed begins at a multiple of four bytes.
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    fs::write(&all, bytes)?;
    Ok(all)
}

/// The emulated machine. It has one processor, and leaves another one to the servers.
fn machine(root: &Root, initrd: &Path, sockets: &[PathBuf]) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-machine", "q35", "-accel", "tcg", "-cpu", "Westmere", "-smp", "1"]);
    command.args(["-m", &GUEST_MIB.to_string(), "-nographic", "-no-reboot", "-net", "none"]);
    let memory = format!("memory-backend-memfd,id=mem,size={GUEST_MIB}M,share=on");
    command.args(["-object", &memory, "-numa", "node,memdev=mem"]);
    for (at, socket) in sockets.iter().enumerate() {
        let mut channel = OsString::from(format!("socket,id=disk{at},path="));
        channel.push(socket);
        command.arg("-chardev").arg(channel);
        let device = format!("vhost-user-blk-pci,chardev=disk{at},num-queues=1");
        command.args(["-device", &device]);
    }
    command.arg("-kernel").arg(root.kernel()).arg("-initrd").arg(initrd);
    let words = "console=ttyS0 rdinit=/init mitigations=off clearcpuid=cx16 quiet";
    command.args(["-append", words]);
    command
}

/// What the guest has measured: for a load and a disk the figure of each round.
struct Figures(HashMap<(String, String), Vec<f64>>);

impl Figures {
    /// Reads the console.
    fn parse(console: &str) -> Result<Figures> {
        let mut figures = HashMap::<_, Vec<f64>>::new();
        let mut serials = HashMap::new();
        for line in console.lines() {
            // The kernel may have begun the line.
            let Some((_, said)) = line.split_once("GUEST ") else { continue };
            let words: Vec<&str> = said.split_whitespace().collect();
            match words[..] {
                ["serial", disk, serial] => drop(serials.insert(disk, serial)),
                ["figure", key, disk, fields] => {
                    let Some(load) = LOADS.iter().find(|load| load.key() == key) else { continue };
                    let fields: Vec<f64> =
                        fields.split(';').filter_map(|field| field.parse().ok()).collect();
                    let fields = fields.try_into().ok();
                    let fields = fields.with_context(|| format!("odd figures of fio: {said}"))?;
                    let of = (load.key(), disk.to_owned());
                    figures.entry(of).or_default().push(load.figure(fields));
                }
                _ => {}
            }
        }
        for (format, disks) in FORMATS.iter().zip(DISKS.chunks(2)) {
            let name = format!("ours-{format}");
            let is_it = |disk| serials.get(disk).is_some_and(|serial| **serial == *name);
            ensure!(is_it(disks[0]) && !is_it(disks[1]), "the guest's disks are {serials:?}");
        }
        let figures = Figures(figures);
        figures
            .0
            .iter()
            .for_each(|((load, disk), values)| say(format!("  {load} {disk}: {values:.0?}")));
        Ok(figures)
    }

    fn rows(&self) -> Result<Vec<Measurement>> {
        let mut rows = Vec::new();
        for (format, disks) in FORMATS.iter().zip(DISKS.chunks(2)) {
            for load in &LOADS {
                let of = |disk: &str| {
                    let values = self.0.get(&(load.key(), disk.to_owned()));
                    values.with_context(|| format!("no figures of {} on {disk}", load.name))
                };
                let name = format!("QEMU guest, {format}: {}", load.name);
                let row = Measurement::of_runs(PART, name, load.unit(), of(disks[0])?)
                    .against_runs("qemu-storage-daemon", of(disks[1])?)
                    .target(Target::AtLeast(LEAST));
                rows.push(row);
            }
        }
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERIALS: &str = "GUEST serial vda ours-raw\r\nGUEST serial vdb \r\n\
         GUEST serial vdc ours-qcow2\r\nGUEST serial vdd \r\n";

    #[test]
    fn the_guests_figures_become_rows_of_ours_beside_theirs() {
        let mut console = format!("[    1.0] quiet\r\n{SERIALS}GUEST figure warm vda 1;2;3;4\r\n");
        for round in 1..=3 {
            for load in &LOADS {
                for (at, disk) in DISKS.iter().enumerate() {
                    let rate = round * (10 + at);
                    let key = load.key();
                    console += &format!("GUEST figure {key} {disk} {rate}000;{rate};0;0\r\n");
                }
            }
        }
        let rows = Figures::parse(&console).unwrap().rows().unwrap();
        assert_eq!(rows.len(), FORMATS.len() * LOADS.len());
        let row = rows.iter().find(|row| row.name == "QEMU guest, raw: randread 4k QD1").unwrap();
        assert_eq!((row.value, row.peer_value, row.runs), (20.0, Some(22.0), 3));
        assert_eq!(row.met(), Some(true));
        let row = rows.iter().find(|row| row.name == "QEMU guest, qcow2: read 1m QD8").unwrap();
        assert_eq!((row.value, row.unit), (24_000.0 * 1024.0 / 1e6, "MB/s"));
    }

    #[test]
    fn disks_in_another_order_and_figures_that_are_none_are_refused() {
        let swapped = SERIALS.replace("vda", "vdx").replace("vdb", "vda");
        assert!(Figures::parse(&swapped).is_err());
        let odd = format!("{SERIALS}GUEST figure read-1m-8 vda 1;2;3\n");
        assert!(Figures::parse(&odd).is_err());
        assert!(Figures::parse(SERIALS).unwrap().rows().is_err());
    }
}
