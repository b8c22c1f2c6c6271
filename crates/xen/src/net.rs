//! The back end of one queue of a network interface: its two rings, of one page each, and its event channel.

use crate::hypervisor::{Link, PAGE_SIZE};
use crate::netif::{
    ExtraInfo, RSP_ERROR, RX_SLOT_BYTES, RxRequest, RxResponse, TX_SLOT_BYTES, TxRequest,
    TxResponse,
};
use crate::slots::{RingViolation, SlotRing};

/// Our side of a queue's rings, with the [`Link`] that keeps their memory mapped.
///
/// An answer takes the place of its request on the page. A process that is killed must leave the requests as they were,
/// since its successor takes them again. So answers are kept here, and [`publish`](Self::publish) writes them. It says
/// before on the page how many: of a process that is killed while it writes, the successor answers as many requests by
/// an error, without using the grants that they seem to name.
pub struct NetRings {
    tx: SlotRing,
    rx: SlotRing,
    /// Slots of the transmit ring that a predecessor has written over.
    tx_torn: u32,
    /// Answers that are not on the page, in the order of their requests.
    tx_kept: Vec<[u32; 1]>,
    rx_kept: Vec<[u32; 2]>,
    link: Box<dyn Link>,
}

impl NetRings {
    /// Attaches where the shared response producers stand. A predecessor that died has answered up to there, in order:
    /// requests that it had taken beyond are taken again, but for those that it has written over. On the receive ring
    /// these are answered by an error here; on the transmit ring they are [`tx_torn`](Self::tx_torn).
    ///
    /// `link` has two pages: the transmit ring, then the receive ring.
    ///
    /// # Errors
    /// The indices on a page are impossible.
    ///
    /// # Panics
    /// If the link has another number of pages: a bug of the caller.
    pub fn attach(link: Box<dyn Link>) -> Result<NetRings, RingViolation> {
        let memory = link.ring();
        assert_eq!(memory.len(), 2 * PAGE_SIZE, "the rings of a queue have one page each");
        // SAFETY: two whole pages that stay mapped as long as the link, which outlives the rings here.
        let (mut tx, mut rx) = unsafe {
            let tx = SlotRing::new(memory.base(), 1, TX_SLOT_BYTES);
            (tx, SlotRing::new(memory.base().add(PAGE_SIZE), 1, RX_SLOT_BYTES))
        };
        tx.attach()?;
        rx.attach()?;
        let (tx_torn, rx_torn) = (tx.torn()?, rx.torn()?);
        let (tx_kept, rx_kept) = (Vec::new(), Vec::new());
        let mut rings = NetRings { tx, rx, tx_torn, tx_kept, rx_kept, link };
        for _ in 0..rx_torn {
            // The name may be the begin of an extra info now. Frontends find the page by the place of the answer.
            let RxRequest { id, .. } = rings.take_rx();
            rings.answer_rx(RxResponse { id, offset: 0, flags: 0, status: RSP_ERROR });
        }
        Ok(rings)
    }

    /// Slots of the transmit ring, from the oldest that was there at [`attach`](Self::attach), whose first word may be
    /// that of an answer. Flags, names and the types of extra infos are still those of the requests.
    pub fn tx_torn(&self) -> u32 {
        self.tx_torn
    }

    /// The connection below.
    pub fn link(&mut self) -> &mut dyn Link {
        &mut *self.link
    }

    /// The event channel's descriptor.
    pub fn event_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.link.event_fd()
    }

    /// Slots of the transmit ring that may be taken now.
    ///
    /// # Errors
    /// The producer is impossible.
    #[inline]
    pub fn tx_unconsumed(&self) -> Result<u32, RingViolation> {
        self.tx.unconsumed()
    }

    /// Slots of the receive ring that may be taken now.
    ///
    /// # Errors
    /// The producer is impossible.
    #[inline]
    pub fn rx_unconsumed(&self) -> Result<u32, RingViolation> {
        self.rx.unconsumed()
    }

    /// Takes the next slot of the transmit ring: a private copy, each word read once. To be called only after
    /// [`tx_unconsumed`](Self::tx_unconsumed) has seen it.
    #[inline]
    pub fn take_tx(&mut self) -> TxRequest {
        let slot = self.tx.peek_u32s();
        self.tx.consume();
        TxRequest::decode(slot)
    }

    /// Takes the next slot of the transmit ring as an extra info.
    #[inline]
    pub fn take_extra(&mut self) -> ExtraInfo {
        let slot = self.tx.peek_u32s();
        self.tx.consume();
        ExtraInfo::decode(slot)
    }

    /// Takes the next slot of the receive ring, likewise.
    #[inline]
    pub fn take_rx(&mut self) -> RxRequest {
        let slot = self.rx.peek_u32s();
        self.rx.consume();
        RxRequest::decode(slot)
    }

    /// Answers the oldest unanswered slot of the transmit ring. The answer to an extra info has its
    /// [head](ExtraInfo::head) as id, which keeps it in place.
    #[inline]
    pub fn answer_tx(&mut self, response: TxResponse) {
        self.tx_kept.push(response.encode());
    }

    /// Answers the oldest unanswered slot of the receive ring. Frontends find the page by the place of the answer.
    #[inline]
    pub fn answer_rx(&mut self, response: RxResponse) {
        self.rx_kept.push(response.encode());
    }

    /// Answers the oldest unanswered slot of the receive ring by an extra info.
    #[inline]
    pub fn answer_rx_extra(&mut self, extra: ExtraInfo) {
        self.rx_kept.push(extra.encode());
    }

    /// The number of answers that the transmit ring has had, published or not.
    #[inline]
    pub fn tx_answers(&self) -> u32 {
        self.tx.rsp_prod().wrapping_add(self.tx_kept.len() as u32)
    }

    /// The number of answers that the receive ring has had, published or not.
    #[inline]
    pub fn rx_answers(&self) -> u32 {
        self.rx.rsp_prod().wrapping_add(self.rx_kept.len() as u32)
    }

    /// How many answers of the transmit ring the guest says that it has consumed. Any number may be there.
    #[inline]
    pub fn tx_said_consumed(&self) -> u32 {
        self.tx.said_consumed()
    }

    /// How many answers of the receive ring the guest says that it has consumed. Any number may be there.
    #[inline]
    pub fn rx_said_consumed(&self) -> u32 {
        self.rx.said_consumed()
    }

    /// Makes all answers of both rings visible; tells whether the guest asked for an event.
    ///
    /// # Panics
    /// If there are more answers than slots were taken: a bug of ours.
    pub fn publish(&mut self) -> bool {
        let tx = write(&mut self.tx, &mut self.tx_kept);
        write(&mut self.rx, &mut self.rx_kept) || tx
    }

    /// The check before sleeping: asks for an event with the next transmit request, and if `rx` with one more receive
    /// request than there are. Tells whether there is a transmit request already, or one more page.
    ///
    /// # Errors
    /// A producer is impossible.
    pub fn final_check(&mut self, rx: bool) -> Result<bool, RingViolation> {
        let more = match rx {
            true => {
                let there = self.rx.unconsumed()?;
                self.rx.final_check(there)?
            }
            false => false,
        };
        Ok(self.tx.final_check(0)? || more)
    }
}

/// Writes kept answers to a ring. The order is: how many, the answers, the producer.
fn write<const N: usize>(ring: &mut SlotRing, kept: &mut Vec<[u32; N]>) -> bool {
    if kept.is_empty() {
        return false;
    }
    ring.announce(kept.len() as u32);
    for response in kept.drain(..) {
        ring.respond(response);
    }
    ring.publish()
}

#[cfg(test)]
mod tests;
