//! Block devices of the dom0: an image by `ferrite disk device`, through the kernel's NBD client and through its ublk
//! driver. They are compared with a loop device of the same content without a format, and with the same image by
//! `qemu-nbd`. All are there at once, on one RAM disk, and measured in turn. Then the costs of a device at rest are
//! measured.

use super::load::{self, QD1, QD32, Test};
use super::{XenArguments, hardware};
use crate::compare::result::{Measurement, Target};
use anyhow::{Result, ensure};
use ferrite_xenhost::qemu::Hardware;
use ferrite_xenhost::steps::{say, step};
use ferrite_xenhost::{XenHost, packages, release, root};

const PART: &str = "device";
/// The size of each image.
const DISK_MIB: u32 = 64;
const RAM_MIB: u32 = 6 * DISK_MIB;
const DOM0_MIB: u32 = 2 << 10;
/// The daemon's folders of images are below /lab.
const FOLDER: &str = "/lab/ram";
const LIMIT_S: u64 = 600;
/// A name of `ferrite`. The host's shell does not look for programs there.
const TAP_CTL: &str = "/usr/local/bin/tap-ctl";

const TESTS: &[Test] = &[
    QD1,
    QD32,
    Test {
        key: "write-qd1",
        name: "randwrite 4k QD1",
        fio: "--rw=randwrite --bs=4k --iodepth=1",
        ..QD1
    },
    Test {
        key: "write-qd32",
        name: "randwrite 4k QD32",
        fio: "--rw=randwrite --bs=4k --iodepth=32",
        ..QD32
    },
];

/// A device of the dom0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The kernel's loop driver, of a raw image, past the cache.
    Loop,
    /// `qemu-nbd`, of a qcow2.
    Qemu,
    /// Ours by the kernel's NBD client.
    Nbd,
    /// Ours by the kernel's ublk driver.
    Ublk,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::Loop, Kind::Qemu, Kind::Nbd, Kind::Ublk];

    fn name(self) -> &'static str {
        match self {
            Kind::Loop => "losetup, raw",
            Kind::Qemu => "qemu-nbd",
            Kind::Nbd => "ferrite, nbd",
            Kind::Ublk => "ferrite, ublk",
        }
    }

    /// A command that makes it and prints its name.
    fn make(self) -> String {
        let qcow2 = format!("{FOLDER}/{self:?}.qcow2");
        match self {
            Kind::Loop => format!("losetup -f --show --direct-io=on {FOLDER}/disk.raw"),
            Kind::Qemu => format!(
                "qemu-nbd --connect=/dev/nbd9 --format=qcow2 --cache=none --aio=io_uring {qcow2} >&2 && \
                 until [ $(cat /sys/block/nbd9/size) -gt 0 ]; do sleep 0.1; done; echo /dev/nbd9"
            ),
            Kind::Nbd => format!("ferrite disk device --load --by nbd {qcow2}"),
            Kind::Ublk => format!("ferrite disk device --load --by ublk {qcow2}"),
        }
    }
}

/// A device with its figures: for each test that of each round.
struct Column {
    kind: Kind,
    device: String,
    values: Vec<Vec<f64>>,
}

/// Boots the host, and measures all.
pub(in crate::compare) fn run(arguments: &XenArguments) -> Result<Vec<Measurement>> {
    packages::ensure(&[packages::XEN_HOST])?;
    let (root, programs) = (root::ensure(root::TRIXIE)?, [release::build_ferrite()?]);
    let hardware = Hardware { dom0_mib: DOM0_MIB, ..hardware(arguments) };
    let mut xenhost = XenHost::boot_at(hardware, &root, &programs, &[])?;
    step("make images", || prepare(&mut xenhost))?;
    xenhost.start_daemon("")?;
    let columns = measure(&mut xenhost, arguments)?;
    let mut rows = rates(&columns);
    for column in &columns {
        remove(&mut xenhost, column)?;
    }
    for kind in [Kind::Nbd, Kind::Ublk] {
        rows.extend(step(&format!("{}, at rest", kind.name()), || rest(&mut xenhost, kind))?);
    }
    Ok(rows)
}

/// A file system on a RAM disk with all images, every block of which is written.
fn prepare(xenhost: &mut XenHost) -> Result<()> {
    let mut command = format!(
        "set -e; mkdir -p /run/lock; ln -s $(command -v ferrite) {TAP_CTL}; modprobe brd rd_nr=1 rd_size={}; modprobe nbd; \
         mkfs.ext4 -q -m 0 -O ^has_journal /dev/ram0; mkdir {FOLDER}; mount /dev/ram0 {FOLDER}; \
         head -c {DISK_MIB}M /dev/zero | tr '\\0' f >{FOLDER}/disk.raw; ",
        RAM_MIB << 10
    );
    for kind in Kind::ALL {
        command += &format!(
            "qemu-img convert -f raw -O qcow2 {FOLDER}/disk.raw {FOLDER}/{kind:?}.qcow2; "
        );
    }
    xenhost.sh_for(&command, LIMIT_S).map(drop)
}

fn measure(xenhost: &mut XenHost, arguments: &XenArguments) -> Result<Vec<Column>> {
    let tests: Vec<&Test> = TESTS.iter().collect();
    let mut columns = Vec::new();
    for kind in Kind::ALL {
        let device = step(kind.name(), || xenhost.sh_for(&kind.make(), LIMIT_S))?.trim().to_owned();
        ensure!(device.starts_with("/dev/"), "{}: {device}", kind.name());
        fio(xenhost, &device, &tests[..1], 0.1)?;
        columns.push(Column { kind, device, values: vec![Vec::new(); TESTS.len()] });
    }
    for round in 1..=arguments.xen_rounds {
        for column in &mut columns {
            let what = format!("{}, round {round}", column.kind.name());
            let got = step(&what, || fio(xenhost, &column.device, &tests, arguments.xen_seconds))?;
            for ((test, got), values) in TESTS.iter().zip(got).zip(&mut column.values) {
                say(format!("  {}: {got:.0} {}", test.name, test.unit.name()));
                values.push(got);
            }
        }
    }
    Ok(columns)
}

fn fio(xenhost: &mut XenHost, device: &str, tests: &[&Test], seconds: f64) -> Result<Vec<f64>> {
    let output = xenhost.sh_for(&load::command(device, tests, seconds), LIMIT_S)?;
    load::figures(&output, tests)
}

fn remove(xenhost: &mut XenHost, column: &Column) -> Result<()> {
    let device = &column.device;
    let command = match column.kind {
        Kind::Loop => format!("losetup -d {device}"),
        Kind::Qemu => format!("qemu-nbd --disconnect {device}"),
        Kind::Nbd | Kind::Ublk => format!("ferrite disk device --remove {device}"),
    };
    xenhost.sh_for(&command, LIMIT_S).map(drop)
}

/// The rows of the rates, with the targets of those that have one.
fn rates(columns: &[Column]) -> Vec<Measurement> {
    let of = |kind: Kind| columns.iter().find(|column| column.kind == kind);
    let mut rows = Vec::new();
    for (ours, theirs) in [
        (Kind::Nbd, Kind::Loop),
        (Kind::Nbd, Kind::Qemu),
        (Kind::Ublk, Kind::Nbd),
        (Kind::Ublk, Kind::Loop),
        (Kind::Ublk, Kind::Qemu),
    ] {
        let (Some(ours), Some(theirs)) = (of(ours), of(theirs)) else { continue };
        for (at, test) in TESTS.iter().enumerate() {
            let name = format!("{}, qcow2: {}", ours.kind.name(), test.name);
            let row = Measurement::of_runs(PART, name, test.unit.name(), &ours.values[at])
                .against_runs(theirs.kind.name(), &theirs.values[at]);
            rows.push(match least(test, ours.kind, theirs.kind) {
                Some(least) => row.target(Target::AtLeast(least)),
                None => row,
            });
        }
    }
    rows
}

/// The least ratio of ours to theirs.
fn least(test: &Test, ours: Kind, theirs: Kind) -> Option<f64> {
    let deep = test.fio.contains("--iodepth=32");
    match (ours, theirs) {
        (Kind::Nbd, Kind::Loop) if deep => Some(0.8),
        (Kind::Nbd, Kind::Qemu) if deep => Some(1.2),
        (Kind::Ublk, Kind::Nbd) => Some(1.3),
        _ => None,
    }
}

/// Defines `ours`, which prints the processes of the program: their own memory in KiB, and how often their threads have
/// gone to sleep or were interrupted.
const OURS: &str = "ours() { for p in /proc/[0-9]*; do \
    [ \"$(readlink $p/exe)\" = \"$(readlink -f $(command -v ferrite))\" ] && echo $p; done; }; \
    kib() { for p in $(ours); do cat $p/smaps_rollup; done | awk '/^Pss:/ { sum += $2 } END { print sum + 0 }'; }; \
    switches() { for p in $(ours); do cat $p/task/*/status; done | \
    awk '/ctxt_switches:/ { sum += $2 } END { print sum + 0 }'; }; ";
/// How long a device rests before it is measured: memory is given back after 5 s without a request.
const REST_S: u32 = 15;
const WATCHED_S: u32 = 30;

/// The costs of a device of a disk that is served already, after a load: the memory of all processes, beside the same
/// without a device, and their wake-ups while nothing is asked for.
fn rest(xenhost: &mut XenHost, kind: Kind) -> Result<[Measurement; 2]> {
    let qcow2 = format!("{FOLDER}/{kind:?}.qcow2");
    let by = if kind == Kind::Nbd { "nbd" } else { "ublk" };
    xenhost.sh_for(&format!("{TAP_CTL} create -a qcow2:{qcow2}"), LIMIT_S)?;
    let without = look(xenhost)?;
    let make = format!(
        "ferrite disk device --load --by {by} $(ferrite disk list | grep -o 'tap/[0-9]*' | head -n 1)"
    );
    let device = xenhost.sh_for(&make, LIMIT_S)?.trim().to_owned();
    fio(xenhost, &device, &TESTS.iter().collect::<Vec<_>>(), 0.1)?;
    let with = look(xenhost)?;
    let remove = format!(
        "ferrite disk device --remove {device} && \
         {TAP_CTL} destroy $({TAP_CTL} list | sed 's/pid=\\([0-9]*\\) minor=\\([0-9]*\\) .*/-p \\1 -m \\2/')"
    );
    xenhost.sh_for(&remove, LIMIT_S)?;
    let row = |what: &str, value: f64, unit, most: f64| {
        Measurement::new(PART, format!("{}, at rest: {what}", kind.name()), value, unit)
            .target(Target::AtMost(most))
    };
    let wake_ups = (with.switches - without.switches) * 60.0 / f64::from(WATCHED_S);
    say(format!("  without: {without:?}, with: {with:?}"));
    Ok([
        row("its memory", (with.kib - without.kib) / 1024.0, "MiB", 4.0),
        row("its wake-ups", wake_ups, "a minute", 0.0),
    ])
}

/// All processes of the program.
#[derive(Clone, Copy, Debug)]
struct Look {
    kib: f64,
    /// While they were watched.
    switches: f64,
}

fn look(xenhost: &mut XenHost) -> Result<Look> {
    let command = format!(
        "{OURS} sleep {REST_S}; kib; before=$(switches); sleep {WATCHED_S}; echo $(($(switches) - before))"
    );
    let said = xenhost.sh_for(&command, LIMIT_S)?;
    let numbers: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [kib, switches] = numbers[..] else { anyhow::bail!("odd figures: {said}") };
    Ok(Look { kib, switches })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_has_its_rows_and_what_the_issue_asks_for_its_targets() {
        let column = |kind, rate: f64| Column {
            kind,
            device: String::new(),
            values: vec![vec![rate; 3]; TESTS.len()],
        };
        let columns = [
            column(Kind::Loop, 100.0),
            column(Kind::Qemu, 80.0),
            column(Kind::Nbd, 90.0),
            column(Kind::Ublk, 120.0),
        ];
        let rows = rates(&columns);
        assert_eq!(rows.len(), 5 * TESTS.len());
        let met = |ours: &str, peer: &str, test: &str| {
            let name = format!("{ours}, qcow2: {test}");
            let is_it = |row: &&Measurement| row.name == name && row.peer.as_deref() == Some(peer);
            rows.iter().find(is_it).and_then(Measurement::met)
        };
        let (deep, one) = ("randread 4k QD32", "randread 4k QD1");
        assert_eq!(met("ferrite, nbd", "losetup, raw", deep), Some(true));
        assert_eq!(met("ferrite, nbd", "losetup, raw", one), None);
        assert_eq!(met("ferrite, nbd", "qemu-nbd", deep), Some(false));
        assert_eq!(met("ferrite, ublk", "ferrite, nbd", one), Some(true));
    }
}
