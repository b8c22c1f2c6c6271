//! Each guest's task, and the lines that it and the backend's process exchange.

use std::num::NonZero;

use ferrite_disk::Disk;
use ferrite_xen::abi::{MAX_DIRECT_SEGMENTS, MAX_RING_ORDER, Protocol, SECTOR_BYTES};
use ferrite_xen::hypervisor::PAGE_SIZE;
use ferrite_xen::mover::Mover;
use serde::{Deserialize, Serialize};

use super::cli::{BenchArgs, Mode};
use super::tally::Tally;
use ferrite::exit::{Code, Failure};

/// How long guests poll before they sleep, if there are enough processors.
const POLL_US: u32 = 50;

/// One guest's work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Task {
    /// Its disk.
    pub(crate) devid: u32,
    pub(crate) mode: Mode,
    pub(crate) block_bytes: u32,
    pub(crate) depth: u32,
    /// Send requests only when none is in flight, as many as `depth`.
    pub(crate) batch: bool,
    /// Write no page twice.
    pub(crate) distinct: bool,
    /// Send so many batches, each when the backend sleeps.
    pub(crate) steps: Option<u32>,
    pub(crate) ring_order: u32,
    pub(crate) max_indirect: u32,
    /// How long to poll for responses before sleeping.
    pub(crate) poll_us: u32,
    /// Use persistent grants, if the backend offers them.
    pub(crate) persistent: bool,
    /// Queues to connect.
    pub(crate) queues: u32,
    /// The sectors of each of its queues that has work: first and count.
    pub(crate) parts: Vec<(u64, u64)>,
}

impl Task {
    /// Pages of one request's data.
    pub(crate) fn block_pages(&self) -> u32 {
        self.block_bytes.div_ceil(PAGE_SIZE as u32)
    }
}

/// Times of the monotonic clock, which is the same in all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Times {
    /// The time of the first request.
    pub(crate) start_ns: u64,
    /// Requests that end from this time on count.
    pub(crate) from_ns: u64,
    /// Requests that end from this time on do not count, and none is sent.
    pub(crate) until_ns: u64,
    /// The time at which the guest releases its disk.
    pub(crate) leave_ns: u64,
}

/// The lines of a guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Said {
    /// It is connected.
    Ready,
    /// It has ended successfully.
    Done(Tally),
    /// It has failed.
    Failed(String),
}

/// The guests' tasks. Every queue of every guest has its own part of the disk, all of the same size, so no two queues
/// share a block.
pub(crate) fn split(args: &BenchArgs, disk: &Disk) -> Result<Vec<Task>, Failure> {
    let ring_order = ring_order(args)?;
    let segments = (args.block as usize).div_ceil(PAGE_SIZE);
    let limit = (args.indirect as usize).max(MAX_DIRECT_SEGMENTS);
    if segments > limit {
        return Err(usage(
            format!("a request of {} bytes has {segments} segments", args.block),
            format!("say --indirect {segments} or more, or a smaller --block"),
        ));
    }
    let loaded = loaded(args)?;
    let queues = u64::from(args.guests) * u64::from(loaded);
    let block_sectors = u64::from(args.block) / SECTOR_BYTES;
    let part = disk.sectors() / queues / block_sectors * block_sectors;
    if part == 0 {
        return Err(usage(
            format!("{} is too small: there is not a block for each queue", args.image),
            "use a larger image, smaller blocks, or fewer guests and queues",
        ));
    }
    let parts: Vec<(u64, u64)> = (0..queues).map(|i| (i * part, part)).collect();
    let task = |parts: &[(u64, u64)]| Task {
        devid: super::host::DEVID,
        mode: args.mode,
        block_bytes: args.block,
        depth: args.depth,
        batch: args.batch,
        distinct: args.distinct,
        steps: args.steps,
        ring_order,
        max_indirect: args.indirect,
        poll_us: poll_us(args, loaded),
        queues: args.queues,
        persistent: args.front_persistent.unwrap_or(args.mover == Mover::Persistent),
        parts: parts.to_vec(),
    };
    Ok(parts.chunks(loaded as usize).map(task).collect())
}

/// Queues of a guest that have work.
fn loaded(args: &BenchArgs) -> Result<u32, Failure> {
    let loaded = args.load_queues.unwrap_or(args.queues);
    if loaded > args.queues {
        return Err(usage(
            format!("{loaded} queues cannot have work when there are {}", args.queues),
            "say more --queues, or fewer --load-queues",
        ));
    }
    Ok(loaded)
}

fn ring_order(args: &BenchArgs) -> Result<u32, Failure> {
    let holds = |order: &u32| Protocol::X86_64.entries(*order) >= args.depth;
    let smallest = (0..=MAX_RING_ORDER).find(holds);
    match args.ring_order.or(smallest) {
        Some(order) if holds(&order) => Ok(order),
        _ => Err(usage(
            format!("a ring of that order holds fewer than {} requests", args.depth),
            "say a larger --ring-order, or leave it out, or a smaller --depth",
        )),
    }
}

/// The polling time. Waking a sleeping processor can take longer than a request, and would be measured. But a guest
/// that polls on a processor that others need takes their time.
fn poll_us(args: &BenchArgs, loaded: u32) -> u32 {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    let wanted = 2 * args.guests as usize * loaded as usize;
    args.guest_poll.unwrap_or(if wanted <= processors { POLL_US } else { 0 })
}

fn usage(why: String, help: impl Into<String>) -> Failure {
    Failure::new("cannot measure that", why, help).with_code(Code::USAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::cli::Cli;
    use clap::Parser;
    use ferrite_disk::OpenOptions;

    fn try_split(line: &str) -> Result<Vec<Task>, Failure> {
        let words = ["ferrite-bench"].into_iter().chain(line.split_whitespace());
        let args = Cli::try_parse_from(words).unwrap().bench;
        split(&args, &Disk::open(&args.image, &OpenOptions::default()).unwrap())
    }

    #[test]
    fn every_queue_of_every_guest_has_its_own_blocks() {
        let tasks = try_split("null:1M --guests 2 --queues 3 --block 8K").unwrap();
        assert_eq!(tasks.len(), 2);
        let parts: Vec<_> = tasks.iter().flat_map(|t| t.parts.clone()).collect();
        // 2048 sectors for 6 queues, in blocks of 16.
        let expected: Vec<(u64, u64)> = (0..6).map(|i| (i * 336, 336)).collect();
        assert_eq!(parts, expected);
    }

    #[test]
    fn queues_without_work_have_no_blocks() {
        let tasks = try_split("null:1M --guests 2 --queues 4 --load-queues 1").unwrap();
        let parts = |task: &Task| (task.queues, task.parts.clone());
        assert_eq!(parts(&tasks[0]), (4, vec![(0, 1024)]));
        assert_eq!(parts(&tasks[1]), (4, vec![(1024, 1024)]));
        let refused = try_split("null:1M --queues 2 --load-queues 3").unwrap_err();
        assert_eq!(refused.code, Code::USAGE);
    }

    #[test]
    fn rings_are_as_large_as_the_depth_needs() {
        let order = |line| try_split(line).map(|tasks| tasks[0].ring_order);
        assert_eq!(order("null: --depth 32").unwrap(), 0);
        assert_eq!(order("null: --depth 33").unwrap(), 1);
        assert_eq!(order("null: --depth 512").unwrap(), 4);
        assert_eq!(order("null: --depth 1 --ring-order 3").unwrap(), 3);
        assert_eq!(order("null: --depth 65 --ring-order 1").unwrap_err().code, Code::USAGE);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for line in ["null: --block 48K --indirect 0", "null:4K --queues 2", "null:512"] {
            assert_eq!(try_split(line).unwrap_err().code, Code::USAGE, "{line}");
        }
        assert!(try_split("null: --block 44K --indirect 0").is_ok());
        assert!(try_split("null: --block 1M").is_ok());
    }
}
