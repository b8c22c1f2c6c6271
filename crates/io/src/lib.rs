//! The only way from Ferrite to the kernel's I/O.
//!
//! * [`arena`]: the memory that guests' data passes through, registered with the kernel.
//! * [`pool`]: who may use which part of it: one fixed pool a disk, shared by its queues.
//! * [`engine`]: the [`Engine`](engine::Engine) trait, batches of operations in and
//!   completions out; [`uring`] implements it on io_uring, [`aio`] on Linux AIO, and [`engines`]
//!   chooses between them.
//! * [`computing`]: work that takes a processor for long, beside the threads of queues.
//! * [`executor`] and [`reactor`]: straight-line `async fn` for whatever has steps, on the same
//!   engine and the same thread as the hot path.
//! * [`foreign`]: memory of other processes, mapped: copies in and out.
//! * [`remote`]: data behind a connection, beside files.
//! * [`scratch`] and [`shared_lock`]: memory for tasks' own I/O, and a lock for tasks of several
//!   threads.
//! * [`large`]: tables in huge pages.
//! * [`socket`]: streams between a socket and the arena.
//! * [`ublk`]: the kernel's driver for block devices that a process serves.

pub mod aio;
pub mod arena;
pub mod computing;
pub mod engine;
pub mod engines;
pub mod executor;
pub mod foreign;
pub mod large;
pub mod pool;
pub mod reactor;
pub mod remote;
pub mod scratch;
pub mod shared_lock;
pub mod socket;
pub mod ublk;
pub mod uring;

mod offload;
mod vector;
