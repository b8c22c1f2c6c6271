//! Guests without Xen: the same interfaces, between threads or processes of one Linux machine.
//!
//! It is not Xen, and no figure from it is called Xen. The replacements:
//!
//! | Xen | here | where |
//! |---|---|---|
//! | guest memory | frames of a sealed memfd | [`memory`] |
//! | grant table | one 64-bit atomic word per reference, in the same memfd | [`grants`] |
//! | event channels | pairs of eventfds | [`guest`] |
//! | map | mmap of the memfd's frames (real page-table work) | [`link`] |
//! | grant copy | memcpy, or process_vm_readv and process_vm_writev | [`copy`] |
//! | grant copy from guest to guest | memcpy | [`pages`] |
//! | xenstored | a thread that speaks its wire protocol | [`server`] |
//! | toolstack | [`machine::Machine`] | [`machine`] |
//! | blkfront | [`front::Frontend`] | [`front`] |
//! | netfront | [`netfront::NetFront`] | [`netfront`] |
//!
//! Beside these, [`vhost`] has a guest of another kind: a front end of vhost-user with a virtio driver.
//!
//! Everything that a frontend can access (its memory, its grants, its part of the store) is as hostile as on Xen, and
//! is treated so. Some resources that it could *not* access on Xen it can here: it has the eventfds, and names the
//! process for `process_vm_*` calls. Loopback is for tests and measurements; it is no isolation.

pub mod bare;
pub mod copy;
pub mod front;
pub mod grants;
pub mod guest;
pub mod link;
pub mod machine;
pub mod memory;
pub mod netfront;
pub mod pages;
pub mod pipeline;
pub mod server;
pub mod vhost;

use std::io;

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::StoreError;

pub use copy::CopyWith;
pub use guest::{BackendHandle, GuestHandle, GuestOptions};
pub use link::Loopback;
pub use machine::Machine;
pub use server::StoreServer;

/// The domain of the backend, to which frontends grant their frames: dom0.
pub const BACKEND_DOMID: DomId = DomId(0);

/// The error of a loopback operation.
#[derive(Debug, thiserror::Error)]
pub enum LoopbackError {
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The failed step.
        what: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The text for inherited descriptors is invalid.
    #[error("{text:?} does not describe a guest: {problem}; pass what GuestHandle::pass_to gave")]
    Handle {
        /// The text.
        text: String,
        /// The reason.
        problem: String,
    },
    /// The descriptor is not the memory of a guest.
    #[error("this is not a guest's memory: {0}")]
    NotAGuest(String),
    /// Another backend serves this guest.
    #[error("guest {domid} is already served by process {pid}; stop that one first")]
    Busy {
        /// The guest.
        domid: DomId,
        /// The process of that backend.
        pid: u32,
    },
    /// The store refused a request of the toolstack or of a frontend.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something did not happen in time.
    #[error("{what} within {ms} ms")]
    Timeout {
        /// The event that did not come, as in "the backend did not reach state 4".
        what: String,
        /// The duration of the wait.
        ms: u64,
    },
    /// A frontend has used up a resource of its guest.
    #[error("the guest has no free {what} left; create it with more (GuestOptions)")]
    Exhausted {
        /// Frames, grants or ports.
        what: &'static str,
    },
}

impl LoopbackError {
    /// For `map_err`: adds the failed step to the kernel's error.
    pub(crate) fn system<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |e| LoopbackError::System { what, source: e.into() }
    }
}

/// Has a function of a test program called before its `main`, while there is one thread: for a process in another role.
#[macro_export]
macro_rules! before_main {
    ($role:path) => {
        const _: () = {
            extern "C" fn role() {
                $role();
            }
            // SAFETY: the loader calls the functions in this section, after the standard library's own.
            #[used]
            #[unsafe(link_section = ".init_array")]
            static ROLE: extern "C" fn() = role;
        };
    };
}
