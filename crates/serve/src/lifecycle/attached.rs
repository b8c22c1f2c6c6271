//! A connected frontend: its queues, their threads, and what they leave for a successor.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ferrite_io::pool::Pool;
use ferrite_xen::hypervisor::{HypervisorError, Link};
use ferrite_xen::mover::{Mover, Moving};
use ferrite_xen::ring::BackRing;
use ferrite_xen::store::StoreError;

use super::refusal::Refusal;
use super::run_dir::{TABLE, trace_path};
use super::{Backend, ServeError, largest_request};
use crate::connection::{Connection, Shape, Waker};
use crate::inflight::{Identity, QueueTable, Table, TableError, Unanswered};
use crate::log_limit::limited;
use crate::negotiate::{Wanted, published_offer, read_frontend};
use crate::queue::{Parts, Queue, QueueEnd, QueueEvent};
use crate::trace::TraceRing;

/// Operations that an engine may have in flight beside a ring's requests: the event channel, the
/// waker, and steps of tasks.
const EXTRA_OPERATIONS: u32 = 32;

/// What queue threads tell the control thread.
enum Message {
    Event(QueueEvent),
    End(QueueEnd),
}

/// A connected frontend.
pub(super) struct Attached {
    wanted: Wanted,
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
    pub(super) fn connect(backend: &mut Backend<'_>, wanted: Wanted) -> Result<Attached, Refusal> {
        backend.enter_run_dir().map_err(Refusal::Host)?;
        let discard = backend.may_discard().map_err(|e| Refusal::Host(e.into()))?;
        let indirect = backend.offer.max_indirect_segments;
        let connection =
            new_connection(backend, &wanted, indirect, discard).map_err(Refusal::Host)?;
        let moving = moving(backend, &wanted);
        let mut rings = Vec::new();
        for i in 0..wanted.queues.len() {
            let link = new_link(backend, &wanted, i, &moving)?;
            rings.push(
                BackRing::attach(link, wanted.protocol)
                    .map_err(|e| Refusal::Guest(format!("queue {i}: {e}")))?,
            );
        }
        let identity = identity(backend, &wanted, indirect).map_err(Refusal::Host)?;
        let path = table_path(backend);
        let table = Table::create(&path, identity).map_err(|e| {
            let kind = match &e {
                TableError::Io { source, .. } => source.kind(),
                _ => std::io::ErrorKind::Other,
            };
            Refusal::Host(ServeError::run_dir("keep a table", std::io::Error::new(kind, e)))
        })?;
        let prepared = rings
            .into_iter()
            .zip(table.into_queues())
            .map(|(ring, table)| {
                table.start(ring.req_cons(), ring.rsp_prod());
                Prepared { ring, table, replay: Vec::new() }
            })
            .collect();
        Attached::start(backend, wanted, connection, prepared, moving).map_err(Refusal::Host)
    }

    /// Takes over a frontend that a predecessor had connected (blkif.md 3.9). The image's lock,
    /// which we hold, says that the predecessor and all its I/O are gone: it lies on the open
    /// file that its last operation used.
    pub(super) fn take_over(
        backend: &mut Backend<'_>,
        frontend: &str,
    ) -> Result<Attached, ServeError> {
        let refuse = |why: String| ServeError::TakeOver(why);
        let cannot = |e: Refusal| match e {
            Refusal::Guest(why) => refuse(why),
            Refusal::Host(e) => e,
        };
        backend.enter_run_dir()?;
        let (offer, discard) = published_offer(backend.store, &backend.config.backend)
            .map_err(|e| cannot(e.into()))?;
        let wanted =
            read_frontend(backend.store, frontend, &offer).map_err(|e| cannot(e.into()))?;
        let indirect = offer.max_indirect_segments;
        if indirect > largest_request(backend.device) {
            return Err(refuse(format!("it was offered requests of {indirect} segments")));
        }
        check_size(backend)?;
        let table = Table::open(&table_path(backend), identity(backend, &wanted, indirect)?)
            .map_err(|e| refuse(e.to_string()))?;
        let connection = new_connection(backend, &wanted, indirect, discard)?;
        let moving = moving(backend, &wanted);
        let mut prepared = Vec::new();
        let mut undone = 0;
        for (i, table) in table.into_queues().into_iter().enumerate() {
            let link = new_link(backend, &wanted, i, &moving).map_err(cannot)?;
            let resume = table
                .resume(BackRing::shared_rsp_prod(&*link))
                .ok_or_else(|| refuse(format!("queue {i}: its guest has changed the ring")))?;
            let ring = BackRing::resume(link, wanted.protocol, resume.req_cons, resume.rsp_prod)
                .map_err(|e| refuse(format!("queue {i}: {e}")))?;
            undone += resume.unanswered.len();
            prepared.push(Prepared { ring, table, replay: resume.unanswered });
        }
        let attached = Attached::start(backend, wanted, connection, prepared, moving)?;
        tracing::info!("took over, {undone} requests to finish: {}", attached.describe());
        Ok(attached)
    }

    fn start(
        backend: &mut Backend<'_>,
        wanted: Wanted,
        connection: Arc<Connection>,
        prepared: Vec<Prepared>,
        moving: Moving,
    ) -> Result<Attached, ServeError> {
        // All of them before the first queue works.
        let traces: Vec<_> = (0..prepared.len())
            .map(|i| TraceRing::create(&trace_path(&backend.config.run_dir, i)))
            .collect::<Result<_, _>>()
            .map_err(|e| ServeError::run_dir("make a trace ring", e))?;
        let (sender, messages) = channel();
        let mut attached = Attached {
            wanted,
            connection,
            threads: Vec::new(),
            messages,
            table_path: table_path(backend),
            moving,
            hypervisor: backend.hypervisor.name(),
        };
        for (index, (prepared, trace)) in prepared.into_iter().zip(traces).enumerate() {
            match attached.spawn(backend, index, prepared, trace, sender.clone()) {
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
        backend: &Backend<'_>,
        index: usize,
        prepared: Prepared,
        trace: TraceRing,
        sender: Sender<(usize, Message)>,
    ) -> Result<JoinHandle<()>, ServeError> {
        let connection = self.connection.clone();
        let engine = backend.config.engine.clone();
        let control = backend.control.clone();
        let body = move || {
            let gone = Gone { connection: connection.clone(), index, sender, control };
            let Prepared { ring, table, replay } = prepared;
            let entries = ring.entries() + EXTRA_OPERATIONS;
            let end = engine(connection.pool.arena().clone(), entries).and_then(|engine| {
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
            .map_err(|e| ServeError::host("start a queue's thread", e))
    }

    /// What the frontend had asked for.
    pub(super) fn wanted(&self) -> &Wanted {
        &self.wanted
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

    /// Hears what queues have to say.
    pub(super) fn check_queues(&mut self, backend: &mut Backend<'_>) -> Result<(), ServeError> {
        while let Ok((index, message)) = self.messages.try_recv() {
            match message {
                Message::Event(QueueEvent::Violation(violation)) => {
                    let why = format!("queue {index} stopped for good: {violation}");
                    let now_ns = backend.device.clock.now_ns();
                    limited!(error, backend.device.log_limits.connections, now_ns, "{why}");
                    backend.report_error(&why)?;
                }
                Message::End(QueueEnd::Stopped) => {}
                Message::End(QueueEnd::Failed(e)) => {
                    return Err(ServeError::host(format!("serve queue {index}"), e));
                }
            }
        }
        Ok(())
    }

    /// The toolstack wants the disk back: what is on the rings is answered while the guest is there
    /// to hear it, whatever the disk has used of processors.
    pub(super) fn hurry(&self, now_ns: u64) {
        self.connection.processors.forgive(now_ns);
        self.connection.wake_all();
    }

    /// Answers what is in flight, gives everything of the guest's back, forgets the connection.
    pub(super) fn detach(mut self) -> Result<(), ServeError> {
        self.finish()?;
        // Nothing is in flight: a successor has nothing to learn from it.
        remove(&self.table_path)
    }

    /// Answers what is in flight, and leaves the table: a successor will go on.
    pub(super) fn stop(mut self) -> Result<(), ServeError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<(), ServeError> {
        self.join();
        let mut result = Ok(());
        for (index, message) in self.messages.try_iter() {
            if let Message::End(QueueEnd::Failed(e)) = message {
                result = Err(ServeError::host(format!("end queue {index}"), e));
            }
        }
        result
    }

    fn join(&mut self) {
        if self.threads.is_empty() {
            return;
        }
        self.connection.stop();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a queue's thread panicked: this is a bug in ferrite");
            }
        }
        self.connection.processors.polling.give_back();
        if self.moving.mover != Mover::Copy {
            tracing::debug!("disconnected: {}", self.moving.maps.counts());
        }
        tracing::debug!("since the start: {}", self.connection.counters.counts());
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
    connection: Arc<Connection>,
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
        self.connection.gate.forfeit(self.index);
        self.connection.wake_all();
        if std::thread::panicking() {
            let e = std::io::Error::other("its thread panicked: this is a bug in ferrite");
            self.tell(Message::End(QueueEnd::Failed(e)));
        }
    }
}

fn new_connection(
    backend: &Backend<'_>,
    wanted: &Wanted,
    max_indirect_segments: u16,
    discard: bool,
) -> Result<Arc<Connection>, ServeError> {
    let queues = wanted.queues.len();
    let config = backend.config;
    let device = backend.device.clone();
    let pool = Pool::with_scratch(config.pool_bytes, queues, device.disk.scratch_bytes())
        .map_err(|e| ServeError::host("get memory for the buffer pool", e))?;
    let shape = Shape { protocol: wanted.protocol, max_indirect_segments, discard, queues };
    let (processors, counters) = (config.processors.clone(), config.counters.clone());
    Connection::new(device, pool, shape, config.tuning, processors, counters)
        .map(Arc::new)
        .map_err(|e| ServeError::host("make an eventfd", e))
}

/// The disk's mover, if the frontend agrees to it; otherwise grant copy, which any frontend takes.
fn moving(backend: &Backend<'_>, wanted: &Wanted) -> Moving {
    let configured = &backend.config.moving;
    if configured.mover != Mover::Persistent || wanted.persistent {
        return configured.clone();
    }
    limited!(
        info,
        backend.device.log_limits.connections,
        backend.device.clock.now_ns(),
        "the connection is not one of persistent grants: data goes by grant copy"
    );
    Moving { mover: Mover::Copy, maps: configured.maps.clone() }
}

fn new_link(
    backend: &Backend<'_>,
    wanted: &Wanted,
    i: usize,
    moving: &Moving,
) -> Result<Box<dyn Link>, Refusal> {
    let queue = &wanted.queues[i];
    let link = backend.hypervisor.connect(backend.config.domid, &queue.ring, queue.port, moving);
    link.map_err(|e| match e {
        HypervisorError::Guest { .. } => Refusal::Guest(format!("queue {i}: {e}")),
        HypervisorError::Host { .. } => {
            Refusal::Host(ServeError::host(format!("connect queue {i}"), std::io::Error::other(e)))
        }
    })
}

fn table_path(backend: &Backend<'_>) -> PathBuf {
    backend.config.run_dir.join(TABLE)
}

fn identity(
    backend: &mut Backend<'_>,
    wanted: &Wanted,
    max_indirect_segments: u16,
) -> Result<Identity, ServeError> {
    // Domain numbers are used again; a domain's uuid is not.
    // A driver domain may not look, and goes by the rest.
    let vm = backend.store.read_string(&format!("/local/domain/{}/vm", backend.config.domid));
    let vm = match vm {
        Err(StoreError::Access { .. }) => None,
        vm => vm?,
    };
    let image = backend.device.disk.identity();
    let image = image.map_err(|e| ServeError::host("examine the image", e))?;
    Ok(Identity {
        image,
        text: format!(
            "domain={} vm={} device={} {}",
            backend.config.domid,
            vm.unwrap_or_default(),
            backend.config.devid,
            wanted.line()
        ),
        protocol: wanted.protocol,
        ring_order: wanted.ring_order,
        queues: wanted.queues.len() as u32,
        max_segments: max_indirect_segments.into(),
    })
}

/// The guest goes on with the size that it was told last. An image may have grown meanwhile; a
/// shorter one is not the one that the guest knows.
fn check_size(backend: &mut Backend<'_>) -> Result<(), ServeError> {
    let told = backend.store.read_string(&format!("{}/sectors", backend.config.backend))?;
    let sectors = backend.device.disk.sectors();
    match told.and_then(|told| told.parse::<u64>().ok()) {
        Some(told) if told > sectors => Err(ServeError::TakeOver(format!(
            "its disk has {told} sectors, and {} has only {sectors}. Serve the image that it was \
             served from, or detach the disk and attach it again",
            backend.device.disk
        ))),
        _ => Ok(()),
    }
}

fn remove(path: &Path) -> Result<(), ServeError> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(ServeError::host(format!("remove {}", path.display()), e))
        }
        _ => Ok(()),
    }
}
