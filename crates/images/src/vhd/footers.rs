//! Replacing an image's footers so that there is one whole image at any moment.

use std::io;

use ferrite_disk_base::{Commits, Port, Raw};

use super::format::SECTOR;
use super::format::footer::Footer;
use super::pieces::{erase, write_bytes};

/// Where a file ends, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    /// Of the last part that is used.
    pub(super) used: u64,
    /// Where the footer belongs: there, or further on (see `Layout::footer_at`).
    pub(super) footer: u64,
}

/// Byte offset of a medium's last sector, where the footer of a device stands.
///
/// # Errors
/// The kernel does not say how large it is.
pub(super) fn last_sector(raw: &Raw) -> io::Result<u64> {
    Ok((raw.bytes_now()? / SECTOR * SECTOR).saturating_sub(SECTOR))
}

/// Makes zeros, durable, of what is before the place of a file's footer and is not used: the footer
/// that an image had before it grew, a table that was moved, what a process wrote that died. QEMU
/// puts its first block there, says that it is wholly present, and writes only what its guest did.
/// The copy of the footer is whole, since the one at the end may lie there.
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

/// Replaces the footers of the dynamic or differencing image in `raw`, which is file 0 of the port.
/// Everything that the new one refers to is durable, and the copy at the beginning is whole
/// (`Blocks::mend_copy`).
///
/// First what is before the footer and not used becomes zeros. Of two footers of one image that at the end counts, so that is written first, then the copy at
/// the beginning, each with an `fdatasync`. Two footers of different images are refused by whoever
/// opens the image; so when a file gets another identity, zeros come to the end before that, and
/// the copy counts for a while. On a device nothing but the end counts: there an image with
/// another identity is none until all is done.
///
/// A file is cut off behind its footer when that, or the zeros, are durable: its last sector is
/// never anything else.
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
