//! Warnings about a configuration: valid entries that are probably mistakes. None keeps a daemon
//! from starting, since storage may come later.

use std::path::{Path, PathBuf};

use ferrite_disk::Fencing;
use ferrite_nbd::uri::Uri;

use super::{Config, ConfigError, keys};

impl Config {
    /// The warnings, each with key, reason and next step. `run` is the daemon's own directory,
    /// which it creates itself.
    pub fn warnings(&self, file: &Path, run: &Path) -> Vec<ConfigError> {
        let warning = |key: String, why: String, help: &str| ConfigError {
            file: file.to_owned(),
            key: Some(key),
            why,
            allowed: help.to_owned(),
        };
        let missing = |path: &Path| {
            let e = path.metadata().err()?;
            Some(format!("cannot find {}: {e}", path.display()))
        };
        let mut warnings = Vec::new();
        // Not every host has the default directories.
        let is_named =
            |folder: &&PathBuf| keys::IMAGE_FOLDERS.iter().all(|own| *folder != Path::new(own));
        let folders =
            [("image_folders", &self.image_folders), ("parent_folders", &self.parent_folders)];
        for (key, folders) in folders {
            for folder in folders.iter().filter(is_named) {
                let (why, help) = if let Some(why) = missing(folder) {
                    (why, "correct it, or make the folder: until then no image is there")
                } else if !folder.is_dir() {
                    (
                        format!("{} is not a folder", folder.display()),
                        "name the folder that it is in",
                    )
                } else {
                    continue;
                };
                warnings.push(warning(key.to_owned(), why, help));
            }
        }
        let folder = self.metrics_socket.as_deref().and_then(Path::parent);
        if let Some(why) = folder.filter(|folder| *folder != run).and_then(missing) {
            let help = "correct it, or make the folder: there are no metrics without it";
            warnings.push(warning("metrics_socket".to_owned(), why, help));
        }
        for folder in &self.nbd.certificate_folders {
            if let Some(why) = missing(folder) {
                let help = "correct it, or make the folder: until then no disk is served by TLS";
                warnings.push(warning("nbd.certificate_folders".to_owned(), why, help));
            }
        }
        let folders = self.rbd.folders.iter().filter(|_| !self.rbd.pools.is_empty());
        for folder in folders {
            if let Some(why) = missing(folder) {
                let help = "correct it, or make the folder: until then no disk on Ceph is served";
                warnings.push(warning("rbd.folders".to_owned(), why, help));
            }
        }
        for (name, pool) in &self.pools {
            if let Some(why) = pool.tls.as_deref().and_then(missing) {
                let help =
                    "correct it, or make the folder: until then no disk of the pool is served";
                warnings.push(warning(format!("pool.{name}.tls"), why, help));
            }
        }
        for (image, options) in &self.images {
            if options.fence == Fencing::WeakReservation {
                let why = "if the LUN's target starts again, it forgets which host may write: two hosts may then";
                let help = "use a target that keeps reservations, and fence = \"reservation\"";
                warnings.push(warning(format!("images.{image:?}.fence"), why.to_owned(), help));
            }
            if let Some(uri) = image.to_str().and_then(|text| Uri::parse(text).ok()) {
                if let Err(refused) = self.check_export(&uri) {
                    let why = "it is on a server that disks may not be on".to_owned();
                    let mut warning = warning(format!("images.{image:?}"), why, "");
                    warning.allowed = refused.help;
                    warnings.push(warning);
                }
                continue;
            }
            let key = format!("images.{image:?}");
            if let Some(why) = missing(image) {
                let help = "correct it, or make the image: no other gets these settings";
                warnings.push(warning(key, why, help));
            } else if !image.canonicalize().is_ok_and(|real| self.allows(&real)) {
                let why = "it is in none of the folders that images are served from".to_owned();
                warnings.push(warning(key, why, "add its folder to image_folders"));
            }
        }
        warnings
    }
}
