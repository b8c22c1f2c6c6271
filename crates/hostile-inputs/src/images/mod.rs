//! Images as plain bytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub mod qcow2;
pub mod vhd;

/// A file with only some nonzero parts. Later parts overwrite earlier ones.
#[derive(Clone, Debug, Default)]
pub struct Sketch {
    bytes: u64,
    parts: Vec<(u64, Vec<u8>)>,
}

impl Sketch {
    /// A file of zeros.
    pub fn new(bytes: u64) -> Sketch {
        Sketch { bytes, parts: Vec::new() }
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Cuts the file off, or extends it by zeros.
    pub fn set_bytes(&mut self, bytes: u64) {
        self.bytes = bytes;
        self.parts.retain(|(at, _)| *at < bytes);
        for (at, part) in &mut self.parts {
            part.truncate(usize::try_from(bytes - *at).unwrap_or(usize::MAX));
        }
    }

    /// Writes bytes to the file, which grows as needed.
    pub fn put(&mut self, at: u64, part: &[u8]) -> &mut Sketch {
        self.bytes = self.bytes.max(at + part.len() as u64);
        self.parts.push((at, part.to_vec()));
        self
    }

    /// Writes a big-endian number.
    pub fn put_u32(&mut self, at: u64, value: u32) -> &mut Sketch {
        self.put(at, &value.to_be_bytes())
    }

    /// Writes a big-endian number.
    pub fn put_u64(&mut self, at: u64, value: u64) -> &mut Sketch {
        self.put(at, &value.to_be_bytes())
    }

    /// Bytes of the file.
    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        let end = at + len as u64;
        for (from, part) in &self.parts {
            let (first, last) = (at.max(*from), end.min(from + part.len() as u64));
            if first < last {
                let source = &part[(first - from) as usize..(last - from) as usize];
                out[(first - at) as usize..(last - at) as usize].copy_from_slice(source);
            }
        }
        out
    }

    /// Writes the file, or replaces its content.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let file = File::options().create(true).truncate(true).write(true).open(path)?;
        file.set_len(self.bytes)?;
        self.parts.iter().try_for_each(|(at, part)| file.write_all_at(part, *at))
    }
}
