//! Network interfaces: guests that reach each other by `ferrite net serve`, with interfaces that xl makes.

mod migrated;
mod uplink;

use super::{Bench, Case, ferrite};
use anyhow::{Context, Result, ensure};
use ferrite_xenhost::disk::ended;
use ferrite_xenhost::guest::{Guest, GuestOptions, Kind};
use ferrite_xenhost::network;
use ferrite_xenhost::steps::say;

pub(super) const CASES: &[Case] = &[
    ferrite("net/two-guests", |bench| two_guests(bench, Kind::Pv)),
    ferrite("net/pvh-guests", |bench| two_guests(bench, Kind::Pvh)).on_amd(),
    ferrite("net/uplink-to-dom0", uplink::to_dom0),
    ferrite("net/a-guest-reboots", migrated::reboots),
    ferrite("net/a-guest-migrates-to-its-own-host", migrated::migrates).on_amd(),
];

const LOG: &str = "/tmp/net.log";
/// Bytes of data in each ping: around a frame, a page, and the largest.
const PINGS: [u32; 12] = [1, 56, 1000, 1472, 1473, 4000, 4096, 8191, 9000, 16_000, 40_000, 65_507];
/// MiB of a checksummed stream.
const STREAM_MIB: u32 = 8;

fn two_guests(bench: &mut Bench<'_>, kind: Kind) -> Result<()> {
    with_network(bench, "", |bench, network| steps(bench, network, kind))
}

/// Carries out steps while a switch is served with these further options.
fn with_network(
    bench: &mut Bench<'_>,
    options: &'static str,
    steps: impl FnOnce(&mut Bench<'_>, &mut Network) -> Result<()>,
) -> Result<()> {
    network::add_to_guests(bench.xenhost)?;
    let outcome = Network::start(bench, options).and_then(|mut network| {
        let outcome = steps(bench, &mut network);
        network.stop(bench).and(outcome)
    });
    let log = bench.xenhost.dom0(&format!("tail -n 40 {LOG}; rm -f {LOG}"), 20)?.stdout;
    outcome.with_context(|| format!("the network has said:\n{log}"))
}

/// The process of the switch.
struct Network {
    pid: u32,
    options: &'static str,
}

impl Network {
    fn start(bench: &mut Bench<'_>, options: &'static str) -> Result<Network> {
        let command = format!(
            "setsid ferrite net serve --switch lan --xl {options} </dev/null >>{LOG} 2>&1 & echo $!"
        );
        let pid = bench.xenhost.sh(&command)?;
        let pid = pid.parse().with_context(|| format!("odd answer: {pid}"))?;
        let ready = "ferrite net stat | grep -q interface && ls /run/ferrite/net/lan.json";
        bench.xenhost.wait_until("the switch", ready, 60)?;
        let rights = format!(
            "grep -q 'CapEff:.0*$' /proc/{pid}/status && grep -q 'NoNewPrivs:.1' /proc/{pid}/status"
        );
        bench.xenhost.sh(&rights).context("the rights of the switch")?;
        Ok(Network { pid, options })
    }

    /// Ends it by this signal.
    fn end(&self, bench: &mut Bench<'_>, signal: &str) -> Result<()> {
        bench.xenhost.sh(&format!("kill -{signal} {}; true", self.pid))?;
        bench.xenhost.wait_until("the end of the switch", &ended(self.pid), 60)
    }

    /// Ends it, and removes its folder.
    fn stop(self, bench: &mut Bench<'_>) -> Result<()> {
        self.end(bench, "TERM")?;
        bench.xenhost.sh("! ls /run/ferrite/net/*.json 2>/dev/null && rm -rf /run/ferrite/net")?;
        Ok(())
    }
}

/// A guest with an interface.
struct Peer {
    guest: Guest,
    address: String,
    number: u32,
}

impl Peer {
    fn start(bench: &mut Bench<'_>, kind: Kind, number: u32) -> Result<Peer> {
        let options = match kind {
            Kind::Pvh => GuestOptions::pvh(),
            kind => GuestOptions { kind, ..GuestOptions::default() },
        };
        let mut guest = bench.paused_guest(&options)?;
        guest.unpause(bench.xenhost)?;
        guest.wait_ready(bench.xenhost)?;
        Peer::of(bench, guest, number)
    }

    /// A guest that runs gets an interface.
    fn of(bench: &mut Bench<'_>, guest: Guest, number: u32) -> Result<Peer> {
        let mut peer = Peer { guest, address: format!("10.0.0.{number}"), number };
        peer.sh(bench, &format!("{}; mkfifo /tmp/never", network::LOAD), 60)?;
        peer.attach(bench)?;
        Ok(peer)
    }

    fn sh(&mut self, bench: &mut Bench<'_>, command: &str, limit_s: u64) -> Result<String> {
        self.guest.sh(bench.xenhost, command, limit_s)
    }

    /// xl makes the interface, and the guest uses it.
    fn attach(&mut self, bench: &mut Bench<'_>) -> Result<()> {
        let (domid, number) = (self.guest.domid(), self.number);
        let attach = format!(
            "xl network-attach {domid} script=vif-ferrite mac=00:16:3e:00:00:{number:02x} 2>&1"
        );
        bench.xenhost.sh_for(&attach, 60)?;
        self.up(bench)
    }

    /// The guest uses its interface.
    fn up(&mut self, bench: &mut Bench<'_>) -> Result<()> {
        let up = format!(
            "until ifconfig eth0 {} up 2>/dev/null; do sleep 0.2; done; \
             until [ $(cat /sys/class/net/eth0/carrier) = 1 ]; do sleep 0.2; done",
            self.address
        );
        self.sh(bench, &up, 60).map(drop)
    }

    fn detach(&mut self, bench: &mut Bench<'_>) -> Result<()> {
        let domid = self.guest.domid();
        bench.xenhost.sh_for(&format!("xl network-detach {domid} 0 2>&1"), 60)?;
        bench.xenhost.sh(&format!("! xenstore-exists /local/domain/0/backend/vif/{domid}/0"))?;
        self.sh(bench, "until ! ifconfig eth0 >/dev/null 2>&1; do sleep 0.2; done", 60).map(drop)
    }

    fn ping(&mut self, bench: &mut Bench<'_>, to: &Peer, sizes: &[u32]) -> Result<()> {
        let sizes: Vec<_> = sizes.iter().map(ToString::to_string).collect();
        // The first one resolves the address.
        let command = format!(
            "until ping -c 1 -W 1 {0} >/dev/null; do [ $((n=n+1)) -lt 20 ] || exit 1; done; \
             for s in {1}; do ping -c 2 -W 5 -s $s {0} >/tmp/ping || {{ cat /tmp/ping; exit 1; }}; done",
            to.address,
            sizes.join(" ")
        );
        self.sh(bench, &command, 200).map(drop)
    }
}

/// Data go both ways at the same time by TCP, and arrive as they were sent. `meanwhile` is called when both have begun.
fn streams(
    bench: &mut Bench<'_>,
    peers: &mut [Peer; 2],
    mib: u32,
    meanwhile: impl FnOnce(&mut Bench<'_>) -> Result<()>,
) -> Result<()> {
    // A listener whose own input ends would end the connection.
    let listen = "exec 9<>/tmp/never; busybox nc -l -p 9000 <&9 | md5sum";
    let data =
        format!("dd if=/dev/urandom of=/tmp/data bs=1M count={mib} 2>/dev/null; md5sum </tmp/data");
    let mut sums = Vec::new();
    let mut listeners = Vec::new();
    for peer in peers.iter_mut() {
        sums.push(peer.sh(bench, &data, 120)?);
        listeners.push(peer.guest.begin(bench.xenhost, listen, 400)?);
        peer.sh(bench, "until netstat -ltn | grep -q :9000; do sleep 0.1; done", 60)?;
    }
    let mut senders = Vec::new();
    for at in 0..2 {
        let send = format!("busybox nc {} 9000 </tmp/data", peers[1 - at].address);
        senders.push(peers[at].guest.begin(bench.xenhost, &send, 400)?);
    }
    meanwhile(bench)?;
    for at in 0..2 {
        peers[at].guest.finish_ok(bench.xenhost, &senders[at])?;
        let got = peers[1 - at].guest.finish_ok(bench.xenhost, &listeners[1 - at])?;
        ensure!(
            got == sums[at],
            "stream {at}: the sum of {mib} MiB is {got} instead of {}",
            sums[at]
        );
    }
    Ok(())
}

/// Bytes in a packet of those that a guest has sent since the last call.
fn packet_bytes(bench: &mut Bench<'_>, peer: &Peer, since: &mut (u64, u64)) -> Result<u64> {
    // Counters are written twice a second.
    let told = bench.xenhost.sh(&format!(
        "sleep 1.2; ferrite net stat | awk '$1==\"vif{}.0\" {{print $3, $4}}'",
        peer.guest.domid()
    ))?;
    let (packets, bytes) = told.split_once(' ').with_context(|| format!("odd answer: {told}"))?;
    let now = (packets.parse::<u64>()?, bytes.parse::<u64>()?);
    let mean = (now.1 - since.1) / (now.0 - since.0).max(1);
    *since = now;
    Ok(mean)
}

fn steps(bench: &mut Bench<'_>, network: &mut Network, kind: Kind) -> Result<()> {
    let mut peers = [Peer::start(bench, kind, 1)?, Peer::start(bench, kind, 2)?];
    let mut seen = (0, 0);
    say("  pings, and streams with segmentation");
    let [first, second] = &mut peers;
    first.ping(bench, second, &PINGS).context("pings")?;
    packet_bytes(bench, &peers[0], &mut seen)?;
    streams(bench, &mut peers, STREAM_MIB, |_| Ok(())).context("streams")?;
    let mean = packet_bytes(bench, &peers[0], &mut seen)?;
    // TCP fills a packet only as far as its rate asks for. That of emulated PVH guests asks for one segment.
    let is_fast = matches!(kind, Kind::Pv);
    ensure!(
        mean > 1600 || !is_fast,
        "a packet has {mean} bytes: segmentation is not left to the receiver"
    );

    say("  without segmentation, and with large frames");
    for peer in &mut peers {
        peer.sh(bench, "iproute2 link set eth0 gso_max_segs 1", 30)?;
    }
    streams(bench, &mut peers, STREAM_MIB / 2, |_| Ok(())).context("without segmentation")?;
    let mean = packet_bytes(bench, &peers[0], &mut seen)?;
    ensure!(mean < 1515, "a packet has {mean} bytes although the guest segments");
    for peer in &mut peers {
        peer.sh(bench, "iproute2 link set eth0 mtu 9000 gso_max_segs 65535", 30)?;
    }
    let [first, second] = &mut peers;
    first.ping(bench, second, &PINGS).context("pings with large frames")?;
    streams(bench, &mut peers, STREAM_MIB, |_| Ok(())).context("large frames")?;

    say("  the process killed under both streams");
    streams(bench, &mut peers, 2 * STREAM_MIB, |bench| {
        bench.xenhost.sh("sleep 1")?;
        network.end(bench, "KILL")?;
        *network = Network::start(bench, network.options)?;
        Ok(())
    })
    .context("killed")?;

    say("  detached and attached again");
    peers[0].detach(bench)?;
    peers[0].attach(bench)?;
    let [first, second] = &mut peers;
    first.ping(bench, second, &[56, 65_507]).context("attached again")?;
    streams(bench, &mut peers, STREAM_MIB / 2, |_| Ok(())).context("attached again")?;

    say("  a guest destroyed under a stream");
    let [mut first, second] = peers;
    let endless = "exec 9<>/tmp/never; busybox nc -l -p 9001 <&9 >/dev/null";
    let sink = first.guest.begin(bench.xenhost, endless, 600)?;
    let mut other = second;
    let send = format!("busybox nc {} 9001 </dev/zero; true", first.address);
    let sender = other.guest.begin(bench.xenhost, &send, 600)?;
    bench.xenhost.sh("sleep 1")?;
    bench.xenhost.sh_for(&format!("xl destroy {} 2>&1", first.guest.domid()), 60)?;
    drop(sink);
    let domid = first.guest.domid();
    let gone =
        format!("! xenstore-exists /local/domain/0/backend/vif/{domid} && ! xl list {domid}");
    bench.xenhost.wait_until("the guest gone", &gone, 30)?;
    bench.forget(&first.guest);
    let mut third = Peer::start(bench, kind, 1)?;
    third
        .ping(bench, &other, &[56, 65_507])
        .context("a new guest with the address of the old one")?;
    other.sh(bench, "killall nc; true", 30)?;
    other.guest.finish(bench.xenhost, &sender)?;
    Ok(())
}
