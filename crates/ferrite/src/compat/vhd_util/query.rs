//! `query`: the properties of an image.

use super::{Verb, missing};

pub(in super::super) const QUERY: Verb = Verb {
    name: "query",
    letters: "n:vspfdSmaub",
    usage: "-n FILE [-v] [-s] [-p] [-f] [-d] [-S] [-a] [-u] [-b]",
    run: missing,
};
