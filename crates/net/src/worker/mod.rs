//! The thread that moves packets. One turn of it:
//!
//! 1. Held packets whose receivers have pages now, and those that have waited too long (`hold.rs`).
//! 2. Slots of each transmit ring are taken, some from each. The first bytes of all their frames: one grant copy
//!    (`take.rs`).
//! 3. The switch judges the private copies. Each delivery takes pages of its receiver, and adds its pieces
//!    (`deliver.rs`).
//! 4. All pieces: one grant copy, each status checked (`finish.rs`).
//! 5. Both sides are answered. Each queue is published once, and its guest notified once if it asked.
//!
//! With nothing left to do, it looks for a while, asks for events, and sleeps (`wait.rs`).

mod deliver;
mod finish;
mod hold;
mod record;
mod take;
pub(crate) mod wait;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use ferrite_host::clock::{Clock, SystemClock};
use ferrite_io::arena::{Arena, Span};
use ferrite_xen::netif::{FRAME_BYTES_MAX, RSP_DROPPED, RxRequest};
use ferrite_xen::pages::{Pages, Piece};

use crate::VifId;
use crate::counters::{add, count};
use crate::packet::{Offload, Stop, Uplink};
use crate::switch::{PortId, Source, Switch, SwitchError, Target};
use crate::trace::{Noticed, TraceRing};
use crate::vif::{Connection, Pending, Ref, Vif};

/// Bytes of a frame that are copied before it is judged.
const HEADER_BYTES: usize = 128;
/// Packets that are taken in a turn.
const TAKEN_MAX: usize = 256;
/// Packets that are taken from one queue in a turn.
const QUEUE_MAX: usize = 64;
/// Headers in the arena: of packets that are taken in a turn, and of held ones.
const HEADERS: usize = 2 * TAKEN_MAX;
/// Frames from the uplink in a turn, and frames to it that are copied together.
const UPLINK_RECEIVED: usize = 8;
const UPLINK_SENT: usize = 16;
const UPLINK_FRAMES: usize = UPLINK_RECEIVED + UPLINK_SENT;
/// Room for one of them.
const UPLINK_BYTES: usize = 64 << 10;
const _: () = assert!(UPLINK_BYTES >= FRAME_BYTES_MAX);

/// From control.
pub(crate) enum Command {
    /// Serves an interface, and says which port it has.
    Connect(Connection, Sender<Result<(), SwitchError>>),
    /// Drops an interface's rings, and says so.
    Disconnect(VifId, Sender<()>),
    /// All interfaces that there were at the start are connected: before, packets for them would be lost.
    Begin,
    /// Ends the thread.
    End,
}

/// To control.
pub(crate) enum Report {
    /// An interface's rings were dropped: its frontend broke the rules.
    Stopped(VifId, Stop),
}

/// The parts that the thread starts with.
pub(crate) struct Start {
    pub(crate) pages: Box<dyn Pages>,
    pub(crate) uplink: Option<Box<dyn Uplink>>,
    pub(crate) commands: Receiver<Command>,
    /// Readable when there is a command.
    pub(crate) wake: Arc<OwnedFd>,
    pub(crate) reports: Sender<Report>,
    /// To be written after a report.
    pub(crate) reported: Arc<OwnedFd>,
    pub(crate) hold_ms: u64,
    pub(crate) poll_us: u64,
    pub(crate) trace: Option<TraceRing>,
}

/// The sender of a frame, in a turn.
#[derive(Clone, Copy)]
enum From {
    Guest(Ref),
    Uplink,
}

/// A frame that is to be judged: where it is from, and its first bytes.
#[derive(Clone, Copy)]
struct Frame {
    from: From,
    /// For a frame of the uplink: all of it.
    header: Span,
    size: usize,
    offload: Offload,
    /// When its slots were seen, and its header was there.
    seen_ns: u64,
    fetched_ns: u64,
}

/// The receiver of a frame, in a turn.
enum To {
    /// A guest: its pages are `rx` of the turn.
    Port { port: PortId, queue: usize, rx: std::ops::Range<usize> },
    /// The uplink, from the arena.
    Uplink(Span),
}

/// A page of a receiver that was taken for a frame.
#[derive(Clone, Copy)]
struct Room {
    request: RxRequest,
    /// Bytes of the frame in it; `None`: it becomes the extra info.
    len: Option<u16>,
}

/// A frame on its way to one receiver.
struct Delivery {
    frame: Frame,
    to: To,
    pieces: std::ops::Range<usize>,
    /// The receiver has it.
    is_ok: bool,
    /// The count of answers of its receiver's ring with its own.
    rx_answers: u32,
}

impl Delivery {
    fn new(frame: &Frame, to: To, pieces: std::ops::Range<usize>) -> Delivery {
        Delivery { frame: *frame, to, pieces, is_ok: false, rx_answers: 0 }
    }
}

/// The lists of one turn; their memory is used again.
#[derive(Default)]
struct Turn {
    now_ns: u64,
    frames: Vec<Frame>,
    deliveries: Vec<Delivery>,
    pieces: Vec<Piece>,
    /// Pieces of headers.
    fetches: Vec<Piece>,
    rx: Vec<Room>,
    headers: usize,
    uplink_received: usize,
    uplink_sent: usize,
    /// Something was done.
    has_worked: bool,
    /// Interfaces that are to be stopped at its end.
    stops: Vec<(PortId, Stop)>,
}

pub(crate) struct Worker {
    clock: SystemClock,
    arena: Arc<Arena>,
    /// Before the interfaces, whose descriptors it watches.
    events: wait::Events,
    switch: Switch,
    /// By port.
    vifs: Vec<Option<Vif>>,
    start: Start,
    epochs: u64,
    turn: Turn,
    tracer: record::Tracer,
    targets: Vec<Target>,
    /// Bytes of a frame in each page of its receiver.
    lens: Vec<u16>,
    /// One frame of the uplink.
    bytes: Vec<u8>,
    /// The port that is first in the next turn.
    first: usize,
    has_begun: bool,
    has_ended: bool,
    copy_failures: u64,
}

impl Worker {
    pub(crate) fn new(mut start: Start) -> std::io::Result<Worker> {
        let ring = start.trace.take();
        let arena = Arena::new(HEADERS * HEADER_BYTES + UPLINK_FRAMES * UPLINK_BYTES)?;
        Ok(Worker {
            switch: Switch::new(start.uplink.is_some()),
            start,
            clock: SystemClock,
            events: wait::Events::new(arena.clone())?,
            arena,
            vifs: Vec::new(),
            epochs: 0,
            turn: Turn::default(),
            tracer: record::Tracer::new(ring),
            targets: Vec::new(),
            lens: Vec::new(),
            bytes: vec![0; UPLINK_BYTES],
            first: 0,
            has_begun: false,
            has_ended: false,
            copy_failures: 0,
        })
    }

    /// Works until it is told to end.
    pub(crate) fn run(&mut self) {
        loop {
            self.obey();
            if self.has_ended {
                return;
            }
            if !self.has_begun {
                self.sleep();
                continue;
            }
            self.turn();
            if !self.has_more() {
                self.rest();
            }
        }
    }

    fn obey(&mut self) {
        self.events.is_called = false;
        while let Ok(command) = self.start.commands.try_recv() {
            match command {
                Command::Connect(connection, reply) => {
                    let _ = reply.send(self.connect(connection));
                }
                Command::Disconnect(id, reply) => {
                    if let Some(port) = self.port_of(id) {
                        self.disconnect(port);
                    }
                    let _ = reply.send(());
                }
                Command::Begin => self.has_begun = true,
                Command::End => self.has_ended = true,
            }
        }
    }

    fn connect(&mut self, connection: Connection) -> Result<(), SwitchError> {
        let port = self.switch.add(connection.mac)?;
        self.epochs += 1;
        let at = usize::from(port.0);
        if self.vifs.len() <= at {
            self.vifs.resize_with(at + 1, || None);
        }
        let mut vif = Vif::new(connection, self.epochs);
        for queue in &mut vif.queues {
            match queue.refuse_torn() {
                Ok(packets) => add(&vif.counters.dropped, packets),
                Err(stop) => self.turn.stops.push((port, stop)),
            }
            queue.rings.publish();
            // A predecessor may have published answers and died before it notified the guest, which then waits for ever:
            // it asked to hear of these.
            if let Err(e) = queue.rings.link().notify() {
                tracing::debug!("cannot notify {}: {e}", vif.id);
            }
        }
        self.vifs[at] = Some(vif);
        // At once: before the next turn the port may belong to another interface.
        self.stop_all();
        Ok(())
    }

    fn port_of(&self, id: VifId) -> Option<PortId> {
        let is = |vif: &Option<Vif>| vif.as_ref().is_some_and(|vif| vif.id == id);
        self.vifs.iter().position(is).map(|at| PortId(at as u16))
    }

    fn vif(&mut self, port: PortId) -> Option<&mut Vif> {
        self.vifs.get_mut(usize::from(port.0))?.as_mut()
    }

    /// A packet that is not answered, if its connection is still there.
    fn pending(&mut self, from: Ref) -> Option<&mut Pending> {
        let vif = self.vif(from.port).filter(|vif| vif.epoch == from.epoch)?;
        vif.queues.get_mut(from.queue)?.get_mut(from.seq)
    }

    /// Drops an interface's rings. Its packets that wait for others are gone; those that wait for it are dropped.
    fn disconnect(&mut self, port: PortId) {
        self.switch.remove(port);
        self.unwatch(port);
        let Some(vif) = self.vifs.get_mut(usize::from(port.0)).and_then(Option::take) else {
            return;
        };
        for other in self.vifs.iter_mut().flatten() {
            for queue in &mut other.queues {
                queue.held.retain(|held| held.from.epoch != vif.epoch);
            }
        }
        for held in vif.queues.into_iter().flat_map(|queue| queue.held) {
            count(&vif.counters.starved);
            self.release(held.from, RSP_DROPPED);
        }
        for queue in self.vifs.iter_mut().flatten().flat_map(|vif| &mut vif.queues) {
            queue.answer();
        }
        self.publish();
    }

    /// A held packet is done.
    fn release(&mut self, from: Ref, status: i16) {
        if let Some(pending) = self.pending(from) {
            pending.is_held = false;
            pending.status = status;
        }
    }

    /// One turn.
    fn turn(&mut self) {
        let turn = &mut self.turn;
        turn.now_ns = self.clock.now_ns();
        turn.frames.clear();
        turn.deliveries.clear();
        turn.pieces.clear();
        turn.rx.clear();
        (turn.headers, turn.uplink_received, turn.uplink_sent) = (0, 0, 0);
        turn.has_worked = false;
        self.tracer.answered_ns = None;
        self.look_at_consumed(self.turn.now_ns);
        self.retry_held();
        self.take_all();
        self.fetch_headers();
        self.receive_uplink();
        self.are_fetched();
        self.deliver_all();
        self.are_chosen();
        self.copy_and_finish();
        for queue in self.vifs.iter_mut().flatten().flat_map(|vif| &mut vif.queues) {
            queue.answer();
        }
        self.publish();
        self.stop_all();
        self.tracer.noticed = Noticed::Working;
    }

    /// Publishes all answers of all queues, and notifies each guest that asked once.
    fn publish(&mut self) {
        let (mut is_traced, mut has_notified) = (false, false);
        for vif in self.vifs.iter_mut().flatten() {
            for queue in &mut vif.queues {
                is_traced |= queue.has_records();
                if queue.has_records() {
                    let now = || self.clock.now_ns();
                    self.tracer.answered_ns.get_or_insert_with(now);
                }
                let asked = queue.rings.publish();
                queue.was_notified = asked;
                has_notified |= asked;
                if asked && let Err(e) = queue.rings.link().notify() {
                    tracing::debug!("cannot notify {}: {e}", vif.id);
                }
            }
        }
        if is_traced {
            self.are_published(has_notified);
        }
    }

    fn stop_all(&mut self) {
        while let Some((port, stop)) = self.turn.stops.pop() {
            let Some(id) = self.vif(port).map(|vif| vif.id) else { continue };
            self.disconnect(port);
            let _ = self.start.reports.send(Report::Stopped(id, stop));
            wait::wake(&self.start.reported);
        }
    }

    /// The arena's room for a header.
    fn header_room(&mut self) -> Option<Span> {
        let at = self.turn.headers;
        (at < HEADERS).then(|| {
            self.turn.headers += 1;
            self.arena.span(at * HEADER_BYTES, HEADER_BYTES)
        })
    }

    /// The arena's room for a frame from the uplink.
    fn room_from_uplink(&mut self) -> Option<Span> {
        let at = self.turn.uplink_received;
        (at < UPLINK_RECEIVED).then(|| {
            self.turn.uplink_received += 1;
            self.uplink_room(at)
        })
    }

    /// The arena's room for a frame to the uplink. If there is none, deliveries that were begun are carried out first:
    /// no frame is lost by having come with many.
    fn room_to_uplink(&mut self) -> Span {
        if self.turn.uplink_sent == UPLINK_SENT {
            self.are_chosen();
            self.copy_and_finish();
            self.turn.deliveries.clear();
            self.turn.pieces.clear();
            self.turn.rx.clear();
            self.turn.uplink_sent = 0;
        }
        self.turn.uplink_sent += 1;
        self.uplink_room(UPLINK_RECEIVED + self.turn.uplink_sent - 1)
    }

    fn uplink_room(&self, at: usize) -> Span {
        self.arena.span(HEADERS * HEADER_BYTES + at * UPLINK_BYTES, UPLINK_BYTES)
    }

    /// The source of a frame, for the switch.
    fn source(from: From) -> Source {
        match from {
            From::Guest(from) => Source::Port(from.port),
            From::Uplink => Source::Uplink,
        }
    }
}
