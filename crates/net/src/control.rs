//! The thread that follows xenstore: one [`Step`] follows from the states of both sides of an interface. It believes no
//! order of events, so lost, merged and spurious watches are all the same to it.

mod keys;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use ferrite_xen::hypervisor::Hypervisor;
use ferrite_xen::store::{Store, StoreError};
use ferrite_xen::xenbus::XenbusState;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::counters::{Counters, Counts};
use crate::worker::{Command, Report, Start, Worker, wait};
use crate::{NetworkError, Options, VifId};

type Known = Arc<Mutex<BTreeMap<VifId, Arc<Counters>>>>;

/// The most interfaces of a network: what one thread can look at.
const VIFS_MAX: usize = 1024;

/// Both threads.
pub(crate) struct Control {
    thread: JoinHandle<Result<(), NetworkError>>,
    ends: Arc<AtomicBool>,
    wake: Arc<OwnedFd>,
    known: Known,
}

impl Control {
    /// The counters of all connected interfaces.
    pub(crate) fn counters(&self) -> Vec<(VifId, Counts)> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().map(|(id, counters)| (*id, counters.read())).collect()
    }

    /// Whether the thread that follows xenstore has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.thread.is_finished()
    }

    /// Tells both threads to end.
    pub(crate) fn stop(&self) {
        self.ends.store(true, Ordering::Release);
        wait::wake(&self.wake);
    }

    /// Waits until they have ended.
    ///
    /// # Errors
    /// xenstore has gone.
    pub(crate) fn join(self) -> Result<(), NetworkError> {
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Starts both threads.
pub(crate) fn start(options: Options) -> Result<Control, NetworkError> {
    let system = |what| move |source: std::io::Error| NetworkError::System { what, source };
    let event = || {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        fd.map(Arc::new).map_err(|e| system("make an event")(e.into()))
    };
    let (wake, worker_wake) = (event()?, event()?);
    let (commands, from_control) = mpsc::channel();
    let (reports, from_worker) = mpsc::channel();
    let mut worker = Worker::new(Start {
        pages: options.hypervisor.pages()?,
        uplink: options.uplink,
        commands: from_control,
        wake: worker_wake.clone(),
        reports,
        reported: wake.clone(),
        hold_ms: options.hold_ms,
        poll_us: options.poll_us,
    })
    .map_err(system("take memory"))?;
    let worker = std::thread::Builder::new()
        .name("net".into())
        .spawn(move || worker.run())
        .map_err(system("start a thread"))?;
    let (ends, known) = (Arc::new(AtomicBool::new(false)), Known::default());
    let mut follower = Follower {
        store: options.store,
        root: format!("backend/{}", options.kind),
        queues: options.queues.max(1),
        hypervisor: options.hypervisor,
        commands,
        worker_wake,
        reports: from_worker,
        wake: wake.clone(),
        ends: ends.clone(),
        known: known.clone(),
        vifs: BTreeMap::new(),
    };
    let run = move || {
        let outcome = follower.run();
        let _ = follower.commands.send(Command::End);
        wait::wake(&follower.worker_wake);
        if worker.join().is_err() {
            tracing::error!("the thread that moves packets has panicked");
        }
        Ok(outcome?)
    };
    let thread = std::thread::Builder::new()
        .name("net-control".into())
        .spawn(run)
        .map_err(system("start a thread"))?;
    Ok(Control { thread, ends, wake, known })
}

/// One interface, as control knows it.
struct Followed {
    backend: String,
    frontend: String,
    is_connected: bool,
    /// It was stopped: its frontend has to close before it is connected again.
    is_stopped: bool,
}

struct Follower {
    store: Store,
    root: String,
    queues: u32,
    hypervisor: Arc<dyn Hypervisor>,
    commands: Sender<Command>,
    worker_wake: Arc<OwnedFd>,
    reports: Receiver<Report>,
    wake: Arc<OwnedFd>,
    ends: Arc<AtomicBool>,
    known: Known,
    vifs: BTreeMap<VifId, Followed>,
}

/// What follows from the states of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Nothing.
    Rest,
    /// Says what this backend can do, and waits for the frontend; 2.
    Offer,
    /// Connects; 4.
    Connect,
    /// Drops the rings; 5.
    Close,
    /// Drops the rings; 6.
    Finish,
}

/// The step of a backend in state `back` whose frontend is in state `front`.
fn step(back: XenbusState, front: XenbusState, is_connected: bool, is_online: bool) -> Step {
    use XenbusState::{
        Closed, Closing, Connected, InitWait, Initialised, Initialising, Reconfigured,
        Reconfiguring, Unknown,
    };
    match (back, front) {
        // Made just now, or by a program that knows other states.
        (Initialising | Initialised | Reconfiguring | Reconfigured, _) => Step::Offer,
        (InitWait, Initialised | Connected) => Step::Connect,
        // A predecessor has connected it.
        (Connected, Connected) if !is_connected => Step::Connect,
        // The guest starts again without having closed.
        (Connected, Initialising | InitWait) => Step::Offer,
        (InitWait | Connected, Closing) => Step::Close,
        (InitWait | Connected | Closing, Closed) | (Connected | Closing, Unknown) => Step::Finish,
        (Closed | Closing, Initialising) if is_online => Step::Offer,
        (Closing, _) if is_connected => Step::Close,
        _ => Step::Rest,
    }
}

impl Follower {
    fn run(&mut self) -> Result<(), StoreError> {
        let root = self.root.clone();
        self.store.watch(&root, "interfaces")?;
        self.find()?;
        self.command(Command::Begin);
        while !self.ends.load(Ordering::Acquire) {
            let mut changed = false;
            while self.store.poll_event()?.is_some() {
                changed = true;
            }
            if changed {
                self.find()?;
            }
            while let Ok(Report::Stopped(id, stop)) = self.reports.try_recv() {
                self.stopped(id, &stop.to_string());
            }
            if !changed {
                self.sleep();
            }
        }
        Ok(())
    }

    fn sleep(&self) {
        let mut fds = [
            PollFd::from_borrowed_fd(self.store.fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN),
        ];
        // The descriptor does not signal events that came with a reply, so look again soon.
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let _ = poll(&mut fds, Some(&timeout));
        wait::take_wake(&self.wake);
    }

    /// Looks at all interfaces that there are.
    fn find(&mut self) -> Result<(), StoreError> {
        let mut there = Vec::new();
        for domid in self.store.list(&self.root.clone())? {
            for handle in self.store.list(&format!("{}/{domid}", self.root))? {
                // libxl writes plain numbers; another text is no interface.
                let (Ok(d), Ok(h)) = (domid.parse::<u16>(), handle.parse::<u32>()) else {
                    continue;
                };
                let is_plain = d.to_string() == domid && h.to_string() == handle;
                if is_plain && there.len() < VIFS_MAX {
                    there.push(VifId { domid: d, handle: h });
                }
            }
        }
        let gone: Vec<VifId> = self.vifs.keys().filter(|id| !there.contains(id)).copied().collect();
        for id in gone {
            self.disconnect(id);
            if let Some(vif) = self.vifs.remove(&id) {
                let _ = self.store.unwatch(&vif.frontend, &id.to_string());
            }
        }
        for id in there {
            if let Err(e) = self.look(id) {
                if self.store.is_dead() {
                    return Err(e);
                }
                tracing::debug!("{id}: {e}");
            }
        }
        Ok(())
    }

    fn look(&mut self, id: VifId) -> Result<(), StoreError> {
        if !self.vifs.contains_key(&id) {
            let backend = format!("{}/{}/{}", self.root, id.domid, id.handle);
            let Some(frontend) = self.store.read_string(&format!("{backend}/frontend"))? else {
                return Ok(());
            };
            self.store.watch(&frontend, &id.to_string())?;
            let (is_connected, is_stopped) = (false, false);
            self.vifs.insert(id, Followed { backend, frontend, is_connected, is_stopped });
        }
        // Each step leads to another state, so this ends; a guest that changes its own all the time has a bound.
        for _ in 0..4 {
            let Some(vif) = self.vifs.get(&id) else { return Ok(()) };
            let (backend, frontend) = (vif.backend.clone(), vif.frontend.clone());
            let (is_connected, is_stopped) = (vif.is_connected, vif.is_stopped);
            let back = XenbusState::read(&mut self.store, &backend)?;
            let front = XenbusState::read(&mut self.store, &frontend)?;
            let online = self.store.read(&format!("{backend}/online"))?;
            let step = step(back, front, is_connected, online.as_deref() == Some(b"1"));
            if step == Step::Rest || (step == Step::Connect && is_stopped) {
                return Ok(());
            }
            self.take(id, &backend, &frontend, step)?;
        }
        Ok(())
    }

    fn take(
        &mut self,
        id: VifId,
        backend: &str,
        frontend: &str,
        step: Step,
    ) -> Result<(), StoreError> {
        let state = match step {
            Step::Rest => return Ok(()),
            Step::Offer => {
                self.disconnect(id);
                keys::offer(&mut self.store, backend, self.queues)?;
                XenbusState::InitWait
            }
            Step::Connect => match self.connect(id, backend, frontend)? {
                Ok(()) => XenbusState::Connected,
                Err(why) => {
                    tracing::warn!("{id}: {why}");
                    self.store.write(&format!("{backend}/error"), why.as_bytes())?;
                    XenbusState::Closing
                }
            },
            Step::Close => {
                self.disconnect(id);
                XenbusState::Closing
            }
            Step::Finish => {
                self.disconnect(id);
                XenbusState::Closed
            }
        };
        // After the rings are mapped, or gone: the other side acts on it.
        self.store.write(&format!("{backend}/state"), state.to_string().as_bytes())
    }

    /// Connects an interface. The inner error is the reason in words.
    fn connect(
        &mut self,
        id: VifId,
        backend: &str,
        frontend: &str,
    ) -> Result<Result<(), String>, StoreError> {
        self.disconnect(id);
        let keys = match keys::read(&mut self.store, id, backend, frontend, self.queues)? {
            Ok(keys) => keys,
            Err(why) => return Ok(Err(why)),
        };
        let counters: Arc<Counters> = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.entry(id).or_default().clone()
        };
        let connection = match keys.connect(id, &*self.hypervisor, counters) {
            Ok(connection) => connection,
            Err(why) => return Ok(Err(why)),
        };
        let (reply, answer) = mpsc::channel();
        self.command(Command::Connect(connection, reply));
        Ok(match answer.recv() {
            Ok(Ok(())) => {
                if let Some(vif) = self.vifs.get_mut(&id) {
                    vif.is_connected = true;
                }
                tracing::info!("{id} is connected");
                Ok(())
            }
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => {
                Err("the thread that moves packets has ended; start the network again".into())
            }
        })
    }

    /// Has the worker drop an interface's rings, and waits for that.
    fn disconnect(&mut self, id: VifId) {
        let Some(vif) = self.vifs.get_mut(&id) else { return };
        vif.is_stopped = false;
        if std::mem::take(&mut vif.is_connected) {
            let (reply, answer) = mpsc::channel();
            self.command(Command::Disconnect(id, reply));
            let _ = answer.recv();
            tracing::info!("{id} is disconnected");
        }
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    fn command(&self, command: Command) {
        let _ = self.commands.send(command);
        wait::wake(&self.worker_wake);
    }

    /// The worker has dropped an interface's rings. Said once for each connection.
    fn stopped(&mut self, id: VifId, why: &str) {
        let Some(vif) = self.vifs.get_mut(&id).filter(|vif| vif.is_connected) else { return };
        (vif.is_connected, vif.is_stopped) = (false, true);
        tracing::warn!("{id} is stopped until its guest connects it again: {why}");
        let path = format!("{}/error", vif.backend);
        if let Err(e) = self.store.write(&path, why.as_bytes()) {
            tracing::debug!("{id}: {e}");
        }
    }
}

#[cfg(test)]
mod tests;
