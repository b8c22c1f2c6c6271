//! The network interfaces of a host's guests, and the switch between them. Experimental.
//!
//! Two threads serve a switch. `control` follows xenstore: it connects interfaces, and disconnects them. `worker`
//! owns all rings and the [`switch`]: nothing there is shared, so nothing is locked.
//!
//! A packet's way: its slots are copied ([`packet`]), then the first bytes of the frame. The switch judges that private
//! copy, and the receiver gets that copy. All other bytes go from the sender's page to the receiver's by one grant copy.

#![forbid(unsafe_code)]

mod control;
pub mod counters;
pub mod packet;
pub mod switch;
pub mod tap;
pub mod trace;
mod vif;
mod worker;

use std::io;
use std::sync::Arc;

use ferrite_xen::hypervisor::{Hypervisor, HypervisorError};
use ferrite_xen::store::{Store, StoreError};

pub use counters::{Counters, Counts};
pub use packet::{Gso, GsoKind, Offload, Uplink};

/// An interface: its guest, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VifId {
    /// The guest's domain.
    pub domid: u16,
    /// The interface's number.
    pub handle: u32,
}

impl std::fmt::Display for VifId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "vif{}.{}", self.domid, self.handle)
    }
}

/// The options of a network.
pub struct Options {
    /// The name of the directory below `backend` in xenstore whose interfaces are served.
    pub kind: String,
    /// Only interfaces with this hotplug script are served: others are of another backend.
    pub script: Option<String>,
    /// The most queues of an interface.
    pub queues: u32,
    /// How long a packet waits for a receiver that has no pages for it, milliseconds.
    pub hold_ms: u64,
    /// How long the worker looks for packets before it sleeps, microseconds.
    pub poll_us: u64,
    /// The way to the guests.
    pub hypervisor: Arc<dyn Hypervisor>,
    /// A connection of its own.
    pub store: Store,
    /// The way out of the switch.
    pub uplink: Option<Box<dyn Uplink>>,
    /// Where each packet leaves a record.
    pub trace: Option<trace::TraceRing>,
}

impl Options {
    /// Four queues, 50 ms, 20 us; no polling where there is one processor only.
    pub fn new(kind: &str, hypervisor: Arc<dyn Hypervisor>, store: Store) -> Options {
        let several = std::thread::available_parallelism().is_ok_and(|n| n.get() > 1);
        let poll_us = if several { 20 } else { 0 };
        let kind = kind.into();
        let (script, uplink, trace) = (None, None, None);
        Options { kind, script, queues: 4, hold_ms: 50, poll_us, hypervisor, store, uplink, trace }
    }
}

/// Why a network could not be started, or ended.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// This host cannot do it.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// xenstore does not answer.
    #[error("the network cannot follow xenstore: {0}; start it again when xenstored runs")]
    Store(#[from] StoreError),
    /// The kernel refused something.
    #[error("cannot {what} for the network: {source}")]
    System {
        /// The failed step.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// A running network. Dropping it ends it: interfaces stay connected in xenstore, and the next network takes them over.
pub struct Network {
    control: Option<control::Control>,
}

impl Network {
    /// Starts both threads.
    ///
    /// # Errors
    /// The hypervisor cannot copy from guest to guest, or xenstore or the kernel refuses.
    pub fn start(options: Options) -> Result<Network, NetworkError> {
        control::start(options).map(|control| Network { control: Some(control) })
    }

    /// The counters of all connected interfaces.
    pub fn counters(&self) -> Vec<(VifId, Counts)> {
        self.control.as_ref().map(control::Control::counters).unwrap_or_default()
    }

    /// Whether it has ended by itself: [`Network::wait`] tells why.
    pub fn has_ended(&self) -> bool {
        self.control.as_ref().is_none_or(control::Control::has_ended)
    }

    /// Waits until the network has ended by itself: only with an error.
    ///
    /// # Errors
    /// xenstore has gone.
    pub fn wait(mut self) -> Result<(), NetworkError> {
        self.control.take().map_or(Ok(()), control::Control::join)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        if let Some(control) = self.control.take() {
            control.stop();
            if let Err(e) = control.join() {
                tracing::warn!("{e}");
            }
        }
    }
}
