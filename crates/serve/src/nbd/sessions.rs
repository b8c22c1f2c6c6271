//! The sessions of clients that name themselves, so that the rest of an older connection has ended before a newer one
//! begins (remotes.md 2, rule 1).

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_nbd::client::Session;

/// The connections that have a name.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    all: Mutex<Vec<Connection>>,
    ended: Condvar,
}

#[derive(Debug)]
struct Connection {
    name: Session,
    /// The number that tells it from one with the same name.
    number: u64,
    socket: UnixStream,
}

/// A connection with a name. It has ended when this is dropped: nothing of it is under way.
#[derive(Debug)]
pub(super) struct Named<'a> {
    sessions: &'a Sessions,
    number: u64,
}

impl Sessions {
    /// Names a connection. Those that it replaces are disconnected, and this waits until their requests have ended.
    /// `None`: they have not within `limit`, and the client is to be turned away.
    ///
    /// # Errors
    /// Out of descriptors.
    pub(super) fn begin(
        &self,
        name: Session,
        socket: &UnixStream,
        limit: Duration,
    ) -> io::Result<Option<Named<'_>>> {
        let socket = socket.try_clone()?;
        let end = Instant::now() + limit;
        let mut all = self.all();
        // An older one that comes here now waits for this one, and not the other way round.
        let number = all.last().map_or(0, |last| last.number + 1);
        all.push(Connection { name, number, socket });
        let named = Named { sessions: self, number };
        let is_older = |old: &Connection| old.number < number && name.replaces(&old.name);
        for old in all.iter().filter(|old| is_older(old)) {
            // It may be gone already.
            let _ = old.socket.shutdown(Shutdown::Both);
        }
        while all.iter().any(is_older) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(all);
                return Ok(None);
            }
            let waited = self.ended.wait_timeout(all, left);
            all = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(all);
        Ok(Some(named))
    }

    fn all(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Named<'_> {
    fn drop(&mut self) {
        self.sessions.all().retain(|connection| connection.number != self.number);
        self.sessions.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn session(process: u64, connection: u32) -> Session {
        Session { user: [1; 16], process, connection }
    }

    #[test]
    fn a_newer_connection_waits_for_the_end_of_the_older_one() {
        let sessions = Sessions::default();
        let pair = || UnixStream::pair().unwrap();
        let (old, mut theirs) = pair();
        let wait = Duration::from_secs(30);
        let first = sessions.begin(session(1, 0), &old, wait).unwrap().unwrap();
        // Another connection of the same process goes beside it.
        let beside = sessions.begin(session(1, 1), &pair().0, wait).unwrap();
        assert!(beside.is_some());
        let at_once = Duration::from_millis(10);
        assert!(sessions.begin(session(1, 0), &pair().0, at_once).unwrap().is_none());
        // It was disconnected, and has requests under way yet.
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
        std::thread::scope(|scope| {
            let newer =
                scope.spawn(|| sessions.begin(session(2, 0), &pair().0, wait).unwrap().is_some());
            drop(beside);
            assert!(!newer.is_finished());
            drop(first);
            assert!(newer.join().unwrap());
        });
    }
}
