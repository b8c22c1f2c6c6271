//! One disk of one guest, from the creation of its xenstore directory to its removal.
//!
//! [`serve`] is one level-triggered loop: wait for an event (`inbox.rs`), read all states, ask the
//! state machine what follows (`xenbus.rs`), and do it (`carry_out.rs`). Events only say when to
//! read, so lost, merged and spurious ones make no difference. A guest that toggles its state makes
//! work only as fast as this loop reads (XSA-349, 350).
//!
//! The loop follows xenstore, and touches no ring, disk or file. The worker (`worker.rs`) does
//! that, and knows nothing of xenstore. Their messages are in `messages.rs`. With [`follow`] the
//! worker is another process, and the messages pass a socket (`remote/`).

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::clock::{Clock, SystemClock};
use ferrite_xen::hypervisor::{DomId, Hypervisor};
use ferrite_xen::store::{Store, StoreError};
use ferrite_xen::xenbus::XenbusState;

use crate::blkif::negotiate::{DiskFacts, Offer};
use crate::log_limit::{LogLimits, limited};
use crate::path::device::Device;
use crate::polling::wake_up_ns;
use crate::waker::Waker;

mod ahead;
mod attachment;
mod carry_out;
mod chain;
mod closing;
mod config;
mod connected;
mod directory;
mod error;
mod growth;
mod in_use;
mod inbox;
mod messages;
mod orphan;
mod pace;
mod refusal;
mod remote;
mod reported;
mod run_dir;
mod states;
mod successor;
mod sweep;
mod tune;
mod volume;
mod worker;
mod worker_handle;
mod xenbus;

pub use ahead::hold;
pub use attachment::{Attachment, report_failure};
pub use chain::ChainImage;
pub use closing::close;
pub use config::{Ahead, Config, ExpectedAttachment, FollowConfig, WAIT_FOR_HOST, WorkConfig};
pub use connected::EngineFactory;
pub use error::ServeError;
pub use in_use::{Change, Facts, ImageOrder, ImageReply};
pub use messages::OpenFailure;
pub use orphan::{Orphan, Start};
pub use remote::deferred::{Opening, OpeningKind};
pub use remote::line::{ask_of_chain, ask_of_image, ask_of_volume, leave, part, pause, retire};
pub use remote::work::{Lines, Opened, work, work_from};
pub use reported::clear_error as clear_failure;
pub use run_dir::{STOPPED, TABLE, release_tables, remove_run_dir, remove_second, run_dir_name};
pub use sweep::{sweep, sweep_disk};
pub use tune::Tune;
pub use volume::{VolumeOrder, VolumeReply};

use attachment::DIRECTORY;
use inbox::{Event, Wait};
use messages::{Failure, Order, Report};
use pace::Pace;
use remote::line::Line;
use worker::Worker;
use worker_handle::WorkerHandle;
use xenbus::Xenbus;

/// The first pause before a failed operation on xenstore is tried again. It doubles with each
/// failure.
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause before a failed operation on xenstore is tried again.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// The pause after a connection that the host could not make.
const HOST_RETRY_PAUSE: Duration = Duration::from_millis(250);

/// The token of the watch on the frontend's state.
const FRONTEND: &str = "frontend";

/// How serving ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The disk was unplugged, and the guest has let go of it.
    Unplugged,
    /// `stop` was woken. The guest keeps the disk and waits for a successor.
    Stopped,
    /// `stop` was woken, and the worker is another process: it goes on until another follower
    /// connects.
    Left,
}

/// Serves `device` until it is unplugged or `stop` is woken.
///
/// # Errors
/// Failures that the administrator has to repair. No xenstore state is changed then: a guest whose
/// backend goes to Closing loses its disk, one whose backend is gone waits (blkif.md 3.9).
pub fn serve(
    store: &mut Store,
    hypervisor: &dyn Hypervisor,
    device: &Arc<Device>,
    config: &Config,
    stop: &Waker,
) -> Result<Outcome, ServeError> {
    // It is measured once and now, while no guest waits.
    wake_up_ns();
    let mut worker = Worker::new(hypervisor, device, &config.work, &config.engine)?;
    let facts = carry_out::facts(&mut worker)?;
    let follow = &config.follow;
    let attachment = match find(store, follow, stop, Outcome::Stopped)? {
        Ok(attachment) => attachment,
        Err(outcome) => return Ok(outcome),
    };
    let (clock, log_limits) = (device.clock.clone(), &device.log_limits);
    let means = FollowContext { store, worker: Box::new(worker), clock, log_limits, stop };
    Backend::new(means, follow, &facts, attachment)?.run()
}

/// Follows xenstore for a worker that is another process, until the disk is unplugged or `stop` is
/// woken. `line` leads to that process. Requests of earlier followers make no difference.
///
/// # Errors
/// As [`serve`], and [`ServeError::Open`] and [`ServeError::WorkerLost`]. After any error it may be
/// called again with the line of a running worker.
pub fn follow(
    store: &mut Store,
    line: BorrowedFd<'_>,
    config: &FollowConfig,
    log_limits: &LogLimits,
    stop: &Waker,
) -> Result<Outcome, ServeError> {
    follow_notifying(store, line, config, log_limits, stop, &Tune::default(), |_, _| Ok(()))
}

/// As [`follow`]. When the worker has opened the image, it is given the settings of `tune`, and
/// `opened` is called with the disk's facts and their result, before the guest or the toolstack is
/// told. A worker that does not take the settings serves the guest all the same. An error of
/// `opened` is returned, and the image stays open.
///
/// # Errors
/// As [`follow`].
pub fn follow_notifying(
    store: &mut Store,
    line: BorrowedFd<'_>,
    config: &FollowConfig,
    log_limits: &LogLimits,
    stop: &Waker,
    tune: &Tune,
    opened: impl FnOnce(&DiskFacts, Result<(), ServeError>) -> Result<(), ServeError>,
) -> Result<Outcome, ServeError> {
    let defers = config.defers && is_unconnected(store, config)?;
    let open = |line: &mut Line<'_>, attachment: &Attachment| {
        let read_only = config.ahead.map_or(attachment.read_only, |ahead| ahead.read_only);
        line.open(read_only, !attachment.may_discard, defers)?;
        if config.ahead.is_some() {
            line.name_guest(config.domid)?;
        }
        line.tune(tune)
    };
    follow_a_line(store, line, config, log_limits, stop, open, opened)
}

/// Whether no guest was connected. One that was is taken over with the image open.
fn is_unconnected(store: &mut Store, config: &FollowConfig) -> Result<bool, StoreError> {
    let state = store.read(&format!("{}/state", config.backend))?;
    Ok(XenbusState::parse(state.as_deref()) <= XenbusState::InitWait)
}

/// Follows xenstore on a worker's second line: for a stub domain whose guest has the same disk.
/// Calls `opened` when the worker serves the guest's disk and can serve the stub domain's.
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
    let join = |line: &mut Line<'_>, attachment: &Attachment| {
        line.join(attachment.read_only, config.domid)
    };
    follow_a_line(store, line, config, log_limits, stop, join, |_, ()| {
        opened();
        Ok(())
    })
}

fn follow_a_line<T>(
    store: &mut Store,
    line: BorrowedFd<'_>,
    config: &FollowConfig,
    log_limits: &LogLimits,
    stop: &Waker,
    open: impl FnOnce(&mut Line<'_>, &Attachment) -> Result<T, Failure>,
    opened: impl FnOnce(&DiskFacts, T) -> Result<(), ServeError>,
) -> Result<Outcome, ServeError> {
    let attachment = match find(store, config, stop, Outcome::Left)? {
        Ok(attachment) => attachment,
        Err(outcome) => return Ok(outcome),
    };
    let followed = || {
        let mut line = Line::new(line, stop);
        let found = open(&mut line, &attachment)?;
        let facts = carry_out::facts(&mut line)?;
        opened(&facts, found)?;
        let clock = SystemClock::shared();
        let means = FollowContext { store, worker: Box::new(line), clock, log_limits, stop };
        Backend::new(means, config, &facts, attachment)?.run()
    };
    match followed() {
        Err(ServeError::Left) => Ok(Outcome::Left),
        followed => followed,
    }
}

/// The configured attachment; or the outcome, if there is none. `stopped`: the outcome if the wait
/// for it was interrupted.
fn find(
    store: &mut Store,
    config: &FollowConfig,
    stop: &Waker,
    stopped: Outcome,
) -> Result<Result<Attachment, Outcome>, ServeError> {
    let backend = &config.backend;
    if config.attached == ExpectedAttachment::Any {
        return Ok(Attachment::wait(store, backend, config.domid, stop)?.ok_or(stopped));
    }
    if let Some(attachment) = Attachment::read(store, backend, config.domid)? {
        return Ok(Ok(attachment));
    }
    // A later attachment of this name is another one.
    for key in ["frontend", "state"] {
        if store.read(&format!("{backend}/{key}"))?.is_none() {
            return Ok(Err(Outcome::Unplugged));
        }
    }
    Err(ServeError::Attachment(format!("{backend} is not complete")))
}

/// The parts of a backend's half that follows xenstore.
struct FollowContext<'a> {
    store: &'a mut Store,
    worker: Box<dyn WorkerHandle + 'a>,
    clock: Arc<dyn Clock>,
    log_limits: &'a LogLimits,
    stop: &'a Waker,
}

/// The half of a backend that follows xenstore. It has no rings, no disk and no files: it orders
/// the worker to use them.
struct Backend<'a> {
    store: &'a mut Store,
    worker: Box<dyn WorkerHandle + 'a>,
    /// The path of its directory, see [`FollowConfig::backend`].
    backend: &'a str,
    domid: DomId,
    devid: u32,
    clock: Arc<dyn Clock>,
    log_limits: &'a LogLimits,
    /// The toolstack's keys of the disk.
    attachment: Attachment,
    /// The attachment that is to be served.
    attached: &'a ExpectedAttachment,
    /// Whether the backend's state has left the toolstack's 1.
    has_begun: bool,
    /// The features to offer, as far as this disk's requests fit into buffers.
    offer: Offer,
    /// The offer that the frontend has read from xenstore. A predecessor may have written it.
    standing: Offer,
    stop: &'a Waker,
    /// The state machine.
    xenbus: Xenbus,
    /// The events to wait for.
    wait: Wait,
    /// Whether the frontend has written its state since it was read last.
    frontend_changed: bool,
    /// Whether the backend's directory was written since it was read last, by the toolstack or by
    /// us.
    directory_changed: bool,
    /// The rate of requests to xenstore.
    pace: Pace,
    /// The pause after the next failure of xenstore.
    pause: Duration,
    /// The error that ended the connection to xenstore.
    lost_store: Option<StoreError>,
    /// Whether the worker reports growth of the medium.
    listens: bool,
    /// The new number of sectors of a medium that has grown, until it is published.
    grown: Option<u64>,
}

impl<'a> Backend<'a> {
    /// A backend that has read nothing yet.
    fn new(
        means: FollowContext<'a>,
        config: &'a FollowConfig,
        facts: &DiskFacts,
        attachment: Attachment,
    ) -> Result<Backend<'a>, ServeError> {
        let FollowContext { store, worker, clock, log_limits, stop } = means;
        if attachment.read_only && !facts.read_only {
            let why = format!("{} is read-only, and its image is open for writing", config.backend);
            return Err(ServeError::Attachment(why));
        }
        let max_indirect_segments = config.offer.max_indirect_segments.min(facts.max_segments);
        let max_queues = if facts.one_queue { 1 } else { config.offer.max_queues };
        let offer = Offer { max_indirect_segments, max_queues, ..config.offer };
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
            has_begun: config.attached == ExpectedAttachment::Begun,
            offer,
            standing: offer,
            stop,
            xenbus: Xenbus::new(),
            wait: Wait::Anything(Some(Duration::ZERO)),
            frontend_changed: false,
            directory_changed: false,
            pause: RETRY_PAUSE,
            lost_store: None,
            listens: false,
            grown: None,
        })
    }

    /// Removes everything that a successor could find. This comes before the end is announced: the
    /// toolstack may attach a disk of this name at once.
    fn remove_traces(&mut self) -> Result<(), ServeError> {
        self.order(Order::Forget)?;
        Ok(self.clear_error()?)
    }

    fn run(&mut self) -> Result<Outcome, ServeError> {
        loop {
            match self.turn() {
                Err(ServeError::Store(e)) if self.endures(&e) => self.endure(e),
                turned => {
                    self.pause = RETRY_PAUSE;
                    if let Some(outcome) = turned? {
                        return self.lost_store.take().map_or(Ok(outcome), |e| Err(e.into()));
                    }
                }
            }
        }
    }

    /// Waits for an event, reads all states, and does what follows. Returns the outcome at the end.
    fn turn(&mut self) -> Result<Option<Outcome>, ServeError> {
        match self.select()? {
            Event::Stop => return self.stopped().map(Some),
            Event::Queue => {
                self.worker.clear_reports()?;
                self.handle_reports()?;
            }
            Event::Store | Event::Growth | Event::Time => {}
        }
        if self.is_over_budget()? {
            return Ok(None);
        }
        self.follow()
    }

    /// Handles all reports of the worker, whether or not xenstore accepts them. No event announces
    /// reports that are left.
    fn handle_reports(&mut self) -> Result<(), ServeError> {
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

    /// Ends as `stop` demands. A worker of another process goes on.
    fn stopped(&mut self) -> Result<Outcome, ServeError> {
        if self.worker.is_separate_process() {
            return Ok(Outcome::Left);
        }
        self.order(Order::Stop)?;
        Ok(Outcome::Stopped)
    }

    /// Whether to go on after this error, for the guest's sake. A separate worker needs no lost
    /// connection: the next follower opens another one.
    fn endures(&self, e: &StoreError) -> bool {
        self.xenbus.is_connected() && !(e.is_fatal() && self.worker.is_separate_process())
    }

    /// Leaves xenstore alone for a while after an error, or for ever if the connection is gone. The
    /// guest's data do not depend on it (threats.md T12).
    fn endure(&mut self, e: StoreError) {
        limited!(
            error,
            self.log_limits.store,
            self.clock.now_ns(),
            "{e}; the guest is still served, but its states are not followed until this {}",
            if e.is_fatal() { "process is started again" } else { "works" }
        );
        // A read that failed may have missed a change.
        (self.frontend_changed, self.directory_changed) = (true, true);
        self.listens = false;
        if e.is_fatal() {
            self.wait = Wait::Silence(None);
            self.lost_store = Some(e);
        } else {
            self.wait = Wait::Silence(Some(self.pause));
            self.pause = (self.pause * 2).min(RETRY_PAUSE_MAX);
        }
    }
}
