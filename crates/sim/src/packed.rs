//! Compressed clusters in qcow2 images: other programs make them, and ours only read and replace them.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use ferrite_host::clock::{Random, SplitMix64};
use flate2::Compression;
use flate2::write::DeflateEncoder;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
/// Bits 9 to 55.
const PLACE: u64 = 0x00FF_FFFF_FFFF_FE00;

struct Image {
    file: File,
    cluster_bits: u32,
    reftable: u64,
}

/// A cluster that compressed data fill partly: the first free byte.
struct Half {
    cluster: u64,
    end: u64,
}

/// Compresses about half of an image's clusters, in place. Two may then share one host cluster, and the other becomes
/// free. The image is not open, and all durable.
pub(crate) fn pack(path: &Path, random: &mut SplitMix64) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let mut head = [0; 104];
    file.read_exact_at(&mut head, 0)?;
    let word = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().unwrap_or_default());
    let (cluster_bits, l1_entries) = (word(20) >> 32, word(36) >> 32);
    let order = word(96) >> 32;
    let image = Image { file, cluster_bits: cluster_bits as u32, reftable: word(48) };
    let mut half = None;
    for i in 0..l1_entries {
        let l1 = image.word(word(40) + i * 8)?;
        if l1 & COPIED == 0 {
            continue;
        }
        for at in (0..1u64 << cluster_bits).step_by(8) {
            let at = (l1 & PLACE) + at;
            let entry = image.word(at)?;
            let own = entry & !PLACE == COPIED;
            // Images here have refcounts of 16 bits.
            if own && order == 4 && random.below(2) == 0 {
                image.pack_one(at, entry & PLACE, &mut half)?;
            }
        }
    }
    Ok(())
}

impl Image {
    fn word(&self, at: u64) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(u64::from_be_bytes(bytes))
    }

    /// Compresses the cluster at `host`, whose entry is at `entry_at`.
    fn pack_one(&self, entry_at: u64, host: u64, half: &mut Option<Half>) -> io::Result<()> {
        let size = 1usize << self.cluster_bits;
        let mut bytes = vec![0; size];
        self.file.read_exact_at(&mut bytes, host)?;
        let mut packer = DeflateEncoder::new(Vec::new(), Compression::fast());
        packer.write_all(&bytes)?;
        let packed = packer.finish()?;
        if packed.len() >= size {
            return Ok(());
        }
        let len = packed.len() as u64;
        let place = match half.take() {
            Some(Half { cluster, end }) if end + len <= cluster + size as u64 => {
                self.add_to_count(cluster, 1)?;
                self.add_to_count(host, -1)?;
                end
            }
            _ => {
                *half = Some(Half { cluster: host, end: host + len });
                host
            }
        };
        self.file.write_all_at(&packed, place)?;
        let sectors = (place + len - 1) / 512 - place / 512;
        let entry = COMPRESSED | sectors << (62 - (self.cluster_bits - 8)) | place;
        self.file.write_all_at(&entry.to_be_bytes(), entry_at)
    }

    fn add_to_count(&self, host: u64, change: i16) -> io::Result<()> {
        let cluster = host >> self.cluster_bits;
        let per_block = 1u64 << (self.cluster_bits - 1);
        let block = self.word(self.reftable + cluster / per_block * 8)?;
        let at = block + cluster % per_block * 2;
        let mut count = [0; 2];
        self.file.read_exact_at(&mut count, at)?;
        let count = i16::from_be_bytes(count) + change;
        self.file.write_all_at(&count.to_be_bytes(), at)
    }
}
