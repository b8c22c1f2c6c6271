//! Two attachments of one disk at a time: two domains that are one VM, in a migration.

mod host;

use ferrite_daemon::control::protocol::PhaseName;
use ferrite_loopback::front::Frontend;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::PATIENCE;
use host::{A_WHILE, Host, id, works};
use std::path::PathBuf;

const VM: &[u8] = b"/vm/6b7b2f6c-5a7e-4f55-9f35-1f2f8d0b8a11";

/// Guests 1 and 2, of which the first is connected.
struct Pair {
    host: Host,
    image: PathBuf,
    source: (DiskPaths, Frontend),
}

fn pair(vms: [&[u8]; 2]) -> Pair {
    let mut host = Host::new(2);
    for (domid, vm) in (1..).zip(vms) {
        host.store().write(&format!("/local/domain/{domid}/vm"), vm).unwrap();
    }
    host.start();
    let image = host.make_image("a.img", 8 << 20);
    let disk = host.attach(1, 0, &format!("aio:{}", image.display()));
    let mut front = host.connect(&disk);
    works(&mut front, 1);
    Pair { host, image, source: (disk, front) }
}

impl Pair {
    fn attach_target(&self) -> DiskPaths {
        self.host.attach(2, 0, &format!("aio:{}", self.image.display()))
    }

    fn stamp(&self) -> u8 {
        std::fs::read(&self.image).unwrap()[4096]
    }
}

/// The order of `xl migrate` to the same host.
#[test]
fn a_migrated_guest_is_served_when_its_source_rests_and_the_source_goes() {
    let pair = pair([VM, VM]);
    let target = pair.attach_target();
    pair.host.wait_for_phase(&target, PhaseName::Served);
    // Before the later one is, as the image is one's alone.
    pair.host.wait_for_phase(&pair.source.0, PhaseName::Resting);
    assert_eq!(pair.host.backend_state(&pair.source.0), 4);
    let waits = pair.host.show(&pair.source.0).unwrap().waits_for.unwrap();
    assert!(waits.contains("2/51712"), "{waits}");
    let mut front = pair.host.connect(&target);
    assert_eq!(pair.stamp(), 1);
    works(&mut front, 2);
    // The toolstack destroys the source: its frontend's directory goes first.
    let (source, _suspended) = &pair.source;
    pair.host.machine().unplug(source).unwrap();
    pair.host.machine().destroy(source.domid).unwrap();
    pair.host.wait_for_state(source, 6);
    pair.host.machine().remove_disk(source).unwrap();
    works(&mut front, 3);
    front.close(PATIENCE).unwrap();
    pair.host.detach(&target);
    pair.host.wait_for_no_disks();
    assert_eq!(pair.stamp(), 3);
}

#[test]
fn a_migration_that_fails_goes_back_to_its_source() {
    let mut pair = pair([VM, VM]);
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

/// What an image's name leads to is asked once, by its own disk: to ask again may never end, where its
/// storage does not answer.
#[test]
fn an_earlier_attachment_is_found_though_its_name_leads_nowhere_any_more() {
    let mut host = Host::new(2);
    for domid in 1..=2 {
        host.store().write(&format!("/local/domain/{domid}/vm"), VM).unwrap();
    }
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
        let mut pair = pair(vms);
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
    let mut pair = pair([VM, VM]);
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
    works(&mut pair.source.1, 9);
    assert_eq!(pair.stamp(), 9);
    assert_eq!(
        pair.host.disks().iter().map(|disk| disk.disk).collect::<Vec<_>>(),
        [id(&pair.source.0)]
    );
}

/// The names of disks that are gone are used again.
#[test]
fn a_disk_of_the_same_name_does_not_rest_for_what_an_older_one_rested_for() {
    let mut pair = pair([VM, VM]);
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
