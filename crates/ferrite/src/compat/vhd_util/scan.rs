//! `scan`: a line for each of many images.

use super::{Verb, missing};

pub(in super::super) const SCAN: Verb = Verb {
    name: "scan",
    letters: "m:fcl:pavM",
    usage: "[-f] [-c] [-a] [-p] [-v] [-l VG] -m PATTERN",
    run: missing,
};
