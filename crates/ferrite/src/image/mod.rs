//! `ferrite image`: disk images that are not in use. `ferrite_image_tools` does the work; this module has names,
//! options, progress and text.

use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{Convert, ImageTools, NewImage, Rebase, Verdict};
use ferrite_io::engines::{EngineChoice, EngineKind};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use crate::exit::{Code, Failure};
use crate::plain::one_line;
use crate::signals;

pub(crate) mod args;
pub(crate) mod progress;
mod text;

use args::{
    Amendment, CheckArgs, CompareArgs, ConvertArgs, CreateArgs, ImageArgs, ImageCommand,
    JournalCommand, OneArgs, existing, existing_disk, name, new_disk,
};
use progress::Shown;

/// The folder of answered changes of images in use; see `serve`.
const STATE_DIR: &str = "/run/ferrite/images";
/// Operations in flight.
pub(crate) const ENTRIES: u32 = 128;

/// Runs one command.
pub(crate) fn run(args: &ImageArgs) -> Result<(), Failure> {
    allow_many_files();
    let kind = engine(args.engine)?;
    let stop = match changes_nothing(&args.command) {
        true => signals::end_at_once()?,
        false => signals::flag_once()?,
    };
    let shown = Shown::new(args.is_json(), stop);
    let tools = ImageTools {
        directory: &HostDirectory,
        engine: &|arena| kind.open(arena, ENTRIES),
        state_dir: state_dir(matches!(args.command, ImageCommand::Journal(_)))?,
        fixed_size: false,
        unlocked: looks(&args.command),
        parents: args.parents.allowed()?,
        progress: &|progress| shown.show(progress),
    };
    let done = command(&tools, args, &shown);
    shown.clear();
    done
}

fn command(tools: &ImageTools<'_>, args: &ImageArgs, shown: &Shown) -> Result<(), Failure> {
    let out = Out { json: args.is_json(), shown };
    match &args.command {
        ImageCommand::Create(create) => out.say(&self::create(tools, create)?, text::made),
        ImageCommand::Info(one) => info(tools, &out, one),
        ImageCommand::Snapshot(it) => out.say(
            &tools.snapshot(&existing(&it.leaf, None)?, &name(&it.parent, None)?)?,
            text::made,
        ),
        ImageCommand::Clone(it) => {
            let parent = Some(existing(&it.parent, None)?);
            let unmarked = it.marking.unmarked;
            let new = NewImage { parent, unmarked, force: it.force, ..NewImage::default() };
            out.say(&tools.create(&name(&it.new, None)?, &new)?, text::made)
        }
        ImageCommand::Convert(convert) => out.say(&self::convert(tools, convert)?, text::made),
        ImageCommand::Check(it) => check(tools, &out, it),
        ImageCommand::Repair(it) => {
            let repaired = tools.repair(&it.named.name()?, it.force)?;
            out.say(&repaired, text::repaired)?;
            Ok(repaired.or_refused()?)
        }
        ImageCommand::Coalesce(it) => {
            let child = existing(&it.child, None)?;
            let done = match &it.into {
                Some(parent) => tools.coalesce_into(&child, &existing(parent, None)?, it.force)?,
                None => tools.coalesce(&child, it.force)?,
            };
            out.say(&done, text::made)
        }
        ImageCommand::Rebase(it) => {
            let how = if it.is_unsafe { Rebase::Unsafe } else { Rebase::Safe };
            let done =
                tools.rebase(&it.named.name()?, &existing(&it.parent, None)?, how, it.force)?;
            out.say(&done, text::made)
        }
        ImageCommand::Resize(it) => {
            out.say(&tools.resize(&it.named.name()?, it.size, it.force)?, text::resized)
        }
        ImageCommand::Amend(it) => {
            let Amendment::Version3 = it.amendment;
            out.say(&tools.upgrade(&it.named.name()?)?, text::made)
        }
        ImageCommand::Map(one) => map(tools, &out, one),
        ImageCommand::Compare(compare) => self::compare(tools, &out, compare),
        ImageCommand::Du(one) => out.say(&tools.du(&one.named.name()?)?, text::usage),
        ImageCommand::Journal(JournalCommand::List) => {
            out.say(&tools.journals()?, |all| text::journals(all))
        }
        ImageCommand::Journal(JournalCommand::Drop(it)) => {
            let dropped = tools.drop_journals(&it.names, it.stale, it.force)?;
            out.say(&dropped, |all| text::dropped(all))
        }
    }
}

/// How results are printed.
struct Out<'a> {
    json: bool,
    shown: &'a Shown,
}

impl Out<'_> {
    /// Prints a result: as JSON, or as the text that `text` makes of it.
    fn say<T: Serialize>(&self, result: &T, text: impl Fn(&T) -> String) -> Result<(), Failure> {
        self.shown.clear();
        let text = if self.json { json(result)? + "\n" } else { text(result) };
        print(&text)
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
        | ImageCommand::Du(_)
        | ImageCommand::Check(_)
        | ImageCommand::Journal(JournalCommand::List) => true,
        ImageCommand::Repair(repair) => !repair.force,
        _ => false,
    }
}

/// Whether the command may read an image that is in use. If so, a note says that the output may be outdated.
fn looks(command: &ImageCommand) -> bool {
    let one = match command {
        ImageCommand::Info(one) | ImageCommand::Map(one) | ImageCommand::Du(one) => one,
        ImageCommand::Check(check) => &check.one,
        _ => return false,
    };
    if one.force_share {
        let image = one.named.image.display().to_string();
        let image = one_line(&image);
        eprintln!("note: {image} may be in use: what is shown may be stale, or not fit together");
    }
    one.force_share
}

/// Prints as much of a chain as can be opened, and why the rest cannot.
fn info(tools: &ImageTools<'_>, out: &Out<'_>, one: &OneArgs) -> Result<(), Failure> {
    let (info, end) = tools.info_as_far(&one.named.disk()?)?;
    out.say(&info, text::info)?;
    end.map_or(Ok(()), |e| Err(e.into()))
}

fn create(tools: &ImageTools<'_>, args: &CreateArgs) -> Result<ferrite_image_tools::Done, Failure> {
    let new = NewImage {
        bytes: args.size,
        parent: args.parent.as_deref().map(|parent| existing(parent, None)).transpose()?,
        fixed: args.fixed,
        unit_bytes: args.unit.block,
        force: args.force,
        unmarked: args.marking.unmarked,
    };
    Ok(tools.create(&name(&args.image, args.format)?, &new)?)
}

fn convert(
    tools: &ImageTools<'_>,
    args: &ConvertArgs,
) -> Result<ferrite_image_tools::Done, Failure> {
    let from = existing_disk(&args.source, args.from)?;
    let to = new_disk(&args.destination, args.to)?;
    let how = Convert {
        force: args.force,
        resume: args.resume,
        fixed: args.fixed,
        unit_bytes: args.unit.block,
    };
    Ok(tools.convert(&from, &to, &how)?)
}

/// Prints extents as they are found: there may be millions.
fn map(tools: &ImageTools<'_>, out: &Out<'_>, one: &OneArgs) -> Result<(), Failure> {
    let name = one.named.disk()?;
    let mut printed = Ok(());
    let mut first = true;
    let mut put = |text: String| {
        printed = io::stdout().lock().write_all(text.as_bytes());
        printed.is_ok()
    };
    let head = || if out.json { "[".into() } else { text::map_head() };
    let mapped = tools.map(&name, |extent| {
        let is_first = std::mem::take(&mut first);
        let comma = if is_first { "\n" } else { ",\n" };
        let head = if is_first { head() } else { String::new() };
        put(match out.json {
            true => {
                format!("{head}{comma}  {}", serde_json::to_string(extent).unwrap_or_default())
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
        Ok(match args.strict {
            true => tools.check_strictly(&name, args.chain)?,
            false => tools.check(&name, args.chain)?,
        })
    });
    let report = report.map_err(|e| e.with_code(Code::NOT_CHECKED))?;
    out.say(&report, text::report)?;
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
            let help = match is_of_chain {
                true => "the findings name the next steps".into(),
                false => format!("ferrite image repair {image} shows what can be mended"),
            };
            let why = "parts of it do not read correctly";
            (Code::CORRUPT, format!("{image} is damaged"), why, help)
        }
    };
    Err(Failure::new(what, why, help).with_code(code))
}

fn compare(tools: &ImageTools<'_>, out: &Out<'_>, args: &CompareArgs) -> Result<(), Failure> {
    let (a, b) = (existing_disk(&args.a, args.format_a), existing_disk(&args.b, args.format_b));
    let found = match (a, b) {
        (Ok(a), Ok(b)) => tools.compare(&a, &b, args.strict).map_err(Failure::from),
        (Err(e), _) | (_, Err(e)) => Err(e),
    };
    let found = found.map_err(|e| e.with_code(Code::NOT_COMPARED))?;
    out.say(&found, text::comparison).map_err(|e| e.with_code(Code::NOT_COMPARED))?;
    match found.first_difference_bytes {
        None => Ok(()),
        Some(at) => Err(Failure {
            code: Code::DIFFER,
            what: format!("{} and {} differ", args.a.display(), args.b.display()),
            why: format!("the first difference is at byte {at}"),
            help: "ferrite image map shows where each has its data".into(),
        }),
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

/// The folder in which a killed backend has left answered changes. `None`: it cannot have left any. If this user may
/// not read the folder, images that may have changes there are logged. With `needed` that is a failure.
pub(crate) fn state_dir(needed: bool) -> Result<Option<PathBuf>, Failure> {
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
