//! A pool in domain 0 (docs/distributed.md): an etcd, and servers, each a host by its address.

use std::path::PathBuf;

use anyhow::Result;
use ferrite_xenhost::{Program, steps};

use super::Bench;

/// What the daemon and the commands are told of it.
pub(crate) const TABLE: &str =
    "[pool.lab]\netcd = [\"http://127.0.0.1:2379\"]\nplain = true\nexperimental = true\n";

/// etcd is a program of its own, and that of this machine runs in domain 0.
const ETCD: &str = "/usr/bin/etcd";

/// etcd for domain 0, if this machine has it.
pub(crate) fn etcd() -> Option<Program> {
    let file = PathBuf::from(ETCD);
    file.exists().then_some(Program { name: "etcd", file })
}

/// Whether domain 0 has etcd; otherwise the test is left out, which is told.
pub(super) fn has_etcd(bench: &mut Bench<'_>) -> Result<bool> {
    let found = bench.xenhost.dom0("command -v etcd", 30)?.status == 0;
    if !found {
        steps::say("left out: this domain 0 has no etcd");
    }
    Ok(found)
}

/// Starts etcd, makes the pool, and starts servers with these names. The daemon's configuration has the table already.
pub(crate) fn start(bench: &mut Bench<'_>, servers: &[&str]) -> Result<()> {
    bench.xenhost.sh_for(
        "ip link set lo up
         setsid etcd --data-dir /lab/etcd </dev/null >/tmp/etcd.log 2>&1 &
         for i in $(seq 100); do ferrite pool init lab --json >/lab/pool.json 2>/tmp/init.log && break; sleep 0.5; done
         cat /tmp/init.log; test -s /lab/pool.json",
        120,
    )?;
    servers.iter().try_for_each(|name| serve(bench, name))
}

/// Starts a server, or starts it again, and waits until the pool knows it.
pub(crate) fn serve(bench: &mut Bench<'_>, name: &str) -> Result<()> {
    let number = name.as_bytes().first().map_or(0, |letter| letter - b'a') + 2;
    bench.xenhost.sh_for(
        &format!(
            "mkdir -p /lab/server-{name}
             id=$(grep -oE '[0-9a-f]{{32}}' /lab/pool.json)
             setsid ferrite pool serve /lab/server-{name} --name {name} --pool $id --listen 127.0.0.{number}:10811 --plain \
             --etcd http://127.0.0.1:2379 --etcd-plain --experimental </dev/null >>/tmp/server-{name}.log 2>&1 &
             echo $! >/tmp/server-{name}.pid
             for i in $(seq 100); do ferrite pool status lab | grep -q 'server {name}: 127' && break; sleep 0.3; done
             ferrite pool status lab | grep 'server {name}: 127'"
        ),
        120,
    )?;
    Ok(())
}

/// Kills a server.
pub(crate) fn kill(bench: &mut Bench<'_>, name: &str) -> Result<()> {
    bench.xenhost.sh(&format!("kill -KILL $(cat /tmp/server-{name}.pid)")).map(drop)
}

/// Waits until all copies of the disks are in sync.
pub(crate) fn until_whole(bench: &mut Bench<'_>) -> Result<()> {
    let whole = "s=$(ferrite pool status lab) && echo \"$s\" | grep -q 'in sync' && \
                 ! echo \"$s\" | grep -E 'copies are missing|: out|: new'";
    bench.xenhost.wait_until("all copies in sync", whole, 120)
}

/// Ends all of it.
pub(crate) fn stop(bench: &mut Bench<'_>) -> Result<()> {
    let end = "for p in /tmp/server-*.pid; do kill -TERM $(cat $p) 2>/dev/null; done
               kill -KILL $(pgrep -x etcd); rm -rf /lab/etcd /lab/server-* /lab/pool.json /tmp/server-* /run/ferrite/pool";
    bench.xenhost.dom0(end, 60).map(drop)
}
