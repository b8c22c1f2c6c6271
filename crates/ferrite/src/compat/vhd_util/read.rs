//! `read`: the metadata of an image.

use super::{Verb, missing};

pub(in super::super) const READ: Verb =
    Verb { name: "read", letters: "n:pB", usage: "-n FILE (-p | -B)", run: missing };
