//! Requests that begin and end at any byte, in each form of the protocol.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_serve::path::device::Device;
use ferrite_testkit::devices::Loop;
use ferrite_testkit::images;
use ferrite_testkit::nbd::{
    ACK, Client, PAYLOAD_LEN, Served, command, info, option, options, request,
};
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

/// The form of a client's requests and replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Simple,
    Structured,
    Extended,
}

/// Random requests of one client, compared with a model.
fn compare(served: &Served, form: Form, rounds: u64) {
    let mut client = served.connect();
    match form {
        Form::Extended => client.go_extended(&["base:allocation"]),
        _ => client.go(form == Form::Structured),
    };
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
    use Form::{Extended, Simple, Structured};
    let forms = [("raw", Structured), ("raw", Simple), ("vhd", Structured), ("qcow2", Simple)];
    for (format, form) in forms.into_iter().chain([("raw", Extended), ("vhd", Extended)]) {
        compare(&Served::new(format, BYTES, options()), form, 150);
    }
}

#[test]
fn any_bytes_of_a_device_with_larger_blocks_are_read_written_and_zeroed() {
    let dir = dir_on_disk();
    let path = image(&dir, BYTES);
    let Some(device) = Loop::attach(&path, 4096) else { return };
    let disk = Disk::open(&device.0, &OpenOptions::default()).unwrap();
    let served = Served::of(dir, Arc::new(Device::new(disk, SystemClock::shared())), options());
    compare(&served, Form::Structured, 60);
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

/// In either order, the bytes of the block that only the whole write has are its own.
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

const TIB: u64 = 1 << 40;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;
const NAMES: [&str; 2] = ["base:allocation", "qemu:allocation-depth"];

/// A server of a disk of 1 TiB without data.
fn large() -> Served {
    Served::new("raw", TIB, options())
}

#[test]
fn a_request_with_an_extended_head_may_be_as_long_as_the_disk() {
    let served = large();
    let mut client = served.connect();
    assert_eq!(client.go_extended(&NAMES).0, TIB);
    client.write(TIB / 2, &[7; 8192]);
    let status = client.call_long(command::BLOCK_STATUS, 0, 0, TIB);
    let (half, rest) = (TIB / 2, TIB / 2 - 8192);
    let allocation = (1, vec![(half, 3), (8192, 0), (rest, 3)]);
    assert_eq!((status.error, status.contexts), (0, vec![allocation, (2, vec![(TIB, 1)])]));
    // One extent of each context.
    let status = client.call_long(command::BLOCK_STATUS, 1 << 3, 100, TIB - 100);
    assert_eq!(status.contexts, [(1, vec![(half - 100, 3)]), (2, vec![(TIB - 100, 1)])]);
    assert_eq!(client.call_long(command::CACHE, 1, 0, TIB).error, 0);
    assert_eq!(client.call_long(command::WRITE_ZEROES, 1, 1, TIB - 2).error, 0);
    assert_eq!(client.read(TIB / 2, 8192), [0; 8192]);
    client.write(TIB / 2, &[7; 8192]);
    assert_eq!(client.call_long(command::TRIM, 0, 0, TIB).error, 0);
    assert_eq!(client.read(TIB / 2, 8192), [0; 8192]);
}

#[test]
fn wrong_requests_with_extended_heads_get_their_error_and_the_next_is_served() {
    const DF: u16 = 1 << 2;
    let served = large();
    let mut client = served.connect();
    client.go_extended(&NAMES[..1]);
    let without_data = [
        (command::READ, 0, 0, (32 << 20) + 1, EINVAL),
        (command::READ, 0, 0, 1 << 32, EINVAL),
        (command::READ, 0, u64::MAX, u64::MAX, EINVAL),
        (command::READ, DF, 0, 2 << 20, 75),
        (command::TRIM, 0, 1, u64::MAX, EINVAL),
        (command::TRIM, 0, 0, 0, EINVAL),
        (command::WRITE_ZEROES, 0, 1, TIB, ENOSPC),
        (command::WRITE_ZEROES, 1 << 6, 0, 512, EINVAL),
        (command::BLOCK_STATUS, 0, TIB, 1, EINVAL),
        (command::CACHE, 0, 0, TIB + 1, EINVAL),
        (99, 0, 0, 0, EINVAL),
    ];
    for (command, flags, offset, len, error) in without_data {
        let reply = client.call_long(command, flags, offset, len);
        assert_eq!(reply.error, error, "{command} {flags} {offset} {len}");
    }
    // Data where none belong, and too many, are dropped.
    let much = vec![0x25; (32 << 20) + 1];
    let with_data = [
        (command::TRIM, 0, &much[..5000], EINVAL),
        (command::READ, 0, &much[..512], EINVAL),
        (command::BLOCK_STATUS, 0, &much[..16], EINVAL),
        (99, 0, &much[..1], EINVAL),
        (command::WRITE, 0, &much[..], EINVAL),
        (command::WRITE, TIB - 1, &much[..2], ENOSPC),
    ];
    for (command, offset, data, error) in with_data {
        let cookie = client.send_long(command, PAYLOAD_LEN, offset, data.len() as u64, data);
        let reply = client.reply();
        assert_eq!((reply.cookie, reply.error), (cookie, error), "{command} {}", data.len());
    }
    client.write(0, &[9; 512]);
    // As QEMU's client does: the flag of data is not set.
    let cookie = client.send_long(command::WRITE, 0, 512, 512, &[8; 512]);
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.error), (cookie, 0));
    assert_eq!(client.read(512, 512), [8; 512]);
    assert_eq!(client.call_long(command::READ, DF, 0, 64 << 10).chunks, 1);
    client.flush();
    // A short head is no request.
    client.say(&[&request(command::FLUSH, 0, 9, 0, 0)[..], &[0; 4]].concat());
    assert!(client.is_closed());
}

#[test]
fn extended_heads_are_not_left_again_and_lead_to_an_export_by_go_only() {
    let served = large();
    let mut client = served.connect();
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]), [(ACK, vec![])]);
    client.extend();
    client.extend();
    let required = 1 << 31 | 10;
    assert_eq!(client.option(option::STRUCTURED_REPLY, &[]), [(required, vec![])]);
    let size = client.go(false);
    // DF is there.
    assert_eq!(size, (TIB, 0xded));
    client.write(0, &[1; 512]);
    let mut client = served.connect();
    client.extend();
    client.ask(option::EXPORT_NAME, b"");
    assert!(client.is_closed());
}

#[test]
fn the_depth_of_blocks_is_the_image_of_the_chain_that_has_them() {
    for format in ["vhd", "qcow2"] {
        let dir = dir_in_memory();
        let parent = images::make(dir.path(), format, BYTES);
        (0..4).for_each(|i| images::write(&parent, i * MIB, &vec![1; MIB as usize]));
        let leaf = dir.path().join(format!("leaf.{format}"));
        images::make_next(&parent, &leaf);
        let open =
            OpenOptions { state_dir: Some(images::state_dir(&leaf)), ..OpenOptions::default() };
        let disk = Disk::open(&leaf, &open).unwrap();
        let served = Served::of(dir, Arc::new(Device::new(disk, SystemClock::shared())), options());
        let mut client = served.connect();
        client.go_extended(&NAMES);
        client.write(2 * MIB, &vec![2; 4 << 20]);
        let status = client.call_long(command::BLOCK_STATUS, 0, 0, BYTES);
        let allocation = (1, vec![(6 * MIB, 0), (2 * MIB, 3)]);
        let depth = (2, vec![(2 * MIB, 2), (4 * MIB, 1), (2 * MIB, 0)]);
        assert_eq!(status.contexts, [allocation.clone(), depth.clone()], "{format}");
        // The same with 32-bit lengths, and one context without the other.
        let mut client = served.connect();
        assert_eq!(client.option(option::STRUCTURED_REPLY, &[]), [(ACK, vec![])]);
        let queries = ferrite_testkit::nbd::contexts("", &NAMES);
        assert_eq!(client.option(option::SET_META_CONTEXT, &queries).len(), 3);
        client.option(option::GO, &info(""));
        let status = client.call(command::BLOCK_STATUS, 0, 0, BYTES as u32, &[]);
        assert_eq!(status.contexts, [allocation, depth.clone()], "{format}");
        let mut client = served.connect();
        client.go_extended(&NAMES[1..]);
        let status = client.call_long(command::BLOCK_STATUS, 0, 0, BYTES);
        assert_eq!(status.contexts, [depth], "{format}");
    }
}

#[test]
fn zeros_that_have_to_be_fast_are_refused_at_once_if_they_are_not() {
    const FAST: u16 = 1 << 4;
    for format in ["raw", "vhd", "qcow2"] {
        let served = Served::new(format, BYTES, options());
        let mut client = served.client();
        client.write(0, &[7; 65536]);
        let mut zero = |flags: u16, at: u64, len: u32| {
            let error = client.call(command::WRITE_ZEROES, flags | FAST, at, len, &[]).error;
            (error, client.read(0, 65536).iter().filter(|byte| **byte == 0).count())
        };
        // Zeros with space, and parts of blocks, are written.
        assert_eq!(zero(NO_HOLE, 0, 65536), (ENOTSUP, 0), "{format}");
        assert_eq!(zero(0, 1, 1000), (ENOTSUP, 0), "{format}");
        assert_eq!(zero(1, 1, 1023), (0, 1023), "{format}");
        assert_eq!(zero(0, 0, 65536), (0, 65536), "{format}");
    }
    // A file system in memory only punches holes.
    let keeps = ferrite_serve::nbd::Options { keeps_all: true, ..options() };
    let served = Served::new("raw", BYTES, keeps);
    let mut client = served.client();
    assert_eq!(client.call(command::WRITE_ZEROES, FAST, 0, 65536, &[]).error, ENOTSUP);
    assert_eq!(client.call(command::WRITE_ZEROES, 0, 0, 65536, &[]).error, 0);
}

#[test]
fn a_server_that_hides_its_names_lists_none_and_serves_who_knows_one() {
    let served =
        Served::new("raw", BYTES, ferrite_serve::nbd::Options { hides_names: true, ..options() });
    let mut client = served.connect();
    let policy = 1 << 31 | 2;
    assert_eq!(client.option(option::LIST, &[]), [(policy, vec![])]);
    assert_eq!(client.go(true).0, BYTES);
    client.flush();
}
