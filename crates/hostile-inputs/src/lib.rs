//! Hostile inputs, and the rules that all code that reads them must keep.
//!
//! * [`TARGETS`]: one function for each parser of data from guests, clients, images and xenstore. The fuzzer (`fuzz/`
//!   in the repository) calls them with generated inputs; `tests/corpus.rs` calls them with the inputs found so far, on
//!   every test run.
//! * [`images`]: images as plain bytes, from the specifications of their formats and not from our code that reads them,
//!   for tests to damage.

#![forbid(unsafe_code)]

mod clients;
mod dedup;
mod dirty;
mod guest;
pub mod images;
mod names;
mod network;
mod pool;
mod replies;
mod seen;
mod servers;
mod stores;
mod tunnel;
mod vhost;
mod whole;

pub use whole::Recipe;

/// A function that takes any bytes. It panics if the code that it calls breaks a rule.
pub type Target = fn(&[u8]);

/// All targets, by the names of the fuzz targets and of their corpora.
pub const TARGETS: [(&str, Target); 27] = [
    ("counters", seen::counters),
    ("dedup_journal", dedup::journal),
    ("dedup_pages", dedup::pages),
    ("dedup_store", stores::store),
    ("dedup_superblock", dedup::superblock),
    ("dirty_map", dirty::dirty_map),
    ("image_name", names::image_name),
    ("journal", whole::journal),
    ("nbd", clients::nbd),
    ("nbd_client", servers::nbd_client),
    ("nbd_relay", clients::nbd_relay),
    ("nbd_replies", servers::nbd_replies),
    ("nbd_uri", servers::nbd_uri),
    ("net_slots", network::net_slots),
    ("pool_wire", pool::pool_wire),
    ("qcow2", whole::qcow2_image),
    ("ring", guest::ring),
    ("size", names::size),
    ("state", seen::state),
    ("store_client", replies::store_client),
    ("store_keys", replies::store_keys),
    ("store_wire", replies::store_wire),
    ("trace", seen::trace),
    ("tunnel", tunnel::tunnel),
    ("vhd", whole::vhd_image),
    ("vhost", vhost::vhost),
    ("vhost_ring", vhost::vhost_ring),
];

/// Runs the target of that name.
///
/// # Panics
/// If there is none, or the input breaks a rule.
pub fn run(name: &str, input: &[u8]) {
    match TARGETS.iter().find(|(known, _)| *known == name) {
        Some((_, target)) => target(input),
        None => panic!("there is no target {name:?}"),
    }
}
