//! Reads and writes metadata: private copies, through the port's scratch memory.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::task::Poll;

use ferrite_disk_base::{Port, Raw};
use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;
use ferrite_io::scratch::MAX_PIECE_BYTES;

/// Retries of an operation in a row.
const RETRIES: u32 = 16;

/// How often something is prepared that other tasks use up meanwhile, before that is an error.
pub(in crate::qcow2) const TRIES: u32 = 64;

/// Bytes of a table that are read at once.
pub(in crate::qcow2) const TABLE_PIECE: u64 = 1 << 20;

/// Reads bytes; past the end of the file there are zeros. Offset and length are multiples of 512.
///
/// Memory for the bytes is held only together with scratch memory to read them through. That bounds the number of
/// concurrent callers, and so the memory of compressed clusters of megabytes when a guest requests as many at once as
/// it can (threats.md T17).
/// as many at once as it can (threats.md T17).
pub(in crate::qcow2) async fn read(
    port: &Port,
    file: FileId,
    offset: u64,
    len: usize,
) -> io::Result<Vec<u8>> {
    if len == 0 {
        return Ok(Vec::new());
    }
    let piece = port.scratch.take(len.min(MAX_PIECE_BYTES)).await;
    let mut bytes = vec![0; len];
    let mut at = 0;
    while at < len {
        let part = (len - at).min(MAX_PIECE_BYTES);
        let got = read_part(port, file, offset + at as u64, piece.span().slice(0, part)).await?;
        port.memory().copy_out(piece.span().slice(0, got), &mut bytes[at..at + got]);
        if got < part {
            break;
        }
        at += part;
    }
    Ok(bytes)
}

/// Fills a span, or as much of it as the file has; the bytes read.
pub(in crate::qcow2) async fn read_part(
    port: &Port,
    file: FileId,
    offset: u64,
    span: Span,
) -> io::Result<usize> {
    let (mut got, mut retries) = (0, 0);
    while got < span.len() {
        let rest = span.slice(got, span.len() - got);
        match port.io.read(file, offset + got as u64, rest).await {
            Ok(0) => break,
            Ok(n) => got += (n as usize).min(rest.len()),
            Err(e) if is_temporary(&e) && retries < RETRIES => retries += 1,
            Err(e) => return Err(e),
        }
    }
    Ok(got)
}

/// Writes all of `bytes`.
pub(in crate::qcow2) async fn write(
    port: &Port,
    file: FileId,
    offset: u64,
    bytes: &[u8],
) -> io::Result<()> {
    for (i, part) in bytes.chunks(MAX_PIECE_BYTES).enumerate() {
        let piece = port.scratch.take(part.len()).await;
        piece.copy_in(part);
        let at = offset + (i * MAX_PIECE_BYTES) as u64;
        port.io.write_all(file, at, piece.span()).await?;
    }
    Ok(())
}

/// Writes zeros.
pub(in crate::qcow2) async fn write_zeros(
    port: &Port,
    file: FileId,
    offset: u64,
    len: u64,
) -> io::Result<()> {
    let piece = port.scratch.take(len.min(MAX_PIECE_BYTES as u64) as usize).await;
    port.memory().fill(piece.span(), 0);
    let mut done = 0;
    while done < len {
        let part = (len - done).min(piece.span().len() as u64);
        port.io.write_all(file, offset + done, piece.span().slice(0, part as usize)).await?;
        done += part;
    }
    Ok(())
}

/// Writes blocks of one size, a piece of scratch memory full of them at once. `bytes` gives a block's content when it
/// is written.
pub(in crate::qcow2) async fn write_blocks(
    port: &Port,
    file: FileId,
    block_bytes: usize,
    offsets: &[u64],
    mut bytes: impl FnMut(usize, &mut [u8]),
) -> io::Result<()> {
    let per_piece = MAX_PIECE_BYTES / block_bytes;
    let mut block = vec![0; block_bytes];
    for (chunk, offsets) in offsets.chunks(per_piece).enumerate() {
        let piece = port.scratch.take(offsets.len() * block_bytes).await;
        let span = |i: usize| piece.span().slice(i * block_bytes, block_bytes);
        for i in 0..offsets.len() {
            bytes(chunk * per_piece + i, &mut block);
            port.memory().copy_in(span(i), &block);
        }
        let write = |(i, offset): (usize, &u64)| {
            let write: Step<'_> = Box::pin(port.io.write_all(file, *offset, span(i)));
            write
        };
        all(offsets.iter().enumerate().map(write).collect()).await?;
    }
    Ok(())
}

type Step<'a> = Pin<Box<dyn Future<Output = io::Result<()>> + 'a>>;

/// Waits for all steps, also after failures; the first error.
async fn all(mut steps: Vec<Step<'_>>) -> io::Result<()> {
    let mut result = Ok(());
    poll_fn(|cx| {
        steps.retain_mut(|step| match step.as_mut().poll(cx) {
            Poll::Pending => true,
            Poll::Ready(done) => {
                if result.is_ok() {
                    result = done;
                }
                false
            }
        });
        if steps.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
}

/// Syncs: all earlier writes are on the medium.
pub(in crate::qcow2) async fn sync(port: &Port) -> io::Result<()> {
    port.io.sync(port.files[0]).await
}

/// Reads metadata while nothing else runs; past the end of the file there are zeros.
pub(in crate::qcow2) fn read_whole(medium: &Raw, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = medium.read_now(offset, len)?;
    bytes.resize(len, 0);
    Ok(bytes)
}

/// The error if each prepared resource is used up by others at once.
pub(in crate::qcow2) fn out_of_memory() -> io::Error {
    let text = "qcow2 image: its metadata does not fit into the memory for it";
    io::Error::new(io::ErrorKind::OutOfMemory, text)
}

/// An error of the image's contents, with the reason.
pub(in crate::qcow2) fn damaged(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("qcow2 image: {}", why.into()))
}

fn is_temporary(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock)
}
