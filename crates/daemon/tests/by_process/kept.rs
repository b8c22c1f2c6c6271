//! Disks that are served by keepers and workers. Any process is killed and replaced.

use std::os::unix::fs::PermissionsExt as _;

use ferrite_daemon::Step;
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{Details, PhaseName, Source, Upgraded};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::NewImage;
use ferrite_io::engines::test_engine;
use ferrite_keeper::{Keeper, socket_name};
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::{PATIENCE, few_or_all, images, wait_until};
use rustix::fs::{FlockOperation, flock};
use serde_json::json;

use crate::host::{self, Host, works};
use crate::load::Load;
use crate::roles::{MIB, attach, end, is_alive, keeper, kill, kill_keeper, kill_pid, worker};

#[test]
fn disks_are_served_by_keepers_that_are_named_and_end_with_them() {
    let host = Host::new(3);
    let daemon = host.spawn(None);
    let disks: Vec<DiskPaths> = (1..=3).map(|domid| attach(&host, domid)).collect();
    let mut keepers = Vec::new();
    for disk in &disks {
        let mut front = host.connect(disk);
        works(&mut front, 3);
        let pid = keeper(&host, disk);
        let named = host.store().read_string(&format!("{}/kthread-pid", disk.backend)).unwrap();
        assert_eq!(named, Some(pid.to_string()));
        keepers.push(pid);
        front.close(PATIENCE).unwrap();
    }
    end(&host, &disks, &keepers);
    kill(daemon);
}

#[test]
fn workers_keepers_and_daemons_that_are_killed_under_load_are_pauses() {
    let host = Host::new(2);
    let mut daemon = host.spawn(None);
    let disks: Vec<DiskPaths> = (1..=2).map(|domid| attach(&host, domid)).collect();
    let loads: Vec<Load> = disks.iter().map(|disk| Load::start(&host, disk)).collect();
    for round in 0..few_or_all(4, 40) {
        for load in &loads {
            load.wait_for_progress();
        }
        let keepers: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
        match round % 4 {
            0 => keepers.iter().filter_map(|keeper| worker(*keeper)).for_each(kill_pid),
            1 => keepers.iter().copied().for_each(kill_keeper),
            2 => {
                kill(daemon);
                // Without a daemon the guests are served.
                for load in &loads {
                    load.wait_for_progress();
                }
                daemon = host.spawn(None);
                wait_until("the daemon", || host.status().is_ok_and(|s| s.served == 2));
                let found: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
                assert_eq!(found, keepers, "they were found, not started");
            }
            _ => {
                kill(daemon);
                keepers.iter().copied().for_each(kill_keeper);
                daemon = host.spawn(None);
                wait_until("the daemon", || host.status().is_ok_and(|s| s.served == 2));
            }
        }
    }
    for load in loads {
        load.end();
    }
    let keepers: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
    end(&host, &disks, &keepers);
    kill(daemon);
}

#[test]
fn disks_get_another_program_under_load_with_their_images_closed() {
    let host = Host::new(2);
    let daemon = host.spawn(None);
    let folder = host.image("qcow2");
    std::fs::create_dir(&folder).unwrap();
    let image = images::make(&folder, "qcow2", 4 * MIB);
    let disks = [attach(&host, 1), host.attach(2, 0, &format!("qcow2:{}", image.display()))];
    let loads: Vec<Load> = disks.iter().map(|disk| Load::start(&host, disk)).collect();
    let keepers: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
    let binary = host.dir.path().join("next");
    host::copy_program(&std::env::current_exe().unwrap(), &binary);
    let ask = |binary: &str| -> Result<Upgraded, ClientError> {
        host.call("upgrade", &json!({ "binary": binary }))
    };
    for _ in 0..3 {
        for load in &loads {
            load.wait_for_progress();
        }
        let done = ask(binary.to_str().unwrap()).unwrap();
        assert_eq!(done.upgraded, disks.each_ref().map(host::id), "{:?}", done.failed);
        for (disk, pid) in disks.iter().zip(&keepers) {
            // The keeper is the same process with another program.
            assert_eq!(keeper(&host, disk), *pid);
            // The next worker starts a moment after the keeper.
            wait_until("a worker", || worker(*pid).is_some_and(is_alive));
            for pid in [*pid, worker(*pid).unwrap()] {
                let exe = format!("/proc/{pid}/exe");
                // A worker is a fork of its keeper for a moment, with the same program.
                assert_eq!(std::fs::read_link(exe).unwrap(), binary);
            }
        }
    }
    // No image is closed for a program that does not exist.
    let Err(ClientError::Refused(e)) = ask("/nonexistent/ferrite") else { panic!("begun") };
    assert!(e.message.contains("cannot run /nonexistent/ferrite"), "{e:?}");
    let odd = host.dir.path().join("odd");
    std::fs::write(&odd, "no program").unwrap();
    std::fs::set_permissions(&odd, std::fs::Permissions::from_mode(0o755)).unwrap();
    let done = ask(odd.to_str().unwrap()).unwrap();
    assert_eq!((done.upgraded.len(), done.failed.len()), (0, 2));
    assert!(done.failed[0].why.contains("cannot run"), "{done:?}");
    for load in loads {
        load.wait_for_progress();
        load.end();
    }
    assert!(ask("ferrite").is_err());
    end(&host, &disks, &keepers);
    images::check(&image);
    kill(daemon);
}

/// Migrates a guest as xl does. In siblings.rs the daemon serves the disks itself.
#[test]
fn a_guest_is_moved_from_keeper_to_keeper_and_a_move_that_fails_goes_back() {
    let host = Host::new(2);
    for (domid, name) in [(1, "g"), (2, "g--incoming")] {
        host.store().write(&format!("/local/domain/{domid}/vm"), b"/vm/1").unwrap();
        host.store().write(&format!("/local/domain/{domid}/name"), name.as_bytes()).unwrap();
    }
    let daemon = host.spawn(None);
    let folder = host.image("vhd");
    std::fs::create_dir(&folder).unwrap();
    let image = images::make(&folder, "vhd", 4 * MIB);
    let params = format!("vhd:{}", image.display());
    let source = host.attach(1, 0, &params);
    let mut front = host.connect(&source);
    for round in 1..4 {
        works(&mut front, round);
        let target = host.attach(2, 0, &params);
        host.wait_for_phase(&target, PhaseName::Served);
        host.wait_for_phase(&source, PhaseName::Resting);
        host.detach(&target);
    }
    works(&mut front, 4);
    let target = host.attach(2, 0, &params);
    host.wait_for_phase(&target, PhaseName::Served);
    host.store().write("/local/domain/1/name", b"g--migratedaway").unwrap();
    host.store().write("/local/domain/2/name", b"g").unwrap();
    let mut moved = host.connect(&target);
    works(&mut moved, 5);
    host.machine().unplug(&source).unwrap();
    host.machine().destroy(source.domid).unwrap();
    host.wait_for_state(&source, 6);
    host.machine().remove_disk(&source).unwrap();
    works(&mut moved, 6);
    moved.close(PATIENCE).unwrap();
    end(&host, std::slice::from_ref(&target), &[]);
    images::check(&image);
    kill(daemon);
}

/// Each disk's thread has its own connection to the store. The guest is served all the time.
#[test]
fn a_disk_whose_connection_to_the_store_was_lost_is_followed_by_another_one() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    wait_until("the daemon's connection", || host.status().is_ok_and(|status| status.xen));
    let daemons = host.store_connections();
    let disk = attach(&host, 1);
    let mut front = host.connect(&disk);
    works(&mut front, 1);
    let keepers = [keeper(&host, &disk)];
    for stamp in 2..4 {
        host.cut_store_connections(daemons..);
        works(&mut front, stamp);
    }
    front.close(PATIENCE).unwrap();
    end(&host, std::slice::from_ref(&disk), &keepers);
    kill(daemon);
}

/// The daemon's main thread connects again, and the disks' threads are not affected.
#[test]
fn a_daemon_whose_own_connection_to_the_store_was_lost_follows_by_another_one() {
    let host = Host::new(3);
    let daemon = host.spawn(None);
    wait_until("the daemon's connection", || host.status().is_ok_and(|status| status.xen));
    let first = attach(&host, 1);
    let mut fronts = vec![host.connect(&first)];
    let all = host.store_connections();
    let mut disks = vec![first];
    for domid in 2..4 {
        // The first connection, and the one that replaced it.
        let own = if domid == 2 { 0 } else { all };
        host.cut_store_connections(own..=own);
        let disk = attach(&host, domid);
        fronts.push(host.connect(&disk));
        disks.push(disk);
        fronts.iter_mut().for_each(|front| works(front, domid as u8));
    }
    // The daemon made two more connections, and each new disk one.
    assert_eq!(host.store_connections(), all + 4);
    // All connections are cut at once, as by a restart of xenstored.
    host.cut_store_connections(..);
    for front in &mut fronts {
        works(front, 4);
        front.close(PATIENCE).unwrap();
    }
    let keepers: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
    end(&host, &disks, &keepers);
    kill(daemon);
}

#[test]
fn a_daemon_killed_at_a_step_of_a_kept_disk_is_followed_by_one_that_does_the_rest() {
    for step in [Step::StateWritten, Step::Kept, Step::Served, Step::Forgotten] {
        let host = Host::new(1);
        let disk = attach(&host, 1);
        let mut daemon = host.spawn(Some(step));
        if step == Step::Forgotten {
            let mut front = host.connect(&disk);
            front.close(PATIENCE).unwrap();
            host.detach(&disk);
        }
        daemon.wait().unwrap();
        let daemon = host.spawn(None);
        if step != Step::Forgotten {
            let mut front = host.connect(&disk);
            works(&mut front, 5);
            let keepers = [keeper(&host, &disk)];
            front.close(PATIENCE).unwrap();
            end(&host, std::slice::from_ref(&disk), &keepers);
        }
        wait_until("an answer", || host.status().is_ok_and(|status| status.xen));
        host.wait_for_no_disks();
        kill(daemon);
    }
}

#[test]
fn the_keeper_of_a_disk_that_was_detached_and_attached_without_a_daemon_is_another_one() {
    // This holds also for the same image, since the old keeper has the old rings.
    for name in ["other.img", "1.img"] {
        let host = Host::new(1);
        let disk = attach(&host, 1);
        let daemon = host.spawn(None);
        works(&mut host.connect(&disk), 1);
        let old = keeper(&host, &disk);
        kill(daemon);
        host.machine().remove_disk(&disk).unwrap();
        let image = host.image(name);
        if !image.exists() {
            host.make_image(name, MIB);
        }
        let again = host.attach(1, 0, &format!("aio:{}", image.display()));
        let daemon = host.spawn(None);
        let mut front = host.connect(&again);
        works(&mut front, 2);
        let new = keeper(&host, &again);
        assert!(new != old && !is_alive(old));
        front.close(PATIENCE).unwrap();
        end(&host, std::slice::from_ref(&again), &[new]);
        kill(daemon);
    }
}

/// The next daemon has another configuration. Its disks keep the options that they were attached
/// with.
#[test]
fn a_disk_shows_the_settings_that_its_worker_was_started_with() {
    let host = Host::new(2);
    let waits = [(host::ON_FULL, "wait")];
    let daemon = host.spawn_with(None, &waits);
    let mut disks = vec![attach(&host, 1)];
    let shown = |disk: &DiskPaths| {
        wait_until("the daemon", || host.status().is_ok());
        host.wait_for_phase(disk, PhaseName::Served);
        let details: Details = host.call("disk.show", &json!({ "disk": host::id(disk) })).unwrap();
        let on_full = details.settings.into_iter().find(|setting| setting.key == "on_full");
        let on_full = on_full.unwrap();
        (details.read_only, on_full.value, on_full.from)
    };
    let mut front = host.connect(&disks[0]);
    assert_eq!(shown(&disks[0]), (false, "wait".to_owned(), Source::Disks));
    kill(daemon);
    let daemon = host.spawn(None);
    assert_eq!(shown(&disks[0]), (false, "wait".to_owned(), Source::Earlier));
    disks.push(attach(&host, 2));
    assert_eq!(shown(&disks[1]), (false, "error".to_owned(), Source::Default));
    host.store().write(&format!("{}/mode", disks[1].backend), b"r").unwrap();
    assert!(shown(&disks[1]).0);
    works(&mut front, 1);
    front.close(PATIENCE).unwrap();
    let keepers: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
    end(&host, &disks, &keepers);
    kill(daemon);
}

#[test]
fn an_image_that_a_worker_cannot_open_is_told_and_tried_again() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let image = host.image("a.vhd");
    std::fs::write(&image, vec![0; 4096]).unwrap();
    let disk = host.attach(1, 0, &format!("vhd:{}", image.display()));
    wait_until("a reason", || host.status().is_ok());
    let failed = host.wait_for_phase(&disk, PhaseName::Failed);
    assert!(failed.why.unwrap().contains("a.vhd"));
    let good = images::make(host.dir.path(), "vhd", 4 * MIB);
    std::fs::rename(good, &image).unwrap();
    let mut front = host.connect(&disk);
    works(&mut front, 2);
    let keepers = [keeper(&host, &disk)];
    front.close(PATIENCE).unwrap();
    end(&host, std::slice::from_ref(&disk), &keepers);
    kill(daemon);
}

/// An image can name any file of the host (threats.md T25 and T28).
#[test]
fn a_parent_elsewhere_is_refused_with_what_to_do_and_the_image_is_free() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let [own, other] = ["own", "other"].map(|name| host.image(name));
    for folder in [&own, &other] {
        std::fs::create_dir(folder).unwrap();
    }
    let leaf = own.join("leaf.qcow2");
    let parent = images::make(&other, "qcow2", 4 * MIB);
    images::anywhere(&HostDirectory, |tools| {
        let parent = Some(images::name(&parent));
        tools.create(&images::name(&leaf), &NewImage { parent, ..NewImage::default() }).unwrap();
    });
    let disk = host.attach(1, 0, &format!("qcow2:{}", leaf.display()));
    let failed = host.wait_for_phase(&disk, PhaseName::Failed);
    let why = failed.why.unwrap();
    assert!(why.contains(parent.to_str().unwrap()), "{why}");
    let file = std::fs::File::options().read(true).write(true).open(&leaf).unwrap();
    // The next try of the daemon opens the image for a moment.
    wait_until("a free image", || flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok());
    drop(file);
    end(&host, std::slice::from_ref(&disk), &[]);
    kill(daemon);
}

/// An attacker who takes over the worker of a read-only disk cannot write (threats.md T10).
#[test]
fn the_worker_of_a_read_only_disk_has_no_right_to_write() {
    let host = Host::new(2);
    let daemon = host.spawn(None);
    for (domid, mode) in [(1, "r"), (2, "w")] {
        let image = host.make_image(&format!("{domid}.img"), MIB);
        let params = format!("aio:{}", image.display());
        let disk = host.attach_with(domid, 0, &params, &[("mode", mode)]);
        let mut front = host.connect(&disk);
        let pid = keeper(&host, &disk);
        let socket =
            host.paths().run.join("keepers").join(socket_name(&host::id(&disk).file_name()));
        let spec = Keeper::connect(&socket).unwrap().spec().unwrap();
        assert_eq!(spec.sandbox.unwrap().writable, mode == "w");
        // The keeper holds a writable image, unless the image's lock has to show that a dead
        // worker's operations have ended (docs/internals/processes.md 5).
        let is_held = mode == "w" && test_engine().holds();
        // The keeper has a descriptor for a moment while it sends it to the worker.
        wait_until("what the keeper holds", || {
            let held = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
            let held = held.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
            held.filter(|path| *path == image).count() == usize::from(is_held)
        });
        front.close(PATIENCE).unwrap();
        end(&host, std::slice::from_ref(&disk), &[pid]);
    }
    kill(daemon);
}
