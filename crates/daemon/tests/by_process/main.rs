//! Disks that the daemon's keepers and workers serve, each a process: this program in another role.

mod device_model;
mod gone;
mod groups;
#[path = "../host/mod.rs"]
mod host;
mod in_use;
mod kept;
#[path = "../load/mod.rs"]
mod load;
mod nbd;
mod orphans;
mod pauses;
mod relay;
#[path = "../roles/mod.rs"]
mod roles;
mod settings;
mod stubs;
mod taps;
mod two_hosts;
mod upgrades;

use std::sync::Arc;

use ferrite_daemon::keepers::Keepers;

/// Not a test: the daemon, if the environment asks for one.
#[test]
fn process_daemon() {
    host::be_a_daemon_with(|run| Arc::new(Keepers::new(run, Box::new(roles::Roles))));
}
