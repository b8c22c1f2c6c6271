//! The worker's end of the line: a process that serves one disk, and does what it is asked.
//!
//! Whoever follows may end at any moment, also between an order and its answer. So nothing here depends
//! on who asks: an order that was carried out before is carried out again, or is done already.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use ferrite_disk::Disk;
use ferrite_io::clock::SystemClock;
use ferrite_io::names;
use ferrite_io::process::receive_with;
use ferrite_xen::hypervisor::Hypervisor;
use rustix::fs::{Mode, OFlags};

use super::super::attached::EngineFactory;
use super::super::carrier::Carrier;
use super::super::closing::close;
use super::super::config::WorkConfig;
use super::super::error::ServeError;
use super::super::messages::{Failure, OpenFailure, Order, Reply, Report, VERSION};
use super::super::run_dir::STOPPED;
use super::super::worker::Worker;
use super::wire::{Ask, Said, What, hear, say};
use crate::path::device::Device;
use crate::polling::wake_up_ns;
use crate::waker::wait_for;

/// A message of the door says nothing but that a client comes with it.
const DOOR_BYTES: usize = 16;

/// A disk that can be served: of what killed predecessors have left, nothing is missing in it.
pub struct Opened {
    /// The disk.
    pub disk: Disk,
    /// What does its I/O.
    pub engine: EngineFactory,
}

/// Serves what is asked for on the line, until that ends, and the clients of NBD that come by the door.
/// `open` opens the image, to be written or only to be read.
///
/// # Errors
/// The line's, also its end: nobody is left who could follow. [`ServeError::Host`]: a queue has failed,
/// or the hypervisor [is used up](Hypervisor::is_used_up), and the next process may do better.
pub fn work(
    line: &OwnedFd,
    door: &OwnedFd,
    hypervisor: &dyn Hypervisor,
    config: &WorkConfig,
    open: &mut dyn FnMut(bool) -> Result<Opened, OpenFailure>,
) -> Result<(), ServeError> {
    // Measured now, once: no guest waits for us yet.
    wake_up_ns();
    let mut bench = Bench { hypervisor, config, open, door: Some(door), served: None };
    let line = line.as_fd();
    loop {
        let (asked, told, came) = bench.select(line)?;
        if told {
            bench.tell(line)?;
        }
        if came {
            bench.admit();
        }
        if asked && let Some(Ask { number, what }) = hear_ask(line).map_err(line_failed)? {
            let result = bench.carry_out(what);
            let failed = result.is_err();
            say(line, &Said::Answer { number, result }, true).map_err(line_failed)?;
            // Nothing can be opened here any more. The guest's requests are in the table.
            if failed && hypervisor.is_used_up() {
                let e = io::Error::other("all devices of Xen are in use or spoiled");
                return Err(ServeError::host("connect a guest", e));
            }
        }
    }
}

/// What is asked next. A follower that is newer than this program may ask what it does not know: it is
/// told so, since it has to be able to ask for the end.
pub(super) fn hear_ask(line: BorrowedFd<'_>) -> io::Result<Option<Ask>> {
    let Some(Ask { number, what }) = hear::<Ask<serde_json::Value>>(line)? else { return Ok(None) };
    match serde_json::from_value(what) {
        Ok(what) => Ok(Some(Ask { number, what })),
        Err(e) => {
            let result = Err(Failure::host("do what this program does not know", e.into()));
            say(line, &Said::Answer { number, result }, true)?;
            Ok(None)
        }
    }
}

/// Where a worker sits that may have nothing to work on.
struct Bench<'a> {
    hypervisor: &'a dyn Hypervisor,
    config: &'a WorkConfig,
    open: &'a mut dyn FnMut(bool) -> Result<Opened, OpenFailure>,
    /// Until its other end is gone.
    door: Option<&'a OwnedFd>,
    served: Option<Served<'a>>,
}

/// An open image.
struct Served<'a> {
    worker: Worker<'a>,
    device: Arc<Device>,
    engine: EngineFactory,
    read_only: bool,
    /// It is closed, or is being closed: it can be closed again, and nothing else.
    closed: bool,
    /// Its size was asked for, and what tells of growth is listened to.
    listens: bool,
}

impl<'a> Bench<'a> {
    /// Waits. Whether there is something on the line, something to be told, and a client.
    fn select(&self, line: BorrowedFd<'_>) -> Result<(bool, bool, bool), ServeError> {
        let reports = self.served.as_ref().map_or(line, |served| served.worker.reports_fd());
        let growth = self.served.as_ref().filter(|served| served.listens);
        let growth = growth.and_then(|served| served.worker.growth_fd()).unwrap_or(line);
        // Until the disk can be served, clients wait where they are.
        let takes = self.served.as_ref().is_some_and(|s| !s.closed && s.worker.takes_clients());
        let door = self.door.filter(|_| takes).map_or(line, OwnedFd::as_fd);
        let [asked, reports, growth, came] = wait_for([line, reports, growth, door], None)
            .map_err(|e| ServeError::host("wait for orders", e))?;
        Ok((asked, self.served.is_some() && (reports || growth), takes && came))
    }

    /// Serves the next client that has come by the door.
    fn admit(&mut self) {
        let (Some(served), Some(door)) = (&mut self.served, self.door) else { return };
        match receive_with(door, DOOR_BYTES, false) {
            Ok((bytes, _)) if bytes.is_empty() => self.door = None,
            Ok((_, Some(client))) => served.worker.admit(UnixStream::from(client)),
            // Nobody, or no descriptor was left for him.
            Ok((_, None)) | Err(_) => {}
        }
    }

    /// Tells what nobody has asked for.
    fn tell(&mut self, line: BorrowedFd<'_>) -> Result<(), ServeError> {
        let Some(served) = &mut self.served else { return Ok(()) };
        served.listens = false;
        served.worker.clear_reports()?;
        while let Some(report) = served.worker.report() {
            let failed = match &report {
                Report::Failed(failure) => Some(failure.clone()),
                Report::Violation { .. } => None,
            };
            say(line, &Said::Report(report), true).map_err(line_failed)?;
            // The guest's requests are in the table, and the next process does them again.
            if let Some(failure) = failed {
                return Err(failure.into());
            }
        }
        say(line, &Said::Look, true).map_err(line_failed)
    }

    fn carry_out(&mut self, what: What) -> Result<Reply, Failure> {
        match what {
            What::Open { read_only, keeps_all } => {
                self.open(read_only, keeps_all)?;
                let program = env!("CARGO_PKG_VERSION").to_owned();
                return Ok(Reply::Opened { version: VERSION, program });
            }
            What::Retire => self.retire()?,
            What::Order(order) => return self.order(order),
        }
        Ok(Reply::Done)
    }

    /// Has the image open in this way. An open one is taken for what it is: its guest goes on.
    fn open(&mut self, read_only: bool, keeps_all: bool) -> Result<(), Failure> {
        if let Some(served) = &self.served {
            if !served.closed && served.read_only == read_only {
                return Ok(());
            }
            // The toolstack has attached it once more.
            self.give_up()?;
        }
        let Opened { disk, engine } = (self.open)(read_only).map_err(Failure::Open)?;
        let device = Device::new(disk, SystemClock::shared()).on_full(self.config.on_full);
        let device = Arc::new(device);
        let mut worker = Worker::new(self.hypervisor, &device, self.config, &engine)?;
        worker.keep_all(keeps_all);
        // What fails before this leaves the image to others.
        if let Ok(disk) = device.disk() {
            disk.keep();
        }
        let (closed, listens) = (false, false);
        self.served = Some(Served { worker, device, engine, read_only, closed, listens });
        Ok(())
    }

    fn order(&mut self, order: Order) -> Result<Reply, Failure> {
        let Some(served) = &mut self.served else {
            let e = io::Error::other("it is not open: this is a bug in ferrite");
            return Err(Failure::host("serve the image", e));
        };
        match order {
            Order::Close => served.closed = true,
            Order::CheckSize => served.listens = true,
            _ => {}
        }
        served.worker.carry_out(order)
    }

    /// Lets go of the image. Its guest, if there is one, waits for a takeover.
    fn give_up(&mut self) -> Result<(), Failure> {
        let Some(mut served) = self.served.take() else { return Ok(()) };
        served.worker.end_clients();
        served.worker.carry_out(Order::Stop)?;
        match served.closed {
            true => served.worker.carry_out(Order::EndClose).map(drop),
            false => {
                let closed = close(&served.device, &served.engine);
                closed.map_err(|e| Failure::Close(e.to_string()))?;
                // Complete as it is, it is not for the next process only.
                served.device.disk().iter().for_each(|disk| disk.let_go());
                Ok(())
            }
        }
    }

    /// Leaves the image complete. One that cannot be closed stays: it is served on.
    fn retire(&mut self) -> Result<(), Failure> {
        let Some(served) = &mut self.served else { return Ok(()) };
        served.worker.end_clients();
        served.worker.carry_out(Order::Stop)?;
        if !served.closed {
            close(&served.device, &served.engine).map_err(|e| Failure::Close(e.to_string()))?;
        }
        self.give_up()?;
        // Without it the next one takes this one for killed, and does no harm.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let _ = names::open(self.config.run_dir.join(STOPPED), flags, Mode::from(0o600));
        Ok(())
    }
}

fn line_failed(e: io::Error) -> ServeError {
    ServeError::host("go on without anybody who follows", e)
}
