//! Reads and writes metadata of the file, through a thread's port.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::task::Poll;

use ferrite_disk_base::{Port, Raw};
use ferrite_io::engine::FileId;

/// Bytes of the arena that one batch of operations uses.
const BATCH_BYTES: usize = 64 << 10;
/// Bytes of one operation of a longer transfer.
const PART_BYTES: usize = 32 << 10;

/// Writes a piece for each item, many at the same time. `piece` appends its bytes, at most 64 KiB, and returns its byte
/// offset in the file.
///
/// # Errors
/// The first error. Nothing is in flight any more then; other pieces may have been written.
pub(super) async fn write_pieces<T>(
    port: &Port,
    file: FileId,
    items: impl Iterator<Item = T>,
    piece: impl Fn(T, &mut Vec<u8>) -> u64,
) -> io::Result<()> {
    let mut items = items.peekable();
    let mut bytes = Vec::new();
    // Of each piece: its offset in the file, and its range of `bytes`.
    let mut places: Vec<(u64, usize, usize)> = Vec::new();
    while items.peek().is_some() || !bytes.is_empty() {
        let mut over = None;
        for item in items.by_ref() {
            let start = bytes.len();
            let offset = piece(item, &mut bytes);
            let place = (offset, start, bytes.len());
            if bytes.len() > BATCH_BYTES {
                over = Some(place);
                break;
            }
            places.push(place);
        }
        let used = over.map_or(bytes.len(), |(_, start, _)| start);
        if used > 0 {
            let memory = port.scratch.take(used).await;
            memory.copy_in(&bytes[..used]);
            let writes = places.iter().map(|(offset, start, end)| {
                let part = memory.span().slice(*start, end - start);
                port.io.write_all(file, *offset, part)
            });
            all(writes).await?;
        }
        bytes.drain(..used);
        places.clear();
        places.extend(over.map(|(offset, start, end)| (offset, 0, end - start)));
    }
    Ok(())
}

/// Waits for all of them; the first error, once all have ended.
async fn all<F: Future<Output = io::Result<()>>>(
    futures: impl Iterator<Item = F>,
) -> io::Result<()> {
    let mut running: Vec<Pin<Box<F>>> = futures.map(Box::pin).collect();
    let mut result = Ok(());
    poll_fn(|cx| {
        running.retain_mut(|future| match future.as_mut().poll(cx) {
            Poll::Pending => true,
            Poll::Ready(done) => {
                if result.is_ok() {
                    result = done;
                }
                false
            }
        });
        if running.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
}

/// Writes bytes to places of a file, a piece of any length at each.
///
/// # Errors
/// As [`write_pieces`].
pub(super) async fn write_bytes(
    port: &Port,
    file: FileId,
    pieces: &[(u64, &[u8])],
) -> io::Result<()> {
    let parts = pieces.iter().flat_map(|(offset, bytes)| {
        let offsets = (*offset..).step_by(PART_BYTES);
        offsets.zip(bytes.chunks(PART_BYTES))
    });
    write_pieces(port, file, parts, |(offset, bytes), to| {
        to.extend_from_slice(bytes);
        offset
    })
    .await
}

/// Makes a part of the medium, file 0 of the port, read as zeros; without space, if the file system has holes.
///
/// # Errors
/// Those of the kernel.
pub(super) async fn erase(port: &Port, raw: &Raw, offset: u64, len: u64) -> io::Result<()> {
    if raw.is_file() {
        match port.io.punch_hole(port.files[0], offset, len).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {}
            done => return done,
        }
    }
    write_zeros(port, raw, offset, len).await
}

/// Makes a part of the medium read as zeros, with space for it.
///
/// # Errors
/// Those of the kernel.
pub(super) async fn write_zeros(port: &Port, raw: &Raw, offset: u64, len: u64) -> io::Result<()> {
    let zeros = port.scratch.take(BATCH_BYTES).await;
    port.memory().fill(zeros.span(), 0);
    raw.write_zeroes(&port.io, &port.files, offset, len, zeros.span()).await
}

/// Copies a part of a file to another place in it; they do not overlap.
///
/// # Errors
/// Those of the kernel.
pub(super) async fn copy(
    port: &Port,
    file: FileId,
    from: u64,
    to: u64,
    len: u64,
) -> io::Result<()> {
    let memory = port.scratch.take(BATCH_BYTES).await;
    for at in (0..len).step_by(BATCH_BYTES) {
        let part = memory.span().slice(0, (len - at).min(BATCH_BYTES as u64) as usize);
        port.io.read_exact(file, from + at, part).await?;
        port.io.write_all(file, to + at, part).await?;
    }
    Ok(())
}

/// Writes the same byte over a range.
///
/// # Errors
/// As [`write_pieces`].
pub(super) async fn write_filled(
    port: &Port,
    file: FileId,
    offset: u64,
    len: u64,
    byte: u8,
) -> io::Result<()> {
    let parts = (0..len).step_by(PART_BYTES);
    write_pieces(port, file, parts, |at, to| {
        let part = (len - at).min(PART_BYTES as u64) as usize;
        to.resize(to.len() + part, byte);
        offset + at
    })
    .await
}
