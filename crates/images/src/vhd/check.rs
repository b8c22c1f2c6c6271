//! Checks an image without changing it.

use ferrite_disk_base::{Class, Counts, DiskError, ProblemKind, Raw, Stretches};

use super::by_name;
use super::footers::End;
use super::format::batmap::{self, Batmap, Encrypted};
use super::format::footer::{Footer, Kind};
use super::format::header::Header;
use super::format::layout::{Layout, Placed, UNUSED};
use super::format::{Malformed, SECTOR};
use super::meta::{self, CopyOnDevice, Footers, MetaError};

/// The kinds of findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Problem {
    /// No intact footer at the end; the copy at the beginning serves. Normal while an image is open and after a crash.
    EndFooter,
    /// The copy of the footer at the beginning is damaged.
    FooterCopy,
    /// The two footers differ, or neither is intact: there is no image.
    Footers,
    /// The dynamic header, or its places of tables, are invalid: there are no blocks.
    Header,
    /// An entry of the block table outside of the image, or over metadata.
    Place,
    /// Two blocks that overlap.
    Overlap,
    /// The batmap is damaged. It is not used then.
    Batmap,
    /// The batmap has a bit for a block that is not full: sectors of the parent are hidden.
    BatmapBit,
    /// A bitmap could not be read.
    Bitmap,
    /// No valid parent locator.
    Locators,
    /// Space of a file that nothing refers to.
    Leak,
    /// An unsupported version, kind or feature: there are no blocks.
    Unsupported,
    /// `vhd-util check` refuses the image, or libvhd cannot read it. Only in strict checks.
    Refused,
}

impl ProblemKind for Problem {
    fn class(self) -> Class {
        match self {
            Problem::Leak => Class::Leak,
            Problem::EndFooter | Problem::FooterCopy | Problem::Batmap => Class::Harmless,
            Problem::Unsupported => Class::Unsupported,
            Problem::Refused => Class::Foreign,
            Problem::BatmapBit
            | Problem::Footers
            | Problem::Header
            | Problem::Place
            | Problem::Overlap
            | Problem::Bitmap
            | Problem::Locators => Class::Damage,
        }
    }

    fn is_mendable(self) -> bool {
        match self {
            Problem::EndFooter
            | Problem::FooterCopy
            | Problem::Batmap
            | Problem::BatmapBit
            | Problem::Leak => true,
            Problem::Footers
            | Problem::Header
            | Problem::Place
            | Problem::Overlap
            | Problem::Bitmap
            | Problem::Locators
            | Problem::Unsupported
            | Problem::Refused => false,
        }
    }
}

/// One inconsistency of a VHD.
pub type Finding = ferrite_disk_base::Finding<Problem>;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The worst first, at most 1,000.
    pub findings: Vec<Finding>,
    /// All findings, listed or not.
    pub counts: Counts,
    /// The stretches of tables that are one finding each.
    stretches: Stretches<Problem>,
    /// The kinds of all findings, each once.
    kinds: Vec<Problem>,
}

impl Report {
    pub(super) fn add(&mut self, problem: Problem, offset: u64, why: impl Into<String>) {
        let finding = Finding { problem, offset, why: why.into() };
        self.stretches.add(finding, &mut self.findings, &mut self.counts);
        if !self.has(problem) {
            self.kinds.push(problem);
        }
    }

    /// Adds damage of a structure, or that it is of an unsupported kind.
    fn add_bad(&mut self, problem: Problem, bad: Malformed) {
        let problem = if bad.unsupported { Problem::Unsupported } else { problem };
        self.add(problem, bad.offset, bad.why);
    }

    /// Whether there is a finding of this kind, listed or not.
    pub(super) fn has(&self, problem: Problem) -> bool {
        self.kinds.contains(&problem)
    }

    fn add_error(&mut self, problem: Problem, e: MetaError) -> Result<(), MetaError> {
        match e {
            MetaError::Bad(bad) => {
                self.add_bad(problem, bad);
                Ok(())
            }
            io => Err(io),
        }
    }

    /// Findings that are in the line of another one.
    pub fn joined(&self) -> u64 {
        self.stretches.joined
    }

    /// Whether nothing was found.
    pub fn is_clean(&self) -> bool {
        self.counts.total() == 0
    }
}

/// The data that a repair needs besides the findings.
pub(super) struct Survey {
    pub(super) footer: Footer,
    pub(super) sparse: Option<SparseSurvey>,
}

pub(super) struct SparseSurvey {
    pub(super) header: Header,
    pub(super) batmap: Option<Batmap>,
    /// Bits of the batmap, by the bitmaps.
    pub(super) full: Vec<u8>,
    /// The end of the file.
    pub(super) end: End,
    /// Parts before the end that nothing refers to.
    pub(super) gaps: Vec<(u64, u64)>,
}

/// Checks the image in `raw`, which no process has open for writing. Reads all bitmaps.
///
/// # Errors
/// It cannot be read; damage is in the report.
pub fn check(raw: &Raw) -> Result<Report, DiskError> {
    let mut report = Report::default();
    survey(raw, &mut report).map_err(|e| e.for_image(raw.path()))?;
    Ok(report)
}

/// Checks; `None`: too damaged to be repaired.
pub(super) fn survey(raw: &Raw, report: &mut Report) -> Result<Option<Survey>, MetaError> {
    let footers = match Footers::read(raw) {
        Ok(footers) => footers,
        Err(e) => return report.add_error(Problem::Footers, e).map(|()| None),
    };
    let (footer, footer_at) = match footers.choose(CopyOnDevice::Never) {
        Ok(chosen) => chosen,
        Err(bad) => {
            let is_damage = !bad.unsupported;
            report.add_bad(Problem::Footers, bad);
            // An unsupported image may be a fixed one, whose guest has the first sector.
            if let (true, Err(start)) = (is_damage, &footers.start) {
                report.add_bad(Problem::Footers, start.clone());
            }
            return Ok(None);
        }
    };
    if let Err(bad) = &footers.end {
        report.add(Problem::EndFooter, bad.offset, bad.why.clone());
    }
    let room = footer_at.room(footers.medium_bytes);
    if footer.kind == Kind::Fixed {
        if footer.current_size > footers.end_at {
            let why = format!("footer: a disk of {} bytes in less", footer.current_size);
            report.add(Problem::Footers, footers.end_at, why);
            return Ok(None);
        }
        return Ok(Some(Survey { footer, sparse: None }));
    }
    match &footers.start {
        Err(bad) => report.add(Problem::FooterCopy, 0, bad.why.clone()),
        Ok(start) if *start != footer => {
            report.add(Problem::FooterCopy, 0, "it is not the same as the footer at the end");
        }
        Ok(_) => {}
    }
    let (header, batmap, layout) = match meta::read_header(raw, &footer, room, Encrypted::Refused) {
        Ok(found) => found,
        Err(e) => return report.add_error(Problem::Header, e).map(|()| None),
    };
    if footer.kind == Kind::Differencing {
        match meta::read_parent_paths(raw, &header) {
            Ok(paths) if paths.is_empty() && !by_name::is_there(raw, &footer, &header) => {
                report.add(Problem::Locators, footer.data_offset, "no parent locator makes sense");
            }
            Ok(_) => {}
            Err(e) => report.add_error(Problem::Locators, e)?,
        }
    }
    let sparse = survey_blocks(raw, report, &footers, &footer, header, batmap, layout)?;
    Ok(sparse.map(|sparse| Survey { footer, sparse: Some(sparse) }))
}

fn survey_blocks(
    raw: &Raw,
    report: &mut Report,
    footers: &Footers,
    footer: &Footer,
    header: Header,
    batmap: Option<Batmap>,
    layout: Layout,
) -> Result<Option<SparseSurvey>, MetaError> {
    let mut placed = Vec::new();
    let entry_at = |block: u32| header.table_offset + u64::from(block) * 4;
    meta::for_each_entry(raw, &header, &layout, |block, sector| {
        if sector != UNUSED {
            match layout.check_place(sector, entry_at(block)) {
                Ok(()) => placed.push(Placed { sector, block }),
                Err(bad) => report.add(Problem::Place, bad.offset, bad.why),
            }
        }
        Ok(())
    })?;
    placed.sort_unstable_by_key(|p| (p.sector, p.block));
    for pair in placed.windows(2) {
        if u64::from(pair[1].sector - pair[0].sector) * SECTOR < layout.stride() {
            let why = format!("blocks {} and {} lie over each other", pair[0].block, pair[1].block);
            report.add(Problem::Overlap, entry_at(pair[1].block), why);
        }
    }
    let mut full = read_bitmaps(raw, report, footer, &layout, &placed)?;
    if let Some(batmap) = &batmap {
        check_batmap(raw, report, footer, batmap, &full)?;
    }
    let (used, mut gaps) = layout.unused(&placed);
    // Smaller gaps come from the alignment of blocks.
    gaps.retain(|(from, to)| to - from >= 4096);
    let qemu = footer.kind == Kind::Dynamic
        && layout.qemu_overwrites_batmap(placed.iter().map(|p| p.sector));
    let end = End { used, footer: layout.footer_at(used, qemu) };
    if qemu {
        full.fill(0);
    }
    check_leaks(report, raw, footers, end.footer, &gaps);
    // With invalid entries, unused space cannot be determined.
    let unsound = [Problem::Place, Problem::Overlap, Problem::Bitmap].map(|p| report.has(p));
    Ok((unsound == [false; 3]).then_some(SparseSurvey { header, batmap, full, end, gaps }))
}

/// Reads all bitmaps, in the order of the file; a bit for each block whose bits are all set.
fn read_bitmaps(
    raw: &Raw,
    report: &mut Report,
    footer: &Footer,
    layout: &Layout,
    placed: &[Placed],
) -> Result<Vec<u8>, MetaError> {
    let mut full = vec![0u8; (layout.blocks as usize).div_ceil(8)];
    for Placed { sector, block } in placed {
        let start = u64::from(*block) * layout.block_bytes;
        let sectors = (footer.current_size - start).min(layout.block_bytes) / SECTOR;
        let at = u64::from(*sector) * SECTOR;
        let bits = match meta::read(raw, at, sectors.div_ceil(8) as usize) {
            Ok(bits) => bits,
            Err(e) => {
                report.add(Problem::Bitmap, at, format!("bitmap of block {block}: {e}"));
                continue;
            }
        };
        let (whole, rest) = ((sectors / 8) as usize, sectors % 8);
        let last = bits.get(whole).is_none_or(|b| b >> (8 - rest) == 0xff >> (8 - rest));
        if bits[..whole].iter().all(|b| *b == 0xff) && last {
            full[*block as usize / 8] |= 0x80 >> (block % 8);
        }
    }
    Ok(full)
}

fn check_batmap(
    raw: &Raw,
    report: &mut Report,
    footer: &Footer,
    batmap: &Batmap,
    full: &[u8],
) -> Result<(), MetaError> {
    let len = batmap::covered_bytes(footer.current_size) as usize;
    let map = meta::read(raw, batmap.offset, len)?;
    if !batmap.is_valid(&map) {
        report.add(Problem::Batmap, batmap.offset, "the batmap and its checksum do not match");
        return Ok(());
    }
    for (i, byte) in map.iter().enumerate() {
        let wrong = byte & !full.get(i).copied().unwrap_or(0);
        if wrong != 0 {
            let block = i * 8 + wrong.leading_zeros() as usize;
            let why = format!("batmap: block {block} is said to be full, and its bitmap is not");
            report.add(Problem::BatmapBit, batmap.offset + i as u64, why);
        }
    }
    Ok(())
}

fn check_leaks(report: &mut Report, raw: &Raw, footers: &Footers, end: u64, gaps: &[(u64, u64)]) {
    // All space of a device exists, used or not.
    if !raw.is_file() {
        return;
    }
    for (from, to) in gaps.iter().filter(|(from, to)| raw.has_space_for(*from, *to)) {
        report.add(Problem::Leak, *from, format!("{} bytes that nothing refers to", to - from));
    }
    let tail = footers.medium_bytes.saturating_sub(end + SECTOR);
    if tail >= 4096 {
        report.add(Problem::Leak, end, format!("{tail} bytes behind the last block"));
    }
}
