//! A raw image as the last layer of a chain: byte for byte, and zeros beyond its end.

use std::io;
use std::sync::Weak;

use ferrite_disk_base::{Format, Port, Raw, SECTOR_BYTES, SyncWitness};
use ferrite_io::arena::Span;

use super::backing::Backing;
use super::format::ImageFormat;
use super::mapping::Mapping;

impl ImageFormat for Raw {
    fn format(&self) -> Format {
        Format::Raw
    }

    fn bytes(&self) -> u64 {
        self.sectors() * SECTOR_BYTES
    }

    fn medium(&self) -> &Raw {
        self
    }

    fn find(&self, offset: u64, len: u64) -> Mapping {
        match (self.sectors() * SECTOR_BYTES).checked_sub(offset) {
            None | Some(0) => Mapping::Zeros { len },
            Some(left) => Mapping::Data { offset, len: len.min(left) },
        }
    }

    fn reserve(&self, _: impl Backing, offset: u64, len: u64) -> Mapping {
        Mapping::Data { offset, len }
    }

    async fn commit(&self, port: &Port) -> io::Result<()> {
        self.flush(port).await
    }

    fn witness_syncs(&self, witness: Weak<dyn SyncWitness>) {
        Raw::witness_syncs(self, witness);
    }

    fn is_faulty(&self) -> bool {
        Raw::is_faulty(self)
    }

    async fn discard_part(
        &self,
        port: &Port,
        _: impl Backing,
        offset: u64,
        len: u64,
    ) -> io::Result<u64> {
        Raw::discard_part(self, &port.io, &port.files, offset, len).await
    }

    async fn write_zeroes(
        &self,
        port: &Port,
        _: impl Backing,
        offset: u64,
        len: u64,
        zeros: Span,
    ) -> io::Result<()> {
        Raw::empty(self, &port.io, &port.files, offset, len, zeros).await
    }

    async fn close(&self, port: &Port) -> io::Result<()> {
        self.flush(port).await
    }
}
