//! Headers: `set`, `modify` and `key`.

use std::path::Path;

use ferrite_image_tools::{VhdChange, VhdParent};
use rustix::io::Errno;

use super::change::{as_hex, change, found, hex, with_tools};
use super::{Given, Stop, Verb, say};

pub(in super::super) const SET: Verb =
    Verb { name: "set", letters: "n:f:v:", usage: "-n FILE -f hidden -v NUMBER", run: set };

pub(in super::super) const MODIFY: Verb = Verb {
    name: "modify",
    letters: "n:p:P:ms:z",
    usage: "-n FILE (-p PARENT [-m] | -s BYTES | -z)",
    run: modify,
};

pub(in super::super) const KEY: Verb = Verb {
    name: "key",
    letters: "n:k:N:sH:pcC",
    usage: "-n FILE (-p | -s -H HASH [-N NONCE])",
    run: key,
};

fn set(given: &Given, _: &mut Vec<u8>) -> Result<(), Stop> {
    let path = given.image()?;
    let field = given.needed('f')?;
    let value = given.number('v')?.ok_or_else(|| Stop::Usage("-v is missing".to_owned()))?;
    let value = u8::try_from(value).map_err(|_| Stop::Usage("-v is 0 to 255".to_owned()))?;
    let change_of = match field.to_str() {
        Some("hidden") => VhdChange::Hidden(value),
        Some("marker") => VhdChange::Marker(value),
        _ => return Err(Stop::Usage("-f is hidden or marker".to_owned())),
    };
    change(&found(path)?, &change_of)
}

/// In the order in which vhd-util makes them, if several changes are asked for.
fn modify(given: &Given, _: &mut Vec<u8>) -> Result<(), Stop> {
    let path = found(given.image()?)?;
    let end = given.number('s')?;
    if given.has('z') {
        let seen = with_tools(|tools| tools.look_at_vhd(&path))?;
        if !seen.has_table {
            let why = format!("{} is fixed: it has no blocks to forget", path.display());
            return Err(Stop::new(Errno::NOSYS, why));
        }
        change(&path, &VhdChange::Empty)?;
    }
    if let Some(bytes) = end {
        change(&path, &VhdChange::End(bytes))?;
    }
    if let Some(parent) = given.value('p').or(given.value('P')) {
        let parent = VhdParent { path: found(Path::new(parent))?, raw: given.has('m') };
        change(&path, &VhdChange::Parent(parent))?;
    }
    Ok(())
}

fn key(given: &Given, out: &mut Vec<u8>) -> Result<(), Stop> {
    if given.has('k') || given.has('c') || given.has('C') {
        let why = "keys in files are not supported: give the hash of the key, -H";
        return Err(Stop::new(Errno::OPNOTSUPP, why));
    }
    let path = given.image()?;
    if !given.has('s') && !given.has('p') {
        return Err(Stop::Usage("one of -p and -s is needed".to_owned()));
    }
    if given.has('s') {
        let hash = hex(given.needed('H')?, 'H')?;
        let nonce = given.value('N').map_or(Ok([0; 32]), |nonce| hex(nonce, 'N'))?;
        change(&found(path)?, &VhdChange::Key { nonce, hash })?;
    }
    if given.has('p') {
        let path = found(path)?;
        match with_tools(|tools| tools.look_at_vhd(&path))?.key {
            None => say(out, "none"),
            Some(key) => say(out, format!("{} {}", as_hex(&key.nonce), as_hex(&key.hash))),
        }
    }
    Ok(())
}
