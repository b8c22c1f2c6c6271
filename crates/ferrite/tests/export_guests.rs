//! Exports of the daemon's disks, with guests: who may write, and what clients see of a disk's processes and states.

mod deep;
#[path = "../../daemon/tests/host/mod.rs"]
mod host;
#[path = "../../daemon/tests/roles/mod.rs"]
mod roles;

use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::Arc;

use deep::Deep;
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{ExportRow, ExportRows, PhaseName, TapDone, Upgraded};
use ferrite_daemon::keepers::Keepers;
use ferrite_daemon::state::DiskId;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::{PATIENCE, wait_until};
use host::{A_WHILE, Host, works};
use roles::{MIB, Roles, kill, kill_pid};
use serde_json::{Value, json};

/// Not a test: the daemon.
#[test]
fn process_daemon() {
    host::be_a_daemon_with(|run| Arc::new(Keepers::new(run, Box::new(Roles))));
}

/// NBD's number for what is not permitted.
const EPERM: u32 = 1;

/// A host with one guest, and a daemon that exports disks by the real program.
struct Site {
    host: Host,
    daemon: Option<Child>,
}

impl Site {
    fn new() -> Site {
        let mut site = Site { host: Host::new(1), daemon: None };
        site.start();
        site
    }

    fn start(&mut self) {
        let program = [(roles::PROGRAM, env!("CARGO_BIN_EXE_ferrite"))];
        self.daemon = Some(self.host.spawn_with(None, &program));
        wait_until("the daemon", || self.host.status().is_ok_and(|status| status.xen));
    }

    fn restart(&mut self) {
        kill(self.daemon.take().unwrap());
        self.start();
    }

    fn export(&self, disk: DiskId, more: &Value) -> Result<ExportRow, ClientError> {
        let mut asked = json!({ "disk": disk, "listen": ["127.0.0.1:0"], "plain": true });
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.host.call("disk.export", &asked)
    }

    #[track_caller]
    fn is_refused(&self, disk: DiskId, more: &Value, why: &str) {
        let refused = self.export(disk, more).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }

    fn unexport(&self, disk: DiskId) {
        self.host.call::<ExportRow>("disk.unexport", &json!({ "disk": disk })).unwrap();
    }

    fn exports(&self) -> Vec<ExportRow> {
        self.host.call::<ExportRows>("disk.exports", &json!({})).unwrap().exports
    }

    /// The process that listens for the only export.
    fn exporter(&self) -> u32 {
        let mut pid = None;
        wait_until("an exporter", || {
            pid = self.exports().first().and_then(|row| row.pid);
            pid.is_some()
        });
        pid.unwrap()
    }

    /// The reason why a guest's disk is not served, as the toolstack finds it.
    fn error(&self, disk: &DiskPaths) -> Option<String> {
        let path =
            format!("/local/domain/0/error/{}/error", &disk.backend["/local/domain/0/".len()..]);
        self.host.store().read_string(&path).unwrap()
    }

    /// Opens a tap of 4 MiB.
    fn tap(&self) -> Tap {
        let image = self.host.make_image("web.img", 4 * MIB);
        let done = |verb: &str, asked: Value| -> TapDone {
            self.host.call(&format!("tap.{verb}"), &asked).unwrap()
        };
        let minor = done("allocate", json!({})).minor.unwrap();
        let pid = done("spawn", json!({})).pid.unwrap();
        let image = format!("aio:{}", image.display());
        done("attach", json!({ "pid": pid, "minor": minor }));
        done("open", json!({ "pid": pid, "minor": minor, "image": image, "timeout_s": 20 }));
        Tap { pid, minor, id: DiskId::tap(minor) }
    }

    /// Attaches the guest's disk as xenopsd does: its script names the tap.
    fn join(&self, tap: &Tap) -> DiskPaths {
        let socket = self.host.paths().blktap().join(format!("nbd{}.{}", tap.pid, tap.minor));
        let keys = [
            ("script", "/usr/libexec/xenopsd/block"),
            ("physical-device-path", socket.to_str().unwrap()),
            ("hotplug-status", "connected"),
        ];
        let params = "nbd:unix:/run/blktap-control/nbd/sr/vdi:exportname=vdi";
        self.host.attach_with(1, 0, params, &keys)
    }

    /// Unplugs the guest's disk.
    fn leave(&self, disk: &DiskPaths) {
        self.host.machine().unplug(disk).unwrap();
        self.host.wait_for_state(disk, 6);
        self.host.store().remove(&disk.frontend).unwrap();
        let backend = format!("{}/state", disk.backend);
        wait_until("the end of the directory", || {
            self.host.store().read(&backend).unwrap().is_none()
        });
    }

    fn end(mut self) {
        self.host.end_processes();
        let _ = self.daemon.take().unwrap().wait();
    }
}

struct Tap {
    pid: u32,
    minor: u32,
    id: DiskId,
}

fn stream(row: &ExportRow) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(row.listen[0].as_str())?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// A client of an export, which is asked for by its default name.
fn client(row: &ExportRow) -> Client {
    let mut client = Client::over(UnixStream::from(OwnedFd::from(stream(row).unwrap())));
    client.go(true);
    client
}

#[test]
fn a_guest_gets_a_disk_that_clients_may_write_when_its_export_has_ended() {
    let mut site = Site::new();
    let tap = site.tap();
    let row = site.export(tap.id, &json!({})).unwrap();
    let mut writer = client(&row);
    writer.write(4096, &[7; 4096]);
    let disk = site.join(&tap);
    wait_until("the reason", || site.error(&disk).is_some());
    let why = site.error(&disk).unwrap();
    assert!(why.contains("is exported for writing") && why.contains("unexport tap/0"), "{why}");
    // The next daemon keeps to it as well, and clients go on.
    site.restart();
    site.host.store().remove("/local/domain/0/error").unwrap();
    site.host.store().write(&format!("{}/again", disk.backend), b"").unwrap();
    wait_until("the reason again", || site.error(&disk).is_some());
    writer.write(8192, &[8; 4096]);
    assert_eq!(site.host.backend_state(&disk), 1);
    site.unexport(tap.id);
    // Nothing but the end of the export tells the daemon to look.
    let mut front = site.host.connect(&disk);
    works(&mut front, 9);
    assert_eq!(site.error(&disk), None);
    // The guest is first now.
    site.is_refused(tap.id, &json!({}), "is that of a guest (1/51712), which writes to it");
    let row = site.export(tap.id, &json!({ "read_only": true })).unwrap();
    assert_eq!(client(&row).read(8192, 4096), [8; 4096]);
    site.unexport(tap.id);
    front.close(PATIENCE).unwrap();
    site.leave(&disk);
    // Clients may write again when the guest has left.
    site.export(tap.id, &json!({})).unwrap();
    site.unexport(tap.id);
    site.end();
}

#[test]
fn a_guest_joins_beside_an_export_for_reading_one_that_is_shared_and_after_one_that_failed() {
    let site = Site::new();
    let tap = site.tap();
    let joins = || {
        let disk = site.join(&tap);
        let mut front = site.host.connect(&disk);
        works(&mut front, 3);
        front.close(PATIENCE).unwrap();
        site.leave(&disk);
    };
    for more in [json!({ "read_only": true }), json!({ "shared": true })] {
        site.export(tap.id, &more).unwrap();
        joins();
        site.unexport(tap.id);
    }
    site.is_refused(tap.id, &json!({ "listen": ["192.0.2.1:1"] }), "cannot listen at");
    joins();
    site.end();
}

#[test]
fn clients_of_a_guests_disk_go_on_over_the_end_of_each_process_and_see_what_was_flushed() {
    let mut site = Site::new();
    let image = site.host.make_image("disk.img", deep::BYTES);
    let disk = site.host.attach(1, 0, &format!("aio:{}", image.display()));
    let id = host::id(&disk);
    let load = Deep::start(site.host.connect(&disk));
    load.wait_for_progress();
    site.is_refused(id, &json!({}), "which writes to it");
    let row = site.export(id, &json!({ "read_only": true })).unwrap();
    let mut reader = client(&row);
    let refused = reader.call(command::WRITE, 0, 0, 4096, &[1; 4096]);
    assert_eq!(refused.error, EPERM);
    let reads = |reader: &mut Client| reader.read(0, 64 << 10);
    reads(&mut reader);
    kill_pid(roles::worker(roles::keeper(&site.host, &disk)).unwrap());
    reads(&mut reader);
    site.restart();
    reads(&mut reader);
    load.wait_for_progress();
    let binary = std::env::current_exe().unwrap();
    roles::keeper(&site.host, &disk);
    let upgraded: Upgraded = site.host.call("upgrade", &json!({ "binary": binary })).unwrap();
    assert_eq!(upgraded.upgraded, [id]);
    reads(&mut reader);
    load.wait_for_progress();
    // A tunnel's end takes the clients' connections along, and the exporter starts the next one.
    let tunnel = roles::children(site.exporter() as i32, "tunnel").next().unwrap();
    kill_pid(tunnel);
    assert!(reader.is_closed());
    let mut reader = client(&row);
    reads(&mut reader);
    // Without its exporter a client has to connect again, to the same address.
    let exporter = site.exporter();
    kill_pid(exporter as i32);
    assert!(reader.is_closed());
    wait_until("the next exporter", || site.exporter() != exporter);
    let mut reader = client(&row);
    reads(&mut reader);
    // A keeper's end takes the clients' connections along.
    roles::kill_keeper(roles::keeper(&site.host, &disk));
    assert!(reader.is_closed());
    load.wait_for_progress();
    reads(&mut client(&row));
    assert_eq!(load.errors(), 0);
    load.end();
    site.host.detach(&disk);
    wait_until("the end of the export", || site.exports().is_empty());
    site.end();
}

#[test]
fn a_client_of_a_paused_disk_waits_and_one_of_a_detached_disk_is_disconnected() {
    let site = Site::new();
    let disk = roles::attach(&site.host, 1);
    let id = host::id(&disk);
    let mut front = site.host.connect(&disk);
    works(&mut front, 5);
    let row = site.export(id, &json!({ "read_only": true })).unwrap();
    let mut reader = client(&row);
    assert_eq!(reader.read(4096, 4096), [5; 4096]);
    site.host.call::<Value>("disk.pause", &json!({ "disk": id, "by": "a test" })).unwrap();
    site.host.wait_for_phase(&disk, PhaseName::Paused);
    let cookie = reader.send(command::READ, 0, 4096, 4096, &[]);
    std::thread::sleep(A_WHILE);
    site.is_refused(id, &json!({ "read_only": true }), "is exported already");
    site.host.call::<Value>("disk.resume", &json!({ "disk": id })).unwrap();
    let reply = reader.reply();
    assert_eq!((reply.cookie, reply.error), (cookie, 0));
    assert_eq!(reply.data, [5; 4096]);
    front.close(PATIENCE).unwrap();
    site.host.detach(&disk);
    assert!(reader.is_closed());
    wait_until("the end of the export", || site.exports().is_empty());
    assert!(stream(&row).is_err());
    assert_eq!(std::fs::read_dir(site.host.paths().run.join("exports")).unwrap().count(), 0);
    site.end();
}

#[test]
fn clients_of_a_tap_do_not_get_the_next_one_of_its_number() {
    let site = Site::new();
    let tap = site.tap();
    let row = site.export(tap.id, &json!({})).unwrap();
    let mut writer = client(&row);
    writer.write(0, &[1; 4096]);
    let image = format!("aio:{}", site.host.make_image("next.img", 4 * MIB).display());
    let call = |verb: &str| {
        let asked = json!({ "pid": tap.pid, "minor": tap.minor, "image": image, "timeout_s": 20 });
        site.host.call::<TapDone>(&format!("tap.{verb}"), &asked).unwrap();
    };
    call("close");
    call("open");
    assert_eq!(site.exports(), []);
    assert!(writer.is_closed() && stream(&row).is_err());
    site.end();
}

#[test]
fn clients_of_a_guests_disk_do_not_get_the_next_one_of_its_number() {
    let site = Site::new();
    let disk = roles::attach(&site.host, 1);
    site.host.wait_for_phase(&disk, PhaseName::Served);
    let row = site.export(host::id(&disk), &json!({ "read_only": true })).unwrap();
    let mut reader = client(&row);
    reader.read(0, 4096);
    site.host.detach(&disk);
    let third = site.host.make_image("third.img", 4 * MIB);
    let disk = site.host.attach(1, 0, &format!("aio:{}", third.display()));
    // The earlier one may be there for a moment.
    wait_until("the next disk", || {
        let shown = site.host.show(&disk).map(|shown| shown.disk);
        shown.is_ok_and(|disk| {
            disk.phase == PhaseName::Served && disk.image.unwrap().contains("third.img")
        })
    });
    assert_eq!(site.exports(), []);
    assert!(reader.is_closed() && stream(&row).is_err());
    site.end();
}
