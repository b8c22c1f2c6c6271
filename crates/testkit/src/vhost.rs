//! A disk that is served by vhost-user in this process, for the front end of `ferrite_loopback::vhost`, which is here under
//! the same names.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_serve::counters::Counters;
use ferrite_serve::nbd::bind;
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;
use ferrite_serve::vhost::{self, Options};
use ferrite_serve::waker::Waker;
use tempfile::TempDir;

use crate::nbd::engines;
use crate::{images, places};

mod load;

pub use ferrite_loopback::vhost::*;
pub use load::Load;

/// A server in this process.
pub struct Served {
    /// The directory of the socket and the image.
    pub dir: TempDir,
    /// The path of the socket.
    pub socket: PathBuf,
    /// The path of the image.
    pub image: PathBuf,
    /// The served device.
    pub device: Arc<Device>,
    stop: Arc<Waker>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

/// The server's options in most tests.
pub fn options() -> Options {
    Options {
        read_only: false,
        queues: 4,
        memory: 8 << 20,
        id: *b"the disk's own name\0",
        engine: engines(),
        tuning: Tuning::default(),
        counters: Some(Counters::default()),
    }
}

impl Served {
    /// Serves a new image of that format.
    pub fn new(format: &str, bytes: u64, options: Options) -> Served {
        let dir = places::dir_in_memory();
        let image = images::make(dir.path(), format, bytes);
        let state_dir = Some(images::state_dir(&image));
        let open = OpenOptions { state_dir, ..OpenOptions::default() };
        let disk = Disk::open(&image, &open).unwrap();
        let device = Arc::new(Device::new(disk, SystemClock::shared()));
        Served::of(dir, image, device, options)
    }

    /// Serves a device.
    pub fn of(dir: TempDir, image: PathBuf, device: Arc<Device>, options: Options) -> Served {
        let socket = dir.path().join("vhost.sock");
        let stop = Arc::new(Waker::new().unwrap());
        let bound = bind(&socket).unwrap();
        let (served, ended) = (device.clone(), stop.clone());
        let thread =
            std::thread::spawn(move || vhost::serve(&served, &options, &bound.listener, &ended));
        Served { dir, socket, image, device, stop, thread: Some(thread) }
    }

    /// Stops the server, and returns how it has ended.
    pub fn stop(&mut self) -> std::io::Result<()> {
        self.stop.wake();
        self.thread.take().map_or(Ok(()), |thread| thread.join().unwrap())
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let ended = self.stop();
        assert!(std::thread::panicking() || ended.is_ok(), "{ended:?}");
    }
}
