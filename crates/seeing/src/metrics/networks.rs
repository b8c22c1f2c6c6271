//! The metrics of guests' network interfaces. Sent and received are the guest's view.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::encoding::{EncodeLabel as _, LabelSetEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::Everything;
use super::families::begin;

/// The count in the file, the metric's name, and its help.
const PACKETS: [(&str, &str, &str); 8] = [
    ("sent_packets", "sent_packets", "Packets that a guest sent and a receiver took"),
    ("received_packets", "received_packets", "Packets that a guest received"),
    ("spoofed", "spoofed_packets", "Packets that a guest sent with an address of others"),
    ("malformed", "malformed_packets", "Packets that a guest sent in slots that contradict"),
    ("failed", "failed_packets", "Packets whose pages could not be copied"),
    ("dropped", "dropped_packets", "Packets of a guest that no receiver took"),
    ("starved", "starved_packets", "Packets for a guest that it had no pages for"),
    ("unsupported", "unsupported_packets", "Packets for a guest that does not take such"),
];
const BYTES: [(&str, &str, &str); 2] = [
    ("sent_bytes", "sent", "Bytes of packets that a guest sent and a receiver took"),
    ("received_bytes", "received", "Bytes of packets that a guest received"),
];

/// The labels of an interface.
struct Labels<'a> {
    switch: &'a str,
    domid: u64,
    handle: u64,
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, to: &mut LabelSetEncoder) -> fmt::Result {
        ("switch", self.switch).encode(to.encode_label())?;
        ("domid", self.domid).encode(to.encode_label())?;
        ("handle", self.handle).encode(to.encode_label())
    }
}

impl Everything {
    /// Counters of all interfaces.
    pub(super) fn interfaces(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        // A family without samples is none.
        if self.switches.iter().all(|switch| switch.interfaces.is_empty()) {
            return Ok(());
        }
        let packets = PACKETS.iter().map(|row| (row, None));
        let bytes = BYTES.iter().map(|row| (row, Some(&Unit::Bytes)));
        for ((count, name, help), unit) in packets.chain(bytes) {
            let name = format!("ferrite_net_{name}");
            let mut family = begin(to, &name, help, unit, MetricType::Counter)?;
            for switch in &self.switches {
                for interface in &switch.interfaces {
                    let (domid, handle) = (interface.domid.into(), interface.handle.into());
                    let labels = Labels { switch: &switch.switch, domid, handle };
                    family
                        .0
                        .encode_family(&labels)?
                        .encode_counter::<NoLabelSet, _, f64>(&interface.count(count), None)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Host, write};
    use super::*;
    use crate::interfaces::{Interface, Switch};

    #[test]
    fn each_count_of_an_interface_has_a_metric_with_its_value() {
        let all = PACKETS.iter().chain(&BYTES).map(|(count, ..)| (*count).to_owned());
        let counts = all.zip(100..).collect();
        let interfaces = vec![Interface { domid: 7, handle: 1, counts }];
        // A name that would end its label.
        let switches = vec![Switch { switch: "a\"b".into(), uplink: None, interfaces }];
        let everything =
            Everything { host: Host::default(), disks: Vec::new(), switches, skipped: 0 };
        let mut text = String::new();
        write(everything, &mut text).unwrap();
        let labels = r#"{switch="a\"b",domid="7",handle="1"}"#;
        for line in [
            format!("ferrite_net_sent_packets_total{labels} 100"),
            format!("ferrite_net_unsupported_packets_total{labels} 107"),
            format!("ferrite_net_received_bytes_total{labels} 109"),
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is not in {text}");
        }
    }
}
