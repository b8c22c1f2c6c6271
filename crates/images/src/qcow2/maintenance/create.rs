//! Makes images. The order of writes: all tables, `fdatasync`, the header, `fdatasync`. Without its header, which
//! begins with one sector, a file is no image. So at any moment there is either no image or a complete one.

use std::io;
use std::path::Path;

use ferrite_disk_base::{DiskError, ErrorKind, Format, Port, Raw, SECTOR_BYTES};

use crate::qcow2::format::header::{
    Backing, EXTENDED_L2, Header, MAX_DISK_BYTES, MAX_L1_BYTES, MAX_REFTABLE_BYTES,
    MIN_EXTENDED_BITS,
};
use crate::qcow2::format::refcount;
use crate::qcow2::format::unpack::Compression;
use crate::qcow2::tables::meta;

/// The properties of a new image.
#[derive(Clone, Debug)]
pub struct NewImage {
    /// The size of its disk in bytes: whole sectors, up to 64 TiB.
    pub bytes: u64,
    /// The image below it: its name relative to the new image's folder, and its format.
    pub backing: Option<(String, Format)>,
    /// 2 or 3.
    pub version: u32,
    /// Bytes of a cluster: a power of 2 from 512 to 2 MiB.
    pub cluster_bytes: u32,
    /// Bits of a refcount: a power of 2 up to 64; 16 in version 2.
    pub refcount_bits: u32,
    /// L2 entries with a bitmap of subclusters: version 3, and clusters of 16 KiB at least.
    pub extended_l2: bool,
    /// Room in the tables for a disk of so many bytes, so that growing to that size moves no table; 0: none.
    pub room_for_bytes: u64,
}

impl NewImage {
    /// Version 3 with clusters of 64 KiB.
    pub fn new(bytes: u64) -> NewImage {
        NewImage {
            bytes,
            backing: None,
            version: 3,
            cluster_bytes: 64 << 10,
            refcount_bits: 16,
            extended_l2: false,
            room_for_bytes: 0,
        }
    }

    /// Checks the options for the image at `path`, before anything is made.
    ///
    /// # Errors
    /// The options contradict each other.
    pub fn check(&self, path: &Path) -> Result<(), DiskError> {
        Plan::new(self).map(drop).map_err(|why| refused(path, why))
    }

    /// Makes the image in `raw`, a new, empty file or a block device, which is file 0 of `port`. Data on a device are
    /// lost.
    ///
    /// # Errors
    /// The options contradict each other, or do not fit the medium: nothing was written then. Those of the kernel:
    /// there is no image.
    pub async fn create(&self, port: &Port, raw: &Raw) -> Result<(), DiskError> {
        let failed = |e: io::Error| {
            let help = "check the space on the medium and the kernel's log (dmesg)";
            let what = cannot(raw.path());
            DiskError::new(ErrorKind::Io, what, e.to_string(), help).with_source(e)
        };
        let refused = |why: String| refused(raw.path(), why);
        let medium_bytes = raw.bytes_now().map_err(failed)?;
        let plan = Plan::new(self).map_err(refused)?;
        if raw.is_file() && medium_bytes > 0 {
            return Err(refused("the file is not empty".into()));
        }
        if !raw.is_file() && medium_bytes < plan.end {
            let needed = plan.end;
            let why = format!("the device has {medium_bytes} bytes, and {needed} are needed");
            return Err(refused(why));
        }
        plan.write(port, raw).await.map_err(failed)
    }
}

/// The places of everything that is written. The refcount table is after the header, then come blocks and L1.
struct Plan {
    header: Header,
    head: Vec<u8>,
    blocks: u64,
    /// Bytes of the new image.
    end: u64,
}

impl Plan {
    fn new(new: &NewImage) -> Result<Plan, String> {
        let mut header = new.header()?;
        let bits = header.cluster_bits;
        let entries = header.block_entries();
        let disk = new.bytes.max(new.room_for_bytes);
        let guest = disk.div_ceil(header.cluster_bytes());
        let tables = guest.div_ceil(header.l2_entries());
        let l1_clusters = (tables * 8).div_ceil(header.cluster_bytes());
        // Everything that a full disk has, except refcounts; with a generous margin for their own clusters.
        let all = guest + tables + l1_clusters + 1;
        let all_blocks = all.div_ceil(entries) + all.div_ceil(entries).div_ceil(entries / 2) + 1;
        let reftable = (all_blocks * 8).div_ceil(header.cluster_bytes());
        let reftable = reftable.clamp(1, (MAX_REFTABLE_BYTES >> bits).max(1));
        let mut blocks = 1;
        while blocks * entries < 1 + reftable + blocks + l1_clusters {
            blocks += 1;
        }
        if blocks > reftable * (header.cluster_bytes() / 8) {
            return Err("the clusters are too small for the tables of such a disk".into());
        }
        header.l1_entries = u32::try_from(tables).map_err(|e| e.to_string())?;
        header.reftable_offset = 1 << bits;
        header.reftable_clusters = reftable as u32;
        header.l1_offset = (1 + reftable + blocks) << bits;
        let head =
            header.encode().ok_or("the name of the backing file is too long for a cluster")?;
        Ok(Plan { header, head, blocks, end: (1 + reftable + blocks + l1_clusters) << bits })
    }

    async fn write(&self, port: &Port, raw: &Raw) -> io::Result<()> {
        let (file, bits) = (port.files[0], self.header.cluster_bits);
        let order = self.header.refcount_order;
        if raw.is_file() {
            port.io.set_len(file, self.end).await?;
        } else {
            meta::write_zeros(port, file, 0, self.end).await?;
        }
        let first = 1 + u64::from(self.header.reftable_clusters);
        let table: Vec<u8> =
            (0..self.blocks).flat_map(|i| ((first + i) << bits).to_be_bytes()).collect();
        let table = whole_sectors(table);
        meta::write(port, file, self.header.reftable_offset, &table).await?;
        let (used, entries) = (self.end >> bits, self.header.block_entries());
        for i in 0..self.blocks {
            let count = (used - i * entries).min(entries) as usize;
            let mut block = vec![0; 1 << bits];
            (0..count).for_each(|c| refcount::set(&mut block, order, c, 1));
            meta::write(port, file, (first + i) << bits, &block).await?;
        }
        meta::sync(port).await?;
        meta::write(port, file, 0, &whole_sectors(self.head.clone())).await?;
        meta::sync(port).await
    }
}

impl NewImage {
    fn header(&self) -> Result<Header, String> {
        let (bytes, cluster) = (self.bytes, self.cluster_bytes);
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) || bytes > MAX_DISK_BYTES {
            return Err(format!("a disk of {bytes} bytes"));
        }
        if !cluster.is_power_of_two() || !(512..=2 << 20).contains(&cluster) {
            return Err(format!("clusters of {cluster} bytes"));
        }
        if !self.refcount_bits.is_power_of_two() || self.refcount_bits > 64 {
            return Err(format!("refcounts of {} bits", self.refcount_bits));
        }
        if !(2..=3).contains(&self.version) || (self.version == 2 && self.refcount_bits != 16) {
            let (version, bits) = (self.version, self.refcount_bits);
            return Err(format!("version {version} with refcounts of {bits} bits"));
        }
        let least = 1 << MIN_EXTENDED_BITS;
        if self.extended_l2 && (self.version < 3 || cluster < least) {
            let version = self.version;
            let why =
                format!("extended L2 entries in version {version}, clusters of {cluster} bytes");
            return Err(why);
        }
        let entry_bytes = if self.extended_l2 { 16 } else { 8 };
        let room = bytes.max(self.room_for_bytes).min(MAX_DISK_BYTES);
        let tables = room.div_ceil(u64::from(cluster)).div_ceil(u64::from(cluster) / entry_bytes);
        let l1_bytes = tables * 8;
        if l1_bytes > MAX_L1_BYTES {
            return Err(format!("clusters of {cluster} bytes are too small for {room} bytes"));
        }
        let format = |format: &Format| match format {
            Format::Vhd => "vpc".to_owned(),
            other => other.name().to_owned(),
        };
        let backing = self.backing.as_ref();
        let backing =
            backing.map(|(name, f)| Backing { name: name.clone(), format: Some(format(f)) });
        if backing.as_ref().is_some_and(|b| !(1..=1023).contains(&b.name.len())) {
            return Err("a backing file's name has 1 to 1023 bytes".into());
        }
        Ok(Header {
            version: self.version,
            cluster_bits: cluster.trailing_zeros(),
            disk_bytes: bytes,
            l1_entries: 0,
            l1_offset: 0,
            reftable_offset: 0,
            reftable_clusters: 0,
            snapshots: 0,
            snapshots_offset: 0,
            incompatible: if self.extended_l2 { EXTENDED_L2 } else { 0 },
            compatible: 0,
            autoclear: 0,
            refcount_order: self.refcount_bits.trailing_zeros(),
            compression: Compression::Deflate,
            backing,
            extensions: Vec::new(),
        })
    }
}

fn whole_sectors(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(SECTOR_BYTES as usize), 0);
    bytes
}

fn refused(path: &Path, why: String) -> DiskError {
    let help =
        "sizes are whole sectors of 512 bytes, up to 64 TiB; clusters have 512 bytes to 2 MiB";
    DiskError::new(ErrorKind::Usage, cannot(path), why, help)
}

fn cannot(path: &Path) -> String {
    format!("cannot create the qcow2 image {}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_make_no_sense_are_refused() {
        let good = NewImage::new(1 << 30);
        assert!(Plan::new(&good).is_ok());
        for bad in [
            NewImage::new(0),
            NewImage::new(513),
            NewImage::new(MAX_DISK_BYTES + 512),
            NewImage { cluster_bytes: 256, ..good.clone() },
            NewImage { cluster_bytes: 3 << 9, ..good.clone() },
            NewImage { cluster_bytes: 4 << 20, ..good.clone() },
            NewImage { refcount_bits: 3, ..good.clone() },
            NewImage { refcount_bits: 128, ..good.clone() },
            NewImage { version: 4, ..good.clone() },
            NewImage { version: 2, refcount_bits: 8, ..good.clone() },
            NewImage { version: 2, extended_l2: true, ..good.clone() },
            NewImage { cluster_bytes: 8 << 10, extended_l2: true, ..good.clone() },
            NewImage { cluster_bytes: 512, bytes: 1 << 40, ..good.clone() },
            NewImage { backing: Some(("a".repeat(1024), Format::Raw)), ..good.clone() },
            NewImage {
                backing: Some(("a".repeat(600), Format::Raw)),
                cluster_bytes: 512,
                ..good.clone()
            },
        ] {
            assert!(Plan::new(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_is_planned_is_a_header_that_is_accepted() {
        for bits in 9..=21 {
            for (refcount_bits, extended) in [(1, false), (8, true), (64, true)] {
                let bytes = (1u64 << 40).min(1 << (3 * bits + 5).min(46)).min(100 << 30);
                let extended_l2 = extended && bits >= MIN_EXTENDED_BITS;
                let cluster_bytes = 1 << bits;
                let new =
                    NewImage { cluster_bytes, refcount_bits, extended_l2, ..NewImage::new(bytes) };
                let plan = Plan::new(&new).unwrap_or_else(|e| panic!("{new:?}: {e}"));
                let mut head = plan.head.clone();
                head.resize(4096, 0);
                let parsed = Header::parse(&head, plan.end).unwrap();
                assert_eq!(parsed, plan.header);
            }
        }
    }
}
