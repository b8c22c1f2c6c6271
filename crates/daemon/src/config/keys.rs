//! The keys of the configuration: their valid values and where they are stored.

use std::path::{Path, PathBuf};

use ferrite_nbd::uri::{BadUri, Uri};
use ferrite_serve::memory::DataMemory;
use toml::{Table, Value};

use super::{
    Config, DiskOptions, HostOptions, MigrationOptions, NbdOptions, PoolOptions, RbdOptions,
    clusters, migration, nearest, pools, servers,
};

/// The default of `image_folders`.
pub(super) const IMAGE_FOLDERS: [&str; 4] =
    ["/srv", "/var/lib/xen/images", "/dev", "/run/sr-mount"];

/// An invalid key.
#[derive(Debug)]
pub(super) struct KeyError {
    pub(super) key: String,
    pub(super) why: String,
    pub(super) allowed: String,
}

/// A key of one kind of table. `take` stores a value, and returns `false` if it is invalid.
struct Key<T> {
    name: &'static str,
    allowed: &'static str,
    take: fn(&mut T, &Value) -> bool,
}

const FOLDERS: &str = "a list of absolute paths, such as [\"/srv/images\"]";

/// The default directory of what outlives the host's restart.
pub(super) const STATE_FOLDER: &str = "/var/lib/ferrite";

const TOP: [Key<Config>; 4] = [
    Key {
        name: "image_folders",
        allowed: FOLDERS,
        take: |config, value| put(&mut config.image_folders, folders(value)),
    },
    Key {
        name: "metrics_socket",
        allowed: "an absolute path of at most 107 bytes, such as \"/run/ferrite/metrics.sock\"",
        take: |config, value| put(&mut config.metrics_socket, socket(value).map(Some)),
    },
    Key {
        name: "parent_folders",
        allowed: FOLDERS,
        take: |config, value| put(&mut config.parent_folders, folders(value)),
    },
    Key {
        name: "state_folder",
        allowed: "an absolute path, such as \"/var/lib/ferrite\"",
        take: |config, value| {
            let path = value.as_str().map(PathBuf::from).filter(|path| is_folder(path));
            put(&mut config.state_folder, path)
        },
    },
];

const TABLES: [&str; 7] = ["disks", "host", "images", "migration", "nbd", "pool", "rbd"];

const MIGRATION: [Key<MigrationOptions>; 7] = [
    Key {
        name: "listen",
        allowed: "an IP address with a port, such as \"192.0.2.5:10810\"",
        take: |to, value| put(&mut to.listen, migration::listen(value).map(Some)),
    },
    Key {
        name: "certificates",
        allowed: "an absolute path of a folder, such as \"/etc/ferrite/tls\"",
        take: |to, value| put(&mut to.certificates, folder(value).map(Some)),
    },
    Key {
        name: "folder",
        allowed: "an absolute path of a folder, such as \"/srv/images\"",
        take: |to, value| put(&mut to.folder, folder(value).map(Some)),
    },
    Key {
        name: "from",
        allowed: "a list of names of hosts, as their certificates have them, such as [\"a.example\"]",
        take: |to, value| put(&mut to.from, migration::from(value)),
    },
    Key {
        name: "ports",
        allowed: "the first and the last port, such as [49152, 49215], or [0, 0] for any that is free",
        take: |to, value| put(&mut to.ports, migration::ports(value)),
    },
    Key {
        name: "bases",
        allowed: "a list of names of images in folder, such as [\"golden.qcow2\"]",
        take: |to, value| put(&mut to.bases, migration::bases(value)),
    },
    Key {
        name: "hosts",
        allowed: "a table of names, such as { b = \"b.example:10810\" }",
        take: |to, value| put(&mut to.hosts, migration::hosts(value)),
    },
];

const NBD: [Key<NbdOptions>; 2] = [
    Key {
        name: "servers",
        allowed: servers::ALLOWED,
        take: |nbd, value| put(&mut nbd.servers, servers::of_list(value)),
    },
    Key {
        name: "certificate_folders",
        allowed: FOLDERS,
        take: |nbd, value| put(&mut nbd.certificate_folders, folders(value)),
    },
];

const RBD: [Key<RbdOptions>; 2] = [
    Key {
        name: "pools",
        allowed: clusters::ALLOWED,
        take: |rbd, value| put(&mut rbd.pools, clusters::of_list(value)),
    },
    Key {
        name: "folders",
        allowed: FOLDERS,
        take: |rbd, value| put(&mut rbd.folders, folders(value)),
    },
];

const POOL: [Key<PoolOptions>; 4] = [
    Key {
        name: "etcd",
        allowed: "a list of addresses, such as [\"https://a.example:2379\"]",
        take: |pool, value| put(&mut pool.etcd, pools::addresses(value)),
    },
    Key {
        name: "tls",
        allowed: "an absolute path of a folder, such as \"/etc/ferrite/tls\"",
        take: |pool, value| put(&mut pool.tls, folder(value).map(Some)),
    },
    Key {
        name: "plain",
        allowed: "true or false",
        take: |pool, value| put(&mut pool.plain, value.as_bool()),
    },
    Key {
        name: "experimental",
        allowed: "true or false",
        take: |pool, value| put(&mut pool.experimental, value.as_bool()),
    },
];

const HOST: [Key<HostOptions>; 3] = [
    Key {
        name: "map_budget",
        allowed: "a number of pages, from 0 to 16777216",
        take: |host, value| put(&mut host.map_budget, number(value, 0, 1 << 24)),
    },
    Key {
        name: "poll_processors",
        allowed: "a number of processors, from 0 to 4096",
        take: |host, value| put(&mut host.poll_processors, number(value, 0, 4096).map(Some)),
    },
    Key {
        name: "memory_mib",
        allowed: "a number of MiB, from 0 to 1048576",
        take: |host, value| put(&mut host.memory_mib, number(value, 0, 1 << 20).map(Some)),
    },
];

const DISK: [Key<DiskOptions>; 19] = [
    Key {
        name: "queues",
        allowed: "a number from 1 to 64",
        take: |disk, value| put(&mut disk.queues, number(value, 1, 64)),
    },
    Key {
        name: "ring_order",
        allowed: "a number from 0 to 4: rings have 2^N pages",
        take: |disk, value| put(&mut disk.ring_order, number(value, 0, 4)),
    },
    Key {
        name: "indirect",
        allowed: "a number of segments, from 0 to 256",
        take: |disk, value| put(&mut disk.indirect, number(value, 0, 256).map(|n| n as u16)),
    },
    Key {
        name: "engine",
        allowed: "\"auto\", \"uring\" or \"aio\"",
        take: |disk, value| put(&mut disk.engine, word(value)),
    },
    Key {
        name: "poll_storage",
        allowed: "true or false",
        take: |disk, value| put(&mut disk.poll_storage, value.as_bool()),
    },
    Key {
        name: "mover",
        allowed: "\"copy\", \"map\" or \"persistent\"",
        take: |disk, value| put(&mut disk.mover, word(value)),
    },
    Key {
        name: "own_grants",
        allowed: "true or false",
        take: |disk, value| put(&mut disk.own_grants, value.as_bool()),
    },
    Key {
        name: "map_budget",
        allowed: "a number of pages, from 0 to 16777216",
        take: |disk, value| put(&mut disk.map_budget, number(value, 0, 1 << 24)),
    },
    Key {
        name: "on_full",
        allowed: "\"error\" or \"wait\"",
        take: |disk, value| put(&mut disk.on_full, word(value)),
    },
    Key {
        name: "keep_allocated",
        allowed: "true or false",
        take: |disk, value| put(&mut disk.keep_allocated, value.as_bool()),
    },
    Key {
        name: "fence",
        allowed: "\"none\", \"reservation\" or \"weak-reservation\"",
        take: |disk, value| put(&mut disk.fence, word(value)),
    },
    Key {
        name: "memory_mib",
        allowed: "\"auto\", or a number of MiB, from 1 to 2048",
        take: |disk, value| {
            let memory = match value.as_str() {
                Some(text) => (text == "auto").then_some(DataMemory::Auto),
                None => number(value, 1, 2048).map(|mib| DataMemory::Bytes((mib as usize) << 20)),
            };
            put(&mut disk.memory, memory)
        },
    },
    Key {
        name: "metadata_memory_mib",
        allowed: "a number of MiB, from 1 to 65536",
        take: |disk, value| put(&mut disk.metadata_memory_mib, number(value, 1, 1 << 16)),
    },
    Key {
        name: "index_memory_mib",
        allowed: "a number of MiB, from 1 to 65536",
        take: |disk, value| put(&mut disk.index_memory_mib, number(value, 1, 1 << 16)),
    },
    Key {
        name: "poll_us",
        allowed: "\"auto\", or a number of microseconds",
        take: |disk, value| {
            let text = match value {
                Value::Integer(us) => us.to_string(),
                Value::String(text) => text.clone(),
                _ => return false,
            };
            put(&mut disk.poll, text.parse().ok())
        },
    },
    Key {
        name: "poll_cpu",
        allowed: "percent of a processor, from 0 to 6400",
        take: |disk, value| put(&mut disk.poll_cpu, number(value, 0, 6400)),
    },
    Key {
        name: "cpu",
        allowed: "percent of a processor, from 1 to 6400",
        take: |disk, value| put(&mut disk.cpu, number(value, 1, 6400).map(Some)),
    },
    Key {
        name: "merge",
        allowed: "true or false",
        take: |disk, value| put(&mut disk.merge, value.as_bool()),
    },
    Key {
        name: "limit",
        allowed: "\"none\", or limits in a second as in \"iops=500,bytes_write=10485760\", with a \
                  burst behind a colon; there are iops, iops_read, iops_write, bytes, bytes_read \
                  and bytes_write",
        take: |disk, value| put(&mut disk.limits, word(value)),
    },
];

/// All keys of a disk with their values, formatted as in the file.
pub(super) fn values(disk: &DiskOptions) -> [(&'static str, String); DISK.len()] {
    let poll = disk.poll.to_string();
    let cpu = disk.cpu.map_or_else(|| "-".to_owned(), |percent| percent.to_string());
    let memory = match disk.memory {
        DataMemory::Auto => disk.memory.to_string(),
        DataMemory::Bytes(bytes) => (bytes >> 20).to_string(),
    };
    [
        ("queues", disk.queues.to_string()),
        ("ring_order", disk.ring_order.to_string()),
        ("indirect", disk.indirect.to_string()),
        ("engine", disk.engine.to_string()),
        ("poll_storage", disk.poll_storage.to_string()),
        ("mover", disk.mover.to_string()),
        ("own_grants", disk.own_grants.to_string()),
        ("map_budget", disk.map_budget.to_string()),
        ("on_full", disk.on_full.to_string()),
        ("keep_allocated", disk.keep_allocated.to_string()),
        ("fence", disk.fence.to_string()),
        ("memory_mib", memory),
        ("metadata_memory_mib", disk.metadata_memory_mib.to_string()),
        ("index_memory_mib", disk.index_memory_mib.to_string()),
        ("poll_us", poll),
        ("poll_cpu", disk.poll_cpu.to_string()),
        ("cpu", cpu),
        ("merge", disk.merge.to_string()),
        ("limit", disk.limits.to_string()),
    ]
}

/// Parses the whole file.
pub(super) fn take_all(config: &mut Config, file: &Table) -> Result<(), KeyError> {
    let known: Vec<&str> = TOP.iter().map(|key| key.name).chain(TABLES).collect();
    for (name, value) in file.iter().filter(|(name, _)| !TABLES.contains(&name.as_str())) {
        take(config, &TOP, &known, "", name, value)?;
    }
    if let Some(value) = file.get("host") {
        take_table(&mut config.host, &HOST, "host", value)?;
    }
    if let Some(value) = file.get("disks") {
        take_table(&mut config.disks, &DISK, "disks", value)?;
    }
    if let Some(value) = file.get("nbd") {
        take_table(&mut config.nbd, &NBD, "nbd", value)?;
    }
    if let Some(value) = file.get("migration") {
        take_table(&mut config.migration, &MIGRATION, "migration", value)?;
    }
    if let Some(value) = file.get("rbd") {
        take_table(&mut config.rbd, &RBD, "rbd", value)?;
    }
    if let Some(value) = file.get("pool") {
        for (name, value) in table("pool", value)? {
            let (key, mut options) = (format!("pool.{name}"), PoolOptions::default());
            take_table(&mut options, &POOL, &key, value)?;
            if let Err(BadUri { why, help }) = pools::check_table(name, &options) {
                return Err(KeyError { key, why, allowed: help });
            }
            config.pools.insert(name.clone(), options);
        }
    }
    // Images come after `disks`: an image has its values for each key that it does not set.
    if let Some(value) = file.get("images") {
        for (path, value) in table("images", value)? {
            let key = format!("images.{path:?}");
            if !is_folder(Path::new(path)) && Uri::parse(path).is_err() {
                let why = "an image is named by its absolute path, an export by its URI".to_owned();
                let allowed = "write [images.\"/srv/images/disk.vhd\"]".to_owned();
                return Err(KeyError { key, why, allowed });
            }
            let mut options = config.disks.clone();
            take_table(&mut options, &DISK, &key, value)?;
            config.images.insert(PathBuf::from(path), options);
        }
    }
    Ok(())
}

fn table<'a>(key: &str, value: &'a Value) -> Result<&'a Table, KeyError> {
    value.as_table().ok_or_else(|| KeyError {
        key: key.to_owned(),
        why: format!("{} is not a table", shown(value)),
        allowed: format!("write [{key}], and its keys below"),
    })
}

fn take_table<T>(to: &mut T, keys: &[Key<T>], prefix: &str, value: &Value) -> Result<(), KeyError> {
    let known: Vec<&str> = keys.iter().map(|key| key.name).collect();
    let table = table(prefix, value)?;
    table.iter().try_for_each(|(name, value)| take(to, keys, &known, prefix, name, value))
}

fn take<T>(
    to: &mut T,
    keys: &[Key<T>],
    known: &[&str],
    prefix: &str,
    name: &str,
    value: &Value,
) -> Result<(), KeyError> {
    let path = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
    let Some(key) = keys.iter().find(|key| key.name == name) else {
        let meant = nearest(name, known.iter().copied());
        return Err(KeyError {
            key: path,
            why: "there is no such key".to_owned(),
            allowed: match (meant, elsewhere(name)) {
                (_, Some(place)) => format!("write it {place}"),
                (Some(meant), None) => format!("did you mean {meant}?"),
                (None, None) => format!("there are {}", known.join(", ")),
            },
        });
    };
    match (key.take)(to, value) {
        true => Ok(()),
        false => Err(KeyError {
            key: path,
            why: format!("{} is not valid here", shown(value)),
            allowed: format!("it takes {}", key.allowed),
        }),
    }
}

/// The table that a key belongs to, if it stands in a wrong one.
fn elsewhere(name: &str) -> Option<&'static str> {
    let of_disks = DISK.iter().any(|key| key.name == name);
    let of_host = HOST.iter().any(|key| key.name == name);
    if NBD.iter().any(|key| key.name == name) {
        return Some("below [nbd]");
    }
    if MIGRATION.iter().any(|key| key.name == name) {
        return Some("below [migration]");
    }
    if POOL.iter().any(|key| key.name == name) {
        return Some("below [pool.NAME]");
    }
    match (of_disks, of_host) {
        (true, true) => Some("below [host] for all disks together, below [disks] for each"),
        (true, false) => {
            Some("below [disks], or below [images.\"/srv/images/disk.vhd\"] for one image")
        }
        (false, true) => Some("below [host]"),
        (false, false) => {
            TOP.iter().any(|key| key.name == name).then_some("before the first table")
        }
    }
}

/// A value as it was written, shortened if it is long.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(64) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn put<T>(to: &mut T, value: Option<T>) -> bool {
    value.map(|value| *to = value).is_some()
}

fn number(value: &Value, least: u32, most: u32) -> Option<u32> {
    let number = value.as_integer().and_then(|n| u32::try_from(n).ok());
    number.filter(|n| (least..=most).contains(n))
}

fn word<T: std::str::FromStr>(value: &Value) -> Option<T> {
    value.as_str().and_then(|text| text.parse().ok())
}

fn folder(value: &Value) -> Option<PathBuf> {
    value.as_str().map(PathBuf::from).filter(|path| is_folder(path))
}

fn folders(value: &Value) -> Option<Vec<PathBuf>> {
    let list = value.as_array()?.iter();
    let list = list.map(|entry| entry.as_str().map(PathBuf::from).filter(|path| is_folder(path)));
    list.collect()
}

/// A valid path of a Unix socket.
fn socket(value: &Value) -> Option<PathBuf> {
    let path = value.as_str().filter(|path| path.len() <= 107 && !path.contains('\0'));
    path.map(PathBuf::from).filter(|path| is_folder(path))
}

/// Whether a path is absolute and has no `..`: it is compared with resolved paths, which have none.
pub(super) fn is_folder(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == std::path::Component::ParentDir)
}

#[cfg(test)]
pub(super) fn of_disks() -> Vec<&'static str> {
    DISK.iter().map(|key| key.name).collect()
}

#[cfg(test)]
pub(super) fn names() -> Vec<&'static str> {
    let disk = DISK.iter().map(|key| key.name).chain(HOST.iter().map(|key| key.name));
    let disk = disk.chain(NBD.iter().map(|key| key.name));
    let disk = disk.chain(MIGRATION.iter().map(|key| key.name));
    let disk = disk.chain(RBD.iter().map(|key| key.name)).chain(POOL.iter().map(|key| key.name));
    disk.chain(TOP.iter().map(|key| key.name)).chain(TABLES).collect()
}
