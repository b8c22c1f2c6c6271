//! Dirty bitmaps inside of qcow2 images, which QEMU makes and only a resize keeps. A test says "skipped"
//! where there is no `qemu-img`.

use std::path::Path;

use ferrite_image_tools::Rebase;

use crate::model::{name, qemu, tools};
use tempfile::TempDir;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A parent and a child, each with so many bitmaps. None: no `qemu-img`.
fn pair(dir: &TempDir, of_parent: u32, of_child: u32) -> Option<[std::path::PathBuf; 2]> {
    let paths = ["base.qcow2", "leaf.qcow2"].map(|name| dir.path().join(name));
    let [base, leaf] = paths.each_ref().map(|path| text(path));
    if !qemu(&["create", "-q", "-f", "qcow2", base, "4M"]) {
        return None;
    }
    assert!(qemu(&["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", leaf]));
    for (path, count) in [(base, of_parent), (leaf, of_child)] {
        for i in 0..count {
            assert!(qemu(&["bitmap", "--add", path, &format!("backup{i}")]));
        }
    }
    Some(paths)
}

#[test]
fn who_merges_images_with_dirty_bitmaps_is_told_that_these_are_lost() {
    let dir = tempfile::tempdir().unwrap();
    let Some([base, leaf]) = pair(&dir, 1, 2) else { return };
    let done = tools(|tools| tools.coalesce(&name(&leaf), false)).unwrap();
    for (path, count) in [(&base, 1), (&leaf, 2)] {
        let said = format!("inside of {} and are lost: {count} ", path.display());
        assert!(done.notes.iter().any(|note| note.contains(&said)), "{:?}", done.notes);
    }
}

#[test]
fn a_rebase_says_whose_dirty_bitmaps_are_lost_and_nothing_where_there_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let Some([base, leaf]) = pair(&dir, 1, 1) else { return };
    let lost = |notes: &[String]| notes.iter().filter(|note| note.contains("are lost")).count();
    let rebase = || tools(|tools| tools.rebase(&name(&leaf), &name(&base), Rebase::Safe, false));
    let first = rebase().unwrap();
    assert_eq!(lost(&first.notes), 1, "{:?}", first.notes);
    assert!(first.notes.iter().any(|note| note.contains(text(&leaf))), "{:?}", first.notes);
    assert_eq!(lost(&rebase().unwrap().notes), 0);
}

/// The bitmaps that `info` shows of an image: name, granularity, whether valid and enabled.
fn bitmaps(path: &Path) -> Vec<(String, u64, bool, bool)> {
    let found = tools(|tools| tools.info(&name(path))).unwrap();
    let leaf = found.chain.into_iter().next().unwrap();
    let told =
        |b: ferrite_image_tools::BitmapInfo| (b.name, b.granularity_bytes, b.valid, b.enabled);
    leaf.bitmaps.into_iter().map(told).collect()
}

#[test]
fn a_resize_keeps_dirty_bitmaps_and_refuses_a_size_for_which_their_tables_are_too_short() {
    let dir = tempfile::tempdir().unwrap();
    let Some([_, leaf]) = pair(&dir, 0, 1) else { return };
    assert!(qemu(&["bitmap", "--add", "--disable", "-g", "32K", text(&leaf), "off"]));
    let all = [("backup0".to_owned(), 65536, true, true), ("off".to_owned(), 32768, true, false)];
    assert_eq!(bitmaps(&leaf), all);
    tools(|tools| tools.resize(&name(&leaf), 128 << 20, false)).unwrap();
    assert_eq!(bitmaps(&leaf), all);
    assert!(qemu(&["check", "-q", text(&leaf)]));
    // QEMU reads a bitmap that it clears.
    assert!(qemu(&["bitmap", "--clear", text(&leaf), "backup0"]));
    let refused = tools(|tools| tools.resize(&name(&leaf), 20 << 30, false)).unwrap_err();
    assert!(refused.to_string().contains("bitmap off needs another table"), "{refused}");
    assert_eq!(bitmaps(&leaf), all);
    assert!(qemu(&["check", "-q", text(&leaf)]));
}
