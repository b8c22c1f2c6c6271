//! An image that is opened when its guest connects, since the guest comes from another host
//! (attachments.md).
//!
//! That host's backend has the image, and may write to it until the guest runs here. So metadata
//! that were read before would be outdated. The worker only looks at the image, for the facts that a
//! frontend is offered, and keeps nothing of it. It opens the image before the first order that
//! needs it, and before clients of NBD and a stub domain are served.

use std::io;
use std::time::{Duration, Instant};

use ferrite_disk::Disk;

use super::super::in_use::ImageReply;
use super::super::messages::{Failure, Order, Reply};
use super::super::run_dir::RunFiles;
use super::super::tune::Tune;
use super::super::volume::VolumeReply;
use super::super::worker::facts;
use super::super::worker_handle::WorkerHandle;
use super::work::WorkerProcess;
use crate::blkif::negotiate::DiskFacts;

/// The pause between attempts to open an image for a client of NBD or a stub domain.
const PAUSE: Duration = Duration::from_millis(250);

/// How an image is to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The purpose.
    pub kind: OpeningKind,
}

/// The purpose of opening an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpeningKind {
    /// Its guest is to be served, and it waits for a predecessor's last operations.
    Serve,
    /// The facts are to be read, while another host may write to it: without locks, and for reading
    /// only.
    Look,
    /// Its guest is to be served after a look. Another host may have it, and the caller waits.
    AfterLook,
}

impl Opening {
    /// For a look at the image.
    pub(super) fn look() -> Opening {
        Opening { read_only: true, kind: OpeningKind::Look }
    }
}

/// An image that was looked at.
pub(super) struct Deferred {
    read_only: bool,
    keeps_all: bool,
    facts: DiskFacts,
    files: RunFiles,
    /// The order about a predecessor's files. The follower sends it first of all.
    first: Option<Order>,
    tune: Option<Tune>,
    /// When the guest was kept waiting first.
    waits_since: Option<Instant>,
    /// When the image may be opened for others than the guest.
    next: Option<Instant>,
}

impl Deferred {
    /// Until when no attempt is made for others than the guest.
    fn pause(&self) -> Option<Duration> {
        let left = self.next?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }
}

impl WorkerProcess<'_> {
    /// Reads the facts of the image, for a guest that comes from another host. An image that is open
    /// in this mode stays open.
    pub(super) fn look(&mut self, read_only: bool, keeps_all: bool) -> Result<(), Failure> {
        if self.is_open(read_only)? {
            return Ok(());
        }
        let looked = (self.open)(Opening::look()).map_err(Failure::Open)?;
        self.deferred = Some(Deferred {
            read_only,
            keeps_all,
            facts: looked_facts(&looked.disk, read_only),
            files: RunFiles::new(&self.config.run_dir),
            first: None,
            tune: None,
            waits_since: None,
            next: None,
        });
        Ok(())
    }

    /// Carries out an order while the image is not open. `None`: it is open now, and the order is
    /// the worker's.
    pub(super) fn order_deferred(&mut self, order: &Order) -> Result<Option<Reply>, Failure> {
        let Some(deferred) = &mut self.deferred else { return Ok(None) };
        match order {
            Order::Describe => return Ok(Some(Reply::Facts(deferred.facts.clone()))),
            Order::Remember => deferred.first = Some(Order::Remember),
            Order::Forget => {
                deferred.files.remove();
                deferred.first = Some(Order::Forget);
            }
            Order::Tune(tune) => deferred.tune = Some(tune.clone()),
            // A size that is read now may be outdated. It is read when the image is open.
            Order::CheckSize => {
                return Ok(Some(Reply::Size { grown: None, ask_again: None }));
            }
            // The other host writes to it.
            Order::Image(_) => return Ok(Some(Reply::Image(ImageReply::NotMine))),
            Order::Volume(_) => return Ok(Some(Reply::Volume(VolumeReply::not_open()))),
            Order::Chain => return Ok(Some(Reply::Chain(Vec::new()))),
            // No guest was connected, and the image is closed.
            Order::Guest(_)
            | Order::Detach
            | Order::Stop
            | Order::Hurry
            | Order::Save
            | Order::Close
            | Order::EndClose => {}
            Order::Enter | Order::Connect(_) | Order::TakeOver { .. } => {
                self.open_for_guest()?;
                return Ok(None);
            }
        }
        Ok(Some(Reply::Done))
    }

    /// Opens the image for the guest, which runs here from now on. While the other host has it, the
    /// follower tries again, and the reason is in the backend's error node. After a time the disk
    /// has failed.
    fn open_for_guest(&mut self) -> Result<(), Failure> {
        let result = self.open_deferred();
        let Some(deferred) = &mut self.deferred else { return result };
        match result {
            Err(Failure::Open(e)) if e.in_use => {
                let since = *deferred.waits_since.get_or_insert_with(Instant::now);
                let limit = self.config.wait_for_host;
                if since.elapsed() < limit {
                    let secs = limit.as_secs();
                    return Err(Failure::RunDir {
                        what: "serve the guest yet".to_owned(),
                        why: format!(
                            "{}: {}; the host that the guest comes from has {secs} s to close the \
                             image",
                            e.what, e.why
                        ),
                    });
                }
                deferred.waits_since = None;
                Err(Failure::Open(e))
            }
            result => result,
        }
    }

    /// Opens the image for clients of NBD or a stub domain. They wait while another host has it.
    pub(super) fn open_for_others(&mut self) {
        let Some(deferred) = &mut self.deferred else { return };
        if deferred.first.is_none() || deferred.pause().is_some() {
            return;
        }
        let is_first = deferred.next.is_none();
        deferred.next = Some(Instant::now() + PAUSE);
        if let Err(e) = self.open_deferred()
            && is_first
        {
            let why = super::super::error::ServeError::from(e);
            tracing::warn!("a client of the disk has to wait: {why}");
        }
    }

    /// How long nothing is opened for others than the guest. `None`: there is no such pause.
    pub(super) fn pause_for_others(&self) -> Option<Duration> {
        self.deferred.as_ref()?.pause()
    }

    /// Whether others than the guest may have the image opened.
    pub(super) fn opens_for_others(&self) -> bool {
        let may = |deferred: &Deferred| deferred.first.is_some() && deferred.pause().is_none();
        self.deferred.as_ref().is_some_and(may)
    }

    /// Closes the image of a guest that is suspended, for another host.
    pub(super) fn leave(&mut self) -> Result<(), Failure> {
        if self.served.as_ref().is_some_and(|served| served.worker.has_clients()) {
            return Err(Failure::host(
                "leave the image to another host",
                io::Error::other("clients use it beside the guest"),
            ));
        }
        self.retire()
    }

    /// Opens the image with fresh metadata, its lock and its journal, and does what was ordered
    /// while it was closed. If that fails, it is closed.
    fn open_deferred(&mut self) -> Result<(), Failure> {
        let Some(deferred) = &self.deferred else { return Ok(()) };
        let (read_only, keeps_all) = (deferred.read_only, deferred.keeps_all);
        let orders = deferred.tune.clone().map(Order::Tune).into_iter();
        let orders: Vec<Order> = orders.chain(deferred.first.clone()).collect();
        self.open_image(Opening { read_only, kind: OpeningKind::AfterLook }, keeps_all)?;
        for order in orders {
            let Some(served) = &mut self.served else { break };
            if let Err(e) = served.worker.carry_out(order) {
                self.give_up()?;
                return Err(e);
            }
        }
        self.deferred = None;
        Ok(())
    }
}

/// The facts of an image that was opened for reading, as if it was opened for its guest.
fn looked_facts(disk: &Disk, read_only: bool) -> DiskFacts {
    let discard = disk.discard_limits().filter(|_| !read_only);
    DiskFacts { read_only, discard, ..facts(disk) }
}
