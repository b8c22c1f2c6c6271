//! `ferrite store`: stores and their volumes. `ferrite_image_tools::stores` does the work; this module has names,
//! options, progress and text.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use ferrite_disk::{DiskError, ErrorKind, Parents, size};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::stores::{
    Change, StoreCheck, StoreChecked, StoreListed, StoreStats, VolumeDone,
};
use ferrite_image_tools::{ImageTools, NewSize, Progress, Verdict};
use ferrite_store::journal::Name;
use ferrite_store::name::StoreName;
use ferrite_store::page::Packing;
use serde::de::DeserializeOwned;

use crate::exit::{Code, Failure};
use crate::image::progress::Shown;
use crate::image::{ENTRIES, Out, engine, state_dir};
use crate::signals;

pub(crate) mod args;
mod asking;
pub(crate) mod owner;
pub(crate) mod reading;
mod rollback;
pub(crate) mod streams;
mod text;
mod wire;

use asking::Asked;
use wire::{Ask, Compressing};

pub(crate) use wire::prefix;

use args::{
    CompactArgs, Compress, CreateArgs, RollbackArgs, StoreArg, StoreArgs, StoreCommand, VolumeArg,
};

/// Runs one command.
pub(crate) fn run(args: &StoreArgs) -> Result<(), Failure> {
    // A snapshot of a served store is sent through its owner.
    reading::through_owners();
    let kind = engine(args.engine)?;
    let stop = match args.command {
        StoreCommand::List(_) | StoreCommand::Info(_) => signals::end_at_once()?,
        _ => signals::flag_once()?,
    };
    let shown = Shown::new(args.json || args.quiet, stop);
    let tools = ImageTools {
        directory: &HostDirectory,
        engine: &|arena| kind.open(arena, ENTRIES),
        // An image that is replaced by a store may have a journal there.
        state_dir: state_dir(false)?,
        fixed_size: false,
        unlocked: false,
        parents: Parents::default(),
        progress: &|progress| shown.show(progress),
    };
    let done = command(&tools, args, &Out { json: args.json, quiet: args.quiet, shown: &shown });
    shown.clear();
    done
}

/// Attempts while another process opens the store, with pauses between them.
const TRIES: u32 = 20;
const AGAIN: Duration = Duration::from_millis(50);

/// Runs the command here, or has the store's owner run it.
fn here_or_there<T: DeserializeOwned>(
    out: &Out,
    store: &Path,
    what: &Ask,
    here: impl Fn() -> Result<T, DiskError>,
) -> Result<T, Failure> {
    let goes_on = || out.shown.show(Progress { done_bytes: 0, total_bytes: 0 });
    let mut tries = 0;
    loop {
        let e = match here() {
            Err(e) if e.kind() == ErrorKind::InUse => e,
            done => return Ok(done?),
        };
        tries += 1;
        match asking::ask(store, what, &|far| out.shown.show(far)) {
            Asked::Answered(done) => return done,
            Asked::NotOpen if tries < TRIES && goes_on() => std::thread::sleep(AGAIN),
            // Its owner may have ended since the first attempt.
            Asked::Nobody if tries == 1 => {}
            Asked::NotOpen | Asked::Nobody => return Err(e.into()),
        }
    }
}

fn change(
    tools: &ImageTools<'_>,
    out: &Out,
    (store, volume): (StoreName, Name),
    change: Change,
) -> Result<(), Failure> {
    out.confirm(&changed(tools, out, (&store.path, &volume), change)?, text::done)
}

fn changed(
    tools: &ImageTools<'_>,
    out: &Out,
    (store, volume): (&Path, &Name),
    change: Change,
) -> Result<VolumeDone, Failure> {
    let what = Ask::Change { volume: volume.clone(), change: change.clone() };
    let here = || tools.change_volume(store, volume, change.clone());
    here_or_there(out, store, &what, here)
}

/// Removes a snapshot for `ferrite backup create`.
pub(crate) fn remove_snapshot(
    tools: &ImageTools<'_>,
    out: &Out,
    snapshot: &Path,
) -> Result<(), DiskError> {
    let name = StoreName::parse(snapshot)?;
    let Some(volume) = &name.volume else {
        let what = format!("cannot remove {name}");
        let help = "ferrite store list names the snapshots";
        return Err(DiskError::new(ErrorKind::Usage, what, "it is no snapshot", help));
    };
    changed(tools, out, (&name.path, volume), Change::Delete)
        .map(drop)
        .map_err(reading::as_disk_error)
}

/// Resizes a volume for `ferrite image resize`; returns its new size in bytes.
pub(crate) fn resize(
    tools: &ImageTools<'_>,
    out: &Out,
    (store, volume): (&Path, &str),
    size: NewSize,
    shrink: bool,
) -> Result<u64, Failure> {
    let change = Change::Resize { size, shrink };
    let done = changed(tools, out, (store, &entry(OsStr::new(volume))?), change)?;
    Ok(done.volume.virtual_bytes)
}

fn roll_back(tools: &ImageTools<'_>, out: &Out, args: &RollbackArgs) -> Result<(), Failure> {
    let ((name, volume), snap) = (of_volume(&args.volume)?, entry(&args.snap)?);
    if !args.force {
        rollback::check(&list(tools, out, &name.path)?.volumes, &name, &snap)?;
    }
    change(tools, out, (name, volume), Change::Rollback(snap))
}

fn list(tools: &ImageTools<'_>, out: &Out, store: &Path) -> Result<StoreListed, Failure> {
    here_or_there(out, store, &Ask::List, || tools.list_store(store))
}

fn stats(tools: &ImageTools<'_>, out: &Out, store: &Path) -> Result<StoreStats, Failure> {
    here_or_there(out, store, &Ask::Stats, || tools.store_stats(store))
}

fn command(tools: &ImageTools<'_>, args: &StoreArgs, out: &Out) -> Result<(), Failure> {
    let change = |volume: &VolumeArg, how: Change| change(tools, out, of_volume(volume)?, how);
    match &args.command {
        StoreCommand::Create(it) => create(tools, out, it),
        StoreCommand::List(it) => {
            let store = of_store(&it.store)?.path;
            let stats = it.used.then(|| stats(tools, out, &store)).transpose()?;
            let mut listed = list(tools, out, &store)?;
            stats.iter().for_each(|stats| listed.count(stats));
            out.say(&listed, |listed| text::list(listed, it.used))
        }
        StoreCommand::Info(it) => info(tools, out, &StoreName::parse(&it.name)?),
        StoreCommand::Snapshot(it) => change(&it.of, Change::Snapshot(entry(&it.snap)?)),
        StoreCommand::Clone(it) => change(&it.of, Change::Clone(entry(&it.new)?)),
        StoreCommand::Rollback(it) => roll_back(tools, out, it),
        StoreCommand::Delete(it) => change(it, Change::Delete),
        StoreCommand::Rename(it) => change(&it.of, Change::Rename(entry(&it.new)?)),
        StoreCommand::Resize(it) => {
            change(&it.volume, Change::Resize { size: it.size, shrink: it.shrink })
        }
        StoreCommand::Grow(it) => {
            let store = of_store(&it.store)?.path;
            let here = || tools.grow_store(&store, it.size);
            let mut grown = here_or_there(out, &store, &Ask::Grow { size: it.size }, here)?;
            if it.overcommit {
                grown.notes.clear();
            }
            out.confirm(&grown, text::grown)
        }
        StoreCommand::Check(it) => {
            let how = of_contents(it.deep, it.rate);
            let what = Ask::Check { deep: it.deep, rate: it.rate };
            let help = "ferrite store scrub keeps writes from sharing damaged blocks; then restore the named \
                        parts from a backup; all other parts read correctly";
            check(out, &it.store, help, |store| {
                here_or_there(out, store, &what, || tools.check_store(store, how))
            })
        }
        StoreCommand::Scrub(it) => {
            let what = Ask::Scrub { rate: it.rate };
            let help = "restore the named parts from a backup; all other parts read correctly";
            check(out, &it.store, help, |store| {
                here_or_there(out, store, &what, || tools.scrub_store(store, it.rate))
            })
        }
        StoreCommand::Gc(it) => {
            let store = of_store(it)?.path;
            let here = || tools.collect_store(&store);
            out.confirm(&here_or_there(out, &store, &Ask::Collect, here)?, text::collected)
        }
        StoreCommand::Stats(it) => out.say(&stats(tools, out, &of_store(it)?.path)?, text::stats),
        StoreCommand::Compact(it) => compact(tools, out, it),
        StoreCommand::Repair(it) => {
            let store = of_store(&it.store)?.path;
            let what = Ask::Repair { force: it.force };
            let here = || tools.repair_store(&store, it.force);
            let repaired = here_or_there(out, &store, &what, here)?;
            out.say(&repaired, text::repaired)?;
            Ok(repaired.or_refused()?)
        }
        StoreCommand::Send(it) => streams::send(tools, it),
        StoreCommand::Receive(it) => streams::receive(tools, out, it),
    }
}

fn packing(compress: Compress) -> Option<Packing> {
    match compress {
        Compress::None => None,
        Compress::Lz4 => Some(Packing::Lz4),
        Compress::Zstd => Some(Packing::Zstandard),
    }
}

fn compact(tools: &ImageTools<'_>, out: &Out, args: &CompactArgs) -> Result<(), Failure> {
    let store = of_store(&args.store)?.path;
    let packing = args.compress.map(packing);
    let here = || {
        packing.map(|packing| tools.set_packing(&store, packing)).transpose()?;
        tools.compact_store(&store)
    };
    let what = Ask::Compact { compress: packing.map(Compressing) };
    out.confirm(&here_or_there(out, &store, &what, here)?, text::compacted)
}

/// The options of a check that reads all content, at most `rate` bytes of it a second.
fn of_contents(deep: bool, rate: Option<u64>) -> StoreCheck {
    StoreCheck { contents: true, deep, rate, mend: false }
}

fn entry(text: &OsStr) -> Result<Name, Failure> {
    Ok(StoreName::entry(text)?)
}

/// The name of a store. The name of a volume is refused.
fn of_store(arg: &StoreArg) -> Result<StoreName, Failure> {
    let name = StoreName::parse(&arg.store)?;
    match &name.volume {
        None => Ok(name),
        Some(_) => {
            let why = "it names a volume, and this command needs a whole store";
            let help = "leave out # and the volume's name; if the store's own path has a #, add another # at the end";
            Err(Failure::new(format!("cannot use {name}"), why, help).with_code(Code::USAGE))
        }
    }
}

fn of_volume(arg: &VolumeArg) -> Result<(StoreName, Name), Failure> {
    let name = StoreName::parse(&arg.volume)?;
    match name.volume.clone() {
        Some(volume) => Ok((name, volume)),
        None => {
            let help = "name a volume PATH#NAME; ferrite store list PATH shows them";
            let failure = Failure::new(format!("cannot use {name}"), "it names no volume", help);
            Err(failure.with_code(Code::USAGE))
        }
    }
}

fn create(tools: &ImageTools<'_>, out: &Out, args: &CreateArgs) -> Result<(), Failure> {
    let name = StoreName::parse(&args.name)?;
    let refused = |why: &str, help: &str| {
        Err(Failure::new(format!("cannot make {name}"), why, help).with_code(Code::USAGE))
    };
    let Some(volume) = &name.volume else {
        if args.size.is_some() {
            return refused("it names a store, whose size is an option", "say --size SIZE");
        }
        let mut made = tools.create_store(&name, args.store_size, args.force)?;
        if args.overcommit {
            made.notes.clear();
        }
        if let Some(packing) = args.compress.and_then(packing) {
            tools.set_packing(&name.path, Some(packing))?;
        }
        return out.confirm(&made, text::made);
    };
    if args.store_size.is_some() || args.force {
        let help = "say PATH#NAME SIZE; a volume that is there is deleted by ferrite store delete";
        return refused("it names a volume: --size and --force are for stores", help);
    }
    let Some(bytes) = args.size else {
        return refused("a volume needs a size", "say PATH#NAME SIZE, for example 10G");
    };
    if bytes == 0 || !bytes.is_multiple_of(BLOCK_BYTES) {
        let why = format!("a volume has whole blocks of 4 KiB, and {bytes} bytes are none");
        return refused(
            &why,
            &format!("take {}", size::Human(bytes.next_multiple_of(BLOCK_BYTES).max(BLOCK_BYTES))),
        );
    }
    let how = Change::Create(bytes, entry(&args.domain)?);
    change(tools, out, (name.clone(), volume.clone()), how)
}

const BLOCK_BYTES: u64 = ferrite_store::BLOCK_BYTES as u64;

fn info(tools: &ImageTools<'_>, out: &Out, name: &StoreName) -> Result<(), Failure> {
    let listed = list(tools, out, &name.path)?;
    let Some(volume) = &name.volume else {
        return match out.json {
            // `list` shows the volumes.
            true => out.say(&listed.store, |_| String::new()),
            false => out.say(&listed, text::info),
        };
    };
    match listed.volumes.iter().find(|found| found.name == volume.as_str()) {
        Some(found) => out.say(found, text::volume),
        None => {
            let path = name.path.display();
            let help = format!("ferrite store list {path} shows those that there are");
            let what = format!("cannot look at {name}");
            Err(Failure::new(what, "there is no such volume", help).with_code(Code::NOT_FOUND))
        }
    }
}

/// Prints the findings. Damage decides the exit code.
fn check(
    out: &Out,
    store: &StoreArg,
    help: &str,
    check: impl FnOnce(&Path) -> Result<StoreChecked, Failure>,
) -> Result<(), Failure> {
    let checked = of_store(store).and_then(|store| check(&store.path));
    let checked = checked.map_err(|e| e.with_code(Code::NOT_CHECKED))?;
    out.say(&checked, text::report)?;
    let StoreChecked { path, .. } = &checked;
    match checked.verdict() {
        Verdict::InOrder | Verdict::Leaks => Ok(()),
        Verdict::Unsupported | Verdict::Refused => {
            let why = "it has features that this version does not support";
            let help = "use the version of this program that has written to it";
            let failure = Failure::new(format!("cannot check {path}"), why, help);
            Err(failure.with_code(Code::NOT_CHECKED))
        }
        Verdict::Damaged => {
            let why = "parts of it do not read correctly";
            Err(Failure::new(format!("{path} is damaged"), why, help).with_code(Code::CORRUPT))
        }
    }
}
