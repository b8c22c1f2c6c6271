//! The headers of a VHD are changed while its disk is in use.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_disk::{Disk, HeaderChange, ImageName, KeyHash, OpenOptions, ParentLink, Session};
use ferrite_image_tools::NewImage;
use ferrite_images::vhd::Vhd;
use ferrite_simio::SimWorld;
use ferrite_testkit::{images, is_night};

use crate::common::vhd::{at, name, options};
use crate::common::{MIB, Queue, dir_in_memory, work};

const BLOCK: u64 = 2 * MIB;
/// Ways in which the writes of a step are lost.
const SEEDS: u64 = 2;
/// The parent, what it is replaced by, and the leaf.
const NAMES: [&str; 3] = ["old.vhd", "another.vhd", "leaf.vhd"];

/// Makes a leaf on one of two parents that read the same: 8192 bytes of 5 at 0.
fn make(dir: &Path) {
    for file in NAMES {
        let image = images::name(&dir.join(file));
        let is_leaf = file == NAMES[2];
        let parent = is_leaf.then(|| images::name(&dir.join(NAMES[0])));
        // The table has room for a larger disk.
        let bytes = (!is_leaf).then_some(4 * BLOCK);
        let new = NewImage { bytes, parent, ..NewImage::default() };
        work(None, |tools| tools.create(&image, &new)).unwrap();
        if !is_leaf {
            images::write(&image.path, 0, &[5; 8192]);
        }
    }
}

fn unlocked() -> OpenOptions {
    OpenOptions { read_only: true, unlocked: true, ..OpenOptions::default() }
}

/// The change to the other parent.
fn link(dir: &Path, file: &str) -> HeaderChange {
    let uuid = Vhd::open(&dir.join(file), &unlocked()).unwrap().footer().uuid;
    let relative = PathBuf::from(format!("./{file}"));
    HeaderChange::Parent(ParentLink { uuid, modified_unix_s: 1_800_000_000, relative })
}

fn change(queue: &mut Queue, change: &HeaderChange) -> std::io::Result<()> {
    queue.flush()?;
    let (port, disk) = (queue.port(), queue.disk.clone());
    queue.reactor.block_on(async move { disk.change_headers(&port, change).await }).unwrap()
}

/// The image as another program finds it now: hidden, the size, and the name of the parent, which is the one that the
/// path leads to.
fn seen(leaf: &Path) -> (u8, u64, String) {
    let vhd = Vhd::open(leaf, &unlocked()).unwrap();
    let parent = vhd.parent().unwrap();
    let found = Vhd::open(&parent.paths[0], &unlocked()).unwrap();
    assert_eq!(found.footer().uuid, parent.uuid);
    let name = parent.paths[0].file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(parent.name, name);
    (vhd.footer().hidden, vhd.footer().current_size, name)
}

#[test]
fn a_change_is_on_the_medium_at_once_and_stays_there_when_the_disk_is_closed() {
    let dir = dir_in_memory();
    make(dir.path());
    let leaf = at(&dir, NAMES[2]);
    let mut queue = Queue::new(Disk::open(&leaf, &options()).unwrap());
    let key = KeyHash { nonce: [7; 32], hash: [8; 32] };
    // With the footer at the end, then without one: the file grows at the first write.
    for round in 0..2 {
        let [to, was] = if round == 0 { [NAMES[1], NAMES[0]] } else { [NAMES[0], NAMES[1]] };
        assert_eq!(seen(&leaf), (round, 4 * BLOCK, was.into()));
        change(&mut queue, &HeaderChange::Hidden(round + 1)).unwrap();
        assert_eq!(seen(&leaf), (round + 1, 4 * BLOCK, was.into()));
        change(&mut queue, &link(dir.path(), to)).unwrap();
        assert_eq!(seen(&leaf), (round + 1, 4 * BLOCK, to.into()));
        queue.write(BLOCK * u64::from(round + 1), &[round; 4096]).unwrap();
    }
    change(&mut queue, &HeaderChange::Bytes(4 * BLOCK)).unwrap();
    let facts = queue.disk.header_facts().unwrap().unwrap();
    assert_eq!((facts.bytes, facts.hidden, facts.blocks), (4 * BLOCK, 2, Some(2)));
    assert!(facts.parent.unwrap().ends_with(NAMES[0]));
    assert_eq!(queue.read(0, 8192).unwrap(), [5; 8192]);
    queue.close().unwrap();
    let end = facts.end;
    drop(queue);
    assert_eq!(fs::metadata(&leaf).unwrap().len(), end + 512);
    assert_eq!(seen(&leaf), (2, 4 * BLOCK, NAMES[0].into()));
    images::check(&leaf);
    let mut queue = Queue::new(Disk::open(&leaf, &options()).unwrap());
    assert_eq!(queue.read(0, 8192).unwrap(), [5; 8192]);
    assert_eq!(queue.read(BLOCK, 4096).unwrap(), [0; 4096]);
    assert_eq!(queue.read(2 * BLOCK, 4096).unwrap(), [1; 4096]);
    change(&mut queue, &HeaderChange::Key(key)).unwrap();
    queue.write(3 * BLOCK, &[3; 4096]).unwrap();
    queue.close().unwrap();
    drop(queue);
    let closed = fs::read(&leaf).unwrap();
    let found = closed.windows(8).position(|bytes| bytes == b"tdbatmap").unwrap();
    assert_eq!(closed[found + 29], 1);
    assert_eq!(closed[found + 30..][..64], [[7; 32], [8; 32]].concat());
}

#[test]
fn a_disk_grows_within_its_table_and_reads_as_before_beyond_its_old_end() {
    let dir = dir_in_memory();
    let path = at(&dir, "a.vhd");
    let bytes = 3 * MIB;
    let new = NewImage { bytes: Some(bytes), ..NewImage::default() };
    work(None, |tools| tools.create(&images::name(&path), &new)).unwrap();
    let mut queue = Queue::new(Disk::open(&path, &options()).unwrap());
    queue.write(2 * MIB, &[9; 1 << 20]).unwrap();
    let refused =
        |queue: &mut Queue, bytes| change(queue, &HeaderChange::Bytes(bytes)).unwrap_err().kind();
    for wrong in [2 * MIB, 4 * MIB + 512, 4 * MIB + 1] {
        assert_eq!(refused(&mut queue, wrong), std::io::ErrorKind::InvalidInput, "{wrong}");
    }
    change(&mut queue, &HeaderChange::Bytes(4 * MIB)).unwrap();
    // The open disk stays as it is.
    assert_eq!(queue.disk.sectors() * 512, bytes);
    queue.write(0, &[1; 4096]).unwrap();
    queue.close().unwrap();
    drop(queue);
    images::check(&path);
    let content = images::contents(&path);
    assert_eq!(content.len() as u64, 4 * MIB);
    assert!(content[2 << 20..3 << 20].iter().all(|byte| *byte == 9));
    assert!(content[3 << 20..].iter().all(|byte| *byte == 0));
}

/// Has the leaf in use in this world, and changes its headers meanwhile, the hidden mark at last; whether it was not
/// stopped.
fn used(world: &SimWorld, dir: &Path, state: &Path, change: &HeaderChange) -> bool {
    let options = OpenOptions { state_dir: Some(state.into()), ..options() };
    let disk = Arc::new(Disk::open(&dir.join(NAMES[2]), &options).unwrap());
    let mut session = Session::new(disk.clone(), |arena| Ok(world.engine(arena))).unwrap();
    let mut steps = || {
        session.write(BLOCK, &[1; 8192])?;
        session.flush()?;
        session.write(2 * BLOCK, &[2; 4096])?;
        let port = session.port().clone();
        let is_last = matches!(change, HeaderChange::Hidden(_));
        if !is_last {
            session.run(disk.change_headers(&port, change))??;
        }
        session.write(3 * BLOCK, &[3; 4096])?;
        session.flush()?;
        match is_last {
            true => session.run(disk.change_headers(&port, change))?,
            false => Ok(()),
        }
    };
    steps().is_ok()
}

/// Stops the machine at this step; whether all was done before. `kills`: only the process ends.
fn is_whole_after(template: &Path, kills: bool, to: &HeaderChange, step: u64, seed: u64) -> bool {
    let (dir, state) = (dir_in_memory(), dir_in_memory());
    for file in NAMES {
        fs::copy(template.join(file), at(&dir, file)).unwrap();
    }
    let leaf = at(&dir, NAMES[2]);
    let old = seen(&leaf);
    let new = match to {
        HeaderChange::Hidden(hidden) => (*hidden, old.1, old.2.clone()),
        _ => (old.0, old.1, NAMES[1].to_owned()),
    };
    let world = SimWorld::new(seed * 1000 + step);
    world.stop_at(Some(step + 1));
    let whole = used(&world, dir.path(), state.path(), to);
    let state_dir = match kills {
        true => {
            world.kill_process().unwrap();
            Some(state.path().to_owned())
        }
        false => {
            world.cut_power().unwrap();
            None
        }
    };
    let found = seen(&leaf);
    assert!(found == new || !whole && found == old, "step {step}: {found:?}");
    let disk = Disk::open(&leaf, &OpenOptions { state_dir, ..options() });
    let disk = disk.unwrap_or_else(|e| panic!("step {step}: {e}"));
    let mut queue = Queue::new(disk);
    assert_eq!(queue.read(0, 8192).unwrap(), [5; 8192]);
    // It may be done again, also after the next process has died.
    change(&mut queue, to).unwrap_or_else(|e| panic!("step {step}: {e}"));
    assert_eq!(seen(&leaf), new);
    if whole {
        for block in 1..=3 {
            assert_eq!(queue.read(block * BLOCK, 4096).unwrap(), [block as u8; 4096], "{step}");
        }
    }
    queue.close().unwrap();
    drop(queue);
    let vhd = Vhd::open(&leaf, &unlocked()).unwrap();
    assert_eq!(vhd.footer().data_offset, 512, "step {step}");
    drop(vhd);
    images::check(&leaf);
    whole
}

fn every_step(kills: bool, change: impl Fn(&Path) -> HeaderChange) {
    let template = dir_in_memory();
    make(template.path());
    let to = change(template.path());
    // With each commit, each step is one seed's.
    let apart = if is_night() { 1 } else { SEEDS };
    for seed in 0..SEEDS {
        let mut step = seed % apart;
        while !is_whole_after(template.path(), kills, &to, step, seed) {
            step += apart;
        }
        assert!(step >= 20, "{step}");
    }
}

#[test]
fn a_leaf_has_the_one_parent_or_the_other_wherever_the_power_is_cut() {
    every_step(false, |dir| link(dir, NAMES[1]));
}

#[test]
fn a_leaf_has_the_one_parent_or_the_other_wherever_its_process_is_killed() {
    every_step(true, |dir| link(dir, NAMES[1]));
}

#[test]
fn the_hidden_mark_is_old_or_new_wherever_the_power_is_cut() {
    every_step(false, |_| HeaderChange::Hidden(1));
}

/// A path for which the blocks leave no room stays behind them.
#[test]
fn a_long_path_to_a_parent_moves_no_block() {
    let dir = dir_in_memory();
    make(dir.path());
    let leaf = at(&dir, NAMES[2]);
    let long = format!("{}.vhd", "n".repeat(240));
    let below: PathBuf = ["a", "b", "c"].map(|letter| letter.repeat(240)).iter().collect();
    let folder = dir.path().join(&below);
    fs::create_dir_all(&folder).unwrap();
    fs::copy(at(&dir, NAMES[1]), folder.join(&long)).unwrap();
    let uuid = Vhd::open(&folder.join(&long), &unlocked()).unwrap().footer().uuid;
    let relative = Path::new(".").join(below).join(&long);
    let mut queue = Queue::new(Disk::open(&leaf, &options()).unwrap());
    queue.write(BLOCK, &[1; 4096]).unwrap();
    let to = ParentLink { uuid, modified_unix_s: 0, relative };
    change(&mut queue, &HeaderChange::Parent(to)).unwrap();
    queue.write(2 * BLOCK, &[2; 4096]).unwrap();
    assert_eq!(queue.read(BLOCK, 4096).unwrap(), [1; 4096]);
    assert_eq!(seen(&leaf).2, long);
    queue.close().unwrap();
    drop(queue);
    let name = ImageName::parse(&format!("vhd:{}", name(&leaf))).unwrap();
    let parents = ferrite_disk::Parents::Any;
    let disk = Disk::open_image(&name, &OpenOptions { parents, ..options() }).unwrap();
    let mut queue = Queue::new(disk);
    assert_eq!(queue.read(0, 4096).unwrap(), [5; 4096]);
    assert_eq!(queue.read(2 * BLOCK, 4096).unwrap(), [2; 4096]);
}
