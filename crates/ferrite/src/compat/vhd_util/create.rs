//! New images: `create` and `snapshot`.

use std::io::Write as _;
use std::path::Path;

use ferrite_image_tools::{NewVhd, VhdParent};
use rustix::io::Errno;

use super::change::{MIB, found, found_or_new, mib, with_tools};
use super::{Given, Stop, Verb};
use crate::plain::one_line;

pub(in super::super) const CREATE: Verb = Verb {
    name: "create",
    letters: "n:s:rS:b",
    usage: "-n FILE -s MIB [-r] [-S MIB]",
    run: create,
};

pub(in super::super) const SNAPSHOT: Verb = Verb {
    name: "snapshot",
    letters: "n:p:l:mS:eb",
    usage: "-n FILE -p PARENT [-m] [-S MIB] [-e]",
    run: snapshot,
};

/// The size that an image can grow to, of at least `bytes`.
fn room(given: &Given, bytes: u64) -> Result<u64, Stop> {
    let room = given.number('S')?.unwrap_or(0);
    match mib(Some(room), 'S')? {
        room @ 1.. if room < bytes => {
            let why = "-S, the size that it can grow to, is smaller than -s";
            Err(Stop::new(Errno::INVAL, why))
        }
        room => Ok(room),
    }
}

/// A file that is there is overwritten.
fn create(given: &Given, _: &mut Vec<u8>) -> Result<(), Stop> {
    let (path, _) = found_or_new(given.image()?)?;
    let bytes = mib(given.number('s')?, 's')?;
    if bytes == 0 {
        return Err(Stop::new(Errno::INVAL, "a disk has 1 MiB at least"));
    }
    let new = NewVhd {
        bytes,
        fixed: given.has('r'),
        room_bytes: room(given, bytes)?,
        ..NewVhd::default()
    };
    with_tools(|tools| tools.make_vhd(&path, &new))
}

/// The parent stays as it is, also its mode, and gets no list of children: the caller knows its chains.
fn snapshot(given: &Given, _: &mut Vec<u8>) -> Result<(), Stop> {
    let named = given.image()?;
    let (path, is_there) = found_or_new(named)?;
    let parent = found(Path::new(given.needed('p')?))?;
    if is_there && path.is_file() {
        // The number that vhd-util ends with.
        return Err(Stop::new(Errno::PIPE, format!("{} is there already", named.display())));
    }
    if path == parent {
        return Err(Stop::new(Errno::INVAL, format!("{} is its own parent", named.display())));
    }
    let new = NewVhd {
        room_bytes: room(given, MIB)?,
        parent: Some(VhdParent { path: parent, raw: given.has('m') }),
        on_empty: given.has('e'),
        ..NewVhd::default()
    };
    if let Some(limit) = given.number('l')?.filter(|limit| *limit > 0) {
        check_depth(&new, limit)?;
    }
    with_tools(|tools| tools.make_vhd(&path, &new))?;
    say_void(&path, new.parent.as_ref());
    Ok(())
}

/// Says so if dirty maps do not go on with the new image. The storage manager makes `LEAF.new` on another name of
/// LEAF, and gives it the name LEAF then: the maps beside that are void when it is opened.
fn say_void(path: &Path, parent: Option<&VhdParent>) {
    let leaf = path.extension().is_some_and(|end| end == "new").then(|| path.with_extension(""));
    let names = parent.map(|parent| parent.path.clone()).into_iter().chain(leaf);
    let mut maps =
        names.map(|name| ferrite_disk::dirty::path_of(&name)).filter(|maps| maps.exists());
    if let Some(maps) = maps.next() {
        let _ = writeln!(
            std::io::stderr(),
            "vhd-util: the dirty maps {} do not go on with {}; begin them anew on it, or use ferrite disk snapshot",
            one_line(&maps.to_string_lossy()),
            one_line(&path.to_string_lossy())
        );
    }
}

/// Refuses a chain that would be longer than `limit`.
fn check_depth(new: &NewVhd, limit: u64) -> Result<(), Stop> {
    let depth = with_tools(|tools| tools.depth_below(new))?;
    match depth as u64 + 1 > limit {
        true => {
            let why = format!("the chain has {depth} images, and may have {limit}");
            Err(Stop::new(Errno::NOSPC, why))
        }
        false => Ok(()),
    }
}
