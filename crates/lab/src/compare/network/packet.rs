//! The path of a packet from one guest to another, from the traces of three kernels.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};

/// The kernel of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Party {
    Sender,
    Dom0,
    Receiver,
}

impl Party {
    pub(super) const ALL: [Party; 3] = [Party::Sender, Party::Dom0, Party::Receiver];

    pub(super) fn name(self) -> &'static str {
        match self {
            Party::Sender => "sender",
            Party::Dom0 => "dom0",
            Party::Receiver => "receiver",
        }
    }
}

/// A step of the path: a function of a kernel that is entered.
pub(super) struct Hop {
    pub(super) key: &'static str,
    pub(super) party: Party,
    function: &'static str,
    /// The hop before it.
    pub(super) after: &'static str,
    /// What the function does.
    pub(super) what: &'static str,
}

const fn hop(
    key: &'static str,
    party: Party,
    function: &'static str,
    after: &'static str,
    what: &'static str,
) -> Hop {
    Hop { key, party, function, after, what }
}

/// The first hop: the sender's driver has the packet and takes a slot of its ring.
pub(super) const FIRST: &str = "slot";
/// The hop at which a backend has seen the slot.
pub(super) const FETCHED: &str = "fetch";
/// The hop after which the answer's path and the packet's path separate.
pub(super) const FORK: &str = "copied";
/// The last hops of both paths.
pub(super) const RECEIVED: &str = "received";
pub(super) const COMPLETED: &str = "completed";
/// Entered in each kernel when an event has arrived, and when one is sent.
const UPCALL: &str = "xen_evtchn_do_upcall";
const NOTIFY: &str = "notify_remote_via_irq";

/// The path to the receiver.
pub(super) const TO_THE_RECEIVER: &[Hop] = &[
    hop(FIRST, Party::Sender, "xennet_start_xmit", "", "a slot of the TX ring"),
    hop("notified", Party::Sender, NOTIFY, FIRST, "notifies netback"),
    hop("event", Party::Dom0, UPCALL, "notified", "the event arrives"),
    hop("poll", Party::Dom0, "xenvif_poll", "event", "netback polls"),
    hop(FETCHED, Party::Dom0, "xenvif_tx_action", "poll", "netback fetches and maps"),
    hop("bridge", Party::Dom0, "br_handle_frame", "fetch", "the bridge has it"),
    hop("queued", Party::Dom0, "xenvif_start_xmit", "bridge", "the other netback queues it"),
    hop("slots", Party::Dom0, "xenvif_rx_skb", "queued", "its thread runs"),
    hop(FORK, Party::Dom0, "xenvif_rx_copy_flush", "slots", "copies to the receiver"),
    hop("told", Party::Dom0, NOTIFY, FORK, "notifies the receiver"),
    hop("arrived", Party::Receiver, UPCALL, "told", "the event arrives"),
    hop("rx", Party::Receiver, "xennet_poll", "arrived", "its driver polls"),
    hop(RECEIVED, Party::Receiver, "icmp_rcv", "rx", "its protocol has it"),
];

/// The path back to the sender, from the copy on.
pub(super) const BACK: &[Hop] = &[
    hop("released", Party::Dom0, "xenvif_zerocopy_callback", FORK, "its pages are free"),
    hop("unmapped", Party::Dom0, "gnttab_unmap_refs", "released", "unmaps them"),
    hop("answered", Party::Dom0, "xenvif_idx_release", "unmapped", "answers the slot"),
    hop("answer-told", Party::Dom0, NOTIFY, "answered", "notifies the sender"),
    hop("answer-event", Party::Sender, UPCALL, "answer-told", "the event arrives"),
    hop(COMPLETED, Party::Sender, "xennet_tx_buf_gc", "answer-event", "the slot is free"),
];

/// The path by `ferrite net serve` to the receiver. dom0's calls are those of its one thread.
pub(super) const OURS_TO_THE_RECEIVER: &[Hop] = &[
    hop(FIRST, Party::Sender, "xennet_start_xmit", "", "a slot of the TX ring"),
    hop("notified", Party::Sender, NOTIFY, FIRST, "notifies the backend"),
    hop("event", Party::Dom0, UPCALL, "notified", "the event arrives"),
    hop(FETCHED, Party::Dom0, "gnttab_batch_copy", "event", "the thread fetches the header"),
    hop(FORK, Party::Dom0, "gnttab_batch_copy", "fetch", "copies from guest to guest"),
    hop("told", Party::Dom0, "evtchn_ioctl", FORK, "notifies the first of both"),
    hop("arrived", Party::Receiver, UPCALL, FORK, "the event arrives"),
    hop("rx", Party::Receiver, "xennet_poll", "arrived", "its driver polls"),
    hop(RECEIVED, Party::Receiver, "icmp_rcv", "rx", "its protocol has it"),
];

/// The path back to the sender, by `ferrite net serve`.
pub(super) const OURS_BACK: &[Hop] = &[
    hop("answer-event", Party::Sender, UPCALL, "told", "the event arrives"),
    hop(COMPLETED, Party::Sender, "xennet_tx_buf_gc", "answer-event", "the slot is free"),
];

/// The path of a packet by one backend.
#[derive(Clone, Copy)]
pub(super) struct Path {
    pub(super) to_the_receiver: &'static [Hop],
    pub(super) back: &'static [Hop],
}

/// By the kernel's backend and its bridge.
pub(super) const KERNEL: Path = Path { to_the_receiver: TO_THE_RECEIVER, back: BACK };
/// By `ferrite net serve`.
pub(super) const OURS: Path = Path { to_the_receiver: OURS_TO_THE_RECEIVER, back: OURS_BACK };

impl Path {
    pub(super) fn hops(self) -> impl Iterator<Item = &'static Hop> + Clone {
        self.to_the_receiver.iter().chain(self.back)
    }
}

/// The functions of a kernel to be traced.
pub(super) fn functions(path: Path, party: Party) -> Vec<&'static str> {
    let mut functions: Vec<_> =
        path.hops().filter(|hop| hop.party == party).map(|hop| hop.function).collect();
    functions.sort_unstable();
    functions.dedup();
    functions
}

/// The time of an entry, by the time stamp counter.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Event {
    at: u64,
    function: String,
}

/// The trace of a kernel as tracefs prints it, each probe named as its function.
fn parse(trace: &str) -> Vec<Event> {
    let event = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let time = |word: &&str| word.strip_suffix(':').and_then(|time| time.parse().ok());
        let place = words.iter().position(|word| time(word).is_some())?;
        let function = words.get(place + 1)?.strip_suffix(':')?.to_owned();
        Some(Event { at: time(&words[place])?, function })
    };
    let lines = trace.lines().filter(|line| !line.starts_with('#'));
    let mut events: Vec<Event> = lines.filter_map(event).collect();
    events.sort_by_key(|event| event.at);
    events
}

/// For each hop, its times after the first hop, in microseconds: a value per packet.
pub(super) type Times = BTreeMap<&'static str, Vec<f64>>;

/// The times of all packets that were recorded at each hop.
///
/// A hop is the first time that its function is entered after the hop before it, and before the sender's next packet.
///
/// # Errors
/// No packet was recorded at all hops.
pub(super) fn follow(path: Path, traces: &[String; 3], mhz: f64) -> Result<Times> {
    let events = [&traces[0], &traces[1], &traces[2]].map(|trace| parse(trace));
    let of = |party: Party| &events[party as usize];
    let first = &path.to_the_receiver[0];
    let begins: Vec<u64> = of(first.party)
        .iter()
        .filter(|event| event.function == first.function)
        .map(|event| event.at)
        .collect();
    let mut times = Times::new();
    for (i, begin) in begins.iter().enumerate() {
        let end = begins.get(i + 1).copied().unwrap_or(u64::MAX);
        let mut at = BTreeMap::from([(FIRST, *begin)]);
        for hop in path.hops().skip(1) {
            let Some(after) = at.get(hop.after).copied() else { break };
            let fits = |event: &&Event| {
                event.function == hop.function && event.at > after && event.at < end
            };
            let Some(event) = of(hop.party).iter().find(fits) else { break };
            at.insert(hop.key, event.at);
        }
        // A packet with a missing hop is left out: otherwise the hops' means would be of different packets.
        if at.len() == path.hops().count() {
            let us = |time: u64| (time - begin) as f64 / mhz;
            at.into_iter().for_each(|(key, time)| times.entry(key).or_default().push(us(time)));
        }
    }
    let whole = times.get(FIRST).map_or(0, Vec::len);
    ensure!(
        whole > 0,
        "of {} packets none was seen at every place: {}",
        begins.len(),
        seen(path, &events)
    );
    Ok(times)
}

/// How often each function was entered, for the text of a failure.
fn seen(path: Path, events: &[Vec<Event>; 3]) -> String {
    let mut text = String::new();
    for (party, events) in Party::ALL.iter().zip(events) {
        for function in functions(path, *party) {
            let count = events.iter().filter(|event| event.function == function).count();
            text += &format!("{} {function} {count}, ", party.name());
        }
    }
    text
}

/// The values of `time=` in the output of ping, in microseconds.
///
/// # Errors
/// There are none.
pub(super) fn round_trips(ping: &str) -> Result<Vec<f64>> {
    let times = ping.lines().filter_map(|line| line.split_once("time=")?.1.split(' ').next());
    let us = |text: &str| {
        Ok(1000.0 * text.parse::<f64>().with_context(|| format!("odd output: {ping}"))?)
    };
    let times = times.map(us).collect::<Result<Vec<_>>>()?;
    ensure!(!times.is_empty(), "no answer: {ping}");
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trace in which each hop of each packet comes `step` after the one before.
    fn traces(path: Path, packets: u64, skip: Option<&str>) -> [String; 3] {
        let mut traces = [String::from("# tracer: nop\n"), String::new(), String::new()];
        for packet in 0..packets {
            for (i, hop) in path.hops().enumerate().filter(|(_, hop)| Some(hop.key) != skip) {
                let at = 1_000_000 * (packet + 1) + 2000 * i as u64;
                let line =
                    format!("  ping-9  [000] d..1. {at}: {0}: ({0}+0x0/0x5 [m])\n", hop.function);
                traces[hop.party as usize] += &line;
            }
        }
        traces
    }

    #[test]
    fn each_hop_has_its_time_after_the_first() {
        let times = follow(KERNEL, &traces(KERNEL, 3, None), 1000.0).unwrap();
        assert_eq!(times[FIRST], [0.0; 3]);
        assert_eq!(times["notified"], [2.0; 3]);
        assert_eq!(times[RECEIVED], [24.0; 3]);
        assert_eq!(times[COMPLETED], [36.0; 3]);
        let times = follow(OURS, &traces(OURS, 2, None), 1000.0).unwrap();
        assert_eq!((&times["fetch"], &times[FORK]), (&vec![6.0; 2], &vec![8.0; 2]));
        assert_eq!(times[COMPLETED], [20.0; 2]);
    }

    #[test]
    fn a_packet_that_was_not_seen_everywhere_counts_nowhere() {
        let why =
            follow(KERNEL, &traces(KERNEL, 2, Some("bridge")), 1000.0).unwrap_err().to_string();
        assert!(why.contains("none was seen") && why.contains("br_handle_frame 0"), "{why}");
        // The last one lacks its completion.
        let mut cut = traces(KERNEL, 2, None);
        let end = cut[0].trim_end().rfind('\n').unwrap();
        cut[0].truncate(end);
        assert_eq!(follow(KERNEL, &cut, 1000.0).unwrap()[COMPLETED], [36.0]);
    }

    #[test]
    fn every_hop_follows_one_that_stands_before_it() {
        for path in [KERNEL, OURS] {
            let keys: Vec<_> = path.hops().map(|hop| hop.key).collect();
            for (i, hop) in path.hops().enumerate().skip(1) {
                assert!(keys[..i].contains(&hop.after), "{}", hop.key);
            }
        }
    }

    #[test]
    fn round_trips_are_read_in_microseconds() {
        let ping =
            "64 bytes from 10.0.0.2: seq=0 ttl=64 time=0.125 ms\nround-trip min/avg/max = 1/2/3 ms";
        assert_eq!(round_trips(ping).unwrap(), [125.0]);
        assert!(round_trips("3 packets transmitted, 0 received").is_err());
    }
}
