//! `ferrite image`: disk images that are not in use. `ferrite_image_tools` does the work; this module has names,
//! options, progress and text.

use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ferrite_disk::{Format, ImageName};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{
    Checked, Difference, Done, ImageTools, NewImage, NewSize, Resize, Verdict,
};
use ferrite_io::engines::{EngineChoice, EngineKind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use crate::exit::{Code, Failure};
use crate::plain::one_line;
use crate::{signals, user_state};

pub(crate) mod args;
mod dirty;
mod making;
mod merging;
mod mirroring;
pub(crate) mod progress;
mod qemu;
pub(crate) mod text;

use args::{
    Amendment, CheckArgs, CompareArgs, DirtyCommand, ImageArgs, ImageCommand, InfoArgs,
    JournalCommand, MapArgs, OneArgs, Scope, existing, existing_disk, name,
};
use progress::Shown;

/// The folder of answered changes of images in use; see `serve`.
const STATE_DIR: &str = "/run/ferrite/images";
/// Operations in flight.
pub(crate) const ENTRIES: u32 = 128;

/// Runs one command.
pub(crate) fn run(args: &ImageArgs) -> Result<(), Failure> {
    allow_many_files();
    crate::store::reading::through_owners();
    if let EngineChoice::Only(_) = args.engine {
        engine(args.engine)?;
    }
    let stop = match changes_nothing(&args.command) {
        true => signals::end_at_once()?,
        false => signals::flag_once()?,
    };
    let shown = Shown::new(args.is_json() || args.quiet, stop);
    let tools = ImageTools {
        directory: &HostDirectory,
        engine: &|arena| args.engine.open(arena, ENTRIES),
        state_dir: state_dir(matches!(args.command, ImageCommand::Journal(_)))?,
        fixed_size: false,
        unlocked: looks(args),
        parents: args.parents.allowed()?,
        progress: &|progress| shown.show(progress),
    };
    let done = command(&tools, args, &shown);
    shown.clear();
    done
}

fn command(tools: &ImageTools<'_>, args: &ImageArgs, shown: &Shown) -> Result<(), Failure> {
    let out = Out { json: args.is_json(), quiet: args.quiet, shown };
    match &args.command {
        ImageCommand::Create(create) => out.confirm(&making::create(tools, create)?, text::made),
        ImageCommand::Info(it) => info(tools, &out, it),
        ImageCommand::Snapshot(it) => making::snapshot(tools, &out, it),
        ImageCommand::Clone(it) => {
            let parent = Some(existing(&it.parent, None)?);
            let unmarked = it.marking.unmarked;
            let new = NewImage { parent, unmarked, force: it.force, ..NewImage::default() };
            out.confirm(&tools.create(&name(&it.new, None)?, &new)?, text::made)
        }
        ImageCommand::Convert(it) if it.salvage => making::salvage(tools, &out, it),
        ImageCommand::Convert(convert) => {
            out.confirm(&making::convert(tools, convert)?, text::made)
        }
        ImageCommand::Check(it) => check(tools, &out, it),
        ImageCommand::Repair(it) => {
            let repaired = tools.repair(&it.named.name()?, it.force)?;
            out.say(&repaired, text::repaired)?;
            Ok(repaired.or_refused()?)
        }
        ImageCommand::Coalesce(it) => merging::coalesce(tools, &out, it),
        ImageCommand::MirrorCheck(it) => mirroring::check(tools, &out, it),
        ImageCommand::MirrorMap(it) => mirroring::map(tools, &out, it),
        ImageCommand::MergeStep(step) => merging::step(tools, &out, step),
        ImageCommand::Rebase(it) => out.confirm(&making::rebase(tools, it)?, text::made),
        ImageCommand::Resize(it) => {
            let (shrink, in_use) = (it.shrink || it.force, it.grow);
            let may = Resize { shrink, parents: it.force, in_use };
            let name = it.named.disk()?;
            let done = match name.volume() {
                Some(volume) => resize_volume(tools, &out, volume, it.size, may)?,
                None => tools.resize(&name, it.size, may)?,
            };
            out.confirm(&done, text::resized)
        }
        ImageCommand::Amend(it) => {
            let Amendment::Version3 = it.amendment;
            out.confirm(&tools.upgrade(&it.named.name()?)?, text::made)
        }
        ImageCommand::Map(it) => map(tools, &out, it),
        ImageCommand::Measure(it) => out.say(&making::measure(tools, it)?, text::measured),
        ImageCommand::Compare(compare) => self::compare(tools, &out, compare),
        ImageCommand::Du(one) => out.say(&tools.du(&one.named.name()?)?, text::usage),
        ImageCommand::Dirty(it) => dirty::run(tools, &out, it),
        ImageCommand::Journal(JournalCommand::List) => {
            mention_users();
            out.say(&tools.journals()?, |all| text::journals(all))
        }
        ImageCommand::Journal(JournalCommand::Drop(it)) => {
            let dropped = tools.drop_journals(&it.names, it.stale, it.force)?;
            out.confirm(&dropped, |all| text::dropped(all))
        }
    }
}

/// Resizes a volume of a store: what is behind a smaller size is lost, whatever it is.
fn resize_volume(
    tools: &ImageTools<'_>,
    out: &Out,
    (store, volume): (&Path, &str),
    size: NewSize,
    may: Resize,
) -> Result<Done, Failure> {
    let virtual_bytes = crate::store::resize(tools, out, (store, volume), size, may.shrink)?;
    let (path, format) = (format!("{}#{volume}", store.display()), Format::Store.name());
    Ok(Done { path, format, virtual_bytes, notes: Vec::new() })
}

/// How results of commands on images and stores are printed.
pub(crate) struct Out<'a> {
    pub(crate) json: bool,
    pub(crate) quiet: bool,
    pub(crate) shown: &'a Shown,
}

impl Out<'_> {
    /// Prints a result: as JSON, or as the text that `text` makes of it.
    pub(crate) fn say<T: Serialize>(
        &self,
        result: &T,
        text: impl Fn(&T) -> String,
    ) -> Result<(), Failure> {
        self.shown.clear();
        let text = if self.json { json(result)? + "\n" } else { text(result) };
        print(&text)
    }

    /// Prints what was done, unless that was not asked for.
    pub(crate) fn confirm<T: Serialize>(
        &self,
        result: &T,
        text: impl Fn(&T) -> String,
    ) -> Result<(), Failure> {
        if self.quiet { Ok(()) } else { self.say(result, text) }
    }
}

pub(crate) fn json(result: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string_pretty(result)
        .map_err(|e| Failure::new("cannot print JSON", e, "run the command without --json"))
}

/// Prints text. A closed standard output is no failure: its reader wants no more.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new("cannot print the result", e, "check where standard output goes"))
        }
        _ => Ok(()),
    }
}

/// Whether a signal may end the command at any point, as it writes nothing. `compare` ends by itself, and removes its
/// progress bar.
fn changes_nothing(command: &ImageCommand) -> bool {
    match command {
        ImageCommand::Info(_)
        | ImageCommand::Map(_)
        | ImageCommand::Measure(_)
        | ImageCommand::Du(_)
        | ImageCommand::Dirty(DirtyCommand::List(_) | DirtyCommand::Show(_))
        | ImageCommand::Journal(JournalCommand::List) => true,
        ImageCommand::Check(check) => check.repair.is_none(),
        ImageCommand::Snapshot(snapshot) => snapshot.inner.list,
        ImageCommand::Repair(repair) => !repair.force,
        _ => false,
    }
}

/// Whether the command may read an image that is in use. If so, a note says that the output may be outdated.
fn looks(args: &ImageArgs) -> bool {
    let of = |one: &OneArgs| (one.force_share, one.named.image.clone());
    let (may, image) = match &args.command {
        ImageCommand::Info(info) => of(&info.one),
        ImageCommand::Map(map) => of(&map.one),
        ImageCommand::Du(one) | ImageCommand::Dirty(DirtyCommand::List(one)) => of(one),
        ImageCommand::Dirty(DirtyCommand::Show(it)) => of(&it.one),
        ImageCommand::Check(check) => of(&check.one),
        ImageCommand::Convert(it) => (it.force_share, it.source.clone()),
        ImageCommand::Compare(it) => (it.force_share, it.a.clone()),
        ImageCommand::Snapshot(it) => (it.force_share, it.leaf.clone()),
        ImageCommand::Measure(it) => (it.force_share, it.image.clone().unwrap_or_default()),
        _ => return false,
    };
    // With JSON nothing but an error is on standard error.
    if may && !args.quiet && !args.is_json() {
        let image = image.display().to_string();
        let image = one_line(&image);
        eprintln!("note: {image} may be in use: what is read may be stale, or not fit together");
    }
    may
}

/// Prints as much of a chain as can be opened, and why the rest cannot.
fn info(tools: &ImageTools<'_>, out: &Out<'_>, args: &InfoArgs) -> Result<(), Failure> {
    let (info, end) = tools.info_as_far(&args.one.named.disk()?)?;
    match args.backing_chain && out.json {
        true => out.say(&qemu::chain(&info), |_| String::new())?,
        false => out.say(&qemu::Both::of(&info), |both| text::info(both.ours))?,
    }
    end.map_or(Ok(()), |e| Err(e.into()))
}

/// The bytes of a map that are printed at a time.
const MAP_BUFFER: usize = 64 << 10;

/// Prints extents as they are found: there may be millions.
fn map(tools: &ImageTools<'_>, out: &Out<'_>, args: &MapArgs) -> Result<(), Failure> {
    let name = args.one.named.disk()?;
    let end = args.max_length.map_or(u64::MAX, |most| args.start_offset.saturating_add(most));
    let mut printed = Ok(());
    let mut first = true;
    // Standard output by itself makes a system call for each line.
    let mut to = BufWriter::with_capacity(MAP_BUFFER, io::stdout().lock());
    let mut put = |text: String| {
        printed = to.write_all(text.as_bytes());
        printed.is_ok()
    };
    let head = || if out.json { "[".into() } else { text::map_head() };
    let mapped = tools.map_part(&name, args.start_offset..end, |extent| {
        let is_first = std::mem::take(&mut first);
        let comma = if is_first { "\n" } else { ",\n" };
        let head = if is_first { head() } else { String::new() };
        put(match out.json {
            true => {
                let line = serde_json::to_string(&qemu::Part::of(extent)).unwrap_or_default();
                format!("{head}{comma}  {line}")
            }
            false => head + &text::extent(extent),
        })
    });
    // If the command fails before the first extent, nothing is printed.
    if mapped.is_ok() && first {
        put(head());
    }
    if out.json && (mapped.is_ok() || !first) {
        put("\n]\n".into());
    }
    let printed = printed.and_then(|()| to.flush());
    mapped?;
    match printed {
        Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new("cannot print the map", e, "check where standard output goes"))
        }
        _ => Ok(()),
    }
}

/// Prints the findings. Damage decides the exit code.
fn check(tools: &ImageTools<'_>, out: &Out<'_>, args: &CheckArgs) -> Result<(), Failure> {
    let report = args.one.named.name().and_then(|name| {
        if let Some(scope) = args.repair {
            repair_first(tools, &name, scope)?;
        }
        Ok(match args.strict {
            true => tools.check_strictly(&name, args.chain)?,
            false => tools.check(&name, args.chain)?,
        })
    });
    let report = report.map_err(|e| e.with_code(Code::NOT_CHECKED))?;
    out.confirm(&report, text::report)?;
    // The damaged image may be a parent of the one that was named.
    let worst = report.images.iter().find(|image| image.verdict() == report.verdict);
    let image = worst.map_or("", |image| &image.path);
    let is_of_chain = worst
        .and_then(|image| image.findings.iter().find(|finding| !finding.harmless))
        .is_some_and(|first| first.kind == "chain");
    let (code, what, why, help) = match report.verdict {
        Verdict::InOrder => return Ok(()),
        Verdict::Leaks => {
            let help = format!("ferrite image repair --force {image} frees it");
            let why = "it has space that nothing refers to";
            (Code::LEAKS, format!("{image} could be smaller"), why, help)
        }
        Verdict::Unsupported => {
            let help = "use the program that made it, or convert it with that".into();
            let why = "it has features that are not supported here";
            (Code::NOT_CHECKED, format!("cannot check {image}"), why, help)
        }
        Verdict::Refused => {
            let help =
                "docs/internals/formats.md has the rules; ferrite image convert makes a copy \
                        that follows them, if sizes and names do"
                    .into();
            (Code::CORRUPT, format!("{image} is not for XAPI"), "vhd-util would refuse it", help)
        }
        Verdict::Damaged => {
            let help = match worst {
                _ if is_of_chain => "the findings name the next steps".into(),
                Some(worst) if worst.counts.mendable == 0 => without_repair(worst),
                _ => format!("ferrite image repair {image} shows what can be mended"),
            };
            let why = "parts of it do not read correctly";
            (Code::CORRUPT, format!("{image} is damaged"), why, help)
        }
    };
    Err(Failure::new(what, why, help).with_code(code))
}

/// The next step for an image in which nothing can be mended.
fn without_repair(image: &Checked) -> String {
    let lacks_footers = image.format == "vhd" && image.findings.iter().all(|f| f.kind == "footers");
    let by_raw = match lacks_footers {
        true => format!("; if it was a fixed VHD, raw:{} reads all its data", image.path),
        false => String::new(),
    };
    format!("nothing in it can be repaired: restore it from a backup{by_raw}")
}

/// `check -r`: repairs the findings in the scope. The check that follows shows the rest.
fn repair_first(tools: &ImageTools<'_>, name: &ImageName, scope: Scope) -> Result<(), Failure> {
    let before = tools.repair(name, false)?.before;
    let only_leaks = before.counts.mendable <= before.counts.leaks && before.counts.damage == 0;
    if scope == Scope::Leaks && !only_leaks {
        let what = format!("cannot repair the leaks of {}", name.path.display());
        let why = "it has other findings, which a repair would mend with them";
        let help = "ferrite image check shows them; -r all repairs what can be repaired";
        return Err(Failure::new(what, why, help));
    }
    tools.repair(name, true)?;
    Ok(())
}

fn compare(tools: &ImageTools<'_>, out: &Out<'_>, args: &CompareArgs) -> Result<(), Failure> {
    let (a, b) = (existing_disk(&args.a, args.format_a), existing_disk(&args.b, args.format_b));
    let found = match (a, b) {
        (Ok(a), Ok(b)) => tools.compare(&a, &b, args.strict).map_err(Failure::from),
        (Err(e), _) | (_, Err(e)) => Err(e),
    };
    let found = found.map_err(|e| e.with_code(Code::NOT_COMPARED))?;
    out.confirm(&found, text::comparison).map_err(|e| e.with_code(Code::NOT_COMPARED))?;
    match found.first_difference_bytes {
        None => Ok(()),
        Some(at) => {
            let what = format!("{} and {} differ", args.a.display(), args.b.display());
            let why = match found.difference {
                Some(Difference::Allocation) => format!(
                    "they read the same, and from byte {at} on one of them has space allocated \
                     where the other has none (-s)"
                ),
                _ => format!("the first difference is at byte {at}"),
            };
            let help = "ferrite image map shows where each has its data";
            Err(Failure::new(what, why, help).with_code(Code::DIFFER))
        }
    }
}

/// Raises the limit of open files: each image of a chain takes a descriptor, and each queue of a disk some. The usual
/// soft limit is low for programs that use select(2).
pub(crate) fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    // If it fails, the present limit stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

pub(crate) fn engine(choice: EngineChoice) -> Result<EngineKind, Failure> {
    let chosen = choice.decide().map_err(|e| {
        let what = format!("no engine for disk I/O (--engine {choice})");
        Failure::new(what, e, "ferrite doctor shows what this kernel offers")
    })?;
    Ok(chosen.kind)
}

/// Says that users have journals of their own.
fn mention_users() {
    for folder in user_state::of_others() {
        tracing::warn!("a user has more of them in {}: run this as that user", folder.display());
    }
}

/// The folder in which a killed backend has left answered changes. `None`: it cannot have left any. If this user may
/// not read the folder, images that may have changes there are logged. With `needed` that is a failure.
pub(crate) fn state_dir(needed: bool) -> Result<Option<PathBuf>, Failure> {
    if let Some(own) = user_state::used() {
        return Ok(Some(own));
    }
    let path = Path::new(STATE_DIR);
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    match made.and_then(|()| path.read_dir()) {
        Ok(_) => Ok(Some(path.to_owned())),
        Err(e) if needed && path.parent().is_some_and(Path::exists) => {
            let help = "run it as root, as disks are served";
            Err(Failure::new(format!("cannot read {STATE_DIR}"), e, help))
        }
        Err(e) => {
            let denied = e.kind() == io::ErrorKind::PermissionDenied;
            Ok((denied && path.parent().is_some_and(Path::exists)).then(|| path.to_owned()))
        }
    }
}
