//! The follower's end of the line.
//!
//! A worker may be anybody's by now: it has a guest's rings, and images that guests have written. So
//! what it says is checked, bounded, and counted. Who says more than it was asked for is not heard any
//! more. And it may stop to answer, which must not keep us from ending.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use ferrite_io::clock::{Random, SplitMix64};
use ferrite_xen::hypervisor::DomId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::super::carrier::Carrier;
use super::super::error::ServeError;
use super::super::messages::{Failure, Order, Reply, Report, VERSION};
use super::wire::{Ask, Said, What, hear, say};
use crate::waker::Waker;

/// Most messages that nobody has asked for, between two orders. A queue has two at most: that its ring
/// is broken, and that it has failed.
const UNASKED: u32 = 256;
/// Most bytes of a text that is passed on. The longest value of xenstore has 4096.
const TEXT_BYTES: usize = 1024;
/// The size of an image is not asked for more often than this, whatever the worker says.
const ASK_AGAIN_MIN: Duration = Duration::from_millis(500);
/// And at least this often: no time of a worker's is too long for a clock.
const ASK_AGAIN_MAX: Duration = Duration::from_secs(60);

/// How long a second guest's worker is waited for, until it has the image open.
const JOINED_WITHIN: Duration = Duration::from_secs(2);

/// What came of an order, and of which.
type Answer = (u64, Result<Reply, Failure>);

/// The way to a worker of another process.
pub(in super::super) struct Line<'a> {
    fd: BorrowedFd<'a>,
    stop: &'a Waker,
    /// Nothing is waited for any longer than that.
    end: Option<Instant>,
    /// Of the last order. It begins anywhere: answers to a follower that is no more are nobody's.
    number: u64,
    reports: VecDeque<Report>,
    /// It is to be looked at all states.
    look: bool,
    /// Messages that nobody has asked for, since the last order.
    unasked: u32,
}

impl<'a> Line<'a> {
    pub(in super::super) fn new(fd: BorrowedFd<'a>, stop: &'a Waker) -> Line<'a> {
        let number = SplitMix64::from_system().next_u64();
        Line { fd, stop, end: None, number, reports: VecDeque::new(), look: false, unasked: 0 }
    }

    /// Has the image opened, unless it is open in this way. Another program than ours is told of: it may
    /// not know all that it is asked.
    pub(in super::super) fn open(
        &mut self,
        read_only: bool,
        keeps_all: bool,
    ) -> Result<(), Failure> {
        match self.ask(What::Open { read_only, keeps_all })? {
            Reply::Opened { version, program } => {
                let ours = env!("CARGO_PKG_VERSION");
                if (version, program.as_str()) != (VERSION, ours) {
                    tracing::info!(
                        "the disk is served by ferrite {program} ({version}), and this is ferrite \
                         {ours} ({VERSION}); ferrite upgrade has it served by this one"
                    );
                }
                Ok(())
            }
            reply => Err(Failure::Lost(format!("it has opened an image and says {reply:.60?}"))),
        }
    }

    /// On the second line: has this guest served beside the first, when the image is open for that. Who
    /// follows has to look at the disk's end, too: nothing is waited for longer than [`JOINED_WITHIN`].
    pub(in super::super) fn join(&mut self, read_only: bool, domid: DomId) -> Result<(), Failure> {
        self.end = Some(Instant::now() + JOINED_WITHIN);
        let joined = self.ask(What::Join { read_only, domid: domid.0 });
        self.end = None;
        joined.map(drop)
    }

    fn ask(&mut self, what: What) -> Result<Reply, Failure> {
        self.number = self.number.wrapping_add(1);
        self.unasked = 0;
        let ask = Ask { number: self.number, what };
        loop {
            match say(self.fd, &ask, false) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.wait(PollFlags::OUT)?,
                said => break said.map_err(lost)?,
            }
        }
        loop {
            match self.hear()? {
                // Whose guest is served no more has failed for that, and not at what was asked.
                Some((number, Err(e))) if number == self.number => {
                    return Err(self.lost().unwrap_or(e));
                }
                Some((number, result)) if number == self.number => return result,
                Some(_) => {}
                None => self.wait(PollFlags::IN)?,
            }
        }
    }

    /// That it has said that it goes on no more.
    fn lost(&self) -> Option<Failure> {
        self.reports.iter().find_map(|report| match report {
            Report::Failed(failure) => Some(failure.clone()),
            Report::Violation { .. } => None,
        })
    }

    /// Takes what has come, up to an answer. `None`: there is nothing more.
    fn hear(&mut self) -> Result<Option<Answer>, Failure> {
        loop {
            match hear(self.fd).map_err(lost)? {
                None => return Ok(None),
                Some(Said::Answer { number, mut result }) => {
                    self.count()?;
                    bound(&mut result);
                    return Ok(Some((number, result)));
                }
                Some(Said::Report(mut report)) => {
                    self.count()?;
                    bound_report(&mut report);
                    self.reports.push_back(report);
                }
                Some(Said::Look) => {
                    self.count()?;
                    self.look = true;
                }
            }
        }
    }

    fn count(&mut self) -> Result<(), Failure> {
        self.unasked += 1;
        match self.unasked > UNASKED {
            true => Err(Failure::Lost("it says more than it was asked for".to_owned())),
            false => Ok(()),
        }
    }

    /// Waits for the worker, but not when we are asked to stop, and not beyond the end.
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

impl Carrier for Line<'_> {
    fn carry_out(&mut self, order: Order) -> Result<Reply, Failure> {
        self.ask(What::Order(order))
    }

    fn reports_fd(&self) -> BorrowedFd<'_> {
        self.fd
    }

    fn clear_reports(&mut self) -> Result<(), Failure> {
        self.look = false;
        while self.hear()?.is_some() {}
        self.look = false;
        Ok(())
    }

    fn report(&mut self) -> Option<Report> {
        self.reports.pop_front()
    }

    fn has_news(&self) -> bool {
        self.look || !self.reports.is_empty()
    }

    fn growth_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn outlives_us(&self) -> bool {
        true
    }
}

/// Has a worker answer what is in flight and close its image: the next process of the disk finds all of
/// it in the image. The worker opens it again when its line is followed.
///
/// # Errors
/// [`ServeError::Close`]: what was answered is kept on this host, and the worker can be followed on.
/// [`ServeError::WorkerLost`]; [`ServeError::Left`]: `stop` was woken before, or it takes longer than
/// `within`.
pub fn retire(
    line: BorrowedFd<'_>,
    stop: &Waker,
    within: Option<Duration>,
) -> Result<(), ServeError> {
    let end = within.map(|within| Instant::now() + within);
    Line { end, ..Line::new(line, stop) }.ask(What::Retire)?;
    Ok(())
}

/// On the second line: has a worker forget this guest, whose disk is gone. One that is not there is
/// forgotten already.
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
    Line { end, ..Line::new(line, stop) }.ask(What::Part { domid: domid.0 })?;
    Ok(())
}

fn lost(e: io::Error) -> Failure {
    Failure::Lost(match e.kind() {
        io::ErrorKind::InvalidData => clean(&format!("it says what nobody understands: {e}")),
        _ => "its process has ended".to_owned(),
    })
}

/// What a worker has said is for logs, xenstore and a guest: nothing of it is without end.
fn bound(result: &mut Result<Reply, Failure>) {
    match result {
        Ok(Reply::Connected { how: text, .. } | Reply::Opened { program: text, .. }) => {
            *text = clean(text);
        }
        Ok(Reply::Size { ask_again: Some(ask_again), .. }) => {
            *ask_again = (*ask_again).clamp(ASK_AGAIN_MIN, ASK_AGAIN_MAX);
        }
        Ok(Reply::Done | Reply::Facts(_) | Reply::Size { .. }) => {}
        Err(failure) => bound_failure(failure),
    }
}

fn bound_report(report: &mut Report) {
    match report {
        Report::Violation { why, .. } => *why = clean(why),
        // It ends, or hangs at it: another queue's storage may be stuck. The next one is asked for.
        Report::Failed(failure) => {
            let why = ServeError::from(failure.clone()).to_string();
            *failure = Failure::Lost(clean(&format!("it goes on no more: {why}")));
        }
    }
}

fn bound_failure(failure: &mut Failure) {
    match failure {
        Failure::Refused(why)
        | Failure::OtherRings(why)
        | Failure::WrongImage(why)
        | Failure::Close(why)
        | Failure::Lost(why) => *why = clean(why),
        Failure::RunDir { what, why } | Failure::Host { what, why } => {
            (*what, *why) = (clean(what), clean(why));
        }
        Failure::Open(open) => {
            (open.what, open.why) = (clean(&open.what), clean(&open.why));
            open.help = clean(&open.help);
        }
        Failure::Left => {}
    }
}

/// One line of bounded length.
fn clean(text: &str) -> String {
    let most = text.char_indices().take_while(|(at, c)| at + c.len_utf8() <= TEXT_BYTES);
    most.map(|(_, c)| if c.is_control() { ' ' } else { c }).collect()
}
