//! Another size: `resize`, and `revert` after one that was interrupted.

use std::path::{Path, PathBuf};

use ferrite_image_tools::{VhdChange, rounded};
use rustix::io::Errno;

use super::change::{change, found, mib, with_tools};
use super::{Given, Stop, Verb};

pub(in super::super) const RESIZE: Verb = Verb {
    name: "resize",
    letters: "n:j:s:f",
    usage: "-n FILE -s MIB (-j JOURNAL | -f)",
    run: resize,
};

pub(in super::super) const REVERT: Verb =
    Verb { name: "revert", letters: "n:j:", usage: "-n FILE -j JOURNAL", run: revert };

/// With `-f` the headers are changed, and no data are moved. Otherwise a journal is kept until it is done.
fn resize(given: &Given, _: &mut Vec<u8>) -> Result<(), Stop> {
    let path = given.image()?;
    let bytes = mib(given.number('s')?, 's')?;
    let journal = match (given.value('j'), given.has('f')) {
        (Some(journal), false) => Some(PathBuf::from(journal)),
        (None, true) => None,
        _ => return Err(Stop::Usage("one of -j and -f is needed".to_owned())),
    };
    let path = found(path)?;
    let seen = with_tools(|tools| tools.look_at_vhd(&path))?;
    if bytes < seen.bytes {
        let why = format!("the disk has {} bytes: it cannot shrink", seen.bytes);
        return Err(Stop::new(Errno::NOSYS, why));
    }
    match journal {
        Some(journal) => with_tools(|tools| tools.resize_vhd(&path, bytes, &journal)),
        None if rounded(bytes) > seen.room_bytes => {
            let why = format!(
                "its table is for {} bytes: without -f, and with -j, it can be moved",
                seen.room_bytes
            );
            Err(Stop::new(Errno::INVAL, why))
        }
        None => change(&path, &VhdChange::Grow(bytes)),
    }
}

fn revert(given: &Given, _: &mut Vec<u8>) -> Result<(), Stop> {
    let path = found(given.image()?)?;
    let journal = Path::new(given.needed('j')?);
    with_tools(|tools| tools.revert_vhd(&path, journal))
}
