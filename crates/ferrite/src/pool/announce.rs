//! Tells etcd that a server is there: a key with a lease. The key says which servers seem alive,
//! and no more (R4, R5 do not rest on it).

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_etcd::{Cluster, Failure as Error, Lease, Said, Settings, TlsFiles, Transaction};
use ferrite_host::clock::{Clock as _, SystemClock};
use ferrite_host::limited;
use ferrite_host::log_limit::SharedLogLimit;
use ferrite_member::Server;
use ferrite_pool::wire::Extent;
use ferrite_pool_map::{Id, clean};
use serde_json::json;

use crate::exit::{Code, Failure};

/// The lease's time.
const LEASE_S: u32 = 10;
/// The pause between two looks. Three of them fit in a lease.
const PAUSE: Duration = Duration::from_secs(3);

/// The content of an announcement, and the etcd that gets it.
pub(super) struct Announcement {
    pub(super) endpoints: Vec<String>,
    pub(super) tls: Option<PathBuf>,
    pub(super) plain: bool,
    pub(super) pool: [u8; 16],
    pub(super) name: String,
    pub(super) address: String,
    pub(super) server: Server,
}

/// The thread that keeps the key. Its end removes the key.
pub(super) struct Announced {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Announced {
    /// Begins. etcd may be unreachable: then it is tried again.
    pub(super) fn start(of: Announcement) -> Result<Announced, Failure> {
        let cannot = |why: String| {
            let help = "give --etcd with https addresses and --etcd-tls DIR, or http ones and --etcd-plain";
            Failure::new("cannot tell etcd of this server", why, help).with_code(Code::USAGE)
        };
        let settings = Settings {
            endpoints: of.endpoints.clone(),
            tls: of.tls.clone().map(TlsFiles),
            plain: of.plain,
            cluster: None,
        };
        let cluster = Cluster::new(&settings).map_err(|e| cannot(e.to_string()))?;
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name("etcd".to_owned());
        let thread = thread.spawn(move || {
            let limit = SharedLogLimit::default();
            let mut lease = None;
            loop {
                if let Err(e) = keep(&cluster, &of, &mut lease) {
                    limited!(
                        warn,
                        limit,
                        SystemClock.now_ns(),
                        "etcd does not hear of this server: {e}"
                    );
                }
                clean_up(&cluster, &of, &limit);
                match stopped.recv_timeout(PAUSE) {
                    Err(RecvTimeoutError::Timeout) => {}
                    _ => break,
                }
            }
            if let Some(lease) = lease {
                // It ends by itself, too.
                let _ = cluster.revoke(lease);
            }
        });
        let thread = thread.map_err(|e| cannot(e.to_string()))?;
        Ok(Announced { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Removes the files of copies that the map has not any more.
fn clean_up(cluster: &Cluster, of: &Announcement, limit: &SharedLogLimit) {
    let remove = |name: &str, id: Id| {
        let removed = of.server.discard(&Extent { id: id.0, name: name.to_owned() });
        match &removed {
            Ok(()) => tracing::info!("{name} is removed: no disk has it any more"),
            Err(e) => limited!(warn, limit, SystemClock.now_ns(), "{e}"),
        }
        removed.is_ok()
    };
    if let Err(e) = clean(cluster, Id(of.pool), &of.name, remove) {
        limited!(warn, limit, SystemClock.now_ns(), "files of removed copies stay: {e}");
    }
}

/// Renews the lease, and writes the server's current state to its key.
fn keep(cluster: &Cluster, of: &Announcement, lease: &mut Option<Lease>) -> Result<(), Error> {
    let (held, is_new) = match *lease {
        Some(held) if cluster.keep(held)? => (held, false),
        _ => (cluster.grant(LEASE_S)?, true),
    };
    let space = of.server.space().ok();
    let value = json!({
        "address": of.address,
        "free": space.map_or(0, |space| space.free),
        "total": space.map_or(0, |space| space.total),
        "boot": format!("{:016x}", of.server.boot()),
    });
    let pool = u128::from_be_bytes(of.pool);
    let key = format!("ferrite/{pool:032x}/servers/{}", of.name);
    let before = cluster.get(&key)?;
    // A key of an earlier lease ends with that, whatever it says.
    if !is_new && before.as_ref().is_some_and(|entry| entry.value == value.to_string().as_bytes()) {
        return Ok(());
    }
    let revision = before.map(|entry| entry.revision).unwrap_or_default();
    let put =
        Transaction::when(&key, revision).put_leased(&key, value.to_string().into_bytes(), held);
    // Lost or unknown: the next turn looks again, and a key that this lease does not have is written by a new one.
    if let Said::Won(_) = cluster.commit(&put)? {
        *lease = Some(held);
    }
    Ok(())
}
