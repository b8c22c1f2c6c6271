//! A whole hostile store: a valid one, of which an input changes bytes. If the input asks for it, all checksums on the
//! way there are corrected, and both copies are equal.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, OnceLock};

use ferrite_disk::Port;
use ferrite_io::arena::Arena;
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::{MIN_REGION_BYTES, Scratch};
use ferrite_simio::SimWorld;
use ferrite_store::check::{How, check};
use ferrite_store::content::{DomainKey, checksum, checksum_on};
use ferrite_store::journal::Name;
use ferrite_store::layout::Layout;
use ferrite_store::live::{LEAST_METADATA, Live, Memory, Operation};
use ferrite_store::medium::Medium;
use ferrite_store::{BLOCK_BYTES, opening};
use tempfile::TempDir;

/// The smallest store.
const BYTES: u64 = 18 << 20;
const BLOCK: u64 = BLOCK_BYTES as u64;
const SCRATCH_BYTES: usize = 8 * MIN_REGION_BYTES;
/// The most bytes of a request.
const DATA_BYTES: usize = 16 * BLOCK_BYTES;
const MEMORY: Memory = Memory { metadata: LEAST_METADATA, index: 1 << 12 };

/// Bytes of an input for each change: the block, the place in it, the value, and the kind.
const CHANGE_BYTES: usize = 6;
const MAX_CHANGES: usize = 64;
/// The offset of the checksum in a block of the journal.
const JOURNAL_SUM_AT: usize = 60;
/// A bound above the number of pages from a superblock to content.
const DEPTH: usize = 10;

/// A place and its checksum, as in a pointer and an entry of P2M, at these bytes of the store.
struct Reference {
    at: usize,
    to: u64,
}

struct Valid {
    bytes: Vec<u8>,
    /// Blocks that are not zeros.
    used: Vec<u64>,
    references: Vec<Reference>,
    /// Pages and their copies.
    copies: Vec<(u64, u64)>,
}

fn block(bytes: &[u8], place: u64) -> &[u8] {
    &bytes[place as usize * BLOCK_BYTES..][..BLOCK_BYTES]
}

/// A port to a file, on a machine without faults.
fn port(file: File) -> io::Result<(Port, Reactor)> {
    let arena = Arena::new(SCRATCH_BYTES + DATA_BYTES)?;
    let mut reactor = Reactor::new(SimWorld::new(1).engine(arena.clone()));
    let files = [reactor.add_file(Arc::new(file.into()))?].into();
    let region = arena.span(0, SCRATCH_BYTES);
    Ok((Port { io: reactor.io(), files, scratch: Scratch::new(arena, region) }, reactor))
}

impl Valid {
    /// A store with every structure. Its last changes are in the journal.
    fn make() -> io::Result<Valid> {
        let dir = TempDir::new_in("/dev/shm")?;
        let path = dir.path().join("store");
        let file = File::options().create_new(true).read(true).write(true).open(&path)?;
        file.set_len(BYTES)?;
        let (port, mut reactor) = port(file)?;
        let layout = Layout::of(BYTES).map_err(io::Error::other)?;
        let name = |name| Name::new(name).ok_or(io::ErrorKind::InvalidInput);
        let made = async {
            opening::create(&Medium::default(), &port, &layout, [3; 16]).await?;
            let live = Live::open(&port, BYTES, MEMORY).await?;
            live.operate(&port, Operation::Domain(name("a")?, DomainKey([1; 32]))).await?;
            live.operate(&port, Operation::Domain(name("b")?, DomainKey([2; 32]))).await?;
            let first = live.operate(&port, Operation::Create(name("v")?, 9000, 0)).await?;
            let second = live.operate(&port, Operation::Create(name("w")?, 64, 1)).await?;
            let write = async |volume, block: u64, value: u8| {
                let from = port.memory().span(SCRATCH_BYTES, DATA_BYTES);
                for i in 0..DATA_BYTES / BLOCK_BYTES {
                    let content = [value, i as u8].repeat(BLOCK_BYTES / 2);
                    port.memory().copy_in(from.slice(i * BLOCK_BYTES, BLOCK_BYTES), &content);
                }
                live.write(&port, volume, block * BLOCK, from).await
            };
            write(first, 0, 1).await?;
            write(first, 504, 2).await?;
            write(second, 0, 1).await?;
            live.operate(&port, Operation::Snapshot(name("s")?, first)).await?;
            live.gc(&port).await?;
            live.checkpoint(&port).await?;
            live.operate(&port, Operation::Clone(name("c")?, first)).await?;
            write(first, 0, 3).await?;
            live.write_zeros(&port, first, 504 * BLOCK, 5000).await?;
            live.flush(&port).await
        };
        reactor.block_on(made)??;
        let bytes = std::fs::read(&path)?;
        let blocks = 0..BYTES / BLOCK;
        let used: Vec<u64> =
            blocks.filter(|place| block(&bytes, *place).iter().any(|b| *b != 0)).collect();
        let sums: std::collections::BTreeMap<u64, u32> =
            used.iter().map(|place| (*place, checksum(block(&bytes, *place)))).collect();
        let refers = |place: u64, at: usize| {
            let word =
                |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
            let at = place as usize * BLOCK_BYTES + at;
            let (to, sum) = (word(at) & ((1 << 40) - 1), word(at + 5) as u32);
            (sums.get(&to) == Some(&sum)).then_some(Reference { at, to })
        };
        let at = |place: u64| (0..BLOCK_BYTES - 16).filter_map(move |at| refers(place, at));
        let references: Vec<Reference> = used.iter().flat_map(|place| at(*place)).collect();
        let copies = used.iter().filter_map(|place| {
            let copy = layout.copy_of(*place)?;
            (block(&bytes, copy) == block(&bytes, *place)).then_some((*place, copy))
        });
        let copies = copies.collect();
        Ok(Valid { bytes, used, references, copies })
    }

    /// Changes bytes, and corrects all checksums on the way there.
    fn changed(&self, input: &[u8]) -> (Vec<u8>, BTreeSet<u64>) {
        let (mut bytes, mut changed) = (self.bytes.clone(), BTreeSet::new());
        let Some((flags, changes)) = input.split_first() else { return (bytes, changed) };
        for change in changes.chunks_exact(CHANGE_BYTES).take(MAX_CHANGES) {
            let [a, b, c, d, value, how] = change.try_into().unwrap_or_default();
            let place = self.used[usize::from(u16::from_le_bytes([a, b])) % self.used.len()];
            let at = usize::from(u16::from_le_bytes([c, d])) % BLOCK_BYTES;
            let at = place as usize * BLOCK_BYTES + at;
            bytes[at] = if how & 1 == 0 { value } else { bytes[at] ^ value };
            changed.insert(place);
        }
        if flags & 1 == 1 {
            self.seal(&mut bytes, &mut changed);
        }
        (bytes, changed)
    }

    fn seal(&self, bytes: &mut [u8], changed: &mut BTreeSet<u64>) {
        let layout = Layout::of(BYTES).expect("a store");
        for _ in 0..DEPTH {
            for reference in self.references.iter().filter(|r| changed.contains(&r.to)) {
                let sum = checksum(block(bytes, reference.to)).to_le_bytes();
                bytes[reference.at + 5..reference.at + 9].copy_from_slice(&sum);
            }
            let of_changed = self.references.iter().filter(|r| changed.contains(&r.to));
            let more: Vec<u64> = of_changed.map(|r| (r.at / BLOCK_BYTES) as u64).collect();
            changed.extend(more);
        }
        for (page, copy) in &self.copies {
            if changed.contains(page) {
                let from = *page as usize * BLOCK_BYTES;
                bytes.copy_within(from..from + BLOCK_BYTES, *copy as usize * BLOCK_BYTES);
                changed.insert(*copy);
            }
        }
        let journal = layout.journal(0)..layout.journal(0) + layout.journal_blocks;
        for place in changed.iter().filter(|place| layout.segment_of(**place).is_none()) {
            let from = *place as usize * BLOCK_BYTES;
            let block = &mut bytes[from..from + BLOCK_BYTES];
            let (sum, at) = match journal.contains(place) {
                true => (
                    checksum_on(checksum(&block[..JOURNAL_SUM_AT]), &block[JOURNAL_SUM_AT + 4..]),
                    JOURNAL_SUM_AT,
                ),
                false => (checksum(&block[..BLOCK_BYTES - 4]), BLOCK_BYTES - 4),
            };
            block[at..at + 4].copy_from_slice(&sum.to_le_bytes());
        }
    }
}

/// Checks, opens and uses the store. Data that it cannot read must be errors.
pub(crate) fn store(input: &[u8]) {
    static VALID: OnceLock<Valid> = OnceLock::new();
    let valid = VALID.get_or_init(|| Valid::make().expect("a valid store"));
    let (bytes, changed) = valid.changed(input);
    use_it(valid, &bytes, &changed).expect("the machine");
}

fn use_it(valid: &Valid, bytes: &[u8], changed: &BTreeSet<u64>) -> io::Result<()> {
    let dir = TempDir::new_in("/dev/shm")?;
    let path = dir.path().join("store");
    let file = File::options().create_new(true).read(true).write(true).open(&path)?;
    file.set_len(BYTES)?;
    let used: BTreeSet<u64> = valid.used.iter().chain(changed).copied().collect();
    for place in used {
        file.write_all_at(block(bytes, place), place * BLOCK)?;
    }
    let (port, mut reactor) = port(file)?;
    let how = How { contents: true, deep: true, ..How::default() };
    let checked = reactor.block_on(async { check(&port, BYTES, how, &|_, _| true).await })?;
    let is_sound = checked.is_ok_and(|outcome| outcome.findings.listed.is_empty());
    if changed.is_empty() {
        assert!(is_sound, "the valid store is none");
    }
    let used = reactor.block_on(async {
        let live = Live::open(&port, BYTES, MEMORY).await?;
        for volume in live.list() {
            let Some(found) = live.volume_called(&volume.name) else { continue };
            let to = port.memory().span(SCRATCH_BYTES, DATA_BYTES);
            for first in [0, 500, found.blocks.saturating_sub(16)] {
                let blocks = found.blocks.saturating_sub(first).min(16) as usize;
                if blocks > 0 {
                    let to = to.slice(0, blocks * BLOCK_BYTES);
                    let _ = live.read(&port, found.number, first * BLOCK, to).await;
                    let _ = live.write(&port, found.number, first * BLOCK, to).await;
                }
            }
        }
        live.gc(&port).await?;
        live.close(&port).await
    })?;
    // A store without findings can be used.
    assert!(used.is_ok() || !is_sound, "{used:?}");
    Ok(())
}
