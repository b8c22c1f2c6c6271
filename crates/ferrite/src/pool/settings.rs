//! Where a pool's etcd is: on the command line, or in the table `[pool.NAME]` of the host's configuration.

use std::path::PathBuf;

use ferrite_daemon::config::{self, CONFIGURED_BY, Config, PoolOptions};
use ferrite_etcd::{Settings, TlsFiles};
use ferrite_nbd::uri::pool::{Access, Security};

use super::args::PoolArgs;
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
    let Some(options) = configured(pool)? else {
        let why = format!("no address is given, and {} has no pool {pool}", file().display());
        let help = format!("give --etcd URL,URL,URL, or add [pool.{pool}] to the file");
        return Err(Failure::new("cannot ask etcd", why, help).with_code(Code::USAGE));
    };
    settings_of(&options)
}

/// Refuses to use pools unless the user has said that this may be: on the command line, or for this pool in the configuration.
///
/// # Errors
/// Neither, or the configuration cannot be read.
pub(super) fn must_be_allowed(args: &PoolArgs, pool: Option<&str>) -> Result<(), Failure> {
    let by_file = || match pool {
        Some(pool) => configured(pool).map(|options| options.is_some_and(|of| of.experimental)),
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

/// The same settings as the configuration has them.
pub(super) fn settings_of(options: &PoolOptions) -> Result<Settings, Failure> {
    // It was checked when the file was read.
    let Access { etcd, security } = options
        .access()
        .map_err(|e| Failure::new("cannot ask etcd", e.why, e.help).with_code(Code::USAGE))?;
    let (tls, plain) = match security {
        Security::Plain => (None, true),
        Security::Tls(folder) => (Some(TlsFiles(folder)), false),
    };
    Ok(Settings { endpoints: etcd, tls, plain, cluster: None })
}

/// The table of a pool.
///
/// # Errors
/// The file cannot be read, or is wrong.
pub(super) fn configured(pool: &str) -> Result<Option<PoolOptions>, Failure> {
    let named = std::env::var_os(CONFIGURED_BY);
    let mut config = Config::load(&file(), named.is_some()).map_err(|e| {
        let what = format!("cannot learn where the pool {pool} is");
        let help = "correct the file (ferrite daemon --check-config), or give --etcd";
        Failure::new(what, e, help).with_code(Code::USAGE)
    })?;
    Ok(config.pools.remove(pool))
}

/// The host's configuration, or the one that the daemon was started with.
fn file() -> PathBuf {
    std::env::var_os(CONFIGURED_BY).map_or(config::PATH.into(), PathBuf::from)
}
