//! A real Xen host on any Linux machine: QEMU's emulator runs the hypervisor, a dom0 and guests.
#![forbid(unsafe_code)]

pub mod bootdisk;
pub mod certificates;
pub mod channel;
pub mod disk;
pub mod guest;
mod initramfs;
pub mod network;
pub mod packages;
pub mod qemu;
pub mod release;
pub mod root;
pub mod steps;

use crate::steps::step;
use anyhow::{Context, Result, anyhow, bail};
use channel::{Channel, Output, quote};
use qemu::{Hardware, Machine, Pace, Processor, Qemu, Scratch};
use root::Root;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The time limit from power-on to the agent; 20 s when nothing else runs.
const BOOT_LIMIT: Duration = Duration::from_secs(600);
/// The additional time of an answer after its command's own limit, on a busy machine.
const GRACE: Duration = Duration::from_secs(20);
/// Size of the payload's file system, which also has tests' images; a sparse file.
const PAYLOAD_BYTES: u64 = 8 << 30;

/// The prefix of a run's files on disk; the process's id follows.
const RUN_PREFIX: &str = "ferrite-lab-";

/// Scratch disk with 512-byte sectors.
pub const SCRATCH_512: &str = "scratch512";
/// Scratch disk with 4096-byte sectors.
pub const SCRATCH_4096: &str = "scratch4096";

/// NVMe scratch disk; `modprobe nvme` brings it up.
pub const SCRATCH_NVME: &str = "scratchnvme";

/// A program for dom0.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its name there; a Debian package (`.deb`) is installed.
    pub name: &'static str,
    /// The local file.
    pub file: PathBuf,
}

/// A running Xen host. The thread that booted it must keep it: QEMU dies with that thread.
pub struct XenHost {
    channel: Channel,
    qemu: Qemu,
    /// Its drop removes the folder.
    _dir: RunDir,
    guests: u32,
    processor: Processor,
    /// Arguments of every `ferrite serve`.
    pub serve_arguments: String,
    pace: Pace,
}

impl XenHost {
    /// Boots a host for PV guests, whose dom0 has `programs` in its PATH.
    pub fn boot(root: &Root, programs: &[Program]) -> Result<XenHost> {
        Self::boot_at(Hardware::default(), root, programs, &[])
    }

    /// Boots a host with this hardware; `arguments` are the emulator's.
    pub fn boot_at(
        hardware: Hardware,
        root: &Root,
        programs: &[Program],
        arguments: &[String],
    ) -> Result<XenHost> {
        step("boot Xen and its dom0", || Self::boot_quietly(hardware, root, programs, arguments))
    }

    /// Boots a host with this processor.
    pub fn boot_on(processor: Processor, root: &Root, programs: &[Program]) -> Result<XenHost> {
        step(&format!("boot Xen and its dom0 ({processor:?})"), || {
            let hardware = Hardware { processor, ..Hardware::default() };
            Self::boot_quietly(hardware, root, programs, &[])
        })
    }

    fn boot_quietly(
        hardware: Hardware,
        root: &Root,
        programs: &[Program],
        arguments: &[String],
    ) -> Result<XenHost> {
        let dir = RunDir::new()?;
        let payload = make_payload(&dir.path, root, programs)?;
        let socket = dir.socket.clone();
        let scratch = [
            Scratch { serial: SCRATCH_512, bytes: 512 << 20, sector_bytes: 512, nvme: false },
            Scratch { serial: SCRATCH_4096, bytes: 512 << 20, sector_bytes: 4096, nvme: false },
            Scratch { serial: SCRATCH_NVME, bytes: 512 << 20, sector_bytes: 512, nvme: true },
        ];
        let machine = Machine {
            root,
            dir: &dir.path,
            payload: &payload,
            scratch: &scratch,
            socket: &socket,
            hardware,
            arguments,
        };
        let mut qemu = Qemu::start(&machine)?;
        let mut channel = Channel::connect(&socket, Duration::from_secs(20))
            .with_context(|| steps::tail(&dir.path.join("qemu.log")))?;
        if let Err(error) =
            channel.wait_ready(BOOT_LIMIT * if hardware.pace == Pace::Clock { 1 } else { 4 })
        {
            let state = qemu.ended().unwrap_or_else(|| "still running".into());
            let console = steps::tail(qemu.console());
            return Err(error.context(format!(
                "the dom0 did not come up (QEMU: {state}); end of its console:\n{console}"
            )));
        }
        let mut xenhost = XenHost {
            channel,
            qemu,
            _dir: dir,
            guests: 0,
            processor: hardware.processor,
            serve_arguments: String::new(),
            pace: hardware.pace,
        };
        for package in programs.iter().filter(|program| program.name.ends_with(".deb")) {
            xenhost.sh_for(&format!("dpkg --install /lab/bin/{} 2>&1", package.name), 300)?;
        }
        Ok(xenhost)
    }

    /// The clock of the host.
    fn pace(&self) -> Pace {
        self.pace
    }

    /// Its processor.
    pub fn processor(&self) -> Processor {
        self.processor
    }

    /// How often the host has hung so far: some hundred seconds of its time without progress. This happens only with
    /// the processor of AMD, about once in forty starts of guests.
    pub fn standstills(&mut self) -> Result<u32> {
        let told = self.sh("dmesg | grep -c 'Long readout interval' || true")?;
        told.parse().with_context(|| format!("odd answer: {told}"))
    }

    /// Processor time of the emulator, in seconds.
    pub fn cpu_s(&self) -> f64 {
        self.qemu.cpu_s()
    }

    /// Runs a shell command in dom0.
    ///
    /// # Errors
    /// No answer comes; the error has the console's end. The host is then unusable.
    pub fn dom0(&mut self, command: &str, limit_s: u64) -> Result<Output> {
        // dom0 ends a command after `limit_s` of its own seconds; outside these may be longer.
        let grace = GRACE + Duration::from_secs(limit_s) * (self.pace.patience() - 1);
        let result = self.channel.run(command, Duration::from_secs(limit_s), grace);
        result.map_err(|error| {
            let state = self.qemu.ended().unwrap_or_else(|| "still running".into());
            let console = steps::tail(self.qemu.console());
            error.context(format!(
                "dom0 command failed: {command}\nQEMU: {state}; end of its console:\n{console}"
            ))
        })
    }

    /// Runs a shell command in dom0 that must succeed; returns its trimmed output.
    pub fn sh(&mut self, command: &str) -> Result<String> {
        self.sh_for(command, 60)
    }

    /// [`XenHost::sh`] with a limit of its own, in seconds.
    pub fn sh_for(&mut self, command: &str, limit_s: u64) -> Result<String> {
        let output = self.dom0(command, limit_s)?;
        let why = if output.timed_out() { " (its time was up)" } else { "" };
        if output.status != 0 {
            bail!(
                "dom0: `{command}` ended with {}{why}:\n{}",
                output.status,
                output.stdout.trim_end()
            );
        }
        Ok(output.stdout.trim().to_owned())
    }

    /// Repeats `condition` in dom0 until it succeeds or `limit_s` seconds are over.
    pub fn wait_until(&mut self, what: &str, condition: &str, limit_s: u64) -> Result<()> {
        let command = format!("until {{ {condition}; }} >/dev/null 2>&1; do sleep 0.1; done");
        let output = self.dom0(&command, limit_s)?;
        if output.status != 0 {
            let last = self.dom0(condition, 20)?.stdout;
            return Err(anyhow!("`{condition}` did not come true in {limit_s} s: {}", last.trim()))
                .with_context(|| what.to_owned());
        }
        Ok(())
    }

    /// The device node of a scratch disk in dom0.
    pub fn scratch(&mut self, serial: &str) -> Result<String> {
        let command = format!(
            "for d in /sys/block/vd*; do [ \"$(cat $d/serial)\" = {serial} ] && echo /dev/${{d##*/}}; done; true"
        );
        let device = self.sh(&command)?;
        if device.is_empty() {
            bail!("the dom0 has no disk called {serial}");
        }
        Ok(device)
    }

    /// Starts the daemon, for all images on the payload's disk, with these additional tables of its configuration;
    /// returns its process.
    pub fn start_daemon(&mut self, tables: &str) -> Result<u32> {
        let configuration = format!("image_folders = [\"/lab\", \"/dev\"]\n{tables}");
        let pid = self.sh(&format!(
            "mkdir -p /etc/ferrite; printf %s {} >/etc/ferrite/ferrite.toml; \
             setsid ferrite daemon </dev/null >>/tmp/daemon.log 2>&1 & echo $!",
            quote(&configuration)
        ))?;
        self.wait_until("the daemon", "ferrite disk list", 60)?;
        pid.parse().with_context(|| format!("odd answer: {pid}"))
    }

    /// A guest name that is new in this boot.
    fn next_guest(&mut self) -> String {
        self.guests += 1;
        format!("g{}", self.guests)
    }

    /// Keeps a copy of the console in `to`, as evidence for a failure.
    pub fn save_console(&self, to: &Path) -> Result<()> {
        std::fs::copy(self.qemu.console(), to)?;
        Ok(())
    }
}

/// Makes the disk of the boot: scripts, programs, the guests' RAM disk, and room for images.
fn make_payload(dir: &Path, root: &Root, programs: &[Program]) -> Result<PathBuf> {
    let tree = dir.join("payload");
    std::fs::create_dir_all(tree.join("bin"))?;
    let init = include_str!("scripts/dom0-init.sh").replace("@XEN@", root.suite().xen);
    write_program(&tree.join("init"), &init)?;
    write_program(&tree.join("agent"), include_str!("scripts/dom0-agent.sh"))?;
    for program in programs {
        std::fs::copy(&program.file, tree.join("bin").join(program.name))
            .with_context(|| format!("cannot read {}", program.file.display()))?;
    }
    let guest_init = include_str!("scripts/guest-init.sh");
    initramfs::assemble(&root.guest_base(), guest_init, &tree.join("guest.img"))?;
    initramfs::init_only(guest_init, &tree.join("init.img"))?;
    let image = dir.join("lab.ext4");
    std::fs::File::create(&image)?.set_len(PAYLOAD_BYTES)?;
    let mut mkfs = Command::new(crate::packages::find("mkfs.ext4").context("no mkfs.ext4")?);
    mkfs.args(["-q", "-F", "-E", "nodiscard,root_owner=0:0", "-d"]).arg(&tree).arg(&image);
    steps::run_logged(&mut mkfs, &dir.join("payload.log"))?;
    std::fs::remove_dir_all(&tree)?;
    Ok(image)
}

fn write_program(path: &Path, text: &str) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, text)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))?;
    Ok(())
}

/// A boot's folder in the cache, removed with it, and its control socket in the system's folder for temporary files,
/// because paths of Unix sockets must be short.
struct RunDir {
    path: PathBuf,
    socket: PathBuf,
}

impl RunDir {
    fn new() -> Result<RunDir> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let cache = root::cache_dir();
        remove_stale(&cache);
        remove_stale(&std::env::temp_dir());
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{RUN_PREFIX}{}-{count}", std::process::id());
        let path = cache.join(&name);
        std::fs::create_dir(&path)
            .with_context(|| format!("cannot make the boot's folder {}", path.display()))?;
        Ok(RunDir { path: path.canonicalize()?, socket: std::env::temp_dir().join(name) })
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Removes files of killed runs.
fn remove_stale(base: &Path) {
    let Ok(entries) = std::fs::read_dir(base) else { return };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(RUN_PREFIX).and_then(|rest| rest.split('-').next());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // Another user's files stay; ours are removed.
            let path = entry.path();
            let _ = if path.is_dir() {
                std::fs::remove_dir_all(&path)
            } else {
                std::fs::remove_file(&path)
            };
        }
    }
}
