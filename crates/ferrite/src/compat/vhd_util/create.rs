//! New images: `create` and `snapshot`.

use super::{Verb, missing};

pub(in super::super) const CREATE: Verb = Verb {
    name: "create",
    letters: "n:s:rS:b",
    usage: "-n FILE -s MIB [-r] [-S MIB]",
    run: missing,
};

pub(in super::super) const SNAPSHOT: Verb = Verb {
    name: "snapshot",
    letters: "n:p:l:mS:eb",
    usage: "-n FILE -p PARENT [-m] [-S MIB] [-e]",
    run: missing,
};
