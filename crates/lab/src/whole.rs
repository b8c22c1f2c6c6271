//! Replaces files atomically.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// The mode of a new file, before the user's mask.
const MODE: u32 = 0o666;

/// Writes a file atomically: a full disk does not lose the old content.
///
/// # Errors
/// It cannot be written.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    let path = match fs::metadata(path) {
        // A terminal or a pipe is written directly.
        Ok(there) if !there.is_file() => return fs::write(path, text),
        Ok(_) => path.canonicalize()?,
        Err(_) => path.to_owned(),
    };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut new = tempfile::Builder::new();
    let mut file = new.permissions(Permissions::from_mode(MODE)).tempfile_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.persist(&path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        write(&file, "old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, "new").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert!(link.is_symlink() && fs::read_dir(folder.path()).unwrap().count() == 2);
        // Others may read it, as the user's mask allows.
        fs::write(folder.path().join("plain"), "").unwrap();
        let mode =
            |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode("file"), mode("plain"));
        write(Path::new("/dev/null"), "gone").unwrap();
        assert!(write(&folder.path().join("none/file"), "").is_err());
    }
}
