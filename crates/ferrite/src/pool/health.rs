//! The pools of this host, for `ferrite doctor`.

use ferrite_daemon::config::{Config, PoolOptions};
use ferrite_etcd::{Cluster, Settings, TlsFiles};
use ferrite_host::fence::find;
use ferrite_pool_map::{Access, State};

use super::status::Status;

/// A finding about a pool.
pub(crate) struct Finding {
    /// Whether there is nothing to do.
    pub(crate) is_good: bool,
    pub(crate) found: String,
    /// The consequence, or the next step.
    pub(crate) means: String,
}

/// Looks at each pool that the configuration names.
pub(crate) fn of_configured(config: &Config) -> Vec<Finding> {
    config.pools.iter().flat_map(|(name, options)| of_pool(name, options)).collect()
}

fn of_pool(name: &str, options: &PoolOptions) -> Vec<Finding> {
    let PoolOptions { etcd, tls, plain, .. } = options.clone();
    let settings = Settings { endpoints: etcd, tls: tls.map(TlsFiles), plain, cluster: None };
    let state = Cluster::new(&settings)
        .map_err(|e| e.to_string())
        .and_then(|cluster| Access::new(cluster, name).map_err(|e| e.to_string()))
        .and_then(|access| access.state().map_err(|e| e.to_string()));
    match state {
        Ok(state) => of_state(name, &state),
        Err(why) => vec![Finding {
            is_good: false,
            found: format!("pool {name}: {why}"),
            means: "open disks go on; none is opened, replaced or dropped until etcd answers: see whether it runs, and has a quorum"
                .to_owned(),
        }],
    }
}

fn of_state(name: &str, state: &State) -> Vec<Finding> {
    let mut all = Vec::new();
    let mut bad = |found: String, means: &str| {
        all.push(Finding {
            is_good: false,
            found: format!("pool {name}: {found}"),
            means: means.to_owned(),
        });
    };
    let status = Status::of(name, state);
    for disk in status.disks.iter().filter(|disk| !disk.whole) {
        let means = "its owner fills them when their servers are back; of a server that is lost: ferrite pool replace";
        bad(format!("copies of {} are missing", disk.name), means);
    }
    for server in status.silent() {
        bad(
            format!("the server {server} has copies, and does not answer"),
            "start ferrite pool serve there; if it is lost: ferrite pool replace",
        );
    }
    for (lun, of) in &state.luns {
        if find(&of.wwid, &of.device).is_none() {
            let means = "log in to its target: iscsiadm -m node --login, nvme connect";
            bad(format!("this host does not have the LUN {lun} ({})", of.wwid), means);
        }
        if of.weak {
            let means = "two hosts may write to it when its target has started again";
            bad(format!("the target of the LUN {lun} forgets reservations"), means);
        }
    }
    for (key, why) in &state.odd {
        bad(format!("the key {key} of etcd: {why}"), "see which program has written it");
    }
    if all.is_empty() {
        let (servers, disks) = (state.servers.len(), state.disks.len());
        let found =
            format!("pool {name}: servers: {servers}, disks: {disks}, all copies are in sync");
        all.push(Finding { is_good: true, found, means: String::new() });
    }
    all
}
