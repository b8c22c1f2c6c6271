//! The thread that does the background work of a store in service (store.md 15).
//!
//! The thread has an engine and memory of its own, so it does not delay queues. It runs the bounded steps of
//! [`Live::run_background_task`]. It starts when the process has given up all rights that it does not need.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrite_disk_base::Port;
use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;
use ferrite_io::reactor::Reactor;

use super::live::{BackgroundTask, Live};
use super::pace::{Pace, Stop};

/// The most operations under way.
pub(super) const ENTRIES: u32 = 32;
/// The thread reads and writes pages no faster than this, unless a write waits for room.
const BYTES_A_SECOND: u64 = 64 << 20;
/// The pause before the thread looks for work again.
const IDLE: Duration = Duration::from_secs(1);
/// The time from the start to the first round of scrubbing.
const FIRST_SCRUB: Duration = Duration::from_secs(3600);
/// The time from the start of one round of scrubbing to that of the next.
const SCRUB_AGAIN: Duration = Duration::from_secs(24 * 3600);
/// The pause after a task that has failed. So the log has its error at most this often.
const FAILED: Duration = Duration::from_secs(30);

/// Makes engines for the service of a disk: memory, and operations under way.
pub type ServiceEngine = Arc<dyn Fn(Arc<Arena>, u32) -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// See the module text.
pub(super) struct Background {
    stop: Arc<Stop>,
    thread: JoinHandle<()>,
}

impl Background {
    /// Starts a thread that runs `work`: it calls [`work()`] for a store that stays open until
    /// [`end`](Background::end).
    pub(super) fn start(
        work: impl FnOnce(Arc<Stop>) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Background> {
        let stop = Stop::new()?;
        let theirs = stop.clone();
        let span = tracing::Span::current();
        let body = move || {
            let _in_span = span.enter();
            if let Err(e) = work(theirs) {
                tracing::warn!("the store does no work behind service: {e}");
            }
        };
        let thread = std::thread::Builder::new().name("store".to_owned()).spawn(body)?;
        Ok(Background { stop, thread })
    }

    /// Ends the thread between two steps. None of its operations is under way when this returns.
    pub(super) fn end(self) {
        self.stop.ask();
        if self.thread.join().is_err() {
            tracing::error!("a store's own thread has panicked: this is a bug in ferrite");
        }
    }
}

/// Runs the background work of a store until `stop` is asked for.
pub(super) fn work(
    live: &Live,
    (mut reactor, port): (Reactor, Port),
    stop: Arc<Stop>,
) -> io::Result<()> {
    let pace = Pace::bounded(Some(BYTES_A_SECOND), Some(stop));
    reactor.block_on(async { run_until_stopped(live, &port, &pace).await })
}

/// Runs task after task, until `pace` ends it or a failed sync has ended all changes of the store.
async fn run_until_stopped(live: &Live, port: &Port, pace: &Pace) {
    let mut scrub_at = Instant::now() + FIRST_SCRUB;
    while !live.is_faulty() {
        if Instant::now() >= scrub_at {
            live.begin_scrub();
            scrub_at = Instant::now() + SCRUB_AGAIN;
        }
        let rested = match live.run_background_task(port, pace).await {
            Ok(BackgroundTask::Ran) => Ok(()),
            Ok(BackgroundTask::Idle) => pace.rest(&port.io, IDLE).await,
            Err(e) if pace.check().is_ok() => {
                tracing::warn!("work of the store behind service has failed: {e}");
                pace.rest(&port.io, FAILED).await
            }
            Err(e) => Err(e),
        };
        if rested.is_err() {
            return;
        }
    }
}
