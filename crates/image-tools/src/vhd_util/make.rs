//! New VHDs. A file that is there becomes the new image, as with vhd-util: it keeps its name, mode and links.
//!
//! The order: an old file is cut off, `fdatasync`; the new image, whose footers come last (`NewImage::create`); the
//! folder. So after a crash there is the old image, none, or the new one.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use ferrite_disk_base::{DiskError, ErrorKind, Port, Raw};
use ferrite_images::open_medium;
use ferrite_images::vhd::{self, Kind, NewImage as NewFile, NewParent, Stamp, Uuid, Vhd};
use serde::{Deserialize, Serialize};

use super::{libvhd_path, rounded};
use crate::io_context::IoContext;
use crate::{ImageTools, broken, unsuitable};

/// The longest chain that an empty image is looked for in.
const MAX_DEPTH: usize = 1024;

/// A parent for a VHD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VhdParent {
    /// Its path.
    pub path: PathBuf,
    /// It is no VHD: its content is the disk.
    pub raw: bool,
}

/// The properties of a new VHD.
#[derive(Clone, Debug, Default)]
pub struct NewVhd {
    /// The bytes of its disk, rounded up to whole blocks; 0: those of its parent.
    pub bytes: u64,
    /// All space is taken at once.
    pub fixed: bool,
    /// The size that the disk can grow to within its table; 0: it cannot.
    pub room_bytes: u64,
    /// Its parent.
    pub parent: Option<VhdParent>,
    /// It stands on the parent itself, even if that is empty, and has a parent.
    pub on_empty: bool,
}

impl VhdParent {
    /// Looks at it.
    pub(super) fn look(&self, tools: &ImageTools<'_>) -> Result<NewParent, DiskError> {
        let what = || format!("cannot use {} as a parent", self.path.display());
        let path = libvhd_path(&self.path).map_err(|e| broken(what(), e))?;
        let meta = path.metadata().map_err(|e| broken(what(), e))?;
        let (uuid, bytes) = match self.raw {
            true => {
                let raw = Raw::glance(&path).map_err(|e| broken(what(), e))?;
                let raw = raw.ok_or_else(|| {
                    unsuitable(what(), "it is no file or device", "name an image")
                })?;
                let bytes = raw.bytes_now().map_err(|e| broken(what(), e))?;
                (Uuid::NIL, bytes.next_multiple_of(512))
            }
            false => {
                let vhd = Vhd::open(&path, &tools.vhd_options(true))?;
                let uuid = vhd.footer().uuid;
                if uuid == Uuid::NIL {
                    let help = "vhd-util repair gives it one";
                    return Err(unsuitable(what(), "it has no identity", help));
                }
                (uuid, vhd.bytes())
            }
        };
        let modified_unix_s = u64::try_from(meta.mtime()).unwrap_or(0);
        Ok(NewParent { uuid, bytes, modified_unix_s, path })
    }
}

impl ImageTools<'_> {
    /// Makes a VHD at `path`. A file that is there is lost.
    ///
    /// # Errors
    /// The options contradict each other: nothing was changed. Errors of the kernel: there is no image.
    pub fn make_vhd(&self, path: &Path, new: &NewVhd) -> Result<(), DiskError> {
        let what = || format!("cannot make {}", path.display());
        let mut bytes = rounded(new.bytes);
        let (mut parent, mut key) = (None, None);
        if let Some(named) = &new.parent {
            let below = named.look(self)?;
            if bytes == 0 {
                bytes = below.bytes;
            }
            let (below, found) = match named.raw || new.on_empty {
                true => (below, named.clone()),
                false => self.below_empty(below)?,
            };
            if !found.raw {
                key = Vhd::open(&below.path, &self.vhd_options(true))?.key();
            }
            parent = Some(below);
        }
        let image = NewFile {
            bytes,
            fixed: new.fixed,
            room_bytes: rounded(new.room_bytes),
            stamp: Stamp::from_system(),
            parent,
            ..NewFile::dynamic(bytes)
        };
        if new.room_bytes > 0 && image.room_bytes < bytes {
            let help = "its room has the size that it can grow to";
            return Err(unsuitable(what(), "the room is smaller than the disk", help));
        }
        image.check(path)?;
        let is_new = self.make_file(path)?;
        let made = self.write_vhd(path, &image, key);
        if made.is_err() && is_new {
            // The error counts, not what happens to the rest of the file.
            let _ = self.directory.remove(path);
        }
        made
    }

    /// The parent of a snapshot: the image itself, or if that is empty the first below it that is not.
    fn below_empty(&self, top: NewParent) -> Result<(NewParent, VhdParent), DiskError> {
        let what = format!("cannot stand on {}", top.path.display());
        let mut at = top;
        for _ in 0..MAX_DEPTH {
            let path = at.path.clone();
            let vhd = Vhd::open(&path, &self.vhd_options(true))?;
            let here = VhdParent { path, raw: false };
            if vhd.footer().kind != Kind::Differencing || vhd.allocated_bytes() > 0 {
                return Ok((at, here));
            }
            let Some(below) = self.parent_of_vhd(&vhd)? else { return Ok((at, here)) };
            at = below.look(self)?;
            if below.raw {
                return Ok((at, below));
            }
        }
        Err(unsuitable(what, "its chain has no end", "look at it with vhd-util query -d"))
    }

    /// The images of the chain that a new image will stand on; 0: it stands on none, or on a raw one.
    ///
    /// # Errors
    /// One of them cannot be opened.
    pub fn depth_below(&self, new: &NewVhd) -> Result<usize, DiskError> {
        let Some(named) = new.parent.as_ref().filter(|parent| !parent.raw) else { return Ok(0) };
        let below = named.look(self)?;
        let found = if new.on_empty { named.clone() } else { self.below_empty(below)?.1 };
        let mut at = Some(found).filter(|found| !found.raw);
        let mut depth = 0;
        while let Some(parent) = at.filter(|_| depth < MAX_DEPTH) {
            depth += 1;
            let vhd = Vhd::open(&parent.path, &self.vhd_options(true))?;
            at = self.parent_of_vhd(&vhd)?.filter(|below| !below.raw);
        }
        Ok(depth)
    }

    /// The parent of an image, where it is found.
    pub(super) fn parent_of_vhd(&self, vhd: &Vhd) -> Result<Option<VhdParent>, DiskError> {
        let Some(parent) = vhd.parent() else { return Ok(None) };
        let raw = parent.uuid == Uuid::NIL;
        let is_it = |path: &&PathBuf| {
            raw || Vhd::open(path, &self.vhd_options(true))
                .is_ok_and(|found| found.footer().uuid == parent.uuid)
        };
        let there = || parent.paths.iter().filter(|path| path.exists());
        match there().find(is_it).or_else(|| there().next()) {
            Some(path) => Ok(Some(VhdParent { path: path.clone(), raw })),
            None => {
                let what = format!("cannot find the parent of {}", vhd.medium().path().display());
                let why = format!("{:?} is not there", parent.name);
                let help = "vhd-util modify -p names another place";
                Err(DiskError::new(ErrorKind::NotFound, what, why, help))
            }
        }
    }

    /// Makes a file, unless there is one, or a device.
    fn make_file(&self, path: &Path) -> Result<bool, DiskError> {
        let cannot = |e| broken(format!("cannot make {}", path.display()), e);
        match self.directory.create_new(path) {
            Ok(file) => {
                let readable = Permissions::from_mode(0o644);
                std::fs::File::from(file).set_permissions(readable).map_err(cannot)?;
                Ok(true)
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(e) => Err(cannot(e)),
        }
    }

    fn write_vhd(
        &self,
        path: &Path,
        image: &NewFile,
        key: Option<vhd::KeyHash>,
    ) -> Result<(), DiskError> {
        let cannot = |e| broken(format!("cannot make {}", path.display()), e);
        let raw = open_medium(path, &self.vhd_options(false))?;
        let mut context = IoContext::new(self, 1).map_err(cannot)?;
        let port = context.port_of(raw.files()).map_err(cannot)?;
        let buffer = context.buffer().map_err(cannot)?;
        port.memory().fill(buffer, 0);
        let steps = async {
            vhd::cut_off(&port, &raw).await?;
            if image.fixed && !raw.is_file() {
                clear(&port, &raw, image.bytes, buffer).await?;
            }
            Ok(image.create(&port, &raw).await)
        };
        context.run(steps).map_err(cannot)??;
        drop(context);
        self.sync_dir(path)?;
        let Some(key) = key else { return Ok(()) };
        let vhd = Vhd::open(path, &self.vhd_options(false))?;
        let what = || format!("cannot make {}", path.display());
        self.on_vhd(vhd, what, async |vhd, port| vhd.set_key(port, &key).await)
    }
}

/// Makes the beginning of a device read as zeros.
async fn clear(
    port: &Port,
    raw: &Raw,
    bytes: u64,
    zeros: ferrite_io::arena::Span,
) -> io::Result<()> {
    for at in (0..bytes).step_by(1 << 30) {
        let len = (bytes - at).min(1 << 30);
        raw.write_zeroes(&port.io, &port.files, at, len, zeros).await?;
    }
    Ok(())
}
