//! The follower's end of the line.
//!
//! A worker may have been taken over: it has a guest's rings, and images that guests have written.
//! So its messages are checked, limited and counted. A worker that sends more than was requested is
//! dropped. It may also stop to reply, which must not keep the follower from ending.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_xen::hypervisor::DomId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::super::chain::ChainImage;
use super::super::error::ServeError;
use super::super::in_use::{ImageOrder, ImageReply};
use super::super::messages::{Failure, Order, Reply, Report};
use super::super::tune::Tune;
use super::super::volume::{VolumeOrder, VolumeReply};
use super::super::worker_handle::WorkerHandle;
use super::wire::{Message, Request, RequestKind, VERSION, receive_message, send_message};
use crate::waker::Waker;

/// Most unsolicited messages between two requests. A queue sends two at most: that its ring is
/// broken, and that it has failed.
const MAX_UNSOLICITED: u32 = 256;
/// The first version of the line, and the one from which on workers know [`Order::Tune`].
const FIRST: u32 = 1;
const TUNES: u32 = 2;
/// Most bytes of a text that is passed on. The longest value of xenstore has 4096.
const TEXT_BYTES: usize = 1024;
/// Most bytes of a path that is passed on.
const PATH_BYTES: usize = 4096;
/// The shortest interval between checks of the image's size, whatever the worker says.
const SIZE_INTERVAL_MIN: Duration = Duration::from_millis(500);
/// The longest interval between checks of the image's size. A longer one could overflow a clock.
const SIZE_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// How long a second guest waits until its worker has opened the image.
const JOIN_TIMEOUT: Duration = Duration::from_secs(2);

/// The number of a request and its result.
type NumberedReply = (u64, Result<Reply, Failure>);

/// A connection to a worker of another process.
pub(in super::super) struct Line<'a> {
    fd: BorrowedFd<'a>,
    stop: &'a Waker,
    /// The end of all waits, if there is one.
    end: Option<Instant>,
    /// Number of the last request. It starts at random: replies to an earlier follower are dropped.
    number: u64,
    /// The version that both ends speak, once the image was opened.
    version: u32,
    reports: VecDeque<Report>,
    /// Whether all states are to be read again.
    recheck: bool,
    /// Unsolicited messages since the last request.
    unsolicited: u32,
}

impl<'a> Line<'a> {
    pub(in super::super) fn new(fd: BorrowedFd<'a>, stop: &'a Waker) -> Line<'a> {
        let number = SplitMix64::from_system().next_u64();
        Line {
            fd,
            stop,
            end: None,
            number,
            version: FIRST,
            reports: VecDeque::new(),
            recheck: false,
            unsolicited: 0,
        }
    }

    /// Has the worker open the image, unless it is open in this mode. `defers`: it only looks at the
    /// image, and opens it when the guest connects. Logs a worker of another
    /// program. One that speaks an unknown version serves its guest on, and is not followed.
    pub(in super::super) fn open(
        &mut self,
        read_only: bool,
        keeps_all: bool,
        defers: bool,
    ) -> Result<(), Failure> {
        let open = RequestKind::Open { read_only, keeps_all, defers, version: VERSION.own };
        match self.request(open)? {
            Reply::Opened { version, program } => {
                let agreed = VERSION.agree(version);
                self.version =
                    agreed.map_err(|e| Failure::version("cannot follow the worker", &e))?;
                let ours = env!("CARGO_PKG_VERSION");
                if (version, program.as_str()) != (VERSION.own, ours) {
                    tracing::info!(
                        "the disk is served by ferrite {program} ({version}), and this is ferrite \
                         {ours} ({}); use ferrite upgrade to serve it by this one",
                        VERSION.own
                    );
                }
                Ok(())
            }
            reply => Err(Failure::Lost(format!(
                "it replied {reply:.60?} to a request to open the image"
            ))),
        }
    }

    /// Has the worker set this on the running disk, if there is anything to set. The inner error is
    /// the worker's, which serves the disk as before.
    pub(in super::super) fn tune(
        &mut self,
        tune: &Tune,
    ) -> Result<Result<(), ServeError>, Failure> {
        if tune.is_empty() {
            return Ok(Ok(()));
        }
        if self.version < TUNES {
            return Ok(Err(ServeError::Open {
                what: "cannot change the running disk".to_owned(),
                why: "its worker is of an older ferrite, which does not know these settings"
                    .to_owned(),
                help: "move it to this version first: ferrite upgrade".to_owned(),
                errno: None,
            }));
        }
        match self.request(RequestKind::Order(Order::Tune(tune.clone()))) {
            Ok(_) => Ok(Ok(())),
            Err(e @ (Failure::Lost(_) | Failure::Left)) => Err(e),
            Err(e) => Ok(Err(e.into())),
        }
    }

    /// Has the worker of a disk that is open without a guest serve this one next.
    pub(in super::super) fn name_guest(&mut self, domid: DomId) -> Result<(), Failure> {
        self.request(RequestKind::Order(Order::Guest(domid.0))).map(drop)
    }

    /// Waits until `stop` is woken, and reads and drops the worker's reports meanwhile: there is no
    /// guest that they could be about.
    ///
    /// # Errors
    /// [`Failure::Left`] when `stop` was woken; [`Failure::Lost`]: the worker is gone.
    pub(in super::super) fn idle(&mut self) -> Result<(), Failure> {
        loop {
            self.wait(PollFlags::IN)?;
            self.unsolicited = 0;
            self.clear_reports()?;
            self.reports.clear();
        }
    }

    /// On the second line: has the worker serve this guest beside the first one, when the image is
    /// open. The follower has to notice the disk's end, too, so it waits for [`JOIN_TIMEOUT`] at
    /// most.
    pub(in super::super) fn join(&mut self, read_only: bool, domid: DomId) -> Result<(), Failure> {
        self.end = Some(Instant::now() + JOIN_TIMEOUT);
        let joined = self.request(RequestKind::Join { read_only, domid: domid.0 });
        self.end = None;
        joined.map(drop)
    }

    fn request(&mut self, what: RequestKind) -> Result<Reply, Failure> {
        self.number = self.number.wrapping_add(1);
        self.unsolicited = 0;
        let request = Request { number: self.number, what };
        loop {
            match send_message(self.fd, &request, false) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::OUT)?,
                said => break said.map_err(lost)?,
            }
        }
        loop {
            match self.receive_message()? {
                // If the guest's connection has failed, that is the cause, and not this request.
                Some((number, Err(e))) if number == self.number => {
                    return Err(self.lost().unwrap_or(e));
                }
                Some((number, result)) if number == self.number => return result,
                Some(_) => {}
                None => self.wait(PollFlags::IN)?,
            }
        }
    }

    /// The worker's report that it cannot go on.
    fn lost(&self) -> Option<Failure> {
        self.reports.iter().find_map(|report| match report {
            Report::Failed(failure) => Some(failure.clone()),
            Report::Violation { .. } => None,
        })
    }

    /// Reads messages up to a reply. `None`: there are no more.
    fn receive_message(&mut self) -> Result<Option<NumberedReply>, Failure> {
        loop {
            match receive_message(self.fd).map_err(lost)? {
                None => return Ok(None),
                Some(Message::Reply { number, mut result }) => {
                    self.count_message()?;
                    limit_reply(&mut result);
                    return Ok(Some((number, result)));
                }
                Some(Message::Report(mut report)) => {
                    self.count_message()?;
                    limit_report(&mut report);
                    self.reports.push_back(report);
                }
                Some(Message::Recheck) => {
                    self.count_message()?;
                    self.recheck = true;
                }
            }
        }
    }

    fn count_message(&mut self) -> Result<(), Failure> {
        self.unsolicited += 1;
        match self.unsolicited > MAX_UNSOLICITED {
            true => Err(Failure::Lost("it sent too many unsolicited messages".to_owned())),
            false => Ok(()),
        }
    }

    /// Waits for the worker. It ends with `stop`, and at `end`.
    fn wait(&self, flags: PollFlags) -> Result<(), Failure> {
        let left = self.end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(Failure::Left);
        }
        let timeout = left.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        });
        let stop = self.stop.fd();
        let mut fds = [
            PollFd::from_borrowed_fd(self.fd, flags),
            PollFd::from_borrowed_fd(stop, PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(Failure::host("wait for the worker", e.into())),
        }
        match fds[1].revents().is_empty() {
            true => Ok(()),
            false => Err(Failure::Left),
        }
    }
}

impl WorkerHandle for Line<'_> {
    fn carry_out(&mut self, order: Order) -> Result<Reply, Failure> {
        self.request(RequestKind::Order(order))
    }

    fn reports_fd(&self) -> BorrowedFd<'_> {
        self.fd
    }

    fn clear_reports(&mut self) -> Result<(), Failure> {
        self.recheck = false;
        while self.receive_message()?.is_some() {}
        self.recheck = false;
        Ok(())
    }

    fn report(&mut self) -> Option<Report> {
        self.reports.pop_front()
    }

    fn has_pending_events(&self) -> bool {
        self.recheck || !self.reports.is_empty()
    }

    fn growth_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn is_separate_process(&self) -> bool {
        true
    }
}

/// Has a worker answer the requests in flight and close its image: the next process finds all data
/// in the image. The worker opens it again when its line is followed.
///
/// # Errors
/// [`ServeError::Close`]: answered writes are kept on this host, and the worker can be followed
/// again. [`ServeError::WorkerLost`]: the worker is gone. [`ServeError::Left`]: `stop` was woken,
/// or it takes longer than `within`.
pub fn retire(
    line: BorrowedFd<'_>,
    stop: &Waker,
    within: Option<Duration>,
) -> Result<(), ServeError> {
    let end = within.map(|within| Instant::now() + within);
    Line { end, ..Line::new(line, stop) }.request(RequestKind::Retire)?;
    Ok(())
}

/// As [`retire`], of a disk whose guest is suspended: another host may open the image.
///
/// # Errors
/// As [`retire`]. There are clients of NBD, or a worker of an older program does not know this
/// request.
pub fn leave(line: BorrowedFd<'_>, stop: &Waker) -> Result<(), ServeError> {
    Line::new(line, stop).request(RequestKind::Leave)?;
    Ok(())
}

/// As [`retire`], of a disk that may go on with another image: the guests' tables name none any
/// more. A worker that has closed the image does that only.
///
/// # Errors
/// As [`retire`]. A worker of an older program does not know this request.
pub fn pause(
    line: BorrowedFd<'_>,
    stop: &Waker,
    within: Option<Duration>,
) -> Result<(), ServeError> {
    let end = within.map(|within| Instant::now() + within);
    Line { end, ..Line::new(line, stop) }.request(RequestKind::Pause)?;
    Ok(())
}

/// Has a worker change or read the headers of the image that it has open. Other messages that come meanwhile are
/// dropped, so all states have to be read again afterwards.
///
/// # Errors
/// As [`retire`]; [`ServeError::Host`]: the image is not open, or the worker does not know the request.
pub fn ask_of_image(
    line: BorrowedFd<'_>,
    stop: &Waker,
    order: &ImageOrder,
) -> Result<ImageReply, ServeError> {
    let request = RequestKind::Order(Order::Image(order.clone()));
    match Line::new(line, stop).request(request)? {
        Reply::Image(reply) => Ok(reply),
        reply => Err(ServeError::WorkerLost(format!("it replied {reply:.60?} to a question"))),
    }
}

/// Has a worker change the volume of a store that it has open, or tell its size. As with [`ask_of_image`], all states
/// have to be read again afterwards.
///
/// # Errors
/// As [`ask_of_image`].
pub fn ask_of_volume(
    line: BorrowedFd<'_>,
    stop: &Waker,
    order: &VolumeOrder,
) -> Result<VolumeReply, ServeError> {
    let request = RequestKind::Order(Order::Volume(order.clone()));
    match Line::new(line, stop).request(request)? {
        Reply::Volume(reply) => Ok(reply),
        reply => Err(ServeError::WorkerLost(format!("it replied {reply:.60?} to a question"))),
    }
}

/// Has a worker tell the images of the chain that it has open, the leaf first; none if there is no chain. As with
/// [`ask_of_image`], all states have to be read again afterwards.
///
/// # Errors
/// As [`ask_of_image`].
pub fn ask_of_chain(line: BorrowedFd<'_>, stop: &Waker) -> Result<Vec<ChainImage>, ServeError> {
    match Line::new(line, stop).request(RequestKind::Order(Order::Chain))? {
        Reply::Chain(images) => Ok(images),
        reply => Err(ServeError::WorkerLost(format!("it replied {reply:.60?} to a question"))),
    }
}

/// On the second line: has a worker remove this guest, whose disk is gone. A guest that the worker
/// does not have counts as removed.
///
/// # Errors
/// As [`retire`].
pub fn part(
    line: BorrowedFd<'_>,
    domid: DomId,
    stop: &Waker,
    within: Option<Duration>,
) -> Result<(), ServeError> {
    let end = within.map(|within| Instant::now() + within);
    Line { end, ..Line::new(line, stop) }.request(RequestKind::Part { domid: domid.0 })?;
    Ok(())
}

fn lost(e: io::Error) -> Failure {
    Failure::Lost(match e.kind() {
        io::ErrorKind::InvalidData => sanitize(&format!("it sent a malformed message: {e}")),
        _ => "its process has ended".to_owned(),
    })
}

/// Limits a worker's values, which go to logs, to xenstore and to a guest.
fn limit_reply(result: &mut Result<Reply, Failure>) {
    match result {
        Ok(Reply::Connected { how: text, .. } | Reply::Opened { program: text, .. }) => {
            *text = sanitize(text);
        }
        Ok(Reply::Size { ask_again: Some(ask_again), .. }) => {
            *ask_again = (*ask_again).clamp(SIZE_INTERVAL_MIN, SIZE_INTERVAL_MAX);
        }
        Ok(Reply::Image(ImageReply::Refused { why: text, .. })) => *text = sanitize(text),
        Ok(Reply::Volume(VolumeReply::Refused { why, help })) => {
            (*why, *help) = (sanitize(why), sanitize(help));
        }
        Ok(Reply::Volume(VolumeReply::Done(_))) => {}
        Ok(Reply::Image(ImageReply::Facts(facts))) => {
            facts.parent = facts.parent.take().filter(|path| is_path(path));
        }
        // A chain ends where one of its names cannot be told.
        Ok(Reply::Chain(images)) => {
            let is_plain = |image: &ChainImage| {
                is_path(&image.path) && image.format.bytes().all(|b| b.is_ascii_alphanumeric())
            };
            images.truncate(images.iter().take_while(|image| is_plain(image)).count());
        }
        Ok(
            Reply::Done | Reply::Facts(_) | Reply::Size { .. } | Reply::Image(ImageReply::NotMine),
        ) => {}
        Err(failure) => limit_failure(failure),
    }
}

fn is_path(path: &str) -> bool {
    path.len() <= PATH_BYTES && !path.contains(char::is_control)
}

fn limit_report(report: &mut Report) {
    match report {
        Report::Violation { why, .. } => *why = sanitize(why),
        // The worker ends, or hangs since another queue's storage is stuck. The follower requests
        // the next one.
        Report::Failed(failure) => {
            let why = ServeError::from(failure.clone()).to_string();
            *failure = Failure::Lost(sanitize(&format!("it cannot go on: {why}")));
        }
    }
}

fn limit_failure(failure: &mut Failure) {
    match failure {
        Failure::Refused(why)
        | Failure::OtherRings(why)
        | Failure::WrongImage(why)
        | Failure::Close(why)
        | Failure::Lost(why) => *why = sanitize(why),
        Failure::RunDir { what, why } | Failure::Host { what, why } => {
            (*what, *why) = (sanitize(what), sanitize(why));
        }
        Failure::Open(open) => {
            (open.what, open.why) = (sanitize(&open.what), sanitize(&open.why));
            open.help = sanitize(&open.help);
        }
        Failure::Left => {}
    }
}

/// The text as one line of bounded length.
fn sanitize(text: &str) -> String {
    let most = text.char_indices().take_while(|(at, c)| at + c.len_utf8() <= TEXT_BYTES);
    most.map(|(_, c)| if c.is_control() { ' ' } else { c }).collect()
}
