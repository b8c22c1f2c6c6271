//! The map of a pool in etcd: its servers, its disks, and which server has which part of a disk.
//!
//! A *disk* is a list of *segments*: one is made with the disk, and one at each growth. A segment is striped over *sets*. A
//! set is one to three *copies* with equal content, on different hosts. A copy is a file on a server. Each set has a record
//! ([`ferrite_pool::Record`]) in a key of its own, which its owner alone changes.
//!
//! | key | content |
//! |---|---|
//! | `ferrite/pools/NAME` | [`Pool`]: identifier, servers that get nothing new. Each change of the map writes it |
//! | `ferrite/POOL/servers/NAME` | [`Server`]: written by the server, gone when it is |
//! | `ferrite/POOL/luns/NAME` | [`Lun`] |
//! | `ferrite/POOL/disks/NAME` | [`Disk`] |
//! | `ferrite/POOL/records/DISK/SET` | the set's record |
//! | `ferrite/POOL/removed/COPY` | [`Removed`]: a file that is not needed any more |
//!
//! POOL and COPY are identifiers in hexadecimal digits.

mod commands;
mod id;
mod map;
mod place;
mod pool;
mod record;
mod removed;

pub use commands::{Made, NewDisk, Replaced};
pub use ferrite_nbd::uri::pool::is_name;
pub use id::Id;
pub use map::{
    Copy, Disk, Lun, MAX_BYTES, MAX_COPIES, MAX_SEGMENTS, MAX_SETS, MAX_STRIPES, Pool, RANGE_UNIT,
    Removed, Segment, Server, Set, Shape, Spot, UNIT, range_bytes,
};
pub use place::{Host, NoRoom, Room, rooms};
pub use pool::{Access, Error, State};
pub use record::{Stored, StoredRecord};
pub use removed::clean;
