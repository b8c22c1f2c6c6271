//! The folders in which parents of images are allowed: those of the command line and of the host.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use ferrite_disk::{CONFIGURED_PARENTS, ImageName, Parents};
use ferrite_host::names;

use crate::exit::{Code, Failure};

/// The word that allows all folders.
const ANY: &str = "any";

/// The environment variable that names another file than [`CONFIGURED_PARENTS`].
const CONFIGURED_BY: &str = "FERRITE_PARENTS_FILE";

/// The option of all commands that open chains.
#[derive(Debug, Args)]
pub struct ParentsArgs {
    /// Allow parents of images in DIR and below, or the one image DIR, besides the image's own folder and below; any:
    /// in all folders. May be given several times.
    #[arg(long = "parents", value_name = "DIR|any", global = true)]
    named: Vec<PathBuf>,
}

impl ParentsArgs {
    /// The arguments as if these folders had been given.
    pub fn of(folders: &[PathBuf]) -> ParentsArgs {
        ParentsArgs { named: folders.to_vec() }
    }

    /// The file with the host's own list.
    pub fn list() -> PathBuf {
        env::var_os(CONFIGURED_BY).map_or(CONFIGURED_PARENTS.into(), PathBuf::from)
    }

    /// The folders that were given.
    pub fn named(&self) -> &[PathBuf] {
        &self.named
    }

    /// The folders that were given, and those of the host's own list.
    ///
    /// # Errors
    /// The list cannot be read, or is invalid.
    pub fn allowed(&self) -> Result<Parents, Failure> {
        self.allowed_with(&ParentsArgs::list())
    }

    /// The allowed parents of this image. A volume of a store has no parents, so the list is not read: the worker of a
    /// store is not permitted to.
    ///
    /// # Errors
    /// Those of [`allowed`](Self::allowed).
    pub fn allowed_for(&self, image: &OsStr) -> Result<Parents, Failure> {
        self.allowed_for_with(image, &ParentsArgs::list())
    }

    fn allowed_for_with(&self, image: &OsStr, list: &Path) -> Result<Parents, Failure> {
        match ImageName::parse(image).is_ok_and(|name| name.volume().is_some()) {
            true => Ok(Parents::default()),
            false => self.allowed_with(list),
        }
    }

    fn allowed_with(&self, list: &Path) -> Result<Parents, Failure> {
        let named = [&self.named[..], &configured(list)?].concat();
        match named.iter().any(|dir| dir == Path::new(ANY)) {
            true => Ok(Parents::Any),
            false => Ok(Parents::Within(named)),
        }
    }
}

/// Reads a list with one folder per line. `#` begins a comment.
fn configured(file: &Path) -> Result<Vec<PathBuf>, Failure> {
    let text = match names::read_to_string(file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|e| {
            let what = format!("cannot read {}", file.display());
            Failure::new(what, e, "correct it: it lists the folders where parents of images may be")
        })?,
    };
    let lines = text.lines().map(str::trim).enumerate();
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|(i, line)| match line == ANY || line.starts_with('/') {
            true => Ok(line.into()),
            false => {
                let why = format!("line {} is neither an absolute path nor \"{ANY}\"", i + 1);
                let what = format!("cannot use {}", file.display());
                Err(Failure::new(what, why, "name a folder a line").with_code(Code::USAGE))
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_list_has_a_folder_a_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "# templates\n/srv/templates\n\n  /dev/vg \nany\n").unwrap();
        let found = configured(file.path()).unwrap();
        assert_eq!(found, ["/srv/templates", "/dev/vg", "any"].map(PathBuf::from));
        std::fs::write(file.path(), "/a\nsrv/b\n").unwrap();
        let error = configured(file.path()).unwrap_err();
        assert!(error.why.contains("line 2"), "{error}");
        assert!(configured(Path::new("/nonexistent/file")).unwrap().is_empty());
    }

    #[test]
    fn the_list_is_not_read_for_a_volume_of_a_store() {
        let none = ParentsArgs::of(&[]);
        // A folder cannot be read as a file.
        let list = tempfile::tempdir().unwrap();
        let of = |image| none.allowed_for_with(OsStr::new(image), list.path());
        assert_eq!(of("store:/lab/pool.store#web").unwrap(), Parents::default());
        assert!(of("vhd:/lab/a.vhd").is_err());
    }
}
