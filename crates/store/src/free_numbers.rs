//! Which numbers of contents can be given (store.md 7 and 11).
//!
//! A pass counts the free numbers of each page of P2M. Before the first pass each page may have some. A page is opened
//! once after each pass: then its numbers with empty entries can be given. So no write may have a number of such a page
//! whose entry it has not stored yet. Pages of which numbers were given during a pass are left to the next pass.

use std::collections::BTreeSet;

use super::page::P2M_ENTRIES;

/// See the module text.
#[derive(Debug, Default)]
pub struct FreeNumbers {
    /// By page: how many free numbers the last pass has found. Before the first pass: 1.
    pages: Vec<u8>,
    /// A pass has counted them.
    are_known: bool,
    /// The most free numbers that a page may have.
    most: u8,
    /// The pages before this one have fewer. So the next page to open is found without a look at all pages.
    first: usize,
    /// Numbers of opened pages that can be given. Those of the last page are last.
    open: Vec<u64>,
    /// Pages that were open since the pass began to count.
    recent: BTreeSet<u64>,
}

/// The page of P2M that has a number.
pub fn page_of(number: u64) -> u64 {
    number / P2M_ENTRIES as u64
}

impl FreeNumbers {
    /// The free numbers of a store that was just opened. All numbers ever given are below `numbers_end`, and a checkpoint
    /// has all empty entries.
    pub fn opened(numbers_end: u64) -> FreeNumbers {
        let pages = vec![1; page_of(numbers_end) as usize];
        FreeNumbers { pages, most: 1, ..FreeNumbers::default() }
    }

    /// How many numbers can be given without another page.
    pub fn ready(&self) -> u64 {
        self.open.len() as u64
    }

    /// Gives the lowest number of the last opened page.
    pub fn give(&mut self) -> Option<u64> {
        self.open.pop()
    }

    /// Whether a pass has counted the free numbers.
    pub fn are_known(&self) -> bool {
        self.are_known
    }

    /// The page to [open](FreeNumbers::open) next: the first of those with the most free numbers.
    pub fn next_page(&mut self) -> Option<u64> {
        while self.most > 0 {
            // Between two passes counts only ever become zero.
            let left = self.pages.get(self.first..).unwrap_or_default();
            if let Some(at) = left.iter().position(|count| *count == self.most) {
                self.first += at;
                return Some(self.first as u64);
            }
            (self.most, self.first) = (self.most - 1, 0);
        }
        None
    }

    /// Opens a page with these numbers, whose entries are empty in a checkpoint. A page that was opened before is left
    /// as it is.
    pub fn open(&mut self, page: u64, numbers: impl DoubleEndedIterator<Item = u64>) {
        if self.count(page) > 0 {
            self.open.extend(numbers.rev());
            self.recent.insert(page);
            self.close(page);
        }
    }

    fn count(&self, page: u64) -> u8 {
        self.pages.get(page as usize).copied().unwrap_or(0)
    }

    /// Leaves a page out until the next pass: it has empty entries that no checkpoint has yet, or it cannot be read.
    pub fn close(&mut self, page: u64) {
        if let Some(count) = self.pages.get_mut(page as usize) {
            *count = 0;
        }
    }

    /// Begins to note the open pages for a pass. The pass then waits for two epochs: after that, all numbers given before
    /// this call have their entries.
    pub fn begin(&mut self) {
        self.recent = self.open.iter().map(|number| page_of(*number)).collect();
    }

    /// Takes the counts of a pass. A checkpoint has all the empty entries.
    pub fn end(&mut self, mut pages: Vec<u8>) {
        for page in &self.recent {
            if let Some(count) = pages.get_mut(*page as usize) {
                *count = 0;
            }
        }
        (self.most, self.first) = (pages.iter().max().copied().unwrap_or(0), 0);
        (self.pages, self.are_known) = (pages, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_opened_once_and_the_one_with_the_most_first() {
        let mut free = FreeNumbers::default();
        assert_eq!((free.next_page(), free.give()), (None, None));
        free.begin();
        free.end(vec![2, 0, 7]);
        assert_eq!(free.next_page(), Some(2));
        free.open(2, [520, 530].into_iter());
        free.open(2, [520, 530].into_iter());
        assert_eq!((free.give(), free.give(), free.give()), (Some(520), Some(530), None));
        free.open(2, [520].into_iter());
        assert_eq!(free.give(), None, "a writer may have it");
        assert_eq!(free.next_page(), Some(0));
        free.close(0);
        assert_eq!(free.next_page(), None);
    }

    #[test]
    fn pages_are_opened_in_the_order_of_what_they_have() {
        let mut free = FreeNumbers::default();
        free.end(vec![3, 255, 0, 7, 255, 1, 7]);
        // One that is asked for again is not given away before.
        assert_eq!((free.next_page(), free.next_page()), (Some(1), Some(1)));
        free.close(6);
        let mut order = Vec::new();
        while let Some(page) = free.next_page() {
            order.push(page);
            free.close(page);
        }
        assert_eq!(order, [1, 4, 3, 0, 5]);
        free.end(vec![0, 0, 2]);
        assert_eq!(free.next_page(), Some(2), "another pass has found some");
    }

    #[test]
    fn before_the_first_pass_each_page_may_have_some() {
        let mut free = FreeNumbers::opened(2 * P2M_ENTRIES as u64 + 5);
        assert_eq!((free.next_page(), free.are_known()), (Some(0), false));
        free.open(0, [].into_iter());
        assert_eq!(free.next_page(), Some(1));
        free.open(1, [300].into_iter());
        assert_eq!((free.next_page(), free.give()), (None, Some(300)), "the last one may be given");
        free.end(vec![0; 3]);
        assert!(free.are_known());
    }

    #[test]
    fn several_pages_can_be_open_and_each_was_open_during_the_pass() {
        let mut free = FreeNumbers::default();
        free.end(vec![9, 9, 9]);
        free.open(2, [512, 520].into_iter());
        free.open(0, [5].into_iter());
        free.begin();
        free.end(vec![9, 9, 9]);
        assert_eq!((free.next_page(), free.ready()), (Some(1), 3));
        assert_eq!([free.give(), free.give(), free.give()], [Some(5), Some(512), Some(520)]);
    }

    #[test]
    fn of_a_page_that_was_open_during_a_pass_nothing_is_given_before_the_next_one() {
        let mut free = FreeNumbers::default();
        free.end(vec![9, 9, 9]);
        free.open(1, [256, 257].into_iter());
        free.begin();
        free.give();
        free.give();
        free.open(0, [1].into_iter());
        free.give();
        free.end(vec![9, 9, 9]);
        assert_eq!(free.next_page(), Some(2));
        free.close(2);
        assert_eq!(free.next_page(), None);
        free.begin();
        free.end(vec![9, 9, 9]);
        assert!(free.next_page().is_some());
    }
}
