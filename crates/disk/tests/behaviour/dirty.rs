//! The maps of what has changed on a disk: what they name, and when they are void.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::{Disk, ErrorKind, ImageName, OpenOptions, Session};
use ferrite_image_tools::{DirtyMaps, MapChange, NewImage};
use ferrite_testkit::faulty::{Faults, Kind, Ops};
use ferrite_testkit::images::work;
use tempfile::TempDir;

use crate::common::dir_on_disk;
use crate::model::{name, session_of, tools};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const EIO: i32 = 5;
const FORMATS: [&str; 3] = ["img", "vhd", "qcow2"];

/// A disk of 40 MiB with a map "nightly", in a folder of its own.
struct Mapped {
    dir: TempDir,
    path: PathBuf,
}

impl Mapped {
    fn new(extension: &str) -> Mapped {
        let dir = dir_on_disk();
        let path = dir.path().join("a").with_extension(extension);
        let new = NewImage { bytes: Some(40 * MIB), ..NewImage::default() };
        tools(|tools| tools.create(&name(&path), &new)).unwrap();
        let mapped = Mapped { dir, path };
        mapped.change(MapChange::Begin("nightly".into()));
        mapped
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn maps_path(&self) -> PathBuf {
        path_of_maps(&self.path)
    }

    fn change(&self, change: MapChange) {
        tools(|tools| tools.change_maps(&name(&self.path), &change)).unwrap();
    }

    fn options(&self) -> OpenOptions {
        OpenOptions { state_dir: Some(self.state()), ..OpenOptions::default() }
    }

    fn open(&self) -> Session {
        session_of(Disk::open_image(&name(&self.path), &self.options()).unwrap())
    }

    fn maps(&self) -> DirtyMaps {
        maps(&self.path, Some(&self.state()))
    }

    /// The changes in the map, as offset and length in KiB.
    fn changed(&self) -> Vec<(u64, u64)> {
        let maps = self.maps();
        assert_eq!(maps.void, None);
        changed(&maps)
    }

    /// The changed parts of an open disk, as offsets and lengths in KiB.
    fn changed_in(&self, session: &Session) -> Vec<(u64, u64)> {
        let seen = session.disk().maps(Some(&self.state())).unwrap().unwrap();
        let part = |part: &std::ops::Range<u64>| (part.start / KIB, (part.end - part.start) / KIB);
        let changed: Vec<_> = seen.maps[0].changed.iter().map(part).collect();
        assert_eq!(viewed(session), changed, "what clients of the disk are told");
        changed
    }

    /// Why the maps are void.
    #[track_caller]
    fn void(&self) -> String {
        self.maps().void.expect("void maps")
    }
}

/// The changed stretches of the first map, as the open disk tells them to its clients: offsets and lengths.
fn viewed(session: &Session) -> Vec<(u64, u64)> {
    let view = session.disk().dirty_view().unwrap().expect("maps");
    let all = view.stretches(&view.maps()[0].id, 0..40 * MIB, usize::MAX).unwrap();
    let (mut at, mut changed) = (0, Vec::new());
    for part in all {
        if part.changed {
            changed.push((at / KIB, part.len / KIB));
        }
        at += part.len;
    }
    changed
}

fn path_of_maps(image: &Path) -> PathBuf {
    let mut path = image.to_owned().into_os_string();
    path.push(".ferrite-dirty");
    path.into()
}

fn maps(path: &Path, state: Option<&Path>) -> DirtyMaps {
    work(state, |tools| tools.dirty_maps(&name(path))).unwrap()
}

fn changed(maps: &DirtyMaps) -> Vec<(u64, u64)> {
    let part =
        |part: &ferrite_image_tools::Changed| (part.start_bytes / KIB, part.length_bytes / KIB);
    maps.maps[0].changed.iter().map(part).collect()
}

#[test]
fn a_map_names_the_blocks_of_all_changes_and_their_regions_after_a_power_cut() {
    for extension in FORMATS {
        let disk = Mapped::new(extension);
        assert_eq!(disk.changed(), [], "{extension}");
        let mut session = disk.open();
        session.write(9 * MIB + 512, &[7; 512]).unwrap();
        // Across the end of a region.
        session.write(20 * MIB - 512, &[7; 1024]).unwrap();
        session.write_zeroes(30 * MIB, 4096).unwrap();
        let blocks = [(9 * KIB, 64), (20 * KIB - 64, 128), (30 * KIB, 64)];
        assert_eq!(disk.changed_in(&session), blocks, "{extension}, while it is open");
        session.close().unwrap();
        assert_eq!(disk.changed(), blocks, "{extension}, after it was closed");
        let mut session = disk.open();
        session.write(0, &[7; 512]).unwrap();
        drop(session);
        assert_eq!(disk.changed(), [&[(0, 64)][..], &blocks].concat(), "{extension}");
        fs::remove_dir_all(disk.state()).unwrap();
        let regions = [(0, 4 * KIB), (8 * KIB, 4 * KIB), (16 * KIB, 8 * KIB), (28 * KIB, 4 * KIB)];
        assert_eq!(disk.changed(), regions, "{extension}, after a power cut");
    }
}

#[test]
fn what_is_in_memory_of_maps_that_have_ended_is_removed() {
    let disk = Mapped::new("img");
    let files = || fs::read_dir(disk.state()).unwrap().count();
    let change = |change| {
        work(Some(&disk.state()), |tools| tools.change_maps(&name(&disk.path), &change)).unwrap()
    };
    for i in 0..3 {
        let mut session = disk.open();
        session.write(MIB, &[1; 4096]).unwrap();
        session.close().unwrap();
        change(MapChange::Begin(format!("m{i}")));
        assert_eq!(files(), 1);
        // It is the one that counts.
        assert_eq!(disk.changed(), [(KIB, 64)]);
    }
    for ended in ["nightly", "m0", "m1", "m2"] {
        change(MapChange::End(ended.to_owned()));
    }
    assert_eq!(files(), 0);
}

#[test]
fn a_discard_is_a_change() {
    let disk = Mapped::new("img");
    let mut session = disk.open();
    session.discard(5 * MIB, MIB).unwrap();
    assert_eq!(disk.changed_in(&session), [(5 * KIB, KIB)]);
}

#[test]
fn a_region_is_synced_once_and_then_costs_no_sync_of_the_map() {
    let disk = Mapped::new("img");
    let faults = Faults::none();
    let opened = Disk::open_image(&name(&disk.path), &disk.options()).unwrap();
    let mut session = Session::new(Arc::new(opened), |arena| faults.open(arena, 64)).unwrap();
    faults.list();
    for i in 0..16 {
        session.write(8 * MIB + i * 128 * KIB, &[7; 4096]).unwrap();
    }
    let syncs = |faults: &Faults| {
        let list = faults.take_list();
        list.iter().filter(|op| Kind::of(op) == Kind::Sync).count()
    };
    assert_eq!(syncs(&faults), 1);
    faults.list();
    session.write(12 * MIB, &[7; 4096]).unwrap();
    assert_eq!(syncs(&faults), 1);
}

#[test]
fn each_of_several_maps_names_what_has_changed_since_it_was_begun() {
    let disk = Mapped::new("qcow2");
    let mut session = disk.open();
    session.write(MIB, &[7; 512]).unwrap();
    session.close().unwrap();
    disk.change(MapChange::Begin("weekly".into()));
    let mut session = disk.open();
    session.write(36 * MIB, &[7; 512]).unwrap();
    session.close().unwrap();
    let all = disk.maps();
    let named = |i: usize| (all.maps[i].name.clone(), all.maps[i].changed.len());
    assert_eq!((named(0), named(1)), (("nightly".into(), 2), ("weekly".into(), 1)));
    assert_ne!(all.maps[0].id, all.maps[1].id);
    disk.change(MapChange::Clear("nightly".into()));
    let cleared = disk.maps();
    let nightly = cleared.maps.iter().find(|map| map.name == "nightly").unwrap();
    assert_eq!(nightly.changed, []);
    assert_ne!(nightly.id, all.maps[0].id);
    disk.change(MapChange::End("nightly".into()));
    disk.change(MapChange::End("weekly".into()));
    assert!(!disk.maps_path().exists());
    assert_eq!(disk.maps().path, None);
}

#[test]
fn a_map_of_another_file_is_void_for_good() {
    for extension in FORMATS {
        let disk = Mapped::new(extension);
        let copy = disk.dir.path().join("copy").with_extension(extension);
        fs::copy(&disk.path, &copy).unwrap();
        fs::copy(disk.maps_path(), path_of_maps(&copy)).unwrap();
        let why = maps(&copy, None).void.unwrap();
        assert!(why.contains("copied or restored"), "{extension}: {why}");
        assert_eq!(changed(&maps(&copy, None)), [(0, 40 * KIB)], "everything");
        let opened = Disk::open_image(&name(&copy), &OpenOptions::default()).unwrap();
        assert!(!opened.is_tracked());
        drop(opened);
        let why = maps(&copy, None).void.unwrap();
        assert!(why.contains("given up before"), "{extension}: {why}");
        assert_eq!(disk.maps().void, None, "that of the original is valid");
    }
}

#[test]
fn a_change_by_another_program_makes_a_map_void() {
    for extension in FORMATS {
        let disk = Mapped::new(extension);
        let mut session = disk.open();
        session.write(MIB, &[7; 512]).unwrap();
        session.close().unwrap();
        let file = File::options().write(true).open(&disk.path).unwrap();
        let mut sector = [0; 512];
        File::open(&disk.path).unwrap().read_exact_at(&mut sector, 0).unwrap();
        file.write_all_at(&sector, 0).unwrap();
        assert!(disk.void().contains("another program has changed"), "{extension}");
    }
}

#[test]
fn a_disk_that_has_grown_has_changed_there_and_one_that_has_shrunk_makes_its_map_void() {
    let disk = Mapped::new("img");
    let mut session = disk.open();
    session.write(0, &[7; 512]).unwrap();
    drop(session);
    let file = File::options().write(true).open(&disk.path).unwrap();
    file.set_len(41 * MIB).unwrap();
    assert_eq!(disk.changed(), [(0, 64), (40 * KIB, KIB)]);
    let mut session = disk.open();
    session.write(40 * MIB + 4096, &[7; 512]).unwrap();
    session.close().unwrap();
    assert_eq!(disk.changed(), [(0, 64), (40 * KIB, KIB)]);
    file.set_len(39 * MIB).unwrap();
    assert!(disk.void().contains("had 41943040 bytes"), "{}", disk.void());
}

#[test]
fn what_is_no_file_of_maps_is_void_or_refused_with_the_next_step() {
    let disk = Mapped::new("img");
    let good = fs::read(disk.maps_path()).unwrap();
    for (bytes, says) in [
        (&good[..700], "length does not fit"),
        (b"some text", "too short"),
        (&[0; 8704][..], "no file of dirty maps"),
        (b"", "too short"),
    ] {
        fs::write(disk.maps_path(), bytes).unwrap();
        assert!(disk.void().contains(says), "{}", disk.void());
        drop(disk.open());
    }
    disk.change(MapChange::Begin("again".into()));
    assert_eq!(disk.changed(), []);
    fs::remove_file(disk.maps_path()).unwrap();
    std::os::unix::fs::symlink(disk.path.with_extension("else"), disk.maps_path()).unwrap();
    let e = Disk::open_image(&name(&disk.path), &disk.options()).unwrap_err();
    assert!(e.to_string().contains("no regular file") && e.help().contains("full one"), "{e}");
}

#[test]
fn a_map_that_cannot_be_written_is_void_and_the_guest_goes_on() {
    let disk = Mapped::new("img");
    let faults = Faults::none();
    let opened = Disk::open_image(&name(&disk.path), &disk.options()).unwrap();
    let mut session = Session::new(Arc::new(opened), |arena| faults.open(arena, 64)).unwrap();
    faults.set([Ops::among(&[Kind::Sync]).fail(EIO).once()]);
    session.write(MIB, &[7; 512]).unwrap();
    session.write(9 * MIB, &[7; 512]).unwrap();
    assert_eq!(viewed(&session), [(0, 40 * KIB)], "everything may have changed");
    session.close().unwrap();
    assert!(disk.void().contains("given up before"), "{}", disk.void());
}

#[test]
fn a_write_fails_whose_map_can_neither_be_written_nor_given_up() {
    let disk = Mapped::new("img");
    let faults = Faults::none();
    let opened = Disk::open_image(&name(&disk.path), &disk.options()).unwrap();
    let mut session = Session::new(Arc::new(opened), |arena| faults.open(arena, 64)).unwrap();
    faults.set([Ops::among(&[Kind::Sync]).fail(EIO)]);
    let e = session.write(MIB, &[7; 512]).unwrap_err();
    assert!(e.to_string().contains("neither be written nor be made void"), "{e}");
    faults.clear();
    session.write(MIB, &[7; 512]).unwrap();
    assert_eq!(disk.changed_in(&session), [(KIB, 64)]);
}

#[test]
fn changes_of_maps_that_make_no_sense_are_refused_with_the_next_step() {
    let disk = Mapped::new("img");
    let refused = |change: MapChange| {
        tools(|tools| tools.change_maps(&name(&disk.path), &change)).unwrap_err()
    };
    let again = refused(MapChange::Begin("nightly".into()));
    assert!(again.kind() == ErrorKind::Refused && again.help().contains("clear"), "{again:?}");
    assert_eq!(refused(MapChange::End("weekly".into())).kind(), ErrorKind::NotFound);
    assert_eq!(refused(MapChange::Begin("a/b".into())).kind(), ErrorKind::Usage);
    for i in 1..16 {
        disk.change(MapChange::Begin(format!("map-{i}")));
    }
    assert!(refused(MapChange::Begin("one-more".into())).why().contains("16 maps"));
    let session = disk.open();
    assert_eq!(refused(MapChange::End("nightly".into())).kind(), ErrorKind::InUse);
    drop(session);
    let null = ImageName::parse("raw:/dev/null").unwrap();
    assert!(tools(|tools| tools.change_maps(&null, &MapChange::Begin("a".into()))).is_err());
}

/// The ranges of the map of this name, as offsets and lengths in KiB.
fn changed_of(maps: &DirtyMaps, map: &str) -> Vec<(u64, u64)> {
    assert_eq!(maps.void, None);
    let map = maps.maps.iter().find(|seen| seen.name == map).expect("such a map");
    map.changed.iter().map(|part| (part.start_bytes / KIB, part.length_bytes / KIB)).collect()
}

impl Mapped {
    fn write(&self, at: u64) {
        let mut session = self.open();
        session.write(at, &[7; 512]).unwrap();
        session.close().unwrap();
    }

    /// With the blocks in memory.
    fn does<T>(
        &self,
        what: impl FnOnce(&ferrite_image_tools::ImageTools<'_>) -> Result<T, ferrite_disk::DiskError>,
    ) -> T {
        work(Some(&self.state()), what).unwrap()
    }
}

#[test]
fn maps_go_on_with_a_snapshots_leaf_and_back_and_the_snapshot_keeps_them_as_they_were() {
    for extension in ["vhd", "qcow2"] {
        let disk = Mapped::new(extension);
        disk.write(9 * MIB);
        let was = disk.path.with_file_name("was").with_extension(extension);
        let (leaf, parent) = (name(&disk.path), name(&was));
        disk.does(|tools| tools.snapshot_and(&leaf, &parent, Some("next")));
        // Before and after the first write, which binds the maps to the leaf.
        for written in [&[][..], &[(20 * KIB, 64)]] {
            let both = [&[(9 * KIB, 64)][..], written].concat();
            assert_eq!(changed_of(&disk.maps(), "nightly"), both, "{extension}");
            assert_eq!(changed_of(&disk.maps(), "next"), written, "{extension}");
            let frozen = maps(&was, Some(&disk.state()));
            assert_eq!(changed_of(&frozen, "nightly"), [(9 * KIB, 64)], "{extension}");
            assert_eq!(frozen.maps.len(), 1);
            disk.write(20 * MIB);
        }
        disk.does(|tools| tools.coalesce(&leaf, false));
        disk.write(30 * MIB);
        let next = [(20 * KIB, 64), (30 * KIB, 64)];
        assert_eq!(changed_of(&disk.maps(), "next"), next, "{extension}");
        assert!(!path_of_maps(&was).exists());
        disk.does(|tools| tools.resize(&leaf, 44 << 20, false));
        let grown = [&next[..], &[(40 * KIB, 4 * KIB)]].concat();
        assert_eq!(changed_of(&disk.maps(), "next"), grown, "{extension}");
    }
}

#[test]
fn a_snapshot_that_is_cut_off_before_its_last_step_leaves_maps_that_fit_the_old_leaf() {
    let disk = Mapped::new("qcow2");
    disk.write(9 * MIB);
    let old = disk.path.with_file_name("old.qcow2");
    // A second name, as a snapshot that is cut off leaves one.
    fs::hard_link(&disk.path, &old).unwrap();
    let was = disk.path.with_file_name("was.qcow2");
    disk.does(|tools| tools.snapshot_and(&name(&disk.path), &name(&was), Some("next")));
    fs::rename(&old, &disk.path).unwrap();
    // A user who takes the old leaf up again makes it writable (ferrite image repair says so, too).
    fs::set_permissions(&disk.path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(changed_of(&disk.maps(), "next"), []);
    disk.write(20 * MIB);
    assert_eq!(changed_of(&disk.maps(), "next"), [(20 * KIB, 64)]);
    assert_eq!(changed_of(&disk.maps(), "nightly"), [(9 * KIB, 64), (20 * KIB, 64)]);
}

#[test]
fn blocks_in_memory_are_kept_for_each_map_when_another_is_begun() {
    let disk = Mapped::new("img");
    disk.write(9 * MIB);
    disk.does(|tools| tools.change_maps(&name(&disk.path), &MapChange::Begin("next".into())));
    disk.write(9 * MIB + 256 * KIB);
    let first = [(9 * KIB, 64), (9 * KIB + 256, 64)];
    assert_eq!(changed_of(&disk.maps(), "nightly"), first);
    assert_eq!(changed_of(&disk.maps(), "next"), first[1..]);
}

#[test]
fn blocks_that_one_host_remembers_are_not_believed_after_another_has_written() {
    let disk = Mapped::new("img");
    disk.write(9 * MIB);
    let elsewhere = disk.dir.path().join("elsewhere");
    let options = OpenOptions { state_dir: Some(elsewhere.clone()), ..OpenOptions::default() };
    let mut session = session_of(Disk::open_image(&name(&disk.path), &options).unwrap());
    session.write(10 * MIB, &[7; 512]).unwrap();
    // It is killed.
    drop(session);
    let region = [(8 * KIB, 4 * KIB)];
    assert_eq!(changed_of(&maps(&disk.path, Some(&elsewhere)), "nightly"), region);
    assert_eq!(disk.changed(), region);
    disk.write(20 * MIB);
    assert_eq!(disk.changed(), [region[0], (20 * KIB, 64)]);
}

#[test]
fn maps_are_copied_to_an_image_that_reads_the_same_and_what_that_has_recorded_stays() {
    let disk = Mapped::new("img");
    disk.write(9 * MIB);
    let other = disk.path.with_file_name("b.qcow2");
    disk.does(|tools| {
        tools.convert(
            &name(&disk.path),
            &name(&other),
            &ferrite_image_tools::Convert::default(),
        )?;
        tools.change_maps(&name(&other), &MapChange::Begin("own".into()))?;
        tools.copy_maps(&name(&disk.path), &name(&other), Some("next"))
    });
    let all = maps(&other, Some(&disk.state()));
    assert_eq!(changed_of(&all, "nightly"), [(9 * KIB, 64)]);
    assert_eq!((changed_of(&all, "next"), changed_of(&all, "own")), (vec![], vec![]));
    assert_eq!(all.maps[0].id, disk.maps().maps[0].id);
}
