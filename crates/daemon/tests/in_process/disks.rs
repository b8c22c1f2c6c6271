//! Disks that toolstacks attach and detach, and one daemon that serves them all.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{Attached, Detached, PhaseName, code};
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::{PATIENCE, images, wait_until};
use ferrite_xen::store::StoreError;
use serde_json::json;

use crate::host::{self, Host, connect, id, works};

const MIB: u64 = 1 << 20;

#[test]
fn disks_of_all_formats_are_served_until_they_are_detached() {
    let mut host = Host::new(3);
    host.start();
    let raw = host.make_image("a:b.img", 8 * MIB);
    let folder = host.image("vhd");
    std::fs::create_dir(&folder).unwrap();
    let vhd = images::make(&folder, "vhd", 8 * MIB);
    let folder = host.image("qcow2");
    std::fs::create_dir(&folder).unwrap();
    let qcow2 = images::make(&folder, "qcow2", 8 * MIB);
    let disks = [
        host.attach(1, 0, &format!("aio:{}", raw.display())),
        host.attach(2, 0, &format!("vhd:{}", vhd.display())),
        host.attach(3, 0, &format!("aio:qcow2:{}", qcow2.display())),
    ];
    let mut fronts: Vec<_> = disks.iter().map(|disk| host.connect(disk)).collect();
    for (i, front) in fronts.iter_mut().enumerate() {
        works(front, i as u8 + 1);
    }
    let listed = host.disks();
    assert!(listed.iter().all(|disk| disk.phase == PhaseName::Served), "{listed:?}");
    let mut minors: Vec<u32> = listed.iter().map(|disk| disk.minor).collect();
    minors.sort_unstable();
    assert_eq!(minors, [0, 1, 2]);
    assert_eq!(listed[0].image.as_deref(), raw.to_str());
    assert_eq!(host.show(&disks[0]).unwrap().waits_for, None);
    for (front, disk) in fronts.into_iter().zip(&disks) {
        drop(front);
        let mut front = host.frontend(disk);
        front.set_state(6).unwrap();
        host.detach(disk);
    }
    host.wait_for_no_disks();
    assert_eq!(host.removed().len(), 3);
    images::check(&vhd);
    images::check(&qcow2);
}

/// The names for tapdisk's tools, with the disks' sockets. Without keepers there are no sockets, so these are the records
/// of the names.
fn tapdisk_names(host: &Host) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(host.paths().run.join("names")).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| {
            let target = std::fs::read_link(entry.path()).unwrap();
            (entry.file_name().into_string().unwrap(), target)
        })
        .collect();
    names.sort();
    names
}

#[test]
fn tapdisks_numbers_and_names_of_disks_are_the_same_for_the_next_daemon() {
    let mut host = Host::new(4);
    host.start();
    let attach = |host: &Host, domid: u16| {
        let image = host.make_image(&format!("{domid}.img"), MIB);
        host.attach(domid, 0, &format!("aio:{}", image.display()))
    };
    let minors = |host: &Host| -> Vec<(u16, u32)> {
        host.disks().iter().map(|disk| (disk.disk.domid, disk.minor)).collect()
    };
    let run = host.paths().run;
    let names = |disks: &[(u16, u32)]| -> Vec<(String, PathBuf)> {
        let name = |(domid, minor): &(u16, u32)| {
            let target = run.join(format!("vbd-{domid}-51712/nbd"));
            (format!("nbd{}.{minor}", std::process::id()), target)
        };
        disks.iter().map(name).collect()
    };
    let mut fronts = Vec::new();
    for domid in [3, 4] {
        let disk = attach(&host, domid);
        fronts.push((host.connect(&disk), disk));
    }
    assert_eq!(minors(&host), [(3, 0), (4, 1)]);
    assert_eq!(tapdisk_names(&host), names(&[(3, 0), (4, 1)]));
    host.stop();
    // The new disk is found first, and gets a number of its own.
    let disk = attach(&host, 2);
    host.start();
    fronts.push((host.connect(&disk), disk));
    host.wait_for_phase(&fronts[1].1, PhaseName::Served);
    assert_eq!(minors(&host), [(2, 2), (3, 0), (4, 1)]);
    assert_eq!(tapdisk_names(&host), names(&[(3, 0), (4, 1), (2, 2)]));
    // A disk is removed while there is no daemon. Its number is free for the next one.
    host.stop();
    host.machine().remove_disk(&fronts.remove(0).1).unwrap();
    host.start();
    let disk = attach(&host, 1);
    fronts.push((host.connect(&disk), disk));
    assert_eq!(minors(&host), [(1, 0), (2, 2), (4, 1)]);
    assert_eq!(tapdisk_names(&host), names(&[(1, 0), (4, 1), (2, 2)]));
    for (mut front, disk) in fronts {
        front.close(PATIENCE).unwrap();
        host.detach(&disk);
    }
    host.wait_for_no_disks();
    assert_eq!(tapdisk_names(&host), []);
}

#[test]
fn a_device_is_attached_again_with_another_image() {
    let mut host = Host::new(1);
    host.start();
    for round in 0..5u8 {
        let image = host.make_image(&format!("{round}.img"), 4 * MIB);
        let disk = host.attach(1, 0, &format!("aio:{}", image.display()));
        let mut front = host.connect(&disk);
        works(&mut front, round + 1);
        front.close(PATIENCE).unwrap();
        host.detach(&disk);
        let data = std::fs::read(&image).unwrap();
        assert!(data[4096..8192].iter().all(|byte| *byte == round + 1), "round {round}");
    }
    host.wait_for_no_disks();
}

#[test]
fn thirty_disks_come_and_go_in_a_storm() {
    let mut host = Host::new(30);
    host.start();
    for round in 0..3 {
        let disks: Vec<DiskPaths> = (1..=30u16)
            .map(|domid| {
                let image = host.make_image(&format!("{domid}.img"), MIB);
                host.attach(domid, round, &format!("aio:{}", image.display()))
            })
            .collect();
        for disk in &disks {
            let mut front = host.connect(disk);
            works(&mut front, disk.domid.0 as u8);
            front.close(PATIENCE).unwrap();
        }
        assert_eq!(host.status().unwrap().served, 30);
        for disk in &disks {
            host.machine().unplug(disk).unwrap();
        }
        for disk in &disks {
            host.wait_for_state(disk, 6);
            host.machine().remove_disk(disk).unwrap();
        }
        host.wait_for_no_disks();
    }
}

#[test]
fn a_script_comes_between_the_offer_and_the_connection() {
    let mut host = Host::new(1);
    host.start();
    let image = host.make_image("a.img", MIB);
    let params = format!("aio:{}", image.display());
    let disk = host.attach_with(1, 0, &params, &[("script", "/etc/xen/scripts/block-ferrite")]);
    host.wait_for_state(&disk, 2);
    let mut front = host.frontend(&disk);
    front.offer(&Default::default()).unwrap();
    wait_until("a reason to wait", || {
        let waits = host.show(&disk).unwrap().waits_for;
        waits.is_some_and(|waits| waits.contains("hotplug script"))
    });
    assert_eq!(host.backend_state(&disk), 2);
    let asked = json!({ "backend": "backend/vbd3/1/51712" });
    let attached: Attached = host.call("attach.wait", &asked).unwrap();
    assert_eq!(attached.disk.phase, PhaseName::Served);
    host.store().write(&format!("{}/hotplug-status", disk.backend), b"connected").unwrap();
    front.finish(PATIENCE).unwrap();
    works(&mut front, 7);
}

#[test]
fn a_failure_names_the_disk_that_is_served_from_the_same_image() {
    let mut host = Host::new(3);
    host.start();
    let image = host.make_image("a.img", MIB);
    let params = format!("aio:{}", image.display());
    let first = host.attach(1, 0, &params);
    host.wait_for_phase(&first, PhaseName::Served);
    // Later attachments fail at once, since the name does not exist any more.
    std::fs::remove_file(&image).unwrap();
    let second = host.attach(2, 0, &params);
    let other = host.attach(3, 0, &format!("{params}2"));
    let help = |disk| host.wait_for_phase(disk, PhaseName::Failed).help.unwrap();
    let named = "disk 1/51712 is served from the same image; ";
    assert!(help(&second).starts_with(named), "{}", help(&second));
    assert!(!help(&other).contains("same image"), "{}", help(&other));
}

#[test]
fn an_image_that_cannot_be_served_fails_alone_with_a_reason_and_is_tried_again() {
    let mut host = Host::new(4);
    host.start();
    let missing = host.image("missing.img");
    let script = ("script", "block-ferrite");
    let bad = host.attach_with(1, 0, &format!("aio:{}", missing.display()), &[script]);
    let outside = host.dir.path().join("outside.img");
    std::fs::write(&outside, [0; 4096]).unwrap();
    std::os::unix::fs::symlink(&outside, host.image("link.img")).unwrap();
    let link = host.image("link.img");
    let refused = host.attach(2, 0, &format!("aio:{}", link.display()));
    let odd = host.attach(3, 0, "nbd:/x");
    let why = host.wait_for_phase(&bad, PhaseName::Failed).why.unwrap();
    assert!(why.contains("missing.img"), "{why}");
    let failed = host.wait_for_phase(&refused, PhaseName::Failed);
    assert!(failed.why.unwrap().contains("none of the folders"));
    assert!(failed.help.unwrap().contains("image_folders"));
    // Without a script the disk cannot be attached.
    wait_until("a second try", || {
        host.disks().iter().any(|disk| disk.disk == id(&refused) && disk.starts > 1)
    });
    assert_eq!(host.backend_state(&refused), 1);
    let why = host.wait_for_phase(&odd, PhaseName::Failed).why.unwrap();
    assert!(why.contains("nbd:/x"), "{why}");
    // xl waits for 2 before it runs the script, which then gets the reason.
    host.wait_for_state(&bad, 2);
    let error = host.call::<Attached>("attach.wait", &json!({ "backend": bad.backend }));
    let ClientError::Refused(error) = error.unwrap_err() else { panic!() };
    assert_eq!(error.code, code::FAILED);
    assert!(error.message.contains("missing.img"), "{error:?}");
    let told = "error/backend/vbd3/1/51712/error";
    let told = host.store().read_string(&format!("/local/domain/0/{told}")).unwrap().unwrap();
    assert!(told.contains("missing.img") && told.contains("create the image"), "{told}");
    // Other disks are served.
    let image = host.make_image("good.img", MIB);
    let good = host.attach(4, 0, &format!("aio:{}", image.display()));
    works(&mut host.connect(&good), 3);
    // The daemon notices that the cause is gone.
    host.make_image("missing.img", MIB);
    host.store().write(&format!("{}/hotplug-status", bad.backend), b"connected").unwrap();
    works(&mut host.connect(&bad), 4);
    // The failed disks are detached as others are.
    host.detach(&refused);
    host.detach(&odd);
    wait_until("their end", || host.disks().len() == 2);
}

#[test]
fn the_end_of_a_disk_that_cannot_be_served_any_more_waits_for_its_guest_and_its_image() {
    let mut host = Host::new(1);
    host.start();
    let image = host.make_image("a.img", MIB);
    let disk = host.attach(1, 0, &format!("aio:{}", image.display()));
    let mut front = host.connect(&disk);
    host.stop();
    let away = host.image("away.img");
    std::fs::rename(&image, &away).unwrap();
    host.start();
    host.wait_for_phase(&disk, PhaseName::Failed);
    assert_eq!(host.backend_state(&disk), 4);
    host.machine().unplug(&disk).unwrap();
    wait_until("a second try", || host.disks()[0].starts > 1);
    std::thread::sleep(host::A_WHILE);
    assert_eq!(host.backend_state(&disk), 5);
    let waits = host.show(&disk).unwrap().waits_for.unwrap();
    assert!(waits.contains("unmount it"), "{waits}");
    front.set_state(6).unwrap();
    // The toolstack has to wait, too: another host may open the image after the end.
    let starts = host.disks()[0].starts;
    wait_until("two more tries", || host.disks()[0].starts > starts + 1);
    assert_eq!(host.backend_state(&disk), 5);
    std::fs::rename(&away, &image).unwrap();
    host.wait_for_state(&disk, 6);
    host.machine().remove_disk(&disk).unwrap();
    host.wait_for_no_disks();
}

#[test]
fn a_disk_that_was_never_served_ends_when_its_guest_lets_go() {
    a_disk_ends_that_was_never_served(false);
}

#[test]
fn a_disk_that_was_never_served_ends_also_by_a_later_daemon() {
    a_disk_ends_that_was_never_served(true);
}

fn a_disk_ends_that_was_never_served(by_later_daemon: bool) {
    let mut host = Host::new(1);
    host.start();
    let params = format!("aio:{}", host.image("missing.img").display());
    let disk = host.attach_with(1, 0, &params, &[("script", "block-ferrite")]);
    host.wait_for_state(&disk, 2);
    let mut front = host.frontend(&disk);
    front.offer(&Default::default()).unwrap();
    host.machine().unplug(&disk).unwrap();
    if by_later_daemon {
        host.stop();
        host.start();
    }
    let starts = host.disks().first().map_or(0, |disk| disk.starts);
    wait_until("two more tries", || host.disks().iter().any(|disk| disk.starts > starts + 1));
    assert_eq!(host.backend_state(&disk), 5);
    front.set_state(6).unwrap();
    host.wait_for_state(&disk, 6);
    host.machine().remove_disk(&disk).unwrap();
    host.wait_for_no_disks();
}

#[test]
fn force_gives_up_an_image_that_cannot_be_opened_any_more() {
    let mut host = Host::new(1);
    host.start();
    let image = host.make_image("a.img", MIB);
    let disk = host.attach(1, 0, &format!("aio:{}", image.display()));
    let mut front = host.connect(&disk);
    host.stop();
    std::fs::remove_file(&image).unwrap();
    host.start();
    host.wait_for_phase(&disk, PhaseName::Failed);
    host.machine().unplug(&disk).unwrap();
    front.set_state(6).unwrap();
    let waits = |part| {
        wait_until("a reason", || host.show(&disk).unwrap().waits_for.unwrap().contains(part))
    };
    waits("cannot be");
    waits("--force");
    let asked = json!({ "disk": id(&disk), "force": true, "timeout_s": 1 });
    let detached: Detached = host.call("disk.detach", &asked).unwrap();
    assert!(detached.forced);
    host.wait_for_no_disks();
    assert_eq!(host.store().read(&format!("{}/state", disk.backend)).unwrap(), None);
}

#[test]
fn an_empty_drive_and_changed_params_do_no_harm() {
    let mut host = Host::new(1);
    host.start();
    let drive = host.attach_with(1, 2, "aio:", &[("device-type", "cdrom")]);
    host.wait_for_state(&drive, 2);
    host.wait_for_phase(&drive, PhaseName::Empty);
    let asked = json!({ "backend": drive.backend });
    host.call::<Attached>("attach.wait", &asked).unwrap();
    let image = host.make_image("a.img", MIB);
    let disk = host.attach(1, 0, &format!("aio:{}", image.display()));
    let mut front = host.connect(&disk);
    for dir in [&drive.backend, &disk.backend] {
        host.store().write(&format!("{dir}/params"), b"/srv/other.iso").unwrap();
    }
    works(&mut front, 1);
    // The next daemon goes on with the image that the guest has.
    host.stop();
    host.start();
    works(&mut front, 2);
    assert_eq!(host.show(&disk).unwrap().disk.image.as_deref(), image.to_str());
    assert_eq!(host.backend_state(&drive), 2);
    host.detach(&drive);
}

#[test]
fn a_disk_that_was_detached_while_no_daemon_ran_leaves_nothing() {
    let mut host = Host::new(2);
    host.start();
    let image = host.make_image("a.img", MIB);
    let (gone, stays) = (
        host.attach(1, 0, &format!("aio:{}", image.display())),
        host.attach(2, 0, &format!("aio:{}", host.make_image("b.img", MIB).display())),
    );
    drop((host.connect(&gone), host.connect(&stays)));
    host.stop();
    host.machine().remove_disk(&gone).unwrap();
    // A disk that was attached again under its name is a new one.
    host.machine().remove_disk(&stays).unwrap();
    let other = host.make_image("c.img", MIB);
    let again = host.attach(2, 0, &format!("aio:{}", other.display()));
    host.start();
    works(&mut host.connect(&again), 9);
    let listed = host.disks();
    assert_eq!(listed.len(), 1, "{listed:?}");
    assert_eq!(listed[0].image.as_deref(), other.to_str());
    assert_eq!(host.removed(), [id(&gone)]);
    assert_eq!(host.leftovers().len(), 2);
}

#[test]
fn a_dead_guests_disks_end_with_it() {
    let mut host = Host::new(2);
    host.start();
    let image = host.make_image("a.img", MIB);
    let served = host.attach(1, 0, &format!("aio:{}", image.display()));
    let empty = host.attach(1, 1, "aio:");
    drop(host.connect(&served));
    host.wait_for_phase(&empty, PhaseName::Empty);
    host.machine().destroy(served.domid).unwrap();
    for disk in [&served, &empty] {
        host.wait_for_state(disk, 6);
        host.machine().remove_disk(disk).unwrap();
    }
    host.wait_for_no_disks();
}

#[test]
fn detach_asks_the_guest_and_takes_the_disk_only_with_force() {
    let mut host = Host::new(1);
    host.start();
    let image = host.make_image("a.img", MIB);
    let disk = host.attach(1, 0, &format!("aio:{}", image.display()));
    let mut front = host.connect(&disk);
    let ask = |force: bool| -> Result<Detached, ClientError> {
        let asked = json!({ "disk": id(&disk), "force": force, "timeout_s": 1 });
        host.call("disk.detach", &asked)
    };
    let ClientError::Refused(error) = ask(false).unwrap_err() else { panic!() };
    assert_eq!(error.code, code::TIMEOUT);
    assert!(error.message.contains("unmount it"), "{error:?}");
    works(&mut front, 1);
    let waits = host.show(&disk).unwrap().waits_for.unwrap();
    assert!(waits.contains("--force"), "{waits}");
    assert!(ask(true).unwrap().forced);
    host.wait_for_no_disks();
    assert_eq!(host.store().read(&format!("{}/state", disk.backend)).unwrap(), None);
    let ClientError::Refused(error) = ask(true).unwrap_err() else { panic!() };
    assert_eq!(error.code, code::NO_DISK);
}

#[test]
fn without_xen_the_daemon_says_so_and_begins_when_there_is_some() {
    let mut host = Host::new(1);
    let image = host.make_image("a.img", MIB);
    let disk = host.attach(1, 0, &format!("aio:{}", image.display()));
    let (there, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (is_there, counted) = (there.clone(), asked.clone());
    let way = connect(&host.store_socket());
    host.start_with(
        host.config(),
        Box::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            match is_there.load(Ordering::SeqCst) {
                true => way(),
                false => Err(StoreError::Unreachable { tried: "no socket is there".to_owned() }),
            }
        }),
    );
    wait_until("a second question", || asked.load(Ordering::SeqCst) > 1);
    let status = host.status().unwrap();
    assert!(!status.xen && status.no_xen.unwrap().contains("no socket is there"));
    assert!(host.disks().is_empty());
    there.store(true, Ordering::SeqCst);
    works(&mut host.connect(&disk), 1);
    assert!(host.status().unwrap().xen);
}

#[test]
fn a_second_daemon_is_refused() {
    let mut host = Host::new(0);
    host.start();
    let again = host.paths();
    let stop = Arc::new(ferrite_serve::waker::Waker::new().unwrap());
    let loopback = Arc::new(ferrite_loopback::Loopback::new(ferrite_loopback::CopyWith::Memcpy));
    let serving = Arc::new(host::InProcess { loopback, removed: Default::default() });
    let way = connect(&host.store_socket());
    let second = ferrite_daemon::Daemon::new(host.config(), again, serving, way, stop);
    assert!(second.err().unwrap().to_string().contains("another ferrite daemon"));
    assert!(host.status().is_ok());
}
