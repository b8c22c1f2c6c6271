//! Disks that leave this host.
//!
//! # Order of durable writes
//! Prepare: 1. the record names the migration; 2. the receiver makes and exports the image; 3. the record names that.
//!
//! Commit, while the guest waits and both disks are closed, equal and durable:
//! 1. The record says that the disk is leaving.
//! 2. The image gets its mark, which is synced: **no program of Ferrite opens it for writing from now on**. The mark is
//!    what counts: without it the disk is here, whatever the record says.
//! 3. The receiver is asked to take the disk, until it answers.
//! 4. "Taken": the mark says so, then the record. The disk goes on with the image there, or its guest waits until it is
//!    detached.
//! 5. "Aborted": the mark is removed, and the folder synced. Then the record is changed, and the disk goes on here.
//!
//! Time alone never removes the mark (token.rs, rule 5).

use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use ferrite_disk::moved::{self, Mark};
use ferrite_nbd::address::Address;
use serde::Deserialize;

use super::messages::{Answer, Ask, Base, Prepare, to_hex};
use super::records::{self, Outgoing};
use super::token::{Receiver, Request, Sender};
use super::wire::{NoAnswer, Peer};
use super::{new_id, no_certificates, no_such, now_s, parents};
use crate::jobs::state::{Mirror, MirrorMigration, Task};
use crate::params::{Format, Image};
use crate::state::DiskId;
use crate::{Failure, Shared, Step, verbs};

pub(super) fn refuse(why: impl Into<String>, help: &str) -> Failure {
    Failure { why: why.into(), help: help.to_owned() }
}

/// The outcome after the receiver's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// The disk is there.
    Moved,
    /// The disk is here: the migration was given up.
    Back,
}

pub(super) fn write(shared: &Shared, record: &Outgoing) -> Result<(), Failure> {
    shared.migration.records.write(record).map_err(|e| {
        let folder = shared.migration.records.folder().display();
        refuse(
            format!("cannot write a record in {folder}: {e}"),
            "mend that folder (state_folder), and try again",
        )
    })
}

/// The record of a migration of this host's disk.
pub(crate) fn read(shared: &Shared, id: &str) -> Result<Outgoing, Failure> {
    let read = shared.migration.records.read::<Outgoing>(id);
    read.map_err(|e| refuse(format!("its record cannot be read: {e}"), "repair that file"))?
        .ok_or_else(|| no_such(id))
}

/// The migration of a disk that is not over.
pub(crate) fn of_disk(shared: &Shared, disk: DiskId) -> Result<Outgoing, Failure> {
    let image = shared.table.read(|disks| disks.get(&disk)?.image.clone());
    let all = shared.migration.records.all::<Outgoing>();
    // One that was given up waits for the other host to hear of it.
    let waits_only = |it: &Outgoing| it.gives_up && it.state == Sender::Owner;
    let is_open = |it: &Outgoing| !(it.done || it.is_parent || waits_only(it));
    let mut all = all.into_iter().filter(is_open);
    all.find(|it| it.disk == disk && image.as_ref().is_none_or(|image| *image == it.image))
        .ok_or_else(|| {
            refuse(format!("disk {disk} has no migration"), "ferrite migrate DISK HOST begins one")
        })
}

/// The address of another host's listener: a name of the configuration, or HOST:PORT.
pub(super) fn address(shared: &Shared, host: &str) -> Result<(Address, String), Failure> {
    let place = shared.config.migration.hosts.get(host).map_or(host, String::as_str);
    let parsed = place.rsplit_once(':').and_then(|(host, port)| {
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        Some((host.to_owned(), port.parse::<u16>().ok().filter(|port| *port > 0)?))
    });
    let fits = |host: &str| {
        (1..=255).contains(&host.len())
            && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-:%_".contains(c))
    };
    let Some((name, port)) = parsed.filter(|(name, _)| fits(name)) else {
        let why = format!("{host:.200} is no host that is known");
        return Err(refuse(
            why,
            "name one of hosts below [migration] in ferrite.toml, or write HOST:PORT",
        ));
    };
    let certificates = shared.config.migration.certificates.clone().ok_or_else(no_certificates)?;
    let shown =
        if name.contains(':') { format!("[{name}]:{port}") } else { format!("{name}:{port}") };
    Ok((Address::Tls { host: name, port, certificates }, shown))
}

pub(super) fn connect(shared: &Shared, host: &str) -> Result<Peer, NoAnswer> {
    let (address, shown) = address(shared, host).map_err(NoAnswer::Refused)?;
    Peer::connect(&address, &shown)
}

/// What `ferrite image info` says of an image.
#[derive(Deserialize)]
struct Facts {
    virtual_bytes: u64,
}

fn bytes_of(shared: &Shared, image: &Image) -> Result<u64, Failure> {
    let said = verbs::asked(shared, &["info".into(), "-U".into(), image.name()])?;
    let facts: Facts = serde_json::from_slice(&said).map_err(|e| {
        refuse(format!("the size of the disk is not known: {e}"), "ferrite image info shows it")
    })?;
    Ok(facts.virtual_bytes)
}

/// The URI of an export of the other host.
pub(super) fn target(host: &Address, port: u16, export: &str) -> Result<String, Failure> {
    let Address::Tls { host: server, certificates, .. } = host else {
        return Err(no_certificates());
    };
    let at = if server.contains(':') { format!("[{server}]") } else { server.clone() };
    let folder = certificates.display().to_string().replace('%', "%25").replace('&', "%26");
    Ok(format!("nbds://{at}:{port}/{export}?tls-certificates={folder}"))
}

pub(super) fn not_understood() -> Failure {
    refuse("its answer is not understood", "use one release on both hosts")
}

/// The properties of the image on the other host.
pub(crate) struct Wanted<'a> {
    /// The name of its file. Without one, the name that it has here.
    pub(crate) name: Option<&'a str>,
    /// The image there that it is to stand on.
    pub(crate) base: Option<&'a str>,
    /// Whether the parents of the disk are copied, too, down to that base.
    pub(crate) chain: bool,
}

/// Has the other host make an image for the disk, and export it.
pub(crate) fn prepare(
    shared: &Arc<Shared>,
    disk: DiskId,
    image: &Image,
    host: &str,
    wanted: &Wanted<'_>,
) -> Result<Outgoing, Failure> {
    let base = match wanted.chain && of_disk(shared, disk).is_err() {
        true => parents::copy(shared, disk, image, host, wanted.base)?,
        false => wanted.base.map(|base| Base { name: base.to_owned(), id: None }),
    };
    let _one = shared.migration.change();
    if of_disk(shared, disk).is_ok() {
        let help = "ferrite migrate status shows it; ferrite migrate abort ends it";
        return Err(refuse(format!("disk {disk} is migrated already"), help));
    }
    let is_over = |it: &Outgoing| it.done.then_some(it.created);
    shared.migration.records.prune::<Outgoing>(now_s(), is_over);
    let all = shared.migration.records.all::<Outgoing>();
    if all.len() >= records::MAX {
        return Err(refuse(
            "there are too many records of migrations",
            "ferrite migrate forget ID removes old ones",
        ));
    }
    if !matches!(image.format, Format::Raw | Format::Vhd | Format::Qcow2) || !image.path.is_file() {
        let help = "mirror it (ferrite mirror), or copy a snapshot of it";
        return Err(refuse(
            "only an image in a file can be migrated: a mark has to be beside it",
            help,
        ));
    }
    if let Ok(Some(mark)) = moved::look(&image.path) {
        return Err(refuse(
            format!("its image was moved to {}", mark.to),
            "ferrite migrate list shows it",
        ));
    }
    let own_name = image.path.file_name().and_then(|name| name.to_str());
    let name = wanted.name.or(own_name).unwrap_or_default().to_owned();
    let (place, shown) = address(shared, host)?;
    let bytes = bytes_of(shared, image)?;
    let allocated = image.path.metadata().map_or(0, |facts| facts.blocks() * 512);
    let id = new_id()?;
    let mut record = Outgoing::new(&id, disk, image, &shown, now_s());
    record.on_base = base.is_some();
    write(shared, &record)?;
    (shared.on_step)(Step::Migration("begun"));
    let format = image.format;
    let asked = Prepare { id: id.clone(), name, format, bytes, allocated, base, is_file: false };
    let answered = connect(shared, &shown).and_then(|mut peer| peer.ask(&Ask::Prepare(asked)));
    match answered {
        Ok(Answer::Prepared { port, export }) => {
            record.target = target(&place, port, &export)?;
            write(shared, &record)?;
            (shared.on_step)(Step::Migration("agreed"));
            Ok(record)
        }
        Ok(_) => Err(give_up_new(shared, &mut record, not_understood())),
        // It has not begun there.
        Err(NoAnswer::Refused(e)) => {
            shared.migration.records.remove::<Outgoing>(&id).map_err(|e| {
                refuse(format!("its record cannot be removed: {e}"), "mend the state folder")
            })?;
            Err(e)
        }
        Err(no) => Err(give_up_new(shared, &mut record, no.into())),
    }
}

/// A migration that was not agreed on: the other host is told when it can be.
fn give_up_new(shared: &Shared, record: &mut Outgoing, failure: Failure) -> Failure {
    record.gives_up = true;
    record.note = Some(failure.why.clone());
    let told = write(shared, record).and_then(|()| settle_now(shared, record).map(drop));
    if let Err(e) = told {
        tracing::debug!("migration {}: {e}; the other host is told later", record.id);
    }
    failure
}

/// Starts the copy: a mirror.
pub(crate) fn run(shared: &Shared, record: &Outgoing, speed: Option<u64>) -> Result<u64, Failure> {
    if record.target.is_empty() {
        return Err(refuse("the other host has not agreed yet", "abort it, and begin it anew"));
    }
    let mirror = Mirror::new(&record.image, record.target.clone(), false);
    let mut mirror = mirror.comparing(record.on_base);
    mirror.migration = Some(MirrorMigration { id: record.id.clone() });
    let started = shared.jobs.start(record.disk, Task::Mirror(mirror), speed);
    started.map(|seen| seen.state.id).map_err(|e| refuse(e.to_string(), &e.help()))
}

/// Has the disk move as soon as the copy is complete.
pub(crate) fn commit(shared: &Shared, disk: DiskId, keep: bool) -> Result<u64, Failure> {
    let mut record = of_disk(shared, disk)?;
    let job = shared.jobs.migrating(&record.id).ok_or_else(|| {
        refuse(
            "its copy does not run",
            "ferrite migrate run starts it; ferrite job list has the reason",
        )
    })?;
    if keep && let Some(uri) = ferrite_nbd::uri::Uri::parse(&record.target).ok() {
        shared.config.check_export(&uri).map_err(|e| {
            let help = "add the host to hosts below [migration] in ferrite.toml and restart the daemon, or have the guest wait \
                        until its disk is detached (--detach)";
            refuse(format!("the guest cannot go on here: {}", e.why), help)
        })?;
    }
    if record.state == Sender::Owner && record.keep != keep {
        let _one = shared.migration.change();
        record.keep = keep;
        write(shared, &record)?;
    }
    shared.jobs.complete(job).map_err(|e| refuse(e.to_string(), &e.help()))?;
    Ok(job)
}

/// Gives a migration up. If the other host may have the disk, that host decides.
pub(crate) fn abort(shared: &Shared, id: &str) -> Result<Outgoing, Failure> {
    let mut record = {
        let _one = shared.migration.change();
        let mut record = read(shared, id)?;
        if record.done || record.state == Sender::Moved {
            return Err(refuse("it is over", "ferrite migrate list shows what has come of it"));
        }
        record.gives_up = true;
        write(shared, &record)?;
        record
    };
    if let Some(job) = shared.jobs.migrating(id) {
        // A switch-over that has begun asks the other host itself.
        if let Err(e) = shared.jobs.cancel(job) {
            tracing::debug!("migration {id}: {e}");
            return Ok(record);
        }
        let _ = shared.jobs.wait(job, std::time::Duration::from_secs(30));
    }
    if let Err(e) = settle(shared, id) {
        shared.migration.set_trouble(id, Some(&e));
        if record.state == Sender::Owner {
            tracing::warn!(
                "migration {id} is given up; the other host is told when it can be reached: {e}"
            );
        }
    }
    record = read(shared, id)?;
    Ok(record)
}

/// The disk's guest waits, and both disks are closed, equal and durable: from here on it is not opened here.
pub(crate) fn leave(shared: &Shared, id: &str) -> Result<(), Failure> {
    let _one = shared.migration.change();
    let mut record = read(shared, id)?;
    if record.gives_up || record.state != Sender::Owner {
        return Err(refuse("it is given up", "begin it anew"));
    }
    record.state = Sender::Leaving;
    write(shared, &record)?;
    (shared.on_step)(Step::Migration("leaving"));
    mark(&record, false)?;
    (shared.on_step)(Step::Migration("marked"));
    Ok(())
}

fn mark(record: &Outgoing, is_taken: bool) -> Result<(), Failure> {
    let mark = Mark { id: record.id.clone(), to: record.host.clone(), is_taken };
    moved::set(&record.image.path, &mark).map_err(|e| {
        let path = moved::path_of(&record.image.path);
        refuse(format!("cannot write {}: {e}", path.display()), "make room in that folder")
    })
}

/// Asks the other host until it has answered what decides.
///
/// # Errors
/// It cannot be reached, or something cannot be written: nothing is decided, and this can be called again.
pub(crate) fn settle(shared: &Shared, id: &str) -> Result<Settled, Failure> {
    let _one = shared.migration.change();
    let mut record = read(shared, id)?;
    settle_now(shared, &mut record)
}

fn settle_now(shared: &Shared, record: &mut Outgoing) -> Result<Settled, Failure> {
    if record.done {
        return Ok(if record.state == Sender::Moved { Settled::Moved } else { Settled::Back });
    }
    if record.is_parent {
        return parents::give_up(shared, record).map(|()| Settled::Back);
    }
    let is_marked = moved::look(&record.image.path).map_or(true, |mark| mark.is_some());
    if record.state == Sender::Leaving && !is_marked {
        // It died between the record and the mark: the disk is here, and was never offered.
        record.state = Sender::Owner;
        write(shared, record)?;
        return Ok(Settled::Back);
    }
    let Some(request) = record.state.request(record.gives_up) else {
        return Ok(Settled::Back);
    };
    let mut peer = connect(shared, &record.host)?;
    let id = record.id.clone();
    let ask = match request {
        Request::Take => Ask::Take { id, keep: record.keep, maps: maps(shared, record) },
        Request::Abort => Ask::Abort { id },
    };
    let Answer::State { state, note } = peer.ask(&ask)? else {
        return Err(not_understood());
    };
    (shared.on_step)(Step::Migration("answered"));
    record.note = note.or(record.note.take());
    let Some(answer) = state else {
        let help = "see its state folder; if its records are lost, say where the disk is: ferrite migrate resolve";
        return Err(refuse(format!("{} does not know the migration", record.host), help));
    };
    let after = record.state.after(answer);
    become_(shared, record, after, answer == Receiver::Aborted)?;
    match (after, answer) {
        (Sender::Moved, _) => Ok(Settled::Moved),
        (Sender::Owner, Receiver::Aborted) => Ok(Settled::Back),
        _ => Err(refuse(format!("{} has not decided yet", record.host), "it is asked again")),
    }
}

/// Makes a decision durable. The mark decides, so it comes first.
fn become_(
    shared: &Shared,
    record: &mut Outgoing,
    after: Sender,
    is_over: bool,
) -> Result<(), Failure> {
    match (record.state, after) {
        (_, Sender::Moved) => mark(record, true)?,
        (Sender::Leaving, Sender::Owner) => moved::clear(&record.image.path).map_err(|e| {
            let path = moved::path_of(&record.image.path);
            refuse(
                format!("cannot remove {}: {e}", path.display()),
                "mend that folder; it is tried again",
            )
        })?,
        _ => {}
    }
    (shared.on_step)(Step::Migration("decided"));
    record.state = after;
    record.done = after == Sender::Moved || is_over;
    write(shared, record)?;
    (shared.on_step)(Step::Migration("written"));
    Ok(())
}

/// The file of the disk's dirty maps, in hexadecimal. Maps that cannot come along are told of.
fn maps(shared: &Shared, record: &mut Outgoing) -> Option<String> {
    if !verbs::maps_of(&record.image.path).exists() {
        return None;
    }
    let file = shared.paths.run.join("mirrors").join(format!("{}.packed", record.id));
    let packed = verbs::run(
        shared,
        &["dirty".into(), "pack".into(), record.image.name(), file.clone().into()],
    );
    let read = packed.and_then(|()| {
        std::fs::read(&file)
            .map_err(|e| refuse(e.to_string(), "make room on the file system of /run"))
    });
    let _ = std::fs::remove_file(&file);
    let fits = |bytes: &Vec<u8>| bytes.len() < super::messages::MAX_BYTES / 2 - 4096;
    let lost = match read {
        Ok(bytes) if fits(&bytes) => return Some(to_hex(&bytes)),
        Ok(_) => "they are too large".to_owned(),
        Err(e) => e.why,
    };
    tracing::warn!("the dirty maps of {} do not go along: {lost}", record.image.path.display());
    record.note = Some(format!("the dirty maps do not go along: {lost}; make a full backup there"));
    None
}

/// Records an administrator's decision on a disk that is in doubt.
pub(super) fn resolve(shared: &Shared, id: &str, here: bool) -> Result<(), Failure> {
    let _one = shared.migration.change();
    let mut record = read(shared, id)?;
    let after = record.state.decide(here).ok_or_else(|| {
        let has = if record.state == Sender::Moved {
            "the other host has the disk"
        } else {
            "this host has the disk"
        };
        refuse(format!("it is not in doubt: {has}"), "ferrite migrate list shows it")
    })?;
    // A host that answers knows the state: the disk is not in doubt.
    if connect(shared, &record.host).is_ok() {
        let help =
            "wait for its end (ferrite migrate status), or give it up (ferrite migrate abort)";
        return Err(refuse(format!("it is not in doubt: {} answers", record.host), help));
    }
    become_(shared, &mut record, after, true)
}
