//! `ferrite-bench bound`: the least pipeline of two processes for a load, instead of Ferrite and blkif. This is the
//! limit of a backend in a process of its own; fio, in one process, has another.
//!
//! The load, its times, its guest's way of waiting and the engine are those of a measurement. Only the carrier and the
//! backend's loop differ, and these have no unnecessary steps.

use std::io::{self, BufRead as _, BufReader, Write as _, stdout};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::{Clock as _, Random as _, SplitMix64, SystemClock};
use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::{Completion, Engine, FileId, Op};
use ferrite_io::engines::EngineKind;
use ferrite_loopback::GuestHandle;
use ferrite_loopback::front::FrontError;
use ferrite_loopback::pipeline::{self, Back, Front, Shape};
use ferrite_xen::abi::SECTOR_BYTES;
use ferrite_xen::hypervisor::PAGE_SIZE;
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use super::cli::{BoundArgs, GuestArgs};
use super::guest::{hear, say};
use super::load::{Carrier, Load, What};
use super::measure::{CpuTime, LEAD_NS, RAMP_NS};
use super::tally::{Counter, Tally};
use super::task::{Said, Task, Times};
use crate::report::Latency;
use ferrite::exit::Failure;

/// The token of the watch on the front's events; smaller tokens are places.
const EVENT: u64 = 1 << 32;
/// Turns of the polling loop between two readings of the clock.
const TURNS: u32 = 32;

/// One run; the fields of its JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) iops: f64,
    pub(crate) cpu_us_per_io: f64,
    pub(crate) guest_cpu_us_per_io: f64,
    pub(crate) lat_us: Latency,
    ios: u64,
    direct: bool,
}

/// Measures, and prints JSON.
pub(crate) fn run(args: &BoundArgs) -> Result<(), Failure> {
    let help =
        "name a plain file or a block device, and check the limits of this process (ulimit -a)";
    measure(args).map_err(|e| Failure::new("cannot measure the bound", format!("{e:#}"), help))
}

fn measure(args: &BoundArgs) -> anyhow::Result<()> {
    let disk = open(args)?;
    let file = disk.files().into_iter().next().context("a raw image is a file")?;
    let task = task(args, disk.sectors());
    let shape = shape(&task);
    let handle = shape.create()?;
    let mut front = start_front(&handle, &task)?;
    let mut lines =
        BufReader::new(front.0.stdout.take().context("it was asked to be a pipe")?).lines();
    let mut heard = || -> anyhow::Result<Said> {
        let line = lines.next().context("the front's process has ended")??;
        Ok(serde_json::from_str(&line)?)
    };
    anyhow::ensure!(matches!(heard()?, Said::Ready), "the front is not ready");
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, served, shared) = (stop.clone(), task.clone(), handle.share());
    let poll_us = args.poll_us;
    // An engine belongs to the thread that makes it.
    let serve = move || Server::new(&shared, &served, file, poll_us)?.run(&stopped);
    let server = std::thread::Builder::new().name("bound".into()).spawn(serve)?;
    let times = times(args.seconds);
    let mut stdin = front.0.stdin.take().context("it was asked to be a pipe")?;
    writeln!(stdin, "{}", serde_json::to_string(&times)?)?;
    sleep_until(times.from_ns);
    let cpu = CpuTime::now();
    sleep_until(times.until_ns);
    let cpu_ns = cpu.rate_until_now() * args.seconds * 1e9;
    let said = heard()?;
    stop.store(true, Ordering::Release);
    pipeline::wake_back(&handle)?;
    server.join().map_err(|_| anyhow::anyhow!("the back's thread panicked"))??;
    match said {
        Said::Done(tally) => {
            let report = report(args, &tally, cpu_ns, disk.direct())?;
            Ok(writeln!(stdout().lock(), "{}", serde_json::to_string_pretty(&report)?)?)
        }
        other => anyhow::bail!("the front said {other:?}"),
    }
}

/// Opens the image as Ferrite does: past the page cache, or in the fastest way on tmpfs.
fn open(args: &BoundArgs) -> anyhow::Result<Disk> {
    anyhow::ensure!(args.mode.moves_data_only(), "this pipeline reads and writes only");
    let writes = args.mode.writes();
    anyhow::ensure!(
        !writes || args.force_overwrite,
        "this mode overwrites what {} holds: use an image that is not needed and say \
         --force-overwrite",
        args.image
    );
    let options = OpenOptions { read_only: !writes, ..Default::default() };
    Ok(Disk::open(&format!("raw:{}", args.image), &options)?)
}

fn task(args: &BoundArgs, sectors: u64) -> Task {
    let block_sectors = u64::from(args.block) / SECTOR_BYTES;
    Task {
        devid: 0,
        mode: args.mode,
        block_bytes: args.block,
        depth: args.depth,
        batch: false,
        distinct: false,
        steps: None,
        ring_order: 0,
        max_indirect: 0,
        poll_us: args.guest_poll,
        persistent: false,
        queues: 1,
        parts: vec![(0, sectors / block_sectors * block_sectors)],
    }
}

fn shape(task: &Task) -> Shape {
    Shape { places: task.depth as u16, pages: task.block_pages() }
}

fn times(seconds: f64) -> Times {
    let start_ns = SystemClock.now_ns() + LEAD_NS;
    let from_ns = start_ns + RAMP_NS;
    let until_ns = from_ns + Duration::from_secs_f64(seconds).as_nanos() as u64;
    Times { start_ns, from_ns, until_ns, leave_ns: until_ns }
}

fn sleep_until(at_ns: u64) {
    SystemClock.sleep(Duration::from_nanos(at_ns.saturating_sub(SystemClock.now_ns())));
}

fn report(args: &BoundArgs, tally: &Tally, cpu_ns: f64, direct: bool) -> anyhow::Result<Report> {
    let counter = Counter::of(std::slice::from_ref(tally));
    anyhow::ensure!(tally.errors == 0, "{} requests failed", tally.errors);
    anyhow::ensure!(counter.ios() > 0, "no request ended within {} s", args.seconds);
    let ios = counter.ios() as f64;
    Ok(Report {
        iops: (ios / args.seconds).round(),
        cpu_us_per_io: cpu_ns / 1000.0 / ios,
        guest_cpu_us_per_io: tally.cpu_ns as f64 / 1000.0 / ios,
        lat_us: Latency::of(&counter),
        ios: counter.ios(),
        direct,
    })
}

/// The front's process, which ends when this is dropped.
struct FrontProcess(Child);

impl Drop for FrontProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_front(handle: &GuestHandle, task: &Task) -> anyhow::Result<FrontProcess> {
    let mut command = Command::new(std::env::current_exe()?);
    let text = handle.share().pass_to(&mut command);
    command.args(["bound-front", &text, &serde_json::to_string(task)?]);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    Ok(FrontProcess(child.context("cannot start the front's process")?))
}

/// The back: between shared memory and the engine.
struct Server {
    back: Back,
    engine: Box<dyn Engine>,
    arena: Arc<Arena>,
    /// The buffer of each place.
    spans: Vec<Span>,
    file: FileId,
    poll_ns: u64,
    /// Whether the request of each place writes.
    writes: Vec<bool>,
    armed: bool,
}

impl Server {
    fn new(
        handle: &GuestHandle,
        task: &Task,
        file: Arc<OwnedFd>,
        poll_us: u32,
    ) -> anyhow::Result<Server> {
        let (places, bytes) = (task.depth as usize, task.block_bytes as usize);
        let stride = bytes.next_multiple_of(PAGE_SIZE);
        let arena = Arena::new(places * stride)?;
        let spans = (0..places).map(|i| arena.span(i * stride, bytes)).collect();
        let mut engine = EngineKind::Uring.open(arena.clone(), (places as u32).max(32))?;
        let file = engine.add_file(file)?;
        engine.pin(arena.span(0, arena.len()));
        Ok(Server {
            back: Back::attach(handle, shape(task))?,
            engine,
            arena,
            spans,
            file,
            poll_ns: u64::from(poll_us) * 1000,
            writes: vec![false; places],
            armed: false,
        })
    }

    fn run(mut self, stop: &AtomicBool) -> anyhow::Result<()> {
        let mut done = Vec::new();
        while !stop.load(Ordering::Acquire) {
            let started = self.start();
            self.engine.submit()?;
            if !started && !self.poll() {
                self.sleep()?;
            }
            self.engine.reap(&mut done);
            for completion in done.drain(..) {
                self.end(completion)?;
            }
            self.back.push()?;
        }
        Ok(())
    }

    /// Begins all new requests.
    fn start(&mut self) -> bool {
        let mut any = false;
        while let Some(request) = self.back.take() {
            let (file, offset) = (self.file, request.sector * SECTOR_BYTES);
            let buf = self.spans[usize::from(request.place)];
            self.writes[usize::from(request.place)] = request.write;
            let op = match request.write {
                true => {
                    self.back.fetch(request.place, &self.arena, buf);
                    Op::Write { file, offset, buf }
                }
                false => Op::Read { file, offset, buf },
            };
            self.engine.push(u64::from(request.place), op);
            any = true;
        }
        any
    }

    /// Polls as a queue with a fixed window does (`serve/src/blkif/queue/wait.rs`).
    fn poll(&mut self) -> bool {
        let end_ns = SystemClock.now_ns() + self.poll_ns;
        while self.poll_ns > 0 {
            for _ in 0..TURNS {
                if self.back.has_request() {
                    return true;
                }
                if self.engine.may_reap() {
                    return self.engine.submit().is_ok();
                }
                std::hint::spin_loop();
            }
            if SystemClock.now_ns() >= end_ns {
                break;
            }
        }
        false
    }

    fn sleep(&mut self) -> io::Result<()> {
        if self.back.final_check() {
            return Ok(());
        }
        if !std::mem::replace(&mut self.armed, true) {
            let fd = self.back.event_fd().as_raw_fd();
            self.engine.push(EVENT, Op::Readable { fd });
        }
        self.engine.wait(None)
    }

    fn end(&mut self, completion: Completion) -> io::Result<()> {
        if completion.token == EVENT {
            self.armed = false;
            return self.back.take_event();
        }
        let place = completion.token as u16;
        let span = self.spans[usize::from(place)];
        let ok = usize::try_from(completion.raw) == Ok(span.len());
        if ok && !self.writes[usize::from(place)] {
            self.back.deliver(place, &self.arena, span);
        }
        self.back.answer(place, ok);
        Ok(())
    }
}

/// The front's process: runs its task and prints the result.
pub(crate) fn front(args: &GuestArgs) -> Result<(), Failure> {
    let outcome = work(args).unwrap_or_else(|e| Said::Failed(format!("{e:#}")));
    say(&outcome).map_err(|e| {
        Failure::new("cannot report", format!("{e:#}"), "this command is for ferrite-bench only")
    })
}

fn work(args: &GuestArgs) -> anyhow::Result<Said> {
    // Nothing else ends a front whose parent was killed.
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot bind to the starter")?;
    let task: Task = serde_json::from_str(&args.task).context("the task makes no sense")?;
    let front = Front::attach(&GuestHandle::from_arg(&args.guest)?, shape(&task))?;
    let mut random = SplitMix64::new(0);
    front.fill(|| random.next_u64());
    let part = *task.parts.first().context("the task has no part of the disk")?;
    let load = Load::new(front, &task, part);
    say(&Said::Ready)?;
    let (_, tally) = load.run(hear()?)?;
    Ok(Said::Done(tally))
}

impl Carrier for Front {
    fn send(&mut self, place: u16, sector: u64, what: What) -> Result<(), FrontError> {
        Front::send(self, place, sector, what == What::Write);
        Ok(())
    }

    fn push(&mut self) -> Result<(), FrontError> {
        Ok(Front::push(self)?)
    }

    fn in_flight(&self) -> usize {
        Front::in_flight(self)
    }

    fn has_response(&self) -> bool {
        self.has_answer()
    }

    fn final_check(&self) -> bool {
        Front::final_check(self)
    }

    fn wait(&mut self, timeout: Duration) -> Result<bool, FrontError> {
        let end_ns = SystemClock.now_ns().saturating_add(timeout.as_nanos() as u64);
        while !Front::final_check(self) {
            let left = end_ns.saturating_sub(SystemClock.now_ns());
            if left == 0 {
                return Ok(false);
            }
            self.sleep(Duration::from_nanos(left))?;
        }
        Ok(true)
    }

    fn take(&mut self) -> Result<Option<(u16, bool)>, FrontError> {
        Ok(Front::take(self))
    }
}
