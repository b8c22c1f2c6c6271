//! Stretches of chains are merged, at rest and while a process has the chain open.

use std::cell::{Cell, RefCell};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use ferrite_disk::{Disk, DiskError, ErrorKind, ImageName, OpenOptions};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{Done, ImageTools, MergeCopy, NewImage, Progress, Stretch};
use ferrite_simio::SimWorld;
use ferrite_testkit::images::tools;
use ferrite_testkit::is_night;
use ferrite_testkit::programs::installed;

use crate::chain::{BYTES, Chain, SMALL, clean, copy, reads, relink};
use crate::common::vhd::at;
use crate::common::{MIB, Mount, Queue, dir_in_memory, work};
use crate::family::{FORMATS, create, on};

#[test]
fn stretches_of_any_length_are_merged_at_rest_and_read_the_same() {
    for format in FORMATS {
        for (from, to, left) in [
            (4, 3, &[0, 1, 2, 3, 5][..]),
            (3, 1, &[0, 1, 4, 5]),
            (4, 0, &[0, 5]),
            (2, 1, &[0, 1, 3, 4, 5]),
        ] {
            let chain = Chain::new(&[format], 6);
            chain.coalesce(&chain.stretch(from, to), false).unwrap();
            chain.reads_right();
            chain.is_left_with(left);
            if format == "qcow2" {
                let leaf = chain.leaf().path.to_str().unwrap();
                let said = Command::new("qemu-img").args(["check", "-q", leaf]).output();
                if let Some(said) = installed("qemu-img", said) {
                    assert!(said.status.success(), "{said:?}");
                }
            }
        }
    }
}

#[test]
fn the_leaf_s_name_shows_the_merged_disk_if_the_leaf_is_the_upper_end() {
    for format in FORMATS {
        for (to, left) in [(3, &[0, 1, 2, 4][..]), (1, &[0, 4])] {
            let chain = Chain::new(&[format], 5);
            chain.coalesce(&chain.stretch(4, to), false).unwrap();
            chain.reads_right();
            chain.is_left_with(left);
        }
    }
}

#[test]
fn by_default_the_leaf_s_parent_is_merged_into_its_own() {
    let chain = Chain::new(&["qcow2"], 4);
    work(None, |tools| tools.coalesce_stretch(chain.leaf(), None, None, false)).unwrap();
    chain.reads_right();
    chain.is_left_with(&[0, 1, 3]);
    let end = work(None, |tools| tools.stretch(&chain.images[1], None, None)).unwrap_err();
    assert!(end.why().contains("has no parent"), "{end}");
}

#[test]
fn a_raw_base_takes_the_data_and_the_format_of_the_parent_changes() {
    for format in FORMATS {
        let chain = Chain::new(&["img", format], 3);
        chain.coalesce(&chain.stretch(1, 0), false).unwrap();
        chain.reads_right();
        chain.is_left_with(&[0, 2]);
    }
}

#[test]
fn a_lower_end_that_is_smaller_grows() {
    for format in FORMATS {
        let sized = |i: usize| NewImage {
            bytes: Some(if i < 2 { BYTES } else { 2 * BYTES }),
            ..NewImage::default()
        };
        let mut chain = Chain::with(&[format], 4, sized);
        let mut queue = chain.queue();
        chain.put(&mut queue, 15 * MIB, &[9; 4096]);
        let stretch = chain.stretch(2, 1);
        let refused = copy(&stretch).unwrap_err();
        assert!(refused.help().contains("merge-step grow"), "{refused}");
        queue.close().unwrap();
        drop(queue);
        work(None, |tools| tools.merge_grow(&stretch, false)).unwrap();
        copy(&stretch).unwrap();
        chain.reads_right();
        chain.coalesce(&stretch, false).unwrap();
        chain.reads_right();
        chain.is_left_with(&[0, 1, 3]);
    }
}

#[test]
fn a_vhd_chain_that_is_open_reads_the_same_at_each_moment_of_the_copy() {
    merged_while_it_is_open("vhd");
}

#[test]
fn a_qcow2_chain_that_is_open_reads_the_same_at_each_moment_of_the_copy() {
    merged_while_it_is_open("qcow2");
}

/// While the copy runs, the leaf is read and written, and all that would read or write a mixture is refused.
fn merged_while_it_is_open(format: &str) {
    let chain = RefCell::new(Chain::new(&[format], 5));
    let stretch = chain.borrow().stretch(3, 1);
    let queue = RefCell::new(chain.borrow().queue());
    let calls = Cell::new(0u64);
    let progress = |_: Progress| {
        let call = calls.get();
        calls.set(call + 1);
        let (mut chain, mut queue) = (chain.borrow_mut(), queue.borrow_mut());
        chain.put(&mut queue, call % 7 * MIB + call * 512, &[call as u8 | 1; 4096]);
        if call % 16 < 2 {
            reads(&mut queue, &chain.model);
            queue.flush().unwrap();
        }
        if call == 1 {
            refuses_others(&chain, &stretch);
        }
        true
    };
    let all = ImageTools { progress: &progress, ..tools(&HostDirectory) };
    all.merge_copy(&stretch, &MergeCopy::default()).unwrap();
    let mut queue = queue.into_inner();
    assert!(calls.get() > 3, "{format}: {}", calls.get());
    reads(&mut queue, &chain.borrow().model);
    let in_use = clean(&stretch).unwrap_err();
    assert_eq!(in_use.kind(), ErrorKind::Refused, "{in_use}");
    // The leaf is the image above the stretch, and the process has it open.
    let in_use = relink(&stretch).unwrap_err();
    assert_eq!(in_use.kind(), ErrorKind::InUse, "{in_use}");
    queue.close().unwrap();
    drop(queue);
    let mut chain = chain.into_inner();
    relink(&stretch).unwrap();
    chain.reads_right();
    let mut queue = chain.queue();
    chain.put(&mut queue, 3 * MIB, &[77; 4096]);
    clean(&stretch).unwrap();
    reads(&mut queue, &chain.model);
    queue.close().unwrap();
    drop(queue);
    chain.reads_right();
    chain.is_left_with(&[0, 1, 4]);
}

/// The copy is killed at each of its steps, and a process that has had the chain open all the time goes on.
#[test]
fn a_copy_that_is_killed_at_any_step_changes_nothing_for_a_chain_that_is_open() {
    for format in FORMATS {
        let small = |_| NewImage { bytes: Some(SMALL), ..NewImage::default() };
        let mut chain = Chain::with(&[format], 4, small);
        let (stretch, mut queue) = (chain.stretch(2, 0), chain.queue());
        let steps = (1..).position(|stop| {
            let world = SimWorld::new(stop);
            world.stop_at(Some(stop));
            let sim = |arena| Ok(world.engine(arena));
            let all = ImageTools { engine: &sim, ..tools(&HostDirectory) };
            let copied = all.merge_copy(&stretch, &MergeCopy::default());
            world.kill_process().unwrap();
            reads(&mut queue, &chain.model);
            chain.put(&mut queue, stop % 100 * 4096, &[stop as u8; 512]);
            copied.is_ok()
        });
        assert!(steps.unwrap() > 10, "{format}: {steps:?}");
        queue.close().unwrap();
        drop(queue);
        relink(&stretch).unwrap();
        clean(&stretch).unwrap();
        chain.reads_right_in_spite();
        chain.is_left_with(&[0, 3]);
    }
}

/// A child whose name is not that of an image is found by its parent's list only.
#[test]
fn the_lower_end_s_list_names_the_child_that_stands_on_it_now() {
    for format in FORMATS {
        let mut chain = Chain::new(&[format], 3);
        let name = format!("{format}:{}", at(&chain.dir, "disk").display());
        let leaf = ImageName::parse(&name).unwrap();
        work(None, |tools| tools.create(&leaf, &on(chain.leaf()))).unwrap();
        chain.images.push(leaf);
        chain.coalesce(&chain.stretch(2, 1), false).unwrap();
        chain.reads_the_model();
        let list = at(&chain.dir, &format!("i1.{format}.ferrite-children"));
        assert!(fs::read_to_string(list).unwrap().contains("/disk"));
        assert!(!chain.files().iter().any(|name| name.starts_with("i2.")), "{:?}", chain.files());
    }
}

fn refuses_others(chain: &Chain, stretch: &Stretch) {
    let second = copy(stretch).unwrap_err();
    assert_eq!(second.kind(), ErrorKind::InUse, "{second}");
    let even = OpenOptions { even_parent: true, ..OpenOptions::default() };
    let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    for (i, options) in [(1, &even), (1, &read_only), (2, &read_only)] {
        let other = Disk::open_image(&chain.images[i], options).unwrap_err();
        assert_eq!(other.kind(), ErrorKind::InUse, "{i}: {other}");
    }
    let clone = chain.name(&format!("clone.{}", chain.leaf().format));
    let made = work(None, |tools| tools.create(&clone, &on(&chain.images[1]))).unwrap_err();
    assert_eq!(made.kind(), ErrorKind::InUse, "{made}");
    drop(Disk::open_image(&chain.images[3], &read_only).unwrap());
}

#[test]
fn who_reads_an_image_of_the_stretch_for_itself_is_not_given_another_content() {
    let chain = Chain::new(&["vhd"], 5);
    let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    for i in [1, 2] {
        let before = fs::read(&chain.images[1].path).unwrap();
        let reader = Disk::open_image(&chain.images[i], &read_only).unwrap();
        let error = copy(&chain.stretch(3, 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InUse, "{i}: {error}");
        drop(reader);
        assert!(fs::read(&chain.images[1].path).unwrap() == before);
    }
    copy(&chain.stretch(3, 1)).unwrap();
}

#[test]
fn a_copy_that_was_stopped_goes_on_where_it_was_durable() {
    let chain = Chain::new(&["qcow2"], 4);
    let stretch = chain.stretch(2, 1);
    let first = Cell::new(None);
    let until = |most: u64| {
        first.set(None);
        let progress = |now: Progress| {
            first.set(first.get().or(Some(now.done_bytes)));
            now.done_bytes < most
        };
        let all = ImageTools { progress: &progress, ..tools(&HostDirectory) };
        all.merge_copy(&stretch, &MergeCopy::default())
    };
    let stopped = until(4 * MIB).unwrap_err();
    assert_eq!(stopped.kind(), ErrorKind::Interrupted, "{stopped}");
    chain.reads_right();
    let refused = relink(&stretch).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Refused, "{refused}");
    assert_eq!(clean(&stretch).unwrap_err().kind(), ErrorKind::Refused);
    until(u64::MAX).unwrap();
    assert!(first.get().unwrap() >= 4 * MIB, "{first:?}");
    let again = copy(&stretch).unwrap();
    assert!(again[0].contains("nothing to do"), "{again:?}");
    relink(&stretch).unwrap();
    assert!(relink(&stretch).unwrap()[0].contains("nothing to do"));
    clean(&stretch).unwrap();
    assert!(clean(&stretch).unwrap()[0].contains("nothing to do"));
    chain.reads_right();
    chain.is_left_with(&[0, 1, 3]);
}

#[test]
fn a_copy_keeps_to_its_speed_and_takes_a_new_one_at_once() {
    let chain = Chain::new(&["vhd"], 3);
    let speed = Arc::new(AtomicU64::new(1));
    let waits = Cell::new(0);
    let progress = |_: Progress| {
        waits.set(waits.get() + 1);
        if waits.get() == 4 {
            speed.store(0, std::sync::atomic::Ordering::Relaxed);
        }
        true
    };
    let all = ImageTools { progress: &progress, ..tools(&HostDirectory) };
    let how = MergeCopy { speed: speed.clone(), force: false };
    all.merge_copy(&chain.stretch(1, 0), &how).unwrap();
    assert!(waits.get() > 4);
}

#[test]
fn children_elsewhere_are_named_and_with_force_what_they_stand_on_stays() {
    for format in FORMATS {
        for (parent, stays) in [(3, true), (2, false), (1, false)] {
            let chain = Chain::new(&[format], 5);
            let other = chain.name(&format!("other.{format}"));
            work(None, |tools| tools.create(&other, &on(&chain.images[parent]))).unwrap();
            let before = chain.files();
            for refused in [
                chain.coalesce(&chain.stretch(3, 1), false).unwrap_err(),
                copy(&chain.stretch(3, 1)).unwrap_err(),
            ] {
                assert_eq!(refused.kind(), ErrorKind::Refused);
                assert!(refused.to_string().contains("other."), "{refused}");
            }
            assert_eq!(chain.files(), before);
            let notes = chain.coalesce(&chain.stretch(3, 1), true).unwrap();
            assert!(notes.iter().any(|note| note.contains("other.")), "{notes:?}");
            chain.reads_right();
            assert_eq!(chain.images[3].path.exists(), stays, "{parent}: {notes:?}");
            drop(Disk::open_image(&other, &OpenOptions::default()).unwrap());
        }
    }
}

#[test]
fn what_is_no_stretch_is_refused_with_the_reason() {
    let chain = Chain::new(&["qcow2"], 4);
    let other = chain.name("other.qcow2");
    create(&other);
    for (from, to, why) in [
        (chain.images[1].clone(), chain.images[1].clone(), "is not below"),
        (chain.images[1].clone(), chain.images[2].clone(), "is not below"),
        (chain.images[2].clone(), other, "not in its chain"),
        (chain.leaf().clone(), chain.images[1].clone(), "in other steps"),
    ] {
        let stretch = Stretch { leaf: chain.leaf().clone(), from, to };
        let error = copy(&stretch).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn clusters_that_a_reader_would_see_in_part_are_merged_at_rest_only() {
    let units = |i: usize| NewImage {
        bytes: Some(BYTES),
        unit_bytes: Some(if i == 1 { 64 << 10 } else { 4096 }),
        ..NewImage::default()
    };
    let split =
        |i: usize| NewImage { bytes: Some(BYTES), extended_l2: i == 1, ..NewImage::default() };
    for new in [&units as &dyn Fn(usize) -> NewImage, &split] {
        let chain = Chain::with(&["qcow2"], 4, new);
        let refused = copy(&chain.stretch(2, 1)).unwrap_err();
        assert!(refused.to_string().contains("clusters"), "{refused}");
        chain.coalesce(&chain.stretch(2, 1), false).unwrap();
        chain.reads_right();
        chain.is_left_with(&[0, 1, 3]);
    }
}

#[test]
fn a_merge_that_does_not_fit_is_refused_before_anything_is_changed() {
    for format in FORMATS {
        let folder = dir_in_memory();
        let Some(mount) = Mount::new(&["-t", "tmpfs", "-o", "size=12M", "none"], folder.path())
        else {
            return;
        };
        no_room(folder.path(), format);
        drop(mount);
    }
}

fn no_room(folder: &Path, format: &str) {
    let name = |i: usize| ImageName::parse(folder.join(format!("i{i}.{format}")).to_str().unwrap());
    let images = [0, 1, 2].map(|i| name(i).unwrap());
    for (i, image) in images.iter().enumerate() {
        let parent = i.checked_sub(1).map(|below| images[below].clone());
        let new = NewImage { bytes: Some(BYTES), parent, ..NewImage::default() };
        work(None, |tools| tools.create(image, &new)).unwrap();
        if i == 1 {
            let options = OpenOptions { thin: true, ..OpenOptions::default() };
            let mut queue = Queue::new(Disk::open_image(image, &options).unwrap());
            (0..6).for_each(|mib| queue.write(mib * MIB, &[5; MIB as usize]).unwrap());
            queue.close().unwrap();
        }
    }
    let [to, from, leaf] = images;
    let before = fs::read(&to.path).unwrap();
    // As the leaf of its own chain, it is refused before there is a snapshot.
    let of_leaf = work(None, |tools| tools.merge_plan(&from, Some(&from), Some(&to), true));
    let error = copy(&Stretch { leaf, from, to: to.clone() }).unwrap_err();
    for error in [of_leaf.unwrap_err(), error] {
        assert!(error.why().contains("it takes 6 MiB or more"), "{format}: {error}");
    }
    assert!(fs::read(&to.path).unwrap() == before);
}

/// Merges with an engine and directories of this world, which may stop meanwhile.
fn merged(world: &SimWorld, chain: &Chain, attic: &Path) -> Result<Done, DiskError> {
    let directories = world.directories(attic);
    let tools = ImageTools { engine: &|arena| Ok(world.engine(arena)), ..tools(&directories) };
    let Stretch { leaf, from, to } = chain.stretch(2, 0);
    tools.coalesce_stretch(&leaf, Some(&from), Some(&to), false)
}

/// Every way in which a step may be cut off is left to the seeds.
fn cut_off(template: &Chain, stop: u64) -> bool {
    let (chain, attic) = (template.copied(), dir_in_memory());
    let world = SimWorld::new(stop);
    world.stop_at(Some(stop));
    let whole = merged(&world, &chain, attic.path()).is_ok();
    match stop % 3 {
        0 => world.kill_process().unwrap(),
        _ => world.cut_power().unwrap(),
    }
    chain.reads_right_in_spite();
    if !whole {
        match merged(&SimWorld::new(0), &chain, attic.path()) {
            // All was done but the last sync.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => panic!("step {stop}: {e}"),
            Ok(_) => chain.reads_the_model(),
        }
    }
    chain.is_left_with(&[0, 3]);
    whole
}

fn cut_off_everywhere(format: &str, part: u64) {
    let small = |_| NewImage { bytes: Some(SMALL), ..NewImage::default() };
    let template = Chain::with(&[format], 4, small);
    let every = if is_night() { 1 } else { SHARE };
    let stop = |i| (i * PARTS + part) * every;
    let steps = (0..).position(|i| cut_off(&template, stop(i))).unwrap();
    assert!(stop(steps as u64) > 20, "{steps}");
}

/// One of so many steps is taken with each commit. It is no multiple of 3, as the kind of an end goes by its step.
const SHARE: u64 = 5;

/// Every step is taken by night, in several tests, which run at the same time.
const PARTS: u64 = 6;

macro_rules! cut_off {
    ($($format:ident: $($test:ident $part:literal)*;)*) => { $(
        mod $format {
            $(
                #[test]
                fn $test() {
                    super::cut_off_everywhere(stringify!($format), $part);
                }
            )*
        }
    )* };
}

cut_off! {
    vhd: cut_off_at_any_step_1 1 cut_off_at_any_step_2 2 cut_off_at_any_step_3 3
        cut_off_at_any_step_4 4 cut_off_at_any_step_5 5 cut_off_at_any_step_6 6;
    qcow2: cut_off_at_any_step_1 1 cut_off_at_any_step_2 2 cut_off_at_any_step_3 3
        cut_off_at_any_step_4 4 cut_off_at_any_step_5 5 cut_off_at_any_step_6 6;
}
