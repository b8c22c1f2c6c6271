//! Faults, and their end.

use ferrite_member::Server;
use ferrite_pool::{MemberId, OwnerId, Revision};

use super::{Host, POOL, TROUBLE, What, World, channel, now};
use crate::set::Set;

impl World {
    pub(super) fn start_server(&mut self, member: MemberId) {
        let Some(machine) = self.machines.get_mut(&member) else { return };
        if machine.power.is_off() {
            machine.power.restart().unwrap();
        }
        if machine.server.is_none() {
            let name = machine.place.server.clone();
            let server = Server::simulated(machine.folder.path(), POOL, &name, &machine.power);
            machine.server = Some(server.unwrap());
        }
    }

    /// A server's process ends; with `power`, so does its machine.
    pub(super) fn stop_server(&mut self, member: MemberId, power: bool) {
        let Some(machine) = self.machines.get_mut(&member) else { return };
        match power {
            true => machine.power.cut(),
            false => machine.power.end_process(),
        }
        machine.server = None;
        self.end_wires_of(member);
    }

    /// Machines whose power was cut in the middle of something.
    pub(super) fn see_cuts(&mut self) {
        let off = self.machines.iter().filter(|(_, it)| it.power.is_off() && it.server.is_some());
        for member in off.map(|(member, _)| *member).collect::<Vec<_>>() {
            self.stop_server(member, true);
            let delay = self.random.one_of(&[50, 1_000, 5_000]);
            self.at(delay, What::StartServer(member));
        }
    }

    pub(super) fn start_owner(&mut self) {
        let host = self.hosts.len();
        let places = self.machines.iter().map(|(id, machine)| (*id, machine.place.clone()));
        let (asked, records) = channel();
        let found = (Revision(self.revision), self.record.clone());
        let me = OwnerId((host as u64 + 1) << 32 | 1);
        let called = ("the disk".to_owned(), String::new());
        let set = Set::new(called, places.collect(), self.bytes, me, found, asked, now);
        let (threads, connects) = self
            .machines
            .keys()
            .map(|member| {
                let (go, asked) = channel();
                ((*member, go), (*member, asked))
            })
            .unzip();
        self.hosts.push(Host {
            set,
            is_alive: true,
            paused_until: 0,
            no_record_until: 0,
            fast: self.random.below(11),
            connects,
            records,
            outstanding: Default::default(),
        });
        self.tell(host, |set| set.begin(threads));
        self.at(1, What::Tick(host));
        self.at(5, What::Client(host));
    }

    /// An owner's process ends.
    pub(super) fn stop_owner(&mut self, host: usize) {
        let host = &mut self.hosts[host];
        host.is_alive = false;
        // Its requests under way have no answer.
        host.outstanding.clear();
        host.set.stop();
    }

    pub(super) fn fault(&mut self) {
        if self.calm {
            return;
        }
        let pause = self.random.between(100, 2_000);
        self.at(pause, What::Fault);
        let members: Vec<MemberId> = self.machines.keys().copied().collect();
        let member = self.random.one_of(&members);
        let last = self.hosts.len() - 1;
        let is_last = self.random.chance(70);
        let host = if is_last { last } else { self.random.below(last as u64 + 1) as usize };
        let time = self.now + self.random.one_of(&[100, 700, 2_000, 4_000]);
        // Mostly one that the disk can do without: when all have lost power, it has failed for good.
        let may_cut = self.is_spare(member) || self.random.chance(10);
        match self.random.below(12) {
            0 => drop(self.cuts.insert((host, member, true), time)),
            1 => drop(self.cuts.insert((host, member, false), time)),
            2 => {
                for member in members {
                    self.cuts.insert((host, member, true), time);
                    self.cuts.insert((host, member, false), time);
                }
            }
            // In the middle of one of the next writes or syncs.
            3..=5 if may_cut => {
                let steps = self.random.between(1, 12);
                self.machines[&member].power.cut_after(steps);
            }
            6 | 7 if self.machines[&member].server.is_some() => {
                let power = may_cut && self.random.chance(50);
                self.stop_server(member, power);
                self.at_time(time, What::StartServer(member));
            }
            8 => self.hosts[host].paused_until = time,
            9 => self.hosts[host].no_record_until = time,
            10 => {
                if self.random.chance(50) {
                    self.stop_owner(host);
                }
                let delay = self.random.one_of(&[1, 300, 1_500]);
                self.at(delay, What::StartOwner);
            }
            _ => {}
        }
    }

    /// Whether another copy in sync is on a machine that runs.
    fn is_spare(&self, member: MemberId) -> bool {
        let mut others = self.record.in_sync.iter().filter(|other| **other != member);
        others.any(|other| self.machines[other].server.is_some())
    }

    /// The trouble is over: one more owner, on a host that nothing is wrong with.
    pub(super) fn heal(&mut self) {
        self.calm = true;
        self.cuts.clear();
        (0..self.hosts.len()).for_each(|host| self.stop_owner(host));
        for machine in self.machines.values() {
            machine.power.cut_after(u64::MAX);
        }
        let members: Vec<MemberId> = self.machines.keys().copied().collect();
        members.into_iter().for_each(|member| self.at(1, What::StartServer(member)));
        self.start_owner();
        self.at(9_500, What::LastLook);
        debug_assert!(self.now >= TROUBLE);
    }
}
