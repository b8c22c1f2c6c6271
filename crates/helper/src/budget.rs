//! Requests and memory of all connections together.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Requests under way, at most.
const MAX_REQUESTS: usize = 128;
/// Bytes of their data. A medium may have as many again.
const MAX_BYTES: usize = 16 << 20;

/// The requests and bytes that are taken.
#[derive(Debug, Default)]
pub struct Budget {
    taken: Mutex<(usize, usize)>,
    given_back: Condvar,
}

/// A request's part, which is given back when this is dropped.
#[derive(Debug)]
pub struct Permit {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Budget {
    /// Waits for room for a request with so many bytes, which are no more than the longest request's.
    pub fn take(self: &Arc<Budget>, bytes: usize) -> Permit {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while taken.0 >= MAX_REQUESTS || taken.1 + bytes > MAX_BYTES {
            taken = self.given_back.wait(taken).unwrap_or_else(PoisonError::into_inner);
        }
        *taken = (taken.0 + 1, taken.1 + bytes);
        Permit { budget: self.clone(), bytes }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut taken = self.budget.taken.lock().unwrap_or_else(PoisonError::into_inner);
        *taken = (taken.0 - 1, taken.1 - self.bytes);
        drop(taken);
        // Those who wait need different amounts.
        self.budget.given_back.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_is_there_again_and_no_more_is_given() {
        let budget = Arc::new(Budget::default());
        let all: Vec<Permit> = (0..4).map(|_| budget.take(MAX_BYTES / 4)).collect();
        let waits = {
            let budget = budget.clone();
            std::thread::spawn(move || drop(budget.take(1)))
        };
        assert_eq!(*budget.taken.lock().unwrap(), (4, MAX_BYTES));
        drop(all);
        waits.join().unwrap();
        assert_eq!(*budget.taken.lock().unwrap(), (0, 0));
        let all: Vec<Permit> = (0..MAX_REQUESTS).map(|_| budget.take(0)).collect();
        assert_eq!(budget.taken.lock().unwrap().0, all.len());
    }
}
