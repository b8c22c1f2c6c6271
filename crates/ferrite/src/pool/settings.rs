//! Where a pool's etcd is: on the command line, or in the table `[pool.NAME]` of the host's configuration.

use std::path::{Path, PathBuf};

use ferrite_daemon::config::{self, CONFIGURED_BY, Config, ConfigError, PoolOptions};
use ferrite_etcd::{Settings, TlsFiles};
use ferrite_helper::Fault;

use super::args::{PoolArgs, PoolCommand};
use crate::exit::{Code, Failure};

/// How etcd is asked about a pool.
///
/// # Errors
/// Neither says it, or the configuration cannot be read.
pub(super) fn of(args: &PoolArgs, pool: &str) -> Result<Settings, Failure> {
    if !args.etcd.is_empty() {
        return Ok(Settings {
            endpoints: args.etcd.clone(),
            tls: args.etcd_tls.clone().map(TlsFiles),
            plain: args.etcd_plain,
            cluster: None,
        });
    }
    let Some(options) = configured(pool).map_err(|e| wrong(pool, &e))? else {
        let why = format!("no address is given, and {} has no pool {pool}", file().display());
        let help = format!("give --etcd URL,URL,URL, or add [pool.{pool}] to the file");
        return Err(Failure::new("cannot ask etcd", why, help).with_code(Code::USAGE));
    };
    // The keys were checked together when the file was read.
    let PoolOptions { etcd, tls, plain, .. } = options;
    Ok(Settings { endpoints: etcd, tls: tls.map(TlsFiles), plain, cluster: None })
}

/// Where etcd is for the process of a disk, and the folder of certificates for etcd and the servers. `None`: without TLS.
///
/// # Errors
/// Errors are in words for the process that opens the disk.
pub(super) fn of_owner(
    args: &PoolArgs,
    pool: &str,
    tls: Option<&Path>,
    plain: bool,
) -> Result<(Vec<String>, Option<PathBuf>), Fault> {
    if !args.etcd.is_empty() {
        return match tls.is_some() || plain {
            true => Ok((args.etcd.clone(), tls.map(Path::to_owned))),
            false => Err(Fault::lasting(
                "it does not say how etcd is spoken to",
                "give --tls DIR or --plain",
            )),
        };
    }
    let shown = file().display().to_string();
    let options =
        configured(pool).map_err(|e| Fault::lasting(e.to_string(), "correct that file"))?;
    let Some(options) = options else {
        let help = format!(
            "add [pool.{pool}] with etcd and tls to it, or write pool:{pool}/DISK?etcd=URL,URL&tls=DIR&experimental=yes"
        );
        return Err(Fault::lasting(format!("{shown} has no pool {pool}"), help));
    };
    match options.experimental || args.experimental {
        true => Ok((options.etcd, options.tls)),
        false => Err(Fault::lasting(
            "disks of a pool are being built, and may fail",
            format!(
                "add experimental = true to [pool.{pool}] in {shown}, or ?experimental=yes to the disk's name"
            ),
        )),
    }
}

/// Refuses to use pools unless the user has said that this may be: on the command line, or for this pool in the configuration.
///
/// # Errors
/// Neither, or the configuration cannot be read.
pub(super) fn must_be_allowed(args: &PoolArgs) -> Result<(), Failure> {
    let pool = args.command.pool();
    // The process of a disk says it to the one that has started it.
    if matches!(args.command, PoolCommand::Own(_)) {
        return Ok(());
    }
    let by_file = || match pool {
        Some(pool) => configured(pool)
            .map(|options| options.is_some_and(|of| of.experimental))
            .map_err(|e| wrong(pool, &e)),
        None => Ok(false),
    };
    if args.experimental || by_file()? {
        return Ok(());
    }
    let help = match pool {
        Some(pool) => format!(
            "to try them, give --experimental, or write experimental = true below [pool.{pool}] in {}",
            file().display()
        ),
        None => "to try them, give --experimental".to_owned(),
    };
    let why = "they are being built, and may fail";
    Err(Failure::new("cannot use pools", why, help).with_code(Code::USAGE))
}

/// The table of a pool.
///
/// # Errors
/// The file cannot be read, or is wrong.
fn configured(pool: &str) -> Result<Option<PoolOptions>, ConfigError> {
    let is_named = std::env::var_os(CONFIGURED_BY).is_some();
    Ok(Config::load(&file(), is_named)?.pools.remove(pool))
}

/// The folder of the records of this host's keys at LUNs.
pub(super) fn fences() -> PathBuf {
    let is_named = std::env::var_os(CONFIGURED_BY).is_some();
    Config::load(&file(), is_named).unwrap_or_default().fence_records()
}

fn wrong(pool: &str, e: &ConfigError) -> Failure {
    let what = format!("cannot learn where the pool {pool} is");
    let help = "correct the file (ferrite daemon --check-config), or give --etcd";
    Failure::new(what, e, help).with_code(Code::USAGE)
}

/// The host's configuration, or the one that the daemon was started with.
fn file() -> PathBuf {
    std::env::var_os(CONFIGURED_BY).map_or(config::PATH.into(), PathBuf::from)
}
