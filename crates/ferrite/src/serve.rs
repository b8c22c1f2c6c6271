//! `ferrite serve`: serves disks to guests, in the foreground.

use std::ffi::OsStr;
use std::io;
use std::iter;
use std::path::Path;
use std::sync::{Arc, Once};
use std::time::Duration;

use ferrite_daemon::state::DiskId;
use ferrite_disk::{
    Disk, ImageName, Locking, MirrorOptions, OnDamage, OpenOptions, Session, client_of,
    mirror_target,
};
use ferrite_host::clock::SystemClock;
use ferrite_host::names;
use ferrite_io::pool::HostMemory;
use ferrite_serve::blkif::lifecycle::{
    Attachment, Config, EngineFactory, ExpectedAttachment, FollowConfig, Outcome, STOPPED,
    ServeError, WAIT_FOR_HOST, WorkConfig, close, report_failure, run_dir_name, serve, sweep,
};
use ferrite_serve::blkif::negotiate::Offer;
use ferrite_serve::counters::Counters;
use ferrite_serve::path::device::Device;
use ferrite_serve::polling::{Budget, HostMonitor, HostView, PollWindow};
use ferrite_serve::processors::{Limit, Processors};
use ferrite_serve::waker::Waker;
use ferrite_xen::hypervisor::{DomId, Hypervisor};
use ferrite_xen::mover::{self, Maps, Mover, Moving};
use ferrite_xen::real::{HostProcessors, Xen};
use ferrite_xen::store::{Store, StoreError};
use rustix::fs::Mode;

use crate::cli::ServeArgs;
use crate::controlled::Controlled;
use crate::daemon;
use crate::engine::{choose, engines};
use crate::exit::{Code, Failure};
use crate::image::allow_many_files;
use crate::served_raw::{self, was_killed};
use crate::signals;
use crate::store::owner::{Place, Serving};

#[cfg(test)]
mod tests;
mod together;

/// The kind of backend that xl and XAPI make for tapdisk: `backend/vbd3/<domid>/<devid>`.
const BACKEND_KIND: &str = "vbd3";
/// On tmpfs: its files concern running guests only.
pub(crate) const RUN_DIR: &str = "/run/ferrite";
/// The file in the run directory by which all backends of this host share the limit of mapped pages.
pub(crate) const MAP_BUDGET: &str = "map-budget";
/// The file in the run directory by which they share processors to poll with.
pub(crate) const POLL_BUDGET: &str = "poll-budget";
/// The file in the run directory by which they share memory for data while storage is slow.
pub(crate) const MEMORY_BUDGET: &str = "memory-budget";
/// The folder in the run directory for answered writes that are not yet in the images' metadata.
pub(crate) const IMAGES: &str = "images";
/// How long a takeover waits for the killed predecessor's last I/O to end.
pub(crate) const TAKE_OVER_WAIT: Duration = Duration::from_secs(60);
/// The part of that wait after which a message says what it waits for.
const UNTOLD: Duration = Duration::from_secs(1);

/// The queue depth of the engine that recovers a disk before its guest is served.
pub(crate) const RECOVERY_ENTRIES: u32 = 32;

/// The interfaces of the host, which tests replace.
pub(crate) struct Host<'a> {
    /// The folder for files that outlive the process.
    run: &'a Path,
    /// Connects to xenstore, once for each disk.
    connect: &'a (dyn Fn() -> Result<Store, StoreError> + Sync),
    /// The interface to the guest of one disk.
    hypervisor: &'a (dyn Fn(&ServeArgs) -> Arc<dyn Hypervisor> + Sync),
}

/// Serves disks. The options for opening an image are known only when the toolstack has attached its disk. So images
/// are opened once before that: their errors are reported on any machine, with Xen or without.
pub(crate) fn run(args: &ServeArgs) -> Result<(), Failure> {
    let connect = Store::open;
    let hypervisor = |args: &ServeArgs| -> Arc<dyn Hypervisor> {
        Arc::new(if args.own_grants { Xen::new().with_own_grants() } else { Xen::new() })
    };
    let run = Path::new(RUN_DIR);
    run_on(args, &Host { run, connect: &connect, hypervisor: &hypervisor })
}

/// [`run`] with the given interfaces of the host.
fn run_on(args: &ServeArgs, host: &Host<'_>) -> Result<(), Failure> {
    let disks: Vec<&ServeArgs> = iter::once(args).chain(&args.others).collect();
    together::compare(&disks)?;
    let stop = stop_on_signals()?;
    let mut store = match (host.connect)() {
        Ok(store) => store,
        Err(e) => {
            disks.iter().try_for_each(|disk| try_open(disk, host.run))?;
            return Err(no_xen(args, e));
        }
    };
    if let Err(e) = sweep(&mut store, host.run, &format!("backend/{BACKEND_KIND}")) {
        tracing::warn!("cannot look for remains of detached disks: {e}");
    }
    if let Some(control) = disks.iter().find_map(|disk| disk.control.control.as_deref()) {
        return controlled(&disks, control, host, &mut store, &stop);
    }
    let limit = limit(args);
    let _commands = commands(&disks)?;
    match &disks[..] {
        [disk] => serve_one(disk, host, &mut store, limit, &stop),
        disks => {
            drop(store);
            allow_many_files();
            together::serve(disks, |disk| {
                let mut store = (host.connect)().map_err(|e| no_xen(disk, e))?;
                serve_one(disk, host, &mut store, limit.clone(), &stop)
            })
        }
    }
}

/// Runs commands on the stores of these disks, as long as the result lives.
fn commands(disks: &[&ServeArgs]) -> Result<Vec<Serving>, Failure> {
    let places = Place::of(disks.iter().map(|disk| disk.image.as_os_str()));
    if places.is_empty() {
        return Ok(Vec::new());
    }
    let engine = engines(crate::image::engine(disks[0].engine)?);
    Ok(places.into_iter().filter_map(|place| place.serve(&engine)).collect())
}

/// Serves the disk with a control socket.
fn controlled(
    disks: &[&ServeArgs],
    control: &Path,
    host: &Host<'_>,
    store: &mut Store,
    stop: &Waker,
) -> Result<(), Failure> {
    let [args] = disks else {
        let what = "cannot serve several disks with one --control";
        let help = "start one ferrite serve for each, each with a folder of its own";
        let failure = Failure::new(what, "a control folder is that of one disk", help);
        return Err(failure.with_code(Code::USAGE));
    };
    let (domid, devid) = (args.xen.domain, args.xen.device);
    let backend = format!("backend/{BACKEND_KIND}/{domid}/{devid}");
    let Some(attachment) = attachment(args, store, &backend, host.run, stop)? else {
        return Ok(());
    };
    let served = Controlled {
        control,
        image: &args.image,
        read_only: args.read_only || attachment.read_only,
        options: daemon::options(args),
        parents: &args.parents,
        guest: Some(DiskId { domid: domid.0, devid }),
        export: None,
        socket: None,
    }
    .run(stop);
    served.inspect_err(|failure| {
        // The toolstack waits for this report. An error of xenstore does not change the failure.
        let _ = report_failure(store, &backend, &format!("{}: {}", failure.what, failure.why));
    })
}

/// Serves one disk.
fn serve_one(
    args: &ServeArgs,
    host: &Host<'_>,
    store: &mut Store,
    limit: Option<Arc<Limit>>,
    stop: &Waker,
) -> Result<(), Failure> {
    let run = host.run;
    let (domid, devid) = (args.xen.domain, args.xen.device);
    let backend = format!("backend/{BACKEND_KIND}/{domid}/{devid}");
    let Some(attachment) = attachment(args, store, &backend, run, stop)? else {
        return Ok(());
    };
    let found = open(args, attachment.read_only, run).and_then(|disk| {
        tracing::info!("opened {disk}");
        let kind = choose(args.engine, args.poll_storage, &disk)?;
        Ok((disk, kind))
    });
    let (disk, kind) = found.inspect_err(|failure| {
        // The toolstack waits for this report. An error of xenstore does not change the failure.
        let _ = report_failure(store, &backend, &format!("{}: {}", failure.what, failure.why));
    })?;
    let engine = engines(kind);
    let disk = complete(args, disk, &engine)?;
    let work = work_config(args, run, limit, host_view(args, run))?;
    if work.processors.host.is_some() {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| tell_of_processors(run));
    }
    let config = Config {
        follow: FollowConfig {
            backend,
            domid,
            devid,
            offer: offer(args),
            attached: ExpectedAttachment::Any,
            ahead: None,
            defers: false,
        },
        work,
        engine,
    };
    let device = Device::new(disk, SystemClock::shared()).on_full(config.work.on_full);
    let device = Arc::new(device);
    let hypervisor = (host.hypervisor)(args);
    let outcome = serve(store, &*hypervisor, &device, &config, stop);
    if let Ok(Outcome::Stopped) = outcome {
        close(&device, &config.engine).map_err(|e| failed(args, &ServeError::Close(e)))?;
        // Without this file a successor takes this process for killed, which does no harm.
        let _ = std::fs::write(config.work.run_dir.join(STOPPED), "");
    }
    match outcome {
        Ok(Outcome::Unplugged) => tracing::info!("{} was unplugged", args.xen),
        Ok(Outcome::Stopped | Outcome::Left) => tracing::info!(
            "stopped; a guest that had connected {} waits until it is served again",
            args.xen
        ),
        Err(e) => return Err(failed(args, &e)),
    }
    Ok(())
}

fn offer(args: &ServeArgs) -> Offer {
    Offer {
        max_queues: args.queues,
        max_ring_order: args.ring_order,
        max_indirect_segments: args.indirect as u16,
        persistent: args.mover == Mover::Persistent,
    }
}

/// The limit of processor time of this process.
pub(crate) fn limit(args: &ServeArgs) -> Option<Arc<Limit>> {
    args.cpu.map(limit_of)
}

/// The limit in percent of one processor.
pub(crate) fn limit_of(percent: u32) -> Arc<Limit> {
    Arc::new(Limit::new(percent, SystemClock::shared()))
}

/// The configuration of a disk with these options, in a process with this limit of processor time.
pub(crate) fn work_config(
    args: &ServeArgs,
    run: &Path,
    limit: Option<Arc<Limit>>,
    host: Option<Arc<HostView>>,
) -> Result<WorkConfig, Failure> {
    let (domid, devid) = (args.xen.domain, args.xen.device);
    Ok(WorkConfig {
        domid,
        wait_for_host: WAIT_FOR_HOST,
        moving: moving(args, run)?,
        pool_bytes: args.memory.memory.bytes(),
        host_memory: host_memory(args, run),
        run_dir: run.join(run_dir_name(domid, devid)),
        closes: true,
        stays: domid == DomId::NONE,
        tuning: args.tuning.tuning(),
        on_full: args.on_full,
        limits: args.limit,
        processors: processors(args, run, limit, host),
        counters: Counters::default(),
    })
}

/// Waits for the toolstack's settings of the disk. `None`: stopped before they came.
fn attachment(
    args: &ServeArgs,
    store: &mut Store,
    backend: &str,
    run: &Path,
    stop: &Waker,
) -> Result<Option<Attachment>, Failure> {
    let domid = args.xen.domain;
    let found = Attachment::read(store, backend, domid).map_err(|e| failed(args, &e))?;
    if found.is_some() {
        return Ok(found);
    }
    try_open(args, run)?;
    Attachment::wait(store, backend, domid, stop).map_err(|e| failed(args, &e))
}

/// Opens the image for reading, and closes it, so that its errors are reported at once. It may be for writing later.
fn try_open(args: &ServeArgs, run: &Path) -> Result<(), Failure> {
    let on_damage = if args.read_only { OnDamage::Serve } else { OnDamage::Refuse };
    open_waiting(args, true, run, on_damage).map(drop)
}

fn open(args: &ServeArgs, read_only: bool, run: &Path) -> Result<Disk, Failure> {
    open_waiting(args, read_only, run, OnDamage::Serve)
}

fn open_waiting(
    args: &ServeArgs,
    read_only: bool,
    run: &Path,
    on_damage: OnDamage,
) -> Result<Disk, Failure> {
    match open_as(args, read_only, run, UNTOLD, on_damage) {
        Err(failure) if failure.code == Code::BUSY && is_taken_over(args, run) => {
            let Failure { what, why, .. } = failure;
            tracing::warn!("{what}: {why}; it is waited for, for a minute");
            open_as(args, read_only, run, TAKE_OVER_WAIT, on_damage)
        }
        opened => opened,
    }
}

/// Whether a predecessor was killed: its I/O may still be in flight.
fn is_taken_over(args: &ServeArgs, run: &Path) -> bool {
    was_killed(&run.join(run_dir_name(args.xen.domain, args.xen.device)))
}

/// Opens the image, in spite of damage if it is only read. It waits at most this long for a killed predecessor's I/O.
pub(crate) fn open_within(
    args: &ServeArgs,
    read_only: bool,
    run: &Path,
    within: Duration,
) -> Result<Disk, Failure> {
    open_as(args, read_only, run, within, OnDamage::Serve)
}

/// Opens the image to read its facts, while another host may write to it: for reading only and
/// without locks. That is no data to serve.
pub(crate) fn look(args: &ServeArgs, run: &Path) -> Result<Disk, Failure> {
    let run_dir = run.join(run_dir_name(args.xen.domain, args.xen.device));
    let options = OpenOptions {
        read_only: true,
        unlocked: true,
        keep_allocated: args.keep_allocated,
        parents: args.parents.allowed_for(&args.image)?,
        on_damage: OnDamage::Serve,
        ..OpenOptions::default()
    };
    Ok(Disk::open(&served_raw::name(&run_dir, &args.image), &options)?)
}

fn open_as(
    args: &ServeArgs,
    read_only: bool,
    run: &Path,
    within: Duration,
    on_damage: OnDamage,
) -> Result<Disk, Failure> {
    let run_dir = run.join(run_dir_name(args.xen.domain, args.xen.device));
    let taken_over = is_taken_over(args, run);
    let options = OpenOptions {
        read_only: args.read_only || read_only,
        wait_for_lock: taken_over.then_some(within),
        taken_over,
        qemu_first: args.qemu_first,
        locking: if args.toolstack_locks { Locking::Toolstack } else { Locking::Ours },
        keep_allocated: args.keep_allocated,
        fence: args.fence.terms(),
        // Only servers are told it, and a store's worker may not ask the kernel for it.
        client: is_export(&args.image).then(|| client_of(&run_dir)).flatten(),
        state_dir: Some(run.join(IMAGES)),
        parents: args.parents.allowed_for(&args.image)?,
        on_damage,
        ..OpenOptions::default()
    };
    let options = args.store.give(options);
    Ok(Disk::open(&served_raw::name(&run_dir, &args.image), &options)?)
}

fn is_export(image: &OsStr) -> bool {
    ImageName::parse(image).is_ok_and(|name| name.export().is_some())
}

/// The disk with its mirror, if it has one.
pub(crate) fn mirrored(
    args: &ServeArgs,
    disk: Disk,
    run: &Path,
    within: Duration,
) -> Result<Disk, Failure> {
    let (Some(target), Some(map)) = (&args.mirror, &args.mirror_map) else { return Ok(disk) };
    let options = OpenOptions {
        wait_for_lock: is_taken_over(args, run).then_some(within),
        taken_over: is_taken_over(args, run),
        parents: args.parents.allowed_for(target.as_ref())?,
        ..OpenOptions::default()
    };
    let mirror = MirrorOptions { target: mirror_target(target)?, map: map.clone() };
    Ok(disk.mirrored(&mirror, &options)?)
}

/// Copies writes of a killed backend to an image that is now a parent into the leaf.
pub(crate) fn complete(
    args: &ServeArgs,
    disk: Disk,
    engine: &EngineFactory,
) -> Result<Disk, Failure> {
    let disk = Arc::new(disk);
    recover_parents(&disk, engine).map_err(|e| no_copy(args, e))?;
    // The session has ended, so this is the only reference.
    Arc::into_inner(disk).ok_or_else(|| no_copy(args, io::ErrorKind::ResourceBusy.into()))
}

fn recover_parents(disk: &Arc<Disk>, engine: &EngineFactory) -> io::Result<()> {
    if disk.is_unrecovered() {
        let bytes = Session::new(disk.clone(), |arena| engine(arena, RECOVERY_ENTRIES))?
            .recover_parents()?;
        tracing::warn!(
            bytes,
            "a parent of this image lacks what a killed backend had answered for it: it was copied \
             from there into the image, so that a flush can make it durable",
        );
    }
    Ok(())
}

fn no_copy(args: &ServeArgs, e: io::Error) -> Failure {
    let what = format!(
        "{} cannot be completed with the writes that a killed backend had answered",
        args.image.display()
    );
    let help =
        "make room for it, or bring it into the parent (ferrite image repair --force PARENT)";
    Failure::new(what, e, help)
}

fn moving(args: &ServeArgs, run: &Path) -> Result<Moving, Failure> {
    let path = run.join(MAP_BUDGET);
    let budget = match args.mover {
        Mover::Copy => mover::Budget::of_disk(0),
        Mover::Map | Mover::Persistent => {
            make_dir(run)?;
            mover::Budget::of_host(&path, args.map_budget_host, args.map_budget).map_err(|e| {
                let help = "it is made when it is not there; --mover copy does without it";
                Failure::new(format!("cannot open {}", path.display()), e, help)
            })?
        }
    };
    Ok(Moving { mover: args.mover, maps: Maps::new(budget, SystemClock::shared()) })
}

fn make_run(run: &Path) -> io::Result<()> {
    names::create_dir_all(run, Mode::RWXU)
}

/// The host's shared memory budget. Without its file the disk is served with its own memory alone.
fn host_memory(args: &ServeArgs, run: &Path) -> Option<Arc<HostMemory>> {
    let path = run.join(MEMORY_BUDGET);
    make_run(run).and_then(|()| args.memory.host(&path)).unwrap_or_else(|e| {
        tracing::warn!(
            "cannot open {}: {e}; this disk gets no more memory for data while its storage is slow",
            path.display()
        );
        None
    })
}

/// The disk's budget for polling. Without the host's shared file the disk is served with its own limit alone.
fn processors(
    args: &ServeArgs,
    run: &Path,
    limit: Option<Arc<Limit>>,
    host: Option<Arc<HostView>>,
) -> Arc<Processors> {
    let path = run.join(POLL_BUDGET);
    let polling = make_run(run).and_then(|()| args.tuning.polling(&path)).unwrap_or_else(|e| {
        let percent = args.tuning.poll_cpu;
        tracing::warn!(
            "cannot open {}: {e}; this disk polls with up to {percent} % of a processor, \
             whatever others do",
            path.display()
        );
        Budget::new(percent)
    });
    // The host's view matters only for `auto`.
    let host = host.filter(|_| args.tuning.poll_us == PollWindow::Auto);
    Arc::new(Processors::new(polling, host, limit))
}

/// The host's report of its processors. It is opened only for options that use it.
fn host_view(args: &ServeArgs, run: &Path) -> Option<Arc<HostView>> {
    (args.tuning.poll_us == PollWindow::Auto).then(|| view_of_host(run)).flatten()
}

/// The host's report of its processors, for disks of any options.
pub(crate) fn view_of_host(run: &Path) -> Option<Arc<HostView>> {
    let view = HostView::open(run);
    let told = |e: &io::Error| {
        tracing::warn!(
            "cannot open what {} says of the host's processors: {e}; disks here judge by what they see",
            run.display()
        );
    };
    view.inspect_err(told).ok().map(Arc::new)
}

/// Publishes the host's processors to its disks for as long as this process lives. Without it each disk judges by this
/// domain's processors.
pub(crate) fn tell_of_processors(run: &Path) {
    let asks = HostProcessors::open().and_then(|mut xen| {
        let teller = HostMonitor::open(run)?;
        std::thread::Builder::new()
            .name("processors".to_owned())
            .spawn(move || teller.run(&SystemClock, &mut || xen.ask()))
    });
    if let Err(e) = asks {
        tracing::debug!("Xen is not asked for the host's processors: {e}");
    }
}

fn make_dir(path: &Path) -> Result<(), Failure> {
    make_run(path).map_err(|e| {
        let what = format!("cannot make {}", path.display());
        Failure::new(what, e, "run as root, with tmpfs mounted on /run")
    })
}

/// SIGTERM, SIGINT and SIGHUP end the process in good order: all requests that were taken are answered.
pub(crate) fn stop_on_signals() -> Result<Arc<Waker>, Failure> {
    let stop = Arc::new(Waker::new().map_err(signals::cannot)?);
    let mut signals = signals::listen()?;
    let wake = stop.clone();
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || signals.forever().for_each(|_| wake.wake()))
        .map_err(signals::cannot)?;
    Ok(stop)
}

fn no_xen(args: &ServeArgs, e: impl std::fmt::Display) -> Failure {
    Failure::new(format!("cannot serve {}", args.xen), e, "ferrite doctor shows what is missing")
}

pub(crate) fn failed(args: &ServeArgs, e: &ServeError) -> Failure {
    let help = match e {
        ServeError::Store(_)
        | ServeError::Host { .. }
        | ServeError::RunDir { .. }
        | ServeError::Open { .. }
        | ServeError::WorkerLost(_)
        | ServeError::Left => "the guest waits: mend the cause and run the same command again",
        ServeError::Close(_) => {
            "answered writes are kept on this host: remove the cause and run the same command again, \
             or open it with ferrite image check, or of a volume ferrite store check"
        }
        ServeError::Attachment(_) => "check DOMID/DEVID against xl list and xl block-list",
        ServeError::TakeOver(_) => {
            "if the guest cannot be served as it is, detach the disk (xl block-detach) and attach \
             it again; requests in flight are lost then"
        }
    };
    Failure::new(format!("cannot serve {}", args.xen), e, help)
}
