//! Guests whose disks are on servers of NBD. Here the server is domain 0's own, and is reached by TLS as from another host.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::toolstack::{USE, running_guest, xl_knows_us};
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::disk::ended;
use ferrite_xenhost::guest::Guest;
use ferrite_xenhost::steps;

pub(super) const CASES: &[Case] = &[
    ferrite("xl/a-guests-disk-is-on-a-server-by-tls-while-processes-end", by_tls),
    ferrite("xl/a-guests-disk-moves-to-a-server-by-tls-while-processes-end", moves),
];

/// The folders of certificates in domain 0.
pub(crate) const TLS: &str = "/lab/tls";
const IMAGE: &str = "/lab/remote.qcow2";
/// A disk of domain 0 that moves to the server.
const LOCAL: &str = "/lab/local.qcow2";
pub(crate) const SERVER: &str = "127.0.0.1";
/// What the daemon is told of servers.
const TABLES: &str =
    "[nbd]\nservers = [\"127.0.0.1\"]\ncertificate_folders = [\"/lab/tls/client\"]\n";

/// Certificates of an authority for a server and a client, as docs/access.md makes them.
const CERTIFICATES: &str = "
mkdir -p authority server client
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 3650 -subj /CN=ca \
    -keyout authority/ca-key.pem -out authority/ca-cert.pem
sign() { openssl req -x509 -CA authority/ca-cert.pem -CAkey authority/ca-key.pem -newkey ec \
    -pkeyopt ec_paramgen_curve:P-256 -noenc -days 3650 -addext basicConstraints=critical,CA:FALSE \"$@\"; }
sign -subj /CN=server -addext subjectAltName=IP:127.0.0.1 -addext extendedKeyUsage=serverAuth \
    -keyout server/server-key.pem -out server/server-cert.pem
sign -subj /CN=client -addext subjectAltName=DNS:a.example -addext extendedKeyUsage=clientAuth \
    -keyout client/client-key.pem -out client/client-cert.pem
cp authority/ca-cert.pem server
cp authority/ca-cert.pem client
";

/// fio in the guest, which reads what it has written.
const LOAD: &str = "until [ -b /dev/xvdb ]; do sleep 0.2; done; \
     fio --name=remote --filename=/dev/xvdb --size=48m --ioengine=libaio --direct=1 --rw=randrw --bs=4k-64k \
     --iodepth=16 --fsync=32 --randrepeat=1 --verify=crc32c --verify_fatal=1 --verify_backlog=64 --time_based \
     --runtime=40 --minimal";

/// Makes certificates where openssl is, and copies them to domain 0: each is text of a few lines.
pub(crate) fn put_certificates(bench: &mut Bench<'_>) -> Result<()> {
    let folder = steps::target_dir().join("xen-certificates");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let mut bash = Command::new("bash");
    steps::output(bash.args(["-ec", CERTIFICATES]).current_dir(&folder))?;
    // A clock of domain 0 that is behind would find them not valid yet.
    let now = steps::output(Command::new("date").arg("+%s"))?;
    bench.xenhost.sh(&format!("[ $(date +%s) -ge {0} ] || date -s @{0}", now.trim()))?;
    for part in ["server", "client"] {
        bench.xenhost.sh(&format!("mkdir -p {TLS}/{part}"))?;
        for entry in fs::read_dir(folder.join(part))? {
            put(bench, &entry?.path(), &format!("{TLS}/{part}"))?;
        }
    }
    Ok(())
}

fn put(bench: &mut Bench<'_>, from: &Path, to: &str) -> Result<()> {
    let name = from.file_name().and_then(|name| name.to_str()).context("a file without a name")?;
    let text = fs::read_to_string(from)?;
    bench.xenhost.sh(&format!("cat >{to}/{name} <<'EOF'\n{text}EOF")).map(drop)
}

/// Starts the export, and returns its process id.
fn export(bench: &mut Bench<'_>) -> Result<u32> {
    let pid = bench.xenhost.sh(&format!(
        "setsid ferrite export nbd {IMAGE} --listen {SERVER}:10809 --tls {TLS}/server </dev/null \
         >/tmp/remote.log 2>&1 & echo $!"
    ))?;
    bench.xenhost.wait_until("an export", "grep -q 'listening at' /tmp/remote.log", 60)?;
    Ok(pid.parse()?)
}

/// The worker, its tunnel, the daemon and the server end under fio's verification.
fn by_tls(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    put_certificates(bench)?;
    bench.xenhost.sh(&format!("rm -f {IMAGE}; ferrite image create {IMAGE} 64M"))?;
    let mut server = export(bench)?;
    bench.start_daemon_with(TABLES)?;
    let mut guest = running_guest(bench)?;
    refused(bench, &guest)?;
    // The server ends the connections of a worker that was killed: nothing waits for a day.
    let uri = format!("nbds://{SERVER}/?tls-certificates={TLS}/client&drain_s=86400");
    bench.xenhost.sh(&attach(&guest, &uri))?;
    guest.sh(bench.xenhost, USE, 120)?;
    let listed = bench.xenhost.sh("ferrite disk list")?;
    if !listed.contains(&uri) {
        bail!("the disk is not listed by its address:\n{listed}");
    }
    let load = guest.begin(bench.xenhost, LOAD, 180)?;
    for kill in [
        "kill -KILL $(pgrep -f 'ferrite worker ' | head -n 1)",
        "kill -KILL $(pgrep -f 'ferrite tunnel out' | head -n 1)",
    ] {
        bench.xenhost.sh(&format!("sleep 3; {kill}"))?;
    }
    bench.xenhost.sh(&format!("sleep 3; kill -KILL {server}"))?;
    bench.xenhost.wait_until("the end of the server", &ended(server), 60)?;
    server = export(bench)?;
    guest.finish_ok(bench.xenhost, &load).context("fio's verification in the guest")?;
    bench.xenhost.sh(&format!("xl block-detach {} xvdb", guest.name()))?;
    bench.xenhost.sh(&format!("kill -TERM {server}"))?;
    bench.xenhost.wait_until("the end of the server", &ended(server), 60)?;
    let checked = format!("ferrite image check {IMAGE} && rm -r {IMAGE} {TLS} /tmp/remote.log");
    bench.xenhost.sh(&checked).map(drop)
}

/// A disk is mirrored to the server. The server and the worker end under fio's verification. Then the guest goes on with
/// the server's disk.
fn moves(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    put_certificates(bench)?;
    let made = format!(
        "rm -f {IMAGE} {LOCAL}; for i in {IMAGE} {LOCAL}; do ferrite image create $i 64M; done"
    );
    bench.xenhost.sh(&made)?;
    let mut server = export(bench)?;
    bench.start_daemon_with(TABLES)?;
    let mut guest = running_guest(bench)?;
    let uri = format!("nbds://{SERVER}/?tls-certificates={TLS}/client");
    bench.xenhost.sh(&attach(&guest, &format!("qcow2:{LOCAL}")))?;
    guest.sh(bench.xenhost, USE, 120)?;
    let load = guest.begin(bench.xenhost, LOAD, 180)?;
    let disk = format!("{}/xvdb", guest.name());
    // It ends when the target has all.
    bench.xenhost.sh_for(&format!("ferrite mirror {disk} '{uri}'"), 180)?;
    guest.finish_ok(bench.xenhost, &load).context("fio's verification in the guest")?;
    // It writes until the server has come again: only a write notices that the target is gone.
    let load = LOAD.replace("--runtime=40", "--runtime=120");
    let load = guest.begin(bench.xenhost, &load, 400)?;
    let has_all =
        "ferrite job show 1 | grep -q 'step mirror' && ! ferrite job show 1 | grep -q reason";
    bench.xenhost.sh("sleep 2; kill -KILL $(pgrep -f 'ferrite worker ' | head -n 1)")?;
    bench.xenhost.wait_until("a target that has all again", has_all, 60)?;
    bench.xenhost.sh(&format!("sleep 2; kill -KILL {server}"))?;
    bench.xenhost.wait_until("the end of the server", &ended(server), 60)?;
    bench.xenhost.wait_until(
        "a target that fails",
        "ferrite job show 1 | grep -q 'target lacks'",
        60,
    )?;
    server = export(bench)?;
    bench.xenhost.wait_until("a target that has all again", has_all, 90)?;
    bench.xenhost.sh(&format!("ferrite mirror complete {disk}"))?;
    let listed = bench.xenhost.sh("ferrite disk list")?;
    if !listed.contains(&uri) {
        bail!("the disk is not listed by its address:\n{listed}");
    }
    guest.finish_ok(bench.xenhost, &load).context("fio's verification in the guest")?;
    bench.xenhost.sh(&format!("xl block-detach {} xvdb", guest.name()))?;
    bench.xenhost.sh(&format!("kill -TERM {server}"))?;
    bench.xenhost.wait_until("the end of the server", &ended(server), 60)?;
    let checked = format!(
        "ferrite image check {IMAGE} && ferrite image check {LOCAL} && \
         rm -r {IMAGE} {LOCAL} {TLS} /tmp/remote.log"
    );
    bench.xenhost.sh(&checked).map(drop)
}

/// A server that the configuration does not name is refused, and xl prints which key to add.
fn refused(bench: &mut Bench<'_>, guest: &Guest) -> Result<()> {
    let uri = format!("nbds://192.0.2.1/?tls-certificates={TLS}/client");
    let said = bench.xenhost.dom0(&format!("{} 2>&1", attach(guest, &uri)), 90)?;
    if said.status == 0 || !said.stdout.contains("servers below [nbd]") {
        bail!("xl ends with {}: {}", said.status, said.stdout);
    }
    let detached = format!(
        "xl block-detach {} xvdb; xl block-list {0} | grep -c '^51728 ' || true",
        guest.name()
    );
    expect_eq("the disk in xl's list", &bench.xenhost.sh(&detached)?.trim(), &"0")
}

/// Attaches an image, or the disk of a server by its address.
fn attach(guest: &Guest, target: &str) -> String {
    let words = "format=raw,vdev=xvdb,access=w,backendtype=tap,script=block-ferrite,target=";
    format!("xl block-attach {} '{words}{target}'", guest.name())
}
