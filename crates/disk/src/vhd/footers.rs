//! Replacing an image's footers so that there is one whole image at any moment.

use std::io;

use super::format::SECTOR;
use super::format::footer::{Footer, Kind};
use super::pieces::write_bytes;
use crate::{Port, Raw};

/// Replaces the footers of the image in `raw`, which is file `file` of the port. Everything that
/// the new one refers to is durable. `end`: where the last part ends that is used.
///
/// Two footers of different images are refused by whoever opens the image, so a dynamic one has
/// only the copy at the beginning for a while:
/// 1. the footer at the end is taken away (a file is cut off there); `fdatasync`,
/// 2. the copy at the beginning, one sector, becomes the new one; `fdatasync`,
/// 3. the new one is written at the end; `fdatasync`.
pub(super) async fn replace_footers(
    port: &Port,
    index: usize,
    raw: &Raw,
    footer: &Footer,
    end: u64,
) -> io::Result<()> {
    let (io, file) = (&port.io, port.files[index]);
    let bytes = footer.bytes();
    if footer.kind == Kind::Fixed {
        // Its only one: a single sector.
        let at = if raw.is_file() { end } else { raw.bytes_now()? / SECTOR * SECTOR - SECTOR };
        write_bytes(port, file, &[(at, &bytes)]).await?;
        return io.sync(file).await;
    }
    let at = match raw.is_file() {
        true => {
            io.set_len(file, end).await?;
            end
        }
        false => {
            let at = raw.bytes_now()? / SECTOR * SECTOR - SECTOR;
            write_bytes(port, file, &[(at, &[0; SECTOR as usize])]).await?;
            at
        }
    };
    io.sync(file).await?;
    write_bytes(port, file, &[(0, &bytes)]).await?;
    io.sync(file).await?;
    write_bytes(port, file, &[(at, &bytes)]).await?;
    io.sync(file).await
}
