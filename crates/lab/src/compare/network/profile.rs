//! The instructions of 64 KiB of a stream by function, of the guests, of Xen and of dom0.

use anyhow::{Context as _, Result};
use ferrite_xenhost::qemu::{Hardware, Pace};
use ferrite_xenhost::steps::{self, step};
use ferrite_xenhost::{XenHost, packages, release, root};

use super::hosts::{Backend, Host, Who};
use super::{Load, has_ended, listen, send, written};
use crate::compare::result::Measurement;
use crate::compare::xen::MARK_NOW;
use crate::compare::xen::profile::{self, Apart, Profiler};

/// With one backend dom0 runs the first function, with the other one the second.
const APART: Apart = Apart {
    dom0: &["xenvif_tx_action [xen_netback]", "gntdev_ioctl [xen_gntdev]"],
    guest: "xennet_start_xmit [xen_netfront]",
};
/// Milliseconds of the two streams whose difference is profiled.
const SHORT_MS: u32 = 100;
const LONG_MS: u32 = 300;
/// The field of the written KiB in fio's terse format.
const WRITTEN_KIB: usize = 46;
const LOADS: [Load; 2] = [Load::Streams(1), Load::Segmented];

/// Boots the host, and profiles some loads by both backends.
pub(in crate::compare) fn run() -> Result<Vec<Measurement>> {
    packages::ensure(&[packages::XEN_HOST])?;
    let root = root::ensure(root::TRIXIE)?;
    let ferrite = release::build_ferrite()?;
    let mut profiler = Profiler::new(&ferrite.file, APART)?;
    let hardware = Hardware { pace: Pace::Instructions, ..Hardware::default() };
    let xenhost = XenHost::boot_at(hardware, &root, &[ferrite], &profiler.arguments())?;
    let mut host = Host::prepare(xenhost)?;
    profiler.read_symbols(&mut host.xenhost, &mut host.guests[0])?;
    let maps = host.xenhost.sh("cat /proc/$(pgrep -x ferrite | head -n 1)/maps")?;
    let mut text = String::new();
    for (load, backend) in LOADS.iter().flat_map(|load| Backend::BOTH.map(|b| (*load, b))) {
        let title = format!("{}: {}, 64 KiB", backend.name(), load.name());
        text += &step(&title, || one(&mut host, &mut profiler, backend, load, &title, &maps))?;
        text += "\n";
    }
    host.check()?;
    let file = steps::target_dir().join("bench").join("network-profile.md");
    std::fs::write(&file, &text).with_context(|| format!("cannot write {}", file.display()))?;
    println!("{text}");
    Ok(Vec::new())
}

/// A short and a longer stream differ only in what they send: fio's own start and end are in both.
fn one(
    host: &mut Host,
    profiler: &mut Profiler,
    backend: Backend,
    load: Load,
    title: &str,
    maps: &str,
) -> Result<String> {
    let mut both = Vec::new();
    // Before the first one nothing is cached.
    for ms in [SHORT_MS, SHORT_MS, LONG_MS] {
        listen(host, load)?;
        let command = format!("{MARK_NOW}; {}; {MARK_NOW}", send(backend, load, ms));
        let output = host.sh(Who::Guest(0), &command, 600)?;
        has_ended(host, load)?;
        let marks = [profiler.counters()?, profiler.counters()?];
        let kib = written(&output, WRITTEN_KIB).context("odd output of fio")?;
        both.push((kib, profile::difference(&marks[1], &marks[0])));
    }
    let ((few, short), (many, long)) = (&both[1], &both[2]);
    Ok(profiler.report(title, &profile::difference(long, short), (many - few) / 64.0, maps))
}
