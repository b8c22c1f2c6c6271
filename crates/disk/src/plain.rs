//! Files whose names can be foreseen by anybody who may write in their folder, and who may have put
//! something else there.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// Opens a regular file: never through a link, and without waiting for the other end of a pipe.
pub(crate) fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let foreign =
        || io::Error::other("it is no regular file (a link, a pipe, a folder): move it away");
    // A link, and a pipe that nobody reads.
    let not_opened = [Errno::LOOP, Errno::NXIO, Errno::ISDIR].map(|e| Some(e.raw_os_error()));
    match options.custom_flags(flags.bits().cast_signed()).open(path) {
        Err(e) if not_opened.contains(&e.raw_os_error()) => Err(foreign()),
        Ok(file) if !file.metadata()?.is_file() => Err(foreign()),
        opened => opened,
    }
}

/// All of such a file, if that is not more than `most` bytes.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    open(path, File::options().read(true))?.take(most + 1).read_to_end(&mut text)?;
    if text.len() as u64 > most { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(text) }
}
