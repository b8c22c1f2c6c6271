//! Directories of a simulated world. Operations are done at once, on the real directory; a power cut reverts the last
//! of those that no sync made durable.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::{SimWorld, State};
use ferrite_host::clock::{Random, SplitMix64};
use ferrite_host::directory::{Directory, HostDirectory};

/// How to revert an operation.
enum Undo {
    /// Remove the name that it made.
    Remove(PathBuf),
    /// Restore files, first the one that was renamed, then the one that it replaced.
    Bring(Vec<Back>),
}

/// How a name is restored: from another name of the file, the first path.
enum Back {
    Move(PathBuf, PathBuf),
    /// The other name stays.
    Link(PathBuf, PathBuf),
}

struct Operation {
    /// The directories of the changed entries.
    directories: Vec<PathBuf>,
    undo: Undo,
    /// The file in the attic, until the operation is durable.
    put_away: Option<PathBuf>,
}

/// The operations that are not durable, in order: the journal of a file system.
#[derive(Default)]
pub(super) struct Entries(Vec<Operation>);

impl Entries {
    pub(super) fn is_durable(&self) -> bool {
        self.0.is_empty()
    }

    /// Writes the journal up to the last operation on this directory.
    fn sync(&mut self, directory: &Path) {
        let last = self.0.iter().rposition(|op| op.directories.iter().any(|d| d == directory));
        self.forget(last.map_or(0, |last| last + 1));
    }

    /// The first `count` operations are durable: no file of theirs is restored any more. A file without a name is gone
    /// on a real machine, so no handle finds it.
    fn forget(&mut self, count: usize) {
        for operation in self.0.drain(..count) {
            if let Some(place) = operation.put_away {
                let _ = std::fs::remove_file(place);
            }
        }
    }

    /// Makes some of the operations, from the first on, durable, and reverts the others.
    pub(super) fn cut(&mut self, random: &mut SplitMix64) -> io::Result<()> {
        let kept = random.below(self.0.len() as u64 + 1) as usize;
        for op in self.0.split_off(kept).into_iter().rev() {
            match op.undo {
                Undo::Remove(path) => std::fs::remove_file(path)?,
                Undo::Bring(names) => {
                    for name in names {
                        match name {
                            Back::Move(from, to) => std::fs::rename(from, to)?,
                            Back::Link(from, to) => std::fs::hard_link(from, to)?,
                        }
                    }
                }
            }
        }
        self.forget(kept);
        Ok(())
    }
}

/// The directories of a [`SimWorld`].
#[derive(Clone)]
pub struct SimDirectory {
    world: SimWorld,
    /// The folder of files without a name, on the same file system: they may be restored.
    attic: PathBuf,
}

impl SimWorld {
    /// The machine's directories. `attic` is used for nothing else, on the same file system.
    pub fn directories(&self, attic: &Path) -> SimDirectory {
        SimDirectory { world: self.clone(), attic: attic.to_owned() }
    }
}

impl SimDirectory {
    /// Makes one step: fails if the world has stopped, else does the work, and reports its errors.
    fn step<T>(&self, work: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let state = &mut *self.world.state();
        state.check()?;
        let done = work(state)?;
        state.next_step();
        state.check()?;
        Ok(done)
    }

    /// Removes a name. A file with another name does not go to the attic, where it would have more names than on a real
    /// machine.
    fn put_away(&self, state: &State, path: &Path) -> io::Result<Back> {
        if let Some(other) = other_name(path)? {
            std::fs::remove_file(path)?;
            return Ok(Back::Link(other, path.to_owned()));
        }
        let place = self.attic.join(state.step.to_string());
        std::fs::rename(path, &place)?;
        Ok(Back::Move(place, path.to_owned()))
    }
}

impl Directory for SimDirectory {
    fn create_new(&self, path: &Path) -> io::Result<OwnedFd> {
        self.step(|state| {
            let file = HostDirectory.create_new(path)?;
            state.add_file(&file)?;
            state.did(&[path], Undo::Remove(path.to_owned()));
            Ok(file)
        })
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(|state| {
            HostDirectory.hard_link(from, to)?;
            state.did(&[to], Undo::Remove(to.to_owned()));
            Ok(())
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(|state| {
            std::fs::symlink_metadata(from)?;
            let mut back = vec![Back::Move(to.to_owned(), from.to_owned())];
            if to.try_exists()? {
                back.push(self.put_away(state, to)?);
            }
            HostDirectory.rename(from, to)?;
            state.did(&[from, to], Undo::Bring(back));
            Ok(())
        })
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step(|state| {
            let back = self.put_away(state, path)?;
            state.did(&[path], Undo::Bring(vec![back]));
            Ok(())
        })
    }

    fn sync(&self, directory: &Path) -> io::Result<()> {
        self.step(|state| {
            state.entries.sync(directory);
            Ok(())
        })
    }
}

/// Another name of a file, in its directory.
fn other_name(path: &Path) -> io::Result<Option<PathBuf>> {
    let meta = std::fs::symlink_metadata(path)?;
    if meta.nlink() < 2 {
        return Ok(None);
    }
    for entry in std::fs::read_dir(path.parent().unwrap_or(Path::new("/")))? {
        let other = entry?.path();
        let found = std::fs::symlink_metadata(&other)?;
        if other != path && (found.dev(), found.ino()) == (meta.dev(), meta.ino()) {
            return Ok(Some(other));
        }
    }
    Ok(None)
}

impl State {
    fn did(&mut self, paths: &[&Path], undo: Undo) {
        // A replaced file is the last one to be restored. A renamed one has a name.
        let put_away = match &undo {
            Undo::Bring(names) => names.last().and_then(|back| match back {
                Back::Move(place, to) => {
                    (paths.last() == Some(&to.as_path())).then(|| place.clone())
                }
                Back::Link(..) => None,
            }),
            Undo::Remove(_) => None,
        };
        let directories = paths.iter().filter_map(|p| p.parent()).map(Path::to_owned).collect();
        self.entries.0.push(Operation { directories, undo, put_away });
    }
}
