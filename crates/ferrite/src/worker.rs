//! `ferrite worker`: the process that serves one disk for its keeper (docs/internals/processes.md).

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_daemon::orphan;
use ferrite_daemon::state::DiskId;
use ferrite_disk::{Disk, Fencing, ImageName, Parents, client_of, server_of};
use ferrite_host::fence::Terms;
use ferrite_host::process::take_given;
use ferrite_host::sandbox::{self, user_of, user_of_tap};
use ferrite_io::engines::EngineKind;
use ferrite_keeper::{
    ALIVE_FD, CLIENT_CHANNEL_FD, DataServer, FenceTerms, LINE_FD, MirrorFiles, SECOND_FD,
    WorkerSandbox,
};
use ferrite_serve::blkif::lifecycle::{
    EngineFactory, Lines, OpenFailure, Opened, Opening, OpeningKind, ServeError, Start, TABLE,
    WorkConfig, run_dir_name, work_from,
};
use ferrite_serve::counters::stats_file;
use ferrite_serve::polling::HostView;
use ferrite_serve::processors::Limit;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::real::Xen;
use ferrite_xen::store::Store;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::cli::{ServeArgs, WorkerArgs};
use crate::engine::choose;
use crate::exit::{Code, Failure};
use crate::parents::ParentsArgs;
use crate::{SERVER_LOG, log, serve};

pub(crate) mod store;
mod words;

use words::Role;
pub(crate) use words::Words;

/// The folder with nothing in it that is the root of workers' file systems.
const EMPTY: &str = "empty";
/// How long to wait for the image: for a predecessor's last I/O, or for another process that has locked it. Then the
/// failure is reported, and the next worker waits again (processes.md 4).
const PATIENCE: Duration = Duration::from_secs(2);
/// The pause between attempts to get the lock.
const ASK_AGAIN: Duration = Duration::from_millis(5);

/// The most queues that an option allows.
const MOST_QUEUES: u32 = 64;
/// The number of queues that the guest's stub domain is offered.
const OF_STUB_DOMAIN: usize = 1;

/// The process of a worker.
pub(crate) fn main(words: Words) -> ExitCode {
    ferrite_serve::counters::remember_process();
    let disk = match &words.role {
        Role::Worker(args) => Some(args.serve.xen.to_string()),
        Role::StoreWorker(_) => None,
    };
    log::set_up(words.verbose, if words.quiet { "error" } else { SERVER_LOG }, disk);
    let done = match &words.role {
        Role::Worker(args) => run(args),
        Role::StoreWorker(args) => store::run(args),
    };
    done.map_or_else(|failure| failure.report_as(false), |()| ExitCode::SUCCESS)
}

/// Serves for as long as the keeper lives.
fn run(args: &WorkerArgs) -> Result<(), Failure> {
    let WorkerArgs { serve: args, run_dir } = args;
    let line = given(LINE_FD)?;
    let (alive, client_channel) = (Arc::new(given(ALIVE_FD)?), given(CLIENT_CHANNEL_FD)?);
    let second = given(SECOND_FD)?;
    // The host's view is opened while this process has the rights, for all connections.
    let host = serve::view_of_host(run_dir);
    let means = Means::open(args, run_dir, serve::limit(args), host)?;
    let start = orphan::start(run_dir, disk_id(args), Store::open);
    let nvme = image(args).is_some_and(|path| is_namespace(&path));
    // Servers of disks are told this name, which can be made of the kernel's only here.
    client_of(run_dir);
    drop_privileges(nvme, &args.xen)?;
    let lines = Lines { first: &line, second: &second };
    let worked = means.serve(start, lines, &client_channel, &alive);
    worked.map_err(|e| serve::failed(args, &e))
}

fn disk_id(args: &ServeArgs) -> DiskId {
    DiskId { domid: args.xen.domain.0, devid: args.xen.device }
}

/// The means to serve a disk, besides its image.
struct Means<'a> {
    args: &'a ServeArgs,
    run_dir: &'a Path,
    xen: Xen,
    no_xen: Option<String>,
    config: WorkConfig,
}

impl<'a> Means<'a> {
    /// Opens devices of Xen and files of budgets.
    fn open(
        args: &'a ServeArgs,
        run_dir: &'a Path,
        limit: Option<Arc<Limit>>,
        host: Option<Arc<HostView>>,
    ) -> Result<Means<'a>, Failure> {
        let xen = Xen::ahead(queues_ahead(args, run_dir));
        let (xen, no_xen) = match xen {
            Ok(xen) if args.own_grants => (xen.with_own_grants(), None),
            Ok(xen) => (xen, None),
            // The next worker may be able to open it.
            Err(e) => (Xen::nothing(), Some(e.to_string())),
        };
        let config = serve::work_config(args, run_dir, limit, host)?;
        Ok(Means { args, run_dir, xen, no_xen, config })
    }

    /// Serves the disk until its control connection ends.
    fn serve(
        &self,
        start: Start,
        lines: Lines<'_>,
        client_channel: &OwnedFd,
        alive: &Arc<OwnedFd>,
    ) -> Result<(), ServeError> {
        let mut last = None;
        let mut open = |how| {
            let opened = match &self.no_xen {
                // A tap serves clients of NBD where there is no Xen.
                Some(why) if self.args.xen.domain != DomId::NONE => {
                    let help = "ferrite doctor shows what is missing";
                    Err(Failure::new(format!("cannot serve {}", self.args.xen), why, help))
                }
                _ => open(self.args, self.run_dir, alive, how),
            };
            opened.map_err(|failure| told(failure, &mut last))
        };
        work_from(start, lines, client_channel, &self.xen, &self.config, &mut open)
    }
}

fn open(
    args: &ServeArgs,
    run_dir: &Path,
    alive: &Arc<OwnedFd>,
    how: Opening,
) -> Result<Opened, Failure> {
    if how.kind == OpeningKind::Look {
        let disk = serve::look(args, run_dir)?;
        let kind = choose(args.engine, args.poll_storage, &disk)?;
        return Ok(Opened { disk, engine: engines(kind, alive.clone()) });
    }
    // The lock comes first: until then the image may be a dead worker's.
    lock(args, alive)?;
    let disk = serve::open_within(args, how.read_only, run_dir, PATIENCE)?;
    tracing::info!("opened {disk}");
    let kind = choose(args.engine, args.poll_storage, &disk)?;
    // Of a tap's image, callers want to find one process that has it open.
    if !kind.holds() || args.xen.domain == DomId::NONE {
        disk.let_go();
    }
    let engine = engines(kind, alive.clone());
    let disk = serve::complete(args, disk, &engine)?;
    if let Some(file) = &args.changes {
        disk.record_changes(file)?;
    }
    let disk = serve::mirrored(args, disk, run_dir, PATIENCE)?;
    let Disk::Mirror(mirror) = &disk else { return Ok(Opened { disk, engine }) };
    // The target's data may take another engine.
    let kind = choose(args.engine, args.poll_storage && args.mirror.is_none(), &disk)?;
    let engine = engines(kind, alive.clone());
    // It is copied whether or not a guest is connected.
    if let Err(e) = mirror.begin_service(&engine) {
        tracing::warn!("the mirror copies nothing: {e}");
    }
    Ok(Opened { disk, engine })
}

/// The number of queues for which devices are opened. A guest keeps the number that an earlier worker has offered it, also
/// when the option was made smaller since. A disk that had a worker has its table or its counters. `run_dir`: the parent of
/// the disks' run directories.
fn queues_ahead(args: &ServeArgs, run_dir: &Path) -> usize {
    let of_disk = run_dir.join(run_dir_name(args.xen.domain, args.xen.device));
    let queues = match of_disk.join(TABLE).exists() || stats_file(&of_disk).exists() {
        true => args.queues.max(MOST_QUEUES),
        false => args.queues,
    };
    queues as usize + OF_STUB_DOMAIN
}

/// The arguments of a worker that serves with these options, after the program's name. `None`: the
/// image's name is not text.
pub(crate) fn arguments(args: &ServeArgs, run_dir: &Path) -> Option<Vec<String>> {
    let mut all = vec!["worker".to_owned()];
    let mut put = |name: &str, value: &dyn Display| all.push(format!("--{name}={value}"));
    put("xen", &args.xen);
    put("run-dir", &run_dir.to_str()?);
    put("queues", &args.queues);
    put("ring-order", &args.ring_order);
    put("indirect", &args.indirect);
    put("engine", &args.engine);
    put("on-full", &args.on_full);
    // Without a limit there is no word: a worker of an older version does not know it.
    if !args.limit.is_none() {
        put("limit", &args.limit);
    }
    put("memory", &args.memory.memory);
    args.memory.memory_host.iter().for_each(|bytes| put("memory-host", bytes));
    put("metadata-memory", &args.store.metadata_memory);
    put("index-memory", &args.store.index_memory);
    args.mirror.iter().for_each(|target| put("mirror", target));
    if let Some(map) = &args.mirror_map {
        put("mirror-map", &map.to_str()?);
    }
    if let Some(file) = &args.changes {
        put("changes", &file.to_str()?);
    }
    put("mover", &args.mover);
    put("own-grants", &args.own_grants);
    put("map-budget", &args.map_budget);
    put("map-budget-host", &args.map_budget_host);
    put("poll-us", &args.tuning.poll_us);
    put("poll-cpu", &args.tuning.poll_cpu);
    args.cpu.iter().for_each(|percent| put("cpu", percent));
    args.tuning.poll_host.iter().for_each(|processors| put("poll-host", processors));
    // Without a reservation there is no word: a worker of an older version does not know it.
    if args.fence.fence != Fencing::None {
        put("fence", &args.fence.fence);
        put("fence-records", &args.fence.fence_records.to_str()?);
    }
    for folder in args.parents.named() {
        put("parents", &folder.to_str()?);
    }
    let switches = [
        ("--read-only", args.read_only),
        ("--keep-allocated", args.keep_allocated),
        ("--qemu-first", args.qemu_first),
        ("--toolstack-locks", args.toolstack_locks),
        ("--poll-storage", args.poll_storage),
        ("--no-merge", args.tuning.no_merge),
    ];
    all.extend(switches.iter().filter(|(_, on)| *on).map(|(name, _)| (*name).to_owned()));
    // The image's name may begin with a dash.
    all.extend(["--".to_owned(), args.image.to_str()?.to_owned()]);
    Some(all)
}

/// The options that a worker with these arguments was started with.
pub(crate) fn told_by(arguments: &[String]) -> Option<ServeArgs> {
    let words: Vec<OsString> = ["ferrite"]
        .into_iter()
        .chain(arguments.iter().map(String::as_str))
        .map(Into::into)
        .collect();
    match Words::parse_if_worker(&words)?.ok()?.role {
        Role::Worker(args) => Some(args.serve),
        Role::StoreWorker(_) => None,
    }
}

/// Drops all rights of this process. From here on its keeper opens files for it.
fn drop_privileges(nvme: bool, whose: &dyn Display) -> Result<(), Failure> {
    match ferrite_keeper::drop_privileges(sandbox::Means { nvme, ..sandbox::Means::default() }) {
        Ok(None) => tracing::warn!("this worker has all rights of its keeper"),
        Ok(Some(lacking)) if lacking.is_empty() => {}
        Ok(Some(lacking)) => {
            tracing::info!("this worker's sandbox is as strict as it can be: {lacking}")
        }
        Err(e) => {
            let help = "run as root: a worker that keeps its rights serves no disk";
            return Err(Failure::new(format!("cannot serve {whose}"), e, help));
        }
    }
    Ok(())
}

/// Whether the path is an NVMe namespace's character device for commands.
fn is_namespace(path: &Path) -> bool {
    path.metadata().is_ok_and(|meta| meta.file_type().is_char_device())
}

/// The sandbox of a worker with these options. `None`: the image's name is not text.
///
/// # Errors
/// The host's list of parents is invalid.
pub(crate) fn worker_sandbox(
    args: &ServeArgs,
    run_dir: &Path,
    writable: bool,
) -> Result<Option<WorkerSandbox>, Failure> {
    let (Some(image), Some(run)) = (image(args), run_dir.parent()) else { return Ok(None) };
    if is_volume(args) {
        return Ok(Some(store::worker_sandbox(image, run_dir, run)));
    }
    let parents = match args.parents.allowed()? {
        Parents::Within(places) => places,
        Parents::Any => vec![PathBuf::from("/")],
    };
    let stats = stats_file(run_dir);
    Ok(Some(WorkerSandbox {
        image,
        writable: writable && !args.read_only,
        // The worker reads the list itself.
        read: [parents, vec![ParentsArgs::list()]].concat(),
        journals: Some(run.join(serve::IMAGES)),
        own_files: [
            vec![stats.with_extension("new"), stats],
            args.changes.iter().cloned().collect(),
        ]
        .concat(),
        root: run.join(EMPTY),
        user: match args.xen.domain {
            DomId::NONE => user_of_tap(number_of_tap(args.xen.device, run)),
            domain => user_of(domain.0, args.xen.device),
        },
        servers: servers(&args.image, args.read_only || !writable),
        mirror: mirror_files(args),
        fence: fence_terms(args),
    }))
}

/// The number of a tap among all of the host. A daemon of one disk numbers from 0, beside the host's daemon, whose numbers
/// are smaller than these.
fn number_of_tap(minor: u32, run: &Path) -> u32 {
    const FIRST: u32 = 0x8_0000;
    match run.metadata() {
        Ok(meta) if ferrite_daemon::is_standalone(run) => FIRST | (meta.ino() as u32 & (FIRST - 1)),
        _ => minor,
    }
}

/// The file of the image; of a volume, its store's.
fn image(args: &ServeArgs) -> Option<PathBuf> {
    let name = ImageName::parse(args.image.to_str()?).ok()?;
    let store = name.volume().map(|(store, _)| store.to_owned());
    Some(store.unwrap_or(name.path))
}

/// The server of an export, whose name may have to be resolved: that waits. One that has no address now is tried in vain
/// by the worker, which says so.
fn servers(image: &OsStr, read_only: bool) -> Vec<DataServer> {
    let name = ImageName::parse(image).ok();
    let server = name.and_then(|name| server_of(name.export()?, read_only));
    server.as_ref().and_then(DataServer::of).into_iter().collect()
}

/// How the keeper reserves the image's LUN.
fn fence_terms(args: &ServeArgs) -> Option<FenceTerms> {
    let Terms { weak, records } = args.fence.terms()?;
    Some(FenceTerms { weak, records })
}

/// The files that the worker opens for a mirror.
fn mirror_files(args: &ServeArgs) -> Option<MirrorFiles> {
    let (target, map) = args.mirror.as_ref().zip(args.mirror_map.clone())?;
    let name = ImageName::parse(target).ok();
    let image = name.filter(|name| name.export().is_none()).map(|name| name.path);
    Some(MirrorFiles { map, image, servers: servers(target.as_ref(), false) })
}

fn is_volume(args: &ServeArgs) -> bool {
    ImageName::parse(&args.image).is_ok_and(|name| name.volume().is_some())
}

fn given(number: i32) -> Result<OwnedFd, Failure> {
    take_given(number).map_err(|e| {
        let help = "a keeper starts it; ferrite serve serves a disk by hand";
        Failure::new("cannot be a worker", e, help)
    })
}

/// Waits until no earlier worker has I/O in flight. The lock is kept to the end.
fn lock(args: &ServeArgs, alive: &OwnedFd) -> Result<(), Failure> {
    let end = Instant::now() + PATIENCE;
    loop {
        let why = match flock(alive, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < end => {
                std::thread::sleep(ASK_AGAIN);
                continue;
            }
            Err(Errno::WOULDBLOCK) => {
                "I/O of a worker that has ended is still under way".to_owned()
            }
            Err(e) => e.to_string(),
        };
        let what = format!("cannot open {}", args.image.display());
        let help = "it is tried again; check whether the storage answers";
        return Err(Failure::new(what, why, help));
    }
}

/// A factory that makes one engine for each queue. The lock is held until the last operation has ended, however this
/// process ends.
fn engines(kind: EngineKind, alive: Arc<OwnedFd>) -> EngineFactory {
    Arc::new(move |arena, entries| {
        let mut engine = kind.open(arena, entries)?;
        engine.hold(alive.as_fd())?;
        Ok(engine)
    })
}

/// Reports a failure to the log, unless it is the same as the last one, and to the keeper.
fn told(failure: Failure, last: &mut Option<String>) -> OpenFailure {
    let in_use = failure.code == Code::BUSY;
    let Failure { what, why, help, errno, .. } = failure;
    if last.as_ref() != Some(&why) {
        tracing::error!("{what}: {why}; {help}");
        *last = Some(why.clone());
    }
    OpenFailure { what, why, help, in_use, errno: errno.map(Errno::raw_os_error) }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    fn parse<T: Into<String>>(args: impl IntoIterator<Item = T>) -> Cli {
        let args = ["ferrite".to_owned()].into_iter().chain(args.into_iter().map(Into::into));
        Cli::try_parse_from(args).unwrap()
    }

    #[test]
    fn a_worker_is_told_all_options_of_serve() {
        let plain = ["serve", "--xen", "3/xvda", "a.img"].as_slice();
        let all = [
            "serve",
            "--xen=3/xvda",
            "--read-only",
            "--queues=7",
            "--ring-order=3",
            "--indirect=9",
            "--engine=aio",
            "--poll-storage",
            "--cpu=150",
            "--on-full=wait",
            "--keep-allocated",
            "--toolstack-locks",
            "--fence=reservation",
            "--fence-records=/r",
            "--memory=3M",
            "--memory-host=70M",
            "--mover=map",
            "--own-grants=false",
            "--map-budget=5",
            "--map-budget-host=6",
            "--poll-us=17",
            "--poll-cpu=33",
            "--poll-host=2",
            "--no-merge",
            "--parents=/a",
            "--parents=/b",
            "--",
            "--image",
        ];
        for given in [plain, &all] {
            let Command::Serve(serve) = parse(given.iter().copied()).command else { panic!() };
            let arguments = arguments(&serve, Path::new("/run/there")).unwrap();
            let words = ["ferrite".to_owned()].into_iter().chain(arguments);
            let words: Vec<OsString> = words.map(Into::into).collect();
            let words = Words::parse_if_worker(&words).unwrap().unwrap();
            let Role::Worker(worker) = words.role else { panic!() };
            assert_eq!(format!("{:?}", worker.serve), format!("{serve:?}"));
            assert_eq!(worker.run_dir, Path::new("/run/there"));
        }
    }

    #[test]
    fn a_takeover_whose_image_another_has_locked_is_told_so_before_long() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = dir.path().join("vbd-3-51712");
        std::fs::create_dir(&run_dir).unwrap();
        // A predecessor was killed.
        std::fs::write(run_dir.join("inflight"), "").unwrap();
        let image = dir.path().join("a.img");
        let theirs = std::fs::File::create(&image).unwrap();
        theirs.set_len(1 << 20).unwrap();
        theirs.lock().unwrap();
        let alive = std::fs::File::create(run_dir.join("alive")).unwrap();
        let arguments = ["serve", "--xen=3/xvda", image.to_str().unwrap()];
        let Command::Serve(serve) = parse(arguments).command else { panic!() };
        let begin = Instant::now();
        let alive = Arc::new(OwnedFd::from(alive));
        let how = Opening { read_only: false, kind: OpeningKind::Serve };
        let failure = open(&serve, dir.path(), &alive, how).err().unwrap();
        assert_eq!(failure.code, Code::BUSY);
        let whose = format!("process {}", std::process::id());
        assert!(failure.why.contains(&whose), "{}", failure.why);
        // It would be shown as served until then.
        assert!(begin.elapsed() < Duration::from_secs(30));
        let arguments = ["serve", "--xen=3/xvda", "--toolstack-locks", image.to_str().unwrap()];
        let Command::Serve(serve) = parse(arguments).command else { panic!() };
        assert!(open(&serve, dir.path(), &alive, how).is_ok());
    }

    #[test]
    fn a_worker_can_take_a_guest_over_whatever_its_predecessors_option_was() {
        let run = tempfile::tempdir().unwrap();
        let ahead = |queues| {
            let Command::Serve(serve) = parse(["serve", "--xen=3/xvda", queues, "a"]).command
            else {
                panic!()
            };
            queues_ahead(&serve, run.path())
        };
        // The disk had no worker.
        assert_eq!([ahead("--queues=1"), ahead("--queues=64")], [2, 65]);
        for (folder, file) in [("vbd-3-51712", "inflight"), ("stats", "vbd-3-51712")] {
            let folder = run.path().join(folder);
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join(file), "").unwrap();
            assert_eq!([ahead("--queues=1"), ahead("--queues=64")], [65, 65]);
            std::fs::remove_file(folder.join(file)).unwrap();
        }
        let more = ["ferrite", "serve", "--xen=3/xvda", "--queues=65", "a"];
        assert!(Cli::try_parse_from(more).is_err());
    }

    #[test]
    fn a_worker_may_have_its_image_the_parents_that_are_allowed_and_the_files_of_its_disk() {
        let given = ["serve", "--xen=3/xvda", "--parents=/a", "--", "vhd:/images/x.img"];
        let run_dir = Path::new("/run/ferrite/vbd-3-51712");
        let of = |given: &[&str], writable| {
            let Command::Serve(serve) = parse(given.iter().copied()).command else { panic!() };
            worker_sandbox(&serve, run_dir, writable).unwrap().unwrap()
        };
        let sandbox = of(&given, true);
        assert_eq!((sandbox.image, sandbox.writable), ("/images/x.img".into(), true));
        assert_eq!(sandbox.read, [PathBuf::from("/a"), ParentsArgs::list()]);
        assert_eq!(sandbox.journals, Some("/run/ferrite/images".into()));
        let stats = ["vbd-3-51712.new", "vbd-3-51712"];
        assert_eq!(sandbox.own_files, stats.map(|name| Path::new("/run/ferrite/stats").join(name)));
        assert_eq!(sandbox.user, user_of(3, 51712));
        assert!(!of(&given, false).writable);
        let read_only = [&given[..1], &["--read-only"], &given[1..]].concat();
        assert!(!of(&read_only, true).writable);
        let any = [&given[..1], &["--parents=any"], &given[1..]].concat();
        assert_eq!(of(&any, true).read[0], Path::new("/"));
    }

    #[test]
    fn the_worker_of_an_export_may_have_its_server_and_no_image() {
        let of = |image: &str| {
            let Command::Serve(serve) = parse(["serve", "--xen=3/xvda", image]).command else {
                panic!()
            };
            servers(&serve.image, false)
        };
        assert_eq!(of("/images/a.img"), []);
        let json = serde_json::to_string(&of("rbd:p/i?conf=/c")).unwrap();
        assert!(json.contains("\"rbd:p/i?conf=%2fc&id=admin&deadline_s=60\""), "{json}");
        let unix = of("nbd+unix:///a?socket=/run/s");
        let json = serde_json::to_string(&unix).unwrap();
        assert_eq!(json, r#"[{"address":"unix:/run/s","certificates":null,"resolved":[]}]"#);
        let tls = of("nbds://127.0.0.1:7/a?tls-certificates=/etc/pki");
        let json = serde_json::to_string(&tls).unwrap();
        assert!(json.contains("tls:7:127.0.0.1") && json.contains("/etc/pki"), "{json}");
        assert!(json.contains("127.0.0.1:7\""), "{json}");
    }

    /// Commands are permitted by the image's name, whatever format precedes it.
    #[test]
    fn the_image_is_what_is_named_without_its_format() {
        for (name, path) in [("raw:/dev/ng0n1", "/dev/ng0n1"), ("/dev/ng0n1", "/dev/ng0n1")] {
            let Command::Serve(serve) = parse(["serve", "--xen=3/xvda", name]).command else {
                panic!()
            };
            assert_eq!(image(&serve), Some(path.into()));
        }
    }
}
