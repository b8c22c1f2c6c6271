//! Values by grant reference, with the order of their last use.
//!
//! A guest chooses the references, so the time of a look-up must not depend on which they are.
//! Places are chosen by a hash with a key of this table's own. At most half of them are in use, and
//! everything is allocated when the table is made.

use ferrite_host::clock::{Random, SplitMix64};

/// No slot, no entry.
const NONE: u16 = u16::MAX;

struct Entry<V> {
    gref: u32,
    /// Towards those used later, towards those used earlier.
    newer: u16,
    older: u16,
    used_ns: u64,
    /// `None` while the entry is free.
    value: Option<V>,
}

/// A table of fixed capacity: open addressing, linear probing, no tombstones.
pub(super) struct Table<V> {
    key: u64,
    /// Numbers of entries, or [`NONE`]; a power of two of them.
    slots: Box<[u16]>,
    entries: Box<[Entry<V>]>,
    /// First of the free entries, which are linked by `older`.
    free: u16,
    newest: u16,
    oldest: u16,
    len: usize,
}

impl<V> Table<V> {
    /// For at most `capacity` values.
    pub(super) fn new(capacity: usize) -> Table<V> {
        assert!((1..usize::from(NONE)).contains(&capacity), "entries have 16-bit numbers");
        let entry = |i: usize| Entry {
            gref: 0,
            newer: NONE,
            older: if i + 1 < capacity { i as u16 + 1 } else { NONE },
            used_ns: 0,
            value: None,
        };
        Table {
            key: SplitMix64::from_system().next_u64(),
            slots: vec![NONE; (2 * capacity).next_power_of_two()].into(),
            entries: (0..capacity).map(entry).collect(),
            free: 0,
            newest: NONE,
            oldest: NONE,
            len: 0,
        }
    }

    /// Values in it.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether it takes no more.
    pub(super) fn is_full(&self) -> bool {
        self.len == self.entries.len()
    }

    /// The value of a reference, used now.
    pub(super) fn get(&mut self, gref: u32, now_ns: u64) -> Option<&V> {
        let slot = self.find(gref).ok()?;
        let entry = self.slots[slot];
        if self.newest != entry {
            self.unlink(entry);
            self.link_newest(entry);
        }
        let entry = &mut self.entries[usize::from(entry)];
        entry.used_ns = now_ns;
        entry.value.as_ref()
    }

    /// Adds a value, used now; it comes back if the table is full or has one for this reference.
    pub(super) fn insert(&mut self, gref: u32, now_ns: u64, value: V) -> Result<&V, V> {
        let slot = match self.find(gref) {
            Err(slot) if self.free != NONE => slot,
            _ => return Err(value),
        };
        let number = self.free;
        let entry = &mut self.entries[usize::from(number)];
        self.free = entry.older;
        entry.gref = gref;
        entry.used_ns = now_ns;
        self.slots[slot] = number;
        self.len += 1;
        self.link_newest(number);
        Ok(self.entries[usize::from(number)].value.insert(value))
    }

    /// When the value that was not used for longest was last used.
    pub(super) fn oldest_use_ns(&self) -> Option<u64> {
        self.entries.get(usize::from(self.oldest)).map(|entry| entry.used_ns)
    }

    /// Takes that value out.
    pub(super) fn pop_oldest(&mut self) -> Option<V> {
        let number = self.oldest;
        let gref = self.entries.get(usize::from(number))?.gref;
        if let Ok(slot) = self.find(gref) {
            self.empty_slot(slot);
        }
        self.unlink(number);
        self.len -= 1;
        let entry = &mut self.entries[usize::from(number)];
        entry.older = self.free;
        self.free = number;
        entry.value.take()
    }

    fn home(&self, gref: u32) -> usize {
        let mixed = SplitMix64::new(self.key ^ u64::from(gref)).next_u64();
        mixed as usize & (self.slots.len() - 1)
    }

    /// The slot of a reference, or the one where it would be put.
    fn find(&self, gref: u32) -> Result<usize, usize> {
        let mask = self.slots.len() - 1;
        let mut slot = self.home(gref);
        // Ends: at least half of the slots are empty.
        loop {
            match self.slots[slot] {
                NONE => return Err(slot),
                entry if self.entries[usize::from(entry)].gref == gref => return Ok(slot),
                _ => slot = (slot + 1) & mask,
            }
        }
    }

    /// Empties a slot, and moves up what would not be found behind the gap any more.
    fn empty_slot(&mut self, mut gap: usize) {
        let mask = self.slots.len() - 1;
        let mut slot = gap;
        loop {
            slot = (slot + 1) & mask;
            let entry = self.slots[slot];
            if entry == NONE {
                break;
            }
            let home = self.home(self.entries[usize::from(entry)].gref);
            // How far it is from home, and how far the gap is from it.
            if slot.wrapping_sub(home) & mask >= slot.wrapping_sub(gap) & mask {
                self.slots[gap] = entry;
                gap = slot;
            }
        }
        self.slots[gap] = NONE;
    }

    fn link_newest(&mut self, number: u16) {
        let before = self.newest;
        let entry = &mut self.entries[usize::from(number)];
        entry.newer = NONE;
        entry.older = before;
        match self.entries.get_mut(usize::from(before)) {
            Some(before) => before.newer = number,
            None => self.oldest = number,
        }
        self.newest = number;
    }

    fn unlink(&mut self, number: u16) {
        let Entry { newer, older, .. } = self.entries[usize::from(number)];
        match self.entries.get_mut(usize::from(newer)) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
        match self.entries.get_mut(usize::from(older)) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The same, slowly: values in the order of their last use, the newest last.
    #[derive(Default)]
    struct Model(Vec<(u32, u64, u64)>);

    impl Model {
        fn get(&mut self, gref: u32, now_ns: u64) -> Option<u64> {
            let at = self.0.iter().position(|e| e.0 == gref)?;
            let (_, _, value) = self.0.remove(at);
            self.0.push((gref, now_ns, value));
            Some(value)
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Get(u32),
        Insert(u32),
        PopOldest,
    }

    /// Few references, so that they meet; neighbours and strangers.
    fn step() -> impl Strategy<Value = Step> {
        let gref = prop_oneof![0..40u32, (0..20u32).prop_map(|n| n << 20), Just(u32::MAX)];
        prop_oneof![
            3 => gref.clone().prop_map(Step::Get),
            3 => gref.prop_map(Step::Insert),
            1 => Just(Step::PopOldest),
        ]
    }

    proptest! {
        #[test]
        fn it_behaves_as_a_list_in_the_order_of_use(
            capacity in 1..24usize,
            steps in proptest::collection::vec(step(), 0..400),
        ) {
            let mut table = Table::new(capacity);
            let mut model = Model::default();
            for (now_ns, step) in steps.into_iter().enumerate() {
                let now_ns = now_ns as u64;
                match step {
                    Step::Get(gref) => {
                        prop_assert_eq!(table.get(gref, now_ns).copied(), model.get(gref, now_ns));
                    }
                    Step::Insert(gref) => {
                        let there = model.0.iter().any(|e| e.0 == gref);
                        let fits = model.0.len() < capacity && !there;
                        prop_assert_eq!(table.insert(gref, now_ns, now_ns).is_ok(), fits);
                        if fits {
                            model.0.push((gref, now_ns, now_ns));
                        }
                    }
                    Step::PopOldest => {
                        let oldest = (!model.0.is_empty()).then(|| model.0.remove(0).2);
                        prop_assert_eq!(table.pop_oldest(), oldest);
                    }
                }
                prop_assert_eq!(table.len(), model.0.len());
                prop_assert_eq!(table.is_full(), model.0.len() == capacity);
                prop_assert_eq!(table.oldest_use_ns(), model.0.first().map(|e| e.1));
            }
            for (gref, _, value) in model.0 {
                prop_assert_eq!(table.get(gref, 0), Some(&value));
            }
        }
    }

    #[test]
    fn whatever_references_a_guest_takes_few_steps_find_them() {
        let capacity = 1056;
        let worst = |grefs: &mut dyn Iterator<Item = u32>| {
            let mut table = Table::new(capacity);
            for gref in grefs.take(capacity) {
                table.insert(gref, 0, ()).unwrap();
            }
            assert!(table.is_full());
            let mask = table.slots.len() - 1;
            let steps = (0..table.slots.len()).filter(|s| table.slots[*s] != NONE).map(|slot| {
                let gref = table.entries[usize::from(table.slots[slot])].gref;
                slot.wrapping_sub(table.home(gref)) & mask
            });
            steps.sum::<usize>() / capacity
        };
        // A table of the same size without a key would have all of the second and third in a row.
        assert!(worst(&mut (8..)) <= 4);
        assert!(worst(&mut (0..).map(|i: u32| i * 4096)) <= 4);
        assert!(worst(&mut (0..).map(|i: u32| u32::MAX - (i << 16))) <= 4);
    }

    #[test]
    fn values_are_dropped_with_the_table() {
        let value = std::rc::Rc::new(());
        let mut table = Table::new(4);
        for gref in 0..4 {
            table.insert(gref, 0, value.clone()).unwrap();
        }
        assert!(table.insert(9, 0, value.clone()).is_err());
        table.pop_oldest();
        assert_eq!(std::rc::Rc::strong_count(&value), 4);
        drop(table);
        assert_eq!(std::rc::Rc::strong_count(&value), 1);
    }
}
