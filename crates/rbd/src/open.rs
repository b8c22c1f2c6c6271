//! From a name to an open image.

use std::path::Path;

use ferrite_host::sandbox::deny_changes;
use ferrite_nbd::uri::rbd::{Image as Name, SCHEME};
use rustix::io::Errno;

use ferrite_helper::{Fault, Record, State};

use crate::ffi::{self, Cluster, Image, Pool};
use crate::lock::{self, cannot};
use crate::log::log;

/// Seconds that connecting may take. The client of the stream waits for 10.
const MOUNT_TIMEOUT_S: &str = "6";
/// Seconds for an answer of the monitors.
const MON_TIMEOUT_S: &str = "8";
/// The feature of librbd that a disk that is written has to have.
const EXCLUSIVE_LOCK: u64 = 1 << 2;

pub(crate) const PERMISSION: &str = "check the cluster (ceph -s), and that the client has the capabilities mon 'profile rbd' and osd \
                                     'profile rbd pool=POOL' (ceph auth caps)";

/// An open image, and the lock on it.
pub(crate) struct Opened {
    pub(crate) image: Image<'static>,
    /// The name for people.
    pub(crate) name: String,
    /// It, or its snapshot, is only read.
    pub(crate) read_only: bool,
    lock: Option<(Record, String)>,
}

impl Opened {
    /// Writes down that another client has taken the image.
    pub(crate) fn lose(&self) {
        if let Some((record, own)) = &self.lock {
            // Without room the successor sees it by the lock.
            let _ = record.write(own, State::Lost);
        }
    }

    /// Gives the lock back. Nothing is under way. `lost`: the lock is not ours any more.
    pub(crate) fn release(&self, lost: bool) {
        if let (Some((record, own)), false) = (&self.lock, lost) {
            // The record first: a successor must not take a lock that was given back for one that was taken away.
            let _ = record.write(own, State::Releases);
            let _ = self.image.unlock();
        }
    }
}

/// Opens an image, and takes its lock unless it is only read.
///
/// # Errors
/// In words for the user.
pub(crate) fn open(name: &Name, read_only: bool) -> Result<Opened, Fault> {
    let read_only = read_only || name.snapshot.is_some();
    // Before anything that takes long.
    let record = if read_only { None } else { Some(record(name)?) };
    // Behind the record, and before any thread of librados.
    let lacking = deny_changes().map_err(|e| Fault::lasting(e.to_string(), "look into the log"))?;
    if !lacking.is_empty() {
        log(5, &format!("{}: its helper has more rights than it needs: {lacking}", name.short()));
    }
    let (cluster, pool) = connect(name)?;
    let image = open_image(pool, name, read_only)?;
    let short = name.short();
    if !read_only {
        must_not_cache(&image, &short)?;
    }
    let features = image.features().map_err(|e| cannot("read the features of", &short, e))?;
    let lock = match record {
        None => None,
        Some(_) if features & EXCLUSIVE_LOCK == 0 => {
            let why =
                format!("{short} has no exclusive lock: nothing would keep a second writer away");
            let help = format!("rbd feature enable {short} exclusive-lock");
            return Err(Fault::lasting(why, help));
        }
        Some(record) => {
            let own = own_address(cluster, &short)?;
            lock::take(&image, &own, &record, (&short, &shown(name)))?;
            // The cluster's text for this client, which a successor compares.
            let said = image.owner().map_err(|e| cannot("read the lock of", &short, e))?;
            let own = said.unwrap_or(own);
            let _ = record.write(&own, State::Holds);
            Some((record, own))
        }
    };
    Ok(Opened { image, name: short, read_only, lock })
}

/// The record of an image's helpers on this host.
fn record(name: &Name) -> Result<Record, Fault> {
    let conf = std::fs::canonicalize(&name.conf).unwrap_or_else(|_| name.conf.clone());
    let identity = format!("{}\n{}", conf.display(), name.short());
    Record::open("rbd", &identity, &name.short())
}

/// Refuses an image whose own settings, or its pool's, overrule [`settings`]: an answered write would end with this process.
fn must_not_cache(image: &Image<'_>, name: &str) -> Result<(), Fault> {
    for (key, harmless) in [("rbd_cache", "false"), ("rbd_persistent_cache_mode", "disabled")] {
        let found = image.setting(key).map_err(|e| cannot("read the settings of", name, e))?;
        let Some((value, level)) = found.filter(|(value, _)| value != harmless) else { continue };
        let level = level.unwrap_or("image");
        let of = if level == "pool" { name.split('/').next().unwrap_or(name) } else { name };
        let why = format!("{key} is {value} for {name}: answered writes could be lost");
        return Err(Fault::lasting(why, format!("rbd config {level} remove {of} {key}")));
    }
    Ok(())
}

/// Takes the lock of an image from the client that has it, and shuts that client out. Returns that client.
///
/// # Errors
/// In words for the user.
pub(crate) fn steal(name: &Name) -> Result<Option<String>, Fault> {
    let (_, pool) = connect(name)?;
    let image = open_image(pool, name, false)?;
    let short = name.short();
    let owner = image.owner().map_err(|e| cannot("learn who has the lock of", &short, e))?;
    if let Some(owner) = &owner {
        image.break_lock(owner).map_err(|e| cannot("break the lock of", &short, e))?;
    }
    Ok(owner)
}

/// The name as commands take it.
fn shown(name: &Name) -> String {
    format!("{SCHEME}{name}")
}

/// This client's address as locks have it: the one of the older protocol of the messengers is the same but for its prefix.
fn own_address(cluster: &Cluster, name: &str) -> Result<String, Fault> {
    let all = cluster.addresses().map_err(|e| cannot("learn the own address for", name, e))?;
    let first = all.trim_matches(['[', ']']).split(',').next().unwrap_or_default();
    Ok(first.trim_start_matches("v2:").trim_start_matches("v1:").to_owned())
}

fn connect(name: &Name) -> Result<(&'static Cluster, &'static Pool<'static>), Fault> {
    ffi::load()?;
    let conf = name.conf.to_string_lossy();
    readable(&name.conf, "conf")?;
    if let Some(keyring) = &name.keyring {
        readable(keyring, "keyring")?;
    }
    let client = format!("client.{}", name.id);
    let failed = |what: &str, e: i32| {
        let why = format!("{what} {conf} as {client}: {}", reason(e));
        connecting(&why, e)
    };
    let cluster = Cluster::new(&client).map_err(|e| failed("cannot make a client of", e))?;
    cluster.read_conf(&conf).map_err(|e| failed("cannot read", e))?;
    settings(&cluster, name).map_err(|e| failed("cannot set up the client of", e))?;
    cluster.connect().map_err(|e| failed("cannot connect to the cluster of", e))?;
    // They live as long as the process, which has one image.
    let cluster: &'static Cluster = Box::leak(Box::new(cluster));
    let pool =
        cluster.pool(&name.pool, &name.namespace).map_err(|e| {
            match Errno::from_raw_os_error(e) {
                Errno::NOENT => {
                    let why = format!("the cluster of {conf} has no pool {}", name.pool);
                    Fault::lasting(why, "write rbd:POOL/IMAGE; ceph osd pool ls lists the pools")
                }
                _ => cannot("open the pool", &name.pool, e),
            }
        })?;
    Ok((cluster, Box::leak(Box::new(pool))))
}

/// The settings that a disk depends on, whatever the configuration says.
fn settings(cluster: &Cluster, name: &Name) -> Result<(), i32> {
    let deadline_s = name.deadline.as_secs().to_string();
    let needed = [
        // With the cache an answered write would end with this process.
        ("rbd_cache", "false"),
        // Without these a dead monitor or OSD is waited for without an end.
        ("client_mount_timeout", MOUNT_TIMEOUT_S),
        ("rados_mon_op_timeout", MON_TIMEOUT_S),
        ("rados_osd_op_timeout", &deadline_s),
        // No files and sockets of its own, no lines on standard error.
        ("log_file", ""),
        ("log_to_stderr", "false"),
        ("err_to_stderr", "false"),
        ("admin_socket", ""),
        // Discards smaller than an object's part are zeros: they read as such afterwards.
        ("rbd_skip_partial_discard", "false"),
    ];
    needed.iter().try_for_each(|(key, value)| cluster.set(key, value))?;
    if let Some(keyring) = &name.keyring {
        cluster.set("keyring", &keyring.to_string_lossy())?;
    }
    // Of another name in Ceph 15; the default is the same.
    let _ = cluster.set("rbd_blocklist_on_break_lock", "true");
    Ok(())
}

fn open_image(
    pool: &'static Pool<'static>,
    name: &Name,
    read_only: bool,
) -> Result<Image<'static>, Fault> {
    let short = name.short();
    pool.image(&name.image, name.snapshot.as_deref(), read_only).map_err(|e| {
        match Errno::from_raw_os_error(e) {
            Errno::NOENT => Fault::lasting(
                format!("the cluster has no image {short}"),
                format!("make it (rbd create --size SIZE {short}), or correct its name (rbd ls {})", name.pool),
            ),
            Errno::NOSYS | Errno::OPNOTSUPP => Fault::lasting(
                format!("{short} has features that this librbd does not know"),
                format!("install a newer librbd1, or disable them (rbd info {short}; rbd feature disable)"),
            ),
            _ => cannot("open", &short, e),
        }
    })
}

fn readable(path: &Path, key: &str) -> Result<(), Fault> {
    std::fs::File::open(path).map(drop).map_err(|e| {
        let why = format!("{}: {e}", path.display());
        Fault::lasting(why, format!("name Ceph's file: ?{key}=FILE, which this user may read"))
    })
}

fn connecting(why: &str, errno: i32) -> Fault {
    match Errno::from_raw_os_error(errno) {
        Errno::TIMEDOUT => Fault::passing(
            why,
            "check that the monitors run (ceph -s) and can be reached from here (mon host in the configuration)",
        ),
        Errno::ACCESS | Errno::PERM | Errno::NOENT => Fault::lasting(
            why,
            "check the client's name (id=NAME) and its key (keyring=FILE); ceph auth get client.NAME shows it",
        ),
        _ => Fault::passing(why, "check the configuration and the cluster (ceph -s)"),
    }
}

/// An error number in words.
pub(crate) fn reason(errno: i32) -> String {
    match Errno::from_raw_os_error(errno) {
        Errno::TIMEDOUT => "the cluster does not answer".into(),
        Errno::SHUTDOWN => "this client was shut out of the cluster (blocklisted)".into(),
        e => std::io::Error::from(e).to_string(),
    }
}
