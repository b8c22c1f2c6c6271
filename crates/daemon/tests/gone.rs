//! What is left of disks that are gone: nothing, but their images, complete.

mod host;
mod roles;

use std::sync::Arc;

use ferrite_daemon::keeping::Keepers;
use ferrite_testkit::{PATIENCE, images, wait_until};
use host::{Host, works};
use roles::{MIB, Roles, end, is_alive, keeper, kill};

/// Not a test: the daemon.
#[test]
fn process_daemon() {
    host::be_a_daemon_with(|run| Arc::new(Keepers::new(run, Box::new(Roles))));
}

/// A disk that went while no daemon ran, of an image with its answered writes in memory, and perhaps
/// another disk of this name since.
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
    let journals = std::fs::read_dir(host.places().run.join("images")).unwrap();
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
