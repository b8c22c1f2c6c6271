//! Numbers of journal blocks: which are under way, and below which number all blocks are durable (store.md 3 to 5).

use std::collections::BTreeSet;

/// Blocks of new data after which a sync is made even if no guest flushes: 256 MiB.
pub const SYNC_AFTER: u64 = 1 << 16;

/// No block gets a number this far above the highest one that has ended well. So a replay knows which blocks a journal
/// place that storage cannot read may have (store.md 4). It is more than can be under way at once.
pub const AHEAD: u64 = 64;

/// The blocks that a successful sync makes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "pass it to `synced` when the sync has succeeded"]
pub struct Before {
    /// All journal blocks below this one are durable.
    below: u64,
    /// Blocks of new data since the store was opened.
    new_data: u64,
}

/// See the module text.
#[derive(Debug)]
pub struct Numbers {
    next: u64,
    /// Replay begins here: this block and later ones are not overwritten.
    from: u64,
    /// Blocks of the journal.
    length: u64,
    /// All blocks below are durable, and so are their data.
    synced: u64,
    /// The value of `synced` that the last block has recorded.
    told: u64,
    /// The number behind the last block that has a record.
    recorded: u64,
    /// The number behind the highest block that has ended well.
    good: u64,
    /// Blocks of new data since the opening.
    new_data: u64,
    /// Those of them that a sync has covered.
    synced_data: u64,
    /// How many blocks have ended.
    ended: u64,
    under_way: BTreeSet<u64>,
    /// The blocks of which something has failed, and that a replay would find.
    failed: BTreeSet<u64>,
    /// The last block that had an operation on volumes.
    operation: Option<u64>,
    /// A checkpoint that begins at this number, and has a change of volumes without a record, has failed.
    unsettled: Option<u64>,
}

impl Numbers {
    /// The numbers when a checkpoint has all blocks below `next`, of a journal of `length` blocks.
    pub fn new(next: u64, length: u64) -> Numbers {
        let (under_way, failed, operation, unsettled) = Default::default();
        let (from, synced, told, recorded, good) = (next, next, next, next, next);
        let (new_data, synced_data, ended) = (0, 0, 0);
        Numbers {
            next,
            from,
            length,
            synced,
            told,
            recorded,
            good,
            new_data,
            synced_data,
            ended,
            under_way,
            failed,
            operation,
            unsettled,
        }
    }

    /// Gives the next number, and the number below which its block says that all is durable. `None`: a checkpoint must
    /// be made first. The journal is full, or an operation on volumes has failed that a replay would carry out, or a
    /// checkpoint that has one, or no block has ended well for long.
    pub fn begin(&mut self) -> Option<(u64, u64)> {
        let begun = self.begin_empty();
        self.recorded = begun.map_or(self.recorded, |(number, _)| number + 1);
        begun
    }

    /// As [`begin`](Numbers::begin), for a block without records.
    pub fn begin_empty(&mut self) -> Option<(u64, u64)> {
        let number = self.next;
        let has_failed = self.operation.is_some_and(|number| self.failed.contains(&number));
        let end = (self.from + self.length).min(self.good.max(self.from) + AHEAD);
        (number < end && !has_failed && self.unsettled.is_none()).then(|| {
            self.next += 1;
            self.told = self.synced;
            self.under_way.insert(number);
            (number, self.synced)
        })
    }

    /// As [`begin`](Numbers::begin), for an operation on volumes. No block may be under way. No block may have failed: a
    /// replay would carry it out before this one, though memory has not.
    pub fn begin_operation(&mut self) -> Option<(u64, u64)> {
        let begun = if self.has_failed() { None } else { self.begin() };
        self.operation = begun.map(|(number, _)| number).or(self.operation);
        begun
    }

    /// Ends a block. `is_done`: the kernel has the block and its data, and memory has the change.
    pub fn end(&mut self, number: u64, is_done: bool) {
        self.under_way.remove(&number);
        self.ended += 1;
        match is_done {
            true => self.good = self.good.max(number + 1),
            false => drop(self.failed.insert(number)),
        }
    }

    /// How many blocks have ended since the opening. While this stays the same, no block has changed the store.
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// The number that the next block gets.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Counts blocks of new data that are written from now on.
    pub fn new_data(&mut self, blocks: u64) {
        self.new_data += blocks;
    }

    /// The blocks that are durable if a sync that begins now succeeds. Failed blocks are never part of it.
    pub fn before_sync(&self) -> Before {
        let first = [self.under_way.first(), self.failed.first()].into_iter().flatten().min();
        let below = first.copied().unwrap_or(self.next);
        Before { below, new_data: self.new_data }
    }

    /// Notes that the sync has succeeded.
    pub fn synced(&mut self, before: Before) {
        self.synced = self.synced.max(before.below);
        self.synced_data = self.synced_data.max(before.new_data);
    }

    /// Whether no block has recorded yet that the last sync made records durable.
    pub fn is_untold(&self) -> bool {
        self.told < self.synced.min(self.recorded)
    }

    /// Whether there is so much new data that a replay would look at it for long.
    pub fn want_sync(&self) -> bool {
        self.new_data - self.synced_data >= SYNC_AFTER
    }

    /// Notes that a checkpoint on the medium has all blocks below `from`.
    pub fn left_behind(&mut self, from: u64) {
        self.from = from;
        self.failed = self.failed.split_off(&from);
        self.unsettled = self.unsettled.filter(|unsettled| from < *unsettled);
        self.synced = self.synced.max(from);
        // Replay begins there.
        self.told = self.told.max(from);
    }

    /// Notes that a checkpoint has failed which begins at `from`, and has a change of volumes that no record says. No block
    /// gets a number before it is on the medium: its records could be of what the older checkpoint lacks.
    pub fn unsettled(&mut self, from: u64) {
        self.unsettled = Some(from);
    }

    /// Whether a block has failed that a replay may find.
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Whether a checkpoint is wanted: half of the journal is used, or a write or a checkpoint with a change of volumes has
    /// failed.
    pub fn want_checkpoint(&self) -> bool {
        let has_failed = self.has_failed() || self.unsettled.is_some();
        self.next - self.from >= self.length / 2 || has_failed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_block_is_given_that_a_replay_would_need() {
        let mut numbers = Numbers::new(5, 16);
        let given: Vec<u64> = std::iter::from_fn(|| numbers.begin()).map(|(n, _)| n).collect();
        assert_eq!(given, (5..21).collect::<Vec<_>>());
        numbers.left_behind(6);
        assert_eq!(numbers.begin(), Some((21, 6)));
        assert_eq!(numbers.begin(), None);
    }

    #[test]
    fn while_no_block_ends_well_the_next_ones_need_a_checkpoint() {
        let mut numbers = Numbers::new(5, 1 << 16);
        let fill = |numbers: &mut Numbers| std::iter::from_fn(|| numbers.begin()).count() as u64;
        assert_eq!(fill(&mut numbers), AHEAD);
        numbers.end(5 + 9, true);
        numbers.end(5 + 10, false);
        assert_eq!(fill(&mut numbers), 10);
        numbers.left_behind(5 + 12);
        assert_eq!(fill(&mut numbers), 2);
    }

    #[test]
    fn behind_a_failed_change_without_a_record_no_block_is_given_before_its_checkpoint() {
        let mut numbers = Numbers::new(5, 1 << 16);
        assert_eq!(numbers.begin(), Some((5, 5)));
        numbers.end(5, true);
        assert!(!numbers.want_checkpoint());
        numbers.unsettled(6);
        assert!(numbers.want_checkpoint());
        assert_eq!(
            (numbers.begin(), numbers.begin_empty(), numbers.begin_operation()),
            (None, None, None)
        );
        // Of an earlier one.
        numbers.left_behind(5);
        assert_eq!(numbers.begin(), None);
        numbers.left_behind(6);
        assert_eq!(numbers.begin(), Some((6, 6)));
    }

    #[test]
    fn a_sync_vouches_for_what_had_ended_before_it_began() {
        let mut numbers = Numbers::new(0, 100);
        for _ in 0..4 {
            numbers.begin();
        }
        numbers.end(0, true);
        numbers.end(2, true);
        let (older, before) = (Numbers::new(0, 100).before_sync(), numbers.before_sync());
        numbers.end(1, true);
        assert!(!numbers.is_untold());
        numbers.synced(before);
        assert!(numbers.is_untold());
        assert_eq!(numbers.begin(), Some((4, 1)));
        assert!(!numbers.is_untold());
        numbers.synced(older);
        assert_eq!(numbers.begin(), Some((5, 1)), "an older sync says nothing new");
        numbers.end(3, true);
        numbers.end(4, true);
        assert_eq!(numbers.before_sync().below, 5);
    }

    #[test]
    fn no_sync_vouches_for_a_block_that_has_failed_until_a_checkpoint_leaves_it_behind() {
        let mut numbers = Numbers::new(0, 100);
        for number in 0..4 {
            numbers.begin();
            numbers.end(number, number != 1);
        }
        assert!(numbers.want_checkpoint());
        assert_eq!(numbers.before_sync().below, 1);
        numbers.left_behind(1);
        assert_eq!(numbers.before_sync().below, 1);
        numbers.left_behind(2);
        assert_eq!(numbers.before_sync().below, 4);
        assert!(!numbers.want_checkpoint());
    }

    #[test]
    fn behind_an_operation_that_has_failed_and_between_it_and_a_failed_write_is_a_checkpoint() {
        let mut numbers = Numbers::new(0, 100);
        assert_eq!(numbers.begin(), Some((0, 0)));
        numbers.end(0, false);
        assert_eq!(numbers.begin_operation(), None);
        assert_eq!(numbers.begin(), Some((1, 0)), "writes go on behind writes that have failed");
        numbers.end(1, true);
        numbers.left_behind(2);
        assert_eq!(numbers.begin_operation(), Some((2, 2)));
        numbers.end(2, false);
        numbers.left_behind(2);
        assert_eq!(numbers.begin(), None, "that checkpoint was older");
        assert_eq!(numbers.begin_operation(), None);
        numbers.left_behind(3);
        assert_eq!(numbers.begin_operation(), Some((3, 3)));
        numbers.end(3, true);
        assert_eq!(numbers.begin(), Some((4, 3)));
    }

    #[test]
    fn a_checkpoint_is_wanted_when_half_of_the_journal_is_used() {
        let mut numbers = Numbers::new(0, 16);
        for _ in 0..7 {
            numbers.begin();
        }
        assert!(!numbers.want_checkpoint());
        numbers.begin();
        assert!(numbers.want_checkpoint());
    }

    #[test]
    fn a_sync_is_wanted_for_so_much_new_data_and_covers_what_there_was_when_it_began() {
        let mut numbers = Numbers::new(0, 100);
        numbers.new_data(SYNC_AFTER - 1);
        assert!(!numbers.want_sync());
        numbers.new_data(2);
        assert!(numbers.want_sync());
        let before = numbers.before_sync();
        numbers.new_data(SYNC_AFTER - 1);
        numbers.synced(before);
        assert!(!numbers.want_sync());
        numbers.new_data(1);
        assert!(numbers.want_sync());
    }
}
