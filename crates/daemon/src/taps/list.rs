//! What `tap-ctl list` and `tap-ctl stats` show.

use std::collections::BTreeSet;

use ferrite_serve::blkif::lifecycle::ChainImage;
use ferrite_serve::counters::{snapshot, stats_file};

use super::verbs::worker;
use super::{Attached, is_paused, marked};
use crate::control::protocol::{TapImage, TapRow, TapStatistics};
use crate::follow::Follower;
use crate::params::{Format, Image};
use crate::state::DiskId;
use crate::{Failure, Shared, asking};

/// tapdisk's bits of a tap's state.
const CLOSED: u32 = 0x2;
const PAUSED: u32 = 0x2a;
const NOT_RESUMED: u32 = 0x200;

/// All taps: allocated minors, processes without a tap, and attached ones.
pub(crate) fn list(shared: &Shared) -> Vec<TapRow> {
    forget_dead(shared);
    let mut rows: Vec<TapRow> = Vec::new();
    let mut minors: BTreeSet<u32> = marked(&shared.paths).into_iter().collect();
    minors.extend(shared.taps.lock().keys());
    for minor in minors {
        rows.push(row(shared, minor));
    }
    let spares = shared.serving.spares();
    rows.extend(spares.into_iter().map(|pid| TapRow { pid: Some(pid), ..TapRow::default() }));
    rows
}

/// Forgets attached taps without an image whose process was killed. An open one gets another
/// process from its thread.
fn forget_dead(shared: &Shared) {
    let is_open = |id| shared.table.read(|disks| disks.contains_key(&id));
    let idle: Vec<u32> = shared.taps.lock().keys().copied().collect();
    for minor in idle {
        let id = DiskId::tap(minor);
        if is_open(id) || shared.serving.keeper_of(id).is_some() {
            continue;
        }
        let _one = shared.taps.change();
        if !is_open(id) && shared.serving.keeper_of(id).is_none() {
            Follower::forget_tap(shared, id);
            shared.taps.lock().remove(&minor);
        }
    }
}

fn row(shared: &Shared, minor: u32) -> TapRow {
    let id = DiskId::tap(minor);
    let mut row = TapRow { minor: Some(minor), ..TapRow::default() };
    let is_closed = match shared.taps.lock().get(&minor) {
        None => return row,
        Some(Attached { pid, is_closed, .. }) => {
            row.pid = Some(*pid);
            *is_closed
        }
    };
    let seen = shared.table.read(|disks| {
        let entry = disks.get(&id)?;
        let pause = entry.pause.as_ref().filter(|_| is_paused(entry));
        let refused = pause.and_then(|pause| pause.refused.clone());
        Some(match (pause, refused) {
            (None, _) => (0, entry.image.clone()),
            (Some(_), None) => (PAUSED, entry.image.clone()),
            (Some(_), refused) => (PAUSED | NOT_RESUMED, refused),
        })
    });
    let (state, image) = seen.unwrap_or((if is_closed { CLOSED } else { 0 }, None));
    row.worker = seen_worker(shared, id, image.is_some());
    row.state = Some(state);
    row.args = image.as_ref().map(args);
    row
}

fn seen_worker(shared: &Shared, id: DiskId, is_open: bool) -> Option<u32> {
    is_open.then(|| worker(shared, id)).flatten()
}

/// An image as tapdisk's tools name it.
fn args(image: &Image) -> String {
    format!("{}:{}", image.format.tapdisk_word(), image.path.to_string_lossy())
}

fn tap_image(image: ChainImage) -> TapImage {
    let ChainImage { format, path, read_sectors } = image;
    let word = if format == Format::Raw.word() { Format::Raw.tapdisk_word() } else { &format };
    TapImage { args: format!("{word}:{path}"), read_sectors }
}

/// The counters of an attached tap.
///
/// # Errors
/// There is no such tap.
pub(crate) fn statistics(shared: &Shared, minor: u32) -> Result<TapStatistics, Failure> {
    let id = DiskId::tap(minor);
    let row = row(shared, minor);
    if row.pid.is_none() {
        let why = format!("minor {minor} is not attached");
        return Err(Failure { why, help: "tap-ctl list shows the minors".to_owned() });
    }
    let stats = stats_file(&shared.paths.run.join(id.file_name()));
    let seen = snapshot::read(&stats).ok();
    let sectors = |kind: fn(&snapshot::Snapshot) -> &snapshot::KindCounts| {
        seen.as_ref().map_or((0, 0, 0), |seen| {
            let counts = kind(seen);
            (counts.sectors, counts.errors, counts.in_flight())
        })
    };
    let (reads, writes) = (sectors(|seen| &seen.reads), sectors(|seen| &seen.writes));
    let is_paused = row.state.is_some_and(|state| state & PAUSED == PAUSED);
    let chain = match row.args.is_some() && !is_paused {
        true => asking::chain_of(shared, id).unwrap_or_default(),
        false => Vec::new(),
    };
    Ok(TapStatistics {
        chain: chain.into_iter().map(tap_image).collect(),
        args: row.args,
        is_paused,
        sectors: [reads.0, writes.0],
        errors: [reads.1, writes.1],
        in_flight: reads.2 + writes.2,
        mirror_failed: super::motion::has_failed(shared, id),
    })
}
