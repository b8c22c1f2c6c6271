//! A process that does a step of a job: `ferrite image merge-step`, say.
//!
//! Its protocol:
//!
//! * It writes lines of JSON to standard output: `{"progress":{"done_bytes":N,"total_bytes":N}}` about
//!   once a second, and at its end `{"result":…}`. Other lines are ignored.
//! * On failure it ends with another code than 0, and writes the failure as JSON to standard error:
//!   `{"what":…,"why":…,"help":…}`.
//! * SIGTERM cancels it: it leaves the images as whole as it has found them.
//! * A step that takes long ends when its standard input is closed, as by SIGTERM. The daemon holds the
//!   other end of that pipe, so no process works on unnoticed when its daemon is gone, however that
//!   has ended. Such a step reads lines there before: each is a new limit in bytes a second, 0 for none.
//! * The step can be done again from any place that it has come to.
//!
//! Standard error is a file that the daemon has locked. The lock belongs to the open file and goes
//! with the last process that has it. So the next daemon starts no second process of a job while
//! one of its predecessor's still ends: it waits for the lock.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use ferrite_serve::waker::Waker;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::Value;

use crate::Failure;
use crate::wait::wait_for;

/// The longest line. A result may have the names of all images of a chain.
const MAX_LINE: usize = 1 << 20;
/// Most bytes of standard error that are looked at for a failure.
const MAX_ERRORS: u64 = 64 << 10;
/// How often it is looked whether a process has ended that has closed its output.
const LOOK: Duration = Duration::from_millis(20);
/// How long a process may take to end by SIGTERM. Its images are whole without that, too.
const KILL_AFTER: Duration = Duration::from_secs(30);

/// A line of a process.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Line {
    /// How far it is.
    Progress {
        /// Bytes that are done.
        done_bytes: u64,
        /// All bytes that are to be done.
        total_bytes: u64,
    },
    /// The result of the step.
    Result(Value),
}

/// The limit in bytes a second of a process that rests.
const REST: u64 = 1;

/// The order to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// It goes on, with this limit in bytes a second; 0: none.
    GoOn(u64),
    /// It is to end.
    End,
}

impl Order {
    /// The order for a job with this limit.
    pub(super) fn of(speed: Option<u64>, paused: bool) -> Order {
        Order::GoOn(if paused { REST } else { speed.unwrap_or(0) })
    }
}

/// How a process has ended.
pub(super) enum Ended {
    /// It has done the step.
    Done,
    /// It was told to end.
    Told,
    /// It has failed.
    Failed(Failure),
}

/// The failure that a process writes.
#[derive(Deserialize)]
struct Reported {
    what: String,
    why: String,
    help: String,
}

/// The file that is standard error of a job's processes, with its lock.
pub(super) struct Errors {
    pub(super) lock: OwnedFd,
    pub(super) path: PathBuf,
}

impl Errors {
    /// Empties the file. Returns a descriptor for a process, which shares the lock.
    fn begin(&self) -> io::Result<OwnedFd> {
        rustix::fs::ftruncate(&self.lock, 0)?;
        self.lock.try_clone()
    }

    fn last_bytes(&self) -> io::Result<String> {
        let mut file = File::open(&self.path)?;
        let length = file.seek(SeekFrom::End(0))?;
        file.seek(SeekFrom::Start(length.saturating_sub(MAX_ERRORS)))?;
        let mut bytes = Vec::new();
        file.take(MAX_ERRORS).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// A running process.
struct Running<'a> {
    child: Child,
    stdin: Option<ChildStdin>,
    /// The limit that it has.
    speed: u64,
    /// Since when it is told to end.
    told: Option<Instant>,
    step: &'a str,
}

/// Runs a process to its end. `order` is asked when `wake` is woken, and gives what the process is
/// to do; `speed` is the limit that it is started with.
pub(super) fn run(
    command: &mut Command,
    step: &str,
    errors: &Errors,
    wake: &Waker,
    speed: u64,
    mut order: impl FnMut() -> Order,
    mut note: impl FnMut(Line),
) -> Ended {
    let cannot = |e: io::Error| {
        let help = "look at the limits of the daemon's process, then start the job again";
        let why = format!("cannot start the process of the step {step}: {e}");
        Ended::Failed(Failure { why, help: help.to_owned() })
    };
    let seen = match errors.begin() {
        Ok(seen) => seen,
        Err(e) => return cannot(e),
    };
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::from(seen));
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(e) => return cannot(e),
    };
    // The kernel spares the daemon and the guests' disks, and not what can be done again. This may
    // fail: the process is one of them then.
    let _ = std::fs::write(format!("/proc/{}/oom_score_adj", child.id()), "0");
    let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
    stdin.as_ref().into_iter().for_each(never_wait);
    let mut running = Running { child, stdin, speed, told: None, step };
    let (mut lines, mut buffer) = (Vec::new(), [0; 1024]);
    running.obey(order());
    let mut stdout = stdout;
    let status = loop {
        let Some(out) = &mut stdout else {
            match running.child.try_wait() {
                Ok(None) => {}
                Ok(Some(status)) => break Ok(status),
                Err(e) => break Err(e),
            }
            let [woken] = wait_for([wake.fd()], Some(LOOK));
            running.look(woken, wake, &mut order);
            continue;
        };
        let [readable, woken] = wait_for([out.as_fd(), wake.fd()], running.patience());
        running.look(woken, wake, &mut order);
        if readable {
            match out.read(&mut buffer) {
                Ok(0) | Err(_) => stdout = None,
                Ok(n) => take_lines(&mut lines, &buffer[..n], &mut note),
            }
        }
    };
    match status {
        _ if running.told.is_some() => Ended::Told,
        Ok(status) if status.success() => Ended::Done,
        Ok(status) => Ended::Failed(failure(errors, step, status)),
        Err(e) => cannot(e),
    }
}

/// The daemon's thread must not wait for a process that does not read.
fn never_wait(stdin: &ChildStdin) {
    if let Err(e) = fcntl_getfl(stdin).and_then(|now| fcntl_setfl(stdin, now | OFlags::NONBLOCK)) {
        tracing::debug!("the input of a job's process stays as it is: {e}");
    }
}

impl Running<'_> {
    /// How long to wait for its output.
    fn patience(&self) -> Option<Duration> {
        self.told.map(|since| KILL_AFTER.saturating_sub(since.elapsed()))
    }

    fn look(&mut self, woken: bool, wake: &Waker, order: &mut impl FnMut() -> Order) {
        if woken {
            wake.clear();
            self.obey(order());
        }
        if self.told.is_some_and(|since| since.elapsed() >= KILL_AFTER) {
            tracing::warn!(
                "the step {} of a job did not end when told to, and is killed",
                self.step
            );
            self.told = Some(Instant::now());
            let _ = self.child.kill();
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::GoOn(speed) if speed != self.speed => {
                self.speed = speed;
                let line = format!("{speed}\n");
                let written = self.stdin.as_mut().map(|stdin| stdin.write_all(line.as_bytes()));
                if let Some(Err(e)) = written {
                    tracing::debug!("a job's process does not take a new limit: {e}");
                }
            }
            Order::GoOn(_) => {}
            Order::End if self.told.is_none() => {
                self.told = Some(Instant::now());
                self.stdin = None;
                // It is not reaped yet, so the number is still its own.
                if let Err(e) = kill_process(Pid::from_child(&self.child), Signal::TERM) {
                    tracing::debug!("a job's process cannot be told to end: {e}");
                }
            }
            Order::End => {}
        }
    }
}

/// Takes bytes of standard output, and reports each whole line.
fn take_lines(lines: &mut Vec<u8>, bytes: &[u8], note: &mut impl FnMut(Line)) {
    for byte in bytes {
        if *byte == b'\n' {
            if let Ok(line) = serde_json::from_slice::<Line>(lines) {
                note(line);
            }
            lines.clear();
        } else if lines.len() < MAX_LINE {
            lines.push(*byte);
        }
    }
}

/// The failure in the last line of standard error, or how the process has ended.
fn failure(errors: &Errors, step: &str, status: ExitStatus) -> Failure {
    let text = errors.last_bytes().unwrap_or_default();
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    if let Ok(Reported { what, why, help }) = serde_json::from_str(last) {
        return Failure { why: format!("{what}: {why}"), help };
    }
    let ended = match (status.code(), status.signal()) {
        (Some(code), _) => format!("the step {step} has ended with the code {code}"),
        (None, signal) => format!("the step {step} was ended by signal {}", signal.unwrap_or(0)),
    };
    let why = if last.is_empty() { ended } else { format!("{ended}: {last:.400}") };
    let help = "start the job again; look at the kernel's log if that ends in the same way";
    Failure { why, help: help.to_owned() }
}
