//! A disk's directories in xenstore, as the daemon looks at them.

use ferrite_serve::blkif::lifecycle::Attached;
use ferrite_xen::store::{Store, StoreError};

use crate::params::Format;
use crate::state::DiskId;

/// The script of disks whose configuration names none.
const DEFAULT_SCRIPT: &[u8] = b"/block-tap";

/// The folder of all backends' directories: the kind that toolstacks make for tapdisk.
pub const KIND: &str = "backend/vbd3";

/// A backend's directory.
pub fn path(id: DiskId) -> String {
    format!("{KIND}/{id}")
}

/// The disk whose directory it is.
pub fn id_of(path: &str) -> Option<DiskId> {
    let rest = path.find(KIND).map(|at| &path[at + KIND.len()..])?;
    let (domid, devid) = rest.strip_prefix('/')?.split_once('/')?;
    parse(domid, devid)
}

fn parse(domid: &str, devid: &str) -> Option<DiskId> {
    let id = DiskId { domid: domid.parse().ok()?, devid: devid.parse().ok()? };
    (id.to_string() == format!("{domid}/{devid}")).then_some(id)
}

/// All directories there are.
///
/// # Errors
/// xenstore's.
pub fn all(store: &mut Store) -> Result<Vec<DiskId>, StoreError> {
    let mut found = Vec::new();
    for domid in list(store, KIND)? {
        let devices = list(store, &format!("{KIND}/{domid}"))?;
        found.extend(devices.iter().filter_map(|devid| parse(&domid, devid)));
    }
    Ok(found)
}

/// The node's children; none if it is not there.
pub(crate) fn list(store: &mut Store, path: &str) -> Result<Vec<String>, StoreError> {
    match store.list(path) {
        Err(StoreError::NotFound { .. }) => Ok(Vec::new()),
        listed => listed,
    }
}

/// Whether QEMU, as the device model of an HVM guest, opens the image by itself: xl has it do so with a
/// raw one whose configuration names no script. Only toolstacks write to what is read here.
///
/// # Errors
/// xenstore's.
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
        // A driver domain may not look. QEMU runs elsewhere then, and has no such file.
        Err(StoreError::Access { .. }) => Ok(false),
        kind => Ok(kind?.as_deref() == Some(b"hvm")),
    }
}

/// What stands in them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// The toolstack has written the backend's directory.
    pub is_there: bool,
    /// The backend's state; 0 for none.
    pub own: u32,
    /// The frontend's state; 0 for none.
    pub front: u32,
    /// The toolstack wants the disk to stay.
    pub online: bool,
    /// A hotplug script is run for it.
    pub has_script: bool,
    /// What that has said.
    pub hotplug_status: Option<String>,
    /// The image.
    pub params: Option<Vec<u8>>,
    /// The frontend's directory.
    pub frontend: Option<String>,
}

impl Look {
    /// Reads all of it.
    ///
    /// # Errors
    /// xenstore's.
    pub fn take(store: &mut Store, id: DiskId) -> Result<Look, StoreError> {
        let dir = path(id);
        let mut key = |name: &str| store.read(&format!("{dir}/{name}"));
        let frontend = key("frontend")?.and_then(|path| String::from_utf8(path).ok());
        let state = key("state")?;
        let mut look = Look {
            is_there: frontend.is_some() && state.is_some(),
            own: number(state.as_deref()),
            online: key("online")?.as_deref() == Some(b"1"),
            has_script: key("script")?.is_some(),
            hotplug_status: key("hotplug-status")?
                .map(|t| String::from_utf8_lossy(&t).into_owned()),
            params: key("params")?,
            ..Look::default()
        };
        if let Some(frontend) = &frontend {
            look.front = match store.read(&format!("{frontend}/state")) {
                // A driver domain may not look at a guest that is gone.
                Err(StoreError::Access { .. }) => 0,
                state => number(state?.as_deref()),
            };
        }
        look.frontend = frontend;
        Ok(look)
    }

    /// The frontend has rings, or had some and has not closed.
    pub fn is_held(&self) -> bool {
        matches!(self.front, 3..=5)
    }

    /// There is, or was, a guest that a predecessor had connected.
    pub fn has_begun(&self) -> bool {
        !matches!(self.own, 0 | 1)
    }

    /// Whether it is this attachment, and not a later one of the same name.
    pub fn is_of(&self, attached: &Attached) -> bool {
        let is_meant = match attached {
            Attached::Any => true,
            // The toolstack writes 1, and 5 when it detaches.
            Attached::New(params) => {
                matches!(self.own, 2..=4) || self.params.as_ref() == Some(params)
            }
            Attached::Begun => self.own != 1,
        };
        self.is_there && is_meant
    }

    /// Somebody has to see to this disk: it is attached, or on its way out and not there.
    pub fn is_wanted(&self) -> bool {
        self.is_there && (self.online || self.own != 6)
    }
}

fn number(value: Option<&[u8]>) -> u32 {
    let text = value.and_then(|value| std::str::from_utf8(value).ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
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
