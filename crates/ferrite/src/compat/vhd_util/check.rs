//! `check`: whether an image is valid, by the rules of libvhd.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use ferrite_image_tools::vhd::{Seen, Uuid, Verify, verify};
use rustix::io::Errno;

use super::query::{found, open};
use super::{Given, Stop, Verb, say, shown};

pub(in super::super) const CHECK: Verb = Verb {
    name: "check",
    letters: "n:iItpB",
    usage: "-n FILE [-i without a footer at the end] [-I whatever the parent's identifier] [-t whatever \
            the time] [-B do not compare blocks with each other] [-p also its parents]",
    run: check,
};

fn check(given: &Given, out: &mut Vec<u8>) -> Result<(), Stop> {
    let how = Verify {
        ignore_footer: given.has('i'),
        ignore_parent: given.has('I'),
        ignore_times: given.has('t'),
        overlaps: !given.has('B'),
    };
    let path = given.image()?;
    one(path, how, out)?;
    let mut met = HashSet::new();
    let mut next = if given.has('p') { parent(path, how)? } else { None };
    while let Some(path) = next {
        one(&path, how, out)?;
        if !met.insert(path.clone()) {
            return Err(Stop::new(
                Errno::LOOP,
                format!("the chain comes back to {}", path.display()),
            ));
        }
        next = parent(&path, how)?;
    }
    Ok(())
}

/// Checks one image.
fn one(path: &Path, how: Verify, out: &mut Vec<u8>) -> Result<(), Stop> {
    let report = verify(path, how)?;
    let Some(first) = report.findings.first() else {
        out.extend_from_slice(&shown(path));
        say(out, " is valid");
        return Ok(());
    };
    let seen = Seen::read(path, how.ignore_footer).ok();
    let is_lost = |seen: &Seen| seen.parent_uuid().is_some() && seen.parent_path().is_err();
    let errno = if seen.is_some_and(|seen| is_lost(&seen)) { Errno::NOENT } else { Errno::INVAL };
    Err(Stop::new(errno, format!("{} is not valid: {}", path.display(), first.why)))
}

/// The parent of an image, unless that is raw.
fn parent(path: &Path, how: Verify) -> Result<Option<PathBuf>, Stop> {
    let seen = open(path, how.ignore_footer)?;
    match seen.parent_uuid() {
        None | Some(Uuid::NIL) => Ok(None),
        Some(_) => Ok(Some(found(&seen)?)),
    }
}
