//! Everything that is Xen: the ABI of disks and of network interfaces, and the hypervisor behind it.
//!
//! * [`abi`]: the shared ring and its messages, for x86_64 and x86_32 frontends (pure functions
//!   over copies; no shared memory).
//! * [`slots`]: a shared ring of slots of any size, the one place that touches its memory.
//! * [`ring`]: the back end of a disk's ring.
//! * [`netif`]: the messages of a network interface. [`net`]: the back end of the two rings of its queue.
//! * [`pages`]: copies between the pages of any guests.
//! * [`hypervisor`]: the traits [`Hypervisor`](hypervisor::Hypervisor) and
//!   [`Link`](hypervisor::Link), one connected queue.
//! * [`store`]: a client for xenstore's wire protocol.
//! * [`real`]: Xen itself, by /dev/xen/gntdev and /dev/xen/evtchn.

pub mod abi;
#[cfg(test)]
mod bare;
pub mod hypervisor;
pub mod mover;
pub mod net;
pub mod netif;
pub mod pages;
pub mod real;
pub mod ring;
pub mod slots;
pub mod store;
pub mod xenbus;
