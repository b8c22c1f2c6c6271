//! The error numbers of simulated failures.

/// Interrupted: to be retried.
pub const EINTR: i32 = 4;
/// The medium has failed.
pub const EIO: i32 = 5;
/// Not now: to be retried.
pub const EAGAIN: i32 = 11;
/// No memory.
pub const ENOMEM: i32 = 12;
/// No space.
pub const ENOSPC: i32 = 28;
/// The system has no such call.
pub const ENOSYS: i32 = 38;
/// The file or device has no such operation.
pub const EOPNOTSUPP: i32 = 95;
