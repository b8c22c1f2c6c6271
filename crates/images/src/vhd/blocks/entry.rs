//! The state of one block in one word, so that a reader on any thread sees all of it at once.

/// The place of the bits of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The block has no place in the file.
    Empty,
    /// Its bitmap is on disk and not in memory.
    OnDisk,
    /// All of its sectors are present.
    Full,
    /// Its bitmap is in this slot of the slab.
    Bits(u32),
    /// Its slot has the sectors that became present; the other bits are on disk.
    Overlay(u32),
    /// It cannot be read, for the reason of this number (`damage`).
    Damaged(u32),
}

/// The word: 32 bits of place, 3 of state, flags, 26 of slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry(pub(super) u64);

const STATE_SHIFT: u32 = 32;
const SLOT_SHIFT: u32 = 38;

impl Entry {
    pub(super) const EMPTY: Entry = Entry(0);
    /// The table on disk does not have the block yet.
    pub(super) const NEW: u64 = 1 << 35;
    /// Changed since the last commit took it: it is in the dirty list.
    pub(super) const DIRTY: u64 = 1 << 36;
    /// A commit is writing it.
    pub(super) const BUSY: u64 = 1 << 37;
    const FLAGS: u64 = Self::NEW | Self::DIRTY | Self::BUSY;

    /// A block at `sector`, without flags.
    pub(super) fn new(sector: u32, state: State) -> Entry {
        Entry(u64::from(sector)).with_state(state)
    }

    /// Where its bitmap starts, in sectors of the file.
    #[inline]
    pub(super) fn sector(self) -> u32 {
        self.0 as u32
    }

    #[inline]
    pub(super) fn state(self) -> State {
        let slot = (self.0 >> SLOT_SHIFT) as u32;
        match (self.0 >> STATE_SHIFT) & 7 {
            1 => State::OnDisk,
            2 => State::Full,
            3 => State::Bits(slot),
            4 => State::Overlay(slot),
            5 => State::Damaged(slot),
            _ => State::Empty,
        }
    }

    pub(super) fn with_state(self, state: State) -> Entry {
        let (number, slot) = match state {
            State::Empty => (0, 0),
            State::OnDisk => (1, 0),
            State::Full => (2, 0),
            State::Bits(slot) => (3, slot),
            State::Overlay(slot) => (4, slot),
            State::Damaged(why) => (5, why),
        };
        let keep = self.0 & (Self::FLAGS | u64::from(u32::MAX));
        Entry(keep | number << STATE_SHIFT | u64::from(slot) << SLOT_SHIFT)
    }

    /// The entry with another place.
    pub(super) fn at(self, sector: u32) -> Entry {
        Entry(self.0 & !u64::from(u32::MAX) | u64::from(sector))
    }

    #[inline]
    pub(super) fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    pub(super) fn with(self, flag: u64) -> Entry {
        Entry(self.0 | flag)
    }

    pub(super) fn without(self, flag: u64) -> Entry {
        Entry(self.0 & !flag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_of_an_entry_are_independent() {
        for state in [
            State::OnDisk,
            State::Full,
            State::Bits(0),
            State::Bits((1 << 26) - 1),
            State::Overlay(77),
            State::Damaged(5),
        ] {
            for flags in [0, Entry::NEW, Entry::DIRTY | Entry::BUSY, Entry::FLAGS] {
                let entry = Entry::new(u32::MAX - 1, State::Bits(5)).with(flags).with_state(state);
                assert_eq!((entry.sector(), entry.state()), (u32::MAX - 1, state));
                assert_eq!(entry.0 & Entry::FLAGS, flags);
                assert_eq!(entry.without(flags).state(), state);
                assert_eq!((entry.at(7).sector(), entry.at(7).state()), (7, state));
                assert_eq!(entry.at(7).0 & Entry::FLAGS, flags);
            }
        }
        assert_eq!(Entry::EMPTY.state(), State::Empty);
    }
}
