//! Which parts of two disks are allocated, side by side.

use std::io;

use ferrite_disk::pieces::{What, look};

use super::compare::Side;

/// The facts of a part that are known without reading it. Two disks with the same content may differ in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Allocation {
    /// An image of the chain has data.
    Data,
    /// An image says that there are zeros, or its file has a hole.
    Zeros,
    /// No image has it.
    Nothing,
}

/// The first byte that is allocated in one disk, and not in the same way in the other.
pub(super) async fn first_difference(
    a: &Side<'_>,
    b: &Side<'_>,
    end: u64,
) -> io::Result<Option<u64>> {
    let (mut at, mut parts) = (0, [(Allocation::Nothing, 0); 2]);
    while at < end {
        for (side, part) in [a, b].into_iter().zip(&mut parts) {
            if part.1 <= at {
                *part = allocation(side, at, end).await?;
            }
        }
        let [(kind_a, end_a), (kind_b, end_b)] = parts;
        if kind_a != kind_b {
            return Ok(Some(at));
        }
        at = end_a.min(end_b);
    }
    Ok(None)
}

/// The kind of the part at `at`, and its end.
async fn allocation(side: &Side<'_>, at: u64, end: u64) -> io::Result<(Allocation, u64)> {
    let piece = look(side.disk, &side.port, at, end - at).await?;
    let kind = match (piece.what, piece.layer) {
        (What::Zeros, Some(_)) => Allocation::Zeros,
        (What::Zeros, None) => Allocation::Nothing,
        (What::Data(_) | What::Packed | What::Shared, _) => Allocation::Data,
    };
    Ok((kind, at + piece.len.max(1)))
}
