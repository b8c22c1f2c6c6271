//! The toolstack's keys of a disk, in the directory that the guest cannot write.

use std::time::Duration;

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};

use super::error::ServeError;
use super::states::is_in_use;
use crate::blkif::negotiate::{INFO_CDROM, INFO_READ_ONLY, INFO_REMOVABLE};
use crate::waker::{Waker, wait_for};
use ferrite_xen::xenbus::XenbusState;

/// A disk as the toolstack has attached it. The keys are read once: later changes count when the
/// disk is attached again, as with the kernel's backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// The path of the frontend's directory, from the backend's directory (XSA-175).
    pub frontend: String,
    /// Whether the guest may only read (`mode`). The medium itself is then opened read-only
    /// (XSA-142).
    pub read_only: bool,
    /// Whether it is a CD-ROM (`device-type`).
    pub cdrom: bool,
    /// Whether its medium can be changed (`removable`).
    pub removable: bool,
    /// Whether the toolstack allows discards (`discard-enable`).
    pub may_discard: bool,
    /// Whether the toolstack runs a hotplug script (`script`), which writes `hotplug-status` when
    /// it has connected the disk.
    pub has_script: bool,
}

impl Attachment {
    /// Reads the directory. `None`: the toolstack has not written all keys yet.
    ///
    /// # Errors
    /// Errors of xenstore; [`ServeError::Attachment`] if the directory is not one of this guest's
    /// disks.
    pub fn read(
        store: &mut Store,
        backend: &str,
        domid: DomId,
    ) -> Result<Option<Attachment>, ServeError> {
        let mut keys = Keys { store, dir: backend };
        let (Some(id), Some(frontend)) = (keys.read("frontend-id")?, keys.read("frontend")?) else {
            return Ok(None);
        };
        if id != domid.to_string().as_bytes() {
            let id = String::from_utf8_lossy(&id);
            return Err(ServeError::Attachment(format!(
                "{backend} belongs to domain {id}, not to domain {domid}"
            )));
        }
        let frontend = String::from_utf8(frontend)
            .map_err(|_| ServeError::Attachment(format!("{backend}/frontend is not a path")))?;
        let Some(read_only) = keys.read_only(&frontend)? else { return Ok(None) };
        // A state of 1 that comes later belongs to another attachment.
        if keys.read("state")?.is_none() {
            return Ok(None);
        }
        Ok(Some(Attachment {
            frontend,
            read_only,
            cdrom: keys.read("device-type")?.as_deref() == Some(b"cdrom"),
            removable: keys.read("removable")?.as_deref() == Some(b"1"),
            may_discard: keys.read("discard-enable")?.as_deref() != Some(b"0"),
            has_script: keys.read("script")?.is_some(),
        }))
    }

    /// Waits until the toolstack has written all keys. `None`: `stop` was woken.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn wait(
        store: &mut Store,
        backend: &str,
        domid: DomId,
        stop: &Waker,
    ) -> Result<Option<Attachment>, ServeError> {
        store.watch(backend, DIRECTORY)?;
        let mut told = false;
        loop {
            while store.poll_event()?.is_some() {}
            if let Some(attachment) = Attachment::read(store, backend, domid)? {
                return Ok(Some(attachment));
            }
            if !told {
                tracing::info!("waiting for {backend} to be attached");
                told = true;
            }
            // Events that came with the last reply do not make the descriptor readable.
            let timeout = store.poll_event()?.map(|_| Duration::ZERO);
            let [_, stopped] = wait_for([store.fd(), stop.fd()], timeout)
                .map_err(|e| ServeError::host("wait for events", e))?;
            if stopped {
                return Ok(None);
            }
        }
    }

    /// The value of the `info` key, with a medium that is read-only or not.
    pub(super) fn info(&self, read_only: bool) -> u32 {
        let bits = [
            (self.cdrom, INFO_CDROM),
            (self.removable, INFO_REMOVABLE),
            (read_only, INFO_READ_ONLY),
        ];
        bits.iter().filter(|(is, _)| *is).map(|(_, bit)| bit).sum()
    }
}

/// Writes to xenstore why an attached disk is not served. The toolstack may be waiting.
///
/// # Errors
/// Errors of xenstore.
pub fn report_failure(store: &mut Store, backend: &str, why: &str) -> Result<(), StoreError> {
    store.write(&error_path(backend), format!("1 {why}").as_bytes())
}

/// The token of the watch on the backend's directory.
pub(super) const DIRECTORY: &str = "backend";

struct Keys<'a> {
    store: &'a mut Store,
    dir: &'a str,
}

impl Keys<'_> {
    fn read(&mut self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.read(&format!("{}/{key}", self.dir))
    }

    /// Reads `mode`. For a connected guest it is what the guest was told: a successor must look
    /// like the same disk.
    fn read_only(&mut self, frontend: &str) -> Result<Option<bool>, StoreError> {
        let own = XenbusState::parse(self.read("state")?.as_deref());
        let front = XenbusState::parse(self.store.read(&format!("{frontend}/state"))?.as_deref());
        if is_in_use(own, front)
            && let Some(info) = self.read("info")?
            && let Some(info) = std::str::from_utf8(&info).ok().and_then(|i| i.parse::<u32>().ok())
        {
            return Ok(Some(info & INFO_READ_ONLY != 0));
        }
        Ok(self.read("mode")?.map(|mode| !mode.contains(&b'w')))
    }
}

/// The path of a device's error node: `error/` precedes the part that is relative to the domain.
pub(super) fn error_path(backend: &str) -> String {
    let absolute = backend.strip_prefix("/local/domain/").and_then(|rest| rest.split_once('/'));
    match absolute {
        Some((domid, rest)) => format!("/local/domain/{domid}/error/{rest}/error"),
        None => format!("error/{backend}/error"),
    }
}
