//! Damaged and torn space pages.

use super::*;

/// A checkpoint writes pages and is cut; the next one has its number, and other pages.
#[test]
fn a_page_of_a_checkpoint_that_never_was_is_not_believed_by_the_next_one() {
    let mut world = World::new();
    world.data(9);
    world.begin(0);
    world.done();
    world.drop_one(0);
    world.begin(0);
    world.cut_behind_all_pages();
    assert_eq!(world.now.len(), 9);
    // Of another segment, so that nothing else writes that page.
    world.new_page();
    world.begin(0);
    world.done();
    world.open();
    while world.data(64).is_some() {}
}

/// The newer of two pages may be the one that is damaged.
#[test]
fn of_a_segment_with_a_damaged_page_nothing_is_given() {
    for home in 0..2 {
        let mut world = World::new();
        world.data(9);
        world.checkpoint();
        // Of others: so neither page is of the last checkpoint.
        world.new_page();
        world.checkpoint();
        world.medium.get_mut(&layout().space_page(0, home)).unwrap()[100] ^= 1;
        world.open();
        let first = layout().first_place(0)..layout().first_place(1);
        loop {
            match world.space.give_data(64) {
                Given::Places(run) => assert!(!first.contains(&run.start)),
                Given::Load(segment) => world.load(segment),
                Given::Full => break,
            }
        }
    }
}

/// No page that counts is newer than the last checkpoint.
#[test]
fn a_damaged_page_beside_one_of_the_last_checkpoint_costs_nothing() {
    let mut world = World::new();
    world.data(9);
    world.checkpoint();
    world.medium.get_mut(&layout().space_page(0, 1)).unwrap()[100] ^= 1;
    world.open();
    assert_eq!(world.space.free_of(0), 2 * layout().segment_blocks - 9);
    world.checkpoint();
    assert!(world.page(0, 1).is_ok(), "it is written, whatever has changed");
}

/// The other page would count, and says that all is free.
#[test]
fn of_a_segment_with_a_damaged_page_nothing_is_given_behind_a_cut_of_the_next_checkpoint_either() {
    let mut world = World::new();
    world.data(1);
    world.checkpoint();
    world.data(8);
    world.checkpoint();
    world.damage(0);
    world.open();
    world.begin(0);
    world.cut_behind_all_pages();
    assert_eq!(world.now.len(), 9);
    while world.data(64).is_some() {}
}

/// So it cannot be read again some day, whichever checkpoint it was of.
#[test]
fn a_damaged_space_page_is_written_before_anything_else_is() {
    for is_cut in [false, true] {
        let mut world = World::new();
        world.data(1);
        world.checkpoint();
        world.data(8);
        world.checkpoint();
        if is_cut {
            world.data(1);
            world.begin(0);
            world.cut_behind_all_pages();
        }
        // Of the two the one that counts.
        let home = usize::from(world.page(0, 1).is_ok_and(|page| page.checkpoint == world.whole.0));
        world.medium.get_mut(&layout().space_page(0, home as u64)).unwrap()[..512].fill(7);
        world.open();
        let page = world.page(0, home).unwrap();
        assert_eq!((page.checkpoint, page.bits.clear_bits()), (world.whole.0, 0), "{is_cut}");
        while world.data(64).is_some() {}
    }
}

/// Pages were there, and then content, which the journal has.
#[test]
fn content_is_taken_in_an_empty_pair_of_pages_whichever_of_its_space_pages_is_damaged() {
    for damaged in [0, 1] {
        let mut world = World::new();
        world.new_page();
        world.checkpoint();
        world.drop_one(0);
        world.checkpoint();
        world.release(world.epoch);
        while world.now.len() < 128 {
            world.data(64);
        }
        world.damage(damaged);
        world.cut(0, false, u64::MAX);
        assert_eq!((world.now.len(), world.space.pairs[0]), (128, Kind::Data), "{damaged}");
        while world.data(64).is_some() {}
    }
}

/// Its page is read as it opens, not when content is taken there, and again behind the next checkpoint.
#[test]
fn what_a_replay_takes_is_in_the_next_page_though_the_last_one_could_not_be_read_for_a_moment() {
    let mut world = World::new();
    world.data(9);
    world.checkpoint();
    world.data(8);
    let since: Vec<u64> =
        world.now.keys().filter(|place| !world.whole.1.contains_key(place)).copied().collect();
    world.open();
    world.space.load(0, Err(UNREADABLE));
    since.iter().for_each(|place| world.space.take(*place).unwrap());
    assert_eq!(since.len(), 8);
    world.checkpoint();
    world.open();
    while world.data(64).is_some() {}
}

/// As after the first checkpoint behind a damaged page of a pair of pages that is one of data now.
#[test]
fn of_a_pair_whose_pages_differ_in_kind_nothing_is_given_but_what_is_dropped() {
    let mut world = World::new();
    while world.now.len() < 128 {
        world.data(64);
    }
    world.checkpoint();
    let bits = Bits::all(false, 64);
    let page = SpacePage { checkpoint: world.whole.0, kind: Kind::Metadata, bits };
    let newer = 1 - world.space.segments[1].next_home;
    let page = page.encode(&ID, 1, newer.into());
    world.medium.insert(layout().space_page(1, newer.into()), page);
    world.open();
    world.drop_one(127);
    world.checkpoint();
    world.release(world.epoch);
    assert_eq!((world.space.pairs[0], world.space.free_of(0)), (Kind::Data, 1));
    while world.data(64).is_some() {}
}
