//! qcow2, by QEMU's `docs/interop/qcow2.txt`.
//!
//! All images of [`Image::build`] have the same layout, one cluster for each structure except long tables: header,
//! refcount table, refcount block, L1 table, L2 table, then data.

use super::Sketch;

/// Bit 63 of L1 and L2 entries: the cluster is used once.
pub const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry.
pub const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of an L2 entry: reads as zeros.
pub const ZERO: u64 = 1;

/// Fields of the header, by their offsets.
pub mod field {
    #![allow(missing_docs)] // each is named as in the specification
    pub const VERSION: u64 = 4;
    pub const BACKING_AT: u64 = 8;
    pub const BACKING_BYTES: u64 = 16;
    pub const CLUSTER_BITS: u64 = 20;
    pub const SIZE: u64 = 24;
    pub const CRYPT: u64 = 32;
    pub const L1_ENTRIES: u64 = 36;
    pub const L1_AT: u64 = 40;
    pub const REFTABLE_AT: u64 = 48;
    pub const REFTABLE_CLUSTERS: u64 = 56;
    pub const SNAPSHOTS: u64 = 60;
    pub const SNAPSHOTS_AT: u64 = 64;
    pub const INCOMPATIBLE: u64 = 72;
    pub const REFCOUNT_ORDER: u64 = 96;
    pub const HEADER_BYTES: u64 = 100;
}

/// The parts of an image.
#[derive(Clone, Debug)]
pub struct Image {
    /// 2 or 3.
    pub version: u32,
    /// Clusters of `1 << cluster_bits` bytes.
    pub cluster_bits: u32,
    /// Bytes of the disk; at most those of one L2 table.
    pub disk_bytes: u64,
    /// Allocated guest clusters, full of their number.
    pub present: Vec<u64>,
    /// Guest clusters that read as zeros.
    pub zeros: Vec<u64>,
    /// Path and format of the backing file.
    pub backing: Option<(String, Option<String>)>,
}

/// A small disk, with the smallest clusters: a file of a few KiB has every structure.
pub fn small() -> Image {
    Image {
        version: 3,
        cluster_bits: 9,
        disk_bytes: 16 << 10,
        present: vec![0, 5],
        zeros: vec![7],
        backing: None,
    }
}

impl Image {
    /// Bytes of a cluster.
    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The offset of the refcount table.
    pub fn reftable_at(&self) -> u64 {
        self.cluster()
    }

    /// The offset of the only refcount block.
    pub fn refblock_at(&self) -> u64 {
        2 * self.cluster()
    }

    /// The offset of the L1 table.
    pub fn l1_at(&self) -> u64 {
        3 * self.cluster()
    }

    /// The offset of the only L2 table.
    pub fn l2_at(&self) -> u64 {
        4 * self.cluster()
    }

    /// The offset of data.
    pub fn data_at(&self) -> u64 {
        5 * self.cluster()
    }

    /// Builds the image.
    pub fn build(&self) -> Sketch {
        let mut out = Sketch::new(self.data_at() + self.present.len() as u64 * self.cluster());
        self.put_header(&mut out);
        out.put_u64(self.reftable_at(), self.refblock_at());
        for cluster in 0..out.bytes() / self.cluster() {
            out.put(self.refblock_at() + 2 * cluster, &1u16.to_be_bytes());
        }
        out.put_u64(self.l1_at(), self.l2_at() | COPIED);
        for (i, guest) in self.present.iter().enumerate() {
            let at = self.data_at() + i as u64 * self.cluster();
            out.put_u64(self.l2_at() + 8 * guest, at | COPIED);
            out.put(at, &vec![*guest as u8 + 1; self.cluster() as usize]);
        }
        for guest in &self.zeros {
            out.put_u64(self.l2_at() + 8 * guest, ZERO);
        }
        out
    }

    fn put_header(&self, out: &mut Sketch) {
        out.put(0, b"QFI\xFB").put_u32(field::VERSION, self.version);
        out.put_u32(field::CLUSTER_BITS, self.cluster_bits).put_u64(field::SIZE, self.disk_bytes);
        out.put_u32(field::L1_ENTRIES, 1).put_u64(field::L1_AT, self.l1_at());
        out.put_u64(field::REFTABLE_AT, self.reftable_at()).put_u32(field::REFTABLE_CLUSTERS, 1);
        let mut end = 72;
        if self.version >= 3 {
            out.put_u32(field::REFCOUNT_ORDER, 4).put_u32(field::HEADER_BYTES, 104);
            end = 104;
        }
        let Some((path, format)) = &self.backing else { return };
        if let Some(format) = format {
            extension(out, &mut end, 0xE279_2ACA, format.as_bytes());
        }
        extension(out, &mut end, 0, &[]);
        out.put_u64(field::BACKING_AT, end).put_u32(field::BACKING_BYTES, path.len() as u32);
        out.put(end, path.as_bytes());
    }
}

/// Writes a header extension at `end`, and advances `end`.
fn extension(out: &mut Sketch, end: &mut u64, kind: u32, data: &[u8]) {
    out.put_u32(*end, kind).put_u32(*end + 4, data.len() as u32).put(*end + 8, data);
    *end += 8 + (data.len() as u64).next_multiple_of(8);
}
