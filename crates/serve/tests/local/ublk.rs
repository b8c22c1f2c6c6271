//! The frontend of ublk as its driver sees it: the results of requests, and what stays for the next server. The driver is a
//! model of the kernel's: there is none on every machine.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_io::arena::{Arena, Span};
use ferrite_io::ublk::{Channel, Description, Ended, Operation};
use ferrite_serve::counters::Counters;
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;
use ferrite_serve::ublk::{Opener, Options, Service, parameters};
use ferrite_serve::waker::Waker;
use ferrite_testkit::nbd::engines;
use ferrite_testkit::{PATIENCE, images, places};

const MIB: u64 = 1 << 20;
const BYTES: u64 = 64 * MIB;
const DEPTH: u16 = 8;
const EIO: i32 = -5;

/// The driver's state of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tag {
    /// The server does not wait for a request.
    Free,
    /// It does.
    Fetched,
    /// The server has a request.
    Taken,
}

struct State {
    tags: Vec<Tag>,
    asked: Vec<Description>,
    data: Vec<Vec<u8>>,
    /// Commands that have ended and were not seen.
    ended: Vec<Ended>,
    answers: BTreeMap<u16, i32>,
    /// No server, so its copies fail.
    refuses_copies: bool,
}

/// A queue of the driver.
struct Driver {
    state: Mutex<State>,
    changed: Condvar,
    event: Waker,
}

impl Driver {
    fn new() -> Arc<Driver> {
        let flush = Description { operation: Operation::Flush, sector: 0, sectors: 0 };
        let state = State {
            tags: vec![Tag::Free; DEPTH.into()],
            asked: vec![flush; DEPTH.into()],
            data: vec![Vec::new(); DEPTH.into()],
            ended: Vec::new(),
            answers: BTreeMap::new(),
            refuses_copies: false,
        };
        let event = Waker::new().unwrap();
        Arc::new(Driver { state: Mutex::new(state), changed: Condvar::new(), event })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn wait(&self, what: &str, until: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_timeout_while(self.lock(), PATIENCE, |state| !until(state));
        let (state, result) = waited.unwrap();
        assert!(!result.timed_out(), "{what}");
        state
    }

    /// Gives a request to the server, as soon as it waits for one on that tag.
    fn give(&self, tag: u16, operation: Operation, sector: u64, data: Vec<u8>) {
        let at = usize::from(tag);
        let mut state = self.wait("a free tag", |state| state.tags[at] == Tag::Fetched);
        state.tags[at] = Tag::Taken;
        let sectors = (data.len() / 512) as u32;
        state.asked[at] = Description { operation, sector, sectors };
        state.data[at] = data;
        state.ended.push(Ended { tag, result: 0 });
        drop(state);
        self.event.wake();
    }

    /// The answer of a request, and its data.
    fn answer(&self, tag: u16) -> (i32, Vec<u8>) {
        let mut state = self.wait("an answer", |state| state.answers.contains_key(&tag));
        let result = state.answers.remove(&tag).unwrap();
        (result, std::mem::take(&mut state.data[usize::from(tag)]))
    }

    fn call(&self, operation: Operation, sector: u64, data: Vec<u8>) -> (i32, Vec<u8>) {
        self.give(0, operation, sector, data);
        self.answer(0)
    }

    fn read(&self, sector: u64, bytes: usize) -> (i32, Vec<u8>) {
        // Bytes that the server does not write are seen.
        self.call(Operation::Read, sector, vec![0xee; bytes])
    }

    /// The device is stopped: all tags that wait end.
    fn stop(&self) {
        let mut state = self.lock();
        for tag in 0..DEPTH {
            if std::mem::replace(&mut state.tags[usize::from(tag)], Tag::Free) == Tag::Fetched {
                state.ended.push(Ended { tag, result: -19 });
            }
        }
        drop(state);
        self.event.wake();
    }

    /// The server has gone. The next server gets the requests that it had taken.
    fn recover(&self) -> Vec<u16> {
        let mut state = self.lock();
        state.ended.clear();
        let taken = |tag: &u16| state.tags[usize::from(*tag)] == Tag::Taken;
        let taken: Vec<u16> = (0..DEPTH).filter(taken).collect();
        state.tags.fill(Tag::Free);
        taken
    }

    fn give_again(&self, tag: u16) {
        let at = usize::from(tag);
        let mut state = self.wait("a free tag", |state| state.tags[at] == Tag::Fetched);
        state.tags[at] = Tag::Taken;
        state.ended.push(Ended { tag, result: 0 });
        drop(state);
        self.event.wake();
    }
}

/// The server's side of a queue.
struct Line {
    driver: Arc<Driver>,
    /// Commands that were not submitted.
    commands: Vec<(u16, Option<i32>)>,
}

impl Channel for Line {
    fn depth(&self) -> u16 {
        DEPTH
    }

    fn fetch(&mut self, tag: u16) {
        self.commands.push((tag, None));
    }

    fn commit(&mut self, tag: u16, result: i32) {
        self.commands.push((tag, Some(result)));
    }

    fn submit(&mut self) -> io::Result<()> {
        let mut state = self.driver.lock();
        for (tag, result) in self.commands.drain(..) {
            let expected = if result.is_some() { Tag::Taken } else { Tag::Free };
            let before = std::mem::replace(&mut state.tags[usize::from(tag)], Tag::Fetched);
            assert_eq!(before, expected, "tag {tag}");
            if let Some(result) = result {
                assert!(state.answers.insert(tag, result).is_none(), "tag {tag} is answered twice");
            }
        }
        drop(state);
        self.driver.changed.notify_all();
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<Ended>) {
        self.driver.event.clear();
        out.append(&mut self.driver.lock().ended);
    }

    fn fd(&self) -> RawFd {
        self.driver.event.fd().as_raw_fd()
    }

    fn describe(&self, tag: u16) -> Description {
        self.driver.lock().asked[usize::from(tag)]
    }

    fn copy_in(&self, tag: u16, at: u64, arena: &Arena, to: Span) -> io::Result<()> {
        let state = self.driver.lock();
        if state.refuses_copies {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        arena.copy_in(to, &state.data[usize::from(tag)][at as usize..][..to.len()]);
        Ok(())
    }

    fn copy_out(&self, tag: u16, at: u64, arena: &Arena, from: Span) -> io::Result<()> {
        let mut state = self.driver.lock();
        if state.refuses_copies {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        arena.copy_out(from, &mut state.data[usize::from(tag)][at as usize..][..from.len()]);
        Ok(())
    }

    fn zero(&self, tag: u16, at: u64, bytes: u64) -> io::Result<()> {
        self.driver.lock().data[usize::from(tag)][at as usize..][..bytes as usize].fill(0);
        Ok(())
    }
}

struct Served {
    driver: Arc<Driver>,
    service: Option<Service>,
    device: Arc<Device>,
    dir: tempfile::TempDir,
    image: std::path::PathBuf,
}

fn open(image: &Path) -> Arc<Device> {
    let state_dir = Some(images::state_dir(image));
    let disk = Disk::open(image, &OpenOptions { state_dir, ..OpenOptions::default() }).unwrap();
    Arc::new(Device::new(disk, SystemClock::shared()))
}

fn start(driver: &Arc<Driver>, device: &Arc<Device>, read_only: bool) -> Service {
    let options = Options {
        read_only,
        memory: 8 << 20,
        engine: engines(),
        tuning: Tuning::default(),
        counters: Some(Counters::default()),
    };
    let driver = driver.clone();
    let opener: Opener = Box::new(move || Ok(Box::new(Line { driver, commands: Vec::new() })));
    Service::start(device, &options, vec![opener], Arc::new(Waker::new().unwrap())).unwrap()
}

impl Served {
    fn new(format: &str, read_only: bool) -> Served {
        let dir = places::dir_in_memory();
        let image = images::make(dir.path(), format, BYTES);
        let (driver, device) = (Driver::new(), open(&image));
        let service = Some(start(&driver, &device, read_only));
        Served { driver, service, device, dir, image }
    }

    /// The device is stopped, and the server ends by itself.
    fn end(mut self) {
        self.driver.stop();
        self.service.take().unwrap().join().unwrap();
        ferrite_serve::blkif::lifecycle::close(&self.device, &engines()).unwrap();
        drop(self.device);
        images::check(&self.image);
        drop(self.dir);
    }
}

#[test]
fn what_was_written_is_read_again_and_each_answer_is_its_bytes() {
    for format in ["raw", "qcow2", "vhd"] {
        let served = Served::new(format, false);
        let driver = &served.driver;
        let data: Vec<u8> = (0..MIB).map(|i| (i / 512 + 1) as u8).collect();
        for sector in [0, 7, BYTES / 512 - 2048] {
            let written = driver.call(Operation::Write, sector, data.clone()).0;
            assert_eq!(written, MIB as i32, "{format}");
            assert_eq!(driver.call(Operation::Flush, 0, Vec::new()).0, 0);
            assert_eq!(driver.read(sector, MIB as usize), (MIB as i32, data.clone()), "{format}");
        }
        // Where nothing was written there are zeros.
        assert_eq!(driver.read(BYTES / 1024, 4096), (4096, vec![0; 4096]));
        assert!(images::state_dir(&served.image).exists() || format == "raw");
        served.end();
    }
}

#[test]
fn all_tags_are_busy_at_once_and_more_than_once() {
    let served = Served::new("qcow2", false);
    let driver = &served.driver;
    for round in 1..=4u8 {
        for tag in 0..DEPTH {
            let at = u64::from(tag) * 256;
            driver.give(tag, Operation::Write, at, vec![round + tag as u8; 128 << 10]);
        }
        (0..DEPTH).for_each(|tag| assert_eq!(driver.answer(tag).0, 128 << 10));
        for tag in (0..DEPTH).rev() {
            driver.give(tag, Operation::Read, u64::from(tag) * 256, vec![0; 128 << 10]);
        }
        for tag in 0..DEPTH {
            assert_eq!(driver.answer(tag), (128 << 10, vec![round + tag as u8; 128 << 10]));
        }
    }
    served.end();
}

#[test]
fn requests_that_make_no_sense_fail_alone() {
    let served = Served::new("raw", false);
    let (driver, last) = (&served.driver, BYTES / 512);
    for (operation, sector, bytes, expected) in [
        (Operation::Read, last, 512, EIO),
        (Operation::Read, u64::MAX, 512, EIO),
        (Operation::Write, last - 1, 1024, EIO),
        (Operation::Write, 0, 4 * MIB as usize, EIO),
        (Operation::Read, 0, 0, EIO),
        (Operation::Discard, last - 1, 1024, EIO),
        (Operation::Other(9), 0, 512, -95),
        (Operation::Read, last - 1, 512, 512),
    ] {
        let answer = driver.call(operation, sector, vec![0; bytes]).0;
        assert_eq!(answer, expected, "{operation:?} {sector} {bytes}");
    }
    // A copy that fails is the failure of its request.
    driver.lock().refuses_copies = true;
    assert_eq!(driver.call(Operation::Write, 0, vec![9; 4096]).0, EIO);
    assert_eq!(driver.call(Operation::Write, 8, vec![9; 4096]).0, EIO);
    driver.lock().refuses_copies = false;
    assert_eq!(driver.read(0, 8192), (8192, vec![0; 8192]));
    served.end();
}

#[test]
fn a_read_only_device_takes_no_writes() {
    let served = Served::new("qcow2", true);
    let driver = &served.driver;
    assert_eq!(driver.call(Operation::Write, 0, vec![1; 512]).0, -30);
    assert_eq!(driver.call(Operation::Discard, 0, vec![0; 64 << 10]).0, -30);
    assert_eq!(driver.read(0, 512), (512, vec![0; 512]));
    let (disk, own) = (served.device.disk().unwrap(), |read_only| {
        parameters(&served.device.disk().unwrap(), read_only)
    });
    assert_eq!((own(true).read_only, own(true).discards), (true, None));
    assert!(!own(false).read_only && own(false).discards.is_some());
    assert_eq!((own(false).sectors, own(false).max_sectors), (disk.sectors(), 2048));
    drop(disk);
    served.end();
}

#[test]
fn a_discard_gives_space_back() {
    let served = Served::new("qcow2", false);
    let driver = &served.driver;
    driver.call(Operation::Write, 0, vec![7; MIB as usize]);
    assert_eq!(driver.call(Operation::Discard, 0, vec![0; 512 << 10]).0, 0);
    let (_, read) = driver.read(0, MIB as usize);
    assert!(read[..512 << 10].iter().all(|byte| *byte == 0));
    assert!(read[512 << 10..].iter().all(|byte| *byte == 7));
    served.end();
}

/// A server that is told to end answers the requests that it has taken. Later requests go to the next server.
#[test]
fn what_a_server_leaves_with_the_driver_its_successor_does() {
    let mut served = Served::new("qcow2", false);
    let driver = served.driver.clone();
    assert_eq!(driver.call(Operation::Write, 0, vec![1; 4096]).0, 4096);
    served.service.take().unwrap().stop().unwrap();
    // It has ended, and the driver has not noticed.
    driver.give(3, Operation::Write, 8, vec![2; 4096]);
    driver.give(5, Operation::Read, 0, vec![0; 4096]);
    assert_eq!(driver.recover(), [3, 5]);
    served.service = Some(start(&driver, &served.device, false));
    [3, 5].into_iter().for_each(|tag| driver.give_again(tag));
    assert_eq!(driver.answer(3).0, 4096);
    assert_eq!(driver.answer(5), (4096, vec![1; 4096]));
    assert_eq!(driver.read(8, 4096), (4096, vec![2; 4096]));
    served.end();
}
