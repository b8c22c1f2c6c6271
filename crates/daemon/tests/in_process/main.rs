//! Disks that the daemon serves in its own process.

mod attachments;
mod control;
mod deaths;
mod disks;
#[path = "../host/mod.rs"]
mod host;
#[path = "../load/mod.rs"]
mod load;
mod siblings;

/// Not a test: the daemon, if the environment asks for one.
#[test]
fn process_daemon() {
    host::be_a_daemon();
}
