//! The LUNs of a disk: this process opens each once, and is the server of the copies on it (`ferrite_member`). A connection to such
//! a copy is a socket pair of this process.
//!
//! A LUN stays reserved for this host when the disk is given back, until the next owner seizes it: without a reservation, a host
//! that was shut out could write again.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_host::fence::Terms;
use ferrite_member::{LunName, Server};
use ferrite_pool_map::{Id, Lun};

use crate::member::Place;

/// The open LUNs, by name.
pub(crate) struct Luns {
    pool: Id,
    /// The folder of the records of this host's keys.
    records: PathBuf,
    open: Mutex<BTreeMap<String, Slot>>,
}

/// A LUN, if it is open. The thread that opens it has the lock: others wait for a LUN that does not answer only if they
/// mean that one.
type Slot = Arc<Mutex<Option<Server>>>;

impl Luns {
    pub(crate) fn new(pool: Id, records: PathBuf) -> Luns {
        Luns { pool, records, open: Mutex::default() }
    }

    /// A stream to the copies of a LUN.
    ///
    /// # Errors
    /// In words.
    pub(crate) fn connect(&self, place: &Place, start: u64, lun: &Lun) -> Result<OwnedFd, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = open.entry(place.server.clone()).or_default().clone();
        drop(open);
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        // Operations under way on one that has failed end first: until then it is open, and is not opened again.
        let usable = slot.take().filter(|server| !server.has_failed());
        let server = match usable {
            Some(server) => server,
            None => {
                let name = LunName {
                    pool: self.pool.0,
                    server: place.server.clone(),
                    id: lun.id.0,
                    wwid: lun.wwid.clone(),
                    device: lun.device.clone(),
                };
                let terms = Terms { weak: lun.weak, records: self.records.clone() };
                Server::on_lun(&name, terms).map_err(|e| e.to_string())?
            }
        };
        *slot = Some(server.clone());
        drop(slot);
        server.place(&place.extent.name, start);
        let (ours, theirs) = UnixStream::pair().map_err(|e| e.to_string())?;
        server.connect(theirs.into(), "this process".to_owned());
        Ok(ours.into())
    }
}
