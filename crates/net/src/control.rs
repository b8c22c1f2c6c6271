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
use crate::switch::Mac;
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

fn system(what: &'static str) -> impl Fn(std::io::Error) -> NetworkError {
    move |source| NetworkError::System { what, source }
}

/// Starts the thread that moves packets. Its engine belongs to it, so it is made there.
fn start_worker(start: Start) -> Result<JoinHandle<()>, NetworkError> {
    let (made, is_made) = mpsc::channel();
    let run = move || match Worker::new(start) {
        Ok(mut worker) => {
            let _ = made.send(Ok(()));
            worker.run();
        }
        Err(e) => drop(made.send(Err(e))),
    };
    let thread = std::thread::Builder::new().name("net".into()).spawn(run);
    let thread = thread.map_err(system("start a thread"))?;
    let outcome = is_made.recv().unwrap_or_else(|_| Err(std::io::ErrorKind::Other.into()));
    outcome.map_err(system("take memory or an engine"))?;
    Ok(thread)
}

/// Starts both threads.
pub(crate) fn start(options: Options) -> Result<Control, NetworkError> {
    let event = || {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        fd.map(Arc::new).map_err(|e| system("make an event")(e.into()))
    };
    let (wake, worker_wake) = (event()?, event()?);
    let (commands, from_control) = mpsc::channel();
    let (reports, from_worker) = mpsc::channel();
    let start = Start {
        pages: options.hypervisor.pages()?,
        uplink: options.uplink,
        commands: from_control,
        wake: worker_wake.clone(),
        reports,
        reported: wake.clone(),
        hold_ms: options.hold_ms,
        trace: options.trace,
        poll_us: options.poll_us,
    };
    let worker = start_worker(start)?;
    let (ends, known) = (Arc::new(AtomicBool::new(false)), Known::default());
    let mut follower = Follower {
        store: options.store,
        root: format!("backend/{}", options.kind),
        script: options.script,
        queues: options.queues.max(1),
        hypervisor: options.hypervisor,
        commands,
        worker_wake,
        reports: from_worker,
        wake: wake.clone(),
        ends: ends.clone(),
        known: known.clone(),
        vifs: BTreeMap::new(),
        has_freed: false,
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
    /// Its address, while it is connected.
    mac: Option<Mac>,
    /// Another one has its address: it waits for the end of that.
    is_waiting: bool,
}

/// The outcome of connecting.
enum Connecting {
    Done,
    /// Another interface has its address. Each look tries again.
    Waits,
    /// The reason, in words.
    Refused(String),
}

struct Follower {
    store: Store,
    root: String,
    /// The hotplug script of this network's interfaces; `None`: any.
    script: Option<String>,
    queues: u32,
    hypervisor: Arc<dyn Hypervisor>,
    commands: Sender<Command>,
    worker_wake: Arc<OwnedFd>,
    reports: Receiver<Report>,
    wake: Arc<OwnedFd>,
    ends: Arc<AtomicBool>,
    known: Known,
    vifs: BTreeMap<VifId, Followed>,
    /// An interface was disconnected since the last look.
    has_freed: bool,
}

/// The step that follows from the states of both sides.
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
        // It is detached, and its frontend has no driver that would close.
        (Closing, Initialising | InitWait | Initialised) if !is_online => Step::Finish,
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
                self.has_freed = false;
                self.find()?;
                // One that has waited for an address comes first in the list perhaps.
                if self.has_freed && self.vifs.values().any(|vif| vif.is_waiting) {
                    self.find()?;
                }
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

    /// The names below a directory. It is not there before the first interface, or not any more.
    fn list(&mut self, path: &str) -> Result<Vec<String>, StoreError> {
        match self.store.list(path) {
            Err(StoreError::NotFound { .. }) => Ok(Vec::new()),
            listed => listed,
        }
    }

    /// Looks at all interfaces that there are.
    fn find(&mut self) -> Result<(), StoreError> {
        let mut there = Vec::new();
        let root = self.root.clone();
        for domid in self.list(&root)? {
            for handle in self.list(&format!("{root}/{domid}"))? {
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
            if !self.is_ours(&backend)? {
                return Ok(());
            }
            let Some(frontend) = self.store.read_string(&format!("{backend}/frontend"))? else {
                return Ok(());
            };
            self.store.watch(&frontend, &id.to_string())?;
            let (is_connected, is_stopped, mac, is_waiting) = (false, false, None, false);
            let vif = Followed { backend, frontend, is_connected, is_stopped, mac, is_waiting };
            self.vifs.insert(id, vif);
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
                Connecting::Done => XenbusState::Connected,
                Connecting::Waits => return Ok(()),
                Connecting::Refused(why) => {
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

    /// Whether an interface is one of this network: if a script is named, only those with that script.
    fn is_ours(&mut self, backend: &str) -> Result<bool, StoreError> {
        let Some(wanted) = &self.script else { return Ok(true) };
        let script = self.store.read_string(&format!("{backend}/script"))?;
        let name = script.as_deref().and_then(|script| script.rsplit('/').next());
        Ok(name == Some(wanted))
    }

    /// The connected interface that has the address already.
    fn owner_of(&self, id: VifId, mac: Mac) -> Option<VifId> {
        let others = self.vifs.iter().filter(|(other, _)| **other != id);
        others.filter(|(_, vif)| vif.mac == Some(mac)).map(|(other, _)| *other).next()
    }

    /// An interface has the address of another: a guest that has migrated to this host from itself is two domains for
    /// a moment. Said once.
    fn wait_for(&mut self, id: VifId, owner: VifId, mac: Mac) -> Result<Connecting, StoreError> {
        let Some(vif) = self.vifs.get_mut(&id) else { return Ok(Connecting::Waits) };
        if !std::mem::replace(&mut vif.is_waiting, true) {
            let why = format!("{owner} has the address {mac}; it is connected when that has gone");
            tracing::warn!("{id}: {why}");
            let path = format!("{}/error", vif.backend);
            self.store.write(&path, why.as_bytes())?;
        }
        Ok(Connecting::Waits)
    }

    /// Connects an interface.
    fn connect(
        &mut self,
        id: VifId,
        backend: &str,
        frontend: &str,
    ) -> Result<Connecting, StoreError> {
        self.disconnect(id);
        let keys = match keys::read(&mut self.store, id, backend, frontend, self.queues)? {
            Ok(keys) => keys,
            Err(why) => return Ok(Connecting::Refused(why)),
        };
        let mac = keys.mac();
        if let Some(owner) = self.owner_of(id, mac) {
            return self.wait_for(id, owner, mac);
        }
        let counters: Arc<Counters> = {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.entry(id).or_default().clone()
        };
        let connection = match keys.connect(id, &*self.hypervisor, counters) {
            Ok(connection) => connection,
            Err(why) => return Ok(Connecting::Refused(why)),
        };
        let (reply, answer) = mpsc::channel();
        self.command(Command::Connect(connection, reply));
        Ok(match answer.recv() {
            Ok(Ok(())) => {
                self.connected(id, mac)?;
                Connecting::Done
            }
            Ok(Err(e)) => Connecting::Refused(e.to_string()),
            Err(_) => Connecting::Refused(
                "the thread that moves packets has ended; start the network again".into(),
            ),
        })
    }

    fn connected(&mut self, id: VifId, mac: Mac) -> Result<(), StoreError> {
        tracing::info!("{id} is connected");
        let Some(vif) = self.vifs.get_mut(&id) else { return Ok(()) };
        (vif.is_connected, vif.mac) = (true, Some(mac));
        if std::mem::take(&mut vif.is_waiting) {
            self.store.remove(&format!("{}/error", vif.backend))?;
        }
        Ok(())
    }

    /// Has the worker drop an interface's rings, and waits for that.
    fn disconnect(&mut self, id: VifId) {
        let Some(vif) = self.vifs.get_mut(&id) else { return };
        vif.is_stopped = false;
        vif.mac = None;
        self.has_freed = true;
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
        (vif.is_connected, vif.is_stopped, vif.mac) = (false, true, None);
        tracing::warn!("{id} is stopped until its guest connects it again: {why}");
        let path = format!("{}/error", vif.backend);
        if let Err(e) = self.store.write(&path, why.as_bytes()) {
            tracing::debug!("{id}: {e}");
        }
    }
}

#[cfg(test)]
mod tests;
