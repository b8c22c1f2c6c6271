//! Changes of images, by the library that has their order of writes.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use ferrite_daemon::control::protocol::Change;
use ferrite_disk::DiskError;
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{ImageTools, VhdChange, libvhd_path, rounded};
use ferrite_io::engines::EngineChoice;
use rustix::io::Errno;

use super::Stop;
use crate::compat::served;
use crate::image::{ENTRIES, allow_many_files, state_dir};

/// Bytes of the unit of most sizes.
pub(super) const MIB: u64 = 1 << 20;

/// Does something with the tools for images. They take no lock.
pub(super) fn with_tools<T>(
    work: impl FnOnce(&ImageTools<'_>) -> Result<T, DiskError>,
) -> Result<T, Stop> {
    allow_many_files();
    let tools = ImageTools {
        directory: &HostDirectory,
        engine: &|arena| EngineChoice::Auto.open(arena, ENTRIES),
        // A folder that cannot be made has nothing in it.
        state_dir: state_dir(false).ok().flatten(),
        fixed_size: false,
        unlocked: false,
        parents: ferrite_disk::Parents::Any,
        progress: &|_| true,
    };
    Ok(work(&tools)?)
}

/// Changes the headers of one image: `set`, `modify`, `key`, `resize -f` and `repair` write through this, and no other
/// way.
pub(super) fn change(path: &Path, change: &VhdChange) -> Result<(), Stop> {
    match served(path, change) {
        Some(done) => done,
        None => with_tools(|tools| tools.change_vhd(path, change)),
    }
}

/// Has the worker that writes to an image change its headers. `None`: no worker does.
fn served(path: &Path, change: &VhdChange) -> Option<Result<(), Stop>> {
    let run_dir = served::run_dir();
    match served::query(&run_dir, path) {
        Ok(None) => return None,
        Ok(Some(_)) => {}
        Err(refusal) => return Some(Err(refusal.into())),
    }
    let change = match change {
        VhdChange::Hidden(hidden) => Change::Hidden(*hidden),
        VhdChange::Key { nonce, hash } => Change::Key { nonce: as_hex(nonce), hash: as_hex(hash) },
        VhdChange::Grow(bytes) => Change::Size(rounded(*bytes)),
        VhdChange::Parent(parent) => match with_tools(|tools| tools.link_of_vhd(path, parent)) {
            Ok(link) => Change::Parent {
                uuid: link.uuid.to_string(),
                modified: link.modified_unix_s,
                relative: link.relative.to_string_lossy().into_owned(),
            },
            Err(stop) => return Some(Err(stop)),
        },
        VhdChange::Marker(_) | VhdChange::End(_) | VhdChange::Empty | VhdChange::Mend => {
            let why = format!("{} is being written by a disk: pause that first", path.display());
            return Some(Err(Stop::new(Errno::BUSY, why)));
        }
    };
    // The disk may have been closed meanwhile.
    served::change(&run_dir, path, &change).map_err(Stop::from).transpose()
}

/// The image of `-n`, by the path that libvhd would use.
pub(super) fn found(path: &Path) -> Result<PathBuf, Stop> {
    libvhd_path(path).map_err(|e| {
        let errno = Errno::from_io_error(&e).unwrap_or(Errno::INVAL);
        Stop::new(errno, format!("cannot find {}: {e}", path.display()))
    })
}

/// The path of a new image, and whether something is there already.
pub(super) fn found_or_new(path: &Path) -> Result<(PathBuf, bool), Stop> {
    if path.symlink_metadata().is_ok() {
        return found(path).map(|path| (path, true));
    }
    let name = path.file_name().ok_or_else(|| {
        Stop::new(Errno::INVAL, format!("{} is no name of a file", path.display()))
    })?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = found(folder.unwrap_or(Path::new(".")))?;
    Ok((folder.join(name), false))
}

/// The bytes of a size in MiB that has to be there.
pub(super) fn mib(number: Option<u64>, letter: char) -> Result<u64, Stop> {
    let number = number.ok_or_else(|| Stop::Usage(format!("-{letter} is missing")))?;
    number.checked_mul(MIB).ok_or_else(|| Stop::Usage(format!("-{letter}: {number} MiB")))
}

/// 32 bytes in hexadecimal digits.
pub(super) fn hex(text: &OsStr, letter: char) -> Result<[u8; 32], Stop> {
    let bad = || {
        let why = format!("-{letter}: not 64 hexadecimal digits, which are 32 bytes");
        Stop::new(Errno::INVAL, why)
    };
    let text = text.to_str().filter(|text| text.len() == 64).ok_or_else(bad)?;
    let mut out = [0; 32];
    for (byte, pair) in out.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16);
        let (high, low) = digit(0).zip(digit(1)).ok_or_else(bad)?;
        // Two digits fit.
        *byte = (high * 16 + low) as u8;
    }
    Ok(out)
}

/// Bytes as hexadecimal digits.
pub(super) fn as_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
