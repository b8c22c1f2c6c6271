//! Guests without Xen: the same interfaces, between threads or processes of one Linux machine.
//!
//! It is not Xen, and no figure from it is called Xen. What stands in for what:
//!
//! | Xen | here | where |
//! |---|---|---|
//! | guest memory | frames of a sealed memfd | [`memory`] |
//! | grant table | one 64-bit atomic word a reference, in the same memfd | [`grants`] |
//! | event channels | pairs of eventfds | [`guest`] |
//! | map | mmap of the memfd's frames (real page-table work) | [`link`] |
//! | grant copy | memcpy, or process_vm_readv and process_vm_writev | [`copy`] |
//! | xenstored | a thread that speaks its wire protocol | [`server`] |
//! | toolstack | [`machine::Machine`] | [`machine`] |
//! | blkfront | [`front::Frontend`] | [`front`] |
//!
//! Whatever a frontend can reach (its memory, its grants, its part of the store) is as hostile as
//! on Xen, and is treated so. What it can *not* reach on Xen it partly can here: it knows the
//! eventfds, and names the process that `process_vm_*` calls go to. Loopback is for tests and
//! measurements; it isolates nobody.

pub mod bare;
pub mod copy;
pub mod front;
pub mod grants;
pub mod guest;
pub mod link;
pub mod machine;
pub mod memory;
pub mod pipeline;
pub mod server;

use std::io;

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::StoreError;

pub use copy::CopyWith;
pub use guest::{BackendHandle, GuestHandle, GuestOptions};
pub use link::Loopback;
pub use machine::Machine;
pub use server::StoreServer;

/// Whom the frontends grant their frames to, and who serves the disks: dom0.
pub const BACKEND_DOMID: DomId = DomId(0);

/// Why something in the loopback world failed.
#[derive(Debug, thiserror::Error)]
pub enum LoopbackError {
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The step that was tried.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The text that should describe inherited descriptors does not.
    #[error("{text:?} does not describe a guest: {problem}; pass what GuestHandle::pass_to gave")]
    Handle {
        /// The value that was given.
        text: String,
        /// Its fault.
        problem: String,
    },
    /// The descriptor is not the memory of a guest.
    #[error("this is not a guest's memory: {0}")]
    NotAGuest(String),
    /// Another backend serves this guest.
    #[error("guest {domid} is already served by process {pid}; stop that one first")]
    Busy {
        /// Which guest.
        domid: DomId,
        /// The backend that serves it.
        pid: u32,
    },
    /// The store refused something that the toolstack or a frontend asked of it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something did not happen in time.
    #[error("{what} within {ms} ms")]
    Timeout {
        /// The event that did not come, as in "the backend did not reach state 4".
        what: String,
        /// How long it was waited for.
        ms: u64,
    },
    /// A frontend has used up something of its guest's.
    #[error("the guest has no free {what} left; create it with more (GuestOptions)")]
    Exhausted {
        /// Frames, grants or ports.
        what: &'static str,
    },
}

impl LoopbackError {
    /// For `map_err`: adds what was tried to the kernel's answer.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |e| LoopbackError::System { what, source: e.into() }
    }
}

/// Has a function of a test program called before its `main`, while there is one thread: for a process
/// that plays another role.
#[macro_export]
macro_rules! before_main {
    ($role:path) => {
        const _: () = {
            extern "C" fn role() {
                $role();
            }
            // SAFETY: the loader calls what stands in this section, after the standard library's own.
            #[used]
            #[unsafe(link_section = ".init_array")]
            static ROLE: extern "C" fn() = role;
        };
    };
}
