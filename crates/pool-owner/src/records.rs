//! The thread that asks etcd for the records of sets, and changes them. A set goes on meanwhile.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferrite_etcd::{Revision as EtcdRevision, Said as EtcdSaid, Transaction};
use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::limited;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_pool::{Event, Generation, OwnerId, Record, Revision, Said};
use ferrite_pool_map::{Access, Id, Stored};

use crate::set::Set;

/// The pause after an attempt without an outcome.
const PAUSE: Duration = Duration::from_millis(500);

/// A change of a set's record that is wanted.
pub(crate) struct Wanted {
    pub(crate) set: Weak<Set>,
    pub(crate) compare: Revision,
    pub(crate) record: Record,
}

/// The thread's inbox.
pub(crate) type Records = Sender<Wanted>;

/// Starts the thread. It ends when no set wants anything any more.
///
/// # Errors
/// The kernel's.
pub(crate) fn start(access: Arc<Access>) -> std::io::Result<Records> {
    let (records, inbox) = channel();
    std::thread::Builder::new().name("records".into()).spawn(move || run(&access, &inbox))?;
    Ok(records)
}

fn run(access: &Access, inbox: &Receiver<Wanted>) {
    let limit = SharedLogLimit::default();
    while let Ok(wanted) = inbox.recv() {
        let Some(set) = wanted.set.upgrade() else { continue };
        let said = match transact(access, set.key(), wanted.compare, &wanted.record) {
            Ok(said) => said,
            Err(why) => {
                limited!(
                    warn,
                    limit,
                    SystemClock.now_ns(),
                    "{}: etcd has not changed its record yet: {why}",
                    set.name()
                );
                // Nothing follows from it (R11): the owner asks again, by another number.
                std::thread::sleep(PAUSE);
                Said::Unknown
            }
        };
        set.happened(Event::Said(said));
    }
}

/// One attempt. The error is why its outcome is not known.
pub(crate) fn transact(
    access: &Access,
    key: &str,
    compare: Revision,
    record: &Record,
) -> Result<Said, String> {
    let value = Stored::from(record).to_json();
    let change = Transaction::when(key, EtcdRevision(compare.0)).put(key, value);
    match access.cluster().commit(&change) {
        Ok(EtcdSaid::Won(revision)) => Ok(Said::Won(Revision(revision.0))),
        Ok(EtcdSaid::Lost(found)) => match found.into_iter().next().flatten() {
            Some(entry) => {
                // A value that is no record comes from another program.
                let found = Stored::from_json(&entry.value);
                let found = found.map_or_else(|_| nobodys(record), |it| Record::from(&it));
                Ok(Said::Lost(Revision(entry.revision.0), found))
            }
            // The disk was removed: it has no owner any more.
            None => Ok(Said::Lost(Revision(0), nobodys(record))),
        },
        Ok(EtcdSaid::Unknown(why)) => Err(why),
        Err(e) => Err(e.to_string()),
    }
}

/// A record that no attempt of this owner has written.
fn nobodys(record: &Record) -> Record {
    let generation = Generation(record.generation.0.saturating_add(1));
    Record { generation, owner: OwnerId(0), nonce: Id::random().number(), ..record.clone() }
}
