//! What becomes of taps while their images change, with a model of taps.

use super::super::model::{Model, Process, Wrong};
use super::super::volume_folder::Repository;
use super::*;

/// A volume whose image a tap of the model has open.
struct Used {
    taps: Model,
    folder: Folder,
}

const KEY: &str = "a.qcow2";
const BYTES: u64 = 1 << 20;

impl Used {
    fn new() -> Used {
        let taps = Model::new();
        let path = taps.dir.path().join("images");
        fs::create_dir(&path).unwrap();
        let repository = Repository { uuid: "1".to_owned(), ..Repository::default() };
        let used = Used { folder: Folder::create(&path, repository).unwrap(), taps };
        used.images().create(KEY, BYTES).unwrap();
        let image = used.folder.image(KEY).unwrap();
        let args = Some(format!("{}:{}", image.kind(), image.path));
        let process = Process { minor: Some(0), state: 0, args };
        used.taps.world.borrow_mut().processes.insert(7, process);
        used
    }

    fn images(&self) -> Images<'_> {
        Images { folder: &self.folder, taps: &self.taps, run_dir: self.taps.dir.path() }
    }

    fn is_running(&self) -> bool {
        self.taps.world.borrow().processes[&7].state == 0
    }
}

#[test]
fn a_guest_waits_while_its_image_changes_and_goes_on_also_after_a_failure() {
    let used = Used::new();
    let images = used.images();
    images.create_from(KEY, "b.qcow2").unwrap();
    assert_eq!((used.taps.steps().as_str(), used.is_running()), ("pause unpause", true));
    // It is in use, so nothing says that it was not written to since.
    images.create_from(KEY, "c.qcow2").unwrap();
    assert_eq!((used.taps.steps().as_str(), used.is_running()), ("pause unpause", true));
    assert_eq!(used.folder.keys().unwrap().len(), 5);
    images.resize(KEY, 2 * BYTES).unwrap();
    assert_eq!(images.info(KEY).unwrap().virtual_bytes, 2 * BYTES);
    assert_eq!((used.taps.steps().as_str(), used.is_running()), ("pause unpause", true));
    images.resize(KEY, BYTES).unwrap_err();
    assert_eq!((used.taps.steps().as_str(), used.is_running()), ("pause unpause", true));
    let text = images.check_unused(KEY).unwrap_err().text;
    assert!(text.contains("process 7"), "{text}");
    // An image on which it stands has no tap of its own.
    images.check_unused("b.qcow2").unwrap();
}

#[test]
fn without_a_pause_nothing_changes_and_a_guest_that_still_waits_is_named() {
    let used = Used::new();
    let before = used.folder.keys().unwrap();
    used.taps.world.borrow_mut().wrong = Some((0, Wrong::Refused));
    used.images().create_from(KEY, "b.qcow2").unwrap_err();
    assert_eq!((used.folder.keys().unwrap(), used.is_running()), (before, true));
    used.taps.steps();
    used.taps.world.borrow_mut().wrong = Some((1, Wrong::Refused));
    let text = used.images().create_from(KEY, "b.qcow2").unwrap_err().text;
    assert!(text.contains("tap-ctl unpause -p 7 -m 0"), "{text}");
    assert!(!used.is_running());
    // The next change resumes it.
    used.taps.world.borrow_mut().wrong = None;
    used.images().create_from(KEY, "b.qcow2").unwrap();
    assert!(used.is_running());
}
