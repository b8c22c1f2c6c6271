//! The interfaces that the kernel offers.

use std::fs;
use std::path::Path;

use rustix::process::{Resource, getrlimit};

use ferrite_disk::size::Human;
use ferrite_io::engines::EngineKind;

use super::{Check, State, read};

/// The data memory of one disk at default limits, which io_uring keeps locked.
const LOCKED_BYTES: u64 = 8 << 20;

const CAP_IPC_LOCK: u32 = 14;
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// `chosen`: the engine that `--engine auto` takes here.
pub(super) fn checks(chosen: Option<EngineKind>) -> Vec<Check> {
    vec![
        version(),
        io_uring(chosen),
        aio(chosen),
        polled_storage(),
        huge_pages(),
        locked_memory(),
        run_directory(),
        devices(),
        ublk(),
    ]
}

fn check(name: &'static str, state: State, found: String, means: impl Into<String>) -> Check {
    Check { area: "kernel", name, state, found, means: means.into() }
}

fn version() -> Check {
    let uname = rustix::system::uname();
    let text = |c: &std::ffi::CStr| c.to_string_lossy().into_owned();
    let found = format!("Linux {} on {}", text(uname.release()), text(uname.machine()));
    check("version", State::Ok, found, "")
}

fn io_uring(chosen: Option<EngineKind>) -> Check {
    let name = "io_uring";
    match ferrite_io::uring::probe() {
        Ok(features) => {
            let whole = features.fixed_buffers && features.missing_ops.is_empty();
            let state = if whole { State::Ok } else { State::Warn };
            check(name, state, features.to_string(), "used for all disk I/O")
        }
        Err(e) => {
            let disabled = read("/proc/sys/kernel/io_uring_disabled");
            let state = if chosen.is_some() { State::Warn } else { State::No };
            check(name, state, format!("not available: {e}"), advice(disabled.as_deref()))
        }
    }
}

/// The advice where io_uring does not work, from the value of `kernel.io_uring_disabled`.
fn advice(disabled: Option<&str>) -> &'static str {
    match disabled {
        Some("2") => "disabled for all users; sysctl kernel.io_uring_disabled=0 allows it",
        Some("1") => {
            "only for privileged users and the group of kernel.io_uring_group; run as root, join \
             the group, or sysctl kernel.io_uring_disabled=0"
        }
        _ => {
            "needs Linux 5.11 or newer with CONFIG_IO_URING, and a sandbox (container, seccomp) \
             that lets it through"
        }
    }
}

fn aio(chosen: Option<EngineKind>) -> Check {
    let name = "Linux AIO";
    let means = match chosen {
        Some(EngineKind::Aio) => "used for all disk I/O, since io_uring does not work here",
        _ => "not used unless asked for (--engine aio)",
    };
    match ferrite_io::aio::probe() {
        Ok(()) => {
            let number = |path| read(path).unwrap_or_else(|| "?".into());
            let (used, max) = (number("/proc/sys/fs/aio-nr"), number("/proc/sys/fs/aio-max-nr"));
            check(name, State::Ok, format!("available, {used} of {max} requests taken"), means)
        }
        Err(e) => {
            let state = if chosen.is_some() { State::Ok } else { State::No };
            check(name, state, format!("not available: {e}"), "not needed where io_uring works")
        }
    }
}

/// Block devices with poll queues, and NVMe namespaces as character devices.
fn polled_storage() -> Check {
    let name = "polled storage";
    let names = |dir: &str, fits: &dyn Fn(&str) -> bool| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|e| e.file_name().into_string().ok()).filter(|n| fits(n)).collect();
        names.sort();
        names.join(" ")
    };
    let is_polled =
        |name: &str| read(&format!("/sys/block/{name}/queue/io_poll")).as_deref() == Some("1");
    let polled = names("/sys/block", &is_polled);
    let commands = names("/dev", &is_namespace);
    let queues = read("/sys/module/nvme/parameters/poll_queues");
    let (found, means) = match (polled.is_empty(), queues.as_deref()) {
        (false, _) => (format!("poll queues: {polled}"), "used with --poll-storage"),
        (true, Some("0")) => (
            "no poll queues; the NVMe driver has none (nvme.poll_queues=0)".into(),
            "load nvme with poll_queues=N (one a queue of each disk) to use --poll-storage",
        ),
        (true, _) => ("no device has poll queues".into(), "--poll-storage would change nothing"),
    };
    let found = match commands.is_empty() {
        true => found,
        false => format!("{found}; for NVMe commands: {commands}"),
    };
    check(name, State::Ok, found, means)
}

/// Whether a name in /dev is the character device of an NVMe namespace: `ng0n1`.
fn is_namespace(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let parts = name.strip_prefix("ng").and_then(|rest| rest.split_once('n'));
    parts.is_some_and(|(controller, namespace)| number(controller) && number(namespace))
}

fn huge_pages() -> Check {
    let free: u64 = read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .and_then(|text| text.parse().ok())
        .unwrap_or(0);
    let transparent = read("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let name = "huge pages";
    if free > 0 {
        return check(name, State::Ok, format!("{free} free pages of 2 MiB"), "used for data");
    }
    match chosen(&transparent) {
        Some(mode @ ("always" | "madvise")) => check(
            name,
            State::Ok,
            format!("none reserved; transparent ones on ({mode})"),
            "transparent huge pages are used for data; vm.nr_hugepages reserves certain ones",
        ),
        _ => check(
            name,
            State::Warn,
            "none reserved, and transparent ones are off".into(),
            "pages of 4 KiB are used: more CPU for each request; sysctl vm.nr_hugepages=64, or \
             allow transparent ones",
        ),
    }
}

/// The word in brackets: `always [madvise] never`.
fn chosen(choices: &str) -> Option<&str> {
    choices.split_once('[')?.1.split_once(']').map(|(word, _)| word)
}

fn locked_memory() -> Check {
    let limit = getrlimit(Resource::Memlock).current;
    let exempt = read("/proc/self/status").is_some_and(|s| has_capability(&s, CAP_IPC_LOCK));
    locked_memory_for(limit, exempt)
}

fn locked_memory_for(limit: Option<u64>, exempt: bool) -> Check {
    let name = "locked memory";
    match limit {
        _ if exempt => check(name, State::Ok, "no limit for this user (CAP_IPC_LOCK)".into(), ""),
        None => check(name, State::Ok, "no limit".into(), ""),
        Some(bytes) if bytes >= LOCKED_BYTES => {
            // A second disk would not start with io_uring.
            let (state, means) = match bytes / LOCKED_BYTES {
                1 => (State::Warn, "enough for 1 disk; raise it with ulimit -l".to_owned()),
                n => (State::Ok, format!("enough for {n} disks at default limits")),
            };
            check(name, state, format!("limit {}", Human(bytes)), means)
        }
        Some(bytes) => check(
            name,
            State::Warn,
            format!("limit {}", Human(bytes)),
            format!("a disk keeps {} locked; raise it with ulimit -l", Human(LOCKED_BYTES)),
        ),
    }
}

/// Whether /proc/self/status grants the capability with that number.
fn has_capability(status: &str, number: u32) -> bool {
    status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
        .is_some_and(|set| set >> number & 1 == 1)
}

/// The in-flight table is a file there, which each request changes.
fn run_directory() -> Check {
    let name = "/run";
    match rustix::fs::statfs("/run") {
        Ok(s) if s.f_type as u64 == TMPFS_MAGIC => check(
            name,
            State::Ok,
            "in memory (tmpfs)".into(),
            "holds the requests in flight, so that a killed server's successor can take over",
        ),
        Ok(_) => check(
            name,
            State::Warn,
            "not a tmpfs".into(),
            "the record of requests in flight costs disk writes there; mount a tmpfs on /run",
        ),
        Err(e) => {
            check(name, State::No, format!("not there: {e}"), "make it, and mount a tmpfs on it")
        }
    }
}

/// Disks as block devices of this host, by the kernel's NBD client.
fn devices() -> Check {
    let name = "devices, nbd";
    match ferrite_host::nbd_device::Devices::open() {
        Ok(_) => check(
            name,
            State::Ok,
            "nbd is loaded".into(),
            "ferrite disk device shows disks to this host",
        ),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => match has_module("nbd") {
            true => check(
                name,
                State::Ok,
                "nbd is not loaded".into(),
                "only ferrite disk device needs it: modprobe nbd, or --load",
            ),
            false => check(
                name,
                State::Ok,
                "this kernel has no nbd".into(),
                "only ferrite disk device needs it: --by ublk, or a kernel with the module nbd",
            ),
        },
        Err(e) => check(name, State::Ok, format!("nbd cannot be asked for: {e}"), ""),
    }
}

/// Whether this kernel makes devices by its ublk driver.
fn ublk() -> Check {
    let name = "devices, ublk";
    let (found, means) = match ferrite_io::ublk::Control::open() {
        Ok(_) => ("ublk_drv is loaded".into(), "ferrite disk device uses it"),
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => (
            format!("ublk_drv cannot be asked: {e}"),
            "run ferrite doctor as root; --by nbd does the same",
        ),
        Err(_) if has_module("ublk_drv") => (
            "ublk_drv is not loaded".into(),
            "only ferrite disk device uses it, and is faster by it: modprobe ublk_drv, or --by ublk --load",
        ),
        Err(_) => (
            "this kernel has no ublk_drv".into(),
            "only ferrite disk device would use it; its NBD client does the same",
        ),
    };
    check(name, State::Ok, found, means)
}

/// Whether the running kernel has this module, loaded or not.
fn has_module(module: &str) -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let folder = Path::new("/lib/modules").join(release);
    let lists = ["modules.dep", "modules.builtin"].map(|list| folder.join(list));
    let file = format!("/{module}.ko");
    let names = |line: &str| line.split(':').next().is_some_and(|path| path.contains(&file));
    lists.iter().any(|list| fs::read_to_string(list).unwrap_or_default().lines().any(names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_known_by_its_name() {
        assert!(is_namespace("ng0n1") && is_namespace("ng12n34"));
        assert!(!["ng0", "ngn1", "nvme0n1", "ng0n1p1", "ng"].into_iter().any(is_namespace));
    }

    #[test]
    fn the_chosen_word_is_the_one_in_brackets() {
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen("always madvise [never]"), Some("never"));
        assert_eq!(chosen(""), None);
        assert_eq!(chosen("[x"), None);
    }

    #[test]
    fn a_capability_is_a_bit_of_the_effective_set() {
        let status = "Name:\tx\nCapPrm:\tffff\nCapEff:\t0000000000004000\n";
        assert!(has_capability(status, CAP_IPC_LOCK));
        assert!(!has_capability(status, 13));
        assert!(!has_capability("CapEff:\tzz\n", CAP_IPC_LOCK));
        assert!(!has_capability("", CAP_IPC_LOCK));
    }

    #[test]
    fn too_little_lockable_memory_is_a_warning_unless_exempt() {
        assert_eq!(locked_memory_for(Some(64 << 10), false).state, State::Warn);
        assert_eq!(locked_memory_for(Some(64 << 10), true).state, State::Ok);
        assert_eq!(locked_memory_for(None, false).state, State::Ok);
        assert!(locked_memory_for(Some(16 << 20), false).means.contains("2 disks"));
        let one = locked_memory_for(Some(8 << 20), false);
        assert_eq!((one.state, one.means.contains("1 disk;")), (State::Warn, true));
    }

    #[test]
    fn the_advice_names_the_setting_that_forbids_io_uring() {
        assert!(advice(Some("2")).contains("all users"));
        assert!(advice(Some("1")).contains("io_uring_group"));
        assert!(advice(None).contains("CONFIG_IO_URING"));
    }
}
