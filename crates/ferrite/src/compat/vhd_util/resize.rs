//! Another size: `resize`, and `revert` after one that was interrupted.

use super::{Verb, missing};

pub(in super::super) const RESIZE: Verb = Verb {
    name: "resize",
    letters: "n:j:s:f",
    usage: "-n FILE -s MIB (-j JOURNAL | -f)",
    run: missing,
};

pub(in super::super) const REVERT: Verb =
    Verb { name: "revert", letters: "n:j:", usage: "-n FILE -j JOURNAL", run: missing };
