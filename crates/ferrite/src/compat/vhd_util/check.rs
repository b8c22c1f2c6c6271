//! `check`: whether an image is valid.

use super::{Verb, missing};

pub(in super::super) const CHECK: Verb = Verb {
    name: "check",
    letters: "n:iItpbBs",
    usage: "-n FILE [-i] [-I] [-t] [-B] [-p]",
    run: missing,
};
