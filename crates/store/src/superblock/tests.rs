use proptest::prelude::*;

use super::*;

fn layout() -> Layout {
    Layout::of(64 << 20).unwrap()
}

fn superblock(checkpoint: u64) -> Superblock {
    let place = layout().first_place(2) + 9;
    let pointer = |checksum| Some(Pointer { place, checksum, born: checkpoint });
    let roots = Roots { p2m: pointer(1), hashes: None, volumes: pointer(3), domains: pointer(4) };
    Superblock {
        id: [5; 16],
        layout: layout(),
        checkpoint,
        replay_from: checkpoint * 100,
        generation: checkpoint * 7,
        numbers_end: checkpoint,
        roots,
        packing: PACKINGS[checkpoint as usize % 3],
        has_times: checkpoint % 4 > 1,
    }
}

/// A medium's four pages.
#[derive(Clone)]
struct Medium([[Vec<u8>; 2]; 2]);

impl Medium {
    /// As it is made: both homes have checkpoints 0 and 1.
    fn new() -> Medium {
        let mut medium = Medium([0, 1].map(|_| [Vec::new(), Vec::new()]));
        for checkpoint in 0..2 {
            medium.write(0, checkpoint);
            medium.write(1, checkpoint);
        }
        medium
    }

    fn write(&mut self, home: usize, checkpoint: u64) {
        self.0[home][(checkpoint % 2) as usize] = superblock(checkpoint).encode(home);
    }

    fn choose(&self) -> Result<Superblock, Unusable> {
        let decode =
            |home: usize, odd: usize| Superblock::decode(&self.0[home][odd], home, odd == 1);
        choose(&[[decode(0, 0), decode(0, 1)], [decode(1, 0), decode(1, 1)]])
    }

    fn checkpoint(&self) -> u64 {
        self.choose().unwrap().checkpoint
    }
}

#[test]
fn what_is_read_is_what_was_written_in_each_home() {
    for (home, checkpoint) in [(0, 6), (0, 7), (1, 6), (1, 7)] {
        let page = superblock(checkpoint).encode(home);
        assert_eq!(page.len(), BLOCK_BYTES);
        let odd = checkpoint % 2 == 1;
        assert_eq!(Superblock::decode(&page, home, odd), Ok(superblock(checkpoint)));
        // A page that was put elsewhere.
        assert!(Superblock::decode(&page, 1 - home, odd).is_err());
        assert!(Superblock::decode(&page, home, !odd).is_err());
    }
}

/// Each write torn anywhere, or lost, and the superblock that counts is the one before or this one.
#[test]
fn a_cut_while_a_checkpoint_is_made_leaves_it_or_the_one_before() {
    let mut medium = Medium::new();
    for checkpoint in 2..9 {
        for home in [0, 1] {
            let slot = (checkpoint % 2) as usize;
            let new = superblock(checkpoint).encode(home);
            for torn_at in [0, 8, 60, 512, 1000, 4092, 4095] {
                for ends in [false, true] {
                    let mut torn = medium.clone();
                    let range = if ends { torn_at..BLOCK_BYTES } else { 0..torn_at };
                    torn.0[home][slot][range.clone()].copy_from_slice(&new[range]);
                    let found = torn.checkpoint();
                    let allowed = if home == 0 { checkpoint - 1 } else { checkpoint };
                    assert!((allowed..=checkpoint).contains(&found), "{found} of {checkpoint}");
                }
            }
            medium.write(home, checkpoint);
        }
        assert_eq!(medium.checkpoint(), checkpoint);
    }
}

/// Bits that rot in one page: the other home has it. In both pages of a parity: an error, and not the
/// checkpoint before, whose places are others' by now.
#[test]
fn rot_never_brings_an_older_checkpoint_back() {
    let mut medium = Medium::new();
    (2..8).for_each(|checkpoint| (0..2).for_each(|home| medium.write(home, checkpoint)));
    for bit in (0..BLOCK_BYTES * 8).step_by(13) {
        for home in 0..2 {
            let mut one = medium.clone();
            one.0[home][1][bit / 8] ^= 1 << (bit % 8);
            assert_eq!(one.checkpoint(), 7);
            one.0[1 - home][1][4000] ^= 1;
            assert!(matches!(one.choose(), Err(Unusable::Damaged(_))), "{:?}", one.choose());
        }
    }
}

#[test]
fn pages_of_two_stores_are_none() {
    let mut medium = Medium::new();
    let other = Superblock { id: [6; 16], ..superblock(3) };
    medium.0[1][1] = other.encode(1);
    assert!(matches!(medium.choose(), Err(Unusable::Damaged(_))));
    // Nor is one with another end of the same checkpoint.
    let mut medium = Medium::new();
    medium.0[1][1] = Superblock { replay_from: 99, ..superblock(1) }.encode(1);
    assert!(matches!(medium.choose(), Err(Unusable::Damaged(_))));
}

/// With the checksum as it has to be.
fn changed(at: usize, value: u8) -> Vec<u8> {
    let mut page = superblock(6).encode(0);
    page[at] = value;
    let sum = checksum(&page[..CHECKSUM_AT]).to_le_bytes();
    page[CHECKSUM_AT..].copy_from_slice(&sum);
    page
}

#[test]
fn a_later_version_is_named_and_not_taken_for_damage() {
    let decode = |page: &[u8]| Superblock::decode(page, 0, false);
    assert_eq!(decode(&changed(8, 2)), Err(Unusable::Version { found: 2 }));
    assert_eq!(decode(&changed(32, 4)), Err(Unusable::Features { bits: 4 }));
    assert_eq!(decode(&changed(40, 1)), Err(Unusable::Features { bits: 1 }));
    assert_eq!(decode(&[0; BLOCK_BYTES]), Err(Unusable::Foreign));
    // It says so though the pages of this version are whole.
    let mut medium = Medium::new();
    medium.0[0][0] = changed(8, 2);
    assert_eq!(medium.choose(), Err(Unusable::Version { found: 2 }));
}

#[test]
fn what_means_nothing_has_to_be_zeros() {
    for at in [12, FIELDS_BYTES, 1000, CHECKSUM_AT - 1] {
        assert!(Superblock::decode(&changed(at, 1), 0, false).is_err(), "byte {at}");
    }
    assert!(Superblock::decode(&changed(FIELDS_BYTES, 0), 0, false).is_ok());
}

proptest! {
    /// The sizes come from the maker of the image, who may be an attacker.
    #[test]
    fn any_fields_are_refused_or_sound(at in 8usize..FIELDS_BYTES, bytes in any::<[u8; 8]>()) {
        let mut page = superblock(6).encode(0);
        page[at..at + 8].copy_from_slice(&bytes);
        let sum = checksum(&page[..CHECKSUM_AT]).to_le_bytes();
        page[CHECKSUM_AT..].copy_from_slice(&sum);
        if let Ok(superblock) = Superblock::decode(&page, 0, false) {
            prop_assert!(superblock.layout.checked().is_ok());
            prop_assert_eq!(superblock.encode(0), page);
        }
    }
}
