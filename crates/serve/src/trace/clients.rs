//! The traces of a disk's NBD clients: a file for each connected client, by its number.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Record, Span, TraceRing, client_file};

/// Most clients with a trace at a time.
pub const CLIENTS: u16 = 64;

/// The numbers in use, and the directory of the files.
#[derive(Debug)]
pub struct ClientTraces {
    run_dir: PathBuf,
    /// A bit for each number.
    in_use: Mutex<u64>,
}

/// The trace of one client, which ends when this is dropped. Its file stays until the next client
/// gets the number.
pub(crate) struct ClientTrace {
    ring: TraceRing,
    number: u16,
    traces: Arc<ClientTraces>,
}

impl ClientTraces {
    /// Traces in the run directory of the clients' disk.
    pub fn new(run_dir: &Path) -> Arc<ClientTraces> {
        Arc::new(ClientTraces { run_dir: run_dir.to_owned(), in_use: Mutex::new(0) })
    }

    /// Begins the trace of one more client, with the lowest free number, so that files have no
    /// gaps. `None`: all numbers are in use or the file cannot be made. The client is served
    /// without a trace then.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<ClientTrace> {
        let number = {
            let mut in_use = self.in_use();
            let number = in_use.trailing_ones() as u16;
            if number >= CLIENTS {
                return None;
            }
            *in_use |= 1 << number;
            number
        };
        match TraceRing::create(&self.run_dir.join(client_file(number))) {
            Ok(ring) => Some(ClientTrace { ring, number, traces: self.clone() }),
            Err(e) => {
                *self.in_use() &= !(1 << number);
                tracing::debug!("no trace of a client: {e}");
                None
            }
        }
    }

    fn in_use(&self) -> MutexGuard<'_, u64> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientTrace {
    pub(crate) fn push(&mut self, record: &Record) {
        self.ring.push(record);
    }

    pub(crate) fn span(&mut self, span: &Span) {
        self.ring.span(span);
    }
}

impl Drop for ClientTrace {
    fn drop(&mut self) {
        *self.traces.in_use() &= !(1 << self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_has_the_lowest_number_that_is_free() {
        let dir = tempfile::tempdir().unwrap();
        let traces = ClientTraces::new(dir.path());
        let mut all: Vec<_> = (0..CLIENTS).map(|_| traces.begin().unwrap()).collect();
        assert!(all.iter().map(|trace| trace.number).eq(0..CLIENTS));
        assert!(traces.begin().is_none(), "there are so many");
        all.remove(7);
        assert_eq!(traces.begin().unwrap().number, 7);
        drop(all);
        assert_eq!(traces.begin().unwrap().number, 0);
        assert!(dir.path().join("trace-nbd-63").exists());
    }

    #[test]
    fn without_a_folder_a_client_has_no_trace_and_no_number() {
        let dir = tempfile::tempdir().unwrap();
        let traces = ClientTraces::new(&dir.path().join("gone"));
        assert!(traces.begin().is_none());
        assert_eq!(*traces.in_use(), 0);
    }
}
