//! The keeper's process: one thread that waits for its worker's end and for requests.
//!
//! It uses few pages of memory, since there is one keeper for each disk. It never blocks on another
//! process: neither on a worker whose storage is stuck, nor on a client that does not read its
//! replies.

use std::convert::Infallible;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::Duration;

use ferrite_host::frames::Frame;
use ferrite_host::process::{
    Fork, Program, become_in_place, environment_without, fork, take_given,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{chdir, getpid, setsid};

use crate::group::GroupEndpoint;
use crate::log;
use crate::member::Member;
use crate::public;
use crate::socket::Endpoint;
use crate::spec::{DiskSpec, Group, Other, State, VARIABLE};
use crate::wire::{KEEPER, Reply, Request, VERSION};
use crate::worker::Worker;

/// Most disks of a group.
const MEMBERS: usize = 64;
/// A failed start of the worker is logged once in so many failures.
const LOG_EVERY: u32 = 100;
/// The pause after an error, such as too many open descriptors. Its cause stays, and `poll` would
/// return at once.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Runs a keeper, in the process that [`DiskSpec::start`] has started. Each worker inherits the
/// descriptors `also` under the same numbers.
///
/// # Errors
/// The environment has no state of a keeper, or a keeper of this disk lives.
pub fn run(also: &[RawFd]) -> io::Result<Infallible> {
    let text = std::env::var(VARIABLE).map_err(|_| {
        io::Error::other("a keeper is started by ferrite itself, when it serves a disk")
    })?;
    let state: State = serde_json::from_str(&text)?;
    // The file is opened and not looked up by name: workers run this program also after its file
    // was replaced.
    let binary = OwnedFd::from(File::open("/proc/self/exe")?);
    let is_first = state.before.is_none();
    let start = state.start;
    let (members, group) = restore(state)?;
    // The process that started this one waits for this exit, so that it is not the keeper's parent.
    if is_first {
        if fork()? == Fork::Parent {
            std::process::exit(0);
        }
        setsid()?;
    }
    let spec = &members[0].spec;
    // The keeper may outlive the directory, and the file system, that it was started in.
    if spec.socket.is_absolute() && spec.run_dir.is_absolute() {
        chdir("/")?;
    }
    let requesters = members.iter().flat_map(|member| &member.clients);
    requesters.for_each(|requester| send_reply(requester, &Reply::Done, None));
    let group_fds = spec.group.as_ref().map(|group| &group.run_dir);
    crate::name_disk(group_fds.unwrap_or(&spec.run_dir));
    let worker = Worker::new(start, group.is_some())?;
    Process { binary, members, group, worker, also: also.to_vec(), failures: 0 }.run()
}

/// Creates or takes over the first disks and the sockets of their group.
fn restore(state: State) -> io::Result<(Vec<Member>, Option<GroupEndpoint>)> {
    let State { spec, before, public, relay, asker_of, group, commands, others, .. } = state;
    let what = spec.group.clone();
    let mut members = Vec::new();
    let group = match (before, what) {
        (None, what) => {
            // The group's socket comes first: other disks join through it.
            let group = what.map(GroupEndpoint::take).transpose()?;
            members.push(Member::new(spec)?);
            group
        }
        (Some([lock, listener, requester]), what) => {
            members.push(Member::restore(spec, [lock, listener], public, relay)?);
            for Other { spec, before: [lock, listener, public], relay } in others {
                members.push(Member::restore(spec, [lock, listener], Some(public), relay)?);
            }
            // The next requests of this client are about this disk.
            let of = members.get_mut(asker_of).ok_or(io::ErrorKind::InvalidData)?;
            of.clients.push(take_given(requester)?);
            what.map(|what| GroupEndpoint::restore(what, group, commands)).transpose()?
        }
    };
    Ok((members, group))
}

/// The work that `wait` has found. Members and their clients are given by index.
#[derive(Default)]
struct Ready {
    /// Members with a new connection to their socket.
    connecting: Vec<usize>,
    /// Members and clients with a request.
    requests: Vec<(usize, usize)>,
    /// Whether the worker requests a file.
    names: bool,
    /// Members with a new NBD client.
    nbd_clients: Vec<usize>,
    /// Members whose relay has sent a message or ended.
    relay: Vec<usize>,
    /// Whether there is a new connection to the group's socket.
    joining: bool,
    /// Connections to the group's socket that have a request.
    joiners: Vec<usize>,
    /// Whether there is a new connection to the socket for commands.
    command: bool,
}

struct Process {
    binary: OwnedFd,
    /// The one disk, or all disks of a group. The keeper ends with the last one.
    members: Vec<Member>,
    group: Option<GroupEndpoint>,
    worker: Worker,
    also: Vec<RawFd>,
    /// Failed starts of the worker.
    failures: u32,
}

/// The source of a polled descriptor.
#[derive(Clone, Copy)]
enum PollSource {
    Endpoint(usize),
    Public(usize),
    Client(usize, usize),
    Relay(usize),
    Worker,
    Names,
    Group,
    Joiner(usize),
    Commands,
}

impl Process {
    fn run(mut self) -> ! {
        loop {
            if let Err(e) = self.worker.advance(&mut self.members, &self.binary, &self.also) {
                if self.failures.is_multiple_of(LOG_EVERY) {
                    log(&format!("cannot start the worker: {e}"));
                }
                self.failures = self.failures.wrapping_add(1);
                std::thread::sleep(RETRY_PAUSE);
            }
            let ready = self.wait();
            self.members.iter_mut().for_each(|member| member.relay.reap());
            self.handle(ready);
        }
    }

    fn handle(&mut self, ready: Ready) {
        for m in ready.relay {
            let Member { relay, connections, .. } = &mut self.members[m];
            relay.handle_message(connections);
        }
        if ready.names
            && let Err(e) = self.worker.serve_name_request(&mut self.members)
        {
            log(&format!("cannot kill the worker: {e}"));
            std::thread::sleep(RETRY_PAUSE);
        }
        ready.nbd_clients.into_iter().for_each(|m| self.forward_client(m));
        // Connections are accepted before any member is removed, since that changes indices.
        for m in ready.connecting {
            if self.members[m].accept().is_err() {
                std::thread::sleep(RETRY_PAUSE);
            }
        }
        // From the last to the first, since a client that has gone is removed.
        let mut gone = None;
        for (m, i) in ready.requests.into_iter().rev() {
            if gone != Some(m) && !self.handle_request(m, i) {
                gone = Some(m);
            }
        }
        self.handle_group(ready.joining, ready.joiners, ready.command);
    }

    fn handle_group(&mut self, joining: bool, requests: Vec<usize>, command: bool) {
        let Some(group) = &mut self.group else { return };
        if command {
            group.forward_client(&self.worker);
        }
        let mut wanted = Vec::new();
        for i in requests.into_iter().rev() {
            wanted.extend(group.read_request(i));
        }
        if joining && group.accept().is_err() {
            std::thread::sleep(RETRY_PAUSE);
        }
        for (client, spec) in wanted {
            let joined = spec.and_then(|spec| self.join(spec));
            let reply = joined.map_or_else(|e| Reply::Failed(e.to_string()), |()| Reply::Done);
            send_reply(&client, &reply, None);
        }
    }

    /// Adds a disk to the group.
    fn join(&mut self, mut spec: DiskSpec) -> io::Result<()> {
        let ours = &self.members[0].spec.group;
        let socket = |group: &Option<Group>| group.as_ref().map(|group| group.socket.clone());
        if socket(&spec.group) != socket(ours) {
            return Err(io::Error::other("the disk belongs to another group"));
        }
        // The one worker was started with these arguments.
        spec.group.clone_from(ours);
        if self.members.len() >= MEMBERS {
            return Err(io::Error::other(format!(
                "at most {MEMBERS} disks of one store are served at a time"
            )));
        }
        self.members.push(Member::new(spec)?);
        if let Err(e) = self.worker.allow(&self.members) {
            drop(self.members.pop().map(|mut member| member.remove(None)));
            return Err(e);
        }
        self.worker.disk_added();
        Ok(())
    }

    /// Waits until there is something to do.
    fn wait(&self) -> Ready {
        let (mut fds, mut whose) = (Vec::new(), Vec::new());
        let mut listen = |fd, flags, who| {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
            whose.push(who);
        };
        for (m, member) in self.members.iter().enumerate() {
            listen(member.endpoint.listener.as_fd(), PollFlags::IN, PollSource::Endpoint(m));
            listen(member.public.as_fd(), PollFlags::IN, PollSource::Public(m));
            for (i, client) in member.clients.iter().enumerate() {
                listen(client.as_fd(), PollFlags::IN, PollSource::Client(m, i));
            }
            if let Some(relay) = member.relay.fd() {
                listen(relay, PollFlags::IN, PollSource::Relay(m));
            }
        }
        if let Some(end) = self.worker.end_fd(&self.members) {
            listen(end.as_fd(), PollFlags::RDHUP, PollSource::Worker);
        }
        if let Some(names) = self.worker.names_fd() {
            listen(names, PollFlags::IN, PollSource::Names);
        }
        if let Some(group) = &self.group {
            listen(group.endpoint.listener.as_fd(), PollFlags::IN, PollSource::Group);
            for (i, client) in group.clients.iter().enumerate() {
                listen(client.as_fd(), PollFlags::IN, PollSource::Joiner(i));
            }
            if let Some((commands, _)) = &group.commands {
                listen(commands.as_fd(), PollFlags::IN, PollSource::Commands);
            }
        }
        let relays = self.members.iter().filter_map(|member| member.relay.due());
        let is_idle = self.members.first().is_some_and(|member| member.spec.is_idle());
        let due = self.worker.due(is_idle).into_iter().chain(relays).min();
        let timeout = due.map(|due| Timespec {
            tv_sec: due.as_secs() as i64,
            tv_nsec: due.subsec_nanos().into(),
        });
        if poll(&mut fds, timeout.as_ref()).is_err() {
            std::thread::sleep(RETRY_PAUSE);
            return Ready::default();
        }
        let mut ready = Ready::default();
        let all = whose.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        all.for_each(|(who, _)| ready.add(who));
        ready
    }

    /// Accepts an NBD client and hands it to the relay. On failure the client's connection is
    /// closed.
    fn forward_client(&mut self, m: usize) {
        let Member { relay, spec, public, connections, .. } = &mut self.members[m];
        match public::accept(public) {
            Ok(Some(_)) if spec.is_idle() => {}
            Ok(Some(client)) => drop(relay.admit(client.as_fd(), spec, &self.binary, connections)),
            Ok(None) => {}
            Err(_) => std::thread::sleep(RETRY_PAUSE),
        }
    }

    /// Handles one request of client `i` of member `m`. Returns whether the member still exists.
    fn handle_request(&mut self, m: usize, i: usize) -> bool {
        let member = &mut self.members[m];
        let Frame { bytes, files } = match KEEPER.try_receive(&member.clients[i]) {
            Ok(Some(frame)) => frame,
            Ok(None) => return true,
            Err(_) => {
                member.remove_client(i);
                return true;
            }
        };
        let no = |why: &dyn std::fmt::Display| Reply::Failed(why.to_string());
        let (reply, gives) = match serde_json::from_slice(&bytes) {
            Ok(Request::Line { lost, version }) => {
                let is_lost = lost == Some(self.worker.start());
                let agreed = VERSION.agree(version).map_err(|e| {
                    let e = io::Error::from(e);
                    io::Error::new(e.kind(), format!("the keeper refuses this daemon: {e}"))
                });
                match agreed.and_then(|_| match is_lost {
                    true => self.worker.kill(&mut self.members),
                    false => Ok(()),
                }) {
                    Err(e) => (no(&e), None),
                    Ok(()) => {
                        let member = &mut self.members[m];
                        member.follower = Some(member.clients[i].as_raw_fd());
                        (self.line(), Some(0))
                    }
                }
            }
            // The client may have noticed the end of a worker before this keeper.
            Ok(Request::SecondLine) => match self.worker.check_exit(&mut self.members) {
                Err(e) => (no(&e), None),
                Ok(()) => (self.line(), Some(1)),
            },
            Ok(Request::Spec) => (Reply::Spec(Box::new(member.spec.clone())), None),
            Ok(Request::End) => return self.end(m, i, true),
            Ok(Request::Leave) => return self.end(m, i, false),
            Ok(Request::Join(_)) => (no(&"a disk can join at its group's socket only"), None),
            Ok(Request::Change(spec)) => {
                let changed = self.change(m, *spec);
                (changed.map_or_else(|e| no(&e), |()| Reply::Done), None)
            }
            Ok(Request::Become(spec)) => {
                let became = self.become_keeper_of(*spec);
                (became.map_or_else(|e| no(&e), |()| Reply::Done), None)
            }
            Ok(Request::Client { about }) => {
                let handed = member.connections.admit_other(&about, &files);
                (handed.map_or_else(|e| no(&e), |()| Reply::Done), None)
            }
            Ok(Request::Upgrade { binary }) => (no(&self.upgrade(m, i, &binary)), None),
            Err(e) => (no(&format!("malformed request: {e}")), None),
        };
        let Member { connections, clients, .. } = &self.members[m];
        send_reply(&clients[i], &reply, gives.map(|line: usize| connections.lines[line].as_fd()));
        true
    }

    fn line(&self) -> Reply {
        let keeper = getpid().as_raw_nonzero().get();
        Reply::Line { start: self.worker.start(), keeper, version: VERSION.own }
    }

    /// Replaces the description of the disk. Its worker, which has closed the image, is replaced.
    fn change(&mut self, m: usize, spec: DiskSpec) -> io::Result<()> {
        let ours = &self.members[m].spec;
        if self.group.is_some() || spec.group.is_some() {
            return Err(io::Error::other("a disk of a store leaves it instead"));
        }
        if (&spec.socket, &spec.run_dir) != (&ours.socket, &ours.run_dir) {
            return Err(io::Error::other("it is another disk"));
        }
        self.worker.replace(&mut self.members)?;
        if spec.is_idle() {
            // Its clients have nothing to wait for.
            self.members[m].relay.end();
        }
        self.members[m].spec = spec;
        self.worker.allow(&self.members)
    }

    /// Takes a disk, if there is none. The new sockets are listened at before the old ones go.
    fn become_keeper_of(&mut self, spec: DiskSpec) -> io::Result<()> {
        let [member] = self.members.as_mut_slice() else {
            return Err(io::Error::other("it keeps several disks"));
        };
        if !member.spec.is_idle() || spec.group.is_some() {
            return Err(io::Error::other("it has a disk"));
        }
        let mut next = Member::new(spec)?;
        let run_dir = member.spec.run_dir.clone();
        let removed = member.remove(Some(&run_dir));
        // The requester waits for the reply at its connection.
        next.clients = std::mem::take(&mut member.clients);
        *member = next;
        crate::name_disk(&member.spec.run_dir);
        removed?;
        self.worker.allow(&self.members)
    }

    /// Stops keeping a disk, and ends the process after the last one. Kills a worker that may have
    /// the disk open. Returns whether the disk is still kept, since the worker could not be killed.
    fn end(&mut self, m: usize, requester: usize, has_it_open: bool) -> bool {
        let is_last = self.members.len() == 1;
        if (is_last || has_it_open)
            && let Err(e) = self.end_worker()
        {
            send_reply(&self.members[m].clients[requester], &Reply::Failed(e.to_string()), None);
            return true;
        }
        let mut member = self.members.remove(m);
        let alive = match &self.group {
            None => Some(member.spec.run_dir.clone()),
            Some(_) => None,
        };
        let mut removed = member.remove(alive.as_deref());
        // While I/O of a dead worker is under way, no other host may have the LUN.
        let fenced = member.spec.sandbox.as_ref().filter(|sandbox| sandbox.fence.is_some());
        if let (Ok(()), Some(sandbox)) = (&removed, fenced) {
            self.worker.drop_images();
            sandbox.release_fence();
        }
        if let Some(group) = self.group.as_ref().filter(|_| is_last) {
            removed = removed.and(group.remove());
        }
        let reply = match removed {
            Ok(()) => Reply::Done,
            Err(e) => Reply::Failed(e.to_string()),
        };
        send_reply(&member.clients[requester], &reply, None);
        if is_last {
            std::process::exit(0);
        }
        // It cannot fail for want of a directory: those of the other disks exist.
        let _ = self.worker.allow(&self.members);
        false
    }

    /// Kills the worker and waits a while for its end. A worker whose storage is stuck ends later:
    /// it does nothing more, and its lock keeps the next one away until then.
    fn end_worker(&mut self) -> io::Result<()> {
        self.worker.kill(&mut self.members)?;
        for _ in 0..EXIT_POLLS {
            if self.worker.has_exited() {
                break;
            }
            std::thread::sleep(self.worker.due(false).unwrap_or_default());
        }
        Ok(())
    }

    /// Replaces this program by `binary`. It returns only on failure, with nothing changed but the
    /// worker killed.
    fn upgrade(&mut self, m: usize, requester: usize, binary: &Path) -> io::Error {
        self.try_upgrade(m, requester, binary).err().unwrap_or_else(|| io::ErrorKind::Other.into())
    }

    fn try_upgrade(&mut self, m: usize, requester: usize, binary: &Path) -> io::Result<()> {
        let file = File::open(binary)?;
        self.end_worker()?;
        // The next program could not wait for a worker that it has not started.
        if !self.worker.has_exited() {
            return Err(io::Error::other("the worker does not end: its storage is stuck"));
        }
        let requester = &self.members[m].clients[requester];
        let group = self.group.as_ref();
        let group_fds = group.map(|group| [&group.endpoint.lock, &group.endpoint.listener]);
        let commands = group.and_then(|group| group.commands.as_ref());
        let Other { spec, before: [lock, listener, public], relay } = self.members[0].to_state();
        let state = State {
            spec,
            start: self.worker.start() + 1,
            before: Some([lock, listener, requester.as_raw_fd()]),
            public: Some(public),
            relay,
            asker_of: m,
            group: group_fds.map(|group_fds| group_fds.map(AsRawFd::as_raw_fd)),
            commands: commands.map(|(fd, path)| (fd.as_raw_fd(), path.clone())),
            others: self.members[1..].iter().map(Member::to_state).collect(),
        };
        let mut kept = vec![requester.as_fd()];
        for Member { endpoint: Endpoint { lock, listener }, public, relay, .. } in &self.members {
            kept.extend([lock, listener, public].map(AsFd::as_fd));
            kept.extend(relay.fd());
        }
        kept.extend(group_fds.into_iter().flatten().map(AsFd::as_fd));
        kept.extend(commands.map(|(fd, _)| fd.as_fd()));
        let state = CString::new(format!("{VARIABLE}={}", serde_json::to_string(&state)?))?;
        let mut environment = environment_without(VARIABLE);
        environment.push(state);
        let arguments = std::env::args_os().map(|argument| CString::new(argument.into_vec()));
        let arguments = arguments.collect::<Result<_, _>>()?;
        let program = Program { file: file.as_fd(), arguments, environment };
        Err(become_in_place(&program, &kept))
    }
}

impl Ready {
    fn add(&mut self, who: PollSource) {
        match who {
            PollSource::Endpoint(m) => self.connecting.push(m),
            PollSource::Public(m) => self.nbd_clients.push(m),
            PollSource::Client(m, i) => self.requests.push((m, i)),
            PollSource::Relay(m) => self.relay.push(m),
            // The next turn of the loop begins with the worker.
            PollSource::Worker => {}
            PollSource::Names => self.names = true,
            PollSource::Group => self.joining = true,
            PollSource::Joiner(i) => self.joiners.push(i),
            PollSource::Commands => self.command = true,
        }
    }
}

/// Most checks for the worker's exit before the keeper stops waiting for it.
const EXIT_POLLS: u32 = 50;

/// Sends a reply. A client that does not read misses it.
fn send_reply(client: &OwnedFd, reply: &Reply, file: Option<BorrowedFd<'_>>) {
    if let Ok(bytes) = serde_json::to_vec(reply) {
        let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
        let _ = KEEPER.try_send(client, &bytes, &files);
    }
}
