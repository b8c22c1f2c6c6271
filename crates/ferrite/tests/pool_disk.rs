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

#[test]
fn what_a_disk_has_grown_by_is_used_by_the_process_that_has_it() {
    let Some(pool) = Pool::start(&["a", "b"]) else { return };
    pool.create("web1", "16M", &["--stripes", "2", "--stripe-size", "64K"]);
    let socket = pool.dir.path().join("s");
    let words = ["pool", "own", "--pool", "lab", "--disk", "web1", "--plain", "--unix"];
    let mut owner = pool.ferrite(&words).arg(&socket).stdout(Stdio::null()).spawn().unwrap();
    wait_until("the owner", || UnixStream::connect(&socket).is_ok());
    let connect = || Client::over(UnixStream::connect(&socket).unwrap());
    let mut client = connect();
    assert_eq!(client.go(false).0, 16 << 20);
    client.write(0, &[1; 4096]);
    pool.ok(&["pool", "resize", "lab/web1", "24M"]);
    wait_until("the new size", || connect().go(false).0 == 24 << 20);
    // Its clients have to ask for the size anew.
    assert!(client.is_closed());
    let mut client = connect();
    client.go(false);
    let end = (24 << 20) - 4096;
    client.write(end, &[2; 4096]);
    client.flush();
    assert_eq!((client.read(0, 4096), client.read(end, 4096)), (vec![1; 4096], vec![2; 4096]));
    drop(client);
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&owner),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    owner.wait().unwrap();
    // The owner has given the disk back.
    assert!(!pool.ok(&["pool", "status", "lab/web1", "--json"]).contains("\"owned\": true"));
}

#[test]
#[ignore = "nightly: servers look every three seconds"]
fn the_files_of_a_disk_that_is_gone_go_and_its_name_is_free() {
    let Some(pool) = Pool::start(&["a", "b"]) else { return };
    let files = || {
        let of = |server: &str| std::fs::read_dir(pool.folder(server)).unwrap().count();
        of("a") + of("b")
    };
    let none = files();
    let file = write_file(pool.dir.path(), "first", &pattern(MIB, 1));
    let name = pool.create("web1", "1M", &[]);
    pool.ok(&["image", "convert", "-n", &file, &name]);
    assert_eq!(files(), none + 4);
    pool.ok(&["pool", "delete", "lab/web1"]);
    // Its name is free, whether the servers have seen that or not.
    let again = pool.create("web1", "1M", &[]);
    pool.ok(&["image", "convert", "-n", &file, &again]);
    pool.ok(&["pool", "delete", "lab/web1"]);
    wait_until("the files", || files() == none);
    wait_until("their list's end", || !pool.ok(&["pool", "status", "lab"]).contains("not needed"));
}

#[test]
#[ignore = "nightly: a lease ends"]
fn the_doctor_says_which_copies_are_missing() {
    let Some(mut pool) = Pool::start(&["a", "b"]) else { return };
    let name = pool.create("web1", "1M", &[]);
    let file = write_file(pool.dir.path(), "first", &pattern(MIB, 1));
    pool.ok(&["image", "convert", "-n", &file, &name]);
    // Without Xen it fails, and prints all the same.
    let said = |pool: &Pool| {
        let output = pool.run(&["doctor"]).stdout;
        let text = String::from_utf8(output).unwrap();
        text.lines().filter(|line| line.contains("pool lab")).collect::<Vec<_>>().join("\n")
    };
    assert!(said(&pool).contains("all copies are in sync"), "{}", said(&pool));
    pool.kill("b");
    pool.ok(&["image", "convert", "-n", &file, &name]);
    assert!(said(&pool).contains("copies of web1 are missing"), "{}", said(&pool));
    wait_until("the end of the lease", || said(&pool).contains("the server b has copies"));
    pool.etcd.kill(0);
    assert!(said(&pool).contains("etcd"), "{}", said(&pool));
}

#[test]
#[ignore = "nightly: a server leaves and returns"]
fn copies_are_filled_without_a_user_of_the_disk() {
    let Some(mut pool) = Pool::start(&["a", "b"]) else { return };
    let name = pool.create("web1", "4M", &[]);
    let data = pattern(4 * MIB, 5);
    let file = write_file(pool.dir.path(), "first", &data);
    pool.ok(&["image", "convert", "-n", &file, &name]);
    pool.serve("c");
    pool.ok(&["pool", "replace", "lab/web1", "b", "--by", "c"]);
    let said = pool.ok(&["pool", "repair", "lab/web1"]);
    assert!(said.contains("c web1-0-2-") && !said.contains("replaced"), "{said}");
    assert!(pool.copy("c") == data, "the new copy has something else");
    assert!(said.contains("no owner"), "{said}");
    // Nothing is to be done.
    pool.ok(&["pool", "repair", "lab/web1"]);
    pool.kill("c");
    pool.ok(&["image", "convert", "-n", &file, &name]);
    let mut repair = pool.ferrite(&["pool", "repair", "lab/web1"]).spawn().unwrap();
    pool.serve("c");
    assert!(repair.wait().unwrap().success());
}
