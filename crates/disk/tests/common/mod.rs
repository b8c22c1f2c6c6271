//! Shared by the tests: images, devices, and a queue to do I/O on.

#![allow(dead_code, unused_imports, reason = "each test binary uses its own part")]

pub(crate) mod tree;
pub(crate) mod vhd;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use ferrite_disk::{Disk, DiskError, ImageName, OpenOptions, Parents, Port};
use ferrite_host::directory::{Directory, HostDirectory};
use ferrite_image_tools::ImageTools;
use ferrite_io::engine::{Engine, FileId};
use ferrite_io::engines::test_engine;
use ferrite_io::pool::{Buf, Pool, QueuePool};
use ferrite_io::reactor::{Io, Reactor};
use ferrite_io::scratch::Scratch;

pub(crate) use ferrite_testkit::devices::{Loop, Mount};
pub(crate) use ferrite_testkit::images::{anywhere, work};
pub(crate) use ferrite_testkit::places::{dir_in_memory, dir_on_disk, image};
pub(crate) use ferrite_testkit::programs::{run, skipped};

pub(crate) const MIB: u64 = 1 << 20;

/// Opens a disk read-write.
pub(crate) fn open(path: &Path) -> Result<Disk, DiskError> {
    Disk::open(path.to_str().unwrap(), &OpenOptions::default())
}

/// Opens a disk read-only.
pub(crate) fn open_read_only(path: &Path) -> Result<Disk, DiskError> {
    Disk::open(path.to_str().unwrap(), &OpenOptions { read_only: true, ..Default::default() })
}

/// Owner, group and permissions; the super-user's tests only have another owner.
pub(crate) fn rights(image: &ImageName) -> (u32, u32, u32) {
    let meta = fs::metadata(&image.path).unwrap();
    (meta.uid(), meta.gid(), meta.mode() & 0o777)
}

/// One queue of a disk, as a backend has it.
pub(crate) struct Queue {
    pub(crate) disk: Arc<Disk>,
    /// One for all: work that a call leaves to a task has its memory still.
    port: Port,
    pub(crate) pool: Arc<Pool>,
    buffers: QueuePool,
    pub(crate) reactor: Reactor,
}

impl Queue {
    pub(crate) fn new(disk: Disk) -> Queue {
        Queue::of(Arc::new(disk))
    }

    /// One of several queues.
    pub(crate) fn of(disk: Arc<Disk>) -> Queue {
        Queue::on(disk, |engine| engine)
    }

    /// One whose engine is put into another.
    pub(crate) fn on(
        disk: Arc<Disk>,
        wrap: impl FnOnce(Box<dyn Engine>) -> Box<dyn Engine>,
    ) -> Queue {
        let pool = Pool::with_scratch(2 << 20, 1, disk.scratch_bytes()).unwrap();
        let engine = test_engine().open(pool.arena().clone(), 64).unwrap();
        let mut reactor = Reactor::new(wrap(engine));
        let files = disk.files();
        let files = files.into_iter().map(|f| reactor.add_file(f).unwrap()).collect();
        let buffers = pool.queue(0);
        let port = port(&reactor, &pool, files);
        Queue { disk, port, pool, buffers, reactor }
    }

    pub(crate) fn io(&self) -> Io {
        self.reactor.io()
    }

    pub(crate) fn buffer(&mut self, bytes: usize) -> Buf {
        self.buffers.alloc(bytes).expect("a buffer of at most 1 MiB")
    }

    /// Writes, wherever [`Disk::map`] says.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let buffer = self.buffer(bytes.len());
        let span = buffer.span().slice(0, bytes.len());
        self.pool.arena().copy_in(span, bytes);
        let (port, disk) = (self.port(), self.disk.clone());
        let done = self.reactor.block_on(async move { disk.write(&port, offset, span).await });
        self.buffers.free(buffer);
        done.unwrap()
    }

    /// Reads, wherever [`Disk::map`] says.
    pub(crate) fn read(&mut self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let buffer = self.buffer(len);
        let span = buffer.span().slice(0, len);
        self.pool.arena().fill(span, 0xEE);
        let (port, disk) = (self.port(), self.disk.clone());
        let done = self.reactor.block_on(async move { disk.read(&port, offset, span).await });
        let done: io::Result<()> = done.unwrap();
        let mut bytes = vec![0; len];
        self.pool.arena().copy_out(span, &mut bytes);
        self.buffers.free(buffer);
        done.map(|()| bytes)
    }

    pub(crate) fn port(&self) -> Port {
        self.port.clone()
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        let (port, disk) = (self.port(), self.disk.clone());
        self.reactor.block_on(async move { disk.flush(&port).await }).unwrap()
    }

    pub(crate) fn close(&mut self) -> io::Result<()> {
        let (port, disk) = (self.port(), self.disk.clone());
        self.reactor.block_on(async move { disk.close(&port).await }).unwrap()
    }

    pub(crate) fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let (port, disk) = (self.port(), self.disk.clone());
        self.reactor.block_on(async move { disk.discard(&port, offset, len).await }).unwrap()
    }

    pub(crate) fn write_zeroes(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let (port, disk) = (self.port(), self.disk.clone());
        let zeros = self.pool.zero_page();
        self.reactor
            .block_on(async move { disk.write_zeroes(&port, offset, len, zeros).await })
            .unwrap()
    }
}

/// The port that a disk's steps run on: this reactor, and the pool's scratch memory of its first queue.
pub(crate) fn port(reactor: &Reactor, pool: &Pool, files: Vec<FileId>) -> Port {
    let scratch = Scratch::new(pool.arena().clone(), pool.scratch(0));
    Port { io: reactor.io(), files: files.into(), scratch }
}
