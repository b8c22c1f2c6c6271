//! Gives an image another backing file, in its place: only the header's cluster is written.

use std::io;

use ferrite_disk_base::{Format, Port, SECTOR_BYTES};

use crate::qcow2::Qcow2;
use crate::qcow2::format::header::{
    Backing, EXT_BACKING_FORMAT, EXT_END, HEAD_BYTES, HEADER_V2_BYTES, Header,
    MAX_BACKING_NAME_BYTES, be32, be64,
};
use crate::qcow2::tables::meta;

const SECTOR: usize = SECTOR_BYTES as usize;

impl Qcow2 {
    /// Makes this image, which is file 0 of the port, one on the backing file of that name, and closes it. That one
    /// reads as the old one, or hides what is different, and its data are durable.
    ///
    /// 1. The name is written to a part of the first cluster that nothing uses; sync.
    /// 2. The first sector, which has the name's place and the format's name, is replaced; sync. A sector is never torn.
    ///
    /// # Errors
    /// Those of the kernel: the backing file is the old or the new one. `InvalidInput`: the header has no room for it;
    /// nothing was changed.
    pub async fn relink(self, port: &Port, name: &str, format: Format) -> io::Result<()> {
        self.close(port).await?;
        let len = self.cluster_bytes().min(HEAD_BYTES) as usize;
        let head = meta::read(port, port.files[0], 0, len).await?;
        let format = match format {
            Format::Raw | Format::Store | Format::Nbd | Format::Rbd | Format::Pool => "raw",
            Format::Qcow2 => "qcow2",
            Format::Vhd => "vpc",
        };
        let none = || io::Error::new(io::ErrorKind::InvalidInput, "its header has no room for it");
        let plan = plan(&head, name, format).ok_or_else(none)?;
        if let Some((at, bytes)) = &plan.name {
            meta::write(port, port.files[0], *at, bytes).await?;
            self.base.sync(port).await?;
        }
        meta::write(port, port.files[0], 0, &plan.first_sector).await?;
        self.base.sync(port).await?;
        Ok(())
    }
}

/// The bytes that are written.
struct Plan {
    first_sector: Vec<u8>,
    /// The name in sectors of its own, and their place.
    name: Option<(u64, Vec<u8>)>,
}

/// Plans the change of the first cluster, `head`. `None`: there is no room.
fn plan(head: &[u8], name: &str, format: &str) -> Option<Plan> {
    if name.is_empty() || name.len() > MAX_BACKING_NAME_BYTES as usize || head.len() < SECTOR {
        return None;
    }
    apart(head, name, format).or_else(|| together(head, name, format))
}

/// The name in sectors of its own. All the rest stays as it is, whatever other programs have put there.
fn apart(head: &[u8], name: &str, format: &str) -> Option<Plan> {
    let old = (be64(head, 8), u64::from(be32(head, 16)));
    let (extensions_end, format_at) = extensions(head, old.0)?;
    let mut sector = head[..SECTOR].to_vec();
    let at = format_at?;
    let len = be32(head, at - 4) as usize;
    if head.get(at..at + len)? != format.as_bytes() {
        let room = len.next_multiple_of(8);
        if format.len().next_multiple_of(8) != room || at + room > SECTOR {
            return None;
        }
        sector[at - 4..at].copy_from_slice(&(format.len() as u32).to_be_bytes());
        sector[at..at + room].fill(0);
        sector[at..at + format.len()].copy_from_slice(format.as_bytes());
    }
    let mut bytes = name.as_bytes().to_vec();
    bytes.resize(bytes.len().next_multiple_of(SECTOR), 0);
    let len = bytes.len() as u64;
    let mut place = (extensions_end as u64).next_multiple_of(SECTOR_BYTES).max(SECTOR_BYTES);
    if place < old.0 + old.1 && old.0 < place + len {
        place = (old.0 + old.1).next_multiple_of(SECTOR_BYTES);
    }
    if place + len > head.len() as u64 {
        return None;
    }
    sector[8..16].copy_from_slice(&place.to_be_bytes());
    sector[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    Some(Plan { first_sector: sector, name: Some((place, bytes)) })
}

/// The end of the extensions, with their end marker, and the place of the format's name. `None`: they have no marker, so
/// the old name's place is their end.
fn extensions(head: &[u8], name_at: u64) -> Option<(usize, Option<usize>)> {
    let bytes =
        head.get(..usize::try_from(name_at).ok().filter(|at| *at > 0).unwrap_or(head.len()))?;
    let mut at = if be32(head, 4) == 2 { HEADER_V2_BYTES } else { be32(head, 100) as usize };
    let mut format = None;
    while at.checked_add(8)? <= bytes.len() {
        let (kind, len) = (be32(bytes, at), be32(bytes, at + 4) as usize);
        match kind {
            EXT_END => return Some((at + 8, format)),
            EXT_BACKING_FORMAT => format = Some(at + 8),
            _ => {}
        }
        at = at.checked_add(8)?.checked_add(len.checked_next_multiple_of(8)?)?;
    }
    None
}

/// All in the first sector, where clusters have few.
fn together(head: &[u8], name: &str, format: &str) -> Option<Plan> {
    let backing = Some(Backing { name: name.into(), format: Some(format.into()) });
    let header = Header::parse_in_spite(head, u64::MAX).ok()?.0;
    let mut first_sector = Header { backing, ..header }.encode()?;
    if first_sector.len() > SECTOR {
        return None;
    }
    first_sector.resize(SECTOR, 0);
    Some(Plan { first_sector, name: None })
}
