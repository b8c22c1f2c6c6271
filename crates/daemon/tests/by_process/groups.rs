//! Disks that are volumes of one store, with one keeper and one worker. Any of the processes is
//! killed, and disks come and go.

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrite_daemon::control::protocol::{PhaseName, Upgraded};
use ferrite_disk::{Disk, Session, open_store};
use ferrite_io::engines::test_engine;
use ferrite_loopback::machine::DiskPaths;
use ferrite_store::owned::StoreHandle;
use ferrite_testkit::{PATIENCE, few_or_all, stores, wait_until};
use serde_json::json;

use crate::host::{self, A_WHILE, Host, id, works};
use crate::load::Load;
use crate::roles::{attach, end, is_alive, keeper, kill, kill_keeper, kill_pid, worker};

/// Creates a store with volumes of 4 MiB for these guests.
fn make_store(host: &Host, name: &str, guests: &str) -> PathBuf {
    let store = host.image(name);
    std::fs::write(store.with_extension("guests"), guests).unwrap();
    let volumes = ["a", "b", "c", "d"].map(|name| (name, 1024));
    stores::create(&store, 64 << 20, &volumes);
    store
}

fn attach_volume(host: &Host, domid: u16, name: &str) -> DiskPaths {
    let store = host.image("pool");
    host.attach(domid, 0, &format!("aio:store:{}#{name}", store.display()))
}

/// The one keeper of these disks.
fn one_keeper(host: &Host, disks: &[DiskPaths]) -> i32 {
    let mut keepers: Vec<i32> = disks.iter().map(|disk| keeper(host, disk)).collect();
    keepers.dedup();
    assert_eq!(keepers.len(), 1, "{keepers:?}");
    keepers[0]
}

/// Sends a command, which is the name of a snapshot to make.
fn command(host: &Host, name: &str) -> String {
    let sockets = std::fs::read_dir(host.paths().run.join("stores")).unwrap();
    let sockets: Vec<PathBuf> = sockets.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(sockets.len(), 1, "{sockets:?}");
    let mut stream = UnixStream::connect(&sockets[0]).unwrap();
    stream.write_all(name.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    said
}

/// Checks that the store's keeper has left nothing.
fn is_swept(host: &Host) {
    let run = host.paths().run;
    let left = |folder: &str| std::fs::read_dir(run.join(folder)).map_or(0, Iterator::count);
    wait_until("nothing", || left("keepers") == 0 && left("stores") == 0);
    let names = std::fs::read_dir(&run).unwrap().flatten().map(|e| e.file_name());
    let left: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with("store-")).collect();
    assert_eq!(left, Vec::<std::ffi::OsString>::new());
}

#[test]
fn volumes_of_a_store_have_one_worker_whoever_is_killed_under_load() {
    let host = Host::new(3);
    make_store(&host, "pool", "1 2 3");
    let mut daemon = host.spawn(None);
    let disks: Vec<DiskPaths> = [(1, "a"), (2, "b"), (3, "c")]
        .map(|(domid, name)| attach_volume(&host, domid, name))
        .into();
    let loads: Vec<Load> = disks.iter().map(|disk| Load::start(&host, disk)).collect();
    for round in 0..few_or_all(4, 40) {
        loads.iter().for_each(Load::wait_for_progress);
        let keeper = one_keeper(&host, &disks);
        match round % 4 {
            0 => kill_pid(worker(keeper).unwrap()),
            1 => kill_keeper(keeper),
            2 => {
                kill(daemon);
                loads.iter().for_each(Load::wait_for_progress);
                // No daemon runs, and all guests are served.
                kill_pid(worker(keeper).unwrap());
                loads.iter().for_each(Load::wait_for_progress);
                daemon = host.spawn(None);
                wait_until("the daemon", || host.status().is_ok_and(|s| s.served == 3));
                assert_eq!(one_keeper(&host, &disks), keeper, "it was found, not started");
            }
            _ => {
                kill(daemon);
                kill_keeper(keeper);
                daemon = host.spawn(None);
                wait_until("the daemon", || host.status().is_ok_and(|s| s.served == 3));
            }
        }
    }
    loads.into_iter().for_each(Load::end);
    let keeper = one_keeper(&host, &disks);
    end(&host, &disks, &[keeper]);
    is_swept(&host);
    kill(daemon);
}

#[test]
fn disks_of_one_store_share_content_and_other_stores_and_images_have_processes_of_their_own() {
    let host = Host::new(4);
    let store = make_store(&host, "pool", "1 2");
    let other = make_store(&host, "other", "3");
    let daemon = host.spawn(None);
    let first = attach_volume(&host, 1, "a");
    // The second disk names the store by a link.
    let link = host.image("link");
    std::os::unix::fs::symlink(&store, &link).unwrap();
    let second = host.attach(2, 0, &format!("store:{}#b", link.display()));
    let third = host.attach(3, 0, &format!("store:{}#a", other.display()));
    let image = attach(&host, 4);
    for disk in [&first, &second, &third, &image] {
        let mut front = host.connect(disk);
        works(&mut front, 7);
        front.close(PATIENCE).unwrap();
    }
    let both = [first.clone(), second.clone()];
    let keepers = [one_keeper(&host, &both), keeper(&host, &third), keeper(&host, &image)];
    assert!(keepers[0] != keepers[1] && keepers[1] != keepers[2] && keepers[0] != keepers[2]);
    end(&host, &[first, second, third, image], &keepers);
    is_swept(&host);
    let handle = StoreHandle::open(&store, &stores::options(), open_store).unwrap();
    let info = handle.store().live().list();
    assert!(info.iter().any(|volume| volume.name == "a"), "{info:?}");
    // Two volumes have the same block.
    let read = |name: &str| {
        let name = format!("store:{}#{name}", store.display());
        let disk = Arc::new(Disk::open(&name, &stores::options()).unwrap());
        let mut session = Session::new(disk, |arena| test_engine().open(arena, 32)).unwrap();
        let mut data = vec![0; 4096];
        session.read(4096, &mut data).unwrap();
        data
    };
    assert_eq!((read("a"), read("b")), (vec![7; 4096], vec![7; 4096]));
    kill(daemon);
}

/// Whether the keeper has the store open, so that no other process gets it when the worker ends.
fn is_held(keeper: i32, store: &Path) -> bool {
    let open = std::fs::read_dir(format!("/proc/{keeper}/fd")).unwrap().flatten();
    let mut held = open.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    held.any(|path| path == store) || !test_engine().holds()
}

#[test]
fn a_disk_that_was_removed_while_no_daemon_ran_is_closed_and_the_others_do_not_notice() {
    let host = Host::new(2);
    let store = make_store(&host, "pool", "1 2");
    let daemon = host.spawn(None);
    let [stays, goes] = [(1, "a"), (2, "b")].map(|(domid, name)| attach_volume(&host, domid, name));
    let load = Load::start(&host, &stays);
    let mut front = host.connect(&goes);
    works(&mut front, 5);
    let keeper = one_keeper(&host, &[stays.clone(), goes.clone()]);
    let before = worker(keeper);
    kill(daemon);
    host.machine().remove_disk(&goes).unwrap();
    let daemon = host.spawn(None);
    wait_until("its end", || host.status().is_ok_and(|status| status.served == 1));
    let left = host.paths().run.join("keepers/vbd-2-51712.sock");
    wait_until("nothing of it", || !left.exists());
    load.wait_for_progress();
    assert_eq!(worker(keeper), before);
    assert!(is_held(keeper, &store));
    load.end();
    end(&host, &[stays], &[keeper]);
    is_swept(&host);
    kill(daemon);
}

#[test]
fn a_disk_comes_and_goes_while_the_others_of_its_store_go_on() {
    let host = Host::new(3);
    let store = make_store(&host, "pool", "1 2");
    let daemon = host.spawn(None);
    let stays = attach_volume(&host, 1, "a");
    let load = Load::start(&host, &stays);
    let keeper = keeper(&host, &stays);
    let worker_before = worker(keeper).unwrap();
    for round in 0..4 {
        let goes = attach_volume(&host, 2, "b");
        let mut front = host.connect(&goes);
        works(&mut front, 9 + round);
        assert_eq!(one_keeper(&host, &[stays.clone(), goes.clone()]), keeper);
        front.close(PATIENCE).unwrap();
        host.detach(&goes);
        wait_until("its end", || host.disks().len() == 1);
        let left = host.paths().run.join("vbd-2-51712");
        wait_until("nothing of it", || !left.exists());
        load.wait_for_progress();
        assert_eq!(worker(keeper), Some(worker_before), "the same worker");
        assert!(is_held(keeper, &store));
    }
    // The first disk is detached, and the worker is replaced without it.
    let other = attach_volume(&host, 2, "b");
    let others_load = Load::from(&host, &other, 300);
    load.end();
    host.detach(&stays);
    wait_until("its end", || host.disks().len() == 1);
    others_load.wait_for_progress();
    assert_eq!(worker(keeper), Some(worker_before));
    kill_pid(worker_before);
    others_load.wait_for_progress();
    others_load.end();
    end(&host, &[other], &[keeper]);
    is_swept(&host);
    kill(daemon);
}

#[test]
fn a_volume_and_a_store_have_one_owner() {
    let host = Host::new(3);
    let store = make_store(&host, "pool", "1 2 3");
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok());
    // Another process has the store open.
    let theirs = StoreHandle::open(&store, &stores::options(), open_store).unwrap();
    let disk = attach_volume(&host, 1, "a");
    let refused = host.wait_for_phase(&disk, PhaseName::Failed);
    assert!(refused.why.unwrap().contains("pool"));
    drop(theirs);
    host.wait_for_phase(&disk, PhaseName::Served);
    // Now other processes do not get the store, also while the worker is replaced.
    let pid = keeper(&host, &disk);
    for _ in 0..3 {
        assert!(StoreHandle::open(&store, &stores::options(), open_store).is_err());
        kill_pid(worker(pid).unwrap());
        assert!(StoreHandle::open(&store, &stores::options(), open_store).is_err());
        let mut front = host.connect(&disk);
        works(&mut front, 3);
        front.close(PATIENCE).unwrap();
        host.wait_for_phase(&disk, PhaseName::Served);
    }
    // A second disk does not get the same volume.
    let again = attach_volume(&host, 2, "a");
    let refused = host.wait_for_phase(&again, PhaseName::Failed);
    assert!(refused.help.unwrap().contains("disk 1/51712 is served from the same image"));
    let none = attach_volume(&host, 3, "nobodys");
    let refused = host.wait_for_phase(&none, PhaseName::Failed);
    assert!(refused.why.unwrap().contains("no such volume"));
    assert!(is_alive(pid));
    let mut front = host.connect(&disk);
    works(&mut front, 4);
    front.close(PATIENCE).unwrap();
    end(&host, &[again, none, disk], &[pid]);
    is_swept(&host);
    kill(daemon);
}

#[test]
fn commands_come_to_the_worker_of_a_store_and_to_the_next_one() {
    let host = Host::new(2);
    let store = make_store(&host, "pool", "1 2");
    let daemon = host.spawn(None);
    let disks = [(1, "a"), (2, "b")].map(|(domid, name)| attach_volume(&host, domid, name));
    let loads: Vec<Load> = disks.iter().map(|disk| Load::start(&host, disk)).collect();
    let keeper = one_keeper(&host, &disks);
    assert_eq!(command(&host, "one"), "done");
    loads.iter().for_each(Load::wait_for_progress);
    kill_pid(worker(keeper).unwrap());
    loads.iter().for_each(Load::wait_for_progress);
    // The command's client may have been passed to a worker that has ended.
    wait_until("an answer", || command(&host, "two") == "done");
    assert_ne!(command(&host, "two"), "done", "it is there");
    loads.into_iter().for_each(Load::end);
    end(&host, &disks, &[keeper]);
    is_swept(&host);
    let handle = StoreHandle::open(&store, &stores::options(), open_store).unwrap();
    let names: Vec<String> = handle.store().live().list().into_iter().map(|v| v.name).collect();
    assert_eq!(names, ["a", "b", "c", "d", "one", "two"]);
    kill(daemon);
}

#[test]
fn all_disks_of_a_store_get_another_program_together() {
    let host = Host::new(3);
    make_store(&host, "pool", "1 2");
    let daemon = host.spawn(None);
    let disks = [(1, "a"), (2, "b")].map(|(domid, name)| attach_volume(&host, domid, name));
    let image = attach(&host, 3);
    let loads: Vec<Load> = disks.iter().map(|disk| Load::start(&host, disk)).collect();
    let pid = one_keeper(&host, &disks);
    let alone = keeper(&host, &image);
    let binary = host.dir.path().join("next");
    host::copy_program(&std::env::current_exe().unwrap(), &binary);
    let exe = |pid: i32| std::fs::read_link(format!("/proc/{pid}/exe")).unwrap();
    for _ in 0..3 {
        loads.iter().for_each(Load::wait_for_progress);
        let asked = json!({ "binary": binary, "disk": id(&disks[1]) });
        let done = host.call::<Upgraded>("upgrade", &asked).unwrap();
        assert_eq!(done.upgraded, disks.each_ref().map(id), "{:?}", done.failed);
        assert_eq!(one_keeper(&host, &disks), pid);
        assert_eq!(exe(pid), binary);
        assert_ne!(exe(alone), binary);
    }
    let all = host.call::<Upgraded>("upgrade", &json!({ "binary": binary })).unwrap();
    assert_eq!(all.upgraded.len(), 3, "{:?}", all.failed);
    loads.iter().for_each(Load::wait_for_progress);
    assert_eq!(command(&host, "one"), "done");
    loads.into_iter().for_each(Load::end);
    let [first, second] = disks;
    end(&host, &[first, second, image], &[pid, alone]);
    is_swept(&host);
    kill(daemon);
}

#[test]
fn what_a_killed_keeper_of_a_store_has_left_goes_with_the_next_daemon() {
    let host = Host::new(2);
    make_store(&host, "pool", "1 2");
    let daemon = host.spawn(None);
    let disks = [(1, "a"), (2, "b")].map(|(domid, name)| attach_volume(&host, domid, name));
    for disk in &disks {
        let mut front = host.connect(disk);
        works(&mut front, 1);
        front.close(PATIENCE).unwrap();
    }
    let keeper = one_keeper(&host, &disks);
    kill(daemon);
    kill_keeper(keeper);
    for disk in &disks {
        host.machine().remove_disk(disk).unwrap();
    }
    let daemon = host.spawn(None);
    wait_until("the daemon", || host.status().is_ok_and(|status| status.xen));
    host.wait_for_no_disks();
    let run = host.paths().run;
    wait_until("no keepers", || std::fs::read_dir(run.join("keepers")).unwrap().count() == 0);
    std::thread::sleep(A_WHILE);
    kill(daemon);
}
