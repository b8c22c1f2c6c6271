//! Raw images.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ferrite_disk::{Extent, Intent, OpenOptions};
use ferrite_io::arena::Span;

use crate::format::{Disk, Format, Place, Queue};

/// A file, byte for byte.
pub struct Raw;

/// Its file's name.
const IMAGE: &str = "disk.raw";

impl Format for Raw {
    type Disk = ferrite_disk::Disk;

    fn name(&self) -> &'static str {
        "raw"
    }

    fn create(&self, place: &Place, sectors: u64) -> Result<(), String> {
        let made = File::create_new(place.image(IMAGE)).and_then(|f| f.set_len(sectors * 512));
        made.map_err(|e| format!("cannot make an image: {e}"))
    }

    fn open(&self, place: &Place) -> Result<ferrite_disk::Disk, String> {
        let path = place.image(IMAGE);
        ferrite_disk::Disk::open(&path.to_string_lossy(), &OpenOptions::default())
            .map_err(|e| e.to_string())
    }

    fn check(&self, _: &Place, _: bool) -> Result<(), String> {
        Ok(())
    }

    fn hot_spots(&self, sectors: u64) -> Vec<u64> {
        vec![0, 8, sectors / 2, sectors]
    }
}

impl Disk for ferrite_disk::Disk {
    fn sectors(&self) -> u64 {
        self.sectors()
    }

    fn files(&self) -> Vec<Arc<OwnedFd>> {
        self.files()
    }

    async fn read(&self, queue: &Queue, offset: u64, to: Span) -> io::Result<()> {
        let mut done = 0;
        while done < to.len() {
            let (at, left) = (offset + done as u64, (to.len() - done) as u64);
            done += match self.map(at, left, Intent::Read) {
                Extent::Zeros { len } => {
                    queue.memory().fill(to.slice(done, len as usize), 0);
                    len as usize
                }
                Extent::Data { file, offset, len } => {
                    let (port, part) = (&queue.port, to.slice(done, len as usize));
                    port.io.read_exact(port.files[file], offset, part).await?;
                    part.len()
                }
                Extent::Slow { len } => {
                    let part = to.slice(done, len as usize);
                    self.read(&queue.port, at, part).await?;
                    part.len()
                }
            };
        }
        Ok(())
    }

    async fn write(&self, queue: &Queue, offset: u64, from: Span) -> io::Result<()> {
        let mut done = 0;
        while done < from.len() {
            let (at, left) = (offset + done as u64, (from.len() - done) as u64);
            done += match self.map(at, left, Intent::Write) {
                Extent::Zeros { len } => len as usize,
                Extent::Data { file, offset, len } => {
                    let (port, part) = (&queue.port, from.slice(done, len as usize));
                    port.io.write_all(port.files[file], offset, part).await?;
                    self.wrote(at, len);
                    part.len()
                }
                Extent::Slow { len } => {
                    let part = from.slice(done, len as usize);
                    self.write(&queue.port, at, part).await?;
                    part.len()
                }
            };
        }
        Ok(())
    }

    async fn flush(&self, queue: &Queue) -> io::Result<()> {
        self.flush(&queue.port).await
    }

    async fn discard(&self, queue: &Queue, offset: u64, len: u64) -> io::Result<()> {
        self.discard(&queue.port, offset, len).await
    }

    async fn write_zeroes(&self, queue: &Queue, offset: u64, len: u64) -> io::Result<()> {
        self.write_zeroes(&queue.port, offset, len, queue.zeros).await
    }

    async fn close(&self, queue: &Queue) -> io::Result<()> {
        self.close(&queue.port).await
    }
}
