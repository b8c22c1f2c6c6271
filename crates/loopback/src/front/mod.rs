//! A blkif frontend: a guest's block driver, which can also behave as a hostile one.
//!
//! [`Frontend`] takes a disk through the xenbus handshake (blkif.md 3.6); [`FrontQueue`] carries
//! requests. Both check the backend as strictly as a hardened blkfront: see [`FrontError`].
//!
//! ```no_run
//! # use std::time::Duration;
//! # use ferrite_loopback::{Machine, machine::DiskPaths};
//! # use ferrite_loopback::front::{FrontError, FrontOptions, Frontend};
//! # fn example(machine: Machine, disk: DiskPaths) -> Result<(), FrontError> {
//! let second = Duration::from_secs(1);
//! let mut front = Frontend::new(machine.guest(disk.domid)?, disk.devid)?;
//! front.connect(&FrontOptions { queues: 2, order: 1, ..FrontOptions::default() }, second)?;
//! let buffer = front.space().buffer(8)?;
//! let queue = &mut front.queues[0];
//! queue.write(0, &buffer, 0, 8 * 4096)?;
//! assert!(queue.next_reply(second)?.is_ok());
//! front.close(second)?;
//! # Ok(())
//! # }
//! ```

mod error;
mod persistent;
mod queue;
mod ring;
mod space;

use std::sync::Arc;
use std::time::Duration;

use super::machine::{state, wait_for_state};
use super::{GuestHandle, LoopbackError};
use ferrite_xen::abi::{MAX_DIRECT_SEGMENTS, MAX_RING_ORDER, Protocol};
use ferrite_xen::store::{Store, StoreError};

pub use error::FrontError;
pub use queue::{FrontQueue, QueueOptions, Reply, Tag};
pub use ring::{RawRing, RingWord};
pub use space::{Alias, Buffer, GuestSpace};

/// The keys that describe the ring (blkif.md 3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingKeys {
    /// As Linux and Windows: `ring-ref` for one page, `ring-page-order` and `ring-refN` for more.
    Linux,
    /// `ring-page-order` and `ring-refN` even for one page.
    AlwaysOrder,
    /// `num-ring-pages` and `ring-refN`, `ring-ref` for one page.
    NumRingPages,
    /// As FreeBSD: both `ring-page-order` and `num-ring-pages`; `ring-ref` for one page.
    Both,
}

/// The properties of a frontend.
#[derive(Clone, Copy, Debug)]
pub struct FrontOptions {
    /// The layout of the ring.
    pub protocol: Protocol,
    /// Whether to write the `protocol` key. Without it the backend takes the frontend for 32-bit
    /// x86.
    pub protocol_key: bool,
    /// The wanted ring order; lower if the backend offers less.
    pub order: u32,
    /// The wanted number of queues; lower if the backend offers fewer.
    pub queues: u32,
    /// The keys for the ring.
    pub ring_keys: RingKeys,
    /// Whether to write `multi-queue-num-queues` for a single queue, too, as Windows does.
    pub always_num_queues: bool,
    /// The most segments of an indirect request; fewer if the backend offers fewer. Linux uses 32; with 11 or fewer
    /// there are no indirect requests.
    pub max_indirect: usize,
    /// See [`QueueOptions::id_bits`].
    pub id_bits: u64,
    /// See [`QueueOptions::regrant`].
    pub regrant: bool,
    /// See [`QueueOptions::check_release`].
    pub check_release: bool,
    /// The value of `feature-persistent`, by default 1 as in Linux. If the backend has the same value,
    /// [`read`](FrontQueue::read) and [`write`](FrontQueue::write) use pages of the queue that stay granted, whatever
    /// `regrant` is.
    pub persistent: bool,
    /// Keep keys of an earlier connection that this one does not write, as Linux does.
    pub keep_keys: bool,
    /// Use `order` and `queues` even if the backend offers less, as a hostile frontend may.
    pub exceed_offer: bool,
}

impl Default for FrontOptions {
    /// A 64-bit Linux guest with one queue and one ring page.
    fn default() -> Self {
        FrontOptions {
            protocol: Protocol::X86_64,
            protocol_key: true,
            order: 0,
            queues: 1,
            ring_keys: RingKeys::Linux,
            always_num_queues: false,
            max_indirect: 32,
            id_bits: 0,
            regrant: false,
            check_release: true,
            persistent: true,
            keep_keys: false,
            exceed_offer: false,
        }
    }
}

impl FrontOptions {
    /// A Windows guest: ids are kernel addresses, the number of queues is always written, and rings and requests are as
    /// large as the backend offers.
    pub fn windows() -> Self {
        FrontOptions {
            order: MAX_RING_ORDER,
            always_num_queues: true,
            max_indirect: usize::MAX,
            id_bits: 0xFFFF_FA80_1234_0000,
            ..Self::default()
        }
    }

    /// A 32-bit Linux guest.
    pub fn x86_32() -> Self {
        FrontOptions { protocol: Protocol::X86_32, ..Self::default() }
    }
}

/// The features that the backend has published (blkif.md 3.3). 0 or `false` for an absent key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// `multi-queue-max-queues`.
    pub max_queues: u64,
    /// `max-ring-page-order`.
    pub max_order: u64,
    /// `feature-max-indirect-segments`.
    pub max_indirect: u64,
    /// `feature-flush-cache`.
    pub flush: bool,
    /// `feature-barrier`.
    pub barrier: bool,
    /// `feature-persistent`.
    pub persistent: bool,
    /// `feature-discard`.
    pub discard: bool,
    /// `discard-granularity`, bytes.
    pub discard_granularity: u64,
    /// `discard-alignment`, bytes.
    pub discard_alignment: u64,
    /// `discard-secure`.
    pub discard_secure: bool,
    /// `sectors`, of 512 bytes.
    pub sectors: u64,
    /// `sector-size`, bytes.
    pub sector_size: u64,
    /// `physical-sector-size`, bytes.
    pub physical_sector_size: u64,
    /// `info`: 4 is read-only.
    pub info: u64,
}

/// The entries that a frontend will publish about a connection: names and values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys(pub Vec<(String, Vec<u8>)>);

impl Keys {
    /// Adds or replaces a key.
    pub fn set(&mut self, key: &str, value: impl ToString) {
        self.set_bytes(key, value.to_string().as_bytes());
    }

    /// Adds or replaces a key whose value need not be text.
    pub fn set_bytes(&mut self, key: &str, value: &[u8]) {
        self.remove(key);
        self.0.push((key.to_owned(), value.to_vec()));
    }

    /// Removes a key.
    pub fn remove(&mut self, key: &str) {
        self.0.retain(|(k, _)| k != key);
    }

    /// A key's value, if it is text.
    pub fn get(&self, key: &str) -> Option<&str> {
        let (_, value) = self.0.iter().find(|(k, _)| k == key)?;
        std::str::from_utf8(value).ok()
    }
}

/// One disk of a guest, on the guest's side.
pub struct Frontend {
    space: Arc<GuestSpace>,
    store: Store,
    frontend: String,
    backend: String,
    features: Features,
    /// This side's value of `feature-persistent`.
    persistent: bool,
    /// The connected queues; a thread may take its own out. [`close`](Self::close) releases those that are here.
    pub queues: Vec<FrontQueue>,
}

impl Frontend {
    /// The frontend of disk `devid` in this guest; the only one in the guest.
    ///
    /// # Errors
    /// The handle has no store connection, or the toolstack has made no such disk.
    pub fn new(mut guest: GuestHandle, devid: u32) -> Result<Frontend, FrontError> {
        let store = guest.take_store().ok_or_else(|| {
            LoopbackError::NotAGuest("the handle has no connection to the store".into())
        })?;
        Self::on(GuestSpace::attach(&guest)?, Store::from_fd(store), devid)
    }

    /// One of several frontends of a guest, on a memory that they share and with a store
    /// connection of its own.
    ///
    /// # Errors
    /// The toolstack has made no such disk.
    pub fn on(space: Arc<GuestSpace>, mut store: Store, devid: u32) -> Result<Self, FrontError> {
        let frontend = format!("{}/device/vbd/{devid}", super::server::home(space.domid()));
        let key = format!("{frontend}/backend");
        let backend =
            store.read_string(&key)?.ok_or(StoreError::NotFound { what: format!("read {key}") })?;
        let (features, persistent, queues) = (Features::default(), false, Vec::new());
        Ok(Frontend { space, store, frontend, backend, features, persistent, queues })
    }

    /// The guest's memory.
    pub fn space(&self) -> &Arc<GuestSpace> {
        &self.space
    }

    /// This frontend's connection to the store, for other operations of a test.
    pub fn store(&mut self) -> &mut Store {
        &mut self.store
    }

    /// The frontend's directory.
    pub fn path(&self) -> &str {
        &self.frontend
    }

    /// The backend's directory.
    pub fn backend_path(&self) -> &str {
        &self.backend
    }

    /// The backend's features at the last call of [`read_features`](Self::read_features): [`connect`](Self::connect)
    /// calls it when the backend is in state 4.
    pub fn features(&self) -> &Features {
        &self.features
    }

    /// Goes from any state to Connected: waits for the backend's 2, makes the queues, writes the keys and 3, waits for
    /// the backend's 4, reads its features, writes 4. Existing queues are [abandoned](FrontQueue::abandon), as by a
    /// guest that restarts without closing.
    ///
    /// # Errors
    /// The backend does not follow in time, or the guest's resources are exhausted.
    pub fn connect(&mut self, o: &FrontOptions, timeout: Duration) -> Result<(), FrontError> {
        if self.state()? != 1 {
            self.set_state(1)?;
        }
        self.wait_for_backend(&[2], timeout)?;
        self.read_features()?;
        self.offer(o)?;
        self.finish(timeout)
    }

    /// The middle of [`connect`](Self::connect): makes the queues, and writes the keys and state 3, by the features
    /// that were read.
    ///
    /// # Errors
    /// The guest's resources are exhausted, or the store refuses a key.
    pub fn offer(&mut self, o: &FrontOptions) -> Result<(), FrontError> {
        self.offer_edited(o, |_| {})
    }

    /// As [`offer`](Self::offer), with the keys changed by `edit` before they are written, as by a hostile frontend
    /// (threats.md T11). Names are relative to the frontend's directory.
    ///
    /// # Errors
    /// Those of [`offer`](Self::offer).
    pub fn offer_edited(
        &mut self,
        o: &FrontOptions,
        edit: impl FnOnce(&mut Keys),
    ) -> Result<(), FrontError> {
        self.queues.drain(..).for_each(FrontQueue::abandon);
        self.persistent = o.persistent;
        let (order, queues) = match o.exceed_offer {
            true => (o.order, o.queues),
            false => (
                o.order.min(self.features.max_order.min(u64::from(MAX_RING_ORDER)) as u32),
                o.queues.min(self.features.max_queues.clamp(1, u64::from(u32::MAX)) as u32),
            ),
        };
        let max_indirect = o.max_indirect.min(self.features.max_indirect as usize);
        let options = QueueOptions {
            protocol: o.protocol,
            order,
            max_indirect: if max_indirect <= MAX_DIRECT_SEGMENTS { 0 } else { max_indirect },
            id_bits: o.id_bits,
            regrant: o.regrant,
            check_release: o.check_release,
            persistent: o.persistent && self.features.persistent,
        };
        for _ in 0..queues {
            self.queues.push(FrontQueue::new(&self.space, options)?);
        }
        let mut keys = self.keys(o, order);
        edit(&mut keys);
        self.publish(&keys, o.keep_keys)
    }

    /// The end of [`connect`](Self::connect): waits for the backend's 4, reads, writes 4.
    ///
    /// # Errors
    /// The backend does not follow in time.
    pub fn finish(&mut self, timeout: Duration) -> Result<(), FrontError> {
        self.wait_for_backend(&[4], timeout)?;
        self.read_features()?;
        // The backend may not have published it yet when the queues were made.
        let persistent = self.persistent && self.features.persistent;
        self.queues.iter_mut().for_each(|queue| queue.set_persistent(persistent));
        self.set_state(4)
    }

    /// The keys for the present queues.
    fn keys(&self, o: &FrontOptions, order: u32) -> Keys {
        let mut keys = Keys::default();
        if o.protocol_key {
            keys.set("protocol", o.protocol.key());
        }
        let many = self.queues.len() > 1;
        if many || o.always_num_queues {
            keys.set("multi-queue-num-queues", self.queues.len());
        }
        let (page_order, num_pages) = match o.ring_keys {
            RingKeys::Linux => (order > 0, false),
            RingKeys::AlwaysOrder => (true, false),
            RingKeys::NumRingPages => (false, true),
            RingKeys::Both => (true, true),
        };
        if page_order {
            keys.set("ring-page-order", order);
        }
        if num_pages {
            keys.set("num-ring-pages", 1 << order);
        }
        let plain = order == 0 && o.ring_keys != RingKeys::AlwaysOrder;
        for (i, queue) in self.queues.iter().enumerate() {
            let dir = if many { format!("queue-{i}/") } else { String::new() };
            for (page, gref) in queue.ring_grefs().iter().enumerate() {
                let number = if plain { String::new() } else { page.to_string() };
                keys.set(&format!("{dir}ring-ref{number}"), gref.0);
            }
            keys.set(&format!("{dir}event-channel"), queue.port());
        }
        keys.set("feature-persistent", u8::from(o.persistent));
        keys
    }

    /// Writes the keys and state 3 in one transaction.
    fn publish(&mut self, keys: &Keys, keep_keys: bool) -> Result<(), FrontError> {
        let frontend = &self.frontend;
        Ok(self.store.transaction(|t| {
            // Keys that an earlier connection has left.
            let is_old = |key: &&String| !keep_keys && is_connection_key(key);
            for old in t.list(frontend)?.iter().filter(is_old) {
                t.remove(&format!("{frontend}/{old}"))?;
            }
            for (key, value) in &keys.0 {
                t.write(&format!("{frontend}/{key}"), value)?;
            }
            t.write(&format!("{frontend}/state"), b"3")
        })?)
    }

    /// Goes to Closed: 5, waits for the backend's 5 or 6, 6, waits for the backend's 6, releases the queues that are
    /// here.
    ///
    /// # Errors
    /// The backend does not follow in time; [`FrontError::StillMapped`] if it is Closed and has not released a ring.
    pub fn close(&mut self, timeout: Duration) -> Result<(), FrontError> {
        self.set_state(5)?;
        self.wait_for_backend(&[5, 6], timeout)?;
        self.set_state(6)?;
        self.wait_for_backend(&[6], timeout)?;
        let mut outcome = Ok(());
        for queue in self.queues.drain(..) {
            outcome = outcome.and(queue.release());
        }
        outcome
    }

    /// Goes on after a resume or a migration as the Windows driver does, up to the backend's 2: it closes whatever the
    /// backend has, and waits without a limit of its own while the whole guest stands still. `connect` follows.
    ///
    /// # Errors
    /// The backend does not follow in time. The guest would hang for ever.
    pub fn resume_as_windows(&mut self, timeout: Duration) -> Result<(), FrontError> {
        // The rings of before are lost with their grants.
        self.queues.drain(..).for_each(FrontQueue::abandon);
        self.wait_for_backend(&[2, 3, 4, 5, 6], timeout)?;
        self.set_state(5)?;
        self.wait_for_backend(&[5, 6], timeout)?;
        self.set_state(6)?;
        self.wait_for_backend(&[6], timeout)?;
        self.set_state(1)?;
        self.wait_for_backend(&[2], timeout).map(drop)
    }

    /// Waits until the backend is in one of these states; returns the state.
    ///
    /// # Errors
    /// [`LoopbackError::Timeout`].
    pub fn wait_for_backend(
        &mut self,
        states: &[u32],
        timeout: Duration,
    ) -> Result<u32, FrontError> {
        let path = format!("{}/state", self.backend);
        Ok(wait_for_state(&mut self.store, &path, states, timeout)?)
    }

    /// The backend's state; 0 if it has none.
    ///
    /// # Errors
    /// The store's.
    pub fn backend_state(&mut self) -> Result<u32, FrontError> {
        Ok(state(&mut self.store, &format!("{}/state", self.backend))?)
    }

    /// This side's state; 0 if there is none.
    ///
    /// # Errors
    /// The store's.
    pub fn state(&mut self) -> Result<u32, FrontError> {
        Ok(state(&mut self.store, &format!("{}/state", self.frontend))?)
    }

    /// Writes this side's state, without checks.
    ///
    /// # Errors
    /// The store's.
    pub fn set_state(&mut self, state: u32) -> Result<(), FrontError> {
        self.write_key("state", state.to_string().as_bytes())
    }

    /// Writes any key of the frontend.
    ///
    /// # Errors
    /// The store's.
    pub fn write_key(&mut self, key: &str, value: &[u8]) -> Result<(), FrontError> {
        Ok(self.store.write(&format!("{}/{key}", self.frontend), value)?)
    }

    /// Removes any key of the frontend.
    ///
    /// # Errors
    /// The store's.
    pub fn remove_key(&mut self, key: &str) -> Result<(), FrontError> {
        Ok(self.store.remove(&format!("{}/{key}", self.frontend))?)
    }

    /// Reads a key of the backend.
    ///
    /// # Errors
    /// The store's.
    pub fn backend_key(&mut self, key: &str) -> Result<Option<String>, FrontError> {
        Ok(self.store.read_string(&format!("{}/{key}", self.backend))?)
    }

    /// Reads the backend's present features.
    ///
    /// # Errors
    /// [`FrontError::Key`] for a value that is not a number.
    pub fn read_features(&mut self) -> Result<&Features, FrontError> {
        let mut number = |key: &str| match self.backend_key(key)? {
            None => Ok(0),
            Some(value) => {
                let error = || FrontError::Key { key: key.into(), value: value.clone() };
                value.parse::<u64>().map_err(|_| error())
            }
        };
        let features = Features {
            max_queues: number("multi-queue-max-queues")?,
            max_order: number("max-ring-page-order")?,
            max_indirect: number("feature-max-indirect-segments")?,
            flush: number("feature-flush-cache")? != 0,
            barrier: number("feature-barrier")? != 0,
            persistent: number("feature-persistent")? != 0,
            discard: number("feature-discard")? != 0,
            discard_granularity: number("discard-granularity")?,
            discard_alignment: number("discard-alignment")?,
            discard_secure: number("discard-secure")? != 0,
            sectors: number("sectors")?,
            sector_size: number("sector-size")?,
            physical_sector_size: number("physical-sector-size")?,
            info: number("info")?,
        };
        self.features = features;
        Ok(&self.features)
    }
}

/// Whether the key is one of [`Frontend::keys`], with any number at its end.
fn is_connection_key(key: &str) -> bool {
    ["ring-ref", "queue-", "ring-page-order", "num-ring-pages", "event-channel", "protocol"]
        .iter()
        .any(|k| key.starts_with(k))
        || key == "multi-queue-num-queues"
}

#[cfg(test)]
mod tests;
