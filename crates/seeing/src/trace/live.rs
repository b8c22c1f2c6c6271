//! Records a running disk: the rings of all its queues are read as they are written.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use ferrite_serve::counters::{snapshot, stats_file};
use ferrite_serve::trace::RECORDS;
use ferrite_serve::trace::read::{News, Problem, Reader};
use rustix::time::{ClockId, clock_gettime};

use super::{LINES, Line, MOST_REQUESTS, MOST_SPANS, QUEUES, Trace};

/// The pauses between two readings, with few and with many new entries.
const PAUSES: (Duration, Duration) = (Duration::from_micros(500), Duration::from_micros(50));
/// The interval of checks for new queues.
const SCAN_NS: u64 = 20_000_000;

/// The limits of a recording.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The duration.
    pub time: Duration,
    /// The number of requests.
    pub requests: usize,
}

/// The reason why a disk cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// It has no trace: no guest or client is connected.
    #[error("there is no trace of it in {0}")]
    NotThere(PathBuf),
    /// A queue's trace cannot be read.
    #[error("{0}: {1}")]
    Queue(PathBuf, Problem),
}

/// Records the disk with this run directory from now on, until `Bounds` or `stop` end it.
///
/// # Errors
/// It has no trace, or one that cannot be read.
pub fn record(
    run_dir: &Path,
    bounds: Bounds,
    mut stop: impl FnMut() -> bool,
) -> Result<Trace, Failure> {
    let mut queues = Queues { run_dir: run_dir.to_owned(), readers: BTreeMap::new() };
    let mut trace = begin(run_dir);
    // Existing entries are from before.
    queues.scan(&mut trace, true)?;
    if queues.readers.is_empty() {
        return Err(Failure::NotThere(run_dir.to_owned()));
    }
    let end_ns = trace.from_ns.saturating_add(bounds.time.as_nanos() as u64);
    let most = bounds.requests.min(MOST_REQUESTS);
    let mut scan_at_ns = trace.from_ns + SCAN_NS;
    loop {
        let much = queues.look(&mut trace)?;
        trace.until_ns = now_ns();
        let is_over = trace.until_ns >= end_ns || stop();
        if is_over || trace.requests.len() >= most || trace.spans.len() >= MOST_SPANS {
            break;
        }
        if trace.until_ns >= scan_at_ns {
            scan_at_ns = trace.until_ns + SCAN_NS;
            queues.scan(&mut trace, false)?;
        }
        std::thread::sleep(if much { PAUSES.1 } else { PAUSES.0 });
    }
    trace.requests.truncate(most);
    trace.spans.truncate(MOST_SPANS);
    trace.requests.sort_by_key(|(queue, record)| (record.stages.taken_ns, *queue));
    trace.spans.sort_by_key(|(queue, span)| (span.to_ns, *queue));
    Ok(trace)
}

fn begin(run_dir: &Path) -> Trace {
    let disk = run_dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let counters = snapshot::read(&stats_file(run_dir));
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    Trace {
        disk,
        image: counters.map(|counters| counters.image).unwrap_or_default(),
        from_ns: now_ns(),
        began_unix_ns: since.as_nanos() as u64,
        ..Trace::default()
    }
}

/// The time of the queues' clock.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

struct Queues {
    run_dir: PathBuf,
    readers: BTreeMap<u16, Reader>,
}

impl Queues {
    fn path(&self, line: u16) -> PathBuf {
        self.run_dir.join(Line::of(line).file())
    }

    /// Finds new queues and clients, and those of a later connection or process, which have other files.
    fn scan(&mut self, trace: &mut Trace, is_first: bool) -> Result<(), Failure> {
        self.scan_lines(0..QUEUES, trace, is_first)?;
        self.scan_lines(QUEUES..LINES, trace, is_first)
    }

    fn scan_lines(
        &mut self,
        lines: Range<u16>,
        trace: &mut Trace,
        is_first: bool,
    ) -> Result<(), Failure> {
        for queue in lines {
            let path = self.path(queue);
            let inode = match std::fs::symlink_metadata(&path) {
                Ok(meta) => meta.ino(),
                // Their numbers have no gaps.
                Err(e) if e.kind() == io::ErrorKind::NotFound => break,
                Err(e) => return Err(Failure::Queue(path, e.into())),
            };
            if self.readers.get(&queue).is_some_and(|reader| reader.inode() == inode) {
                continue;
            }
            let opened = Reader::open(&path).and_then(|mut reader| {
                if is_first {
                    reader.from_now_on()?;
                }
                Ok(reader)
            });
            let reader = match opened {
                // It was removed meanwhile.
                Err(Problem::Io(e)) if e.kind() == io::ErrorKind::NotFound => break,
                opened => opened.map_err(|problem| Failure::Queue(path.clone(), problem))?,
            };
            if let Some(mut old) = self.readers.insert(queue, reader) {
                let last = old.look().map_err(|problem| Failure::Queue(path, problem))?;
                add(trace, queue, last);
            }
        }
        Ok(())
    }

    /// Adds new entries. `true`: there are so many that more may be lost soon.
    fn look(&mut self, trace: &mut Trace) -> Result<bool, Failure> {
        let mut much = false;
        for (queue, reader) in &mut self.readers {
            let news = reader.look();
            let news = news.map_err(|problem| {
                Failure::Queue(self.run_dir.join(Line::of(*queue).file()), problem)
            })?;
            let entries = news.records.len().max(news.spans.len()) as u64;
            much |= entries > RECORDS / 8 || news.lost_records > 0;
            add(trace, *queue, news);
        }
        Ok(much)
    }
}

fn add(trace: &mut Trace, queue: u16, news: News) {
    trace.requests.extend(news.records.into_iter().map(|record| (queue, record)));
    trace.spans.extend(news.spans.into_iter().map(|span| (queue, span)));
    trace.lost_requests = trace.lost_requests.saturating_add(news.lost_records);
    trace.lost_spans = trace.lost_spans.saturating_add(news.lost_spans);
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ferrite_serve::trace::{Record, Span, TraceRing, client_file};

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn bounds(requests: usize) -> Bounds {
        Bounds { time: LONG, requests }
    }

    fn ring(dir: &Path, queue: u16) -> TraceRing {
        TraceRing::create(&dir.join(format!("trace-{queue}"))).unwrap()
    }

    fn ids(trace: &Trace) -> Vec<(u16, u64)> {
        trace.requests.iter().map(|(queue, record)| (*queue, record.id)).collect()
    }

    #[test]
    fn what_comes_after_the_beginning_is_recorded_up_to_the_bound() {
        let dir = tempfile::tempdir().unwrap();
        let mut rings = [ring(dir.path(), 0), ring(dir.path(), 1)];
        rings[0].push(&Record { id: 99, ..Record::default() });
        let rings = Cell::new(Some(&mut rings));
        let trace = record(dir.path(), bounds(3), || {
            if let Some([zero, one]) = rings.take() {
                (0..2).for_each(|id| zero.push(&Record { id, ..Record::default() }));
                (5..9).for_each(|id| one.push(&Record { id, ..Record::default() }));
                one.span(&Span::default());
            }
            false
        });
        let trace = trace.unwrap();
        assert_eq!(ids(&trace), [(0, 0), (0, 1), (1, 5)]);
        assert_eq!((trace.spans.len(), trace.lost_requests), (1, 0));
        assert!(trace.from_ns > 0 && trace.until_ns >= trace.from_ns);
    }

    #[test]
    fn a_disk_that_is_connected_anew_is_recorded_on_and_what_was_lost_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let mut old = ring(dir.path(), 0);
        let turns = Cell::new(0);
        let trace = record(dir.path(), bounds(2000), || {
            turns.set(turns.get() + 1);
            if turns.get() == 1 {
                old.push(&Record { id: 1, ..Record::default() });
                let mut new = ring(dir.path(), 0);
                (0..2000).for_each(|id| new.push(&Record { id: 10 + id, ..Record::default() }));
            }
            // A later check of the folder finds it.
            turns.get() > 400
        });
        let trace = trace.unwrap();
        assert_eq!(ids(&trace)[0], (0, 1));
        assert_eq!(ids(&trace).last(), Some(&(0, 2009)));
        assert_eq!(trace.requests.len() as u64 + trace.lost_requests, 2001);
    }

    #[test]
    fn clients_of_nbd_are_recorded_beside_queues_also_those_that_come_later() {
        let dir = tempfile::tempdir().unwrap();
        let mut queue = ring(dir.path(), 0);
        let client = |number| TraceRing::create(&dir.path().join(client_file(number))).unwrap();
        let mut first = client(0);
        let turns = Cell::new(0);
        let trace = record(dir.path(), bounds(3), || {
            turns.set(turns.get() + 1);
            if turns.get() == 1 {
                queue.push(&Record { id: 1, ..Record::default() });
                first.push(&Record { id: 2, ..Record::default() });
                client(1).push(&Record { id: 3, ..Record::default() });
            }
            false
        });
        assert_eq!(ids(&trace.unwrap()), [(0, 1), (64, 2), (65, 3)]);
    }

    #[test]
    fn a_disk_without_a_trace_and_one_with_nonsense_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let error = record(dir.path(), bounds(1), || true).unwrap_err();
        assert!(matches!(error, Failure::NotThere(_)), "{error}");
        std::fs::write(dir.path().join("trace-0"), b"short").unwrap();
        let error = record(dir.path(), bounds(1), || true).unwrap_err().to_string();
        assert!(error.contains("trace-0: its contents are not valid: its length"), "{error}");
    }
}
