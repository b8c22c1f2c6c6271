//! How a parent knows of its children in other folders, whatever it and they are called now.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use ferrite_disk::{Format, Parents};
use ferrite_image_tools::{ImageTools, NewImage, Progress, Rebase};

use crate::common::tree::{FORMATS, Refuses, Tree};
use crate::common::vhd::at;
use crate::common::{MIB, Mount, anywhere, dir_on_disk, run, skipped};
use ferrite_host::directory::HostDirectory;
use rustix::fs::{CWD, FileType, FlockOperation, Mode, flock, mknodat};

#[test]
fn a_parent_that_was_renamed_knows_its_children_in_other_folders() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        tree.rename("a/base", "a/template");
        let rebase = |tools: &ImageTools<'_>| {
            tools.rebase(&tree.image("a/own"), &tree.image("a/template"), Rebase::Unsafe, false)
        };
        anywhere(&HostDirectory, rebase).unwrap();
        tree.refuses_to_coalesce("a/own", "b/vm");
        // Another image gets the old name, and a child.
        tree.create("a/base");
        fs::create_dir(tree.path("c")).unwrap();
        tree.clone("a/base", "c/other");
        tree.refuses_to_coalesce("a/own", "b/vm");
        tree.make_writable("a/template");
        let error = tree.open("a/template").unwrap_err();
        assert!(error.to_string().contains("stands on it"), "{error}");
        // An image whose parent is the new `a/base` hinders no merge into the old one.
        let next = format!("a/next.{format}");
        tree.clone("a/base", &next);
        tree.remove("b/vm");
        tree.coalesce("a/own").unwrap();
        // The merge leaves one line in the list: that of the new `a/base`.
        assert_eq!(tree.list("a/base").lines().count(), 1, "{}", tree.list("a/base"));
        tree.make_writable("a/base");
        let error = tree.open("a/base").unwrap_err();
        assert!(error.to_string().contains("c/other"), "{error}");
        tree.open("a/own").unwrap();
    }
}

/// A merge gives the parent's file the child's name, and what stands on that.
#[test]
fn a_merged_image_that_was_renamed_knows_what_stood_on_its_child() {
    for format in FORMATS {
        for renamed_before in [false, true] {
            let tree = Tree::new(format);
            tree.clone("a/own", "b/vm");
            if renamed_before {
                tree.rename("a/own", "a/disk");
                tree.make_writable("a/disk");
                tree.coalesce("a/disk").unwrap();
                tree.rename("a/disk", "a/template");
            } else {
                tree.make_writable("a/own");
                tree.coalesce("a/own").unwrap();
                tree.rename("a/own", "a/template");
            }
            tree.make_writable("a/template");
            let error = tree.open("a/template").unwrap_err();
            assert!(error.to_string().contains("stands on it"), "{error}");
            tree.clone("a/template", "a/next");
            tree.refuses_to_coalesce("a/next", "b/vm");
            tree.remove("b/vm");
            tree.coalesce("a/next").unwrap();
            assert_eq!(tree.list("a/own"), "", "{renamed_before}");
        }
    }
}

/// A rebase makes a new file of it.
#[test]
fn a_rebased_image_that_was_renamed_knows_what_stood_on_it() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/own", "b/vm");
        tree.create("a/other");
        let rebase = |tools: &ImageTools<'_>| {
            tools.rebase(&tree.image("a/own"), &tree.image("a/other"), Rebase::Safe, true)
        };
        anywhere(&HostDirectory, rebase).unwrap();
        tree.rename("a/own", "a/template");
        tree.clone("a/template", "a/next");
        tree.refuses_to_coalesce("a/next", "b/vm");
        tree.remove("b/vm");
        tree.coalesce("a/next").unwrap();
    }
}

#[test]
fn a_forced_merge_leaves_no_line_that_keeps_the_disk_from_being_served() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        tree.rename("a/base", "a/template");
        anywhere(&HostDirectory, |tools| {
            let (own, template) = (tree.image("a/own"), tree.image("a/template"));
            tools.rebase(&own, &template, Rebase::Unsafe, false).unwrap();
            tools.coalesce(&own, true).unwrap();
        });
        assert_eq!(tree.list("a/base"), "");
        tree.open("a/own").unwrap();
    }
}

/// Its number is that of its device, and it gets another one when the host starts again.
#[test]
fn a_child_that_was_deleted_is_gone_although_its_file_system_has_another_number() {
    let (files, folder) = (dir_on_disk(), "b");
    let [volume, other] = ["volume", "other"].map(|name| at(&files, name));
    for file in [&volume, &other] {
        fs::File::create(file).unwrap().set_len(320 * MIB).unwrap();
        if run("mkfs.xfs", &["-q", file.to_str().unwrap()]).is_none() {
            return skipped("there is no mkfs.xfs here");
        }
    }
    let mount =
        |file: &Path, at: &Path| Mount::new(&["-o", "loop,nouuid", file.to_str().unwrap()], at);
    let tree = Tree::new(Format::Qcow2);
    let Some(mounted) = mount(&volume, &tree.path(folder)) else { return };
    tree.clone("a/base", "b/vm");
    drop(mounted);
    // Another one may have the number now, and is in its place.
    let mounted = mount(&other, &tree.path(folder)).unwrap();
    tree.refuses_to_coalesce("a/own", "not mounted");
    drop(mounted);
    fs::create_dir(tree.path("c")).unwrap();
    let _other = mount(&other, &tree.path("c")).unwrap();
    let _mounted = mount(&volume, &tree.path(folder)).unwrap();
    tree.refuses_to_coalesce("a/own", "b/vm");
    tree.remove("b/vm");
    tree.coalesce("a/own").unwrap();
}

#[test]
fn a_line_that_does_not_say_on_which_volume_a_child_was_counts() {
    for word in ["device", "00000000deadbeef"] {
        let tree = Tree::new(Format::Vhd);
        let line = format!("{word} file://{}\n", tree.path("b/vm").display());
        fs::write(tree.path("a/base.ferrite-children"), &line).unwrap();
        tree.refuses_to_coalesce("a/own", "does not say on which volume");
        tree.clone("a/base", "b/other");
        assert!(tree.list("a/base").contains(&line), "{}", tree.list("a/base"));
    }
}

#[test]
fn a_snapshot_that_fails_leaves_no_line_for_what_never_was() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        let (disk, old) = (tree.image("b/vm"), tree.image("b/old"));
        let before = tree.list("a/base");
        let snapshot = |tools: &ImageTools<'_>| tools.snapshot(&disk, &old);
        anywhere(&Refuses(disk.path.clone()), snapshot).unwrap_err();
        assert_eq!(tree.list("a/base"), before, "{format}");
        let names = fs::read_dir(tree.path("b")).unwrap().count();
        assert_eq!(names, 1, "{format}");
        anywhere(&HostDirectory, snapshot).unwrap();
    }
}

#[test]
fn what_a_clone_that_was_cut_off_has_made_read_only_is_told_from_a_parent() {
    for format in FORMATS {
        let tree = Tree::new(format);
        let error = tree.open("a/base").unwrap_err();
        let (why, help) = (error.why(), error.help());
        assert!(why.contains("a/own stands on it") && !help.contains("chmod"), "{why}: {help}");
        tree.remove("a/own");
        tree.clone("a/base", "b/vm");
        let error = tree.open("a/base").unwrap_err();
        let (why, help) = (error.why(), error.help());
        assert!(why.contains("b/vm stands on it") && !help.contains("chmod"), "{why}: {help}");
        tree.remove("b/vm");
        let error = tree.open("a/base").unwrap_err();
        let help = error.help();
        assert!(help.contains("cut off") && help.contains("chmod u+w"), "{help}");
        tree.make_writable("a/base");
        tree.open("a/base").unwrap();
    }
}

/// A child in its parent's folder whose name says that it has the other format.
#[test]
fn a_child_with_the_extension_of_another_format_is_known_by_a_line_and_by_what_it_is() {
    for format in FORMATS {
        for has_line in [true, false] {
            let tree = Tree::new(format);
            let other = if format == Format::Vhd { "a/web.qcow2" } else { "a/web.vhd" };
            tree.remove("a/own");
            tree.clone("a/base", other);
            assert!(tree.list("a/base").contains("web"), "{}", tree.list("a/base"));
            if !has_line {
                tree.remove("a/base.ferrite-children");
            }
            tree.make_writable("a/base");
            let error = tree.open("a/base").unwrap_err();
            assert!(error.to_string().contains("web"), "{error}");
            let new = NewImage { bytes: Some(8 * MIB), force: true, ..NewImage::default() };
            let before = fs::read(tree.path("a/base")).unwrap();
            anywhere(&HostDirectory, |tools| tools.create(&tree.image("a/base"), &new))
                .unwrap_err();
            assert!(fs::read(tree.path("a/base")).unwrap() == before);
        }
    }
}

/// A user with the right to write in the folder can put it there.
#[test]
fn a_list_that_is_no_regular_file_is_refused_by_name_and_nobody_waits_for_it() {
    let tree = Tree::new(Format::Vhd);
    tree.make_writable("a/base");
    let (list, file) = (tree.path("a/base.ferrite-children"), tree.path("file"));
    fs::write(&file, "").unwrap();
    let pipe = || mknodat(CWD, &list, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let make: [&dyn Fn(); 4] = [
        &|| symlink("nowhere", &list).unwrap(),
        &|| symlink(&file, &list).unwrap(),
        &pipe,
        &|| fs::create_dir(&list).unwrap(),
    ];
    for make in make {
        fs::remove_file(&list).or_else(|_| fs::remove_dir(&list)).unwrap();
        make();
        let on = NewImage { parent: Some(tree.image("a/base")), ..NewImage::default() };
        let clone =
            anywhere(&HostDirectory, |tools| tools.create(&tree.image("b/vm"), &on).map(drop));
        tree.make_writable("a/base");
        for refused in [clone, tree.open("a/base").map(drop), tree.coalesce("a/own")] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("base.ferrite-children"), "{error}");
            assert!(error.contains("move it away"), "{error}");
        }
    }
    // Another image's is not in its way.
    fs::remove_dir(&list).unwrap();
    tree.remove("a/own");
    pipe();
    tree.create("a/other");
    tree.open("a/other").unwrap();
}

#[test]
fn a_clone_does_not_wait_for_the_copy_of_a_rebase_and_both_are_known() {
    let tree = Tree::new(Format::Vhd);
    tree.clone("a/base", "b/vm");
    tree.create("a/new");
    let cloned = std::cell::Cell::new(false);
    let during = |_: Progress| {
        let list = fs::File::open(tree.path("a/new.ferrite-children")).unwrap();
        flock(&list, FlockOperation::NonBlockingLockExclusive).expect("the list is locked");
        drop(list);
        if !cloned.replace(true) {
            tree.clone("a/new", "b/other");
        }
        true
    };
    let rebase = |tools: &ImageTools<'_>| {
        let tools = ImageTools {
            progress: &during,
            state_dir: None,
            parents: Parents::Any,
            directory: tools.directory,
            engine: tools.engine,
            ..*tools
        };
        tools.rebase(&tree.image("b/vm"), &tree.image("a/new"), Rebase::Safe, false)
    };
    anywhere(&HostDirectory, rebase).unwrap();
    assert!(cloned.get());
    let list = tree.list("a/new");
    assert!(list.contains("b/vm") && list.contains("b/other"), "{list}");
}

#[test]
fn a_clone_that_cannot_be_told_leaves_no_list_and_a_parent_that_can_be_written() {
    for format in FORMATS {
        for fails in ["a/base.ferrite-list.new", "a/base.ferrite-children", "b/vm.ferrite-new"] {
            let tree = Tree::new(format);
            tree.remove("a/own");
            tree.remove("a/base.ferrite-children");
            tree.make_writable("a/base");
            let on = NewImage { parent: Some(tree.image("a/base")), ..NewImage::default() };
            let clone = |tools: &ImageTools<'_>| tools.create(&tree.image("b/vm"), &on);
            anywhere(&Refuses(tree.path(fails)), clone).unwrap_err();
            let names: Vec<_> = fs::read_dir(tree.path("a")).unwrap().collect();
            assert_eq!(names.len(), 1, "{fails}: {names:?}");
            tree.open("a/base").unwrap();
        }
    }
}

/// A name has at most 255 bytes, and more is behind it until a file is complete.
#[test]
fn a_parent_with_a_name_of_238_bytes_knows_its_children_and_a_longer_one_is_refused() {
    for format in FORMATS {
        for bytes in 234..=244 {
            let tree = Tree::new(format);
            let parent = format!("a/{}", "p".repeat(bytes));
            tree.rename("a/base", &parent);
            tree.remove("a/base.ferrite-children");
            tree.make_writable(&parent);
            let on = NewImage { parent: Some(tree.image(&parent)), ..NewImage::default() };
            let made = anywhere(&HostDirectory, |tools| tools.create(&tree.image("b/vm"), &on));
            if bytes <= 238 {
                made.unwrap();
                assert!(tree.list(&parent).contains("b/vm"), "{bytes}");
                continue;
            }
            let error = made.unwrap_err().to_string();
            assert!(error.contains("could not be told"), "{error}");
            assert_eq!(fs::read_dir(tree.path("a")).unwrap().count(), 2, "{bytes}");
            assert_eq!(fs::read_dir(tree.path("b")).unwrap().count(), 0, "{bytes}");
            assert!(!fs::metadata(tree.path(&parent)).unwrap().permissions().readonly());
        }
    }
}
