//! Exclusive use of the whole disk by one request.
//!
//! A barrier has to wait for every queue's writes and hold back their next ones (blkif.md 2, rule
//! 9). So has the first write that is smaller than the medium's block: it reads the block, changes
//! a part and writes it back, and must not undo a neighbour's write in between. Later ones lock the
//! block (`ranges.rs`). Both are rare, so the simplest exclusion serves: stop everything, do it, go
//! on.
//!
//! Every path is a member of the gate, whose state says whether the path has work under way. The
//! path that closes the gate waits until no other path has. Both sides store and then load with SeqCst (Dekker): either
//! the path sees the gate closed, or the closing one sees the path busy.
//!
//! Parking (`parking.rs`) uses the same word: with `PARK` in it no path takes requests. Requests
//! that were taken end first, and those that wait to be alone still get the gate one by one.
//!
//! Two guests on one disk (attachments.md, "A stub domain and its guest") are two sides, and the
//! disk is one side's at a time: the other's requests wait until all of this side's are answered.
//! So a dead process leaves requests of one side only, and repeating them undoes no answered write
//! of the other.
//!
//! A path that finds the turn on the other side marks it as wanted, and takes it if that side is
//! idle. Otherwise that side takes no further requests, and its last busy path hands the turn over.
//! This is Dekker again: the last path sees the mark, or the wanting path sees it idle.

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// The holder's word of an open gate.
const OPEN: u32 = 0;
/// The bit of the holder's word by which all paths are to rest.
const PARK: u32 = 1 << 31;

/// The bit of the turn's word that names the side. A number of the turn is above it, so that no two
/// turns look alike for long.
const SIDE: u32 = 1;
/// The step of the turn's number.
const NUMBER: u32 = 1 << 1;
/// The bit by which the other side wants the turn.
const WANTED: u32 = 1 << 30;
/// The bit by which this side keeps the turn, even if the other side wants it.
const KEPT: u32 = 1 << 31;

/// One of the two guests that a disk may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Side {
    /// The guest that the disk is attached to, and all clients that are not guests.
    #[default]
    First = 0,
    /// The stub domain of that guest.
    Second = 1,
}

/// The activity of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Activity {
    /// The record is free.
    Free = 0,
    /// Nothing is under way.
    Idle = 1,
    Busy = 2,
    /// The path is parked, and has no file of the disk.
    Resting = 3,
    /// Nothing is under way, and requests that were taken wait to be alone or for space.
    Waiting = 4,
}

/// The atomic operations that a [`Gate`] needs, all sequentially consistent. A scheduler that tries
/// interleavings can replace the processor's.
pub trait Word {
    /// Makes a word with this value.
    fn holding(value: u32) -> Self;
    /// Loads the value.
    fn load(&self) -> u32;
    /// Stores a value.
    fn store(&self, value: u32);
    /// Stores a value, and returns the old one.
    fn swap(&self, value: u32) -> u32;
    /// Stores `new` if the value is `old`. The error is the actual value.
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

/// A path's [`Activity`], alone on its cache line: it is stored at the start and end of every burst.
#[repr(align(128))]
struct MemberState<W> {
    activity: W,
    /// The [`Side`] of the path.
    side: W,
}

/// The gate of one device.
pub struct Gate<W = AtomicU32> {
    /// [`OPEN`], or the member that closed the gate plus one; perhaps with [`PARK`].
    holder: W,
    /// The [`Side`] that may take requests, and the number of its turn; perhaps with [`WANTED`] or
    /// [`KEPT`].
    turn: W,
    members: Box<[MemberState<W>]>,
}

/// The turn's word after this one, on the other side.
fn next_turn(word: u32) -> u32 {
    ((word & !WANTED).wrapping_add(NUMBER) & !(WANTED | KEPT)) ^ SIDE
}

/// The paths that have to be woken by a path that has become idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The member that has closed the gate.
    pub holder: Option<usize>,
    /// The parker of the device.
    pub parker: bool,
    /// All paths of the other side, which may take requests now.
    pub side: bool,
}

impl<W: Word> Gate<W> {
    /// An open gate with this number of free members.
    pub fn new(members: usize) -> Self {
        let [free, side] = [Activity::Free as u32, Side::First as u32];
        let member = || MemberState { activity: W::holding(free), side: W::holding(side) };
        let members = (0..members).map(|_| member()).collect();
        Gate { holder: W::holding(OPEN), turn: W::holding(side), members }
    }

    fn set_activity(&self, member: usize, activity: Activity) {
        self.members[member].activity.store(activity as u32);
    }

    fn has_activity(&self, member: usize, activity: Activity) -> bool {
        self.members[member].activity.load() == activity as u32
    }

    /// Takes the first free member for an idle path. `None`: there is none. Only one thread may call
    /// it at a time.
    pub fn join(&self, side: Side) -> Option<usize> {
        let member =
            (0..self.members.len()).find(|&member| self.has_activity(member, Activity::Free))?;
        self.members[member].side.store(side as u32);
        self.set_activity(member, Activity::Idle);
        Some(member)
    }

    /// Marks the path as busy, before it takes requests. `false`: it must not take any. Another
    /// path holds the gate, all are to rest, or it is the other side's turn. The path is woken when
    /// that ends.
    pub fn enter(&self, member: usize) -> bool {
        self.set_activity(member, Activity::Busy);
        let holder = self.holder.load();
        (holder == OPEN || holder == member as u32 + 1) && self.has_turn(member)
    }

    /// As [`enter`](Self::enter), for requests that the path took before: its side keeps the turn
    /// until they are answered.
    pub fn go_on(&self, member: usize) -> bool {
        let side = self.members[member].side.load();
        self.set_activity(member, Activity::Busy);
        let word = self.holder.load();
        (word == OPEN || word == member as u32 + 1) && self.turn.load() & SIDE == side
    }

    /// Whether it is the turn of this member's side. If not, the turn is marked as wanted.
    fn has_turn(&self, member: usize) -> bool {
        let side = self.members[member].side.load();
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
            // A busy path hands the turn over later.
            if self.is_busy(1 - side) {
                return false;
            }
            if self.turn.replace(word | WANTED, next_turn(word)).is_ok() {
                return true;
            }
        }
    }

    /// Whether a path of this side has requests without an answer, or is about to take some. A
    /// resting path may have requests that wait for space.
    fn is_busy(&self, side: u32) -> bool {
        let busy = [Activity::Busy, Activity::Waiting, Activity::Resting].map(|busy| busy as u32);
        let is_busy = |member: &MemberState<W>| {
            busy.contains(&member.activity.load()) && member.side.load() == side
        };
        self.members.iter().any(is_busy)
    }

    /// Gives the turn to the other side, if it wants the turn and this side is idle.
    fn hand_over(&self, side: u32) -> bool {
        let word = self.turn.load();
        word & (SIDE | WANTED) == side | WANTED
            && !self.is_busy(side)
            && self.turn.replace(word, next_turn(word)).is_ok()
    }

    /// Has an idle path woken when it may try again, after [`enter`](Self::enter) was refused.
    /// `true`: all paths have to be woken now, this one included.
    pub fn wish(&self, member: usize) -> bool {
        if self.holder.load() != OPEN {
            return false;
        }
        let side = self.members[member].side.load();
        loop {
            let word = self.turn.load();
            let has_turn = word & SIDE == side;
            if word & KEPT != 0 {
                return has_turn;
            }
            if has_turn {
                // A busy path hands the turn over later. If the other side does not want the turn,
                // it is free already.
                return word & WANTED == 0 || self.hand_over(side) || !self.is_busy(side);
            }
            if word & WANTED == 0 && self.turn.replace(word, word | WANTED).is_err() {
                continue;
            }
            return !self.is_busy(1 - side);
        }
    }

    /// Whether the path of this member may take requests if the gate is open.
    pub fn is_at_home(&self, member: usize) -> bool {
        self.turn.load() & (SIDE | WANTED) == self.members[member].side.load()
    }

    /// Keeps the turn for this side until it is [shared](Self::share). Call it before there is a
    /// path.
    pub fn keep_for(&self, side: Side) {
        self.turn.store(side as u32 | KEPT);
    }

    /// Whether the turn is kept for this side.
    pub fn is_kept_for(&self, side: Side) -> bool {
        self.turn.load() == side as u32 | KEPT
    }

    /// Ends the keeping of the turn for this side. All paths have to be woken.
    pub fn share(&self, side: Side) -> bool {
        self.turn.replace(side as u32 | KEPT, side as u32).is_ok()
    }

    /// Marks the path as idle, except for requests that wait (`waits`) to be alone or for space.
    /// Returns the paths that may be waiting for this.
    pub fn leave(&self, member: usize, waits: bool) -> Option<Wanted> {
        let activity = if waits { Activity::Waiting } else { Activity::Idle };
        let was_busy = self.members[member].activity.swap(activity as u32) == Activity::Busy as u32;
        let side = self.members[member].side.load();
        // The other side may have taken the turn just now. Paths of this side that relied on this
        // one have to mark it as wanted.
        let side =
            self.hand_over(side) || was_busy && self.turn.load() & (SIDE | WANTED) == 1 - side;
        match self.holder.load() {
            OPEN => side.then_some(Wanted { holder: None, parker: false, side }),
            word => {
                let holder = (word & !PARK).checked_sub(1).map(|holder| holder as usize);
                let holder = holder.filter(|&holder| holder != member);
                Some(Wanted { holder, parker: word & PARK != 0, side })
            }
        }
    }

    /// Replaces the holder's word while `change` returns another value. Returns whether it was
    /// replaced.
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

    /// Tries to take the gate. Returns whether the path has it.
    pub fn close(&self, member: usize) -> bool {
        let me = member as u32 + 1;
        self.change(|word| (word & !PARK == OPEN).then_some(word | me))
            || self.holder.load() & !PARK == me
    }

    /// Whether every other path is idle. It stays so while the gate is closed.
    pub fn others_idle(&self, member: usize) -> bool {
        (0..self.members.len())
            .all(|other| other == member || !self.has_activity(other, Activity::Busy))
    }

    /// Opens the gate that the path holds. All other paths have to be woken.
    ///
    /// # Panics
    /// If another path holds it, which is a bug in ferrite.
    pub fn open(&self, member: usize) {
        let me = member as u32 + 1;
        let opened = self.change(|word| (word & !PARK == me).then_some(word & PARK));
        assert!(opened, "the gate is opened by who closed it");
    }

    /// Frees the member of a path that has ended, and opens the gate if the path held it. All other
    /// paths have to be woken.
    pub fn forfeit(&self, member: usize) {
        self.set_activity(member, Activity::Free);
        let me = member as u32 + 1;
        self.change(|word| (word & !PARK == me).then_some(word & PARK));
    }

    /// Asks all paths to rest. They have to be woken. Returns whether they were not asked before.
    pub fn park(&self) -> bool {
        self.change(|word| (word & PARK == 0).then_some(word | PARK))
    }

    /// Lets all paths go on. They have to be woken.
    pub fn unpark(&self) {
        self.change(|word| (word & PARK != 0).then_some(word & !PARK));
    }

    /// Whether all paths are asked to rest.
    pub fn is_parking(&self) -> bool {
        self.holder.load() & PARK != 0
    }

    /// Marks the path as resting.
    pub fn rest(&self, member: usize) {
        self.set_activity(member, Activity::Resting);
    }

    /// Whether all paths rest.
    pub fn all_rest(&self) -> bool {
        let rests = |member| {
            self.has_activity(member, Activity::Resting)
                || self.has_activity(member, Activity::Free)
        };
        (0..self.members.len()).all(rests)
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
        assert_eq!(gate.join(Side::First), Some(1), "its number is the next queue's");
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
