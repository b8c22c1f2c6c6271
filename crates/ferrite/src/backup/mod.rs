//! `ferrite backup`: backups of disks in folders. `ferrite_image_tools` does the work; this module has names, options,
//! progress and text.

use std::io::{self, BufWriter, IsTerminal as _};
use std::path::Path;

use ferrite_daemon::params::Format;
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{
    BackUp, BackupKind, ImageTools, Progress, Prune, Restore, RestoreStream, Verified,
};

use crate::exit::{Code, Failure};
use crate::guests::Names;
use crate::image::progress::Shown;
use crate::image::{ENTRIES, Out, allow_many_files, engine, state_dir, text as image_text};
use crate::signals;
use crate::store::streams::Input;
use crate::vdev::Vbd;

pub(crate) mod args;
pub(crate) mod live;
mod text;

use args::{BackupArgs, BackupCommand, CreateArgs, PruneArgs, RestoreArgs};

/// Bytes of a stream that are written at a time.
const BUFFER_BYTES: usize = 256 << 10;

/// Runs one command.
pub(crate) fn run(args: &BackupArgs) -> Result<(), Failure> {
    allow_many_files();
    crate::store::reading::through_owners();
    let kind = engine(args.engine)?;
    let stop = match args.command {
        BackupCommand::List(_) => signals::end_at_once()?,
        _ => signals::flag_once()?,
    };
    let shown = Shown::new(args.json || args.quiet, stop);
    let tools = ImageTools {
        directory: &HostDirectory,
        engine: &|arena| kind.open(arena, ENTRIES),
        state_dir: state_dir(false)?,
        fixed_size: false,
        unlocked: false,
        parents: args.parents.allowed()?,
        progress: &|progress| shown.show(progress),
    };
    let out = Out { json: args.json, quiet: args.quiet, shown: &shown };
    let done = command(&tools, args, &out);
    shown.clear();
    done
}

fn command(tools: &ImageTools<'_>, args: &BackupArgs, out: &Out<'_>) -> Result<(), Failure> {
    match &args.command {
        BackupCommand::Create(it) => create(tools, out, it),
        BackupCommand::Restore(it) => restore(tools, out, it),
        BackupCommand::Verify(it) => {
            let all = tools.verify_backups(&it.of.folder, it.name.as_deref())?;
            out.say(&all, |all| text::verified(all))?;
            match all.iter().filter(|one| !one.is_good()).collect::<Vec<&Verified>>()[..] {
                [] => Ok(()),
                [first, ..] => Err(damaged(&it.of.folder, first)),
            }
        }
        BackupCommand::List(it) => out.say(&tools.backups(&it.folder)?, |all| text::list(all)),
        BackupCommand::Prune(it) => {
            out.confirm(&tools.prune_backups(&it.of.folder, &pruning(it))?, text::pruned)
        }
        BackupCommand::Merge(it) => {
            out.confirm(&tools.merge_backup(&it.of.folder, &it.name)?, text::merged)
        }
    }
}

fn create(tools: &ImageTools<'_>, out: &Out<'_>, args: &CreateArgs) -> Result<(), Failure> {
    let kind = match (args.full, args.incremental) {
        (true, _) => BackupKind::Full,
        (_, true) => BackupKind::Incremental,
        _ => BackupKind::Auto,
    };
    let map = (!args.no_map).then(|| args.map.clone());
    let speed = args.speed.and_then(|speed| speed.0).unwrap_or(0);
    let how = BackUp { name: args.name.clone(), map, kind, speed };
    if let Some(disk) = live::named(&args.named)? {
        return create_live(tools, out, args, (disk.find()?, &how));
    }
    let image = args.named.disk()?;
    if args.leaf.is_some() || args.quiesce.is_some() {
        let why = "--leaf and --quiesce are for disks that the daemon serves";
        let help = "leave it out, or name the disk as GUEST/DEV";
        return Err(Failure::new("cannot back up", why, help).with_code(Code::USAGE));
    }
    if !is_stream(&args.folder) {
        return out.confirm(&tools.back_up(&image, &args.folder, &how)?, text::made);
    }
    let to = io::stdout();
    if to.is_terminal() {
        return Err(terminal("back up to standard output", "> FILE, or name a folder"));
    }
    let mut to = BufWriter::with_capacity(BUFFER_BYTES, to.lock());
    tools.back_up_to(&image, &mut to, &how)?;
    Ok(())
}

/// Backs up a disk that the daemon serves.
fn create_live(
    tools: &ImageTools<'_>,
    out: &Out<'_>,
    args: &CreateArgs,
    (disk, how): (Vbd, &BackUp),
) -> Result<(), Failure> {
    let name = Names::read().disk(disk);
    if is_stream(&args.folder) {
        let what = format!("cannot back up {name} to standard output");
        let why = "a disk in use is backed up into a folder";
        return Err(Failure::new(what, why, "name a folder").with_code(Code::USAGE));
    }
    let run = &args.places.run_dir;
    let _locked = live::lock(run, disk)?;
    let leaf = args.leaf.as_ref().map(|_| Format::Qcow2);
    let speed = args.speed.and_then(|speed| speed.0);
    let quiesce = args.quiesce.as_deref();
    let served = live::Served { run, disk, name, leaf, speed, quiesce, tools, out };
    out.confirm(&tools.back_up_live(&served, &args.folder, how)?, text::made)
}

fn restore(tools: &ImageTools<'_>, out: &Out<'_>, args: &RestoreArgs) -> Result<(), Failure> {
    let to = match args.existing {
        true => crate::image::args::existing_disk(&args.target, args.format)?,
        false => crate::image::args::new_disk(&args.target, args.format)?,
    };
    let done = match is_stream(&args.folder) {
        false => {
            let RestoreArgs { force, existing, fixed, .. } = *args;
            let how = Restore { name: args.name.clone(), force, existing, fixed };
            tools.restore(&args.folder, &to, &how)?
        }
        true if args.existing || args.fixed || args.name.is_some() => {
            let why = "a backup from standard input is restored into a new thin image";
            let help = "leave --name, --existing and --fixed out";
            return Err(Failure::new("cannot restore", why, help).with_code(Code::USAGE));
        }
        true if io::stdin().is_terminal() => {
            return Err(terminal("restore from standard input", "< FILE, or name a folder"));
        }
        true => {
            let goes_on = || out.shown.show(Progress { done_bytes: 0, total_bytes: 0 });
            let from = &mut Input::new(&goes_on);
            tools.restore_stream(&to, RestoreStream { from, force: args.force })?
        }
    };
    out.confirm(&done, image_text::made)
}

fn pruning(args: &PruneArgs) -> Prune {
    Prune {
        keep: args.keep.map(|keep| keep as usize),
        names: args.name.clone(),
        unfinished: args.unfinished,
        merge: args.merge,
    }
}

fn is_stream(folder: &Path) -> bool {
    folder.as_os_str() == "-"
}

fn terminal(what: &str, instead: &str) -> Failure {
    let why = "the stream is no text, and this is a terminal";
    Failure::new(format!("cannot {what}"), why, format!("say {instead}")).with_code(Code::USAGE)
}

fn damaged(folder: &Path, first: &Verified) -> Failure {
    let what = format!("backup {} of {} is damaged", first.name, folder.display());
    let why = match &first.why {
        Some(why) => why.clone(),
        None => format!("{} regions are not what was backed up", first.damaged_regions.len()),
    };
    let help = "backups that do not stand on it can be restored; make a new full one (ferrite backup create --full)";
    Failure::new(what, why, help).with_code(Code::DAMAGED)
}
