//! A copy of the source, so that no mutant is ever in the work tree. Unchanged files keep their times, so little is
//! compiled for each mutant.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

use super::list::Mutant;
use ferrite_xenhost::steps;

/// The environment variable for another build folder, which may have the dependencies already.
const TARGET: &str = "FERRITE_MUTANTS_TARGET";

/// See the module text.
pub(super) struct Copy {
    /// The first is 0.
    index: usize,
    source: PathBuf,
    build: PathBuf,
    /// The lock against concurrent runs.
    _lock: File,
}

impl Copy {
    /// Updates the copy of this index from the work tree.
    pub(super) fn make(index: usize) -> Result<Copy> {
        let folder = match index {
            0 => steps::target_dir().join("mutants"),
            more => steps::target_dir().join(format!("mutants-{}", more + 1)),
        };
        fs::create_dir_all(&folder)?;
        let lock = File::create(folder.join("lock"))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .context("another `cargo xtask mutants` is running here")?;
        let named = std::env::var_os(TARGET).filter(|_| index == 0);
        let build = named.map_or_else(|| folder.join("build"), PathBuf::from);
        if build.canonicalize().ok() == Some(steps::target_dir().canonicalize()?) {
            bail!(
                "{TARGET} is the work tree's own build folder, where cargo would take a mutant's \
                 programs for its; name another one"
            );
        }
        let copy = Copy { index, source: folder.join("source"), build, _lock: lock };
        let files = tracked()?;
        for file in &files {
            let bytes = fs::read(steps::repository().join(file))?;
            copy.put(file, &bytes)?;
        }
        remove_others(&copy.source, &copy.source, &files)?;
        Ok(copy)
    }

    fn put(&self, file: &Path, bytes: &[u8]) -> Result<()> {
        let to = self.source.join(file);
        if fs::read(&to).is_ok_and(|old| old == bytes) {
            return Ok(());
        }
        fs::create_dir_all(to.parent().context("a file without a folder")?)?;
        fs::write(&to, bytes).with_context(|| to.display().to_string())
    }

    /// Applies a mutant.
    pub(super) fn apply(&self, mutant: &Mutant) -> Result<()> {
        let file = Path::new(&mutant.file);
        let text = fs::read_to_string(steps::repository().join(file))?;
        self.put(file, mutant.mutate(&text)?.as_bytes())
    }

    /// Reverts it.
    pub(super) fn restore(&self, mutant: &Mutant) -> Result<()> {
        let file = Path::new(&mutant.file);
        self.put(file, &fs::read(steps::repository().join(file))?)
    }

    /// `cargo` in the copy, with a build folder of its own by default: a mutant's programs must never be where the real
    /// ones are searched.
    pub(super) fn cargo(&self) -> Command {
        let mut cargo = steps::cargo();
        cargo.current_dir(&self.source).env("CARGO_TARGET_DIR", &self.build);
        cargo
    }

    /// An empty log of this copy's work.
    pub(super) fn fresh_log(&self, of: &str) -> Result<PathBuf> {
        steps::fresh_log(&format!("mutant-{}-{of}", self.index))
    }

    /// The last simulator that was built.
    pub(super) fn simulator(&self) -> PathBuf {
        self.build.join("debug/ferrite-sim")
    }
}

/// All files of the work tree that belong to the repository, new ones too.
fn tracked() -> Result<BTreeSet<PathBuf>> {
    let mut git = Command::new("git");
    git.current_dir(steps::repository());
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let names = steps::output(&mut git)?;
    let files = names.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from);
    Ok(files.filter(|file| steps::repository().join(file).is_file()).collect())
}

fn remove_others(folder: &Path, source: &Path, files: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, source, files)?;
            // Cargo takes a folder below crates/ for a crate.
            if fs::read_dir(&path)?.next().is_none() {
                fs::remove_dir(&path)?;
            }
        } else if !files.contains(path.strip_prefix(source)?) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}
