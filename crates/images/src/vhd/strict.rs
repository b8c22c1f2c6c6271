//! Checks for what `vhd-util check` refuses and libvhd cannot read, in images that are valid here: XAPI runs that
//! before it coalesces. The rules are in docs/internals/formats.md.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ferrite_disk_base::{DiskError, Raw};
use ferrite_host::{clock, names};

use super::check::{Problem, Report};
use super::format::batmap::{self, Batmap, Encrypted};
use super::format::footer::{self, Footer, Kind};
use super::format::geometry::Geometry;
use super::format::header::{self, DEFAULT_BLOCK_BYTES, Header, LOCATORS, LOCATORS_AT};
use super::format::layout::UNUSED;
use super::format::locator::{self, Locator};
use super::format::{SECTOR, Uuid, be32, be64, whole_sectors};
use super::meta::{self, CopyOnDevice, Footers, MetaError};
use super::seen;

/// The largest difference of clocks, in seconds.
const SLACK_S: u32 = 1800;
/// The first version of blktap's images that certainly have a batmap, and the last one.
const SURE_OF_BATMAP: u32 = 0x0001_0002;
const NEWEST: u32 = 0x0001_0003;

/// Checks as [`check`](super::check()) does, and the rules of other programs besides. `parent`: the path of the image's
/// parent, if there is one and it was found.
///
/// # Errors
/// The image cannot be read.
pub fn check_strictly(raw: &Raw, parent: Option<&Path>) -> Result<Report, DiskError> {
    let mut report = super::check(raw)?;
    if report.counts.damage == 0 && report.counts.unsupported == 0 {
        let mut rules =
            Rules { raw, report: &mut report, now: footer::timestamp(clock::unix_time_s()) };
        rules.all(parent).map_err(|e| e.for_image(raw.path()))?;
    }
    Ok(report)
}

pub(super) struct Rules<'a> {
    pub(super) raw: &'a Raw,
    pub(super) report: &'a mut Report,
    /// The present time in seconds since 2000.
    pub(super) now: u32,
}

impl Rules<'_> {
    pub(super) fn refuse(&mut self, offset: u64, why: impl Into<String>) {
        self.report.add(Problem::Refused, offset, why);
    }

    /// Adds those of the reasons that apply.
    fn refuse_if<const N: usize>(&mut self, offset: u64, reasons: [(bool, &str); N]) {
        for (_, why) in reasons.into_iter().filter(|(holds, _)| *holds) {
            self.refuse(offset, why);
        }
    }

    fn all(&mut self, parent: Option<&Path>) -> Result<(), MetaError> {
        let footers = Footers::read(self.raw)?;
        let Ok((footer, _)) = footers.choose(CopyOnDevice::Never) else { return Ok(()) };
        let (end_at, last) = (footers.end_at, meta::read_sector(self.raw, footers.end_at)?);
        if footers.end.is_err() {
            self.refuse(end_at, "there is no footer at the end");
        }
        if footer.kind == Kind::Fixed {
            self.footer(&last, end_at, &footer);
            return Ok(());
        }
        let first = meta::read_sector(self.raw, 0)?;
        self.footer(&first, 0, &footer);
        if footers.end.is_ok() && first != last {
            self.refuse(0, "the footers at the beginning and at the end differ");
        }
        let (header, _, layout) =
            meta::read_header(self.raw, &footer, footers.medium_bytes, Encrypted::Refused)?;
        let raw = meta::read(self.raw, footer.data_offset, header::BYTES)?;
        self.header(&raw, &footer, &header, end_at);
        if header.block_bytes != DEFAULT_BLOCK_BYTES {
            self.refuse(footer.data_offset, "libvhd reads blocks of 2 MiB only");
            return Ok(());
        }
        if !footer.current_size.is_multiple_of(u64::from(DEFAULT_BLOCK_BYTES)) {
            self.refuse(
                0,
                "libvhd does not see what is behind the disk's last whole block of 2 MiB",
            );
        }
        let end = self.batmap(&footer, &header, end_at)?;
        let end = end.max(locators_end(&raw)).max(footer.data_offset + header::BYTES as u64);
        let stride = layout.stride();
        meta::for_each_entry(self.raw, &header, &layout, |block, sector| {
            let start = u64::from(sector) * SECTOR;
            if sector != UNUSED && start < end {
                self.refuse(
                    start,
                    format!("block {block} is before metadata, which ends at {end}"),
                );
            }
            if sector != UNUSED && start + stride > end_at {
                self.refuse(start, format!("block {block} ends behind the footer's place"));
            }
            Ok(())
        })?;
        match footer.kind {
            Kind::Differencing => self.locators(&raw, &footer, &header, parent),
            _ => Ok(()),
        }
    }

    pub(super) fn footer(&mut self, raw: &[u8; footer::BYTES], at: u64, footer: &Footer) {
        let is_tap = footer.creator.app.starts_with(b"tap");
        let (g, right) = (be32(raw, 56), Geometry::of_sectors(footer.current_size / SECTOR));
        let right = u32::from(right.cylinders) << 16
            | u32::from(right.heads) << 8
            | u32::from(right.sectors);
        let fixed = footer.kind == Kind::Fixed;
        self.refuse_if(
            at,
            [
                (be32(raw, 8) & 2 == 0, "footer: the reserved feature is not set"),
                (be32(raw, 12) != 0x0001_0000, "footer: another version than 1.0"),
                (fixed && be64(raw, 16) != u64::MAX, "footer: a fixed disk with a dynamic header"),
                (footer.timestamp > self.now.saturating_add(SLACK_S), "footer: made in the future"),
                (is_tap && footer.creator.version > NEWEST, "footer: blktap of a version to come"),
                (g > right, "footer: a geometry of more than the disk has"),
                (raw[84] > 1, "footer: a saved state other than 0 and 1"),
                (footer.hidden > 1, "footer: hidden is neither 0 nor 1"),
                (raw[86..].iter().any(|b| *b != 0), "footer: something in the reserved bytes"),
                (footer.uuid == Uuid::NIL, "footer: no UUID"),
            ],
        );
    }

    pub(super) fn header(&mut self, raw: &[u8], footer: &Footer, header: &Header, end_at: u64) {
        let at = footer.data_offset;
        let table_end = header.table_offset.saturating_add(u64::from(header.max_entries) * 4);
        let some = |range: std::ops::Range<usize>| raw[range].iter().any(|byte| *byte != 0);
        self.refuse_if(
            at,
            [
                (be64(raw, 8) != u64::MAX, "header: a further structure"),
                (
                    header.table_offset == 0 || table_end > end_at,
                    "header: a table outside of the image",
                ),
                (
                    some(60..64) || some(768..header::BYTES),
                    "header: something in the reserved bytes",
                ),
            ],
        );
        if footer.kind == Kind::Differencing {
            let future = header.parent_timestamp > self.now.saturating_add(SLACK_S);
            self.refuse_if(at, [(future, "header: a parent of the future")]);
            let name = header.parent_name();
            if let Some(why) = locator::unreadable_by_libvhd(&name) {
                self.refuse(at, format!("header: the parent's name {name:?} {why}"));
            }
        } else {
            self.refuse_if(
                at,
                [(
                    some(40..60) || some(64..LOCATORS_AT + LOCATORS * Locator::BYTES),
                    "header: a parent, in a disk without one",
                )],
            );
        }
    }

    /// The end of table and batmap.
    pub(super) fn batmap(
        &mut self,
        footer: &Footer,
        header: &Header,
        end_at: u64,
    ) -> Result<u64, MetaError> {
        let table_end = header.table_offset + whole_sectors(u64::from(header.max_entries) * 4);
        let Some(at) = Batmap::header_offset(footer, header) else { return Ok(table_end) };
        let raw = meta::read_sector(self.raw, at)?;
        let Some(map) = Batmap::parse(&raw, at, footer, header, Encrypted::Opened)? else {
            if footer.creator.version >= SURE_OF_BATMAP {
                self.refuse(at, "there is no batmap, or one that libvhd cannot read");
            }
            return Ok(table_end);
        };
        if map.len * 8 < u64::from(header.max_entries) || map.offset + map.len > end_at {
            self.refuse(at, "the batmap is smaller than the table, or outside of the image");
        }
        let covered = batmap::covered_bytes(footer.current_size) as usize;
        let bits = meta::read(self.raw, map.offset, covered)?;
        if !map.is_valid(&bits) {
            self.refuse(map.offset, "the batmap and its checksum do not match");
            return Ok(map.offset + map.len);
        }
        Ok((at + SECTOR).max(map.offset + map.len))
    }

    pub(super) fn locators(
        &mut self,
        raw: &[u8],
        footer: &Footer,
        header: &Header,
        parent: Option<&Path>,
    ) -> Result<(), MetaError> {
        let mut seen: Vec<[u8; 4]> = Vec::new();
        let mut found = false;
        for i in 0..LOCATORS {
            let entry = &raw[LOCATORS_AT + i * Locator::BYTES..][..Locator::BYTES];
            let at = footer.data_offset + (LOCATORS_AT + i * Locator::BYTES) as u64;
            let locator = header.locators[i];
            if !locator.is_used() {
                self.refuse_if(
                    at,
                    [(entry.iter().any(|b| *b != 0), "a locator without a platform")],
                );
                continue;
            }
            let odd = locator.space >= 512 && !u64::from(locator.space).is_multiple_of(SECTOR);
            self.refuse_if(
                at,
                [
                    (seen.contains(&locator.code), "two locators of one platform"),
                    (locator.offset == 0 || locator.len == 0, "a locator without a text"),
                    (locator.space == 0 || odd, "a locator whose space libvhd does not understand"),
                    (be32(entry, 12) != 0, "a locator with something in its reserved bytes"),
                ],
            );
            seen.push(locator.code);
            if locator.reads() {
                found = true;
                self.path(&locator, header, parent)?;
            }
        }
        if !found {
            self.refuse(footer.data_offset, "no locator of the kinds that libvhd reads");
        }
        Ok(())
    }

    /// Checks a locator's path: it has to end with the parent's name, and to lead to it.
    fn path(
        &mut self,
        locator: &Locator,
        header: &Header,
        parent: Option<&Path>,
    ) -> Result<(), MetaError> {
        let text = meta::read(self.raw, locator.offset, locator.len as usize)?;
        let Some(path) = locator::as_libvhd_reads(locator.code, &text) else {
            self.refuse(locator.offset, "a locator that is no path in ASCII");
            return Ok(());
        };
        let (shown, name) = (path.display(), header.parent_name());
        if path.file_name().is_none_or(|last| last.to_str() != Some(&name)) {
            self.refuse(
                locator.offset,
                format!("a locator leads to {shown}, the header to {name:?}"),
            );
        }
        let dir = seen::canonical(self.raw.path()).ok();
        let dir = dir.as_deref().and_then(Path::parent).unwrap_or(Path::new("."));
        let led_to = [path.clone(), dir.join(path.strip_prefix("/").unwrap_or(&path))];
        let led_to = led_to.iter().find(|path| path.is_absolute() && names::exists(path));
        let same = match (led_to, parent) {
            (Some(here), Some(parent)) => same_file(here, parent),
            (here, _) => here.is_some(),
        };
        if !same {
            self.refuse(
                locator.offset,
                format!("the locator's path {shown} does not lead to the parent"),
            );
        }
        Ok(())
    }
}

fn same_file(a: &Path, b: &Path) -> bool {
    match (names::metadata(a), names::metadata(b)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// The end of the texts of all locators, also of unused ones.
fn locators_end(header: &[u8]) -> u64 {
    let entries = header[LOCATORS_AT..].chunks_exact(Locator::BYTES).take(LOCATORS);
    let ends = entries.filter(|entry| entry[..4] != [0; 4]).map(|entry| {
        let space = u64::from(be32(entry, 4));
        let room = if space < 512 { space * SECTOR } else { space };
        be64(entry, 16).saturating_add(room)
    });
    ends.max().unwrap_or(0)
}
