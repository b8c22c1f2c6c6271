//! LUNs: targets with reservations, and the processes that open them and are the servers of the copies on them.
//!
//! A process sends orders to a target, which come late, are held up by cuts, or are lost with their machine. Of writes the
//! target looks at the reservation when it receives them, and executes them later.

use std::collections::{BTreeMap, BTreeSet};

use ferrite_pool::{
    BootId, ConnId, Io, LunHold, LunOpening, LunStep, Member, MemberEffect, MemberId, OpId, Reply,
    Request, Rules, Stored,
};

use super::{DRIFT, Plan, REGION_BLOCKS, TRUST, World};
use crate::random::Random;

mod target;

/// Machines that owners run on.
const MACHINES: u64 = 3;

/// Rules that keep a LUN right beside those of the state machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LunRule {
    /// It is reserved before it is used.
    Reserve,
    /// Orders of the host before are aborted when the LUN is taken.
    Abort,
    /// The reservation is not given back when an owner ends.
    Keep,
    /// The target keeps it when it starts again.
    Persist,
    /// One process of a machine has the LUN, until its last order is over.
    Alone,
    /// A session is confirmed by the LUN.
    Ask,
    /// Answered writes are on the medium.
    Durable,
    /// After an error all copies on the LUN let it go, and it is opened anew.
    LetGo,
}

/// A rule of the state machines, or of LUNs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    Pool(ferrite_pool::Rule),
    Lun(LunRule),
}

/// The rule that is left out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Without(pub(crate) Option<Rule>);

impl Without {
    pub(super) fn rules(self) -> Rules {
        match self.0 {
            Some(Rule::Pool(rule)) => Rules::without(rule),
            _ => Rules::default(),
        }
    }

    fn keeps(self, rule: LunRule) -> bool {
        !matches!(self.0, Some(Rule::Lun(left)) if left == rule)
    }
}

/// All LUNs of a history.
pub(super) struct Luns {
    without: Without,
    /// For the machines of owners alone.
    random: Random,
    on: BTreeMap<MemberId, usize>,
    targets: Vec<Target>,
    /// Counts the starts of machines.
    lives: BTreeMap<usize, u64>,
    open: BTreeMap<(usize, usize), OpenLun>,
    orders: BTreeMap<u64, Sent>,
    last: u64,
}

/// A LUN as a target has it.
#[derive(Default)]
struct Target {
    /// The machine that has it reserved. No other one is registered.
    holder: Option<usize>,
    is_down: bool,
    /// Until then it executes nothing.
    busy_until: u64,
    /// Received, and not executed.
    queue: BTreeSet<u64>,
    /// The start of each machine that has logged in last.
    logins: BTreeMap<usize, u64>,
}

/// A LUN as a process has it.
#[derive(Default)]
struct OpenLun {
    hold: LunHold,
    /// An order has failed: no copy is opened any more.
    has_failed: bool,
    /// Nothing is done any more. It is closed when its last order is over.
    is_over: bool,
    copies: BTreeMap<MemberId, Member>,
    openings: BTreeMap<ConnId, Opening>,
    under_way: BTreeSet<u64>,
}

struct Opening {
    machine: LunOpening,
    request: Request,
    looked: Stored,
}

struct Sent {
    host: usize,
    lun: usize,
    /// The start of the machine in which it was sent.
    life: u64,
    copy: MemberId,
    order: Order,
}

#[derive(Clone, Debug)]
enum Order {
    Look(ConnId),
    Seize(ConnId),
    Claim(ConnId, Stored),
    WhoHasIt(ConnId, OpId),
    Store(Stored),
    Io(ConnId, OpId, Io),
}

#[derive(Debug)]
pub(super) enum Answer {
    Done,
    Failed,
    Looked(Stored),
    Seized { was_ours: bool },
    IsHeld(bool),
    IsSame(bool),
    Read(Vec<(u64, u64)>),
}

/// An event at a LUN.
pub(super) enum What {
    Arrives(u64),
    Executed(u64),
    Answered(u64, Answer),
    Waited(usize, ConnId),
    Flushed(usize, MemberId, ConnId, OpId),
}

impl Luns {
    pub(super) fn new(plan: &Plan, without: Without) -> Luns {
        let on = plan.luns.iter().enumerate();
        let on: BTreeMap<MemberId, usize> =
            on.filter_map(|(copy, lun)| Some((MemberId(copy as u8), (*lun)?))).collect();
        let count = on.values().max().map_or(0, |last| last + 1);
        Luns {
            without,
            random: Random::new(plan.seed ^ 0x6c75_6e73),
            on,
            targets: (0..count).map(|_| Target::default()).collect(),
            lives: BTreeMap::new(),
            open: BTreeMap::new(),
            orders: BTreeMap::new(),
            last: 0,
        }
    }

    /// The LUN of a copy.
    pub(super) fn of(&self, copy: MemberId) -> Option<usize> {
        self.on.get(&copy).copied()
    }

    /// The machine of the next owner.
    pub(super) fn next_machine(&mut self) -> usize {
        self.random.below(MACHINES) as usize
    }

    /// A new copy is on a LUN of its own, if there are LUNs.
    pub(super) fn replace(&mut self, new: MemberId) {
        if !self.on.is_empty() && self.random.chance(70) {
            self.on.insert(new, self.targets.len());
            self.targets.push(Target::default());
        }
    }

    /// No target is busy any more.
    pub(super) fn heal(&mut self) {
        self.targets.iter_mut().for_each(|target| target.busy_until = 0);
    }

    /// A target is there again.
    pub(super) fn start(&mut self, lun: usize) {
        self.targets[lun].is_down = false;
    }
}

impl World {
    pub(super) fn is_on_lun(&self, conn: ConnId) -> bool {
        self.lun_of(conn).is_some()
    }

    /// A connection's process, LUN and copy.
    fn lun_of(&self, conn: ConnId) -> Option<(usize, usize, MemberId)> {
        let known = self.conns.get(&conn)?;
        Some((known.host, self.luns.of(known.member)?, known.member))
    }

    /// Whether a process has a LUN, or can open it now.
    pub(super) fn open_lun(&mut self, host: usize, lun: usize) -> bool {
        if let Some(open) = self.luns.open.get(&(host, lun)) {
            return !open.is_over && !open.has_failed;
        }
        if self.hosts[host].owner.is_none() {
            return false;
        }
        let machine = self.hosts[host].machine;
        let mut others = self.luns.open.keys();
        let is_taken = others.any(|(of, at)| *at == lun && self.hosts[*of].machine == machine);
        if self.luns.targets[lun].is_down || (is_taken && self.luns.without.keeps(LunRule::Alone)) {
            return false;
        }
        self.luns.open.insert((host, lun), OpenLun::default());
        true
    }

    pub(super) fn happen_at_lun(&mut self, what: What) {
        match what {
            What::Arrives(id) => self.arrives(id),
            What::Executed(id) => self.executed(id),
            What::Answered(id, answer) => self.answered(id, answer),
            What::Flushed(host, copy, conn, op) => {
                self.at_lun_copy(host, copy, |member| member.done(conn, op));
            }
            What::Waited(host, conn) => {
                let paused = self.hosts[host].paused_until;
                if paused > self.now {
                    return self.at_time(paused, super::What::Lun(What::Waited(host, conn)));
                }
                self.open_step(conn, LunStep::Open);
            }
        }
    }

    /// The process of a copy's owner takes a message for the copy.
    pub(super) fn tell_lun_copy(&mut self, conn: ConnId, request: Request) {
        let Some((host, lun, copy)) = self.lun_of(conn) else { return };
        let rules = self.rules;
        let asks = self.luns.without.keeps(LunRule::Ask);
        let Some(open) = self.luns.open.get_mut(&(host, lun)).filter(|open| !open.is_over) else {
            return self.end_of_lun_conn(conn);
        };
        match request {
            Request::Open { generation, owner } => {
                let machine = LunOpening::new(generation, owner, TRUST + DRIFT, rules);
                let request = Request::Open { generation, owner };
                let looked = Stored::default();
                open.openings.insert(conn, Opening { machine, request, looked });
                self.order(host, copy, Order::Look(conn));
            }
            Request::Io { op, io: Io::Confirm } if asks => {
                self.order(host, copy, Order::WhoHasIt(conn, op));
            }
            request => self.at_lun_copy(host, copy, |member| member.request(conn, request)),
        }
    }

    pub(super) fn end_at_lun_copy(&mut self, conn: ConnId) {
        let Some((host, lun, copy)) = self.lun_of(conn) else { return };
        if let Some(open) = self.luns.open.get_mut(&(host, lun)) {
            open.openings.remove(&conn);
            self.at_lun_copy(host, copy, |member| member.ended(conn));
        }
        if let Some(conn) = self.conns.get_mut(&conn) {
            conn.at_member = false;
        }
    }

    fn end_of_lun_conn(&mut self, conn: ConnId) {
        if let Some(known) = self.conns.get_mut(&conn).filter(|known| known.at_member) {
            known.at_member = false;
            self.send(conn, 1, super::What::EndAtOwner(conn));
        }
    }

    fn at_lun_copy(
        &mut self,
        host: usize,
        copy: MemberId,
        f: impl FnOnce(&mut Member) -> Vec<MemberEffect>,
    ) {
        let Some(lun) = self.luns.of(copy) else { return };
        let open = self.luns.open.get_mut(&(host, lun)).filter(|open| !open.is_over);
        let Some(member) = open.and_then(|open| open.copies.get_mut(&copy)) else { return };
        for effect in f(member) {
            match effect {
                MemberEffect::Store(stored) => self.order(host, copy, Order::Store(stored)),
                // Each write was on the medium before it was answered.
                MemberEffect::Start(conn, op, Io::Flush) => {
                    self.at(0, super::What::Lun(What::Flushed(host, copy, conn, op)));
                }
                MemberEffect::Start(conn, op, io) => {
                    self.order(host, copy, Order::Io(conn, op, io));
                }
                MemberEffect::Send(conn, reply) => {
                    self.send(conn, 1, super::What::ToOwner(conn, reply));
                }
                MemberEffect::Close(conn) => self.end_of_lun_conn(conn),
            }
        }
    }

    /// Does the next step of opening a copy.
    fn open_step(&mut self, conn: ConnId, step: LunStep) {
        let Some((host, lun, copy)) = self.lun_of(conn) else { return };
        let rules = self.rules;
        let open = self.luns.open.get_mut(&(host, lun)).filter(|open| !open.is_over);
        let Some(open) = open.filter(|open| open.openings.contains_key(&conn)) else { return };
        match step {
            LunStep::Look => self.order(host, copy, Order::Look(conn)),
            LunStep::Seize => self.order(host, copy, Order::Seize(conn)),
            LunStep::Claim => {
                let Some(opening) = open.openings.get_mut(&conn) else { return };
                let Request::Open { generation, .. } = opening.request else { return };
                (opening.looked.generation, opening.looked.owner) = (generation, None);
                let stored = opening.looked.clone();
                self.order(host, copy, Order::Claim(conn, stored));
            }
            LunStep::Wait(until) => {
                let fast = 1000 + self.hosts[host].fast;
                let time = (until * 1000).div_ceil(fast);
                self.at_time(time, super::What::Lun(What::Waited(host, conn)));
            }
            LunStep::Refuse(stored) => {
                self.send(conn, 1, super::What::ToOwner(conn, Reply::Refused { stored }));
                self.end_of_lun_conn(conn);
            }
            LunStep::Open => {
                // Answered writes are on the medium, so they outlive each start of a system.
                const ALWAYS: BootId = BootId(1);
                let Some(opening) = open.openings.remove(&conn) else { return };
                let member = || Member::new(opening.looked, ALWAYS, REGION_BLOCKS, rules);
                open.copies.entry(copy).or_insert_with(member);
                let request = opening.request;
                self.at_lun_copy(host, copy, |member| member.request(conn, request));
            }
        }
    }

    /// An order was answered.
    fn answered(&mut self, id: u64, answer: Answer) {
        let Some(sent) = self.luns.orders.get(&id) else { return };
        let paused = self.hosts[sent.host].paused_until;
        if paused > self.now {
            return self.at_time(paused, super::What::Lun(What::Answered(id, answer)));
        }
        let Some(Sent { host, lun, copy, order, .. }) = self.luns.orders.remove(&id) else {
            return;
        };
        let now = self.clock(host);
        let Some(open) = self.luns.open.get_mut(&(host, lun)) else { return };
        open.under_way.remove(&id);
        if open.is_over {
            return self.close_lun(host, lun);
        }
        match (order, answer) {
            (_, Answer::Failed | Answer::IsHeld(false)) => self.lun_has_failed(host, lun, copy),
            (Order::Look(conn), Answer::Looked(stored)) => {
                let hold = open.hold;
                let Some(opening) = open.openings.get_mut(&conn) else { return };
                let step = opening.machine.looked(&stored, hold, now);
                opening.looked = stored;
                self.open_step(conn, step);
            }
            (Order::Seize(conn), Answer::Seized { was_ours }) => {
                let Some(opening) = open.openings.get(&conn) else { return };
                open.hold.taken(was_ours, now);
                let step = opening.machine.seized(open.hold, now);
                self.open_step(conn, step);
            }
            (Order::Claim(conn, _), _) => {
                let hold = open.hold;
                let Some(opening) = open.openings.get_mut(&conn) else { return };
                let step = opening.machine.claimed(hold, now);
                self.open_step(conn, step);
            }
            (Order::WhoHasIt(conn, op), _) => {
                let request = Request::Io { op, io: Io::Confirm };
                self.at_lun_copy(host, copy, |member| member.request(conn, request));
            }
            (Order::Store(_), _) => self.at_lun_copy(host, copy, Member::stored),
            (Order::Io(conn, op, _), Answer::IsSame(is_same)) => {
                self.at_lun_copy(host, copy, |member| member.compared(conn, op, is_same));
            }
            (Order::Io(conn, op, _), answer) => {
                if let Answer::Read(found) = answer {
                    self.hosts[host].found.insert(op, found);
                }
                self.at_lun_copy(host, copy, |member| member.done(conn, op));
            }
            _ => {}
        }
    }

    /// An order of a copy has failed.
    fn lun_has_failed(&mut self, host: usize, lun: usize, copy: MemberId) {
        let Some(open) = self.luns.open.get_mut(&(host, lun)) else { return };
        let all = self.luns.without.keeps(LunRule::LetGo);
        open.has_failed = true;
        open.copies.retain(|other, _| !all && *other != copy);
        open.is_over = open.copies.is_empty();
        let of = self.conns.iter().filter(|(_, known)| {
            known.host == host
                && self.luns.of(known.member) == Some(lun)
                && (all || known.member == copy)
        });
        let of: Vec<ConnId> = of.map(|(conn, _)| *conn).collect();
        of.into_iter().for_each(|conn| self.end_of_lun_conn(conn));
        self.close_lun(host, lun);
    }

    /// The end of a process: the kernel goes on with its orders.
    pub(super) fn process_ends(&mut self, host: usize) {
        let machine = self.hosts[host].machine;
        for (_, open) in self.luns.open.iter_mut().filter(|((of, _), _)| *of == host) {
            open.is_over = true;
        }
        for lun in 0..self.luns.targets.len() {
            let target = &mut self.luns.targets[lun];
            if !self.luns.without.keeps(LunRule::Keep) && target.holder == Some(machine) {
                target.holder = None;
            }
            self.close_lun(host, lun);
        }
    }

    /// Closes a LUN that is over, when its last order is.
    fn close_lun(&mut self, host: usize, lun: usize) {
        let is_closed = |open: &OpenLun| open.is_over && open.under_way.is_empty();
        if self.luns.open.get(&(host, lun)).is_some_and(is_closed) {
            self.luns.open.remove(&(host, lun));
        }
    }

    /// The power of a machine may be cut, with a process that ends.
    pub(super) fn may_cut_power_of(&mut self, machine: usize) {
        if self.luns.on.is_empty() || self.random.chance(50) {
            return;
        }
        for host in 0..self.hosts.len() {
            if self.hosts[host].machine == machine && self.hosts[host].owner.is_some() {
                self.stop_owner(host);
            }
        }
        *self.luns.lives.entry(machine).or_default() += 1;
        let hosts = &self.hosts;
        self.luns.open.retain(|(host, _), _| hosts[*host].machine != machine);
    }

    /// The data of a write by a process of this host, by block.
    fn data_of(&self, host: usize, io: &Io) -> Vec<(u64, u64)> {
        match io {
            Io::Write { blocks, data } | Io::Repair { blocks, data } => {
                self.data(host, *blocks, *data)
            }
            _ => Vec::new(),
        }
    }
}
