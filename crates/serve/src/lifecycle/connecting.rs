//! Making a connection, or not.

use super::attached::Attached;
use super::look::{Look, State};
use super::refusal::{Refusal, Refused};
use super::{Backend, ServeError};
use crate::log_limit::limited;
use crate::negotiate::{self, NegotiateError};

impl Backend<'_> {
    pub(super) fn connect(
        &mut self,
        frontend: &str,
        look: Look,
        attached: &mut Option<Attached>,
        refused: &mut Refused,
    ) -> Result<(), ServeError> {
        let now_ns = self.device.clock.now_ns();
        if let Some(a) = attached {
            // Back with other rings and without having closed: a resumed guest (3.8). We are at 4
            // all the time, so it may be at 4 again before it was seen at 3.
            let connected = look.front == State::Connected;
            let same = connected && !look.moved
                || match self.wanted(frontend).map_err(Refusal::from) {
                    Ok(wanted) => a.wanted().has_rings_of(&wanted),
                    Err(Refusal::Guest(_)) => connected,
                    Err(Refusal::Host(e)) => return Err(e),
                };
            if same {
                // Said once more if xenstore did not take it.
                let unsaid = matches!(look.own, State::InitWait | State::Closed);
                return if unsaid { self.offer(State::Connected) } else { Ok(()) };
            }
            limited!(
                info,
                self.device.log_limits.connections,
                now_ns,
                "the frontend has set up other rings: connecting anew"
            );
            self.detach(attached)?;
        }
        self.pace.connection();
        let connected = self
            .wanted(frontend)
            .map_err(Refusal::from)
            .and_then(|wanted| Attached::connect(self, wanted));
        match connected {
            Ok(a) => {
                limited!(
                    info,
                    self.device.log_limits.connections,
                    now_ns,
                    "connected: {}",
                    a.describe()
                );
                *attached = Some(a);
                self.clear_error()?;
                self.offer(State::Connected)
            }
            Err(Refusal::Host(e @ ServeError::RunDir { .. })) => self.delay(&e),
            Err(Refusal::Host(e)) => Err(e),
            Err(Refusal::Guest(why)) => {
                if self.drain_watches()? {
                    // What was read may have been half of one offer and half of the next.
                    self.moved = true;
                    return Ok(());
                }
                refused.refuse();
                limited!(
                    error,
                    self.device.log_limits.connections,
                    now_ns,
                    "cannot connect the frontend: {why}"
                );
                self.report_error(&why)?;
                Ok(self.write_state(State::Closing)?)
            }
        }
    }

    fn wanted(&mut self, frontend: &str) -> Result<negotiate::Wanted, NegotiateError> {
        negotiate::read_frontend(self.store, frontend, &self.offer)
    }

    /// The host cannot serve this guest now. It waits, and others are not concerned.
    pub(super) fn delay(&mut self, why: &ServeError) -> Result<(), ServeError> {
        self.delayed = true;
        let now_ns = self.device.clock.now_ns();
        limited!(error, self.device.log_limits.connections, now_ns, "the guest has to wait: {why}");
        Ok(self.report_error(&why.to_string())?)
    }
}
