//! One request alone on the whole disk.
//!
//! A barrier has to wait for every queue's writes and hold back their next ones (blkif.md 2,
//! rule 9), and so has a write that is smaller than the medium's block: it reads the block,
//! changes a part and writes it back, and must not undo a neighbour's write in between. Both are
//! rare, so the simplest exclusion serves: stop everything, do it, go on.
//!
//! Every path has a seat, and says in it whether it has work under way; whoever closed the gate
//! waits until no other has. Store-then-load on both sides with SeqCst (Dekker): either the path
//! sees the gate closed, or the closer sees the path busy.
//!
//! Parking (`parking.rs`) uses the same word: with `PARK` in it nobody takes requests. Requests
//! that were taken end first, and those that wait to be alone still get the gate one by one.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Nobody holds the gate.
const OPEN: u32 = 0;
/// Beside the holder: all are to rest.
const PARK: u32 = 1 << 31;

/// What a path says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Sitting {
    /// There is none.
    Nobody = 0,
    /// Nothing is under way.
    Idle = 1,
    Busy = 2,
    /// It is parked: it has no file of the disk's.
    Resting = 3,
}

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

/// A path's [`Sitting`], alone on its cache line: it is stored to at every start and end of a burst.
#[repr(align(128))]
struct Seat<W>(W);

/// The gate of one device.
pub struct Gate<W = AtomicU32> {
    /// [`OPEN`], or the seat that closed it plus one; perhaps [`PARK`].
    holder: W,
    seats: Box<[Seat<W>]>,
}

/// Whom a path that has nothing under way any more has to wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The seat that has closed the gate.
    pub holder: Option<usize>,
    /// Whoever parks the device.
    pub parker: bool,
}

impl<W: Word> Gate<W> {
    /// An open gate with so many empty seats.
    pub fn new(seats: usize) -> Self {
        let seat = || Seat(W::holding(Sitting::Nobody as u32));
        Gate { holder: W::holding(OPEN), seats: (0..seats).map(|_| seat()).collect() }
    }

    fn sit(&self, seat: usize, sitting: Sitting) {
        self.seats[seat].0.store(sitting as u32);
    }

    fn sits(&self, seat: usize, sitting: Sitting) -> bool {
        self.seats[seat].0.load() == sitting as u32
    }

    /// An idle path takes the first empty seat; `None` if there is none. By one thread at a time.
    pub fn join(&self) -> Option<usize> {
        let seat = (0..self.seats.len()).find(|&seat| self.sits(seat, Sitting::Nobody))?;
        self.sit(seat, Sitting::Idle);
        Some(seat)
    }

    /// Says that the path is about to take requests. `false`: another holds the gate, or all are to
    /// rest, and it must not; it will be woken when that ends.
    pub fn enter(&self, seat: usize) -> bool {
        self.sit(seat, Sitting::Busy);
        let holder = self.holder.load();
        holder == OPEN || holder == seat as u32 + 1
    }

    /// Says that nothing of the path is under way. Some: who may be waiting for just this.
    pub fn leave(&self, seat: usize) -> Option<Wanted> {
        self.sit(seat, Sitting::Idle);
        match self.holder.load() {
            OPEN => None,
            word => {
                let holder = (word & !PARK).checked_sub(1).map(|holder| holder as usize);
                let holder = holder.filter(|&holder| holder != seat);
                Some(Wanted { holder, parker: word & PARK != 0 })
            }
        }
    }

    /// Changes the word as long as `change` says what it becomes. `true`: it was changed.
    fn change(&self, change: impl Fn(u32) -> Option<u32>) -> bool {
        let mut word = self.holder.load();
        while let Some(next) = change(word) {
            match self.holder.replace(word, next) {
                Ok(_) => return true,
                Err(other) => word = other,
            }
        }
        false
    }

    /// Tries to take the gate; also `true` if the path has it already.
    pub fn close(&self, seat: usize) -> bool {
        let me = seat as u32 + 1;
        self.change(|word| (word & !PARK == OPEN).then_some(word | me))
            || self.holder.load() & !PARK == me
    }

    /// Whether every other path is idle; with the gate closed it stays so.
    pub fn others_idle(&self, seat: usize) -> bool {
        (0..self.seats.len()).all(|other| other == seat || !self.sits(other, Sitting::Busy))
    }

    /// Opens the gate that the path holds. All others have to be woken.
    ///
    /// # Panics
    /// If another holds it: a bug of ours.
    pub fn open(&self, seat: usize) {
        let me = seat as u32 + 1;
        let opened = self.change(|word| (word & !PARK == me).then_some(word & PARK));
        assert!(opened, "the gate is opened by who closed it");
    }

    /// Nothing of the path is under way any more, nor will be: its seat is empty, and the gate opens
    /// if it holds it. All others have to be woken.
    pub fn forfeit(&self, seat: usize) {
        self.sit(seat, Sitting::Nobody);
        let me = seat as u32 + 1;
        self.change(|word| (word & !PARK == me).then_some(word & PARK));
    }

    /// Asks all paths to rest, which have to be woken; `false` if they were asked already.
    pub fn park(&self) -> bool {
        self.change(|word| (word & PARK == 0).then_some(word | PARK))
    }

    /// The opposite; the paths have to be woken.
    pub fn unpark(&self) {
        self.change(|word| (word & PARK != 0).then_some(word & !PARK));
    }

    /// Whether all are asked to rest.
    pub fn is_parking(&self) -> bool {
        self.holder.load() & PARK != 0
    }

    /// The path rests.
    pub fn rest(&self, seat: usize) {
        self.sit(seat, Sitting::Resting);
    }

    /// Whether all that there are rest.
    pub fn all_rest(&self) -> bool {
        let rests = |seat| self.sits(seat, Sitting::Resting) || self.sits(seat, Sitting::Nobody);
        (0..self.seats.len()).all(rests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate() -> Gate {
        let gate = Gate::new(3);
        assert_eq!([gate.join(), gate.join()], [Some(0), Some(1)]);
        gate
    }

    #[test]
    fn a_closed_gate_keeps_others_out_and_its_holder_in() {
        let gate = gate();
        assert!(gate.enter(0) && gate.enter(1));
        assert!(gate.close(0));
        assert!(!gate.close(1) && gate.close(0));
        assert!(!gate.others_idle(0));
        let wanted = Wanted { holder: Some(0), parker: false };
        assert_eq!(gate.leave(1), Some(wanted), "the holder waits for this");
        assert!(gate.others_idle(0));
        assert!(!gate.enter(1));
        gate.leave(1);
        gate.open(0);
        assert!(gate.enter(1));
    }

    #[test]
    fn a_queue_that_is_gone_neither_holds_the_gate_nor_is_waited_for() {
        let gate = gate();
        assert!(gate.enter(0) && gate.enter(1) && gate.close(1));
        gate.forfeit(0);
        assert!(gate.others_idle(1) && gate.close(1));
        gate.forfeit(1);
        assert!(gate.enter(0));
        assert_eq!(gate.join(), Some(1), "its seat is the next one's");
    }

    #[test]
    fn who_is_to_rest_takes_nothing_and_still_gets_the_gate_for_what_it_has_taken() {
        let gate = gate();
        assert!(gate.enter(0) && gate.enter(1));
        assert!(gate.park() && !gate.park());
        assert!(!gate.enter(0) && !gate.all_rest());
        let wanted = Wanted { holder: None, parker: true };
        assert_eq!(gate.leave(0), Some(wanted));
        assert!(gate.close(1) && !gate.close(0));
        assert!(gate.others_idle(1));
        gate.open(1);
        gate.rest(0);
        assert!(!gate.all_rest());
        gate.rest(1);
        assert!(gate.all_rest() && gate.is_parking());
        gate.unpark();
        assert!(gate.enter(0) && gate.enter(1) && !gate.all_rest());
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
                (0..3).for_each(|seat| assert_eq!(gate.join(), Some(seat)));
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
            gate.leave(me)
                .and_then(|w| w.holder)
                .into_iter()
                .for_each(|holder| bells[holder].ring());
            bells[me].wait();
        }
        working.fetch_add(1, SeqCst);
        thread::yield_now();
        working.fetch_sub(1, SeqCst);
        gate.leave(me).and_then(|w| w.holder).into_iter().for_each(|holder| bells[holder].ring());
    }

    /// Is alone once.
    fn be_alone(gate: &Gate, bells: &[Bell], me: usize, working: &AtomicU32) {
        loop {
            if !gate.close(me) {
                gate.leave(me)
                    .and_then(|w| w.holder)
                    .into_iter()
                    .for_each(|holder| bells[holder].ring());
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
            (0..3).for_each(|seat| assert_eq!(gate.join(), Some(seat)));
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
