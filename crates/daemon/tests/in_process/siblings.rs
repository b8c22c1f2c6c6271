//! Two attachments of one disk at a time: two domains that are one VM, in a migration.

use ferrite_daemon::control::protocol::PhaseName;
use ferrite_loopback::front::Frontend;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::PATIENCE;
use std::path::PathBuf;

use crate::host::{A_WHILE, Host, works};

const VM: &[u8] = b"/vm/6b7b2f6c-5a7e-4f55-9f35-1f2f8d0b8a11";

/// The names that xl gives two domains while it migrates.
const MOVE: [&str; 2] = ["g", "g--incoming"];

/// Guests 1 and 2. The first one is connected.
struct Pair {
    host: Host,
    image: PathBuf,
    source: (DiskPaths, Frontend),
}

fn pair(vms: [&[u8]; 2], names: [&str; 2]) -> Pair {
    let mut host = Host::new(3);
    be_called(&host, vms, names);
    host.start();
    let image = host.make_image("a.img", 8 << 20);
    let disk = host.attach(1, 0, &format!("aio:{}", image.display()));
    let mut front = host.connect(&disk);
    works(&mut front, 1);
    Pair { host, image, source: (disk, front) }
}

fn be_called(host: &Host, vms: [&[u8]; 2], names: [&str; 2]) {
    for (domid, (vm, name)) in (1..).zip(vms.into_iter().zip(names)) {
        host.store().write(&format!("/local/domain/{domid}/vm"), vm).unwrap();
        rename(host, domid, name);
    }
}

fn rename(host: &Host, domid: u16, name: &str) {
    host.store().write(&format!("/local/domain/{domid}/name"), name.as_bytes()).unwrap();
}

impl Pair {
    fn attach_target(&self) -> DiskPaths {
        self.host.attach(2, 0, &format!("aio:{}", self.image.display()))
    }

    /// Destroys the source as the toolstack does: it removes the frontend's directory first.
    fn destroy_source(&self) {
        let (source, _suspended) = &self.source;
        self.host.machine().unplug(source).unwrap();
        self.host.machine().destroy(source.domid).unwrap();
        self.host.wait_for_state(source, 6);
        self.host.machine().remove_disk(source).unwrap();
    }

    fn stamp(&self) -> u8 {
        std::fs::read(&self.image).unwrap()[4096]
    }
}

/// The order of steps of `xl migrate` to the same host.
#[test]
fn a_migrated_guest_is_served_when_its_source_rests_and_the_source_goes() {
    let pair = pair([VM, VM], MOVE);
    let target = pair.attach_target();
    pair.host.wait_for_phase(&target, PhaseName::Served);
    // The source rests before the target is served, since only one may have the image.
    pair.host.wait_for_phase(&pair.source.0, PhaseName::Resting);
    assert_eq!(pair.host.backend_state(&pair.source.0), 4);
    let waits = pair.host.show(&pair.source.0).unwrap().waits_for.unwrap();
    assert!(waits.contains("2/51712"), "{waits}");
    rename(&pair.host, 1, "g--migratedaway");
    rename(&pair.host, 2, "g");
    let mut front = pair.host.connect(&target);
    assert_eq!(pair.stamp(), 1);
    works(&mut front, 2);
    pair.destroy_source();
    works(&mut front, 3);
    front.close(PATIENCE).unwrap();
    pair.host.detach(&target);
    pair.host.wait_for_no_disks();
    assert_eq!(pair.stamp(), 3);
}

#[test]
fn a_migration_that_fails_goes_back_to_its_source() {
    let mut pair = pair([VM, VM], MOVE);
    for round in 2..5 {
        let target = pair.attach_target();
        pair.host.wait_for_phase(&target, PhaseName::Served);
        pair.host.wait_for_phase(&pair.source.0, PhaseName::Resting);
        pair.host.detach(&target);
        works(&mut pair.source.1, round);
        assert_eq!(pair.stamp(), round);
    }
    pair.host.wait_for_phase(&pair.source.0, PhaseName::Served);
}

/// A disk's own thread resolves its image's path once. Resolving it again might block for ever, if
/// its storage hangs.
#[test]
fn an_earlier_attachment_is_found_though_its_name_leads_nowhere_any_more() {
    let mut host = Host::new(2);
    be_called(&host, [VM, VM], MOVE);
    host.start();
    let image = host.make_image("a.img", 8 << 20);
    let link = host.image("link.img");
    std::os::unix::fs::symlink(&image, &link).unwrap();
    let source = host.attach(1, 0, &format!("aio:{}", link.display()));
    let mut front = host.connect(&source);
    works(&mut front, 1);
    std::fs::remove_file(&link).unwrap();
    let target = host.attach(2, 0, &format!("aio:{}", image.display()));
    host.wait_for_phase(&target, PhaseName::Served);
    host.wait_for_phase(&source, PhaseName::Resting);
}

#[test]
fn another_vms_disk_does_not_rest_for_who_names_the_same_image() {
    for vms in [[VM, b"/vm/another"], [VM, b""], [b"", b""]] {
        let mut pair = pair(vms, MOVE);
        let target = pair.attach_target();
        pair.host.wait_for_phase(&target, PhaseName::Starting);
        std::thread::sleep(A_WHILE);
        works(&mut pair.source.1, 2);
        pair.host.wait_for_phase(&pair.source.0, PhaseName::Served);
        pair.source.1.close(PATIENCE).unwrap();
        pair.host.detach(&pair.source.0);
        pair.host.wait_for_phase(&target, PhaseName::Served);
    }
}

#[test]
fn a_daemon_that_starts_again_leaves_the_image_to_the_later_attachment() {
    let mut pair = pair([VM, VM], MOVE);
    let target = pair.attach_target();
    pair.host.wait_for_phase(&target, PhaseName::Served);
    let mut front = pair.host.connect(&target);
    works(&mut front, 2);
    for round in 3..6 {
        pair.host.stop();
        pair.host.start();
        pair.host.wait_for_phase(&pair.source.0, PhaseName::Resting);
        works(&mut front, round);
    }
    front.close(PATIENCE).unwrap();
    pair.host.detach(&target);
    // The target's guest wrote last and has ended, and the source's guest does not know these data.
    for _ in 0..2 {
        let failed = pair.host.wait_for_phase(&pair.source.0, PhaseName::Failed);
        assert!(failed.why.unwrap().contains("2/51712"));
        pair.host.stop();
        pair.host.start();
    }
    assert_eq!(pair.host.backend_state(&pair.source.0), 4);
    assert_eq!(pair.stamp(), 5);
    pair.destroy_source();
    pair.host.wait_for_no_disks();
}

/// The toolstack renames the source just before it lets the target run. If that fails it restores
/// the name.
#[test]
fn a_source_is_served_on_when_the_toolstack_has_not_given_it_up() {
    let mut pair = pair([VM, VM], MOVE);
    let target = pair.attach_target();
    pair.host.wait_for_phase(&target, PhaseName::Served);
    rename(&pair.host, 1, "g--migratedaway");
    pair.host.detach(&target);
    pair.host.wait_for_phase(&pair.source.0, PhaseName::Failed);
    // No guest is moved from a failed source, neither by its first name nor by its new one.
    for name in ["g--incoming", "g--migratedaway--incoming"] {
        pair.host.store().write("/local/domain/3/vm", VM).unwrap();
        rename(&pair.host, 3, name);
        let target = pair.host.attach(3, 0, &format!("aio:{}", pair.image.display()));
        pair.host.wait_for_phase(&target, PhaseName::Failed);
        pair.host.detach(&target);
    }
    rename(&pair.host, 1, "g");
    works(&mut pair.source.1, 7);
    assert_eq!(pair.stamp(), 7);
}

/// A copied configuration has the same identifier, and both guests run.
#[test]
fn a_guest_that_is_not_moved_keeps_its_disk_from_others_of_its_identifier() {
    for names in [["g", "copy"], ["g", "h--incoming"], ["", ""], ["g--migratedaway", "g"]] {
        let mut pair = pair([VM, VM], names);
        let target = pair.attach_target();
        pair.host.wait_for_phase(&target, PhaseName::Starting);
        std::thread::sleep(A_WHILE);
        works(&mut pair.source.1, 2);
        pair.host.wait_for_phase(&pair.source.0, PhaseName::Served);
        pair.source.1.close(PATIENCE).unwrap();
        pair.host.detach(&pair.source.0);
        pair.host.wait_for_phase(&target, PhaseName::Served);
    }
}

/// Names of removed disks are used again.
#[test]
fn a_disk_of_the_same_name_does_not_rest_for_what_an_older_one_rested_for() {
    let mut pair = pair([VM, VM], MOVE);
    let target = pair.attach_target();
    pair.host.wait_for_phase(&pair.source.0, PhaseName::Resting);
    pair.host.wait_for_phase(&target, PhaseName::Served);
    pair.host.stop();
    let Pair { mut host, source, .. } = pair;
    drop(source.1);
    host.machine().remove_disk(&source.0).unwrap();
    host.machine().remove_disk(&target).unwrap();
    let other = host.make_image("b.img", 8 << 20);
    let disks = [(1, "a.img"), (2, "b.img")]
        .map(|(domid, name)| host.attach(domid, 0, &format!("aio:{}", host.image(name).display())));
    assert!(other.exists());
    host.start();
    for disk in &disks {
        host.wait_for_phase(disk, PhaseName::Served);
    }
}
