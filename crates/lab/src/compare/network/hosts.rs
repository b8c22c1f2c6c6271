//! The host, two guests, and their two interfaces each: one of the kernel's backend, one of `ferrite net serve`.

use anyhow::{Context as _, Result, bail};
use ferrite_xenhost::XenHost;
use ferrite_xenhost::guest::{Guest, GuestOptions};
use ferrite_xenhost::network;
use ferrite_xenhost::steps::step;

use super::packet::{KERNEL, OURS, Path};

/// The backend that moves the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Backend {
    /// netback, the bridge, netback.
    Kernel,
    /// `ferrite net serve`.
    Ours,
}

impl Backend {
    pub(super) const BOTH: [Backend; 2] = [Backend::Kernel, Backend::Ours];

    pub(super) fn name(self) -> &'static str {
        match self {
            Backend::Kernel => "netback",
            Backend::Ours => "ferrite",
        }
    }

    pub(super) fn path(self) -> Path {
        match self {
            Backend::Kernel => KERNEL,
            Backend::Ours => OURS,
        }
    }

    /// The address of guest `number`; of dom0, if that is 254.
    pub(super) fn address(self, number: u32) -> String {
        format!("10.0.{}.{number}", self as u32)
    }
}

/// dom0's number in addresses.
pub(super) const HOST: u32 = 254;

/// The host.
pub(super) struct Host {
    pub(super) xenhost: XenHost,
    pub(super) guests: Vec<Guest>,
}

/// A domain that can run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Who {
    Guest(usize),
    Dom0,
}

impl Who {
    pub(super) fn address(self, backend: Backend) -> String {
        match self {
            Who::Guest(at) => backend.address(at as u32 + 1),
            Who::Dom0 => backend.address(HOST),
        }
    }
}

impl Host {
    /// Sets up both backends, and two guests with an interface of each.
    pub(super) fn prepare(mut xenhost: XenHost) -> Result<Host> {
        step("bridge, switch and drivers", || backends(&mut xenhost))?;
        let mut host = Host { xenhost, guests: Vec::new() };
        for number in [1, 2] {
            step("start a guest", || host.start(number))?;
        }
        Ok(host)
    }

    /// A guest of one processor.
    fn start(&mut self, number: u32) -> Result<()> {
        let options = GuestOptions { vcpus: 1, host_time: true, ..GuestOptions::default() };
        let mut guest = Guest::start(&mut self.xenhost, &options)?;
        let domid = guest.domid();
        let mac = format!("00:16:3e:00:00:{number:02x}");
        self.xenhost.sh_for(&format!("xl network-attach {domid} bridge=xenbr0 mac={mac}"), 120)?;
        self.xenhost.sh(&by_hand(domid, &format!("00:16:3e:00:01:{number:02x}")))?;
        let up = |backend: Backend| {
            let (interface, address) = (backend as u32, backend.address(number));
            format!(
                "until ifconfig eth{interface} {address} netmask 255.255.255.0 up 2>/dev/null && \
                 [ $(cat /sys/class/net/eth{interface}/carrier) = 1 ]; do sleep 0.1; done"
            )
        };
        let [first, second] = Backend::BOTH.map(up);
        let up = format!(
            "{}; {first}; {second}; mount -t tracefs none {}",
            network::LOAD,
            super::TRACING
        );
        guest.sh(&mut self.xenhost, &up, 200)?;
        self.guests.push(guest);
        Ok(())
    }

    /// Runs a command somewhere.
    pub(super) fn sh(&mut self, who: Who, command: &str, limit_s: u64) -> Result<String> {
        match who {
            Who::Guest(at) => self.guests[at].sh(&mut self.xenhost, command, limit_s),
            Who::Dom0 => self.xenhost.sh_for(command, limit_s),
        }
    }

    /// A line each 20 ms until the file is removed: dom0's clock, and the processor time so far of dom0 and of the guest
    /// that shows when there is load; nanoseconds.
    pub(super) fn begin_samples(&mut self, shows: usize) -> Result<()> {
        let domid = self.guests[shows].domid();
        let command = format!(
            "rm -f {SAMPLES}; touch {SAMPLES}; setsid python3 -c '{SAMPLER}' {domid} >>{SAMPLES} 2>&1 &"
        );
        self.xenhost.sh(&command)?;
        self.xenhost.wait_until("samples of processor time", &format!("[ -s {SAMPLES} ]"), 60)
    }

    /// The part of its time that dom0 has run, while the guest was busy.
    pub(super) fn busy(&mut self) -> Result<f64> {
        let text = self.xenhost.sh(&format!("cat {SAMPLES}; rm {SAMPLES}"))?;
        busy(&text).with_context(|| format!("odd samples: {text}"))
    }

    /// Fails with what the switch has said, if its process has ended.
    pub(super) fn check(&mut self) -> Result<()> {
        let output = self.xenhost.dom0("pgrep -x ferrite >/dev/null || cat /tmp/net.log", 20)?;
        match output.stdout.is_empty() {
            true => Ok(()),
            false => bail!("the switch has ended: {}", output.stdout),
        }
    }
}

const SAMPLES: &str = "/tmp/samples";

/// The library's call writes a structure of a number, three flags and the time.
const SAMPLER: &str = "
import ctypes, os, sys, time
x = ctypes.CDLL(\"libxenctrl.so.4.20\")
x.xc_interface_open.restype = ctypes.c_void_p
h = ctypes.c_void_p(x.xc_interface_open(None, None, 0))
b = ctypes.create_string_buffer(64)
while os.path.exists(\"/tmp/samples\"):
    line = [time.monotonic_ns()]
    for domid in [0, int(sys.argv[1])]:
        x.xc_vcpu_getinfo(h, domid, 0, b)
        line.append(int.from_bytes(b.raw[8:16], \"little\"))
    print(*line, flush=True)
    time.sleep(0.02)
";

/// What a guest runs at least, of its time, while there is load.
const LOADED: f64 = 0.1;

/// dom0's part in the longest time in which the guest was busy, without its first and last interval.
fn busy(text: &str) -> Option<f64> {
    let line = |line: &str| {
        let mut words = line.split(' ').map(|word| word.parse::<f64>().ok());
        Some([words.next()??, words.next()??, words.next()??])
    };
    let samples: Vec<[f64; 3]> = text.lines().map(line).collect::<Option<_>>()?;
    let (mut longest, mut begin) = (0..0, 0);
    for (at, pair) in samples.windows(2).enumerate() {
        let is_busy = pair[1][2] - pair[0][2] > LOADED * (pair[1][0] - pair[0][0]);
        if !is_busy {
            begin = at + 1;
        } else if at + 1 - begin > longest.len() {
            longest = begin..at + 1;
        }
    }
    let (first, last) =
        (samples.get(longest.start + 1)?, samples.get(longest.end.checked_sub(1)?)?);
    (last[0] > first[0]).then(|| (last[1] - first[1]) / (last[0] - first[0]))
}

/// Sets up a bridge and the switch, each with an address of dom0, and the guests' driver.
fn backends(xenhost: &mut XenHost) -> Result<()> {
    let (bridge, tap) = (Backend::Kernel.address(HOST), Backend::Ours.address(HOST));
    xenhost.sh_for(
        &format!(
            "set -e; modprobe xen-netback; modprobe bridge; modprobe tun; \
             echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; \
             ip link add xenbr0 type bridge; ip address add {bridge}/24 dev xenbr0; ip link set xenbr0 up; \
             ip tuntap add ferrite0 mode tap multi_queue; ip address add {tap}/24 dev ferrite0; \
             ip link set ferrite0 up; \
             setsid ferrite net serve --switch lan --uplink ferrite0 </dev/null >/tmp/net.log 2>&1 &"
        ),
        180,
    )?;
    xenhost.wait_until("the switch", "ls /run/ferrite/net/lan.json", 120)?;
    network::add_to_guests(xenhost)
}

/// The commands of docs/network.md that make an interface, of handle 1.
fn by_hand(domid: u32, mac: &str) -> String {
    let front = format!("/local/domain/{domid}/device/vif/1");
    let back = format!("/local/domain/0/backend/vif-ferrite/{domid}/1");
    // The guest may write what is made below a directory after that is its own.
    format!(
        "set -e; xenstore-write {front} '' {back} ''; \
         xenstore-chmod {front} n{domid} r0; xenstore-chmod {back} n0 r{domid}; \
         xenstore-write {back}/frontend {front} {back}/frontend-id {domid} {back}/mac {mac} {back}/handle 1 \
         {back}/online 1 {back}/hotplug-status connected; \
         xenstore-write {front}/backend {back} {front}/backend-id 0 {front}/mac {mac} {front}/handle 1; \
         xenstore-write {front}/state 1; xenstore-write {back}/state 1"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busy_part_is_that_of_the_time_with_load() {
        // dom0 is busy with other work first; with the guest it runs half of the time, in 10 intervals of 20.
        let (mut text, mut dom0, mut guest) = (String::new(), 0, 0);
        for at in 0..40_u64 {
            (dom0, guest) = match at {
                3..6 => (dom0 + 20, guest),
                15..25 => (dom0 + 10, guest + 8),
                _ => (dom0, guest + 1),
            };
            text += &format!("{} {dom0} {guest}\n", at * 20);
        }
        assert_eq!(busy(&text), Some(0.5));
        assert_eq!(busy("Traceback"), None);
        assert_eq!(busy("1 2 3"), None);
    }

    #[test]
    fn each_backend_has_a_network_of_its_own() {
        assert_eq!(Who::Guest(1).address(Backend::Kernel), "10.0.0.2");
        assert_eq!(Who::Dom0.address(Backend::Ours), "10.0.1.254");
    }
}
