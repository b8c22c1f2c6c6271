//! Results as text for people.

use std::fmt::Write as _;

use ferrite_disk::size::Human;
use ferrite_image_tools::stores::{
    StoreChecked, StoreCollected, StoreCompacted, StoreGrown, StoreListed, StoreMade,
    StoreRepaired, StoreStats, VolumeDone,
};
use ferrite_store::check::StoreFinding;
use ferrite_store::live::{VolumeInfo, WorkInfo};

use crate::image::text::{date, with_notes};
use crate::plain::one_line;

pub(super) fn made(made: &StoreMade) -> String {
    let line = format!("{}: store of {}", one_line(&made.path), Human(made.store_bytes));
    with_notes(line, &made.notes)
}

pub(super) fn grown(grown: &StoreGrown) -> String {
    let [before, now, free] = [grown.before_bytes, grown.store_bytes, grown.free_bytes].map(Human);
    let path = one_line(&grown.path);
    with_notes(format!("{path}: store of {now} now, was {before}; {free} free"), &grown.notes)
}

pub(super) fn done(done: &VolumeDone) -> String {
    let VolumeInfo { name, virtual_bytes, domain, origin, .. } = &done.volume;
    let (path, size) = (one_line(&done.path), Human(*virtual_bytes));
    let origin = origin.as_deref().unwrap_or("-");
    match done.done.as_str() {
        "created" => format!("{path}#{name}: volume of {size} in domain {domain}\n"),
        "snapshot" => format!("{path}#{name}: snapshot of {origin}, {size}\n"),
        "cloned" => format!("{path}#{name}: clone of {origin}, {size}\n"),
        "received" => format!("{path}#{name}: snapshot received, {size}\n"),
        "rolled-back" => format!("{path}#{name}: rolled back, {size} now\n"),
        "renamed" => format!("{path}#{name}: renamed, {size}\n"),
        "resized" => format!("{path}#{name}: {size} now\n"),
        _ => format!(
            "{path}#{name} of {size} is deleted; gc frees blocks that no other volume references\n"
        ),
    }
}

/// One line per volume. `used`: with how much of it is not zeros.
pub(super) fn list(listed: &StoreListed, used: bool) -> String {
    let titles = ["NAME", "KIND", "SIZE", "USED", "DOMAIN", "FROM", "CREATED"].map(str::to_owned);
    let rows = listed.volumes.iter().map(|volume| {
        [
            volume.name.clone(),
            kind(volume).into(),
            Human(volume.virtual_bytes).to_string(),
            volume.mapped_bytes.map_or_else(|| "-".into(), |bytes| Human(bytes).to_string()),
            volume.domain.clone(),
            volume.origin.clone().unwrap_or_else(|| "-".into()),
            created(volume),
        ]
    });
    let rows: Vec<[String; 7]> = [titles].into_iter().chain(rows).collect();
    if used {
        return table(&rows);
    }
    let rows = rows
        .into_iter()
        .map(|[name, kind, size, _, domain, from, at]| [name, kind, size, domain, from, at]);
    table(&rows.collect::<Vec<_>>())
}

fn table<const N: usize>(rows: &[[String; N]]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(i, cell)| format!("{cell:0$}", width(i)));
        let line = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// When it was made. Volumes of older programs have no time.
fn created(volume: &VolumeInfo) -> String {
    volume.created_unix_s.map_or_else(|| "-".into(), date)
}

fn kind(volume: &VolumeInfo) -> &'static str {
    if volume.snapshot { "snapshot" } else { "volume" }
}

fn lines(lines: &[(&str, String)]) -> String {
    lines.iter().map(|(name, value)| format!("{name:11} {}\n", one_line(value))).collect()
}

pub(super) fn info(listed: &StoreListed) -> String {
    let store = &listed.store;
    lines(&[
        ("store", listed.path.clone()),
        ("size", Human(store.store_bytes).to_string()),
        ("free", Human(store.free_bytes).to_string()),
        ("volumes", format!("{}, {} of them snapshots", store.volumes, store.snapshots)),
        ("domains", store.domains.join(", ")),
        ("compress", store.compress.map_or_else(|| "-".into(), |packing| packing.to_string())),
        ("id", store.id.clone()),
        ("version", store.version.to_string()),
        ("checkpoint", store.checkpoint.to_string()),
        ("journal", Human(store.journal_bytes).to_string()),
        ("segments", format!("of {}", Human(store.segment_bytes))),
    ])
}

pub(super) fn volume(volume: &VolumeInfo) -> String {
    lines(&[
        (kind(volume), volume.name.clone()),
        ("size", format!("{} ({} bytes)", Human(volume.virtual_bytes), volume.virtual_bytes)),
        ("domain", volume.domain.clone()),
        ("from", volume.origin.clone().unwrap_or_else(|| "-".into())),
        ("created", created(volume)),
    ])
}

pub(super) fn stats(all: &StoreStats) -> String {
    let stats = &all.stats;
    let human = |bytes: u64| Human(bytes).to_string();
    let mut text = lines(&[
        ("store", all.path.clone()),
        ("logical", human(stats.logical_bytes)),
        ("mapped", human(stats.mapped_bytes)),
        ("distinct", human(stats.distinct_bytes)),
        ("stored", human(stats.stored_bytes)),
        ("ratio", if stats.stored_bytes == 0 { "-".into() } else { format!("{:.2}", stats.ratio) }),
        ("metadata", human(stats.metadata_bytes)),
        ("garbage", human(stats.garbage_bytes)),
        ("available", human(stats.available_bytes)),
        ("reserved", human(stats.reserved_bytes)),
        ("free", human(stats.free_bytes)),
    ]);
    let below = all.file_system_free_bytes.map(|free| format!("{} free", Human(free)));
    text.extend(below.map(|below| lines(&[("file system", below)])));
    text.extend(all.work.as_ref().map(work));
    text.extend(all.findings.iter().map(finding));
    let mut rows = vec![["NAME", "SIZE", "MAPPED"].map(str::to_owned)];
    rows.extend(stats.volumes.iter().map(|volume| {
        [volume.name.clone(), human(volume.virtual_bytes), human(volume.mapped_bytes)]
    }));
    if rows.len() > 1 {
        text = text + "\n" + &table(&rows);
    }
    text
}

/// The background work of a served store.
fn work(work: &WorkInfo) -> String {
    let part = |done: u64, all: u64| 100 * done.min(all) / all.max(1);
    let (scrub, compaction) = (&work.scrub, &work.compaction);
    let running = |is: bool| if is { ", one is under way" } else { "" };
    let scrubbed = match scrub.running {
        true => format!(", {} % of the next one", part(scrub.done, scrub.all)),
        false => String::new(),
    };
    lines(&[
        ("passes", format!("{}{}", work.passes, running(work.passing))),
        (
            "index",
            format!("{} % read since the store was opened", part(work.index_done, work.index_all)),
        ),
        ("compaction", format!("{} moved", Human(compaction.moved_bytes))),
        (
            "scrubbing",
            format!("{} rounds{scrubbed}, {} bad contents", scrub.rounds, scrub.bad_contents),
        ),
    ])
}

pub(super) fn collected(collected: &StoreCollected) -> String {
    let path = one_line(&collected.path);
    let [freed, free, live] =
        [collected.freed_bytes, collected.free_bytes, collected.live_bytes].map(Human);
    format!("{path}: {freed} freed, {free} free now; volumes have {live} of content\n")
}

pub(super) fn compacted(compacted: &StoreCompacted) -> String {
    let path = one_line(&compacted.path);
    let [moved, packed, to, free] = [
        compacted.moved_bytes,
        compacted.packed_bytes,
        compacted.packed_to_bytes,
        compacted.free_bytes,
    ]
    .map(Human);
    let packed = match compacted.packed_bytes {
        0 => String::new(),
        _ => format!(", {packed} of it compressed to {to}"),
    };
    format!("{path}: {moved} moved{packed}; {free} free now\n")
}

pub(super) fn report(checked: &StoreChecked) -> String {
    report_of(checked, "in order")
}

/// `order`: the text if there are no findings.
fn report_of(checked: &StoreChecked, order: &str) -> String {
    let path = one_line(&checked.path);
    let mut text: String = checked.findings.iter().map(finding).collect();
    if checked.more_findings > 0 {
        let _ = writeln!(text, "{path}: {} more findings", checked.more_findings);
    }
    let counts = &checked.counts;
    let _ = match counts.total() {
        0 => writeln!(text, "{path}: {order}"),
        _ => writeln!(
            text,
            "{path}: {} damaged, {} repairable (redundant copy or free-space map)",
            counts.damage + counts.unsupported,
            counts.harmless + counts.leaks
        ),
    };
    if checked.read_bytes > 0 {
        let _ = writeln!(text, "{path}: {} of content read", Human(checked.read_bytes));
    }
    text
}

fn finding(finding: &StoreFinding) -> String {
    let mut text = format!("{}:", finding.kind);
    if let (Some(volume), Some(at)) = (&finding.volume, finding.offset_bytes) {
        let length = finding.length_bytes.unwrap_or(0);
        let _ = write!(text, " {} at byte {at}, {length} bytes:", one_line(volume));
    } else if let Some(volume) = &finding.volume {
        let _ = write!(text, " {}:", one_line(volume));
    }
    if let Some(at) = finding.place_bytes {
        let _ = write!(text, " at byte {at} of the store:");
    }
    let mendable = if finding.mendable { " (repair mends it)" } else { "" };
    format!("{text} {}{mendable}\n", one_line(&finding.why))
}

pub(super) fn repaired(repaired: &StoreRepaired) -> String {
    let checked = if repaired.done { &repaired.after } else { &repaired.before };
    let mut text = report_of(checked, "metadata in order (content is for check)");
    if repaired.mended > 0 {
        let blocks = if repaired.mended == 1 { "block" } else { "blocks" };
        let path = one_line(&repaired.after.path);
        let _ = writeln!(text, "{path}: {} {blocks} written again", repaired.mended);
    }
    text
}
