//! Merging images: a stretch of a chain at once, or a step of that for the daemon.

use std::cell::Cell;
use std::io::{self, BufRead as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferrite_disk::ImageName;
use ferrite_image_tools::{Done, ImageTools, MergeCopy, Progress, Stretch};
use rustix::process::{Signal, getpid, kill_process};
use serde::Serialize;

use super::args::merging::{CoalesceArgs, CopyStepArgs, MergeStep, StretchArgs};
use super::args::{existing, name};
use super::{Out, print, text};
use crate::exit::Failure;

/// The time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// A line for a program.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Line<'a, T> {
    /// How far the copy is.
    Progress {
        done_bytes: u64,
        total_bytes: u64,
    },
    Result(&'a T),
}

pub(super) fn coalesce(
    tools: &ImageTools<'_>,
    out: &Out<'_>,
    it: &CoalesceArgs,
) -> Result<(), Failure> {
    let child = existing(&it.child, None)?;
    let [from, to] = ends(&it.from, &it.to)?;
    let done = match &it.into {
        Some(parent) => tools.coalesce_into(&child, &existing(parent, None)?, it.force)?,
        None if from.is_some() || to.is_some() => {
            tools.coalesce_stretch(&child, from.as_ref(), to.as_ref(), it.force)?
        }
        None => tools.coalesce(&child, it.force)?,
    };
    out.confirm(&done, text::made)
}

/// The names of the two ends. They may be gone, after a merge that was cut off.
fn ends(
    from: &Option<std::ffi::OsString>,
    to: &Option<std::ffi::OsString>,
) -> Result<[Option<ImageName>; 2], Failure> {
    let name = |text: &Option<std::ffi::OsString>| {
        text.as_ref().map(|text| existing(text, None)).transpose()
    };
    Ok([name(from)?, name(to)?])
}

pub(super) fn step(tools: &ImageTools<'_>, out: &Out<'_>, step: &MergeStep) -> Result<(), Failure> {
    let named = |it: &StretchArgs| stretch(tools, it);
    match step {
        MergeStep::Plan(it) => {
            let leaf = existing(&it.leaf, None)?;
            let [from, to] = ends(&it.from, &it.to)?;
            let plan = tools.merge_plan(&leaf, from.as_ref(), to.as_ref(), it.force)?;
            tell(out, &plan, as_json)
        }
        MergeStep::Grow(it) => result(out, &tools.merge_grow(&named(it)?, it.force)?),
        MergeStep::Copy(it) => copy(tools, out, it),
        MergeStep::Relink(it) => result(out, &tools.merge_relink(&named(it)?)?),
        MergeStep::Clean(it) => result(out, &tools.merge_clean(&named(it)?)?),
        MergeStep::Split(it) => {
            result(out, &tools.merge_split(&existing(&it.leaf, None)?, &name(&it.from, None)?)?)
        }
        MergeStep::Leaf(it) => {
            let [leaf, to] = [existing(&it.leaf, None)?, existing(&it.to, None)?];
            tell(out, &tools.merge_leaf(&leaf, &to, it.most, it.force)?, as_json)
        }
        MergeStep::Undo(it) => {
            let [leaf, to] = [existing(&it.split.leaf, None)?, existing(&it.to, None)?];
            let snapshot = name(&it.split.from, None)?;
            tell(out, &tools.merge_undo(&leaf, &snapshot, &to, it.most)?, as_json)
        }
    }
}

/// The stretch that is named; with both ends named they need not be in the chain any more.
fn stretch(tools: &ImageTools<'_>, it: &StretchArgs) -> Result<Stretch, Failure> {
    let leaf = existing(&it.leaf, None)?;
    Ok(match ends(&it.from, &it.to)? {
        [Some(from), Some(to)] => Stretch { leaf, from, to },
        [from, to] => tools.stretch(&leaf, from.as_ref(), to.as_ref())?,
    })
}

fn copy(tools: &ImageTools<'_>, out: &Out<'_>, it: &CopyStepArgs) -> Result<(), Failure> {
    let stretch = stretch(tools, &it.stretch)?;
    let speed = Arc::new(AtomicU64::new(it.speed));
    if it.speeds {
        listen(speed.clone());
    }
    let told: Cell<Option<Instant>> = Cell::new(None);
    let progress = |progress: Progress| {
        if out.json && told.get().is_none_or(|then| then.elapsed() >= LINE_EVERY) {
            told.set(Some(Instant::now()));
            let Progress { done_bytes, total_bytes } = progress;
            let line: Line<'_, ()> = Line::Progress { done_bytes, total_bytes };
            let _ = serde_json::to_string(&line).map(|line| print(&(line + "\n")));
        }
        (tools.progress)(progress)
    };
    let tools = ImageTools {
        state_dir: tools.state_dir.clone(),
        parents: tools.parents.clone(),
        progress: &progress,
        ..*tools
    };
    let how = MergeCopy { speed, force: it.stretch.force };
    result(out, &tools.merge_copy(&stretch, &how)?)
}

/// Takes new speeds from standard input until its end. The daemon holds the other end: if that is closed, the daemon is
/// gone, and the copy ends as by a signal. The next daemon starts it again.
fn listen(speed: Arc<AtomicU64>) {
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            match line.trim().parse() {
                Ok(bytes) => speed.store(bytes, Ordering::Relaxed),
                Err(_) => tracing::warn!("{line:?} is no speed: a number of bytes a second"),
            }
        }
        let _ = kill_process(getpid(), Signal::TERM);
    });
}

fn as_json(what: &impl Serialize) -> String {
    super::json(what).unwrap_or_default() + "\n"
}

fn result(out: &Out<'_>, done: &Done) -> Result<(), Failure> {
    tell(out, done, text::made)
}

/// Prints a result for people, or as a line for a program.
pub(super) fn tell<T: Serialize>(
    out: &Out<'_>,
    what: &T,
    text: impl Fn(&T) -> String,
) -> Result<(), Failure> {
    if !out.json {
        return out.confirm(what, text);
    }
    let line = serde_json::to_string(&Line::Result(what));
    let line = line.map_err(|e| Failure::new("cannot print JSON", e, "run it without --json"))?;
    print(&(line + "\n"))
}
