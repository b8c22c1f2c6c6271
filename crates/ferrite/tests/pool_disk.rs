//! Disks of a pool under `ferrite image` and `ferrite export nbd`: names, the start of the owner's process, its successors.

mod pooled;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::wait_until;
use pooled::{Pool, end, pattern, write_file};
use tempfile::TempDir;

const MIB: usize = 1 << 20;
/// NBD's `EIO`.
const IO: u32 = 5;

/// An export, which is killed with this.
struct Export {
    child: Child,
    socket: PathBuf,
    _dir: TempDir,
}

impl Export {
    fn of(pool: &Pool, name: &str, more: &[&str]) -> Export {
        let dir = TempDir::new().unwrap();
        let socket = dir.path().join("s");
        let mut command = pool.ferrite(&["export", "nbd", name, "--socket"]);
        let child = command.arg(&socket).args(more).stdout(Stdio::null()).spawn().unwrap();
        wait_until("the export", || UnixStream::connect(&socket).is_ok());
        Export { child, socket, _dir: dir }
    }

    fn client(&self) -> Client {
        let mut client = Client::over(UnixStream::connect(&self.socket).unwrap());
        client.go(false);
        client
    }

    /// The owner's process.
    fn owner(&self) -> Option<i32> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let lists = tasks
            .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).ok());
        lists.flat_map(|list| list.split(' ').find_map(|n| n.parse().ok())).next()
    }

    fn kill_owner(&self) {
        wait_until("an owner", || self.owner().is_some());
        let pid = rustix::process::Pid::from_raw(self.owner().unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// Runs a command as on another host: one with a name and a `/run` of its own. What it says of its failure.
fn elsewhere(pool: &Pool, args: &[&str]) -> String {
    let name = write_file(pool.dir.path(), "hostname", b"elsewhere\n");
    let script = format!("mount -t tmpfs t /run; mount --bind {name} /etc/hostname; exec \"$@\"");
    let ours = pool.ferrite(args);
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-ec", &script, "sh"]).arg(ours.get_program()).args(args);
    let output = command.env("FERRITE_CONFIG", pool.config()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.success(), said.is_empty(), "{args:?}: {said}");
    said
}

#[test]
fn what_is_written_is_on_each_copy_and_is_read_again() {
    let Some(pool) = Pool::start(&["a", "b"]) else { return };
    let name = pool.create("web1", "16M", &[]);
    let data = pattern(16 * MIB, 7);
    let file = write_file(pool.dir.path(), "first", &data);
    pool.ok(&["image", "convert", "-n", &file, &name]);
    assert!(pool.copy("a") == data && pool.copy("b") == data, "a copy has something else");
    pool.ok(&["image", "compare", &file, &name]);
    let said = pool.json(&["image", "info", &name]);
    assert!(said.to_string().contains("16777216"), "{said}");
    // The same with all settings in the name, and no configuration.
    let url = &pool.etcd.urls[0];
    let whole = format!("{name}?etcd={url}&plain=yes&experimental=yes");
    let mut command = pool.ferrite(&["image", "compare", &file, &whole]);
    assert!(command.env("FERRITE_CONFIG", "/nonexistent").status().unwrap().success());
    // A command leaves no owner.
    assert!(!pool.ok(&["pool", "status", "lab/web1", "--json"]).contains("\"owned\": true"));
}

#[test]
fn an_export_goes_on_behind_its_killed_owner_and_nobody_else_has_the_disk() {
    let Some(pool) = Pool::start(&["a", "b"]) else { return };
    let name = pool.create("web1", "16M", &[]);
    let export = Export::of(&pool, &name, &[]);
    let mut client = export.client();
    for round in 0..4 {
        client.write(round * MIB as u64, &vec![round as u8 + 1; MIB]);
        client.flush();
        export.kill_owner();
        let data = client.read(0, 4 * MIB as u32);
        for done in 0..=round as usize {
            assert!(
                data[done * MIB..][..MIB].iter().all(|byte| *byte == done as u8 + 1),
                "{round}"
            );
        }
    }
    let said = pool.refused(&["image", "compare", &name, &name]);
    assert!(said.contains("in use"), "{said}");
    drop((client, export));
    let reader = Export::of(&pool, &name, &["--read-only"]);
    let mut client = reader.client();
    assert!(client.read(0, MIB as u32).iter().all(|byte| *byte == 1));
    assert_ne!(client.call(command::WRITE, 0, 0, 4096, &[3; 4096]).error, 0);
}

#[test]
fn an_owner_whose_disk_was_stolen_fails_it_for_good() {
    let Some(pool) = Pool::start(&["a", "b"]) else { return };
    let name = pool.create("web1", "16M", &[]);
    let short = format!("{name}?reconnect_s=1");
    let export = Export::of(&pool, &short, &[]);
    let mut client = export.client();
    client.write(0, &[1; 4096]);
    client.flush();
    let file = write_file(pool.dir.path(), "other", &pattern(16 * MIB, 9));
    let convert = ["image", "convert", "-n", &file, &name];
    let refused = elsewhere(&pool, &convert);
    assert!(
        refused.contains("in use by another host") && refused.contains("pool steal lab/web1"),
        "{refused}"
    );
    pool.ok(&["pool", "steal", "lab/web1"]);
    assert_eq!(elsewhere(&pool, &convert), "");
    // Neither this owner nor one that follows it writes again.
    assert_eq!(client.call(command::WRITE, 0, 0, 4096, &[2; 4096]).error, IO);
    export.kill_owner();
    for _ in 0..2 {
        assert_eq!(client.call(command::WRITE, 0, 0, 4096, &[3; 4096]).error, IO);
    }
    assert!(pool.copy("a") == pattern(16 * MIB, 9), "a write of an old owner");
}

#[test]
fn a_disk_that_cannot_be_opened_is_refused_with_what_to_do() {
    let Some(pool) = Pool::start(&["a", "b"]) else { return };
    pool.create("web1", "16M", &[]);
    for (name, cure) in [
        ("pool:lab/none", "ferrite pool list"),
        ("pool:other/web1", "[pool.other]"),
        ("pool:lab/web1?etcd=http://127.0.0.1:1&plain=yes", "experimental=yes"),
        ("pool:lab/web1?etcd=http://127.0.0.1:1&plain=yes&experimental=yes", "etcd"),
        ("pool:lab", "pool:POOL/DISK"),
        ("pool:lab/web1?key=a", "it may have"),
    ] {
        let said = pool.refused(&["image", "info", name]);
        assert!(said.contains(cure), "{name}: {said}");
    }
    let table = std::fs::read_to_string(pool.config()).unwrap();
    std::fs::write(pool.config(), table.replace("experimental = true\n", "")).unwrap();
    let said = pool.refused(&["image", "info", "pool:lab/web1"]);
    assert!(said.contains("experimental = true"), "{said}");
    pool.ok(&["image", "info", "pool:lab/web1?experimental=yes"]);
    let said = pool.refused(&["image", "resize", "pool:lab/web1", "32M"]);
    assert!(said.contains("ferrite pool"), "{said}");
}
