//! A guest's disk on one and two servers, beside a local one, in the emulator's counting mode. The disks are copies of
//! a pool on servers of its own and on LUNs of the kernel's targets, such a LUN without a pool, and DRBD. The daemon
//! serves all of them to one guest. They are measured in turn, with each server behind a link of a limited rate, and
//! without limits.

mod scripts;

use std::collections::BTreeMap;

use super::load::{self, QD1, READ_1M, Test};
use super::{XenArguments, hardware, start};
use crate::compare::result::Target;
use crate::experiments::findings::{Findings, Row};
use anyhow::{Context as _, Result};
use ferrite_xenhost::disk::{Disk as Attached, DiskOptions};
use ferrite_xenhost::guest::Guest;
use ferrite_xenhost::qemu::Hardware;
use ferrite_xenhost::steps::{say, step};
use ferrite_xenhost::{Program, XenHost, packages, release, root};
use scripts::{DISK_MIB, LINK_BYTES_S};

const HOST_MIB: u32 = 4 << 10;
const DOM0_MIB: u32 = 2560;
const LIMIT_S: u64 = 600;
/// Behind limited links a test is so many times longer: a depth of 16 takes a quarter of a second.
const LIMITED_TIMES: f64 = 5.0;
/// Segments of the guest's requests: 512 KiB.
const SEGMENTS: u32 = 128;

/// The storage of a disk of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Disk {
    Local,
    Server,
    Servers,
    ServerMirror,
    PlainLun,
    Lun,
    Luns,
    LunMirror,
    Drbd,
}

impl Disk {
    const ALL: [Disk; 9] = [
        Disk::Local,
        Disk::Server,
        Disk::Servers,
        Disk::ServerMirror,
        Disk::PlainLun,
        Disk::Lun,
        Disk::Luns,
        Disk::LunMirror,
        Disk::Drbd,
    ];

    fn name(self) -> &'static str {
        match self {
            Disk::Local => "local disk",
            Disk::Server => "one server",
            Disk::Servers => "2 stripes on servers",
            Disk::ServerMirror => "mirror on servers",
            Disk::PlainLun => "one LUN without a pool",
            Disk::Lun => "one LUN",
            Disk::Luns => "2 stripes on LUNs",
            Disk::LunMirror => "mirror on LUNs",
            Disk::Drbd => "DRBD",
        }
    }

    /// The image for the daemon.
    fn image(self, plain_lun: &str) -> String {
        match self {
            Disk::Local => "/dev/ram0".into(),
            Disk::Server => "pool:lab/one".into(),
            Disk::Servers => "pool:lab/striped".into(),
            Disk::ServerMirror => "pool:lab/mirrored".into(),
            Disk::PlainLun => format!("/dev/{plain_lun}"),
            Disk::Lun => "pool:lab/lun".into(),
            Disk::Luns => "pool:lab/luns-striped".into(),
            Disk::LunMirror => "pool:lab/luns-mirrored".into(),
            Disk::Drbd => "/dev/drbd1".into(),
        }
    }

    /// The guest's name for it.
    fn vdev(self) -> &'static str {
        const NAMES: [&str; 9] =
            ["xvdb", "xvdc", "xvdd", "xvde", "xvdf", "xvdg", "xvdh", "xvdi", "xvdj"];
        NAMES[self as usize]
    }

    /// Its measurements, with links of a limited rate or without limits. DRBD's network is not limited.
    fn tests(self, link: Link) -> &'static [Test] {
        match (link, self) {
            (Link::Limited, Disk::Drbd) => &[],
            (Link::Limited, _) | (Link::Free, Disk::Local) => LARGE,
            (Link::Free, Disk::Server | Disk::Lun) => SMALL,
            (Link::Free, Disk::ServerMirror | Disk::LunMirror | Disk::Drbd) => BOTH,
            (Link::Free, Disk::Servers | Disk::Luns | Disk::PlainLun) => &[],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Link {
    /// So are the servers' links and the local disk.
    Limited,
    Free,
}

impl Link {
    fn name(self) -> String {
        match self {
            Link::Limited => format!("{} MiB/s", LINK_BYTES_S >> 20),
            Link::Free => "no limit".into(),
        }
    }
}

const WRITE: Test = Test {
    key: "write-512k",
    name: "write 512k QD16",
    fio: "--rw=write --bs=512k --iodepth=16 --size=48m",
    indirect: Some(SEGMENTS),
    ..READ_1M
};
const READ: Test = Test {
    key: "read-512k",
    name: "read 512k QD16",
    fio: "--rw=read --bs=512k --iodepth=16 --size=48m",
    ..WRITE
};
const SMALL_WRITE: Test = Test {
    key: "write-4k",
    name: "randwrite 4k QD1",
    fio: "--rw=randwrite --bs=4k --iodepth=1 --size=48m",
    ..QD1
};
const SMALL_READ: Test = Test {
    key: "read-4k",
    name: "randread 4k QD1",
    fio: "--rw=randread --bs=4k --iodepth=1 --size=48m",
    ..QD1
};
const LARGE: &[Test] = &[WRITE, READ];
const SMALL: &[Test] = &[SMALL_WRITE, SMALL_READ];
const BOTH: &[Test] = &[WRITE, READ, SMALL_WRITE, SMALL_READ];

/// The figure of each round, by link, disk and test.
type Values = BTreeMap<(Link, Disk, &'static str), Vec<f64>>;

/// Boots the host, and measures all in turn. `keep` gets the findings so far after each round.
pub(in crate::compare) fn run(
    arguments: &XenArguments,
    keep: impl Fn(Findings) -> Result<()>,
) -> Result<()> {
    packages::ensure(&[packages::XEN_HOST, &[("etcd", "etcd-server")]])?;
    let etcd = packages::find("etcd").context("no etcd")?;
    let programs = [release::build_ferrite()?, Program { name: "etcd", file: etcd }];
    let root = root::ensure(root::TRIXIE)?;
    let hardware = Hardware { host_mib: HOST_MIB, dom0_mib: DOM0_MIB, ..hardware(arguments) };
    let mut xenhost = XenHost::boot_at(hardware, &root, &programs, &[])?;
    let plain_lun = prepare(&mut xenhost)?;
    let mut guest = start(&mut xenhost, arguments, Some(SEGMENTS))?;
    for disk in Disk::ALL {
        step(&format!("attach: {}", disk.name()), || {
            attach(&mut xenhost, &mut guest, disk, &plain_lun)
        })?;
    }
    load::settle(&mut xenhost, &mut guest)?;
    let mut values = Values::new();
    for round in 1..=arguments.xen_rounds {
        for link in [Link::Limited, Link::Free] {
            measure(&mut xenhost, &mut guest, arguments, (link, round), &mut values)?;
        }
        keep(findings(&values))?;
    }
    Ok(())
}

/// Has all servers, and returns the name of the LUN that is in no pool.
fn prepare(xenhost: &mut XenHost) -> Result<String> {
    let size = |script: &str| script.replace("SIZE", &format!("{DISK_MIB}M"));
    step("RAM disks", || xenhost.sh_for(&scripts::ram(), LIMIT_S))?;
    let daemon = xenhost.start_daemon(scripts::POOL)?;
    xenhost.sh(&scripts::group(daemon))?;
    step("etcd and servers", || xenhost.sh_for(scripts::SERVERS, LIMIT_S))?;
    step("targets and sessions", || xenhost.sh_for(&scripts::targets(), LIMIT_S))?;
    let devices: Vec<String> = scripts::luns()
        .map(|(target, number)| xenhost.sh(&scripts::device(target, number)))
        .collect::<Result<_>>()?;
    for (at, device) in devices.iter().enumerate().skip(1) {
        xenhost.sh_for(&scripts::add(at, device), LIMIT_S)?;
    }
    step("disks of the pool", || xenhost.sh_for(&size(scripts::DISKS), LIMIT_S))?;
    step("DRBD", || xenhost.sh_for(&size(scripts::DRBD), LIMIT_S))?;
    devices.into_iter().next().context("there is no LUN")
}

/// Attaches a disk, and writes all of it once.
fn attach(xenhost: &mut XenHost, guest: &mut Guest, disk: Disk, plain_lun: &str) -> Result<()> {
    let vdev = disk.vdev();
    let options = DiskOptions::new(&disk.image(plain_lun), vdev);
    // The daemon serves what has a directory.
    let attached = Attached::attach_beside(xenhost, guest, options)?;
    attached.wait_connected(xenhost).with_context(|| told(xenhost))?;
    let fill = format!(
        "until [ -b /dev/{vdev} ]; do sleep 0.1; done; fio --name=fill --filename=/dev/{vdev} --ioengine=libaio \
         --direct=1 {} --minimal >/dev/null",
        WRITE.fio
    );
    in_guest(xenhost, guest, &fill).map(drop)
}

fn in_guest(xenhost: &mut XenHost, guest: &mut Guest, command: &str) -> Result<String> {
    guest.sh(xenhost, command, LIMIT_S).with_context(|| told(xenhost))
}

/// What the daemon and the pool say, for a failure.
fn told(xenhost: &mut XenHost) -> String {
    let told = xenhost.sh("tail -n 40 /tmp/daemon.log; ferrite pool status lab 2>&1; true");
    told.unwrap_or_else(|error| error.to_string())
}

/// Measures all disks, one after the other.
fn measure(
    xenhost: &mut XenHost,
    guest: &mut Guest,
    arguments: &XenArguments,
    (link, round): (Link, u32),
    values: &mut Values,
) -> Result<()> {
    let seconds = match link {
        Link::Limited => {
            xenhost.sh(&scripts::limit())?;
            arguments.xen_seconds * LIMITED_TIMES
        }
        Link::Free => arguments.xen_seconds,
    };
    for disk in Disk::ALL {
        let tests: Vec<&Test> = disk.tests(link).iter().collect();
        if tests.is_empty() {
            continue;
        }
        let what = format!("{}, {}, round {round}", link.name(), disk.name());
        let node = format!("/dev/{}", disk.vdev());
        let command = load::command(&node, &tests, seconds);
        let output = step(&what, || in_guest(xenhost, guest, &command))?;
        for (test, got) in tests.iter().zip(load::figures(&output, &tests)?) {
            say(format!("  {}: {got:.0} {}", test.name, test.unit.name()));
            values.entry((link, disk, test.key)).or_default().push(got);
        }
    }
    if link == Link::Limited {
        xenhost.sh(scripts::NO_LIMIT)?;
    }
    Ok(())
}

/// A comparison of two disks by one test.
struct Comparison {
    link: Link,
    test: Test,
    ours: Disk,
    other: Disk,
    /// Whether the times of a request are compared, and not the rates.
    times: bool,
    target: Option<Target>,
    /// By the trial that the source names.
    published: Option<f64>,
}

/// The trial's rates with links of 112 MiB/s, in MB/s: of one server, and by stripes and mirror, written and read. The local disk was not
/// limited there, so ratios are to the one server.
const TRIAL_ONE: f64 = 116.5;
const TRIAL_STRIPES: [f64; 2] = [222.0, 220.0];
const TRIAL_MIRROR: [f64; 2] = [111.5, 224.0];

fn comparisons() -> Vec<Comparison> {
    let mut list = Vec::new();
    let at_least = |ratio: f64| Some(Target::AtLeast(ratio));
    let mut limited = |test, ours, target, published| {
        let (link, other, times) = (Link::Limited, Disk::Local, false);
        list.push(Comparison { link, test, ours, other, times, target, published });
    };
    for one in [Disk::Server, Disk::Lun, Disk::PlainLun] {
        limited(WRITE, one, None, None);
        limited(READ, one, None, None);
    }
    for (stripes, mirror) in [(Disk::Servers, Disk::ServerMirror), (Disk::Luns, Disk::LunMirror)] {
        for (at, test) in [WRITE, READ].into_iter().enumerate() {
            limited(test, stripes, at_least(1.85), Some(TRIAL_STRIPES[at] / TRIAL_ONE));
        }
        limited(WRITE, mirror, at_least(0.95), Some(TRIAL_MIRROR[0] / TRIAL_ONE));
        limited(READ, mirror, at_least(1.85), Some(TRIAL_MIRROR[1] / TRIAL_ONE));
    }
    for (mirror, one) in [(Disk::ServerMirror, Disk::Server), (Disk::LunMirror, Disk::Lun)] {
        let free = |test, other, times, target| Comparison {
            link: Link::Free,
            test,
            ours: mirror,
            other,
            times,
            target: Some(target),
            published: None,
        };
        for test in [SMALL_WRITE, SMALL_READ] {
            list.push(free(test, one, true, Target::AtMost(1.4)));
        }
        for test in [SMALL_WRITE, SMALL_READ, WRITE, READ] {
            list.push(free(test, Disk::Drbd, false, Target::AtLeast(0.8)));
        }
    }
    list
}

/// The rows: what is compared, then every rate.
fn findings(values: &Values) -> Findings {
    let mut rows = Vec::new();
    for it in comparisons() {
        let of = |disk| values.get(&(it.link, disk, it.test.key));
        let (Some(ours), Some(other)) = (of(it.ours), of(it.other)) else { continue };
        let ratio = |(ours, other): (&f64, &f64)| match it.times {
            true => other / ours,
            false => ours / other,
        };
        let ratios: Vec<f64> = ours.iter().zip(other).map(ratio).collect();
        let (test, link, ours, other) =
            (it.test.name, it.link.name(), it.ours.name(), it.other.name());
        let (what, unit) = match it.times {
            true => ("time of ", "times as long"),
            false => ("", "times"),
        };
        let row = Row::new(format!("{test}, {link}: {what}{ours} over {other}"), unit, &ratios);
        let row = it.published.map_or(row.clone(), |figure| row.published(figure));
        rows.push(it.target.map_or(row.clone(), |target| row.target(target)));
    }
    for link in [Link::Limited, Link::Free] {
        for disk in Disk::ALL {
            for test in disk.tests(link) {
                let Some(values) = values.get(&(link, disk, test.key)) else { continue };
                let name = format!("{}, {}: {}", test.name, link.name(), disk.name());
                rows.push(Row::new(name, test.unit.name(), values));
            }
        }
    }
    Findings { rows, ..Findings::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that is measured in a round: each of these disks has its own rate.
    fn values(rate: impl Fn(Link, Disk, &str) -> f64) -> Values {
        let mut values = Values::new();
        for link in [Link::Limited, Link::Free] {
            for disk in Disk::ALL {
                for test in disk.tests(link) {
                    values.insert((link, disk, test.key), vec![rate(link, disk, test.key)]);
                }
            }
        }
        values
    }

    fn row(found: &Findings, name: &str) -> (f64, Option<bool>) {
        let row = found.rows.iter().find(|row| row.name == name);
        let row = row.unwrap_or_else(|| panic!("no row {name}"));
        ((row.mean * 100.0).round() / 100.0, row.met)
    }

    #[test]
    fn stripes_and_mirrors_are_held_to_a_local_disk_under_the_links_limit_to_one_copy_and_to_drbd()
    {
        let found = findings(&values(|link, disk, key| match (link, disk, key) {
            (Link::Limited, Disk::Local, _) => 100.0,
            (Link::Limited, Disk::Servers, _) => 184.0,
            (Link::Limited, Disk::Luns, _) => 186.0,
            (Link::Limited, Disk::ServerMirror, "write-512k") => 96.0,
            (Link::Limited, Disk::ServerMirror, _) => 190.0,
            (Link::Free, Disk::Server, _) => 150.0,
            (Link::Free, Disk::ServerMirror, _) => 100.0,
            (Link::Free, Disk::Drbd, _) => 120.0,
            _ => 90.0,
        }));
        let limited = "write 512k QD16, 28 MiB/s";
        let of = |name: String| row(&found, &name);
        assert_eq!(
            of(format!("{limited}: 2 stripes on servers over local disk")),
            (1.84, Some(false))
        );
        assert_eq!(of(format!("{limited}: 2 stripes on LUNs over local disk")), (1.86, Some(true)));
        assert_eq!(of(format!("{limited}: mirror on servers over local disk")), (0.96, Some(true)));
        let read = "read 512k QD16, 28 MiB/s: mirror on servers over local disk";
        assert_eq!(of(read.into()), (1.9, Some(true)));
        let time = "randwrite 4k QD1, no limit: time of mirror on servers over one server";
        assert_eq!(of(time.into()), (1.5, Some(false)));
        for test in ["randwrite 4k QD1", "randread 4k QD1", "write 512k QD16", "read 512k QD16"] {
            let name = format!("{test}, no limit: mirror on servers over DRBD");
            assert_eq!(of(name), (0.83, Some(true)));
        }
    }

    #[test]
    fn every_comparison_is_of_what_is_measured_and_what_is_published_is_of_limited_links() {
        let found = findings(&values(|_, _, _| 100.0));
        let compared = found.rows.iter().filter(|row| row.unit.starts_with("times")).count();
        assert_eq!(compared, comparisons().len());
        let mut published = found.rows.iter().filter(|row| row.published.is_some());
        assert!(published.clone().count() == 8 && published.all(|row| row.name.contains("MiB/s")));
    }

    #[test]
    fn no_two_disks_are_one_in_the_guest_or_in_the_daemon() {
        for (at, disk) in Disk::ALL.into_iter().enumerate() {
            for other in &Disk::ALL[..at] {
                assert_ne!(disk.vdev(), other.vdev());
                assert_ne!(disk.image("sda"), other.image("sda"));
            }
        }
        assert_eq!((Disk::Local.vdev(), Disk::Drbd.vdev()), ("xvdb", "xvdj"));
    }
}
