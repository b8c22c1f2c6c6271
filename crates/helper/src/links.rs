//! The medium, and the connections to it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrite_host::helper::{CONTROL, LINK};
use rustix::net::{Shutdown, shutdown};

use crate::budget::Budget;
use crate::session::Session;
use crate::{Fault, Medium, greeting};

/// Connections at a time. A disk has one for each queue.
const MAX_CONNECTIONS: usize = 128;

/// A medium, and what all connections to it share.
pub struct Links<M> {
    medium: M,
    pub(crate) budget: Arc<Budget>,
    sessions: Mutex<Vec<Arc<Session>>>,
}

impl<M: Medium> Links<M> {
    /// A medium without a connection.
    pub fn new(medium: M) -> Arc<Links<M>> {
        Arc::new(Links { medium, budget: Arc::default(), sessions: Mutex::default() })
    }

    /// The medium.
    pub fn medium(&self) -> &M {
        &self.medium
    }

    /// The medium again, when the last connection has let it go.
    pub fn into_medium(self) -> M {
        self.medium
    }

    /// Serves the streams that come through the starter's socket, until that is closed.
    pub fn take_from(self: &Arc<Self>, control: &OwnedFd) {
        while let Ok(mut frame) = CONTROL.receive(control) {
            if let Some(socket) = frame.files.pop().filter(|_| frame.bytes == LINK) {
                self.serve(socket);
            }
        }
    }

    /// Serves a client, on threads of its own. With too many others it is turned away.
    pub fn serve(self: &Arc<Self>, socket: OwnedFd) {
        let session = Arc::new(Session::new(socket));
        {
            let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
            if sessions.len() >= MAX_CONNECTIONS {
                return;
            }
            sessions.push(session.clone());
        }
        let links = self.clone();
        let started = std::thread::Builder::new().name("connection".into()).spawn({
            let session = session.clone();
            move || {
                session.run(&links);
                links.forget(&session);
            }
        });
        if started.is_err() {
            self.forget(&session);
        }
    }

    pub(crate) fn sessions(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn forget(&self, session: &Arc<Session>) {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|other| !Arc::ptr_eq(other, session));
    }

    /// Closes all connections. Our clients connect again at once, and repeat what was not answered.
    pub fn close_all(&self) {
        self.sessions().iter().for_each(|session| session.close());
    }

    /// Starts a thread that ends all connections when the medium has grown: NBD tells a client the size in its greeting only, and
    /// ours connects again at once. It repeats what was not answered.
    ///
    /// # Errors
    /// The kernel's.
    pub fn follow_size(self: &Arc<Self>, every: Duration) -> std::io::Result<()> {
        let weak = Arc::downgrade(self);
        std::thread::Builder::new().name("size".into()).spawn(move || {
            let mut known = None;
            while let Some(links) = weak.upgrade() {
                if let Some(bytes) = links.medium().bytes()
                    && known.replace(bytes).is_some_and(|known| bytes > known)
                {
                    links.close_all();
                }
                drop(links);
                std::thread::sleep(every);
            }
        })?;
        Ok(())
    }

    /// Ends all connections. False: requests were still under way at that time.
    pub fn end(&self, until: Instant) -> bool {
        self.sessions().iter().all(|session| session.end(until))
    }
}

/// Says to the clients that wait why there is no disk. They log it once; a helper is started for each of their attempts.
pub fn refuse_links(control: &OwnedFd, fault: &Fault) {
    let mut next = CONTROL.receive(control).ok();
    // A stream that comes behind the last look would end without a word. The starter cannot send it, and starts another helper.
    let _ = shutdown(control, Shutdown::Read);
    while let Some(frame) = next {
        for socket in frame.files {
            let _ = greeting::refuse(socket.as_fd(), fault);
        }
        next = CONTROL.try_receive(control).ok().flatten();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use ferrite_host::frames;

    use super::*;

    #[test]
    fn who_was_refused_cannot_send_a_stream_that_nobody_takes() {
        let (starter, control) = frames::pair().unwrap();
        let (client, theirs) = UnixStream::pair().unwrap();
        CONTROL.try_send(&starter, LINK, &[theirs.as_fd()]).unwrap();
        // The client leaves at once, and the refusal ends with it.
        drop(client);
        refuse_links(&control, &Fault::lasting("why", "help"));
        // The process still has its socket, as between the refusal and its end.
        assert!(CONTROL.try_send(&starter, LINK, &[theirs.as_fd()]).is_err());
        drop(control);
    }
}
