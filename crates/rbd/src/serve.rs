//! The image, and the connections to it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use ferrite_host::helper::{CONTROL, CONTROL_FD, LINK};
use ferrite_host::process::take_given;
use ferrite_host::sandbox::{leave_root, user_of_helper};
use ferrite_nbd::uri::rbd::Image as Name;
use rustix::process::{geteuid, set_parent_process_death_signal};

use crate::budget::Budget;
use crate::fault::{Fault, log};
use crate::greeting;
use crate::lock::is_lost;
use crate::open::{Opened, open};
use crate::session::Session;

/// Connections at a time. A disk has one for each queue.
const MAX_CONNECTIONS: usize = 128;
/// How long the end may wait for requests under way, and for the starter of a helper without an image.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often the size of the image is looked at. librbd has it from the image's watch, so that costs nothing.
const SIZE_EVERY: Duration = Duration::from_secs(1);

/// What all connections share.
pub(crate) struct Disk {
    pub(crate) opened: Opened,
    pub(crate) budget: Arc<Budget>,
    sessions: Mutex<Vec<Arc<Session>>>,
    /// Another client has the image: nothing succeeds any more.
    has_lost: AtomicBool,
}

impl Disk {
    pub(crate) fn has_lost(&self) -> bool {
        self.has_lost.load(Ordering::Relaxed)
    }

    /// Looks at the error of a request.
    pub(crate) fn failed(&self, errno: i32) {
        if is_lost(errno) && !self.has_lost.swap(true, Ordering::Relaxed) {
            self.opened.lose();
            let name = &self.opened.name;
            log(
                3,
                &format!(
                    "{name}: another client has taken the image, and all requests fail from now on; end the guest"
                ),
            );
        }
    }

    pub(crate) fn sessions(&self) -> Vec<Arc<Session>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn forget(&self, session: &Arc<Session>) {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|other| !Arc::ptr_eq(other, session));
    }
}

/// Serves an image until the starter closes the control socket.
pub(crate) fn run(name: &str, read_only: bool) -> ExitCode {
    let Ok(control) = take_given(CONTROL_FD) else {
        log(3, "it is started by ferrite, which gives it a socket");
        return ExitCode::from(2);
    };
    // It ends with the control socket, and gives the lock back. To be killed with the starter would leave the lock.
    let _ = set_parent_process_death_signal(None);
    let name = Name::parse(name).map_err(|e| Fault::lasting(e.why, e.help));
    let opened = name
        .and_then(|name| open(&name, read_only))
        .and_then(|opened| be_nobody().map(|()| opened));
    match opened {
        Ok(opened) => {
            let (budget, sessions) = (Arc::default(), Mutex::default());
            let disk = Disk { opened, budget, sessions, has_lost: AtomicBool::new(false) };
            let disk = Arc::new(disk);
            let weak = Arc::downgrade(&disk);
            // Without the thread the disk has its new size when it is opened again.
            let _ =
                std::thread::Builder::new().name("size".into()).spawn(move || follow_size(&weak));
            take_links(&control, disk);
            ExitCode::SUCCESS
        }
        Err(fault) => {
            refuse_links(&control, &fault);
            ExitCode::FAILURE
        }
    }
}

/// All that is opened by name is open: the rest needs no right of root.
fn be_nobody() -> Result<(), Fault> {
    if !geteuid().is_root() {
        return Ok(());
    }
    leave_root(user_of_helper(std::process::id()))
        .map_err(|e| Fault::lasting(e.to_string(), "start it as root with all its capabilities"))
}

fn take_links(control: &OwnedFd, disk: Arc<Disk>) {
    while let Ok(mut frame) = CONTROL.receive(control) {
        let Some(socket) = frame.files.pop().filter(|_| frame.bytes == LINK) else { continue };
        let session = Arc::new(Session::new(socket));
        {
            let mut sessions = disk.sessions.lock().unwrap_or_else(PoisonError::into_inner);
            if sessions.len() >= MAX_CONNECTIONS {
                continue;
            }
            sessions.push(session.clone());
        }
        let of_thread = disk.clone();
        let started = std::thread::Builder::new().name("connection".into()).spawn({
            let session = session.clone();
            move || {
                session.run(&of_thread);
                of_thread.forget(&session);
            }
        });
        if started.is_err() {
            disk.forget(&session);
        }
    }
    end(disk);
}

/// Ends all connections when the image has grown: NBD tells a client the size in its greeting only, and ours connects again at
/// once. It repeats what was not answered.
fn follow_size(disk: &Weak<Disk>) {
    let mut known = None;
    while let Some(disk) = disk.upgrade() {
        if let Ok(bytes) = disk.opened.image.bytes()
            && known.replace(bytes).is_some_and(|known| bytes > known)
        {
            disk.sessions().iter().for_each(|session| session.close());
        }
        drop(disk);
        std::thread::sleep(SIZE_EVERY);
    }
}

/// No request is under way when the lock is given back.
fn end(mut disk: Arc<Disk>) {
    let until = Instant::now() + PATIENCE;
    let sessions = disk.sessions();
    // With requests under way the lock is left: a successor breaks it, which keeps them from coming late.
    if sessions.iter().all(|session| session.end(until)) {
        disk.opened.release(disk.has_lost());
    }
    drop(sessions);
    // The image is closed when the last thread has let it go.
    while Instant::now() < until {
        match Arc::try_unwrap(disk) {
            Ok(_) => return,
            Err(shared) => disk = shared,
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Says to the clients that wait why there is no image. They log it once; a helper is started for each of their attempts.
fn refuse_links(control: &OwnedFd, fault: &Fault) {
    let mut next = CONTROL.receive(control).ok();
    while let Some(frame) = next {
        for socket in frame.files {
            let _ = greeting::refuse(socket.as_fd(), fault);
        }
        next = CONTROL.try_receive(control).ok().flatten();
    }
}
