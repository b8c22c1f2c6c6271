//! The state machine of xenbus: what follows from the states in xenstore (blkif.md 3.6 to 3.9).
//!
//! A [`Snapshot`] of all states goes in, and [`Action`]s come out. Some actions have an [`Answer`],
//! from which more actions follow. There is no I/O and no clock here, and no order of events is
//! assumed: each snapshot is compared with what was done before, which is all that is remembered. So
//! one snapshot too many changes nothing, and an action that xenstore did not accept follows from the
//! next snapshot again.

use super::states::Snapshot;
use crate::blkif::negotiate::Wanted;
use ferrite_xen::xenbus::XenbusState;

#[cfg(test)]
mod tests;

/// An action. They are carried out in order. One that has an answer is the last of its list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Read what a predecessor has recorded of failed flushes.
    Remember,
    /// Remove the files of an older disk of this name.
    Forget,
    /// Take over a predecessor's connection. Answer: [`TakenOver`](Answer::TakenOver),
    /// [`OtherRings`](Answer::OtherRings), [`NotTakenOver`](Answer::NotTakenOver),
    /// [`WrongImage`](Answer::WrongImage) or [`Delayed`](Answer::Delayed).
    TakeOver,
    /// Read the keys of the rings. Answer: [`Rings`](Answer::Rings).
    ReadRings,
    /// Connect the rings that the frontend has set up. Answer: [`Connected`](Answer::Connected),
    /// [`Refused`](Answer::Refused) or [`Delayed`](Answer::Delayed).
    Connect,
    /// Answer the requests in flight, and release everything of the guest's.
    Detach,
    /// Answer the requests in flight of a guest that has other rings. Its table stays until that of
    /// the next connection replaces it, since this process may end before.
    Release,
    /// Answer the requests on the rings without regard to the processor limit.
    Hurry,
    /// Publish all features, together with the backend's state.
    Offer(XenbusState),
    /// Write the backend's state.
    Write(XenbusState),
    /// Report why a frontend is not connected.
    Report(String),
    /// Report why the guest has to wait, and look again in a while.
    Delay(String),
    /// Remove the reported error.
    ClearError,
    /// Log a note for the administrator.
    Note(Note),
    /// Look again at once.
    Recheck,
    /// Write to the medium what no flush has requested.
    Save,
    /// Publish the medium's size, if it has grown.
    CheckSize,
    /// End: the frontend does not hold the disk any more.
    Unplug {
        /// Whether the toolstack waits for state 6.
        announce: bool,
    },
    /// End: a running guest's connection cannot be taken over.
    GiveUp(String),
}

/// A note for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// The toolstack's script has to finish first.
    WaitsForScript,
    /// A predecessor's connection is left to its frontend, which goes on from its state.
    NotTakenOver(String),
    /// The frontend is connected, and has set up other rings.
    OtherRings,
}

/// The result of an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The rings that the frontend's keys name now. `None`: the keys are invalid.
    Rings(Option<Wanted>),
    /// These rings are connected.
    Connected(Wanted),
    /// The frontend cannot be connected by its own fault.
    Refused {
        /// The reason.
        why: String,
        /// Whether keys were written meanwhile: the values may be a mixture of two offers.
        stale: bool,
    },
    /// This host cannot do it now.
    Delayed {
        /// The reason.
        why: String,
    },
    /// A predecessor's connection is taken over with these rings.
    TakenOver(Wanted),
    /// The same guest was served from the same image, by other rings than it has now.
    OtherRings,
    /// The predecessor's table is not of this connection.
    NotTakenOver {
        /// The reason.
        why: String,
    },
    /// The guest was served from another image.
    WrongImage {
        /// The difference.
        why: String,
    },
}

/// The progress of the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No states were read yet.
    New,
    /// A predecessor's connection is not decided on yet.
    TakingOver,
    /// Each snapshot is followed.
    Following,
}

/// One disk's states, and what was done about them.
#[derive(Debug)]
pub(super) struct Xenbus {
    phase: Phase,
    /// The rings that are served.
    connected: Option<Wanted>,
    /// Whether the frontend was refused. It is left alone until its state changes, so there is no
    /// loop of errors.
    refused: bool,
    /// The last snapshot. Answers belong to it.
    snapshot: Snapshot,
}

impl Xenbus {
    pub(super) fn new() -> Xenbus {
        Xenbus { phase: Phase::New, connected: None, refused: false, snapshot: Snapshot::default() }
    }

    /// Whether a frontend is served.
    pub(super) fn is_connected(&self) -> bool {
        self.connected.is_some()
    }

    /// The actions that follow from a snapshot.
    pub(super) fn observe(&mut self, snapshot: Snapshot) -> Vec<Action> {
        self.snapshot = snapshot;
        match self.phase {
            Phase::New => self.begin(),
            Phase::TakingOver => self.decide(),
            Phase::Following => self.follow(),
        }
    }

    /// The actions that follow from the answer to the last action.
    pub(super) fn handle_answer(&mut self, answer: Answer) -> Vec<Action> {
        match answer {
            Answer::Rings(rings) => self.compare(rings),
            Answer::Connected(wanted) => self.has_connected(wanted),
            Answer::Refused { stale: true, .. } => self.finish(vec![Action::Recheck]),
            Answer::Refused { why, .. } if self.phase == Phase::TakingOver => self.give_up(why),
            Answer::Refused { why, .. } => {
                self.refused = true;
                self.finish(vec![Action::Report(why), Action::Write(XenbusState::Closing)])
            }
            Answer::Delayed { why } => self.finish(vec![Action::Delay(why)]),
            Answer::TakenOver(wanted) => {
                self.connected = Some(wanted);
                self.start_following(vec![])
            }
            // A table is written before its rings are served. So these rings were not served, and
            // all requests of the guest are on them: it was resumed, and repeated its requests
            // (3.8). The phase stays until this has worked, since a successor would not see it
            // otherwise.
            Answer::OtherRings => vec![Action::Note(Note::OtherRings), Action::Connect],
            Answer::NotTakenOver { why } => self.give_up(why),
            // This holds even at 3: a resumed guest knows its disk.
            Answer::WrongImage { why } => vec![Action::Save, Action::GiveUp(why)],
        }
    }

    fn has_connected(&mut self, wanted: Wanted) -> Vec<Action> {
        self.connected = Some(wanted);
        // At 5, only the predecessor's rings were connected, and the frontend waits for the
        // backend's 5.
        let offer = Action::Offer(XenbusState::Connected);
        let offer = Some(offer).filter(|_| self.snapshot.front != XenbusState::Closing);
        match self.phase {
            Phase::TakingOver => self.start_following(offer.into_iter().collect()),
            _ => self.finish(std::iter::once(Action::ClearError).chain(offer).collect()),
        }
    }

    /// A connection that cannot be taken over.
    fn give_up(&mut self, why: String) -> Vec<Action> {
        // A working frontend may have requests in flight that would never be answered. Its stub
        // domain does not wait for them (attachments.md, "A stub domain and its guest").
        if self.snapshot.front == XenbusState::Connected {
            return vec![Action::Save, Action::GiveUp(why)];
        }
        // At 3 nothing is in flight: a resumed guest sets up new rings and repeats its requests
        // (3.8). At 5, these rings were not connected: the frontend gets the backend's 5 and
        // closes.
        self.start_following(vec![Action::Note(Note::NotTakenOver(why))])
    }

    /// The first snapshot.
    fn begin(&mut self) -> Vec<Action> {
        // The toolstack writes 1 and a backend never does. So the disk was attached just now, and
        // all files are an older disk's.
        let first = match self.snapshot.own {
            XenbusState::Initialising => Action::Forget,
            _ => Action::Remember,
        };
        let mut actions = vec![first];
        actions.extend(self.decide());
        actions
    }

    /// Takes over a predecessor's connection, if there is one. Neither case writes a state that
    /// makes a connected frontend give up its disk (3.9).
    fn decide(&mut self) -> Vec<Action> {
        let snapshot = self.snapshot;
        if snapshot.is_in_use() {
            self.phase = Phase::TakingOver;
            return vec![Action::TakeOver];
        }
        let mut actions = Vec::new();
        if snapshot.online && snapshot.is_fresh() {
            // A frontend beyond its beginning has read the predecessor's offer.
            if snapshot.own != XenbusState::InitWait || !snapshot.is_held() {
                actions.push(Action::Offer(XenbusState::InitWait));
            }
            if !snapshot.plugged {
                actions.push(Action::Note(Note::WaitsForScript));
            }
        }
        self.start_following(actions)
    }

    /// Begins to follow the states. The disk is served, so an error that was reported before does
    /// not hold any more.
    fn start_following(&mut self, mut actions: Vec<Action>) -> Vec<Action> {
        self.phase = Phase::Following;
        actions.extend([Action::ClearError, Action::Recheck]);
        actions
    }

    /// The actions that follow from the frontend's state and the toolstack's wishes (3.6).
    fn follow(&mut self) -> Vec<Action> {
        let snapshot = self.snapshot;
        if snapshot.gone {
            let mut actions = self.detach();
            actions.push(Action::Unplug { announce: false });
            return actions;
        }
        let mut actions = Vec::new();
        if self.is_connected() && !snapshot.online {
            actions.push(Action::Hurry);
        }
        match snapshot.front {
            // A fresh start. The driver before may have died without closing: kexec, firmware.
            XenbusState::Initialising => {
                actions.extend(self.detach());
                self.refused = false;
                if snapshot.own != XenbusState::InitWait && snapshot.online {
                    actions.push(Action::Offer(XenbusState::InitWait));
                }
            }
            XenbusState::Initialised | XenbusState::Connected => {
                let may_connect = snapshot.online && snapshot.plugged;
                if !self.refused && (may_connect || self.is_connected()) {
                    actions.extend(self.connect());
                    return actions;
                }
            }
            XenbusState::Closing => {
                self.refused = false;
                if snapshot.own != XenbusState::Closing {
                    actions.push(Action::Write(XenbusState::Closing));
                }
            }
            XenbusState::Closed | XenbusState::Unknown => actions.extend(self.closed()),
            XenbusState::InitWait | XenbusState::Reconfiguring | XenbusState::Reconfigured => {}
        }
        self.finish(actions)
    }

    /// The frontend has let go of the disk.
    fn closed(&mut self) -> Vec<Action> {
        let snapshot = self.snapshot;
        self.refused = false;
        let was_connected = self.is_connected();
        let mut actions = self.detach();
        // A frontend that closes waits for the backend's 6, whatever it has missed (3.6).
        let waits = snapshot.front == XenbusState::Closed;
        let closes = matches!(snapshot.own, XenbusState::Closing | XenbusState::Connected);
        // Otherwise 6 is announced when the image is closed, too.
        if (waits || was_connected || closes)
            && !snapshot.is_unwanted()
            && snapshot.own != XenbusState::Closed
        {
            actions.push(Action::Write(XenbusState::Closed));
        }
        actions
    }

    /// The frontend has set up rings.
    fn connect(&mut self) -> Vec<Action> {
        if !self.is_connected() {
            return vec![Action::Connect];
        }
        // Other rings without a close mean a resumed guest (3.8). The backend is at 4 all the time,
        // so the frontend may be back at 4 before it was seen at 3.
        if self.snapshot.front == XenbusState::Connected && !self.snapshot.frontend_changed {
            return self.unchanged();
        }
        vec![Action::ReadRings]
    }

    fn compare(&mut self, rings: Option<Wanted>) -> Vec<Action> {
        let same = match (&self.connected, &rings) {
            (Some(served), Some(wanted)) => served.has_rings_of(wanted),
            _ => self.snapshot.front == XenbusState::Connected,
        };
        if same {
            return self.unchanged();
        }
        self.connected = None;
        vec![Action::Note(Note::OtherRings), Action::Release, Action::Connect]
    }

    /// The rings are those that are served.
    fn unchanged(&self) -> Vec<Action> {
        // The state is written again if xenstore did not accept it.
        match self.snapshot.own {
            XenbusState::InitWait | XenbusState::Closed => {
                self.finish(vec![Action::Offer(XenbusState::Connected)])
            }
            _ => self.finish(vec![]),
        }
    }

    fn detach(&mut self) -> Vec<Action> {
        self.connected.take().map(|_| Action::Detach).into_iter().collect()
    }

    /// The actions that end each snapshot.
    fn finish(&self, mut actions: Vec<Action>) -> Vec<Action> {
        if self.phase != Phase::Following {
            return actions;
        }
        if !self.is_connected() {
            if self.snapshot.is_unwanted() && !self.snapshot.is_held() {
                actions.push(Action::Unplug { announce: true });
                return actions;
            }
            actions.push(Action::Save);
        }
        actions.push(Action::CheckSize);
        actions
    }
}
