//! A disk on a kernel that fails: the engine gives the answers that the test sets.

use std::path::PathBuf;
use std::sync::Arc;

use crate::common::{MIB, dir_in_memory, image, port};
use ferrite_disk::{Disk, OpenOptions, Port};
use ferrite_io::engine::{FileId, Op};
use ferrite_io::pool::Pool;
use ferrite_io::reactor::Reactor;
use ferrite_testkit::errno::{EIO, ENOSPC, EOPNOTSUPP};
use ferrite_testkit::faulty::{Fault, Faults, Null};

/// A disk on a scripted engine.
struct Bench {
    disk: Disk,
    faults: Faults,
    reactor: Reactor,
    pool: Arc<Pool>,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Bench {
    fn new(bytes: u64, answers: &[Fault]) -> Bench {
        Bench::with(bytes, answers, &OpenOptions::default())
    }

    fn with(bytes: u64, answers: &[Fault], options: &OpenOptions) -> Bench {
        let dir = dir_in_memory();
        let path = image(&dir, bytes);
        let disk = Disk::open(path.to_str().unwrap(), options).unwrap();
        let faults = Faults::none();
        faults.list();
        faults.in_order(answers);
        let reactor = Reactor::new(faults.around(Box::new(Null::default())));
        Bench { disk, faults, reactor, pool: Pool::new(2 << 20, 1).unwrap(), path, _dir: dir }
    }

    fn allocate(&self, offset: u64, len: u64) {
        let file = std::fs::OpenOptions::new().write(true).open(&self.path).unwrap();
        rustix::fs::fallocate(file, rustix::fs::FallocateFlags::KEEP_SIZE, offset, len).unwrap();
    }

    fn port(&self) -> Port {
        port(&self.reactor, &self.pool, vec![FileId(0)])
    }

    fn flush(&mut self) -> Result<(), Option<i32>> {
        let port = self.port();
        let done = self.reactor.block_on(self.disk.flush(&port)).unwrap();
        done.map_err(|e| e.raw_os_error())
    }

    fn discard(&mut self, offset: u64, len: u64) -> Result<(), Option<i32>> {
        let port = self.port();
        let done = self.reactor.block_on(self.disk.discard(&port, offset, len)).unwrap();
        done.map_err(|e| e.raw_os_error())
    }

    fn write_zeroes(&mut self, offset: u64, len: u64) -> Result<(), Option<i32>> {
        let (port, zeros) = (self.port(), self.pool.zero_page());
        let work = async { self.disk.write_zeroes(&port, offset, len, zeros).await };
        self.reactor.block_on(work).unwrap().map_err(|e| e.raw_os_error())
    }

    fn asked(&self) -> Vec<Op> {
        self.faults.take_list()
    }
}

const FILE: FileId = FileId(0);
const GIB: u64 = 1 << 30;

#[test]
fn a_failed_flush_is_an_error_whatever_it_is_and_the_last_that_is_tried() {
    for errno in [EIO, ENOSPC, EOPNOTSUPP] {
        let mut bench = Bench::new(MIB, &[Fault::Errno(errno)]);
        assert_eq!(bench.flush(), Err(Some(errno)));
        bench.flush().unwrap_err();
        assert_eq!(bench.asked(), [Op::Sync { file: FILE }]);
    }
}

#[test]
fn a_long_discard_goes_in_chunks_and_ends_at_the_first_error() {
    let mut bench = Bench::new(4 * GIB, &[Fault::None, Fault::Errno(EIO)]);
    bench.allocate(0, 65 * MIB);
    assert_eq!(bench.discard(512, 3 * GIB), Err(Some(EIO)));
    let hole = |offset, len| Op::PunchHole { file: FILE, offset, len };
    assert_eq!(bench.asked(), [hole(512, GIB - 512), hole(GIB, GIB)]);
    assert!(bench.disk.discard_limits().is_some());
    assert_eq!(bench.discard(512, 1024), Ok(()));
    assert_eq!(bench.asked(), [hole(512, 1024)]);
}

/// Its cost depends on the space to free, wherever in the file that is.
#[test]
fn a_long_discard_of_a_file_with_little_in_it_is_one_operation() {
    let mut bench = Bench::new(1 << 44, &[]);
    bench.allocate(1 << 43, MIB);
    assert_eq!(bench.discard(0, 1 << 44), Ok(()));
    assert_eq!(bench.asked(), [Op::PunchHole { file: FILE, offset: 0, len: 1 << 44 }]);
}

/// A device is told in chunks, whatever is behind it.
#[test]
fn a_long_discard_of_a_device_goes_in_chunks() {
    let options = OpenOptions { fixed_size: true, ..OpenOptions::default() };
    let mut bench = Bench::with(3 * GIB, &[], &options);
    assert_eq!(bench.discard(512, 2 * GIB), Ok(()));
    let discard = |offset, len| Op::Discard { file: FILE, offset, len };
    assert_eq!(bench.asked(), [discard(512, GIB - 512), discard(GIB, GIB), discard(2 * GIB, 512)]);
}

#[test]
fn a_medium_that_refuses_discard_is_not_asked_again() {
    let mut bench = Bench::new(MIB, &[Fault::Errno(EOPNOTSUPP)]);
    assert_eq!(bench.discard(0, 4096), Err(Some(EOPNOTSUPP)));
    assert_eq!(bench.discard(0, 4096), Err(Some(EOPNOTSUPP)));
    assert_eq!(bench.asked().len(), 1);
    assert_eq!(bench.disk.discard_limits(), None);
}

#[test]
fn zeros_are_made_by_the_best_means_that_works() {
    let mut bench = Bench::new(MIB, &[Fault::Errno(EOPNOTSUPP); 2]);
    assert_eq!(bench.write_zeroes(4096, 4096 + 512), Ok(()));
    let page = bench.pool.zero_page();
    let write = |offset, buf| Op::Write { file: FILE, offset, buf };
    let writes = [write(4096, page), write(8192, page.slice(0, 512))];
    let (offset, len) = (4096, 4608);
    let mut expected =
        vec![Op::PunchHole { file: FILE, offset, len }, Op::ZeroRange { file: FILE, offset, len }];
    expected.extend(writes);
    assert_eq!(bench.asked(), expected);
    assert_eq!(bench.write_zeroes(4096, 4096 + 512), Ok(()));
    assert_eq!(bench.asked(), writes);
}

#[test]
fn zeros_that_do_not_fit_are_an_error_and_no_reason_for_other_means() {
    let mut bench = Bench::new(MIB, &[Fault::Errno(ENOSPC)]);
    assert_eq!(bench.write_zeroes(0, 4096), Err(Some(ENOSPC)));
    assert_eq!(bench.asked(), [Op::PunchHole { file: FILE, offset: 0, len: 4096 }]);
}
