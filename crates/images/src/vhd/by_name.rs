//! Finds a parent by the file name that the header has, beside the child.
//!
//! Some programs write no locators, or leave them when they give a child another parent. Windows' file systems ignore
//! the case of letters, so the file may be called otherwise. A name alone proves nothing: the UUID decides.

use std::path::{Path, PathBuf};

use ferrite_disk_base::Raw;
use ferrite_host::names;

use super::format::footer::Footer;
use super::format::header::Header;
use super::meta::{CopyOnDevice, Footers, MetaError, read_parent_paths};
use super::{Parent, Uuid};

/// Files of a folder whose names differ in the case of letters only, at most: a folder may have any number.
const MAX_ALIKE: usize = 8;

/// The possible places of the parent with this UUID and name, besides those of the locators: the name itself, then
/// with `search`, files that are there under names with other cases of letters. None of these for a raw parent, which has
/// no UUID, and never the child itself.
fn places(child: &Path, uuid: Uuid, name: &str, search: bool) -> Vec<PathBuf> {
    let Some(name) = last_component(name).filter(|_| uuid != Uuid::NIL) else { return Vec::new() };
    let folder = child.parent().unwrap_or(Path::new(""));
    let mut places = vec![folder.join(name)];
    if search && !names::exists(&places[0]) {
        places.extend(alike(folder, name));
    }
    places.retain(|path| path.file_name() != child.file_name());
    places
}

/// The parent that a header names: by its locators, and by its name.
pub(super) fn parent(raw: &Raw, footer: &Footer, header: &Header) -> Result<Parent, MetaError> {
    let (uuid, name) = (header.parent_uuid, header.parent_name());
    let mut paths = read_parent_paths(raw, header)?;
    let is_found = paths.iter().any(names::exists);
    for path in places(raw.path(), uuid, &name, !is_found) {
        // A copy of the child would pass for a parent that has all of it.
        if !paths.contains(&path) && uuid_of(&path) != Some(footer.uuid) {
            paths.push(path);
        }
    }
    Ok(Parent { uuid, name, paths })
}

/// Whether the parent is beside the child, by its name and UUID.
pub(super) fn is_there(raw: &Raw, footer: &Footer, header: &Header) -> bool {
    header.parent_uuid != footer.uuid
        && !verified(raw.path(), header.parent_uuid, &header.parent_name()).is_empty()
}

/// Those of [`places`] that are VHDs with the UUID.
pub(super) fn verified(child: &Path, uuid: Uuid, name: &str) -> Vec<PathBuf> {
    let mut places = places(child, uuid, name, true);
    places.retain(|path| uuid_of(path) == Some(uuid));
    places
}

fn uuid_of(path: &Path) -> Option<Uuid> {
    let raw = Raw::glance(path).ok()??;
    let (footer, _) = Footers::read(&raw).ok()?.choose(CopyOnDevice::Never).ok()?;
    Some(footer.uuid)
}

/// The files of a folder that have the name with other cases of letters, in order.
fn alike(folder: &Path, name: &str) -> Vec<PathBuf> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let Ok(entries) = names::read_dir(folder) else { return Vec::new() };
    let lower = name.to_lowercase();
    let is_alike = |path: &PathBuf| {
        let found = path.file_name().and_then(|found| found.to_str());
        found.is_some_and(|found| found.to_lowercase() == lower)
    };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<_> = paths.filter(is_alike).take(MAX_ALIKE).collect();
    found.sort();
    found
}

/// The last part of a path of Windows or of this system. `None`: it names no file.
fn last_component(name: &str) -> Option<&str> {
    let last = name.rsplit(['\\', '/']).next()?;
    let last = match last.as_bytes() {
        [b'a'..=b'z' | b'A'..=b'Z', b':', ..] => &last[2..],
        _ => last,
    };
    Some(last).filter(|last| !matches!(*last, "" | "." | ".."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_of_any_path_is_the_name() {
        for (name, last) in [
            ("base.vhd", Some("base.vhd")),
            ("C:\\vm\\Base.VHD", Some("Base.VHD")),
            ("c:base.vhd", Some("base.vhd")),
            ("\\\\host\\share\\base.vhd", Some("base.vhd")),
            ("/srv/vm/base.vhd", Some("base.vhd")),
            ("..\\..", None),
            ("C:\\vm\\", None),
            ("C:", None),
            ("", None),
        ] {
            assert_eq!(last_component(name), last, "{name}");
        }
    }
}
