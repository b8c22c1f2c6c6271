//! The virtual machine that is the Xen host.

use crate::packages;
use crate::root::Root;
use anyhow::{Context, Result};
use rustix::thread::CpuSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// An empty disk for dom0, new for each boot.
#[derive(Clone, Debug)]
pub(crate) struct Scratch {
    /// Its serial number, by which dom0 finds it.
    pub(crate) serial: &'static str,
    /// Its size; a sparse file.
    pub(crate) bytes: u64,
    /// Its logical sector size.
    pub(crate) sector_bytes: u32,
    /// Whether it is an NVMe device (dom0 loads its driver when a test needs it), otherwise a virtio one.
    pub(crate) nvme: bool,
}

/// Mitigations of processor flaws flush the emulator's address translation at each entry into the hypervisor: without
/// them everything is several times faster.
const XEN_SPEED: &str = "spec-ctrl=no xpti=no pv-l1tf=no";
/// The same for Linux. Read-only kernel pages cost a hypercall each; the others are not checked.
///
/// It also disables `cmpxchg16b`, which the kernel's allocator uses. QEMU before 8.0 computes the flags of that
/// instruction from stale ones (`helper_cmpxchg16b` reads `cc_op`, which is not up to date). An interrupt directly
/// after the instruction saves these flags, with any bit set, and the kernel continues with them: guests died of a
/// double fault, or of a damaged list, in the allocator.
const LINUX_CLOCK: &str =
    "mitigations=off rodata=off lsm=capability audit=0 nowatchdog clearcpuid=cx16";

/// The clock of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// The real time.
    Clock,
    /// Each instruction takes a nanosecond, and idle time is skipped. So measurements depend on the instructions of
    /// guest, hypervisor and dom0, and hardly on the load of this machine. Nothing that a real host does is omitted, so
    /// the figures are for unmodified kernels.
    Instructions,
}

impl Pace {
    /// How many times longer a step may take outside than inside.
    pub(crate) fn patience(self) -> u32 {
        match self {
            Pace::Clock => 1,
            Pace::Instructions => 60,
        }
    }

    /// The options on the hypervisor's command line for speed.
    fn xen_arguments(self) -> &'static str {
        match self {
            Pace::Clock => XEN_SPEED,
            Pace::Instructions => "",
        }
    }

    /// The options on the kernels' command lines, for speed and for this emulator.
    pub(crate) fn linux_arguments(self) -> &'static str {
        match self {
            Pace::Clock => LINUX_CLOCK,
            Pace::Instructions => "nokaslr norandmaps",
        }
    }
}

/// The emulated processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processor {
    /// Without hardware virtualisation: for PV guests.
    Plain,
    /// With AMD's virtualisation and nested paging: for PVH and HVM guests. Such a guest costs a quarter to a half
    /// more, since each of its exits is emulated.
    Amd,
}

impl Processor {
    /// QEMU's name for it. Westmere: the emulation of SMAP and XSAVE in newer models sometimes breaks PV kernels.
    fn model(self) -> &'static str {
        match self {
            Processor::Plain => "Westmere",
            Processor::Amd => "Westmere,vendor=AuthenticAMD,+svm,+npt",
        }
    }
}

/// The hardware of a host.
#[derive(Clone, Copy, Debug)]
pub struct Hardware {
    /// The clock.
    pub pace: Pace,
    /// Its processor.
    pub processor: Processor,
    /// The number of processors. dom0 has one, which is pinned to the first if there are more.
    pub cpus: u32,
    /// Memory of the whole host, in MiB.
    pub host_mib: u32,
    /// Memory of dom0 in MiB, fixed, so that the toolstack never balloons it.
    pub dom0_mib: u32,
}

impl Default for Hardware {
    /// Hardware for PV guests, with the real time.
    fn default() -> Self {
        let (pace, processor) = (Pace::Clock, Processor::Plain);
        Hardware { pace, processor, cpus: 1, host_mib: 3 << 10, dom0_mib: 1 << 10 }
    }
}

/// A running QEMU, which is killed when this is dropped.
pub(crate) struct Qemu {
    child: Child,
    console: PathBuf,
}

/// The parts of a boot.
pub(crate) struct Machine<'a> {
    /// The cached root.
    pub(crate) root: &'a Root,
    /// The boot's own folder.
    pub(crate) dir: &'a Path,
    /// The payload's file system image.
    pub(crate) payload: &'a Path,
    /// Extra disks.
    pub(crate) scratch: &'a [Scratch],
    /// The path at which QEMU listens for the control channel.
    pub(crate) socket: &'a Path,
    /// Its hardware.
    pub(crate) hardware: Hardware,
    /// Further arguments of the emulator.
    pub(crate) arguments: &'a [String],
}

impl Qemu {
    /// Starts the machine; it waits for a connection to the control channel.
    pub(crate) fn start(machine: &Machine<'_>) -> Result<Qemu> {
        let console = machine.dir.join("console.log");
        let mut command = command(machine, &console)?;
        let errors = File::create(machine.dir.join("qemu.log"))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(errors.try_clone()?)
            .stderr(errors)
            .spawn()
            .context("cannot start qemu-system-x86_64")?;
        Ok(Qemu { child, console })
    }

    /// The host's serial console, as a log.
    pub(crate) fn console(&self) -> &Path {
        &self.console
    }

    /// Processor time of the emulator, in seconds: the cost of a step, independent of the machine's load.
    pub(crate) fn cpu_s(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        let ticks = stat.ok().and_then(|text| {
            // User and system time are the 12th and 13th field after the name in parentheses.
            let after_name = text.rsplit_once(')')?.1.to_owned();
            let mut fields = after_name.split_whitespace().skip(11);
            let user: u64 = fields.next()?.parse().ok()?;
            let system: u64 = fields.next()?.parse().ok()?;
            Some(user + system)
        });
        ticks.unwrap_or(0) as f64 / rustix::param::clock_ticks_per_second() as f64
    }

    /// Whether the machine has ended, with its status.
    pub(crate) fn ended(&mut self) -> Option<String> {
        self.child.try_wait().ok().flatten().map(|status| status.to_string())
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // Both fail only if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A processor of the build machine, each in turn: two hosts that run at the same time have different ones.
fn next_processor() -> Result<usize> {
    static STARTED: AtomicUsize = AtomicUsize::new(0);
    let allowed = rustix::thread::sched_getaffinity(None)?;
    let started = STARTED.fetch_add(1, Ordering::Relaxed);
    let processors = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    processors.cycle().nth(started % 1024).context("there is no processor to run on")
}

fn command(machine: &Machine<'_>, console: &Path) -> Result<Command> {
    let (root, hardware) = (machine.root, machine.hardware);
    // setpriv: the machine is killed when this process dies.
    let mut command = Command::new(packages::find("setpriv").unwrap_or_else(|| "setpriv".into()));
    command.args(["--pdeathsig", "KILL", "--"]);
    if hardware.processor == Processor::Amd {
        // At each exit of a guest QEMU 7.2 clears a bit of the pending interrupts without a lock (`do_vmexit`). A timer
        // that fires in another thread at that time sets one, which is lost: the host stands still from then on. Threads
        // of one processor cannot meet inside of an instruction.
        command.args(["taskset", "--cpu-list", &next_processor()?.to_string()]);
    }
    command.arg("qemu-system-x86_64");
    // thread=single: Xen's locking is not under test, and it boots as fast.
    command.args(["-machine", "q35", "-accel", "tcg,thread=single"]);
    command.args(["-cpu", hardware.processor.model()]);
    if hardware.pace == Pace::Instructions {
        command.args(["-icount", "shift=0,align=off,sleep=off"]);
        command.args(["-rtc", "base=2026-01-01T00:00:00,clock=vm", "-seed", "1"]);
    }
    let (cpus, memory) = (hardware.cpus.to_string(), format!("{}M", hardware.host_mib));
    command.args(["-smp", &cpus, "-m", &memory, "-display", "none", "-monitor", "none"]);
    command.args(machine.arguments);
    command.args(["-no-reboot", "-nic", "none", "-device", "virtio-rng-pci"]);
    command.arg("-serial").arg(format!("file:{}", console.display()));
    command.arg("-kernel").arg(root.xen());
    command.arg("-append").arg(format!(
        "console=com1 com1=115200,8n1 dom0_mem={0}M,max:{0}M \
         dom0_max_vcpus=1 {1}loglvl=warning guest_loglvl=warning {2}",
        hardware.dom0_mib,
        if hardware.cpus > 1 { "dom0_vcpus_pin " } else { "" },
        hardware.pace.xen_arguments()
    ));
    // A machine that hangs while others run stalls every grace period, which is not dom0's fault.
    command.arg("-initrd").arg(format!(
        "{} console=hvc0 root=/dev/vda rw init=/lab-init quiet rcupdate.rcu_cpu_stall_suppress=1 \
         {},{}",
        root.kernel().display(),
        hardware.pace.linux_arguments(),
        root.initrd().display()
    ));
    let drive = |file: &Path, id: &str, more: &str| {
        format!("file={},if=none,format=raw,cache=unsafe,id={id}{more}", file.display())
    };
    // The cached root is never written: dom0's changes are lost with the machine.
    command.arg("-drive").arg(drive(&root.image(), "root", ",snapshot=on"));
    command.args(["-device", "virtio-blk-pci,drive=root,serial=root"]);
    command.arg("-drive").arg(drive(machine.payload, "lab", ",discard=unmap"));
    command.args(["-device", "virtio-blk-pci,drive=lab,serial=lab"]);
    for disk in machine.scratch {
        let file = machine.dir.join(format!("{}.raw", disk.serial));
        File::create(&file)?.set_len(disk.bytes)?;
        command.arg("-drive").arg(drive(&file, disk.serial, ",discard=unmap"));
        let model = if disk.nvme { "nvme" } else { "virtio-blk-pci" };
        command.arg("-device").arg(format!(
            "{model},drive={id},serial={id},logical_block_size={n},physical_block_size={n}",
            id = disk.serial,
            n = disk.sector_bytes
        ));
    }
    command
        .arg("-chardev")
        .arg(format!("socket,id=lab,path={},server=on,wait=on", machine.socket.display()));
    command.args(["-device", "virtio-serial-pci"]);
    command.args(["-device", "virtserialport,chardev=lab,name=ferrite.lab"]);
    Ok(command)
}
