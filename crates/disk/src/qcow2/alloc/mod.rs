//! Who has which cluster of the file: [`state`] says it in memory, [`refs`] has the counts, [`grow`]
//! finds space behind the last cluster, and [`reuse`] between others.
//!
//! # The states of a cluster
//! ```text
//!   free ------> set aside -----> taken -----------> referred to ------> on the medium
//!   count 0      a run            count 1, dirty     an entry in memory  count and entry
//!     ^            ^                |     |          and a record of     durable, in this
//!     |            |   give_back    |     | untake   the journal         order
//!     |            +----------------+     v                                    |
//!     |                             quarantined                                | the entry is
//!     |                             until the next opening                     | replaced
//!     |                                   ^                                    v
//!     +---- quarantined <---- due <-------|------------------------------- leaving
//!     the   count 0 in        no entry on | a queue may be                 the entry on the
//!     count memory            the medium  | reading there                  medium still refers
//!     is durable              refers      +                                to it
//! ```
//! * *set aside*: `State::run`, `spares`, `claimed`. Nothing on the medium knows of it.
//! * *taken*: `State::take`. Until its data are written it is `pending`, or somebody copies to it.
//! * *leaving*: `State::leaving`, until the commit that removes the reference is durable.
//! * *due*: `State::due`, until nobody unpacks there; then the next commit lowers the count.
//! * *quarantined*: `State::came_free`; it ends when the count of 0 is durable, if all readers are
//!   known, and with the next opening otherwise.

pub(in crate::qcow2) mod grow;
pub(in crate::qcow2) mod refs;
pub(in crate::qcow2) mod reuse;
pub(in crate::qcow2) mod state;
