//! A connected frontend: its queues with their threads, and the table that they leave for a
//! successor.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ferrite_disk::Disk;
use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;
use ferrite_io::pool::{Growth, HostMemory, Others, Pool};
use ferrite_xen::abi::MAX_DIRECT_SEGMENTS;
use ferrite_xen::hypervisor::{DomId, Hypervisor, HypervisorError, Link, PAGE_SIZE};
use ferrite_xen::mover::{Mover, Moving};
use ferrite_xen::ring::BackRing;

use super::messages::{Failure, Report, Rings};
use super::run_dir::RunFiles;
use super::successor::TableSuccessor;
use crate::blkif::connection::Connection;
use crate::blkif::inflight::{Identity, QueueTable, Table, TableError, Unanswered};
use crate::blkif::negotiate::Wanted;
use crate::blkif::queue::{Parts, Queue, QueueEnd, QueueEvent};
use crate::counters::Counters;
use crate::log_limit::limited;
use crate::path::device::Device;
use crate::path::gate::Side;
use crate::path::shared::Shared;
use crate::processors::Processors;
use crate::trace::TraceRing;
use crate::tuning::Tuning;
use crate::waker::Waker;

/// Operations that an engine may have in flight besides a ring's requests: the event channel, the
/// waker, and steps of tasks.
const EXTRA_OPERATIONS: u32 = 32;

/// Builds a queue's storage engine over the arena, for this number of operations in flight. It is
/// called on the queue's own thread.
pub type EngineFactory = Arc<dyn Fn(Arc<Arena>, u32) -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// The parts that connections to a disk are made of.
pub(super) struct ConnectionContext<'a> {
    pub(super) hypervisor: &'a dyn Hypervisor,
    pub(super) domid: DomId,
    pub(super) device: Arc<Device>,
    /// The side of the guest that is served.
    pub(super) side: Side,
    pub(super) files: RunFiles,
    /// Keeps the image's name in the in-flight table up to date.
    pub(super) successor: Arc<TableSuccessor>,
    pub(super) moving: Moving,
    pub(super) pool_bytes: usize,
    pub(super) host_memory: Option<Arc<HostMemory>>,
    pub(super) engine: EngineFactory,
    pub(super) tuning: Tuning,
    pub(super) processors: Arc<Processors>,
    pub(super) counters: Counters,
    /// Woken by queues that have a report.
    pub(super) control: Arc<Waker>,
}

/// A message of a queue's thread to the control thread.
enum Message {
    Event(QueueEvent),
    End(QueueEnd),
}

/// A connected frontend.
pub(super) struct ConnectedFrontend {
    wanted: Wanted,
    /// The guest, see [`Rings::guest`].
    guest: String,
    connection: Arc<Connection>,
    threads: Vec<JoinHandle<()>>,
    messages: Receiver<(usize, Message)>,
    table_path: PathBuf,
    moving: Moving,
    hypervisor: &'static str,
}

/// A queue before its thread runs.
struct PreparedQueue {
    ring: BackRing,
    table: QueueTable,
    replay: Vec<Unanswered>,
}

impl ConnectedFrontend {
    /// Connects a frontend that has no requests in flight.
    pub(super) fn connect(
        context: &ConnectionContext<'_>,
        rings: Rings,
    ) -> Result<ConnectedFrontend, Failure> {
        let wanted = &rings.wanted;
        let moving = moving(context, wanted);
        let connection = new_connection(context, &rings, moving.mover)?;
        let mut attached = Vec::new();
        for i in 0..wanted.queues.len() {
            let link = new_link(context, wanted, i, &moving)?;
            attached.push(
                BackRing::attach(link, wanted.protocol)
                    .map_err(|e| Failure::Refused(format!("queue {i}: {e}")))?,
            );
        }
        let table = table(context, &rings, Table::create)?.map_err(|e| {
            let kind = match &e {
                TableError::Io { source, .. } => source.kind(),
                _ => std::io::ErrorKind::Other,
            };
            Failure::run_dir("make the in-flight table", std::io::Error::new(kind, e))
        })?;
        let prepared = attached
            .into_iter()
            .zip(table.into_queues())
            .map(|(ring, table)| {
                table.start(ring.req_cons(), ring.rsp_prod());
                PreparedQueue { ring, table, replay: Vec::new() }
            })
            .collect();
        ConnectedFrontend::start(context, rings, connection, prepared, moving)
    }

    /// Takes over a frontend that a predecessor had connected (blkif.md 3.9). Returns the number of
    /// its requests that are repeated.
    ///
    /// This process holds the image's lock, so the predecessor and all its I/O are gone: the lock
    /// is on the open file that its last operation used.
    pub(super) fn take_over(
        context: &ConnectionContext<'_>,
        rings: Rings,
    ) -> Result<(ConnectedFrontend, usize), Failure> {
        let refuse = |why: String| Failure::Refused(why);
        let table = table(context, &rings, Table::open)?.map_err(|e| {
            let why = e.to_string();
            match e {
                TableError::OtherRings { .. } => Failure::OtherRings(why),
                TableError::OtherImage { .. } => Failure::WrongImage(why),
                _ => refuse(why),
            }
        })?;
        let wanted = &rings.wanted;
        let moving = moving(context, wanted);
        let connection = new_connection(context, &rings, moving.mover)?;
        let mut prepared = Vec::new();
        let mut undone = 0;
        for (i, table) in table.into_queues().into_iter().enumerate() {
            let link = new_link(context, wanted, i, &moving)?;
            let resume = table
                .resume(BackRing::shared_rsp_prod(&*link))
                .ok_or_else(|| refuse(format!("queue {i}: the guest has changed the ring")))?;
            let ring = BackRing::resume(link, wanted.protocol, resume.req_cons, resume.rsp_prod)
                .map_err(|e| refuse(format!("queue {i}: {e}")))?;
            undone += resume.unanswered.len();
            prepared.push(PreparedQueue { ring, table, replay: resume.unanswered });
        }
        // The number is set before any of these requests begins.
        context.device.expect_replays(context.side, undone);
        Ok((ConnectedFrontend::start(context, rings, connection, prepared, moving)?, undone))
    }

    fn start(
        context: &ConnectionContext<'_>,
        rings: Rings,
        connection: Arc<Connection>,
        prepared: Vec<PreparedQueue>,
        moving: Moving,
    ) -> Result<ConnectedFrontend, Failure> {
        // All trace rings are created before the first queue works.
        let traces: Vec<_> = (0..prepared.len())
            .map(|i| TraceRing::create(&context.files.trace(i)))
            .collect::<Result<_, _>>()
            .map_err(|e| Failure::run_dir("make a trace ring", e))?;
        context.device.begin_service(&context.engine);
        let (sender, messages) = channel();
        let mut attached = ConnectedFrontend {
            wanted: rings.wanted,
            guest: rings.guest,
            connection,
            threads: Vec::new(),
            messages,
            table_path: context.files.table(),
            moving,
            hypervisor: context.hypervisor.name(),
        };
        for (index, (prepared, trace)) in prepared.into_iter().zip(traces).enumerate() {
            match attached.spawn(context, index, prepared, trace, sender.clone()) {
                Ok(thread) => attached.threads.push(thread),
                Err(e) => {
                    attached.join();
                    return Err(e);
                }
            }
        }
        Ok(attached)
    }

    fn spawn(
        &self,
        context: &ConnectionContext<'_>,
        index: usize,
        prepared: PreparedQueue,
        trace: TraceRing,
        sender: Sender<(usize, Message)>,
    ) -> Result<JoinHandle<()>, Failure> {
        let connection = self.connection.clone();
        let engine = context.engine.clone();
        let control = context.control.clone();
        // The queue's log lines name the same disk.
        let span = tracing::Span::current();
        let body = move || {
            let _in_span = span.enter();
            let gone = ThreadGuard { index, sender, control };
            let PreparedQueue { ring, table, replay } = prepared;
            let entries = ring.entries() + EXTRA_OPERATIONS;
            let end = engine(connection.shared.pool.arena().clone(), entries).and_then(|engine| {
                Queue::new(Parts { connection, index, ring, engine, table, replay, trace })
            });
            let end = match end {
                Ok(queue) => queue.run(|event| gone.send(Message::Event(event))),
                Err(e) => QueueEnd::Failed(e),
            };
            gone.send(Message::End(end));
        };
        std::thread::Builder::new()
            .name(format!("queue-{index}"))
            .spawn(body)
            .map_err(|e| Failure::host("start a queue's thread", e))
    }

    /// Whether the frontend is connected by these rings.
    pub(super) fn serves(&self, rings: &Rings) -> bool {
        self.guest == rings.guest && self.wanted.has_rings_of(&rings.wanted)
    }

    /// A description of the connection in one line, for the log.
    pub(super) fn describe(&self) -> String {
        format!(
            "{}, {} queue{}, ring order {}, up to {} segments, {} ({})",
            self.wanted.protocol.key(),
            self.wanted.queues.len(),
            if self.wanted.queues.len() == 1 { "" } else { "s" },
            self.wanted.ring_order,
            self.connection.max_indirect_segments.max(11),
            match self.moving.mover {
                Mover::Copy => "grant copy",
                Mover::Map => "grant map",
                Mover::Persistent => "persistent grants",
            },
            self.hypervisor,
        )
    }

    /// The next report of a queue.
    pub(super) fn report(&mut self) -> Option<Report> {
        while let Ok((queue, message)) = self.messages.try_recv() {
            match message {
                Message::Event(QueueEvent::Violation(violation)) => {
                    return Some(Report::Violation { queue, why: violation.to_string() });
                }
                Message::End(QueueEnd::Stopped) => {}
                Message::End(QueueEnd::Failed(e)) => {
                    let failure = Failure::host(format!("serve queue {queue}"), e);
                    return Some(Report::Failed(failure));
                }
            }
        }
        None
    }

    /// Answers the requests on the rings without regard to the limits of the processor and of
    /// requests and bytes: the toolstack wants the disk back, and the guest may be gone soon.
    pub(super) fn hurry(&self, now_ns: u64) {
        self.connection.shared.device.limiter.lift(now_ns);
        self.connection.shared.processors.forgive(now_ns);
        self.connection.shared.wake_all();
    }

    /// Answers the requests in flight, releases everything of the guest's, and removes the
    /// connection. Requests that wait for space fail: the guest has let go of its rings, and reads
    /// no response.
    pub(super) fn detach(mut self) -> Result<(), Failure> {
        self.connection.shared.give_up();
        self.finish()?;
        // Nothing is in flight, so a successor does not need the table.
        remove(&self.table_path)
    }

    /// Answers the requests in flight, and leaves the table for a successor or the next connection.
    /// Requests that wait for space stay in it.
    pub(super) fn stop(mut self) -> Result<(), Failure> {
        self.connection.shared.leave();
        self.finish()
    }

    fn finish(&mut self) -> Result<(), Failure> {
        self.join();
        let mut result = Ok(());
        for (index, message) in self.messages.try_iter() {
            if let Message::End(QueueEnd::Failed(e)) = message {
                result = Err(Failure::host(format!("end queue {index}"), e));
            }
        }
        result
    }

    fn join(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        self.connection.shared.stop();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a queue's thread panicked: this is a bug in ferrite");
            }
        }
        self.connection.shared.processors.polling.give_back();
        if self.moving.mover != Mover::Copy {
            tracing::debug!("disconnected: {}", self.moving.maps.counts());
        }
        tracing::debug!("since the start: {}", self.connection.shared.counters.counts());
    }
}

impl Drop for ConnectedFrontend {
    fn drop(&mut self) {
        self.join();
    }
}

/// Lives in a queue's thread. When that ends in any way, the control thread is told. The queue's
/// engine has ended by then, and with it all I/O.
struct ThreadGuard {
    index: usize,
    sender: Sender<(usize, Message)>,
    control: Arc<Waker>,
}

impl ThreadGuard {
    fn send(&self, message: Message) {
        // This fails only when the control thread is gone, which needs no message any more.
        let _ = self.sender.send((self.index, message));
        self.control.wake();
    }
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let e = std::io::Error::other("its thread panicked: this is a bug in ferrite");
            self.send(Message::End(QueueEnd::Failed(e)));
        }
    }
}

fn new_connection(
    context: &ConnectionContext<'_>,
    rings: &Rings,
    mover: Mover,
) -> Result<Arc<Connection>, Failure> {
    let queues = rings.wanted.queues.len();
    let device = context.device.clone();
    // Other movers do not need a lender: they copy by the processor.
    let lender = if mover == Mover::Copy { context.hypervisor.lender() } else { None };
    let host = context.host_memory.clone();
    let growth = host.map(|host| Growth { most_bytes: ring_bytes(rings), host });
    let others = Others { lender, growth };
    let pool = Pool::with_others(context.pool_bytes, queues, Disk::MAX_SCRATCH_BYTES, others)
        .map_err(|e| Failure::host("get memory for the buffer pool", e))?;
    let (processors, counters) = (context.processors.clone(), context.counters.clone());
    let shared = Shared::new(device, pool, queues, context.tuning, processors, counters)
        .map_err(|e| Failure::host("make an eventfd", e))?;
    Ok(Arc::new(Connection {
        shared: Arc::new(shared.on_side(context.side)),
        protocol: rings.wanted.protocol,
        max_indirect_segments: rings.max_indirect_segments,
        discard: rings.discard,
    }))
}

/// Bytes of data that all requests on the rings can have at once.
fn ring_bytes(rings: &Rings) -> usize {
    let Rings { wanted, max_indirect_segments, .. } = rings;
    let segments = usize::from(*max_indirect_segments).max(MAX_DIRECT_SEGMENTS);
    let entries = wanted.protocol.entries(wanted.ring_order) as usize;
    wanted.queues.len() * entries * segments * PAGE_SIZE
}

/// The disk's mover, if the frontend supports it; otherwise grant copy, which any frontend
/// supports.
fn moving(context: &ConnectionContext<'_>, wanted: &Wanted) -> Moving {
    if context.moving.mover != Mover::Persistent || wanted.persistent {
        return context.moving.clone();
    }
    limited!(
        info,
        context.device.log_limits.connections,
        context.device.clock.now_ns(),
        "the frontend does not use persistent grants: data goes by grant copy"
    );
    Moving { mover: Mover::Copy, maps: context.moving.maps.clone() }
}

fn new_link(
    context: &ConnectionContext<'_>,
    wanted: &Wanted,
    i: usize,
    moving: &Moving,
) -> Result<Box<dyn Link>, Failure> {
    let queue = &wanted.queues[i];
    let link = context.hypervisor.connect(context.domid, &queue.ring, queue.port, moving);
    link.map_err(|e| match e {
        HypervisorError::Guest { .. } => Failure::Refused(format!("queue {i}: {e}")),
        HypervisorError::Host { .. } => {
            Failure::host(format!("connect queue {i}"), std::io::Error::other(e))
        }
    })
}

/// Makes the table of a connection. The disk is not exchanged between the read of its identity and
/// the registration of the table with the successor.
fn table(
    context: &ConnectionContext<'_>,
    rings: &Rings,
    make: impl FnOnce(&Path, Identity) -> Result<Table, TableError>,
) -> Result<Result<Table, TableError>, Failure> {
    let made = context.device.with_disk(|disk| {
        let table = make(&context.files.table(), identity(disk, rings)?);
        Ok(table.inspect(|table| context.successor.keep(table.image())))
    });
    made.and_then(|made| made).map_err(|e| Failure::host("examine the image", e))
}

fn identity(disk: &Disk, rings: &Rings) -> std::io::Result<Identity> {
    let Rings { wanted, max_indirect_segments, .. } = rings;
    let image = disk.identity()?;
    Ok(Identity {
        image,
        guest: rings.guest.clone(),
        rings: wanted.line(),
        protocol: wanted.protocol,
        ring_order: wanted.ring_order,
        queues: wanted.queues.len() as u32,
        max_segments: (*max_indirect_segments).into(),
    })
}

fn remove(path: &Path) -> Result<(), Failure> {
    match ferrite_host::names::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::host(format!("remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}
