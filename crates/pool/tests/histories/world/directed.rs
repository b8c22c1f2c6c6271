//! Histories that are made for one rule: chance does not find them in 10,000 seeds.

use ferrite_pool::{Blocks, MemberId, Wanted};

use super::{Plan, What, Without, World};

/// An event at a given time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// A process takes the disk over; the first one is host 0.
    Start,
    /// A process on this machine takes the disk over. With `Start` each process is on a machine of its own.
    StartOn(usize),
    /// A host's process ends.
    Kill(usize),
    /// Messages from a host to a member are held up until then, but not those back.
    Hold { host: usize, member: u8, until: u64 },
    /// Messages from a member to a host are held up until then, but not those of the host.
    HoldBack { host: usize, member: u8, until: u64 },
    /// A host's operations under way on the LUN of a copy fail.
    FailLun { host: usize, member: u8 },
    /// The target of a copy executes no writes until then.
    Busy { member: u8, until: u64 },
    /// The target of a copy starts again.
    RestartLun(u8),
    /// All requests of a host have to be answered by now.
    Idle(usize),
    /// Messages from a member to a host, and from the host to the member, are held up until then.
    Cut { host: usize, member: u8, until: u64 },
    /// A host does not reach the record until then.
    CutRecord { host: usize, until: u64 },
    /// A host does not hear the outcome of its changes until then.
    HideOutcome { host: usize, until: u64 },
    /// A server's process ends.
    Stop(u8),
    /// It is started.
    Restart(u8),
    /// The user of a host asks for this.
    Ask(usize, Wanted),
}

/// Lets these acts happen, by their times in milliseconds, on servers and LUNs ([`Plan::luns`]), and then brings all in order.
pub(crate) fn directed(
    luns: &[Option<usize>],
    without: Without,
    acts: &[(u64, Act)],
) -> Result<(), String> {
    let plan = Plan {
        seed: 1,
        servers: luns.len() as u8,
        fault_every: u64::MAX,
        unknown: 0,
        replaces: false,
        luns: luns.to_vec(),
    };
    let mut world = World::new(&plan, without);
    world.is_directed = true;
    for (time, act) in acts {
        world.at_time(*time, What::Act(*act));
    }
    world.run_to_the_end()
}

/// The first block of the disk.
pub(crate) const FIRST: Blocks = Blocks { start: 0, end: 1 };

impl World {
    pub(super) fn act(&mut self, act: Act) {
        match act {
            Act::Start => self.start_owner_on(self.hosts.len()),
            Act::StartOn(machine) => self.start_owner_on(machine),
            Act::Kill(host) => self.stop_owner(host),
            Act::FailLun { host, member } => self.fail_lun(host, MemberId(member)),
            Act::Hold { host, member, until } => {
                self.cuts.insert((host, MemberId(member), 0), until);
            }
            Act::HoldBack { host, member, until } => {
                self.cuts.insert((host, MemberId(member), 1), until);
            }
            Act::Busy { member, until } => self.keep_lun_busy(MemberId(member), until),
            Act::RestartLun(member) => {
                self.stop_lun(MemberId(member));
                self.start_server(MemberId(member));
            }
            Act::Idle(host) if self.hosts[host].outstanding.is_empty() => {}
            Act::Idle(host) => self.wrong = Some(format!("requests of {host} wait")),
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
