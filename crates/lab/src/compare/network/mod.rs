//! Network interfaces from guest to guest in one host, in the emulator's counting mode: by the kernel's backend, and by
//! `ferrite net serve`.

mod hosts;
mod packet;
mod profile;
mod records;

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use ferrite_xenhost::qemu::{Hardware, Pace};
use ferrite_xenhost::steps::{say, step};
use ferrite_xenhost::{XenHost, packages, release, root};
use hosts::{Backend, Host, Who};
use packet::{COMPLETED, FETCHED, FIRST, FORK, Party, Path, RECEIVED, Times};
use records::Records;

use super::result::Target;
use super::table::figure;
use crate::experiments::findings::{Chart, Findings, Row};
pub(super) use profile::run as profile;

/// Packets that are traced, and their bytes: full ones, whose pages netback maps.
const PACKETS: u32 = 20;
const PACKET_BYTES: u32 = 1400;
/// Bytes of the headers before them: Ethernet, IPv4, ICMP.
const HEADER_BYTES: u32 = 14 + 20 + 8;
/// Duration of a stream, in time of the emulated machine.
const STREAM_MS: u32 = 300;
const PORT: u32 = 9000;
/// Where a stream's receiver says that it has ended.
const ENDED: &str = "/tmp/fio.ended";
/// The published figures: one stream, and all of a host.
const PUBLISHED: [(Load, f64); 2] = [(Load::Streams(1), 15_000.0), (Load::Streams(8), 33_000.0)];
/// The bytes that costs are given for.
const SEGMENT_BYTES: f64 = 65_536.0;
/// The trace folder of a kernel.
const TRACING: &str = "/sys/kernel/tracing";

/// The stream that the first guest sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Load {
    /// By so many streams of TCP to the other guest.
    Streams(u32),
    /// One stream in frames of 1,514 bytes, which the guest has segmented.
    Segmented,
    /// One stream to dom0.
    ToHost,
}

impl Load {
    const ALL: [Load; 4] = [Load::Streams(1), Load::Streams(8), Load::Segmented, Load::ToHost];

    fn streams(self) -> u32 {
        match self {
            Load::Streams(streams) => streams,
            Load::Segmented | Load::ToHost => 1,
        }
    }

    fn receiver(self) -> Who {
        match self {
            Load::ToHost => Who::Dom0,
            Load::Streams(_) | Load::Segmented => Who::Guest(1),
        }
    }

    fn name(self) -> String {
        match self {
            Load::Streams(1) => "TCP, 1 stream".into(),
            Load::Streams(streams) => format!("TCP, {streams} streams"),
            Load::Segmented => "TCP, 1 stream in frames of 1,514 bytes".into(),
            Load::ToHost => "TCP, 1 stream to dom0".into(),
        }
    }

    /// The least ratio of the rates, ours to the kernel's.
    fn target(self) -> Option<Target> {
        match self {
            Load::Streams(1) => Some(Target::AtLeast(1.5)),
            Load::Streams(_) => None,
            Load::Segmented => Some(Target::AtLeast(1.0)),
            Load::ToHost => Some(Target::AtLeast(0.5)),
        }
    }
}

/// One backend's results.
struct Measured {
    times: Times,
    plain: Vec<f64>,
    probed: Vec<f64>,
    rates: BTreeMap<Load, Vec<f64>>,
    /// Processor time of dom0 for 64 KiB by one stream, with Xen's own on its behalf, microseconds.
    costs: Vec<f64>,
    /// The backend's own records of the packets without probes.
    records: Option<Records>,
}

/// Boots the host, and measures so often.
pub(super) fn run(rounds: u32) -> Result<Findings> {
    packages::ensure(&[packages::XEN_HOST])?;
    let root = root::ensure(root::TRIXIE)?;
    let ferrite = release::build_ferrite()?;
    let hardware = Hardware { pace: Pace::Instructions, ..Hardware::default() };
    let mut host = Host::prepare(XenHost::boot_at(hardware, &root, &[ferrite], &[])?)?;
    let mut measured = BTreeMap::new();
    for backend in Backend::BOTH {
        let name = backend.name();
        let plain = step(&format!("{name}: round trips"), || ping(&mut host, backend))?;
        let records = match backend {
            Backend::Ours => Some(own_records(&mut host)?),
            Backend::Kernel => None,
        };
        let (times, probed) =
            step(&format!("{name}: the way of a packet"), || trace(&mut host, backend))?;
        let of = |key: &str| figure(times[key][median(&times[key])]);
        say(format!("  received after {} us, completed after {} us", of(RECEIVED), of(COMPLETED)));
        let (rates, costs) = (BTreeMap::new(), Vec::new());
        measured.insert(backend, Measured { times, plain, probed, rates, costs, records });
    }
    for round in 1..=rounds {
        for (load, backend) in Load::ALL.iter().flat_map(|l| Backend::BOTH.map(|b| (*l, b))) {
            let what = format!("{}: {}, round {round} of {rounds}", backend.name(), load.name());
            let (rate, busy) = step(&what, || stream(&mut host, backend, load))?;
            let cost_us = busy * SEGMENT_BYTES * 8.0 / rate;
            say(format!("  {} Mbit/s, dom0 {cost_us:.1} us for 64 KiB", figure(rate)));
            if (backend, load) == (Backend::Ours, Load::Streams(1)) {
                // Where its time goes, to find what could be made shorter.
                say(host.xenhost.sh_for("ferrite net trace --switch lan", 120)?);
            }
            let Some(of) = measured.get_mut(&backend) else { continue };
            of.rates.entry(load).or_default().push(rate);
            if load == Load::Streams(1) {
                of.costs.push(cost_us);
            }
        }
    }
    host.check()?;
    Ok(findings(&measured))
}

fn ping(host: &mut Host, backend: Backend) -> Result<Vec<f64>> {
    let to = Who::Guest(1).address(backend);
    // The first packets resolve the address, and wake idle processors.
    let warm = format!("ping -c 3 -s {PACKET_BYTES} {to} >/dev/null");
    host.sh(Who::Guest(0), &warm, 120)?;
    let command = format!("ping -c {PACKETS} -s {PACKET_BYTES} {to}");
    packet::round_trips(&host.sh(Who::Guest(0), &command, 120)?)
}

/// The records of the packets that were sent just now.
fn own_records(host: &mut Host) -> Result<Records> {
    let text = host.xenhost.sh_for("ferrite --json net trace --switch lan", 120)?;
    Records::parse(&text, host.guests[0].domid(), PACKET_BYTES + HEADER_BYTES)
}

/// The times of the hops, and the round trips of the same packets.
fn trace(host: &mut Host, backend: Backend) -> Result<(Times, Vec<f64>)> {
    let path = backend.path();
    // The guests have it mounted already.
    host.xenhost.sh(&format!("mount -t tracefs none {TRACING} 2>/dev/null; true"))?;
    let parties = [Who::Guest(0), Who::Dom0, Who::Guest(1)];
    for (who, party) in [1, 0, 2].map(|at| (parties[at], Party::ALL[at])) {
        host.sh(who, &probe(path, party), 120)?;
    }
    let probed = ping(host, backend)?;
    let read = format!(
        "cd {TRACING} && echo 0 >tracing_on && cat trace && echo 0 >events/enable && echo >kprobe_events"
    );
    let mut traces = [const { String::new() }; 3];
    for (trace, who) in traces.iter_mut().zip(parties) {
        *trace = host.sh(who, &read, 120)?;
    }
    let mhz = host.xenhost.sh("xl info | sed -n 's/^cpu_mhz *: *//p'")?;
    let mhz: f64 = mhz.parse().with_context(|| format!("odd answer: {mhz}"))?;
    Ok((packet::follow(path, &traces, mhz)?, probed))
}

/// A shell command that has a kernel record each entry of its functions, by the processor's counter.
fn probe(path: Path, party: Party) -> String {
    let probe = |function: &str| format!("echo p:{function} {function} >>kprobe_events");
    let probes: Vec<String> = packet::functions(path, party).into_iter().map(probe).collect();
    format!(
        "cd {TRACING} && echo 0 >tracing_on && echo x86-tsc >trace_clock && {} && \
         echo 1 >events/kprobes/enable && echo >trace && echo 1 >tracing_on",
        probes.join(" && ")
    )
}

/// Megabits a second, and the part of its time that dom0 ran.
fn stream(host: &mut Host, backend: Backend, load: Load) -> Result<(f64, f64)> {
    let receiver = load.receiver();
    listen(host, load)?;
    host.begin_samples(if receiver == Who::Dom0 { 0 } else { 1 })?;
    let output = host.sh(Who::Guest(0), &send(backend, load, STREAM_MS), 300)?;
    let busy = host.busy()?;
    has_ended(host, load)?;
    let rate = rate(&output).with_context(|| format!("odd output of fio: {output}"))?;
    Ok((rate, busy))
}

/// fio's options on both sides.
fn both_sides(load: Load) -> String {
    let streams = load.streams();
    format!(
        "--ioengine=net --protocol=tcp --port={PORT} --bs=64k --thread --numjobs={streams} --group_reporting --minimal"
    )
}

/// Starts the receiver. It ends with its connections.
fn listen(host: &mut Host, load: Load) -> Result<()> {
    let (both, streams) = (both_sides(load), load.streams());
    // Its end is a file: a guest's first process does not reap children, so `pidof` finds processes that have ended.
    let listen = format!(
        "rm -f {ENDED}; (fio --name=to {both} --rw=read --size=1t --listen; touch {ENDED}) >/tmp/fio.out 2>&1 & \
         until [ $(cat /proc/net/tcp | awk '$4==\"0A\"' | grep -c ':232[0-9A-F]') = {streams} ]; do sleep 0.1; done"
    );
    host.sh(load.receiver(), &listen, 120).map(drop)
}

/// The sender's command, for so many milliseconds.
fn send(backend: Backend, load: Load, ms: u32) -> String {
    let interface = format!("iproute2 link set eth{} gso_max_segs", backend as u32);
    let cut = if load == Load::Segmented { format!("{interface} 1; ") } else { String::new() };
    format!(
        "{cut}fio --name=from {} --rw=write --size=1t --hostname={} --time_based --runtime={ms}ms; {interface} 65535",
        both_sides(load),
        load.receiver().address(backend)
    )
}

/// Waits until the receiver has ended.
fn has_ended(host: &mut Host, load: Load) -> Result<()> {
    let end = format!(
        "n=0; until [ -e {ENDED} ]; do [ $((n=n+1)) -lt 50 ] || {{ cat /tmp/fio.out; exit 1; }}; sleep 0.1; done"
    );
    host.sh(load.receiver(), &end, 60).map(drop)
}

/// The bandwidth of writes in fio's terse format, given in KiB/s.
fn rate(output: &str) -> Option<f64> {
    written(output, 47).map(|kib_s| kib_s * 1024.0 * 8.0 / 1e6)
}

/// A field of the sender in fio's terse format.
fn written(output: &str, field: usize) -> Option<f64> {
    let fields = output.lines().map(|line| line.split(';').collect::<Vec<_>>());
    let fields = fields.into_iter().find(|fields| fields.get(2) == Some(&"from"))?;
    fields.get(field)?.parse().ok()
}

/// The index of the median of these values.
fn median(values: &[f64]) -> usize {
    let mut places: Vec<usize> = (0..values.len()).collect();
    places.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    places[places.len() / 2]
}

/// The ratio of our values to the kernel's, round by round.
fn ratios(ours: &[f64], kernel: &[f64]) -> Vec<f64> {
    ours.iter().zip(kernel).map(|(ours, kernel)| ours / kernel).collect()
}

fn findings(measured: &BTreeMap<Backend, Measured>) -> Findings {
    let (mut rows, mut charts) = (Vec::new(), Vec::new());
    let last = |of: &Measured| of.times[COMPLETED][median(&of.times[COMPLETED])];
    let until = measured.values().map(last).fold(0.0, f64::max);
    for (backend, of) in measured {
        charts.push(way(*backend, of, until, &mut rows));
        if let Some(records) = &of.records {
            records.rows(&mut rows);
            charts.push(records.chart(of.times[FORK][median(&of.times[FORK])], until));
        }
    }
    let (ours, kernel) = (&measured[&Backend::Ours], &measured[&Backend::Kernel]);
    let title = "Guest to guest, TCP";
    let mut chart = Chart::new(title, "streams", "Mbit/s");
    let mut by_backend: BTreeMap<Backend, Vec<(f64, Row)>> = BTreeMap::new();
    for load in Load::ALL {
        for (backend, of) in measured {
            let row = Row::new(
                format!("{}: {}", backend.name(), load.name()),
                "Mbit/s",
                &of.rates[&load],
            );
            let published = PUBLISHED.iter().find(|(of, _)| *of == load);
            let row = published.map_or(row.clone(), |(_, rate)| row.published(*rate));
            if let Load::Streams(streams) = load {
                by_backend.entry(*backend).or_default().push((f64::from(streams), row.clone()));
            }
            rows.push(row);
        }
        let values = ratios(&ours.rates[&load], &kernel.rates[&load]);
        let row =
            Row::new(format!("ferrite / netback: {}", load.name()), "times the rate", &values);
        rows.push(match load.target() {
            Some(target) => row.target(target),
            None => row,
        });
    }
    for (backend, rows) in &by_backend {
        chart = chart.line(backend.name(), rows.iter().map(|(x, row)| (*x, row)));
    }
    charts.push(chart);
    for (backend, of) in measured {
        let name = format!("{}: dom0 and Xen for 64 KiB, 1 stream", backend.name());
        rows.push(Row::new(name, "us", &of.costs));
    }
    let costs = ratios(&ours.costs, &kernel.costs);
    rows.push(
        Row::new("ferrite / netback: dom0 and Xen for 64 KiB", "times the cost", &costs)
            .target(Target::AtMost(0.6)),
    );
    // What a backend itself is late with: from its first look at the slot to the answer that the sender can see.
    let answered = |of: &Measured, answer: &str| {
        let late = |(to, from): (&f64, &f64)| to - from;
        let values: Vec<f64> = of.times[answer].iter().zip(&of.times[FETCHED]).map(late).collect();
        values[median(&values)]
    };
    let answers = [answered(ours, "told") / answered(kernel, "answered")];
    let name = "ferrite / netback: slot seen to answered, median";
    rows.push(Row::new(name, "times as late", &answers));
    let late = [last(ours) / last(kernel)];
    rows.push(
        Row::new("ferrite / netback: slot to completion, median", "times as late", &late)
            .target(Target::AtMost(1.0 / 3.0)),
    );
    Findings { rows, charts, missing: vec![] }
}

/// The time line of one backend, on an axis until `until`; its rows.
fn way(backend: Backend, of: &Measured, until: f64, rows: &mut Vec<Row>) -> Chart {
    let (times, name, path) = (&of.times, backend.name(), backend.path());
    let late = |from: &str, to: &str| -> Vec<f64> {
        times[to].iter().zip(&times[from]).map(|(to, from)| to - from).collect()
    };
    let title = format!("One packet by {name}, from its slot to the slot's completion");
    let mut way = Chart::new(&title, "us", "who").lanes().until(until);
    let shown = median(&times[COMPLETED]);
    for (kind, hops) in [("packet", path.to_the_receiver), ("completion", path.back)] {
        for hop in hops {
            let at = format!("{}: {}", hop.party.name(), hop.what);
            way = way.moment(&at, times[hop.key][shown], kind == "completion");
            if hop.key != FIRST {
                let after = late(hop.after, hop.key);
                let row = format!("{name}, {kind}, {at}");
                rows.push(Row::new(row, "us after the one before", &after));
            }
        }
    }
    let row = |what: &str, values: &[f64]| Row::new(format!("{name}: {what}"), "us", values);
    rows.extend([
        row("event to the backend", &late("notified", "event")),
        row("completion after the copy", &late(FORK, COMPLETED)),
        row("whole way to the receiver", &late(FIRST, RECEIVED)),
        row("slot to completion", &times[COMPLETED]),
        row("round trip, without probes", &of.plain),
        row("round trip, with probes", &of.probed),
    ]);
    way
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
        let text = probe(Backend::Kernel.path(), Party::Dom0);
        assert_eq!(
            text.matches("echo p:notify_remote_via_irq notify_remote_via_irq >>").count(),
            1
        );
        assert!(text.contains("p:xenvif_idx_release ") && !text.contains("icmp_rcv"));
    }
}
