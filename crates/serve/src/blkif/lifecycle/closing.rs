//! Closing the image of a disk that is unplugged, before that is announced: a toolstack that hears
//! of it may open the image at once.
//!
//! A close that has failed is reported and not announced. What was answered is in the image's journal
//! on this host then, and another host would read an older state. The toolstack gives up after a
//! while, with an error; when it tries again, or we are started again, the image is closed once more.
//! That is so for the disk of a dead guest, too: its toolstack goes on all the same, with the error in
//! its log. Only storage that does not answer at all is not waited for.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_disk::{Disk, Session};

use super::attached::EngineFactory;
use super::messages::Failure;
use crate::log_limit::limited;
use crate::nbd::Clients;
use crate::path::device::Device;

/// How long the announcement waits for storage: libxl gives a backend 10 s to close.
const PATIENCE: Duration = Duration::from_secs(5);

/// Operations in flight for it.
const ENTRIES: u32 = 32;

/// An image that is being closed, on a thread of its own: storage may be stuck.
pub(super) struct Closing {
    thread: JoinHandle<io::Result<()>>,
    done: Receiver<()>,
}

impl Closing {
    /// Of a disk whose frontend is gone, after these clients.
    pub(super) fn begin(
        device: &Arc<Device>,
        engine: &EngineFactory,
        clients: Option<Clients>,
    ) -> Result<Self, Failure> {
        let (device, engine) = (device.clone(), engine.clone());
        let (tell, done) = channel();
        let span = tracing::Span::current();
        let body = move || {
            let _in_span = span.enter();
            clients.map(Clients::end);
            let closed = device.disk().and_then(|disk| {
                // Kept from here to there: the one that is unlocked is the one that was closed.
                let closed = close_disk(&device, disk.clone(), &engine);
                disk.unlock();
                closed
            });
            // Fails if nobody waits any more.
            let _ = tell.send(());
            closed
        };
        let thread = std::thread::Builder::new().name("close".to_owned()).spawn(body);
        let thread = thread.map_err(|e| Failure::host("start a thread", e))?;
        Ok(Closing { thread, done })
    }

    /// Waits until it is done, but not for ever. Whether it is.
    pub(super) fn wait_a_while(&self) -> bool {
        let done = self.done.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout);
        if !done {
            tracing::warn!(
                "storage takes long to close the image: the disk is said to be unplugged before"
            );
        }
        done
    }

    /// Waits until it is done.
    pub(super) fn wait(self) -> Result<(), Failure> {
        match self.thread.join() {
            Ok(closed) => closed.map_err(|e| Failure::Close(e.to_string())),
            Err(_) => Err(Failure::Close("a panic: this is a bug in ferrite".to_owned())),
        }
    }
}

/// Brings to the medium what was answered and no flush has asked for, when nobody is connected who
/// would see to it. A look at memory if there is nothing.
pub(super) fn save(device: &Arc<Device>, engine: &EngineFactory) {
    // A disk that is gone has nothing that could be saved.
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
            "cannot bring the image's metadata up to date: {e}; what was answered is kept on this \
             host until that works"
        );
    }
}

/// Makes an image complete for whoever opens it next, on whatever host: also a raw disk may have gone
/// through this one's page cache.
///
/// # Errors
/// Those of storage. What was answered is in the image's journal then, unless a sync has failed: then
/// what was not flushed is as after a power cut.
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
