//! The guest's load: fio's jobs, and the figures in its output.

use anyhow::{Context, Result};
use ferrite_xenhost::XenHost;
use ferrite_xenhost::disk::Disk;
use ferrite_xenhost::guest::Guest;

/// The time limit of a fio besides its tests.
pub(super) const LIMIT_S: u64 = 120;
/// Processors of the guest.
pub(super) const VCPUS: u32 = 2;

/// One job of fio in the guest, and its targets.
#[derive(Debug)]
pub(super) struct Test {
    /// Its name in `--tests`.
    pub(super) key: &'static str,
    /// Its name in the table.
    pub(super) name: &'static str,
    /// fio's options.
    pub(super) fio: &'static str,
    pub(super) unit: Unit,
    /// The largest number of segments of the guest's requests (blkfront's `max_indirect_segments`); by default 32.
    pub(super) indirect: Option<u32>,
    /// tapdisk3's ratio to blkback in the lab of 2026-11-21, with a PV guest.
    pub(super) tapdisk: f64,
    /// Least ratios to blkback, to qdisk and to tapdisk3.
    pub(super) least: [f64; 3],
    /// The least ratio to blkback for a polling backend, if that differs.
    pub(super) least_polling: Option<f64>,
    /// The published ratio to tapdisk3 for a backend with several queues.
    pub(super) published: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Iops,
    Bandwidth,
}

impl Unit {
    pub(super) fn name(self) -> &'static str {
        match self {
            Unit::Iops => "IOPS",
            Unit::Bandwidth => "MB/s",
        }
    }
}

impl Test {
    /// fio's options for the processors of its jobs: a single one on the processor of its queue's interrupt, several on
    /// all in turn.
    fn places(&self) -> &'static str {
        match self.fio.contains("--numjobs") {
            true => "--cpus_allowed=0-1 --cpus_allowed_policy=split",
            false => "--cpus_allowed=0",
        }
    }
}

/// Random reads of 4 KiB, one at a time.
pub(super) const QD1: Test = Test {
    key: "qd1",
    name: "randread 4k QD1",
    fio: "--rw=randread --bs=4k --iodepth=1",
    unit: Unit::Iops,
    indirect: None,
    tapdisk: 6281.0 / 9182.0,
    least: [0.82, 1.4, 1.2],
    least_polling: Some(1.0),
    published: None,
};

pub(super) const QD32: Test = Test {
    key: "qd32",
    name: "randread 4k QD32",
    fio: "--rw=randread --bs=4k --iodepth=32",
    tapdisk: 14656.0 / 18131.0,
    least: [0.98, 1.4, 1.2],
    least_polling: None,
    ..QD1
};

const QD32X4: Test = Test {
    key: "qd32x4",
    name: "randread 4k QD32 x 4 jobs",
    fio: "--rw=randread --bs=4k --iodepth=32 --numjobs=4",
    tapdisk: 13046.0 / 15747.0,
    least: [1.0, 1.4, 1.2],
    published: Some(2.0),
    ..QD32
};

pub(super) const READ_1M: Test = Test {
    key: "read-1m",
    name: "read 1m QD8",
    fio: "--rw=read --bs=1m --iodepth=8",
    unit: Unit::Bandwidth,
    tapdisk: 412.0 / 769.0,
    least: [0.9, 1.4, 1.8],
    published: Some(1.25),
    ..QD32
};

const WRITE_1M: Test = Test {
    key: "write-1m",
    name: "write 1m QD8",
    fio: "--rw=write --bs=1m --iodepth=8",
    tapdisk: 412.0 / 753.0,
    ..READ_1M
};

pub(super) const TESTS: &[Test] = &[
    QD1,
    QD32,
    QD32X4,
    Test {
        key: "write-qd32x4",
        name: "randwrite 4k QD32 x 4 jobs",
        fio: "--rw=randwrite --bs=4k --iodepth=32 --numjobs=4",
        tapdisk: 13006.0 / 15592.0,
        ..QD32X4
    },
    READ_1M,
    WRITE_1M,
    Test { key: "read-1m-256", name: "read 1m QD8, 256 segments", indirect: Some(256), ..READ_1M },
    Test {
        key: "write-1m-256",
        name: "write 1m QD8, 256 segments",
        indirect: Some(256),
        ..WRITE_1M
    },
];

/// The tests of these keys, in their order; all tests without keys.
pub(super) fn selected(keys: &[String]) -> Result<Vec<&'static Test>> {
    if keys.is_empty() {
        return Ok(TESTS.iter().collect());
    }
    let find = |key: &String| TESTS.iter().find(|test| test.key == key);
    keys.iter().map(|key| find(key).with_context(|| format!("no such test: {key}"))).collect()
}

/// Binds the interrupt of the disk's k-th queue to the guest's k-th processor. By default it is on the one that had the
/// fewest at that time, which makes depth 1 a tenth faster or slower.
pub(super) fn settle(xenhost: &mut XenHost, guest: &mut Guest) -> Result<()> {
    let command = format!(
        "n=0; for irq in $(awk -F: '/ blkif$/ {{ print $1 + 0 }}' /proc/interrupts); do \
         echo $((1 << n % {VCPUS})) >/proc/irq/$irq/smp_affinity; n=$((n + 1)); done; [ $n -gt 0 ]"
    );
    guest.sh(xenhost, &command, 60).map(drop)
}

/// Runs the tests one after the other; each figure is in its test's unit.
pub(super) fn fio(
    xenhost: &mut XenHost,
    guest: &mut Guest,
    disk: &Disk,
    tests: &[&Test],
    seconds: f64,
) -> Result<Vec<f64>> {
    let limit_s = LIMIT_S + (seconds * tests.len() as f64).ceil() as u64;
    let output = guest.sh(xenhost, &command(&disk.node(), tests, seconds), limit_s);
    let output = output.with_context(|| disk.describe(xenhost))?;
    figures(&output, tests)
}

/// The figure of each test in fio's output.
pub(super) fn figures(output: &str, tests: &[&Test]) -> Result<Vec<f64>> {
    tests
        .iter()
        .map(|test| figure(output, test).with_context(|| format!("odd output of fio: {output}")))
        .collect()
}

/// The command of one fio that runs all tests: its start takes longer here than a short test. It prints its terse
/// format, version 3: one line per test.
pub(super) fn command(node: &str, tests: &[&Test], seconds: f64) -> String {
    let mut command = format!(
        "fio --filename={node} --ioengine=libaio --direct=1 --time_based --runtime={}ms \
         --group_reporting --minimal",
        (seconds * 1000.0).round(),
    );
    for test in tests {
        command += &format!(" --name={} --stonewall {} {}", test.key, test.fio, test.places());
    }
    command
}

/// The sum of a test's two fields in fio's output, one for reads and one for writes. One of them is zero.
fn sum(output: &str, test: &Test, read: usize, write: usize) -> Option<f64> {
    let mut lines = output.lines().map(|line| line.split(';').collect::<Vec<_>>());
    let fields = lines.find(|fields| fields.get(2) == Some(&test.key))?;
    let number = |at: usize| fields.get(at)?.parse::<f64>().ok();
    Some(number(read)? + number(write)?)
}

/// The test's figure, in its unit.
fn figure(output: &str, test: &Test) -> Option<f64> {
    match test.unit {
        Unit::Iops => sum(output, test, 7, 48),
        // Given in KiB/s.
        Unit::Bandwidth => Some(sum(output, test, 6, 47)? * 1024.0 / 1e6),
    }
}

/// The requests of a test: its bytes, given in KiB, by its block size.
pub(super) fn requests(output: &str, test: &Test) -> Option<f64> {
    let block_kib = match test.unit {
        Unit::Iops => 4.0,
        Unit::Bandwidth => 1024.0,
    };
    Some(sum(output, test, 5, 46)? / block_kib)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fios_figures_are_found_for_reads_and_for_writes() {
        let line = |key, figures: [(usize, &'static str); 2]| {
            let mut fields = vec!["0"; 130];
            fields[2] = key;
            figures.iter().for_each(|(at, figure)| fields[*at] = figure);
            fields.join(";")
        };
        let output = line("qd1", [(6, "4000"), (7, "1000")])
            + "\n"
            + &line("write-1m", [(47, "1000000"), (48, "977")]);
        let of = |key: &str| figure(&output, TESTS.iter().find(|test| test.key == key)?);
        assert_eq!(of("qd1"), Some(1000.0));
        assert_eq!(of("write-1m"), Some(1024.0));
        assert_eq!(of("qd32"), None);
    }

    #[test]
    fn an_unknown_test_is_refused() {
        assert!(selected(&["qd33".into()]).is_err());
    }
}
