//! A disk's directories in xenstore, as the daemon reads them.

use ferrite_serve::blkif::lifecycle::ExpectedAttachment;
use ferrite_xen::store::{Store, StoreError};
use ferrite_xen::xenbus::XenbusState;

use crate::params::Format;
use crate::state::DiskId;

/// The end of the default script's path.
const DEFAULT_SCRIPT: &[u8] = b"/block-tap";

/// The parent of all backend directories. Toolstacks use this kind for tapdisk.
pub const KIND: &str = "backend/vbd3";

/// The path of a disk's backend directory.
pub fn path(id: DiskId) -> String {
    format!("{KIND}/{id}")
}

/// The disk of a backend directory. `None` for any other path.
pub fn id_of(path: &str) -> Option<DiskId> {
    let rest = path.find(KIND).map(|at| &path[at + KIND.len()..])?;
    let (domid, devid) = rest.strip_prefix('/')?.split_once('/')?;
    parse(domid, devid)
}

/// The subject of an event of the watch on all directories.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventOf {
    /// A disk's directory, or a node in it.
    Disk(DiskId),
    /// The directory of all disks of a domain.
    Domain(u16),
    /// A name that no toolstack gives.
    Nothing,
    /// The directory of all domains, or a path that this daemon does not know.
    All,
}

/// The subject of an event with this path.
pub(crate) fn event_of(path: &str) -> EventOf {
    let rest = path.find(KIND).map(|at| &path[at + KIND.len()..]);
    let Some(rest) = rest.filter(|rest| rest.is_empty() || rest.starts_with('/')) else {
        return EventOf::All;
    };
    let mut names = rest.split('/').skip(1);
    match (names.next(), names.next()) {
        (None, _) => EventOf::All,
        (Some(domid), None) => match domid.parse::<u16>() {
            Ok(number) if number.to_string() == domid => EventOf::Domain(number),
            _ => EventOf::Nothing,
        },
        (Some(domid), Some(devid)) => parse(domid, devid).map_or(EventOf::Nothing, EventOf::Disk),
    }
}

fn parse(domid: &str, devid: &str) -> Option<DiskId> {
    let id = DiskId { domid: domid.parse().ok()?, devid: devid.parse().ok()? };
    (id.to_string() == format!("{domid}/{devid}")).then_some(id)
}

/// Lists the disks of all backend directories.
///
/// # Errors
/// Errors of xenstore.
pub fn all(store: &mut Store) -> Result<Vec<DiskId>, StoreError> {
    let mut found = Vec::new();
    for domid in list(store, KIND)? {
        let devices = list(store, &format!("{KIND}/{domid}"))?;
        found.extend(devices.iter().filter_map(|devid| parse(&domid, devid)));
    }
    Ok(found)
}

/// Lists the disks of a domain's backend directories.
///
/// # Errors
/// Errors of xenstore.
pub(crate) fn of_domain(store: &mut Store, domid: u16) -> Result<Vec<DiskId>, StoreError> {
    let devices = list(store, &format!("{KIND}/{domid}"))?;
    Ok(devices.iter().filter_map(|devid| parse(&domid.to_string(), devid)).collect())
}

/// Lists a node's children. A missing node has none.
pub(crate) fn list(store: &mut Store, path: &str) -> Result<Vec<String>, StoreError> {
    match store.list(path) {
        Err(StoreError::NotFound { .. }) => Ok(Vec::new()),
        listed => listed,
    }
}

/// Whether QEMU opens the image by itself, as the device model of an HVM guest. xl lets it open a
/// raw image whose configuration names no script. Only toolstacks write the keys that are read
/// here.
///
/// # Errors
/// Errors of xenstore.
pub(crate) fn qemu_opens(
    store: &mut Store,
    id: DiskId,
    format: Format,
) -> Result<bool, StoreError> {
    if format != Format::Raw {
        return Ok(false);
    }
    let script = store.read(&format!("{}/script", path(id)))?;
    if !script.is_some_and(|script| script.ends_with(DEFAULT_SCRIPT)) {
        return Ok(false);
    }
    match store.read(&format!("/libxl/{}/type", id.domid)) {
        // A driver domain may not read it. QEMU runs elsewhere then, and has no such file.
        Err(StoreError::Access { .. }) => Ok(false),
        kind => Ok(kind?.as_deref() == Some(b"hvm")),
    }
}

/// The contents of a disk's backend and frontend directories at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Whether the toolstack has written the backend directory.
    pub is_there: bool,
    /// The backend's state.
    pub own: XenbusState,
    /// The frontend's state.
    pub front: XenbusState,
    /// Whether the toolstack wants the disk to stay.
    pub online: bool,
    /// Whether the toolstack runs a hotplug script for the disk.
    pub has_script: bool,
    /// The hotplug script's status.
    pub hotplug_status: Option<String>,
    /// The key that names the image.
    pub params: Option<Vec<u8>>,
    /// The path of the frontend directory.
    pub frontend: Option<String>,
    /// Whether the frontend's state is there.
    pub has_front: bool,
    /// The path of the disk's socket, which the hotplug script has written.
    pub device_path: Option<Vec<u8>>,
}

impl Snapshot {
    /// Reads both directories.
    ///
    /// # Errors
    /// Errors of xenstore.
    pub fn read(store: &mut Store, id: DiskId) -> Result<Snapshot, StoreError> {
        let dir = path(id);
        let mut key = |name: &str| store.read(&format!("{dir}/{name}"));
        let frontend = key("frontend")?.and_then(|path| String::from_utf8(path).ok());
        let state = key("state")?;
        let mut snapshot = Snapshot {
            is_there: frontend.is_some() && state.is_some(),
            own: XenbusState::parse(state.as_deref()),
            online: key("online")?.as_deref() == Some(b"1"),
            has_script: key("script")?.is_some(),
            hotplug_status: key("hotplug-status")?
                .map(|t| String::from_utf8_lossy(&t).into_owned()),
            params: key("params")?,
            device_path: key("physical-device-path")?,
            ..Snapshot::default()
        };
        if let Some(frontend) = &frontend {
            let state = match store.read(&format!("{frontend}/state")) {
                Err(StoreError::Access { .. }) => Some(Vec::new()),
                state => state?,
            };
            snapshot.has_front = state.is_some();
            snapshot.front = XenbusState::parse(state.as_deref());
        }
        snapshot.frontend = frontend;
        Ok(snapshot)
    }

    /// The minor of the tap that the hotplug script has connected the disk to.
    pub fn tap(&self) -> Option<u32> {
        if self.hotplug_status.as_deref() != Some("connected") {
            return None;
        }
        let path = std::str::from_utf8(self.device_path.as_deref()?).ok()?;
        let (_, name) = path.rsplit_once("/nbd")?;
        let (pid, minor) = name.split_once('.')?;
        pid.parse::<u32>().ok()?;
        minor.parse().ok()
    }

    /// Whether the frontend has rings, or had some and has not closed.
    pub fn is_held(&self) -> bool {
        matches!(
            self.front,
            XenbusState::Initialised | XenbusState::Connected | XenbusState::Closing
        )
    }

    /// Whether a daemon has announced the disk: this one or a predecessor.
    pub fn has_begun(&self) -> bool {
        self.own > XenbusState::Initialising
    }

    /// Whether the directory is that of `attached`, and not that of a later attachment of the same
    /// name.
    pub fn is_of(&self, attached: &ExpectedAttachment) -> bool {
        let is_meant = match attached {
            ExpectedAttachment::Any => true,
            // The toolstack writes state 1, and 5 when it detaches. So 2 to 4 are this backend's
            // own.
            ExpectedAttachment::New(params) => {
                let is_ours = (XenbusState::InitWait..=XenbusState::Connected).contains(&self.own);
                is_ours || self.params.as_ref() == Some(params)
            }
            ExpectedAttachment::Begun => self.own != XenbusState::Initialising,
        };
        self.is_there && is_meant
    }

    /// Whether a thread has to handle the disk: it is attached, or it is leaving and not closed
    /// yet.
    pub fn is_wanted(&self) -> bool {
        self.is_there && (self.online || self.own != XenbusState::Closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directorys_path_names_its_disk() {
        let id = DiskId { domid: 3, devid: 51712 };
        for path in ["backend/vbd3/3/51712", "/local/domain/0/backend/vbd3/3/51712"] {
            assert_eq!(id_of(path), Some(id), "{path}");
        }
        for path in [
            "",
            "backend/vbd3",
            "backend/vbd3/3",
            "backend/vbd3/3/51712/state",
            "backend/vbd3/03/51712",
            "backend/vbd3/3/+51712",
            "backend/vbd3/70000/1",
            "backend/vbd/3/51712",
        ] {
            assert_eq!(id_of(path), None, "{path}");
        }
    }
}
