//! Removes what killed backends have left of removed disks.

use std::path::Path;

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};

use super::reported::clear_error;
use super::run_dir::{RunDir, remove_counters, run_dir_name};
use crate::counters::FOLDER;

/// The guest and the device of a run directory's name.
fn parse_name(name: &str) -> Option<(u16, u32)> {
    let (domid, devid) = name.strip_prefix("vbd-")?.split_once('-')?;
    let ids = (domid.parse().ok()?, devid.parse().ok()?);
    (run_dir_name(ids.0, ids.1) == name).then_some(ids)
}

/// Removes what killed backends have left of removed disks: run directories and error nodes in
/// xenstore. `kind` is the parent of the backend directories, `backend/vbd3`. The files of a disk
/// that is still attached to a living guest stay for its successor.
///
/// # Errors
/// Errors of xenstore. A file that cannot be removed is logged, and stays.
pub fn sweep(store: &mut Store, run_dirs: &Path, kind: &str) -> Result<(), StoreError> {
    let entries = std::fs::read_dir(run_dirs).into_iter().flatten().filter_map(Result::ok);
    for entry in entries {
        let Some((domid, devid)) = entry.file_name().to_str().and_then(parse_name) else {
            continue;
        };
        sweep_run_dir(store, &entry.path(), kind, (domid, devid))?;
    }
    sweep_counters(store, run_dirs, kind)?;
    let errors = format!("error/{kind}");
    for domid in list(store, &errors)? {
        for devid in list(store, &format!("{errors}/{domid}"))? {
            if let (Ok(domid), Ok(devid)) = (domid.parse(), devid.parse()) {
                sweep_error(store, kind, (domid, devid))?;
            }
        }
    }
    Ok(())
}

/// As [`sweep`], of one disk: it costs the same on a host of many.
///
/// # Errors
/// As [`sweep`].
pub fn sweep_disk(
    store: &mut Store,
    run_dirs: &Path,
    kind: &str,
    (domid, devid): (DomId, u32),
) -> Result<(), StoreError> {
    if domid == DomId::NONE {
        return Ok(()); // a tap's end is its storage manager's
    }
    let disk = (domid.0, devid);
    let run_dir = run_dirs.join(run_dir_name(domid, devid));
    sweep_run_dir(store, &run_dir, kind, disk)?;
    sweep_counters_of(store, &run_dir, kind, disk)?;
    sweep_error(store, kind, disk)
}

fn sweep_run_dir(
    store: &mut Store,
    run_dir: &Path,
    kind: &str,
    (domid, devid): (u16, u32),
) -> Result<(), StoreError> {
    if !is_gone(store, kind, domid, devid)? {
        return Ok(());
    }
    // A locked directory belongs to a running process. The disk is checked again under the lock,
    // since it cannot be connected meanwhile.
    let Ok(Some(dir)) = RunDir::existing(run_dir) else { return Ok(()) };
    if is_gone(store, kind, domid, devid)?
        && let Err(e) = dir.remove()
    {
        tracing::warn!("cannot remove {}: {e}", run_dir.display());
    }
    Ok(())
}

fn sweep_error(
    store: &mut Store,
    kind: &str,
    (domid, devid): (u16, u32),
) -> Result<(), StoreError> {
    match is_gone(store, kind, domid, devid)? {
        true => clear_error(store, &format!("{kind}/{domid}/{devid}")),
        false => Ok(()),
    }
}

/// Removes counters whose run directory is gone.
fn sweep_counters(store: &mut Store, run_dirs: &Path, kind: &str) -> Result<(), StoreError> {
    let files = std::fs::read_dir(run_dirs.join(FOLDER)).into_iter().flatten();
    for file in files.filter_map(Result::ok) {
        if let Some(disk) = file.file_name().to_str().and_then(parse_name) {
            sweep_counters_of(store, &run_dirs.join(file.file_name()), kind, disk)?;
        }
    }
    Ok(())
}

fn sweep_counters_of(
    store: &mut Store,
    run_dir: &Path,
    kind: &str,
    (domid, devid): (u16, u32),
) -> Result<(), StoreError> {
    if !run_dir.exists()
        && is_gone(store, kind, domid, devid)?
        && let Err(e) = remove_counters(run_dir)
    {
        tracing::warn!("cannot remove the counters of {}: {e}", run_dir.display());
    }
    Ok(())
}

/// Lists a node's children. A missing node has none.
fn list(store: &mut Store, path: &str) -> Result<Vec<String>, StoreError> {
    match store.list(path) {
        Err(StoreError::NotFound { .. }) => Ok(Vec::new()),
        listed => listed,
    }
}

/// Whether the toolstack has removed the disk, or its guest is gone. A driver domain may not read
/// the guest's node.
fn is_gone(store: &mut Store, kind: &str, domid: u16, devid: u32) -> Result<bool, StoreError> {
    if store.read(&format!("{kind}/{domid}/{devid}/frontend"))?.is_none() {
        return Ok(true);
    }
    match store.read(&format!("/local/domain/{domid}")) {
        Ok(home) => Ok(home.is_none()),
        Err(StoreError::Access { .. }) => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_run_directories_and_no_others() {
        assert_eq!(parse_name(&run_dir_name(7_u16, 51712)), Some((7, 51712)));
        for name in
            ["vbd-7", "vbd-7-", "vbd--7-1", "vbd-07-1", "vbd-7-1-2", "vbd-70000-1", "map-budget"]
        {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }
}
