//! A repair without `force` says what one with it does.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use ferrite_disk::{Disk, DiskError, ErrorKind, ImageName};
use ferrite_image_tools::{NewImage, Repaired, Verdict};

use crate::common::vhd::{at, options};
use crate::common::{MIB, Queue, dir_in_memory, dir_on_disk, work};
use crate::tools::{killed, name, serve};

fn repair(state: &Path, image: &ImageName, force: bool) -> Result<Repaired, DiskError> {
    work(Some(state), |tools| tools.repair(image, force))
}

fn drop_journal(state: &Path) -> DiskError {
    work(Some(state), |tools| {
        let name = tools.journals().unwrap().remove(0).name;
        tools.drop_journals(&[name], false, false).unwrap_err()
    })
}

#[test]
fn answered_writes_in_a_journal_are_something_to_do() {
    for format in ["vhd", "qcow2"] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let (_, image) = killed(dir.path(), state.path(), format);
        let before = fs::read(&image.path).unwrap();
        let shown = repair(state.path(), &image, false).unwrap();
        assert!(shown.journal && !shown.done, "{format}: {shown:?}");
        assert_eq!(shown.or_refused().unwrap_err().kind(), ErrorKind::Refused, "{format}");
        assert!(fs::read(&image.path).unwrap() == before, "{format}");
        let help = drop_journal(state.path()).help().to_owned();
        assert!(help.contains("image repair --force"), "{format}: {help}");
        let done = repair(state.path(), &image, true).unwrap();
        assert!(done.journal && done.or_refused().is_ok(), "{format}: {done:?}");
        let again = repair(state.path(), &image, false).unwrap();
        assert!(!again.journal && again.or_refused().is_ok(), "{format}: {again:?}");
        fs::remove_dir_all(state.path()).unwrap();
        let found = serve(&image, state.path(), false).read(MIB, 512).unwrap();
        assert!(found == [5; 512], "{format}");
    }
}

/// Another program's repair would free what looks like a leak, and with that the answered writes.
#[test]
fn the_answered_writes_in_a_journal_are_no_leaks() {
    for format in ["vhd", "qcow2"] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let (_, image) = killed(dir.path(), state.path(), format);
        // A VHD has the block already, and a qcow2 image no count of the cluster.
        let is_vhd = format == "vhd";
        let without = work(None, |tools| tools.check(&image, false)).unwrap();
        assert_eq!(without.verdict == Verdict::Leaks, is_vhd, "{format}: {without:?}");
        let with = work(Some(state.path()), |tools| tools.check(&image, false)).unwrap();
        assert_eq!(with.verdict, Verdict::InOrder, "{format}: {with:?}");
        let [found] = &with.images[..] else { panic!("{format}: {with:?}") };
        let mendable = found.findings.iter().filter(|found| found.mendable).count() as u64;
        assert_eq!((found.journal, found.counts.mendable), (true, mendable), "{format}: {found:?}");
        let is_told =
            found.findings.iter().any(|found| found.why.contains("writes of the journal"));
        assert_eq!(is_told, is_vhd, "{format}: {found:?}");
    }
}

/// Nothing brings the answered writes into the image then, so nothing is advised that would.
#[test]
fn an_image_that_was_written_to_since_is_refused_in_the_same_words_with_force_and_without() {
    for format in ["vhd", "qcow2"] {
        let (dir, state, other) = (dir_on_disk(), dir_in_memory(), dir_in_memory());
        let (_, image) = killed(dir.path(), state.path(), format);
        let mut foreign = serve(&image, other.path(), false);
        foreign.write(3 * MIB, &[6; 512]).unwrap();
        foreign.close().unwrap();
        drop(foreign);
        let shown = repair(state.path(), &image, false).unwrap_err();
        let done = repair(state.path(), &image, true).unwrap_err();
        assert_eq!((shown.kind(), shown.why()), (done.kind(), done.why()), "{format}");
        assert!(shown.why().contains("another program has written to it"), "{}", shown.why());
        let dropped = drop_journal(state.path());
        assert!(dropped.why().contains(shown.why()), "{format}: {}", dropped.why());
        assert!(!dropped.help().contains("repair"), "{format}: {}", dropped.help());
    }
}

/// Its blocks may be anywhere, so what could be mended by itself is left alone, too.
#[test]
fn what_is_not_mended_beside_other_damage_is_not_promised() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let image = name("vhd", &at(&dir, "a.vhd"));
    let new = NewImage { bytes: Some(64 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
    let mut disk = Queue::new(Disk::open_image(&image, &options()).unwrap());
    disk.write(0, &vec![5; MIB as usize]).unwrap();
    disk.write(8 * MIB, &vec![5; MIB as usize]).unwrap();
    disk.close().unwrap();
    drop(disk);
    let file = fs::File::options().write(true).open(&image.path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 2 * MIB).unwrap();
    let shown = repair(state.path(), &image, false).unwrap();
    assert!(shown.before.counts.mendable > 0 && !shown.is_mended(), "{shown:?}");
    assert_eq!(shown.or_refused().unwrap_err().kind(), ErrorKind::Damaged);
    let done = repair(state.path(), &image, true).unwrap();
    assert_eq!(done.after, done.before);
    assert_eq!(done.or_refused().unwrap_err().kind(), ErrorKind::Damaged);
}

/// A mark of corruption keeps the journal out, which a reader does not notice.
#[test]
fn a_marked_image_with_a_journal_is_refused_without_force_too() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let (_, image) = killed(dir.path(), state.path(), "qcow2");
    let file = fs::File::options().read(true).write(true).open(&image.path).unwrap();
    let mut features = [0; 1];
    file.read_exact_at(&mut features, 79).unwrap();
    file.write_all_at(&[features[0] | 2], 79).unwrap();
    let [shown, done] = [false, true].map(|force| repair(state.path(), &image, force).unwrap_err());
    assert!(shown.why().contains("marked as corrupt"), "{}", shown.why());
    assert_eq!((shown.kind(), shown.why()), (done.kind(), done.why()));
}
