//! One disk of one guest, from the moment its directory appears to its removal.
//!
//! [`serve`] is one level-triggered loop: look at all states, do what follows from them, wait for
//! something to change. Watch events only wake it, so lost, merged and spurious ones are alike,
//! and a guest that toggles its state makes work only as fast as this loop looks (XSA-349, 350).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::GrowthWatch;
use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;
use ferrite_io::pool::SLAB_BYTES;
use ferrite_xen::abi::SECTOR_BYTES;
use ferrite_xen::hypervisor::{DomId, Hypervisor, PAGE_SIZE};
use ferrite_xen::mover::Moving;
use ferrite_xen::store::{Store, StoreError};

use crate::connection::{Device, Waker};
use crate::counters::Counters;
use crate::log_limit::limited;
use crate::negotiate::Offer;
use crate::polling::wake_up_ns;
use crate::processors::Processors;
use crate::tuning::Tuning;

mod attached;
mod attachment;
mod closing;
mod connecting;
mod directory;
mod growth;
mod look;
mod pace;
mod refusal;
mod run_dir;
mod waiting;

pub use attachment::{Attachment, report_failure};
pub use closing::close;
pub use look::State;
pub use run_dir::{SERVED_RAW, STOPPED, run_dir_name, sweep};

use attached::Attached;
use attachment::DIRECTORY;
use closing::Closing;
use look::Look;
use pace::Pace;
use refusal::Refused;
use run_dir::{LATCH, RunDir};
use waiting::poll_all;

/// When xenstore is asked again that has not done what it was asked; twice as long each time, up to
/// the maximum.
const ASK_AGAIN: Duration = Duration::from_millis(10);
const ASK_AGAIN_MAX: Duration = Duration::from_secs(1);

/// When a connection is tried again that the host could not make.
const DELAY: Duration = Duration::from_millis(250);

/// The token of the watch on the frontend's state.
const FRONTEND: &str = "frontend";

/// Builds a queue's storage engine over the arena, for so many operations in flight; called on
/// the queue's own thread.
pub type EngineFactory = Arc<dyn Fn(Arc<Arena>, u32) -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// What is served to whom, and how.
pub struct Config {
    /// The backend's directory in xenstore, absolute or relative to our domain:
    /// `backend/vbd3/<domid>/<devid>`.
    pub backend: String,
    /// The guest.
    pub domid: DomId,
    /// Its virtual-device number.
    pub devid: u32,
    /// What is offered.
    pub offer: Offer,
    /// How data moves, and what may be mapped for it.
    pub moving: Moving,
    /// Bytes of the disk's buffer pool.
    pub pool_bytes: usize,
    /// A directory on tmpfs for the in-flight table and the trace rings.
    pub run_dir: PathBuf,
    /// What a successor finds in the run directory, under [`SERVED_RAW`], while a guest is connected.
    pub served_raw: Option<String>,
    /// Storage engines.
    pub engine: EngineFactory,
    /// No other guest has the disk: it is closed when it is unplugged, before that is announced.
    pub closes: bool,
    /// How queues work.
    pub tuning: Tuning,
    /// What they may use of processors.
    pub processors: Arc<Processors>,
    /// Where they count what they do; the caller may look at any time.
    pub counters: Counters,
}

/// How serving ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The disk was unplugged; the guest has let go of it.
    Unplugged,
    /// We were asked to stop. The guest keeps the disk and waits for a successor.
    Stopped,
}

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// xenstore's.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The attachment in xenstore is not ours to serve.
    #[error("{0}")]
    Attachment(String),
    /// The guest is connected, and its connection cannot be taken over.
    #[error("cannot take over the running guest: {0}")]
    TakeOver(String),
    /// The guest has let go of the disk, and storage failed when its image was to be closed.
    #[error("cannot close the image: {0}")]
    Close(#[source] io::Error),
    /// The run directory cannot be used now: there is no space, or another process works in it.
    /// That delays a connection, and ends nothing.
    #[error("cannot {what}: {source}")]
    RunDir {
        /// What was tried.
        what: String,
        /// The reason.
        source: io::Error,
    },
    /// This host's fault: no memory, no descriptors, a queue that failed.
    #[error("cannot {what}: {source}")]
    Host {
        /// What was tried.
        what: String,
        /// The reason.
        source: io::Error,
    },
}

impl ServeError {
    fn host(what: impl Into<String>, source: io::Error) -> Self {
        ServeError::Host { what: what.into(), source }
    }

    /// What was to be kept in the run directory could not be.
    fn run_dir(what: impl Into<String>, source: io::Error) -> Self {
        let what = what.into();
        match source.kind() {
            io::ErrorKind::WouldBlock => {
                let source = io::Error::other("another process serves this disk");
                ServeError::RunDir { what, source }
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                ServeError::RunDir { what, source }
            }
            _ => ServeError::Host { what, source },
        }
    }
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
    let control = Arc::new(Waker::new().map_err(|e| ServeError::host("make an eventfd", e))?);
    let offer = Offer {
        max_indirect_segments: config.offer.max_indirect_segments.min(largest_request(device)),
        ..config.offer
    };
    let Some(attachment) = Attachment::wait(store, &config.backend, config.domid, stop)? else {
        return Ok(Outcome::Stopped);
    };
    if attachment.read_only && !device.disk.read_only() {
        let why = format!("{} is read-only, and its image is open for writing", config.backend);
        return Err(ServeError::Attachment(why));
    }
    let frontend = attachment.frontend.clone();
    let pace = Pace::new(device.clock.now_ns(), store.requests());
    let mut backend = Backend {
        store,
        hypervisor,
        device,
        config,
        attachment,
        offer,
        control,
        stop,
        run_dir: None,
        delayed: false,
        moved: false,
        directory_moved: false,
        pace,
        requests: u64::MAX,
        grown: false,
    };
    backend.store.watch(&config.backend, DIRECTORY)?;
    backend.store.watch(&format!("{frontend}/state"), FRONTEND)?;
    backend.run(&frontend)
}

/// Segments of the largest request that always finds a buffer: one slab, less the block that a
/// request may reach into at its ends.
fn largest_request(device: &Device) -> u16 {
    let block = device.disk.block_bytes() as usize;
    let slack = if block > SECTOR_BYTES as usize { block } else { 0 };
    ((SLAB_BYTES - slack) / PAGE_SIZE) as u16
}

struct Backend<'a> {
    store: &'a mut Store,
    hypervisor: &'a dyn Hypervisor,
    device: &'a Arc<Device>,
    config: &'a Config,
    /// What the toolstack has said of the disk.
    attachment: Attachment,
    /// What is offered, as far as this disk's requests fit into buffers.
    offer: Offer,
    /// Woken by queues that have something to report.
    control: Arc<Waker>,
    stop: &'a Waker,
    /// Since the first connection.
    run_dir: Option<RunDir>,
    /// A connection could not be made for want of the host's, and is to be tried again.
    delayed: bool,
    /// The frontend has written its state since the last look at it.
    moved: bool,
    /// The same of our own directory, which the toolstack and we write.
    directory_moved: bool,
    /// How often xenstore is asked.
    pace: Pace,
    /// Answered when the size was last asked for.
    requests: u64,
    /// The size has grown and is not published.
    grown: bool,
}

impl Backend<'_> {
    /// The file that remembers a failed flush until the disk is attached again.
    fn latch_path(&self) -> PathBuf {
        self.config.run_dir.join(LATCH)
    }

    /// Makes the run directory with what has to be there before a guest can write, if it is not.
    fn enter_run_dir(&mut self) -> Result<(), ServeError> {
        let path = &self.config.run_dir;
        if self.run_dir.is_none() || !path.exists() {
            let what = format!("work in {}", path.display());
            self.run_dir = Some(RunDir::make(path).map_err(|e| ServeError::run_dir(what, e))?);
        }
        self.say_what_is_served().map_err(|e| ServeError::run_dir("note what is served", e))?;
        self.device
            .remember_in(&self.latch_path(), false)
            .map_err(|e| ServeError::run_dir("make room to remember failed flushes", e))
    }

    fn say_what_is_served(&self) -> io::Result<()> {
        let path = &self.config.run_dir;
        if let Some(text) = &self.config.served_raw {
            std::fs::write(path.join(SERVED_RAW), text)?;
        }
        match std::fs::remove_file(path.join(STOPPED)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Nothing of this disk is left for a successor. Before the toolstack hears that: it may attach
    /// a disk of this name at once.
    fn remove_traces(&mut self) -> Result<(), StoreError> {
        let existing = || RunDir::existing(&self.config.run_dir).ok().flatten();
        if let Some(dir) = self.run_dir.take().or_else(existing)
            && let Err(e) = dir.remove()
        {
            tracing::warn!("cannot remove {}: {e}", self.config.run_dir.display());
        }
        self.clear_error()
    }

    fn run(&mut self, frontend: &str) -> Result<Outcome, ServeError> {
        let mut look = self.look(frontend)?;
        if look.own == State::Initialising {
            // The toolstack writes 1 and we never do: a disk that was attached just now, and has
            // nothing of an older one of its name.
            self.remove_traces()?;
        } else if self.latch_path().exists() {
            self.device
                .remember_in(&self.latch_path(), false)
                .map_err(|e| ServeError::host("remember failed flushes", e))?;
        }
        let mut attached = None;
        while look.is_in_use() {
            match self.take_over(frontend, look) {
                Err(e @ ServeError::RunDir { .. }) => self.delay(&e)?,
                taken => {
                    attached = taken?;
                    break;
                }
            }
            if self.wait(Some(DELAY), None)? {
                return Ok(Outcome::Stopped);
            }
            look = self.look(frontend)?;
        }
        if look.is_in_use() {
            // Taken over, or set up anew when it is back.
        } else if look.online && look.is_fresh() {
            self.offer(State::InitWait)?;
            if !look.plugged {
                tracing::info!("waiting for the hotplug script to connect the disk");
            }
        }
        let mut refused = Refused::default();
        let mut growth = self.device.disk.growth_watch();
        let mut pause = ASK_AGAIN;
        loop {
            let ended = match self.turn(frontend, &mut attached, &mut refused, &mut growth) {
                Err(ServeError::Store(e)) if attached.is_some() => {
                    let ended = self.endure(e, pause, &mut attached)?;
                    pause = (pause * 2).min(ASK_AGAIN_MAX);
                    ended
                }
                ended => {
                    pause = ASK_AGAIN;
                    ended?
                }
            };
            if let Some(outcome) = ended {
                return Ok(outcome);
            }
        }
    }

    /// Looks once, does what follows, and waits for something to change. The outcome, if this is
    /// the end.
    fn turn(
        &mut self,
        frontend: &str,
        attached: &mut Option<Attached>,
        refused: &mut Refused,
        growth: &mut GrowthWatch,
    ) -> Result<Option<Outcome>, ServeError> {
        if let Some(outcome) = self.keep_pace(frontend, attached)? {
            return Ok(Some(outcome));
        }
        let look = self.look(frontend)?;
        if look.gone {
            self.detach(attached)?;
            return self.unplugged(false).map(Some);
        }
        if let Some(attached) = attached
            && !look.online
        {
            attached.hurry(self.device.clock.now_ns());
        }
        self.follow(frontend, look, attached, refused)?;
        if attached.is_none() {
            if look.is_unwanted() && !look.is_held() {
                return self.unplugged(true).map(Some);
            }
            closing::save(self.device, &self.config.engine);
        }
        let mut timeout = self.rest(growth, attached.is_some())?;
        if std::mem::take(&mut self.delayed) {
            timeout = Some(timeout.map_or(DELAY, |t| t.min(DELAY)));
        }
        if self.wait(timeout, growth.fd())? {
            return self.stopped(attached).map(Some);
        }
        self.control.clear();
        if let Some(attached) = attached {
            attached.check_queues(self)?;
        }
        Ok(None)
    }

    /// The end that was asked for.
    fn stopped(&mut self, attached: &mut Option<Attached>) -> Result<Outcome, ServeError> {
        attached.take().map_or(Ok(()), Attached::stop)?;
        Ok(Outcome::Stopped)
    }

    /// xenstore has failed us, and the guest's data does not depend on it (threats.md T12): waits
    /// for `pause` before it is asked again; with the connection to it gone, until the end.
    fn endure(
        &mut self,
        e: StoreError,
        pause: Duration,
        attached: &mut Option<Attached>,
    ) -> Result<Option<Outcome>, ServeError> {
        limited!(
            error,
            self.device.log_limits.store,
            self.device.clock.now_ns(),
            "{e}; the guest is served on, but its states are not followed until this {}",
            if e.is_fatal() { "process is started again" } else { "works" }
        );
        // A look that failed may have had news.
        (self.moved, self.directory_moved) = (true, true);
        let timeout = (!e.is_fatal()).then_some(pause);
        loop {
            let [_, stop] = poll_all([self.control.fd(), self.stop.fd()], timeout)?;
            self.control.clear();
            if stop {
                let outcome = self.stopped(attached)?;
                return if e.is_fatal() { Err(e.into()) } else { Ok(Some(outcome)) };
            }
            match attached.as_mut().map_or(Ok(()), |attached| attached.check_queues(self)) {
                Err(ServeError::Store(_)) | Ok(()) => {}
                Err(e) => return Err(e),
            }
            if !e.is_fatal() {
                return Ok(None);
            }
        }
    }

    /// What a predecessor had connected; none if that is not there and the frontend goes on from
    /// its state. One at work cannot: what it has in flight would never be answered.
    fn take_over(&mut self, frontend: &str, look: Look) -> Result<Option<Attached>, ServeError> {
        match Attached::take_over(self, frontend) {
            Ok(attached) => Ok(Some(attached)),
            // At 3 nothing is in flight: a resumed guest sets up new rings and does its requests
            // again (3.8). At 5, nobody had connected it, or not these rings: it gets its 5, and goes.
            Err(ServeError::TakeOver(why)) if look.front != State::Connected => {
                tracing::warn!("not taken over: {why}");
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// Does what follows from the frontend's state (blkif.md 3.6).
    fn follow(
        &mut self,
        frontend: &str,
        look: Look,
        attached: &mut Option<Attached>,
        refused: &mut Refused,
    ) -> Result<(), ServeError> {
        match look.front {
            // A fresh start, of a driver that may have died without closing: kexec, firmware.
            State::Initialising => {
                self.detach(attached)?;
                refused.reset();
                if look.own != State::InitWait && look.online {
                    self.offer(State::InitWait)?;
                }
            }
            State::Initialised | State::Connected => {
                let may_connect = look.online && look.plugged;
                if refused.is_waiting() || !may_connect && attached.is_none() {
                    return Ok(());
                }
                self.connect(frontend, look, attached, refused)?;
            }
            State::Closing => {
                refused.reset();
                self.set_state(look, State::Closing)?;
            }
            State::Closed | State::Unknown => {
                refused.reset();
                let was_attached = attached.is_some();
                self.detach(attached)?;
                // One that closes waits for our 6, whatever it has missed of us (3.6).
                let waits = look.front == State::Closed;
                let closes = matches!(look.own, State::Closing | State::Connected);
                // Otherwise that is announced when the image is closed, too.
                if (waits || was_attached || closes) && !look.is_unwanted() {
                    self.set_state(look, State::Closed)?;
                }
            }
            State::InitWait | State::Reconfiguring | State::Reconfigured => {}
        }
        Ok(())
    }

    /// The end of a disk that nobody holds. `announce`: the toolstack waits for our 6, and its own
    /// 5 may have come since we looked.
    fn unplugged(&mut self, announce: bool) -> Result<Outcome, ServeError> {
        let Config { engine, closes, .. } = self.config;
        let closing = closes.then(|| Closing::begin(self.device, engine)).transpose()?;
        if let Some(closing) = &closing {
            closing.wait_a_while();
        }
        self.remove_traces()?;
        let announced = if announce { self.write_state(State::Closed) } else { Ok(()) };
        closing.map_or(Ok(()), Closing::wait)?;
        announced?;
        Ok(Outcome::Unplugged)
    }

    fn detach(&mut self, attached: &mut Option<Attached>) -> Result<(), ServeError> {
        match attached.take() {
            Some(a) => a.detach(),
            None => Ok(()),
        }
    }
}
