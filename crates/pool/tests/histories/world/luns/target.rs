//! A target that executes orders, and the faults on their way.

use ferrite_pool::{Io, MemberId};

use super::{Answer, LunRule, Order, Sent, What};
use crate::world::World;

impl World {
    fn soon_at_lun(&mut self, delay: u64, what: What) {
        self.at(delay, crate::world::What::Lun(what));
    }

    /// Until when orders (0) or answers (1) between a host and a LUN are held up.
    fn held_up(&self, host: usize, lun: usize, way: usize) -> u64 {
        let on = self.luns.on.iter().filter(|(_, at)| **at == lun);
        let cuts = on.filter_map(|(copy, _)| self.cuts.get(&(host, *copy, way)));
        cuts.copied().max().unwrap_or(0).saturating_sub(self.now)
    }

    /// Sends an order of a process that has the LUN of a copy open.
    pub(super) fn order(&mut self, host: usize, copy: MemberId, order: Order) {
        let Some(lun) = self.luns.of(copy) else { return };
        self.luns.last += 1;
        let id = self.luns.last;
        let Some(open) = self.luns.open.get_mut(&(host, lun)) else { return };
        open.under_way.insert(id);
        let life = self.luns.lives.get(&self.hosts[host].machine).copied().unwrap_or(0);
        self.luns.orders.insert(id, Sent { host, lun, life, copy, order });
        let delay = self.held_up(host, lun, 0) + self.soon();
        self.soon_at_lun(delay, What::Arrives(id));
    }

    fn answer(&mut self, id: u64, answer: Answer) {
        let Some(Sent { host, lun, .. }) = self.luns.orders.get(&id) else { return };
        let held_up = self.held_up(*host, *lun, 1);
        let delay = held_up + self.soon();
        self.soon_at_lun(delay, What::Answered(id, answer));
    }

    pub(super) fn arrives(&mut self, id: u64) {
        let Some(Sent { host, lun, life, copy, order }) = self.luns.orders.get(&id) else { return };
        let (host, lun, life, copy, order) = (*host, *lun, *life, *copy, order.clone());
        let machine = self.hosts[host].machine;
        let target = &mut self.luns.targets[lun];
        if target.is_down {
            return self.soon_at_lun(5, What::Arrives(id));
        }
        let login = target.logins.entry(machine).or_default();
        if *login > life {
            // Its session has ended.
            return drop(self.luns.orders.remove(&id));
        }
        let is_new = *login < life;
        *login = life;
        let orders = &self.luns.orders;
        if is_new {
            let is_old = |id: &u64| {
                let sent = orders.get(id);
                sent.is_some_and(|sent| {
                    sent.life < life && self.hosts[sent.host].machine == machine
                })
            };
            target.queue.retain(|id| !is_old(id));
        }
        let is_free = target.holder.is_none_or(|holder| holder == machine);
        match order {
            Order::Look(_) => self.answer(id, Answer::Looked(self.servers[&copy].stored.clone())),
            Order::WhoHasIt(..) => {
                let is_held =
                    target.holder == Some(machine) || !self.luns.without.keeps(LunRule::Reserve);
                self.answer(id, Answer::IsHeld(is_held));
            }
            Order::Seize(_) => self.seize(id, machine, lun),
            Order::Io(_, _, Io::Read { blocks }) => {
                let blocks = blocks.start..blocks.end;
                let found = blocks.map(|block| (block, self.servers[&copy].content(block)));
                self.answer(id, Answer::Read(found.collect()));
            }
            Order::Io(_, _, io @ Io::Repair { .. }) => {
                let data = self.data_of(host, &io);
                let server = &self.servers[&copy];
                let is_same = data.iter().all(|(at, value)| server.content(*at) == *value);
                self.answer(id, Answer::IsSame(is_same));
            }
            Order::Store(_) | Order::Claim(..) | Order::Io(..) if is_free => {
                target.queue.insert(id);
                let busy = target.busy_until.saturating_sub(self.now);
                let delay = busy + self.soon();
                self.soon_at_lun(delay, What::Executed(id));
            }
            Order::Store(_) | Order::Claim(..) | Order::Io(..) => self.answer(id, Answer::Failed),
        }
    }

    /// Reserves a LUN for this machine, and takes the reservation from any other machine.
    fn seize(&mut self, id: u64, machine: usize, lun: usize) {
        let without = self.luns.without;
        let target = &mut self.luns.targets[lun];
        let was_ours = target.holder == Some(machine);
        if without.keeps(LunRule::Reserve) {
            target.holder = Some(machine);
        }
        let hosts = &self.hosts;
        let orders = &self.luns.orders;
        let of_others = |id: &u64| orders.get(id).is_some_and(|o| hosts[o.host].machine != machine);
        let aborted: Vec<u64> = target.queue.iter().copied().filter(of_others).collect();
        if without.keeps(LunRule::Abort) {
            target.queue.retain(|id| !aborted.contains(id));
            aborted.into_iter().for_each(|id| self.answer(id, Answer::Failed));
        }
        self.answer(id, Answer::Seized { was_ours });
    }

    pub(super) fn executed(&mut self, id: u64) {
        let Some(Sent { lun, .. }) = self.luns.orders.get(&id) else { return };
        if self.luns.targets[*lun].queue.remove(&id) {
            self.execute(id);
            self.answer(id, Answer::Done);
        }
    }

    /// Does a write that is in the queue.
    fn execute(&mut self, id: u64) {
        let Some(Sent { host, copy, order, .. }) = self.luns.orders.get(&id) else { return };
        let (copy, order) = (*copy, order.clone());
        let data = match &order {
            Order::Io(_, _, io) => self.data_of(*host, io),
            _ => Vec::new(),
        };
        let is_durable = self.luns.without.keeps(LunRule::Durable);
        let Some(medium) = self.servers.get_mut(&copy) else { return };
        if let Order::Store(stored) | Order::Claim(_, stored) = order {
            medium.stored = stored;
        }
        match is_durable {
            true => data.into_iter().for_each(|(at, value)| medium.durable[at as usize] = value),
            false => medium.cache.extend(data),
        }
    }

    /// Orders in a target's queue are done, or not.
    fn tear(&mut self, ids: Vec<u64>) {
        for id in ids {
            if self.random.chance(50) {
                self.execute(id);
            }
            self.answer(id, Answer::Failed);
        }
    }

    /// The target of a copy loses its power.
    pub(in crate::world) fn stop_lun(&mut self, copy: MemberId) {
        let Some(lun) = self.luns.of(copy) else { return };
        let persists = self.luns.without.keeps(LunRule::Persist);
        let target = &mut self.luns.targets[lun];
        target.is_down = true;
        if !persists {
            target.holder = None;
        }
        let queue = std::mem::take(&mut target.queue).into_iter().collect();
        self.tear(queue);
        let on: Vec<MemberId> =
            self.luns.on.iter().filter(|(_, at)| **at == lun).map(|(copy, _)| *copy).collect();
        for copy in on {
            let Some(medium) = self.servers.get_mut(&copy) else { continue };
            for (block, value) in std::mem::take(&mut medium.cache) {
                if self.random.chance(50) {
                    medium.durable[block as usize] = value;
                }
            }
        }
    }

    /// The target of a copy executes no writes until then.
    pub(in crate::world) fn keep_lun_busy(&mut self, copy: MemberId, until: u64) {
        if let Some(lun) = self.luns.of(copy) {
            self.luns.targets[lun].busy_until = until;
        }
    }

    /// A host's orders to a copy's LUN fail, and are over.
    pub(in crate::world) fn fail_lun(&mut self, host: usize, copy: MemberId) {
        let Some(lun) = self.luns.of(copy) else { return };
        let mine = |sent: &Sent| (sent.host, sent.lun) == (host, lun);
        let sent = self.luns.orders.iter().filter(|(_, sent)| mine(sent));
        let queue = &self.luns.targets[lun].queue;
        let (queued, away): (Vec<u64>, Vec<u64>) =
            sent.map(|(id, _)| *id).partition(|id| queue.contains(id));
        self.luns.targets[lun].queue.retain(|id| !queued.contains(id));
        self.tear(queued);
        if let (Some(first), Some(open)) = (away.first(), self.luns.open.get_mut(&(host, lun))) {
            // One of those that are on their way.
            open.under_way.remove(first);
            self.luns.orders.remove(first);
            self.lun_has_failed(host, lun, copy);
        }
    }
}
