//! `repair`: the footer, after a crash.

use super::{Verb, missing};

pub(in super::super) const REPAIR: Verb =
    Verb { name: "repair", letters: "n:", usage: "-n FILE", run: missing };
