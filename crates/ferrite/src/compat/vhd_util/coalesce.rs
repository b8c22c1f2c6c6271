//! `coalesce`: the data of an image into its parent.

use super::{Verb, missing};

pub(in super::super) const COALESCE: Verb =
    Verb { name: "coalesce", letters: "n:", usage: "-n FILE", run: missing };
