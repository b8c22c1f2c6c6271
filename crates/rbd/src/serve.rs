//! The image as the medium of a helper.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_helper::{Done, Fault, Links, Medium, Request, What, refuse_links};
use ferrite_host::helper::CONTROL_FD;
use ferrite_host::process::take_given;
use ferrite_host::sandbox::{leave_root, user_of_helper};
use ferrite_nbd::uri::rbd::Image as Name;
use rustix::process::{geteuid, set_parent_process_death_signal};

use crate::lock::is_lost;
use crate::log::log;
use crate::open::{Opened, open};

/// How long the end may wait for requests under way, and for the starter of a helper without an image.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often the size of the image is looked at. librbd has it from the image's watch, so that costs nothing.
const SIZE_EVERY: Duration = Duration::from_secs(1);

/// The image.
struct Disk {
    opened: Arc<Opened>,
    /// Another client has the image: nothing succeeds any more.
    has_lost: AtomicBool,
}

impl Medium for Disk {
    fn bytes(&self) -> Option<u64> {
        self.opened.image.bytes().ok()
    }

    fn is_read_only(&self) -> bool {
        self.opened.read_only
    }

    fn has_lost(&self) -> bool {
        self.has_lost.load(Ordering::Relaxed)
    }

    fn submit(&self, request: Request, data: Vec<u8>, done: Done) {
        let Request { what, offset, len, durable } = request;
        let done: Done = match durable {
            // The write first, then a flush; the answer when both are done.
            true => {
                let opened = self.opened.clone();
                Box::new(move |result, data| match result {
                    Ok(_) => opened.image.flush(done),
                    failed => done(failed, data),
                })
            }
            false => done,
        };
        let image = &self.opened.image;
        match what {
            What::Read => image.read(offset, data, done),
            What::Write => image.write(offset, data, done),
            What::Discard => image.discard(offset, len, done),
            What::Zero { thick } => image.zero(offset, len as usize, thick, done),
            What::Flush => image.flush(done),
        }
    }

    fn failed(&self, errno: i32) {
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
            let disk = Disk { opened: Arc::new(opened), has_lost: AtomicBool::new(false) };
            let links = Links::new(disk);
            // Without the thread the disk has its new size when it is opened again.
            let _ = links.follow_size(SIZE_EVERY);
            links.take_from(&control);
            end(links);
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

/// No request is under way when the lock is given back.
fn end(mut links: Arc<Links<Disk>>) {
    let until = Instant::now() + PATIENCE;
    // With requests under way the lock is left: a successor breaks it, which keeps them from coming late.
    if links.end(until) {
        let disk = links.medium();
        disk.opened.release(disk.has_lost());
    }
    // The image is closed when the last thread has let it go.
    while Instant::now() < until {
        match Arc::try_unwrap(links) {
            Ok(last) => return drop(last.into_medium()),
            Err(shared) => links = shared,
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
