//! Servers, hosts, the network between them and the record's key, in simulated time (milliseconds).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use ferrite_pool::{
    Blocks, ConnId, Data, Effect, Event, Generation, Io, Member, MemberEffect, MemberId, Members,
    OpId, Owner, OwnerId, Record, Reply, Request, RequestId, Revision, Rules, Said, Stored,
};

use crate::check::{self, Access};
use crate::random::Random;
use luns::Luns;

mod directed;
mod faults;
mod luns;
mod record;
mod user;

pub(crate) use directed::{Act, FIRST, directed};
pub(crate) use luns::{LunRule, Rule, Without};

const BLOCKS: u64 = 6;
const REGION_BLOCKS: u64 = 2;
const TRUST: u64 = 400;
const DRIFT: u64 = 20;
/// Of an owner of servers. `Open` of a LUN takes T.
const PATIENCE: u64 = 250;
const PATIENCE_WITH_LUNS: u64 = 500;
/// Until then everything goes wrong that may.
const TROUBLE: u64 = 6_000;
/// By then all has to be in order again.
const END: u64 = 30_000;
const TICK: u64 = TRUST / 8;
const MOST_OUTSTANDING: usize = 4;

/// The faults that a history may have.
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) servers: u8,
    /// Milliseconds between two faults, on average.
    pub(crate) fault_every: u64,
    /// Transactions of 100 whose outcome is not known at once.
    pub(crate) unknown: u64,
    /// Another server gets the copy of one.
    pub(crate) replaces: bool,
    /// For each copy, the number of the LUN that it is on. `None`: it is on a server.
    pub(crate) luns: Vec<Option<usize>>,
}

impl Plan {
    pub(crate) fn of_seed(seed: u64) -> Plan {
        let mut random = Random::new(seed ^ 0x706f_6f6c);
        Plan {
            seed,
            servers: if random.chance(60) { 2 } else { 3 },
            fault_every: random.one_of(&[150, 300, 600, 1200]),
            unknown: random.one_of(&[0, 10, 40]),
            replaces: false,
            luns: Vec::new(),
        }
    }
}

enum What {
    ToMember(ConnId, Request),
    ToOwner(ConnId, Reply),
    EndAtMember(ConnId),
    EndAtOwner(ConnId),
    Connect(usize, MemberId),
    MediumDone(MemberId, u64, ConnId, OpId, Io),
    Stored(MemberId, u64, Stored),
    RecordRead(usize),
    Transacted(usize, Revision, Record, u64),
    Said(usize, Said),
    RecordIs(usize, Revision, Record),
    Client(usize),
    Tick(usize),
    Copies(usize),
    Fault,
    Replace,
    Act(Act),
    StartServer(MemberId),
    StartOwner,
    Heal,
    LastLook,
    Lun(luns::What),
}

struct Conn {
    host: usize,
    member: MemberId,
    /// The last arrival at the member, and at the owner.
    arrivals: [u64; 2],
    at_member: bool,
    at_owner: bool,
}

struct Server {
    member: Option<Member>,
    stored: Stored,
    boot: u64,
    /// Counts the starts of the process.
    start: u64,
    durable: Vec<u64>,
    /// Written and not flushed.
    cache: Vec<(u64, u64)>,
    /// On the medium.
    under_way: Vec<(ConnId, OpId, Io)>,
}

impl Server {
    fn new(stored: Stored) -> Server {
        Server {
            member: None,
            stored,
            boot: 0,
            start: 0,
            durable: vec![0; BLOCKS as usize],
            cache: Vec::new(),
            under_way: Vec::new(),
        }
    }

    fn content(&self, block: u64) -> u64 {
        let cached = self.cache.iter().rev().find(|(at, _)| *at == block);
        cached.map_or(self.durable[block as usize], |(_, value)| *value)
    }
}

struct Host {
    owner: Option<Owner>,
    /// The machine that its process runs on.
    machine: usize,
    /// Its clock counts this many thousandths more.
    fast: u64,
    paused_until: u64,
    outstanding: BTreeMap<RequestId, Vec<usize>>,
    requests: u64,
    values: BTreeMap<RequestId, u64>,
    found: BTreeMap<OpId, Vec<(u64, u64)>>,
    no_record_until: u64,
    no_outcome_until: u64,
}

pub(crate) struct World {
    random: Random,
    rules: Rules,
    plan_unknown: u64,
    /// A region is copied in one piece, or in two.
    copy_blocks: u64,
    /// The copies that stay, and those that leave, once that was decided.
    copies: Option<(Members, Members)>,
    fault_every: u64,
    now: u64,
    stamp: u64,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    events: BTreeMap<u64, What>,
    servers: BTreeMap<MemberId, Server>,
    hosts: Vec<Host>,
    conns: BTreeMap<ConnId, Conn>,
    cuts: BTreeMap<(usize, MemberId, usize), u64>,
    revision: u64,
    record: Record,
    accesses: Vec<Access>,
    values: u64,
    wrong: Option<String>,
    calm: bool,
    /// Nothing happens by chance.
    is_directed: bool,
    luns: Luns,
    patience: u64,
}

impl World {
    /// Runs a history, and says what is wrong in it.
    pub(crate) fn run(plan: &Plan, without: Without) -> Result<(), String> {
        let mut world = World::new(plan, without);
        world.at(0, What::StartOwner);
        world.at(plan.fault_every, What::Fault);
        if plan.replaces {
            world.at(500 + plan.seed * 37 % (TROUBLE - 1_000), What::Replace);
        }
        world.run_to_the_end()
    }

    /// Lets everything happen, and says what is wrong.
    fn run_to_the_end(mut self) -> Result<(), String> {
        let world = &mut self;
        world.at(TROUBLE, What::Heal);
        while let Some(Reverse((time, id))) = world.queue.pop() {
            world.now = time;
            if time > END {
                break;
            }
            world.stamp += 1;
            let Some(what) = world.events.remove(&id) else { continue };
            world.happen(what);
            if let Some(why) = world.wrong.take() {
                return Err(why);
            }
            world.start_another();
            if world.is_over() {
                break;
            }
        }
        check::check(&world.accesses)?;
        world.last_state()
    }

    fn new(plan: &Plan, without: Without) -> World {
        let has_luns = plan.luns.iter().any(Option::is_some);
        let rules = without.rules();
        let members: Vec<MemberId> = (0..plan.servers).map(MemberId).collect();
        let record = Record {
            generation: Generation(0),
            owner: OwnerId(0),
            in_sync: members.iter().copied().collect(),
            out: Default::default(),
            nonce: 0,
        };
        let mut world = World {
            random: Random::new(plan.seed),
            rules,
            plan_unknown: plan.unknown,
            copy_blocks: REGION_BLOCKS - plan.seed % REGION_BLOCKS,
            copies: None,
            fault_every: plan.fault_every,
            now: 0,
            stamp: 0,
            queue: BinaryHeap::new(),
            events: BTreeMap::new(),
            servers: members
                .iter()
                .map(|member| (*member, Server::new(Stored::default())))
                .collect(),
            hosts: Vec::new(),
            conns: BTreeMap::new(),
            cuts: BTreeMap::new(),
            revision: 1,
            record,
            accesses: Vec::new(),
            values: 0,
            wrong: None,
            calm: false,
            is_directed: false,
            luns: Luns::new(plan, without),
            patience: if has_luns { PATIENCE_WITH_LUNS } else { PATIENCE },
        };
        for member in members {
            world.start_server(member);
        }
        world
    }

    fn at(&mut self, delay: u64, what: What) {
        self.at_time(self.now + delay, what);
    }

    fn at_time(&mut self, time: u64, what: What) {
        self.values += 1;
        let id = self.values;
        self.queue.push(Reverse((time, id)));
        self.events.insert(id, what);
    }

    fn soon(&mut self) -> u64 {
        let rare = self.random.chance(3) && !self.calm && !self.is_directed;
        if rare { self.random.between(5, 300) } else { self.random.between(1, 5) }
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Lun(what) => self.happen_at_lun(what),
            What::ToMember(conn, request) if self.is_on_lun(conn) => {
                self.tell_lun_copy(conn, request);
            }
            What::EndAtMember(conn) if self.is_on_lun(conn) => self.end_at_lun_copy(conn),
            What::ToMember(conn, request) => {
                self.at_member(conn, |member, conn| member.request(conn, request));
            }
            What::EndAtMember(conn) => {
                self.at_member(conn, |member, conn| member.ended(conn));
                if let Some(conn) = self.conns.get_mut(&conn) {
                    conn.at_member = false;
                }
            }
            What::ToOwner(conn, reply) => {
                let of = self.conns.get(&conn).filter(|c| c.at_owner).map(|c| c.host);
                if let Some(host) = of {
                    self.tell(host, What::ToOwner(conn, reply.clone()), Event::Reply(conn, reply));
                }
            }
            What::EndAtOwner(conn) => {
                let of = self.conns.get(&conn).filter(|c| c.at_owner).map(|c| c.host);
                if let Some(host) = of {
                    self.tell(host, What::EndAtOwner(conn), Event::Ended(conn));
                }
            }
            What::Connect(host, member) => self.connect(host, member),
            What::MediumDone(member, start, conn, op, io) => {
                self.medium_done(member, start, conn, op, io);
            }
            What::Stored(member, start, stored) => {
                let server = self.servers.get_mut(&member).unwrap();
                if server.start == start
                    && let Some(running) = &mut server.member
                {
                    server.stored = stored;
                    let effects = running.stored();
                    self.carry_out_member(member, effects);
                }
            }
            What::RecordRead(host) => {
                let (revision, record) = (Revision(self.revision), self.record.clone());
                let delay = self.soon();
                self.at(delay, What::RecordIs(host, revision, record));
            }
            What::RecordIs(host, revision, record) => {
                let again = What::RecordIs(host, revision, record.clone());
                self.tell(host, again, Event::Record(Some((revision, record))));
            }
            What::Transacted(host, compare, record, kind) => {
                self.transacted(host, compare, record, kind);
            }
            What::Said(host, said) => {
                self.tell(host, What::Said(host, said.clone()), Event::Said(said));
            }
            What::Client(host) => self.client(host),
            What::Tick(host) => {
                if self.hosts[host].owner.is_some() {
                    self.at(TICK, What::Tick(host));
                    if self.hosts[host].paused_until <= self.now {
                        self.tell(host, What::Tick(host), Event::Tick);
                    }
                }
            }
            What::Fault => self.fault(),
            What::Replace => self.replace(),
            What::Copies(host) => self.tell_copies(host),
            What::Act(act) => self.act(act),
            What::StartServer(member) => self.start_server(member),
            What::StartOwner if self.calm => {}
            What::StartOwner => self.start_owner(),
            What::Heal => self.heal(),
            What::LastLook => self.last_look(),
        }
    }

    /// Tells an owner something, when its host is not paused.
    fn tell(&mut self, host: usize, again: What, event: Event) {
        let paused = self.hosts[host].paused_until;
        if paused > self.now {
            return self.at_time(paused, again);
        }
        let now = self.clock(host);
        let Some(owner) = &mut self.hosts[host].owner else { return };
        let effects = owner.handle(now, event);
        for effect in effects {
            self.carry_out(host, effect);
        }
    }

    /// The time of a host's clock.
    fn clock(&self, host: usize) -> u64 {
        self.now + self.now * self.hosts[host].fast / 1000
    }

    fn carry_out(&mut self, host: usize, effect: Effect) {
        match effect {
            Effect::Read => {
                let delay = self.record_after(host);
                self.at(delay, What::RecordRead(host));
            }
            Effect::Transact { compare, record } => {
                let delay = self.record_after(host);
                let is_unknown = self.random.chance(self.plan_unknown) && !self.calm;
                let kind = if is_unknown { 1 + self.random.below(3) } else { 0 };
                self.at(delay, What::Transacted(host, compare, record, kind));
            }
            Effect::Connect(member) => {
                let delay = self.soon();
                self.at(delay, What::Connect(host, member));
            }
            Effect::Close(conn) => {
                if let Some(known) = self.conns.get_mut(&conn) {
                    known.at_owner = false;
                }
                self.send(conn, 0, What::EndAtMember(conn));
            }
            Effect::Send(conn, request) => self.send(conn, 0, What::ToMember(conn, request)),
            Effect::AnswerRead(id, op) => {
                let found = self.hosts[host].found.get(&op).cloned().unwrap_or_default();
                for index in self.hosts[host].outstanding.remove(&id).unwrap_or_default() {
                    let access = &mut self.accesses[index];
                    let value = found.iter().find(|(block, _)| *block == access.block);
                    match value {
                        Some((_, value)) => access.value = *value,
                        None => self.wrong = Some("a read was answered without data".to_owned()),
                    }
                    access.ended = Some(self.stamp);
                }
            }
            Effect::Answer(id) => {
                for index in self.hosts[host].outstanding.remove(&id).unwrap_or_default() {
                    self.accesses[index].ended = Some(self.stamp);
                }
            }
            Effect::Fail(id, _) => drop(self.hosts[host].outstanding.remove(&id)),
        }
    }

    /// Sends along a connection. Messages stay in order, and a cut holds them up.
    fn send(&mut self, conn: ConnId, to: usize, what: What) {
        if self.is_on_lun(conn) {
            // A connection of a process to itself.
            return self.at(0, what);
        }
        let delay = self.soon();
        let now = self.now;
        let Some(known) = self.conns.get_mut(&conn) else { return };
        let cut = self.cuts.get(&(known.host, known.member, to)).copied().unwrap_or(0);
        let time = (now.max(cut) + delay).max(known.arrivals[to]);
        known.arrivals[to] = time;
        self.at_time(time, what);
    }

    fn connect(&mut self, host: usize, member: MemberId) {
        let cut = |to| self.cuts.get(&(host, member, to)).copied().unwrap_or(0) > self.now;
        let fails = match self.luns.of(member) {
            None => self.servers[&member].member.is_none() || cut(0) || cut(1),
            Some(lun) => cut(0) || cut(1) || !self.open_lun(host, lun),
        };
        if fails {
            let again = What::Connect(host, member);
            return self.tell(host, again, Event::Unconnected(member));
        }
        self.values += 1;
        let conn = ConnId(self.values);
        let arrivals = [self.now; 2];
        self.conns.insert(conn, Conn { host, member, arrivals, at_member: true, at_owner: true });
        let paused = self.hosts[host].paused_until;
        if paused > self.now {
            self.conns.remove(&conn);
            return self.at_time(paused, What::Connect(host, member));
        }
        self.tell(host, What::Connect(host, member), Event::Connected(member, conn));
    }

    fn at_member(
        &mut self,
        conn: ConnId,
        f: impl FnOnce(&mut Member, ConnId) -> Vec<MemberEffect>,
    ) {
        let Some(known) = self.conns.get(&conn).filter(|known| known.at_member) else { return };
        let id = known.member;
        if let Some(member) = &mut self.servers.get_mut(&id).unwrap().member {
            let effects = f(member, conn);
            self.carry_out_member(id, effects);
        }
    }

    fn carry_out_member(&mut self, id: MemberId, effects: Vec<MemberEffect>) {
        let start = self.servers[&id].start;
        for effect in effects {
            match effect {
                MemberEffect::Store(stored) => {
                    let delay = self.soon();
                    self.at(delay, What::Stored(id, start, stored));
                }
                MemberEffect::Start(conn, op, io) => {
                    let server = self.servers.get_mut(&id).unwrap();
                    server.under_way.push((conn, op, io.clone()));
                    let delay = self.soon();
                    self.at(delay, What::MediumDone(id, start, conn, op, io));
                }
                MemberEffect::Send(conn, reply) => {
                    if self.conns.get(&conn).is_some_and(|conn| conn.at_member) {
                        self.send(conn, 1, What::ToOwner(conn, reply));
                    }
                }
                MemberEffect::Close(conn) => {
                    if let Some(known) = self.conns.get_mut(&conn) {
                        known.at_member = false;
                    }
                    self.send(conn, 1, What::EndAtOwner(conn));
                }
            }
        }
    }

    /// The data that a write has, by block.
    fn data(&self, host: usize, blocks: Blocks, data: Data) -> Vec<(u64, u64)> {
        match data {
            Data::OfRequest(id) => {
                let value = self.hosts[host].values[&id];
                (blocks.start..blocks.end).map(|block| (block, value)).collect()
            }
            Data::OfRead(op) => self.hosts[host].found[&op].clone(),
        }
    }

    fn medium_done(&mut self, id: MemberId, start: u64, conn: ConnId, op: OpId, io: Io) {
        if self.servers[&id].start != start || self.servers[&id].member.is_none() {
            return;
        }
        let host = self.conns[&conn].host;
        let server = self.servers.get_mut(&id).unwrap();
        server.under_way.retain(|(c, o, _)| (*c, *o) != (conn, op));
        let mut is_same = None;
        match io {
            Io::Write { blocks, data } => {
                let data = self.data(host, blocks, data);
                self.servers.get_mut(&id).unwrap().cache.extend(data);
            }
            Io::Repair { blocks, data } => {
                let data = self.data(host, blocks, data);
                let server = &self.servers[&id];
                is_same = Some(data.iter().all(|(at, value)| server.content(*at) == *value));
            }
            Io::Read { blocks } => {
                let blocks = blocks.start..blocks.end;
                let found = blocks.map(|block| (block, server.content(block))).collect();
                self.hosts[host].found.insert(op, found);
            }
            Io::Flush => {
                for (block, value) in std::mem::take(&mut server.cache) {
                    server.durable[block as usize] = value;
                }
            }
            _ => {}
        }
        let member = self.servers.get_mut(&id).unwrap().member.as_mut().unwrap();
        let effects = match is_same {
            Some(is_same) => member.compared(conn, op, is_same),
            None => member.done(conn, op),
        };
        self.carry_out_member(id, effects);
    }
}
