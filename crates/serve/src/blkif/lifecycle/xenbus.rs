//! The state machine of xenbus: what follows from what xenstore says (blkif.md 3.6 to 3.9).
//!
//! A [`Look`] at all states goes in, and [`Action`]s come out. Some have an [`Answer`], from which
//! more follow. There is no I/O here, no clock, and no belief in an order of events: each look is
//! compared with what was done before, which is all that is remembered. So a look too many changes
//! nothing, and what xenstore did not take follows from the next look once more.

use super::look::{Look, State};
use crate::blkif::negotiate::Wanted;

#[cfg(test)]
mod tests;

/// What is to be done, in this order. One that has an answer is the last of its list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Heed what a predecessor has remembered of failed flushes.
    Remember,
    /// Remove what an older disk of this name has left.
    Forget,
    /// Go on where a predecessor ended. Answer: [`TakenOver`](Answer::TakenOver),
    /// [`OtherRings`](Answer::OtherRings), [`NotTakenOver`](Answer::NotTakenOver),
    /// [`WrongImage`](Answer::WrongImage) or [`Delayed`](Answer::Delayed).
    TakeOver,
    /// Read the keys of the rings. Answer: [`Rings`](Answer::Rings).
    ReadRings,
    /// Connect the rings that the frontend has set up. Answer: [`Connected`](Answer::Connected),
    /// [`Refused`](Answer::Refused) or [`Delayed`](Answer::Delayed).
    Connect,
    /// Answer what is in flight, and give everything of the guest's back.
    Detach,
    /// The same for a guest that has other rings. What a successor goes by stays until that of the
    /// next connection takes its place: this process may end before.
    Release,
    /// Answer what is on the rings, whatever the disk has used of processors.
    Hurry,
    /// Publish all that is offered, together with our state.
    Offer(State),
    /// Write our state.
    Write(State),
    /// Report why a frontend is not connected.
    Report(String),
    /// Report why it has to wait, and look again in a while.
    Delay(String),
    /// Remove what was reported.
    ClearError,
    /// Tell the administrator.
    Note(Note),
    /// Look again at once.
    LookAgain,
    /// Bring to the medium what no flush has asked for.
    Save,
    /// Publish the medium's size, if it has grown.
    CheckSize,
    /// The end: nobody holds the disk. `announce`: the toolstack waits for our 6.
    Unplug {
        /// Write 6.
        announce: bool,
    },
    /// The end: a running guest's connection cannot be taken over.
    GiveUp(String),
}

/// What only the log hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// The toolstack's script comes first.
    WaitsForScript,
    /// A predecessor's connection is left to its frontend, which goes on from its state.
    NotTakenOver(String),
    /// The frontend is connected, and has set up other rings.
    OtherRings,
}

/// What became of an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The rings that the frontend's keys name now; `None` if these make no sense.
    Rings(Option<Wanted>),
    /// Connected to these.
    Connected(Wanted),
    /// The frontend cannot be connected, and that is its own doing.
    Refused {
        /// Why.
        why: String,
        /// Something was written meanwhile: what was read may be half of one offer and half of the
        /// next.
        stale: bool,
    },
    /// This host cannot do it now.
    Delayed {
        /// Why.
        why: String,
    },
    /// Taken over with these rings.
    TakenOver(Wanted),
    /// The same guest was served from the same image, by other rings than it has now.
    OtherRings,
    /// What the predecessor has left is not of this connection.
    NotTakenOver {
        /// Why.
        why: String,
    },
    /// The guest was served from another image.
    WrongImage {
        /// How that is known.
        why: String,
    },
}

/// How far the start has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing was seen.
    New,
    /// A predecessor's connection is not decided on.
    TakingOver,
    /// Each look is followed.
    Following,
}

/// One disk's states, and what was done about them.
#[derive(Debug)]
pub(super) struct Xenbus {
    phase: Phase,
    /// The rings that are served.
    connected: Option<Wanted>,
    /// A frontend that was refused is left alone until it moves: no loop of errors.
    refused: bool,
    /// The last one; answers belong to it.
    look: Look,
}

impl Xenbus {
    pub(super) fn new() -> Xenbus {
        Xenbus { phase: Phase::New, connected: None, refused: false, look: Look::default() }
    }

    /// Whether a frontend is served.
    pub(super) fn is_connected(&self) -> bool {
        self.connected.is_some()
    }

    /// What follows from a look.
    pub(super) fn see(&mut self, look: Look) -> Vec<Action> {
        self.look = look;
        match self.phase {
            Phase::New => self.begin(),
            Phase::TakingOver => self.decide(),
            Phase::Following => self.follow(),
        }
    }

    /// What follows from the answer to the last action.
    pub(super) fn hear(&mut self, answer: Answer) -> Vec<Action> {
        match answer {
            Answer::Rings(rings) => self.compare(rings),
            Answer::Connected(wanted) => self.has_connected(wanted),
            Answer::Refused { stale: true, .. } => self.and_rest(vec![Action::LookAgain]),
            Answer::Refused { why, .. } if self.phase == Phase::TakingOver => self.give_up(why),
            Answer::Refused { why, .. } => {
                self.refused = true;
                self.and_rest(vec![Action::Report(why), Action::Write(State::Closing)])
            }
            Answer::Delayed { why } => self.and_rest(vec![Action::Delay(why)]),
            Answer::TakenOver(wanted) => {
                self.connected = Some(wanted);
                self.begun(vec![])
            }
            // A table is there before its rings are served. So nobody has served these, and all that
            // the guest has asked for is on them: it was resumed, and did its requests again (3.8).
            // It is decided on until that has worked: a successor would not see it otherwise.
            Answer::OtherRings => vec![Action::Note(Note::OtherRings), Action::Connect],
            Answer::NotTakenOver { why } => self.give_up(why),
            // Not even at 3: a resumed guest knows its disk.
            Answer::WrongImage { why } => vec![Action::Save, Action::GiveUp(why)],
        }
    }

    fn has_connected(&mut self, wanted: Wanted) -> Vec<Action> {
        self.connected = Some(wanted);
        // Of one that is at 5, only the predecessor's rings were connected; it waits for our 5.
        let offer = Action::Offer(State::Connected);
        let offer = Some(offer).filter(|_| self.look.front != State::Closing);
        match self.phase {
            Phase::TakingOver => self.begun(offer.into_iter().collect()),
            _ => self.and_rest(std::iter::once(Action::ClearError).chain(offer).collect()),
        }
    }

    /// A connection that cannot be taken over.
    fn give_up(&mut self, why: String) -> Vec<Action> {
        // One at work may have requests in flight that would never be answered. Its stub domain does not
        // wait for them (attachments.md, "A stub domain and its guest").
        if self.look.front == State::Connected {
            return vec![Action::Save, Action::GiveUp(why)];
        }
        // At 3 nothing is in flight: a resumed guest sets up new rings and does its requests again
        // (3.8). At 5, nobody had connected it, or not these rings: it gets its 5, and goes.
        self.begun(vec![Action::Note(Note::NotTakenOver(why))])
    }

    /// The first look.
    fn begin(&mut self) -> Vec<Action> {
        // The toolstack writes 1 and we never do: a disk that was attached just now, and has
        // nothing of an older one of its name.
        let first = match self.look.own {
            State::Initialising => Action::Forget,
            _ => Action::Remember,
        };
        let mut actions = vec![first];
        actions.extend(self.decide());
        actions
    }

    /// A predecessor's connection is taken over, or there is none. Neither writes a state that
    /// a connected frontend gives its disk up for (3.9).
    fn decide(&mut self) -> Vec<Action> {
        let look = self.look;
        if look.is_in_use() {
            self.phase = Phase::TakingOver;
            return vec![Action::TakeOver];
        }
        let mut actions = Vec::new();
        if look.online && look.is_fresh() {
            // A frontend that is beyond its beginning has gone by the predecessor's offer.
            if look.own != State::InitWait || !look.is_held() {
                actions.push(Action::Offer(State::InitWait));
            }
            if !look.plugged {
                actions.push(Action::Note(Note::WaitsForScript));
            }
        }
        self.begun(actions)
    }

    /// The disk is served, so what was reported of it before holds no longer.
    fn begun(&mut self, mut actions: Vec<Action>) -> Vec<Action> {
        self.phase = Phase::Following;
        actions.extend([Action::ClearError, Action::LookAgain]);
        actions
    }

    /// What follows from the frontend's state and the toolstack's wishes (3.6).
    fn follow(&mut self) -> Vec<Action> {
        let look = self.look;
        if look.gone {
            let mut actions = self.detach();
            actions.push(Action::Unplug { announce: false });
            return actions;
        }
        let mut actions = Vec::new();
        if self.is_connected() && !look.online {
            actions.push(Action::Hurry);
        }
        match look.front {
            // A fresh start, of a driver that may have died without closing: kexec, firmware.
            State::Initialising => {
                actions.extend(self.detach());
                self.refused = false;
                if look.own != State::InitWait && look.online {
                    actions.push(Action::Offer(State::InitWait));
                }
            }
            State::Initialised | State::Connected => {
                let may_connect = look.online && look.plugged;
                if !self.refused && (may_connect || self.is_connected()) {
                    actions.extend(self.connect());
                    return actions;
                }
            }
            State::Closing => {
                self.refused = false;
                if look.own != State::Closing {
                    actions.push(Action::Write(State::Closing));
                }
            }
            State::Closed | State::Unknown => actions.extend(self.closed()),
            State::InitWait | State::Reconfiguring | State::Reconfigured => {}
        }
        self.and_rest(actions)
    }

    /// The frontend has let go of the disk.
    fn closed(&mut self) -> Vec<Action> {
        let look = self.look;
        self.refused = false;
        let was_connected = self.is_connected();
        let mut actions = self.detach();
        // One that closes waits for our 6, whatever it has missed of us (3.6).
        let waits = look.front == State::Closed;
        let closes = matches!(look.own, State::Closing | State::Connected);
        // Otherwise that is announced when the image is closed, too.
        if (waits || was_connected || closes) && !look.is_unwanted() && look.own != State::Closed {
            actions.push(Action::Write(State::Closed));
        }
        actions
    }

    /// The frontend has rings.
    fn connect(&mut self) -> Vec<Action> {
        if !self.is_connected() {
            return vec![Action::Connect];
        }
        // Back with other rings and without having closed: a resumed guest (3.8). We are at 4
        // all the time, so it may be at 4 again before it was seen at 3.
        if self.look.front == State::Connected && !self.look.moved {
            return self.unchanged();
        }
        vec![Action::ReadRings]
    }

    fn compare(&mut self, rings: Option<Wanted>) -> Vec<Action> {
        let same = match (&self.connected, &rings) {
            (Some(served), Some(wanted)) => served.has_rings_of(wanted),
            _ => self.look.front == State::Connected,
        };
        if same {
            return self.unchanged();
        }
        self.connected = None;
        vec![Action::Note(Note::OtherRings), Action::Release, Action::Connect]
    }

    /// The rings are those that are served.
    fn unchanged(&self) -> Vec<Action> {
        // Said once more if xenstore did not take it.
        match self.look.own {
            State::InitWait | State::Closed => self.and_rest(vec![Action::Offer(State::Connected)]),
            _ => self.and_rest(vec![]),
        }
    }

    fn detach(&mut self) -> Vec<Action> {
        self.connected.take().map(|_| Action::Detach).into_iter().collect()
    }

    /// What ends each look that was followed.
    fn and_rest(&self, mut actions: Vec<Action>) -> Vec<Action> {
        if self.phase != Phase::Following {
            return actions;
        }
        if !self.is_connected() {
            if self.look.is_unwanted() && !self.look.is_held() {
                actions.push(Action::Unplug { announce: true });
                return actions;
            }
            actions.push(Action::Save);
        }
        actions.push(Action::CheckSize);
        actions
    }
}
