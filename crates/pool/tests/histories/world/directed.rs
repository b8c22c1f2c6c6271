//! Histories that are made for one rule: chance does not find them in 10,000 seeds.

use ferrite_pool::{Blocks, MemberId, Rules, Wanted};

use super::{Plan, What, World};

/// What happens at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// A process takes the disk over; the first one is host 0.
    Start,
    /// What a member sends to a host, and a host to a member, is held up until then.
    Cut { host: usize, member: u8, until: u64 },
    /// A host does not reach the record until then.
    CutRecord { host: usize, until: u64 },
    /// A host does not hear what became of its changes until then.
    HideOutcome { host: usize, until: u64 },
    /// A server's process ends.
    Stop(u8),
    /// It is started.
    Restart(u8),
    /// The user of a host asks for this.
    Ask(usize, Wanted),
}

/// Lets these acts happen, by their times in milliseconds, on so many servers, and then brings all in order.
pub(crate) fn directed(servers: u8, rules: Rules, acts: &[(u64, Act)]) -> Result<(), String> {
    reads(servers, rules, acts).map(drop)
}

/// The same, and how often each server was read from.
pub(crate) fn reads(servers: u8, rules: Rules, acts: &[(u64, Act)]) -> Result<Vec<u64>, String> {
    let plan = Plan { seed: 1, servers, fault_every: u64::MAX, unknown: 0, replaces: false };
    let mut world = World::new(&plan, rules);
    world.is_directed = true;
    for (time, act) in acts {
        world.at_time(*time, What::Act(*act));
    }
    world.run_to_the_end()?;
    Ok(world.servers.values().map(|server| server.reads).collect())
}

/// The first block of the disk.
pub(crate) const FIRST: Blocks = Blocks { start: 0, end: 1 };

impl World {
    pub(super) fn act(&mut self, act: Act) {
        match act {
            Act::Start => self.start_owner(),
            Act::Cut { host, member, until } => {
                self.cuts.insert((host, MemberId(member), 0), until);
                self.cuts.insert((host, MemberId(member), 1), until);
            }
            Act::CutRecord { host, until } => self.hosts[host].no_record_until = until,
            Act::HideOutcome { host, until } => self.hosts[host].no_outcome_until = until,
            Act::Stop(member) => self.stop_server(MemberId(member), false),
            Act::Restart(member) => self.start_server(MemberId(member)),
            Act::Ask(host, wanted) => self.ask(host, wanted),
        }
    }
}
