//! The tools' operations on qcow2 images.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use ferrite_disk_base::{DiskError, ErrorKind, Format, Port, Raw};
use ferrite_images::ImageFormat;
use ferrite_images::children::absolute;
use ferrite_images::qcow2::{self, Bitmap, NewImage as NewQcow2, Qcow2, Told};

use super::{Looked, New, Offline, Rules, examined, finding, not_relinked, of_medium};
use crate::spec::Parent;
use crate::{BitmapInfo, Finding, LayerInfo, SnapshotInfo, broken, unsuitable};

impl Offline for Qcow2 {
    fn check_new(new: New<'_>) -> Result<(), DiskError> {
        if new.new.fixed {
            let what = format!("cannot make {}", new.path.display());
            let why = "a qcow2 image always grows with its data";
            let help = "leave --fixed out, or make a .vhd or a raw disk";
            return Err(DiskError::new(ErrorKind::Usage, what, why, help));
        }
        new_qcow2(new)?.check(new.path)
    }

    async fn empty(port: &Port, raw: &Raw, new: New<'_>) -> Result<(), DiskError> {
        new_qcow2(new)?.create(port, raw).await
    }

    fn stands_on(_: Format) -> bool {
        true
    }

    fn check(raw: &Raw, _: Rules<'_>) -> Result<Looked, DiskError> {
        let report = qcow2::check(raw)?;
        let findings = report.findings.iter().map(qcow2_finding).collect();
        let (joined, unused_bytes) = (report.joined(), report.unused_bytes);
        Ok(Looked { findings, counts: report.counts, joined, unused_bytes })
    }

    fn is_repairable(raw: &Raw) -> Result<bool, DiskError> {
        qcow2::is_repairable(raw)
    }

    async fn repair(port: &Port, raw: &Raw) -> Result<(), DiskError> {
        qcow2::repair(port, raw).await.map(|_| ())
    }

    fn info(&self) -> Result<LayerInfo, DiskError> {
        let raw = self.medium();
        let snapshot = |told: Told| SnapshotInfo {
            id: told.id,
            name: told.name,
            virtual_bytes: told.disk_bytes.unwrap_or(self.bytes()),
            created_unix_s: told.created_unix_s,
            vm_state_bytes: told.vm_state_bytes,
        };
        let bitmap = |found: Bitmap| BitmapInfo {
            name: found.name,
            granularity_bytes: found.granularity_bytes,
            valid: found.is_valid,
            enabled: found.is_enabled,
        };
        Ok(LayerInfo {
            kind: Some(format!("version {}", self.version())),
            virtual_bytes: self.bytes(),
            allocated_bytes: examined(raw, self.allocated_bytes())?,
            unit_bytes: Some(self.cluster_bytes()),
            qcow2: Some(self.properties()),
            snapshots: examined(raw, self.snapshots())?.into_iter().map(snapshot).collect(),
            // A directory that makes no sense is for check.
            bitmaps: self.bitmaps().unwrap_or_default().into_iter().map(bitmap).collect(),
            ..of_medium(raw, Format::Qcow2)?
        })
    }

    fn unit_bytes(&self) -> Option<u32> {
        u32::try_from(self.cluster_bytes()).ok()
    }

    fn has_extended_l2(&self) -> bool {
        self.properties().has_extended_l2
    }

    fn inner_snapshots(&self) -> io::Result<usize> {
        self.snapshots().map(|all| all.len())
    }

    fn dirty_bitmaps(&self) -> u32 {
        self.valid_bitmaps()
    }

    async fn relink(self, port: &Port, parent: &Parent) -> Result<(), DiskError> {
        let path = self.medium().path().to_owned();
        let (name, format) = qcow2_backing(parent, &path)?;
        let relinked = Qcow2::relink(self, port, &name, format).await;
        relinked.map_err(|e| not_relinked(&path, e))
    }

    async fn resize(self, port: &Port, bytes: u64, below_bytes: u64) -> Result<(), DiskError> {
        let what = || format!("cannot resize {}", self.medium().path().display());
        let done = Qcow2::resize(&self, port, bytes, below_bytes).await;
        done.map_err(|e| match e.kind() {
            io::ErrorKind::InvalidInput => {
                let help = "choose another size; ferrite image convert makes a copy of version \
                            3, with larger clusters (--block) if that is said";
                DiskError::new(ErrorKind::Usage, what(), e.to_string(), help)
            }
            _ => broken(what(), e),
        })
    }
}

fn new_qcow2(New { path, new, parent, bytes }: New<'_>) -> Result<NewQcow2, DiskError> {
    let backing = parent.map(|parent| qcow2_backing(parent, path)).transpose()?;
    let usual = NewQcow2::new(bytes);
    let cluster_bytes = new.unit_bytes.unwrap_or(usual.cluster_bytes);
    Ok(NewQcow2 { backing, cluster_bytes, extended_l2: new.extended_l2, ..usual })
}

/// A parent's name for a new image.
fn qcow2_backing(parent: &Parent, child: &Path) -> Result<(String, Format), DiskError> {
    // A relative name stays valid when the directory is moved.
    let together = absolute(child).is_ok_and(|p| p.parent() == parent.path.parent());
    let path = match parent.path.file_name() {
        // A prefix before a colon would be taken for a protocol, here and by QEMU.
        Some(name) if together && name.as_bytes().contains(&b':') => Path::new(".").join(name),
        Some(name) if together => name.into(),
        _ => parent.path.clone(),
    };
    let name = path.to_str().map(|name| (name.to_owned(), parent.name.format));
    name.ok_or_else(|| {
        let what = format!("cannot make {}", child.display());
        let why = format!("the name of its parent, {}, is no UTF-8", parent.path.display());
        unsuitable(what, why, "rename the parent")
    })
}

fn qcow2_finding(found: &qcow2::Finding) -> Finding {
    let kind = match found.problem {
        qcow2::Problem::Header => "header",
        qcow2::Problem::Marked => "marked",
        qcow2::Problem::Entry => "entry",
        qcow2::Problem::Outside => "place",
        qcow2::Problem::CountTooLow => "refcount",
        qcow2::Problem::Leak => "leak",
        qcow2::Problem::Refcounts => "refcounts",
        qcow2::Problem::Flag => "copied-flag",
        qcow2::Problem::List => "list",
        qcow2::Problem::Unsupported => "unsupported",
    };
    finding(kind, found)
}
