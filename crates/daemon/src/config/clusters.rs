//! The images of Ceph clusters that may be disks. Without an entry there are none: what a toolstack writes into a disk's
//! target must not make this host a client of whatever it names, nor have it read any file as a key.

use std::path::{Path, PathBuf};

use ferrite_nbd::uri::rbd::Image;
use toml::Value;

use super::servers::is_below;
use crate::Failure;

/// The valid values of the list, for errors.
pub(super) const ALLOWED: &str =
    "a list of pools, or of namespaces in them, such as [\"vm\", \"vm/tenant\"]";

/// Where Ceph's configurations and keys are, if no other folder is named.
const FOLDER: &str = "/etc/ceph";
/// The most bytes of a pool's or a namespace's name.
const MAX_NAME: usize = 256;

/// The pools and folders of Ceph clusters that disks may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdOptions {
    /// The pools.
    pub pools: Vec<RbdPool>,
    /// The folders that configurations and keys of clients may be in, at any depth.
    pub folders: Vec<PathBuf>,
}

impl Default for RbdOptions {
    fn default() -> RbdOptions {
        RbdOptions { pools: Vec::new(), folders: vec![FOLDER.into()] }
    }
}

/// One entry of the list: the images that are directly in a pool, or those in one of its namespaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdPool {
    /// The pool.
    pub name: String,
    /// The namespace; empty: none.
    pub namespace: String,
}

impl RbdPool {
    /// Parses an entry of the list.
    pub fn parse(text: &str) -> Option<RbdPool> {
        let (name, namespace) = match text.split_once('/') {
            Some((name, namespace)) => (name, Some(namespace)),
            None => (text, None),
        };
        let is_name = |name: &str| {
            (1..=MAX_NAME).contains(&name.len())
                && !name.chars().any(|c| c.is_control() || "/@?#".contains(c))
        };
        let is_valid = is_name(name) && namespace.is_none_or(is_name);
        let namespace = namespace.unwrap_or_default().to_owned();
        is_valid.then(|| RbdPool { name: name.to_owned(), namespace })
    }
}

impl RbdOptions {
    /// Checks that an image may be a disk. Links in the paths of its files are resolved first.
    ///
    /// # Errors
    /// The list does not have its pool, or one of its files is elsewhere.
    pub(crate) fn check(&self, image: &Image) -> Result<(), Failure> {
        let wanted = RbdPool { name: image.pool.clone(), namespace: image.namespace.clone() };
        if !self.pools.contains(&wanted) {
            let shown = match image.namespace.as_str() {
                "" => image.pool.clone(),
                namespace => format!("{}/{namespace}", image.pool),
            };
            return Err(Failure {
                why: format!(
                    "the daemon's configuration does not allow disks of the Ceph pool {shown}"
                ),
                help: format!("add {shown:?} to pools below [rbd] in it and restart the daemon"),
            });
        }
        let keyring = image.keyring.as_ref().map(|keyring| ("keyring", keyring));
        [("conf", &image.conf)].into_iter().chain(keyring).try_for_each(|(key, path)| {
            let real = path.canonicalize().map_err(|e| Failure {
                why: format!("cannot find {}: {e}", path.display()),
                help: format!("correct {key}=FILE, or put the file there; ferrite tries again"),
            })?;
            self.check_file(path, &real)
        })
    }

    fn check_file(&self, named: &Path, real: &Path) -> Result<(), Failure> {
        if is_below(&self.folders, real) {
            return Ok(());
        }
        let folder = real.parent().unwrap_or(real).display().to_string();
        Err(Failure {
            why: format!(
                "{} is in none of the folders that Ceph's files may be in",
                named.display()
            ),
            help: format!(
                "add the folder {folder:?} to folders below [rbd] in the daemon's configuration and restart the daemon"
            ),
        })
    }
}

/// The value of the key.
pub(super) fn of_list(value: &Value) -> Option<Vec<RbdPool>> {
    value.as_array()?.iter().map(|entry| RbdPool::parse(entry.as_str()?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_may_be_in_a_listed_pool_with_files_of_a_listed_folder_only() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        for folder in ["ceph/inner", "other"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        for file in ["ceph/conf", "ceph/inner/key", "other/conf"] {
            std::fs::write(at(file), "").unwrap();
        }
        std::os::unix::fs::symlink(at("other/conf"), at("ceph/link")).unwrap();
        let pools = ["vm", "vm/tenant"].map(|pool| RbdPool::parse(pool).unwrap()).to_vec();
        let options = RbdOptions { pools, folders: vec![at("ceph").into()] };
        let check = |names: &str, files: &str| {
            let image = Image::parse(&format!("{names}?{files}")).unwrap();
            options.check(&image).map_err(|refused| format!("{}; {}", refused.why, refused.help))
        };
        let good = format!("conf={}", at("ceph/conf"));
        let key = format!("{good}&keyring={}", at("ceph/inner/key"));
        for (names, files) in [("vm/a", &good), ("vm/tenant/a@s", &key)] {
            assert_eq!(check(names, files), Ok(()), "{names} {files}");
        }
        for (names, files, cure) in [
            ("other/a", good.clone(), "add \"other\" to pools below [rbd]"),
            ("vm/stranger/a", good.clone(), "add \"vm/stranger\" to pools below [rbd]"),
            ("vm/a", format!("conf={}", at("other/conf")), "folders below [rbd]"),
            // A file that is reached by a link in a listed folder is elsewhere.
            ("vm/a", format!("conf={}", at("ceph/link")), "folders below [rbd]"),
            ("vm/a", format!("conf={}", at("ceph/../other/conf")), "folders below [rbd]"),
            ("vm/a", format!("conf={}", at("ceph/none")), "correct conf=FILE"),
            ("vm/a", format!("{good}&keyring=/etc/hostname"), "folders below [rbd]"),
            ("vm/a", format!("{good}&keyring={}", at("ceph/none")), "correct keyring=FILE"),
        ] {
            let why = check(names, &files).unwrap_err();
            assert!(why.contains(cure), "{names} {files}: {why}");
        }
        let none = RbdOptions::default();
        assert!(none.check(&Image::parse("vm/a").unwrap()).is_err());
        for wrong in ["", "a/", "/a", "a/b/c", "a@b", "a\n"] {
            assert_eq!(RbdPool::parse(wrong), None, "{wrong}");
        }
    }
}
