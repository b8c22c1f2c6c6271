//! VHD, by Microsoft's "Virtual Hard Disk Image Format Specification" 1.0.

use super::Sketch;

/// Bytes of a footer.
pub const FOOTER_BYTES: u64 = 512;
/// Bytes of the header of a dynamic disk, which follows the footer's copy here.
pub const HEADER_BYTES: u64 = 1024;
/// The offset of the block table of [`Dynamic`].
pub const TABLE_AT: u64 = FOOTER_BYTES + HEADER_BYTES;
/// The table entry of an unallocated block.
pub const UNUSED: u32 = u32::MAX;

/// "Disk type" of the footer.
pub const FIXED: u32 = 2;
/// See [`FIXED`].
pub const DYNAMIC: u32 = 3;
/// See [`FIXED`].
pub const DIFFERENCING: u32 = 4;

/// A footer or dynamic header: the range and the place of its checksum.
#[derive(Clone, Copy, Debug)]
pub enum Sealed {
    /// 512 bytes.
    Footer,
    /// 1024 bytes.
    Header,
}

impl Sealed {
    fn shape(self) -> (usize, usize) {
        match self {
            Sealed::Footer => (512, 64),
            Sealed::Header => (1024, 36),
        }
    }

    /// Bytes of it.
    pub fn bytes(self) -> usize {
        self.shape().0
    }

    /// Corrects the checksum: the complement of the sum of all other bytes.
    ///
    /// # Panics
    /// If the bytes are fewer than the structure's.
    pub fn seal(self, structure: &mut [u8]) {
        let (len, at) = self.shape();
        structure[at..at + 4].fill(0);
        let sum = structure[..len].iter().fold(0u32, |sum, b| sum.wrapping_add(u32::from(*b)));
        structure[at..at + 4].copy_from_slice(&(!sum).to_be_bytes());
    }

    /// Changes bytes of a structure of a file, and corrects the checksum.
    pub fn forge(self, file: &mut Sketch, structure_at: u64, field: usize, value: &[u8]) {
        let mut bytes = file.get(structure_at, self.bytes());
        bytes[field..field + value.len()].copy_from_slice(value);
        self.seal(&mut bytes);
        file.put(structure_at, &bytes);
    }
}

/// A footer. Its creator is one whose `current_size` all programs use.
pub fn footer(disk_type: u32, disk_bytes: u64, uuid: [u8; 16]) -> Vec<u8> {
    let mut out = vec![0; FOOTER_BYTES as usize];
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"conectix");
    put(8, &2u32.to_be_bytes());
    put(12, &0x0001_0000u32.to_be_bytes());
    let data_at = if disk_type == FIXED { u64::MAX } else { FOOTER_BYTES };
    put(16, &data_at.to_be_bytes());
    put(28, b"win ");
    put(32, &0x000A_0000u32.to_be_bytes());
    put(36, b"Wi2k");
    put(40, &disk_bytes.to_be_bytes());
    put(48, &disk_bytes.to_be_bytes());
    put(56, &[0, 1, 4, 17]);
    put(60, &disk_type.to_be_bytes());
    put(68, &uuid);
    Sealed::Footer.seal(&mut out);
    out
}

/// The header of a dynamic disk without a parent.
pub fn header(table_at: u64, entries: u32, block_bytes: u32) -> Vec<u8> {
    let mut out = vec![0; HEADER_BYTES as usize];
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"cxsparse");
    put(8, &u64::MAX.to_be_bytes());
    put(16, &table_at.to_be_bytes());
    put(24, &0x0001_0000u32.to_be_bytes());
    put(28, &entries.to_be_bytes());
    put(32, &block_bytes.to_be_bytes());
    Sealed::Header.seal(&mut out);
    out
}

/// The parts of a dynamic disk.
#[derive(Clone, Debug)]
pub struct Dynamic {
    /// The identity.
    pub uuid: [u8; 16],
    /// Bytes of the disk.
    pub disk_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// Allocated blocks, with all sectors present and full of the block's number.
    pub present: Vec<u32>,
    /// The parent.
    pub parent: Option<Parent>,
}

/// A parent as named in its child.
#[derive(Clone, Debug)]
pub struct Parent {
    /// The identity; zeros: a raw parent.
    pub uuid: [u8; 16],
    /// Platform code and text of each locator.
    pub locators: Vec<([u8; 4], Vec<u8>)>,
}

impl Parent {
    /// With one locator, a path relative to the child's directory.
    pub fn beside(uuid: [u8; 16], name: &str) -> Parent {
        Parent { uuid, locators: vec![(*b"W2ru", utf16(&format!(".\\{name}")))] }
    }

    /// With one locator, a URL as libvhd writes it.
    pub fn url(uuid: [u8; 16], path: &str) -> Parent {
        Parent { uuid, locators: vec![(*b"MacX", format!("file://{path}").into_bytes())] }
    }
}

/// Little-endian, as in Windows.
pub fn utf16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

/// A small disk: 64 KiB, in blocks of 4 KiB, so that a file of a few KiB has every structure.
pub fn small() -> Dynamic {
    Dynamic {
        uuid: [7; 16],
        disk_bytes: 64 << 10,
        block_bytes: 4096,
        present: vec![0, 5],
        parent: None,
    }
}

impl Dynamic {
    /// Entries of the table.
    pub fn entries(&self) -> u32 {
        self.disk_bytes.div_ceil(u64::from(self.block_bytes)) as u32
    }

    /// Bytes that a block takes in the file.
    pub fn stride(&self) -> u64 {
        self.bitmap_bytes() + u64::from(self.block_bytes)
    }

    fn bitmap_bytes(&self) -> u64 {
        u64::from(self.block_bytes).div_ceil(512 * 8).next_multiple_of(512)
    }

    fn table_bytes(&self) -> u64 {
        (u64::from(self.entries()) * 4).next_multiple_of(512)
    }

    /// The offset of the first present block: after the table and the locators.
    pub fn blocks_at(&self) -> u64 {
        let locators = self.parent.iter().flat_map(|p| &p.locators);
        let texts: u64 = locators.map(|(_, text)| (text.len() as u64).next_multiple_of(512)).sum();
        TABLE_AT + self.table_bytes() + texts
    }

    /// Builds the image.
    pub fn build(&self) -> Sketch {
        let disk_type = if self.parent.is_some() { DIFFERENCING } else { DYNAMIC };
        let footer = footer(disk_type, self.disk_bytes, self.uuid);
        let mut out = Sketch::new(0);
        out.put(0, &footer);
        out.put(FOOTER_BYTES, &header(TABLE_AT, self.entries(), self.block_bytes));
        let mut table = vec![0xFF; self.table_bytes() as usize];
        let mut at = self.blocks_at();
        for block in &self.present {
            let entry = *block as usize * 4;
            table[entry..entry + 4].copy_from_slice(&((at / 512) as u32).to_be_bytes());
            let bitmap = u64::from(self.block_bytes).div_ceil(512 * 8) as usize;
            out.put(at, &vec![0xFF; bitmap]);
            let data = vec![*block as u8 + 1; self.block_bytes as usize];
            out.put(at + self.bitmap_bytes(), &data);
            at += self.stride();
        }
        out.put(TABLE_AT, &table);
        if let Some(parent) = &self.parent {
            self.put_parent(&mut out, parent);
        }
        out.put(at, &footer);
        out
    }

    fn put_parent(&self, out: &mut Sketch, parent: &Parent) {
        Sealed::Header.forge(out, FOOTER_BYTES, 40, &parent.uuid);
        let mut at = TABLE_AT + self.table_bytes();
        for (i, (code, text)) in parent.locators.iter().enumerate() {
            let room = (text.len() as u64).next_multiple_of(512);
            let mut locator = code.to_vec();
            locator.extend((room as u32).to_be_bytes());
            locator.extend((text.len() as u32).to_be_bytes());
            locator.extend(0u32.to_be_bytes());
            locator.extend(at.to_be_bytes());
            Sealed::Header.forge(out, FOOTER_BYTES, 576 + i * 24, &locator);
            let mut text = text.clone();
            text.resize(room as usize, 0);
            out.put(at, &text);
            at += room;
        }
    }
}

/// A fixed disk, full of one byte.
pub fn fixed(disk_bytes: u64, uuid: [u8; 16], fill: u8) -> Sketch {
    let mut out = Sketch::new(disk_bytes);
    out.put(0, &vec![fill; disk_bytes.min(4096) as usize]);
    out.put(disk_bytes, &footer(FIXED, disk_bytes, uuid));
    out
}
