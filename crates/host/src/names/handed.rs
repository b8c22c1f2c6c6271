//! Files that were opened for this process by its keeper before it asked. No policy allows them: a worker that
//! may open one of them once more could do harm.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

thread_local! {
    static HANDED: RefCell<Handed> = RefCell::default();
}

/// Files by the names that they were opened by. Each is there as often as it may be opened.
#[derive(Debug, Default)]
pub struct Handed(BTreeMap<PathBuf, Vec<Result<OwnedFd, Errno>>>);

impl Handed {
    /// One of them more, or why there is none.
    pub fn add(&mut self, path: PathBuf, file: Result<OwnedFd, Errno>) {
        self.0.entry(path).or_default().push(file);
    }
}

/// While `f` runs, what this thread [opens](super::open) by one of these names is that file, however it is to be
/// opened. Files that are left then are closed.
pub fn with_handed<T>(handed: Handed, f: impl FnOnce() -> T) -> T {
    struct End(Handed);
    impl Drop for End {
        fn drop(&mut self) {
            HANDED.replace(std::mem::take(&mut self.0));
        }
    }
    let _end = End(HANDED.replace(handed));
    f()
}

/// `None`: it is to be opened as ever.
pub(super) fn take(path: &Path) -> Option<Result<OwnedFd, Errno>> {
    HANDED.with_borrow_mut(|handed| {
        let files = handed.0.get_mut(path)?;
        let file = files.pop();
        if files.is_empty() {
            handed.0.remove(path);
        }
        file
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read as _;

    use rustix::fs::{Mode, OFlags};

    use super::*;
    use crate::names::open;

    #[test]
    fn what_was_handed_over_is_opened_so_often_by_this_thread_and_closed_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (name, other) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&other, "b").unwrap();
        let mut handed = Handed::default();
        for _ in 0..2 {
            handed.add(name.clone(), Ok(File::open(&other).unwrap().into()));
        }
        handed.add(name.clone(), Err(Errno::NODEV));
        let look = || open(&name, OFlags::RDONLY, Mode::empty());
        with_handed(handed, || {
            assert_eq!(look().err(), Some(Errno::NODEV));
            let mut text = String::new();
            File::from(look().unwrap()).read_to_string(&mut text).unwrap();
            assert_eq!(text, "b");
            std::thread::scope(|scope| {
                let theirs = scope.spawn(|| look().err());
                assert_eq!(theirs.join().unwrap(), Some(Errno::NOENT));
            });
        });
        assert_eq!(look().err(), Some(Errno::NOENT));
    }
}
