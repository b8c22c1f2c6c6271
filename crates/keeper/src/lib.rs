//! The keeper of a disk: a tiny process that starts the disk's worker, and the next one when it ends.
//!
//! * [`Keep`]: what is kept, and the start of a keeper.
//! * [`Keeper`]: the way to one that runs.
//! * [`run`]: the process itself.
//! * [`forget`]: what is left of one that was killed.
//! * [`Names`], [`give_rights_up`]: what a worker without rights may have, and its way there.
//! * [`Group`], [`Roll`]: several disks that have one keeper and one worker.
//! * [`become_relay`]: the same of a relay, which may have nothing.

#![forbid(unsafe_code)]

use std::sync::OnceLock;

mod client;
mod group;
mod keep;
mod keeper;
mod member;
mod names;
mod pauses;
mod public;
mod relay;
mod roll;
mod socket;
mod wire;
mod worker;

pub use client::{Keeper, Line};
pub use keep::{Ahead, Group, Keep};
pub use keeper::run;
pub use names::{Names, give_rights_up};
pub use public::nbd_socket;
pub use relay::become_relay;
pub use roll::{Called, CalledDisk, Roll};
pub use socket::{forget, name_of, socket_name};
pub use worker::{ALIVE, ALIVE_FD, DOOR_FD, LINE_FD, SECOND_FD};

/// The run directory's name, of the disk or the group that this process keeps.
static DISK: OnceLock<String> = OnceLock::new();

/// Tells it whoever reads this process's standard error. Nobody may be there any more.
pub(crate) fn tell(text: &str) {
    use std::io::Write as _;
    let disk = DISK.get().map_or("", String::as_str);
    let _ = writeln!(std::io::stderr(), "ferrite keeper {disk}: {text}");
}
