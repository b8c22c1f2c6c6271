//! The loop of a queue that serves a client beside the rings of Xen: the order of the steps of a turn, for each kind of client.

use std::io;
use std::time::Duration;

use ferrite_host::clock::Clock;
use ferrite_io::engine::Completion;
use ferrite_io::reactor::Wait;

use super::work::{Action, Work};
use super::{Admitted, RequestPath, Ticket};

/// After this long without a request, memory is given back.
pub(crate) const COLD: Duration = Duration::from_secs(5);

/// The fields of a queue that the loop uses.
pub(crate) struct Turns<'a> {
    pub(crate) path: &'a mut RequestPath,
    pub(crate) clock: &'a dyn Clock,
    /// Writes whose data are to be fetched.
    pub(crate) copy_in: &'a mut Vec<Ticket>,
    /// A list for one step.
    pub(crate) tickets: &'a mut Vec<Ticket>,
    /// No request can be taken now. The end of the reason wakes this thread.
    pub(crate) blocked: &'a mut bool,
    /// Unflushed writes were flushed at the end.
    pub(crate) saved: &'a mut bool,
}

/// A queue's side to its client.
pub(crate) trait Client {
    fn turns(&mut self) -> Turns<'_>;

    /// Notes what has come from the client.
    fn look(&mut self) {}

    /// Whether the queue ends: requests that wait for what may never come are given up.
    fn is_stopping(&self) -> bool;

    /// Hands requests to the path.
    fn take(&mut self) -> io::Result<()>;

    /// Copies a write's data to its buffer. `false`: it fails. An error ends the queue.
    fn fetch(&self, ticket: &Ticket) -> io::Result<bool>;

    /// Gives the data of a read to the client. `false`: it fails. An error ends the queue.
    fn give(&self, ticket: &Ticket) -> io::Result<bool>;

    /// Answers all requests that have ended.
    fn answer(&mut self) -> io::Result<()>;

    /// Sends what the turn has for the client, before this thread may end or sleep.
    fn send(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether all that was taken is answered, and the queue was stopped.
    fn is_done(&self) -> bool;

    /// An entry of the path has the flush at the queue's end, and no request.
    fn has_no_request(&mut self, entry: usize);

    /// Does what is to be done at the end, when all is answered and flushed.
    fn end(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// How long the next turn may wait.
    fn next_wait(&mut self, started: bool) -> io::Result<Wait>;

    /// Notes how long a turn has waited that may have slept.
    fn slept(&mut self, _took_ns: u64) {}

    /// Takes a completion: the path's, or one of the client's descriptors.
    fn dispatch(&mut self, completion: Completion, now_ns: u64) -> io::Result<()>;
}

/// Serves until the queue is stopped. All requests that were taken are answered then.
pub(crate) fn serve(client: &mut impl Client) -> io::Result<()> {
    let result = take_turns(client);
    if result.is_err() {
        let Turns { path, copy_in, tickets, .. } = client.turns();
        copy_in.drain(..).chain(tickets.drain(..)).for_each(|ticket| {
            ticket.park();
        });
        path.abandon();
    }
    result
}

fn take_turns(client: &mut impl Client) -> io::Result<()> {
    let mut completions = Vec::new();
    loop {
        client.look();
        client.turns().path.follow()?;
        if client.is_stopping() {
            // The client could not be answered later.
            client.turns().path.give_up_waiting();
        }
        let Turns { path, blocked, .. } = client.turns();
        if path.is_throttled() {
            *blocked = true;
            path.leave_if_idle();
        } else {
            client.take()?;
        }
        let Turns { path, copy_in, .. } = client.turns();
        if let Some(Admitted::Fetch(ticket)) = path.retry() {
            copy_in.push(ticket);
        }
        path.order_buffers();
        fetch_all(client)?;
        let started = client.turns().path.start();
        client.answer()?;
        if let Some(ticket) = client.turns().path.take_alone() {
            let fetched = client.fetch(&ticket);
            let Turns { path, clock, .. } = client.turns();
            path.alone_fetched(ticket, *fetched.as_ref().unwrap_or(&false), clock.now_ns());
            fetched?;
        }
        client.send()?;
        if is_over(client) {
            return client.end();
        }
        let wait = client.next_wait(started)?;
        let Turns { path, clock, .. } = client.turns();
        let before_ns = clock.now_ns();
        path.turn(wait, &mut completions)?;
        let now_ns = clock.now_ns();
        if wait != Wait::No {
            woke(client, completions.is_empty(), now_ns - before_ns);
        }
        client.turns().path.throttle(now_ns);
        for completion in completions.drain(..) {
            client.dispatch(completion, now_ns)?;
        }
        client.turns().path.collect_tasks(now_ns);
        deliver(client)?;
        client.answer()?;
    }
}

/// Fetches the data of all writes of this turn.
fn fetch_all(client: &mut impl Client) -> io::Result<()> {
    while let Some(ticket) = client.turns().copy_in.pop() {
        let fetched = client.fetch(&ticket);
        let Turns { path, copy_in, clock, .. } = client.turns();
        match fetched {
            Ok(ok) => path.fetched(ticket, ok, clock.now_ns()),
            Err(e) => {
                copy_in.push(ticket);
                return Err(e);
            }
        }
    }
    Ok(())
}

/// Gives the data of reads that are done to the client.
fn deliver(client: &mut impl Client) -> io::Result<()> {
    let Turns { path, tickets, .. } = client.turns();
    path.read(tickets);
    while let Some(ticket) = client.turns().tickets.pop() {
        let given = client.give(&ticket);
        let Turns { path, tickets, clock, .. } = client.turns();
        match given {
            Ok(ok) => path.delivered(ticket, ok, clock.now_ns()),
            Err(e) => {
                tickets.push(ticket);
                return Err(e);
            }
        }
    }
    Ok(())
}

/// Updates the state after a turn that may have waited. `idle`: it brought no completion.
fn woke(client: &mut impl Client, idle: bool, took_ns: u64) {
    client.slept(took_ns);
    let path = client.turns().path;
    path.counters().sleeps.add(1);
    if idle && took_ns >= COLD.as_nanos() as u64 && path.may_cool() {
        path.give_memory_back();
    }
}

/// Whether the queue was stopped, and all that was taken is answered. Writes that were not flushed are flushed then, as
/// no other process may be there to do it later.
fn is_over(client: &mut impl Client) -> bool {
    if !client.is_done() || !client.turns().path.is_idle() {
        return false;
    }
    let Turns { path, saved, clock, .. } = client.turns();
    if !std::mem::replace(saved, true)
        && path.disk().is_dirty()
        && path.enter()
        && let Some(ticket) = path.take(0, 0, None, clock.now_ns())
    {
        client.has_no_request(ticket.entry());
        let work = Work { action: Action::Flush, sector: 0, sectors: 0 };
        match client.turns().path.admit(ticket, work) {
            Admitted::Taken => {}
            Admitted::Fetch(_) => unreachable!("a flush has no data"),
        }
        return false;
    }
    path.leave_if_idle()
}
