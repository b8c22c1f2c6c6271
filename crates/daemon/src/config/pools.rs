//! The pools of servers whose disks this host may have, and where each pool's etcd is. Without an entry there are none: what a
//! toolstack writes into a disk's target must not make this host ask whatever it names.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ferrite_nbd::uri::BadUri;
use ferrite_nbd::uri::pool::{Access, Disk, Security, is_name};
use toml::Value;

use crate::Failure;

/// The environment variable that names the configuration in which a pool's disks are looked up, if it is not
/// `/etc/ferrite/ferrite.toml`: the daemon gives it to its processes.
pub const CONFIGURED_BY: &str = "FERRITE_CONFIG";

/// One pool: the table `[pool.NAME]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    /// The addresses of etcd's servers.
    pub etcd: Vec<String>,
    /// The folder of certificates, for etcd and the pool's servers.
    pub tls: Option<PathBuf>,
    /// Without TLS.
    pub plain: bool,
    /// Its disks may be used although pools are being built.
    pub experimental: bool,
}

impl PoolOptions {
    /// How etcd and the servers are reached.
    ///
    /// # Errors
    /// The keys contradict each other, or one is missing.
    pub fn access(&self) -> Result<Access, BadUri> {
        let bad = |why: &str, help: &str| BadUri { why: why.to_owned(), help: help.to_owned() };
        let security = match (&self.tls, self.plain) {
            (Some(folder), false) => Security::Tls(folder.clone()),
            (None, true) => Security::Plain,
            (Some(_), true) => {
                return Err(bad("it is encrypted and plain at once", "leave plain out, or tls"));
            }
            (None, false) => {
                let help =
                    "add tls = \"DIR\"; or, on a network that only trusted hosts use, plain = true";
                return Err(bad("it does not say how etcd and the servers are spoken to", help));
            }
        };
        Access::new(self.etcd.clone(), security)
    }
}

/// Checks that a disk of a pool may be a guest's disk.
///
/// # Errors
/// Its pool has no table, the name says where etcd is, or `experimental = true` is missing.
pub(super) fn check(pools: &BTreeMap<String, PoolOptions>, disk: &Disk) -> Result<(), Failure> {
    let pool = &disk.pool;
    let Some(options) = pools.get(pool) else {
        return Err(Failure {
            why: format!("the daemon's configuration has no pool {pool}"),
            help: format!(
                "add [pool.{pool}] with etcd and tls to it (docs/distributed.md) and restart the daemon"
            ),
        });
    };
    if disk.access.is_some() {
        return Err(Failure {
            why: "its name says where the pool's etcd is, which the daemon's configuration says"
                .to_owned(),
            help: format!("leave etcd, tls and plain out: pool:{}", disk.short()),
        });
    }
    match options.experimental || disk.experimental {
        true => Ok(()),
        false => Err(Failure {
            why: "disks of a pool are being built, and may fail".to_owned(),
            help: format!(
                "add experimental = true to [pool.{pool}] in the daemon's configuration and restart the daemon"
            ),
        }),
    }
}

/// The value of `etcd`.
pub(super) fn addresses(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|entry| entry.as_str().map(str::to_owned)).collect()
}

/// Checks a table when it is read: its name and its keys together.
///
/// # Errors
/// The error, and the next step.
pub(super) fn check_table(name: &str, options: &PoolOptions) -> Result<(), BadUri> {
    match is_name(name) {
        true => options.access().map(drop),
        false => Err(BadUri {
            why: "it is no name of a pool".to_owned(),
            help: "names have 1 to 40 of a-z, 0-9, \"-\" and \"_\"".to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_may_be_in_a_listed_pool_and_its_name_names_no_etcd() {
        let of = |experimental| PoolOptions {
            etcd: vec!["http://h:1".into()],
            plain: true,
            experimental,
            tls: None,
        };
        let pools = [("lab".to_owned(), of(true)), ("new".to_owned(), of(false))].into();
        let check = |text: &str| {
            let disk = Disk::parse(text).unwrap();
            check(&pools, &disk).map_err(|refused| format!("{}; {}", refused.why, refused.help))
        };
        for name in ["lab/a", "new/a?experimental=yes"] {
            assert_eq!(check(name), Ok(()), "{name}");
        }
        for (name, cure) in [
            ("other/a?experimental=yes", "add [pool.other]"),
            ("new/a", "experimental = true to [pool.new]"),
            ("lab/a?etcd=http://h:1&plain=yes&experimental=yes", "leave etcd"),
        ] {
            let why = check(name).unwrap_err();
            assert!(why.contains(cure), "{name}: {why}");
        }
    }
}
