//! The leaf of a chain is merged in steps, between which it is written to.

use std::path::Path;

use ferrite_disk::{DiskError, ErrorKind, ImageName};
use ferrite_image_tools::{ImageTools, LeafMerge, MergeCopy, NewImage, Stretch};
use ferrite_simio::SimWorld;
use ferrite_testkit::images::tools;
use ferrite_testkit::is_night;

use crate::chain::{BYTES, Chain, SMALL, clean, copy, patiently, relink};
use crate::common::{MIB, dir_in_memory, work};
use crate::family::{FORMATS, on};

/// The name that the leaf gets.
fn snapshot(chain: &Chain) -> ImageName {
    chain.name(&format!("snapshot.{}", chain.leaf().format.name()))
}

fn stretch(chain: &Chain, to: usize) -> Stretch {
    Stretch { leaf: chain.leaf().clone(), from: snapshot(chain), to: chain.images[to].clone() }
}

fn split(chain: &Chain) {
    work(None, |tools| tools.merge_split(chain.leaf(), &snapshot(chain))).unwrap();
}

fn leaf(chain: &Chain, to: usize, most: u64) -> Result<LeafMerge, DiskError> {
    work(None, |tools| tools.merge_leaf(chain.leaf(), &chain.images[to], most, false))
}

fn undo(chain: &Chain, to: usize, most: u64) -> Result<LeafMerge, DiskError> {
    let to = &chain.images[to];
    work(None, |tools| tools.merge_undo(chain.leaf(), &snapshot(chain), to, most))
}

/// The leaf is written to, as if its guest went on.
fn write(chain: &mut Chain, value: u8, at: u64) {
    let mut queue = chain.queue();
    chain.put(&mut queue, at, &[value; 4096]);
    queue.close().unwrap();
}

#[test]
fn a_leaf_that_is_written_to_between_the_steps_is_merged_and_keeps_its_name() {
    for format in FORMATS {
        for to in [0, 1] {
            let mut chain = Chain::new(&[format], 3);
            let plan = work(None, |tools| {
                tools.merge_plan(chain.leaf(), Some(chain.leaf()), Some(&chain.images[to]), false)
            });
            let plan = plan.unwrap();
            assert!(plan.leaf_bytes.is_some_and(|bytes| bytes > 4096), "{plan:?}");
            assert_eq!(plan.images.len(), 2 - to);
            for round in 0..2 {
                split(&chain);
                write(&mut chain, 71 + round, 3 * MIB);
                // A successor begins with the step that was begun.
                split(&chain);
                let stretch = stretch(&chain, to);
                let mut queue = chain.queue();
                copy(&stretch).unwrap();
                chain.put(&mut queue, 5 * MIB, &[81 + round; 512]);
                queue.close().unwrap();
                drop(queue);
                chain.reads_right();
                for _ in 0..2 {
                    relink(&stretch).unwrap();
                }
                write(&mut chain, 91 + round, 4 * MIB);
                for _ in 0..2 {
                    clean(&stretch).unwrap();
                }
                chain.reads_right();
                let done = leaf(&chain, to, 4096).unwrap();
                assert!(!done.merged && done.leaf_bytes > 4096, "{done:?}");
                chain.reads_right();
            }
            for _ in 0..2 {
                assert!(leaf(&chain, to, MIB).unwrap().merged);
            }
            chain.reads_right();
            chain.is_left_with(
                &[vec![], vec![0]][to].iter().copied().chain([2]).collect::<Vec<_>>(),
            );
        }
    }
}

#[test]
fn a_split_is_undone_if_little_was_written_since() {
    for format in FORMATS {
        let mut chain = Chain::new(&[format], 3);
        let before = chain.files();
        for copies in [false, true] {
            split(&chain);
            if copies {
                copy(&stretch(&chain, 0)).unwrap();
            }
            write(&mut chain, 71, 3 * MIB);
            let done = undo(&chain, 0, 512).unwrap();
            assert!(!done.merged && done.leaf_bytes >= 4096, "{done:?}");
            chain.reads_right();
            for _ in 0..2 {
                assert!(undo(&chain, 0, MIB).unwrap().merged);
                chain.reads_right();
                assert_eq!(chain.files(), before, "{format}");
            }
        }
    }
}

/// A merge is refused before anything is changed, if the lower end could not become the leaf in the end.
#[test]
fn a_leaf_that_cannot_be_merged_is_refused_by_the_plan() {
    let refusal = |chain: &Chain, to: &ImageName| {
        let plan = |tools: &ImageTools<'_>| {
            tools.merge_plan(chain.leaf(), Some(chain.leaf()), Some(to), false)
        };
        let before = chain.files();
        let refused = work(None, plan).unwrap_err().to_string();
        assert_eq!(chain.files(), before);
        refused
    };
    let chain = Chain::new(&["raw", "qcow2"], 2);
    let refused = refusal(&chain, &chain.images[0]);
    assert!(refused.contains("could not take its name"), "{refused}");
    let chain = Chain::new(&["qcow2"], 3);
    let refused = refusal(&chain, chain.leaf());
    assert!(refused.contains("into itself"), "{refused}");
    let other = chain.name("other.qcow2");
    work(None, |tools| tools.create(&other, &on(&chain.images[0]))).unwrap();
    for to in [1, 0] {
        let plan = |tools: &ImageTools<'_>| {
            tools.merge_plan(chain.leaf(), Some(chain.leaf()), Some(&chain.images[to]), false)
        };
        match work(None, plan) {
            Ok(_) => assert_eq!(to, 1),
            Err(e) => assert!(to == 0 && e.to_string().contains("other.qcow2"), "{e}"),
        }
    }
    let units = |i: usize| NewImage {
        bytes: Some(BYTES),
        unit_bytes: Some(if i == 0 { 64 << 10 } else { 4096 }),
        ..NewImage::default()
    };
    let chain = Chain::with(&["qcow2"], 2, units);
    let refused = refusal(&chain, &chain.images[0]);
    assert!(refused.contains("smaller clusters"), "{refused}");
}

/// A step of a merge of the leaf.
type Step = fn(&ImageTools<'_>, &Stretch) -> Result<bool, DiskError>;

const STEPS: [Step; 5] = [
    |tools, it| tools.merge_split(&it.leaf, &it.from).map(|_| true),
    |tools, it| tools.merge_copy(it, &MergeCopy::default()).map(|_| true),
    |tools, it| tools.merge_relink(it).map(|_| true),
    |tools, it| tools.merge_clean(it).map(|_| true),
    |tools, it| tools.merge_leaf(&it.leaf, &it.to, u64::MAX, false).map(|done| done.merged),
];
/// The steps that can be undone.
const UNDONE: usize = 3;

/// Does the steps from this one on in a world that may stop meanwhile. Returns the step that fails.
fn merge(
    world: &SimWorld,
    chain: &Chain,
    attic: &Path,
    first: usize,
) -> Option<(usize, DiskError)> {
    let directories = world.directories(attic);
    let tools = ImageTools { engine: &|arena| Ok(world.engine(arena)), ..tools(&directories) };
    for (i, step) in STEPS.iter().enumerate().skip(first) {
        match patiently(|| step(&tools, &stretch(chain, 0))) {
            Ok(done) => assert!(done, "step {i}"),
            Err(e) => return Some((i, e)),
        }
    }
    None
}

/// Cuts off a merge at this operation, and goes on with it or undoes it. Returns whether it was whole.
fn cut_off(template: &Chain, stop: u64) -> bool {
    let (chain, attic) = (template.copied(), dir_in_memory());
    let before = chain.files();
    let world = SimWorld::new(stop);
    world.stop_at(Some(stop));
    let failed = merge(&world, &chain, attic.path(), 0);
    match stop % 3 {
        0 => world.kill_process().unwrap(),
        _ => world.cut_power().unwrap(),
    }
    chain.reads_right_in_spite();
    let Some((step, _)) = failed else { return true };
    if stop.is_multiple_of(2) && step < UNDONE {
        match undo(&chain, 0, u64::MAX) {
            Ok(done) => {
                assert!(done.merged, "stop {stop}, step {step}");
                chain.reads_the_model();
                assert_eq!(chain.files(), before, "stop {stop}, step {step}");
                return false;
            }
            // The chain was linked anew.
            Err(e) => assert!(step == UNDONE - 1 && e.kind() == ErrorKind::Unsuitable, "{e}"),
        }
    }
    if let Some((then, e)) = merge(&SimWorld::new(0), &chain, attic.path(), step) {
        panic!("stop {stop} in step {step}, then in step {then}: {e}");
    }
    chain.reads_the_model();
    chain.is_left_with(&[1]);
    false
}

/// So many threads for each format share the operations at which it is cut off.
const PARTS: u64 = 9;
/// One of so many operations is the last with each commit; by night each is. It has no factor in common with 2 and 3, by
/// which an end is chosen.
const SHARE: u64 = 5;

#[test]
fn a_merge_of_the_leaf_that_is_cut_off_at_any_step_goes_on_or_back() {
    let small = |_| NewImage { bytes: Some(SMALL), ..NewImage::default() };
    let every = if is_night() { 1 } else { SHARE };
    let parts: Vec<_> =
        FORMATS.iter().flat_map(|format| (0..PARTS).map(move |n| (*format, n))).collect();
    std::thread::scope(|scope| {
        for (format, part) in parts {
            scope.spawn(move || {
                let template = Chain::with(&[format], 2, small);
                let stop = |i| (i * PARTS + part) * every;
                let steps = (0..).position(|i| cut_off(&template, stop(i))).unwrap();
                assert!(stop(steps as u64) > 60, "{steps}");
            });
        }
    });
}
