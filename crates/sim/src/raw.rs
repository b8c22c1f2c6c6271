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
        let mut at = 0;
        while at < to.len() as u64 {
            at += match self.map(offset + at, to.len() as u64 - at, Intent::Read) {
                Extent::Zeros { len } => {
                    queue.arena.fill(to.slice(at as usize, len as usize), 0);
                    len
                }
                Extent::Data { file, offset, len } => {
                    let part = to.slice(at as usize, len as usize);
                    queue.io.read_exact(queue.files[file], offset, part).await?;
                    len
                }
            };
        }
        Ok(())
    }

    async fn write(&self, queue: &Queue, offset: u64, from: Span) -> io::Result<()> {
        let mut at = 0;
        while at < from.len() as u64 {
            at += match self.map(offset + at, from.len() as u64 - at, Intent::Write) {
                Extent::Zeros { len } => len,
                Extent::Data { file, offset, len } => {
                    let part = from.slice(at as usize, len as usize);
                    queue.io.write_all(queue.files[file], offset, part).await?;
                    len
                }
            };
        }
        Ok(())
    }

    async fn flush(&self, queue: &Queue) -> io::Result<()> {
        self.flush(&queue.io, &queue.files).await
    }

    async fn discard(&self, queue: &Queue, offset: u64, len: u64) -> io::Result<()> {
        self.discard(&queue.io, &queue.files, offset, len).await
    }

    async fn write_zeroes(&self, queue: &Queue, offset: u64, len: u64) -> io::Result<()> {
        self.write_zeroes(&queue.io, &queue.files, offset, len, queue.zeros).await
    }

    async fn close(&self, queue: &Queue) -> io::Result<()> {
        self.flush(&queue.io, &queue.files).await
    }
}
