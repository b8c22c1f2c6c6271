//! A VHD gets another parent in its place, and the power is cut at each step of that, in several ways.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use ferrite_disk::{Disk, ImageName, OpenOptions, Session};
use ferrite_image_tools::NewImage;
use ferrite_images::vhd::{MAX_MOVED, NewParent, Vhd};
use ferrite_io::pool::Pool;
use ferrite_io::reactor::Reactor;
use ferrite_simio::SimWorld;
use ferrite_testkit::few_or_all;

use crate::common::vhd::at;
use crate::common::{MIB, Queue, dir_in_memory, port, work};
use crate::family::on;

const NAMES: [&str; 3] = ["old.vhd", "new.vhd", "child.vhd"];
/// Ways in which the writes of a step are lost.
const SEEDS: u32 = 8;

fn name(dir: &Path, i: usize) -> ImageName {
    ImageName::parse(dir.join(NAMES[i]).to_str().unwrap()).unwrap()
}

/// Relinks the child with an engine of this world; whether it was not stopped.
fn relinked(world: &SimWorld, child: &Path, parent: &NewParent) -> bool {
    let options = OpenOptions { even_parent: true, ..OpenOptions::default() };
    let vhd = Vhd::open(child, &options).unwrap();
    let pool = Pool::with_scratch(2 << 20, 1, 256 << 10).unwrap();
    let mut reactor = Reactor::new(world.engine(pool.arena().clone()));
    let files = vhd.medium().files().into_iter();
    let files = files.map(|file| reactor.add_file(file).unwrap()).collect();
    let port = port(&reactor, &pool, files);
    matches!(reactor.block_on(vhd.relink(&port, parent, MAX_MOVED)), Ok(Ok(())))
}

fn unlocked() -> OpenOptions {
    OpenOptions { read_only: true, unlocked: true, ..OpenOptions::default() }
}

#[test]
fn a_vhd_has_the_one_parent_or_the_other_wherever_the_power_is_cut() {
    let template = dir_in_memory();
    let images = [0, 1, 2].map(|i| name(template.path(), i));
    let new = NewImage { bytes: Some(2 * MIB), unit_bytes: Some(64 << 10), ..NewImage::default() };
    let options = OpenOptions { thin: true, ..OpenOptions::default() };
    for i in 0..3 {
        let new = if i == 2 { on(&images[0]) } else { new.clone() };
        work(None, |tools| tools.create(&images[i], &new)).unwrap();
        let mut queue = Queue::new(Disk::open_image(&images[i], &options).unwrap());
        queue.write(if i == 2 { 4096 } else { 0 }, &[5; 8192]).unwrap();
        queue.close().unwrap();
    }
    for seed in 0..u64::from(few_or_all(2, SEEDS)) {
        let mut steps = 0..;
        while !is_whole_after(template.path(), seed, steps.next().unwrap()) {}
        assert!(steps.start > 10, "{steps:?}");
    }
}

/// Cuts the power at this step; whether all was done before.
fn is_whole_after(template: &Path, seed: u64, step: u64) -> bool {
    let dir = dir_in_memory();
    for file in NAMES {
        fs::copy(template.join(file), at(&dir, file)).unwrap();
    }
    let [_, lower, child] = [0, 1, 2].map(|i| name(dir.path(), i));
    let uuid = Vhd::open(&lower.path, &unlocked()).unwrap().footer().uuid;
    let path = lower.path.canonicalize().unwrap();
    let parent = NewParent { uuid, bytes: 2 * MIB, modified_unix_s: 0, path };
    let world = SimWorld::new(seed * 1000 + step);
    world.stop_at(Some(step + 1));
    let whole = relinked(&world, &child.path, &parent);
    world.cut_power().unwrap();
    let disk = Disk::open_image(&child, &unlocked());
    let disk = disk.unwrap_or_else(|e| panic!("seed {seed}, step {step}: {e}"));
    let stands_on = disk.media()[1].path().file_name().unwrap().to_owned();
    assert!(stands_on == NAMES[1] || !whole && stands_on == NAMES[0], "{stands_on:?}");
    let engine = |arena| Ok(SimWorld::new(0).engine(arena));
    let mut session = Session::new(Arc::new(disk), engine).unwrap();
    let mut found = vec![0; 16 << 10];
    session.read(0, &mut found).unwrap();
    assert!(found[..12288] == [5; 12288] && found[12288..] == [0; 4096]);
    whole
}
