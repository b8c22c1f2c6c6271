//! Running disks that are changed, copied and backed up while their guests write.

mod backup;
mod dirty;
#[path = "../../../daemon/tests/host/mod.rs"]
mod host;
mod images;
#[path = "../live/mod.rs"]
mod live;
#[path = "../../../daemon/tests/load/mod.rs"]
mod load;
mod merge;
mod mirror;
mod random;
#[path = "../../../daemon/tests/roles/mod.rs"]
mod roles;

/// Not a test: the daemon, if the environment asks for one.
#[test]
fn process_daemon() {
    live::be_a_daemon();
}
