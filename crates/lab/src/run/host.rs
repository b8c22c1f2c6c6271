//! The machine: guests as processes, and their backends as threads of this process.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_disk::Disk;
use ferrite_host::clock::{Clock, SystemClock};
use ferrite_io::engines::EngineKind;
use ferrite_loopback::machine::{Disk as VirtualDisk, DiskPaths};
use ferrite_loopback::{GuestHandle, GuestOptions, Loopback, LoopbackError, Machine};
use ferrite_serve::blkif::lifecycle::{
    Config, EngineFactory, ExpectedAttachment, FollowConfig, Outcome, ServeError, WAIT_FOR_HOST,
    WorkConfig, close, serve,
};
use ferrite_serve::blkif::negotiate::Offer;
use ferrite_serve::counters::{Counters, Counts};
use ferrite_serve::path::device::Device;
use ferrite_serve::path::full::OnFull;
use ferrite_serve::processors::Processors;
use ferrite_serve::waker::Waker;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::mover::{Budget, DISK_MAPPINGS, Maps, Mover, Moving};
use ferrite_xen::store::Store;
use rustix::param::clock_ticks_per_second;
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use super::cli::BenchArgs;
use super::idle::{self, Idle, Switches};
use super::kept::Kept;
use super::measure::{CpuTime, interrupted};
use super::progress::Progress;
use super::tally::Tally;
use super::task::{Said, Task, Times};
use ferrite::engine::engines;
use ferrite::exit::Failure;

/// The number of the guests' disk: xvda.
pub(crate) const DEVID: u32 = 202 << 8;
/// The folders for in-flight tables and traces; on tmpfs, as in production.
pub(crate) const RUN_DIRS: [&str; 2] = ["/dev/shm", "/run"];

const SECOND: Duration = Duration::from_secs(1);

/// The events.
enum Event {
    /// A guest sent a line.
    Said(usize, Said),
    /// A guest's process closed its output, which is its end.
    Gone(usize),
    /// A signal asked for the end.
    Stopped,
    /// A backend ended.
    Ended(usize, Result<Outcome, ServeError>),
}

/// A guest's process. It is killed when this is dropped before it has ended.
struct Guest {
    child: Child,
    stdin: ChildStdin,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One guest's backend.
struct Backend {
    stop: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves all guests from this process.
struct Own {
    loopback: Arc<Loopback>,
    device: Arc<Device>,
    engine: EngineFactory,
}

/// Everything that runs.
pub(crate) struct Host {
    // Dropped in this order: guests first, or their backends would wait for their next requests.
    guests: Vec<Guest>,
    backends: Vec<Backend>,
    events: Receiver<Event>,
    /// The counts of each guest that has ended successfully.
    done: Vec<Option<Tally>>,
    /// The counters of each backend.
    counters: Vec<Counters>,
    progress: Progress,
    machine: Machine,
    /// Set if this process serves the guests.
    own: Option<Own>,
    /// The keepers that serve the guests otherwise.
    kept: Vec<Kept>,
    /// The run directory of all backends.
    run_dir: TempDir,
}

impl Host {
    /// Starts all guests and their backends, and waits until they are connected.
    pub(crate) fn start(
        args: &BenchArgs,
        disk: Disk,
        kind: EngineKind,
        tasks: &[Task],
        run_dir: TempDir,
        signals: Signals,
    ) -> Result<Host, Failure> {
        let mut machine = Machine::new().map_err(no_machine)?;
        let mut disks = Vec::new();
        for task in tasks {
            let domid = machine.add_guest(size(task)).map_err(no_machine)?;
            disks.push(machine.attach_disk(domid, virtual_disk(args)).map_err(no_machine)?);
        }
        let own = match args.kept {
            true => {
                // The workers open the image.
                drop(disk);
                None
            }
            false => Some(Own {
                loopback: Arc::new(machine.loopback(args.copy_with).map_err(no_machine)?),
                device: Arc::new(Device::new(disk, SystemClock::shared())),
                engine: engines(kind),
            }),
        };
        let (sender, events) = channel();
        pass_on(signals, sender.clone())?;
        let (done, progress) = (vec![None; tasks.len()], Progress::new());
        let (guests, backends) = (Vec::new(), Vec::new());
        let counters = Vec::new();
        let kept = Vec::new();
        let mut host = Host {
            guests,
            backends,
            events,
            done,
            counters,
            progress,
            machine,
            own,
            kept,
            run_dir,
        };
        for (i, (task, disk)) in tasks.iter().zip(&disks).enumerate() {
            let run_dir = host.run_dir.path().join(i.to_string());
            std::fs::create_dir(&run_dir).map_err(no_run_dir)?;
            let follow = follow_config(args, task, disk);
            match args.kept {
                true => host.keep_backend(i, args, follow, &run_dir, sender.clone())?,
                false => {
                    let work = work_config(args, disk.domid, &run_dir)?;
                    host.start_backend(i, follow, work, sender.clone())?;
                }
            }
            host.start_guest(i, task, disk.domid, sender.clone())?;
        }
        host.wait_until_ready()?;
        Ok(host)
    }

    fn start_backend(
        &mut self,
        i: usize,
        follow: FollowConfig,
        work: WorkConfig,
        events: Sender<Event>,
    ) -> Result<(), Failure> {
        let Some(Own { loopback, device, engine }) = &self.own else { return Ok(()) };
        self.counters.push(work.counters.clone());
        let config = Config { follow, work, engine: engine.clone() };
        let (loopback, device) = (loopback.clone(), device.clone());
        self.run_backend(i, events, move |store, stop| {
            serve(store, &*loopback, &device, &config, stop)
        })
    }

    /// Starts a keeper and its worker as the backend.
    fn keep_backend(
        &mut self,
        i: usize,
        args: &BenchArgs,
        config: FollowConfig,
        run_dir: &Path,
        events: Sender<Event>,
    ) -> Result<(), Failure> {
        let guest = self.machine.guest(config.domid).map_err(no_machine)?;
        let (kept, line) = Kept::start(args, guest, run_dir)?;
        self.kept.push(kept);
        self.run_backend(i, events, move |store, stop| line.follow(store, &config, stop))
    }

    fn run_backend(
        &mut self,
        i: usize,
        events: Sender<Event>,
        run: impl FnOnce(&mut Store, &Waker) -> Result<Outcome, ServeError> + Send + 'static,
    ) -> Result<(), Failure> {
        let stop = Arc::new(Waker::new().map_err(no_resources)?);
        let mut store = self.machine.store().map_err(no_machine)?;
        let stopped = stop.clone();
        let body = move || {
            let end = run(&mut store, &stopped);
            // After a failure of the bench no thread receives events.
            let _ = events.send(Event::Ended(i, end));
        };
        let thread = std::thread::Builder::new()
            .name(format!("backend-{i}"))
            .spawn(body)
            .map_err(no_resources)?;
        self.backends.push(Backend { stop, thread: Some(thread) });
        Ok(())
    }

    fn start_guest(
        &mut self,
        i: usize,
        task: &Task,
        domid: DomId,
        events: Sender<Event>,
    ) -> Result<(), Failure> {
        let handle = self.machine.guest(domid).map_err(no_machine)?;
        let mut child = spawn(handle, task).map_err(|e| {
            Failure::new(
                format!("cannot start the process of guest {i}"),
                e,
                "check the limits on processes (ulimit -u) and that this program is still there",
            )
        })?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both were asked to be pipes");
        };
        self.guests.push(Guest { child, stdin });
        std::thread::Builder::new()
            .name(format!("guest-{i}"))
            .spawn(move || listen(i, stdout, &events))
            .map_err(no_resources)?;
        Ok(())
    }

    fn wait_until_ready(&mut self) -> Result<(), Failure> {
        let guests = self.guests.len();
        for ready in 0..guests {
            self.progress.show(&format!("{ready} of {guests} guests are connected"));
            match self.next(None)? {
                Some((_, Said::Ready)) => {}
                other => unreachable!("guests say that they are ready first, not {other:?}"),
            }
        }
        Ok(())
    }

    /// Completes the image for other programs; all guests have ended.
    pub(crate) fn close(&self) -> Result<(), Failure> {
        let Some(own) = &self.own else { return Ok(()) };
        close(&own.device, &own.engine).map_err(|e| {
            Failure::new(
                "cannot close the image",
                e,
                "check the storage; the image may be unusable",
            )
        })
    }

    /// Counts the wake-ups of the backends without requests.
    pub(crate) fn leave_idle(&mut self, seconds: f64) -> Result<Idle, Failure> {
        let before = Switches::now();
        self.progress.show("leaving everything idle");
        // This thread is not counted. It sleeps to the end, unless an event comes.
        let until_ns = SystemClock.now_ns() + Duration::from_secs_f64(seconds).as_nanos() as u64;
        self.wait(until_ns, |_, left| left)?;
        let context_switches = Switches::now().since(&before);
        Ok(Idle { seconds, context_switches })
    }

    /// Sends all guests the times of start and end.
    pub(crate) fn go(&mut self, times: Times) -> Result<(), Failure> {
        let failed = |e| Failure::new("cannot start the guests", e, "run it again");
        let line = serde_json::to_string(&times).map_err(std::io::Error::from).map_err(failed)?;
        for guest in &mut self.guests {
            writeln!(guest.stdin, "{line}").map_err(failed)?;
        }
        Ok(())
    }

    /// Waits for that time; fails if a guest or a backend fails before.
    pub(crate) fn watch(&mut self, until_ns: u64) -> Result<(), Failure> {
        self.wait(until_ns, |host, left| {
            host.progress.show(&format!("measuring, {} s left", left.as_secs() + 1));
            left.min(SECOND)
        })
    }

    /// Waits until that time. `nap` gives the length of each sleep from the remaining time.
    fn wait(
        &mut self,
        until_ns: u64,
        nap: impl Fn(&mut Host, Duration) -> Duration,
    ) -> Result<(), Failure> {
        loop {
            let left_ns = until_ns.saturating_sub(SystemClock.now_ns());
            if left_ns == 0 {
                return Ok(());
            }
            let nap = nap(self, Duration::from_nanos(left_ns));
            if let Some((i, Said::Done(tally))) = self.next(Some(nap))? {
                self.done[i] = Some(tally);
            }
        }
    }

    /// The counts of all backends so far.
    pub(crate) fn counts(&self) -> Counts {
        let own = self.counters.iter().map(Counters::counts);
        let each = own.chain(self.kept.iter().map(Kept::counts));
        each.fold(Counts::default(), |sum, counts| sum.plus(&counts))
    }

    /// The processor time of all backends.
    pub(crate) fn cpu_time(&self) -> CpuTime {
        if self.kept.is_empty() {
            return CpuTime::now();
        }
        let ticks = self.kept.iter().map(Kept::cpu_ticks).sum::<u64>();
        let cpu_ns = ticks * (1_000_000_000 / clock_ticks_per_second());
        CpuTime { cpu_ns, at_ns: SystemClock.now_ns() }
    }

    /// The memory of all backends, in KiB.
    pub(crate) fn pss_kib(&self) -> u64 {
        match self.kept.is_empty() {
            true => idle::pss_kib(std::process::id()),
            false => self.kept.iter().map(Kept::pss_kib).sum(),
        }
    }

    /// Reads the guests' results, and ends the backends; the sum of all counts.
    pub(crate) fn finish(&mut self) -> Result<Tally, Failure> {
        while self.done.iter().any(Option::is_none) {
            if let Some((i, Said::Done(tally))) = self.next(None)? {
                self.done[i] = Some(tally);
            }
        }
        self.backends.iter().for_each(|b| b.stop.wake());
        let mut running = self.backends.len();
        while running > 0 {
            match self.events.recv() {
                Ok(Event::Ended(i, end)) => {
                    end.map_err(|e| backend_failed(i, &e))?;
                    running -= 1;
                }
                Ok(Event::Stopped) => return Err(interrupted()),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        let tallies: Vec<Tally> = self.done.iter().flatten().cloned().collect();
        Ok(Tally::sum(&tallies))
    }

    /// Segments per copy, on average since the start; `None` if nothing was copied or the backends have not ended.
    pub(crate) fn segments_per_copy(&self) -> Option<f64> {
        let (calls, segments) = self.own.as_ref()?.loopback.copies();
        (calls > 0).then(|| segments as f64 / calls as f64)
    }

    /// The next line of a guest; `None`: none within the time. Guests time out themselves, so the wait ends.
    fn next(&mut self, timeout: Option<Duration>) -> Result<Option<(usize, Said)>, Failure> {
        let event = match timeout {
            Some(timeout) => self.events.recv_timeout(timeout),
            None => self.events.recv().map_err(RecvTimeoutError::from),
        };
        match event {
            Ok(Event::Said(i, Said::Failed(why))) => Err(self.guest_failed(i, why)),
            Ok(Event::Said(i, said)) => Ok(Some((i, said))),
            Ok(Event::Gone(i)) if self.done[i].is_some() => Ok(None),
            Ok(Event::Gone(i)) => {
                let status = self.guests[i].child.wait();
                let status = status.map_or_else(|e| e.to_string(), |s| s.to_string());
                Err(self.guest_failed(i, format!("its process ended: {status}")))
            }
            Ok(Event::Stopped) => Err(interrupted()),
            Ok(Event::Ended(i, Err(e))) => Err(backend_failed(i, &e)),
            Ok(Event::Ended(i, Ok(outcome))) => Err(Failure::new(
                format!("the backend of guest {i} failed"),
                format!("it ended early ({outcome:?})"),
                "this is a bug in ferrite: please report it",
            )),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => unreachable!("every end is an event"),
        }
    }

    /// The guest's own error, or its backend's if that failed first.
    fn guest_failed(&self, i: usize, why: String) -> Failure {
        let ended = self.events.try_iter().find_map(|event| match event {
            Event::Ended(i, Err(e)) => Some(backend_failed(i, &e)),
            _ => None,
        });
        ended.unwrap_or_else(|| {
            let what = format!("guest {i} failed");
            Failure::new(what, why, "-v shows what the backend has to say")
        })
    }
}

/// Memory for the data in flight, the rings, and the pages of indirect requests.
fn size(task: &Task) -> GuestOptions {
    let queues = task.queues;
    let pages_of_request = task.block_pages() + 1;
    let pages_of_queue = task.depth * pages_of_request + (1 << task.ring_order);
    let frames = queues * pages_of_queue;
    // Persistent grants need a second page for each one.
    let frames = if task.persistent { 2 * frames } else { frames };
    // A reference for each page that stays granted and one for each request's; the queues take those in lots of 64, and
    // the first 8 are reserved.
    let grants = 2 * frames + 64 * queues + 8;
    GuestOptions { frames, grants, ports: queues }
}

fn virtual_disk(args: &BenchArgs) -> VirtualDisk {
    let disk = VirtualDisk { params: args.image.clone(), ..VirtualDisk::xvd(0) };
    if args.mode.writes() { disk } else { disk.read_only() }
}

fn follow_config(args: &BenchArgs, task: &Task, disk: &DiskPaths) -> FollowConfig {
    let offer = Offer {
        max_queues: args.queues,
        max_ring_order: task.ring_order,
        max_indirect_segments: args.indirect as u16,
        persistent: args.mover == Mover::Persistent,
    };
    let (backend, domid, devid) = (disk.backend.clone(), disk.domid, disk.devid);
    let (attached, ahead, defers) = (ExpectedAttachment::Any, None, false);
    FollowConfig { backend, domid, devid, offer, attached, ahead, defers }
}

/// The configuration of a disk with this run directory.
pub(super) fn work_config(
    args: &BenchArgs,
    domid: DomId,
    run_dir: &Path,
) -> Result<WorkConfig, Failure> {
    let shared = run_dir.with_file_name("poll-budget");
    let polling = args.tuning.polling(&shared).map_err(no_run_dir)?;
    let shared = run_dir.with_file_name("memory-budget");
    let host_memory = args.memory.host(&shared).map_err(no_run_dir)?;
    Ok(WorkConfig {
        domid,
        wait_for_host: WAIT_FOR_HOST,
        moving: Moving {
            mover: args.mover,
            maps: Maps::new(Budget::of_disk(DISK_MAPPINGS), SystemClock::shared()),
        },
        pool_bytes: args.memory.memory.bytes(),
        host_memory,
        run_dir: run_dir.to_owned(),
        // Several guests may have it open.
        closes: false,
        stays: false,
        tuning: args.tuning.tuning(),
        on_full: OnFull::Error,
        limits: args.limit,
        processors: Arc::new(Processors::new(polling, None, None)),
        counters: Counters::default(),
    })
}

/// Makes the folder for all files that a backend keeps on tmpfs.
pub(crate) fn run_dir() -> Result<TempDir, Failure> {
    let prefix = format!("ferrite-bench-{}-", std::process::id());
    let make = |dir| tempfile::Builder::new().prefix(&prefix).tempdir_in(dir);
    make(RUN_DIRS[0]).or_else(|_| make(RUN_DIRS[1])).map_err(no_run_dir)
}

fn spawn(handle: GuestHandle, task: &Task) -> std::io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    let guest = handle.pass_to(&mut command);
    command.arg("guest").arg(guest).arg(serde_json::to_string(task)?);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()
}

/// Forwards signals as events.
fn pass_on(mut signals: Signals, events: Sender<Event>) -> Result<(), Failure> {
    let pass_on = move || {
        for _ in signals.forever() {
            if events.send(Event::Stopped).is_err() {
                return;
            }
        }
    };
    let started = std::thread::Builder::new().name("signals".into()).spawn(pass_on);
    started.map(drop).map_err(no_resources)
}

/// Forwards the lines of a guest.
fn listen(i: usize, from: ChildStdout, events: &Sender<Event>) {
    for line in BufReader::new(from).lines().map_while(Result::ok) {
        let said = serde_json::from_str(&line)
            .unwrap_or_else(|e| Said::Failed(format!("it said {line:?}: {e}")));
        if events.send(Event::Said(i, said)).is_err() {
            return;
        }
    }
    let _ = events.send(Event::Gone(i));
}

fn no_machine(e: LoopbackError) -> Failure {
    let help = "check the limits on descriptors (ulimit -n) and memory; fewer guests need less";
    Failure::new("cannot set up the loopback", e, help)
}

fn no_resources(e: std::io::Error) -> Failure {
    let help = "check the limits of this process (ulimit -a); fewer guests need less";
    Failure::new("cannot start a backend", e, help)
}

fn no_run_dir(e: std::io::Error) -> Failure {
    let help = "check that /dev/shm is there, has room and may be written to";
    Failure::new("cannot make a directory on tmpfs", e, help)
}

fn backend_failed(i: usize, e: &ServeError) -> Failure {
    let help = "check memory and limits (ulimit -a); -v shows what led to it";
    Failure::new(format!("the backend of guest {i} failed"), e, help)
}
