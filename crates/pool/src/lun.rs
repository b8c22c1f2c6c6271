//! Opening a copy on a LUN. It has no server, so the process of its owner does by itself what a server does for others (R1, R5).
//!
//! The caller reads, reserves and waits; this says in which order, and what follows.

use crate::rules::{Rule, Rules};
use crate::{Generation, OwnerId, Stored};

/// The reservation of a LUN, as the process knows it that has the LUN open. All copies on the LUN share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LunHold(Option<Seized>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seized {
    /// This host had the LUN reserved before.
    was_ours: bool,
    /// When it was reserved by this process.
    at: u64,
}

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LunStep {
    /// Read the copy's state, then call [`LunOpening::looked`].
    Look,
    /// Reserve the LUN for this host, take it from any other, and have the LUN abort what that one has sent. Then call
    /// [`LunHold::taken`] and [`LunOpening::seized`].
    Seize,
    /// Write the copy's state, durably, with this owner's generation and without an owner, and call [`LunOpening::claimed`].
    Claim,
    /// The copy is open from this time on. It has the state that was looked at last.
    Wait(u64),
    /// A later owner has had the copy. The LUN stays its.
    Refuse(Generation),
    /// The copy is open. It has the state that was looked at last.
    Open,
}

/// A copy that an owner opens.
#[derive(Clone, Copy, Debug)]
pub struct LunOpening {
    generation: Generation,
    owner: OwnerId,
    /// T and the drift.
    trust: u64,
    rules: Rules,
    /// By the last look: the generation on the LUN, and the owner that opened the copy with it. `None`: no owner has.
    last: (Generation, Option<OwnerId>),
}

impl LunOpening {
    /// Begins, with a look. `trust`: how long the owner before may answer reads after the LUN was seized, in nanoseconds.
    pub fn new(generation: Generation, owner: OwnerId, trust: u64, rules: Rules) -> LunOpening {
        LunOpening { generation, owner, trust, rules, last: (Generation(0), None) }
    }

    /// The copy's state was read. It is this time now.
    pub fn looked(&mut self, stored: &Stored, hold: LunHold, now: u64) -> LunStep {
        let is_past = stored.generation > self.generation;
        self.last = (stored.generation, stored.owner);
        match hold.0 {
            Some(seized) if !is_past => self.wait(seized, now),
            // So an owner of the past takes nothing from the present one.
            None if !is_past || !self.rules.keep(Rule::LunLookBefore) => LunStep::Seize,
            _ => LunStep::Refuse(stored.generation),
        }
    }

    /// The LUN is reserved.
    pub fn seized(&self, hold: LunHold, now: u64) -> LunStep {
        match hold.0 {
            Some(seized) if !self.rules.keep(Rule::LunLookBehind) => self.wait(seized, now),
            // This look is the decision: before, another owner could write.
            _ => LunStep::Look,
        }
    }

    /// The state on the LUN has this owner's generation.
    pub fn claimed(&mut self, hold: LunHold, now: u64) -> LunStep {
        self.last = (self.generation, None);
        hold.0.map_or(LunStep::Seize, |seized| self.wait(seized, now))
    }

    /// No server has ended the session of an owner on another host: it may answer reads as long as it relies on its last
    /// confirmation, which was before the LUN was seized.
    fn wait(&self, seized: Seized, now: u64) -> LunStep {
        // An owner of this host has let the LUN go, and has itself waited for the one before. An owner that has only reserved the LUN,
        // and not opened the copy, may not have waited.
        let was_here = match self.last {
            (_, Some(last)) => last.host() == self.owner.host(),
            (generation, None) => generation == Generation(0),
        };
        let is_alone = seized.was_ours && (was_here || !self.rules.keep(Rule::LunLastOwner));
        let from = seized.at + self.trust;
        if is_alone || now >= from || !self.rules.keep(Rule::LunWait) {
            return LunStep::Open;
        }
        // Otherwise the owner before finds its own generation, and takes the LUN back meanwhile.
        match self.last.0 < self.generation && self.rules.keep(Rule::LunClaim) {
            true => LunStep::Claim,
            false => LunStep::Wait(from),
        }
    }
}

impl LunHold {
    /// This process has reserved the LUN at this time. `was_ours`: a process of this host had.
    pub fn taken(&mut self, was_ours: bool, now: u64) {
        self.0 = Some(Seized { was_ours, at: now });
    }
}
