//! One request alone on the whole disk.
//!
//! A barrier has to wait for every queue's writes and hold back their next ones (blkif.md 2,
//! rule 9), and so has a write that is smaller than the medium's block: it reads the block,
//! changes a part and writes it back, and must not undo a neighbour's write in between. Both are
//! rare, so the simplest exclusion serves: stop everything, do it, go on.
//!
//! Every queue says whether it has work under way; whoever closed the gate waits until no other
//! has. Store-then-load on both sides with SeqCst (Dekker): either the queue sees the gate
//! closed, or the closer sees the queue busy.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Nobody holds the gate.
const OPEN: u32 = 0;

const IDLE: u32 = 0;
const BUSY: u32 = 1;

/// The atomic operations that a [`Gate`] is made of, all sequentially consistent, so that a scheduler
/// that tries interleavings can stand in for the processor's.
pub trait Word {
    /// One that holds `value`.
    fn holding(value: u32) -> Self;
    /// What it holds.
    fn load(&self) -> u32;
    /// Lets it hold `value`.
    fn store(&self, value: u32);
    /// Lets it hold `value`, and gives what it held.
    fn swap(&self, value: u32) -> u32;
    /// Lets it hold `new` if it holds `old`; what else it holds is the error.
    fn replace(&self, old: u32, new: u32) -> Result<u32, u32>;
}

impl Word for AtomicU32 {
    fn holding(value: u32) -> Self {
        AtomicU32::new(value)
    }
    fn load(&self) -> u32 {
        self.load(SeqCst)
    }
    fn store(&self, value: u32) {
        self.store(value, SeqCst);
    }
    fn swap(&self, value: u32) -> u32 {
        self.swap(value, SeqCst)
    }
    fn replace(&self, old: u32, new: u32) -> Result<u32, u32> {
        self.compare_exchange(old, new, SeqCst, SeqCst)
    }
}

/// Whether a queue is busy, alone on its cache line: it is stored to at every start and end of a
/// burst.
#[repr(align(128))]
struct Busy<W>(W);

/// The gate of one connected disk.
pub struct Gate<W = AtomicU32> {
    /// [`OPEN`], or the index of the queue that closed it plus one.
    holder: W,
    busy: Box<[Busy<W>]>,
}

impl<W: Word> Gate<W> {
    /// An open gate for so many idle queues.
    pub fn new(queues: usize) -> Self {
        let busy = (0..queues).map(|_| Busy(W::holding(IDLE))).collect();
        Gate { holder: W::holding(OPEN), busy }
    }

    /// Says that `queue` is about to take requests. `false`: another queue holds the gate, and
    /// `queue` must not; it will be woken when the gate opens.
    pub fn enter(&self, queue: usize) -> bool {
        self.busy[queue].0.store(BUSY);
        let holder = self.holder.load();
        holder == OPEN || holder == queue as u32 + 1
    }

    /// Says that nothing of `queue` is under way. `Some(holder)`: that queue may be waiting for
    /// just this and has to be woken.
    pub fn leave(&self, queue: usize) -> Option<usize> {
        self.busy[queue].0.store(IDLE);
        match self.holder.load() {
            OPEN => None,
            holder => Some(holder as usize - 1).filter(|&h| h != queue),
        }
    }

    /// Tries to take the gate for `queue`; also `true` if it has it already.
    pub fn close(&self, queue: usize) -> bool {
        let me = queue as u32 + 1;
        match self.holder.replace(OPEN, me) {
            Ok(_) => true,
            Err(holder) => holder == me,
        }
    }

    /// Whether every queue but `queue` is idle; with the gate closed it stays so.
    pub fn others_idle(&self, queue: usize) -> bool {
        self.busy.iter().enumerate().all(|(i, b)| i == queue || b.0.load() == IDLE)
    }

    /// Opens the gate that `queue` holds. All other queues have to be woken.
    ///
    /// # Panics
    /// If another holds it: a bug of ours.
    pub fn open(&self, queue: usize) {
        let me = queue as u32 + 1;
        assert_eq!(self.holder.swap(OPEN), me, "the gate is opened by who closed it");
    }

    /// Nothing of `queue` is under way any more, nor will be: the gate opens if it holds it. All
    /// other queues have to be woken.
    pub fn forfeit(&self, queue: usize) {
        self.busy[queue].0.store(IDLE);
        let _ = self.holder.replace(queue as u32 + 1, OPEN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_gate_keeps_others_out_and_its_holder_in() {
        let gate: Gate = Gate::new(2);
        assert!(gate.enter(0) && gate.enter(1));
        assert!(gate.close(0));
        assert!(!gate.close(1) && gate.close(0));
        assert!(!gate.others_idle(0));
        assert_eq!(gate.leave(1), Some(0), "the holder waits for this");
        assert!(gate.others_idle(0));
        assert!(!gate.enter(1));
        gate.leave(1);
        gate.open(0);
        assert!(gate.enter(1));
    }

    #[test]
    fn a_queue_that_is_gone_neither_holds_the_gate_nor_is_waited_for() {
        let gate: Gate = Gate::new(2);
        assert!(gate.enter(0) && gate.enter(1) && gate.close(1));
        gate.forfeit(0);
        assert!(gate.others_idle(1) && gate.close(1));
        gate.forfeit(1);
        assert!(gate.enter(0));
    }
}

#[cfg(test)]
mod shuttle_tests {
    use std::sync::Arc;

    use shuttle::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use shuttle::sync::{Condvar, Mutex};
    use shuttle::thread;

    use super::Word;

    type Gate = super::Gate<AtomicU32>;

    impl Word for AtomicU32 {
        fn holding(value: u32) -> Self {
            AtomicU32::new(value)
        }
        fn load(&self) -> u32 {
            self.load(SeqCst)
        }
        fn store(&self, value: u32) {
            self.store(value, SeqCst);
        }
        fn swap(&self, value: u32) -> u32 {
            self.swap(value, SeqCst)
        }
        fn replace(&self, old: u32, new: u32) -> Result<u32, u32> {
            self.compare_exchange(old, new, SeqCst, SeqCst)
        }
    }

    /// Three queues, each now working, now alone: nobody ever works beside one that is alone.
    #[test]
    fn no_queue_works_beside_the_one_that_is_alone() {
        shuttle::check_random(
            || {
                let gate = Arc::new(Gate::new(3));
                let working = Arc::new(AtomicU32::new(0));
                let threads: Vec<_> = (0..3)
                    .map(|me| {
                        let (gate, working) = (gate.clone(), working.clone());
                        thread::spawn(move || {
                            for round in 0..3 {
                                if (round + me) % 2 == 0 {
                                    while !gate.enter(me) {
                                        gate.leave(me);
                                        thread::yield_now();
                                    }
                                    working.fetch_add(1, SeqCst);
                                    thread::yield_now();
                                    working.fetch_sub(1, SeqCst);
                                    gate.leave(me);
                                } else if gate.close(me) {
                                    while !gate.others_idle(me) {
                                        thread::yield_now();
                                    }
                                    assert_eq!(working.load(SeqCst), 0);
                                    thread::yield_now();
                                    assert_eq!(working.load(SeqCst), 0);
                                    gate.open(me);
                                }
                            }
                        })
                    })
                    .collect();
                for t in threads {
                    t.join().unwrap();
                }
            },
            2000,
        );
    }

    /// A queue's thread asleep, and what wakes it.
    #[derive(Default)]
    struct Bell(Mutex<bool>, Condvar);

    impl Bell {
        fn ring(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_one();
        }

        fn wait(&self) {
            let mut rung = self.0.lock().unwrap();
            while !*rung {
                rung = self.1.wait(rung).unwrap();
            }
            *rung = false;
        }
    }

    /// Works once, as a queue does: what cannot be taken now waits until it is woken.
    fn work(gate: &Gate, bells: &[Bell], me: usize, working: &AtomicU32) {
        while !gate.enter(me) {
            gate.leave(me).into_iter().for_each(|holder| bells[holder].ring());
            bells[me].wait();
        }
        working.fetch_add(1, SeqCst);
        thread::yield_now();
        working.fetch_sub(1, SeqCst);
        gate.leave(me).into_iter().for_each(|holder| bells[holder].ring());
    }

    /// Is alone once.
    fn be_alone(gate: &Gate, bells: &[Bell], me: usize, working: &AtomicU32) {
        loop {
            if !gate.close(me) {
                gate.leave(me).into_iter().for_each(|holder| bells[holder].ring());
            } else if gate.others_idle(me) {
                break;
            }
            bells[me].wait();
        }
        assert_eq!(working.load(SeqCst), 0);
        thread::yield_now();
        assert_eq!(working.load(SeqCst), 0);
        gate.open(me);
        bells.iter().for_each(Bell::ring);
    }

    /// The same with sleep in place of spinning: a wake-up that got lost would be a deadlock,
    /// which the scheduler reports.
    #[test]
    fn nobody_sleeps_for_ever() {
        let body = || {
            let gate = Arc::new(Gate::new(3));
            let bells: Arc<[Bell; 3]> = Arc::default();
            let working = Arc::new(AtomicU32::new(0));
            let threads: Vec<_> = (0..3)
                .map(|me| {
                    let (gate, bells, working) = (gate.clone(), bells.clone(), working.clone());
                    thread::spawn(move || {
                        for round in 0..3 {
                            match (round + me) % 2 {
                                0 => work(&gate, &*bells, me, &working),
                                _ => be_alone(&gate, &*bells, me, &working),
                            }
                        }
                    })
                })
                .collect();
            threads.into_iter().for_each(|t| t.join().unwrap());
        };
        shuttle::check_random(body, 5000);
        shuttle::check_pct(body, 2000, 3);
    }
}
