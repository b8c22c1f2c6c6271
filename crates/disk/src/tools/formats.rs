//! What is different from format to format.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_io::scratch::MAX_PIECE_BYTES;

use super::create::Parent;
use super::info::{examined, of_medium, raw_info};
use super::{Checked, Finding, LayerInfo, NewImage, SnapshotInfo, broken, unsuitable};
use crate::children::absolute;
use crate::finding::{Counts, Kind as ProblemKind};
use crate::image::{Image, Layer};
use crate::qcow2::{self, NewImage as NewQcow2, Qcow2, Told};
use crate::vhd::{
    self, DEFAULT_BLOCK_BYTES, NewImage as NewVhd, NewParent, Problem, Stamp, Uuid, Vhd,
};
use crate::{Disk, DiskError, ErrorKind, Format, ImageName, Port, Raw};

/// Refuses what a new image of a format cannot be, before anything is made or changed.
pub(super) fn check_new(
    name: &ImageName,
    new: &NewImage,
    parent: Option<&Parent>,
    bytes: u64,
) -> Result<(), DiskError> {
    check_fixed(name, new.fixed)?;
    check_unit(name, new)?;
    match name.format {
        Format::Raw => Ok(()),
        Format::Vhd => new_vhd(new, parent, bytes).check(&name.path),
        Format::Qcow2 => new_qcow2(new, parent, &name.path, bytes)?.check(&name.path),
    }
}

fn check_fixed(name: &ImageName, fixed: bool) -> Result<(), DiskError> {
    if !fixed || name.format != Format::Qcow2 {
        return Ok(());
    }
    let what = format!("cannot make {}", name.path.display());
    let help = "leave --fixed out, or make a .vhd or a raw disk";
    Err(DiskError::new(ErrorKind::Usage, what, "a qcow2 image always grows with its data", help))
}

fn check_unit(name: &ImageName, new: &NewImage) -> Result<(), DiskError> {
    let why = match name.format {
        _ if new.unit_bytes.is_none() => return Ok(()),
        Format::Raw => "a raw disk has no blocks",
        Format::Vhd if new.fixed => "a fixed VHD has no blocks",
        Format::Vhd | Format::Qcow2 => return Ok(()),
    };
    let what = format!("cannot make {}", name.path.display());
    let help = "leave --block out, or make a .vhd (not --fixed) or a .qcow2";
    Err(DiskError::new(ErrorKind::Usage, what, why, help))
}

/// What an image on a device reads as where nothing was written to it yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blank {
    /// Zeros.
    Zeros,
    /// Anything, where the format has no say in it: every byte will be written.
    Anything,
}

/// Whether an image on a device shows what was on it before, until that is written over.
pub(super) fn shows_medium(format: Format, new: &NewImage) -> bool {
    format == Format::Raw || format == Format::Vhd && new.fixed
}

/// Writes an image of `bytes` without data into a new file or a device, durably.
pub(super) async fn empty(
    port: &Port,
    raw: &Raw,
    format: Format,
    new: &NewImage,
    (parent, blank): (Option<&Parent>, Blank),
    bytes: u64,
) -> Result<(), DiskError> {
    if !raw.is_file() && blank == Blank::Zeros && shows_medium(format, new) {
        let what = || format!("cannot make {}", raw.path().display());
        zero_device(port, raw, bytes).await.map_err(|e| broken(what(), e))?;
    }
    match format {
        Format::Raw => {
            let made = empty_raw(port, raw, new, bytes).await;
            made.map_err(|e| broken(format!("cannot make {}", raw.path().display()), e))
        }
        Format::Vhd => new_vhd(new, parent, bytes).create(port, raw).await.map(|_| ()),
        Format::Qcow2 => new_qcow2(new, parent, raw.path(), bytes)?.create(port, raw).await,
    }
}

fn new_qcow2(
    new: &NewImage,
    parent: Option<&Parent>,
    path: &Path,
    bytes: u64,
) -> Result<NewQcow2, DiskError> {
    let backing = parent.map(|parent| qcow2_backing(parent, path)).transpose()?;
    let usual = NewQcow2::new(bytes);
    let cluster_bytes = new.unit_bytes.unwrap_or(usual.cluster_bytes);
    Ok(NewQcow2 { backing, cluster_bytes, ..usual })
}

fn new_vhd(new: &NewImage, parent: Option<&Parent>, bytes: u64) -> NewVhd {
    NewVhd {
        bytes,
        fixed: new.fixed,
        parent: parent.map(vhd_parent),
        block_bytes: new.unit_bytes.unwrap_or(DEFAULT_BLOCK_BYTES),
        stamp: Stamp::from_system(),
    }
}

/// What other programs that such images are for cannot do with a new one.
pub(super) fn warnings(
    name: &ImageName,
    new: &NewImage,
    parent: Option<&Parent>,
    bytes: u64,
) -> Vec<String> {
    match name.format {
        Format::Vhd => {
            let vhd = new_vhd(new, parent, bytes);
            let mut notes = vhd.not_for_libvhd(&name.path);
            notes.extend(vhd.not_for_qemu());
            notes
        }
        Format::Raw | Format::Qcow2 => Vec::new(),
    }
}

/// A parent's name for a new image.
fn qcow2_backing(parent: &Parent, child: &Path) -> Result<(String, Format), DiskError> {
    // In one directory they stay together when that is moved.
    let together = absolute(child).is_ok_and(|p| p.parent() == parent.path.parent());
    let path = match parent.path.file_name() {
        Some(name) if together => Path::new(name),
        _ => &parent.path,
    };
    let name = path.to_str().map(|name| (name.to_owned(), parent.name.format));
    name.ok_or_else(|| {
        let what = format!("cannot make {}", child.display());
        let why = format!("the name of its parent, {}, is no UTF-8", parent.path.display());
        unsuitable(what, why, "rename the parent")
    })
}

/// Writes zeros over what is on a device.
async fn zero_device(port: &Port, raw: &Raw, bytes: u64) -> io::Result<()> {
    if raw.bytes_now()? < bytes {
        return Err(io::ErrorKind::StorageFull.into());
    }
    let zeros = port.scratch.take(MAX_PIECE_BYTES).await;
    port.memory().fill(zeros.span(), 0);
    raw.write_zeroes(&port.io, &port.files, 0, bytes, zeros.span()).await?;
    port.io.sync(port.files[0]).await
}

async fn empty_raw(port: &Port, raw: &Raw, new: &NewImage, bytes: u64) -> io::Result<()> {
    let file = port.files[0];
    if !raw.is_file() {
        return match raw.bytes_now()? {
            room if room < bytes => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        };
    }
    port.io.set_len(file, bytes).await?;
    if new.fixed {
        match port.io.allocate(file, 0, bytes).await {
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {}
            done => done?,
        }
    }
    port.io.sync(file).await
}

/// The layer that a disk is, without those below it.
fn leaf(disk: &Disk) -> Option<&Layer> {
    match disk {
        Disk::Image(image) => image.layers().first(),
        _ => None,
    }
}

fn vhd_parent(parent: &Parent) -> NewParent {
    let uuid = match leaf(&parent.disk) {
        Some(Layer::Vhd(vhd)) => vhd.footer().uuid,
        _ => Uuid::NIL,
    };
    let modified = parent.path.metadata().map(|meta| meta.mtime()).unwrap_or(0);
    NewParent {
        uuid,
        bytes: parent.bytes(),
        modified_unix_s: u64::try_from(modified).unwrap_or(0),
        path: parent.path.clone(),
    }
}

/// Whether an image of this format can stand on a parent of that one.
pub(super) fn stands_on(child: Format, parent: Format) -> bool {
    match child {
        Format::Raw => false,
        Format::Vhd => parent != Format::Qcow2,
        Format::Qcow2 => true,
    }
}

/// What a layer says about itself.
pub(super) fn layer_info(layer: &Layer) -> Result<LayerInfo, DiskError> {
    match layer {
        Layer::Raw(raw) => raw_info(raw),
        Layer::Vhd(vhd) => vhd_info(vhd),
        Layer::Qcow2(qcow2) => qcow2_info(qcow2),
    }
}

fn qcow2_info(qcow2: &Qcow2) -> Result<LayerInfo, DiskError> {
    let raw = qcow2.medium();
    let snapshot = |told: Told| SnapshotInfo {
        id: told.id,
        name: told.name,
        virtual_bytes: told.disk_bytes.unwrap_or(qcow2.bytes()),
        created_unix_s: told.created_unix_s,
        vm_state_bytes: told.vm_state_bytes,
    };
    Ok(LayerInfo {
        kind: Some(format!("version {}", qcow2.version())),
        virtual_bytes: qcow2.bytes(),
        allocated_bytes: examined(raw, qcow2.allocated_bytes())?,
        unit_bytes: Some(qcow2.cluster_bytes()),
        snapshots: examined(raw, qcow2.snapshots())?.into_iter().map(snapshot).collect(),
        ..of_medium(raw, Format::Qcow2)?
    })
}

fn vhd_info(vhd: &Vhd) -> Result<LayerInfo, DiskError> {
    let footer = vhd.footer();
    let (app, version) = (footer.creator.app, footer.creator.version);
    let app: String = app.iter().map(|b| char::from(*b)).filter(char::is_ascii_graphic).collect();
    Ok(LayerInfo {
        kind: Some(footer.kind.to_string()),
        virtual_bytes: vhd.bytes(),
        allocated_bytes: Some(vhd.allocated_bytes()),
        unit_bytes: vhd.block_bytes().map(u64::from),
        uuid: Some(footer.uuid.to_string()),
        creator: Some(format!("{app} {}.{}", version >> 16, version & 0xffff)),
        ..of_medium(vhd.medium(), Format::Vhd)?
    })
}

/// What other programs that such images are for make of another size of a disk.
pub(super) fn resize_notes(disk: &Disk, bytes: u64) -> Vec<String> {
    let qemu_bytes = match leaf(disk) {
        Some(Layer::Vhd(vhd)) => vhd.footer().qemu_bytes(bytes),
        _ => bytes,
    };
    let note = || {
        format!(
            "QEMU sees {qemu_bytes} bytes only: it takes the size of an image that it has made \
             from the geometry; ferrite image convert makes a copy that it sees as a whole"
        )
    };
    if qemu_bytes < bytes { vec![note()] } else { Vec::new() }
}

/// Gives a disk another size; it is closed by that.
pub(super) async fn resize(port: &Port, disk: Disk, bytes: u64) -> Result<(), DiskError> {
    let cannot = |raw: &Raw, e| broken(format!("cannot resize {}", raw.path().display()), e);
    match disk {
        Disk::Null(_) => Ok(()),
        Disk::Raw(raw) => resize_raw(port, bytes).await.map_err(|e| cannot(&raw, e)),
        Disk::Image(image) => {
            let below_bytes = image.layers().get(1).map_or(0, Layer::bytes);
            resize_layer(port, image.into_leaf(), bytes, below_bytes).await
        }
    }
}

/// Gives a layer another size, above a disk of `below_bytes`.
async fn resize_layer(
    port: &Port,
    layer: Option<Layer>,
    bytes: u64,
    below_bytes: u64,
) -> Result<(), DiskError> {
    let cannot = |raw: &Raw, e| broken(format!("cannot resize {}", raw.path().display()), e);
    match layer {
        Some(Layer::Raw(raw)) => resize_raw(port, bytes).await.map_err(|e| cannot(&raw, e)),
        Some(layer) if bytes > layer.bytes() && below_bytes > layer.bytes() => {
            let what = format!("cannot resize {}", layer.medium().path().display());
            let why = "its parent is larger: what is behind the disk's end would be seen";
            Err(unsuitable(what, why, "ferrite image convert makes a copy, which can grow"))
        }
        Some(Layer::Vhd(vhd)) => vhd.resize(port, bytes).await,
        Some(Layer::Qcow2(qcow2)) => {
            let done = qcow2.resize(port, bytes, below_bytes).await;
            done.map_err(|e| match e.kind() {
                io::ErrorKind::InvalidInput => {
                    let what = format!("cannot resize {}", qcow2.medium().path().display());
                    let help = "choose another size; ferrite image convert makes a copy of version \
                                3, with larger clusters (--block) if that is said";
                    DiskError::new(ErrorKind::Usage, what, e.to_string(), help)
                }
                _ => cannot(qcow2.medium(), e),
            })
        }
        None => Ok(()),
    }
}

async fn resize_raw(port: &Port, bytes: u64) -> io::Result<()> {
    port.io.set_len(port.files[0], bytes).await?;
    port.io.sync(port.files[0]).await
}

/// Completes a parent that has all of its child, with the child's identity if the format has one.
pub(super) async fn take_identity(port: &Port, parent: Disk, child: &Disk) -> io::Result<()> {
    let Disk::Image(parent) = parent else { return Ok(()) };
    match (parent.into_leaf(), leaf(child)) {
        (Some(Layer::Vhd(parent)), Some(Layer::Vhd(child))) => {
            parent.take_identity(port, child).await
        }
        (Some(layer), _) => layer.close(port).await,
        (None, _) => Ok(()),
    }
}

/// Where the parent of an open image may be.
pub(super) fn parents_of(image: &Image) -> Vec<PathBuf> {
    match image.layers().first() {
        Some(Layer::Vhd(vhd)) => vhd.parent().map(|p| p.paths.clone()).unwrap_or_default(),
        Some(Layer::Qcow2(qcow2)) => match qcow2.parent() {
            Ok(Some(parent)) => vec![parent.path],
            _ => Vec::new(),
        },
        Some(Layer::Raw(_)) | None => Vec::new(),
    }
}

/// Rules of other programs, which a strict check applies, too.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rules<'a> {
    /// None.
    Ours,
    /// Theirs, of an image whose parent is there, if it has one and that was found.
    Theirs(Option<&'a Path>),
}

/// Looks for inconsistencies in one image.
pub(super) fn check(raw: &Raw, format: Format, rules: Rules<'_>) -> Result<Checked, DiskError> {
    let (findings, counts, unused_bytes): (Vec<Finding>, Counts, u64) = match format {
        Format::Raw => Default::default(),
        Format::Qcow2 => {
            let report = qcow2::check(raw)?;
            let findings = report.findings.iter().map(qcow2_finding).collect();
            (findings, report.counts, report.unused_bytes)
        }
        Format::Vhd => {
            let report = match rules {
                Rules::Ours => vhd::check(raw)?,
                Rules::Theirs(parent) => vhd::check_strictly(raw, parent)?,
            };
            (report.findings.iter().map(vhd_finding).collect(), report.counts, 0)
        }
    };
    let path = raw.path().display().to_string();
    let more_findings = counts.total() - findings.len() as u64;
    Ok(Checked { path, format: format.name(), counts, findings, more_findings, unused_bytes })
}

fn qcow2_finding(found: &qcow2::Finding) -> Finding {
    let kind = match found.problem {
        qcow2::Problem::Header => "header",
        qcow2::Problem::Marked => "marked",
        qcow2::Problem::Entry => "entry",
        qcow2::Problem::Outside => "place",
        qcow2::Problem::CountTooLow => "refcount",
        qcow2::Problem::Leak => "leak",
        qcow2::Problem::Flag => "copied-flag",
        qcow2::Problem::List => "list",
        qcow2::Problem::Unsupported => "unsupported",
    };
    finding(kind, found)
}

fn vhd_finding(found: &vhd::Finding) -> Finding {
    let kind = match found.problem {
        Problem::EndFooter => "end-footer",
        Problem::FooterCopy => "footer-copy",
        Problem::Footers => "footers",
        Problem::Header => "header",
        Problem::Place => "place",
        Problem::Overlap => "overlap",
        Problem::Batmap => "batmap",
        Problem::BatmapBit => "batmap-bit",
        Problem::Bitmap => "bitmap",
        Problem::Locators => "locators",
        Problem::Leak => "leak",
        Problem::Unsupported => "unsupported",
        Problem::Refused => "vhd-util",
    };
    finding(kind, found)
}

fn finding<P: ProblemKind>(kind: &str, found: &crate::Finding<P>) -> Finding {
    let class = found.problem.class();
    Finding {
        offset_bytes: Some(found.offset),
        kind: kind.into(),
        why: found.why.clone(),
        class,
        harmless: class.is_harmless(),
        mendable: found.problem.is_mendable(),
    }
}

/// Mends what can be mended.
pub(super) async fn repair(port: &Port, raw: &Raw, format: Format) -> Result<(), DiskError> {
    match format {
        Format::Raw => Ok(()),
        Format::Qcow2 => qcow2::repair(port, raw).await.map(|_| ()),
        Format::Vhd => vhd::repair(port, raw).await.map(|_| ()),
    }
}
