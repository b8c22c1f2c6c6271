//! The tools' operations on raw images.

use std::io;

use ferrite_disk_base::{DiskError, Format, Port, Raw, SECTOR_BYTES};

use super::{New, Offline, examined, of_medium, without_units};
use crate::{LayerInfo, NewImage, broken};

impl Offline for Raw {
    fn check_new(new: New<'_>) -> Result<(), DiskError> {
        without_units(new, "a raw disk has no blocks")
    }

    async fn empty(port: &Port, raw: &Raw, new: New<'_>) -> Result<(), DiskError> {
        let made = empty_raw(port, raw, new).await;
        made.map_err(|e| broken(format!("cannot make {}", raw.path().display()), e))
    }

    fn shows_medium(_: &NewImage) -> bool {
        true
    }

    fn info(&self) -> Result<LayerInfo, DiskError> {
        let disk_bytes = examined(self, self.disk_bytes())?;
        Ok(LayerInfo {
            virtual_bytes: self.sectors() * SECTOR_BYTES,
            allocated_bytes: Some(disk_bytes.min(self.sectors() * SECTOR_BYTES)),
            ..of_medium(self, Format::Raw)?
        })
    }

    async fn resize(self, port: &Port, bytes: u64, _: u64) -> Result<(), DiskError> {
        let done = match port.io.set_len(port.files[0], bytes).await {
            Ok(()) => port.io.sync(port.files[0]).await,
            failed => failed,
        };
        done.map_err(|e| broken(format!("cannot resize {}", self.path().display()), e))
    }
}

async fn empty_raw(port: &Port, raw: &Raw, New { new, bytes, .. }: New<'_>) -> io::Result<()> {
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
