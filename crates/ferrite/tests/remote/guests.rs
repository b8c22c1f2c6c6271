//! Guests whose disks are exports of other servers: ours, nbdkit and qemu-nbd. The guest verifies all that it reads.

use std::fs;
use std::process::Command;

use ferrite_daemon::control::protocol::PhaseName;
use ferrite_testkit::wait_until;
use rustix::process::Signal;

use crate::deep;
use crate::far::{At, Far, Server, free_port};
use crate::tls::Pki;

/// With a server of another program each successor would wait for `drain_s`, here a day. Our server is told which
/// client uses the disk.
#[test]
fn a_disk_on_our_server_survives_its_worker_keeper_and_daemon_and_its_server() {
    let mut far = Far::new(&[]);
    let (image, socket) = (far.image("disk.img"), far.path("nbd.sock"));
    let server = Server::ours(&image, At::Socket(&socket), &[]);
    let (disk, load) = far.load(&far.uri("nbd.sock", "&drain_s=86400"));
    far.kill_worker(&disk);
    load.wait_for_progress();
    far.kill_keeper(&disk);
    load.wait_for_progress();
    far.restart();
    load.wait_for_progress();
    drop(server);
    let _server = Server::ours(&image, At::Socket(&socket), &[]);
    load.wait_for_progress();
    let shown = far.host.show(&disk).unwrap().disk;
    assert!(shown.image.unwrap().starts_with("nbd+unix:///?socket="));
    assert_eq!(load.errors(), 0);
    far.end(&disk, load);
}

#[test]
fn disks_by_tls_of_each_server_survive_their_worker_and_their_tunnel() {
    let Some(pki) = Pki::new() else { return };
    let folder = pki.path("server");
    let tls = folder.to_str().unwrap();
    let (ports, certificates) =
        ([(); 3].map(|()| free_port()), format!("--tls-certificates={tls}"));
    let far =
        Far::new(&ports.map(|port| format!("127.0.0.1:{port}")).each_ref().map(String::as_str));
    let at = |i: usize| At::Port("127.0.0.1", ports[i]);
    let mut kit = Command::new("nbdkit");
    kit.args(["-f", "-i", "127.0.0.1", "-p", &ports[1].to_string(), "--tls=require"]);
    kit.args(["--tls-verify-peer", &certificates, "memory", &deep::BYTES.to_string()]);
    let mut qemu = Command::new("qemu-nbd");
    let object = format!("tls-creds-x509,id=t,endpoint=server,dir={tls},verify-peer=yes");
    qemu.args(["--object", &object, "--tls-creds", "t", "-b", "127.0.0.1", "-t", "-e", "8"]);
    qemu.args(["-p", &ports[2].to_string(), "-f", "raw"]).arg(far.image("qemu.img"));
    let servers = [
        Some(Server::ours(&far.image("ours.img"), at(0), &["--tls", tls])),
        Server::start(kit, at(1)),
        Server::start(qemu, at(2)),
    ];
    let client = pki.path("client");
    for (i, _) in servers.iter().enumerate().filter(|(_, server)| server.is_some()) {
        let port = ports[i];
        let uri =
            format!("nbds://127.0.0.1:{port}/?tls-certificates={}&drain_s=0", client.display());
        let (disk, load) = far.load(&uri);
        far.kill_worker(&disk);
        load.wait_for_progress();
        assert!(far.kill_tunnels(&disk) > 0);
        load.wait_for_progress();
        assert_eq!(load.errors(), 0);
        load.end();
        far.host.detach(&disk);
        far.host.wait_for_no_disks();
    }
    far.host.end_processes();
}

#[test]
fn a_disk_whose_server_is_not_there_waits_for_it_and_says_so_and_one_that_is_not_allowed_is_refused()
 {
    let far = Far::new(&[]);
    let (image, socket) = (far.image("disk.img"), far.path("nbd.sock"));
    let disk = far.host.attach(1, 0, &far.uri("nbd.sock", ""));
    let failed = far.host.wait_for_phase(&disk, PhaseName::Failed);
    let why = failed.why.unwrap();
    assert!(why.contains("there is no socket"), "{why}");
    // The toolstack finds it where it finds that an image is missing.
    wait_until("an error in xenstore", || {
        let error =
            far.host.store().read_string("/local/domain/0/error/backend/vbd3/1/51712/error");
        error.is_ok_and(|error| error.is_some_and(|error| error.contains("there is no socket")))
    });
    let _server = Server::ours(&image, At::Socket(&socket), &[]);
    far.host.wait_for_phase(&disk, PhaseName::Served);
    let load = deep::Deep::start(far.host.connect(&disk));
    load.wait_for_progress();
    let elsewhere = far.host.attach(1, 1, "nbd://192.0.2.1/?plain=yes");
    let failed = far.host.wait_for_phase(&elsewhere, PhaseName::Failed);
    let (why, help) = (failed.why.unwrap(), failed.help.unwrap());
    assert!(why.contains("does not allow disks of the server 192.0.2.1:10809"), "{why}");
    assert!(help.contains("add \"192.0.2.1:10809\" to servers below [nbd]"), "{help}");
    far.host.detach(&elsewhere);
    // A pool of a cluster that the configuration does not list is refused before any process reads the files in its name.
    let elsewhere = far.host.attach(1, 2, "aio:rbd:p/i?conf=/nonexistent");
    let failed = far.host.wait_for_phase(&elsewhere, PhaseName::Failed);
    let help = failed.help.unwrap();
    assert!(help.contains("add \"p\" to pools below [rbd]"), "{help}");
    far.host.detach(&elsewhere);
    // A pool that the configuration does not list is refused, even if the name says where its etcd is.
    let name = "aio:pool:p/d?etcd=http://192.0.2.1:1&plain=yes&experimental=yes";
    let elsewhere = far.host.attach(1, 3, name);
    let failed = far.host.wait_for_phase(&elsewhere, PhaseName::Failed);
    assert!(failed.help.unwrap().contains("add [pool.p]"), "{:?}", failed.why);
    far.host.detach(&elsewhere);
    far.end(&disk, load);
}

#[test]
fn a_guest_gets_the_servers_errors_and_the_disk_goes_on() {
    let far = Far::new(&[]);
    let (switch, size) = (far.path("errors"), deep::BYTES.to_string());
    let filters =
        ["--filter=error", "--filter=delay", "--filter=blocksize-policy", "memory", &size];
    let when = format!("error-file={}", switch.display());
    let settings =
        ["error=EIO", "error-pread-rate=50%", "error-pwrite-rate=50%", &when, "wdelay=1ms"];
    let policy = [
        "blocksize-minimum=4096",
        "blocksize-preferred=65536",
        "blocksize-maximum=65536",
        "blocksize-error-policy=error",
    ];
    let args = [&filters[..], &settings, &policy].concat();
    let Some(_server) = Server::nbdkit(&far.path("kit"), &args) else { return };
    let (disk, load) = far.load(&far.uri("kit", ""));
    assert_eq!(load.errors(), 0);
    fs::write(&switch, "").unwrap();
    wait_until("errors", || load.errors() > 20);
    // Between them requests succeed.
    load.wait_for_progress();
    fs::remove_file(&switch).unwrap();
    load.wait_for_progress();
    far.end(&disk, load);
}

#[test]
fn a_guest_waits_for_a_server_that_is_stopped_killed_or_ends_by_itself() {
    let far = Far::new(&[]);
    let (image, socket) = (far.image("disk.img"), far.path("kit"));
    let serve = |filter: &[&str]| {
        let args = [filter, &["file", image.to_str().unwrap()]].concat();
        Server::nbdkit(&socket, &args)
    };
    let Some(server) = serve(&[]) else { return };
    let (disk, load) = far.load(&far.uri("kit", "&deadline_s=1&drain_s=1"));
    // Only a client that gives the stopped server up gets to the next one. The first never executes what it has.
    server.signal(Signal::STOP);
    let next = serve(&[]).unwrap();
    load.wait_for_progress();
    drop((server, next));
    let mut server = serve(&["--filter=exitlast"]).unwrap();
    load.wait_for_progress();
    // Its only client is gone for a moment, and so is the server.
    far.kill_worker(&disk);
    wait_until("the end of the server", || server.has_ended());
    let _server = serve(&[]).unwrap();
    load.wait_for_progress();
    assert_eq!(load.errors(), 0);
    far.end(&disk, load);
}

#[test]
fn a_server_that_stays_away_is_an_error_to_the_guest_until_it_is_back() {
    let far = Far::new(&[]);
    let (image, socket) = (far.image("disk.img"), far.path("kit"));
    let serve = || Server::nbdkit(&socket, &["file", image.to_str().unwrap()]);
    let Some(server) = serve() else { return };
    let (disk, load) = far.load(&far.uri("kit", "&reconnect_s=1&drain_s=0"));
    drop(server);
    wait_until("errors", || load.errors() > 0);
    let _server = serve().unwrap();
    load.wait_for_progress();
    far.end(&disk, load);
}
