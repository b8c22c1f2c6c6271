//! Compares a volume of a store with the kernel's dm-vdo under blkback, for the same guest: the rates of its disk, and
//! the space of the same content. Each is on a RAM disk of its own, in one boot.

use super::load::{self, QD1, QD32, READ_1M, Test};
use super::{XenArguments, attach_by, hardware, start};
use crate::compare::result::{Measurement, Target};
use anyhow::{Context, Result, ensure};
use ferrite_xenhost::disk::{Backend, Disk, DiskOptions};
use ferrite_xenhost::guest::Guest;
use ferrite_xenhost::qemu::Hardware;
use ferrite_xenhost::steps::{say, step};
use ferrite_xenhost::{XenHost, packages, release, root};
use serde_json::Value;

const PART: &str = "vdo";
/// The least index of dm-vdo takes 2.6 GiB of its device, of which little is written.
const DEVICE_MIB: u32 = 6 << 10;
const DISK_MIB: u32 = 192;
/// dm-vdo needs 128 MiB for its map of blocks, and as much again for its index.
const DOM0_MIB: u32 = 3 << 10;
const HOST_MIB: u32 = 4 << 10;
/// Content that the guest writes three times. The last place is not at a multiple of the content's size.
const CONTENT_BLOCKS: u32 = 4096;
const COPIES_AT: [u32; 3] = [0, CONTENT_BLOCKS, 2 * CONTENT_BLOCKS + 1];
/// The only device of device-mapper on this host.
const VDO: &str = "/dev/dm-0";
/// Fills the part of the disk that the tests read and overwrite.
const FILL: &str =
    "--name=fill --ioengine=libaio --direct=1 --rw=write --bs=1m --iodepth=8 --refill_buffers";
const LIMIT_S: u64 = 900;

const TESTS: &[Test] = &[
    Test {
        key: "write-1m",
        name: "write 1m QD8, all distinct",
        fio: "--rw=write --bs=1m --iodepth=8 --refill_buffers",
        ..READ_1M
    },
    READ_1M,
    QD32,
    QD1,
    Test {
        key: "distinct",
        name: "randwrite 4k QD32, all distinct",
        fio: "--rw=randwrite --bs=4k --iodepth=32 --refill_buffers",
        ..QD32
    },
    // Each of its 32 buffers keeps its content.
    Test {
        key: "duplicates",
        name: "randwrite 4k QD32 of what is there",
        fio: "--rw=randwrite --bs=4k --iodepth=32 --scramble_buffers=0",
        ..QD32
    },
    Test {
        key: "flushed",
        name: "randwrite 4k QD1, each flushed",
        fio: "--rw=randwrite --bs=4k --iodepth=1 --refill_buffers --fsync=1",
        ..QD1
    },
];

/// The two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Store,
    Vdo,
}

impl Side {
    const BOTH: [Side; 2] = [Side::Store, Side::Vdo];

    fn name(self) -> &'static str {
        match self {
            Side::Store => "ferrite, store",
            Side::Vdo => "dm-vdo, blkback",
        }
    }

    fn make(self, xenhost: &mut XenHost) -> Result<()> {
        let command = match self {
            Side::Store => format!(
                "ferrite store create /dev/ram0 --force && ferrite store create /dev/ram0#disk {DISK_MIB}M"
            ),
            // The least index, and slabs of which the device has several; the map cache is the least, too.
            Side::Vdo => format!(
                "modprobe dm-vdo && vdoformat --logical-size={DISK_MIB}M --slab-bits=17 --uds-memory-size=0.25 \
                 /dev/ram1 && dmsetup create --noudevrules --noudevsync vdo --table \"0 {} vdo V4 /dev/ram1 {} 4096 \
                 32768 16380\" && until [ \"$(dmsetup status vdo | cut -d ' ' -f 7)\" = online ]; do sleep 0.2; done",
                u64::from(DISK_MIB) << 11,
                u64::from(DEVICE_MIB) << 8,
            ),
        };
        xenhost.sh_for(&command, LIMIT_S).map(drop)
    }

    fn attach(self, xenhost: &mut XenHost, guest: &mut Guest) -> Result<Disk> {
        let (backend, image) = match self {
            Side::Store => (Backend::Ferrite, "store:/dev/ram0#disk"),
            Side::Vdo => (Backend::Blkback, VDO),
        };
        attach_by(xenhost, guest, backend, DiskOptions::new(image, "xvda"))
    }

    /// The space of its blocks, as it reports it.
    fn stored_bytes(self, xenhost: &mut XenHost) -> Result<u64> {
        match self {
            Side::Store => {
                let told = xenhost.sh_for("ferrite store stats /dev/ram0 --json", LIMIT_S)?;
                let stats: Value = serde_json::from_str(&told)?;
                stats["stored_bytes"].as_u64().context("the store does not say what it has stored")
            }
            Side::Vdo => {
                let told = xenhost.sh("dmsetup message vdo 0 stats")?;
                Ok(4096
                    * figure(&told, "dataBlocksUsed").with_context(|| format!("odd: {told}"))?)
            }
        }
    }
}

/// A figure of dm-vdo's report, which has the form `{ version : 36, dataBlocksUsed : 4096, ...`.
fn figure(report: &str, name: &str) -> Option<u64> {
    let mut parts = report.split(&['{', ',', '}']).filter_map(|part| part.split_once(':'));
    parts.find(|(key, _)| key.trim() == name)?.1.trim().parse().ok()
}

/// For each side, in the order of [`Side::BOTH`]: for each test the figure of each round.
type Values = [Vec<Vec<f64>>; 2];

/// Boots the host, and measures both in turn.
pub(in crate::compare) fn run(arguments: &XenArguments) -> Result<Vec<Measurement>> {
    packages::ensure(&[packages::XEN_HOST])?;
    let (root, programs) = (root::ensure(root::TRIXIE)?, [release::build_ferrite()?]);
    let hardware = Hardware { host_mib: HOST_MIB, dom0_mib: DOM0_MIB, ..hardware(arguments) };
    let mut xenhost = XenHost::boot_at(hardware, &root, &programs, &[])?;
    let ram = format!("modprobe brd rd_nr=2 rd_size={}", u64::from(DEVICE_MIB) << 10);
    xenhost.sh(&ram)?;
    let mut guest = start(&mut xenhost, arguments, None)?;
    let mut stored_bytes = [0; 2];
    for (stored, side) in stored_bytes.iter_mut().zip(Side::BOTH) {
        step(side.name(), || {
            side.make(&mut xenhost)?;
            *stored = space(&mut xenhost, &mut guest, side)?;
            say(format!("  {stored} bytes are stored"));
            Ok(())
        })?;
    }
    let values = speed(&mut xenhost, &mut guest, arguments)?;
    Ok(rows(stored_bytes, &values))
}

/// Has the guest write the same content to several places of its disk, and returns the space that it takes. Then it
/// fills the whole disk.
fn space(xenhost: &mut XenHost, guest: &mut Guest, side: Side) -> Result<u64> {
    let mut disk = side.attach(xenhost, guest)?;
    let node = disk.node();
    let mut command = format!(
        "[ -s /tmp/content ] || dd if=/dev/urandom of=/tmp/content bs=4k count={CONTENT_BLOCKS} 2>/dev/null"
    );
    for at in COPIES_AT {
        command += &format!(
            " && dd if=/tmp/content of={node} bs=4k seek={at} conv=fsync,notrunc 2>/dev/null"
        );
    }
    for at in COPIES_AT {
        command += &format!(
            " && dd if={node} bs=4k skip={at} count={CONTENT_BLOCKS} 2>/dev/null | cmp - /tmp/content"
        );
    }
    guest.sh(xenhost, &command, LIMIT_S).with_context(|| disk.describe(xenhost))?;
    let stored = side.stored_bytes(xenhost)?;
    ensure!(stored >= u64::from(CONTENT_BLOCKS) << 12, "less is stored than differs: {stored}");
    guest.sh(xenhost, &format!("fio {FILL} --filename={node}"), LIMIT_S)?;
    disk.unplug(xenhost)?;
    Ok(stored)
}

/// Runs the tests on both, round after round.
fn speed(xenhost: &mut XenHost, guest: &mut Guest, arguments: &XenArguments) -> Result<Values> {
    let tests: Vec<&Test> = TESTS.iter().collect();
    let mut values = [vec![Vec::new(); tests.len()], vec![Vec::new(); tests.len()]];
    for round in 1..=arguments.xen_rounds {
        for (side, values) in Side::BOTH.into_iter().zip(&mut values) {
            let got = step(&format!("{}, round {round}", side.name()), || {
                let mut disk = side.attach(xenhost, guest)?;
                let got = load::fio(xenhost, guest, &disk, &tests, arguments.xen_seconds)?;
                disk.unplug(xenhost)?;
                Ok(got)
            })?;
            for ((test, got), values) in tests.iter().zip(got).zip(values) {
                say(format!("  {}: {got:.0} {}", test.name, test.unit.name()));
                values.push(got);
            }
        }
    }
    Ok(values)
}

fn rows(stored_bytes: [u64; 2], [ours, theirs]: &Values) -> Vec<Measurement> {
    let distinct = (u64::from(CONTENT_BLOCKS) << 12) as f64;
    let [stored, by_vdo] = stored_bytes.map(|bytes| bytes as f64 / distinct);
    let space = Measurement::new(PART, "stored of what differs", stored, "times");
    let space = space.against(Side::Vdo.name(), by_vdo).target(Target::AtMost(1.0));
    let tests = TESTS.iter().zip(ours.iter().zip(theirs));
    let speed = tests.map(|(test, (ours, theirs))| {
        Measurement::of_runs(PART, test.name, test.unit.name(), ours)
            .against_runs(Side::Vdo.name(), theirs)
            .target(Target::AtLeast(1.0))
    });
    std::iter::once(space).chain(speed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_of_vdos_report_is_found_by_its_whole_name() {
        let report =
            "{ version : 36, dataBlocksUsed : 4096, overheadBlocksUsed : 7, bios : { read : 1, } }";
        assert_eq!(figure(report, "dataBlocksUsed"), Some(4096));
        assert_eq!(figure(report, "BlocksUsed"), None);
        assert_eq!(figure(report, "read"), Some(1));
    }
}
