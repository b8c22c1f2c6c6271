//! One disk of one guest, from the moment its directory appears to its removal.
//!
//! [`serve`] is one level-triggered loop: wait for an event (`inbox.rs`), look at all states, ask
//! the state machine what follows (`xenbus.rs`), and do it (`carry_out.rs`). Events only say when to
//! look, so lost, merged and spurious ones are alike, and a guest that toggles its state makes work
//! only as fast as this loop looks (XSA-349, 350).
//!
//! The loop follows xenstore, and touches no ring, disk or file. The worker (`worker.rs`) does that,
//! and knows nothing of xenstore; what they say to each other is in `messages.rs`. With [`follow`] the
//! worker is another process, and what they say goes over a socket (`remote/`).

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use ferrite_io::clock::{Clock, SystemClock};
use ferrite_xen::hypervisor::{DomId, Hypervisor};
use ferrite_xen::store::{Store, StoreError};

use crate::blkif::negotiate::{DiskFacts, Offer};
use crate::log_limit::{LogLimits, limited};
use crate::path::device::Device;
use crate::polling::wake_up_ns;
use crate::waker::Waker;

mod attached;
mod attachment;
mod carrier;
mod carry_out;
mod closing;
mod config;
mod directory;
mod error;
mod growth;
mod heir;
mod inbox;
mod look;
mod messages;
mod orphan;
mod pace;
mod refusal;
mod remote;
mod reported;
mod run_dir;
mod sweep;
mod worker;
mod xenbus;

pub use attached::EngineFactory;
pub use attachment::{Attachment, report_failure};
pub use closing::close;
pub use config::{Attached, Config, FollowConfig, WorkConfig};
pub use error::ServeError;
pub use look::State;
pub use messages::OpenFailure;
pub use orphan::{Orphan, Start};
pub use remote::line::{part, retire};
pub use remote::work::{Lines, Opened, work, work_from};
pub use reported::clear_error as clear_failure;
pub use run_dir::{STOPPED, TABLE, forget_run_dir, forget_second, run_dir_name};
pub use sweep::sweep;

use attachment::DIRECTORY;
use carrier::Carrier;
use inbox::{Event, Wait};
use messages::{Failure, Order, Report};
use pace::Pace;
use remote::line::Line;
use worker::Worker;
use xenbus::Xenbus;

/// When xenstore is asked again that has not done what it was asked; twice as long each time, up to
/// the maximum.
const ASK_AGAIN: Duration = Duration::from_millis(10);
const ASK_AGAIN_MAX: Duration = Duration::from_secs(1);

/// When a connection is tried again that the host could not make.
const DELAY: Duration = Duration::from_millis(250);

/// The token of the watch on the frontend's state.
const FRONTEND: &str = "frontend";

/// How serving ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The disk was unplugged; the guest has let go of it.
    Unplugged,
    /// We were asked to stop. The guest keeps the disk and waits for a successor.
    Stopped,
    /// We were asked to stop, and the worker of another process was told nothing of that: it serves
    /// on, until somebody follows again.
    Left,
}

/// Serves `device` until it is unplugged or `stop` is woken.
///
/// # Errors
/// What only the administrator can mend. No xenstore state is changed then: a guest whose backend
/// goes to Closing loses its disk, one whose backend is gone waits (blkif.md 3.9).
pub fn serve(
    store: &mut Store,
    hypervisor: &dyn Hypervisor,
    device: &Arc<Device>,
    config: &Config,
    stop: &Waker,
) -> Result<Outcome, ServeError> {
    // Measured now, once: no guest waits for us yet.
    wake_up_ns();
    let mut worker = Worker::new(hypervisor, device, &config.work, &config.engine)?;
    let facts = carry_out::facts(&mut worker)?;
    let follow = &config.follow;
    let attachment = match find(store, follow, stop, Outcome::Stopped)? {
        Ok(attachment) => attachment,
        Err(outcome) => return Ok(outcome),
    };
    let (clock, log_limits) = (device.clock.clone(), &device.log_limits);
    let means = FollowMeans { store, worker: Box::new(worker), clock, log_limits, stop };
    Backend::new(means, follow, &facts, attachment)?.run()
}

/// Follows xenstore for a worker that is another process, until the disk is unplugged or `stop` is
/// woken. `line` leads to that process. What others have asked of it before does not matter.
///
/// # Errors
/// As [`serve`]; beside these, [`ServeError::Open`] and [`ServeError::WorkerLost`]. It may be called
/// again after any error, with the line of a worker that lives.
pub fn follow(
    store: &mut Store,
    line: BorrowedFd<'_>,
    config: &FollowConfig,
    log_limits: &LogLimits,
    stop: &Waker,
) -> Result<Outcome, ServeError> {
    follow_and_tell(store, line, config, log_limits, stop, || ())
}

/// The same; `opened` is called when the worker has the image open, before anybody is told of that.
///
/// # Errors
/// As [`follow`].
pub fn follow_and_tell(
    store: &mut Store,
    line: BorrowedFd<'_>,
    config: &FollowConfig,
    log_limits: &LogLimits,
    stop: &Waker,
    opened: impl FnOnce(),
) -> Result<Outcome, ServeError> {
    follow_a_line(store, line, config, log_limits, stop, |line, attachment| {
        line.open(attachment.read_only, !attachment.may_discard)?;
        opened();
        Ok(())
    })
}

/// The same of a worker's second line: of a stub domain whose guest has the same disk. `opened` is called
/// when the worker serves the guest's, and may serve the stub domain's.
///
/// # Errors
/// As [`follow`].
pub fn follow_second(
    store: &mut Store,
    line: BorrowedFd<'_>,
    config: &FollowConfig,
    log_limits: &LogLimits,
    stop: &Waker,
    opened: impl FnOnce(),
) -> Result<Outcome, ServeError> {
    follow_a_line(store, line, config, log_limits, stop, |line, attachment| {
        line.join(attachment.read_only, config.domid)?;
        opened();
        Ok(())
    })
}

fn follow_a_line(
    store: &mut Store,
    line: BorrowedFd<'_>,
    config: &FollowConfig,
    log_limits: &LogLimits,
    stop: &Waker,
    open: impl FnOnce(&mut Line<'_>, &Attachment) -> Result<(), Failure>,
) -> Result<Outcome, ServeError> {
    let attachment = match find(store, config, stop, Outcome::Left)? {
        Ok(attachment) => attachment,
        Err(outcome) => return Ok(outcome),
    };
    let followed = || {
        let mut line = Line::new(line, stop);
        open(&mut line, &attachment)?;
        let facts = carry_out::facts(&mut line)?;
        let clock = SystemClock::shared();
        let means = FollowMeans { store, worker: Box::new(line), clock, log_limits, stop };
        Backend::new(means, config, &facts, attachment)?.run()
    };
    match followed() {
        Err(ServeError::Left) => Ok(Outcome::Left),
        followed => followed,
    }
}

/// The attachment that is meant, or what follows from its end: `stopped`, if it was waited for.
fn find(
    store: &mut Store,
    config: &FollowConfig,
    stop: &Waker,
    stopped: Outcome,
) -> Result<Result<Attachment, Outcome>, ServeError> {
    let backend = &config.backend;
    if config.attached == Attached::Any {
        return Ok(Attachment::wait(store, backend, config.domid, stop)?.ok_or(stopped));
    }
    if let Some(attachment) = Attachment::read(store, backend, config.domid)? {
        return Ok(Ok(attachment));
    }
    // What comes under this name later is another one.
    for key in ["frontend", "state"] {
        if store.read(&format!("{backend}/{key}"))?.is_none() {
            return Ok(Err(Outcome::Unplugged));
        }
    }
    Err(ServeError::Attachment(format!("{backend} is not complete")))
}

/// What the half that follows xenstore works with.
struct FollowMeans<'a> {
    store: &'a mut Store,
    worker: Box<dyn Carrier + 'a>,
    clock: Arc<dyn Clock>,
    log_limits: &'a LogLimits,
    stop: &'a Waker,
}

/// The half of a backend that follows xenstore. It has no rings, no disk and no files: what is to
/// be done with those, the worker is told.
struct Backend<'a> {
    store: &'a mut Store,
    worker: Box<dyn Carrier + 'a>,
    /// Its directory, see [`FollowConfig::backend`].
    backend: &'a str,
    domid: DomId,
    devid: u32,
    clock: Arc<dyn Clock>,
    log_limits: &'a LogLimits,
    /// What the toolstack has said of the disk.
    attachment: Attachment,
    /// Which one that has to be.
    attached: &'a Attached,
    /// Our state is not the toolstack's 1 any more.
    has_begun: bool,
    /// What is offered, as far as this disk's requests fit into buffers.
    offer: Offer,
    /// What the frontend goes by: the offer that stands in xenstore, which may be a predecessor's.
    standing: Offer,
    stop: &'a Waker,
    /// What follows from all states.
    xenbus: Xenbus,
    /// What is waited for.
    wait: Wait,
    /// The frontend has written its state since the last look at it.
    moved: bool,
    /// The same of our own directory, which the toolstack and we write.
    directory_moved: bool,
    /// How often xenstore is asked.
    pace: Pace,
    /// How long it is left alone when it fails.
    pause: Duration,
    /// It is gone, and this was the last word.
    lost_store: Option<StoreError>,
    /// The worker tells when the medium may have grown.
    listens: bool,
    /// To so many sectors, and that is not published.
    grown: Option<u64>,
}

impl<'a> Backend<'a> {
    /// One that has seen nothing, of a disk that was attached so.
    fn new(
        means: FollowMeans<'a>,
        config: &'a FollowConfig,
        facts: &DiskFacts,
        attachment: Attachment,
    ) -> Result<Backend<'a>, ServeError> {
        let FollowMeans { store, worker, clock, log_limits, stop } = means;
        if attachment.read_only && !facts.read_only {
            let why = format!("{} is read-only, and its image is open for writing", config.backend);
            return Err(ServeError::Attachment(why));
        }
        let max_indirect_segments = config.offer.max_indirect_segments.min(facts.max_segments);
        let offer = Offer { max_indirect_segments, ..config.offer };
        let state = format!("{}/state", attachment.frontend);
        store.watch(&config.backend, DIRECTORY)?;
        store.watch(&state, FRONTEND)?;
        Ok(Backend {
            pace: Pace::new(clock.now_ns(), store.requests()),
            store,
            worker,
            backend: &config.backend,
            domid: config.domid,
            devid: config.devid,
            clock,
            log_limits,
            attachment,
            attached: &config.attached,
            has_begun: config.attached == Attached::Begun,
            offer,
            standing: offer,
            stop,
            xenbus: Xenbus::new(),
            wait: Wait::Anything(Some(Duration::ZERO)),
            moved: false,
            directory_moved: false,
            pause: ASK_AGAIN,
            lost_store: None,
            listens: false,
            grown: None,
        })
    }

    /// Nothing of this disk is left for a successor. Before the toolstack hears that: it may attach
    /// a disk of this name at once.
    fn remove_traces(&mut self) -> Result<(), ServeError> {
        self.order(Order::Forget)?;
        Ok(self.clear_error()?)
    }

    fn run(&mut self) -> Result<Outcome, ServeError> {
        loop {
            match self.turn() {
                Err(ServeError::Store(e)) if self.endures(&e) => self.endure(e),
                turned => {
                    self.pause = ASK_AGAIN;
                    if let Some(outcome) = turned? {
                        return self.lost_store.take().map_or(Ok(outcome), |e| Err(e.into()));
                    }
                }
            }
        }
    }

    /// Waits for something to change, looks at all states, and does what follows. The outcome, if this
    /// is the end.
    fn turn(&mut self) -> Result<Option<Outcome>, ServeError> {
        match self.select()? {
            Event::Stop => return self.stopped().map(Some),
            Event::Queue => {
                self.worker.clear_reports()?;
                self.hear_reports()?;
            }
            Event::Store | Event::Growth | Event::Time => {}
        }
        if self.owes()? {
            return Ok(None);
        }
        self.follow()
    }

    /// Hears what the worker has to say: all of it, whether or not xenstore can be told. Nothing wakes
    /// us for what is left.
    fn hear_reports(&mut self) -> Result<(), ServeError> {
        let (mut failed, mut told) = (None, Ok(()));
        while let Some(report) = self.worker.report() {
            match report {
                Report::Violation { queue, why } => {
                    let why = format!("queue {queue} stopped for good: {why}");
                    limited!(error, self.log_limits.connections, self.clock.now_ns(), "{why}");
                    told = told.and(self.report_error(&why));
                }
                Report::Failed(failure) => failed = failed.or(Some(failure)),
            }
        }
        match failed {
            Some(failure) => Err(failure.into()),
            None => Ok(told?),
        }
    }

    /// The end that was asked for. A worker that outlives us serves on.
    fn stopped(&mut self) -> Result<Outcome, ServeError> {
        if self.worker.outlives_us() {
            return Ok(Outcome::Left);
        }
        self.order(Order::Stop)?;
        Ok(Outcome::Stopped)
    }

    /// Whether the guest is better off if we stay. A worker that outlives us needs no connection that is
    /// lost: whoever follows next comes with another.
    fn endures(&self, e: &StoreError) -> bool {
        self.xenbus.is_connected() && !(e.is_fatal() && self.worker.outlives_us())
    }

    /// xenstore has failed us, and the guest's data does not depend on it (threats.md T12): it is left
    /// alone for a while; with the connection to it gone, until the end.
    fn endure(&mut self, e: StoreError) {
        limited!(
            error,
            self.log_limits.store,
            self.clock.now_ns(),
            "{e}; the guest is served on, but its states are not followed until this {}",
            if e.is_fatal() { "process is started again" } else { "works" }
        );
        // A look that failed may have had news.
        (self.moved, self.directory_moved) = (true, true);
        self.listens = false;
        if e.is_fatal() {
            self.wait = Wait::Silence(None);
            self.lost_store = Some(e);
        } else {
            self.wait = Wait::Silence(Some(self.pause));
            self.pause = (self.pause * 2).min(ASK_AGAIN_MAX);
        }
    }
}
