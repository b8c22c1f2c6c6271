//! The offer to a frontend, and the frontend's answer (blkif.md 3.3 and 3.4).
//!
//! The guest can change the frontend's directory at any time and may write anything there. So each
//! key is read once and checked strictly, and only the checked copy is used (T11).

use std::collections::HashSet;

use ferrite_disk::DiscardLimits;
use ferrite_xen::abi::{MAX_RING_ORDER, Protocol, SECTOR_BYTES};
use ferrite_xen::hypervisor::GrantRef;
use ferrite_xen::store::{Store, StoreError, Transaction};
use serde::{Deserialize, Serialize};

use crate::blkif::as_json;

// Bits of the `info` key.
pub(crate) const INFO_CDROM: u32 = 1;
pub(crate) const INFO_REMOVABLE: u32 = 2;
pub(crate) const INFO_READ_ONLY: u32 = 4;
/// Most characters of a guest's value that an error repeats.
const SHOWN_BYTES: usize = 32;

/// The limits with which a disk is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Most queues, at least 1.
    pub max_queues: u32,
    /// Largest ring order, 0 to 4.
    pub max_ring_order: u32,
    /// Segments of an INDIRECT request; 0 means not offered.
    pub max_indirect_segments: u16,
    /// Grants may stay mapped: `feature-persistent`. Offered only with the mover that supports it.
    pub persistent: bool,
}

/// The properties of a disk that a frontend is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFacts {
    /// The disk's size in units of 512 bytes.
    pub sectors: u64,
    /// The disk is not open for writing.
    pub read_only: bool,
    /// The physical block size of the medium.
    pub physical_block_bytes: u32,
    /// The limits of discard, if the disk supports it.
    #[serde(with = "as_json::discard")]
    pub discard: Option<DiscardLimits>,
    /// Segments of the largest request that always finds a buffer.
    pub max_segments: u16,
    /// Whether no more than one queue may use it. A worker of an older release has no such disks.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub one_queue: bool,
}

/// The keys of one queue that the frontend set up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueKeys {
    /// The grants of the ring's pages, in order.
    #[serde(with = "as_json::grants")]
    pub ring: Vec<GrantRef>,
    /// The guest's port of the event channel.
    pub port: u32,
}

/// The connection that a frontend asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// The layout of the ring's slots.
    #[serde(with = "as_json::protocol")]
    pub protocol: Protocol,
    /// Each ring has `2^ring_order` pages.
    pub ring_order: u32,
    /// The queues: at least 1, at most the offered number.
    pub queues: Vec<QueueKeys>,
    /// The frontend also accepts that grants stay mapped.
    pub persistent: bool,
}

impl Wanted {
    /// Returns whether both are the same connection. It compares the keys that a frontend cannot
    /// change without a new connection.
    pub fn has_rings_of(&self, other: &Wanted) -> bool {
        self.protocol == other.protocol
            && self.ring_order == other.ring_order
            && self.queues == other.queues
    }

    /// Returns the rings as one line. Equal lines mean the same connection.
    pub fn line(&self) -> String {
        let queue = |q: &QueueKeys| {
            let refs: Vec<_> = q.ring.iter().map(|r| r.0.to_string()).collect();
            format!("ring={} port={}", refs.join(","), q.port)
        };
        self.queues.iter().map(queue).collect::<Vec<_>>().join("; ")
    }
}

/// Why a frontend cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum NegotiateError {
    /// xenstore failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A key is missing or invalid.
    #[error("the frontend's {key} {why}")]
    Key {
        /// The key's name.
        key: String,
        /// How the key is wrong, as the end of a sentence.
        why: String,
    },
}

/// Writes all keys that describe the disk, with the given bits of `info`. Windows reads features
/// before InitWait, Linux at Connected. This runs at both times, so both find them (blkif.md 3.3).
///
/// # Errors
/// Fails if xenstore fails.
pub fn publish(
    tx: &mut Transaction<'_>,
    backend: &str,
    disk: &DiskFacts,
    offer: &Offer,
    discard: bool,
    info: u32,
) -> Result<(), StoreError> {
    let mut put = |key: &str, value: u64| -> Result<(), StoreError> {
        tx.write(&format!("{backend}/{key}"), value.to_string().as_bytes())
    };
    put("feature-max-indirect-segments", offer.max_indirect_segments.into())?;
    put("multi-queue-max-queues", offer.max_queues.into())?;
    put("max-ring-page-order", offer.max_ring_order.into())?;
    put("max-ring-pages", 1 << offer.max_ring_order)?;
    // A barrier without a flush makes blkfront send FUA writes that crash the guest (2, rule 8).
    put("feature-flush-cache", 1)?;
    put("feature-barrier", 1)?;
    // Without this key a guest might assume persistent grants, and would copy all data in vain
    // (4.5).
    put("feature-persistent", offer.persistent.into())?;
    // After a migration Windows keeps the old host's value of a key that is missing: each has one, zeros too.
    put("feature-discard", discard.into())?;
    let limits = disk.discard.filter(|_| discard);
    put("discard-granularity", limits.map_or(0, |limits| limits.granularity_bytes.into()))?;
    put("discard-alignment", limits.map_or(0, |limits| limits.alignment_bytes.into()))?;
    put("discard-secure", 0)?;
    put("removable", (info & INFO_REMOVABLE != 0).into())?;
    put("sectors", disk.sectors)?;
    // [MUST] 512 on the wire, always (3.5); the medium's preferred block size is only a hint.
    put("sector-size", SECTOR_BYTES)?;
    put("physical-sector-size", disk.physical_block_bytes.into())?;
    put("info", info.into())
}

/// Reads the offer of a predecessor from the backend's own directory, for a take-over. Returns the
/// offer, and whether discard was offered.
///
/// # Errors
/// Fails if xenstore fails, or if the directory was tampered with.
pub fn published_offer(store: &mut Store, backend: &str) -> Result<(Offer, bool), NegotiateError> {
    let mut keys = Keys { store, dir: backend };
    let mut number = |key: &str, max| Ok::<_, NegotiateError>(keys.number(key, max)?.unwrap_or(0));
    let offer = Offer {
        max_queues: number("multi-queue-max-queues", u32::MAX)?,
        max_ring_order: number("max-ring-page-order", MAX_RING_ORDER)?,
        max_indirect_segments: number("feature-max-indirect-segments", 4096)? as u16,
        persistent: number("feature-persistent", 1)? == 1,
    };
    Ok((offer, number("feature-discard", 1)? == 1))
}

/// Reads and checks the connection that the frontend asks for.
///
/// # Errors
/// [`NegotiateError::Key`] names a key that cannot be accepted.
pub fn read_frontend(
    store: &mut Store,
    frontend: &str,
    offer: &Offer,
) -> Result<Wanted, NegotiateError> {
    let mut keys = Keys { store, dir: frontend };
    let name = keys.text("protocol")?;
    let protocol = Protocol::from_key(name.as_deref())
        .ok_or_else(|| bad("protocol", format!("{:?} is not known here", shown(&name))))?;
    let queue_count = keys.number("multi-queue-num-queues", offer.max_queues)?.unwrap_or(1);
    if queue_count == 0 {
        return Err(bad("multi-queue-num-queues", "is 0".to_owned()));
    }
    let ring = keys.ring_shape(offer)?;
    let mut queues = Vec::new();
    for i in 0..queue_count {
        // Windows writes the number even if it is 1. The queue's keys are then at the top of the
        // directory.
        let prefix = if queue_count == 1 { String::new() } else { format!("queue-{i}/") };
        queues.push(keys.queue(&prefix, ring)?);
    }
    let mut seen = HashSet::new();
    if let Some(twice) = queues.iter().flat_map(|q| &q.ring).find(|r| !seen.insert(r.0)) {
        return Err(bad("ring-ref", format!("names grant {} twice", twice.0)));
    }
    let mut seen = HashSet::new();
    if let Some(q) = queues.iter().find(|q| !seen.insert(q.port)) {
        return Err(bad("event-channel", format!("{} is used by two queues", q.port)));
    }
    // Both ends must announce it. Any value but `1` means no.
    let persistent = offer.persistent && keys.text("feature-persistent")?.as_deref() == Some("1");
    Ok(Wanted { protocol, ring_order: ring.order, queues, persistent })
}

fn bad(key: &str, why: String) -> NegotiateError {
    NegotiateError::Key { key: key.to_owned(), why }
}

fn shown(value: &Option<String>) -> String {
    value.as_deref().unwrap_or_default().chars().take(SHOWN_BYTES).collect()
}

/// How a frontend names the keys of its rings.
#[derive(Clone, Copy)]
struct RingShape {
    order: u32,
    /// The keys are `ring-ref0`, `ring-ref1` and so on. Otherwise the key is `ring-ref`.
    numbered: bool,
}

struct Keys<'a> {
    store: &'a mut Store,
    dir: &'a str,
}

impl Keys<'_> {
    fn text(&mut self, key: &str) -> Result<Option<String>, NegotiateError> {
        let Some(value) = self.store.read(&format!("{}/{key}", self.dir))? else {
            return Ok(None);
        };
        match String::from_utf8(value) {
            Ok(text) if !text.contains('\0') => Ok(Some(text)),
            _ => Err(bad(key, "is not text".to_owned())),
        }
    }

    /// Reads a decimal number of at most `max`. A sign, a space or `0x` is refused.
    fn number(&mut self, key: &str, max: u32) -> Result<Option<u32>, NegotiateError> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        let digits =
            !text.is_empty() && text.len() <= 10 && text.bytes().all(|b| b.is_ascii_digit());
        match text.parse::<u32>() {
            Ok(n) if digits && n <= max => Ok(Some(n)),
            _ => {
                let text = shown(&Some(text));
                Err(bad(key, format!("is {text:?}, not a number from 0 to {max}")))
            }
        }
    }

    fn required(&mut self, key: &str) -> Result<u32, NegotiateError> {
        self.number(key, u32::MAX)?.ok_or_else(|| bad(key, "is missing".to_owned()))
    }

    /// Reads the ring's size (blkif.md 3.4): `ring-page-order`, or the older `num-ring-pages`, or
    /// one page.
    fn ring_shape(&mut self, offer: &Offer) -> Result<RingShape, NegotiateError> {
        if let Some(order) = self.number("ring-page-order", offer.max_ring_order)? {
            return Ok(RingShape { order, numbered: true });
        }
        let Some(pages) = self.number("num-ring-pages", 1 << offer.max_ring_order)? else {
            return Ok(RingShape { order: 0, numbered: false });
        };
        if !pages.is_power_of_two() {
            return Err(bad("num-ring-pages", format!("is {pages}, not a power of two")));
        }
        Ok(RingShape { order: pages.ilog2(), numbered: pages > 1 })
    }

    fn queue(&mut self, prefix: &str, shape: RingShape) -> Result<QueueKeys, NegotiateError> {
        let mut ring = Vec::new();
        for i in 0..1u32 << shape.order {
            let plain = format!("{prefix}ring-ref");
            let numbered = format!("{plain}{i}");
            let reference = if !shape.numbered {
                self.required(&plain)?
            } else if shape.order > 0 {
                self.required(&numbered)?
            } else {
                // Order 0 written out: Linux and QEMU look for ring-ref0, FreeBSD for ring-ref.
                match self.number(&numbered, u32::MAX)? {
                    Some(reference) => reference,
                    None => self.required(&plain)?,
                }
            };
            ring.push(GrantRef(reference));
        }
        Ok(QueueKeys { ring, port: self.required(&format!("{prefix}event-channel"))? })
    }
}
