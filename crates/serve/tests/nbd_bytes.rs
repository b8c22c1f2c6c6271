//! Requests that begin and end at any byte.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_serve::path::device::Device;
use ferrite_testkit::devices::Loop;
use ferrite_testkit::nbd::{Client, Served, command, options};
use ferrite_testkit::places::{dir_in_memory, dir_on_disk, image};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const BYTES: u64 = 8 * MIB;
const NO_HOLE: u16 = 1 << 1;

/// A generator of numbers below a limit.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }
}

/// Random requests of one client, compared with a model.
fn compare(served: &Served, structured: bool, rounds: u64) {
    let mut client = served.connect();
    client.go(structured);
    let mut model = vec![0; BYTES as usize];
    client.write(0, &model);
    let mut numbers = Numbers(1);
    for round in 0..rounds {
        let longest = if round % 16 == 0 { 3 * MIB } else { 3000 };
        let at = numbers.below(BYTES - longest);
        let len = 1 + numbers.below(longest);
        let range = at as usize..(at + len) as usize;
        match numbers.below(4) {
            0 => assert!(client.read(at, len as u32) == model[range], "{at} {len}"),
            1 => {
                let flags = if round % 2 == 0 { NO_HOLE } else { 0 };
                let reply = client.call(command::WRITE_ZEROES, flags, at, len as u32, &[]);
                assert_eq!(reply.error, 0);
                model[range].fill(0);
            }
            _ => {
                let data: Vec<u8> = (0..len).map(|i| (i * 7 + round) as u8 | 1).collect();
                client.write(at, &data);
                model[range].copy_from_slice(&data);
            }
        }
    }
    for at in (0..BYTES).step_by(MIB as usize) {
        let read = client.read(at, MIB as u32);
        assert!(read == model[at as usize..][..MIB as usize], "from {at}");
    }
}

#[test]
fn any_bytes_are_read_written_and_zeroed_in_every_format() {
    for (format, structured) in [("raw", true), ("raw", false), ("vhd", true), ("qcow2", false)] {
        compare(&Served::new(format, BYTES, options()), structured, 150);
    }
}

#[test]
fn any_bytes_of_a_device_with_larger_blocks_are_read_written_and_zeroed() {
    let dir = dir_on_disk();
    let path = image(&dir, BYTES);
    let Some(device) = Loop::attach(&path, 4096) else { return };
    let disk = Disk::open(&device.0, &OpenOptions::default()).unwrap();
    let served = Served::of(dir, Arc::new(Device::new(disk, SystemClock::shared())), options());
    compare(&served, true, 60);
    drop(served);
}

#[test]
fn clients_that_write_different_bytes_of_a_block_at_once_lose_none() {
    const CLIENTS: u8 = 4;
    let served = Served::new("raw", BYTES, options());
    let write = |index: u8| {
        let mut client = served.client();
        move || {
            let places = (u64::from(index)..2048).step_by(usize::from(CLIENTS));
            for chunk in places.collect::<Vec<_>>().chunks(32) {
                for at in chunk {
                    client.send(command::WRITE, 0, *at, 1, &[index + 1]);
                }
                assert!(chunk.iter().all(|_| client.reply().error == 0));
            }
        }
    };
    std::thread::scope(|scope| {
        (0..CLIENTS).for_each(|index| drop(scope.spawn(write(index))));
    });
    let read = served.client().read(0, 2048);
    let wrong = read.iter().enumerate().find(|(at, byte)| **byte != (at % 4) as u8 + 1);
    assert_eq!(wrong, None);
}

/// Whichever comes last, the bytes of the block that only the whole write has are its own.
#[test]
fn a_whole_block_and_bytes_of_it_that_are_written_at_once_come_one_after_the_other() {
    const ROUNDS: u8 = 250;
    let served = Served::new("raw", BYTES, options());
    let [mut whole, mut bytes] = [served.client(), served.client()];
    bytes.write(1, &[1]);
    for round in 1..=ROUNDS {
        let blocks = 0..32u64;
        for block in blocks.clone() {
            bytes.send(command::WRITE, 0, block * 512 + 100, 8, &[0xEE; 8]);
            whole.send(command::WRITE, 0, block * 512, 512, &[round; 512]);
        }
        for _ in blocks.clone() {
            assert_eq!((bytes.reply().error, whole.reply().error), (0, 0));
        }
        let read = whole.read(0, 32 * 512);
        for block in read.chunks(512) {
            let middle = &block[100..108];
            assert!(middle == [0xEE; 8] || middle == [round; 8], "{round}: {middle:?}");
            let rest = block[..100].iter().chain(&block[108..]);
            assert!(rest.clone().all(|byte| *byte == round), "round {round} lost a whole write");
        }
    }
}

#[test]
fn a_trim_keeps_the_bytes_of_sectors_that_it_does_not_cover() {
    let served = Served::new("raw", BYTES, options());
    let mut client = served.client();
    client.write(0, &[7; 8192]);
    let mut trim = |at: u64, len: u32| {
        assert_eq!(client.call(command::TRIM, 0, at, len, &[]).error, 0);
        client.read(0, 8192).iter().position(|byte| *byte == 0)
    };
    assert_eq!(trim(1, 510), None);
    assert_eq!(trim(500, 100), None);
    assert_eq!(trim(100, 8092), Some(512));
    assert_eq!(client.read(0, 512), [7; 512]);
    assert!(client.read(512, 7680).iter().all(|byte| *byte == 0));
}

#[test]
fn the_status_of_any_bytes_is_that_of_their_sectors() {
    let served = Served::new("raw", BYTES, options());
    let mut client = served.client();
    client.write(MIB, &[7; 4096]);
    let status = |client: &mut Client, at: u64, len: u32| {
        client.call(command::BLOCK_STATUS, 0, at, len, &[]).extents
    };
    assert_eq!(status(&mut client, MIB + 1, 100), [(100, 0)]);
    assert_eq!(status(&mut client, MIB - 5, 10), [(5, 3), (5, 0)]);
    assert_eq!(status(&mut client, 1, 3), [(3, 3)]);
}

fn odd(bytes: u64, read_only: bool) -> (TempDir, std::path::PathBuf, Arc<Device>) {
    let dir = dir_in_memory();
    let path = dir.path().join("odd.img");
    std::fs::write(&path, vec![5; bytes as usize]).unwrap();
    let open = OpenOptions { odd_size: true, read_only, ..OpenOptions::default() };
    let disk = Disk::open(&path, &open).unwrap();
    (dir, path.clone(), Arc::new(Device::new(disk, SystemClock::shared())))
}

/// As qemu-nbd does it.
#[test]
fn a_file_that_ends_inside_a_sector_is_served_with_zeros_up_to_its_end() {
    for (bytes, read_only) in [(1000, true), (1000, false), (100, false), (5001, true)] {
        let (dir, path, device) = odd(bytes, read_only);
        let served = Served::of(dir, device, options());
        let mut client = served.connect();
        let size = bytes.next_multiple_of(512);
        assert_eq!(client.go(true).0, size);
        let expected = [vec![5; bytes as usize], vec![0; (size - bytes) as usize]].concat();
        assert_eq!(client.read(0, size as u32), expected);
        assert_eq!(client.read(size - 1, 1), [0]);
        assert_eq!(client.read(bytes - 1, 2), [5, 0]);
        let extents = client.call(command::BLOCK_STATUS, 0, 0, size as u32, &[]).extents;
        assert_eq!(extents, [(bytes as u32, 0), ((size - bytes) as u32, 3)]);
        assert_eq!(client.call(command::BLOCK_STATUS, 0, size - 1, 1, &[]).extents, [(1, 3)]);
        assert_eq!(length(&path), bytes, "nothing was written");
    }
}

#[test]
fn what_is_written_behind_the_end_of_a_file_makes_its_last_sector_whole() {
    let (dir, path, device) = odd(1000, false);
    let served = Served::of(dir, device, options());
    let mut client = served.client();
    client.write(600, &[6; 100]);
    client.write(1010, &[9; 3]);
    client.flush();
    let expected = [vec![0; 10], vec![9; 3], vec![0; 11]].concat();
    assert_eq!(client.read(1000, 24), expected);
    assert_eq!(client.read(598, 4), [5, 5, 6, 6]);
    assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, 1024, &[]).extents, [(1024, 0)]);
    let mut tail = [1; 24];
    std::fs::File::open(&path).unwrap().read_exact_at(&mut tail, 1000).unwrap();
    assert_eq!((length(&path), tail.to_vec()), (1024, expected));
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}
