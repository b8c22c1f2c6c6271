//! The socket of the metrics: it gives the daemon's own state besides the counters of disks.

use std::path::Path;

use ferrite_daemon::control::protocol::{self, Disk, JobPhase, PhaseName};
use ferrite_daemon::{Daemon, DaemonView};
use ferrite_seeing::metrics::{Attached, Host, Job, Server, serve_metrics};

use crate::job::kind;

/// The names that `ferrite disk list` uses.
const PHASES: [&str; 6] = ["starting", "served", "failed", "empty", "resting", "paused"];

fn word(phase: PhaseName) -> &'static str {
    match phase {
        PhaseName::Starting => PHASES[0],
        PhaseName::Served => PHASES[1],
        PhaseName::Failed => PHASES[2],
        PhaseName::Empty => PHASES[3],
        PhaseName::Resting => PHASES[4],
        PhaseName::Paused => PHASES[5],
    }
}

/// Serves metrics on the socket. Disks do not need it, so without it the daemon goes on.
pub(super) fn serve(daemon: &Daemon, socket: &Path, stats: &Path) -> Option<Server> {
    let view = daemon.view();
    match serve_metrics(socket, stats, Box::new(move || host(&view))) {
        Ok(server) => Some(server),
        Err(e) => {
            let socket = socket.display();
            tracing::error!(
                "there are no metrics on {socket}: {e}; correct metrics_socket, and restart the daemon"
            );
            None
        }
    }
}

fn host(view: &DaemonView) -> Host {
    let status = view.status();
    Host {
        version: status.version,
        started_unix_s: status.started,
        has_xen: status.xen,
        phases: &PHASES,
        disks: view.disks().into_iter().map(attached).collect(),
        jobs: view.jobs().iter().filter(|job| !job.phase.has_ended()).map(working).collect(),
        ended_jobs: view.ended_jobs(),
    }
}

fn working(job: &protocol::Job) -> Job {
    Job {
        domid: job.disk.domid,
        devid: job.disk.devid,
        kind: kind(job.kind),
        done_bytes: job.done,
        all_bytes: job.all,
        paused: job.phase == JobPhase::Paused,
        troubled: job.why.is_some(),
    }
}

fn attached(disk: Disk) -> Attached {
    Attached {
        domid: disk.disk.domid,
        devid: disk.disk.devid,
        phase: word(disk.phase),
        starts: disk.starts,
        keeper: disk.pid,
        image: disk.image,
        format: disk.format.map(|format| format.word()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_called_what_disk_list_calls_them() {
        for name in PHASES {
            let phase: PhaseName = serde_json::from_str(&format!("{name:?}")).unwrap();
            assert_eq!(word(phase), name);
        }
    }
}
