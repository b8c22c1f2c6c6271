//! The worker's end of the line: a process that serves one disk and carries out requests.
//!
//! A follower may end at any moment, also between a request and its reply. So nothing here depends
//! on a particular follower: a repeated request is carried out again, or is done already.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::Disk;
use ferrite_host::clock::SystemClock;
use ferrite_host::frames::CLIENT_CHANNEL;
use ferrite_host::names;
use ferrite_xen::hypervisor::{DomId, Hypervisor};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};

use super::super::closing::close;
use super::super::config::WorkConfig;
use super::super::connected::EngineFactory;
use super::super::error::ServeError;
use super::super::in_use::ImageReply;
use super::super::messages::{Failure, OpenFailure, Order, Reply, Report};
use super::super::orphan::Start;
use super::super::run_dir::{RunFiles, STOPPED, release_tables, second};
use super::super::volume::VolumeReply;
use super::super::worker::Worker;
use super::super::worker_handle::WorkerHandle;
use super::deferred::{Deferred, Opening, OpeningKind};
use super::wire::{Message, Request, RequestKind, VERSION, receive_message, send_message};
use crate::path::device::Device;
use crate::polling::wake_up_ns;
use crate::waker::wait_for;

/// How long a follower that should exist may take to send its first request.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// An open disk that can be served. It includes what killed predecessors have left in journals.
pub struct Opened {
    /// The disk.
    pub disk: Disk,
    /// Builds the engine for its I/O.
    pub engine: EngineFactory,
}

/// The lines of a worker. Each has a guest and a follower.
#[derive(Clone, Copy)]
pub struct Lines<'a> {
    /// The line of the guest that the disk is attached to.
    pub first: &'a OwnedFd,
    /// The line of its stub domain, which may have the disk at the same time.
    pub second: &'a OwnedFd,
}

/// Serves the requests on both lines until one of them ends, and the NBD clients of the client
/// channel. `open` opens the image as its argument says.
///
/// It returns `Ok` if a line ends while no image is open: the disk is gone, and other disks of this
/// process go on.
///
/// # Errors
/// An error or the end of a line: there can be no follower any more. [`ServeError::Host`]: a queue
/// has failed, or the hypervisor [is used up](Hypervisor::is_used_up). The next process may
/// succeed.
pub fn work(
    lines: Lines<'_>,
    client_channel: &OwnedFd,
    hypervisor: &dyn Hypervisor,
    config: &WorkConfig,
    open: &mut dyn FnMut(Opening) -> Result<Opened, OpenFailure>,
) -> Result<(), ServeError> {
    work_from(Start::WaitForFollower, lines, client_channel, hypervisor, config, open)
}

/// As [`work`], of a worker that may have to take over a guest before any request comes.
///
/// # Errors
/// As [`work`]; besides, the image cannot be opened for that guest now, or an expected follower
/// sends no request.
pub fn work_from(
    start: Start,
    lines: Lines<'_>,
    client_channel: &OwnedFd,
    hypervisor: &dyn Hypervisor,
    config: &WorkConfig,
    open: &mut dyn FnMut(Opening) -> Result<Opened, OpenFailure>,
) -> Result<(), ServeError> {
    // It is measured once and now, while no guest waits.
    wake_up_ns();
    let (first, second) = (lines.first.as_fd(), lines.second.as_fd());
    let client_channel = Some(client_channel);
    let mut process = WorkerProcess {
        hypervisor,
        config,
        open,
        second,
        client_channel,
        served: None,
        deferred: None,
        pending_join: None,
    };
    match start {
        Start::WaitForFollower => {}
        Start::ExpectFollower => wait_for_first_request([first, second])?,
        Start::Orphan(orphan) => process.take_over_orphan(orphan)?,
        Start::Ahead { ahead, tune } => process.open_ahead(ahead, *tune)?,
    }
    loop {
        match process.turn(first) {
            Ok(()) => {}
            // The keeper has closed both lines. Another process may hold a copy of one for a
            // moment.
            Err(_) if process.served.is_none() && [first, second].into_iter().any(has_hung_up) => {
                return Ok(());
            }
            Err(e) => return Err(e),
        }
    }
}

fn has_hung_up(line: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(line, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Waits for the first request.
fn wait_for_first_request(lines: [BorrowedFd<'_>; 2]) -> Result<(), ServeError> {
    let requests = wait_for(lines, Some(FIRST_REQUEST_TIMEOUT));
    match requests.map_err(|e| ServeError::host("wait for orders", e))?.contains(&true) {
        true => Ok(()),
        false => {
            let why = "no follower sent a request: the next worker checks whether a daemon runs";
            Err(ServeError::host("go on with a guest", io::Error::other(why)))
        }
    }
}

/// Receives the next request. A newer follower may send one that this program does not know. It
/// gets an error, since it must be able to request the end.
pub(super) fn receive_request(line: BorrowedFd<'_>) -> io::Result<Option<Request>> {
    let Some(Request { number, what }) = receive_message::<Request<serde_json::Value>>(line)?
    else {
        return Ok(None);
    };
    match serde_json::from_value(what) {
        Ok(what) => Ok(Some(Request { number, what })),
        Err(e) => {
            let result =
                Err(Failure::host("carry out a request that this program does not know", e.into()));
            send_message(line, &Message::Reply { number, result }, true)?;
            Ok(None)
        }
    }
}

/// A worker's process, with or without an open image.
pub(super) struct WorkerProcess<'a> {
    hypervisor: &'a dyn Hypervisor,
    pub(super) config: &'a WorkConfig,
    pub(super) open: &'a mut dyn FnMut(Opening) -> Result<Opened, OpenFailure>,
    second: BorrowedFd<'a>,
    /// The client channel, until its other end is gone.
    client_channel: Option<&'a OwnedFd>,
    pub(super) served: Option<OpenImage<'a>>,
    /// An image that is opened when its guest connects.
    pub(super) deferred: Option<Deferred>,
    /// A request to join on the second line. It waits until the image is open and a follower has
    /// read the first guest's states.
    pending_join: Option<Request>,
}

/// An open image.
pub(super) struct OpenImage<'a> {
    pub(super) worker: Worker<'a>,
    device: Arc<Device>,
    engine: EngineFactory,
    read_only: bool,
    /// Whether the image is closed or being closed: it can only be closed again.
    closed: bool,
    /// Whether the growth watch is polled, after a check of the size.
    listens: bool,
    /// The stub domain of the guest, while it has the disk, too.
    second: Option<Second<'a>>,
}

struct Second<'a> {
    worker: Worker<'a>,
    domid: DomId,
    listens: bool,
}

/// The work that `select` has found, for each line.
#[derive(Clone, Copy)]
struct Ready {
    requests: [bool; 2],
    /// Lines with a report to send.
    reports: [bool; 2],
    /// Whether there is a client in the client channel.
    client: bool,
}

impl<'a> WorkerProcess<'a> {
    /// Waits, and does what there is to do.
    fn turn(&mut self, first: BorrowedFd<'_>) -> Result<(), ServeError> {
        let ready = self.select(first)?;
        self.send_reports(first, ready)?;
        if ready.client {
            self.open_for_others();
            self.accept_client();
        }
        if ready.requests[0]
            && let Some(request) = receive_request(first).map_err(line_failed)?
        {
            // A disk that stays is served to clients of NBD without a device of Xen.
            let needs_xen = !self.config.stays || request.what.connects();
            let result = self.carry_out(request.what);
            self.send_reply(first, request.number, result, needs_xen)?;
        }
        if ready.requests[1]
            && let Some(request) = receive_request(self.second).map_err(line_failed)?
        {
            self.pending_join = None;
            self.carry_out_second(request)?;
        }
        if let Some(request) = self.pending_join.take() {
            self.carry_out_second(request)?;
        }
        Ok(())
    }

    /// Waits for something to do.
    fn select(&self, first: BorrowedFd<'_>) -> Result<Ready, ServeError> {
        let served = self.served.as_ref();
        let second = served.and_then(|served| served.second.as_ref());
        let workers = [
            served.map(|served| (&served.worker, served.listens)),
            second.map(|second| (&second.worker, second.listens)),
        ];
        let fd = |i: usize| workers[i].map_or(first, |(worker, _)| worker.reports_fd());
        let growth = |i: usize| {
            let listens = workers[i].filter(|(_, listens)| *listens);
            listens.and_then(|(worker, _)| worker.growth_fd())
        };
        // The first line replaces a descriptor that is not waited for: an order on that is no growth.
        let growth_or_first = |i: usize| growth(i).unwrap_or(first);
        // Clients wait in the channel until the disk can be served.
        let takes = self.serves_others() || self.opens_for_others();
        let client_channel = self.client_channel.filter(|_| takes).map_or(first, OwnedFd::as_fd);
        let (grows, grows_second) = (growth_or_first(0), growth_or_first(1));
        let fds = [first, self.second, fd(0), fd(1), grows, grows_second, client_channel];
        let timeout = self.pause_for_others();
        let ready = wait_for(fds, timeout).map_err(|e| ServeError::host("wait for orders", e))?;
        let reports = |i: usize| {
            workers[i].is_some() && (ready[2 + i] || ready[4 + i] && growth(i).is_some())
        };
        let client = takes && ready[6];
        Ok(Ready { requests: [ready[0], ready[1]], reports: [reports(0), reports(1)], client })
    }

    /// Serves the next client of the client channel.
    fn accept_client(&mut self) {
        let (Some(served), Some(client_channel)) = (&mut self.served, self.client_channel) else {
            return;
        };
        match CLIENT_CHANNEL.try_receive(client_channel) {
            Ok(frame) => frame.into_iter().for_each(|frame| served.worker.accept(frame)),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => self.client_channel = None,
            Err(_) => {}
        }
    }

    /// Sends reports on both lines.
    fn send_reports(&mut self, first: BorrowedFd<'_>, ready: Ready) -> Result<(), ServeError> {
        let Some(served) = &mut self.served else { return Ok(()) };
        if ready.reports[0] {
            served.listens = false;
            send_reports(first, &mut served.worker)?;
        }
        if ready.reports[1]
            && let Some(second) = &mut served.second
        {
            second.listens = false;
            send_reports(self.second, &mut second.worker)?;
        }
        Ok(())
    }

    fn send_reply(
        &self,
        line: BorrowedFd<'_>,
        number: u64,
        result: Result<Reply, Failure>,
        needs_xen: bool,
    ) -> Result<(), ServeError> {
        let failed = result.is_err() && needs_xen;
        send_message(line, &Message::Reply { number, result }, true).map_err(line_failed)?;
        // Nothing can be opened here any more. The guests' requests are in their tables.
        if failed && self.hypervisor.is_used_up() {
            let e = io::Error::other("all devices of Xen are in use or unusable");
            return Err(ServeError::host("connect a guest", e));
        }
        Ok(())
    }

    /// Carries out a request of the second line. A guest that cannot join yet gets its reply later.
    fn carry_out_second(&mut self, Request { number, what }: Request) -> Result<(), ServeError> {
        let joins = matches!(what, RequestKind::Join { .. });
        if joins {
            self.open_for_others();
        }
        if joins && !self.serves_others() {
            self.pending_join = Some(Request { number, what });
            return Ok(());
        }
        let result = match what {
            RequestKind::Join { read_only, domid } => self.join(read_only, DomId(domid)),
            RequestKind::Part { domid } => self.part(DomId(domid)),
            RequestKind::Order(order) => self.order_second(order),
            RequestKind::Open { .. }
            | RequestKind::Retire
            | RequestKind::Leave
            | RequestKind::Pause => Err(wrong_line()),
        };
        self.send_reply(self.second, number, result, true)
    }

    /// Whether the stub domain and NBD clients may be served.
    fn serves_others(&self) -> bool {
        self.served.as_ref().is_some_and(|served| !served.closed && served.worker.has_begun())
    }

    /// Serves a second guest. One that has joined already is served on.
    fn join(&mut self, read_only: bool, domid: DomId) -> Result<Reply, Failure> {
        let Some(served) = &mut self.served else { return Err(not_open()) };
        if served.read_only != read_only {
            return Err(Failure::Open(OpenFailure {
                what: format!("cannot serve domain {domid} beside its guest"),
                why: "only one of the two may write to the disk".to_owned(),
                help: "attach it to both in the same mode (mode=)".to_owned(),
                in_use: false,
                errno: None,
            }));
        }
        // The older guest's disk is gone: the daemon serves one at a time beside the first.
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

    /// Removes a second guest, and the requests that it has left to a predecessor of this process.
    fn part(&mut self, domid: DomId) -> Result<Reply, Failure> {
        let Some(served) = &mut self.served else {
            RunFiles::new(&second(&self.config.run_dir)).remove();
            return Ok(Reply::Done);
        };
        let mut second = match served.second.take() {
            // The second guest is another domain's.
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
            // A failed flush is recorded for both guests in one place.
            Order::Enter => drop(served.worker.carry_out(Order::Enter)?),
            Order::CheckSize => second.listens = true,
            _ => {}
        }
        second.worker.carry_out(order)
    }

    /// Disconnects the second guest, since the image is to be closed. It waits until the image is
    /// open again, as after a death of the worker.
    fn leave_second(&mut self) -> Result<(), Failure> {
        let Some(served) = &mut self.served else { return Ok(()) };
        let Some(mut second) = served.second.take() else { return Ok(()) };
        second.worker.carry_out(Order::Stop)?;
        let why = "the disk of its guest is closed".to_owned();
        let report = Message::Report(Report::Failed(Failure::Close(why)));
        send_message(self.second, &report, true).map_err(|e| Failure::host("report the end", e))
    }

    fn carry_out(&mut self, what: RequestKind) -> Result<Reply, Failure> {
        match what {
            RequestKind::Open { read_only, keeps_all, defers, version } => {
                let agreed = VERSION.agree(version);
                agreed.map_err(|e| Failure::version("the worker refuses this daemon", &e))?;
                match defers {
                    true => self.look(read_only, keeps_all)?,
                    false => self.open(read_only, keeps_all)?,
                }
                let program = env!("CARGO_PKG_VERSION").to_owned();
                return Ok(Reply::Opened { version: VERSION.own, program });
            }
            RequestKind::Retire => self.retire()?,
            RequestKind::Leave => self.leave()?,
            RequestKind::Pause => {
                self.retire()?;
                release_tables(&self.config.run_dir)
                    .map_err(|e| Failure::run_dir("release the in-flight table", e))?;
            }
            RequestKind::Order(order) => return self.order(order),
            RequestKind::Join { .. } | RequestKind::Part { .. } => return Err(wrong_line()),
        }
        Ok(Reply::Done)
    }

    /// Opens the image in this mode. An image that is open in this mode stays open, and its guest
    /// goes on.
    pub(super) fn open(&mut self, read_only: bool, keeps_all: bool) -> Result<(), Failure> {
        if self.is_open(read_only)? {
            return Ok(());
        }
        self.open_image(Opening { read_only, kind: OpeningKind::Serve }, keeps_all)?;
        self.deferred = None;
        Ok(())
    }

    /// Whether the image is open in this mode. Closes an image that is open otherwise.
    pub(super) fn is_open(&mut self, read_only: bool) -> Result<bool, Failure> {
        let Some(served) = &self.served else { return Ok(false) };
        let is_open = !served.closed && served.read_only == read_only;
        if !is_open {
            // The toolstack has attached the disk once more.
            self.give_up()?;
        }
        Ok(is_open)
    }

    /// Opens the image, of which nothing is open.
    pub(super) fn open_image(&mut self, how: Opening, keeps_all: bool) -> Result<(), Failure> {
        let read_only = how.read_only;
        let Opened { disk, engine } = match (self.open)(how) {
            Ok(opened) => opened,
            Err(e) if e.in_use && how.kind == OpeningKind::AfterLook => {
                return Err(Failure::Open(e));
            }
            Err(e) => {
                // A second guest that waits to join gets the error, too.
                if let Some(Request { number, .. }) = self.pending_join.take() {
                    let result = Err(Failure::Open(e.clone()));
                    // The end of the line is found when it is read.
                    let _ = send_message(self.second, &Message::Reply { number, result }, true);
                }
                return Err(Failure::Open(e));
            }
        };
        let device = Device::new(disk, SystemClock::shared()).on_full(self.config.on_full);
        let device = Arc::new(device);
        let mut worker = Worker::new(self.hypervisor, &device, self.config, &engine)?;
        worker.keep_all(keeps_all);
        // After a failure before this point, other processes may open the image.
        if let Ok(disk) = device.disk() {
            disk.keep();
        }
        let (closed, listens, second) = (false, false, None);
        self.served =
            Some(OpenImage { worker, device, engine, read_only, closed, listens, second });
        Ok(())
    }

    pub(super) fn order(&mut self, order: Order) -> Result<Reply, Failure> {
        // A disk that stays is closed by [`retire`](Self::retire) only.
        let closes = order == Order::Close && !self.config.stays;
        if closes {
            self.leave_second()?;
        }
        if let Some(reply) = self.order_deferred(&order)? {
            return Ok(reply);
        }
        let Some(served) = &mut self.served else { return Err(not_open()) };
        match order {
            // The tool may change the file itself, once it is unlocked.
            Order::Image(_) if served.closed => return Ok(Reply::Image(ImageReply::NotMine)),
            Order::Volume(_) if served.closed => return Ok(Reply::Volume(VolumeReply::not_open())),
            Order::Chain if served.closed => return Ok(Reply::Chain(Vec::new())),
            Order::Close if closes => served.closed = true,
            Order::CheckSize => served.listens = true,
            _ => {}
        }
        served.worker.carry_out(order)
    }

    /// Closes the image. Its guest, if there is one, waits for a takeover.
    pub(super) fn give_up(&mut self) -> Result<(), Failure> {
        self.leave_second()?;
        let Some(mut served) = self.served.take() else { return Ok(()) };
        served.worker.end_clients();
        served.worker.carry_out(Order::Stop)?;
        match served.closed {
            true => served.worker.carry_out(Order::EndClose).map(drop),
            false => {
                let closed = close(&served.device, &served.engine);
                closed.map_err(|e| Failure::Close(e.to_string()))?;
                // The image is complete, so any process may open it.
                served.device.disk().iter().for_each(|disk| disk.let_go());
                Ok(())
            }
        }
    }

    /// Completes and closes the image. One that cannot be closed stays open and is served.
    pub(super) fn retire(&mut self) -> Result<(), Failure> {
        self.deferred = None;
        self.leave_second()?;
        let Some(served) = &mut self.served else { return Ok(()) };
        served.worker.end_clients();
        served.worker.carry_out(Order::Stop)?;
        if !served.closed {
            close(&served.device, &served.engine).map_err(|e| Failure::Close(e.to_string()))?;
        }
        self.give_up()?;
        // Without the mark the next worker takes this one for killed, which does no harm.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let _ = names::open(self.config.run_dir.join(STOPPED), flags, Mode::from(0o600));
        Ok(())
    }
}

/// Sends the reports of a guest's worker.
fn send_reports(line: BorrowedFd<'_>, worker: &mut Worker<'_>) -> Result<(), ServeError> {
    worker.clear_reports()?;
    while let Some(report) = worker.report() {
        let failed = match &report {
            Report::Failed(failure) => Some(failure.clone()),
            Report::Violation { .. } => None,
        };
        send_message(line, &Message::Report(report), true).map_err(line_failed)?;
        // The guest's requests are in the table, and the next process repeats them.
        if let Some(failure) = failed {
            return Err(failure.into());
        }
    }
    send_message(line, &Message::Recheck, true).map_err(line_failed)
}

fn not_open() -> Failure {
    let e = io::Error::other("it is not open: this is a bug in ferrite");
    Failure::host("serve the image", e)
}

fn wrong_line() -> Failure {
    Failure::host("do that for the other guest", io::Error::other("this is a bug in ferrite"))
}

fn line_failed(e: io::Error) -> ServeError {
    ServeError::host("go on without a follower", e)
}
