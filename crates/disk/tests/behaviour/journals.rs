//! Answered writes of a killed backend are found again with its image, and never with another one.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, DiskError, ErrorKind, Format, ImageName, OpenOptions};
use ferrite_image_tools::{JournalInfo, JournalState, NewImage};

use crate::common::{Loop, MIB, Mount, Queue, dir_in_memory, dir_on_disk, run, skipped, work};
use ferrite_testkit::errno::EIO;
use ferrite_testkit::faulty::{Faults, Kind, Ops};

const FORMATS: [Format; 2] = [Format::Vhd, Format::Qcow2];

fn name(format: Format, path: &Path) -> ImageName {
    ImageName { format, path: path.to_owned() }
}

fn create(image: &ImageName, force: bool) {
    let new = NewImage { bytes: Some(8 * MIB), force, ..NewImage::default() };
    work(None, |tools| tools.create(image, &new)).unwrap();
}

fn serve(image: &ImageName, state: &Path, read_only: bool) -> Result<Queue, DiskError> {
    let state_dir = Some(state.to_owned());
    let options = OpenOptions { read_only, state_dir, ..OpenOptions::default() };
    Disk::open_image(image, &options).map(Queue::new)
}

/// A backend of a new image was killed with a write that was answered.
fn killed(format: Format, dir: &Path, state: &Path) -> ImageName {
    let image = name(format, &dir.join(format!("a.{format}")));
    create(&image, false);
    serve(&image, state, false).unwrap().write(MIB, &[5; 512]).unwrap();
    // A child of another test holds it, too, until that child runs its program.
    repeat(|| journals(state).iter().all(|journal| journal.state != JournalState::InUse));
    image
}

/// Until it is true, some seconds at most.
fn repeat(mut done: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("it does not come true");
}

fn byte(image: &ImageName, state: &Path) -> u8 {
    serve(image, state, true).unwrap().read(MIB, 512).unwrap()[0]
}

fn journals(state: &Path) -> Vec<JournalInfo> {
    work(Some(state), |tools| tools.journals()).unwrap()
}

fn is_usable(image: &ImageName, state: &Path) -> bool {
    work(Some(state), |tools| tools.check(image, true)).is_ok_and(|report| report.usable)
}

/// Unflushed writes may be lost then, as after a power cut. A takeover would put them in the place of flushed data.
#[test]
fn a_close_whose_sync_has_failed_leaves_nothing_to_be_taken_over() {
    for format in FORMATS {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let image = name(format, &dir.path().join(format!("a.{format}")));
        create(&image, false);
        let disk = serve(&image, state.path(), false).unwrap().disk;
        let faults = Faults::none();
        let mut queue = Queue::on(Arc::clone(&disk), |engine| faults.around(engine));
        drop(disk);
        queue.write(MIB, &[5; 512]).unwrap();
        faults.set([Ops::from(Kind::Sync).fail(EIO)]);
        queue.close().unwrap_err();
        drop(queue);
        assert!(journals(state.path()).iter().all(|journal| journal.records == 0), "{format}");
        assert_eq!(byte(&image, state.path()), 0, "{format}");
    }
}

#[test]
fn a_volume_that_comes_back_as_another_device_has_what_was_answered() {
    for format in FORMATS {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let file = dir.path().join("volume");
        fs::File::create(&file).unwrap().set_len(32 * MIB).unwrap();
        let Some(before) = Loop::attach(&file, 512) else { return };
        let image = name(format, &before.0);
        create(&image, true);
        serve(&image, state.path(), false).unwrap().write(MIB, &[5; 512]).unwrap();
        let after = Loop::attach(&file, 512).unwrap();
        let back = name(format, &after.0);
        drop(before);
        assert_eq!(byte(&back, state.path()), 5, "{format}");

        // Another volume, with an image of its own, has the number meanwhile.
        let other = dir.path().join("other");
        fs::File::create(&other).unwrap().set_len(32 * MIB).unwrap();
        let device = image.path.to_str().unwrap();
        if run("losetup", &[device, other.to_str().unwrap()]).is_some() {
            let _detached = Loop(image.path.clone());
            create(&image, true);
            assert_eq!(byte(&image, state.path()), 0, "{format}");
            assert!(is_usable(&image, state.path()), "{format}");
            serve(&image, state.path(), false).unwrap().close().unwrap();
        }
        let mut disk = serve(&back, state.path(), false).unwrap();
        assert!(disk.read(MIB, 512).unwrap() == [5; 512], "{format}");
        disk.close().unwrap();
        assert_eq!(journals(state.path()), [], "{format}");
    }
}

#[test]
fn a_new_image_in_the_place_of_one_that_is_gone_is_in_order_and_the_journal_is_stale() {
    for format in FORMATS {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let image = killed(format, dir.path(), state.path());
        drop(serve(&image, state.path(), true).unwrap());
        fs::remove_file(&image.path).unwrap();
        // File systems give the number of a file that is gone to the next one.
        create(&image, false);
        assert!(is_usable(&image, state.path()), "{format}");
        assert_eq!(byte(&image, state.path()), 0, "{format}");
        let found = journals(state.path());
        assert_eq!((found.len(), found[0].state), (1, JournalState::Stale), "{format}");
        assert!(found[0].records > 0 && found[0].path == image.path.to_str().unwrap());
        let dropped = work(Some(state.path()), |tools| tools.drop_journals(&[], true, false));
        assert_eq!(dropped.unwrap(), found, "{format}");
        assert_eq!(journals(state.path()), [], "{format}");
    }
}

/// The command of an administrator who wants to clean up.
fn drop_stale(state: &Path) -> Vec<JournalInfo> {
    work(Some(state), |tools| tools.drop_journals(&[], true, false)).unwrap()
}

#[test]
fn the_journal_of_an_image_that_has_another_name_now_is_not_stale() {
    for format in FORMATS {
        for to in ["renamed", "other/a"] {
            let (dir, state) = (dir_on_disk(), dir_in_memory());
            fs::create_dir(dir.path().join("other")).unwrap();
            let image = killed(format, dir.path(), state.path());
            let renamed = name(format, &dir.path().join(to));
            fs::rename(&image.path, &renamed.path).unwrap();
            // Another image under its old name is no reason, either.
            create(&image, false);
            assert_eq!(journals(state.path())[0].state, JournalState::Away, "{format}, {to}");
            assert_eq!(drop_stale(state.path()), [], "{format}, {to}");
            assert_eq!(byte(&renamed, state.path()), 5, "{format}, {to}");
        }
    }
}

#[test]
fn the_journal_of_an_image_that_was_deleted_with_its_folder_is_stale() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let folder = dir.path().join("folder");
    fs::create_dir(&folder).unwrap();
    killed(Format::Vhd, &folder, state.path());
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(drop_stale(state.path()).len(), 1);
}

#[test]
fn the_journal_of_an_image_whose_file_system_is_not_mounted_is_not_stale() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let (file, folder) = (dir.path().join("volume"), dir.path().join("folder"));
    fs::create_dir(&folder).unwrap();
    fs::File::create(&file).unwrap().set_len(64 * MIB).unwrap();
    if run("mkfs.ext4", &["-q", file.to_str().unwrap()]).is_none() {
        return skipped("there is no mkfs.ext4 here");
    }
    let mount = || Mount::new(&["-o", "loop", file.to_str().unwrap()], &folder);
    let Some(mounted) = mount() else { return };
    let image = killed(Format::Vhd, &folder, state.path());
    drop(mounted);
    assert_eq!(journals(state.path())[0].state, JournalState::Away);
    assert_eq!(drop_stale(state.path()), []);
    let Some(_mounted) = mount() else { return };
    assert_eq!(byte(&image, state.path()), 5);
    fs::remove_file(&image.path).unwrap();
    assert_eq!(drop_stale(state.path()).len(), 1);
}

#[test]
fn the_journal_of_a_volume_that_is_detached_is_not_stale() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let file = dir.path().join("volume");
    fs::File::create(&file).unwrap().set_len(32 * MIB).unwrap();
    let Some(device) = Loop::attach(&file, 512) else { return };
    let image = name(Format::Vhd, &device.0);
    create(&image, true);
    serve(&image, state.path(), false).unwrap().write(MIB, &[5; 512]).unwrap();
    drop(device);
    // Another test may have that device for a moment.
    repeat(|| journals(state.path())[0].state == JournalState::Away);
    assert_eq!(drop_stale(state.path()), []);
    let back = Loop::attach(&file, 512).unwrap();
    assert_eq!(byte(&name(Format::Vhd, &back.0), state.path()), 5);
}

#[test]
fn a_journal_knows_its_image_by_any_path_that_the_kernel_takes() {
    use std::os::unix::ffi::OsStrExt;
    let bytes = std::ffi::OsStr::from_bytes(b"\xe9t\xe9");
    let long: std::path::PathBuf = vec!["x".repeat(200); 19].iter().collect();
    for folder in [bytes.as_ref(), long.as_path()] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let folder = dir.path().join(folder);
        fs::create_dir_all(&folder).unwrap();
        killed(Format::Vhd, &folder, state.path());
        assert_eq!(journals(state.path())[0].state, JournalState::Kept);
    }
}

#[test]
fn an_image_is_renamed_with_what_was_answered_and_a_copy_beside_it_takes_nothing_away() {
    for format in FORMATS {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let image = killed(format, dir.path(), state.path());
        let copy = name(format, &dir.path().join("copy"));
        fs::copy(&image.path, &copy.path).unwrap();
        let mut disk = serve(&copy, state.path(), false).unwrap();
        assert!(disk.read(MIB, 512).unwrap() == [0; 512], "{format}");
        disk.write(2 * MIB, &[7; 512]).unwrap();
        // Both at once, as two guests have them.
        let mut original = serve(&image, state.path(), false).unwrap();
        assert!(original.read(MIB, 512).unwrap() == [5; 512], "{format}");
        assert!(original.read(2 * MIB, 512).unwrap() == [0; 512], "{format}");
        drop((disk, original));
        let renamed = name(format, &dir.path().join("renamed"));
        fs::rename(&image.path, &renamed.path).unwrap();
        assert_eq!(byte(&renamed, state.path()), 5, "{format}");
        for image in [&renamed, &copy] {
            serve(image, state.path(), false).unwrap().close().unwrap();
        }
        assert_eq!(journals(state.path()), [], "{format}");
        assert_eq!(byte(&renamed, state.path()), 5, "{format}");
    }
}

/// It may be the image, or a backup from before.
#[test]
fn a_copy_whose_original_is_gone_is_refused_until_the_journal_is_dropped() {
    for format in FORMATS {
        let (dir, other, state) = (dir_on_disk(), dir_in_memory(), dir_in_memory());
        let image = killed(format, dir.path(), state.path());
        let copy = name(format, &other.path().join("copy"));
        fs::copy(&image.path, &copy.path).unwrap();
        let away = dir.path().join("away");
        fs::rename(&image.path, &away).unwrap();
        let left = journals(state.path());
        for read_only in [true, false] {
            let error = serve(&copy, state.path(), read_only).err().unwrap();
            assert!(error.help().contains(&left[0].name), "{format}: {}", error.help());
            assert!(error.why().contains(image.path.to_str().unwrap()), "{format}: {error}");
        }
        assert!(!is_usable(&copy, state.path()), "{format}");
        work(Some(state.path()), |tools| tools.repair(&copy, true)).unwrap_err();
        assert_eq!(byte(&name(format, &away), state.path()), 5, "{format}");
        let names = [left[0].name.clone()];
        work(Some(state.path()), |tools| tools.drop_journals(&names, false, false)).unwrap();
        serve(&copy, state.path(), false).unwrap().close().unwrap();
        assert!(is_usable(&copy, state.path()), "{format}");
    }
}

/// Another file at the image's own place is not the image, wherever that is.
#[test]
fn a_copy_that_was_renamed_over_its_original_is_told_from_it() {
    for format in FORMATS {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let image = killed(format, dir.path(), state.path());
        let copy = dir.path().join("copy");
        fs::copy(&image.path, &copy).unwrap();
        fs::rename(&copy, &image.path).unwrap();
        let error = serve(&image, state.path(), true).err().unwrap();
        assert!(error.why().contains("another file has that name now"), "{format}: {error}");
        assert!(!error.help().contains("renamed it back"), "{format}: {}", error.help());
        assert!(error.help().contains(&journals(state.path())[0].name), "{format}");
    }
}

/// A loop device and its file are two names of the same bytes, and the journal is of one of them.
#[test]
fn an_image_whose_backend_was_killed_is_refused_by_its_loop_device_or_the_file_behind_it() {
    for format in FORMATS {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let file = name(format, &dir.path().join("volume"));
        fs::File::create(&file.path).unwrap().set_len(32 * MIB).unwrap();
        let attach = || Loop::attach(&file.path, 512);
        let is_refused = |by: &ImageName, instead: &ImageName| {
            let error = serve(by, state.path(), true).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Refused, "{format}: {error}");
            assert!(error.why().contains(instead.path.to_str().unwrap()), "{format}: {error}");
            assert_eq!(byte(instead, state.path()), 5, "{format}");
        };
        let kill = |image| {
            create(image, true);
            serve(image, state.path(), false).unwrap().write(MIB, &[5; 512]).unwrap();
        };
        let Some(device) = attach() else { return };
        let by_device = name(format, &device.0);
        kill(&by_device);
        is_refused(&file, &by_device);
        serve(&by_device, state.path(), false).unwrap().close().unwrap();
        drop(device);
        if format == Format::Vhd {
            // Its backend has not closed it, so there is no footer where a device has it.
            continue;
        }
        kill(&file);
        let device = attach().unwrap();
        let by_device = name(format, &device.0);
        is_refused(&by_device, &file);
        assert_eq!(
            serve(&by_device, state.path(), false).err().unwrap().kind(),
            ErrorKind::Refused
        );
    }
}

/// Another program puts a block where that of the answered write is.
#[test]
fn a_vhd_that_qemu_has_written_to_after_a_kill_is_refused_and_says_what_is_lost() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let image = killed(Format::Vhd, dir.path(), state.path());
    serve(&image, state.path(), false).unwrap().write(5 * MIB, &[5; 512]).unwrap();
    let path = image.path.to_str().unwrap();
    if run("qemu-io", &["-f", "vpc", "-c", "write 2M 64k", path]).is_none() {
        return skipped("there is no qemu-io here");
    }
    let error = serve(&image, state.path(), true).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    let lost = "bytes 0 to 2097151, 4194304 to 6291455";
    assert!(error.why().contains(lost), "{error}");
    assert!(error.help().contains(&journals(state.path())[0].name), "{}", error.help());
    let report = work(Some(state.path()), |tools| tools.check(&image, false)).unwrap();
    let why = &report.images[0].findings[0].why;
    assert!(why.contains(lost) && why.contains("journal drop"), "{why}");
}

/// `cp backup.qcow2 disk.qcow2` keeps the file's number.
#[test]
fn a_qcow2_backup_that_is_copied_over_an_image_does_not_get_its_journal() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let image = name(Format::Qcow2, &dir.path().join("a.qcow2"));
    create(&image, false);
    let closed = fs::read(&image.path).unwrap();
    serve(&image, state.path(), false).unwrap().write(MIB, &[5; 512]).unwrap();
    let crashed = fs::read(&image.path).unwrap();
    fs::write(&image.path, &closed).unwrap();
    let error = serve(&image, state.path(), false).err().unwrap();
    assert!(error.why().contains("bytes 1048576 to 1114111"), "{error}");
    // And one that was made while another backend had it open.
    fs::write(&image.path, &crashed).unwrap();
    let mut disk = serve(&image, state.path(), false).unwrap();
    disk.close().unwrap();
    disk.write(2 * MIB, &[6; 512]).unwrap();
    drop(disk);
    serve(&image, state.path(), false).unwrap().write(3 * MIB, &[7; 512]).unwrap();
    fs::write(&image.path, &crashed).unwrap();
    let error = serve(&image, state.path(), false).err().unwrap();
    assert!(error.why().contains("bytes 3145728 to"), "{error}");
}

#[test]
fn a_journal_is_dropped_by_name_if_nobody_uses_it_and_by_force_if_its_image_is_there() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let image = killed(Format::Vhd, dir.path(), state.path());
    let left = journals(state.path()).remove(0);
    assert_eq!((left.state, left.format), (JournalState::Kept, Some("vhd")));
    let drop_it = |names: &[String], force| {
        work(Some(state.path()), |tools| tools.drop_journals(names, true, force))
            .map_err(|e| e.kind())
    };
    let names = [left.name.clone()];
    assert_eq!(drop_it(&names, false), Err(ErrorKind::Refused));
    assert_eq!(drop_it(&["none".into()], false), Err(ErrorKind::NotFound));
    let disk = serve(&image, state.path(), false).unwrap();
    assert_eq!(journals(state.path())[0].state, JournalState::InUse);
    assert_eq!(drop_it(&names, true), Err(ErrorKind::InUse));
    drop(disk);
    assert_eq!(byte(&image, state.path()), 5);
    assert_eq!(drop_it(&names, true), Ok(vec![left]));
    assert_eq!(byte(&image, state.path()), 0);
}

#[test]
fn the_journal_of_another_version_keeps_its_image_from_all_that_write_and_is_dropped_by_force() {
    for format in FORMATS {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let image = killed(format, dir.path(), state.path());
        let before = fs::read(&image.path).unwrap();
        let name = journals(state.path()).remove(0).name;
        let file = state.path().join(format!("{name}.journal"));
        let mut journal = fs::read(&file).unwrap();
        journal[..8].copy_from_slice(b"ferrjrn9");
        fs::write(&file, &journal).unwrap();
        let tools = |force| work(Some(state.path()), |tools| tools.repair(&image, force)).err();
        assert!(tools(true).is_some() && serve(&image, state.path(), false).is_err(), "{format}");
        assert!(!is_usable(&image, state.path()), "{format}");
        assert_eq!(journals(state.path())[0].state, JournalState::Foreign, "{format}");
        let names = [name];
        let drop_it = |names: &[String], stale, force| {
            work(Some(state.path()), |tools| tools.drop_journals(names, stale, force))
                .map_err(|e| e.kind())
        };
        assert_eq!(drop_it(&[], true, false), Ok(Vec::new()), "{format}");
        assert_eq!(drop_it(&names, false, false), Err(ErrorKind::Refused), "{format}");
        assert!(fs::read(&file).unwrap() == journal, "{format}");
        assert!(fs::read(&image.path).unwrap() == before, "{format}");
        assert_eq!(drop_it(&names, false, true).unwrap().len(), 1, "{format}");
        serve(&image, state.path(), false).unwrap().close().unwrap();
    }
}
