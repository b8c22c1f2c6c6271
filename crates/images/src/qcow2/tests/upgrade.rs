//! Conversion of version 2 to version 3.

use ferrite_simio::SimWorld;

use super::*;

/// Images of version 2 with data, on a parent whose name has about so many bytes; 0: without a parent.
fn made(dir: &Path, name_bytes: usize) -> std::path::PathBuf {
    let path = dir.join("a.qcow2");
    std::fs::write(dir.join("parent"), vec![5; 1 << 20]).unwrap();
    let name = "./".repeat(name_bytes / 2) + "parent";
    let backing = (name_bytes > 0).then_some((name, ferrite_disk_base::Format::Raw));
    create(&path, &NewImage { version: 2, cluster_bytes: 4096, backing, ..NewImage::new(1 << 20) });
    let mut session = open(&path);
    session.write(1 << 16, &[3; 8192]).unwrap();
    session.close().unwrap();
    path
}

fn content(path: &Path) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    open(path).read(0, &mut bytes).unwrap();
    bytes
}

fn version(path: &Path) -> u32 {
    with_qcow2(&open(path), Qcow2::version)
}

/// Upgrades with an engine of this world, which may stop meanwhile: an error has no reason then.
fn upgraded(world: &SimWorld, path: &Path) -> Result<bool, Option<ferrite_disk_base::DiskError>> {
    let raw = medium(path);
    let arena = Arena::new(2 << 20).unwrap();
    let mut reactor = Reactor::new(world.engine(arena.clone()));
    let files: Vec<_> = raw.files().into_iter().map(|f| reactor.add_file(f).unwrap()).collect();
    let scratch = Scratch::new(arena.clone(), arena.span(0, 256 << 10));
    let port = Port { io: reactor.io(), files: Rc::from(files), scratch };
    let done = reactor.block_on(upgrade(&port, &raw));
    world.cut_power().unwrap();
    done.map_err(|_| None)?.map_err(Some)
}

#[test]
fn an_image_has_the_one_version_or_the_other_wherever_the_power_is_cut() {
    // Names that stay in the first sector, that leave it with the longer header, and that never fit into it.
    for name_bytes in [0, 20, 390, 900] {
        let mut cuts = 0;
        for stop in 1.. {
            let dir = tempfile::TempDir::new_in("/dev/shm").unwrap();
            let path = made(dir.path(), name_bytes);
            let before = content(&path);
            let world = SimWorld::new(stop);
            world.stop_at(Some(stop));
            let done = upgraded(&world, &path);
            assert!(content(&path) == before, "{name_bytes}, step {stop}");
            let found = version(&path);
            assert!(check(&medium(&path)).unwrap().is_clean(), "{name_bytes}, step {stop}");
            assert!(qemu_check(&path).is_none_or(|code| code == 0), "{name_bytes}, step {stop}");
            match done {
                Ok(changed) => assert!(changed && found == 3),
                Err(_) => cuts += 1,
            }
            if done.is_ok() {
                assert!(!upgraded(&SimWorld::new(0), &path).unwrap());
                break;
            }
        }
        assert!(cuts >= 2, "{name_bytes}: {cuts} cuts");
    }
}

#[test]
fn what_is_damaged_or_has_no_room_stays_as_it_is() {
    let refused = |path: &Path, why: &str| {
        let before = std::fs::read(path).unwrap();
        let error = upgraded(&SimWorld::new(0), path).unwrap_err().unwrap();
        assert!(error.why().contains(why), "{error}");
        assert!(std::fs::read(path).unwrap() == before);
    };
    let dir = tempfile::tempdir().unwrap();
    let path = made(dir.path(), 0);
    // An entry with a flag that only version 3 has.
    let table = with_qcow2(&open(&path), |qcow2| qcow2.l1_entry(0) & entry::OFFSET);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&1u64.to_be_bytes(), table).unwrap();
    refused(&path, "damaged");

    let path = dir.path().join("b.qcow2");
    let backing = Some(("./".repeat(190) + "parent", ferrite_disk_base::Format::Raw));
    create(&path, &NewImage { version: 2, cluster_bytes: 512, backing, ..NewImage::new(1 << 20) });
    refused(&path, "no room");
}
