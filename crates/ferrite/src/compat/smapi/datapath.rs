//! The datapath plug-in: a tap for each `ferrite://` URI.
//!
//! `attach` makes the tap without its image, since its process takes time; `activate` and `deactivate` are in a
//! migration's downtime, and only open and close. Two domains may use one URI, domain 0 and a guest: the image is open
//! while one of them is active. Every call may be repeated.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use super::collect;
use super::disks::{Disk, Disks, Held, id_of};
use super::files;
use super::taps::{Close, Row, Tap, TapCtl, Taps};
use super::uri::{Image, SCHEME};
use super::volume_folder::Folder;
use super::{Call, Fault, Kind, Query, json as as_json};

/// The folder of the links that lead to the sockets of these taps, in the folder of the sockets.
const LINKS: &str = "nbd";

#[derive(Deserialize)]
struct OpenParams {
    uri: String,
    persistent: bool,
}

#[derive(Deserialize)]
struct UriParams {
    uri: String,
}

#[derive(Deserialize)]
struct DomainParams {
    uri: String,
    domain: String,
}

/// Carries out a call.
pub(super) fn answer(call: &Call) -> Result<Value, Fault> {
    let taps = TapCtl { run_dir: &call.run_dir };
    let datapath =
        Datapath { taps: &taps, disks: Disks::of(&call.run_dir), run_dir: &call.run_dir };
    match call.name.to_ascii_lowercase().as_str() {
        "plugin.query" => query(),
        "datapath.open" => open(call.params()?),
        "datapath.close" => Image::parse(&call.params::<UriParams>()?.uri).map(|_| Value::Null),
        "datapath.attach" => datapath.attach(&call.params()?),
        "datapath.activate" => datapath.activate(&call.params()?, Access::All).map(|_| Value::Null),
        "datapath.activate_readonly" => {
            datapath.activate(&call.params()?, Access::Reads).map(|_| Value::Null)
        }
        "datapath.import_activate" => datapath.import_activate(&call.params()?),
        "datapath.deactivate" => datapath.deactivate(&call.params()?),
        "datapath.detach" => {
            datapath.detach(&call.params()?);
            Ok(Value::Null)
        }
        name => super::data::answer(call, name).unwrap_or_else(|| Err(call.unimplemented())),
    }
}

fn query() -> Result<Value, Fault> {
    as_json(Query::new("Ferrite datapath", "Serves raw, VHD and qcow2 images by Ferrite"))
}

/// Nothing is done for a disk that keeps its writes. XAPI asks for others only if that is among the features, and such
/// writes must not be kept.
fn open(params: OpenParams) -> Result<Value, Fault> {
    match params.persistent {
        true => Image::parse(&params.uri).map(|_| Value::Null),
        false => {
            let help = "clone the volume instead, as XAPI does by itself";
            let text = format!("cannot open {} for writes that are not kept; {help}", params.uri);
            Err(Fault::new(Kind::Unimplemented, text))
        }
    }
}

/// The access of a domain to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    All,
    Reads,
}

struct Datapath<'a> {
    taps: &'a dyn Taps,
    disks: Disks,
    run_dir: &'a Path,
}

impl Datapath<'_> {
    /// Makes the tap, without its image.
    ///
    /// The order: the number is in the file before a process gets it, and the process before it gets the number. Only
    /// then the domain is attached. So whatever a crash leaves is found by the file, and removed by a later call.
    fn attach(&self, params: &DomainParams) -> Result<Value, Fault> {
        let image = Image::parse(&params.uri)?;
        self.sweep();
        let held = self.disks.lock(&params.uri)?;
        let mut disk = match held.read()? {
            Some(disk) => disk,
            None => {
                check_exists(&image)?;
                let minor = self.taps.allocate()?;
                let (attached, active) = Default::default();
                let (uri, pid, read_only) = (params.uri.clone(), None, false);
                Disk { uri, minor, pid, attached, active, read_only }
            }
        };
        let made = held.save(&disk).and_then(|()| self.tap(&held, &mut disk, &image));
        if let Err(fault) = made {
            if disk.attached.is_empty() {
                // A failure here is repaired by the next call; the first one counts.
                let _ = self.remove(&held, &disk);
            }
            return Err(fault);
        }
        if disk.attached.insert(params.domain.clone()) {
            held.save(&disk)?;
        }
        Ok(self.backend(&params.uri))
    }

    /// The answer of attach. It is the same until the last detach, whatever process serves the tap: its link is remade.
    fn backend(&self, uri: &str) -> Value {
        let (id, link) = (id_of(uri), self.link(&id_of(uri)).display().to_string());
        json!({ "implementations": [
            ["XenDisk", { "backend_type": "vbd3", "params": link, "extra": {} }],
            ["Nbd", { "uri": format!("nbd:unix:{link}:exportname={id}") }],
        ] })
    }

    /// The name under which XAPI finds a tap's socket. It follows the link to get the socket's own name.
    fn link(&self, id: &str) -> PathBuf {
        self.taps.sockets().join(LINKS).join(SCHEME).join(id)
    }

    /// The process and number of a URI's tap. A tap that a death has removed is made again.
    fn tap(&self, held: &Held, disk: &mut Disk, image: &Image) -> Result<Tap, Fault> {
        let rows = self.taps.list()?;
        let row = rows.iter().find(|row| row.minor == Some(disk.minor));
        let is_another = |row: &Row| row.path().is_some_and(|path| path != image.path);
        let tap = match row {
            Some(row) if !is_another(row) => match row.tap() {
                Some(tap) => tap,
                None => self.spawn(held, disk, &rows)?,
            },
            // The number was freed by other means, and may be that of another disk by now.
            _ => {
                disk.minor = self.taps.allocate()?;
                held.save(disk)?;
                self.spawn(held, disk, &rows)?
            }
        };
        if disk.pid != Some(tap.pid) {
            disk.pid = Some(tap.pid);
            held.save(disk)?;
        }
        self.make_link(&held.id, tap).map_err(|e| {
            Fault::of_io(format!("cannot make the link {}", self.link(&held.id).display()), e)
        })?;
        Ok(tap)
    }

    /// Gives a process to a number.
    fn spawn(&self, held: &Held, disk: &mut Disk, rows: &[Row]) -> Result<Tap, Fault> {
        let idle = disk.pid.filter(|pid| rows.iter().any(|row| is_idle(row, *pid)));
        let pid = idle.map_or_else(|| self.taps.spawn(), Ok)?;
        disk.pid = Some(pid);
        held.save(disk)?;
        let tap = Tap { pid, minor: disk.minor };
        self.taps.attach(tap)?;
        Ok(tap)
    }

    fn make_link(&self, id: &str, tap: Tap) -> io::Result<()> {
        let (link, socket) = (self.link(id), self.taps.socket(tap));
        if fs::read_link(&link).is_ok_and(|target| target == socket) {
            return Ok(());
        }
        if let Some(folder) = link.parent() {
            files::make_folder(folder)?;
        }
        // The link is replaced by a rename, so that a reader finds the old one or the new one.
        let new = link.with_extension("new");
        match fs::remove_file(&new) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => symlink(socket, &new)?,
        }
        fs::rename(new, link)
    }

    /// Opens the image, and answers with the socket that takes a connection on which the disk is written: the target of
    /// storage motion.
    fn import_activate(&self, params: &DomainParams) -> Result<Value, Fault> {
        let tap = self.activate(params, Access::All)?;
        let socket = self.taps.sockets().join(format!("nbdserver{}.{}", tap.pid, tap.minor));
        Ok(json!(socket.display().to_string()))
    }

    /// Opens the image, or opens it again after a pause that a failed call has left. One that is open for reading only
    /// is opened anew for a domain that writes.
    fn activate(&self, params: &DomainParams, access: Access) -> Result<Tap, Fault> {
        let image = Image::parse(&params.uri)?;
        let held = self.disks.lock(&params.uri)?;
        let disk = held.read()?.filter(|disk| disk.attached.contains(&params.domain));
        let Some(mut disk) = disk else {
            let text = format!(
                "cannot activate {} for domain {}: it is not attached; attach it first",
                params.uri, params.domain
            );
            return Err(Fault::new(Kind::Invalid, text));
        };
        // Images at rest may be merged at this moment.
        let _still = Folder::hold(&image.path())?;
        let tap = self.tap(&held, &mut disk, &image)?;
        let row = self.row(tap)?;
        let mut is_open = row.as_ref().is_some_and(Row::is_open);
        if is_open && disk.read_only && access == Access::All {
            self.taps.close(tap, Close::Orderly)?;
            is_open = false;
        }
        if !is_open {
            disk.read_only = access == Access::Reads;
            // Before the image is open: a crash must not leave one that seems to be open for writing.
            held.save(&disk)?;
        }
        let opened = match row {
            Some(row) if is_open && row.is_paused() => self.taps.unpause(tap, &image),
            Some(_) if is_open => Ok(()),
            _ => self.taps.open(tap, &image, disk.read_only || is_read_only(&image)),
        };
        opened.map_err(|e| match e.is_missing() && !image.path().exists() {
            true => missing(&image),
            false => e.into(),
        })?;
        if disk.active.insert(params.domain.clone()) {
            held.save(&disk)?;
        }
        Ok(tap)
    }

    fn row(&self, tap: Tap) -> Result<Option<Row>, Fault> {
        Ok(self.taps.list()?.into_iter().find(|row| row.tap() == Some(tap)))
    }

    /// Closes the image if no other domain uses it. Success means that it is closed: another host may open it next.
    fn deactivate(&self, params: &DomainParams) -> Result<Value, Fault> {
        let held = self.disks.lock(&params.uri)?;
        let Some(mut disk) = held.read()? else { return Ok(Value::Null) };
        let mut active = disk.active.clone();
        active.remove(&params.domain);
        if active.is_empty() {
            // The daemon may merge images of the disk.
            let still = Image::parse(&disk.uri).and_then(|image| Folder::hold(&image.path()))?;
            self.close(&disk)?;
            if let Some((folder, lock)) = still {
                drop(lock);
                collect::begin(&folder, self.run_dir);
            }
        }
        if active != disk.active {
            disk.active = active;
            held.save(&disk)?;
        }
        Ok(Value::Null)
    }

    fn close(&self, disk: &Disk) -> Result<(), Fault> {
        let rows = self.taps.list()?;
        let row = rows.iter().find(|row| self.is_of(row, disk));
        match row.filter(|row| row.is_open()).and_then(Row::tap) {
            Some(tap) => Ok(self.taps.close(tap, Close::Orderly)?),
            None => Ok(()),
        }
    }

    /// Whether a row is the tap of this disk. Its number may be another disk's by now.
    fn is_of(&self, row: &Row, disk: &Disk) -> bool {
        let path = Image::parse(&disk.uri).ok().map(|image| image.path);
        row.minor == Some(disk.minor) && row.path().is_none_or(|of| Some(of) == path.as_deref())
    }

    /// Removes the tap if no other domain uses it. This never fails: what cannot be removed now is removed by a later
    /// call, as its file stays, without a domain.
    fn detach(&self, params: &DomainParams) {
        if let Err(fault) = self.try_detach(params) {
            let text = crate::plain::one_line(&fault.text).into_owned();
            eprintln!("the tap of {} stays until the next call: {text}", params.uri);
        }
        self.sweep();
    }

    fn try_detach(&self, params: &DomainParams) -> Result<(), Fault> {
        let held = self.disks.lock(&params.uri)?;
        let Some(mut disk) = held.read()? else { return Ok(()) };
        disk.attached.remove(&params.domain);
        let was_active = disk.active.remove(&params.domain);
        held.save(&disk)?;
        match disk.attached.is_empty() {
            true => self.remove(&held, &disk),
            // A domain that was never deactivated.
            false if was_active && disk.active.is_empty() => self.close(&disk),
            false => Ok(()),
        }
    }

    /// Removes what disks without a domain have left, or leaves it to the next call.
    fn sweep(&self) {
        for held in self.disks.at_rest() {
            let disk = held.read().ok().flatten();
            if let Some(disk) = disk.filter(|disk| disk.attached.is_empty()) {
                // Without a daemon each of them would wait for one.
                if self.taps.list().is_err() {
                    return;
                }
                let _ = self.remove(&held, &disk);
            }
        }
    }

    /// Removes a tap, then its link, then the file by which it is found.
    fn remove(&self, held: &Held, disk: &Disk) -> Result<(), Fault> {
        let rows = self.taps.list()?;
        // A process that got no number ends by itself only when it is told to.
        if let Some(pid) = disk.pid.filter(|pid| rows.iter().any(|row| is_idle(row, *pid))) {
            self.taps.end(pid)?;
        }
        if let Some(row) = rows.iter().find(|row| self.is_of(row, disk)) {
            if let Some(tap) = row.tap() {
                if row.is_open() {
                    self.taps.close(tap, Close::Forced)?;
                }
                self.taps.detach(tap)?;
            }
            self.taps.free(disk.minor)?;
        }
        let link = self.link(&held.id);
        match fs::remove_file(&link) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Fault::of_io(format!("cannot remove {}", link.display()), e));
            }
            _ => {}
        }
        held.remove()
    }
}

/// Whether a row is that of a process without a number.
fn is_idle(row: &Row, pid: u32) -> bool {
    row.minor.is_none() && row.pid == Some(pid)
}

fn missing(image: &Image) -> Fault {
    let text = format!("there is no image {}; check the volume's URI", image.path);
    Fault::new(Kind::VolumeDoesNotExist, text)
}

fn check_exists(image: &Image) -> Result<(), Fault> {
    match fs::metadata(image.path()) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(missing(image)),
        Err(e) => Err(Fault::of_io(format!("cannot look at {}", image.path), e)),
    }
}

/// Whether the image is one that must not be written: the mode of a snapshot, or of an image that others stand on.
fn is_read_only(image: &Image) -> bool {
    fs::metadata(image.path()).is_ok_and(|there| there.is_file() && there.mode() & 0o222 == 0)
}

#[cfg(test)]
mod tests;
