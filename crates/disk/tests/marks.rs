//! How a parent knows of its children in other folders, whatever it and they are called now.

mod common;

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use common::vhd::{at, options};
use common::{MIB, Mount, dir_on_disk, run, skipped};
use ferrite_disk::tools::{NewImage, Progress, Rebase, Workshop};
use ferrite_disk::{Disk, DiskError, ErrorKind, Format, ImageName, Parents};
use ferrite_io::directory::{Directory, HostDirectory};
use ferrite_io::engines::test_engine;
use rustix::fs::{CWD, FileType, FlockOperation, Mode, flock, mknodat};
use tempfile::TempDir;

const FORMATS: [Format; 2] = [Format::Vhd, Format::Qcow2];

fn shop<T>(directory: &dyn Directory, work: impl FnOnce(&Workshop<'_>) -> T) -> T {
    work(&Workshop {
        fixed_size: false,
        directory,
        unlocked: false,
        engine: &|arena| test_engine().open(arena, 64),
        state_dir: None,
        progress: &|_| true,
        parents: Parents::Any,
    })
}

/// A template in folder `a` and an image on it in `a`, and one in `b`.
struct Tree {
    dir: TempDir,
    format: Format,
}

impl Tree {
    fn new(format: Format) -> Tree {
        let tree = Tree { dir: dir_on_disk(), format };
        for folder in ["a", "b"] {
            fs::create_dir(tree.path(folder)).unwrap();
        }
        tree.create("a/base");
        tree.clone("a/base", "a/own");
        tree
    }

    fn path(&self, path: &str) -> PathBuf {
        at(&self.dir, path)
    }

    fn image(&self, path: &str) -> ImageName {
        ImageName { format: self.format, path: self.path(path) }
    }

    fn create(&self, name: &str) {
        let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
        shop(&HostDirectory, |shop| shop.create(&self.image(name), &new)).unwrap();
    }

    fn clone(&self, parent: &str, name: &str) {
        let new = NewImage { parent: Some(self.image(parent)), ..NewImage::default() };
        shop(&HostDirectory, |shop| shop.create(&self.image(name), &new)).unwrap();
    }

    fn rename(&self, from: &str, to: &str) {
        fs::rename(self.path(from), self.path(to)).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.path(path)).unwrap();
    }

    fn list(&self, name: &str) -> String {
        fs::read_to_string(self.path(&format!("{name}.ferrite-children"))).unwrap_or_default()
    }

    fn coalesce(&self, name: &str) -> Result<(), DiskError> {
        shop(&HostDirectory, |shop| shop.coalesce(&self.image(name), false)).map(drop)
    }

    #[track_caller]
    fn refuses_to_coalesce(&self, name: &str, why: &str) {
        let error = self.coalesce(name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
        assert!(error.to_string().contains(why), "{why:?} was expected: {error}");
    }

    fn make_writable(&self, name: &str) {
        fs::set_permissions(self.path(name), Permissions::from_mode(0o644)).unwrap();
    }

    fn open(&self, name: &str) -> Result<Disk, DiskError> {
        Disk::open_image(&self.image(name), &options())
    }
}

#[test]
fn a_parent_that_was_renamed_knows_its_children_in_other_folders() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        tree.rename("a/base", "a/template");
        let rebase = |shop: &Workshop<'_>| {
            shop.rebase(&tree.image("a/own"), &tree.image("a/template"), Rebase::Unsafe, false)
        };
        shop(&HostDirectory, rebase).unwrap();
        tree.refuses_to_coalesce("a/own", "b/vm");
        // Another image gets the old name, and a child.
        tree.create("a/base");
        fs::create_dir(tree.path("c")).unwrap();
        tree.clone("a/base", "c/other");
        tree.refuses_to_coalesce("a/own", "b/vm");
        tree.make_writable("a/template");
        let error = tree.open("a/template").unwrap_err();
        assert!(error.to_string().contains("stands on it"), "{error}");
        // What stands on the other one by its name is in nobody's way.
        let next = format!("a/next.{format}");
        tree.clone("a/base", &next);
        tree.remove("b/vm");
        tree.coalesce("a/own").unwrap();
        // What it leaves of the list is the other one's.
        assert_eq!(tree.list("a/base").lines().count(), 1, "{}", tree.list("a/base"));
        tree.make_writable("a/base");
        let error = tree.open("a/base").unwrap_err();
        assert!(error.to_string().contains("c/other"), "{error}");
        tree.open("a/own").unwrap();
    }
}

#[test]
fn a_forced_merge_leaves_no_line_that_keeps_the_disk_from_being_served() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        tree.rename("a/base", "a/template");
        shop(&HostDirectory, |shop| {
            let (own, template) = (tree.image("a/own"), tree.image("a/template"));
            shop.rebase(&own, &template, Rebase::Unsafe, false).unwrap();
            shop.coalesce(&own, true).unwrap();
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

/// Does not give one name to any file.
struct Refuses(PathBuf);

impl Directory for Refuses {
    fn create_new(&self, path: &Path) -> io::Result<OwnedFd> {
        match path == self.0 {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => HostDirectory.create_new(path),
        }
    }

    fn hard_link(&self, from: &Path, to: &Path) -> io::Result<()> {
        HostDirectory.hard_link(from, to)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        match to == self.0 {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => HostDirectory.rename(from, to),
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        HostDirectory.remove(path)
    }

    fn sync(&self, directory: &Path) -> io::Result<()> {
        HostDirectory.sync(directory)
    }
}

#[test]
fn a_snapshot_that_fails_leaves_no_line_for_what_never_was() {
    for format in FORMATS {
        let tree = Tree::new(format);
        tree.clone("a/base", "b/vm");
        let (disk, old) = (tree.image("b/vm"), tree.image("b/old"));
        let before = tree.list("a/base");
        let snapshot = |shop: &Workshop<'_>| shop.snapshot(&disk, &old);
        shop(&Refuses(disk.path.clone()), snapshot).unwrap_err();
        assert_eq!(tree.list("a/base"), before, "{format}");
        let names = fs::read_dir(tree.path("b")).unwrap().count();
        assert_eq!(names, 1, "{format}");
        shop(&HostDirectory, snapshot).unwrap();
    }
}

#[test]
fn what_a_clone_that_was_cut_off_has_made_read_only_is_told_from_a_parent() {
    for format in FORMATS {
        let tree = Tree::new(format);
        let error = tree.open("a/base").unwrap_err();
        let help = error.help();
        assert!(help.contains("a/own stands on it") && !help.contains("chmod"), "{help}");
        tree.remove("a/own");
        tree.clone("a/base", "b/vm");
        let error = tree.open("a/base").unwrap_err();
        let help = error.help();
        assert!(help.contains("b/vm stands on it") && !help.contains("chmod"), "{help}");
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
            shop(&HostDirectory, |shop| shop.create(&tree.image("a/base"), &new)).unwrap_err();
            assert!(fs::read(tree.path("a/base")).unwrap() == before);
        }
    }
}

/// Who may write in the folder can put it there.
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
        let clone = shop(&HostDirectory, |shop| shop.create(&tree.image("b/vm"), &on).map(drop));
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
    let rebase = |shop: &Workshop<'_>| {
        let shop = Workshop {
            progress: &during,
            state_dir: None,
            parents: Parents::Any,
            directory: shop.directory,
            engine: shop.engine,
            ..*shop
        };
        shop.rebase(&tree.image("b/vm"), &tree.image("a/new"), Rebase::Safe, false)
    };
    shop(&HostDirectory, rebase).unwrap();
    assert!(cloned.get());
    let list = tree.list("a/new");
    assert!(list.contains("b/vm") && list.contains("b/other"), "{list}");
}

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
            let rebase = |shop: &Workshop<'_>| {
                shop.rebase(&tree.image(to), &tree.image("a/base"), Rebase::Unsafe, false)
            };
            shop(&HostDirectory, rebase).unwrap();
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
        let done = shop(&HostDirectory, |shop| shop.coalesce(&tree.image("tree/a/own"), true));
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
        fs::write(tree.path("b/flat"), [7; 4096]).unwrap();
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
        let rebase = |shop: &Workshop<'_>| {
            shop.rebase(&tree.image("b/vm"), &tree.image("a/another"), Rebase::Unsafe, false)
        };
        shop(&HostDirectory, rebase).unwrap();
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
    shop(&HostDirectory, |shop| shop.coalesce(&tree.image("a/own"), true)).unwrap();
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
            shop(&HostDirectory, |shop| shop.snapshot(&tree.image("b/vm"), &tree.image(&old)))
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
        let rebase = |shop: &Workshop<'_>| {
            shop.rebase(&tree.image("b/vm"), &tree.image("a/base"), Rebase::Safe, false)
        };
        shop(&Refuses(tree.path("b/vm")), rebase).unwrap_err();
        assert_eq!(tree.list("a/base"), before);
        shop(&HostDirectory, rebase).unwrap();
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
        shop(&HostDirectory, |shop| shop.create(&raw("a/old.img"), &new)).unwrap();
        let on = NewImage { parent: Some(raw("a/old.img")), ..NewImage::default() };
        shop(&HostDirectory, |shop| shop.create(&tree.image("b/vm"), &on)).unwrap();
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
fn a_clone_that_cannot_be_told_leaves_no_list_and_a_parent_that_can_be_written() {
    for format in FORMATS {
        for fails in ["a/base.ferrite-list.new", "a/base.ferrite-children", "b/vm.ferrite-new"] {
            let tree = Tree::new(format);
            tree.remove("a/own");
            tree.remove("a/base.ferrite-children");
            tree.make_writable("a/base");
            let on = NewImage { parent: Some(tree.image("a/base")), ..NewImage::default() };
            let clone = |shop: &Workshop<'_>| shop.create(&tree.image("b/vm"), &on);
            shop(&Refuses(tree.path(fails)), clone).unwrap_err();
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
            let made = shop(&HostDirectory, |shop| shop.create(&tree.image("b/vm"), &on));
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
