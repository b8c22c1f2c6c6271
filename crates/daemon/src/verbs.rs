//! Changes of a running disk that take a moment: snapshot, resize, switch.
//!
//! The disk is paused, a process of ours changes the image, and the disk goes on. The process is
//! `ferrite image`, since this crate opens no images; each of its commands leaves the old image or
//! the new one, wherever it is interrupted. So the next daemon, which ends the pause, has one of the
//! two to serve. A volume of a store is changed by its disk's worker, which has the store open: no pause
//! is needed.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use ferrite_serve::blkif::lifecycle::VolumeOrder;

use crate::asking::ask_of_disk;
use crate::control::protocol::MapVerb;
use crate::params::{Format, Image};
use crate::pause::{self, NotDone, Pause};
use crate::state::DiskId;
use crate::{Failure, Shared, new_leaf};

/// How long requests under way, and the opening of the image, may take each.
pub(crate) const WITHIN: Duration = Duration::from_secs(60);

/// How often it is tried to let a disk go on, and the pauses between.
const TRIES: u32 = 5;
const AGAIN: Duration = Duration::from_millis(200);

/// Most characters of a program's error that is no JSON.
const MAX_ERROR: usize = 600;

pub(crate) fn refuse(why: impl Into<String>, help: impl Into<String>) -> NotDone {
    NotDone::Failed(Failure { why: why.into(), help: help.into() })
}

/// Gives the disk as it is now the name `new`, read-only. The guest goes on in a new leaf, which
/// keeps the disk's name. A volume goes on as it is, and `new` is a snapshot in its store.
///
/// # Errors
/// The disk goes on as before.
pub(crate) fn snapshot(
    shared: &Shared,
    id: DiskId,
    new: &str,
    leaf: Option<Format>,
    begin_map: Option<&str>,
) -> Result<(), NotDone> {
    let image = image(shared, id)?;
    match (image.format, leaf) {
        (own @ (Format::Vhd | Format::Qcow2), leaf) if leaf.is_none_or(|leaf| leaf == own) => {
            snapshot_of_image(shared, id, &image, Path::new(new), begin_map)
        }
        (Format::Store, None) if begin_map.is_none() => snapshot_of_volume(shared, id, new),
        (Format::Store, _) => Err(no_maps()),
        (Format::Raw, Some(Format::Qcow2)) => {
            must_be_allowed(shared, Path::new(new))?;
            new_leaf::snapshot(shared, id, &image, Path::new(new), begin_map)
        }
        (Format::Nbd, _) => Err(refuse(
            "its data are on another server",
            "make the snapshot there; the guest goes on on what that server exports",
        )),
        (Format::Raw, _) => Err(refuse(
            "a raw image has no snapshots of its own",
            "let the guest go on in a qcow2 image on it: ferrite disk snapshot --leaf qcow2",
        )),
        (own, _) => Err(refuse(
            format!("its image is {}, and so is each leaf of it", own.word()),
            "leave --leaf out: that is for raw disks",
        )),
    }
}

fn snapshot_of_volume(shared: &Shared, id: DiskId, new: &str) -> Result<(), NotDone> {
    must_have_worker(shared, id)?;
    // A snapshot may be asked for twice, if a worker dies. A volume that was there before is not taken for it.
    ask_of_disk(shared, id, VolumeOrder::Check(new.to_owned())).map_err(NotDone::Failed)?;
    let order = VolumeOrder::Snapshot { name: new.to_owned(), again: false };
    ask_of_disk(shared, id, order).map(drop).map_err(NotDone::Failed)
}

fn snapshot_of_image(
    shared: &Shared,
    id: DiskId,
    image: &Image,
    new: &Path,
    begin_map: Option<&str>,
) -> Result<(), NotDone> {
    must_be_allowed(shared, new)?;
    // A snapshot that was cut off has left a second name of the image's file, and is completed.
    let is_cut_off = || {
        let file = |path: &Path| path.symlink_metadata().map(|meta| (meta.dev(), meta.ino())).ok();
        new != image.path && file(new) == file(&image.path)
    };
    if new.symlink_metadata().is_ok() && !is_cut_off() {
        let why = format!("{} exists", new.display());
        return Err(refuse(why, "name a file that does not exist yet"));
    }
    let mut arguments = vec!["snapshot".into(), image.name(), new.into()];
    arguments.extend(begin_map.map(|map| format!("--begin-map={map}").into()));
    while_paused(shared, id, "a snapshot", || run(shared, &arguments))
}

fn no_maps() -> NotDone {
    refuse(
        "only an image in a file can have dirty maps",
        "leave the map out; ferrite store send sends what has changed on a volume",
    )
}

/// Begins, clears or ends a dirty map, in a short pause: a worker can neither make nor remove the file.
///
/// # Errors
/// The disk goes on with the maps that it had.
pub(crate) fn dirty(shared: &Shared, id: DiskId, verb: MapVerb, map: &str) -> Result<(), NotDone> {
    let image = image(shared, id)?;
    if image.format == Format::Store {
        return Err(no_maps());
    }
    let arguments =
        ["dirty".into(), verb.word().into(), "--".into(), image.name(), OsString::from(map)];
    while_paused(shared, id, "a change of its dirty maps", || run(shared, &arguments))
}

/// Gives the dirty maps of an image, if it has any, to another one that reads the same. `begin` is the name of another
/// map.
pub(crate) fn copy_maps(
    shared: &Shared,
    from: &Image,
    to: &Image,
    begin: Option<&str>,
) -> Result<(), Failure> {
    let is_file = |image: &Image| image.path.is_file() && image.format != Format::Store;
    if begin.is_none() && !maps_of(&from.path).exists() {
        return Ok(());
    }
    if begin.is_none() && !(is_file(from) && is_file(to)) {
        let (from, to) = (from.path.display(), to.path.display());
        tracing::warn!(
            "the dirty maps of {from} stay behind: {to} is no file beside which they could be"
        );
        return Ok(());
    }
    let mut arguments = vec!["dirty".into(), "copy".into(), from.name(), to.name()];
    arguments.extend(begin.map(|map| format!("--begin-map={map}").into()));
    run(shared, &arguments)
}

/// The path of an image's dirty maps.
pub(crate) fn maps_of(image: &Path) -> PathBuf {
    let mut path = image.as_os_str().to_owned();
    path.push(ferrite_host::names::policy::DIRTY_EXTENSION);
    path.into()
}

/// Makes the disk larger: to this size, or by it (`is_more`). Its guest is told.
///
/// # Errors
/// The disk goes on as before.
pub(crate) fn resize(
    shared: &Shared,
    id: DiskId,
    bytes: u64,
    is_more: bool,
) -> Result<(), NotDone> {
    let image = image(shared, id)?;
    if image.format == Format::Nbd {
        return Err(refuse(
            "its data are on another server, and an export that grows under a guest ends its disk",
            "detach the disk, make it larger where the server runs, and attach it again",
        ));
    }
    if image.format == Format::Store {
        return resize_volume(shared, id, bytes, is_more);
    }
    let size = format!("{}{bytes}", if is_more { "+" } else { "" });
    let arguments = ["resize".into(), "--grow".into(), image.name(), size.into()];
    while_paused(shared, id, "a resize", || run(shared, &arguments))
}

/// The worker may be asked twice, if one dies. So it is asked for a size, and not for more.
fn resize_volume(shared: &Shared, id: DiskId, bytes: u64, is_more: bool) -> Result<(), NotDone> {
    must_have_worker(shared, id)?;
    let ask = |order| ask_of_disk(shared, id, order).map_err(NotDone::Failed);
    let to = match is_more {
        false => bytes,
        true => ask(VolumeOrder::Look)?
            .checked_add(bytes)
            .ok_or_else(|| refuse("a volume has at most 4 PiB", "take a smaller size"))?,
    };
    ask(VolumeOrder::Grow(to)).map(drop)
}

/// Checks that a disk has a worker of its own.
fn must_have_worker(shared: &Shared, id: DiskId) -> Result<(), NotDone> {
    match shared.table.read(|disks| Some(disks.get(&id)?.beside)) {
        None => Err(NotDone::NoDisk),
        Some(None) => Ok(()),
        Some(Some(first)) => {
            let why = format!("it is a stub domain's and served with disk {first}");
            Err(refuse(why, format!("name disk {first}: both have the same volume")))
        }
    }
}

/// Serves the disk from another image, whose contents the caller says are the same. With `compare`
/// they are compared first, while the guest waits.
///
/// # Errors
/// The disk goes on as before, or is paused: the failure says which.
pub(crate) fn switch(
    shared: &Shared,
    id: DiskId,
    next: &Image,
    compare: bool,
) -> Result<(), NotDone> {
    let before = image(shared, id)?;
    if let Some(uri) = next.export() {
        shared.config.check_export(&uri).map_err(NotDone::Failed)?;
    }
    let by = "a switch to another image";
    pause::pause(shared, id, &Pause::step_of(by), WITHIN)?;
    let compared = match compare {
        true => run(shared, &["compare".into(), before.name(), next.name()]),
        false => Ok(()),
    };
    // Before the disk goes on: no write is missing from the maps.
    let compared = compared.and_then(|()| copy_maps(shared, &before, next, None));
    go_on_with(shared, id, compared.map(|()| next.clone()).map_err(NotDone::Failed), &before)
}

/// Lets a paused disk go on with the image `next`. If there is none, or it cannot be opened, the disk
/// goes on with the one that it had.
///
/// # Errors
/// The disk goes on as before, or is paused: the failure says which.
pub(crate) fn go_on_with(
    shared: &Shared,
    id: DiskId,
    next: Result<Image, NotDone>,
    before: &Image,
) -> Result<(), NotDone> {
    let switched = next.and_then(|next| pause::resume(shared, id, Some(next), true, WITHIN));
    let Err(why) = switched else { return Ok(()) };
    match resume(shared, id, Some(before)) {
        Ok(()) => Err(why),
        Err(e) => Err(stays_paused(id, why, e)),
    }
}

/// The image of a disk that no job changes.
fn image(shared: &Shared, id: DiskId) -> Result<Image, NotDone> {
    if let Some(job) = shared.jobs.of_disk(id) {
        let why = format!("job {job} changes this disk");
        return Err(refuse(why, format!("wait for it (ferrite job wait {job}), or cancel it")));
    }
    let image = shared.table.read(|disks| Some(disks.get(&id)?.image.clone()));
    match image {
        None => Err(NotDone::NoDisk),
        Some(None) => Err(refuse("it has no image", "it is an empty drive")),
        Some(Some(image)) => Ok(image),
    }
}

/// Checks that a new file is in one of the folders that images are served from.
fn must_be_allowed(shared: &Shared, new: &Path) -> Result<(), NotDone> {
    let folder = new.parent().filter(|_| new.is_absolute() && new.file_name().is_some());
    let folder = folder.ok_or_else(|| {
        refuse(format!("{} is no absolute path of a file", new.display()), "name it in full")
    })?;
    let real = folder.canonicalize().map_err(|e| {
        refuse(format!("cannot find {}: {e}", folder.display()), "name an existing folder")
    })?;
    match shared.config.allows(&real.join(new.file_name().unwrap_or_default())) {
        true => Ok(()),
        false => Err(refuse(
            format!("{} is in none of the folders that images are served from", new.display()),
            "name a file beside the image, or add the folder to image_folders",
        )),
    }
}

/// Does `change` while the disk is paused, and lets the disk go on whether it works or not.
fn while_paused(
    shared: &Shared,
    id: DiskId,
    by: &str,
    change: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), NotDone> {
    pause::pause(shared, id, &Pause::step_of(by), WITHIN)?;
    let done = change().map_err(NotDone::Failed);
    match (done, resume(shared, id, None)) {
        (done, Ok(())) => done,
        (done, Err(e)) => {
            let why =
                done.err().unwrap_or_else(|| refuse("the change is made", "look at the image"));
            Err(stays_paused(id, why, e))
        }
    }
}

/// Lets a paused disk go on. A keeper or worker may have died in a try, and the next try finds others.
fn resume(shared: &Shared, id: DiskId, image: Option<&Image>) -> Result<(), NotDone> {
    let mut tries = 0;
    loop {
        // A failed try has left the pause to the administrator.
        let is_step = shared.table.read(|disks| {
            disks.get(&id).and_then(|entry| entry.pause.as_ref()).is_some_and(|pause| pause.is_step)
        });
        let resumed = pause::resume(shared, id, image.cloned(), is_step, WITHIN);
        tries += 1;
        match resumed {
            Err(NotDone::Failed(failure)) if tries < TRIES => {
                tracing::debug!("disk {id} does not go on yet: {failure}");
                if shared.is_stopped(AGAIN) {
                    return Err(NotDone::Failed(failure));
                }
            }
            resumed => return resumed,
        }
    }
}

fn stays_paused(id: DiskId, why: NotDone, e: NotDone) -> NotDone {
    let text = |e: NotDone| match e {
        NotDone::NoDisk => "the disk is gone".to_owned(),
        NotDone::NotInTime(failure) | NotDone::Failed(failure) => failure.to_string(),
    };
    refuse(
        format!("{}; and the disk is paused and cannot go on: {}", text(why), text(e)),
        format!("mend the image, then ferrite disk resume {id}"),
    )
}

/// Runs `ferrite image` with these arguments. Its error is ours.
pub(crate) fn run(shared: &Shared, arguments: &[OsString]) -> Result<(), Failure> {
    asked(shared, arguments).map(drop)
}

/// Runs `ferrite image`, and returns what it says.
pub(crate) fn asked(shared: &Shared, arguments: &[OsString]) -> Result<Vec<u8>, Failure> {
    let Some(tools) = shared.jobs.tools() else {
        let help = "look which program serves this host".to_owned();
        return Err(Failure { why: "this daemon has no programs for images".to_owned(), help });
    };
    let mut command = tools.image();
    for folder in &shared.config.parent_folders {
        command.arg("--parents").arg(folder);
    }
    command.args(["--json", "--quiet"]).args(arguments).stdin(Stdio::null());
    let done = command.output().map_err(|e| not_run(&e))?;
    if done.status.success() {
        return Ok(done.stdout);
    }
    Err(reported(&done.stderr).unwrap_or_else(|| {
        let text = String::from_utf8_lossy(&done.stderr);
        let text: String = text.trim().chars().take(MAX_ERROR).collect();
        let what = arguments.first().map_or(OsStr::new("it"), OsString::as_os_str);
        let why = format!("ferrite image {}: {}: {text}", what.display(), done.status);
        Failure { why, help: "try it by hand while the disk is paused".to_owned() }
    }))
}

fn not_run(e: &io::Error) -> Failure {
    let help = "the host may lack memory or process numbers; try again".to_owned();
    Failure { why: format!("cannot start ferrite image: {e}"), help }
}

/// The failure that the program has written as JSON.
fn reported(text: &[u8]) -> Option<Failure> {
    let value: serde_json::Value = serde_json::from_slice(text).ok()?;
    let field = |name: &str| value[name].as_str().map(str::to_owned);
    Some(Failure { why: format!("{}: {}", field("what")?, field("why")?), help: field("help")? })
}
