//! Images with little memory for metadata.

use super::*;
use crate::Mapping;

fn open_with(path: &Path, options: &OpenOptions) -> Session {
    let name = ferrite_disk_base::ImageName {
        format: ferrite_disk_base::Format::Qcow2,
        path: path.to_owned(),
    };
    let disk = Image::open(&name, options).unwrap();
    let kind = test_engine();
    Session::new(Arc::new(disk), |arena| kind.open(arena, 16)).unwrap()
}

/// A chain shares the memory, and recovery has all of it: so entries are in other places.
#[test]
fn what_a_dead_process_had_in_memory_fits_into_that_of_the_next() {
    let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let at = |name: &str| dir.path().join(name);
    let new = NewImage { cluster_bytes: 512, ..NewImage::new(8 << 20) };
    create(&at("a.qcow2"), &new);
    for (name, parent) in [("b.qcow2", "a.qcow2"), ("c.qcow2", "b.qcow2")] {
        let backing = Some((parent.into(), ferrite_disk_base::Format::Qcow2));
        create(&at(name), &NewImage { backing, ..new.clone() });
    }
    let options =
        OpenOptions { metadata_bytes: 64 << 10, state_dir: Some(at("state")), ..options() };
    let mut session = open_with(&at("c.qcow2"), &options);
    for k in 0..9 {
        session.write(k << 19, &[k as u8 + 1; 512]).unwrap();
    }
    drop(session);
    let mut session = open_with(&at("c.qcow2"), &options);
    for k in 0..9 {
        let mut bytes = [0; 512];
        session.read(k << 19, &mut bytes).unwrap();
        assert_eq!(bytes, [k as u8 + 1; 512]);
    }
}

/// A walk over a disk reads the slices of a table at once, whether or not all of them fit into memory.
#[test]
fn a_slice_that_is_needed_stays_and_those_behind_it_come_with_it_for_a_walk_only() {
    let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
    let path = dir.path().join("a.qcow2");
    create(&path, &NewImage::new(1 << 30));
    let mut session = open_with(&path, &options());
    // Two tables, each of 16 slices.
    (0..32).for_each(|slice| session.write(slice << 25, &[7; 512]).unwrap());
    session.close().unwrap();
    for (metadata_bytes, fits) in [(1 << 20, true), (32 << 10, false)] {
        let mut session = open_with(&path, &OpenOptions { metadata_bytes, ..options() });
        let (disk, port) = (session.disk().clone(), session.port().clone());
        let qcow2 = qcow2_of(&disk);
        let is_here = |slice: u64| !matches!(qcow2.find(slice << 25, 512), Mapping::Miss { .. });
        let mut load = |slice: u64, len| {
            session.run(qcow2.load(&port, port.files[0], slice << 25, len)).unwrap().unwrap();
            assert!(is_here(slice), "slice {slice} of memory for {metadata_bytes}");
        };
        load(0, 4 << 20);
        assert!(!is_here(1));
        for slice in 0..32 {
            load(slice, (32 - slice) << 25);
        }
        if fits {
            assert!((0..32).all(is_here));
        }
    }
    let mut session = open_with(&path, &options());
    let (disk, port) = (session.disk().clone(), session.port().clone());
    let qcow2 = qcow2_of(&disk);
    session.run(qcow2.load(&port, port.files[0], 0, 1 << 30)).unwrap().unwrap();
    let here: Vec<u64> = (0..32)
        .filter(|slice| !matches!(qcow2.find(slice << 25, 512), Mapping::Miss { .. }))
        .collect();
    assert_eq!(here, (0..16).collect::<Vec<u64>>());
}

/// The places of failed writes keep their entries in memory.
#[test]
fn writes_that_failed_do_not_keep_others_from_what_they_need() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    create(&path, &NewImage::new(1 << 30));
    // One set of slots, and slices of 32 MiB.
    let options = OpenOptions { metadata_bytes: 32 << 10, ..options() };
    let mut session = open_with(&path, &options);
    let tenth = 20 << 25;
    session.write(tenth, &[7; 512]).unwrap();
    session.flush().unwrap();
    let (disk, port) = (session.disk().clone(), session.port().clone());
    let qcow2 = qcow2_of(&disk);
    let mut given = 0;
    for slice in 0..9u64 {
        let at = slice << 25;
        let placed = session.run(async {
            while !matches!(disk.reserve(at, 512), Extent::Data { .. }) {
                qcow2.prepare(&port, at).await?;
            }
            Ok::<_, std::io::Error>(())
        });
        given += u32::from(placed.unwrap().is_ok());
    }
    assert!((7..9).contains(&given));
    let mut bytes = [0; 512];
    session.read(tenth, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 512]);
    session.write(tenth, &[8; 512]).unwrap();
    session.write(0, &[9; 512]).unwrap();
    session.flush().unwrap();
    drop((disk, port));
    session.close().unwrap();
    assert!(check(&medium(&path)).unwrap().is_clean());
}

/// Between two reads of an entry another thread may need its place in memory.
#[test]
fn a_compressed_cluster_is_read_while_its_entry_comes_and_goes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    compressed(&path);
    let mut session = open_with(&path, &OpenOptions { metadata_bytes: 32 << 10, ..options() });
    let (disk, port) = (session.disk().clone(), session.port().clone());
    let qcow2 = qcow2_of(&disk);
    let stop = AtomicBool::new(false);
    let read = async {
        let piece = port.scratch.take(4096).await;
        for _ in 0..2000 {
            *qcow2.unpacked.lock().unwrap() = (0, Vec::new());
            qcow2.unpack(&port, port.files[0], 0, piece.span()).await?;
        }
        let mut bytes = [0; 4096];
        port.memory().copy_out(piece.span(), &mut bytes);
        Ok::<_, std::io::Error>(bytes)
    };
    let bytes = std::thread::scope(|scope| {
        scope.spawn(|| {
            for slice in (1..=16).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
                let _state = qcow2.state();
                qcow2.cache.install(slice, &[0; 512]);
            }
        });
        let bytes = session.run(read);
        stop.store(true, Ordering::Relaxed);
        bytes
    });
    assert_eq!(bytes.unwrap().unwrap(), [9; 4096]);
}
