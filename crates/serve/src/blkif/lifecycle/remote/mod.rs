//! A worker that is another process than the half that follows xenstore (docs/internals/processes.md).
//!
//! `wire.rs` has the messages, `line.rs` the follower's end of the line, and `work.rs` the worker's. `deferred.rs`
//! has an image that is opened when its guest connects.

mod alone;
pub(super) mod deferred;
pub(super) mod line;
pub(super) mod wire;
pub(super) mod work;

#[cfg(test)]
mod tests;
