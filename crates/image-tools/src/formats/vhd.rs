//! The tools' operations on VHDs.

use std::io;
use std::os::unix::fs::MetadataExt;

use ferrite_disk_base::{DiskError, Format, Port, Raw};
use ferrite_images::vhd::{
    self, DEFAULT_BLOCK_BYTES, NewImage as NewVhd, NewParent, Problem, Stamp, Uuid, Vhd,
};
use ferrite_images::{ImageFormat as _, Layer};

use super::{Looked, New, Offline, Rules, finding, leaf, not_relinked, of_medium, without_units};
use crate::spec::Parent;
use crate::{Finding, LayerInfo, NewImage};

impl Offline for Vhd {
    fn check_new(new: New<'_>) -> Result<(), DiskError> {
        if new.new.fixed {
            without_units(new, "a fixed VHD has no blocks")?;
        }
        new_vhd(new).check(new.path)
    }

    async fn empty(port: &Port, raw: &Raw, new: New<'_>) -> Result<(), DiskError> {
        new_vhd(new).create(port, raw).await.map(|_| ())
    }

    fn shows_medium(new: &NewImage) -> bool {
        new.fixed
    }

    fn warnings(new: New<'_>) -> Vec<String> {
        let vhd = new_vhd(new);
        let mut notes = vhd.not_for_libvhd(new.path);
        notes.extend(vhd.not_for_qemu());
        notes
    }

    fn stands_on(parent: Format) -> bool {
        matches!(parent, Format::Raw | Format::Vhd)
    }

    fn check(raw: &Raw, rules: Rules<'_>) -> Result<Looked, DiskError> {
        let report = match rules {
            Rules::Ours => vhd::check(raw)?,
            Rules::Theirs(parent) => vhd::check_strictly(raw, parent)?,
        };
        let findings = report.findings.iter().map(vhd_finding).collect();
        let joined = report.joined();
        Ok(Looked { findings, counts: report.counts, joined, unused_bytes: 0 })
    }

    fn is_repairable(raw: &Raw) -> Result<bool, DiskError> {
        vhd::is_repairable(raw)
    }

    async fn repair(port: &Port, raw: &Raw) -> Result<(), DiskError> {
        vhd::repair(port, raw).await.map(|_| ())
    }

    fn info(&self) -> Result<LayerInfo, DiskError> {
        let footer = self.footer();
        let (app, version) = (footer.creator.app, footer.creator.version);
        let app: String =
            app.iter().map(|b| char::from(*b)).filter(char::is_ascii_graphic).collect();
        Ok(LayerInfo {
            kind: Some(footer.kind.to_string()),
            virtual_bytes: self.bytes(),
            allocated_bytes: Some(self.allocated_bytes()),
            unit_bytes: self.block_bytes().map(u64::from),
            uuid: Some(footer.uuid.to_string()),
            creator: Some(format!("{app} {}.{}", version >> 16, version & 0xffff)),
            ..of_medium(self.medium(), Format::Vhd)?
        })
    }

    fn is_fixed(&self) -> bool {
        self.block_bytes().is_none()
    }

    fn unit_bytes(&self) -> Option<u32> {
        self.block_bytes()
    }

    fn qemu_bytes(&self, bytes: u64) -> u64 {
        self.footer().qemu_bytes(bytes)
    }

    async fn resize(self, port: &Port, bytes: u64, _: u64) -> Result<(), DiskError> {
        Vhd::resize(self, port, bytes).await
    }

    async fn relink(self, port: &Port, parent: &Parent) -> Result<(), DiskError> {
        let path = self.medium().path().to_owned();
        let relinked = Vhd::relink(self, port, &vhd_parent(parent), vhd::MAX_MOVED).await;
        relinked.map_err(|e| not_relinked(&path, e))
    }

    async fn take_identity(self, port: &Port, child: &Layer) -> io::Result<()> {
        match child {
            Layer::Vhd(child) => Vhd::take_identity(self, port, child).await,
            _ => self.close(port).await,
        }
    }
}

fn new_vhd(New { new, parent, bytes, .. }: New<'_>) -> NewVhd {
    NewVhd {
        bytes,
        fixed: new.fixed,
        parent: parent.map(vhd_parent),
        block_bytes: new.unit_bytes.unwrap_or(DEFAULT_BLOCK_BYTES),
        room_bytes: 0,
        stamp: Stamp::from_system(),
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
