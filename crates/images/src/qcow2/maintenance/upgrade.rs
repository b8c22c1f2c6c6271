//! Converts version 2 to version 3, which can be marked as open.

use std::io;

use ferrite_disk_base::{DiskError, ErrorKind, Port, Raw, SECTOR_BYTES};

use crate::qcow2::format::header::{HEAD_BYTES, Header, be64};
use crate::qcow2::maintenance::check::{failed, survey};
use crate::qcow2::maintenance::snapshots::Entries;
use crate::qcow2::tables::meta;

const SECTOR: usize = SECTOR_BYTES as usize;

/// Converts the image in `raw`, open for writing and file 0 of the port, to version 3; `false`: it has that version. No
/// journal has changes of it.
///
/// The header gets longer, over the bytes that follow it. The order of writes:
/// 1. The backing file's name, if it no longer fits into the first sector: it is moved to after its old place; sync.
/// 2. The first sector, which has all the rest and is never torn; sync.
///
/// A power cut before the second sync leaves one version or the other, complete.
///
/// # Errors
/// It is damaged, its header has no room, or its snapshots lack sizes that version 3 requires. Those of the medium.
pub async fn upgrade(port: &Port, raw: &Raw) -> Result<bool, DiskError> {
    let (header, report) = survey(raw, |_| {}).map_err(|e| failed(raw, "amend", e))?;
    let refuse = |why: &str, help: &str| {
        let what = format!("cannot amend {}", raw.path().display());
        Err(DiskError::new(ErrorKind::Unsuitable, what, why, help))
    };
    // A flag without a meaning in version 2 would get one.
    let Some(header) = header.filter(|_| report.counts.damage + report.counts.unsupported == 0)
    else {
        let help = "check it (ferrite image check), and mend what can be mended";
        return refuse("it is damaged", help);
    };
    if header.version > 2 {
        return Ok(false);
    }
    let later = "qemu-img amend -o compat=1.1 can, while nothing uses the image";
    if !snapshots_have_sizes(raw, &header).map_err(|e| failed(raw, "amend", e))? {
        return refuse("its internal snapshots lack what version 3 says of them", later);
    }
    let head = raw.read_now(0, SECTOR).map_err(|e| failed(raw, "amend", e))?;
    let header = Header { version: 3, ..header };
    let Some(plan) = plan(&header, be64(&head, 8)) else {
        return refuse("its header has no room for that", later);
    };
    write(port, &plan).await.map_err(|e| failed(raw, "amend", e))?;
    Ok(true)
}

/// The bytes that are written.
struct Plan {
    first_sector: Vec<u8>,
    /// The backing file's name in sectors of its own, and their place.
    name: Option<(u64, Vec<u8>)>,
}

/// Plans the new header. `None`: there is no room. The name of the backing file was at byte `name_at`.
fn plan(header: &Header, name_at: u64) -> Option<Plan> {
    let mut sector = header.encode()?;
    if sector.len() <= SECTOR {
        sector.resize(SECTOR, 0);
        return Some(Plan { first_sector: sector, name: None });
    }
    let backing = header.backing.as_ref()?;
    sector.truncate(sector.len() - backing.name.len());
    let at = (name_at + backing.name.len() as u64).next_multiple_of(SECTOR_BYTES);
    let mut name = backing.name.clone().into_bytes();
    name.resize(name.len().next_multiple_of(SECTOR), 0);
    let room = header.cluster_bytes().min(HEAD_BYTES);
    if sector.len() > SECTOR || at + name.len() as u64 > room {
        return None;
    }
    sector[8..16].copy_from_slice(&at.to_be_bytes());
    sector.resize(SECTOR, 0);
    Some(Plan { first_sector: sector, name: Some((at, name)) })
}

async fn write(port: &Port, plan: &Plan) -> io::Result<()> {
    if let Some((at, name)) = &plan.name {
        meta::write(port, port.files[0], *at, name).await?;
        meta::sync(port).await?;
    }
    meta::write(port, port.files[0], 0, &plan.first_sector).await?;
    meta::sync(port).await
}

/// Whether all snapshots have the sizes of their disk and machine state, as version 3 requires.
fn snapshots_have_sizes(raw: &Raw, header: &Header) -> io::Result<bool> {
    let mut entries = Entries::new(raw, header, raw.bytes_now()?);
    while let Some(entry) = entries.next()? {
        if !entry.is_ok_and(|entry| entry.has_sizes()) {
            return Ok(false);
        }
    }
    Ok(true)
}
