//! The stand-in for `vhd-util check`: its rules, read without a lock, since the caller does the locking. No bitmap is
//! read, so a large image takes no longer than its table.
//!
//! A table that lies behind a block is valid here: `resize` puts it there. libvhd refuses it, and `check --strict` of
//! `ferrite image` says so.

use std::path::Path;

use ferrite_disk_base::DiskError;
use ferrite_host::clock;

use super::check::{Problem, Report};
use super::format::batmap::Encrypted;
use super::format::footer::{self, Footer, Kind};
use super::format::header::{self, Header};
use super::format::layout::{Layout, UNUSED};
use super::format::{Malformed, SECTOR, Uuid};
use super::meta::{self, Footers, MetaError};
use super::seen::{Seen, glance};
use super::strict::Rules;

/// The options of a check.
#[derive(Clone, Copy, Debug)]
pub struct Verify {
    /// Without a footer at the end, the copy counts: the image is open, or was when its host crashed.
    pub ignore_footer: bool,
    /// The parent may have any identity.
    pub ignore_parent: bool,
    /// Images of the future are valid.
    pub ignore_times: bool,
    /// Compare the places of all blocks with each other.
    pub overlaps: bool,
}

/// Checks the VHD at `path`. It is valid if nothing is found.
///
/// # Errors
/// It cannot be read.
pub fn verify(path: &Path, how: Verify) -> Result<Report, DiskError> {
    let raw = glance(path)?;
    let now = if how.ignore_times { u32::MAX } else { footer::timestamp(clock::unix_time_s()) };
    let mut report = Report::default();
    match all(&mut Rules { raw: &raw, report: &mut report, now }, how) {
        Ok(()) => Ok(report),
        Err(MetaError::Bad(bad)) => {
            report.add(Problem::Refused, bad.offset, bad.why);
            Ok(report)
        }
        Err(e) => Err(e.for_image(path)),
    }
}

fn all(rules: &mut Rules<'_>, how: Verify) -> Result<(), MetaError> {
    let footers = Footers::read(rules.raw)?;
    let (footer, at) = choose(&footers, how)?;
    let sector = meta::read_sector(rules.raw, at)?;
    rules.footer(&sector, at, &footer);
    if footer.kind == Kind::Fixed {
        if footer.current_size > at {
            rules.refuse(at, format!("a disk of {} bytes in {at}", footer.current_size));
        }
        return Ok(());
    }
    let room = if footers.end.is_ok() { footers.end_at } else { footers.medium_bytes };
    let (header, map, layout) = meta::read_header(rules.raw, &footer, room, Encrypted::Opened)?;
    let bytes = meta::read(rules.raw, footer.data_offset, header::BYTES)?;
    rules.header(&bytes, &footer, &header, room);
    rules.batmap(&footer, &header, room)?;
    let has_place = blocks(rules, &header, &layout, how)?;
    if let Some(map) = &map {
        let full = meta::read_full(rules.raw, &footer, map)?;
        let wrong = full.iter().enumerate().find(|(i, bits)| {
            let places = has_place.get(*i).copied().unwrap_or(0);
            **bits & !places != 0
        });
        if let Some((i, _)) = wrong {
            let why = format!("batmap: a block from {} on is full and has no place", i * 8);
            rules.refuse(map.offset + i as u64, why);
        }
    }
    match footer.kind {
        Kind::Differencing => parent(rules, &bytes, &footer, &header, how),
        _ => Ok(()),
    }
}

/// The footer that counts, and its offset. Both footers of an image with blocks have to be there and the same.
fn choose(footers: &Footers, how: Verify) -> Result<(Footer, u64), Malformed> {
    match (&footers.start, &footers.end) {
        (_, Ok(end)) if end.kind == Kind::Fixed => Ok((end.clone(), footers.end_at)),
        (Ok(start), Ok(end)) if start == end => Ok((end.clone(), footers.end_at)),
        (Ok(start), _) if how.ignore_footer && start.kind != Kind::Fixed => Ok((start.clone(), 0)),
        (Ok(_), Ok(_)) => {
            Err(Malformed::new(0, "the footers at the beginning and at the end differ"))
        }
        (Err(bad), Ok(_)) => Err(bad.clone()),
        (_, Err(bad)) => Err(bad.clone()),
    }
}

/// Checks the block table. A bit is returned for each block that has a place, the highest of a byte first.
fn blocks(
    rules: &mut Rules<'_>,
    header: &Header,
    layout: &Layout,
    how: Verify,
) -> Result<Vec<u8>, MetaError> {
    let covered = layout.blocks.div_ceil(8) as usize;
    let (mut has_place, mut sectors) = (vec![0; covered], Vec::new());
    meta::for_each_entry(rules.raw, header, layout, |block, sector| {
        if sector == UNUSED {
            return Ok(());
        }
        if let Err(bad) = layout.check_place(sector, header.table_offset + u64::from(block) * 4) {
            rules.refuse(bad.offset, bad.why);
        }
        has_place[block as usize / 8] |= 0x80 >> (block % 8);
        sectors.push(sector);
        Ok(())
    })?;
    let overlap = how.overlaps.then(|| layout.find_overlap(&mut sectors)).flatten();
    if let Some((a, b)) = overlap {
        let (a, b) = (u64::from(a) * SECTOR, u64::from(b) * SECTOR);
        rules.refuse(header.table_offset, format!("a block at byte {b} over one at byte {a}"));
    }
    Ok(has_place)
}

/// Checks the way to the parent, and its identity.
fn parent(
    rules: &mut Rules<'_>,
    bytes: &[u8],
    footer: &Footer,
    header: &Header,
    how: Verify,
) -> Result<(), MetaError> {
    let found = Seen::read(rules.raw.path(), how.ignore_footer);
    let Some(path) = found.ok().and_then(|seen| seen.parent_path().ok()) else {
        let why = format!("its parent {:?} is not there", header.parent_name());
        rules.refuse(footer.data_offset, why);
        return Ok(());
    };
    rules.locators(bytes, footer, header, Some(&path))?;
    if how.ignore_parent || header.parent_uuid == Uuid::NIL {
        return Ok(());
    }
    let expected = header.parent_uuid;
    let why = match Seen::read(&path, false) {
        Ok(parent) if parent.footer().uuid == expected => return Ok(()),
        Ok(parent) => format!(
            "its parent {} has the identifier {}, and it was made on {expected}",
            path.display(),
            parent.footer().uuid
        ),
        Err(e) => format!("its parent {} cannot be read: {}", path.display(), e.why()),
    };
    rules.refuse(footer.data_offset, why);
    Ok(())
}
