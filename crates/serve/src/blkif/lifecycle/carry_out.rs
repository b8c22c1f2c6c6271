//! What follows from a look is done.

use std::collections::VecDeque;
use std::io;

use super::carrier::Carrier;
use super::inbox::Wait;
use super::messages::{Order, Reply};
use super::orphan;
use super::refusal::Refusal;
use super::xenbus::{Action, Answer, Note};
use super::{Backend, DELAY, Outcome, ServeError};
use crate::blkif::negotiate::{self, DiskFacts, NegotiateError, Wanted};
use crate::log_limit::limited;

/// What an action came to.
enum Done {
    /// The next one.
    Nothing,
    /// More may follow from this.
    Answered(Answer),
    /// The end.
    Ended(Outcome),
}

impl Backend<'_> {
    /// Looks once, and does what follows. The outcome, if this is the end.
    pub(super) fn follow(&mut self) -> Result<Option<Outcome>, ServeError> {
        (self.wait, self.listens) = (Wait::Anything(None), false);
        let look = self.look()?;
        let mut actions = VecDeque::from(self.xenbus.see(look));
        while let Some(action) = actions.pop_front() {
            match self.carry_out(action)? {
                Done::Nothing => {}
                Done::Answered(answer) => actions.extend(self.xenbus.hear(answer)),
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
            Action::LookAgain => self.moved = true,
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

    /// A frontend goes by what it was offered last, until it is at its beginning again.
    fn remember_offer(&mut self) -> Result<(), ServeError> {
        match negotiate::published_offer(self.store, self.backend) {
            Ok((offer, _)) => self.standing = offer,
            Err(NegotiateError::Store(e)) => return Err(e.into()),
            // Nobody has served this directory yet, or somebody has tampered with it.
            Err(NegotiateError::Key { .. }) => {}
        }
        Ok(())
    }

    /// What a predecessor had connected.
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
        let (rings, told_sectors) = orphan::begun(self.store, self.backend, &frontend, disk)?;
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
        // Larger ones would find no buffer.
        let max_segments = self.standing.max_indirect_segments.min(facts.max_segments);
        self.standing.max_indirect_segments = max_segments;
        let disk = (self.domid, self.devid);
        let rings = orphan::rings(self.store, disk, &wanted, max_segments, discard)?;
        let (how, _) = self.connected(Order::Connect(rings))?;
        Ok((wanted, how))
    }

    /// How a frontend is served now, and how many requests are done again.
    fn connected(&mut self, order: Order) -> Result<(String, usize), Refusal> {
        match self.worker.carry_out(order)? {
            Reply::Connected { how, undone } => Ok((how, undone)),
            reply => Err(unexpected(&reply).into()),
        }
    }

    /// Has something done that is not answered.
    pub(super) fn order(&mut self, order: Order) -> Result<(), ServeError> {
        match self.worker.carry_out(order)? {
            Reply::Done => Ok(()),
            reply => Err(unexpected(&reply)),
        }
    }

    /// What a frontend is to be told of the disk, now.
    pub(super) fn facts(&mut self) -> Result<DiskFacts, ServeError> {
        facts(&mut *self.worker)
    }

    fn wanted(&mut self) -> Result<Wanted, NegotiateError> {
        negotiate::read_frontend(self.store, &self.attachment.frontend, &self.standing)
    }

    /// The host cannot serve this guest now. It waits, and others are not concerned.
    fn delay(&mut self, why: &str) -> Result<(), ServeError> {
        self.wait.at_most(DELAY);
        let now_ns = self.clock.now_ns();
        limited!(error, self.log_limits.connections, now_ns, "the guest has to wait: {why}");
        Ok(self.report_error(why)?)
    }

    /// The end of a disk that nobody holds. `announce`: the toolstack waits for our 6, and its own
    /// 5 may have come since we looked.
    fn unplugged(&mut self, announce: bool) -> Result<Outcome, ServeError> {
        if let Err(e) = self.order(Order::Close) {
            // What is left is for the next try; with the directory, there is none.
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

/// What a frontend is to be told of a worker's disk, now.
pub(super) fn facts(worker: &mut dyn Carrier) -> Result<DiskFacts, ServeError> {
    match worker.carry_out(Order::Describe)? {
        Reply::Facts(facts) => Ok(facts),
        reply => Err(unexpected(&reply)),
    }
}

/// A worker's reply that belongs to another order.
pub(super) fn unexpected(reply: &Reply) -> ServeError {
    let source = io::Error::other(format!("{reply:?}: this is a bug in ferrite"));
    ServeError::host("understand the worker", source)
}
