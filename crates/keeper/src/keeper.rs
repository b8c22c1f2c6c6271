//! The keeper's process: one thread that waits for its worker's end, and for who asks.
//!
//! It has few pages of memory of its own, since there is one for each disk. It never waits for anybody:
//! not for a worker whose storage is stuck, and not for who asks and does not listen.

use std::convert::Infallible;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::Duration;

use ferrite_io::process::{
    Fork, Program, become_in_place, environment_without, fork, io_priority, receive_with,
    send_with, set_io_priority_of_group, take_given,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{chdir, getpid, setsid};

use crate::group::OfGroup;
use crate::keep::{Group, Keep, Other, State, VARIABLE};
use crate::member::Member;
use crate::public;
use crate::socket::Place;
use crate::tell;
use crate::wire::{Answer, MAX_BYTES, Request};
use crate::worker::Worker;

/// Most disks of a group.
const MEMBERS: usize = 64;
/// How often it is looked whether somebody has given the keeper another priority for its I/O. The
/// kernel tells nobody.
const LOOK_AT_PRIORITY: Duration = Duration::from_secs(2);
/// The worker cannot be started: how often that is told.
const TELL_AGAIN: u32 = 100;
/// What cannot be done for want of descriptors stays to be done, and `poll` says so at once.
pub(crate) const REST: Duration = Duration::from_millis(50);

/// A keeper: the process that [`Keep::start`] has started. Descriptors with the numbers `also`, which
/// this process was started with, are handed on to each worker.
///
/// # Errors
/// It cannot begin: there is nothing to keep, or a keeper of this disk lives.
pub fn run(also: &[RawFd]) -> io::Result<Infallible> {
    let text = std::env::var(VARIABLE).map_err(|_| {
        io::Error::other("a keeper is started by ferrite itself, when it serves a disk")
    })?;
    let state: State = serde_json::from_str(&text)?;
    // By what it is, not by its name: a worker is what this one was, also when that was replaced.
    let binary = OwnedFd::from(File::open("/proc/self/exe")?);
    let is_first = state.before.is_none();
    let start = state.start;
    let (members, group) = take_up(state)?;
    // Who has started us waits for this, and is not our parent.
    if is_first {
        if fork()? == Fork::Parent {
            std::process::exit(0);
        }
        setsid()?;
    }
    let keep = &members[0].keep;
    // It may outlive the folder, and the file system, that it was started in.
    if keep.socket.is_absolute() && keep.run_dir.is_absolute() {
        chdir("/")?;
    }
    let askers = members.iter().flat_map(|member| &member.clients);
    askers.for_each(|asker| answer(asker, &Answer::Done, None));
    let of_group = keep.group.as_ref().map(|group| &group.run_dir);
    let called = of_group.unwrap_or(&keep.run_dir).file_name().unwrap_or_default();
    // Fails where another keeper runs in this process: a test's.
    let _ = crate::DISK.set(called.to_string_lossy().into_owned());
    let worker = Worker::new(start, group.is_some())?;
    Process { binary, members, group, worker, also: also.to_vec(), failures: 0 }.run()
}

/// The disks that it begins with, and what their group has.
fn take_up(state: State) -> io::Result<(Vec<Member>, Option<OfGroup>)> {
    let State { keep, before, public, relay, asker_of, group, commands, others, .. } = state;
    let what = keep.group.clone();
    let mut members = Vec::new();
    let group = match (before, what) {
        (None, what) => {
            // The group first: who finds that it has a keeper has its disk join it.
            let group = what.map(OfGroup::take).transpose()?;
            members.push(Member::new(keep)?);
            group
        }
        (Some([lock, listener, asker]), what) => {
            members.push(Member::handed_on(keep, [lock, listener], public, relay)?);
            for Other { keep, before: [lock, listener, public], relay } in others {
                members.push(Member::handed_on(keep, [lock, listener], Some(public), relay)?);
            }
            // What it asks next is about that disk.
            let of = members.get_mut(asker_of).ok_or(io::ErrorKind::InvalidData)?;
            of.clients.push(take_given(asker)?);
            what.map(|what| OfGroup::handed_on(what, group, commands)).transpose()?
        }
    };
    Ok((members, group))
}

/// What there is to do. Members and their clients are numbers.
#[derive(Default)]
struct Ready {
    /// Somebody has come who wants to ask.
    came: Vec<usize>,
    /// Who has asked.
    asked: Vec<(usize, usize)>,
    /// The worker asks for a name.
    names: bool,
    /// A client of NBD has come.
    client: Vec<usize>,
    /// The relay of such clients wants something.
    relay: Vec<usize>,
    /// Somebody has come to the group,
    joins: bool,
    /// has asked there,
    asked_to_join: Vec<usize>,
    /// or wants a command to be done.
    command: bool,
}

struct Process {
    binary: OwnedFd,
    /// One, or those of a group. There is always one.
    members: Vec<Member>,
    group: Option<OfGroup>,
    worker: Worker,
    also: Vec<RawFd>,
    /// How often the worker could not be started.
    failures: u32,
}

/// Who is meant by a descriptor that is waited for.
#[derive(Clone, Copy)]
enum Whose {
    Place(usize),
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
        let mut priority = io_priority();
        loop {
            if let Err(e) = self.worker.go_on(&mut self.members, &self.binary, &self.also) {
                if self.failures.is_multiple_of(TELL_AGAIN) {
                    tell(&format!("cannot start the worker: {e}"));
                }
                self.failures = self.failures.wrapping_add(1);
                std::thread::sleep(REST);
            }
            let now = io_priority();
            // What fails is tried when it is changed again: nothing but speed depends on it.
            if now != priority && now >= 0 {
                let _ = set_io_priority_of_group(now);
                priority = now;
            }
            let ready = self.wait();
            self.members.iter_mut().for_each(|member| member.relay.reap());
            self.attend(ready);
        }
    }

    fn attend(&mut self, ready: Ready) {
        for m in ready.relay {
            let Member { relay, seat, .. } = &mut self.members[m];
            relay.answer(seat);
        }
        if ready.names
            && let Err(e) = self.worker.answer(&mut self.members)
        {
            tell(&format!("cannot end the worker: {e}"));
            std::thread::sleep(REST);
        }
        ready.client.into_iter().for_each(|m| self.admit(m));
        // Before anybody is removed, and numbers change.
        for m in ready.came {
            if self.members[m].accept().is_err() {
                std::thread::sleep(REST);
            }
        }
        // From the last on, since who has gone is removed.
        let mut gone = None;
        for (m, i) in ready.asked.into_iter().rev() {
            if gone != Some(m) && !self.hear(m, i) {
                gone = Some(m);
            }
        }
        self.attend_to_group(ready.joins, ready.asked_to_join, ready.command);
    }

    fn attend_to_group(&mut self, joins: bool, asked: Vec<usize>, command: bool) {
        let Some(group) = &mut self.group else { return };
        if command {
            group.admit(&self.worker);
        }
        let mut wanted = Vec::new();
        for i in asked.into_iter().rev() {
            wanted.extend(group.hear(i));
        }
        if joins && group.accept().is_err() {
            std::thread::sleep(REST);
        }
        for (client, keep) in wanted {
            let joined = keep.and_then(|keep| self.join(keep));
            let said = joined.map_or_else(|e| Answer::No(e.to_string()), |()| Answer::Done);
            answer(&client, &said, None);
        }
    }

    /// Keeps one disk more.
    fn join(&mut self, mut keep: Keep) -> io::Result<()> {
        let ours = &self.members[0].keep.group;
        let socket = |group: &Option<Group>| group.as_ref().map(|group| group.socket.clone());
        if socket(&keep.group) != socket(ours) {
            return Err(io::Error::other("its group is another one"));
        }
        // The one worker was started as this says.
        keep.group.clone_from(ours);
        if self.members.len() >= MEMBERS {
            return Err(io::Error::other(format!(
                "{MEMBERS} disks of one store are served at a time"
            )));
        }
        self.members.push(Member::new(keep)?);
        if let Err(e) = self.worker.allow(&self.members) {
            drop(self.members.pop().map(|mut member| member.remove(None)));
            return Err(e);
        }
        self.worker.has_another();
        Ok(())
    }

    /// Waits for something to do.
    fn wait(&self) -> Ready {
        let (mut fds, mut whose) = (Vec::new(), Vec::new());
        let mut listen = |fd, flags, who| {
            fds.push(PollFd::from_borrowed_fd(fd, flags));
            whose.push(who);
        };
        for (m, member) in self.members.iter().enumerate() {
            listen(member.place.listener.as_fd(), PollFlags::IN, Whose::Place(m));
            listen(member.public.as_fd(), PollFlags::IN, Whose::Public(m));
            for (i, client) in member.clients.iter().enumerate() {
                listen(client.as_fd(), PollFlags::IN, Whose::Client(m, i));
            }
            if let Some(relay) = member.relay.fd() {
                listen(relay, PollFlags::IN, Whose::Relay(m));
            }
        }
        if let Some(end) = self.worker.end_fd(&self.members) {
            listen(end.as_fd(), PollFlags::RDHUP, Whose::Worker);
        }
        if let Some(names) = self.worker.names() {
            listen(names, PollFlags::IN, Whose::Names);
        }
        if let Some(group) = &self.group {
            listen(group.place.listener.as_fd(), PollFlags::IN, Whose::Group);
            for (i, client) in group.clients.iter().enumerate() {
                listen(client.as_fd(), PollFlags::IN, Whose::Joiner(i));
            }
            if let Some((commands, _)) = &group.commands {
                listen(commands.as_fd(), PollFlags::IN, Whose::Commands);
            }
        }
        let relays = self.members.iter().filter_map(|member| member.relay.due());
        let due = self.worker.due().into_iter().chain(relays).min();
        let timeout = due.unwrap_or(LOOK_AT_PRIORITY).min(LOOK_AT_PRIORITY);
        let timeout =
            Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        if poll(&mut fds, Some(&timeout)).is_err() {
            std::thread::sleep(REST);
            return Ready::default();
        }
        let mut ready = Ready::default();
        let all = whose.into_iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
        all.for_each(|(who, _)| ready.add(who));
        ready
    }

    /// Hands a client on. It is turned away where that cannot be.
    fn admit(&mut self, m: usize) {
        let Member { relay, keep, public, seat, .. } = &mut self.members[m];
        match public::accept(public) {
            Ok(Some(client)) => drop(relay.admit(client.as_fd(), keep, &self.binary, seat)),
            Ok(None) => {}
            Err(_) => std::thread::sleep(REST),
        }
    }

    /// Does what this client of a member asks for. Whether the member is there still.
    fn hear(&mut self, m: usize, i: usize) -> bool {
        let member = &mut self.members[m];
        let heard = receive_with(&member.clients[i], MAX_BYTES, false);
        let bytes = match heard {
            Ok((bytes, _)) if !bytes.is_empty() => bytes,
            Err(e) if e.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => return true,
            _ => {
                member.forget_client(i);
                return true;
            }
        };
        let no = |why: &dyn std::fmt::Display| Answer::No(why.to_string());
        let (said, gives) = match serde_json::from_slice(&bytes) {
            Ok(Request::Line { lost }) => {
                let is_lost = lost == Some(self.worker.start());
                match if is_lost { self.worker.end(&mut self.members) } else { Ok(()) } {
                    Err(e) => (no(&e), None),
                    Ok(()) => {
                        let member = &mut self.members[m];
                        member.follower = Some(member.clients[i].as_raw_fd());
                        (self.line(), Some(0))
                    }
                }
            }
            // Who asks may have seen the end of a worker before us.
            Ok(Request::SecondLine) => match self.worker.look(&mut self.members) {
                Err(e) => (no(&e), None),
                Ok(()) => (self.line(), Some(1)),
            },
            Ok(Request::Keep) => (Answer::Keep(Box::new(member.keep.clone())), None),
            Ok(Request::End) => return self.end(m, i, true),
            Ok(Request::Leave) => return self.end(m, i, false),
            Ok(Request::Join(_)) => (no(&"a disk joins at its group's socket"), None),
            Ok(Request::Upgrade { binary }) => (no(&self.upgrade(m, i, &binary)), None),
            Err(e) => (no(&format!("that is no request: {e}")), None),
        };
        let Member { seat, clients, .. } = &self.members[m];
        answer(&clients[i], &said, gives.map(|line: usize| seat.lines[line].as_fd()));
        true
    }

    fn line(&self) -> Answer {
        let keeper = getpid().as_raw_nonzero().get();
        Answer::Line { start: self.worker.start(), keeper }
    }

    /// Keeps a disk no longer, and ends with the last. A worker that may have it open is killed. Whether the
    /// disk is there still.
    fn end(&mut self, m: usize, asker: usize, has_it_open: bool) -> bool {
        let is_last = self.members.len() == 1;
        if (is_last || has_it_open)
            && let Err(e) = self.end_worker()
        {
            answer(&self.members[m].clients[asker], &Answer::No(e.to_string()), None);
            return true;
        }
        let mut member = self.members.remove(m);
        let alive = match &self.group {
            None => Some(member.keep.run_dir.clone()),
            Some(_) => None,
        };
        let mut removed = member.remove(alive.as_deref());
        if let Some(group) = self.group.as_ref().filter(|_| is_last) {
            removed = removed.and(group.remove());
        }
        let answered = match removed {
            Ok(()) => Answer::Done,
            Err(e) => Answer::No(e.to_string()),
        };
        answer(&member.clients[asker], &answered, None);
        if is_last {
            std::process::exit(0);
        }
        // Its folders were there.
        let _ = self.worker.allow(&self.members);
        false
    }

    /// Kills the worker, and looks for a while whether it has ended. One whose storage is stuck ends
    /// later: it does nothing more, and its lock keeps the next one away until then.
    fn end_worker(&mut self) -> io::Result<()> {
        self.worker.end(&mut self.members)?;
        for _ in 0..LOOKS_AT_THE_END {
            if self.worker.has_ended() {
                break;
            }
            std::thread::sleep(self.worker.due().unwrap_or_default());
        }
        Ok(())
    }

    /// Becomes another binary. Only its failure returns, and nothing has changed then but the worker.
    fn upgrade(&mut self, m: usize, asker: usize, binary: &Path) -> io::Error {
        self.try_upgrade(m, asker, binary).err().unwrap_or_else(|| io::ErrorKind::Other.into())
    }

    fn try_upgrade(&mut self, m: usize, asker: usize, binary: &Path) -> io::Result<()> {
        let file = File::open(binary)?;
        self.end_worker()?;
        // Of whom the next binary knows nothing.
        if !self.worker.has_ended() {
            return Err(io::Error::other("the worker's storage is stuck, and it does not end"));
        }
        let asker = &self.members[m].clients[asker];
        let group = self.group.as_ref();
        let of_group = group.map(|group| [&group.place.lock, &group.place.listener]);
        let commands = group.and_then(|group| group.commands.as_ref());
        let Other { keep, before: [lock, listener, public], relay } = self.members[0].hand_on();
        let state = State {
            keep,
            start: self.worker.start() + 1,
            before: Some([lock, listener, asker.as_raw_fd()]),
            public: Some(public),
            relay,
            asker_of: m,
            group: of_group.map(|of_group| of_group.map(AsRawFd::as_raw_fd)),
            commands: commands.map(|(fd, path)| (fd.as_raw_fd(), path.clone())),
            others: self.members[1..].iter().map(Member::hand_on).collect(),
        };
        let mut kept = vec![asker.as_fd()];
        for Member { place: Place { lock, listener }, public, relay, .. } in &self.members {
            kept.extend([lock, listener, public].map(AsFd::as_fd));
            kept.extend(relay.fd());
        }
        kept.extend(of_group.into_iter().flatten().map(AsFd::as_fd));
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
    fn add(&mut self, who: Whose) {
        match who {
            Whose::Place(m) => self.came.push(m),
            Whose::Public(m) => self.client.push(m),
            Whose::Client(m, i) => self.asked.push((m, i)),
            Whose::Relay(m) => self.relay.push(m),
            // The next turn begins with that.
            Whose::Worker => {}
            Whose::Names => self.names = true,
            Whose::Group => self.joins = true,
            Whose::Joiner(i) => self.asked_to_join.push(i),
            Whose::Commands => self.command = true,
        }
    }
}

/// How often it is looked whether the worker has ended, before that is not waited for any more.
const LOOKS_AT_THE_END: u32 = 50;

/// Who does not listen misses it.
fn answer(client: &OwnedFd, answer: &Answer, file: Option<BorrowedFd<'_>>) {
    if let Ok(bytes) = serde_json::to_vec(answer) {
        let _ = send_with(client, &bytes, file);
    }
}
