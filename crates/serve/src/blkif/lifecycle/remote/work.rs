//! The worker's end of the line: a process that serves one disk, and does what it is asked.
//!
//! Whoever follows may end at any moment, also between an order and its answer. So nothing here depends
//! on who asks: an order that was carried out before is carried out again, or is done already.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::Disk;
use ferrite_io::clock::SystemClock;
use ferrite_io::names;
use ferrite_io::process::receive_with;
use ferrite_xen::hypervisor::{DomId, Hypervisor};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::super::attached::EngineFactory;
use super::super::carrier::Carrier;
use super::super::closing::close;
use super::super::config::WorkConfig;
use super::super::error::ServeError;
use super::super::messages::{Failure, OpenFailure, Order, Reply, Report, VERSION};
use super::super::orphan::{Orphan, Start};
use super::super::run_dir::{RunFiles, STOPPED, second};
use super::super::worker::Worker;
use super::wire::{Ask, Said, What, hear, say};
use crate::path::device::Device;
use crate::polling::wake_up_ns;
use crate::waker::wait_for;

/// How long somebody who should follow may take to ask for the first thing.
const ASKED_WITHIN: Duration = Duration::from_secs(5);

/// A message of the door says nothing but that a client comes with it.
const DOOR_BYTES: usize = 16;

/// A disk that can be served: of what killed predecessors have left, nothing is missing in it.
pub struct Opened {
    /// The disk.
    pub disk: Disk,
    /// What does its I/O.
    pub engine: EngineFactory,
}

/// The lines of a worker. Each has a guest, and a follower.
#[derive(Clone, Copy)]
pub struct Lines<'a> {
    /// Of the guest that the disk is attached to.
    pub first: &'a OwnedFd,
    /// Of its stub domain, which may have the disk at the same time.
    pub second: &'a OwnedFd,
}

/// Serves what is asked for on the lines, until one of them ends, and the clients of NBD that come by the
/// door. `open` opens the image, to be written or only to be read. It has ended well when nothing is open
/// then: the disk is gone, and others of this process go on.
///
/// # Errors
/// A line's, also its end: nobody is left who could follow. [`ServeError::Host`]: a queue has failed,
/// or the hypervisor [is used up](Hypervisor::is_used_up), and the next process may do better.
pub fn work(
    lines: Lines<'_>,
    door: &OwnedFd,
    hypervisor: &dyn Hypervisor,
    config: &WorkConfig,
    open: &mut dyn FnMut(bool) -> Result<Opened, OpenFailure>,
) -> Result<(), ServeError> {
    work_from(Start::Asked, lines, door, hypervisor, config, open)
}

/// The same, of a worker that may have a guest to go on with before anybody asks.
///
/// # Errors
/// As [`work`]; also the image cannot be opened for that guest now, or nobody asks who should.
pub fn work_from(
    start: Start,
    lines: Lines<'_>,
    door: &OwnedFd,
    hypervisor: &dyn Hypervisor,
    config: &WorkConfig,
    open: &mut dyn FnMut(bool) -> Result<Opened, OpenFailure>,
) -> Result<(), ServeError> {
    // Measured now, once: no guest waits for us yet.
    wake_up_ns();
    let (first, second) = (lines.first.as_fd(), lines.second.as_fd());
    let door = Some(door);
    let mut bench = Bench { hypervisor, config, open, second, door, served: None, waits: None };
    match start {
        Start::Asked => {}
        Start::Expecting => expect([first, second])?,
        Start::Orphan(orphan) => bench.adopt(orphan)?,
    }
    loop {
        match bench.turn(first) {
            Ok(()) => {}
            // The keeper has let go of both; of either of them somebody may have a copy for a moment longer.
            Err(_) if bench.served.is_none() && [first, second].into_iter().any(has_ended) => {
                return Ok(());
            }
            Err(e) => return Err(e),
        }
    }
}

fn has_ended(line: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(line, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Waits for the first thing that is asked.
fn expect(lines: [BorrowedFd<'_>; 2]) -> Result<(), ServeError> {
    let asked = wait_for(lines, Some(ASKED_WITHIN));
    match asked.map_err(|e| ServeError::host("wait for orders", e))?.contains(&true) {
        true => Ok(()),
        false => {
            let why = "nobody has asked for anything: the next worker looks whether a daemon runs";
            Err(ServeError::host("go on with a guest", io::Error::other(why)))
        }
    }
}

/// What is asked next. A follower that is newer than this program may ask what it does not know: it is
/// told so, since it has to be able to ask for the end.
pub(super) fn hear_ask(line: BorrowedFd<'_>) -> io::Result<Option<Ask>> {
    let Some(Ask { number, what }) = hear::<Ask<serde_json::Value>>(line)? else { return Ok(None) };
    match serde_json::from_value(what) {
        Ok(what) => Ok(Some(Ask { number, what })),
        Err(e) => {
            let result = Err(Failure::host("do what this program does not know", e.into()));
            say(line, &Said::Answer { number, result }, true)?;
            Ok(None)
        }
    }
}

/// Where a worker sits that may have nothing to work on.
struct Bench<'a> {
    hypervisor: &'a dyn Hypervisor,
    config: &'a WorkConfig,
    open: &'a mut dyn FnMut(bool) -> Result<Opened, OpenFailure>,
    second: BorrowedFd<'a>,
    /// Until its other end is gone.
    door: Option<&'a OwnedFd>,
    served: Option<Served<'a>>,
    /// On the second line: until the image is open, and a follower has looked at the first guest's disk.
    waits: Option<Ask>,
}

/// An open image.
struct Served<'a> {
    worker: Worker<'a>,
    device: Arc<Device>,
    engine: EngineFactory,
    read_only: bool,
    /// It is closed, or is being closed: it can be closed again, and nothing else.
    closed: bool,
    /// Its size was asked for, and what tells of growth is listened to.
    listens: bool,
    /// The stub domain of the guest, while it has the disk, too.
    second: Option<Second<'a>>,
}

struct Second<'a> {
    worker: Worker<'a>,
    domid: DomId,
    listens: bool,
}

/// What there is to do, by line.
#[derive(Clone, Copy)]
struct Ready {
    asked: [bool; 2],
    /// Something is to be told.
    told: [bool; 2],
    /// There is a client at the door.
    came: bool,
}

impl<'a> Bench<'a> {
    /// Waits, and does what there is to do.
    fn turn(&mut self, first: BorrowedFd<'_>) -> Result<(), ServeError> {
        let ready = self.select(first)?;
        self.tell(first, ready)?;
        if ready.came {
            self.admit();
        }
        if ready.asked[0]
            && let Some(ask) = hear_ask(first).map_err(line_failed)?
        {
            let result = self.carry_out(ask.what);
            self.answer(first, ask.number, result)?;
        }
        if ready.asked[1]
            && let Some(ask) = hear_ask(self.second).map_err(line_failed)?
        {
            self.waits = None;
            self.carry_out_second(ask)?;
        }
        if let Some(ask) = self.waits.take() {
            self.carry_out_second(ask)?;
        }
        Ok(())
    }

    /// Waits.
    fn select(&self, first: BorrowedFd<'_>) -> Result<Ready, ServeError> {
        let served = self.served.as_ref();
        let second = served.and_then(|served| served.second.as_ref());
        let workers = [
            served.map(|served| (&served.worker, served.listens)),
            second.map(|second| (&second.worker, second.listens)),
        ];
        let fd = |i: usize| workers[i].map_or(first, |(worker, _)| worker.reports_fd());
        let grows = |i: usize| {
            let listens = workers[i].filter(|(_, listens)| *listens);
            listens.and_then(|(worker, _)| worker.growth_fd()).unwrap_or(first)
        };
        // Until the disk can be served, clients wait where they are.
        let takes = self.takes_others();
        let door = self.door.filter(|_| takes).map_or(first, OwnedFd::as_fd);
        let fds = [first, self.second, fd(0), fd(1), grows(0), grows(1), door];
        let ready = wait_for(fds, None).map_err(|e| ServeError::host("wait for orders", e))?;
        let told = |i: usize| workers[i].is_some() && (ready[2 + i] || ready[4 + i]);
        let came = takes && ready[6];
        Ok(Ready { asked: [ready[0], ready[1]], told: [told(0), told(1)], came })
    }

    /// Goes on with a guest that a predecessor has left, as its follower would have asked. One that comes
    /// meanwhile asks for the same, and finds it done.
    fn adopt(&mut self, orphan: Orphan) -> Result<(), ServeError> {
        let Orphan { read_only, keeps_all, rings, told_sectors } = orphan;
        // What fails here may work later: the next worker tries it.
        self.open(read_only, keeps_all)?;
        self.order(Order::Remember)?;
        self.order(Order::Enter)?;
        match self.order(Order::TakeOver { rings, told_sectors }) {
            Ok(Reply::Connected { how, undone }) => {
                tracing::info!("no daemon runs: took over, {undone} requests to finish: {how}");
            }
            Ok(reply) => tracing::error!("{reply:?}: this is a bug in ferrite"),
            Err(
                failure @ (Failure::Refused(_) | Failure::OtherRings(_) | Failure::WrongImage(_)),
            ) => {
                let why = ServeError::from(failure);
                tracing::warn!("the guest waits until a daemon runs: {why}");
            }
            Err(failure) => return Err(failure.into()),
        }
        Ok(())
    }

    /// Serves the next client that has come by the door.
    fn admit(&mut self) {
        let (Some(served), Some(door)) = (&mut self.served, self.door) else { return };
        match receive_with(door, DOOR_BYTES, false) {
            Ok((bytes, _)) if bytes.is_empty() => self.door = None,
            Ok((_, Some(client))) => served.worker.admit(UnixStream::from(client)),
            // Nobody, or no descriptor was left for him.
            Ok((_, None)) | Err(_) => {}
        }
    }

    /// Tells what nobody has asked for.
    fn tell(&mut self, first: BorrowedFd<'_>, ready: Ready) -> Result<(), ServeError> {
        let Some(served) = &mut self.served else { return Ok(()) };
        if ready.told[0] {
            served.listens = false;
            tell(first, &mut served.worker)?;
        }
        if ready.told[1]
            && let Some(second) = &mut served.second
        {
            second.listens = false;
            tell(self.second, &mut second.worker)?;
        }
        Ok(())
    }

    fn answer(
        &self,
        line: BorrowedFd<'_>,
        number: u64,
        result: Result<Reply, Failure>,
    ) -> Result<(), ServeError> {
        let failed = result.is_err();
        say(line, &Said::Answer { number, result }, true).map_err(line_failed)?;
        // Nothing can be opened here any more. The guests' requests are in their tables.
        if failed && self.hypervisor.is_used_up() {
            let e = io::Error::other("all devices of Xen are in use or spoiled");
            return Err(ServeError::host("connect a guest", e));
        }
        Ok(())
    }

    /// The same of the second line. A guest that cannot join yet is answered later.
    fn carry_out_second(&mut self, Ask { number, what }: Ask) -> Result<(), ServeError> {
        if matches!(what, What::Join { .. }) && !self.takes_others() {
            self.waits = Some(Ask { number, what });
            return Ok(());
        }
        let result = match what {
            What::Join { read_only, domid } => self.join(read_only, DomId(domid)),
            What::Part { domid } => self.part(DomId(domid)),
            What::Order(order) => self.order_second(order),
            What::Open { .. } | What::Retire => Err(not_here()),
        };
        self.answer(self.second, number, result)
    }

    /// Whether others than the first guest are served now.
    fn takes_others(&self) -> bool {
        self.served.as_ref().is_some_and(|served| !served.closed && served.worker.has_begun())
    }

    /// Has a second guest. One that is there already is served on.
    fn join(&mut self, read_only: bool, domid: DomId) -> Result<Reply, Failure> {
        let Some(served) = &mut self.served else { return Err(not_open()) };
        if served.read_only != read_only {
            return Err(Failure::Open(OpenFailure {
                what: format!("cannot serve domain {domid} beside its guest"),
                why: "only one of the two may write to the disk".to_owned(),
                help: "attach it in the same mode to both (mode=)".to_owned(),
            }));
        }
        // Its disk is gone: the daemon has one beside the first at a time.
        if let Some(older) = served.second.as_ref().map(|second| second.domid)
            && older != domid
        {
            self.part(older)?;
        }
        let Some(served) = &mut self.served else { return Err(not_open()) };
        if served.second.is_none() {
            let worker = served.worker.second(domid, self.config)?;
            served.second = Some(Second { worker, domid, listens: false });
        }
        Ok(Reply::Done)
    }

    /// Nothing is left of this second guest, nor of what it has left to a predecessor of this process.
    fn part(&mut self, domid: DomId) -> Result<Reply, Failure> {
        let Some(served) = &mut self.served else {
            RunFiles::new(&second(&self.config.run_dir)).forget();
            return Ok(Reply::Done);
        };
        let mut second = match served.second.take() {
            // What is here is another's.
            Some(second) if second.domid != domid => {
                served.second = Some(second);
                return Ok(Reply::Done);
            }
            Some(second) => second.worker,
            None => served.worker.second(domid, self.config)?,
        };
        second.carry_out(Order::Detach)?;
        second.carry_out(Order::Forget)
    }

    fn order_second(&mut self, order: Order) -> Result<Reply, Failure> {
        let Some(served) = &mut self.served else { return Err(not_open()) };
        let Some(second) = &mut served.second else { return Err(not_open()) };
        match order {
            // A failed flush is remembered for both, in one place.
            Order::Enter => drop(served.worker.carry_out(Order::Enter)?),
            Order::CheckSize => second.listens = true,
            _ => {}
        }
        second.worker.carry_out(order)
    }

    /// The image is to be closed: the second guest waits until it is open again, as after a death.
    fn leave_second(&mut self) -> Result<(), Failure> {
        let Some(served) = &mut self.served else { return Ok(()) };
        let Some(mut second) = served.second.take() else { return Ok(()) };
        second.worker.carry_out(Order::Stop)?;
        let why = "the disk of its guest is closed".to_owned();
        let report = Said::Report(Report::Failed(Failure::Close(why)));
        say(self.second, &report, true).map_err(|e| Failure::host("tell of the end", e))
    }

    fn carry_out(&mut self, what: What) -> Result<Reply, Failure> {
        match what {
            What::Open { read_only, keeps_all } => {
                self.open(read_only, keeps_all)?;
                let program = env!("CARGO_PKG_VERSION").to_owned();
                return Ok(Reply::Opened { version: VERSION, program });
            }
            What::Retire => self.retire()?,
            What::Order(order) => return self.order(order),
            What::Join { .. } | What::Part { .. } => return Err(not_here()),
        }
        Ok(Reply::Done)
    }

    /// Has the image open in this way. An open one is taken for what it is: its guest goes on.
    fn open(&mut self, read_only: bool, keeps_all: bool) -> Result<(), Failure> {
        if let Some(served) = &self.served {
            if !served.closed && served.read_only == read_only {
                return Ok(());
            }
            // The toolstack has attached it once more.
            self.give_up()?;
        }
        let Opened { disk, engine } = match (self.open)(read_only) {
            Ok(opened) => opened,
            Err(e) => {
                // Who waits to join is to hear of it, too.
                if let Some(Ask { number, .. }) = self.waits.take() {
                    let result = Err(Failure::Open(e.clone()));
                    // The line's end is found when it is listened to.
                    let _ = say(self.second, &Said::Answer { number, result }, true);
                }
                return Err(Failure::Open(e));
            }
        };
        let device = Device::new(disk, SystemClock::shared()).on_full(self.config.on_full);
        let device = Arc::new(device);
        let mut worker = Worker::new(self.hypervisor, &device, self.config, &engine)?;
        worker.keep_all(keeps_all);
        // What fails before this leaves the image to others.
        if let Ok(disk) = device.disk() {
            disk.keep();
        }
        let (closed, listens, second) = (false, false, None);
        self.served = Some(Served { worker, device, engine, read_only, closed, listens, second });
        Ok(())
    }

    fn order(&mut self, order: Order) -> Result<Reply, Failure> {
        if order == Order::Close {
            self.leave_second()?;
        }
        let Some(served) = &mut self.served else { return Err(not_open()) };
        match order {
            Order::Close => served.closed = true,
            Order::CheckSize => served.listens = true,
            _ => {}
        }
        served.worker.carry_out(order)
    }

    /// Lets go of the image. Its guest, if there is one, waits for a takeover.
    fn give_up(&mut self) -> Result<(), Failure> {
        self.leave_second()?;
        let Some(mut served) = self.served.take() else { return Ok(()) };
        served.worker.end_clients();
        served.worker.carry_out(Order::Stop)?;
        match served.closed {
            true => served.worker.carry_out(Order::EndClose).map(drop),
            false => {
                let closed = close(&served.device, &served.engine);
                closed.map_err(|e| Failure::Close(e.to_string()))?;
                // Complete as it is, it is not for the next process only.
                served.device.disk().iter().for_each(|disk| disk.let_go());
                Ok(())
            }
        }
    }

    /// Leaves the image complete. One that cannot be closed stays: it is served on.
    fn retire(&mut self) -> Result<(), Failure> {
        self.leave_second()?;
        let Some(served) = &mut self.served else { return Ok(()) };
        served.worker.end_clients();
        served.worker.carry_out(Order::Stop)?;
        if !served.closed {
            close(&served.device, &served.engine).map_err(|e| Failure::Close(e.to_string()))?;
        }
        self.give_up()?;
        // Without it the next one takes this one for killed, and does no harm.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let _ = names::open(self.config.run_dir.join(STOPPED), flags, Mode::from(0o600));
        Ok(())
    }
}

/// Tells what a guest's worker has to say.
fn tell(line: BorrowedFd<'_>, worker: &mut Worker<'_>) -> Result<(), ServeError> {
    worker.clear_reports()?;
    while let Some(report) = worker.report() {
        let failed = match &report {
            Report::Failed(failure) => Some(failure.clone()),
            Report::Violation { .. } => None,
        };
        say(line, &Said::Report(report), true).map_err(line_failed)?;
        // The guest's requests are in the table, and the next process does them again.
        if let Some(failure) = failed {
            return Err(failure.into());
        }
    }
    say(line, &Said::Look, true).map_err(line_failed)
}

fn not_open() -> Failure {
    let e = io::Error::other("it is not open: this is a bug in ferrite");
    Failure::host("serve the image", e)
}

fn not_here() -> Failure {
    Failure::host("do that for the other guest", io::Error::other("this is a bug in ferrite"))
}

fn line_failed(e: io::Error) -> ServeError {
    ServeError::host("go on without anybody who follows", e)
}
