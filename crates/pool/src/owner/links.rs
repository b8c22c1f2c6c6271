//! The connections to members, and members that are lost (R1, R3, R5).

use std::collections::BTreeSet;

use super::{Config, Effect, Failure, Owner, Phase, Purpose, TaskId};
use crate::rules::Rule;
use crate::{ConnId, Io, MemberId, Members, OpId, Region, Reply, Request};

/// A member as its owner sees it.
#[derive(Debug)]
pub(super) struct Link {
    /// A connection that was asked for and is not there yet.
    connecting: bool,
    conn: Option<ConnId>,
    /// Whether the member has opened.
    open: bool,
    /// The time of the last change of these.
    pub(super) since: u64,
    /// When the last confirmed exchange was begun (R5).
    pub(super) proof: Option<u64>,
    /// An exchange without an answer.
    asked: Option<(OpId, u64)>,
    /// The last time at which one was begun.
    last_asked: u64,
    /// The copy is incomplete (R10).
    pub(super) lost: bool,
    /// The dirty regions when it was opened.
    pub(super) dirty: BTreeSet<Region>,
}

impl Link {
    pub(super) fn new(now: u64) -> Link {
        Link {
            connecting: false,
            conn: None,
            open: false,
            since: now,
            proof: None,
            asked: None,
            last_asked: 0,
            lost: false,
            dirty: BTreeSet::new(),
        }
    }

    /// Whether requests may be sent to it.
    pub(super) fn is_usable(&self) -> bool {
        self.open && !self.lost
    }

    pub(super) fn is_down(&self) -> bool {
        !self.connecting && self.conn.is_none()
    }

    /// Gives the connection up.
    pub(super) fn close(&mut self) -> Option<ConnId> {
        self.open = false;
        self.asked = None;
        self.conn.take()
    }
}

impl Owner {
    fn link_of(&mut self, conn: ConnId) -> Option<(MemberId, &mut Link)> {
        let mut links = self.links.iter_mut();
        links.find(|(_, link)| link.conn == Some(conn)).map(|(member, link)| (*member, link))
    }

    pub(super) fn connect(&mut self, member: MemberId) {
        if let Some(link) = self.links.get_mut(&member).filter(|link| link.is_down()) {
            link.connecting = true;
            self.effects.push(Effect::Connect(member));
        }
    }

    pub(super) fn connected(&mut self, member: MemberId, conn: ConnId) {
        let now = self.now;
        let generation = self.record.as_ref().map(|(_, record)| record.generation);
        let link = self.links.get_mut(&member).filter(|link| link.connecting);
        let (Some(link), Some(generation)) = (link, generation) else {
            return self.effects.push(Effect::Close(conn));
        };
        link.connecting = false;
        (link.conn, link.since) = (Some(conn), now);
        let owner = self.config.me;
        self.effects.push(Effect::Send(conn, Request::Open { generation, owner }));
    }

    pub(super) fn unconnected(&mut self, member: MemberId) {
        if let Some(link) = self.links.get_mut(&member) {
            link.connecting = false;
        }
    }

    pub(super) fn ended(&mut self, conn: ConnId) {
        if let Some((member, _)) = self.link_of(conn) {
            self.lose(member);
        }
    }

    /// A connection is lost. The next one sends its outstanding operations again, or the member is dropped.
    fn lose(&mut self, member: MemberId) {
        let now = self.now;
        let Some(link) = self.links.get_mut(&member) else { return };
        let was_open = link.open;
        if let Some(conn) = link.close() {
            self.effects.push(Effect::Close(conn));
        }
        if was_open {
            link.since = now;
        }
        self.ops.retain(|_, (_, of)| *of != member);
        let is_committing = self.maybe_in_sync().contains(&member);
        if self.returning.as_ref().is_some_and(|it| it.member == member) && !is_committing {
            self.give_up_return(member);
        }
        if !self.keep(Rule::DropFirst) {
            self.without(&[member].into());
        }
    }

    pub(super) fn replied(&mut self, conn: ConnId, reply: Reply) {
        let Some((member, link)) = self.link_of(conn) else { return };
        match reply {
            Reply::Refused { .. } => self.fail(Failure::Superseded),
            Reply::Opened { incomplete, dirty } => self.opened(member, incomplete, dirty),
            Reply::Done { op } => match link.asked.take_if(|(asked, _)| *asked == op) {
                Some((_, begun)) => link.proof = Some(begun),
                None => self.op_done(op, member, None),
            },
            Reply::Bits { op, dirty } => self.op_done(op, member, Some(dirty)),
        }
    }

    fn opened(&mut self, member: MemberId, incomplete: bool, dirty: BTreeSet<Region>) {
        let now = self.now;
        let is_in_sync = self.maybe_in_sync().contains(&member);
        let Some(link) = self.links.get_mut(&member) else { return };
        (link.open, link.since, link.dirty) = (true, now, dirty);
        if is_in_sync && incomplete {
            // R10: it is no source any more, and has to return.
            link.lost = true;
            let conn = link.close();
            return self.effects.extend(conn.map(Effect::Close));
        }
        self.confirm(member);
        match is_in_sync {
            true => self.send_again(member),
            false => self.begin_return(member),
        }
    }

    /// Asks a member whether its session still is this one.
    fn confirm(&mut self, member: MemberId) {
        let op = OpId(self.next_id());
        let now = self.now;
        let Some(link) = self.links.get_mut(&member) else { return };
        if let Some(conn) = link.conn.filter(|_| link.open && link.asked.is_none()) {
            link.asked = Some((op, now));
            link.last_asked = now;
            self.effects.push(Effect::Send(conn, Request::Io { op, io: Io::Confirm }));
        }
    }

    /// Sends an operation whose outcome does not matter, if the member can be asked now.
    pub(super) fn send_once(&mut self, member: MemberId, io: Io) {
        let op = OpId(self.next_id());
        let link = self.links.get(&member).filter(|link| link.is_usable());
        if let Some(conn) = link.and_then(|link| link.conn) {
            self.effects.push(Effect::Send(conn, Request::Io { op, io }));
        }
    }

    /// Sends an operation of a task, if the member can be asked now.
    pub(super) fn send(&mut self, task: TaskId, member: MemberId, io: Io) {
        let op = OpId(self.next_id());
        let link = self.links.get(&member).filter(|link| link.is_usable());
        if let Some(conn) = link.and_then(|link| link.conn) {
            self.ops.insert(op, (task, member));
            self.effects.push(Effect::Send(conn, Request::Io { op, io }));
        }
    }

    /// Connects what is not connected, confirms, and gives up on what does not answer.
    pub(super) fn tick(&mut self) {
        let members: Vec<MemberId> = self.links.keys().copied().collect();
        for member in members {
            self.tick_of(member);
        }
    }

    fn tick_of(&mut self, member: MemberId) {
        let (now, Config { trust, patience, .. }) = (self.now, &self.config);
        let (trust, patience) = (*trust, *patience);
        let in_sync = self.maybe_in_sync().contains(&member);
        let may_return = matches!(self.phase, Phase::Serving { .. }) && self.may_begin_return();
        let Some(link) = self.links.get_mut(&member) else { return };
        let asked = link.asked.map(|(_, begun)| begun);
        let is_silent = match link.open {
            true => asked.is_some_and(|begun| now >= begun + patience),
            false => link.conn.is_some() && now >= link.since + patience,
        };
        if is_silent {
            self.lose(member);
        } else if link.is_down() && !link.lost && (in_sync || may_return) {
            self.connect(member);
        } else if link.open && !in_sync && may_return {
            // It was opened while another one returned.
            self.begin_return(member);
        } else if link.open && now >= link.last_asked + trust / 4 {
            self.confirm(member);
        }
    }

    /// R3: members that are lost leave by a change of the record, while one that stays confirms.
    pub(super) fn drop_lost(&mut self) {
        if self.change.is_some() {
            return;
        }
        let (in_sync, now, grace) = (self.in_sync(), self.now, self.config.grace);
        let is_lost = |member: &&MemberId| {
            let link = self.links.get(*member);
            link.is_none_or(|link| link.lost || (!link.open && now >= link.since + grace))
        };
        let lost: Members = in_sync.iter().filter(is_lost).copied().collect();
        if lost.is_empty() {
            return;
        }
        let since = lost.iter().filter_map(|member| self.links.get(member)).map(|link| link.since);
        let since = since.max().unwrap_or(now);
        let staying: Members = in_sync.difference(&lost).copied().collect();
        let confirms = |member: &MemberId| {
            let link = self.links.get(member);
            link.is_some_and(|link| link.is_usable() && link.proof.is_some_and(|at| at > since))
        };
        if staying.is_empty() && lost.iter().all(|m| self.links.get(m).is_some_and(|l| l.lost)) {
            return self.fail(Failure::Incomplete);
        }
        if staying.len() >= self.config.min.max(1) && staying.iter().any(confirms) {
            self.drop_members(lost);
        }
    }

    pub(super) fn drop_members(&mut self, lost: Members) {
        let out = lost.clone();
        self.transact(Purpose::Drop(lost), |record| {
            record.in_sync.retain(|member| !out.contains(member));
            record.out.extend(out);
        });
    }

    /// The record is without these members: nothing waits for them any more.
    pub(super) fn dropped(&mut self, members: &Members) {
        let mut were_open = true;
        for member in members {
            let Some(link) = self.links.get_mut(member) else { continue };
            // A member that was opened has ended the sessions of the owner before.
            were_open &= link.lost;
            self.effects.extend(link.close().map(Effect::Close));
            *link = Link { connecting: link.connecting, ..Link::new(self.now) };
            self.ops.retain(|_, (_, of)| of != member);
        }
        if let Phase::Opening { .. } = self.phase {
            let Config { trust, drift, .. } = self.config;
            let waits = !were_open && self.keep(Rule::Wait);
            return self.serve(if waits { self.now + trust + drift } else { self.now });
        }
        if self.in_sync().len() == 1 {
            self.unequal.clear();
        }
        self.without(members);
    }
}
