//! The file or device of a store: blocks of it, and syncs.

use std::future::Future;
use std::io;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use ferrite_disk_base::{Commits, Port, SyncWitness};
use rustix::io::Errno;

use super::ballast::Ballast;
use super::page::Pointer;
use super::side_by_side::all;
use super::{BLOCK_BYTES, Damaged};

/// Blocks that are read or written at once: those of the largest piece of memory that a task gets.
pub const MAX_BLOCKS: usize = 16;

/// See the module text. A sync that has failed is the last.
#[derive(Debug)]
pub struct Medium {
    commits: Commits,
    ballast: Ballast,
    /// The medium has refused to take back free space.
    keeps_all: AtomicBool,
}

impl Default for Medium {
    fn default() -> Medium {
        let (commits, ballast) = (Commits::of_many(), Ballast::default());
        Medium { commits, ballast, keeps_all: AtomicBool::new(false) }
    }
}

impl Medium {
    /// Reads consecutive blocks, [`MAX_BLOCKS`] at most.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn read(&self, port: &Port, place: u64, blocks: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; blocks * BLOCK_BYTES];
        let piece = port.scratch.take(bytes.len()).await;
        port.io.read_exact(port.files[0], place * BLOCK_BYTES as u64, piece.span()).await?;
        piece.copy_out(&mut bytes);
        Ok(bytes)
    }

    /// Reads consecutive blocks that each have a copy, [`MAX_BLOCKS`] at most. A block that storage cannot read does not
    /// fail the others. Storage may be able to read it again later.
    ///
    /// # Errors
    /// The kernel's that are not of one block.
    pub async fn read_each(
        &self,
        port: &Port,
        place: u64,
        blocks: usize,
    ) -> io::Result<Vec<io::Result<Vec<u8>>>> {
        match self.read(port, place, blocks).await {
            Ok(all) => {
                return Ok(all.chunks(BLOCK_BYTES).map(|block| Ok(block.to_vec())).collect());
            }
            Err(e) if is_of_a_block(&e) => {}
            Err(e) => return Err(e),
        }
        let mut each = Vec::with_capacity(blocks);
        for place in place..place + blocks as u64 {
            let block = self.read(port, place, 1).await;
            match block {
                Err(e) if !is_of_a_block(&e) => return Err(e),
                block => each.push(block),
            }
        }
        Ok(each)
    }

    /// The space of the file system that own work can spend.
    pub fn ballast(&self) -> &Ballast {
        &self.ballast
    }

    /// Writes whole blocks of the store's own, [`MAX_BLOCKS`] at most.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn write(&self, port: &Port, place: u64, bytes: &[u8]) -> io::Result<()> {
        let piece = port.scratch.take(bytes.len()).await;
        piece.copy_in(bytes);
        let at = place * BLOCK_BYTES as u64;
        self.own_work(port, async || port.io.write_all(port.files[0], at, piece.span()).await).await
    }

    /// Writes whole blocks of the store's own, [`MAX_BLOCKS`] at most, and their copy if there is one.
    ///
    /// # Errors
    /// The kernel's. Both have ended then.
    pub async fn write_twice(
        &self,
        port: &Port,
        place: u64,
        copy: Option<u64>,
        bytes: &[u8],
    ) -> io::Result<()> {
        let piece = port.scratch.take(bytes.len()).await;
        piece.copy_in(bytes);
        let write =
            |place: u64| port.io.write_all(port.files[0], place * BLOCK_BYTES as u64, piece.span());
        let write_both = async || {
            let places = [Some(place), copy].into_iter().flatten();
            all(places.map(write)).await.into_iter().collect()
        };
        self.own_work(port, write_both).await
    }

    /// Tries again while it finds no space and there is ballast to spend.
    async fn own_work(&self, port: &Port, act: impl AsyncFn() -> io::Result<()>) -> io::Result<()> {
        let mut done = act().await;
        while let Err(e) = &done
            && self.ballast.spend(port, e).await
        {
            done = act().await;
        }
        done
    }

    /// Writes content into places in a row, [`MAX_BLOCKS`] at most. It spends no ballast.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn write_blocks<'a>(
        &self,
        port: &Port,
        place: u64,
        blocks: impl ExactSizeIterator<Item = &'a [u8]>,
    ) -> io::Result<()> {
        let piece = port.scratch.take(blocks.len() * BLOCK_BYTES).await;
        for (i, block) in blocks.enumerate() {
            port.memory().copy_in(piece.span().slice(i * BLOCK_BYTES, BLOCK_BYTES), block);
        }
        port.io.write_all(port.files[0], place * BLOCK_BYTES as u64, piece.span()).await
    }

    /// Gives free bytes back to the medium, by a hole in the file or a discard. It is a hint: a medium that refuses it is
    /// not asked again.
    pub async fn give_back(&self, port: &Port, offset: u64, len: u64) {
        if self.keeps_all.load(Ordering::Relaxed) {
            return;
        }
        let file = port.files[0];
        let is_done = port.io.discard(file, offset, len).await.is_ok()
            || port.io.punch_hole(file, offset, len).await.is_ok();
        self.keeps_all.fetch_or(!is_done, Ordering::Relaxed);
    }

    /// A page, or its copy if that is damaged. `copy`: where it is.
    ///
    /// # Errors
    /// Both are damaged (`InvalidData`), or cannot be read.
    pub async fn read_page(
        &self,
        port: &Port,
        pointer: &Pointer,
        copy: Option<u64>,
    ) -> io::Result<Vec<u8>> {
        let mut why = damaged(Damaged("there is no copy of a page"));
        for place in [Some(pointer.place), copy].into_iter().flatten() {
            match self.read(port, place, 1).await {
                Ok(page) => match pointer.verify(&page) {
                    Ok(()) => return Ok(page),
                    Err(e) => why = damaged(e),
                },
                Err(e) => why = e,
            }
        }
        Err(why)
    }

    /// Makes all earlier writes durable.
    ///
    /// # Errors
    /// The kernel's; after the first one no sync succeeds any more.
    pub async fn sync(&self, port: &Port) -> io::Result<()> {
        self.commits.sync(port).await
    }

    /// Runs `sync` once for all tasks that wait for it.
    ///
    /// # Errors
    /// Its own.
    pub async fn flush(
        &self,
        port: &Port,
        sync: impl Future<Output = io::Result<()>>,
    ) -> io::Result<()> {
        self.commits.join(&port.io, sync).await
    }

    /// Tells `witness` of a failed sync before any task gets the error.
    pub fn witness(&self, witness: Weak<dyn SyncWitness>) {
        self.commits.witness(witness);
    }

    /// Whether a sync has failed.
    pub fn is_faulty(&self) -> bool {
        self.commits.is_faulty()
    }
}

/// Whether an error may be that of one place of a medium: others may be read all the same.
pub fn is_of_a_block(e: &io::Error) -> bool {
    let known = [Errno::IO, Errno::NODATA, Errno::ILSEQ, Errno::REMOTEIO];
    e.raw_os_error().is_some_and(|errno| known.contains(&Errno::from_raw_os_error(errno)))
}

/// The error of a read that has found damage.
pub fn damaged(why: Damaged) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
