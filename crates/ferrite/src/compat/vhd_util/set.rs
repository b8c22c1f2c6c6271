//! Headers: `set`, `modify` and `key`.

use super::{Verb, missing};

pub(in super::super) const SET: Verb =
    Verb { name: "set", letters: "n:f:v:", usage: "-n FILE -f hidden -v NUMBER", run: missing };

pub(in super::super) const MODIFY: Verb = Verb {
    name: "modify",
    letters: "n:p:P:ms:z",
    usage: "-n FILE (-p PARENT [-m] | -s BYTES | -z)",
    run: missing,
};

pub(in super::super) const KEY: Verb =
    Verb { name: "key", letters: "n:k:sH:p", usage: "-n FILE (-p | -s -H HASH)", run: missing };
