//! The ground floor: how Ferrite reaches the kernel, and nothing else does.
//!
//! * [`arena`]: the memory that guests' data passes through, registered with the kernel.
//! * [`pool`]: who may use which part of it: one fixed pool a disk, shared by its queues.
//! * [`engine`]: the [`Engine`](engine::Engine) trait, batches of operations in and
//!   completions out; [`uring`] implements it on io_uring, [`aio`] on Linux AIO, and [`engines`]
//!   chooses between them.
//! * [`nvme`]: what an NVMe namespace is, and the commands for it.
//! * [`computing`]: what takes a processor for long, beside the threads of queues.
//! * [`executor`] and [`reactor`]: straight-line `async fn` for whatever has steps, on the same
//!   engine and the same thread as the hot path.
//! * [`shm`]: memory that outlives the process (files on tmpfs).
//! * [`scratch`] and [`shared_lock`]: memory for tasks' own I/O, and a lock for tasks of several
//!   threads.
//! * [`byte_locks`] and [`shares`]: locks on bytes of files, and what a host's processes share by them.
//! * [`large`]: tables in huge pages.
//! * [`lock_file`]: a file that says that its owner lives.
//! * [`names`]: what is opened by its name, by this process or by its keeper for it.
//! * [`process`]: processes that are started with chosen descriptors, and that end together.
//! * [`naming`]: what a file is, by whatever name, and a file system.
//! * [`place`]: what a file or a device is, in words that last.
//! * [`directory`]: changes of directory entries, which a crash may take back.
//! * [`sandbox`]: giving up all rights that a worker does not need.
//! * [`socket`]: streams between a socket and the arena.
//! * [`clock`]: time and randomness; no other module of Ferrite asks the system for either.

pub mod aio;
pub mod arena;
pub mod byte_locks;
pub mod clock;
pub mod computing;
pub mod directory;
pub mod engine;
pub mod engines;
pub mod executor;
pub mod large;
pub mod lock_file;
pub mod names;
pub mod naming;
pub mod nvme;
pub mod place;
pub mod pool;
pub mod process;
pub mod processors;
pub mod reactor;
pub mod sandbox;
pub mod scratch;
pub mod shared_lock;
pub mod shares;
pub mod shm;
pub mod socket;
pub mod uring;

mod offload;
mod vector;
mod volatile;
