//! The measurements, as rows of the comparison's table and as an experiment of the report.

use super::load::Test;
use super::{Column, GuestKind, Peer, XenArguments};
use crate::compare::result::{Measurement, Target};
use crate::experiments::findings::{About, Findings, Row};

/// A row for each test, each variant of ferrite, and each peer.
pub(super) fn compare(
    tests: &[&Test],
    columns: &[Column],
    arguments: &XenArguments,
) -> Vec<Measurement> {
    let mut rows = Vec::new();
    for (at, test) in tests.iter().enumerate() {
        for column in columns.iter().filter(|column| column.peer.is_ours()) {
            let name = format!("{}, {}", test.name, column.name);
            let row = Measurement::of_runs("xen", name, test.unit.name(), &column.values[at]);
            let peers = peers(columns);
            rows.extend(peers.iter().map(|peer| {
                let row = row.clone().against_runs(&*peer.name, &peer.values[at]);
                match aim(test, column.peer, peer.peer, arguments.xen_cpus) {
                    Some(least) => row.target(Target::AtLeast(least)),
                    None => row,
                }
            }));
            if peers.is_empty() {
                rows.push(row);
            }
        }
    }
    rows
}

/// The columns of other backends.
fn peers(columns: &[Column]) -> Vec<&Column> {
    columns.iter().filter(|column| !column.peer.is_ours()).collect()
}

/// The least ratio of ours to theirs. Only the recommended variants have one: on a host with one processor, a polling
/// backend takes it from the guest.
fn aim(test: &Test, ours: Peer, theirs: Peer, cpus: u32) -> Option<f64> {
    let at = match theirs {
        Peer::Blkback => 0,
        Peer::Qdisk => 1,
        _ => return None,
    };
    match (ours, theirs) {
        (Peer::Ferrite, _) => Some(test.least[at]),
        (Peer::Polling, Peer::Blkback) if cpus > 1 => test.least_polling,
        _ => None,
    }
}

/// The experiment's name and sentences, for each kind of guest and each number of processors.
pub(super) fn about(arguments: &XenArguments) -> About {
    let (kind, guest) = match arguments.guest {
        GuestKind::Pv => ("pv", "PV"),
        GuestKind::Pvh => ("pvh", "PVH"),
    };
    let (suffix, processors) = match arguments.xen_cpus {
        1 => ("", "one processor"),
        _ => ("-2", "two processors, one for the dom0 and one for the guest"),
    };
    About {
        experiment: format!("xen-{kind}{suffix}"),
        shows: format!(
            "Xen itself: a {guest} guest's disk by the kernel's blkback, by QEMU's qdisk and by Ferrite, on one RAM disk \
             in one boot of a host with {processors}."
        ),
        source: "SPDK as a blkif backend (XCP-ng, 2023): 4 KiB with 4 jobs nearly twice tapdisk, 1 MiB 1.25 times. \
                 tapdisk3 (2014): grant copy from user space twice as fast as tapdisk2."
            .into(),
        differs: "The host is emulated, and its clock counts instructions, a nanosecond each: figures compare backends \
                  within a table, and no cache, no flush of an address translation and no storage is in them. tapdisk3 \
                  was measured in another boot and is scaled by blkback's rate."
            .into(),
    }
}

/// The rows of the report: every backend's rate, then the ratios, with the published ones. A test without a complete
/// round is left out.
pub(super) fn findings(tests: &[&Test], columns: &[Column], arguments: &XenArguments) -> Findings {
    let mut rows = Vec::new();
    let measured = |at: usize| columns.iter().all(|column| !column.values[at].is_empty());
    for (at, test) in tests.iter().enumerate().filter(|(at, _)| measured(*at)) {
        let rate = |column: &Column| {
            let name = format!("{}: {}", test.name, column.name);
            Row::new(name, test.unit.name(), &column.values[at])
        };
        rows.extend(columns.iter().map(rate));
        for ours in columns.iter().filter(|column| column.peer.is_ours()) {
            rows.extend(peers(columns).into_iter().map(|peer| {
                let name = format!("{}: {} over {}", test.name, ours.name, peer.name);
                let row = Row::new(name, "times", &ratios(ours, peer, at, 1.0));
                match aim(test, ours.peer, peer.peer, arguments.xen_cpus) {
                    Some(least) => row.target(Target::AtLeast(least)),
                    None => row,
                }
            }));
        }
        rows.extend(beside_tapdisk(at, test, columns, arguments));
    }
    Findings { rows, ..Findings::default() }
}

/// tapdisk3's rate is known relative to blkback's, for a PV guest on one processor.
fn beside_tapdisk(
    at: usize,
    test: &Test,
    columns: &[Column],
    arguments: &XenArguments,
) -> Option<Row> {
    let known = arguments.guest == GuestKind::Pv && arguments.xen_cpus == 1;
    let of = |peer: Peer| columns.iter().find(|column| column.peer == peer);
    let (ours, blkback) = (of(Peer::Ferrite)?, of(Peer::Blkback)?);
    let name = format!("{}: ferrite over tapdisk3, scaled", test.name);
    let row = Row::new(name, "times", &ratios(ours, blkback, at, test.tapdisk))
        .target(Target::AtLeast(test.least[2]));
    let row = test.published.map_or(row.clone(), |figure| row.published(figure));
    (known && test.indirect.is_none()).then_some(row)
}

/// The ratios of each round.
fn ratios(ours: &Column, peer: &Column, at: usize, part: f64) -> Vec<f64> {
    let rounds = ours.values[at].iter().zip(&peer.values[at]);
    rounds.map(|(ours, theirs)| ours / (part * theirs)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::load::selected;
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Parsed {
        #[command(flatten)]
        xen: XenArguments,
    }

    fn arguments(text: &str) -> XenArguments {
        Parsed::parse_from(text.split(' ')).xen
    }

    fn column(peer: Peer, values: &[f64]) -> Column {
        Column { peer, name: peer.name(""), values: vec![values.to_vec()] }
    }

    #[test]
    fn ratios_are_those_of_the_rounds_and_only_what_is_meant_to_run_has_aims() {
        let tests = selected(&["qd1".into()]).expect("a test");
        let columns = [
            column(Peer::Blkback, &[100.0, 200.0, 400.0]),
            column(Peer::Ferrite, &[90.0, 180.0, 360.0]),
            column(Peer::Polling, &[95.0, 190.0, 380.0]),
            column(Peer::Persistent, &[95.0, 190.0, 380.0]),
        ];
        let two = arguments("bench --guest pvh --xen-cpus 2");
        let found = findings(&tests, &columns, &two);
        let of = |name: &str| {
            let row = found.rows.iter().find(|row| row.name == name);
            row.map(|row| ((row.mean * 100.0).round() / 100.0, row.ci95 < 1e-9, row.met))
        };
        let name = |ours: &str| format!("randread 4k QD1: {ours} over blkback");
        assert_eq!(of(&name("ferrite")), Some((0.9, true, Some(true))));
        assert_eq!(of(&name("ferrite, polling")), Some((0.95, true, Some(false))));
        assert_eq!(of(&name("ferrite, persistent")), Some((0.95, true, None)));
        assert_eq!(found.rows.len(), 4 + 3);
        let met = |arguments: &XenArguments| {
            let table = compare(&tests, &columns, arguments);
            table.iter().map(Measurement::met).collect::<Vec<_>>()
        };
        assert_eq!(met(&two), [Some(true), Some(false), None]);
        assert_eq!(met(&arguments("bench --guest pvh")), [Some(true), None, None]);
    }

    #[test]
    fn tapdisks_figure_is_scaled_by_what_blkback_reaches_now() {
        let columns = [
            column(Peer::Blkback, &[2.0 * 15747.0; 3]),
            column(Peer::Ferrite, &[3.0 * 13046.0; 3]),
        ];
        let tests = selected(&["qd32x4".into()]).expect("a test");
        let found = findings(&tests, &columns, &arguments("bench"));
        let row = found.rows.last().expect("rows");
        assert!(row.name.ends_with("over tapdisk3, scaled") && (row.mean - 1.5).abs() < 1e-9);
        assert_eq!((row.published, row.met), (Some(2.0), Some(true)));
        let found = findings(&tests, &columns, &arguments("bench --guest pvh"));
        assert!(!found.rows.iter().any(|row| row.name.contains("tapdisk")));
    }

    #[test]
    fn a_run_that_is_cut_short_leaves_the_tests_that_it_has_done() {
        let tests = selected(&["qd1".into(), "read-1m-256".into()]).expect("tests");
        let mut columns = [column(Peer::Blkback, &[100.0]), column(Peer::Ferrite, &[90.0])];
        columns.iter_mut().for_each(|column| column.values.push(Vec::new()));
        let found = findings(&tests, &columns, &arguments("bench --guest pvh"));
        assert_eq!(found.rows.len(), 3);
        assert!(
            found.rows.iter().all(|row| row.name.starts_with("randread 4k QD1:") && row.n == 1)
        );
    }

    #[test]
    fn each_kind_of_guest_and_of_host_is_an_experiment() {
        assert_eq!(about(&arguments("bench")).experiment, "xen-pv");
        assert_eq!(about(&arguments("bench --guest pvh --xen-cpus 2")).experiment, "xen-pvh-2");
    }
}
