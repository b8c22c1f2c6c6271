//! Whether a parent knows of its children when these, or their tree, were moved.

use std::fs::{self, Permissions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;

use ferrite_disk::{Disk, Format, ImageName};
use ferrite_image_tools::{ImageTools, NewImage, Rebase};

use crate::common::tree::{FORMATS, Refuses, Tree};
use crate::common::vhd::options;
use crate::common::{MIB, Mount, anywhere, run};
use ferrite_host::directory::HostDirectory;

#[test]
fn a_child_that_was_moved_or_renamed_is_not_taken_for_gone() {
    for format in FORMATS {
        for to in ["b/renamed", "b/below/vm", "c/vm"] {
            let tree = Tree::new(format);
            for folder in ["b/below", "c"] {
                fs::create_dir(tree.path(folder)).unwrap();
            }
            tree.clone("a/base", "b/vm");
            tree.rename("b/vm", to);
            tree.refuses_to_coalesce("a/own", to);
            tree.make_writable("a/base");
            tree.remove("a/own");
            let error = tree.open("a/base").unwrap_err();
            assert!(error.to_string().contains(to), "{error}");
            tree.clone("a/base", "a/own");
            // Nor is it if something else has its name.
            tree.create("b/vm");
            tree.refuses_to_coalesce("a/own", to);
            tree.remove("b/vm");
            tree.clone("a/base", "b/vm");
            tree.remove("b/vm");
            tree.refuses_to_coalesce("a/own", to);
            // What the message advises.
            let rebase = |tools: &ImageTools<'_>| {
                tools.rebase(&tree.image(to), &tree.image("a/base"), Rebase::Unsafe, false)
            };
            anywhere(&HostDirectory, rebase).unwrap();
            tree.refuses_to_coalesce("a/own", to);
            tree.remove(to);
            tree.coalesce("a/own").unwrap();
        }
    }
}

/// A VHD knows its parent by its UUID, and by a relative path; a qcow2 does not.
#[test]
fn children_in_a_tree_that_was_moved_as_a_whole_take_force() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        fs::create_dir(tree.path("tree")).unwrap();
        for folder in ["a", "b"] {
            tree.rename(folder, &format!("tree/{folder}"));
        }
        tree.refuses_to_coalesce("tree/a/own", "tree/b/vm");
        let done =
            anywhere(&HostDirectory, |tools| tools.coalesce(&tree.image("tree/a/own"), true));
        let done = done.unwrap();
        assert!(done.notes.iter().any(|note| note.contains("destroyed")), "{done:?}");
        tree.open("tree/a/own").unwrap();
    }
    let tree = Tree::new(Format::Qcow2);
    tree.clone("a/base", "b/vm");
    tree.rename("a", "c");
    tree.rename("b", "d");
    tree.refuses_to_coalesce("c/own", "b/vm was made on it and was moved (it is ");
    let error = tree.coalesce("c/own").unwrap_err();
    assert!(error.to_string().contains("d/vm now)"), "{error}");
    assert!(error.help().contains("rebase -u") && error.help().contains("--force"), "{error}");
}

#[test]
fn a_child_that_was_moved_beside_its_parent_is_in_its_own_merges_way_no_more() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        tree.remove("a/own");
        tree.rename("b/vm", "a/vm");
        tree.coalesce("a/vm").unwrap();
    }
}

#[test]
fn what_was_moved_and_stands_on_nothing_any_more_is_no_child() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        tree.rename("b/vm", "b/flat");
        tree.create("b/plain");
        fs::write(tree.path("b/flat"), fs::read(tree.path("b/plain")).unwrap()).unwrap();
        tree.coalesce("a/own").unwrap();
    }
}

#[test]
fn a_child_that_was_deleted_is_gone_although_somebody_has_it_open() {
    let tree = Tree::new(Format::Qcow2);
    tree.clone("a/base", "b/vm");
    let _open = fs::File::open(tree.path("b/vm")).unwrap();
    tree.remove("b/vm");
    tree.coalesce("a/own").unwrap();
}

/// As a list of an earlier version, and of a file system without handles.
fn without_handles(list: &str) -> String {
    let words = |line: &str| {
        let words: Vec<_> = line.split(' ').filter(|word| !word.starts_with("handle=")).collect();
        words.join(" ") + "\n"
    };
    list.lines().map(words).collect()
}

#[test]
fn a_missing_child_of_a_line_without_a_handle_may_have_been_moved() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        let list = tree.path("a/base.ferrite-children");
        let new = tree.list("a/base").lines().last().unwrap().to_owned();
        let old = without_handles(&new);
        assert_ne!(new, old.trim(), "this file system has no handles");
        fs::write(&list, &old).unwrap();
        tree.refuses_to_coalesce("a/own", "b/vm");
        // It learns the handle with the next child, if its own is there.
        tree.clone("a/base", "b/next");
        assert!(tree.list("a/base").contains(&new), "{}", tree.list("a/base"));
        tree.remove("b/next");
        fs::write(&list, &old).unwrap();
        tree.rename("b/vm", "b/moved");
        tree.refuses_to_coalesce("a/own", "b/vm was made on it, and is not there");
        tree.clone("a/base", "b/vm");
        assert!(tree.list("a/base").contains(&old), "{}", tree.list("a/base"));
        tree.remove("b/vm");
        tree.refuses_to_coalesce("a/own", "deleted or moved");
        tree.rename("b/moved", "b/vm");
        tree.create("a/another");
        let rebase = |tools: &ImageTools<'_>| {
            tools.rebase(&tree.image("b/vm"), &tree.image("a/another"), Rebase::Unsafe, false)
        };
        anywhere(&HostDirectory, rebase).unwrap();
        tree.refuses_to_coalesce("a/own", "another image is there");
        fs::remove_file(list).unwrap();
        tree.coalesce("a/own").unwrap();
    }
}

#[test]
fn where_a_file_system_has_no_handles_a_missing_child_takes_force() {
    let tree = Tree::new(Format::Qcow2);
    for folder in ["lower", "upper", "work"] {
        fs::create_dir(tree.path(folder)).unwrap();
    }
    let option = |name: &str| format!("{name}dir={}", tree.path(name).display());
    let options = ["lower", "upper", "work"].map(option).join(",");
    let mount = Mount::new(&["-t", "overlay", "-o", &options, "none"], &tree.path("b"));
    let Some(_mount) = mount else { return };
    tree.clone("a/base", "b/vm");
    let line = tree.list("a/base").lines().last().unwrap().to_owned();
    assert!(line.ends_with("b/vm") && !line.contains("handle="), "{line}");
    tree.rename("b/vm", "b/moved");
    tree.refuses_to_coalesce("a/own", "deleted or moved");
    anywhere(&HostDirectory, |tools| tools.coalesce(&tree.image("a/own"), true)).unwrap();
}

#[test]
fn a_line_with_a_word_that_nobody_knows_counts() {
    let tree = Tree::new(Format::Qcow2);
    tree.clone("a/base", "b/vm");
    let list = tree.list("a/base");
    for (from, to) in
        [(" file://", " colour=red file://"), ("handle=", "handle=0"), ("=", "=\u{e9}")]
    {
        let line = list.replacen(from, to, 1);
        fs::write(tree.path("a/base.ferrite-children"), &line).unwrap();
        tree.refuses_to_coalesce("a/own", "b/vm");
    }
}

#[test]
fn a_snapshot_a_day_that_is_merged_again_leaves_no_line_each() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        for day in 0..4 {
            let old = format!("b/day-{day}");
            anywhere(&HostDirectory, |tools| {
                tools.snapshot(&tree.image("b/vm"), &tree.image(&old))
            })
            .unwrap();
            assert!(tree.list("a/base").contains(&old), "{}", tree.list("a/base"));
            tree.coalesce("b/vm").unwrap();
            assert!(tree.list("a/base").lines().count() <= 3, "{}", tree.list("a/base"));
            tree.refuses_to_coalesce("a/own", "b/vm");
        }
        tree.remove("b/vm");
        tree.coalesce("a/own").unwrap();
    }
}

#[test]
fn a_rebase_that_fails_leaves_what_the_parent_knew_of_the_child() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        let before = tree.list("a/base");
        let rebase = |tools: &ImageTools<'_>| {
            tools.rebase(&tree.image("b/vm"), &tree.image("a/base"), Rebase::Safe, false)
        };
        anywhere(&Refuses(tree.path("b/vm")), rebase).unwrap_err();
        assert_eq!(tree.list("a/base"), before);
        anywhere(&HostDirectory, rebase).unwrap();
        tree.rename("b/vm", "b/moved");
        tree.refuses_to_coalesce("a/own", "b/moved");
        tree.remove("b/moved");
        tree.coalesce("a/own").unwrap();
    }
}

/// Its child says where it was, and nothing there says what it is.
#[test]
fn a_raw_parent_that_was_moved_with_its_list_has_its_child_still() {
    for format in FORMATS {
        let tree = Tree::new(format);
        let raw = |path: &str| ImageName { format: Format::Raw, path: tree.path(path) };
        let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
        anywhere(&HostDirectory, |tools| tools.create(&raw("a/old.img"), &new)).unwrap();
        let on = NewImage { parent: Some(raw("a/old.img")), ..NewImage::default() };
        anywhere(&HostDirectory, |tools| tools.create(&tree.image("b/vm"), &on)).unwrap();
        fs::create_dir(tree.path("c")).unwrap();
        for suffix in ["", ".ferrite-children"] {
            tree.rename(&format!("a/old.img{suffix}"), &format!("c/old.img{suffix}"));
        }
        tree.make_writable("c/old.img");
        let open = || Disk::open_image(&raw("c/old.img"), &options());
        let error = open().unwrap_err();
        assert!(error.to_string().contains("b/vm"), "{error}");
        tree.remove("b/vm");
        open().unwrap();
    }
}

#[test]
fn what_has_the_path_of_a_child_that_was_moved_does_not_hide_that() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        tree.rename("b/vm", "b/moved");
        // The image that is merged has the old path, too, under whatever name.
        for target in ["a/own", "a/base"] {
            std::os::unix::fs::symlink(tree.path(target), tree.path("b/vm")).unwrap();
            tree.refuses_to_coalesce("a/own", "b/moved");
            tree.remove("b/vm");
        }
        tree.remove("b/moved");
        // And an image that was made there is merged.
        tree.rename("a/own", "b/moved");
        tree.clone("a/base", "a/own");
        tree.refuses_to_coalesce("a/own", "b/moved");
        tree.remove("b/moved");
        tree.coalesce("a/own").unwrap();
    }
}

#[test]
fn another_image_at_the_path_of_a_child_without_a_handle_does_not_say_that_this_is_gone() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        let list = tree.path("a/base.ferrite-children");
        fs::write(&list, without_handles(&tree.list("a/base"))).unwrap();
        tree.rename("b/vm", "b/moved");
        tree.create("b/vm");
        tree.refuses_to_coalesce("a/own", "another image is there");
        tree.rename("b/moved", "b/vm");
        tree.refuses_to_coalesce("a/own", "b/vm");
        tree.remove("b/vm");
        fs::remove_file(list).unwrap();
        tree.coalesce("a/own").unwrap();
    }
}

#[test]
fn a_child_that_lost_its_header_may_be_restored_and_counts() {
    let tree = Tree::new(Format::Qcow2);
    tree.clone("a/base", "b/vm");
    let path = tree.path("b/vm");
    let whole = fs::read(&path).unwrap();
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all(&[0; 512]).unwrap();
    tree.refuses_to_coalesce("a/own", "cannot be read in it any more");
    let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all(&whole[..512]).unwrap();
    tree.refuses_to_coalesce("a/own", "b/vm");
    tree.remove("b/vm");
    tree.coalesce("a/own").unwrap();
}

#[test]
fn a_parent_that_is_a_mount_itself_has_clones_only_by_word() {
    let tree = Tree::new(Format::Qcow2);
    fs::write(tree.path("b/base"), "").unwrap();
    let source = tree.path("a/base");
    let bind = ["--bind", source.to_str().unwrap()];
    let Some(_mount) = Mount::new(&bind, &tree.path("b/base")) else { return };
    for child in ["b/vm", "b/vm.qcow2"] {
        let new = NewImage { parent: Some(tree.image("b/base")), ..NewImage::default() };
        let make = |new: &NewImage| {
            anywhere(&HostDirectory, |tools| tools.create(&tree.image(child), new))
        };
        let error = make(&new).unwrap_err();
        assert!(error.to_string().contains("it is mounted where it is"), "{error}");
        assert!(!tree.path(child).exists() && tree.list("b/base").is_empty());
        make(&NewImage { unmarked: true, ..new }).unwrap();
    }
}

/// No process can write to it there, whatever its mode.
#[test]
fn a_parent_on_a_read_only_file_system_has_clones_by_word_and_its_owner_is_told_of_its_mode() {
    let tree = Tree::new(Format::Vhd);
    let folder = tree.path("b/fixed");
    fs::create_dir(&folder).unwrap();
    let Some(_mount) = Mount::new(&["-t", "tmpfs", "none"], &folder) else { return };
    fs::copy(tree.path("a/base"), folder.join("base")).unwrap();
    fs::set_permissions(folder.join("base"), Permissions::from_mode(0o644)).unwrap();
    run("mount", &["-o", "remount,ro", folder.to_str().unwrap()]).unwrap();
    let new = NewImage { parent: Some(tree.image("b/fixed/base")), ..NewImage::default() };
    let make =
        |new: &NewImage| anywhere(&HostDirectory, |tools| tools.create(&tree.image("b/vm"), new));
    make(&new).unwrap_err();
    assert!(!tree.path("b/vm").exists());
    let done = make(&NewImage { unmarked: true, ..new }).unwrap();
    assert!(done.notes.iter().any(|note| note.contains("chmod a-w")), "{done:?}");
}
