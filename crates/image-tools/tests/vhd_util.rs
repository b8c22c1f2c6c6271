//! What vhd-util changes: the process is killed and the power is cut at each step of that, and it is done again.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::{Disk, DiskError, Format, ImageName, OpenOptions, Parents, Session};
use ferrite_image_tools::{ImageTools, NewVhd, VhdChange, VhdParent, VhdSeen};
use ferrite_images::{open_medium, vhd};
use ferrite_simio::SimWorld;
use ferrite_testkit::places::dir_in_memory;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// Bytes of most disks here: two blocks.
const DISK: u64 = 4 * MIB;
/// Bytes that are read or written at once.
const PIECE: usize = 256 << 10;

/// What ends the work of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Killed,
    PowerCut,
}

/// Images in a folder, and its copies.
struct Place {
    dir: TempDir,
    /// Its files are used as devices.
    devices: bool,
    /// Where a killed process has left what it had answered.
    state: Option<PathBuf>,
}

impl Place {
    fn new() -> Place {
        Place { dir: dir_in_memory(), devices: false, state: None }
    }

    fn copy(&self) -> Place {
        let copy = Place { devices: self.devices, state: self.state.clone(), ..Place::new() };
        for entry in fs::read_dir(self.dir.path()).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), copy.at(entry.file_name().to_str().unwrap())).unwrap();
        }
        copy
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn tools<T>(
        &self,
        world: &SimWorld,
        work: impl FnOnce(&ImageTools<'_>) -> Result<T, DiskError>,
    ) -> Result<T, DiskError> {
        work(&ImageTools {
            directory: &world.directories(self.dir.path()),
            engine: &|arena| Ok(world.engine(arena)),
            state_dir: self.state.clone(),
            fixed_size: self.devices,
            unlocked: false,
            parents: Parents::Any,
            progress: &|_| true,
        })
    }

    /// Does it undisturbed.
    #[track_caller]
    fn whole<T>(&self, work: impl FnOnce(&ImageTools<'_>) -> Result<T, DiskError>) -> T {
        self.tools(&SimWorld::new(0), work).unwrap()
    }

    /// Does it until this step, at which the process ends so. Whether it was done.
    fn until(
        &self,
        step: u64,
        end: End,
        work: impl FnOnce(&ImageTools<'_>) -> Result<(), DiskError>,
    ) -> bool {
        let world = SimWorld::new(step);
        world.stop_at(Some(step));
        let done = self.tools(&world, work);
        assert!(done.is_ok() || world.stopped(), "step {step}: {done:?}");
        match end {
            End::Killed => world.kill_process().unwrap(),
            End::PowerCut => world.cut_power().unwrap(),
        }
        done.is_ok()
    }

    fn make(&self, name: &str, new: &NewVhd) {
        self.whole(|tools| tools.make_vhd(&self.at(name), new));
    }

    fn child(&self, name: &str, parent: &str) {
        let parent = VhdParent { path: self.at(parent), raw: false };
        self.make(name, &NewVhd { parent: Some(parent), on_empty: true, ..NewVhd::default() });
    }

    fn session(&self, name: &str, read_only: bool) -> Session {
        let options = OpenOptions {
            read_only,
            unlocked: true,
            even_parent: true,
            fixed_size: self.devices,
            ..OpenOptions::default()
        };
        let name = ImageName { format: Format::Vhd, path: self.at(name) };
        let disk = Disk::open_image(&name, &options).unwrap_or_else(|e| panic!("{e}"));
        Session::new(Arc::new(disk), |arena| Ok(SimWorld::new(0).engine(arena))).unwrap()
    }

    fn write(&self, name: &str, parts: &[(u64, usize, u8)]) {
        let mut session = self.session(name, false);
        for (offset, len, byte) in parts {
            for at in (0..*len).step_by(PIECE) {
                let piece = vec![*byte; PIECE.min(len - at)];
                session.write(offset + at as u64, &piece).unwrap();
            }
        }
        session.close().unwrap();
    }

    /// The first `bytes` of a disk.
    fn content(&self, name: &str, bytes: u64) -> Vec<u8> {
        let mut session = self.session(name, true);
        let mut found = vec![0; bytes as usize];
        for (i, part) in found.chunks_mut(PIECE).enumerate() {
            session.read((i * PIECE) as u64, part).unwrap();
        }
        found
    }

    fn look(&self, name: &str) -> VhdSeen {
        self.whole(|tools| tools.look_at_vhd(&self.at(name)))
    }

    /// Asserts that an image has no damage; it may have space that it does not use.
    #[track_caller]
    fn is_sound(&self, name: &str) {
        let options = OpenOptions {
            read_only: true,
            unlocked: true,
            fixed_size: self.devices,
            ..OpenOptions::default()
        };
        let raw = open_medium(&self.at(name), &options).unwrap();
        let report = vhd::check(&raw).unwrap();
        assert_eq!(report.counts.damage, 0, "{name}: {:?}", report.findings);
    }
}

/// Ends some work at each of its steps, at one in one way and at the next in the other, on a copy of the place, until
/// it is done.
fn each_step(
    place: &Place,
    work: impl Fn(&Place, &ImageTools<'_>) -> Result<(), DiskError>,
    look: impl Fn(&Place, bool),
) {
    for step in 1.. {
        let end = if step % 2 == 0 { End::Killed } else { End::PowerCut };
        let copy = place.copy();
        let done = copy.until(step, end, |tools| work(&copy, tools));
        look(&copy, done);
        if done {
            assert!(step > 3, "{end:?}: only {step} steps");
            break;
        }
    }
}

/// A base, an image on it, and a leaf, with different data.
fn chain() -> Place {
    let place = Place::new();
    place.make("base.vhd", &NewVhd { bytes: DISK, ..NewVhd::default() });
    place.write("base.vhd", &[(0, 65536, 1)]);
    place.child("middle.vhd", "base.vhd");
    place.write("middle.vhd", &[(4096, 4096, 2), (12288, 512, 2), (3 * MIB, 4096, 2)]);
    place.child("leaf.vhd", "middle.vhd");
    place.write("leaf.vhd", &[(8192, 512, 3)]);
    place
}

#[test]
fn a_chain_reads_the_same_wherever_a_coalesce_ends_and_it_can_be_done_again() {
    let place = chain();
    let expected = place.content("leaf.vhd", DISK);
    let upper = place.content("middle.vhd", DISK);
    let file = fs::read(place.at("middle.vhd")).unwrap();
    let coalesce = |place: &Place, tools: &ImageTools<'_>| {
        let sectors = tools.coalesce_vhd(&place.at("middle.vhd"))?;
        assert_eq!(sectors, 8 + 1 + 8);
        Ok(())
    };
    each_step(&place, coalesce, |place, done| {
        assert!(place.content("leaf.vhd", DISK) == expected);
        assert!(fs::read(place.at("middle.vhd")).unwrap() == file, "it was changed");
        place.is_sound("base.vhd");
        if !done {
            place.whole(|tools| coalesce(place, tools));
        }
        assert!(place.content("base.vhd", DISK) == upper);
        let parent = VhdParent { path: place.at("base.vhd"), raw: false };
        let relink = VhdChange::Parent(parent);
        place.whole(|tools| tools.change_vhd(&place.at("leaf.vhd"), &relink));
        fs::remove_file(place.at("middle.vhd")).unwrap();
        assert!(place.content("leaf.vhd", DISK) == expected);
    });
}

/// After each end a resize that has a journal is taken back; one without has its old or its new size.
fn is_taken_back(place: &Place, name: &str, bytes: u64) {
    let (before, content) = (place.look(name), place.content(name, DISK));
    let resize = |place: &Place, tools: &ImageTools<'_>| {
        tools.resize_vhd(&place.at(name), bytes, &place.at("journal"))
    };
    let revert = |place: &Place, tools: &ImageTools<'_>| {
        tools.revert_vhd(&place.at(name), &place.at("journal"))
    };
    let (mut early, mut late) = (Cell::new(0), Cell::new(0));
    each_step(place, resize, |place, done| {
        place.is_sound(name);
        assert!(place.content(name, DISK) == content);
        let size = place.look(name).bytes;
        if size == bytes && !done {
            let is_there = place.at("journal").exists();
            let times = if is_there { &early } else { &late };
            times.set(times.get() + 1);
        }
        assert!(size == bytes || size == before.bytes && !done, "{size}");
        if place.at("journal").exists() {
            place.whole(|tools| revert(place, tools));
            assert_eq!(place.look(name), before);
            assert!(!place.at("journal").exists());
            place.is_sound(name);
            assert!(place.content(name, DISK) == content);
        }
    });
    // Only the sync of the folder comes behind the end of the journal.
    assert!(*early.get_mut() >= 1 && *late.get_mut() <= 2, "{early:?} {late:?}");
}

/// The state in which a resize is complete, and its journal still there.
fn with_journal(place: &Place, name: &str, bytes: u64) -> Place {
    let mut last = None;
    for step in 1.. {
        let copy = place.copy();
        let work =
            |tools: &ImageTools<'_>| tools.resize_vhd(&copy.at(name), bytes, &copy.at("journal"));
        let done = copy.until(step, End::Killed, work);
        if copy.at("journal").exists() {
            last = Some(copy);
        }
        if done {
            break;
        }
    }
    last.unwrap()
}

/// An image with one block, and an empty one on it.
fn pair() -> Place {
    let place = Place::new();
    place.make("base.vhd", &NewVhd { bytes: DISK, ..NewVhd::default() });
    place.write("base.vhd", &[(0, 4096, 1)]);
    place.child("leaf.vhd", "base.vhd");
    place
}

#[test]
fn a_resize_that_moves_the_table_is_taken_back_wherever_it_ends() {
    // A block is moved before that.
    is_taken_back(&pair(), "base.vhd", 2 << 30);
}

#[test]
fn a_resize_of_an_image_with_a_parent_is_taken_back_wherever_it_ends() {
    is_taken_back(&pair(), "leaf.vhd", 2 << 30);
}

#[test]
fn a_resize_in_its_place_is_taken_back_wherever_it_ends() {
    is_taken_back(&pair(), "base.vhd", 6 * MIB);
}

#[test]
fn a_fixed_disk_grows_and_is_taken_back() {
    let place = Place::new();
    place.make("fixed.vhd", &NewVhd { bytes: DISK, fixed: true, ..NewVhd::default() });
    place.write("fixed.vhd", &[(0, 4096, 1), (DISK - 4096, 4096, 2)]);
    is_taken_back(&place, "fixed.vhd", 6 * MIB);
}

#[test]
fn taking_back_can_be_interrupted_and_done_again() {
    let place = pair();
    let content = place.content("base.vhd", DISK);
    let before = place.look("base.vhd");
    let place = with_journal(&place, "base.vhd", 2 << 30);
    assert_eq!(place.look("base.vhd").bytes, 2 << 30);
    let revert = |place: &Place, tools: &ImageTools<'_>| {
        tools.revert_vhd(&place.at("base.vhd"), &place.at("journal"))
    };
    each_step(&place, revert, |place, done| {
        place.is_sound("base.vhd");
        assert!(place.content("base.vhd", DISK) == content);
        let is_there = place.at("journal").exists();
        assert!(is_there || place.look("base.vhd") == before);
        if is_there {
            assert!(!done);
            place.whole(|tools| revert(place, tools));
        }
        assert_eq!(place.look("base.vhd"), before);
    });
}

#[test]
fn headers_are_the_old_or_the_new_ones_wherever_a_change_ends() {
    let place = pair();
    let room = NewVhd { bytes: DISK, room_bytes: 512 * MIB, ..NewVhd::default() };
    place.make("room.vhd", &room);
    place.write("room.vhd", &[(0, 4096, 1)]);
    place.make("blank.vhd", &NewVhd { bytes: DISK, ..NewVhd::default() });
    let key = VhdChange::Key { nonce: [7; 32], hash: [9; 32] };
    let parent = VhdChange::Parent(VhdParent { path: place.at("base.vhd"), raw: false });
    for (name, change) in [
        ("base.vhd", VhdChange::Hidden(1)),
        ("room.vhd", VhdChange::Grow(300 * MIB)),
        ("room.vhd", VhdChange::End(12 * MIB)),
        ("blank.vhd", key),
        ("leaf.vhd", parent),
    ] {
        let before = place.look(name);
        let content = (name != "blank.vhd").then(|| place.content(name, DISK));
        let after = {
            let copy = place.copy();
            copy.whole(|tools| tools.change_vhd(&copy.at(name), &change));
            copy.look(name)
        };
        let work =
            |place: &Place, tools: &ImageTools<'_>| tools.change_vhd(&place.at(name), &change);
        each_step(&place, work, |place, done| {
            let seen = place.look(name);
            assert!(seen == after || seen == before && !done, "{change:?}: {seen:?}");
            if let Some(content) = &content {
                place.is_sound(name);
                assert!(place.content(name, DISK) == *content, "{change:?}");
            }
            place.whole(|tools| work(place, tools));
            assert_eq!(place.look(name), after);
        });
    }
}

#[test]
fn what_is_forgotten_stays_forgotten_and_the_rest_is_as_it_was() {
    let place = chain();
    // A whole block, which has a bit in the batmap.
    place.write("middle.vhd", &[(0, 2 << 20, 4)]);
    let (before, below) = (place.content("middle.vhd", DISK), place.content("base.vhd", DISK));
    let work = |place: &Place, tools: &ImageTools<'_>| {
        tools.change_vhd(&place.at("middle.vhd"), &VhdChange::Empty)
    };
    each_step(&place, work, |place, done| {
        place.is_sound("middle.vhd");
        let now = place.content("middle.vhd", DISK);
        let blocks = now.chunks(2 << 20).zip(before.chunks(2 << 20)).zip(below.chunks(2 << 20));
        for ((now, before), below) in blocks {
            assert!(now == below || now == before && !done);
        }
    });
}

#[test]
fn a_new_image_is_whole_or_none_and_never_the_old_one_in_part() {
    let place = Place::new();
    place.make("a.vhd", &NewVhd { bytes: DISK, ..NewVhd::default() });
    place.write("a.vhd", &[(0, 4096, 1), (3 * MIB, 4096, 1)]);
    let old = place.content("a.vhd", DISK);
    let work = |place: &Place, tools: &ImageTools<'_>| {
        let new = NewVhd { bytes: 2 * MIB, ..NewVhd::default() };
        tools.make_vhd(&place.at("a.vhd"), &new)
    };
    each_step(&place, work, |place, done| {
        let seen = place.tools(&SimWorld::new(0), |tools| tools.look_at_vhd(&place.at("a.vhd")));
        match seen {
            Ok(seen) if seen.bytes == 2 * MIB => {
                assert!(place.content("a.vhd", 2 * MIB).iter().all(|byte| *byte == 0));
            }
            Ok(_) => assert!(place.content("a.vhd", DISK) == old && !done),
            Err(e) => assert!(!done, "{e}"),
        }
    });
}

/// Another process reads by the tables that it read before.
#[test]
fn a_process_that_reads_the_chain_reads_the_same_while_it_is_changed_below() {
    let place = chain();
    let expected = place.content("leaf.vhd", DISK);
    // It has the whole chain locked.
    let path = ImageName { format: Format::Vhd, path: place.at("leaf.vhd") };
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = Arc::new(Disk::open_image(&path, &options).unwrap());
    let mut reader = Session::new(disk, |arena| Ok(SimWorld::new(0).engine(arena))).unwrap();
    let mut reads = || {
        let mut found = vec![0; 4 << 20];
        for (i, part) in found.chunks_mut(PIECE).enumerate() {
            reader.read((i * PIECE) as u64, part).unwrap();
        }
        assert!(found == expected);
    };
    reads();
    let change = |name: &str, change: &VhdChange| {
        place.whole(|tools| tools.change_vhd(&place.at(name), change));
    };
    place.whole(|tools| tools.coalesce_vhd(&place.at("middle.vhd")));
    reads();
    change("middle.vhd", &VhdChange::Hidden(1));
    change("base.vhd", &VhdChange::Hidden(1));
    change("leaf.vhd", &VhdChange::Parent(VhdParent { path: place.at("base.vhd"), raw: false }));
    reads();
    assert!(Path::new(&place.at("middle.vhd")).exists());
    assert!(place.content("leaf.vhd", DISK) == expected);
}

/// A hole has no data, and hides what is below.
#[test]
fn zeros_without_space_are_merged_although_what_is_below_is_not_looked_at() {
    let place = pair();
    place.child("upper.vhd", "leaf.vhd");
    let mut session = place.session("upper.vhd", false);
    session.write(0, &[5; 8192]).unwrap();
    session.write_zeroes(0, 4096).unwrap();
    session.close().unwrap();
    let expected = place.content("upper.vhd", DISK);
    assert!(expected[..4096] == [0; 4096] && place.content("base.vhd", 4096) == [1; 4096]);
    place.whole(|tools| tools.coalesce_vhd(&place.at("upper.vhd")));
    assert!(place.content("leaf.vhd", DISK) == expected);
}

/// A VHD on a device with this much room.
fn on_device(bytes: u64) -> Place {
    let mut place = Place::new();
    place.make("base.vhd", &NewVhd { bytes: DISK, ..NewVhd::default() });
    place.devices = true;
    let device = |bytes| fs::File::create(place.at("lv")).unwrap().set_len(bytes).unwrap();
    device(bytes);
    let parent = VhdParent { path: place.at("base.vhd"), raw: false };
    place.make("lv", &NewVhd { parent: Some(parent), on_empty: true, ..NewVhd::default() });
    place.write("lv", &[(0, 4096, 1)]);
    place
}

fn set_len(path: &Path, bytes: u64) {
    fs::File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

#[test]
fn a_volume_of_another_size_has_its_footer_at_the_new_end_wherever_that_ends() {
    let place = on_device(4 * MIB);
    let content = place.content("lv", DISK);
    // It is made larger first, and smaller afterwards.
    set_len(&place.at("lv"), 6 * MIB);
    for bytes in [6 * MIB, 3 * MIB] {
        let end = VhdChange::End(bytes);
        let work = |place: &Place, tools: &ImageTools<'_>| tools.change_vhd(&place.at("lv"), &end);
        each_step(&place, work, |place, _| {
            place.whole(|tools| work(place, tools));
            set_len(&place.at("lv"), bytes);
            assert!(place.content("lv", DISK) == content);
            place.is_sound("lv");
        });
        place.whole(|tools| work(&place, tools));
        set_len(&place.at("lv"), bytes);
    }
    let too_small = VhdChange::End(2 * MIB);
    place.tools(&SimWorld::new(0), |t| t.change_vhd(&place.at("lv"), &too_small)).unwrap_err();
    assert!(place.content("lv", DISK) == content);
}

#[test]
fn an_image_that_fills_its_device_can_get_another_parent() {
    let place = on_device(4 * MIB);
    let file = fs::read(place.at("lv")).unwrap();
    // The end of the block, as its table has it.
    let sector = u32::from_be_bytes(file[1536..1540].try_into().unwrap());
    let bytes = u64::from(sector) * 512 + 512 + 2 * MIB + 512;
    let change = |change: &VhdChange| {
        place.whole(|tools| tools.change_vhd(&place.at("lv"), change));
    };
    change(&VhdChange::End(bytes));
    set_len(&place.at("lv"), bytes);
    fs::copy(place.at("base.vhd"), place.at("next.vhd")).unwrap();
    change(&VhdChange::Parent(VhdParent { path: place.at("next.vhd"), raw: false }));
    fs::remove_file(place.at("base.vhd")).unwrap();
    assert!(place.content("lv", DISK)[..4096] == [1; 4096]);
    place.is_sound("lv");
}

/// Its journal, on tmpfs, has what is not in the image.
#[test]
fn what_a_killed_process_has_answered_is_put_into_an_image_before_it_is_changed() {
    let resize = |place: &Place, tools: &ImageTools<'_>| {
        tools.resize_vhd(&place.at("leaf.vhd"), 2 << 30, &place.at("journal"))
    };
    let coalesce =
        |place: &Place, tools: &ImageTools<'_>| tools.coalesce_vhd(&place.at("leaf.vhd")).map(drop);
    let hide = |place: &Place, tools: &ImageTools<'_>| {
        tools.change_vhd(&place.at("leaf.vhd"), &VhdChange::Hidden(1))
    };
    type Work<'a> = &'a dyn Fn(&Place, &ImageTools<'_>) -> Result<(), DiskError>;
    let all: [(Work<'_>, &str); 3] =
        [(&resize, "leaf.vhd"), (&coalesce, "base.vhd"), (&hide, "leaf.vhd")];
    for (work, name) in all {
        let mut place = pair();
        let state = dir_in_memory();
        place.state = Some(state.path().to_owned());
        let options = OpenOptions {
            state_dir: place.state.clone(),
            even_parent: true,
            ..OpenOptions::default()
        };
        let path = ImageName { format: Format::Vhd, path: place.at("leaf.vhd") };
        let disk = Arc::new(Disk::open_image(&path, &options).unwrap());
        let mut session = Session::new(disk, |arena| Ok(SimWorld::new(0).engine(arena))).unwrap();
        session.write(MIB, &[7; 4096]).unwrap();
        drop(session);
        assert!(place.content("leaf.vhd", DISK)[MIB as usize] == 0, "it is in the image");
        place.whole(|tools| work(&place, tools));
        assert!(place.content(name, DISK)[MIB as usize..][..4096] == [7; 4096]);
        assert!(fs::read_dir(state.path()).unwrap().next().is_none(), "there is a journal");
    }
}
