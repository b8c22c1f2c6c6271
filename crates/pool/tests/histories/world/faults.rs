//! Faults: servers and owners that end, connections that are cut or held up; and the end of all that.

use std::collections::BTreeMap;

use ferrite_pool::{
    Blocks, BootId, Config, ConnId, Event, Io, Member, MemberId, Owner, OwnerId, Region, Stored,
    Wanted,
};

use super::{BLOCKS, DRIFT, Host, PATIENCE, REGION_BLOCKS, Server, TRUST, What, World};

impl World {
    pub(super) fn start_server(&mut self, id: MemberId) {
        if let Some(lun) = self.luns.of(id) {
            return self.luns.start(lun);
        }
        let rules = self.rules;
        let server = self.servers.get_mut(&id).unwrap();
        if server.member.is_none() {
            server.start += 1;
            server.member =
                Some(Member::new(server.stored.clone(), BootId(server.boot), REGION_BLOCKS, rules));
        }
    }

    /// A server's process ends; with `power`, so does its machine.
    pub(super) fn stop_server(&mut self, id: MemberId, power: bool) {
        let server = self.servers.get_mut(&id).unwrap();
        server.member = None;
        for (conn, _, io) in std::mem::take(&mut server.under_way) {
            // Writes on their way to the medium are done, or not.
            let Io::Write { blocks, data } = io else { continue };
            if self.random.chance(50) {
                let data = self.data(self.conns[&conn].host, blocks, data);
                self.servers.get_mut(&id).unwrap().cache.extend(data);
            }
        }
        let server = self.servers.get_mut(&id).unwrap();
        if power {
            server.boot += 1;
            for (block, value) in std::mem::take(&mut server.cache) {
                if self.random.chance(50) {
                    server.durable[block as usize] = value;
                }
            }
        }
        let of: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, c)| c.member == id && c.at_member)
            .map(|(c, _)| *c)
            .collect();
        for conn in of {
            self.conns.get_mut(&conn).unwrap().at_member = false;
            self.send(conn, 1, What::EndAtOwner(conn));
        }
    }

    pub(super) fn start_owner(&mut self) {
        let machine = self.luns.next_machine();
        self.start_owner_on(machine);
    }

    pub(super) fn start_owner_on(&mut self, machine: usize) {
        let host = self.hosts.len();
        let fast = self.random.below(11);
        let (owner, effects) = Owner::start(Config {
            me: OwnerId((machine as u64 + 1) << 32 | (host as u64 + 1)),
            trust: TRUST,
            drift: DRIFT,
            patience: self.patience,
            grace: PATIENCE,
            region_blocks: REGION_BLOCKS,
            copy_blocks: self.copy_blocks,
            disk_blocks: BLOCKS,
            min: 1,
            rules: self.rules,
        });
        self.hosts.push(Host {
            owner: Some(owner),
            machine,
            fast,
            paused_until: 0,
            outstanding: BTreeMap::new(),
            requests: 0,
            values: BTreeMap::new(),
            found: BTreeMap::new(),
            no_record_until: 0,
            no_outcome_until: 0,
        });
        for effect in effects {
            self.carry_out(host, effect);
        }
        self.at(1, What::Tick(host));
        self.at(2, What::Copies(host));
        if !self.is_directed {
            self.at(5, What::Client(host));
        }
    }

    pub(super) fn stop_owner(&mut self, host: usize) {
        self.hosts[host].owner = None;
        let of: Vec<ConnId> = self
            .conns
            .iter()
            .filter(|(_, c)| c.host == host && c.at_owner)
            .map(|(c, _)| *c)
            .collect();
        for conn in of {
            self.conns.get_mut(&conn).unwrap().at_owner = false;
            self.send(conn, 0, What::EndAtMember(conn));
        }
        self.process_ends(host);
    }

    /// The map has a further copy, on a new server, in the place of another one.
    pub(super) fn replace(&mut self) {
        let old: Vec<MemberId> = self.servers.keys().copied().collect();
        let new = MemberId(old.len() as u8);
        let leaving = old[self.hosts.len() % old.len()];
        let regions = (0..BLOCKS.div_ceil(REGION_BLOCKS)).map(Region).collect();
        let stored = Stored { incomplete: true, dirty: regions, ..Stored::default() };
        self.servers.insert(new, Server::new(stored));
        self.luns.replace(new);
        self.start_server(new);
        let stay = old.iter().copied().filter(|id| *id != leaving).chain([new]).collect();
        self.copies = Some((stay, [leaving].into()));
        for host in 0..self.hosts.len() {
            self.at(20, What::Copies(host));
        }
    }

    /// An owner reads the map.
    pub(super) fn tell_copies(&mut self, host: usize) {
        if let Some((stay, leave)) = self.copies.clone() {
            self.tell(host, What::Copies(host), Event::Copies { stay, leave });
        }
    }

    /// The disk's user asks for something.
    pub(super) fn fault(&mut self) {
        if self.calm {
            return;
        }
        let pause = self.random.between(self.fault_every / 2, self.fault_every * 3 / 2);
        self.at(pause, What::Fault);
        let members: Vec<MemberId> = self.servers.keys().copied().collect();
        let member = self.random.one_of(&members);
        let last = self.hosts.len() - 1;
        let host =
            if self.random.chance(70) { last } else { self.random.below(last as u64 + 1) as usize };
        let time = self.now + self.random.one_of(&[30, 200, 500, 1200]);
        match self.random.below(12) {
            0 | 1 => drop(self.cuts.insert((host, member, 0), time)),
            2 | 3 => drop(self.cuts.insert((host, member, 1), time)),
            4 => {
                for member in members {
                    self.cuts.insert((host, member, 0), time);
                    self.cuts.insert((host, member, 1), time);
                }
            }
            5 if self.luns.of(member).is_some() => self.fail_lun(host, member),
            6 if self.luns.of(member).is_some() => self.keep_lun_busy(member, time),
            5 | 6 => self.reset(host, member),
            7 | 8 if self.luns.of(member).is_some() => {
                self.stop_lun(member);
                self.at_time(time, What::StartServer(member));
            }
            7 | 8 if self.servers[&member].member.is_some() => {
                let power = self.random.chance(60);
                self.stop_server(member, power);
                self.at_time(time, What::StartServer(member));
            }
            9 => self.hosts[host].paused_until = time,
            10 => self.hosts[host].no_record_until = time,
            11 => {
                if self.random.chance(50) {
                    self.stop_owner(host);
                    self.may_cut_power_of(self.hosts[host].machine);
                }
                let delay = self.random.one_of(&[1, 20, 300]);
                self.at(delay, What::StartOwner);
            }
            _ => {}
        }
    }

    /// Both ends hear of a connection's end, each at its own time. Messages on their way arrive before.
    pub(super) fn reset(&mut self, host: usize, member: MemberId) {
        let of = self.conns.iter().filter(|(_, c)| (c.host, c.member) == (host, member));
        let of: Vec<ConnId> =
            of.filter(|(_, c)| c.at_member && c.at_owner).map(|(id, _)| *id).collect();
        for conn in of {
            let (first, second) = (self.soon(), self.soon());
            self.at(first, What::EndAtOwner(conn));
            let late = self.conns[&conn].arrivals[0].max(self.now + second);
            self.conns.get_mut(&conn).unwrap().arrivals[0] = late;
            self.at_time(late, What::EndAtMember(conn));
        }
    }

    /// The trouble is over: one more owner, on a host that nothing is wrong with.
    pub(super) fn heal(&mut self) {
        self.calm = true;
        self.cuts.clear();
        self.luns.heal();
        for host in 0..self.hosts.len() {
            self.stop_owner(host);
        }
        let members: Vec<MemberId> = self.servers.keys().copied().collect();
        for member in members {
            self.at(1, What::StartServer(member));
        }
        self.start_owner();
        self.at(6_000, What::LastLook);
    }

    /// Reads the whole disk.
    pub(super) fn last_look(&mut self) {
        let last = self.hosts.len() - 1;
        for block in 0..BLOCKS {
            self.ask(last, Wanted::Read(Blocks { start: block, end: block + 1 }));
        }
    }
}
