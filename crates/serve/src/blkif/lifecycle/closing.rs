//! Closing the image of an unplugged disk. It comes before the end is announced, since the
//! toolstack may open the image at once.
//!
//! A failed close is reported and not announced: the answered writes are in the image's journal on
//! this host, and another host would read an older state. The toolstack gives up after a while with
//! an error. When it tries again, or the backend starts again, the image is closed once more. This
//! holds for the disk of a dead guest, too: its toolstack goes on, with the error in its log. Only
//! storage that does not answer at all is not waited for.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_disk::{Disk, Session};

use super::connected::EngineFactory;
use super::messages::Failure;
use crate::log_limit::limited;
use crate::nbd::Clients;
use crate::others::Others;
use crate::path::device::Device;

/// How long the announcement waits for storage. libxl gives a backend 10 s to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Operations in flight of a session that closes or saves.
const ENTRIES: u32 = 32;

/// The close of an image, on a thread of its own since storage may be stuck.
pub(super) struct Closing {
    thread: JoinHandle<io::Result<()>>,
    done: Receiver<()>,
}

impl Closing {
    /// Begins to close the image, after these clients have ended.
    pub(super) fn begin(
        device: &Arc<Device>,
        engine: &EngineFactory,
        (clients, others): (Option<Clients>, Option<Others>),
    ) -> Result<Self, Failure> {
        let (device, engine) = (device.clone(), engine.clone());
        let (tell, done) = channel();
        let span = tracing::Span::current();
        let body = move || {
            let _in_span = span.enter();
            clients.map(Clients::end);
            if let Some(others) = others {
                others.end();
            }
            let closed = device.disk().and_then(|disk| {
                // The same disk is kept for both steps: the one that is unlocked is the one that
                // was closed.
                let closed = close_disk(&device, disk.clone(), &engine);
                disk.unlock();
                closed
            });
            // This fails if the waiting side is gone.
            let _ = tell.send(());
            closed
        };
        let thread = std::thread::Builder::new().name("close".to_owned()).spawn(body);
        let thread = thread.map_err(|e| Failure::host("start a thread", e))?;
        Ok(Closing { thread, done })
    }

    /// Waits for the close, but at most [`CLOSE_TIMEOUT`]. Returns whether it is done.
    pub(super) fn wait_a_while(&self) -> bool {
        let done = self.done.recv_timeout(CLOSE_TIMEOUT) != Err(RecvTimeoutError::Timeout);
        if !done {
            tracing::warn!(
                "storage is slow to close the image: the end of the disk is announced before"
            );
        }
        done
    }

    /// Waits until the close is done.
    pub(super) fn wait(self) -> Result<(), Failure> {
        match self.thread.join() {
            Ok(closed) => closed.map_err(|e| Failure::Close(e.to_string())),
            Err(_) => Err(Failure::Close("a panic: this is a bug in ferrite".to_owned())),
        }
    }
}

/// Writes answered data to the medium that no flush has requested, while no guest is connected. If
/// there are none it only reads memory.
pub(super) fn save(device: &Arc<Device>, engine: &EngineFactory) {
    // A disk that is gone has nothing to save.
    let Ok(disk) = device.disk() else { return };
    if device.flush_has_failed() || disk.read_only() || !disk.is_dirty() {
        return;
    }
    let saved = Session::new(disk.clone(), |arena| engine(arena, ENTRIES));
    let saved = saved.and_then(|mut session| {
        let port = session.port().clone();
        session.run(device.flush(&disk, &port))?
    });
    if let Err(e) = saved {
        limited!(
            error,
            device.log_limits.storage,
            device.clock.now_ns(),
            "cannot write the image's metadata: {e}; answered writes are kept on this \
             host until that works"
        );
    }
}

/// Completes an image, so that any host can open it next. A raw disk may have data in this host's
/// page cache, too.
///
/// # Errors
/// Errors of storage. Answered writes are in the image's journal then. If a sync has failed, the
/// image is as after a power cut, except for what was flushed.
pub fn close(device: &Device, engine: &EngineFactory) -> io::Result<()> {
    close_disk(device, device.disk()?, engine)
}

fn close_disk(device: &Device, disk: Arc<Disk>, engine: &EngineFactory) -> io::Result<()> {
    let keeps_nothing = disk.read_only() && !disk.has_metadata();
    if device.flush_has_failed() || keeps_nothing {
        return Ok(());
    }
    Session::new(disk, |arena| engine(arena, ENTRIES))?.close()
}
