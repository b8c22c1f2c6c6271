//! Guests whose disks are on other servers: NBD, Ceph, a pool.

#[path = "../deep/mod.rs"]
mod deep;
mod docs;
#[path = "../far/mod.rs"]
mod far;
mod guests;
#[path = "../../../daemon/tests/host/mod.rs"]
mod host;
#[path = "../pages/mod.rs"]
mod pages;
mod pool;
#[path = "../pooled/mod.rs"]
mod pooled;
mod rbd;
#[path = "../../../daemon/tests/roles/mod.rs"]
mod roles;
#[path = "../tls/mod.rs"]
#[allow(dead_code, reason = "a module of several programs, not all of which use all")]
mod tls;
mod two_hosts;

/// Not a test: the daemon, if the environment asks for one.
#[test]
fn process_daemon() {
    far::be_a_daemon();
}
