//! `ferrite-bench guest`: one guest, in a process of its own.

use std::io::{BufRead as _, Write as _, stdin, stdout};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_loopback::GuestHandle;
use ferrite_loopback::front::{FrontError, FrontOptions, FrontQueue, Frontend};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::cli::GuestArgs;
use super::load::{Blkif, Load};
use super::measure::PATIENCE;
use super::tally::Tally;
use super::task::{Said, Task, Times};
use ferrite::exit::Failure;

/// Runs its task and prints the result on standard output.
pub(crate) fn run(args: &GuestArgs) -> Result<(), Failure> {
    let outcome = work(args).unwrap_or_else(|e| Said::Failed(format!("{e:#}")));
    say(&outcome).map_err(|e| {
        Failure::new("cannot report", format!("{e:#}"), "this command is for ferrite-bench only")
    })
}

fn work(args: &GuestArgs) -> anyhow::Result<Said> {
    // Nothing else ends a guest whose backend was killed.
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot bind to the backend")?;
    let task: Task = serde_json::from_str(&args.task).context("the task makes no sense")?;
    let handle = GuestHandle::from_arg(&args.guest)?;
    let mut front = Frontend::new(handle, task.devid)?;
    front.connect(&options(&task), PATIENCE)?;
    let loads = loads(&mut front, &task)?;
    say(&Said::Ready)?;
    let times = hear()?;
    let threads: Vec<_> = loads.into_iter().map(|load| start(load, times, task.steps)).collect();
    let mut tallies = Vec::new();
    for thread in threads {
        let thread = thread.context("cannot start a queue's thread")?;
        let (queue, tally) = thread.join().map_err(|_| anyhow!("a queue's thread panicked"))??;
        front.queues.push(queue.into_queue());
        tallies.push(tally);
    }
    SystemClock.sleep(Duration::from_nanos(times.leave_ns.saturating_sub(SystemClock.now_ns())));
    front.close(PATIENCE)?;
    Ok(Said::Done(Tally::sum(&tallies)))
}

/// Options as of a 64-bit Linux guest. On a backend without persistent grants each page is granted for its request
/// only. On one with them, data is copied through pages that stay granted.
fn options(task: &Task) -> FrontOptions {
    FrontOptions {
        order: task.ring_order,
        queues: task.queues,
        max_indirect: task.max_indirect as usize,
        regrant: true,
        check_release: false,
        persistent: task.persistent,
        ..FrontOptions::default()
    }
}

fn loads(front: &mut Frontend, task: &Task) -> anyhow::Result<Vec<Load<Blkif>>> {
    let (got, wanted) = (front.queues.len(), task.queues as usize);
    anyhow::ensure!(got == wanted, "the backend offers {got} queues instead of {wanted}");
    let queues: Vec<_> = front.queues.drain(..task.parts.len()).collect();
    let pages = task.depth as usize * task.block_pages() as usize;
    let load = |(queue, part): (FrontQueue, &(u64, u64))| {
        let buffer = front.space().buffer(pages)?;
        Ok(Load::new(Blkif::new(queue, buffer, task, part.0), task, *part))
    };
    queues.into_iter().zip(&task.parts).map(load).collect()
}

type Ran = Result<(Blkif, Tally), FrontError>;

fn start(load: Load<Blkif>, times: Times, steps: Option<u32>) -> std::io::Result<JoinHandle<Ran>> {
    let run = move || match steps {
        Some(steps) => load.run_in_steps(steps),
        None => load.run(times),
    };
    std::thread::Builder::new().name("guest-queue".to_owned()).spawn(run)
}

pub(super) fn say(what: &Said) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    serde_json::to_writer(&mut out, what)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

pub(super) fn hear() -> anyhow::Result<Times> {
    let mut line = String::new();
    stdin().lock().read_line(&mut line)?;
    serde_json::from_str(&line).context("no word came from the backend")
}
