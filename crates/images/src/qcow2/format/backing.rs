//! Names of backing files. Most are paths; others of QEMU's names mean a plain file, too: `file:PATH`, and `json:` with
//! the options of a format over a file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Options of QEMU's that change nothing of what is read.
const HARMLESS: [&str; 10] = [
    "node-name",
    "read-only",
    "auto-read-only",
    "force-share",
    "discard",
    "detect-zeroes",
    "cache.direct",
    "cache.no-flush",
    "aio",
    "locking",
];

/// A backing file that is a plain file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::qcow2) struct Named {
    /// The path, as it is named.
    path: String,
    /// A relative path is one from the working directory, as QEMU has it; otherwise from the image's folder.
    is_from_here: bool,
    /// QEMU's name of the format, if the name says it.
    pub(in crate::qcow2) driver: Option<String>,
}

impl Named {
    /// Understands a name.
    ///
    /// # Errors
    /// What it says, if that is no plain file.
    pub(in crate::qcow2) fn of(name: &str) -> Result<Named, String> {
        if let Some(json) = name.strip_prefix("json:") {
            return of_json(json).map_err(|why| format!("its backing file {name:?} {why}"));
        }
        let named =
            |path: &str, is_from_here| Named { path: path.into(), is_from_here, driver: None };
        let (path, is_from_here) = match name.strip_prefix("file:") {
            Some(path) => (path, true),
            None => (name, false),
        };
        match path.split('/').next().is_some_and(|first| first.contains(':')) {
            true => Err(format!("its backing file {name:?} is not named by a path")),
            false => Ok(named(path, is_from_here)),
        }
    }

    /// The path, for an image in `folder`.
    pub(in crate::qcow2) fn path(&self, folder: &Path) -> PathBuf {
        match self.is_from_here {
            // Without a working directory the file is not found.
            true => std::path::absolute(&self.path).unwrap_or_else(|_| (&self.path).into()),
            false => folder.join(&self.path),
        }
    }
}

/// The parent that QEMU's options name: a format over a file.
fn of_json(json: &str) -> Result<Named, String> {
    let value = serde_json::from_str(json).map_err(|e| format!("is no JSON: {e}"))?;
    let mut options = BTreeMap::new();
    flatten("", value, &mut options)?;
    let mut take = |key: &str| match options.remove(key) {
        Some(Value::String(text)) => Ok(Some(text)),
        None => Ok(None),
        Some(other) => Err(format!("has {key}={other}, which is no text")),
    };
    let (driver, protocol, path) = (take("driver")?, take("file.driver")?, take("file.filename")?);
    if let Some(protocol) = protocol.filter(|protocol| protocol != "file") {
        return Err(format!("is accessed by {protocol}, not a file"));
    }
    let harmless = |key: &str| HARMLESS.contains(&key.strip_prefix("file.").unwrap_or(key));
    if let Some((key, value)) = options.iter().find(|(key, _)| !harmless(key)) {
        return Err(format!("has the option {key}={value}, which is not supported"));
    }
    let path = path.ok_or("names no file (file.filename)")?;
    Ok(Named { path, is_from_here: true, driver })
}

/// The options by their names with dots between the parts.
fn flatten(prefix: &str, value: Value, to: &mut BTreeMap<String, Value>) -> Result<(), String> {
    let Value::Object(members) = value else {
        return match to.insert(prefix.into(), value) {
            None => Ok(()),
            Some(_) => Err(format!("has {prefix} twice")),
        };
    };
    for (key, value) in members {
        let name = if prefix.is_empty() { key } else { format!("{prefix}.{key}") };
        flatten(&name, value, to)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> Result<PathBuf, String> {
        Named::of(name).map(|named| named.path("/images".as_ref()))
    }

    #[test]
    fn relative_paths_are_from_the_images_folder_and_others_of_qemu_from_the_working_directory() {
        let here = std::env::current_dir().unwrap();
        for (name, want) in [
            ("a.qcow2", "/images/a.qcow2".into()),
            ("./a:b", "/images/./a:b".into()),
            ("/x/a:b", "/x/a:b".into()),
            ("file:/x/a", "/x/a".into()),
            ("file:a", here.join("a")),
            (r#"json:{"driver":"raw","file":{"driver":"file","filename":"/x/a"}}"#, "/x/a".into()),
            (r#"json:{"file.filename":"a","file.locking":"off"}"#, here.join("a")),
            (r#"json:{"driver":"vpc","file.filename":"/x:y","read-only":true}"#, "/x:y".into()),
        ] {
            assert_eq!(path(name), Ok(want), "{name}");
        }
    }

    #[test]
    fn what_is_no_plain_file_is_refused_with_what_it_says() {
        for (name, why) in [
            ("nbd:localhost:10809", "not named by a path"),
            ("file:nbd:/x", "not named by a path"),
            ("json:", "is no JSON"),
            ("json:[]", "has the option =[]"),
            (r#"json:{"driver":"qcow2"}"#, "names no file"),
            (r#"json:{"driver":"qcow2","file":"node"}"#, r#"has the option file="node""#),
            (r#"json:{"file":{"driver":"nbd","filename":"/x"}}"#, "is accessed by nbd"),
            (r#"json:{"file":{"driver":"https","url":"https://x"}}"#, "is accessed by https"),
            (r#"json:{"driver":1,"file.filename":"/x"}"#, "has driver=1"),
            (r#"json:{"offset":4096,"file.filename":"/x"}"#, "has the option offset=4096"),
            (r#"json:{"backing":null,"file.filename":"/x"}"#, "has the option backing=null"),
            (r#"json:{"file":{"filename":"/x"},"file.filename":"/y"}"#, "file.filename twice"),
        ] {
            let said = path(name).unwrap_err();
            assert!(said.contains(why), "{name}: {said}");
        }
    }
}
