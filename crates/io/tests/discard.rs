//! Discards of a block device. Alone in its process: it runs a command, and a process that forks
//! keeps other tests' files open for a moment.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use ferrite_io::arena::Arena;
use ferrite_io::engines::EngineKind;
use ferrite_io::reactor::Reactor;
use ferrite_testkit::devices::Loop;

const MIB: usize = 1 << 20;

#[test]
fn a_discard_gives_a_block_device_s_range_back() {
    EngineKind::ALL.into_iter().for_each(gives_back);
}

fn gives_back(kind: EngineKind) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("disk");
    std::fs::write(&path, vec![1; 8 * MIB]).unwrap();
    let Some(device) = Loop::attach(&path, 512) else { return };
    let arena = Arena::new(4 * MIB).unwrap();
    let mut r = Reactor::new(kind.open(arena.clone(), 8).unwrap());
    let f = File::options().read(true).write(true).open(&device.0).unwrap();
    let f = r.add_file(Arc::new(f.into())).unwrap();
    let (io, buf) = (r.io(), arena.span(0, MIB));
    let unaligned = r.block_on(async move {
        io.discard(f, 1 << 20, 4 << 20).await.unwrap();
        io.read_exact(f, 2 << 20, buf).await.unwrap();
        io.discard(f, 1, 512).await.unwrap_err()
    });
    assert_eq!(unaligned.unwrap().kind(), io::ErrorKind::InvalidInput);
    let mut bytes = vec![1; MIB];
    arena.copy_out(buf, &mut bytes);
    assert!(bytes.iter().all(|b| *b == 0));
    let blocks = std::fs::metadata(&path).unwrap().blocks();
    assert!(blocks <= (4 * MIB / 512) as u64, "{blocks} blocks are left of {}", 8 * MIB / 512);
}
