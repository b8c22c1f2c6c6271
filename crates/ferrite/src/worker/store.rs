//! `ferrite store-worker`: the process that serves all disks of one store for its keeper
//! (docs/internals/processes.md 10). Each disk has a thread, whose work is that of a worker with one disk.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_daemon::orphan;
use ferrite_daemon::state::DiskId;
use ferrite_host::names::with_handed;
use ferrite_host::sandbox::user_of_store;
use ferrite_keeper::{ALIVE_FD, AssignedDisk, Preopen, WorkerChannel, WorkerEvent, WorkerSandbox};
use ferrite_serve::blkif::lifecycle::{Lines, ServeError, Start};
use ferrite_serve::counters::stats_file;
use ferrite_serve::memory::host_bytes;
use ferrite_serve::polling::HostView;
use ferrite_serve::processors::Limit;
use ferrite_store::owned::StoreKey;
use ferrite_xen::real::{Kind, devices};
use ferrite_xen::store::Store;
use rustix::fs::OFlags;

use super::{
    EMPTY, Means, disk_id, drop_privileges, engines, given, is_namespace, queues_ahead, told_by,
};
use crate::cli::{ServeArgs, StoreWorkerArgs};
use crate::exit::Failure;
use crate::serve;
use crate::store::owner::CommandServer;
use crate::store::prefix;

/// State that all disks share.
struct Shared {
    run_dir: PathBuf,
    alive: Arc<OwnedFd>,
    limit: Option<Arc<Limit>>,
    host: Option<Arc<HostView>>,
}

/// Serves for as long as the keeper lives.
pub(super) fn run(args: &StoreWorkerArgs) -> Result<(), Failure> {
    let failed = |e: io::Error| {
        let help = "a keeper starts it; ferrite serve serves disks by hand";
        Failure::new(format!("cannot serve disks of store {}", args.store.display()), e, help)
    };
    crate::image::allow_many_files();
    let channel = WorkerChannel::take().map_err(failed)?;
    let alive = Arc::new(given(ALIVE_FD)?);
    let kind = crate::image::engine(args.engine)?;
    let shared = Arc::new(Shared {
        run_dir: args.run_dir.clone(),
        alive: alive.clone(),
        limit: args.cpu.map(serve::limit_of),
        host: serve::view_of_host(&args.run_dir),
    });
    // A worker before this one may be an orphan. It is looked for while there are rights.
    let mut disks = Vec::new();
    loop {
        match channel.next().map_err(failed)? {
            WorkerEvent::All => break,
            WorkerEvent::Disk(disk) => {
                let start = told_by(&disk.arguments).map_or(Start::WaitForFollower, |args| {
                    orphan::start(&shared.run_dir, disk_id(&args), Store::open)
                });
                disks.push((disk, start));
            }
            WorkerEvent::Command(_) => {}
        }
    }
    let key = StoreKey::at(&args.store);
    // Computed now, for disks that come later.
    host_bytes();
    drop_privileges(is_namespace(&args.store), &args.store.display())?;
    let server = key.and_then(|key| CommandServer::new(key, &engines(kind, alive))).ok();
    disks.into_iter().for_each(|(disk, start)| begin(*disk, start, &shared));
    let mut commands = Vec::new();
    loop {
        match channel.next().map_err(failed)? {
            WorkerEvent::All => {}
            WorkerEvent::Disk(disk) => begin(*disk, Start::WaitForFollower, &shared),
            WorkerEvent::Command(stream) => {
                if let Some(server) = &server {
                    server.take(stream, &mut commands);
                }
            }
        }
    }
}

/// Serves a disk on a thread of its own.
fn begin(disk: AssignedDisk, start: Start, shared: &Arc<Shared>) {
    let Some(args) = told_by(&disk.arguments) else {
        // The keeper sees the end of the connection, and reports it.
        return tracing::error!("a disk's arguments are invalid: this is a bug in ferrite");
    };
    let DiskId { domid, devid } = disk_id(&args);
    let shared = shared.clone();
    let body = move || {
        let _span = tracing::error_span!("disk", id = %args.xen).entered();
        let served = catch_unwind(AssertUnwindSafe(|| serve_disk(disk, &args, start, &shared)));
        match served {
            Ok(Ok(())) => tracing::debug!("the disk is gone"),
            // After a panic the disk's state in this process is unknown. All guests' requests are in their tables, and
            // the successor does them again.
            Ok(Err(failure)) => {
                failure.report();
                std::process::exit(1);
            }
            Err(_) => std::process::exit(1),
        }
    };
    let name = format!("disk {domid}-{devid}");
    if let Err(e) = std::thread::Builder::new().name(name).spawn(body) {
        tracing::error!("cannot start a thread for disk {domid}/{devid}: {e}");
    }
}

fn serve_disk(
    disk: AssignedDisk,
    args: &ServeArgs,
    start: Start,
    shared: &Shared,
) -> Result<(), Failure> {
    let AssignedDisk { line, second, client_channel, handed, .. } = disk;
    let (run_dir, limit, host) = (&shared.run_dir, shared.limit.clone(), shared.host.clone());
    let means = with_handed(handed, || Means::open(args, run_dir, limit, host))?;
    let lines = Lines { first: &line, second: &second };
    let served: Result<(), ServeError> = means.serve(start, lines, &client_channel, &shared.alive);
    served.map_err(|e| serve::failed(args, &e))
}

/// The sandbox of a store's worker for one of its disks.
pub(super) fn worker_sandbox(store: PathBuf, run_dir: &Path, run: &Path) -> WorkerSandbox {
    let stats = stats_file(run_dir);
    let StoreKey(device, inode) = StoreKey::at(&store).unwrap_or(StoreKey(0, 0));
    WorkerSandbox {
        image: store,
        // Opening a store writes it: its journal is replayed.
        writable: true,
        read: Vec::new(),
        journals: None,
        own_files: vec![stats.with_extension("new"), stats],
        root: run.join(EMPTY),
        user: user_of_store(device, inode),
        servers: Vec::new(),
        mirror: None,
        fence: None,
    }
}

/// The arguments of the worker of a store, after the program's name, when its first disk has these options. `None`: its
/// name is not text.
pub(crate) fn arguments(args: &ServeArgs, run: &Path) -> Option<Vec<String>> {
    let mut all = vec!["store-worker".to_owned()];
    all.push(format!("--run-dir={}", run.to_str()?));
    all.push(format!("--engine={}", args.engine));
    all.extend(args.cpu.map(|percent| format!("--cpu={percent}")));
    all.extend(["--".to_owned(), super::image(args)?.to_str()?.to_owned()]);
    Some(all)
}

/// The prefix of names of sockets for commands on this store.
pub(crate) fn commands(run: &Path, store: StoreKey) -> PathBuf {
    run.join("stores").join(prefix(store))
}

/// The files that the keeper opens for a disk with these options, for a worker without rights: those that
/// [`Means::open`] opens. Unused ones are closed.
pub(crate) fn preopens(args: &ServeArgs, run: &Path) -> Vec<Preopen> {
    let queues = queues_ahead(args, run);
    let of_xen = devices().into_iter().map(|(path, kind, flags)| {
        let count = match kind {
            Kind::OfQueue => queues,
            Kind::OfProcess => 1,
        };
        Preopen { path, flags: flags.bits(), count }
    });
    let budgets = [serve::MAP_BUDGET, serve::POLL_BUDGET, serve::MEMORY_BUDGET].map(|name| {
        let flags = OFlags::RDWR | OFlags::CREATE;
        Preopen { path: run.join(name), flags: flags.bits(), count: 1 }
    });
    of_xen.chain(budgets).collect()
}
