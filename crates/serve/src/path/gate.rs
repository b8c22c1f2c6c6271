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
//!
//! Two guests on one disk (attachments.md, "A stub domain and its guest") are two sides, and the disk
//! is one side's at a time: the other's requests wait until all of this side's are answered. So a dead
//! process leaves requests of one side only, and to do them again undoes no answered write of the other.
//! Who finds the turn the other side's says that it wants it, and takes it if nobody is busy there. Then
//! that side takes nothing more, and its last path to leave hands over. Dekker again: it sees the wish,
//! or who wishes sees it idle.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Nobody holds the gate.
const OPEN: u32 = 0;
/// Beside the holder: all are to rest.
const PARK: u32 = 1 << 31;

/// In the word of turns: whose it is. Above that is a number of the turn, which nobody has for long.
const SIDE: u32 = 1;
const NUMBER: u32 = 1 << 1;
/// And: the other side wants it.
const WANTED: u32 = 1 << 30;
/// And: it stays with this side, whoever wants it.
const KEPT: u32 = 1 << 31;

/// A guest, of the two that a disk may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Side {
    /// Of the one that the disk is attached to, and of all clients that are no guests.
    #[default]
    First = 0,
    /// Of its stub domain.
    Second = 1,
}

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
    /// Nothing is under way, and requests that were taken wait to be alone, or for space.
    Waiting = 4,
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
struct Seat<W> {
    sitting: W,
    /// Whose it is.
    side: W,
}

/// The gate of one device.
pub struct Gate<W = AtomicU32> {
    /// [`OPEN`], or the seat that closed it plus one; perhaps [`PARK`].
    holder: W,
    /// The [`Side`] that may take requests, the number of its turn; perhaps [`WANTED`] or [`KEPT`].
    turn: W,
    seats: Box<[Seat<W>]>,
}

/// The word of the next turn, of the other side.
fn next_turn(word: u32) -> u32 {
    ((word & !WANTED).wrapping_add(NUMBER) & !(WANTED | KEPT)) ^ SIDE
}

/// Whom a path that has nothing under way any more has to wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The seat that has closed the gate.
    pub holder: Option<usize>,
    /// Whoever parks the device.
    pub parker: bool,
    /// All of the other side, which may take requests now.
    pub side: bool,
}

impl<W: Word> Gate<W> {
    /// An open gate with so many empty seats.
    pub fn new(seats: usize) -> Self {
        let [nobody, side] = [Sitting::Nobody as u32, Side::First as u32];
        let seat = || Seat { sitting: W::holding(nobody), side: W::holding(side) };
        let seats = (0..seats).map(|_| seat()).collect();
        Gate { holder: W::holding(OPEN), turn: W::holding(side), seats }
    }

    fn sit(&self, seat: usize, sitting: Sitting) {
        self.seats[seat].sitting.store(sitting as u32);
    }

    fn sits(&self, seat: usize, sitting: Sitting) -> bool {
        self.seats[seat].sitting.load() == sitting as u32
    }

    /// An idle path takes the first empty seat; `None` if there is none. By one thread at a time.
    pub fn join(&self, side: Side) -> Option<usize> {
        let seat = (0..self.seats.len()).find(|&seat| self.sits(seat, Sitting::Nobody))?;
        self.seats[seat].side.store(side as u32);
        self.sit(seat, Sitting::Idle);
        Some(seat)
    }

    /// Says that the path is about to take requests. `false`: another holds the gate, all are to rest, or
    /// it is the other side's turn, and it must not; it will be woken when that ends.
    pub fn enter(&self, seat: usize) -> bool {
        self.sit(seat, Sitting::Busy);
        let holder = self.holder.load();
        (holder == OPEN || holder == seat as u32 + 1) && self.has_turn(seat)
    }

    /// As [`enter`](Self::enter), for requests that the path took before: its side keeps the turn until
    /// they are answered, whoever wants it.
    pub fn go_on(&self, seat: usize) -> bool {
        let side = self.seats[seat].side.load();
        self.sit(seat, Sitting::Busy);
        let word = self.holder.load();
        (word == OPEN || word == seat as u32 + 1) && self.turn.load() & SIDE == side
    }

    /// Whether it is the turn of this seat's side. It is wished for, if not.
    fn has_turn(&self, seat: usize) -> bool {
        let side = self.seats[seat].side.load();
        loop {
            let word = self.turn.load();
            if word & SIDE == side {
                return word & WANTED == 0;
            }
            if word & KEPT != 0 {
                return false;
            }
            if word & WANTED == 0 && self.turn.replace(word, word | WANTED).is_err() {
                continue;
            }
            // Who is busy hands over.
            if self.is_busy(1 - side) {
                return false;
            }
            if self.turn.replace(word | WANTED, next_turn(word)).is_ok() {
                return true;
            }
        }
    }

    /// Whether somebody of this side has requests that are not answered, or looks whether it may. Who
    /// rests may have some that wait for space.
    fn is_busy(&self, side: u32) -> bool {
        let busy = [Sitting::Busy, Sitting::Waiting, Sitting::Resting].map(|busy| busy as u32);
        let is_busy =
            |seat: &Seat<W>| busy.contains(&seat.sitting.load()) && seat.side.load() == side;
        self.seats.iter().any(is_busy)
    }

    /// Gives the turn to the other side, if that wants it and nobody of this one is busy.
    fn hand_over(&self, side: u32) -> bool {
        let word = self.turn.load();
        word & (SIDE | WANTED) == side | WANTED
            && !self.is_busy(side)
            && self.turn.replace(word, next_turn(word)).is_ok()
    }

    /// After [`enter`](Self::enter) was refused, of a path that is idle: sees to it that it is woken when
    /// it may try again. `true`: all have to be woken now, itself included.
    pub fn wish(&self, seat: usize) -> bool {
        if self.holder.load() != OPEN {
            return false;
        }
        let side = self.seats[seat].side.load();
        loop {
            let word = self.turn.load();
            let has_turn = word & SIDE == side;
            if word & KEPT != 0 {
                return has_turn;
            }
            if has_turn {
                // Who is busy hands over. Without a wish of the others, it is free already.
                return word & WANTED == 0 || self.hand_over(side) || !self.is_busy(side);
            }
            if word & WANTED == 0 && self.turn.replace(word, word | WANTED).is_err() {
                continue;
            }
            return !self.is_busy(1 - side);
        }
    }

    /// Whether a path of this seat may take requests without anybody's leave, if the gate is open.
    pub fn is_at_home(&self, seat: usize) -> bool {
        self.turn.load() & (SIDE | WANTED) == self.seats[seat].side.load()
    }

    /// It is this side's turn until that is [shared](Self::share). Before any path is there.
    pub fn keep_for(&self, side: Side) {
        self.turn.store(side as u32 | KEPT);
    }

    /// Whether the turn is kept for this side.
    pub fn is_kept_for(&self, side: Side) -> bool {
        self.turn.load() == side as u32 | KEPT
    }

    /// What was kept for this side goes from side to side again; all paths have to be woken.
    pub fn share(&self, side: Side) -> bool {
        self.turn.replace(side as u32 | KEPT, side as u32).is_ok()
    }

    /// Says that nothing of the path is under way; perhaps something `waits` to be alone, or for space. Some:
    /// who may be waiting for just this.
    pub fn leave(&self, seat: usize, waits: bool) -> Option<Wanted> {
        let sitting = if waits { Sitting::Waiting } else { Sitting::Idle };
        let was_busy = self.seats[seat].sitting.swap(sitting as u32) == Sitting::Busy as u32;
        let side = self.seats[seat].side.load();
        // The other side may have taken its turn just now. Who of this one relied on us is to wish for it.
        let side =
            self.hand_over(side) || was_busy && self.turn.load() & (SIDE | WANTED) == 1 - side;
        match self.holder.load() {
            OPEN => side.then_some(Wanted { holder: None, parker: false, side }),
            word => {
                let holder = (word & !PARK).checked_sub(1).map(|holder| holder as usize);
                let holder = holder.filter(|&holder| holder != seat);
                Some(Wanted { holder, parker: word & PARK != 0, side })
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
        assert_eq!([gate.join(Side::First), gate.join(Side::First)], [Some(0), Some(1)]);
        gate
    }

    #[test]
    fn a_closed_gate_keeps_others_out_and_its_holder_in() {
        let gate = gate();
        assert!(gate.enter(0) && gate.enter(1));
        assert!(gate.close(0));
        assert!(!gate.close(1) && gate.close(0));
        assert!(!gate.others_idle(0));
        let wanted = Wanted { holder: Some(0), parker: false, side: false };
        assert_eq!(gate.leave(1, false), Some(wanted), "the holder waits for this");
        assert!(gate.others_idle(0));
        assert!(!gate.enter(1));
        gate.leave(1, false);
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
        assert_eq!(gate.join(Side::First), Some(1), "its seat is the next one's");
    }

    #[test]
    fn who_is_to_rest_takes_nothing_and_still_gets_the_gate_for_what_it_has_taken() {
        let gate = gate();
        assert!(gate.enter(0) && gate.enter(1));
        assert!(gate.park() && !gate.park());
        assert!(!gate.enter(0) && !gate.all_rest());
        let wanted = Wanted { holder: None, parker: true, side: false };
        assert_eq!(gate.leave(0, false), Some(wanted));
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
mod side_tests;

#[cfg(test)]
mod shuttle_tests;
