//! The folder of a server: its identity, and the files of copies.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use ferrite_pool::wire::{BLOCK_BYTES, Extent, is_name, region_bytes};
use rustix::io::Errno;

use crate::Fault;
use crate::disk::Machine;
use crate::medium::Medium;
use crate::state::{FileIdentity, Fixed, SLOT_BYTES, Slot, read};

/// Names the server and its pool.
const IDENTITY: &str = "identity";
/// Has an empty file for each copy that was removed, so none comes back with the same identifier.
const GONE: &str = "gone";
/// Most bytes of the identity's file.
const MAX_IDENTITY: u64 = 4096;

/// A server's folder, which this process alone has.
pub(crate) struct Folder {
    path: PathBuf,
    pub(crate) pool: [u8; 16],
    pub(crate) server: String,
    machine: Machine,
    _lock: Option<OwnedFd>,
}

/// An open copy.
pub(crate) struct Files {
    pub(crate) medium: Medium,
    pub(crate) slot: Slot,
}

impl Folder {
    /// Opens a folder, and makes it a server's if it is empty.
    pub(crate) fn open(
        path: &Path,
        pool: [u8; 16],
        server: &str,
        machine: Machine,
    ) -> Result<Folder, Fault> {
        let what = format!("cannot serve {}", path.display());
        let fault = |e: io::Error| Fault::new(&what, e, "check the folder and its rights");
        if !is_name(server) {
            let why = format!("a server cannot be called {server:?}");
            return Err(Fault::new(&what, why, "use 1 to 64 of a-z, 0-9, '-' and '_'"));
        }
        let lock = || {
            ferrite_host::lock_file::lock(&path.join("lock")).map_err(|e| {
                let help = "end the other ferrite pool serve of this folder, or check its rights";
                Fault::new(&what, e, help)
            })
        };
        let lock = machine.has_locks().then(lock).transpose()?;
        let wanted = format!("ferrite pool server 1\npool {}\nserver {server}\n", hex(&pool));
        let file = path.join(IDENTITY);
        match read_small(&file) {
            Ok(found) if found == wanted.as_bytes() => {}
            Ok(found) => {
                let found = String::from_utf8_lossy(&found).replace('\n', ", ");
                let why = format!("{} says: {}", file.display(), found.trim_end_matches(", "));
                return Err(Fault::new(
                    &what,
                    why,
                    "give its pool and its name, or another folder",
                ));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let mut present = std::fs::read_dir(path).map_err(fault)?;
                if present.any(|entry| entry.is_ok_and(|entry| entry.file_name() != "lock")) {
                    let why = "it has files, and none says that it is a pool's";
                    return Err(Fault::new(&what, why, "give an empty folder"));
                }
                // The folder of removed copies comes first: a folder with an identity has it.
                DirBuilder::new().mode(0o700).create(path.join(GONE)).map_err(fault)?;
                write_new(&file, wanted.as_bytes()).map_err(fault)?;
                sync(path).map_err(fault)?;
            }
            Err(e) => return Err(fault(e)),
        }
        let (path, server) = (path.to_owned(), server.to_owned());
        Ok(Folder { path, pool, server, machine, _lock: lock })
    }

    fn data(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.raw"))
    }

    fn state(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.state"))
    }

    fn gone(&self, id: &[u8; 16]) -> PathBuf {
        self.path.join(GONE).join(hex(id))
    }

    /// Bytes that are free in the folder's file system, and all of them.
    pub(crate) fn space(&self) -> io::Result<(u64, u64)> {
        let fs = rustix::fs::statvfs(&self.path)?;
        Ok((fs.f_bavail.saturating_mul(fs.f_frsize), fs.f_blocks.saturating_mul(fs.f_frsize)))
    }

    /// Makes a copy. One that is there already, with the same identifier and size, is fine.
    pub(crate) fn create(&self, extent: &Extent, size: u64, is_whole: bool) -> Result<(), Fault> {
        let what = format!("cannot make a copy {}", extent.name);
        let fault = |e: io::Error| Fault::new(&what, e, "check the server's folder and its space");
        if size == 0 || !size.is_multiple_of(BLOCK_BYTES) || size > i64::MAX as u64 {
            let why = format!("it cannot have {size} bytes");
            return Err(Fault::new(&what, why, "use a multiple of 512").with(Errno::INVAL));
        }
        if self.gone(&extent.id).try_exists().map_err(fault)? {
            let why = "a copy with its identifier was removed";
            return Err(Fault::new(&what, why, "use a new identifier").with(Errno::STALE));
        }
        if self.state(&extent.name).try_exists().map_err(fault)? {
            let found = self.open_copy(extent)?;
            return match found.slot.fixed.size == size {
                true => Ok(()),
                false => {
                    let why = format!("it is there with {} bytes", found.slot.fixed.size);
                    Err(Fault::new(&what, why, "use another name").with(Errno::EXIST))
                }
            };
        }
        // Durable order: the data's file with its size, then the whole state under another name, then the state's name,
        // which makes it a copy. A death here leaves a data's file without a state, and it has nothing yet. Or an
        // administrator has removed the state.
        let data = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
            .open(self.data(&extent.name))
            .map_err(fault)?;
        if data.metadata().map_err(fault)?.blocks() != 0 {
            let why = format!("{}.raw is there with data, and has no state", extent.name);
            return Err(Fault::new(&what, why, "move that file away").with(Errno::EXIST));
        }
        data.set_len(size).and_then(|()| data.sync_all()).map_err(fault)?;
        let fixed = Fixed {
            pool: self.pool,
            id: extent.id,
            name: extent.name.clone(),
            size,
            region_bytes: region_bytes(size),
            file: identity(&data).map_err(fault)?,
        };
        let temporary = self.path.join(format!("{}.new", extent.name));
        let _ = std::fs::remove_file(&temporary);
        write_new(&temporary, &fixed.first_slots(is_whole)).map_err(fault)?;
        std::fs::rename(&temporary, self.state(&extent.name)).map_err(fault)?;
        sync(&self.path).map_err(fault)
    }

    /// Opens the files of a copy, and sees that they belong together.
    pub(crate) fn open_copy(&self, extent: &Extent) -> Result<Files, Fault> {
        let what = format!("cannot open the copy {}", extent.name);
        let replace = "replace this copy: ferrite pool replace";
        let fault = |e: io::Error| Fault::new(&what, e, "check the server's folder");
        let open = |path: &Path| {
            let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
            let mut options = OpenOptions::new();
            options.read(true).write(true).custom_flags(flags.bits() as i32).open(path)
        };
        let state = open(&self.state(&extent.name)).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                Fault::new(&what, "this server has none", replace).with(Errno::NOENT)
            }
            _ => fault(e),
        })?;
        let mut bytes = vec![0; 2 * SLOT_BYTES];
        let slot = match state.read_exact_at(&mut bytes, 0) {
            Ok(()) => read(&bytes),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => None,
            Err(e) => return Err(fault(e)),
        };
        let refused = |why: String| Fault::new(&what, why, replace).with(Errno::STALE);
        let slot = slot.ok_or_else(|| refused("its state is damaged".to_owned()))?;
        let fixed = &slot.fixed;
        if fixed.pool != self.pool || fixed.id != extent.id || fixed.name != extent.name {
            let of = format!("{} ({}) of pool {}", fixed.name, hex(&fixed.id), hex(&fixed.pool));
            return Err(refused(format!("its state is that of another copy, {of}")));
        }
        let data = open(&self.data(&extent.name)).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => refused("its data have gone".to_owned()),
            _ => fault(e),
        })?;
        let found = data.metadata().map_err(fault)?;
        if !found.is_file() || identity(&data).map_err(fault)? != fixed.file {
            let why = "another file is in the place of its data, such as one from a backup";
            return Err(refused(why.to_owned()));
        }
        if found.len() < fixed.size {
            let why = format!("its data are shorter, {} of {} bytes", found.len(), fixed.size);
            return Err(refused(why));
        }
        let (data, state) = (self.machine.disk(data), self.machine.disk(state));
        Ok(Files { medium: Medium::Files { data, state }, slot })
    }

    /// Removes a copy for good.
    pub(crate) fn remove(&self, fixed: &Fixed) -> Result<(), Fault> {
        let remove = || {
            // Durable order: first its identifier never comes back, then its state goes, which made it a copy, then its
            // data. Data without a state are replaced by the next copy of that name.
            match write_new(&self.gone(&fixed.id), b"") {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => sync(&self.path.join(GONE))?,
            }
            std::fs::remove_file(self.state(&fixed.name))?;
            sync(&self.path)?;
            std::fs::remove_file(self.data(&fixed.name))
        };
        let what = format!("cannot remove the copy {}", fixed.name);
        remove().map_err(|e| Fault::new(&what, e, "check the server's folder, and remove it again"))
    }
}

/// Which file this is.
fn identity(file: &File) -> io::Result<FileIdentity> {
    let found = file.metadata()?;
    let made = found.created().ok().and_then(|made| made.duration_since(UNIX_EPOCH).ok());
    let made_ns = made.map_or(0, |made| made.as_nanos() as u64);
    Ok(FileIdentity { inode: found.ino(), made_ns })
}

fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_IDENTITY).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes a new file, durably but for its name.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
