//! An image names its parents itself: which of them are opened, and which are not (threats.md T25).

use std::fs::{self, File};
use std::mem::MaybeUninit;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use ferrite_disk::{Disk, DiskError, ErrorKind, ImageName, OpenOptions, Parents};
use ferrite_image_tools::NewImage;

use crate::common::vhd::at;
use crate::common::{Loop, MIB, dir_on_disk};
use crate::model::{name, tools};
use rustix::fs::{FlockOperation, flock, inotify};
use tempfile::TempDir;

fn open(path: &Path, parents: Parents) -> Result<Disk, DiskError> {
    let options = OpenOptions { read_only: true, parents, ..OpenOptions::default() };
    Disk::open(path.to_str().unwrap(), &options)
}

fn within(named: &[&Path]) -> Parents {
    Parents::Within(named.iter().map(|path| path.to_path_buf()).collect())
}

/// `SECRET/disk.img`, which is another one's, and an empty folder.
fn secret() -> (TempDir, PathBuf, TempDir) {
    let theirs = dir_on_disk();
    let disk = at(&theirs, "disk.img");
    fs::write(&disk, vec![7; MIB as usize]).unwrap();
    (theirs, disk, dir_on_disk())
}

/// A qcow2 image of 1 MiB whose header names a parent, whatever that is.
fn on(image: &Path, parent: &str) {
    let name = name(image);
    tools(|tools| tools.create(&name, &NewImage { bytes: Some(MIB), ..NewImage::default() }))
        .unwrap();
    let mut bytes = fs::read(image).unwrap();
    // Behind all fixed fields: the format's name, the end, and the parent's.
    let mut names = b"\xe2\x79\x2a\xca\0\0\0\x03raw\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    let at = 112 + names.len();
    names.extend_from_slice(parent.as_bytes());
    bytes[112..112 + names.len()].copy_from_slice(&names);
    bytes[8..16].copy_from_slice(&(at as u64).to_be_bytes());
    bytes[16..20].copy_from_slice(&(parent.len() as u32).to_be_bytes());
    fs::write(image, bytes).unwrap();
}

/// It is refused by default, with what is named and how to allow it, and opens once that is done.
#[track_caller]
fn refused(image: &Path, parent: &str, allowed: &[&Path]) {
    let error = open(image, Parents::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Parent, "{error}");
    assert!(error.why().contains(parent), "{error}");
    assert!(error.help().contains("--parents "), "{}", error.help());
    for allowed in allowed {
        open(image, within(&[allowed])).unwrap();
    }
    open(image, Parents::Any).unwrap();
}

#[test]
fn a_link_that_is_swapped_after_it_was_checked_leads_to_nothing() {
    let (_theirs, secret, mine) = secret();
    let (own, link) = (at(&mine, "own.img"), at(&mine, "parent.img"));
    fs::write(&own, vec![1; MIB as usize]).unwrap();
    symlink(&own, &link).unwrap();
    let image = at(&mine, "leaf.qcow2");
    on(&image, "parent.img");
    drop(open(&image, Parents::default()).unwrap());

    // The thread that opens the image waits for a lock on its parent, which it has checked.
    let busy = File::open(&own).unwrap();
    // The lock of the image that was open above stays for a moment in children that other tests fork.
    flock(&busy, FlockOperation::LockExclusive).unwrap();
    let watch = inotify::init(inotify::CreateFlags::CLOEXEC).unwrap();
    inotify::add_watch(&watch, &own, inotify::WatchFlags::OPEN).unwrap();
    let wait_for_lock = Some(Duration::from_secs(60));
    let options = OpenOptions { read_only: true, wait_for_lock, ..OpenOptions::default() };
    let name = name(&image);
    let opener = std::thread::spawn(move || Disk::open_image(&name, &options));
    let mut memory = [MaybeUninit::uninit(); 512];
    inotify::Reader::new(&watch, &mut memory).next().unwrap();
    let other = at(&mine, "other");
    symlink(&secret, &other).unwrap();
    fs::rename(&other, &link).unwrap();
    let error = opener.join().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Parent, "{error}");
    drop(busy);
}

/// Opening can have effects by itself. The refusal comes before a lock of another process is noticed.
#[test]
fn a_parent_that_is_not_allowed_is_not_opened() {
    let (_theirs, secret, mine) = secret();
    let image = at(&mine, "leaf.qcow2");
    on(&image, secret.to_str().unwrap());
    let busy = File::open(&secret).unwrap();
    flock(&busy, FlockOperation::NonBlockingLockExclusive).unwrap();
    let error = open(&image, Parents::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Parent, "{error}");
    assert_eq!(open(&image, Parents::Any).unwrap_err().kind(), ErrorKind::InUse);
}

#[test]
fn a_parent_somewhere_else_is_refused_by_name_and_by_dots() {
    let (theirs, disk, mine) = secret();
    let image = at(&mine, "leaf.qcow2");
    on(&image, disk.to_str().unwrap());
    refused(&image, disk.to_str().unwrap(), &[theirs.path(), &disk]);
    let folder = theirs.path().file_name().unwrap().to_str().unwrap();
    for dots in [format!("../{folder}/disk.img"), format!("./../{folder}/../{folder}/disk.img")] {
        on_again(&image, &dots);
        refused(&image, disk.to_str().unwrap(), &[theirs.path()]);
    }
}

fn on_again(image: &Path, parent: &str) {
    fs::remove_file(image).unwrap();
    on(image, parent);
}

#[test]
fn a_parent_behind_a_link_is_where_the_link_leads() {
    let (theirs, disk, mine) = secret();
    let image = at(&mine, "leaf.qcow2");
    symlink(&disk, at(&mine, "link.img")).unwrap();
    on(&image, "link.img");
    refused(&image, disk.to_str().unwrap(), &[theirs.path()]);
    symlink(theirs.path(), at(&mine, "folder")).unwrap();
    on_again(&image, "folder/disk.img");
    refused(&image, disk.to_str().unwrap(), &[theirs.path()]);
    // Naming the folder that has the link allows nothing; a link to the image itself changes nothing.
    assert!(open(&image, within(&[mine.path()])).is_err());
    let elsewhere = dir_on_disk();
    symlink(&image, at(&elsewhere, "leaf.qcow2")).unwrap();
    assert!(open(&at(&elsewhere, "leaf.qcow2"), Parents::default()).is_err());
}

#[test]
fn a_parent_that_is_not_named_by_a_path_is_refused_whatever_is_allowed() {
    let (_theirs, disk, mine) = secret();
    let image = at(&mine, "leaf.qcow2");
    let json = format!("json:{{\"driver\":\"file\",\"filename\":\"{}\"}}", disk.display());
    let by_path = "is not named by a path";
    for (parent, why) in [
        (json.as_str(), "has the option filename"),
        ("nbd:unix:/run/x", by_path),
        ("file:nbd:/x", by_path),
        ("fat:/etc", by_path),
    ] {
        let _ = fs::remove_file(&image);
        on(&image, parent);
        for parents in [Parents::default(), Parents::Any] {
            let error = open(&image, parents).unwrap_err();
            assert!(error.why().contains(why), "{parent}: {error}");
        }
    }
    let json = format!("json:{{\"driver\":\"raw\",\"file.filename\":\"{}\"}}", disk.display());
    for parent in [format!("file:{}", disk.display()), json] {
        on_again(&image, &parent);
        refused(&image, disk.to_str().unwrap(), &[]);
    }
}

#[test]
fn a_device_is_a_parent_only_where_that_was_said() {
    let (_theirs, disk, mine) = secret();
    let Some(device) = Loop::attach(&disk, 512) else { return };
    let image = at(&mine, "leaf.qcow2");
    on(&image, device.0.to_str().unwrap());
    refused(&image, device.0.to_str().unwrap(), &[&device.0, "/dev".as_ref()]);
    // A link to it in a user's own folder is no link of the system.
    symlink(&device.0, at(&mine, "link")).unwrap();
    on_again(&image, "link");
    refused(&image, device.0.to_str().unwrap(), &[&device.0]);
    assert!(open(&image, within(&[mine.path()])).is_err());
    // Nor is a node, though the folder is the image's own.
    let node = at(&mine, "node");
    let made = Command::new("cp").args(["-a", device.0.to_str().unwrap()]).arg(&node).status();
    assert!(made.unwrap().success());
    on_again(&image, "node");
    refused(&image, "node", &[mine.path()]);
}

#[test]
fn an_image_on_a_device_has_no_folder_of_its_own() {
    let (_theirs, disk, mine) = secret();
    let Some(parent) = Loop::attach(&disk, 512) else { return };
    let image = at(&mine, "leaf.qcow2");
    on(&image, parent.0.to_str().unwrap());
    fs::File::options().write(true).open(&image).unwrap().set_len(4 * MIB).unwrap();
    let Some(leaf) = Loop::attach(&image, 512) else { return };
    let opened = |parents| {
        let options = OpenOptions { read_only: true, parents, ..OpenOptions::default() };
        Disk::open(&format!("qcow2:{}", leaf.0.display()), &options)
    };
    assert_eq!(opened(Parents::default()).unwrap_err().kind(), ErrorKind::Parent);
    opened(within(&[&parent.0])).unwrap();
}

#[test]
fn what_is_in_the_folder_or_below_is_allowed_for_the_whole_chain() {
    let dir = dir_on_disk();
    fs::create_dir(at(&dir, "below")).unwrap();
    for extension in ["vhd", "qcow2"] {
        let [base, middle, leaf] =
            ["base", "below/middle", "leaf"].map(|n| name(&at(&dir, &format!("{n}.{extension}"))));
        let new = NewImage { bytes: Some(4 * MIB), ..NewImage::default() };
        tools(|tools| tools.create(&base, &new)).unwrap();
        let upon =
            |parent: &ImageName| NewImage { parent: Some(parent.clone()), ..NewImage::default() };
        let made = tools(|tools| tools.create(&middle, &upon(&base))).unwrap();
        assert!(made.notes.iter().any(|n| n.contains("--parents ")), "{made:?}");
        // The folder is that of the image that is opened.
        assert_eq!(open(&middle.path, Parents::default()).unwrap_err().kind(), ErrorKind::Parent);
        let made = tools(|tools| {
            let tools = ferrite_image_tools::ImageTools {
                parents: within(&[dir.path()]),
                state_dir: None,
                ..*tools
            };
            tools.create(&leaf, &upon(&middle))
        });
        assert!(made.unwrap().notes.iter().all(|n| !n.contains("--parents")));
        open(&leaf.path, Parents::default()).unwrap();
    }
}
