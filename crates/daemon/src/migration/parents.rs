//! The parents of a disk that leaves: their files are copied before its own image is made there, the base first.
//!
//! They stay here, too, where other disks may stand on them, and are never written. So no token moves (token.rs). The
//! receiver takes a copy when it is complete; it gives up a copy that it has not taken.
//!
//! # Order for each parent
//! 1. The record names the copy.
//! 2. The receiver makes and exports a file of that size.
//! 3. The bytes are copied, and durable there.
//! 4. The receiver closes the file, names its parent in it, and gives it its name.
//! 5. The record says that the copy is over.
//!
//! A daemon that finds a record of an earlier one has the receiver give the copy up. If that has taken it, it keeps it.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Deserialize;

use super::messages::{Answer, Ask, Base, Prepare};
use super::records::Outgoing;
use super::send::{address, connect, not_understood, read, refuse, target, write};
use super::{new_id, now_s};
use crate::params::{Format, Image};
use crate::state::DiskId;
use crate::{Failure, Shared, Step, verbs};

/// What `ferrite image info` says of a chain.
#[derive(Deserialize)]
struct Facts {
    chain: Vec<Member>,
}

#[derive(Deserialize)]
struct Member {
    path: PathBuf,
    format: Format,
}

/// The parents of an image, the nearest first.
fn parents(shared: &Shared, image: &Image) -> Result<Vec<Image>, Failure> {
    let said = verbs::asked(shared, &["info".into(), "-U".into(), image.name()])?;
    let facts: Facts = serde_json::from_slice(&said).map_err(|e| {
        refuse(
            format!("the chain of the disk is not known: {e}"),
            "ferrite image info --chain shows it",
        )
    })?;
    let members = facts.chain.into_iter().skip(1);
    Ok(members.map(|Member { path, format }| Image { format, path }).collect())
}

fn name(image: &Image) -> Option<&str> {
    image.path.file_name().and_then(|name| name.to_str())
}

/// Copies the parents of a disk's image, as far as this base, which the other host has. Returns what its own image there
/// is to stand on. It takes as long as the copies take.
///
/// # Errors
/// An incomplete copy is removed there, as soon as that host can be reached. Copies that are complete stay.
pub(super) fn copy(
    shared: &Arc<Shared>,
    disk: DiskId,
    image: &Image,
    host: &str,
    base: Option<&str>,
) -> Result<Option<Base>, Failure> {
    let mut parents = parents(shared, image)?;
    if let Some(base) = base {
        let at = parents.iter().position(|parent| name(parent) == Some(base));
        let at = at.ok_or_else(|| {
            let why = format!("none of the disk's parents is called {base:.100}");
            refuse(why, "name one of them (ferrite image info shows them), or leave --base out")
        })?;
        parents.truncate(at);
    }
    let mut below = base.map(|base| Base { name: base.to_owned(), id: None });
    for parent in parents.iter().rev() {
        let name = name(parent).unwrap_or_default().to_owned();
        let id = new_id()?;
        shared.migration.copies(&id, true);
        let done = copy_one(shared, disk, parent, host, (&id, &name, below));
        shared.migration.copies(&id, false);
        done.map_err(|e| Failure { why: format!("its parent {name}: {}", e.why), ..e })?;
        below = Some(Base { name, id: Some(id) });
    }
    Ok(below)
}

fn copy_one(
    shared: &Arc<Shared>,
    disk: DiskId,
    parent: &Image,
    host: &str,
    (id, name, base): (&str, &str, Option<Base>),
) -> Result<(), Failure> {
    let facts = parent.path.metadata().ok().filter(|facts| facts.is_file()).ok_or_else(|| {
        refuse("it is in no file of this host", "leave --chain out: the other host gets one image")
    })?;
    let (place, shown) = address(shared, host)?;
    let mut record = Outgoing::new(id, disk, parent, &shown, now_s());
    record.is_parent = true;
    write(shared, &record)?;
    (shared.on_step)(Step::Migration("parent-begun"));
    let asked = Prepare {
        id: id.to_owned(),
        name: name.to_owned(),
        format: parent.format,
        bytes: facts.len().next_multiple_of(512),
        allocated: facts.blocks() * 512,
        base,
        is_file: true,
    };
    let Answer::Prepared { port, export } =
        connect(shared, &shown)?.ask(&Ask::Prepare(asked)).map_err(|no| {
            let Failure { why, help } = no.into();
            Failure { why, help: format!("{help}; if it is the same image, name it by --base") }
        })?
    else {
        return Err(not_understood());
    };
    let target = target(&place, port, &export)?;
    (shared.on_step)(Step::Migration("parent-agreed"));
    // The bytes of the file, and not the disk that they describe.
    let file = Image { format: Format::Raw, path: parent.path.clone() };
    verbs::run(shared, &["convert".into(), "-n".into(), file.name(), target.into()])?;
    (shared.on_step)(Step::Migration("parent-copied"));
    let _one = shared.migration.change();
    let mut record = read(shared, id)?;
    if record.gives_up {
        return Err(refuse("it is given up", "begin it anew"));
    }
    let ask = Ask::Take { id: id.to_owned(), keep: false, maps: None };
    match connect(shared, &shown)?.ask(&ask)? {
        Answer::State { state: Some(super::token::Receiver::Taken), .. } => {}
        _ => return Err(refuse("the other host has given it up", "begin it anew")),
    }
    record.done = true;
    write(shared, &record)
}

/// Ends the copy of a parent that was not completed by this daemon: whatever the other host answers, it is over.
pub(super) fn give_up(shared: &Shared, record: &mut Outgoing) -> Result<(), Failure> {
    let ask = Ask::Abort { id: record.id.clone() };
    let Answer::State { .. } = connect(shared, &record.host)?.ask(&ask)? else {
        return Err(not_understood());
    };
    record.gives_up = true;
    record.done = true;
    write(shared, record)
}
