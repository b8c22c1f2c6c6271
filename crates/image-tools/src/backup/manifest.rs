//! The manifest of a backup: what it is of, what it stands on, and the hash of each region that it has.
//!
//! It is one JSON object. Its last field is the BLAKE3 hash of the same object with an empty last field, in the form in
//! which it is written. So a manifest that was changed is noticed. The fields are in docs/internals/backups.md.

use std::io;
use std::path::Path;

use ferrite_disk_base::{VolumeName, plain};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use ferrite_disk_base::dirty::{MAX_DISK_BYTES, REGION_BYTES};

const FORMAT: &str = "ferrite-backup";
const VERSION: u32 = 1;
/// Bytes of the longest manifest: 80 for each region of the largest disk, and some for the rest.
const MAX_BYTES: u64 = MAX_DISK_BYTES / REGION_BYTES * 80 + (1 << 20);

/// The BLAKE3 hash of a region's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hash(pub(super) [u8; 32]);

impl Serialize for Hash {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Hash, D::Error> {
        let text = String::deserialize(from)?;
        let hash = blake3::Hash::from_hex(&text);
        hash.map(|hash| Hash(*hash.as_bytes())).map_err(D::Error::custom)
    }
}

/// Another backup, or a map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Reference {
    pub(super) name: String,
    /// 32 hexadecimal digits.
    pub(super) id: String,
}

/// The disk that a backup is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DiskOf {
    /// The image's absolute path, or another name of the disk.
    pub(super) name: String,
    pub(super) virtual_bytes: u64,
}

/// See the module text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: String,
    version: u32,
    pub(super) name: String,
    /// 32 hexadecimal digits, which no other backup has.
    pub(super) id: String,
    /// The backup that it stands on; `None`: it is a full one.
    pub(super) parent: Option<Reference>,
    pub(super) created_unix_s: u64,
    pub(super) disk: DiskOf,
    /// The map that was begun when it was made.
    pub(super) map: Option<Reference>,
    region_bytes: u64,
    /// The regions that it has, in order: the region's number and hash. A region that no backup of the chain has is zeros.
    pub(super) regions: Vec<(u32, Hash)>,
    blake3: String,
}

/// The facts of a backup for its new manifest.
pub(super) struct NewManifest {
    pub(super) name: String,
    pub(super) id: String,
    pub(super) parent: Option<Reference>,
    pub(super) created_unix_s: u64,
    pub(super) disk: DiskOf,
    pub(super) map: Option<Reference>,
}

impl Manifest {
    pub(super) fn new(new: NewManifest) -> Manifest {
        let NewManifest { name, id, parent, created_unix_s, disk, map } = new;
        Manifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            name,
            id,
            parent,
            created_unix_s,
            disk,
            map,
            region_bytes: REGION_BYTES,
            regions: Vec::new(),
            blake3: String::new(),
        }
    }

    /// A reference to it.
    pub(super) fn reference(&self) -> Reference {
        Reference { name: self.name.clone(), id: self.id.clone() }
    }

    /// The text of its file.
    pub(super) fn sealed(&mut self) -> io::Result<Vec<u8>> {
        self.blake3.clear();
        let unsealed = serde_json::to_vec(&*self)?;
        self.blake3 = blake3::hash(&unsealed).to_hex().to_string();
        drop(unsealed);
        let mut text = serde_json::to_vec(&*self)?;
        text.push(b'\n');
        Ok(text)
    }

    /// Reads the manifest at `path`, of a backup that has this name.
    ///
    /// # Errors
    /// `InvalidData`: it is none, is damaged or was changed. `Unsupported`: it is of a newer version. Errors of the
    /// kernel.
    pub(super) fn read(path: &Path, name: &str) -> io::Result<Manifest> {
        let text = plain::read(path, MAX_BYTES)?;
        Manifest::parse(&text, name)
    }

    fn parse(text: &[u8], name: &str) -> io::Result<Manifest> {
        let manifest = Manifest::parse_any(text)?;
        match manifest.name == name {
            true => Ok(manifest),
            false => Err(bad(&format!("its manifest is that of backup {}", manifest.name))),
        }
    }

    /// Parses a manifest, whatever its name is.
    pub(super) fn parse_any(text: &[u8]) -> io::Result<Manifest> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        let head: Head = serde_json::from_slice(text).map_err(|_| bad("it is no manifest"))?;
        if head.format != FORMAT {
            return Err(bad("it is no manifest of a backup"));
        }
        if head.version != VERSION {
            let why = format!("it has version {}, and this program knows {VERSION}", head.version);
            return Err(io::Error::new(io::ErrorKind::Unsupported, why));
        }
        let mut manifest: Manifest = serde_json::from_slice(text)
            .map_err(|e| bad(&format!("its manifest is damaged or was changed ({e})")))?;
        let said = std::mem::take(&mut manifest.blake3);
        let hash = blake3::hash(&serde_json::to_vec(&manifest)?).to_hex();
        if hash.as_str() != said {
            return Err(bad("its manifest is damaged or was changed: its hash does not fit"));
        }
        manifest.blake3 = said;
        match manifest.is_consistent() {
            true => Ok(manifest),
            false => Err(bad("its manifest makes no sense")),
        }
    }

    fn is_consistent(&self) -> bool {
        let bytes = self.disk.virtual_bytes;
        let end = bytes.div_ceil(REGION_BYTES);
        let rises = self.regions.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let is_inside = self.regions.last().is_none_or(|last| u64::from(last.0) < end);
        let is_named = VolumeName::new(&self.name).is_some();
        let parent = self.parent.as_ref();
        let stands =
            parent.is_none_or(|p| VolumeName::new(&p.name).is_some() && p.name != self.name);
        self.region_bytes == REGION_BYTES
            && (1..=MAX_DISK_BYTES).contains(&bytes)
            && rises
            && is_inside
            && is_named
            && stands
    }
}

fn bad(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let mut manifest = Manifest::new(NewManifest {
            name: "monday".into(),
            id: "0".repeat(32),
            parent: None,
            created_unix_s: 1,
            disk: DiskOf { name: "/a.qcow2".into(), virtual_bytes: 3 * REGION_BYTES },
            map: None,
        });
        manifest.regions = vec![(0, Hash([1; 32])), (2, Hash([2; 32]))];
        manifest
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written() {
        let mut manifest = manifest();
        let text = manifest.sealed().unwrap();
        assert_eq!(Manifest::parse(&text, "monday").unwrap(), manifest);
    }

    #[test]
    fn each_changed_digit_is_noticed() {
        let text = manifest().sealed().unwrap();
        for at in (0..text.len()).filter(|at| text[*at].is_ascii_digit()) {
            let mut changed = text.clone();
            changed[at] = if changed[at] == b'7' { b'8' } else { b'7' };
            assert!(Manifest::parse(&changed, "monday").is_err(), "{at}");
        }
        assert!(Manifest::parse(&text[..text.len() / 2], "monday").is_err());
        assert!(Manifest::parse(&text, "tuesday").is_err());
    }

    #[test]
    fn a_manifest_that_contradicts_itself_is_refused_even_with_its_hash() {
        let mut regions = manifest();
        regions.regions.reverse();
        let mut outside = manifest();
        outside.regions.push((3, Hash([0; 32])));
        let mut itself = manifest();
        itself.parent = Some(itself.reference());
        let mut path = manifest();
        path.parent = Some(Reference { name: "../x".into(), id: String::new() });
        let mut size = manifest();
        size.disk.virtual_bytes = u64::MAX;
        for mut bad in [regions, outside, itself, path, size] {
            let text = bad.sealed().unwrap();
            assert!(Manifest::parse(&text, "monday").is_err(), "{bad:?}");
        }
    }
}
