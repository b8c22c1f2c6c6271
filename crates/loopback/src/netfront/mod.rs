//! A netfront: one network interface of a guest, in threads of a test. It checks the backend as a hardened netfront does.

mod queue;

use std::sync::Arc;
use std::time::Duration;

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};

use super::front::{FrontError, GuestSpace};
use super::machine::wait_for_state;
use super::{GuestHandle, LoopbackError};

pub use queue::{NetError, NetQueue, Packet, SendOptions, Sent};

/// How a frontend connects.
#[derive(Clone, Copy, Debug)]
pub struct NetOptions {
    /// Queues, if the backend offers so many.
    pub queues: u32,
    /// It takes packets of several slots.
    pub sg: bool,
    /// It takes packets that need segmentation, of both families.
    pub gso: bool,
    /// Pages that it keeps on each receive ring.
    pub rx_slots: u32,
}

impl Default for NetOptions {
    /// As Linux: one queue, everything that there is.
    fn default() -> Self {
        NetOptions { queues: 1, sg: true, gso: true, rx_slots: 256 }
    }
}

/// One network interface of a guest, on the guest's side.
pub struct NetFront {
    space: Arc<GuestSpace>,
    store: Store,
    frontend: String,
    backend: String,
    /// The connected queues; a thread may take its own out.
    pub queues: Vec<NetQueue>,
}

impl NetFront {
    /// The frontend of interface `handle` in this guest; the only one in the guest.
    ///
    /// # Errors
    /// The handle has no store connection, or the toolstack has made no such interface.
    pub fn new(mut guest: GuestHandle, handle: u32) -> Result<NetFront, FrontError> {
        let store = guest.take_store().ok_or_else(|| {
            LoopbackError::NotAGuest("the handle has no connection to the store".into())
        })?;
        NetFront::on(GuestSpace::attach(&guest)?, Store::from_fd(store), handle)
    }

    /// One of several frontends of a guest.
    ///
    /// # Errors
    /// The toolstack has made no such interface.
    pub fn on(space: Arc<GuestSpace>, mut store: Store, handle: u32) -> Result<Self, FrontError> {
        let frontend = format!("{}/device/vif/{handle}", super::server::home(space.domid()));
        let key = format!("{frontend}/backend");
        let backend =
            store.read_string(&key)?.ok_or(StoreError::NotFound { what: format!("read {key}") })?;
        Ok(NetFront { space, store, frontend, backend, queues: Vec::new() })
    }

    /// The guest.
    pub fn domid(&self) -> DomId {
        self.space.domid()
    }

    /// The guest's memory.
    pub fn space(&self) -> &Arc<GuestSpace> {
        &self.space
    }

    /// A key of the backend.
    ///
    /// # Errors
    /// The store's.
    pub fn backend_key(&mut self, key: &str) -> Result<Option<String>, FrontError> {
        Ok(self.store.read_string(&format!("{}/{key}", self.backend))?)
    }

    /// Waits until the backend is in one of these states.
    ///
    /// # Errors
    /// [`LoopbackError::Timeout`].
    pub fn wait_for_backend(&mut self, states: &[u32], time: Duration) -> Result<u32, FrontError> {
        let path = format!("{}/state", self.backend);
        Ok(wait_for_state(&mut self.store, &path, states, time)?)
    }

    /// Writes this side's state.
    ///
    /// # Errors
    /// The store's.
    pub fn set_state(&mut self, state: u32) -> Result<(), FrontError> {
        self.write_key("state", state)
    }

    /// Writes a key of this side.
    ///
    /// # Errors
    /// The store's.
    pub fn write_key(&mut self, key: &str, value: impl ToString) -> Result<(), FrontError> {
        let path = format!("{}/{key}", self.frontend);
        Ok(self.store.write(&path, value.to_string().as_bytes())?)
    }

    /// Goes from any state to Connected, with new rings. Existing queues are abandoned, as by a guest that restarts.
    ///
    /// # Errors
    /// The backend does not follow in time, or the guest's resources are exhausted.
    pub fn connect(&mut self, o: &NetOptions, timeout: Duration) -> Result<(), FrontError> {
        self.set_state(1)?;
        self.wait_for_backend(&[2], timeout)?;
        self.offer(o)?;
        self.set_state(4)?;
        self.wait_for_backend(&[4], timeout).map(drop)
    }

    /// Makes the queues and writes all keys but the state.
    ///
    /// # Errors
    /// The guest's resources are exhausted, or the store's.
    pub fn offer(&mut self, o: &NetOptions) -> Result<(), FrontError> {
        let offered = self.backend_key("multi-queue-max-queues")?;
        let most = offered.and_then(|value| value.parse().ok()).unwrap_or(1);
        let queues = o.queues.clamp(1, most);
        self.queues.clear();
        for _ in 0..queues {
            self.queues.push(NetQueue::new(&self.space, o.rx_slots)?);
        }
        if queues > 1 {
            self.write_key("multi-queue-num-queues", queues)?;
        }
        for i in 0..queues as usize {
            let prefix = if queues > 1 { format!("queue-{i}/") } else { String::new() };
            let (tx, rx, port) = self.queues[i].references();
            self.write_key(&format!("{prefix}tx-ring-ref"), tx)?;
            self.write_key(&format!("{prefix}rx-ring-ref"), rx)?;
            self.write_key(&format!("{prefix}event-channel"), port)?;
        }
        self.write_key("request-rx-copy", 1)?;
        self.write_key("feature-rx-notify", 1)?;
        self.write_key("feature-sg", u8::from(o.sg))?;
        self.write_key("feature-gso-tcpv4", u8::from(o.gso))?;
        self.write_key("feature-gso-tcpv6", u8::from(o.gso))?;
        self.write_key("feature-ipv6-csum-offload", 1)
    }

    /// Closes from this side, and waits for the backend.
    ///
    /// # Errors
    /// The backend does not follow in time.
    pub fn close(&mut self, timeout: Duration) -> Result<(), FrontError> {
        self.set_state(5)?;
        self.wait_for_backend(&[5, 6], timeout)?;
        self.set_state(6)?;
        self.wait_for_backend(&[6], timeout)?;
        self.queues.clear();
        Ok(())
    }
}
