//! `ferrite-bench host`: a host of many disks. The daemon, the keepers and the workers are real processes; each guest
//! has one disk, and their frontends are in this process.

mod machine;
mod processes;
mod roles;

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use ferrite::exit::Failure;
use ferrite_daemon::control::protocol::{Disks, Upgraded};
use ferrite_loopback::front::Frontend;
use ferrite_loopback::machine::DiskPaths;
use ferrite_seeing::folder::Folder;
use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use serde_json::json;

use self::machine::Host;
pub(crate) use self::machine::Places;
pub(crate) use self::roles::{daemon, keeper};
use super::cli::HostArgs;
use super::idle::pss_kib;
use processes::{cpu_ms, descriptors, sleeps, threads, worker_of};

/// Disks that are there when the cost of a further one is measured first.
const FEW: u32 = 10;
/// Disks that are attached together.
const TOGETHER: u32 = 200;
/// How often a disk comes and goes when its cost is measured.
const CYCLES: u32 = 5;
/// Longer than a disk at rest keeps its buffers.
const REST: Duration = Duration::from_secs(10);
/// Guests that write while something happens to the host.
const PROBES: usize = 4;
/// Workers that are stopped, as storage that hangs stops them.
const STOPPED: usize = 10;
/// The pause between two writes of a probe.
const PAUSE: Duration = Duration::from_millis(2);
/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Disks with thin images, and their size.
const THIN: u32 = 50;
const THIN_BYTES: u64 = 100 << 30;
const STACK_BYTES: usize = 256 << 10;

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: String,
    /// The bound on it, if there is one.
    pub(crate) at_most: Option<f64>,
}

/// All figures, which are printed as JSON.
#[derive(Default)]
struct Figures(Vec<Figure>);

impl Figures {
    fn add(&mut self, name: impl Into<String>, value: f64, unit: &str, at_most: Option<f64>) {
        let figure = Figure { name: name.into(), value, unit: unit.to_owned(), at_most };
        eprintln!("{}: {:.2} {}", figure.name, figure.value, figure.unit);
        self.0.push(figure);
    }
}

/// Measures all, and prints the figures.
pub(crate) fn run(args: &HostArgs) -> Result<(), Failure> {
    let help = "it takes root, as the daemon does, and /dev/shm for all images";
    let failed = |e: anyhow::Error| Failure::new("cannot measure the host", format!("{e:#}"), help);
    let figures = measure(args.disks).map_err(failed)?;
    println!("{}", serde_json::to_string(&figures).map_err(|e| failed(e.into()))?);
    Ok(())
}

/// A guest that is connected.
struct Guest {
    disk: DiskPaths,
    front: Frontend,
}

fn measure(disks: u32) -> Result<Vec<Figure>> {
    let mut figures = Figures::default();
    let (few, one_more) = (FEW.min(disks), disks + 1);
    let mut host = Host::new(one_more)?;
    let mut daemon = host.start_daemon()?;
    let mut guests = boot(&host, 1, few)?;
    host.wait_for_served(few)?;
    cost_of_one(&host, daemon, one_more, few, &mut figures)?;
    while (guests.len() as u32) < disks {
        let next = guests.len() as u32 + 1;
        let count = TOGETHER.min(disks + 1 - next);
        let began = Instant::now();
        guests.extend(boot(&host, next, count)?);
        if next == few + 1 {
            let bound = (count == TOGETHER).then_some(20.0);
            let name = format!("{count} guests that boot at once: until all are connected");
            figures.add(name, began.elapsed().as_secs_f64(), "s", bound);
        }
    }
    host.wait_for_served(disks)?;
    cost_of_one(&host, daemon, one_more, disks, &mut figures)?;
    at_rest(&host, daemon, disks, &mut figures)?;
    answers(&host, &mut figures)?;
    stopped(&host, &mut guests, &mut figures)?;
    daemon = restarted(&mut host, disks, &mut figures)?;
    upgraded(&host, &mut guests, &mut figures)?;
    let name = "daemon, after all of that: memory (PSS)";
    figures.add(name, pss_kib(daemon) as f64 / 1024.0, "MiB", Some(64.0));
    // Workers whose guests' memory has gone would be started again and again.
    drop(host);
    drop(guests);
    thin(THIN.min(disks), &mut figures)?;
    Ok(figures.0)
}

/// The memory of disks with thin images, on a host of their own.
fn thin(disks: u32, to: &mut Figures) -> Result<()> {
    let mut host = Host::new(disks)?;
    host.start_daemon()?;
    let mut guests = Vec::new();
    for domid in 1..=disks {
        let disk = host.attach_thin(domid, THIN_BYTES)?;
        let mut guest = Guest { front: host.connect(&disk)?, disk };
        write(&mut guest.front)?;
        guests.push(guest);
    }
    host.wait_for_served(disks)?;
    std::thread::sleep(REST);
    let keepers = host.keepers()?;
    let workers: Vec<u32> = keepers.iter().filter_map(|keeper| worker_of(*keeper)).collect();
    let kib = keepers.iter().chain(&workers).map(|pid| pss_kib(*pid)).sum::<u64>();
    let mib = kib as f64 / 1024.0 / f64::from(disks);
    to.add(
        format!("one of {disks} thin images of 100 GiB at rest: memory (PSS)"),
        mib,
        "MiB",
        Some(3.0),
    );
    Ok(())
}

/// Attaches the disks of so many guests at once, and connects all.
fn boot(host: &Host, first: u32, count: u32) -> Result<Vec<Guest>> {
    let disks = (first..first + count).map(|domid| host.attach(domid));
    let disks = disks.collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let connect = |disk: DiskPaths| {
            let body = move || host.connect(&disk).map(|front| Guest { disk, front });
            std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, body)
        };
        let threads: Vec<_> = disks.into_iter().map(connect).collect::<Result<_, _>>()?;
        let joined = threads.into_iter().map(|it| it.join().map_err(|_| anyhow!("a panic"))?);
        joined.collect()
    })
}

/// The costs of a disk that comes, is used and goes, beside so many others.
fn cost_of_one(host: &Host, daemon: u32, domid: u32, others: u32, to: &mut Figures) -> Result<()> {
    let (requests, cpu) = (host.at_rest(), cpu_ms(daemon));
    for _ in 0..CYCLES {
        let mut guest = boot(host, domid, 1)?.pop().context("one guest")?;
        write(&mut guest.front)?;
        guest.front.close(PATIENCE)?;
        host.detach(&guest.disk)?;
        host.wait_for_served(others)?;
    }
    let name = format!("a disk comes and goes beside {others}");
    let requests = (host.at_rest() - requests) as f64 / f64::from(CYCLES);
    to.add(format!("{name}: requests to xenstore"), requests, "", None);
    let cpu = (cpu_ms(daemon) - cpu) / f64::from(CYCLES);
    to.add(format!("{name}: processor time of the daemon"), cpu, "ms", None);
    Ok(())
}

/// Memory and wake-ups of all processes, with all guests connected and nothing to do.
fn at_rest(host: &Host, daemon: u32, disks: u32, to: &mut Figures) -> Result<()> {
    std::thread::sleep(REST);
    let keepers = host.keepers()?;
    let workers: Vec<u32> = keepers.iter().filter_map(|keeper| worker_of(*keeper)).collect();
    let each: Vec<u32> = keepers.iter().chain(&workers).copied().collect();
    let sum = |of: fn(u32) -> u64| each.iter().map(|pid| of(*pid)).sum::<u64>() as f64;
    let a_disk = |value: f64| value / f64::from(disks);
    to.add("a disk: processes", a_disk(each.len() as f64), "", None);
    to.add("a disk: threads", a_disk(sum(threads)), "", None);
    let fds = a_disk(sum(descriptors));
    to.add("a disk: descriptors, with the loopback's of its guest", fds, "", None);
    let before = (sum(sleeps), sleeps(daemon), host.store_requests());
    std::thread::sleep(REST);
    let seconds = REST.as_secs_f64();
    let woken = sum(sleeps) - before.0;
    let of_daemon = (sleeps(daemon) - before.1) as f64 / seconds;
    to.add("all workers and keepers at rest: wake-ups", woken / seconds, "a second", Some(0.0));
    to.add("daemon at rest: wake-ups", of_daemon, "a second", Some(1.0));
    let asked = (host.store_requests() - before.2) as f64 / seconds;
    to.add("daemon at rest: requests to xenstore", asked, "a second", Some(0.0));
    let memory = |pids: &[u32]| pids.iter().map(|pid| pss_kib(*pid)).sum::<u64>() as f64 / 1024.0;
    let (of_keepers, of_workers) = (memory(&keepers), memory(&workers));
    to.add("a disk at rest: memory of its keeper (PSS)", a_disk(of_keepers), "MiB", None);
    to.add("a disk at rest: memory of its worker (PSS)", a_disk(of_workers), "MiB", None);
    to.add("a disk at rest: memory (PSS)", a_disk(of_keepers + of_workers), "MiB", Some(2.0));
    let of_daemon = pss_kib(daemon) as f64 / 1024.0;
    to.add("daemon at rest: memory (PSS)", of_daemon, "MiB", Some(64.0));
    to.add("daemon at rest: threads", threads(daemon) as f64, "", None);
    Ok(())
}

/// The wait of a command, and the time of one pass over all counters.
fn answers(host: &Host, to: &mut Figures) -> Result<()> {
    let began = Instant::now();
    let listed = host.call::<Disks>("disk.list", &json!({}))?.disks.len();
    let ms = began.elapsed().as_secs_f64() * 1000.0;
    to.add(format!("disk list of {listed}: answer"), ms, "ms", Some(100.0));
    let cpu = || {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        now.tv_sec as f64 * 1000.0 + now.tv_nsec as f64 / 1e6
    };
    let mut folder = Folder::new(host.run().join("stats"));
    folder.look().context("cannot read the counters")?;
    let before = cpu();
    folder.look().context("cannot read the counters")?;
    to.add("one pass over all counters: processor time", cpu() - before, "ms", Some(50.0));
    Ok(())
}

/// Ten workers stop, as on storage that hangs.
fn stopped(host: &Host, guests: &mut [Guest], to: &mut Figures) -> Result<()> {
    let half = guests.len() / 2;
    let (probes, others) = guests.split_at_mut(PROBES.min(half));
    let calm = probe(probes, || {
        std::thread::sleep(Duration::from_secs(3));
        Ok(())
    })?;
    let all = host.call::<Disks>("disk.list", &json!({}))?.disks;
    let victims: Vec<_> = others.iter().take(STOPPED).map(|it| it.disk.domid.0).collect();
    let keepers = all.iter().filter(|disk| victims.contains(&disk.disk.domid));
    let workers = keepers.filter_map(|disk| worker_of(disk.pid?));
    let workers: Vec<_> = workers.filter_map(|pid| Pid::from_raw(pid.cast_signed())).collect();
    let signal = |signal| workers.iter().try_for_each(|pid| kill_process(*pid, signal));
    signal(Signal::STOP)?;
    let mut longest = Duration::ZERO;
    let stopped = probe(probes, || {
        for _ in 0..10 {
            let began = Instant::now();
            host.status()?;
            host.call::<Disks>("disk.list", &json!({}))?;
            longest = longest.max(began.elapsed());
            std::thread::sleep(Duration::from_millis(300));
        }
        Ok(())
    });
    signal(Signal::CONT)?;
    let stopped = stopped?;
    let name = format!("{} workers stopped", workers.len());
    let ratio = stopped.percentile(99.0) / calm.percentile(99.0);
    to.add(format!("{name}: p99 of the others' writes, over before"), ratio, "", Some(1.1));
    let ms = longest.as_secs_f64() * 1000.0;
    to.add(format!("{name}: daemon status and disk list, longest"), ms, "ms", Some(100.0));
    Ok(())
}

/// The daemon is killed, and the next one finds all disks.
fn restarted(host: &mut Host, disks: u32, to: &mut Figures) -> Result<u32> {
    host.kill_daemon()?;
    let requests = host.store_requests();
    let began = Instant::now();
    let daemon = host.start_daemon()?;
    host.wait_for_served(disks)?;
    let name = format!("the next daemon beside {disks} disks");
    to.add(format!("{name}: until it has all"), began.elapsed().as_secs_f64(), "s", None);
    let requests = (host.at_rest() - requests) as f64 / f64::from(disks);
    to.add(format!("{name}: requests to xenstore for each"), requests, "", None);
    Ok(daemon)
}

/// All disks get another program, under load.
fn upgraded(host: &Host, guests: &mut [Guest], to: &mut Figures) -> Result<()> {
    let binary = host.folder().join("next");
    fs::copy("/proc/self/exe", &binary).context("cannot copy this program")?;
    let probes = PROBES.min(guests.len());
    let (mut seconds, mut failed, mut count) = (0.0, 0, 0);
    let waited = probe(&mut guests[..probes], || {
        let began = Instant::now();
        let done = host.call::<Upgraded>("upgrade", &json!({ "binary": binary }))?;
        seconds = began.elapsed().as_secs_f64();
        (count, failed) = (done.upgraded.len(), done.failed.len());
        Ok(())
    })?;
    let name = format!("upgrade of {count} disks");
    to.add(format!("{name}: the whole"), seconds, "s", Some(180.0));
    to.add(format!("{name}: disks that were not"), failed as f64, "", Some(0.0));
    let name = format!("{name}: longest pause of {probes} guests that write");
    to.add(name, waited.percentile(100.0) / 1000.0, "ms", Some(200.0));
    Ok(())
}

/// The times of a probe's writes in microseconds, in order.
struct Times(Vec<f64>);

impl Times {
    fn percentile(&self, percent: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        let at = (last as f64 * percent / 100.0).round() as usize;
        self.0.get(at).copied().unwrap_or(f64::NAN)
    }
}

/// Lets these guests write while `meanwhile` runs.
fn probe(guests: &mut [Guest], meanwhile: impl FnOnce() -> Result<()>) -> Result<Times> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let start = |guest| {
            let stop = &stop;
            scope.spawn(move || written(guest, stop))
        };
        let threads: Vec<_> = guests.iter_mut().map(start).collect();
        let done = meanwhile();
        stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for thread in threads {
            all.extend(thread.join().map_err(|_| anyhow!("a panic"))??);
        }
        all.sort_by(f64::total_cmp);
        done.map(|()| Times(all))
    })
}

fn written(guest: &mut Guest, stop: &AtomicBool) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        write(&mut guest.front)?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
        std::thread::sleep(PAUSE);
    }
    Ok(times)
}

/// Writes a page, and waits for the answer.
fn write(front: &mut Frontend) -> Result<()> {
    let buffer = front.space().buffer(1)?;
    buffer.write(0, &[7; 4096]);
    let queue = front.queues.first_mut().context("no queue")?;
    queue.write(8, &buffer, 0, 4096)?;
    anyhow::ensure!(queue.next_reply(PATIENCE)?.is_ok(), "a write failed");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let times = Times((1..=100).map(f64::from).collect());
        assert_eq!((times.percentile(99.0), times.percentile(100.0)), (99.0, 100.0));
        assert!(Times(Vec::new()).percentile(99.0).is_nan());
    }
}
