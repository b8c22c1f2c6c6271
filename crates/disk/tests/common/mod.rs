//! What the tests share: images, devices, and a queue to do I/O on.

#![allow(dead_code)]

pub(crate) mod released;
pub(crate) mod tree;
pub(crate) mod vhd;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::tools::ImageTools;
use ferrite_disk::{Disk, DiskError, ImageName, OpenOptions, Parents, Port};
use ferrite_io::directory::{Directory, HostDirectory};
use ferrite_io::engine::{Engine, FileId};
use ferrite_io::engines::test_engine;
use ferrite_io::pool::{Buf, Pool, QueuePool};
use ferrite_io::reactor::{Io, Reactor};
use ferrite_io::scratch::Scratch;
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;

/// Opens a disk read-write.
pub(crate) fn open(path: &Path) -> Result<Disk, DiskError> {
    Disk::open(path.to_str().unwrap(), &OpenOptions::default())
}

/// Opens a disk read-only.
pub(crate) fn open_read_only(path: &Path) -> Result<Disk, DiskError> {
    Disk::open(path.to_str().unwrap(), &OpenOptions { read_only: true, ..Default::default() })
}

/// A directory on the disk of the machine, where direct I/O usually works.
pub(crate) fn dir_on_disk() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A directory in memory.
pub(crate) fn dir_on_tmpfs() -> TempDir {
    TempDir::new_in("/dev/shm").unwrap()
}

/// A sparse file.
pub(crate) fn image(dir: &TempDir, bytes: u64) -> PathBuf {
    let path = dir.path().join("disk.img");
    File::create_new(&path).unwrap().set_len(bytes).unwrap();
    path
}

/// A place to work on images that nobody uses.
pub(crate) fn work<T>(state: Option<&Path>, work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
    work(&ImageTools { state_dir: state.map(Path::to_owned), ..workshop(&HostDirectory) })
}

/// The same, where the parents of images may be anywhere.
pub(crate) fn anywhere<T>(directory: &dyn Directory, work: impl FnOnce(&ImageTools<'_>) -> T) -> T {
    work(&ImageTools { parents: Parents::Any, ..workshop(directory) })
}

fn workshop(directory: &dyn Directory) -> ImageTools<'_> {
    ImageTools {
        fixed_size: false,
        parents: Parents::default(),
        directory,
        unlocked: false,
        engine: &|arena| test_engine().open(arena, 64),
        state_dir: None,
        progress: &|_| true,
    }
}

/// Owner, group and permissions; the super-user's tests only have another owner.
pub(crate) fn rights(image: &ImageName) -> (u32, u32, u32) {
    let meta = fs::metadata(&image.path).unwrap();
    (meta.uid(), meta.gid(), meta.mode() & 0o777)
}

/// Says that a test cannot be done here; an error where that is not to be.
#[track_caller]
pub(crate) fn skipped(why: &str) {
    let demanded = std::env::var_os("FERRITE_TEST_REQUIRE_PEERS").is_some();
    assert!(!(demanded && rustix::process::geteuid().is_root()), "{why}");
    eprintln!("skipped: {why}");
}

/// Runs a program of the system's; its output, or `None` if there is none or it failed.
pub(crate) fn run(program: &str, args: &[&str]) -> Option<String> {
    let output = released::output(program, args).ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// A loop device, as long as it lives. Needs root.
pub(crate) struct Loop(pub(crate) PathBuf);

impl Loop {
    /// `None` where there are none, see [`skipped`].
    pub(crate) fn attach(file: &Path, block_bytes: u32) -> Option<Loop> {
        let block = block_bytes.to_string();
        let made = run("losetup", &["--find", "--show", "-b", &block, file.to_str().unwrap()]);
        if made.is_none() {
            skipped("no loop devices for this user");
        }
        made.map(|device| Loop(device.into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.0.to_str().unwrap()]);
    }
}

/// A mounted file system, as long as it lives. Needs root.
pub(crate) struct Mount(pub(crate) PathBuf);

impl Mount {
    /// `None` where that is not possible, see [`skipped`].
    pub(crate) fn new(args: &[&str], at: &Path) -> Option<Mount> {
        let mut all = args.to_vec();
        all.push(at.to_str().unwrap());
        if run("mount", &all).is_none() {
            skipped("mounting is not possible here");
            return None;
        }
        Some(Mount(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        run("umount", &[self.0.to_str().unwrap()]);
    }
}

/// One queue of a disk, as a backend has it.
pub(crate) struct Queue {
    pub(crate) disk: Arc<Disk>,
    pub(crate) files: Vec<FileId>,
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
        Queue { disk, files, pool, buffers, reactor }
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
        port(&self.reactor, &self.pool, self.files.clone())
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

/// What a disk's steps run on: this reactor, and the pool's scratch memory of its first queue.
pub(crate) fn port(reactor: &Reactor, pool: &Pool, files: Vec<FileId>) -> Port {
    let scratch = Scratch::new(pool.arena().clone(), pool.scratch(0));
    Port { io: reactor.io(), files: files.into(), scratch }
}
