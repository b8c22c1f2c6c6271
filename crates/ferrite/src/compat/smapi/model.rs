//! A model of taps in memory, which keeps to the rules of `tap-ctl`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use rustix::io::Errno;

use super::taps::{Close, Row, Tap, TapError, Taps};
use super::uri::Image;

/// A process: its number as a tap, the state, and the image.
#[derive(Clone, Debug, Default)]
pub(super) struct Process {
    pub(super) minor: Option<u32>,
    pub(super) state: u32,
    pub(super) args: Option<String>,
}

/// A step that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wrong {
    /// Nothing was done.
    Refused,
    /// It was done, and the answer is lost, as after a death of the caller.
    Lost,
}

#[derive(Default)]
pub(super) struct World {
    pub(super) processes: BTreeMap<u32, Process>,
    pub(super) minors: Vec<u32>,
    last_pid: u32,
    /// All steps but lists.
    pub(super) steps: Vec<String>,
    /// The step, counted from here, that goes wrong.
    pub(super) wrong: Option<(usize, Wrong)>,
}

/// Taps in memory.
pub(super) struct Model {
    pub(super) world: RefCell<World>,
    pub(super) dir: tempfile::TempDir,
}

fn error(errno: Errno) -> TapError {
    TapError { errno: errno.raw_os_error(), why: format!("{errno}") }
}

type Done<T> = Result<T, TapError>;

impl Model {
    pub(super) fn new() -> Model {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.vhd"), "").unwrap();
        Model { world: RefCell::default(), dir }
    }

    pub(super) fn uri(&self) -> String {
        format!("ferrite://{}/a.vhd?format=vhd", self.dir.path().display())
    }

    fn step<T>(&self, name: String, done: impl FnOnce(&mut World) -> Done<T>) -> Done<T> {
        let world = &mut *self.world.borrow_mut();
        let wrong = world.wrong.filter(|(step, _)| *step == world.steps.len());
        world.steps.push(name);
        match wrong {
            Some((_, Wrong::Refused)) => Err(error(Errno::IO)),
            Some((_, Wrong::Lost)) => done(world).and_then(|_| Err(error(Errno::PROTO))),
            None => done(world),
        }
    }

    fn on<T>(&self, verb: &str, tap: Tap, done: impl FnOnce(&mut Process) -> Done<T>) -> Done<T> {
        self.step(verb.to_owned(), |world| {
            let process = world.processes.get_mut(&tap.pid);
            let process = process.filter(|process| process.minor == Some(tap.minor));
            process.map_or_else(|| Err(error(Errno::NOENT)), done)
        })
    }

    /// The steps since the last time.
    pub(super) fn steps(&self) -> String {
        std::mem::take(&mut self.world.borrow_mut().steps).join(" ")
    }
}

impl Taps for Model {
    fn allocate(&self) -> Done<u32> {
        self.step("allocate".to_owned(), |world| {
            let minor = (0..).find(|minor| !world.minors.contains(minor)).unwrap();
            world.minors.push(minor);
            Ok(minor)
        })
    }

    fn spawn(&self) -> Done<u32> {
        self.step("spawn".to_owned(), |world| {
            world.last_pid += 1;
            world.processes.insert(world.last_pid, Process::default());
            Ok(world.last_pid)
        })
    }

    fn end(&self, pid: u32) -> Done<()> {
        self.step("end".to_owned(), |world| {
            world.processes.remove(&pid);
            Ok(())
        })
    }

    fn attach(&self, tap: Tap) -> Done<()> {
        self.step("attach".to_owned(), |world| {
            let process = world.processes.get_mut(&tap.pid).ok_or(error(Errno::NOENT))?;
            assert!(world.minors.contains(&tap.minor), "it was not allocated");
            process.minor = Some(tap.minor);
            Ok(())
        })
    }

    fn open(&self, tap: Tap, image: &Image, read_only: bool) -> Done<()> {
        let verb = if read_only { "open-R" } else { "open" };
        self.on(verb, tap, |process| {
            if process.args.is_some() && process.state & 2 == 0 {
                return Err(error(Errno::ALREADY));
            }
            process.state = 0;
            process.args = Some(format!("{}:{}", image.kind(), image.path));
            Ok(())
        })
    }

    fn pause(&self, tap: Tap) -> Done<()> {
        self.on("pause", tap, |process| {
            process.state = 0x2a;
            Ok(())
        })
    }

    fn unpause(&self, tap: Tap, _: &Image) -> Done<()> {
        self.on("unpause", tap, |process| match process.state {
            0x2a => {
                process.state = 0;
                Ok(())
            }
            _ => Err(error(Errno::INVAL)),
        })
    }

    fn close(&self, tap: Tap, how: Close) -> Done<()> {
        let verb = if how == Close::Forced { "close-f" } else { "close" };
        self.on(verb, tap, |process| {
            (process.state, process.args) = (2, None);
            Ok(())
        })
    }

    fn detach(&self, tap: Tap) -> Done<()> {
        self.on("detach", tap, |process| match process.args {
            Some(_) => Err(error(Errno::INVAL)),
            None => Ok(()),
        })?;
        self.world.borrow_mut().processes.remove(&tap.pid);
        Ok(())
    }

    fn free(&self, minor: u32) -> Done<()> {
        self.step("free".to_owned(), |world| {
            if world.processes.values().any(|process| process.minor == Some(minor)) {
                return Err(error(Errno::AGAIN));
            }
            let place = world.minors.iter().position(|of| *of == minor);
            world.minors.remove(place.ok_or(error(Errno::NOENT))?);
            Ok(())
        })
    }

    fn list(&self) -> Done<Vec<Row>> {
        let world = self.world.borrow();
        let row = |(pid, process): (&u32, &Process)| Row {
            pid: Some(*pid),
            minor: process.minor,
            state: process.state,
            args: process.args.clone(),
        };
        let mut rows: Vec<Row> = world.processes.iter().map(row).collect();
        let alone =
            world.minors.iter().filter(|minor| rows.iter().all(|row| row.minor != Some(**minor)));
        let alone: Vec<Row> =
            alone.map(|minor| Row { minor: Some(*minor), ..Row::default() }).collect();
        rows.extend(alone);
        Ok(rows)
    }

    fn sockets(&self) -> PathBuf {
        self.dir.path().join("blktap-control")
    }
}
