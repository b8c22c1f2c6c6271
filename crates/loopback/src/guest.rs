//! The parts of a guest, and how its descriptors are passed to other processes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, FdFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::LoopbackError;
use super::memory::GuestMemory;
use ferrite_xen::hypervisor::DomId;

/// The size of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestOptions {
    /// Frames of 4096 bytes. They cost memory only once they are touched.
    pub frames: u32,
    /// Grant references.
    pub grants: u32,
    /// Event channels; each costs two descriptors.
    pub ports: u32,
}

impl Default for GuestOptions {
    /// 64 MiB, two references per frame, 64 channels.
    fn default() -> Self {
        GuestOptions { frames: 16 * 1024, grants: 32 * 1024, ports: 64 }
    }
}

/// Both directions of one event channel.
#[derive(Debug)]
struct Channel {
    to_back: OwnedFd,
    to_front: OwnedFd,
}

/// The descriptors of a guest, which all parties have.
#[derive(Debug)]
pub(super) struct Descriptors {
    memory: Arc<OwnedFd>,
    channels: Vec<Channel>,
}

impl Descriptors {
    pub(super) fn memory(&self) -> Arc<OwnedFd> {
        self.memory.clone()
    }

    /// The descriptor on which the backend waits and the frontend notifies; the port has been checked.
    pub(super) fn to_back(&self, port: u32) -> BorrowedFd<'_> {
        self.channels[port as usize].to_back.as_fd()
    }

    /// The descriptor on which the frontend waits and the backend notifies.
    pub(super) fn to_front(&self, port: u32) -> BorrowedFd<'_> {
        self.channels[port as usize].to_front.as_fd()
    }

    fn raw(&self) -> Vec<RawFd> {
        let channels = self.channels.iter().flat_map(|c| [&c.to_back, &c.to_front]);
        std::iter::once(&*self.memory).chain(channels).map(AsRawFd::as_raw_fd).collect()
    }
}

/// Everything that a party needs to use a guest: its memory, its event channels, and, for a frontend, a connection to
/// the store.
///
/// It is passed to a child process by [`pass_to`](Self::pass_to) in the parent and [`from_arg`](Self::from_arg) in the
/// child.
#[derive(Debug)]
pub struct GuestHandle {
    domid: DomId,
    descriptors: Arc<Descriptors>,
    store: Option<OwnedFd>,
}

impl GuestHandle {
    /// A new guest, without a store.
    ///
    /// # Errors
    /// The kernel gives no memory or no descriptors, or the options are out of range.
    pub fn create(domid: DomId, options: GuestOptions) -> Result<GuestHandle, LoopbackError> {
        let memory = Arc::new(GuestMemory::create(domid, options)?);
        let event = || raised(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let channels = (0..options.ports)
            .map(|_| Ok(Channel { to_back: event()?, to_front: event()? }))
            .collect::<Result<_, Errno>>()
            .map_err(LoopbackError::system("create a guest's event channels (ulimit -n?)"))?;
        Ok(GuestHandle {
            domid,
            descriptors: Arc::new(Descriptors { memory, channels }),
            store: None,
        })
    }

    /// The handle with a connection to the store, which must act for this guest.
    pub fn with_store(self, store: OwnedFd) -> GuestHandle {
        GuestHandle { store: Some(store), ..self }
    }

    /// Another handle of the same guest, without a store connection: those have one user each.
    pub fn share(&self) -> GuestHandle {
        GuestHandle { domid: self.domid, descriptors: self.descriptors.clone(), store: None }
    }

    /// The guest's domain.
    pub fn domid(&self) -> DomId {
        self.domid
    }

    /// Takes the connection to the store, once.
    pub fn take_store(&mut self) -> Option<OwnedFd> {
        self.store.take()
    }

    pub(super) fn descriptors(&self) -> &Arc<Descriptors> {
        &self.descriptors
    }

    /// A mapping of the guest's memory.
    ///
    /// # Errors
    /// The kernel refuses it, or the header is not that of a guest.
    pub fn map(&self) -> Result<GuestMemory, LoopbackError> {
        let memory = GuestMemory::attach(self.descriptors.memory())?;
        let channels = self.descriptors.channels.len();
        if memory.layout().ports as usize != channels || memory.domid() != self.domid {
            return Err(LoopbackError::NotAGuest(format!(
                "its header is that of guest {} with {} ports, the handle of guest {} with \
                 {channels}",
                memory.domid(),
                memory.layout().ports,
                self.domid,
            )));
        }
        Ok(memory)
    }

    fn describe(&self) -> String {
        let channels: Vec<String> = self
            .descriptors
            .channels
            .iter()
            .map(|c| format!("{}-{}", c.to_back.as_raw_fd(), c.to_front.as_raw_fd()))
            .collect();
        let store = self.store.as_ref().map_or("-".into(), |s| s.as_raw_fd().to_string());
        let memory = self.descriptors.memory.as_raw_fd();
        format!("{}/{memory}/{}/{store}", self.domid, channels.join(","))
    }

    /// Lets the process that `command` will start inherit the descriptors; returns the text for
    /// [`from_arg`](Self::from_arg) there, as an argument or in the environment. This process keeps its copies (the
    /// store's too) as long as `command` exists.
    pub fn pass_to(self, command: &mut Command) -> String {
        let text = self.describe();
        inherit(command, vec![self]);
        text
    }

    /// The guest that a parent process passed. To be called once for each text.
    ///
    /// # Errors
    /// The text is malformed, or a descriptor was not inherited.
    pub fn from_arg(text: &str) -> Result<GuestHandle, LoopbackError> {
        Self::parse(text, &inherited).map_err(|problem| LoopbackError::Handle {
            text: text.chars().take(80).collect(),
            problem,
        })
    }

    /// The text by which a process of the same user can [take](Self::take_from) the guest from this process, as long as
    /// this has it. Nothing is inherited, so no process is forked for it.
    pub fn offer(&self) -> String {
        format!("{}:{}", std::process::id(), self.describe())
    }

    /// The guest that another process [offers](Self::offer).
    ///
    /// # Errors
    /// The text is malformed, or that process has ended or has no such descriptors.
    pub fn take_from(text: &str) -> Result<GuestHandle, LoopbackError> {
        let taken = || {
            let (process, text) = text.split_once(':').ok_or("it names no process")?;
            let pid = process.parse().ok().and_then(Pid::from_raw).ok_or("it names no process")?;
            let of_it = |e: Errno| format!("process {process}: {e}");
            let process = pidfd_open(pid, PidfdFlags::empty()).map_err(of_it)?;
            Self::parse(text, &|number| {
                let fd = number.parse().map_err(|e| format!("descriptor {number:?}: {e}"))?;
                let got = pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).and_then(raised);
                got.map_err(|e| format!("descriptor {number}: {e}"))
            })
        };
        taken().map_err(|problem| LoopbackError::Handle {
            text: text.chars().take(80).collect(),
            problem,
        })
    }

    fn parse(
        text: &str,
        take: &dyn Fn(&str) -> Result<OwnedFd, String>,
    ) -> Result<GuestHandle, String> {
        let parts: Vec<&str> = text.split('/').collect();
        let [domid, memory, channels, store] = parts[..] else {
            return Err(format!("it has {} parts instead of 4", parts.len()));
        };
        let domid = DomId(domid.parse().map_err(|e| format!("domain {domid:?}: {e}"))?);
        let memory = Arc::new(take(memory)?);
        let channel = |pair: &str| {
            let (back, front) = pair.split_once('-').ok_or(format!("no channel: {pair:?}"))?;
            Ok::<_, String>(Channel { to_back: take(back)?, to_front: take(front)? })
        };
        let channels = channels.split(',').map(channel).collect::<Result<_, _>>()?;
        let store = if store == "-" { None } else { Some(take(store)?) };
        Ok(GuestHandle { domid, descriptors: Arc::new(Descriptors { memory, channels }), store })
    }
}

/// Everything that a backend process needs: a connection to the store that acts for dom0, and the guests that it may
/// serve.
#[derive(Debug)]
pub struct BackendHandle {
    /// The connection; [`pass_to`](Self::pass_to) passes it on.
    pub store: OwnedFd,
    /// The guests.
    pub guests: Vec<GuestHandle>,
}

impl BackendHandle {
    /// As [`GuestHandle::pass_to`].
    pub fn pass_to(self, command: &mut Command) -> String {
        let mut parts = vec![self.store.as_raw_fd().to_string()];
        parts.extend(self.guests.iter().map(GuestHandle::describe));
        inherit(command, self.guests);
        inherit(command, vec![self.store]);
        parts.join(";")
    }

    /// As [`GuestHandle::from_arg`].
    ///
    /// # Errors
    /// Those of [`GuestHandle::from_arg`].
    pub fn from_arg(text: &str) -> Result<BackendHandle, LoopbackError> {
        let mut parts = text.split(';');
        let store = inherited(parts.next().unwrap_or_default()).map_err(|problem| {
            LoopbackError::Handle { text: text.chars().take(80).collect(), problem }
        })?;
        let guests = parts.map(GuestHandle::from_arg).collect::<Result<_, _>>()?;
        Ok(BackendHandle { store, guests })
    }
}

/// The lowest number of inherited descriptors: a started process has its own at chosen numbers below
/// ([`ferrite_host::process::spawn`]).
const LOWEST_INHERITED: RawFd = 64;

/// The same open file under a number that no process uses for another purpose.
pub(super) fn raised(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    rustix::io::fcntl_dupfd_cloexec(fd, LOWEST_INHERITED)
}

/// Sends an event; a counter that is full has one pending already.
pub(super) fn signal(eventfd: BorrowedFd<'_>) -> io::Result<()> {
    match rustix::io::write(eventfd, &1u64.to_ne_bytes()) {
        Ok(_) | Err(Errno::AGAIN) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// The descriptors that a child process may inherit.
trait Inheritable: Send + Sync + 'static {
    fn raw_descriptors(&self) -> Vec<RawFd>;
}

impl Inheritable for GuestHandle {
    fn raw_descriptors(&self) -> Vec<RawFd> {
        let store = self.store.as_ref().map(AsRawFd::as_raw_fd);
        self.descriptors.raw().into_iter().chain(store).collect()
    }
}

impl Inheritable for OwnedFd {
    fn raw_descriptors(&self) -> Vec<RawFd> {
        vec![self.as_raw_fd()]
    }
}

/// Only the child of this `command` gets the descriptors: the flag is cleared after the fork.
fn inherit<T: Inheritable>(command: &mut Command, owners: Vec<T>) {
    let raw: Vec<RawFd> = owners.iter().flat_map(T::raw_descriptors).collect();
    let hook = move || {
        let _open_until_here = &owners;
        for fd in &raw {
            // SAFETY: `owners` keeps the descriptor open; fcntl is safe between fork and exec.
            if unsafe { libc::fcntl(*fd, libc::F_SETFD, 0) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: the hook calls fcntl and errno only: nothing that a lock of another thread of the
    // parent could block, no allocation.
    unsafe { command.pre_exec(hook) };
}

/// Takes a descriptor that was inherited on purpose: it is open, beyond the standard three, and not close-on-exec.
/// Everything that this process opens itself is close-on-exec, so nothing else here owns it. Taking it sets the flag,
/// so it can be taken once.
fn inherited(number: &str) -> Result<OwnedFd, String> {
    let fd: RawFd = number.parse().map_err(|e| format!("descriptor {number:?}: {e}"))?;
    // SAFETY: only asks for a flag; a number that is not open gives EBADF.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    if fd <= 2 || flags < 0 || flags & libc::FD_CLOEXEC != 0 {
        return Err(format!("descriptor {fd} was not inherited"));
    }
    // SAFETY: open, and not owned by anything else in this process, as explained above.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|e| format!("descriptor: {e}"))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_may_inherit_has_none_of_the_low_numbers() {
        let server = crate::StoreServer::start().unwrap();
        let guest = GuestHandle::create(DomId(1), GuestOptions::default()).unwrap();
        let guest = guest.with_store(server.connect(DomId(1)).unwrap());
        let numbers = guest.raw_descriptors();
        assert!(numbers.iter().all(|fd| *fd >= LOWEST_INHERITED), "{numbers:?}");
    }

    #[test]
    fn a_handle_that_was_not_inherited_is_refused() {
        let guest = GuestHandle::create(DomId(1), GuestOptions::default()).unwrap();
        let own = guest.describe();
        for text in ["", "1/2/3", "x/5/6-7/-", "1/2/6-7/-", "1/99999/6-7/-", "1/5/6/-", &own] {
            let outcome = GuestHandle::from_arg(text);
            assert!(matches!(outcome, Err(LoopbackError::Handle { .. })), "{text:?}");
        }
        assert!(BackendHandle::from_arg("").is_err());
    }

    #[test]
    fn a_guest_that_is_offered_is_taken_with_its_memory_and_its_channels() {
        let guest = GuestHandle::create(DomId(3), GuestOptions::default()).unwrap();
        let taken = GuestHandle::take_from(&guest.offer()).unwrap();
        assert_eq!(taken.map().unwrap().domid(), DomId(3));
        signal(guest.descriptors().to_back(1)).unwrap();
        let mut count = [0; 8];
        rustix::io::read(taken.descriptors().to_back(1), &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        assert!(taken.raw_descriptors().iter().all(|fd| *fd >= LOWEST_INHERITED));
        let own = guest.describe();
        for text in ["", &own, "x:1/5/6-7/-", &format!("{}:1/99999/6-7/-", std::process::id())] {
            let outcome = GuestHandle::take_from(text);
            assert!(matches!(outcome, Err(LoopbackError::Handle { .. })), "{text:?}");
        }
    }
}
