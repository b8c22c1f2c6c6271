//! Operations on directories: where the order of files coming and going matters for what
//! survives a crash, it goes through [`Directory`], so that a simulated world can take it back.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use crate::names;

/// Changes of directory entries. None of them is durable before [`sync`](Directory::sync).
pub trait Directory {
    /// Makes an empty file, readable and writable by its owner and readable by its group.
    ///
    /// # Errors
    /// `AlreadyExists`, and what the kernel says; so for all of them.
    fn create_new(&self, path: &Path) -> io::Result<OwnedFd>;

    /// Gives a file another name, `to`.
    ///
    /// # Errors
    /// `AlreadyExists`, and what the kernel says.
    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Gives the file the name `to` instead; a file that had that name is replaced by it.
    ///
    /// # Errors
    /// The kernel's error.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Takes a name away, and the file with it if it was the last one.
    ///
    /// # Errors
    /// The kernel's error.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// All that was done to the entries of `directory` is durable when this returns.
    ///
    /// # Errors
    /// The kernel's error.
    fn sync(&self, directory: &Path) -> io::Result<()>;
}

/// The directories of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostDirectory;

impl Directory for HostDirectory {
    fn create_new(&self, path: &Path) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        Ok(names::open(path, flags, Mode::RUSR | Mode::WUSR | Mode::RGRP)?)
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        names::hard_link(from, to)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        names::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        names::remove_file(path)
    }

    fn sync(&self, directory: &Path) -> io::Result<()> {
        File::from(names::open(directory, OFlags::RDONLY, Mode::empty())?).sync_all()
    }
}
