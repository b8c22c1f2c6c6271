use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

const ID: StoreId = [3; 16];
const COUNT_AT: usize = 40;

fn layout() -> Layout {
    Layout::of(64 << 20).unwrap()
}

fn name() -> impl Strategy<Value = Name> {
    "[a-zA-Z0-9][-_.a-zA-Z0-9]{0,62}".prop_map(|name| Name::new(&name).unwrap())
}

fn new() -> impl Strategy<Value = NewContent> {
    let ids = (any::<u32>(), 0..1u64 << 39, 1..layout().places(), any::<u16>());
    let place = (0..layout().segments).prop_map(|segment| layout().first_place(segment) + 3);
    let hash = any::<[u8; 32]>().prop_map(ContentHash);
    (ids, place, any::<u32>(), hash).prop_map(|(ids, place, checksum, hash)| {
        let (volume, block, number, domain) = ids;
        NewContent { volume, block, number, place, checksum, domain, hash }
    })
}

fn record() -> impl Strategy<Value = Record> {
    let volume = any::<u32>;
    let block = || 0..1u64 << 39;
    let number = 1..layout().places() / 2;
    prop_oneof![
        new().prop_map(Record::New),
        (volume(), block(), number, 1..99u16).prop_map(|(volume, block, number, count)| {
            Record::Same { volume, block, number, count }
        }),
        (volume(), block(), 1..=MAX_SAME as u32)
            .prop_map(|(volume, block, count)| { Record::Zeros { volume, block, count } }),
        (volume(), block(), any::<u16>(), name()).prop_map(|(volume, blocks, domain, name)| {
            Record::Create { volume, blocks, domain, name }
        }),
        (volume(), volume(), any::<bool>(), name()).prop_map(|(volume, of, snapshot, name)| {
            Record::Share { volume, of, snapshot, name }
        }),
        (volume(), volume()).prop_map(|(volume, to)| Record::Rollback { volume, to }),
        volume().prop_map(|volume| Record::Delete { volume }),
        (volume(), any::<u64>()).prop_map(|(volume, unix_s)| Record::Made { volume, unix_s }),
        (any::<u16>(), any::<[u8; 32]>(), name()).prop_map(|(domain, key, name)| {
            Record::Domain { domain, key: DomainKey(key), name }
        }),
    ]
}

fn block(number: u64, synced: u64, records: &[Record]) -> Vec<u8> {
    let mut filling = Filling::default();
    assert!(records.iter().all(|record| filling.add(record)));
    filling.finish(&ID, number, synced)
}

fn decode(bytes: &[u8]) -> Result<Option<Block>, Damaged> {
    Block::decode(bytes, &ID, &layout())
}

proptest! {
    #[test]
    fn what_is_read_is_what_was_written(
        all in prop::collection::vec(record(), 0..150),
        number in 0..1u64 << 60,
        before in 0..1u64 << 60,
    ) {
        let (mut filling, mut records) = (Filling::default(), all.clone());
        let count = all.iter().take_while(|record| filling.add(record)).count();
        records.truncate(count);
        let synced = number.min(before);
        let bytes = filling.finish(&ID, number, synced);
        prop_assert_eq!(bytes.len(), BLOCK_BYTES);
        prop_assert_eq!(decode(&bytes), Ok(Some(Block { number, synced, records })));
        // A record that was refused would not have fitted.
        let used: usize = all[..count].iter().map(|r| r.encode().len()).sum();
        let next = all.get(count).map(|r| r.encode().len());
        prop_assert!(next.is_none_or(|next| HEADER_BYTES + used + next > BLOCK_BYTES));
    }

    /// Torn anywhere over what was there before, or with a bit that is wrong.
    #[test]
    fn a_block_that_is_not_whole_is_none(
        records in prop::collection::vec(record(), 1..20),
        at in 1..BLOCK_BYTES,
        bit in 0..8,
    ) {
        let whole = block(9, 4, &records);
        let mut torn = block(1, 0, &[]);
        torn[at..].copy_from_slice(&whole[at..]);
        prop_assert!(torn == whole || decode(&torn) == Ok(None) || torn == block(1, 0, &[]));
        let mut rotten = whole.clone();
        rotten[at] ^= 1u8 << bit;
        prop_assert_eq!(decode(&rotten), Ok(None));
        let mut id = ID;
        id[0] ^= 1;
        prop_assert_eq!(Block::decode(&whole, &id, &layout()), Ok(None));
    }

    /// An attacker who makes an image makes its checksums, too.
    #[test]
    fn any_bytes_with_a_right_checksum_are_refused_or_sane(
        records in prop::collection::vec(record(), 1..20),
        at in COUNT_AT..BLOCK_BYTES,
        bytes in any::<[u8; 8]>(),
    ) {
        let mut block = block(9, 4, &records);
        let end = BLOCK_BYTES.min(at + 8);
        block[at..end].copy_from_slice(&bytes[..end - at]);
        let sum = sum(&block);
        block[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&sum);
        if let Ok(Some(found)) = decode(&block) {
            prop_assert!(found.records.iter().all(|record| record.is_sane(&layout())));
        }
    }
}

#[test]
fn names_are_short_plain_and_begin_with_a_letter_or_a_digit() {
    for good in ["a", "web-1.root_2", "0", &"n".repeat(63)] {
        assert_eq!(Name::new(good).unwrap().as_str(), good);
    }
    for bad in ["", "-a", ".", "_", "a b", "a/b", "a#b", "ä", "a\n", &"n".repeat(64)] {
        assert_eq!(Name::new(bad), None, "{bad:?}");
    }
}

#[test]
fn a_sweep_of_new_blocks_fits_one_block_of_the_journal() {
    let new = NewContent {
        volume: 1,
        block: 2,
        number: 3,
        place: layout().first_place(0),
        checksum: 5,
        domain: 0,
        hash: ContentHash([6; 32]),
    };
    let mut filling = Filling::default();
    let count = (0..1000).take_while(|_| filling.add(&Record::New(new))).count();
    assert_eq!(count, 69);
}

/// A journal of which blocks are whole, and what they say is synced.
fn scan(from: u64, blocks: &[(u64, u64)]) -> Result<Replay, Damaged> {
    let mut scan = Scan::new(&layout(), from);
    for (number, synced) in blocks {
        let block = decode(&block(*number, *synced, &[])).unwrap().unwrap();
        scan.add(&layout(), layout().journal(*number), &block)?;
    }
    scan.end()
}

#[test]
fn holes_are_passed_where_nobody_vouches_for_them() {
    let replay = scan(10, &[(10, 10), (13, 11), (12, 11), (9, 9)]).unwrap();
    assert_eq!((replay.blocks, replay.next), (vec![10, 12, 13], 14));
    assert_eq!(scan(10, &[]).unwrap().next, 10);
    let missing = scan(10, &[(10, 10), (13, 12), (12, 11)]);
    assert_eq!(missing, Err(Damaged("a block of the journal is missing that was durable")));
}

#[test]
fn a_block_elsewhere_or_of_the_next_round_is_damage() {
    let length = layout().journal_blocks;
    assert!(scan(10, &[(10 + length, 10)]).is_err());
    let block = decode(&block(11, 10, &[])).unwrap().unwrap();
    let mut scan = Scan::new(&layout(), 10);
    assert!(scan.add(&layout(), layout().journal(12), &block).is_err());
}

/// No block gets a number so far above the highest one that has ended well.
#[test]
fn what_cannot_be_read_is_in_doubt_where_an_answered_block_may_be() {
    let length = layout().journal_blocks;
    for (first, last) in [(10, 20), (length - 3, length + 5)] {
        let mut scan = Scan::new(&layout(), first);
        (0..length).for_each(|at| scan.add_unreadable(&layout(), layout().journal(at)));
        let mut doubts: Vec<u64> = scan.in_doubt().collect();
        doubts.sort_unstable();
        assert_eq!(doubts, (first..first + AHEAD).collect::<Vec<_>>(), "there is none");
        let block = decode(&block(last, first, &[])).unwrap().unwrap();
        assert!(scan.add(&layout(), layout().journal(last), &block).unwrap());
        assert_eq!(scan.in_doubt().max(), Some(last + AHEAD));
    }
}

/// The state that a journal without a checkpoint, cut at any point, brings back.
#[derive(Default)]
struct Medium {
    /// By place: the contents that are durable, as numbers that stand for hashes.
    data: HashMap<u64, u8>,
}

fn content(block: u64, number: u64, place: u64, hash: u8) -> Record {
    Record::New(NewContent {
        volume: 0,
        block,
        number,
        place,
        checksum: 0,
        domain: 0,
        hash: ContentHash([hash; 32]),
    })
}

impl Medium {
    /// The contents of a volume after the replay of these blocks: their number, `synced`, records.
    fn replay(&self, blocks: &[(u64, u64, Vec<Record>)]) -> HashMap<u64, u8> {
        let numbers: Vec<_> = blocks.iter().map(|(number, synced, _)| (*number, *synced)).collect();
        let replay = scan(0, &numbers).unwrap();
        let (mut p2m, mut v2p) = (HashMap::new(), HashMap::new());
        for number in &replay.blocks {
            let (.., records) = blocks.iter().find(|(n, ..)| n == number).unwrap();
            for record in records {
                let fits = |new: &NewContent| self.data.get(&new.place) == Some(&new.hash.0[0]);
                if !replay.counts(*number, record, fits, |n| p2m.contains_key(&n)) {
                    continue;
                }
                match record {
                    Record::New(new) => {
                        p2m.insert(new.number, new.place);
                        v2p.insert(new.block, new.number);
                    }
                    Record::Same { block, number, .. } => {
                        v2p.insert(*block, *number);
                    }
                    _ => unreachable!(),
                }
            }
        }
        let read = |number: &u64| self.data[&p2m[number]];
        v2p.iter().map(|(block, number)| (*block, read(number))).collect()
    }
}

/// Three contents, each with a block of the journal, and a block that shares the first. All mixtures that a cut may
/// leave: a read gives the last write that counts, and never missing data.
#[test]
fn a_record_counts_only_with_its_data_and_with_what_it_shares() {
    let shares = Record::Same { volume: 0, block: 9, number: 1, count: 1 };
    let all = [
        (0, 0, vec![content(0, 1, 100, 11)]),
        (1, 0, vec![content(1, 2, 101, 12), content(0, 3, 102, 13)]),
        (2, 0, vec![shares]),
    ];
    for mask in 0..1u32 << 6 {
        let has = |bit: u32| mask >> bit & 1 == 1;
        let places = [(100, 11), (101, 12), (102, 13)];
        let written = places.iter().enumerate().filter(|(i, _)| has(*i as u32));
        // Elsewhere there is what was there before.
        let mut data: HashMap<u64, u8> = places.iter().map(|(place, _)| (*place, 99)).collect();
        data.extend(written.map(|(_, place)| *place));
        let blocks: Vec<_> = all.iter().filter(|(n, ..)| has(3 + *n as u32)).cloned().collect();
        let volume = Medium { data }.replay(&blocks);
        let mut expected = HashMap::new();
        if has(3) && has(0) {
            expected.insert(0, 11);
        }
        if has(4) && has(1) {
            expected.insert(1, 12);
        }
        if has(4) && has(2) {
            expected.insert(0, 13);
        }
        if has(5) && has(3) && has(0) {
            expected.insert(9, 11);
        }
        assert_eq!(volume, expected, "mask {mask:06b}");
    }
}

#[test]
fn what_is_vouched_for_counts_without_a_look_and_nothing_else_does() {
    let replay = scan(0, &[(0, 0), (1, 1), (2, 1)]).unwrap();
    let looked = |block: u64| {
        let mut looked = false;
        let record = content(0, 1, 100, 1);
        let counts = replay.counts(
            block,
            &record,
            |_| {
                looked = true;
                false
            },
            |_| true,
        );
        assert_ne!(counts, looked);
        looked
    };
    assert_eq!([0, 1, 2].map(looked), [false, true, true]);
    let shares = Record::Same { volume: 0, block: 0, number: 5, count: 3 };
    let counts = |known: &[u64]| {
        let known: HashSet<u64> = known.iter().copied().collect();
        // However durable the block: its contents' own records decide.
        replay.counts(0, &shares, |_| true, |n| known.contains(&n))
    };
    assert!(counts(&[5, 6, 7]) && !counts(&[5, 7]) && !counts(&[]));
}

#[test]
fn a_record_is_a_bounded_number_of_steps() {
    let same = |count| {
        let record = Record::Same { volume: 1, block: 0, number: 1, count };
        decode(&block(9, 4, &[record]))
    };
    assert!(same(MAX_SAME as u16).is_ok());
    assert!(same(MAX_SAME as u16 + 1).is_err() && same(0).is_err());
    let zeros = |count| decode(&block(9, 4, &[Record::Zeros { volume: 1, block: 0, count }]));
    assert!(zeros(MAX_SAME as u32).is_ok());
    assert!(zeros(MAX_SAME as u32 + 1).is_err() && zeros(0).is_err());
}
