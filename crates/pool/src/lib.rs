//! A disk whose copies are on several servers: the rules, without I/O, clock or threads.
//!
//! Each server that has a copy is a *member* ([`Member`]). One process has the disk, its *owner* ([`Owner`]). The
//! *record* ([`Record`]) says who that is and which members are in sync; it is one key of etcd, and each change of it
//! compares the revision that it follows. The rules are those of `docs/internals/pool.md`; code cites them by number.
//!
//! All three are state machines: the caller hands over what has happened, and carries out the effects. They hold no
//! data of the disk. Data are named, and the caller moves them.
//!
//! Times are nanoseconds of a clock that goes on while the machine sleeps.

mod lun;
mod member;
mod messages;
mod names;
mod owner;
mod record;
mod rules;
pub mod wire;

pub use lun::{LunHold, LunOpening, LunStep};
pub use member::{Effect as MemberEffect, Member, Stored};
pub use messages::{Data, Io, Reply, Request};
pub use names::{Blocks, BootId, ConnId, Generation, MemberId, Members, OpId, OwnerId, Region};
pub use owner::{Config, Effect, Event, Failure, Owner, RequestId, Wanted};
pub use record::{Record, Revision, Said};
pub use rules::{DRIFT, Rule, Rules, TRUST};
