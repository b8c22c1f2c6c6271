//! The back end of one queue of a network interface: its two rings, of one page each, and its event channel.

use crate::hypervisor::{Link, PAGE_SIZE};
use crate::netif::{
    ExtraInfo, RX_SLOT_BYTES, RxRequest, RxResponse, TX_SLOT_BYTES, TxRequest, TxResponse,
};
use crate::slots::{RingViolation, SlotRing};

/// Our side of a queue's rings, with the [`Link`] that keeps their memory mapped.
///
/// An answer takes the place of its request on the page. A process that is killed in between must leave the requests as
/// they were, since its successor takes them again: so answers are kept here, and [`publish`](Self::publish) writes them.
pub struct NetRings {
    tx: SlotRing,
    rx: SlotRing,
    /// Answers that are not on the page, in the order of their requests.
    tx_kept: Vec<TxResponse>,
    rx_kept: Vec<[u32; 2]>,
    link: Box<dyn Link>,
}

impl NetRings {
    /// Attaches where the shared response producers stand. A predecessor that died has answered up to there, in order:
    /// requests that it had taken beyond are taken again.
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
        Ok(NetRings { tx, rx, tx_kept: Vec::new(), rx_kept: Vec::new(), link })
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

    /// Answers a slot of the transmit ring.
    #[inline]
    pub fn answer_tx(&mut self, response: TxResponse) {
        self.tx_kept.push(response);
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
        for response in self.tx_kept.drain(..) {
            self.tx.respond(response.encode());
        }
        let tx = self.tx.publish();
        for response in self.rx_kept.drain(..) {
            self.rx.respond(response);
        }
        self.rx.publish() || tx
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
