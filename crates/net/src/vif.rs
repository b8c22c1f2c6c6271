//! One connected interface, as the worker has it.

use std::collections::VecDeque;
use std::sync::Arc;

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::net::NetRings;
use ferrite_xen::netif::RSP_DROPPED;

use crate::VifId;
use crate::counters::Counters;
use crate::packet::{GsoKind, Offload, Stop, Taken};
use crate::switch::{Mac, PortId};

/// Packets that wait for one receive ring. Each is a few hundred bytes: its payload stays with its sender.
pub(crate) const HELD_MAX: usize = 64;

/// The features that a guest says it takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Features {
    /// Packets of several slots.
    pub(crate) sg: bool,
    pub(crate) gso_tcp4: bool,
    pub(crate) gso_tcp6: bool,
}

impl Features {
    /// Whether it takes such a packet, in so many pages.
    pub(crate) fn takes(&self, offload: Offload, pages: usize) -> bool {
        let gso = match offload.gso.map(|gso| gso.kind) {
            None => true,
            Some(GsoKind::Tcp4) => self.gso_tcp4,
            Some(GsoKind::Tcp6) => self.gso_tcp6,
        };
        gso && (self.sg || pages == 1)
    }
}

/// An interface that control has connected.
pub(crate) struct Connection {
    pub(crate) id: VifId,
    pub(crate) mac: Mac,
    pub(crate) features: Features,
    pub(crate) queues: Vec<NetRings>,
    pub(crate) counters: Arc<Counters>,
}

/// A packet of a connection: its place among those that its queue has sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ref {
    pub(crate) port: PortId,
    /// The connection: a port is used again by others.
    pub(crate) epoch: u64,
    pub(crate) queue: usize,
    pub(crate) seq: u64,
}

/// A packet that was taken and is not answered.
pub(crate) struct Pending {
    pub(crate) taken: Taken,
    pub(crate) status: i16,
    /// It waits for its receiver.
    pub(crate) is_held: bool,
    /// The number of its last record.
    pub(crate) record: Option<u64>,
}

/// A packet that is not answered, and its guest, if the connection is still there.
pub(crate) fn sent(vifs: &[Option<Vif>], from: Ref) -> Option<(DomId, &Taken)> {
    let vif = vifs.get(usize::from(from.port.0))?.as_ref()?;
    let queue = vif.queues.get(from.queue).filter(|_| vif.epoch == from.epoch)?;
    queue.get(from.seq).map(|pending| (vif.domid, &pending.taken))
}

/// A packet that waits for pages of its receiver.
pub(crate) struct Held {
    pub(crate) from: Ref,
    /// The private copy that was judged.
    pub(crate) header: Vec<u8>,
    pub(crate) since_ns: u64,
    /// When its slots were seen, and its header fetched.
    pub(crate) seen_ns: u64,
    pub(crate) fetched_ns: u64,
}

/// A record whose answers end at this count of a ring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    pub(crate) record: u64,
    pub(crate) answers: u32,
}

/// Answers of one ring that its guest was not seen to have consumed, oldest first: no more than the ring has slots. A
/// guest that never tells loses the oldest.
#[derive(Debug, Default)]
pub(crate) struct Unseen(VecDeque<Answered>);

/// Slots of a ring.
const UNSEEN_MAX: usize = 256;

impl Unseen {
    pub(crate) fn add(&mut self, answered: Answered) {
        if self.0.len() >= UNSEEN_MAX {
            self.0.pop_front();
        }
        self.0.push_back(answered);
    }

    /// The next record of those whose answers are among the first `consumed`. That is the guest's word.
    pub(crate) fn next_consumed(&mut self, consumed: u32) -> Option<u64> {
        let first = self.0.front()?;
        let is = consumed.wrapping_sub(first.answers) <= UNSEEN_MAX as u32;
        is.then(|| self.0.pop_front()).flatten().map(|answered| answered.record)
    }
}

/// One queue.
pub(crate) struct Queue {
    pub(crate) rings: NetRings,
    /// Taken packets, oldest first. They are answered in this order: a successor begins behind the last answer.
    pub(crate) pending: VecDeque<Pending>,
    /// The number of the oldest.
    pub(crate) first: u64,
    /// Packets for this queue's receive ring.
    pub(crate) held: VecDeque<Held>,
    /// A packet waited here in vain, and none was delivered since: no other packet waits.
    pub(crate) is_starved: bool,
    /// An event was taken, and the channel is not rearmed.
    pub(crate) has_event: bool,
    /// The engine has that event still to read.
    pub(crate) is_read_by_engine: bool,
    /// The engine waits for an event.
    pub(crate) is_watched: bool,
    /// Something was done since events were let through.
    pub(crate) has_worked: bool,
    /// The guest was notified of the answers that were published last.
    pub(crate) was_notified: bool,
    /// The channel stays as it is until then: events that bring nothing are held back.
    pub(crate) quiet_until_ns: u64,
    /// Records whose packets this queue has sent, and that were answered in this turn.
    pub(crate) tx_answered: Vec<Answered>,
    /// Records whose packets this queue has received in this turn.
    pub(crate) rx_answered: Vec<Answered>,
    pub(crate) tx_unseen: Unseen,
    pub(crate) rx_unseen: Unseen,
}

impl Queue {
    fn new(rings: NetRings) -> Queue {
        Queue {
            rings,
            pending: VecDeque::new(),
            first: 0,
            held: VecDeque::new(),
            is_starved: false,
            has_event: false,
            is_read_by_engine: false,
            is_watched: false,
            has_worked: false,
            was_notified: false,
            quiet_until_ns: 0,
            tx_answered: Vec::new(),
            rx_answered: Vec::new(),
            tx_unseen: Unseen::default(),
            rx_unseen: Unseen::default(),
        }
    }

    /// Refuses the packets whose answers a predecessor was writing when it died: their grants are written over. How
    /// many.
    ///
    /// # Errors
    /// The ring is to be stopped.
    pub(crate) fn refuse_torn(&mut self) -> Result<u64, Stop> {
        let (mut there, mut packets) = (self.rings.tx_unconsumed()?, 0);
        let rest = there - self.rings.tx_torn().min(there);
        while there > rest {
            let taken = Taken::take(&mut self.rings, &mut there)?;
            taken.answers(RSP_DROPPED).for_each(|response| self.rings.answer_tx(response));
            packets += 1;
        }
        Ok(packets)
    }

    /// Whether packets with records were answered in this turn.
    pub(crate) fn has_records(&self) -> bool {
        !(self.tx_answered.is_empty() && self.rx_answered.is_empty())
    }

    fn get(&self, seq: u64) -> Option<&Pending> {
        self.pending.get(usize::try_from(seq.checked_sub(self.first)?).ok()?)
    }

    pub(crate) fn get_mut(&mut self, seq: u64) -> Option<&mut Pending> {
        self.pending.get_mut(usize::try_from(seq.checked_sub(self.first)?).ok()?)
    }

    /// Answers all packets up to the first one that is held.
    pub(crate) fn answer(&mut self) {
        while let Some(pending) = self.pending.front().filter(|pending| !pending.is_held) {
            for response in pending.taken.answers(pending.status) {
                self.rings.answer_tx(response);
            }
            let answers = self.rings.tx_answers();
            self.tx_answered.extend(pending.record.map(|record| Answered { record, answers }));
            self.pending.pop_front();
            self.first += 1;
        }
    }

    /// Adds a packet that was taken; its number.
    pub(crate) fn add(&mut self, taken: Taken) -> u64 {
        self.pending.push_back(Pending {
            taken,
            status: RSP_DROPPED,
            is_held: false,
            record: None,
        });
        self.first + self.pending.len() as u64 - 1
    }
}

/// One connected interface.
pub(crate) struct Vif {
    pub(crate) id: VifId,
    pub(crate) domid: DomId,
    pub(crate) epoch: u64,
    pub(crate) features: Features,
    pub(crate) counters: Arc<Counters>,
    pub(crate) queues: Vec<Queue>,
}

impl Vif {
    pub(crate) fn new(connection: Connection, epoch: u64) -> Vif {
        let Connection { id, features, queues, counters, .. } = connection;
        let queues = queues.into_iter().map(Queue::new).collect();
        Vif { id, domid: DomId(id.domid), epoch, features, counters, queues }
    }
}
