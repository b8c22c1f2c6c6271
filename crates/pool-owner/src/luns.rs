//! The LUNs of a disk: this process opens each once, and is the server of the copies on it (`ferrite_member`). A connection to such
//! a copy is a socket pair of this process.
//!
//! A LUN stays reserved for this host when the disk is given back, until the next owner seizes it: without a reservation, a host
//! that was shut out could write again.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use ferrite_host::fence::Terms;
use ferrite_member::{LunName, Server};
use ferrite_pool_map::{Id, Lun};

use crate::member::Place;

/// The open LUNs, by name.
pub(crate) struct Luns {
    pool: Id,
    /// The folder of the records of this host's keys.
    records: PathBuf,
    open: Mutex<BTreeMap<String, Server>>,
}

impl Luns {
    pub(crate) fn new(pool: Id, records: PathBuf) -> Luns {
        Luns { pool, records, open: Mutex::default() }
    }

    /// A stream to the copies of a LUN. The lock is held while the LUN is opened: a set's thread waits for another's.
    ///
    /// # Errors
    /// In words.
    pub(crate) fn connect(&self, place: &Place, start: u64, lun: &Lun) -> Result<OwnedFd, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        // What is under way on one that has failed ends first: until then it is open, and is not opened again.
        open.retain(|_, server| !server.has_failed());
        let server = match open.get(&place.server) {
            Some(server) => server.clone(),
            None => {
                let name = LunName {
                    pool: self.pool.0,
                    server: place.server.clone(),
                    id: lun.id.0,
                    wwid: lun.wwid.clone(),
                    device: lun.device.clone(),
                };
                let terms = Terms { weak: lun.weak, records: self.records.clone() };
                let server = Server::on_lun(&name, terms).map_err(|e| e.to_string())?;
                open.entry(place.server.clone()).or_insert(server).clone()
            }
        };
        server.place(&place.extent.name, start);
        let (ours, theirs) = UnixStream::pair().map_err(|e| e.to_string())?;
        server.connect(theirs.into(), "this process".to_owned());
        Ok(ours.into())
    }
}
