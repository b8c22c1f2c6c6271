//! What the tools make of media that are not empty, and of images with something left to do.

use std::fs;
use std::path::Path;

use ferrite_disk::{Disk, ImageName, OpenOptions};
use ferrite_image_tools::{Convert, NewImage, NewSize, Resize};
use ferrite_images::vhd;
use ferrite_testkit::bytes::first_difference;

use crate::common::vhd::{at, options, peer};
use crate::common::{Loop, MIB, Queue, dir_in_memory, dir_on_disk, work};

pub(crate) fn name(text: &str, path: &Path) -> ImageName {
    ImageName::parse(&format!("{text}:{}", path.to_str().unwrap())).unwrap()
}

/// A device has on it whatever was there before.
#[test]
fn a_copy_on_a_device_is_the_same_where_the_source_is_zeros() {
    for (block_bytes, rest) in [(512, 512), (4096, 4096), (4096, 512), (4096, 3584)] {
        copy_to_devices(block_bytes, rest);
    }
}

fn copy_to_devices(block_bytes: u32, rest: u64) {
    let dir = dir_on_disk();
    let source = at(&dir, "source.img");
    let bytes = 4 * MIB + rest;
    let mut content = vec![0; bytes as usize];
    content[MIB as usize..][..512].fill(7);
    content[(3 * MIB) as usize + 1024..][..512].fill(8);
    // The last sector has data in one case, and none in another.
    content[bytes as usize - 512..].fill((rest % 1024 / 512) as u8 * 9);
    fs::write(&source, &content).unwrap();
    for (format, fixed) in [("raw", false), ("vhd", true), ("vhd", false), ("qcow2", false)] {
        let file = at(&dir, "device");
        fs::write(&file, vec![0xEE; 8 * MIB as usize]).unwrap();
        let Some(device) = Loop::attach(&file, block_bytes) else { return };
        let (from, to) = (name("raw", &source), name(format, &device.0));
        let how = Convert { force: true, fixed, ..Convert::default() };
        work(None, |tools| tools.convert(&from, &to, &how)).unwrap();
        let back = at(&dir, &format!("{format}-{fixed}.img"));
        let how = Convert::default();
        work(None, |tools| tools.convert(&to, &name("raw", &back), &how)).unwrap();
        let found = fs::read(&back).unwrap();
        // A raw device is longer.
        assert_eq!(
            first_difference(&found[..content.len()], &content),
            None,
            "{format}, fixed: {fixed}"
        );
        if format == "raw" {
            drop(device);
            let behind = fs::read(&file).unwrap();
            let behind = &behind[bytes as usize..];
            assert!(behind == vec![0xEE; behind.len()], "{rest}");
        }
    }
}

/// The sizes are compared before anything is written.
#[test]
fn a_device_that_is_too_small_is_refused_with_both_sizes_and_stays_as_it_was() {
    for (format, fixed, bytes) in [("raw", false, 4 * MIB + 512), ("vhd", true, 4 * MIB)] {
        let dir = dir_on_disk();
        let (source, file) = (at(&dir, "source.img"), at(&dir, "device"));
        fs::write(&source, vec![1; bytes as usize]).unwrap();
        fs::write(&file, vec![0xEE; 4 * MIB as usize]).unwrap();
        let Some(device) = Loop::attach(&file, 512) else { return };
        let (from, to) = (name("raw", &source), name(format, &device.0));
        let how = Convert { force: true, fixed, ..Convert::default() };
        let copied = work(None, |tools| tools.convert(&from, &to, &how)).unwrap_err();
        let new = NewImage { bytes: Some(bytes), fixed, force: true, ..NewImage::default() };
        let made = work(None, |tools| tools.create(&to, &new)).unwrap_err();
        for error in [copied, made] {
            let text = error.to_string();
            let sizes = [(4 * MIB).to_string(), (4 * MIB + 512).to_string()];
            assert!(sizes.iter().all(|size| text.contains(size)), "{format}: {text}");
            assert!(error.help().contains("a larger device"), "{}", error.help());
        }
        drop(device);
        assert!(fs::read(&file).unwrap().iter().all(|byte| *byte == 0xEE), "{format}");
    }
}

/// The size of a thin image is known when it is written.
#[test]
fn a_device_that_is_too_small_for_a_thin_image_is_told_from_a_full_file_system() {
    for format in ["vhd", "qcow2"] {
        let dir = dir_on_disk();
        let (source, file) = (at(&dir, "source.img"), at(&dir, "device"));
        fs::write(&source, vec![1; 4 * MIB as usize]).unwrap();
        fs::write(&file, vec![0xEE; 4 * MIB as usize]).unwrap();
        let Some(device) = Loop::attach(&file, 512) else { return };
        let (from, to) = (name("raw", &source), name(format, &device.0));
        let how = Convert { force: true, ..Convert::default() };
        let error = work(None, |tools| tools.convert(&from, &to, &how)).unwrap_err();
        let size = format!("the device has {} bytes", 4 * MIB);
        assert!(error.why().contains(&size), "{format}: {error}");
        assert_eq!(error.help(), "take a larger device", "{format}");
    }
}

/// A device of larger blocks than the disk has sectors.
#[test]
fn a_new_raw_disk_on_a_device_ends_within_a_block_of_it() {
    let dir = dir_on_disk();
    let file = at(&dir, "device");
    fs::write(&file, vec![0xEE; 8 * MIB as usize]).unwrap();
    let Some(device) = Loop::attach(&file, 4096) else { return };
    let bytes = 4 * MIB + 512;
    let new = NewImage { bytes: Some(bytes), force: true, ..NewImage::default() };
    work(None, |tools| tools.create(&name("raw", &device.0), &new)).unwrap();
    drop(device);
    let found = fs::read(&file).unwrap();
    let (disk, behind) = found.split_at(bytes as usize);
    assert!(disk.iter().all(|byte| *byte == 0) && behind.iter().all(|byte| *byte == 0xEE));
}

#[test]
fn a_new_fixed_image_on_a_device_reads_as_zeros() {
    for (block_bytes, bytes) in [(512, 4 * MIB + 512), (4096, 4 * MIB), (4096, 4 * MIB + 512)] {
        let dir = dir_on_disk();
        let file = at(&dir, "device");
        fs::write(&file, vec![0xEE; 8 * MIB as usize]).unwrap();
        let Some(device) = Loop::attach(&file, block_bytes) else { return };
        let image = name("vhd", &device.0);
        let new = NewImage { bytes: Some(bytes), fixed: true, force: true, ..NewImage::default() };
        work(None, |tools| tools.create(&image, &new)).unwrap();
        let back = name("raw", &at(&dir, "back.img"));
        work(None, |tools| tools.convert(&image, &back, &Convert::default())).unwrap();
        assert!(fs::read(&back.path).unwrap().iter().all(|byte| *byte == 0));
    }
}

/// Opens an image as a backend does.
pub(crate) fn serve(image: &ImageName, state: &Path, read_only: bool) -> Queue {
    let options = OpenOptions { read_only, state_dir: Some(state.into()), ..options() };
    Queue::new(Disk::open_image(image, &options).unwrap())
}

/// A child and its parent; a backend of the child was killed before it had flushed.
pub(crate) fn killed(dir: &Path, state: &Path, format: &str) -> (ImageName, ImageName) {
    let path = |file: &str| dir.join(format!("{file}.{format}"));
    let (parent, child) = (name(format, &path("parent")), name(format, &path("child")));
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&parent, &new)).unwrap();
    let on = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
    work(None, |tools| tools.create(&child, &on)).unwrap();
    serve(&child, state, false).write(MIB, &[5; 512]).unwrap();
    (parent, child)
}

#[test]
fn what_a_killed_backend_has_answered_survives_a_repair_without_the_parent() {
    for format in ["vhd", "qcow2"] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let (parent, child) = killed(dir.path(), state.path(), format);
        let away = at(&dir, "away");
        fs::rename(&parent.path, &away).unwrap();
        let _ = work(Some(state.path()), |tools| tools.repair(&child, true));
        fs::rename(&away, &parent.path).unwrap();
        let found = serve(&child, state.path(), false).read(MIB, 512).unwrap();
        assert!(found == [5; 512], "{format}");
    }
}

/// A flush of a disk flushes its leaf: writes that its parent lacks would stay on this host.
#[test]
fn no_image_is_made_on_one_that_lacks_what_a_killed_backend_has_answered() {
    for format in ["vhd", "qcow2"] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let (_, image) = killed(dir.path(), state.path(), format);
        let reader = serve(&image, state.path(), true);
        let leaf = name(format, &at(&dir, &format!("leaf.{format}")));
        let new = NewImage { parent: Some(image.clone()), ..NewImage::default() };
        work(Some(state.path()), |tools| tools.create(&leaf, &new)).unwrap_err();
        drop(reader);
        work(Some(state.path()), |tools| tools.create(&leaf, &new)).unwrap();
        fs::remove_dir_all(state.path()).unwrap();
        let found = serve(&leaf, state.path(), false).read(MIB, 512).unwrap();
        assert!(found == [5; 512], "{format}");
    }
}

/// Other programs ask no journal.
#[test]
fn an_image_that_another_program_has_put_a_leaf_on_is_completed_by_a_repair() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let (_, image) = killed(dir.path(), state.path(), "vhd");
    let footer = vhd::Vhd::open(&image.path, &options()).unwrap().footer().clone();
    let leaf = name("vhd", &at(&dir, "leaf.vhd"));
    let new =
        vhd::NewImage::differencing(8 * MIB, crate::common::vhd::parent(&image.path, &footer));
    crate::common::vhd::create(&leaf.path, &new).unwrap();
    assert!(serve(&leaf, state.path(), true).read(MIB, 512).unwrap() == [5; 512]);
    work(Some(state.path()), |tools| tools.repair(&image, true)).unwrap();
    fs::remove_dir_all(state.path()).unwrap();
    assert!(serve(&leaf, state.path(), true).read(MIB, 512).unwrap() == [5; 512]);
}

/// qemu gives a new cluster the first place that nothing on disk counts: just where the killed
/// backend had put its own.
#[test]
fn a_place_that_another_program_has_taken_is_not_taken_over() {
    let (dir, state) = (dir_on_disk(), dir_in_memory());
    let image = name("qcow2", &at(&dir, "a.qcow2"));
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
    let mut disk = serve(&image, state.path(), false);
    disk.write(0, &[1; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    serve(&image, state.path(), false).write(MIB, &[2; 512]).unwrap();
    let path = image.path.to_str().unwrap();
    drop(serve(&image, state.path(), true));
    let Some(_) = peer("qemu-io", &["-f", "qcow2", "-c", "write -P 3 2M 512", path]) else {
        return;
    };
    let options = OpenOptions { state_dir: Some(state.path().into()), ..options() };
    let error = Disk::open_image(&image, &options).unwrap_err();
    assert!(error.to_string().contains("another program has written to it"), "{error}");
}

/// Other programs make such images.
#[test]
fn a_disk_that_is_smaller_than_its_parent_does_not_grow_into_it() {
    let dir = dir_on_disk();
    let (parent, child) = (name("vhd", &at(&dir, "p.vhd")), name("vhd", &at(&dir, "c.vhd")));
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&parent, &new)).unwrap();
    let mut disk = Queue::new(Disk::open_image(&parent, &options()).unwrap());
    disk.write(6 * MIB, &[6; 512]).unwrap();
    disk.close().unwrap();
    drop(disk);
    let footer = vhd::Vhd::open(&parent.path, &options()).unwrap().footer().clone();
    let below = vhd::Footer { current_size: 4 * MIB, ..footer };
    let below = crate::common::vhd::parent(&parent.path, &below);
    crate::common::vhd::create(&child.path, &vhd::NewImage::differencing(4 * MIB, below)).unwrap();
    let error = work(None, |tools| tools.resize(&child, 8 * MIB, false)).unwrap_err();
    assert!(error.to_string().contains("parent is larger"), "{error}");
}

/// Some programs take a VHD's original size for its size, or refuse one above its present size.
#[test]
fn a_resized_vhd_has_its_new_size_in_both_fields() {
    for (fixed, sizes) in [(false, [12, 6].as_slice()), (true, &[12])] {
        let dir = dir_on_disk();
        let image = name("vhd", &at(&dir, "a.vhd"));
        let new = NewImage { bytes: Some(8 * MIB), fixed, ..NewImage::default() };
        work(None, |tools| tools.create(&image, &new)).unwrap();
        for size in sizes {
            work(None, |tools| tools.resize(&image, size * MIB, true)).unwrap();
            let footer = vhd::Vhd::open(&image.path, &options()).unwrap().footer().clone();
            let found = [footer.original_size, footer.current_size];
            assert_eq!(found, [size * MIB; 2], "fixed: {fixed}");
        }
    }
}

/// A journal takes memory, and `journal list` shows it.
#[test]
fn a_refused_resize_leaves_no_journal() {
    for format in ["vhd", "qcow2"] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let image = name(format, &at(&dir, "a"));
        let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
        work(None, |tools| tools.create(&image, &new)).unwrap();
        // Without the permission to shrink, and to a size that no image has.
        for bytes in [4 * MIB, 0, 65 << 40] {
            work(Some(state.path()), |tools| tools.resize(&image, bytes, false)).unwrap_err();
            let left = work(Some(state.path()), |tools| tools.journals()).unwrap();
            assert!(left.is_empty(), "{format}, {bytes}: {left:?}");
        }
        work(Some(state.path()), |tools| tools.resize(&image, 16 * MIB, false)).unwrap();
    }
}

#[test]
fn a_disk_shrinks_by_its_own_permission_and_a_parent_is_resized_by_another() {
    let dir = dir_on_disk();
    let image = name("qcow2", &at(&dir, "a.qcow2"));
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
    let shrink = Resize { shrink: true, ..Resize::default() };
    let less = NewSize::Less(2 * MIB);
    let done = work(None, |tools| tools.resize(&image, less, shrink)).unwrap();
    assert_eq!(done.virtual_bytes, 6 * MIB);
    let on = NewImage { parent: Some(image.clone()), ..NewImage::default() };
    work(None, |tools| tools.create(&name("qcow2", &at(&dir, "b.qcow2")), &on)).unwrap();
    let error = work(None, |tools| tools.resize(&image, less, shrink)).unwrap_err();
    assert!(error.to_string().contains("read-only"), "{error}");
    work(None, |tools| tools.resize(&image, less, true)).unwrap();
}

#[test]
fn a_check_tells_of_the_journal_of_a_killed_backend() {
    for format in ["vhd", "qcow2"] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let (_, image) = killed(dir.path(), state.path(), format);
        let check = || work(Some(state.path()), |tools| tools.check(&image, false)).unwrap();
        assert!(check().images[0].journal, "{format}");
        work(Some(state.path()), |tools| tools.repair(&image, true)).unwrap();
        assert!(!check().images[0].journal, "{format}");
    }
}
