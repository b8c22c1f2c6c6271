//! A disk that is served by NBD in this process; its client is that of [`nbd_client`](crate::nbd_client).

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_serve::nbd::{EngineFactory, Options, Server, bind};
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;
use ferrite_serve::waker::Waker;
use tempfile::TempDir;

pub use crate::nbd_client::*;
use crate::{PATIENCE, images, places};

/// A server in this process.
pub struct Served {
    /// The directory of the socket, and of the image, if it was made here.
    pub dir: TempDir,
    /// The path of the socket.
    pub socket: PathBuf,
    /// The served device.
    pub device: Arc<Device>,
    stop: Arc<Waker>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

/// The engines of the tests.
pub fn engines() -> EngineFactory {
    let kind = ferrite_io::engines::test_engine();
    Arc::new(move |arena, entries| kind.open(arena, entries))
}

/// The server's options in most tests.
pub fn options() -> Options {
    Options {
        read_only: false,
        max_clients: 16,
        client_bytes: 8 << 20,
        greeting: PATIENCE,
        goodbye: PATIENCE,
        at_stop: PATIENCE,
        engine: engines(),
        tuning: Tuning::default(),
        counters: None,
        keeps_all: false,
        traces: None,
        hides_names: false,
        relayed: false,
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
        Served::of(dir, Arc::new(Device::new(disk, SystemClock::shared())), options)
    }

    /// Serves a device, which others may serve, too.
    pub fn of(dir: TempDir, device: Arc<Device>, options: Options) -> Served {
        let socket = dir.path().join("nbd.sock");
        let stop = Arc::new(Waker::new().unwrap());
        let server = Server::new(device.clone(), options, stop.clone());
        let bound = bind(&socket).unwrap();
        let thread = std::thread::spawn(move || server.run(&bound.listener));
        Served { dir, socket, device, stop, thread: Some(thread) }
    }

    /// The URI for other programs.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }

    /// A client before its negotiation.
    pub fn connect(&self) -> Client {
        Client::over(UnixStream::connect(&self.socket).unwrap())
    }

    /// A client after negotiation, with structured replies and `base:allocation`.
    pub fn client(&self) -> Client {
        let mut client = self.connect();
        client.go(true);
        client
    }

    /// Stops the server, and waits until it has ended.
    pub fn stop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server does not panic").unwrap();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            thread.join().expect("the server does not panic").unwrap();
        }
    }
}
