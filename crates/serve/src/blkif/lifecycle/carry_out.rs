//! Carries out the actions of the state machine.

use std::collections::VecDeque;
use std::io;

use super::inbox::Wait;
use super::messages::{Order, Reply};
use super::orphan;
use super::refusal::Refusal;
use super::worker_handle::WorkerHandle;
use super::xenbus::{Action, Answer, Note};
use super::{Backend, HOST_RETRY_PAUSE, Outcome, ServeError};
use crate::blkif::negotiate::{self, DiskFacts, NegotiateError, Wanted};
use crate::log_limit::limited;

/// The result of an action.
enum Done {
    /// There is no result: the next action follows.
    Nothing,
    /// An answer, from which more actions may follow.
    Answered(Answer),
    /// The end of serving.
    Ended(Outcome),
}

impl Backend<'_> {
    /// Reads all states once, and does what follows. Returns the outcome at the end.
    pub(super) fn follow(&mut self) -> Result<Option<Outcome>, ServeError> {
        (self.wait, self.listens) = (Wait::Anything(None), false);
        let snapshot = self.read_states()?;
        let mut actions = VecDeque::from(self.xenbus.observe(snapshot));
        while let Some(action) = actions.pop_front() {
            match self.carry_out(action)? {
                Done::Nothing => {}
                Done::Answered(answer) => actions.extend(self.xenbus.handle_answer(answer)),
                Done::Ended(outcome) => return Ok(Some(outcome)),
            }
        }
        Ok(None)
    }

    fn carry_out(&mut self, action: Action) -> Result<Done, ServeError> {
        match action {
            Action::Remember => {
                self.order(Order::Remember)?;
                self.remember_offer()?;
            }
            Action::Forget => self.remove_traces()?,
            Action::TakeOver => return self.take_over().map(Done::Answered),
            Action::ReadRings => {
                let rings = match self.wanted().map_err(Refusal::from) {
                    Ok(wanted) => Some(wanted),
                    Err(Refusal::Host(e)) => return Err(e),
                    Err(_) => None,
                };
                return Ok(Done::Answered(Answer::Rings(rings)));
            }
            Action::Connect => return self.connect().map(Done::Answered),
            Action::Detach => self.order(Order::Detach)?,
            Action::Release => self.order(Order::Stop)?,
            Action::Hurry => self.order(Order::Hurry)?,
            Action::Offer(state) => self.offer(state)?,
            Action::Write(state) => self.write_state(state)?,
            Action::Report(why) => {
                let (limit, now_ns) = (&self.log_limits.connections, self.clock.now_ns());
                limited!(error, limit, now_ns, "cannot connect the frontend: {why}");
                self.report_error(&why)?;
            }
            Action::Delay(why) => self.delay(&why)?,
            Action::ClearError => self.clear_error()?,
            Action::Note(note) => self.note(&note),
            Action::Recheck => self.frontend_changed = true,
            Action::Save => self.order(Order::Save)?,
            Action::CheckSize => self.check_size()?,
            Action::Unplug { announce } => return self.unplugged(announce).map(Done::Ended),
            Action::GiveUp(why) => return Err(ServeError::TakeOver(why)),
        }
        Ok(Done::Nothing)
    }

    fn note(&self, note: &Note) {
        match note {
            Note::WaitsForScript => {
                tracing::info!("waiting for the hotplug script to connect the disk");
            }
            Note::NotTakenOver(why) => tracing::warn!("not taken over: {why}"),
            Note::OtherRings => limited!(
                info,
                self.log_limits.connections,
                self.clock.now_ns(),
                "the frontend has set up other rings: connecting anew"
            ),
        }
    }

    /// Reads the offer that stands in xenstore. A frontend uses the last one that it was offered,
    /// until it begins anew.
    fn remember_offer(&mut self) -> Result<(), ServeError> {
        match negotiate::published_offer(self.store, self.backend) {
            Ok((offer, _)) => self.standing = offer,
            Err(NegotiateError::Store(e)) => return Err(e.into()),
            // This directory was not served yet, or its keys were tampered with.
            Err(NegotiateError::Key { .. }) => {}
        }
        Ok(())
    }

    /// Takes over a predecessor's connection.
    fn take_over(&mut self) -> Result<Answer, ServeError> {
        match self.try_take_over() {
            Ok((wanted, how, undone)) => {
                tracing::info!("took over, {undone} requests to finish: {how}");
                Ok(Answer::TakenOver(wanted))
            }
            Err(Refusal::Host(e @ ServeError::RunDir { .. })) => {
                Ok(Answer::Delayed { why: e.to_string() })
            }
            Err(Refusal::Guest(why)) => Ok(Answer::NotTakenOver { why }),
            Err(Refusal::OtherRings(_)) => Ok(Answer::OtherRings),
            Err(Refusal::WrongImage(why)) => Ok(Answer::WrongImage { why }),
            Err(Refusal::Host(e)) => Err(e),
        }
    }

    fn try_take_over(&mut self) -> Result<(Wanted, String, usize), Refusal> {
        self.order(Order::Enter)?;
        let frontend = self.attachment.frontend.clone();
        let disk = (self.domid, self.devid);
        let (rings, told_sectors) =
            orphan::predecessors_rings(self.store, self.backend, &frontend, disk)?;
        let wanted = rings.wanted.clone();
        let (how, undone) = self.connected(Order::TakeOver { rings, told_sectors })?;
        Ok((wanted, how, undone))
    }

    fn connect(&mut self) -> Result<Answer, ServeError> {
        self.pace.connection();
        let now_ns = self.clock.now_ns();
        match self.try_connect() {
            Ok((wanted, how)) => {
                limited!(info, self.log_limits.connections, now_ns, "connected: {how}");
                Ok(Answer::Connected(wanted))
            }
            Err(Refusal::Host(e @ ServeError::RunDir { .. })) => {
                Ok(Answer::Delayed { why: e.to_string() })
            }
            Err(Refusal::Host(e)) => Err(e),
            Err(Refusal::Guest(why) | Refusal::OtherRings(why) | Refusal::WrongImage(why)) => {
                let stale = self.drain_watches()?;
                Ok(Answer::Refused { why, stale })
            }
        }
    }

    fn try_connect(&mut self) -> Result<(Wanted, String), Refusal> {
        let wanted = self.wanted()?;
        self.order(Order::Enter)?;
        let facts = self.facts()?;
        let discard = self.may_discard(&facts)?;
        // Larger requests would find no buffer.
        let max_segments = self.standing.max_indirect_segments.min(facts.max_segments);
        self.standing.max_indirect_segments = max_segments;
        let disk = (self.domid, self.devid);
        let rings = orphan::rings(self.store, disk, &wanted, max_segments, discard)?;
        let (how, _) = self.connected(Order::Connect(rings))?;
        Ok((wanted, how))
    }

    /// Sends an order to connect. Returns the description of the connection, and the number of
    /// requests that are repeated.
    fn connected(&mut self, order: Order) -> Result<(String, usize), Refusal> {
        match self.worker.carry_out(order)? {
            Reply::Connected { how, undone } => Ok((how, undone)),
            reply => Err(unexpected(&reply).into()),
        }
    }

    /// Sends an order whose reply carries no value.
    pub(super) fn order(&mut self, order: Order) -> Result<(), ServeError> {
        match self.worker.carry_out(order)? {
            Reply::Done => Ok(()),
            reply => Err(unexpected(&reply)),
        }
    }

    /// The current facts of the disk, for the frontend.
    pub(super) fn facts(&mut self) -> Result<DiskFacts, ServeError> {
        facts(&mut *self.worker)
    }

    fn wanted(&mut self) -> Result<Wanted, NegotiateError> {
        negotiate::read_frontend(self.store, &self.attachment.frontend, &self.standing)
    }

    /// Makes this guest wait, since the host cannot serve it now. Other guests are not affected.
    fn delay(&mut self, why: &str) -> Result<(), ServeError> {
        self.wait.at_most(HOST_RETRY_PAUSE);
        let now_ns = self.clock.now_ns();
        limited!(error, self.log_limits.connections, now_ns, "the guest has to wait: {why}");
        Ok(self.report_error(why)?)
    }

    /// Ends a disk that is not held any more. `announce`: the toolstack waits for state 6, and may
    /// have written 5 since the last read.
    fn unplugged(&mut self, announce: bool) -> Result<Outcome, ServeError> {
        if let Err(e) = self.order(Order::Close) {
            // The next try does what is left. Without the directory there is no next try.
            match announce {
                true => self.report_error(&e.to_string())?,
                false => self.remove_traces()?,
            }
            return Err(e);
        }
        self.remove_traces()?;
        let announced = if announce { self.announce_unplugged() } else { Ok(()) };
        let closed = self.order(Order::EndClose);
        if announce && let Err(e) = &closed {
            self.report_error(&e.to_string())?;
        }
        closed?;
        announced?;
        Ok(Outcome::Unplugged)
    }
}

/// The current facts of a worker's disk, for its frontend.
pub(super) fn facts(worker: &mut dyn WorkerHandle) -> Result<DiskFacts, ServeError> {
    match worker.carry_out(Order::Describe)? {
        Reply::Facts(facts) => Ok(facts),
        reply => Err(unexpected(&reply)),
    }
}

/// A reply that does not belong to its order.
pub(super) fn unexpected(reply: &Reply) -> ServeError {
    let source = io::Error::other(format!("{reply:?}: this is a bug in ferrite"));
    ServeError::host("understand the worker", source)
}
