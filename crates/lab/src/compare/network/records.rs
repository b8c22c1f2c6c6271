//! The records that `ferrite net serve` keeps of packets, as rows and a picture beside the kernels' traces.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::experiments::findings::{Chart, Row};

/// A stage: its name in a record, the one that it is counted from, the party, and what the party does.
struct Stage {
    name: &'static str,
    after: &'static str,
    party: &'static str,
    what: &'static str,
    back: bool,
}

const fn stage(
    name: &'static str,
    after: &'static str,
    party: &'static str,
    what: &'static str,
    back: bool,
) -> Stage {
    Stage { name, after, party, what, back }
}

const STAGES: [Stage; 10] = [
    stage("seen", "seen", "dom0", "the slot is seen", false),
    stage("fetched", "seen", "dom0", "the header is there", false),
    stage("chosen", "fetched", "dom0", "the receiver is chosen", false),
    stage("copied", "chosen", "dom0", "the bytes are copied", false),
    stage("rx_answered", "copied", "dom0", "the receiver's slots are answered", false),
    stage("rx_notified", "rx_answered", "dom0", "the receiver is notified", false),
    stage("rx_consumed", "rx_answered", "receiver", "is seen to have consumed", false),
    stage("tx_answered", "rx_answered", "dom0", "the sender's slots are answered", true),
    stage("tx_notified", "tx_answered", "dom0", "the sender is notified", true),
    stage("tx_consumed", "tx_answered", "sender", "is seen to have consumed", true),
];

/// The times of packets, microseconds after their slots were seen: for each packet those of all stages.
pub(super) struct Records(Vec<[Option<f64>; STAGES.len()]>);

impl Records {
    /// The packets of these many bytes that this domain has sent, of the output of `ferrite --json net trace`.
    ///
    /// # Errors
    /// There are none.
    pub(super) fn parse(text: &str, from: u32, bytes: u32) -> Result<Records> {
        let json: Value =
            serde_json::from_str(text).with_context(|| format!("odd records: {text}"))?;
        let packets = json["packets"].as_array().context("no packets in the records")?;
        let is_meant =
            |packet: &&Value| packet["from"]["domid"] == from && packet["bytes"] == bytes;
        let times = |packet: &Value| {
            let at = |name: &str| packet[format!("{name}_ns")].as_u64();
            let seen = at("seen")?;
            Some(std::array::from_fn(|i| {
                Some(at(STAGES[i].name)?.saturating_sub(seen) as f64 / 1e3)
            }))
        };
        let records: Vec<_> = packets.iter().filter(is_meant).filter_map(times).collect();
        ensure!(!records.is_empty(), "no packet of {bytes} bytes is in the records: {text}");
        Ok(Records(records))
    }

    fn index(name: &str) -> usize {
        STAGES.iter().position(|stage| stage.name == name).unwrap_or(0)
    }

    /// The lateness of a stage, of the packets that have both.
    fn after(&self, name: &str, since: &str) -> Vec<f64> {
        let (to, from) = (Self::index(name), Self::index(since));
        self.0.iter().filter_map(|times| Some(times[to]? - times[from]?)).collect()
    }

    /// A row for each stage.
    pub(super) fn rows(&self, rows: &mut Vec<Row>) {
        for stage in &STAGES[1..] {
            let values = self.after(stage.name, stage.after);
            if !values.is_empty() {
                let name = format!("ferrite, its records, {}: {}", stage.party, stage.what);
                rows.push(Row::new(name, "us after the one before", &values));
            }
        }
        let whole = self.after("tx_answered", "seen");
        rows.push(Row::new("ferrite, its records: slot seen to answered", "us", &whole));
    }

    /// The picture, on an axis on which the receiver was chosen `chosen_us` after the sender took a slot.
    pub(super) fn chart(&self, chosen_us: f64, until: f64) -> Chart {
        let mut chart = Chart::new("The same by the records of ferrite net serve", "us", "who");
        chart = chart.lanes().until(until);
        for back in [false, true] {
            for stage in STAGES.iter().filter(|stage| stage.back == back) {
                let values = self.after(stage.name, "chosen");
                if values.is_empty() {
                    continue;
                }
                let at = chosen_us + values[super::median(&values)];
                chart = chart.moment(&format!("{}: {}", stage.party, stage.what), at, back);
            }
        }
        chart
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_one_sender_become_rows_and_moments() {
        let packet = |domid: u32, bytes: u32, step: u64| {
            let mut packet = serde_json::json!({ "from": { "domid": domid }, "bytes": bytes });
            for (i, stage) in STAGES.iter().enumerate().filter(|(i, _)| *i != 6) {
                packet[format!("{}_ns", stage.name)] = (1000 + i as u64 * step).into();
            }
            packet
        };
        let packets = [packet(7, 1442, 2000), packet(7, 98, 1), packet(8, 1442, 1)];
        let text = serde_json::json!({ "packets": packets }).to_string();
        let records = Records::parse(&text, 7, 1442).unwrap();
        assert_eq!(records.after("copied", "chosen"), [2.0]);
        assert_eq!(records.after("rx_consumed", "rx_answered"), [0.0; 0]);
        let mut rows = Vec::new();
        records.rows(&mut rows);
        assert_eq!(rows.len(), 9, "one stage was never reached");
        assert_eq!(rows.last().unwrap().mean, 14.0);
        let chart = records.chart(50.0, 200.0);
        let first = &chart.series[0];
        assert_eq!((first.name.as_str(), first.points[0].x), ("dom0: the slot is seen", 46.0));
        assert_eq!(chart.series.len(), 9);
        assert!(Records::parse(&text, 9, 1442).is_err() && Records::parse("{", 7, 1442).is_err());
    }
}
