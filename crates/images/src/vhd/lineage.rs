//! Reads an image's parent, without opening the image: it may be in use, or damaged.

use std::io;

use ferrite_disk_base::Raw;
use ferrite_host::names;

use super::by_name;
use super::format::footer::{Footer, Kind};
use super::format::header::{self, Header};
use super::meta::{CopyOnDevice, Footers, MetaError, read_array, read_parent_paths};
use super::{Parent, Uuid};

/// The first bytes of a footer.
const COOKIE: &[u8] = b"conectix";

/// An image's identity, and its parent.
pub(crate) struct Lineage {
    pub(crate) uuid: Uuid,
    pub(crate) parent: Option<Parent>,
}

/// The footer copy at the beginning of an image.
pub(crate) struct Head {
    pub(crate) uuid: Uuid,
    /// Its parent; `None`: it has none.
    pub(crate) parent: Option<Uuid>,
}

/// The head of a VHD with such a copy; `None`: it is fixed, damaged, or no VHD.
pub(crate) fn head(raw: &Raw) -> Option<Head> {
    let footer = Footer::parse(&read_array(raw, 0).ok()?, 0).ok()?;
    let parent = match footer.kind {
        Kind::Fixed => return None,
        Kind::Dynamic => None,
        Kind::Differencing => {
            let at = footer.data_offset;
            let bytes = read_array::<{ header::BYTES }>(raw, at).ok()?;
            Some(Header::parse(&bytes, at, &footer).ok()?.parent_uuid)
        }
    };
    Some(Head { uuid: footer.uuid, parent })
}

/// The identity and parent of a VHD; `None`: the file is no VHD.
///
/// # Errors
/// It is a VHD, and its parent cannot be read.
pub(crate) fn lineage(raw: &Raw) -> io::Result<Option<Lineage>> {
    let told = |e: MetaError| match e {
        MetaError::Io(_, e) => e,
        MetaError::Bad(bad) => io::Error::new(io::ErrorKind::InvalidData, bad.to_string()),
    };
    let footers = match Footers::read(raw) {
        Err(MetaError::Bad(_)) => return Ok(None),
        footers => footers.map_err(told)?,
    };
    let footer = match footers.choose(CopyOnDevice::Never) {
        Ok((footer, _)) => footer,
        Err(bad) => {
            let claims = footers.start.is_ok() || raw.read_now(0, COOKIE.len())? == COOKIE;
            return if claims { Err(told(bad.into())) } else { Ok(None) };
        }
    };
    let parent = match footer.kind {
        Kind::Differencing => {
            let at = footer.data_offset;
            let bytes = read_array::<{ header::BYTES }>(raw, at).map_err(told)?;
            let header = Header::parse(&bytes, at, &footer).map_err(|bad| told(bad.into()))?;
            let mut paths = read_parent_paths(raw, &header).map_err(told)?;
            let name = header.parent_name();
            if !paths.iter().any(names::exists) {
                paths.extend(by_name::verified(raw.path(), header.parent_uuid, &name));
            }
            Some(Parent { uuid: header.parent_uuid, name, paths })
        }
        Kind::Fixed | Kind::Dynamic => None,
    };
    Ok(Some(Lineage { uuid: footer.uuid, parent }))
}
