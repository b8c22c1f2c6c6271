//! The promises of a disk, by its public interface. One program: each file of its own would have the code of
//! all formats compiled once more. Alone stay tests that count what their process has (held.rs,
//! long_chains.rs, store.rs).

#[path = "../common/mod.rs"]
mod common;
mod model;

mod allowed_parents;
mod chains;
mod damaged;
mod device;
mod dirty;
mod errors;
mod failed_syncs;
mod full;
mod group_commit;
mod header_changes;
mod io;
mod journals;
mod mirror;
mod mirror_map;
mod open;
mod parents;
mod places;
mod qcow2_bitmaps;
mod qcow2_device;
mod qcow2_foreign;
mod qcow2_interop;
mod qcow2_model;
mod qcow2_rebuild;
mod qcow2_repair;
mod qcow2_reuse;
mod qcow2_snapshots;
mod qcow2_space;
mod qcow2_subclusters;
mod qemu_locks;
mod shared_syncs;
mod store_full_below;
mod store_mapped;
mod thin;
mod toolstack;
mod vhd;
mod vhd_footers;
mod vhd_interop;
mod vhd_layout;
mod vhd_tools;
