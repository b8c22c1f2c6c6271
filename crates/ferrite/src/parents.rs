//! Where parents of images may be: what the command line and the host say.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use ferrite_disk::{CONFIGURED_PARENTS, ImageName, Parents};
use ferrite_host::names;

use crate::exit::{Code, Failure};

/// Allows all.
const ANY: &str = "any";

/// Names another file than [`CONFIGURED_PARENTS`].
const CONFIGURED_BY: &str = "FERRITE_PARENTS_FILE";

/// Of all commands that open chains.
#[derive(Debug, Args)]
pub struct ParentsArgs {
    /// Allow parents of images in DIR and below, or the one image DIR, and not only in the image's
    /// own folder and below; any: wherever they are. May be given several times.
    #[arg(long = "parents", value_name = "DIR|any", global = true)]
    named: Vec<PathBuf>,
}

impl ParentsArgs {
    /// As if these had been given.
    pub fn of(folders: &[PathBuf]) -> ParentsArgs {
        ParentsArgs { named: folders.to_vec() }
    }

    /// The host's own list.
    pub fn list() -> PathBuf {
        env::var_os(CONFIGURED_BY).map_or(CONFIGURED_PARENTS.into(), PathBuf::from)
    }

    /// Those that were given.
    pub fn named(&self) -> &[PathBuf] {
        &self.named
    }

    /// With what the host's own list says.
    ///
    /// # Errors
    /// The list cannot be read, or makes no sense.
    pub fn allowed(&self) -> Result<Parents, Failure> {
        self.allowed_with(&ParentsArgs::list())
    }

    /// The same for this image. A volume of a store has no parents, so the list is not read: the worker of a store
    /// may not.
    ///
    /// # Errors
    /// As of [`allowed`](Self::allowed).
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

/// A folder a line; `#` begins what is for people.
fn configured(file: &Path) -> Result<Vec<PathBuf>, Failure> {
    let text = match names::read_to_string(file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.map_err(|e| {
            let what = format!("cannot read {}", file.display());
            Failure::new(what, e, "it says which folders parents of images may be in")
        })?,
    };
    let lines = text.lines().map(str::trim).enumerate();
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|(i, line)| match line == ANY || line.starts_with('/') {
            true => Ok(line.into()),
            false => Err(Failure {
                code: Code::USAGE,
                what: format!("cannot use {}", file.display()),
                why: format!("line {} is neither an absolute path nor \"{ANY}\"", i + 1),
                help: "name a folder a line".into(),
            }),
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
        // A folder cannot be read.
        let list = tempfile::tempdir().unwrap();
        let of = |image| none.allowed_for_with(OsStr::new(image), list.path());
        assert_eq!(of("store:/lab/pool.store#web").unwrap(), Parents::default());
        assert!(of("vhd:/lab/a.vhd").is_err());
    }
}
