//! Opens files with predictable names. Another user who may write in the folder may have put something else there.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use ferrite_host::names;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Opens an existing regular file: never through a link, and without waiting for the other end of a pipe.
///
/// # Errors
/// Errors of the kernel, and that it is no regular file.
pub fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let foreign =
        || io::Error::other("it is no regular file (a link, a pipe, a folder): move it away");
    // A link, or a pipe without a reader.
    match names::open(path, flags, Mode::empty()).map(File::from) {
        Err(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => Err(foreign()),
        Ok(file) if !file.metadata()?.is_file() => Err(foreign()),
        opened => Ok(opened?),
    }
}

/// Reads all of a regular file that has at most `most` bytes. The name is followed as [`open`] does.
///
/// # Errors
/// As [`open`]. `FileTooLarge`: it has more bytes.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    open(path, OFlags::RDONLY)?.take(most + 1).read_to_end(&mut text)?;
    if text.len() as u64 > most { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(text) }
}
