//! The machine of a story: its directory, its files, and processes with several queues.

use std::cell::RefCell;
use std::fs;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::Port;
use ferrite_io::arena::{Arena, Span};
use ferrite_io::engine::FileId;
use ferrite_io::reactor::{Reactor, Wait};
use ferrite_io::scratch::Scratch;
use ferrite_simio::SimWorld;
use tempfile::TempDir;

use crate::format::{Place, Queue};
use crate::load::MAX_REQUEST_SECTORS;

/// The most concurrent requests of a queue.
pub const MAX_DEPTH: usize = 4;

/// The most queues of a disk.
pub const MAX_QUEUES: usize = 3;

const BUFFER_BYTES: usize = MAX_REQUEST_SECTORS as usize * 512;
const ZEROS_BYTES: usize = 4096;
const SCRATCH_BYTES: usize = 256 << 10;
const QUEUE_BYTES: usize = SCRATCH_BYTES + ZEROS_BYTES + MAX_DEPTH * BUFFER_BYTES;

/// Turns without a step after which time is advanced, and how often that is done before the story fails.
const PATIENCE: u32 = 1000;
const MAX_NAPS: u32 = 50;

thread_local! {
    /// One arena, which all stories of a thread use in turn.
    static ARENA: RefCell<Option<Arc<Arena>>> = const { RefCell::new(None) };
}

/// See the module text.
pub struct Machine {
    /// The world that it is part of.
    pub world: SimWorld,
    /// Its directories.
    pub place: Place,
    arena: Arc<Arena>,
    _dir: TempDir,
}

impl Machine {
    /// An empty machine.
    ///
    /// # Errors
    /// Those of the real machine.
    pub fn new(seed: u64) -> io::Result<Machine> {
        let dir = TempDir::with_prefix_in("ferrite-sim-", "/dev/shm")?;
        let at = |name: &str| -> io::Result<_> {
            let path = dir.path().join(name);
            fs::create_dir(&path)?;
            Ok(path)
        };
        let world = SimWorld::new(seed);
        let directory = world.directories(&at("attic")?);
        let (images, state) = (at("images")?, at("state")?);
        let (world_too, tight, usual_units) = (world.clone(), false, false);
        let place = Place { images, state, directory, world: world_too, seed, tight, usual_units };
        let made = ARENA.with_borrow(Option::clone);
        let arena = match made {
            Some(arena) => arena,
            None => Arena::new(MAX_QUEUES * QUEUE_BYTES)?,
        };
        ARENA.set(Some(arena.clone()));
        Ok(Machine { world, place, arena, _dir: dir })
    }

    /// A process with `count` queues, each of which has registered all `files`.
    ///
    /// # Errors
    /// The world has stopped.
    pub fn queues(&self, count: usize, files: &[Arc<OwnedFd>]) -> io::Result<Vec<Thread>> {
        (0..count).map(|i| self.queue(i, files)).collect()
    }

    fn queue(&self, i: usize, files: &[Arc<OwnedFd>]) -> io::Result<Thread> {
        let mut reactor = Reactor::new(self.world.engine(self.arena.clone()));
        let ids: io::Result<Vec<FileId>> =
            files.iter().map(|f| reactor.add_file(f.clone())).collect();
        let memory = self.arena.span(i * QUEUE_BYTES, QUEUE_BYTES);
        let (scratch, rest) = (memory.slice(0, SCRATCH_BYTES), QUEUE_BYTES - SCRATCH_BYTES);
        let scratch = Scratch::new(self.arena.clone(), scratch);
        let port = Port { io: reactor.io(), files: Rc::from(ids?), scratch };
        let memory = memory.slice(SCRATCH_BYTES, rest);
        let queue = Queue { port, zeros: memory.slice(0, ZEROS_BYTES) };
        Ok(Thread { reactor, queue, memory })
    }

    /// Runs the threads in an order that the world chooses, until `done` or until the world stops.
    ///
    /// # Errors
    /// No thread progresses, and it is not done.
    pub fn drive(&self, threads: &mut [Thread], done: impl Fn() -> bool) -> Result<(), String> {
        let (mut still, mut naps, mut before) = (0, 0, self.world.step());
        let mut out = Vec::new();
        // Detached tasks may hold locks that a thread needs which runs alone later.
        while !done() || threads.iter().any(|thread| thread.reactor.tasks() > 0) {
            let i = self.world.below(threads.len() as u64) as usize;
            match threads[i].reactor.turn(Wait::No, &mut out) {
                Err(_) if self.world.stopped() => return Ok(()),
                Err(e) => return Err(format!("the engine: {e}")),
                Ok(()) => {}
            }
            still += 1;
            if self.world.step() != before {
                (still, naps, before) = (0, 0, self.world.step());
            } else if still == PATIENCE {
                still = 0;
                naps += 1;
                self.world.clock().sleep(Duration::from_millis(200));
            }
            if naps == MAX_NAPS {
                return Err("all that is left waits for something that does not come".into());
            }
        }
        Ok(())
    }

    /// Runs one `async fn` on a thread; `None`: the world stopped before its end.
    ///
    /// # Errors
    /// As [`drive`](Machine::drive).
    pub fn run<T: 'static>(
        &self,
        thread: &mut Thread,
        work: impl Future<Output = T> + 'static,
    ) -> Result<Option<T>, String> {
        let result = Rc::new(RefCell::new(None));
        let to = result.clone();
        thread.reactor.spawn(async move {
            let done = work.await;
            to.replace(Some(done));
        });
        let threads = std::slice::from_mut(thread);
        self.drive(threads, || result.borrow().is_some())?;
        Ok(result.take())
    }

    /// Saves the memory that outlives a process as it is at the moment of its death: the process of a story is dropped
    /// in good order, and may still write to it then.
    ///
    /// # Errors
    /// Those of the real machine.
    pub fn set_aside(&self) -> io::Result<()> {
        copy(&self.place.state, &self.aside())
    }

    /// Kills the process, whose threads have ended.
    ///
    /// # Errors
    /// Those of the real machine.
    pub fn kill_process(&self) -> io::Result<()> {
        self.world.kill_process()?;
        if self.aside().exists() {
            fs::remove_dir_all(&self.place.state)?;
            fs::rename(self.aside(), &self.place.state)?;
        }
        Ok(())
    }

    fn aside(&self) -> PathBuf {
        self.place.state.with_extension("aside")
    }

    /// Cuts the power: memory is lost, too.
    ///
    /// # Errors
    /// Those of the real machine.
    pub fn cut_power(&self) -> io::Result<()> {
        self.world.cut_power()?;
        for dir in [self.place.state.clone(), self.aside()] {
            if dir.exists() {
                fs::remove_dir_all(dir)?;
            }
        }
        fs::create_dir(&self.place.state)
    }

    /// Keeps the files of a failed story; returns the text for the report.
    pub(crate) fn kept(&self, dir: &Path) -> String {
        match self.keep(dir) {
            Ok(()) => format!("; the files are in {}", dir.display()),
            Err(e) => format!("; the files could not be kept: {e}"),
        }
    }

    /// Copies all files of the machine to a directory.
    ///
    /// # Errors
    /// Those of the real machine.
    pub fn keep(&self, to: &Path) -> io::Result<()> {
        copy(&self.place.images, &to.join("images"))?;
        copy(&self.place.state, &to.join("state"))
    }
}

/// Copies a directory recursively.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        match entry.file_type()?.is_dir() {
            true => copy(&from, &to)?,
            false => fs::copy(&from, &to).map(drop)?,
        }
    }
    Ok(())
}

/// One thread of a process: a queue of the disk.
pub struct Thread {
    /// Its reactor.
    pub reactor: Reactor,
    /// The queue, for tasks on it.
    pub queue: Queue,
    memory: Span,
}

impl Thread {
    /// The memory of its task number `i`.
    pub fn buffer(&self, i: usize) -> Span {
        self.memory.slice(ZEROS_BYTES + i * BUFFER_BYTES, BUFFER_BYTES)
    }
}
