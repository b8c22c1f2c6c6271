//! A connected frontend: its queues, their threads, and what they leave for a successor.

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

use super::heir::TableHeir;
use super::messages::{Failure, Report, Rings};
use super::run_dir::RunFiles;
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

/// Operations that an engine may have in flight beside a ring's requests: the event channel, the
/// waker, and steps of tasks.
const EXTRA_OPERATIONS: u32 = 32;

/// Builds a queue's storage engine over the arena, for so many operations in flight; called on
/// the queue's own thread.
pub type EngineFactory = Arc<dyn Fn(Arc<Arena>, u32) -> io::Result<Box<dyn Engine>> + Send + Sync>;

/// What connections to a disk are made of.
pub(super) struct Means<'a> {
    pub(super) hypervisor: &'a dyn Hypervisor,
    pub(super) domid: DomId,
    pub(super) device: Arc<Device>,
    /// Which of the device's guests is served.
    pub(super) side: Side,
    pub(super) files: RunFiles,
    /// Keeps the image's name in the table true.
    pub(super) heir: Arc<TableHeir>,
    pub(super) moving: Moving,
    pub(super) pool_bytes: usize,
    pub(super) host_memory: Option<Arc<HostMemory>>,
    pub(super) engine: EngineFactory,
    pub(super) tuning: Tuning,
    pub(super) processors: Arc<Processors>,
    pub(super) counters: Counters,
    /// Woken by queues that have something to report.
    pub(super) control: Arc<Waker>,
}

/// What queue threads tell the control thread.
enum Message {
    Event(QueueEvent),
    End(QueueEnd),
}

/// A connected frontend.
pub(super) struct Attached {
    wanted: Wanted,
    /// Which guest it is, see [`Rings::guest`].
    guest: String,
    connection: Arc<Connection>,
    threads: Vec<JoinHandle<()>>,
    messages: Receiver<(usize, Message)>,
    table_path: PathBuf,
    moving: Moving,
    hypervisor: &'static str,
}

/// A queue before its thread runs.
struct Prepared {
    ring: BackRing,
    table: QueueTable,
    replay: Vec<Unanswered>,
}

impl Attached {
    /// Connects a frontend that has nothing in flight.
    pub(super) fn connect(means: &Means<'_>, rings: Rings) -> Result<Attached, Failure> {
        let wanted = &rings.wanted;
        let moving = moving(means, wanted);
        let connection = new_connection(means, &rings, moving.mover)?;
        let mut attached = Vec::new();
        for i in 0..wanted.queues.len() {
            let link = new_link(means, wanted, i, &moving)?;
            attached.push(
                BackRing::attach(link, wanted.protocol)
                    .map_err(|e| Failure::Refused(format!("queue {i}: {e}")))?,
            );
        }
        let table = table(means, &rings, Table::create)?.map_err(|e| {
            let kind = match &e {
                TableError::Io { source, .. } => source.kind(),
                _ => std::io::ErrorKind::Other,
            };
            Failure::run_dir("keep a table", std::io::Error::new(kind, e))
        })?;
        let prepared = attached
            .into_iter()
            .zip(table.into_queues())
            .map(|(ring, table)| {
                table.start(ring.req_cons(), ring.rsp_prod());
                Prepared { ring, table, replay: Vec::new() }
            })
            .collect();
        Attached::start(means, rings, connection, prepared, moving)
    }

    /// Takes over a frontend that a predecessor had connected (blkif.md 3.9), and says how many of
    /// its requests are done again. The image's lock, which we hold, says that the predecessor and
    /// all its I/O are gone: it lies on the open file that its last operation used.
    pub(super) fn take_over(means: &Means<'_>, rings: Rings) -> Result<(Attached, usize), Failure> {
        let refuse = |why: String| Failure::Refused(why);
        let table = table(means, &rings, Table::open)?.map_err(|e| {
            let why = e.to_string();
            match e {
                TableError::OtherRings { .. } => Failure::OtherRings(why),
                TableError::OtherImage { .. } => Failure::WrongImage(why),
                _ => refuse(why),
            }
        })?;
        let wanted = &rings.wanted;
        let moving = moving(means, wanted);
        let connection = new_connection(means, &rings, moving.mover)?;
        let mut prepared = Vec::new();
        let mut undone = 0;
        for (i, table) in table.into_queues().into_iter().enumerate() {
            let link = new_link(means, wanted, i, &moving)?;
            let resume = table
                .resume(BackRing::shared_rsp_prod(&*link))
                .ok_or_else(|| refuse(format!("queue {i}: its guest has changed the ring")))?;
            let ring = BackRing::resume(link, wanted.protocol, resume.req_cons, resume.rsp_prod)
                .map_err(|e| refuse(format!("queue {i}: {e}")))?;
            undone += resume.unanswered.len();
            prepared.push(Prepared { ring, table, replay: resume.unanswered });
        }
        // Before one of them can be begun.
        means.device.expects(means.side, undone);
        Ok((Attached::start(means, rings, connection, prepared, moving)?, undone))
    }

    fn start(
        means: &Means<'_>,
        rings: Rings,
        connection: Arc<Connection>,
        prepared: Vec<Prepared>,
        moving: Moving,
    ) -> Result<Attached, Failure> {
        // All of them before the first queue works.
        let traces: Vec<_> = (0..prepared.len())
            .map(|i| TraceRing::create(&means.files.trace(i)))
            .collect::<Result<_, _>>()
            .map_err(|e| Failure::run_dir("make a trace ring", e))?;
        means.device.begin_service(&means.engine);
        let (sender, messages) = channel();
        let mut attached = Attached {
            wanted: rings.wanted,
            guest: rings.guest,
            connection,
            threads: Vec::new(),
            messages,
            table_path: means.files.table(),
            moving,
            hypervisor: means.hypervisor.name(),
        };
        for (index, (prepared, trace)) in prepared.into_iter().zip(traces).enumerate() {
            match attached.spawn(means, index, prepared, trace, sender.clone()) {
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
        means: &Means<'_>,
        index: usize,
        prepared: Prepared,
        trace: TraceRing,
        sender: Sender<(usize, Message)>,
    ) -> Result<JoinHandle<()>, Failure> {
        let connection = self.connection.clone();
        let engine = means.engine.clone();
        let control = means.control.clone();
        // What it logs is of the same disk as what we log.
        let span = tracing::Span::current();
        let body = move || {
            let _in_span = span.enter();
            let gone = Gone { index, sender, control };
            let Prepared { ring, table, replay } = prepared;
            let entries = ring.entries() + EXTRA_OPERATIONS;
            let end = engine(connection.shared.pool.arena().clone(), entries).and_then(|engine| {
                Queue::new(Parts { connection, index, ring, engine, table, replay, trace })
            });
            let end = match end {
                Ok(queue) => queue.run(|event| gone.tell(Message::Event(event))),
                Err(e) => QueueEnd::Failed(e),
            };
            gone.tell(Message::End(end));
        };
        std::thread::Builder::new()
            .name(format!("queue-{index}"))
            .spawn(body)
            .map_err(|e| Failure::host("start a queue's thread", e))
    }

    /// Whether these are its rings.
    pub(super) fn serves(&self, rings: &Rings) -> bool {
        self.guest == rings.guest && self.wanted.has_rings_of(&rings.wanted)
    }

    /// One line for the log.
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

    /// What a queue has to say.
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

    /// The toolstack wants the disk back: what is on the rings is answered while the guest is there
    /// to hear it, whatever the disk has used of processors.
    pub(super) fn hurry(&self, now_ns: u64) {
        self.connection.shared.processors.forgive(now_ns);
        self.connection.shared.wake_all();
    }

    /// Answers what is in flight, gives everything of the guest's back, forgets the connection. What
    /// waits for space fails: its guest has let go of its rings, and hears of no answer.
    pub(super) fn detach(mut self) -> Result<(), Failure> {
        self.connection.shared.give_up();
        self.finish()?;
        // Nothing is in flight: a successor has nothing to learn from it.
        remove(&self.table_path)
    }

    /// Answers what is in flight, and leaves the table: a successor will go on, or the next
    /// connection puts its own in its place. What waits for space stays in it.
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

impl Drop for Attached {
    fn drop(&mut self) {
        self.join();
    }
}

/// A queue's thread: when it ends, however it does, those who wait for the queue go on. Its
/// engine has ended by then, and with it all I/O.
struct Gone {
    index: usize,
    sender: Sender<(usize, Message)>,
    control: Arc<Waker>,
}

impl Gone {
    fn tell(&self, message: Message) {
        // Fails only when the control thread has gone, and then nobody wants to know.
        let _ = self.sender.send((self.index, message));
        self.control.wake();
    }
}

impl Drop for Gone {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let e = std::io::Error::other("its thread panicked: this is a bug in ferrite");
            self.tell(Message::End(QueueEnd::Failed(e)));
        }
    }
}

fn new_connection(
    means: &Means<'_>,
    rings: &Rings,
    mover: Mover,
) -> Result<Arc<Connection>, Failure> {
    let queues = rings.wanted.queues.len();
    let device = means.device.clone();
    // Others do not need them: they copy by the processor.
    let lender = if mover == Mover::Copy { means.hypervisor.lender() } else { None };
    let host = means.host_memory.clone();
    let growth = host.map(|host| Growth { most_bytes: ring_bytes(rings), host });
    let others = Others { lender, growth };
    let pool = Pool::with_others(means.pool_bytes, queues, Disk::MAX_SCRATCH_BYTES, others)
        .map_err(|e| Failure::host("get memory for the buffer pool", e))?;
    let (processors, counters) = (means.processors.clone(), means.counters.clone());
    let shared = Shared::new(device, pool, queues, means.tuning, processors, counters)
        .map_err(|e| Failure::host("make an eventfd", e))?;
    Ok(Arc::new(Connection {
        shared: Arc::new(shared.on_side(means.side)),
        protocol: rings.wanted.protocol,
        max_indirect_segments: rings.max_indirect_segments,
        discard: rings.discard,
    }))
}

/// Bytes of all data that the rings' requests can have at once.
fn ring_bytes(rings: &Rings) -> usize {
    let Rings { wanted, max_indirect_segments, .. } = rings;
    let segments = usize::from(*max_indirect_segments).max(MAX_DIRECT_SEGMENTS);
    let entries = wanted.protocol.entries(wanted.ring_order) as usize;
    wanted.queues.len() * entries * segments * PAGE_SIZE
}

/// The disk's mover, if the frontend agrees to it; otherwise grant copy, which any frontend takes.
fn moving(means: &Means<'_>, wanted: &Wanted) -> Moving {
    if means.moving.mover != Mover::Persistent || wanted.persistent {
        return means.moving.clone();
    }
    limited!(
        info,
        means.device.log_limits.connections,
        means.device.clock.now_ns(),
        "the connection is not one of persistent grants: data goes by grant copy"
    );
    Moving { mover: Mover::Copy, maps: means.moving.maps.clone() }
}

fn new_link(
    means: &Means<'_>,
    wanted: &Wanted,
    i: usize,
    moving: &Moving,
) -> Result<Box<dyn Link>, Failure> {
    let queue = &wanted.queues[i];
    let link = means.hypervisor.connect(means.domid, &queue.ring, queue.port, moving);
    link.map_err(|e| match e {
        HypervisorError::Guest { .. } => Failure::Refused(format!("queue {i}: {e}")),
        HypervisorError::Host { .. } => {
            Failure::host(format!("connect queue {i}"), std::io::Error::other(e))
        }
    })
}

/// The table of a connection. Nobody exchanges the disk between the look at its image and the moment
/// when the heir is told of exchanges.
fn table(
    means: &Means<'_>,
    rings: &Rings,
    make: impl FnOnce(&Path, Identity) -> Result<Table, TableError>,
) -> Result<Result<Table, TableError>, Failure> {
    let made = means.device.with_disk(|disk| {
        let table = make(&means.files.table(), identity(disk, rings)?);
        Ok(table.inspect(|table| means.heir.keep(table.image())))
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
    match ferrite_io::names::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::host(format!("remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}
