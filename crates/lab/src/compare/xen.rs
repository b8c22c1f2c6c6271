//! A real Xen host in the emulator's counting mode: what fio reports in the guest depends on the
//! number of instructions on the whole path, and hardly on how loaded this machine is. Caches and
//! flushes of the address translation cost nothing there.

use super::profile::{self, Profiler};
use super::result::{Measurement, Target};
use anyhow::{Context, Result};
use ferrite_xenhost::disk::{Backend, Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions};
use ferrite_xenhost::qemu::Pace;
use ferrite_xenhost::steps::{self, say, step};
use ferrite_xenhost::{XenHost, root};
use ferrite_xenhost::{packages, release};

/// Options of the part `xen`.
#[derive(clap::Args)]
#[command(next_help_heading = "Options of the part xen")]
pub(crate) struct XenArguments {
    /// Backends to measure, with commas between them.
    #[arg(long, value_delimiter = ',', default_value = "blkback,qdisk,ferrite")]
    only: Vec<Peer>,
    /// Tests to run, with commas between them: qd1, qd32, qd32x4, write-qd32x4, read-1m, write-1m.
    #[arg(long, value_delimiter = ',')]
    tests: Vec<String>,
    /// Length of a test, in seconds of the emulated machine.
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    xen_seconds: f64,
    /// Processors of the host: with two, the dom0 has the first and the guest the other.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    xen_cpus: u32,
    /// Further arguments of `ferrite serve`; given more than once, each is measured for itself.
    #[arg(long, allow_hyphen_values = true)]
    ferrite_args: Vec<String>,
    /// Says what each request's instructions go to, instead of measuring speed; into
    /// target/bench/xen-profile.md.
    #[arg(long)]
    profile: bool,
}

/// The backends of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peer {
    /// The kernel's backend, with persistent grants.
    Blkback,
    /// QEMU's backend.
    Qdisk,
    /// This project.
    Ferrite,
}

/// One run of fio in the guest, and what was seen in it with a backend that is not measured here.
#[derive(Debug)]
struct Test {
    /// Its name in `--tests`.
    key: &'static str,
    /// Its name in the table.
    name: &'static str,
    /// fio's options for it.
    fio: &'static str,
    unit: Unit,
    /// Blkback's figure in the run that tapdisk3 was measured in (docs/performance.md).
    blkback_then: f64,
    /// The figure of tapdisk3 in that run.
    tapdisk_then: f64,
    /// Least ratios to blkback, to qdisk and to tapdisk3.
    least: [f64; 3],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Iops,
    Bandwidth,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Iops => "IOPS",
            Unit::Bandwidth => "MB/s",
        }
    }
}

const TESTS: &[Test] = &[
    Test {
        key: "qd1",
        name: "randread 4k QD1",
        fio: "--rw=randread --bs=4k --iodepth=1",
        unit: Unit::Iops,
        blkback_then: 9182.0,
        tapdisk_then: 6281.0,
        least: [0.85, 1.4, 1.2],
    },
    Test {
        key: "qd32",
        name: "randread 4k QD32",
        fio: "--rw=randread --bs=4k --iodepth=32",
        unit: Unit::Iops,
        blkback_then: 18131.0,
        tapdisk_then: 14656.0,
        least: [1.0, 1.4, 1.2],
    },
    Test {
        key: "qd32x4",
        name: "randread 4k QD32 x 4 jobs",
        fio: "--rw=randread --bs=4k --iodepth=32 --numjobs=4",
        unit: Unit::Iops,
        blkback_then: 15747.0,
        tapdisk_then: 13046.0,
        least: [1.0, 1.4, 1.2],
    },
    Test {
        key: "write-qd32x4",
        name: "randwrite 4k QD32 x 4 jobs",
        fio: "--rw=randwrite --bs=4k --iodepth=32 --numjobs=4",
        unit: Unit::Iops,
        blkback_then: 15592.0,
        tapdisk_then: 13006.0,
        least: [1.0, 1.4, 1.2],
    },
    Test {
        key: "read-1m",
        name: "read 1m QD8",
        fio: "--rw=read --bs=1m --iodepth=8",
        unit: Unit::Bandwidth,
        blkback_then: 769.0,
        tapdisk_then: 412.0,
        least: [1.0, 1.4, 1.8],
    },
    Test {
        key: "write-1m",
        name: "write 1m QD8",
        fio: "--rw=write --bs=1m --iodepth=8",
        unit: Unit::Bandwidth,
        blkback_then: 753.0,
        tapdisk_then: 412.0,
        least: [1.0, 1.4, 1.8],
    },
];

/// Seconds of the two runs whose difference is profiled.
const PROFILE_S: (f64, f64) = (0.1, 0.4);

/// Size of the RAM disk behind every backend.
const DISK_MIB: u32 = 128;

/// A backend as it was measured, and its figures in the order of the tests.
struct Column {
    peer: Peer,
    /// Its name, with the arguments that make it differ.
    name: String,
    values: Vec<f64>,
}

/// Boots the host and measures one backend after the other with the same guest and RAM disk.
pub(super) fn run(arguments: &XenArguments) -> Result<Vec<Measurement>> {
    let tests = selected(&arguments.tests)?;
    packages::ensure(&[packages::XEN_HOST])?;
    let suite = root::TRIXIE;
    let root = root::ensure(suite)?;
    let programs = [release::build_ferrite()?];
    let mut profiler = match arguments.profile {
        true => Some(Profiler::new(&programs[0].file)?),
        false => None,
    };
    let plugin = profiler.as_ref().map(Profiler::arguments).unwrap_or_default();
    let mut xenhost =
        XenHost::boot_at(Pace::Instructions, arguments.xen_cpus, &root, &programs, &plugin)
            .context(
                "counting instructions works with QEMU 7.2; 10.0 stops with \"Bad icount read\"",
            )?;
    // blkback as it is by itself, and every page of the disk in place before it is read.
    xenhost.sh_for(
        &format!(
            "rmmod xen-blkback && modprobe xen-blkback && \
             modprobe brd rd_nr=1 rd_size={} && dd if=/dev/zero of=/dev/ram0 bs=1M count={DISK_MIB}",
            DISK_MIB << 10
        ),
        60,
    )?;
    let mut guest = step("start a guest", || Guest::start(&mut xenhost, &GuestOptions::default()))?;
    if arguments.xen_cpus > 1 {
        xenhost.sh(&format!("xl vcpu-pin {} all 1", guest.domid()))?;
    }
    if let Some(profiler) = &mut profiler {
        profiler.read_symbols(&mut xenhost, &mut guest)?;
    }
    let mut columns = Vec::new();
    let mut profiles = String::new();
    for (peer, extra) in variants(arguments) {
        let name = format!("{peer:?} {extra}").trim().to_lowercase();
        let mut disk = attach(&mut xenhost, &mut guest, peer, &extra)?;
        match &profiler {
            Some(profiler) => {
                profiles += &step(&format!("profile of {name}"), || {
                    profile(&mut xenhost, &mut guest, &disk, profiler, &name, &tests)
                })?;
            }
            None => {
                let seconds = arguments.xen_seconds;
                let values = step(&name, || fio(&mut xenhost, &mut guest, &disk, &tests, seconds))?;
                for (test, value) in tests.iter().zip(&values) {
                    say(format!("  {}: {value:.0} {}", test.name, test.unit.name()));
                }
                columns.push(Column { peer, name, values });
            }
        }
        disk.unplug(&mut xenhost)?;
    }
    if profiler.is_some() {
        let file = steps::target_dir().join("bench").join("xen-profile.md");
        std::fs::write(&file, &profiles)
            .with_context(|| format!("cannot write {}", file.display()))?;
        println!("{profiles}");
    }
    Ok(compare(&tests, &columns))
}

fn selected(keys: &[String]) -> Result<Vec<&'static Test>> {
    if keys.is_empty() {
        return Ok(TESTS.iter().collect());
    }
    let find = |key: &String| TESTS.iter().find(|test| test.key == key);
    keys.iter().map(|key| find(key).with_context(|| format!("no such test: {key}"))).collect()
}

/// The backends in the order of their measurement, ferrite once for each set of arguments.
fn variants(arguments: &XenArguments) -> Vec<(Peer, String)> {
    let mut list = Vec::new();
    for peer in &arguments.only {
        if *peer == Peer::Ferrite && !arguments.ferrite_args.is_empty() {
            list.extend(arguments.ferrite_args.iter().map(|extra| (*peer, extra.clone())));
        } else {
            list.push((*peer, String::new()));
        }
    }
    list
}

/// Gives the guest a disk over the RAM disk.
fn attach(xenhost: &mut XenHost, guest: &mut Guest, peer: Peer, extra: &str) -> Result<Disk> {
    let backend = match peer {
        Peer::Blkback => Backend::Blkback,
        Peer::Qdisk => Backend::Qdisk,
        Peer::Ferrite => Backend::Ferrite,
    };
    let mut options = DiskOptions::new("/dev/ram0", "xvda");
    options.arguments = extra.to_owned();
    let disk = Disk::attach(xenhost, guest, backend, options)?;
    disk.wait_connected(xenhost)?;
    guest.sh(xenhost, &format!("until [ -b {} ]; do sleep 0.1; done", disk.node()), 60)?;
    Ok(disk)
}

/// Profiles the tests, one after the other. A short and a longer run differ in nothing but the
/// requests: fio's own start and end are in both.
fn profile(
    xenhost: &mut XenHost,
    guest: &mut Guest,
    disk: &Disk,
    profiler: &Profiler,
    name: &str,
    tests: &[&Test],
) -> Result<String> {
    let maps = match disk.pid() {
        Some(pid) => xenhost.sh(&format!("cat /proc/{pid}/maps"))?,
        None => String::new(),
    };
    let mut text = String::new();
    for test in tests {
        let mut run = |seconds: f64| -> Result<_> {
            let before = profiler.counters()?;
            let output = fio_output(xenhost, guest, disk, &[test], seconds)?;
            let counts = profile::difference(&profiler.counters()?, &before);
            let ios = requests(&output, test).context("odd output of fio")?;
            Ok((counts, ios))
        };
        // The first run finds nothing in its place, neither here nor there.
        run(PROFILE_S.0)?;
        let (short, few) = run(PROFILE_S.0)?;
        let (long, many) = run(PROFILE_S.1)?;
        let counts = profile::difference(&long, &short);
        text += &profiler.report(&format!("{}: {name}", test.name), &counts, many - few, &maps);
        text += "\n";
    }
    Ok(text)
}

/// Runs the tests one after the other; each figure is in its test's unit.
fn fio(
    xenhost: &mut XenHost,
    guest: &mut Guest,
    disk: &Disk,
    tests: &[&Test],
    seconds: f64,
) -> Result<Vec<f64>> {
    let output =
        fio_output(xenhost, guest, disk, tests, seconds).with_context(|| disk.describe(xenhost))?;
    tests
        .iter()
        .map(|test| figure(&output, test).with_context(|| format!("odd output of fio: {output}")))
        .collect()
}

/// The output of fio in its terse format, version 3: a line for each test. One fio runs them all:
/// its start takes longer here than a short test.
fn fio_output(
    xenhost: &mut XenHost,
    guest: &mut Guest,
    disk: &Disk,
    tests: &[&Test],
    seconds: f64,
) -> Result<String> {
    let mut command = format!(
        "fio --filename={} --ioengine=libaio --direct=1 --time_based --runtime={}ms \
         --group_reporting --minimal",
        disk.node(),
        (seconds * 1000.0).round(),
    );
    for test in tests {
        command += &format!(" --name={} --stonewall {}", test.key, test.fio);
    }
    let limit_s = 120 + (seconds * tests.len() as f64).ceil() as u64;
    guest.sh(xenhost, &command, limit_s)
}

/// The sum of a test's two fields in fio's output, one for reads and one for writes, of which one
/// is zero.
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
fn requests(output: &str, test: &Test) -> Option<f64> {
    let block_kib = match test.unit {
        Unit::Iops => 4.0,
        Unit::Bandwidth => 1024.0,
    };
    Some(sum(output, test, 5, 46)? / block_kib)
}

/// A row for each test, each way that ferrite ran, and each peer.
fn compare(tests: &[&Test], columns: &[Column]) -> Vec<Measurement> {
    let of = |peer: Peer| columns.iter().find(|column| column.peer == peer);
    let mut rows = Vec::new();
    for (at, test) in tests.iter().enumerate() {
        let blkback = of(Peer::Blkback).map(|column| column.values[at]);
        let peers = [
            ("blkback", blkback),
            ("qdisk", of(Peer::Qdisk).map(|column| column.values[at])),
            ("tapdisk3, scaled", blkback.map(|now| test.tapdisk_then * now / test.blkback_then)),
        ];
        for column in columns.iter().filter(|column| column.peer == Peer::Ferrite) {
            let arguments = column.name.trim_start_matches("ferrite").trim();
            let name = if arguments.is_empty() {
                test.name.to_owned()
            } else {
                format!("{}, {arguments}", test.name)
            };
            let row = Measurement::new("xen", name, column.values[at], test.unit.name());
            let beside = peers.iter().zip(test.least).filter_map(|((peer, value), least)| {
                Some(row.clone().against(*peer, (*value)?).target(Target::AtLeast(least)))
            });
            let before = rows.len();
            rows.extend(beside);
            if rows.len() == before {
                rows.push(row);
            }
        }
    }
    rows
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
    fn tapdisks_figure_is_scaled_by_what_blkback_reaches_now() {
        let column = |peer, value| Column { peer, name: "ferrite".into(), values: vec![value] };
        let columns = [column(Peer::Blkback, 2.0 * 18131.0), column(Peer::Ferrite, 2.0 * 14656.0)];
        let rows = compare(&selected(&["qd32".into()]).expect("a test"), &columns);
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[1].ratio, Some(1.0));
        assert_eq!(rows[1].met(), Some(false));
    }

    #[test]
    fn an_unknown_test_is_refused() {
        assert!(selected(&["qd33".into()]).is_err());
    }
}
