//! The pace of background work, and how another thread ends it (store.md 15).

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use ferrite_io::reactor::Io;
use rustix::event::{EventfdFlags, eventfd};

/// The shortest rest: a timer costs more than a page.
const LEAST_REST: Duration = Duration::from_millis(4);

/// Ends work of another thread between two of its steps.
#[derive(Debug)]
pub struct Stop {
    is_asked: AtomicBool,
    wake: OwnedFd,
}

impl Stop {
    /// A stop that was not asked for yet.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn new() -> io::Result<Arc<Stop>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Stop { is_asked: AtomicBool::new(false), wake }))
    }

    /// Asks for the end.
    pub fn ask(&self) {
        self.is_asked.store(true, Ordering::Release);
        // The eventfd is never read, so all rests from now on end at once.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Whether the end was asked for.
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Acquire)
    }
}

/// The pace of one task: bytes a second, and the stop that ends it.
#[derive(Debug, Default)]
pub struct Pace {
    bytes_a_second: Option<u64>,
    stop: Option<Arc<Stop>>,
    /// Bytes that no rest has paid for.
    owed: Cell<u64>,
}

impl Pace {
    /// Work without rests, since a task waits for its end.
    pub fn unbounded() -> Pace {
        Pace::default()
    }

    /// Work of at most `bytes_a_second` until `stop` ends it. `None` for the bytes: without rests.
    pub fn bounded(bytes_a_second: Option<u64>, stop: Option<Arc<Stop>>) -> Pace {
        Pace { bytes_a_second, stop, owed: Cell::new(0) }
    }

    /// Whether to go on.
    ///
    /// # Errors
    /// `Interrupted`: the stop was asked for.
    pub fn check(&self) -> io::Result<()> {
        match self.stop.as_ref().is_some_and(|stop| stop.is_asked()) {
            true => Err(io::ErrorKind::Interrupted.into()),
            false => Ok(()),
        }
    }

    /// Waits until the stop is asked for, and gives the error of that. Without a stop it waits for ever.
    pub async fn ended(&self, io: &Io) -> io::Error {
        if let Some(stop) = &self.stop {
            while self.check().is_ok() {
                if let Err(e) = io.readable(stop.wake.as_raw_fd()).await {
                    return e;
                }
            }
            return io::ErrorKind::Interrupted.into();
        }
        std::future::pending().await
    }

    /// Counts bytes that were read or written, and rests if they were too many for the pace.
    ///
    /// # Errors
    /// As [`check`](Pace::check), or the kernel's.
    pub async fn used(&self, io: &Io, bytes: u64) -> io::Result<()> {
        let Some(rate) = self.bytes_a_second else { return self.check() };
        let owed = self.owed.get() + bytes;
        let rest = Duration::from_secs_f64(owed as f64 / rate.max(1) as f64);
        if rest < LEAST_REST {
            self.owed.set(owed);
            return self.check();
        }
        self.owed.set(0);
        self.rest(io, rest).await
    }

    /// Rests for a time, or until the stop is asked for.
    ///
    /// # Errors
    /// As [`used`](Pace::used).
    pub async fn rest(&self, io: &Io, time: Duration) -> io::Result<()> {
        self.check()?;
        let Some(stop) = &self.stop else { return io.sleep(time).await };
        let (mut asleep, mut told) =
            (pin!(io.sleep(time)), pin!(io.readable(stop.wake.as_raw_fd())));
        poll_fn(|cx| match asleep.as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(done),
            Poll::Pending => told.as_mut().poll(cx),
        })
        .await?;
        self.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, Machine};

    #[test]
    fn a_rest_is_paid_for_by_many_pages_and_ends_for_who_is_to_end() {
        let machine = Machine::new(1);
        let (port, mut reactor) = testing::port(&machine.world, &machine.path);
        let stop = Stop::new().unwrap();
        let pace = Pace::bounded(Some(1 << 20), Some(stop.clone()));
        let mut used = |bytes| {
            reactor.block_on(async { pace.used(&port.io, bytes).await.map(|()| pace.owed.get()) })
        };
        assert_eq!(used(4095).unwrap().unwrap(), 4095, "4 ms are 4,194 bytes");
        assert_eq!(used(4095).unwrap().unwrap(), 0);
        stop.ask();
        assert_eq!(used(1 << 40).unwrap().unwrap_err().kind(), io::ErrorKind::Interrupted);
        let e = reactor.block_on(async { pace.rest(&port.io, Duration::MAX).await }).unwrap();
        assert_eq!(e.unwrap_err().kind(), io::ErrorKind::Interrupted);
    }
}
