//! The results of `ferrite backup` as text.

use std::fmt::Write as _;

use ferrite_disk::size::Human;
use ferrite_image_tools::{BackupDone, BackupInfo, Pruned, Verified};

use crate::image::text::date;
use crate::plain::one_line;

fn kind(backup: &BackupInfo) -> String {
    match &backup.parent {
        Some(parent) => format!("incremental, on {parent}"),
        None => "full".to_owned(),
    }
}

pub(super) fn made(done: &BackupDone) -> String {
    let BackupInfo { name, data_bytes, .. } = &done.backup;
    let resumed = if done.resumed { ", continued" } else { "" };
    let (read, kind) = (Human(done.read_bytes), kind(&done.backup));
    let mut out = format!(
        "backup {name}: {kind}{resumed}; {read} read, {} in its file\n",
        Human(*data_bytes)
    );
    for note in &done.notes {
        let _ = writeln!(out, "note: {}", one_line(note));
    }
    out
}

pub(super) fn list(all: &[BackupInfo]) -> String {
    let mut out = String::new();
    for backup in all {
        let BackupInfo { name, state, .. } = backup;
        let _ = match &backup.why {
            None if *state == "begun" => {
                writeln!(out, "{name:<24} {state}, of {}", one_line(&backup.disk))
            }
            Some(why) => writeln!(out, "{name:<24} {state}: {}", one_line(why)),
            None => writeln!(
                out,
                "{name:<24} {} {:>12} {state}, {}, of {}",
                date(backup.created_unix_s),
                Human(backup.data_bytes),
                kind(backup),
                one_line(&backup.disk)
            ),
        };
        if let Some(snapshot) = &backup.snapshot {
            let snapshot = one_line(snapshot);
            let _ = writeln!(
                out,
                "    from {snapshot}; if it was interrupted, the next backup of the disk merges that"
            );
        }
    }
    if all.is_empty() { "no backups\n".to_owned() } else { out }
}

pub(super) fn verified(all: &[Verified]) -> String {
    let mut out = String::new();
    for one in all {
        let name = &one.name;
        let _ = match (&one.why, &one.damaged_regions[..]) {
            (Some(why), _) => writeln!(out, "{name}: damaged: {}", one_line(why)),
            (None, []) => writeln!(out, "{name}: good, {} compared", Human(one.read_bytes)),
            (None, [first, ..]) => writeln!(
                out,
                "{name}: damaged: {} regions, the first at byte {first} of the disk",
                one.damaged_regions.len()
            ),
        };
    }
    if all.is_empty() { "no backups\n".to_owned() } else { out }
}

pub(super) fn pruned(done: &Pruned) -> String {
    let mut out = String::new();
    for name in &done.merged {
        let _ = writeln!(out, "{name}: a full backup now");
    }
    for name in &done.removed {
        let _ = writeln!(out, "{name}: removed");
    }
    let _ = writeln!(out, "{} kept", done.kept.len());
    out
}

pub(super) fn merged(backup: &BackupInfo) -> String {
    format!("{}: a full backup now, {} in its file\n", backup.name, Human(backup.data_bytes))
}
