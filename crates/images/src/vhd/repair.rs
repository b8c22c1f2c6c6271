//! Repairs without guessing: everything that the image has twice, or that follows from intact parts.

use ferrite_disk_base::{Commits, DiskError, ErrorKind, Port, Raw};

use super::check::{Problem, Report, SparseSurvey, Survey, survey};
use super::footers::replace_footers;
use super::format::batmap::{self, Batmap};
use super::format::footer::Footer;
use super::pieces::write_bytes;

/// Whether [`repair`] would change the image in `raw`, which is only read.
///
/// # Errors
/// It cannot be read.
pub fn is_repairable(raw: &Raw) -> Result<bool, DiskError> {
    plan(raw).map(|(_, planned)| planned.is_some())
}

/// The findings, and what a repair starts from; `None`: it changes nothing.
fn plan(raw: &Raw) -> Result<(Report, Option<(Footer, SparseSurvey)>), DiskError> {
    let mut report = Report::default();
    let found = survey(raw, &mut report).map_err(|e| e.for_image(raw.path()))?;
    let planned = match found {
        Some(Survey { footer, sparse: Some(sparse) }) if report.counts.mendable > 0 => {
            Some((footer, sparse))
        }
        _ => None,
    };
    Ok((report, planned))
}

/// Repairs the image in `raw`, open for writing and file 0 of the port: footers from an intact one, the batmap from the
/// bitmaps; unused space is returned. Returns the findings from before the repair; damage that is not
/// [mendable](ferrite_disk_base::ProblemKind::is_mendable) stays. If the places of blocks are invalid nothing is
/// changed at all.
///
/// The order: the copy of the footer, which counts alone for a while; `fdatasync`; holes in unused space; the batmap,
/// which is a hint with a checksum; then the footers, one at a time. After a crash in between, another repair finds the
/// rest.
///
/// # Errors
/// It cannot be read or written.
pub async fn repair(port: &Port, raw: &Raw) -> Result<Report, DiskError> {
    let (report, planned) = plan(raw)?;
    let Some((footer, sparse)) = &planned else { return Ok(report) };
    let has = |problem| report.has(problem);
    let failed = |e: std::io::Error| {
        let what = format!("cannot repair {}", raw.path().display());
        let help = "run it again; check the medium and the kernel's log (dmesg)";
        DiskError::new(ErrorKind::Io, what, e.to_string(), help).with_source(e)
    };
    let (file, commits) = (port.files[0], Commits::new());
    if has(Problem::FooterCopy) {
        write_bytes(port, file, &[(0, &footer.bytes())]).await.map_err(failed)?;
        commits.sync(port).await.map_err(failed)?;
    }
    if raw.is_file() {
        for (from, to) in &sparse.gaps {
            match port.io.punch_hole(file, *from, to - from).await {
                // A file system without holes keeps the space.
                Err(e) if e.kind() == std::io::ErrorKind::Unsupported => break,
                done => done.map_err(failed)?,
            }
        }
    }
    if let (Some(map), true) = (&sparse.batmap, has(Problem::Batmap) || has(Problem::BatmapBit)) {
        let mut full = sparse.full.clone();
        full.resize(batmap::covered_bytes(footer.current_size) as usize, 0);
        let header = map.header_for(&full);
        let at = Batmap::header_offset(footer, &sparse.header);
        let mut pieces: Vec<(u64, &[u8])> = vec![(map.offset, &full)];
        pieces.extend(at.map(|at| (at, &header[..])));
        write_bytes(port, file, &pieces).await.map_err(failed)?;
        commits.sync(port).await.map_err(failed)?;
    }
    if has(Problem::EndFooter) || has(Problem::FooterCopy) || has(Problem::Leak) {
        replace_footers(port, &commits, raw, footer, footer, sparse.end).await.map_err(failed)?;
    }
    Ok(report)
}
