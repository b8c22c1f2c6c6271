//! A guest that waits for a successor is served only from the same image.

use std::fs;
use std::time::{Duration, Instant};

use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_serve::blkif::lifecycle::{Outcome, ServeError};
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_testkit::{PATIENCE, images};

const BYTES: u64 = 8 << 20;

/// Writes a sector and reads it back.
fn write(front: &mut Frontend, sector: u64, byte: u8) {
    let buffer = front.space().buffer(1).unwrap();
    buffer.fill(0, 512, byte);
    let queue = &mut front.queues[0];
    queue.write(sector, &buffer, 0, 512).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
}

/// The successor ends with a reason; the guest's state stays.
fn refused(rig: &mut Rig) -> String {
    rig.start();
    let error = rig.join().unwrap_err();
    assert!(matches!(error, ServeError::TakeOver(_)), "{error}");
    assert_eq!(rig.machine.backend_state(&rig.disk.clone()).unwrap(), 4, "nothing is written");
    error.to_string()
}

#[test]
fn a_copy_of_the_image_that_a_guest_knows_is_not_taken_over_and_the_image_is_under_any_name() {
    for format in ["raw", "vhd", "qcow2"] {
        let dir = ferrite_testkit::places::dir_in_memory();
        let image = images::make(dir.path(), format, BYTES);
        let mut rig = Rig::new(Plan { image: Some(image.clone()), ..Plan::default() });
        let mut front = rig.connect(&FrontOptions::default());
        write(&mut front, 8, 1);
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);

        // A copy has all of the original's data, and its UUID.
        let copy = dir.path().join(format!("copy.{format}"));
        fs::copy(&image, &copy).unwrap();
        rig.image = copy.clone();
        let before = fs::read(&copy).unwrap();
        let said = refused(&mut rig);
        let inode = |path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
        for path in [&image, &copy] {
            let named = format!("inode {} ", inode(path));
            assert!(said.contains(&named) && said.contains(path.to_str().unwrap()), "{said}");
        }
        assert!(fs::read(&copy).unwrap() == before, "{format}: it was written to");

        rig.image = dir.path().join(format!("renamed.{format}"));
        fs::rename(&image, &rig.image).unwrap();
        rig.start();
        write(&mut front, 16, 2);
        front.close(PATIENCE).unwrap();
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    }
}

#[test]
fn an_image_that_was_replaced_by_rename_is_not_taken_over() {
    let mut rig = Rig::new(Plan { bytes: BYTES, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    write(&mut front, 8, 1);
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    let (kept, new) = (rig.image.with_extension("kept"), rig.image.with_extension("new"));
    fs::copy(&rig.image, &new).unwrap();
    fs::rename(&rig.image, &kept).unwrap();
    fs::rename(&new, &rig.image).unwrap();
    refused(&mut rig);
    fs::rename(&kept, &rig.image).unwrap();
    rig.start();
    front.close(PATIENCE).unwrap();
}

#[test]
fn an_image_that_is_shorter_than_what_its_guest_was_told_is_not_taken_over_and_a_longer_one_is() {
    let mut rig = Rig::new(Plan { bytes: BYTES, ..Plan::default() });
    let mut front = rig.connect(&FrontOptions::default());
    write(&mut front, 8, 1);
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    let file = fs::File::options().write(true).open(&rig.image).unwrap();
    file.set_len(BYTES / 2).unwrap();
    let said = refused(&mut rig);
    assert!(said.contains(&(BYTES / 512).to_string()), "{said}");
    for times in [1, 2] {
        file.set_len(times * BYTES).unwrap();
        rig.start();
        write(&mut front, 8, 1);
        // The guest gets the size to which the file has grown while no backend ran.
        let end = Instant::now() + PATIENCE;
        while front.read_features().unwrap().sectors != times * BYTES / 512 {
            assert!(Instant::now() < end, "the new size is not published");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    }
    rig.start();
    front.close(PATIENCE).unwrap();
}
