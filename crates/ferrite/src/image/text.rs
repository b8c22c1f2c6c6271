//! Results as text for people.

use std::fmt::Write as _;

use ferrite_disk::size::Human;
use ferrite_disk::{Class, Counts, Format};
use ferrite_image_tools::{
    CheckReport, Checked, Comparison, Done, Extent, Info, InnerDone, JournalInfo, JournalState,
    Kind, LayerInfo, Measured, Repaired, Salvaged, SnapshotInfo, Usage, date_parts,
};

use crate::plain::one_line;

/// A line, and notes below it.
pub(crate) fn with_notes(mut line: String, notes: &[String]) -> String {
    line.push('\n');
    for note in notes {
        let _ = writeln!(line, "note: {}", one_line(note));
    }
    line
}

pub(crate) fn made(done: &Done) -> String {
    let size = Human(done.virtual_bytes);
    let kind = if done.format == Format::Store.name() { "volume" } else { done.format };
    with_notes(format!("{}: {kind} of {size}", one_line(&done.path)), &done.notes)
}

/// A copy of a disk that may be damaged, and what is missing in it.
pub(super) fn salvaged(salvaged: &Salvaged) -> String {
    let mut out = made(&salvaged.done);
    if salvaged.damaged_bytes == 0 {
        return out;
    }
    let _ = writeln!(
        out,
        "{:>18} {:>16}  zeros in the copy, as this could not be read",
        "start", "length"
    );
    for range in &salvaged.ranges {
        let (start, length) = (range.start_bytes, range.length_bytes);
        let (path, why) = (one_line(&range.path), one_line(&range.why));
        let _ = writeln!(out, "{start:>18} {length:>16}  {path}: {why}");
    }
    if salvaged.more_ranges > 0 {
        let _ = writeln!(out, "and {} more ranges", salvaged.more_ranges);
    }
    out
}

pub(super) fn resized(done: &Done) -> String {
    let size = Human(done.virtual_bytes);
    with_notes(format!("{}: {size} now", one_line(&done.path)), &done.notes)
}

pub(super) fn info(info: &Info) -> String {
    let mut out = format!("disk of {} ({} bytes)\n", Human(info.virtual_bytes), info.virtual_bytes);
    for (i, layer) in info.chain.iter().enumerate() {
        let what = if i == 0 { "image" } else { "parent" };
        let _ = writeln!(out, "{what}: {}", one_line(&layer.path));
        layer_lines(&mut out, layer);
    }
    if let Some(why) = &info.incomplete {
        let _ = writeln!(out, "the chain ends here: {}", one_line(why));
    }
    out
}

fn layer_lines(out: &mut String, layer: &LayerInfo) {
    let mut line = |what: &str, value: String| {
        let _ = writeln!(out, "  {what:<11} {value}");
    };
    match &layer.kind {
        Some(kind) => line("format", format!("{}, {kind}", layer.format)),
        None => line("format", layer.format.into()),
    }
    line("size", Human(layer.virtual_bytes).to_string());
    if let Some(bytes) = layer.allocated_bytes {
        line("allocated", Human(bytes).to_string());
    }
    // This host does not know how much storage a server uses.
    if layer.format != Format::Nbd.name() {
        let (file, disk) = (Human(layer.file_bytes), Human(layer.disk_bytes));
        line("file", format!("{file}, {disk} on disk"));
    }
    if let Some(bytes) = layer.unit_bytes {
        line("unit", Human(bytes).to_string());
    }
    if layer.qcow2.is_some_and(|qcow2| qcow2.has_extended_l2) {
        line("extended l2", "true".into());
    }
    if let Some(uuid) = &layer.uuid {
        line("uuid", uuid.clone());
    }
    if let Some(creator) = &layer.creator {
        line("creator", one_line(creator).into_owned());
    }
    for snapshot in &layer.snapshots {
        let (id, name) = (&snapshot.id, &snapshot.name);
        line(
            "snapshot",
            one_line(&format!("{id}: {name}, {}", Human(snapshot.virtual_bytes))).into_owned(),
        );
    }
    for bitmap in &layer.bitmaps {
        let state = match (bitmap.valid, bitmap.enabled) {
            (false, _) => "out of date",
            (true, true) => "up to date, tracks writes",
            (true, false) => "up to date, tracks no writes",
        };
        let (name, each) = (&bitmap.name, Human(bitmap.granularity_bytes));
        line("bitmap", one_line(&format!("{name}, {each} a bit, {state}")).into_owned());
    }
    if layer.read_only {
        line("mode", "read-only".into());
    }
    if layer.journal {
        line("journal", "yes: a backend uses it, or was killed".into());
    }
}

pub(super) fn measured(measured: &Measured) -> String {
    let line = |what: &str, bytes: u64| format!("{what}: {} ({bytes} bytes)\n", Human(bytes));
    line("required", measured.required) + &line("fully allocated", measured.fully_allocated)
}

/// A date and time of UTC.
pub(crate) fn date(unix_s: u64) -> String {
    let [year, month, day, h, m, s] = date_parts(unix_s);
    format!("{year}-{month:02}-{day:02} {h:02}:{m:02}:{s:02} UTC")
}

pub(super) fn inner_made(done: &InnerDone) -> String {
    inner(done, "is inside of it now")
}

pub(super) fn inner_applied(done: &InnerDone) -> String {
    inner(done, "is what the disk is now")
}

pub(super) fn inner_deleted(done: &InnerDone) -> String {
    inner(done, "is deleted")
}

fn inner(InnerDone { done, snapshot }: &InnerDone, what: &str) -> String {
    let (path, name) = (one_line(&done.path), one_line(&snapshot.name));
    with_notes(format!("{path}: snapshot {name} ({}) {what}", one_line(&snapshot.id)), &done.notes)
}

/// The snapshots inside of an image.
pub(super) fn inner_snapshots(all: &[SnapshotInfo]) -> String {
    if all.is_empty() {
        return "no snapshots inside of it\n".into();
    }
    let mut out = format!("{:<9} {:<20} {:>12} {:>12}  made\n", "id", "name", "disk", "machine");
    for snapshot in all {
        let (id, name) = (one_line(&snapshot.id), one_line(&snapshot.name));
        let disk = Human(snapshot.virtual_bytes).to_string();
        let machine = Human(snapshot.vm_state_bytes).to_string();
        let made = date(snapshot.created_unix_s);
        let _ = writeln!(out, "{id:<9} {name:<20} {disk:>12} {machine:>12}  {made}");
    }
    out
}

pub(super) fn usage(usage: &Usage) -> String {
    let mut out = format!("{:>12} {:>12} {:>12}  {}\n", "allocated", "file", "on disk", "image");
    let mut row = |allocated: Option<u64>, file, disk, name: &str| {
        let allocated = allocated.map_or("-".into(), |bytes| Human(bytes).to_string());
        let (file, disk) = (Human(file).to_string(), Human(disk).to_string());
        let _ = writeln!(out, "{allocated:>12} {file:>12} {disk:>12}  {}", one_line(name));
    };
    for layer in &usage.chain {
        row(layer.allocated_bytes, layer.file_bytes, layer.disk_bytes, &layer.path);
    }
    let total = format!("in all, for a disk of {}", Human(usage.virtual_bytes));
    row(usage.allocated_bytes, usage.file_bytes, usage.disk_bytes, &total);
    out
}

pub(super) fn map_head() -> String {
    format!("{:>18} {:>16} {:<12} {:>5} {:>18}\n", "start", "length", "kind", "layer", "offset")
}

pub(super) fn extent(extent: &Extent) -> String {
    let kind = match extent.kind {
        Kind::Data => "data",
        Kind::Compressed => "compressed",
        Kind::Zero => "zero",
        Kind::Unallocated => "unallocated",
    };
    let or_dash = |n: Option<String>| n.unwrap_or_else(|| "-".into());
    let layer = or_dash(extent.layer.map(|n| n.to_string()));
    let offset = or_dash(extent.offset_bytes.map(|n| n.to_string()));
    let (start, length) = (extent.start_bytes, extent.length_bytes);
    format!("{start:>18} {length:>16} {kind:<12} {layer:>5} {offset:>18}\n")
}

pub(super) fn comparison(found: &Comparison) -> String {
    let [a, b] = found.virtual_bytes;
    match (found.identical, a == b) {
        (true, true) => "they read the same\n".into(),
        (true, false) => {
            format!(
                "they read the same; the rest of the larger one ({}) is zeros\n",
                Human(a.max(b))
            )
        }
        (false, _) => String::new(),
    }
}

pub(super) fn report(report: &CheckReport) -> String {
    report.images.iter().map(findings).collect()
}

fn findings(image: &Checked) -> String {
    let what = match image.findings.is_empty() {
        true => "in order".into(),
        false => counts(&image.counts),
    };
    let mut out = format!("{}: {what}\n", one_line(&image.path));
    if image.journal {
        // A journal does not fit an image that another program has changed since: that is a finding.
        let how = match image.is_usable() {
            true => {
                "if no server uses it, ferrite image repair --force brings them in, and so does the next \
                 server"
            }
            false => "whether they can still be brought in is what ferrite image repair says",
        };
        let _ = writeln!(
            out,
            "  its journal has completed writes that are not in the image yet: {how}\n  \
             do not repair it with another program (qemu-img check -r, vhd-util repair) before: these \
             writes would be lost"
        );
    }
    if image.unused_bytes > 0 {
        let unused = Human(image.unused_bytes);
        let what = match image.journal {
            true => "are in no cluster in use: completed writes of the journal may be there",
            false => "are unused: repair --force frees them",
        };
        let _ = writeln!(out, "  {unused} of the file {what}");
    }
    for found in &image.findings {
        let at = found.offset_bytes.map_or(String::new(), |at| format!(" at byte {at}"));
        let class = match found.class {
            Class::Damage => "damage",
            Class::Unsupported => "not supported",
            Class::Foreign => "refused by others",
            Class::Harmless => "harmless",
            Class::Leak => "leak",
        };
        let mendable = if found.mendable { ", mendable" } else { "" };
        let _ = writeln!(out, "  {}{at}: {} ({class}{mendable})", found.kind, one_line(&found.why));
    }
    if image.more_findings > 0 {
        let _ = writeln!(out, "  and {} more", image.more_findings);
    }
    out
}

/// All findings in one line, the worst first.
fn counts(counts: &Counts) -> String {
    let all = [
        (counts.damage, "damaged"),
        (counts.unsupported, "not supported"),
        (counts.foreign, "refused by others"),
        (counts.harmless, "harmless"),
        (counts.leaks, "leaked"),
    ];
    let some = all.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}"));
    some.collect::<Vec<_>>().join(", ")
}

pub(super) fn repaired(repaired: &Repaired) -> String {
    let mendable = repaired.before.counts.mendable;
    let left = if repaired.done { repaired.after.counts.mendable } else { 0 };
    let mended = mendable.saturating_sub(left);
    let given_back = repaired.before.unused_bytes.saturating_sub(repaired.after.unused_bytes);
    let given_back = match repaired.done && given_back > 0 {
        true => format!("given back: {}\n", Human(given_back)),
        false => String::new(),
    };
    let journal = match (repaired.journal, repaired.done) {
        (false, _) => "",
        (true, true) => "the writes in the journal of a killed backend are in the image now\n",
        (true, false) => {
            "a killed backend has left answered writes in its journal: --force writes them into the \
             image\n"
        }
    };
    let given_back = journal.to_owned() + &given_back;
    let text = match (repaired.done, mended) {
        (true, 0) if mendable > 0 => {
            format!("nothing was mended, as some damage cannot be\n{}", findings(&repaired.after))
        }
        (false, 1..) if !repaired.mendable => {
            let found = findings(&repaired.before);
            format!("nothing would be mended, as some damage cannot be\n{found}")
        }
        (_, 0) => findings(&repaired.after),
        (false, n) => format!("{}what would be mended: {n}\n", findings(&repaired.before)),
        (true, n) => format!("mended: {n}\n{}", findings(&repaired.after)),
    };
    given_back + &text
}

pub(super) fn journals(all: &[JournalInfo]) -> String {
    let mut out = String::new();
    for journal in all {
        let state = match journal.state {
            JournalState::InUse => "in use",
            JournalState::Kept => "kept for the image",
            JournalState::Foreign => "of another version of this program",
            JournalState::Away => {
                "away: the image is not there, and may have another name or be on a volume that is \
                 not attached"
            }
            JournalState::Stale if journal.path.is_empty() => "no journal, or an incomplete one",
            JournalState::Stale => "stale: the image is gone",
        };
        let _ = writeln!(out, "{}\n  image   {}", one_line(&journal.name), one_line(&journal.path));
        let format = journal.format.unwrap_or("of no known format");
        let _ = writeln!(out, "  holds   {} changes, {format}\n  state   {state}", journal.records);
    }
    match all.is_empty() {
        true => "no journals: no server has left completed writes on this host\n".into(),
        false => out,
    }
}

pub(super) fn dropped(all: &[JournalInfo]) -> String {
    let line = |journal: &JournalInfo| {
        let (name, path) = (one_line(&journal.name), one_line(&journal.path));
        format!("dropped: {name}, {} changes of {path}\n", journal.records)
    };
    if all.is_empty() { "nothing to drop\n".into() } else { all.iter().map(line).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_journal_is_no_work_for_other_programs() {
        let mut checked = Checked {
            path: "a.qcow2".into(),
            format: "qcow2",
            counts: Counts::default(),
            findings: Vec::new(),
            more_findings: 0,
            unused_bytes: 65536,
            journal: true,
        };
        let text = findings(&checked);
        assert!(
            text.contains("do not repair it with another program (qemu-img check -r"),
            "{text}"
        );
        assert!(!text.contains("are unused"), "{text}");
        assert!(text.contains("repair --force brings them in"), "{text}");
        checked.counts.damage = 1;
        let text = findings(&checked);
        assert!(!text.contains("brings them in"), "{text}");
    }

    #[test]
    fn a_date_is_that_of_the_calendar() {
        for (s, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_732_752_000, "2024-11-28 00:00:00 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(date(s), text);
        }
    }
}
