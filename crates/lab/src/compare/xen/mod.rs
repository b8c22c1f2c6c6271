//! A real Xen host in the emulator's counting mode. fio's figures in the guest depend on the number of instructions on
//! the whole path, and hardly on the load of this machine. Caches and flushes of the address translation cost nothing
//! there.

pub(super) mod device;
mod figures;
mod load;
pub(super) mod profile;
pub(super) mod stripes;
pub(super) mod vdo;

use super::machine;
use super::result::Measurement;
use crate::experiments::findings::Outcome;
use anyhow::{Context, Result};
use ferrite_xenhost::disk::{Backend, Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions, Kind};
use ferrite_xenhost::qemu::{Hardware, Pace, Processor};
use ferrite_xenhost::steps::{self, say, step};
use ferrite_xenhost::{XenHost, root};
use ferrite_xenhost::{packages, release};
use load::Test;
pub(super) use profile::MARK_NOW;
use profile::{Apart, Profiler};
use std::path::PathBuf;

/// Options of the part `xen`.
#[derive(clap::Args)]
#[command(next_help_heading = "Options of the part xen")]
pub(crate) struct XenArguments {
    /// Backends to measure, separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "blkback,qdisk,ferrite,polling,persistent,map,vhd"
    )]
    only: Vec<Peer>,
    /// How the guest is virtualised.
    #[arg(long, value_enum, default_value_t = GuestKind::Pv)]
    guest: GuestKind,
    /// Tests to run, separated by commas: qd1, qd32, qd32x4, write-qd32x4, read-1m, write-1m, read-1m-256,
    /// write-1m-256.
    #[arg(long, value_delimiter = ',')]
    tests: Vec<String>,
    /// Rounds in the one boot: how often each backend is attached and measured, in turn.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) xen_rounds: u32,
    /// Length of a test, in seconds of the emulated machine.
    #[arg(long, value_name = "S", default_value_t = 0.2)]
    xen_seconds: f64,
    /// Processors of the host: with two, the dom0 has the first and the guest the other.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    xen_cpus: u32,
    /// Further arguments of `ferrite serve` for the backend `ferrite`; given more than once, each is measured
    /// separately.
    #[arg(long, allow_hyphen_values = true)]
    ferrite_args: Vec<String>,
    /// The folder of results that `ferrite lab report` reads: xen-pv.json or xen-pvh.json goes there.
    #[arg(long, value_name = "DIR", default_value = "lab-results")]
    results: PathBuf,
    /// Profile the instructions of each request, or of 64 KiB of the part network, instead of measuring speed; the result
    /// goes into target/bench/xen-profile.md, or into the network's profile beside it.
    #[arg(long)]
    pub(super) profile: bool,
}

/// The kinds of guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum GuestKind {
    /// Without hardware virtualisation.
    Pv,
    /// With hardware virtualisation: most hosts use it.
    Pvh,
}

/// The backends of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peer {
    /// The kernel's backend, with persistent grants.
    Blkback,
    /// QEMU's backend.
    Qdisk,
    /// Ferrite.
    Ferrite,
    /// Ferrite, polling for a fixed time before it sleeps.
    Polling,
    /// Ferrite, with persistent grants.
    Persistent,
    /// Ferrite, mapping the guest's pages for each request.
    Map,
    /// Ferrite, with a full VHD, in a file system on a RAM disk.
    Vhd,
}

impl Peer {
    /// Whether it is Ferrite.
    fn is_ours(self) -> bool {
        !matches!(self, Peer::Blkback | Peer::Qdisk)
    }

    /// Arguments of `ferrite serve` for this variant.
    fn arguments(self) -> &'static str {
        match self {
            Peer::Polling => "--poll-us 200",
            Peer::Persistent => "--mover persistent",
            Peer::Map => "--mover map",
            Peer::Blkback | Peer::Qdisk | Peer::Ferrite | Peer::Vhd => "",
        }
    }

    /// Its name in tables, with its additional arguments.
    fn name(self, extra: &str) -> String {
        let name = match self {
            Peer::Blkback => "blkback",
            Peer::Qdisk => "qdisk",
            Peer::Ferrite => "ferrite",
            Peer::Polling => "ferrite, polling",
            Peer::Persistent => "ferrite, persistent",
            Peer::Map => "ferrite, map",
            Peer::Vhd => "ferrite, VHD",
        };
        format!("{name} {extra}").trim().to_owned()
    }
}

const APART: Apart =
    Apart { dom0: &["brd_submit_bio [brd]"], guest: "blkif_queue_rq [xen_blkfront]" };
/// Seconds of the two runs whose difference is profiled.
const PROFILE_S: (f64, f64) = (0.1, 0.4);

/// Seconds of the test before the rounds.
const WARM_UP_S: f64 = 0.1;
/// With fewer rounds the result is only a quick look.
const ROUNDS_THAT_SAY_SOMETHING: u32 = 3;
/// The separator between the outputs of both runs.
const NEXT: &str = "next";

/// Size of each backend's RAM disk.
const DISK_MIB: u32 = 160;
/// Size of the VHD. Its file is on a second RAM disk of the other size.
const VHD_MIB: u32 = 128;
const VHD: &str = "/run/vhd/disk.vhd";

/// A measured backend.
struct Column {
    peer: Peer,
    name: String,
    /// For each test, the figure of each round.
    values: Vec<Vec<f64>>,
}

/// Boots the host and measures one backend after the other with the same guest and RAM disk.
pub(super) fn run(arguments: &XenArguments) -> Result<Vec<Measurement>> {
    let tests = load::selected(&arguments.tests)?;
    packages::ensure(&[packages::XEN_HOST])?;
    let programs = [release::build_ferrite()?];
    let mut profiler = match arguments.profile {
        true => Some(Profiler::new(&programs[0].file, APART)?),
        false => None,
    };
    let plugin = profiler.as_ref().map(Profiler::arguments).unwrap_or_default();
    let root = root::ensure(root::TRIXIE)?;
    let mut xenhost = XenHost::boot_at(hardware(arguments), &root, &programs, &plugin).context(
        "counting instructions works with QEMU 7.2; 10.0 stops with \"Bad icount read\"",
    )?;
    prepare(&mut xenhost, arguments)?;
    if let Some(profiler) = &mut profiler {
        profile_all(&mut xenhost, arguments, profiler, &tests)?;
        return Ok(Vec::new());
    }
    let columns = measure(&mut xenhost, arguments, &tests)?;
    Ok(figures::compare(&tests, &columns, arguments))
}

/// A machine for such guests, with so many processors.
fn hardware(arguments: &XenArguments) -> Hardware {
    let processor = match arguments.guest {
        GuestKind::Pv => Processor::Plain,
        GuestKind::Pvh => Processor::Amd,
    };
    let (pace, cpus) = (Pace::Instructions, arguments.xen_cpus);
    Hardware { pace, processor, cpus, ..Hardware::default() }
}

/// Writes the results of the rounds so far: a run takes long, and an interrupted one leaves them.
fn write(arguments: &XenArguments, tests: &[&Test], columns: &[Column], round: u32) -> Result<()> {
    std::fs::create_dir_all(&arguments.results)?;
    let found = figures::findings(tests, columns, arguments);
    let quick = round < ROUNDS_THAT_SAY_SOMETHING;
    let outcome = Outcome::about(figures::about(arguments), found, machine::describe(), quick);
    say(outcome.write(&arguments.results)?.display().to_string());
    Ok(())
}

/// Sets blkback's options, and touches every page of the disks before it is read.
fn prepare(xenhost: &mut XenHost, arguments: &XenArguments) -> Result<()> {
    xenhost.sh_for(
        &format!(
            "rmmod xen-blkback && modprobe xen-blkback && modprobe brd rd_nr=2 rd_size={} && \
             head -c {DISK_MIB}M /dev/zero | tr '\\0' f >/dev/ram0",
            DISK_MIB << 10
        ),
        120,
    )?;
    if !arguments.only.contains(&Peer::Vhd) {
        return Ok(());
    }
    step("make the VHD", || {
        let make = format!(
            "mkfs.ext4 -q -m 0 -O ^has_journal /dev/ram1 && mkdir /run/vhd && \
             mount /dev/ram1 /run/vhd && loop=$(losetup -f --show --sizelimit {VHD_MIB}M /dev/ram0) && \
             ferrite image convert $loop {VHD} 2>&1 && losetup -d $loop",
        );
        xenhost.sh_for(&make, 300).map(drop)
    })
}

/// Runs each test in a guest with the driver options of the test, round after round.
fn measure(
    xenhost: &mut XenHost,
    arguments: &XenArguments,
    tests: &[&Test],
) -> Result<Vec<Column>> {
    let empty = vec![Vec::new(); tests.len()];
    let mut columns: Vec<Column> = variants(arguments)
        .into_iter()
        .map(|(peer, extra)| Column { peer, name: peer.name(&extra), values: empty.clone() })
        .collect();
    let mut left: Vec<usize> = (0..tests.len()).collect();
    while let Some(first) = left.first().map(|at| tests[*at]) {
        let (now, later) = left.iter().partition(|at| tests[**at].indirect == first.indirect);
        let chosen: Vec<usize> = now;
        left = later;
        let alike: Vec<&Test> = chosen.iter().map(|at| tests[*at]).collect();
        let mut guest = start(xenhost, arguments, first.indirect)?;
        // The first disk of a guest has half the rate at depth 1, whichever backend serves it.
        if let Some((peer, extra)) = variants(arguments).first() {
            step("warm up", || {
                let mut disk = attach(xenhost, &mut guest, *peer, extra)?;
                load::fio(xenhost, &mut guest, &disk, &alike[..1], WARM_UP_S)?;
                disk.unplug(xenhost)
            })?;
        }
        for round in 1..=arguments.xen_rounds {
            for (column, (peer, extra)) in columns.iter_mut().zip(variants(arguments)) {
                let what = format!("{}, round {round}", column.name);
                let values = step(&what, || {
                    let mut disk = attach(xenhost, &mut guest, peer, &extra)?;
                    let values =
                        load::fio(xenhost, &mut guest, &disk, &alike, arguments.xen_seconds)?;
                    disk.unplug(xenhost)?;
                    Ok(values)
                })?;
                for (at, value) in chosen.iter().zip(values) {
                    say(format!("  {}: {value:.0} {}", tests[*at].name, tests[*at].unit.name()));
                    column.values[*at].push(value);
                }
            }
            write(arguments, tests, &columns, round)?;
        }
        guest.destroy(xenhost)?;
    }
    Ok(columns)
}

/// Starts the guest, with so many segments a request.
fn start(xenhost: &mut XenHost, arguments: &XenArguments, indirect: Option<u32>) -> Result<Guest> {
    let kind = match arguments.guest {
        GuestKind::Pv => Kind::Pv,
        GuestKind::Pvh => Kind::Pvh,
    };
    let options = GuestOptions { kind, vcpus: load::VCPUS, indirect, ..GuestOptions::default() };
    let guest = step("start a guest", || Guest::start(xenhost, &options))?;
    if arguments.xen_cpus > 1 {
        xenhost.sh(&format!("xl vcpu-pin {} all 1", guest.domid()))?;
    }
    Ok(guest)
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

/// Attaches a disk on the RAM disk to the guest.
fn attach(xenhost: &mut XenHost, guest: &mut Guest, peer: Peer, extra: &str) -> Result<Disk> {
    let backend = match peer {
        Peer::Blkback => Backend::Blkback,
        Peer::Qdisk => Backend::Qdisk,
        _ => Backend::Ferrite,
    };
    let image = if peer == Peer::Vhd { VHD } else { "/dev/ram0" };
    let mut options = DiskOptions::new(image, "xvda");
    options.arguments = format!("{} {extra}", peer.arguments());
    attach_by(xenhost, guest, backend, options)
}

/// Attaches a disk to the guest, and waits until it is there.
fn attach_by(
    xenhost: &mut XenHost,
    guest: &mut Guest,
    backend: Backend,
    options: DiskOptions,
) -> Result<Disk> {
    let disk = Disk::attach(xenhost, guest, backend, options)?;
    disk.wait_connected(xenhost)?;
    guest.sh(xenhost, &format!("until [ -b {} ]; do sleep 0.1; done", disk.node()), 60)?;
    load::settle(xenhost, guest)?;
    Ok(disk)
}

/// Profiles all tests with all backends.
fn profile_all(
    xenhost: &mut XenHost,
    arguments: &XenArguments,
    profiler: &mut Profiler,
    tests: &[&Test],
) -> Result<()> {
    let mut guest = start(xenhost, arguments, None)?;
    profiler.read_symbols(xenhost, &mut guest)?;
    let mut profiles = String::new();
    for (peer, extra) in variants(arguments) {
        let name = peer.name(&extra);
        let mut disk = attach(xenhost, &mut guest, peer, &extra)?;
        profiles += &step(&format!("profile of {name}"), || {
            profile(xenhost, &mut guest, &disk, profiler, &name, tests)
        })?;
        disk.unplug(xenhost)?;
    }
    let file = steps::target_dir().join("bench").join("xen-profile.md");
    std::fs::write(&file, &profiles).with_context(|| format!("cannot write {}", file.display()))?;
    println!("{profiles}");
    Ok(())
}

/// Profiles the tests, one after the other. A short and a longer run differ only in the number of requests: fio's own
/// start and end are in both.
fn profile(
    xenhost: &mut XenHost,
    guest: &mut Guest,
    disk: &Disk,
    profiler: &mut Profiler,
    name: &str,
    tests: &[&Test],
) -> Result<String> {
    let maps = match disk.pid() {
        Some(pid) => xenhost.sh(&format!("cat /proc/{pid}/maps"))?,
        None => String::new(),
    };
    let mut text = String::new();
    for test in tests {
        let run = |seconds: f64| load::command(&disk.node(), &[test], seconds);
        let (short, long) = (run(PROFILE_S.0), run(PROFILE_S.1));
        // In the first run nothing is cached, neither in the guest nor on the host.
        let command = format!(
            "{short} >/dev/null; {MARK_NOW}; {short}; {MARK_NOW}; echo {NEXT}; {long}; {MARK_NOW}"
        );
        let output = guest.sh(xenhost, &command, 3 * load::LIMIT_S)?;
        let (few, many) = output.split_once(NEXT).context("odd output of fio")?;
        let ios = |output| load::requests(output, test).context("odd output of fio");
        let (few, many) = (ios(few)?, ios(many)?);
        let marks = [profiler.counters()?, profiler.counters()?, profiler.counters()?];
        let short = profile::difference(&marks[1], &marks[0]);
        let long = profile::difference(&marks[2], &marks[1]);
        let counts = profile::difference(&long, &short);
        text += &profiler.report(&format!("{}: {name}", test.name), &counts, many - few, &maps);
        text += "\n";
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_backend_has_a_name_of_its_own() {
        let peers = <Peer as clap::ValueEnum>::value_variants();
        let names: std::collections::BTreeSet<String> =
            peers.iter().map(|peer| peer.name("")).collect();
        assert_eq!(names.len(), peers.len());
        assert!(peers.iter().all(|peer| peer.is_ours() == peer.name("").starts_with("ferrite")));
    }
}
