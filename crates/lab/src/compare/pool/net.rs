//! Hosts of one machine: network namespaces, each with a link to the first one that carries no more than it is told.
//!
//! A namespace lives as long as the processes in it. The first process of each ends with this one, however that ends.

use std::fs;
use std::io::Read as _;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use ferrite_xenhost::packages::{self, Need};
use ferrite_xenhost::steps;

/// The programs that it needs, besides root.
const NEEDS: &[Need] =
    &[("ip", "iproute2"), ("tc", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")];
const PATIENCE: Duration = Duration::from_secs(10);
/// The bytes that may leave at once: some packets as the kernel puts them together.
const BURST: &str = "256kb";

/// As in a network for storage. With frames of 1500 bytes one twentieth of a link would be headers.
const MTU: u32 = 9000;

/// A network namespace.
pub(super) struct Host {
    /// Reads the pipe that this process has the other end of.
    first: Child,
    namespace: PathBuf,
}

/// The hosts: the one in the middle, and others with a link to it.
pub(super) struct Net {
    pub(super) middle: Host,
    pub(super) others: Vec<Host>,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.first.kill();
        let _ = self.first.wait();
    }
}

impl Host {
    fn start() -> Result<Host> {
        let mut command = Command::new("unshare");
        // It says so when it has its namespace.
        command.args(["--net", "sh", "-c", "ip link set lo up && echo up && exec cat"]);
        let first = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut first = first.context("cannot start unshare")?;
        let namespace = format!("/proc/{}/ns/net", first.id()).into();
        let mut said = [0; 3];
        let out = first.stdout.as_mut().context("it was piped")?;
        let heard = out.read_exact(&mut said);
        let host = Host { first, namespace };
        heard.context("no network namespace can be made: it takes root")?;
        Ok(host)
    }

    /// A program on this host.
    pub(super) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.namespace.display())).arg("--").arg(program);
        command
    }

    fn run(&self, words: &str) -> Result<()> {
        let mut words = words.split_whitespace();
        let mut command = self.command(words.next().context("a command has a name")?);
        steps::output(command.args(words)).map(drop)
    }
}

/// The address of the other host of this number, or of the middle one on the link to it.
pub(super) fn address(number: usize, is_middle: bool) -> Ipv4Addr {
    // Addresses for measurements (RFC 2544).
    Ipv4Addr::new(198, 18, number as u8, if is_middle { 1 } else { 2 })
}

impl Net {
    /// So many other hosts. A link carries `bytes_per_s` in each direction, headers included; without that as much as it can.
    pub(super) fn start(others: usize, bytes_per_s: Option<u64>) -> Result<Net> {
        packages::ensure(&[NEEDS])?;
        ensure!(packages::is_root(), "the part pool makes network namespaces: run it as root");
        let middle = Host::start()?;
        let others = (0..others).map(|_| Host::start()).collect::<Result<Vec<_>>>()?;
        let net = Net { middle, others };
        for number in 0..net.others.len() {
            net.link(number, bytes_per_s)?;
        }
        Ok(net)
    }

    fn link(&self, number: usize, bytes_per_s: Option<u64>) -> Result<()> {
        let (middle, other) = (&self.middle, &self.others[number]);
        let pid = other.first.id();
        middle.run(&format!("ip link add host{number} type veth peer name middle netns {pid}"))?;
        for (host, name, is_middle) in
            [(middle, format!("host{number}"), true), (other, "middle".to_owned(), false)]
        {
            let at = address(number, is_middle);
            host.run(&format!("ip address add {at}/30 dev {name}"))?;
            host.run(&format!("ip link set dev {name} mtu {MTU} up"))?;
            if let Some(rate) = bytes_per_s {
                host.run(&format!(
                    "tc qdisc add dev {name} root tbf rate {}bit burst {BURST} latency 50ms",
                    rate * 8
                ))?;
            }
        }
        Ok(())
    }
}

/// Processes that this one has started, whose command line has this word.
pub(super) fn children(pid: u32, word: &str) -> Vec<u32> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists =
        tasks.flatten().filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let all: Vec<u32> = lists
        .flat_map(|list| list.split_whitespace().flat_map(str::parse).collect::<Vec<_>>())
        .collect();
    let has_word = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|it| it == word.as_bytes())
    };
    all.into_iter().filter(has_word).collect()
}

/// The only such process, as soon as it is there.
pub(super) fn child(pid: u32, word: &str) -> Result<u32> {
    let end = Instant::now() + PATIENCE;
    loop {
        match children(pid, word)[..] {
            [only] => return Ok(only),
            _ if Instant::now() > end => bail!("process {pid} has not one child {word}"),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// The most memory that a process has had resident, in MiB.
pub(super) fn peak_mib(pid: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    peak_kib(&status).map(|kib| kib as f64 / 1024.0).context("it has no VmHWM")
}

fn peak_kib(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_of_a_link_have_addresses_of_one_network() {
        for number in [0, 1, 7] {
            let [middle, other] =
                [true, false].map(|is_middle| address(number, is_middle).octets());
            assert_eq!(middle[..3], other[..3]);
            assert_ne!(middle[3], other[3]);
            // Neither is the network's own address, or the one for all of it.
            assert!([middle[3], other[3]].iter().all(|byte| (1..=2).contains(byte)));
        }
    }

    #[test]
    fn children_are_found_by_a_word_of_theirs() {
        let own = std::process::id();
        let mut sleep = Command::new("sleep").arg("7654").spawn().unwrap();
        assert_eq!(child(own, "7654").unwrap(), sleep.id());
        assert_eq!(children(own, "765"), Vec::<u32>::new());
        assert!(peak_mib(sleep.id()).unwrap() > 0.0);
        sleep.kill().unwrap();
        sleep.wait().unwrap();
    }

    #[test]
    fn a_peak_is_read_from_what_the_kernel_says() {
        assert_eq!(peak_kib("VmPeak:\t 9 kB\nVmHWM:\t    5120 kB\n"), Some(5120));
        assert_eq!(peak_kib("Name:\ta\n"), None);
    }
}
