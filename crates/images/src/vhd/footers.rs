//! Replaces an image's footers so that there is a valid image at any moment.

use std::io;

use ferrite_disk_base::{Commits, Port, Raw};

use super::format::SECTOR;
use super::format::footer::Footer;
use super::pieces::{erase, write_bytes};

/// The end of a file, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// The end of the last used part.
    pub(super) used: u64,
    /// The place of the footer: at `used`, or later (see `Layout::footer_at`).
    pub(super) footer: u64,
}

/// Byte offset of a medium's last sector, which has the footer of a device.
///
/// # Errors
/// The kernel does not give the size.
pub(super) fn last_sector(raw: &Raw) -> io::Result<u64> {
    Ok((raw.bytes_now()? / SECTOR * SECTOR).saturating_sub(SECTOR))
}

/// Overwrites unused space before the place of a file's footer with zeros, durably: an old footer from before the image
/// grew, a table that was moved, or a dead process's writes. QEMU places its first block there, marks it as wholly
/// present, and writes only the guest's data. The copy of the footer is intact, since the one at the end may be
/// overwritten.
pub(super) async fn clear_before_footer(
    port: &Port,
    commits: &Commits,
    raw: &Raw,
    end: End,
) -> io::Result<()> {
    let there = end.footer.min(raw.bytes_now()?);
    if raw.is_file() && end.used < there {
        erase(port, raw, end.used, there - end.used).await?;
        commits.sync(port).await?;
    }
    Ok(())
}

/// Replaces the footers of the dynamic or differencing image in `raw`, which is file 0 of the port. Everything that the
/// new one refers to is durable, and the copy at the beginning is intact (`Blocks::mend_copy`).
///
/// First, unused space before the footer becomes zeros. Of two footers of one image the one at the end counts. So that
/// is written first, then the copy at the beginning, each with an `fdatasync`. An image with footers of two identities
/// is refused. So when a file gets another identity, its end becomes zeros before that, and the copy counts for a
/// while. On a device only the end counts: an image that gets another identity is invalid until all is done.
///
/// A file is cut off after its footer when that, or the zeros, are durable: its last sector is never anything else.
pub(super) async fn replace_footers(
    port: &Port,
    commits: &Commits,
    raw: &Raw,
    old: &Footer,
    footer: &Footer,
    end: End,
) -> io::Result<()> {
    let (io, file) = (&port.io, port.files[0]);
    clear_before_footer(port, commits, raw, end).await?;
    let at = if raw.is_file() { end.footer } else { last_sector(raw)? };
    let (new, none) = (footer.bytes(), [0; SECTOR as usize]);
    let steps: &[(u64, &[u8])] = match old.uuid == footer.uuid {
        true => &[(at, &new), (0, &new)],
        false => &[(at, &none), (0, &new), (at, &new)],
    };
    for (number, step) in steps.iter().enumerate() {
        write_bytes(port, file, &[*step]).await?;
        commits.sync(port).await?;
        if number == 0 && raw.is_file() {
            io.set_len(file, at + SECTOR).await?;
            commits.sync(port).await?;
        }
    }
    Ok(())
}
