//! What the tests of several crates share. `README.md` says which floor may be used where.

#![forbid(unsafe_code)]

pub mod errno;
pub mod faulty;

use std::time::Duration;

/// Long enough for anything that ends at all, on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(30);
