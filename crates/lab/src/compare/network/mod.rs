//! The kernel's network backend: guest to guest in one host, in the emulator's counting mode.

mod packet;

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use ferrite_xenhost::guest::{Guest, GuestOptions};
use ferrite_xenhost::qemu::{Hardware, Pace};
use ferrite_xenhost::steps::{say, step};
use ferrite_xenhost::{XenHost, packages, root};
use packet::{BACK, COMPLETED, FIRST, FORK, Party, RECEIVED, TO_THE_RECEIVER, Times};

use super::table::figure;
use crate::experiments::findings::{Chart, Findings, Row};

/// Packets that are traced, and their bytes: full ones, whose pages netback maps.
const PACKETS: u32 = 20;
const PACKET_BYTES: u32 = 1400;
/// Numbers of concurrent streams.
const STREAMS: [u32; 4] = [1, 2, 4, 8];
const ROUNDS: u32 = 3;
/// Duration of a stream, in time of the emulated machine.
const STREAM_MS: u32 = 300;
const PORT: u32 = 9000;
/// The published figures: one stream, and all of a host.
const PUBLISHED: [(u32, f64); 2] = [(1, 15_000.0), (8, 33_000.0)];
/// The trace folder of a kernel.
const TRACING: &str = "/sys/kernel/tracing";

/// A guest with its address.
struct Peer {
    guest: Guest,
    address: String,
}

/// Boots the host, and measures.
pub(super) fn run() -> Result<Findings> {
    packages::ensure(&[packages::XEN_HOST])?;
    let root = root::ensure(root::TRIXIE)?;
    let hardware = Hardware { pace: Pace::Instructions, ..Hardware::default() };
    let mut xenhost = XenHost::boot_at(hardware, &root, &[], &[])?;
    step("bridge and drivers", || prepare(&mut xenhost))?;
    let mut sender = start(&mut xenhost, 1)?;
    let mut receiver = start(&mut xenhost, 2)?;
    let plain = step("round trips", || ping(&mut xenhost, &mut sender, &receiver))?;
    let (times, probed) =
        step("the way of a packet", || trace(&mut xenhost, &mut sender, &mut receiver))?;
    let mut rates = BTreeMap::new();
    for round in 1..=ROUNDS {
        for streams in STREAMS {
            let what = format!("{streams} streams, round {round} of {ROUNDS}");
            let rate = step(&what, || stream(&mut xenhost, &mut sender, &mut receiver, streams))?;
            say(format!("  {} Mbit/s", figure(rate)));
            rates.entry(streams).or_insert_with(Vec::new).push(rate);
        }
    }
    Ok(findings(&times, &plain, &probed, &rates))
}

/// Sets up a bridge, and adds the network driver to the guests' RAM disk: guests of other tests have no network.
fn prepare(xenhost: &mut XenHost) -> Result<()> {
    let driver = "usr/lib/modules/xen-netfront.ko";
    xenhost
        .sh_for(
            &format!(
                "set -e; modprobe xen-netback; modprobe bridge; ip link add xenbr0 type bridge; \
                 echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; ip link set xenbr0 up; \
                 mkdir -p /tmp/net/usr/lib/modules; cd /tmp/net; \
                 busybox xzcat $(modinfo -n xen-netfront) >{driver}; \
                 echo {driver} | busybox cpio -o -H newc | gzip -1 >>/lab/guest.img"
            ),
            120,
        )
        .map(drop)
}

/// A guest of one processor with a network interface on the bridge.
fn start(xenhost: &mut XenHost, number: u32) -> Result<Peer> {
    let options = GuestOptions { vcpus: 1, host_time: true, ..GuestOptions::default() };
    let address = format!("10.0.0.{number}");
    let mut guest = step("start a guest", || Guest::start(xenhost, &options))?;
    let (domid, mac) = (guest.domid(), format!("00:16:3e:00:00:{number:02x}"));
    xenhost.sh_for(&format!("xl network-attach {domid} bridge=xenbr0 mac={mac}"), 120)?;
    let up = format!(
        "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; insmod /lib/modules/xen-netfront.ko && \
         until ifconfig eth0 {address} up; do sleep 0.1; done && mount -t tracefs none {TRACING}"
    );
    guest.sh(xenhost, &up, 120)?;
    Ok(Peer { guest, address })
}

fn ping(xenhost: &mut XenHost, sender: &mut Peer, receiver: &Peer) -> Result<Vec<f64>> {
    let to = &receiver.address;
    // The first packets resolve the address, and wake idle processors.
    let warm = format!("ping -c 3 -s {PACKET_BYTES} {to} >/dev/null");
    sender.guest.sh(xenhost, &warm, 120)?;
    let command = format!("ping -c {PACKETS} -s {PACKET_BYTES} {to}");
    packet::round_trips(&sender.guest.sh(xenhost, &command, 120)?)
}

/// The times of the hops, and the round trips of the same packets.
fn trace(
    xenhost: &mut XenHost,
    sender: &mut Peer,
    receiver: &mut Peer,
) -> Result<(Times, Vec<f64>)> {
    // The guests have no tracefs mounted yet, unlike dom0.
    xenhost.sh(&format!("mount -t tracefs none {TRACING}; true"))?;
    xenhost.sh_for(&probe(Party::Dom0), 120)?;
    sender.guest.sh(xenhost, &probe(Party::Sender), 120)?;
    receiver.guest.sh(xenhost, &probe(Party::Receiver), 120)?;
    let probed = ping(xenhost, sender, receiver)?;
    let read = format!(
        "cd {TRACING} && echo 0 >tracing_on && cat trace && echo 0 >events/enable && echo >kprobe_events"
    );
    let traces = [
        sender.guest.sh(xenhost, &read, 120)?,
        xenhost.sh_for(&read, 120)?,
        receiver.guest.sh(xenhost, &read, 120)?,
    ];
    let mhz = xenhost.sh("xl info | sed -n 's/^cpu_mhz *: *//p'")?;
    let mhz: f64 = mhz.parse().with_context(|| format!("odd answer: {mhz}"))?;
    Ok((packet::follow(&traces, mhz)?, probed))
}

/// A shell command that has a kernel record each entry of its functions, by the processor's counter.
fn probe(party: Party) -> String {
    let probe = |function: &str| format!("echo p:{function} {function} >>kprobe_events");
    let probes: Vec<String> = packet::functions(party).into_iter().map(probe).collect();
    format!(
        "cd {TRACING} && echo 0 >tracing_on && echo x86-tsc >trace_clock && {} && \
         echo 1 >events/kprobes/enable && echo >trace && echo 1 >tracing_on",
        probes.join(" && ")
    )
}

/// Megabits a second, by so many streams of TCP.
fn stream(
    xenhost: &mut XenHost,
    sender: &mut Peer,
    receiver: &mut Peer,
    streams: u32,
) -> Result<f64> {
    let both = format!(
        "--ioengine=net --protocol=tcp --port={PORT} --bs=64k --thread --numjobs={streams} --group_reporting --minimal"
    );
    // It ends with its connections, or by a signal.
    let listen = format!("fio --name=to {both} --rw=read --size=1t --listen; true");
    let job = receiver.guest.begin(xenhost, &listen, 300)?;
    let ready =
        format!("until [ $(netstat -ltn | grep -c ':90') = {streams} ]; do sleep 0.1; done");
    receiver.guest.sh(xenhost, &ready, 120)?;
    let send = format!(
        "fio --name=from {both} --rw=write --size=1t --hostname={} --time_based --runtime={STREAM_MS}ms",
        receiver.address
    );
    let output = sender.guest.sh(xenhost, &send, 300)?;
    receiver.guest.sh(xenhost, "killall fio; true", 60)?;
    receiver.guest.finish(xenhost, &job)?;
    rate(&output).with_context(|| format!("odd output of fio: {output}"))
}

/// The bandwidth of writes in fio's terse format, given in KiB/s.
fn rate(output: &str) -> Option<f64> {
    let fields = output.lines().map(|line| line.split(';').collect::<Vec<_>>());
    let fields = fields.into_iter().find(|fields| fields.get(2) == Some(&"from"))?;
    let kib_s: f64 = fields.get(47)?.parse().ok()?;
    Some(kib_s * 1024.0 * 8.0 / 1e6)
}

/// The index of the median of these values.
fn median(values: &[f64]) -> usize {
    let mut places: Vec<usize> = (0..values.len()).collect();
    places.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    places[places.len() / 2]
}

fn findings(
    times: &Times,
    plain: &[f64],
    probed: &[f64],
    rates: &BTreeMap<u32, Vec<f64>>,
) -> Findings {
    let late = |from: &str, to: &str| -> Vec<f64> {
        times[to].iter().zip(&times[from]).map(|(to, from)| to - from).collect()
    };
    let mut rows = Vec::new();
    let title = "One packet, from its slot to the slot's completion";
    let mut way = Chart::new(title, "us", "who").lanes();
    let shown = median(&times[COMPLETED]);
    for (kind, hops) in [("packet", TO_THE_RECEIVER), ("completion", BACK)] {
        for hop in hops {
            let name = format!("{}: {}", hop.party.name(), hop.what);
            way = way.moment(&name, times[hop.key][shown], kind == "completion");
            if hop.key != FIRST {
                let after = late(hop.after, hop.key);
                rows.push(Row::new(format!("{kind}, {name}"), "us after the one before", &after));
            }
        }
    }
    rows.extend([
        Row::new("event to netback", "us", &late("notified", "event")),
        Row::new("event to the receiver", "us", &late("told", "arrived")),
        Row::new("event of the completion", "us", &late("answer-told", "answer-event")),
        Row::new("completion after the copy", "us", &late(FORK, COMPLETED)),
        Row::new("completion after the receiver has the packet", "us", &late(RECEIVED, COMPLETED)),
        Row::new("whole way to the receiver", "us", &late(FIRST, RECEIVED)),
        Row::new("round trip, without probes", "us", plain),
        Row::new("round trip, with probes", "us", probed),
    ]);
    let by_streams: Vec<(f64, Row)> = rates
        .iter()
        .map(|(streams, values)| {
            let row = Row::new(format!("TCP, {streams} streams"), "Mbit/s", values);
            let published = PUBLISHED.iter().find(|(of, _)| of == streams);
            let row = published.map_or(row.clone(), |(_, rate)| row.published(*rate));
            (f64::from(*streams), row)
        })
        .collect();
    let chart = Chart::new("Guest to guest, TCP", "streams", "Mbit/s")
        .line("all together", by_streams.iter().map(|(x, row)| (*x, row)));
    rows.extend(by_streams.into_iter().map(|(_, row)| row));
    Findings { rows, charts: vec![way, chart], missing: vec![] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_read_in_megabits() {
        let mut fields = vec!["0"; 130];
        (fields[2], fields[47]) = ("from", "125000");
        assert_eq!(rate(&fields.join(";")), Some(1024.0));
        assert_eq!(rate("fio: connection refused"), None);
    }

    #[test]
    fn the_packet_that_is_shown_is_the_one_in_the_middle() {
        assert_eq!(median(&[30.0, 9000.0, 10.0, 20.0, 40.0]), 0);
        assert_eq!(median(&[7.0]), 0);
    }

    #[test]
    fn every_function_of_a_kernel_gets_one_probe() {
        let text = probe(Party::Dom0);
        assert_eq!(
            text.matches("echo p:notify_remote_via_irq notify_remote_via_irq >>").count(),
            1
        );
        assert!(text.contains("p:xenvif_idx_release ") && !text.contains("icmp_rcv"));
    }
}
