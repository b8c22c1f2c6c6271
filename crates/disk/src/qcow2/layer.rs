//! What a layer of a chain answers, and which file of this folder has it.

use std::io;
use std::sync::Arc;

use ferrite_io::arena::Span;
use ferrite_io::engine::FileId;

use super::Qcow2;
use crate::epochs::Epochs;
use crate::image::backing::Backing;
use crate::image::format::{ImageFormat, ParentNames};
use crate::image::mapping::Mapping;
use crate::writeback::journal::Identity;
use crate::{DiskError, Format, Port, Raw};

impl ImageFormat for Qcow2 {
    fn format(&self) -> Format {
        Format::Qcow2
    }

    fn bytes(&self) -> u64 {
        Qcow2::bytes(self)
    }

    fn medium(&self) -> &Raw {
        Qcow2::medium(self)
    }

    fn table_bytes(&self) -> u64 {
        Qcow2::table_bytes(self)
    }

    fn set_metadata_bytes(&mut self, bytes: usize) {
        Qcow2::set_metadata_bytes(self, bytes);
    }

    fn parents(&self) -> Result<Option<ParentNames>, DiskError> {
        Ok(self.parent()?.map(|parent| ParentNames {
            name: parent.path.display().to_string(),
            candidates: vec![parent],
        }))
    }

    #[inline(always)]
    fn find(&self, offset: u64, len: u64) -> Mapping {
        Qcow2::find(self, offset, len)
    }

    #[inline(always)]
    fn reserve(&self, below: impl Backing, offset: u64, len: u64) -> Mapping {
        Qcow2::reserve(self, below, offset, len)
    }

    #[inline(always)]
    fn written(&self, offset: u64, len: u64) {
        Qcow2::written(self, offset, len);
    }

    async fn load(&self, port: &Port, file: FileId, offset: u64, _: u64) -> io::Result<()> {
        Qcow2::load(self, port, file, offset).await
    }

    async fn prepare(&self, port: &Port, offset: u64, _: u64) -> io::Result<()> {
        Qcow2::prepare(self, port, offset).await
    }

    async fn write_copying(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        buf: Span,
    ) -> io::Result<()> {
        Qcow2::write_copying(self, port, below, offset, buf).await
    }

    async fn unpack(&self, port: &Port, file: FileId, offset: u64, buf: Span) -> io::Result<()> {
        Qcow2::unpack(self, port, file, offset, buf).await
    }

    async fn commit(&self, port: &Port) -> io::Result<()> {
        Qcow2::commit(self, port).await
    }

    fn flush_failed(&self) {
        Qcow2::flush_failed(self);
    }

    async fn discard_part(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        Qcow2::discard_part(self, port, below, offset, len).await
    }

    async fn write_zeroes(
        &self,
        port: &Port,
        below: impl Backing,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        Qcow2::write_zeroes(self, port, below, offset, len, zeros).await
    }

    fn epochs(&self) -> Option<&Arc<Epochs>> {
        (!self.medium().read_only()).then_some(&self.epochs)
    }

    fn is_dirty(&self) -> bool {
        Qcow2::is_dirty(self)
    }

    fn recovered(&self) -> Vec<(u64, u64)> {
        Qcow2::recovered(self)
    }

    fn journal_identity(&self) -> io::Result<Option<Identity>> {
        Qcow2::journal_identity(self).map(Some)
    }

    async fn close(&self, port: &Port) -> io::Result<()> {
        Qcow2::close(self, port).await
    }
}
