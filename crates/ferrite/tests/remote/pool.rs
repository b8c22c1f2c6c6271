//! Guests whose disks are in a pool of servers: by daemon, keeper, worker and the owner's process, each of which is killed.

use ferrite_daemon::control::protocol::PhaseName;
use ferrite_testkit::wait_until;

use crate::deep;
use crate::far::{Far, children};
use crate::pooled::Pool;
use crate::roles;

#[test]
fn a_guest_loses_nothing_when_a_server_or_any_process_of_its_disk_is_killed() {
    let Some(mut pool) = Pool::start(&["a", "b"]) else { return };
    let name = pool.create("web1", &deep::BYTES.to_string(), &[]);
    let mut far = Far::of(&[]);
    far.config = Some(pool.config());
    far.start();
    let (disk, load) = far.load(&name);
    let owner = || children(roles::keeper(&far.host, &disk), "pool").first().copied();
    for _ in 0..3 {
        wait_until("an owner", || owner().is_some());
        roles::kill_pid(owner().unwrap());
        load.wait_for_progress();
    }
    far.kill_worker(&disk);
    load.wait_for_progress();
    // The disk grows, and the process that has it ends before it has seen that.
    let key = format!("{}/sectors", disk.backend);
    let sectors = || far.host.store().read_string(&key).unwrap().unwrap().parse::<u64>().unwrap();
    let bytes = deep::BYTES;
    for more in [8 << 20, 16 << 20] {
        pool.ok(&["pool", "resize", "lab/web1", &(bytes + more).to_string()]);
        if more == 8 << 20 {
            roles::kill_pid(owner().unwrap());
        }
        load.wait_for_progress();
        wait_until("the new size", || sectors() * 512 == bytes + more);
    }
    load.wait_for_progress();
    pool.kill("b");
    load.wait_for_progress();
    load.wait_for_progress();
    far.kill_keeper(&disk);
    load.wait_for_progress();
    far.restart();
    load.wait_for_progress();
    assert_eq!(load.errors(), 0);
    // The name that the toolstack writes may not say where etcd is.
    let elsewhere = far.host.attach(
        1,
        1,
        &format!("aio:{name}?etcd=http://127.0.0.1:1&plain=yes&experimental=yes"),
    );
    let failed = far.host.wait_for_phase(&elsewhere, PhaseName::Failed);
    assert!(failed.help.unwrap().contains("leave etcd"), "{:?}", failed.why);
    far.host.detach(&elsewhere);
    far.end(&disk, load);
}
