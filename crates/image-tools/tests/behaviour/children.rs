//! Images that others stand on: which commands write to them, and which merge into them.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use ferrite_disk::{Disk, ErrorKind, ImageName, OpenOptions, Parents};
use ferrite_image_tools::{ImageTools, NewImage, Progress, Rebase};

use crate::common::vhd::{at, options};
use crate::common::{MIB, Mount, Queue, anywhere, dir_on_disk, run, skipped, work};
use crate::family::{
    FORMATS, Family, Watched, clone, clone_anywhere, coalesce, create, link, make_writable, name,
    on, open, snapshot,
};
use ferrite_host::directory::HostDirectory;
use ferrite_testkit::few_or_all;

#[test]
fn a_write_protected_image_is_read_only_for_root_too() {
    for format in ["raw", "vhd", "qcow2"] {
        let dir = dir_on_disk();
        let image = name(format, &at(&dir, "image"));
        create(&image);
        fs::set_permissions(&image.path, Permissions::from_mode(0o444)).unwrap();
        let error = open(&image).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
        // Nothing is said of images on it: there are none.
        assert_eq!(error.why(), "it is read-only by its mode");
        let advised = ["--read-only", "access=r", "clone", "chmod"];
        assert!(advised.iter().all(|word| error.help().contains(word)), "{}", error.help());
        let error = work(None, |tools| tools.resize(&image, 16 * MIB, false)).unwrap_err();
        assert!(error.to_string().contains("read-only"), "{error}");
        drop(Disk::open_image(&image, &OpenOptions { read_only: true, ..options() }).unwrap());
        let known = OpenOptions { even_parent: true, ..options() };
        if rustix::process::geteuid().is_root() {
            drop(Disk::open_image(&image, &known).unwrap());
        }
    }
}

#[test]
fn an_image_that_another_stands_on_is_not_opened_for_writing() {
    for (below, format) in [("raw", "vhd"), ("vhd", "vhd"), ("raw", "qcow2"), ("qcow2", "qcow2")] {
        for place in ["child.EXT", "child", "elsewhere/child.EXT", "elsewhere/child"] {
            let dir = dir_on_disk();
            fs::create_dir(at(&dir, "elsewhere")).unwrap();
            let parent = name(below, &at(&dir, "parent.img"));
            let child = name(format, &at(&dir, &place.replace("EXT", format)));
            create(&parent);
            clone(&parent, &child);
            make_writable(&parent);
            let before = fs::read(&parent.path).unwrap();
            let error = open(&parent).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
            assert!(error.to_string().contains("stands on it"), "{error}");
            let old = ImageName { path: at(&dir, "old"), ..parent.clone() };
            let resize = |tools: &ImageTools<'_>| tools.resize(&parent, 16 * MIB, false).map(drop);
            let again = NewImage { bytes: Some(MIB), force: true, ..NewImage::default() };
            let create = |tools: &ImageTools<'_>| tools.create(&parent, &again).map(drop);
            let snapshot = |tools: &ImageTools<'_>| tools.snapshot(&parent, &old).map(drop);
            work(None, resize).unwrap_err();
            work(None, create).unwrap_err();
            work(None, snapshot).unwrap_err();
            assert!(!old.path.exists() && fs::read(&parent.path).unwrap() == before);
            fs::remove_file(&child.path).unwrap();
            drop(open(&parent).unwrap());
        }
    }
}

#[test]
fn a_merge_sees_children_that_were_made_elsewhere_or_have_no_extension() {
    for format in FORMATS {
        for other in ["elsewhere/other", &format!("elsewhere/other.{format}"), "other"] {
            let family = Family::whole(format, other);
            family.refuses("other");
            let done = coalesce(&family.child, true).unwrap();
            assert!(done.notes.iter().any(|note| note.contains("is destroyed")), "{done:?}");
            open(&family.other).unwrap_err();
        }
    }
}

/// As other programs leave them: with nothing but what is in the file.
#[test]
fn a_merge_asks_files_what_they_are_and_not_their_names() {
    for format in FORMATS {
        let family = Family::whole(format, &format!("other.{format}"));
        fs::rename(&family.other.path, at(&family.dir, "nameless")).unwrap();
        family.refuses("nameless has the same parent");
    }
}

#[test]
fn a_child_elsewhere_that_is_gone_or_has_another_parent_now_is_in_nobodys_way() {
    for format in FORMATS {
        for becomes in ["nothing", "a folder less", "an image", "another parent's"] {
            let family = Family::whole(format, "elsewhere/other");
            family.refuses("other");
            fs::remove_file(&family.other.path).unwrap();
            match becomes {
                "nothing" => {}
                "a folder less" => fs::remove_dir(at(&family.dir, "elsewhere")).unwrap(),
                "an image" => create(&family.other),
                _ => {
                    let base = name(format, &at(&family.dir, "base"));
                    create(&base);
                    clone(&base, &family.other);
                }
            }
            coalesce(&family.child, false).unwrap();
            // The list has gone with the parent.
            let left = |entry: io::Result<fs::DirEntry>| {
                entry.unwrap().file_name().into_string().unwrap().contains("parent")
            };
            assert!(!fs::read_dir(family.dir.path()).unwrap().any(left), "{format}, {becomes}");
        }
    }
}

#[test]
fn a_child_on_a_file_system_that_is_not_mounted_is_not_taken_for_gone() {
    for format in FORMATS {
        let family = Family::new(format, "elsewhere/other");
        let folder = at(&family.dir, "elsewhere");
        let Some(mount) = Mount::new(&["-t", "tmpfs", "none"], &folder) else { return };
        clone(&family.parent, &family.other);
        drop(mount);
        family.refuses("not mounted");
        make_writable(&family.parent);
        fs::remove_file(&family.child.path).unwrap();
        let error = open(&family.parent).unwrap_err();
        assert!(error.to_string().contains("not mounted"), "{error}");
        assert!(error.help().contains(".ferrite-children"), "{}", error.help());
        // What its help says.
        fs::remove_file(at(&family.dir, &format!("parent.{format}.ferrite-children"))).unwrap();
        drop(open(&family.parent).unwrap());
    }
}

#[test]
fn what_does_not_say_what_it_stands_on_takes_force() {
    let family = Family::new("qcow2", "other");
    // A VHD whose footers are damaged, and a name that only QEMU understands.
    let mut damaged = vec![0; 2048];
    damaged[..8].copy_from_slice(b"conectix");
    fs::write(&family.other.path, &damaged).unwrap();
    family.refuses("cannot be excluded");
    let parent = family.parent.path.display();
    for (described, why) in [
        (format!(r#"json:{{"file.filename":"{parent}"}}"#), "has the same parent"),
        (format!(r#"json:{{"file":{{"a":[{{"filename":"{parent}"}}]}}}}"#), "cannot be excluded"),
    ] {
        let mut named = vec![0; 1024];
        named[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        named[8..16].copy_from_slice(&512u64.to_be_bytes());
        named[16..20].copy_from_slice(&(described.len() as u32).to_be_bytes());
        named[512..512 + described.len()].copy_from_slice(described.as_bytes());
        fs::write(&family.other.path, &named).unwrap();
        family.refuses(why);
    }
    let done = coalesce(&family.child, true).unwrap();
    assert!(done.notes.iter().any(|note| note.contains("other")), "{done:?}");
}

/// It is not read here, and its parent is.
#[test]
fn a_qed_image_or_a_qcow_of_version_1_keeps_its_parent_as_it_is() {
    for (file, kind) in [("other.qed", "qed"), ("other", "qed"), ("other.qcow", "qcow")] {
        let family = Family::new("qcow2", file);
        let parent = family.parent.path.to_str().unwrap();
        let other = family.other.path.to_str().unwrap();
        let made = run("qemu-img", &["create", "-f", kind, "-F", "qcow2", "-b", parent, other]);
        if made.is_none() {
            return skipped("there is no qemu-img here that makes such images");
        }
        family.refuses("other");
        if file != "other" {
            make_writable(&family.parent);
            fs::remove_file(&family.child.path).unwrap();
            let error = open(&family.parent).unwrap_err();
            assert!(error.to_string().contains("stands on it"), "{file}: {error}");
        }
    }
}

/// Its guest could keep other guests' disks from being served.
#[test]
fn what_a_guest_writes_into_a_raw_disk_keeps_no_image_from_being_served() {
    let family = Family::new("qcow2", "hostile.img");
    fs::copy(&family.child.path, &family.other.path).unwrap();
    fs::remove_file(&family.child.path).unwrap();
    make_writable(&family.parent);
    drop(open(&family.parent).unwrap());
}

#[test]
fn a_parent_that_was_moved_is_known_by_its_uuid_and_its_copy_is_its_own() {
    let family = Family::new("vhd", "copy.vhd");
    fs::copy(&family.parent.path, &family.other.path).unwrap();
    make_writable(&family.other);
    drop(open(&family.other).unwrap());
    fs::remove_file(&family.parent.path).unwrap();
    let error = open(&family.other).unwrap_err();
    assert!(error.to_string().contains("child.vhd stands on it"), "{error}");
}

/// It is the rest of another image, which a crash has left.
#[test]
fn an_unfinished_image_is_no_child() {
    let family = Family::new("vhd", "disk.vhd.ferrite-new");
    let extra = name("vhd", &at(&family.dir, "extra.vhd"));
    clone(&family.parent, &extra);
    family.refuses("extra.vhd");
    fs::rename(&extra.path, &family.other.path).unwrap();
    coalesce(&family.child, false).unwrap();
}

#[test]
fn the_parent_knows_of_a_child_elsewhere_before_that_has_its_name() {
    let family = Family::new("vhd", "elsewhere/other.vhd");
    let watched = Watched::log(None);
    watched.clone(&family, &on(&family.parent)).unwrap();
    let folder = format!("sync {}", family.dir.path().file_name().unwrap().to_str().unwrap());
    let list = "name parent.vhd.ferrite-children";
    // A command that adds another child would take this one for removed.
    let steps = [list, &folder, "locked other.vhd", "name other.vhd", "sync elsewhere"];
    watched.did(&steps);
}

#[test]
fn a_clone_whose_parent_cannot_be_told_is_made_only_by_word() {
    let family = Family::new("vhd", "elsewhere/other.vhd");
    let watched = || Watched::log(Some("ferrite-children"));
    let error = watched().clone(&family, &on(&family.parent)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    assert!(error.help().contains("--unmarked"), "{}", error.help());
    let left: Vec<_> = fs::read_dir(at(&family.dir, "elsewhere")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    let new = NewImage { unmarked: true, ..on(&family.parent) };
    let done = watched().clone(&family, &new).unwrap();
    assert!(done.notes.iter().any(|note| note.contains("does not know")), "{done:?}");
}

#[test]
fn a_child_elsewhere_is_known_after_a_snapshot_and_after_a_merge() {
    for format in FORMATS {
        let family = Family::whole(format, "elsewhere/other");
        let old = name(format, &at(&family.dir, "elsewhere/old"));
        let watched = Watched::log(None);
        anywhere(&watched, |tools| tools.snapshot(&family.other, &old)).unwrap();
        let list = format!("name parent.{format}.ferrite-children");
        watched.did(&[&list, "name old", "name other"]);
        family.refuses("elsewhere");
        // Only the new name is left of the two.
        fs::remove_file(&family.other.path).unwrap();
        family.refuses("elsewhere/old");
        clone_anywhere(&old, &family.other);
        let watched = Watched::log(None);
        anywhere(&watched, |tools| tools.coalesce(&family.other, false)).unwrap();
        watched.did(&[&list, "name other"]);
        family.refuses("elsewhere/other");
        fs::remove_file(&family.other.path).unwrap();
        coalesce(&family.child, false).unwrap();
    }
}

/// As other programs make a snapshot: the file gets another name, and its old one is a new image's.
#[test]
fn a_child_elsewhere_is_known_however_far_above_the_parent_its_name_is() {
    for format in FORMATS {
        let family = Family::whole(format, "elsewhere/other");
        for _ in 0..3 {
            let old = name(format, &at(&family.dir, "elsewhere/old"));
            snapshot(&family.other, &old);
            let list = at(&family.dir, &format!("parent.{format}.ferrite-children"));
            let text = fs::read_to_string(&list).unwrap();
            let known: Vec<_> = text.lines().filter(|line| !line.contains("/old")).collect();
            fs::write(&list, known.join("\n") + "\n").unwrap();
            family.refuses("elsewhere/other");
            // A command that adds a line keeps that one.
            clone_anywhere(&family.parent, &name(format, &at(&family.dir, "elsewhere/more")));
            let text = fs::read_to_string(&list).unwrap();
            assert!(text.contains("elsewhere/other"), "{text}");
            fs::remove_file(at(&family.dir, "elsewhere/more")).unwrap();
            anywhere(&HostDirectory, |tools| tools.coalesce(&family.other, false)).unwrap();
        }
    }
}

#[test]
fn what_stands_on_the_child_is_in_no_merges_way() {
    for format in FORMATS {
        let family = Family::whole(format, "elsewhere/other");
        let rebase = |tools: &ImageTools<'_>| {
            tools.rebase(&family.other, &family.child, Rebase::Safe, false).map(drop)
        };
        anywhere(&HostDirectory, rebase).unwrap();
        make_writable(&family.child);
        coalesce(&family.child, false).unwrap();
        let options = OpenOptions { parents: Parents::Any, ..options() };
        drop(Disk::open_image(&family.other, &options).unwrap());
    }
}

/// Its guest could keep what it stood on from being served, when it has a parent for once.
#[test]
fn what_a_guest_has_written_into_a_raw_parent_leads_nowhere() {
    for format in FORMATS {
        let family = Family::whole(format, "elsewhere/other");
        let raw = name("raw", &at(&family.dir, "elsewhere/raw"));
        fs::copy(&family.child.path, &raw.path).unwrap();
        fs::remove_file(&family.other.path).unwrap();
        clone_anywhere(&raw, &family.other);
        fs::remove_file(at(&family.dir, "elsewhere/raw.ferrite-children")).ok();
        fs::remove_file(&family.child.path).unwrap();
        make_writable(&family.parent);
        drop(open(&family.parent).unwrap());
    }
}

#[test]
fn a_snapshot_of_what_a_parent_knows_of_takes_a_list_that_can_be_written() {
    for format in FORMATS {
        let family = Family::whole(format, "elsewhere/other");
        let old = name(format, &at(&family.dir, "elsewhere/old"));
        let watched = || Watched::log(Some("parent"));
        let take = |tools: &ImageTools<'_>| tools.snapshot(&family.other, &old);
        let error = anywhere(&watched(), take).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        assert!(error.help().contains("ferrite-children") && !old.path.exists(), "{error:?}");
        // What its help says. The parent does not know of it then.
        fs::remove_file(at(&family.dir, &format!("parent.{format}.ferrite-children"))).unwrap();
        let done = anywhere(&watched(), take).unwrap();
        assert!(done.notes.iter().any(|note| note.contains("does not know")), "{done:?}");
    }
}

#[test]
fn images_on_another_name_of_the_parent_are_in_a_merges_way() {
    for format in FORMATS {
        let file = format!("other.{format}");
        for (second, child) in [("elsewhere/second", "elsewhere/"), ("second", "elsewhere/")] {
            let family = Family::new(format, &format!("{child}{file}"));
            let second = link(&family.parent, &at(&family.dir, second));
            clone_anywhere(&second, &family.other);
            family.refuses(if second.path.starts_with(at(&family.dir, "elsewhere")) {
                "has 2 names"
            } else {
                "other"
            });
            make_writable(&family.parent);
            fs::remove_file(&family.child.path).unwrap();
            let error = open(&family.parent).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        }
    }
}

#[test]
fn another_name_of_the_child_would_be_destroyed_by_its_merge() {
    for format in FORMATS {
        let refusals =
            [("second", "second has the same parent"), ("elsewhere/second", "has 2 names")];
        for (second, why) in refusals {
            let family = Family::new(format, "other");
            let second = link(&family.child, &at(&family.dir, second));
            let error = coalesce(&family.child, false).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
            fs::remove_file(&second.path).unwrap();
            coalesce(&family.child, false).unwrap();
        }
    }
}

#[test]
fn an_image_with_another_name_is_written_to_if_all_of_them_are_known() {
    for format in FORMATS {
        let family = Family::new(format, "other");
        // The name that an interrupted command leaves.
        let new = format!("child.{format}.ferrite-new");
        let second = link(&family.child, &at(&family.dir, &new));
        drop(open(&family.child).unwrap());
        coalesce(&family.child, false).unwrap();
        fs::remove_file(&second.path).unwrap();
        let second = link(&family.child, &at(&family.dir, "second"));
        drop(open(&family.child).unwrap());
        fs::rename(&second.path, at(&family.dir, "elsewhere/second")).unwrap();
        let error = open(&family.child).unwrap_err();
        assert!(error.help().contains("-samefile"), "{error} {}", error.help());
    }
}

/// Users and programs that do not know this program go by the mode.
#[test]
fn a_parent_is_read_only_for_others_while_a_child_is_merged_and_when_that_fails() {
    for format in FORMATS {
        let family = Family::new(format, "other");
        let mut disk = Queue::new(open(&family.child).unwrap());
        disk.write(MIB, &[1; 4096]).unwrap();
        disk.close().unwrap();
        drop(disk);
        let mode = || fs::metadata(&family.parent.path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o440);
        let seen = std::cell::Cell::new(0);
        let stop = |_: Progress| {
            seen.set(mode());
            false
        };
        let error = work(None, |tools| {
            let tools = ImageTools {
                progress: &stop,
                parents: Parents::default(),
                state_dir: None,
                ..*tools
            };
            tools.coalesce(&family.child, false)
        });
        assert!(error.is_err() && seen.get() == 0o440 && mode() == 0o440, "{:o}", mode());
        let watched = Watched::log(Some("child"));
        anywhere(&watched, |tools| tools.coalesce(&family.child, false)).unwrap_err();
        assert_eq!(mode(), 0o440);
        coalesce(&family.child, false).unwrap();
        assert_eq!(fs::metadata(&family.child.path).unwrap().permissions().mode() & 0o777, 0o640);
    }
}

#[test]
fn a_line_that_makes_no_sense_counts_and_stays_until_somebody_removes_it() {
    for line in ["/srv/vms/disk.vhd", "0123 file://", "x file:///a", "\u{fffd}"] {
        let family = Family::new("vhd", "elsewhere/other");
        let list = at(&family.dir, "parent.vhd.ferrite-children");
        fs::write(&list, format!("\n{line}\n\n")).unwrap();
        family.refuses("makes no sense");
        clone(&family.parent, &family.other);
        let text = fs::read_to_string(&list).unwrap();
        assert!(text.lines().count() == 2 && text.contains(line), "{text}");
        fs::remove_file(&family.other.path).unwrap();
        family.refuses("makes no sense");
        fs::remove_file(&family.child.path).unwrap();
        make_writable(&family.parent);
        let error = open(&family.parent).unwrap_err();
        assert!(error.help().contains("parent.vhd.ferrite-children"), "{}", error.help());
    }
}

/// Reads of this thread, of whatever.
fn reads() -> u64 {
    let text = fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("syscr: "));
    line.unwrap().parse().unwrap()
}

/// A storage repository has thousands, and may be on a network.
#[test]
fn opening_for_writing_reads_the_head_of_each_image_once_and_nothing_at_a_takeover() {
    const IMAGES: i64 = 40;
    for format in FORMATS {
        let [alone, beside] = ["alone", "beside"].map(|_| {
            let family = Family::new(format, &format!("other.{format}"));
            fs::remove_file(&family.other.path).ok();
            create(&family.other);
            family
        });
        for n in 0..IMAGES {
            // Half of them stand on something.
            let image = name(format, &at(&beside.dir, &format!("{n}.{format}")));
            if n % 2 == 0 { create(&image) } else { drop(clone(&beside.parent, &image)) }
        }
        let cost = |family: &Family, options: &OpenOptions| {
            let before = reads();
            drop(Disk::open_image(&family.other, options).unwrap());
            (reads() - before).cast_signed()
        };
        // Opening also reads of locks and loop devices, and other tests have some now and then.
        let more = |options: &OpenOptions| {
            let once = |_| cost(&beside, options) - cost(&alone, options);
            let mut more: Vec<i64> = (0..few_or_all(15, 41)).map(once).collect();
            more.sort_unstable();
            more[more.len() / 2]
        };
        let for_writing = more(&options());
        assert!((1..=IMAGES).contains(&for_writing), "{format}: {for_writing}");
        let taken_over = OpenOptions { taken_over: true, ..options() };
        assert_eq!(more(&taken_over), 0, "{format}");
    }
}

/// By its mode, and by what its own list says.
#[test]
fn what_was_put_on_an_image_before_a_takeover_is_seen() {
    for format in FORMATS {
        let family = Family::whole(format, "elsewhere/other");
        fs::remove_file(&family.child.path).unwrap();
        let taken_over = OpenOptions { taken_over: true, ..options() };
        let error = Disk::open_image(&family.parent, &taken_over).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Permission, "{error}");
        make_writable(&family.parent);
        let error = Disk::open_image(&family.parent, &taken_over).unwrap_err();
        assert!(error.to_string().contains("stands on it"), "{error}");
    }
}

#[test]
fn a_file_that_has_no_name_any_more_is_written_to() {
    let dir = dir_on_disk();
    let image = name("raw", &at(&dir, "image"));
    create(&image);
    let file = fs::File::options().read(true).write(true).open(&image.path).unwrap();
    fs::remove_file(&image.path).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    drop(Disk::open_image(&name("raw", path.as_str().as_ref()), &options()).unwrap());
}

/// A guest has the first sector of a fixed disk.
#[test]
fn the_first_sector_of_a_fixed_disk_keeps_no_image_from_being_served() {
    let family = Family::new("vhd", "fixed.vhd");
    let new = NewImage { bytes: Some(8 * MIB), fixed: true, ..NewImage::default() };
    work(None, |tools| tools.create(&family.other, &new)).unwrap();
    let head = fs::read(&family.child.path).unwrap()[..4096].to_vec();
    let mut disk = Queue::new(open(&family.other).unwrap());
    disk.write(0, &head).unwrap();
    disk.close().unwrap();
    drop(disk);
    fs::remove_file(&family.child.path).unwrap();
    make_writable(&family.parent);
    drop(open(&family.parent).unwrap());
}

#[test]
fn clones_that_are_made_at_the_same_time_are_all_known() {
    let family = Family::new("qcow2", "elsewhere/0");
    let clones: Vec<ImageName> =
        (0..8).map(|n| name("qcow2", &at(&family.dir, &format!("elsewhere/{n}")))).collect();
    std::thread::scope(|scope| {
        for child in &clones {
            scope.spawn(|| clone(&family.parent, child));
        }
    });
    let list = fs::read_to_string(at(&family.dir, "parent.qcow2.ferrite-children")).unwrap();
    assert_eq!(list.lines().count(), clones.len(), "{list}");
    // One by one they go, and the last one still counts.
    for child in &clones {
        family.refuses("elsewhere");
        fs::remove_file(&child.path).unwrap();
    }
    coalesce(&family.child, false).unwrap();
}

/// Names of any bytes, and a link to the parent in the child's folder.
#[test]
fn odd_names_and_links_lead_to_the_same_parent() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let family = Family::new("vhd", "elsewhere/other.vhd");
    let link = ImageName { path: at(&family.dir, "elsewhere/link.vhd"), ..family.parent.clone() };
    std::os::unix::fs::symlink(&family.parent.path, &link.path).unwrap();
    let odd: PathBuf = at(&family.dir, "elsewhere").join(OsStr::from_bytes(b"a %41\n\xff.vhd"));
    let odd = ImageName { path: odd, ..family.other.clone() };
    clone(&link, &odd);
    family.refuses("elsewhere");
    let options = OpenOptions { parents: Parents::Any, ..options() };
    let mut disk = Queue::new(Disk::open_image(&odd, &options).unwrap());
    disk.write(0, &[1; 512]).unwrap();
    disk.close().unwrap();
}

/// It may be an older state of the disk that its user keeps.
#[test]
fn a_parent_with_another_name_does_not_become_the_disk_under_that_name_too() {
    for format in FORMATS {
        let family = Family::new(format, "other");
        let kept = link(&family.parent, &at(&family.dir, &format!("monday.{format}")));
        let refused = coalesce(&family.child, false).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Refused);
        assert!(refused.to_string().contains("has 2 names"), "{refused}");
        fs::remove_file(&kept.path).unwrap();
        coalesce(&family.child, false).unwrap();
    }
}
