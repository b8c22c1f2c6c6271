//! Everything that is Xen: the blkif ABI, and the hypervisor behind it.
//!
//! * [`abi`]: the shared ring and its messages, for x86_64 and x86_32 frontends (pure functions
//!   over copies; no shared memory).
//! * [`ring`]: the back end of a shared ring, the one place that touches its memory.
//! * [`hypervisor`]: the traits [`Hypervisor`](hypervisor::Hypervisor) and
//!   [`Link`](hypervisor::Link), one connected queue.
//! * [`store`]: a client for xenstore's wire protocol.
//! * [`real`]: Xen itself, by /dev/xen/gntdev and /dev/xen/evtchn.

pub mod abi;
pub mod hypervisor;
pub mod mover;
pub mod real;
pub mod ring;
pub mod store;
pub mod xenbus;
