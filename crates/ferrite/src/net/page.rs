//! The page of `ferrite net trace`: how long each stage takes, and packets on a time line. It needs no network and no
//! script.

use std::fmt::Write as _;

use ferrite_net::trace::{Record, Stage};

use super::trace::{Recording, rows};

/// Packets on the time line: those around the one in the middle.
const SHOWN: usize = 60;
/// The picture's units.
const WIDTH: f64 = 1100.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 70.0;
const ROW: f64 = 16.0;
const LANE: f64 = 60.0;
const TOP: f64 = 24.0;

/// Bars of a packet: until this stage, with this colour and name.
const BARS: [(Stage, &str, &str); 7] = [
    (Stage::Fetched, "#56b4e9", "header fetched"),
    (Stage::Chosen, "#e69f00", "receiver chosen"),
    (Stage::Copied, "#0072b2", "copied"),
    (Stage::RxAnswered, "#009e73", "receiver answered"),
    (Stage::TxAnswered, "#cc79a7", "sender answered"),
    (Stage::RxNotified, "#d55e00", "receiver notified"),
    (Stage::TxNotified, "#999999", "sender notified"),
];

/// The parties, with the stages of each.
const LANES: [(&str, &[(Stage, &str)]); 3] = [
    ("receiver", &[(Stage::RxConsumed, "seen to consume")]),
    (
        "switch",
        &[
            (Stage::Seen, "slot seen"),
            (Stage::Fetched, "header fetched"),
            (Stage::Chosen, "receiver chosen"),
            (Stage::Copied, "copied"),
            (Stage::RxAnswered, "receiver answered"),
            (Stage::TxAnswered, "sender answered"),
            (Stage::RxNotified, "receiver notified"),
            (Stage::TxNotified, "sender notified"),
        ],
    ),
    ("sender", &[(Stage::TxConsumed, "seen to consume")]),
];

const STYLE: &str = ":root{color-scheme:light dark}body{font:15px system-ui,sans-serif;margin:2em auto;\
     max-width:1140px;padding:0 1em}table{border-collapse:collapse}td,th{padding:2px 12px;text-align:right}\
     td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;\
     fill:currentColor}.grid{stroke:currentColor;opacity:.25}.way{stroke:currentColor;fill:none}.key span{\
     display:inline-block;width:12px;height:12px;margin:0 4px 0 16px}";

/// The page.
pub(super) fn html(recording: &Recording) -> String {
    let mut out = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Packets of the switch {0}</title>\
         <style>{STYLE}</style><h1>Packets of the switch {0}</h1><p>{1} packets",
        recording.switch,
        recording.records.len()
    );
    if recording.lost > 0 {
        let _ = write!(out, "; {} more were lost", recording.lost);
    }
    out += ".</p><h2>Stages</h2><table><tr><th>after the one before<th>packets<th>median us<th>p99 us<th>most us";
    for (name, n, [median, p99, most]) in rows(&recording.records) {
        let _ = write!(out, "<tr><td>{name}<td>{n}<td>{median:.1}<td>{p99:.1}<td>{most:.1}");
    }
    out += "</table>";
    if let Some(middle) = middle(&recording.records) {
        let _ = write!(out, "<h2>The packet in the middle</h2><p>{}</p>", what(&middle));
        out += &lanes(&middle);
    }
    out += "<h2>Packets one by one</h2><p class=\"key\">";
    for (_, colour, name) in BARS {
        let _ = write!(out, "<span style=\"background:{colour}\"></span>{name}");
    }
    out += "</p>";
    out += &bars(&recording.records);
    out + "</html>\n"
}

fn what(record: &Record) -> String {
    format!(
        "{} to {}: {} bytes in {} pages, {} pieces, {} packets together, {}",
        record.from,
        record.to,
        record.bytes,
        record.pages,
        record.pieces,
        record.together,
        record.outcome.name()
    )
}

/// The packet whose time to its sender's answer is in the middle.
fn middle(records: &[Record]) -> Option<Record> {
    let time = |record: &Record| {
        Some(record.at_ns(Stage::TxAnswered)?.saturating_sub(record.at_ns(Stage::Seen)?))
    };
    let mut all: Vec<&Record> = records.iter().filter(|record| time(record).is_some()).collect();
    all.sort_by_key(|record| time(record));
    all.get(all.len() / 2).map(|record| **record)
}

fn us(record: &Record, stage: Stage) -> Option<f64> {
    let from = record.at_ns(Stage::Seen)?;
    Some(record.at_ns(stage)?.saturating_sub(from) as f64 / 1e3)
}

/// A lane for each party, and the moments of one packet.
fn lanes(record: &Record) -> String {
    let last = Stage::ALL.iter().filter_map(|stage| us(record, *stage)).fold(0.1, f64::max);
    let x = |us: f64| LEFT + us / last * (WIDTH - LEFT - RIGHT);
    let height = TOP + LANE * LANES.len() as f64 + 30.0;
    let mut out = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">");
    let mut key = String::from("<ol>");
    let mut number = 0;
    for (i, (party, stages)) in LANES.iter().enumerate() {
        let y = TOP + LANE * (i as f64 + 0.5);
        let _ = write!(
            out,
            "<path class=\"grid\" d=\"M{LEFT} {y}H{WIDTH}\"/><text x=\"0\" y=\"{}\">{party}</text>",
            y + 4.0
        );
        for (stage, what) in *stages {
            let Some(at) = us(record, *stage) else { continue };
            number += 1;
            // Neighbours' numbers are at different heights.
            let above = y - 8.0 - 11.0 * f64::from(number % 3);
            let _ = write!(
                out,
                "<circle cx=\"{0:.1}\" cy=\"{y}\" r=\"4\" fill=\"#0072b2\"/><text x=\"{0:.1}\" y=\"{above}\">{number}</text>",
                x(at)
            );
            let _ = write!(key, "<li>{party}: {what} ({at:.1} us)");
        }
    }
    out + &axis(last, height) + "</svg>" + &key + "</ol>"
}

/// A bar for each packet, oldest first.
fn bars(records: &[Record]) -> String {
    let begin = records.len().saturating_sub(SHOWN);
    let shown = &records[begin..];
    let ends =
        |record: &Record| BARS.iter().filter_map(|(s, ..)| us(record, *s)).fold(0.0, f64::max);
    let mut last: Vec<f64> = shown.iter().map(ends).collect();
    last.sort_by(f64::total_cmp);
    // One packet that waited would make all others invisible.
    let last = super::trace::quantile(&last, 0.95).unwrap_or(0.0).max(0.1);
    let x = |us: f64| LEFT + us.min(last) / last * (WIDTH - LEFT - RIGHT);
    let height = TOP + ROW * shown.len() as f64 + 30.0;
    let mut out = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">");
    for (i, record) in shown.iter().enumerate() {
        let y = TOP + ROW * i as f64;
        let _ = write!(
            out,
            "<text x=\"0\" y=\"{}\">{} to {}, {}</text><g><title>{}</title>",
            y + 11.0,
            record.from,
            record.to,
            record.bytes,
            what(record)
        );
        let mut from = 0.0;
        for (stage, colour, _) in BARS {
            let Some(to) = us(record, stage) else { continue };
            let width = (x(to) - x(from)).max(0.0);
            let _ = write!(
                out,
                "<rect x=\"{:.1}\" y=\"{}\" width=\"{width:.1}\" height=\"12\" fill=\"{colour}\"/>",
                x(from),
                y + 1.0
            );
            from = to.max(from);
        }
        out += "</g>";
    }
    out + &axis(last, height) + "</svg>"
}

fn axis(last: f64, height: f64) -> String {
    let mut out = String::new();
    for i in 0..=5 {
        let part = f64::from(i) / 5.0;
        let x = LEFT + part * (WIDTH - LEFT - RIGHT);
        let (foot, time) = (height - 22.0, last * part);
        let _ = write!(
            out,
            "<path class=\"grid\" d=\"M{x:.1} {TOP}V{foot}\"/><text x=\"{x:.1}\" y=\"{}\">{time:.1} us</text>",
            foot + 14.0
        );
    }
    out
}
