//! Detached disks leave complete images, and nothing else.

use std::path::{Path, PathBuf};

use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::{PATIENCE, few_or_all, images, wait_until};

use crate::host::{Host, works};
use crate::roles::{MIB, attach, end, is_alive, keeper, kill, kill_pid, worker};

/// A disk is detached while no daemon runs, with answered writes in memory only. With `another`, a
/// new disk of its name is attached.
fn image_of_a_disk_whose_end_was_missed(another: bool) {
    let host = Host::new(1);
    let folder = host.image("qcow2");
    std::fs::create_dir(&folder).unwrap();
    let image = images::make(&folder, "qcow2", 4 * MIB);
    let daemon = host.spawn(None);
    let disk = host.attach(1, 0, &format!("qcow2:{}", image.display()));
    works(&mut host.connect(&disk), 7);
    let old = keeper(&host, &disk);
    kill(daemon);
    host.machine().remove_disk(&disk).unwrap();
    let raw = host.make_image("1.img", MIB);
    let again = another.then(|| host.attach(1, 0, &format!("aio:{}", raw.display())));
    let daemon = host.spawn(None);
    wait_until("the end of the keeper", || !is_alive(old));
    assert!(images::contents(&image)[4096..8192] == [7; 4096]);
    let journals = std::fs::read_dir(host.paths().run.join("images")).unwrap();
    assert_eq!(journals.count(), 0, "all of it is in the image");
    images::check(&image);
    if let Some(again) = again {
        let mut front = host.connect(&again);
        works(&mut front, 2);
        let keepers = [keeper(&host, &again)];
        front.close(PATIENCE).unwrap();
        end(&host, std::slice::from_ref(&again), &keepers);
    }
    kill(daemon);
}

#[test]
fn the_image_of_a_disk_that_went_without_a_daemon_is_closed_by_the_next_one() {
    image_of_a_disk_whose_end_was_missed(false);
}

#[test]
fn the_image_of_a_disk_whose_name_another_has_is_closed_before_that_is_served() {
    image_of_a_disk_whose_end_was_missed(true);
}

/// All files in the run directory.
fn files(host: &Host) -> Vec<PathBuf> {
    fn add(found: &mut Vec<PathBuf>, folder: &Path) {
        // A file may be removed meanwhile, so the caller lists them again.
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            found.push(entry.path());
            if entry.path().is_dir() {
                add(found, &entry.path());
            }
        }
    }
    let mut found = Vec::new();
    add(&mut found, &host.paths().run);
    found.sort();
    found
}

/// Fifty of them with each commit: each way to go once.
#[test]
fn a_hundred_disks_that_come_and_go_leave_nothing_whoever_is_killed() {
    const DISKS: u16 = 10;
    let host = Host::new(DISKS.into());
    let mut daemon = host.spawn(None);
    // The first disk creates directories, which stay.
    let first = attach(&host, 1);
    host.connect(&first).close(PATIENCE).unwrap();
    end(&host, &[first], &[]);
    let before = files(&host);
    for round in 0..few_or_all(5, 10) {
        let disks: Vec<DiskPaths> = (1..=DISKS).map(|domid| attach(&host, domid)).collect();
        let mut fronts: Vec<_> = disks.iter().map(|disk| host.connect(disk)).collect();
        fronts.iter_mut().for_each(|front| works(front, 7));
        let keepers: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
        let remove = || disks.iter().for_each(|disk| host.machine().remove_disk(disk).unwrap());
        match round % 5 {
            0 => fronts.drain(..).for_each(|mut front| front.close(PATIENCE).unwrap()),
            1 => keepers.iter().filter_map(|keeper| worker(*keeper)).for_each(kill_pid),
            2 => keepers.iter().copied().for_each(kill_pid),
            3 => {
                kill(daemon);
                keepers.iter().copied().for_each(kill_pid);
                remove();
                daemon = host.spawn(None);
            }
            _ => {
                kill(daemon);
                remove();
                daemon = host.spawn(None);
            }
        }
        if round % 5 < 3 {
            remove();
        }
        wait_until("no files of theirs", || files(&host) == before);
        wait_until("no keepers", || !keepers.iter().any(|keeper| is_alive(*keeper)));
    }
    kill(daemon);
}

#[test]
fn a_daemon_that_ends_in_good_order_leaves_no_socket_and_no_lock() {
    let mut host = Host::new(1);
    host.start();
    let run = host.paths().run;
    let names = ["control.sock", "daemon.lock"].map(|name| run.join(name));
    assert!(names.iter().all(|name| name.exists()));
    host.stop();
    assert!(!names.iter().any(|name| name.exists()));
    // The files of a killed daemon are no obstacle.
    kill(host.spawn(None));
    host.start();
}
