//! Against a real etcd: what each command makes of the map, also when another change comes just before its own, and when an
//! answer is lost. The servers of the pool are their keys alone.

#[path = "../../etcd/tests/peers/mod.rs"]
mod peers;

use std::sync::Arc;

use ferrite_etcd::{Cluster, Revision, Said, Settings, Transaction};
use ferrite_pool_map::{Access, Error, Id, NewDisk, Server, Shape, State, Stored};
use peers::{Next, Proxy, Servers};

const GIB: u64 = 1 << 30;

/// A pool with servers, and a way to it with a proxy.
struct Rig {
    direct: Arc<Access>,
    through: Access,
    proxy: Proxy,
    cluster: Cluster,
    _servers: Servers,
}

impl Rig {
    /// The servers a, b, … of so many GiB, each a host of its own.
    fn new(name: &str, sizes: &[u64]) -> Option<Rig> {
        let servers = Servers::start(name, 1)?;
        let proxy = Proxy::of(&servers.urls[0]);
        let settings = Settings { endpoints: vec![proxy.url.clone()], ..servers.settings() };
        let through = Access::new(Cluster::new(&settings).unwrap(), "p").unwrap();
        let direct = Arc::new(Access::new(servers.client(), "p").unwrap());
        let rig = Rig { direct, through, proxy, cluster: servers.client(), _servers: servers };
        rig.direct.init().unwrap();
        for (i, gib) in (0u8..).zip(sizes) {
            let address = format!("127.0.0.{}:10809", i + 1).parse().unwrap();
            let bytes = gib * GIB;
            let server = Server { address, free: bytes, total: bytes, boot: "1".to_owned() };
            let name = char::from(b'a' + i);
            rig.put(&format!("servers/{name}"), serde_json::to_vec(&server).unwrap());
        }
        Some(rig)
    }

    fn state(&self) -> State {
        self.direct.state().unwrap()
    }

    /// Writes a key, as a server or an owner does.
    fn put(&self, key: &str, value: Vec<u8>) {
        put(&self.cluster, &self.direct, key, value);
    }

    /// The servers of a disk's sets.
    fn servers_of(&self, disk: &str) -> Vec<String> {
        let state = self.state();
        let of =
            |set: &ferrite_pool_map::Set| set.copies.iter().map(|c| c.server.clone()).collect();
        state.disks[disk].sets().map(|(set, _)| of(set)).collect()
    }
}

fn put(cluster: &Cluster, pool: &Access, key: &str, value: Vec<u8>) {
    let key = format!("ferrite/{}/{key}", pool.state().unwrap().pool.id);
    let revision = cluster.get(&key).unwrap().map_or(Revision::ABSENT, |entry| entry.revision);
    let said = cluster.commit(&Transaction::when(&key, revision).put(&key, value)).unwrap();
    assert!(matches!(said, Said::Won(_)));
}

/// An owner takes the only set of a disk.
fn own(cluster: &Cluster, pool: &Access, disk: &str, generation: u64) {
    let members = pool.state().unwrap().records[&(disk.to_owned(), 0)].stored.in_sync.clone();
    let stored = Stored { generation, owner: 77, ..Stored::new(members) };
    put(cluster, pool, &format!("records/{disk}/0"), serde_json::to_vec(&stored).unwrap());
}

fn new(gib: u64, replicas: usize, stripes: usize) -> NewDisk {
    let shape = Shape { replicas, stripes, stripe_size: 1 << 20 };
    NewDisk { bytes: gib * GIB, shape, request: Id::random(), on: Vec::new() }
}

#[test]
fn a_disk_is_made_once_for_each_request_and_grows_and_goes() {
    let Some(rig) = Rig::new("once", &[40, 30, 20]) else { return };
    let wanted = new(8, 2, 2);
    let made = rig.direct.create("web", &wanted).unwrap();
    assert!(!made.was_there && made.disk.bytes() == 8 * GIB);
    assert_eq!(rig.servers_of("web"), ["ab", "ca"]);
    let again = rig.direct.create("web", &wanted).unwrap();
    assert_eq!((again.was_there, again.disk), (true, made.disk));
    assert!(matches!(rig.direct.create("web", &new(8, 2, 2)), Err(Error::Exists(_))));
    assert!(matches!(rig.direct.create("big", &new(21, 3, 1)), Err(Error::Room(_))));
    assert!(matches!(rig.direct.create("a/b", &wanted), Err(Error::Name(_))));

    let grown = rig.direct.resize("web", 12 * GIB).unwrap().disk;
    assert_eq!((grown.bytes(), grown.sets().count()), (12 * GIB, 4));
    assert!(rig.direct.resize("web", 12 * GIB).unwrap().was_there);
    assert!(matches!(rig.direct.resize("web", GIB), Err(Error::Refused(_))));
    let state = rig.state();
    assert_eq!(state.records.len(), 4);
    assert!(state.records.values().all(|record| record.stored.in_sync == [0, 1].into()));

    rig.direct.delete("web", false).unwrap();
    let state = rig.state();
    assert!(state.disks.is_empty() && state.records.is_empty() && state.odd.is_empty());
    assert_eq!(state.removed.len(), 8);
    assert!(matches!(rig.direct.delete("web", true), Err(Error::NoDisk { .. })));
}

#[test]
fn an_answer_that_is_lost_makes_no_second_disk_and_no_late_one() {
    let Some(rig) = Rig::new("lost", &[40, 30]) else { return };
    for (next, name) in [(Next::SwallowsTheAnswer, "one"), (Next::Keeps, "two")] {
        rig.proxy.next(next);
        let made = rig.through.create(name, &new(4, 2, 1)).unwrap();
        let before = rig.state();
        rig.proxy.pass_what_was_kept();
        let after = rig.state();
        assert_eq!(after.disks[name], made.disk);
        assert_eq!((before.disks, before.revision), (after.disks, after.revision));
    }
}

#[test]
fn each_change_that_loses_is_decided_anew() {
    let Some(rig) = Rig::new("anew", &[40, 39, 38]) else { return };
    let before = |act: fn(&Access, &Cluster)| {
        let (pool, cluster) = (rig.direct.clone(), rig._servers.client());
        rig.proxy.before_next(move || act(&pool, &cluster));
    };
    // Made: a disk of its name comes before, and another one that takes the emptiest servers.
    before(|pool, _| drop(pool.create("x", &new(3, 1, 1)).unwrap()));
    assert!(matches!(rig.through.create("x", &new(1, 1, 1)), Err(Error::Exists(_))));
    before(|pool, _| drop(pool.create("y", &new(30, 2, 1)).unwrap()));
    rig.through.create("z", &new(9, 1, 1)).unwrap();
    assert_eq!(rig.servers_of("z"), ["a"]);
    assert_eq!(rig.servers_of("y"), ["bc"]);

    // Grown: another client lets it grow as far.
    before(|pool, _| drop(pool.resize("x", 4 * GIB).unwrap()));
    assert!(rig.through.resize("x", 4 * GIB).unwrap().was_there);
    assert_eq!(rig.state().disks["x"].segments.len(), 2);

    // Drained: both servers are.
    before(|pool, _| pool.set_drained("a", true).unwrap());
    rig.through.set_drained("b", true).unwrap();
    assert_eq!(rig.state().pool.drained, ["a".to_owned(), "b".to_owned()].into());
    rig.direct.set_drained("b", false).unwrap();

    // Replaced: the server that was to have the copy is drained, and only one is left that is.
    rig.direct.set_drained("a", false).unwrap();
    rig.direct.create("w", &new(1, 1, 1)).unwrap();
    assert_eq!(rig.servers_of("w"), ["a"]);
    before(|pool, _| pool.set_drained("b", true).unwrap());
    let replaced = rig.through.replace("w", "a", None).unwrap();
    assert_eq!((replaced[0].to.as_str(), replaced[0].done), ("c", true));

    // Stolen: the owner's own change comes before, and the disk is taken from the later generation.
    own(&rig.cluster, &rig.direct, "w", 3);
    before(|pool, cluster| own(cluster, pool, "w", 4));
    assert!(rig.through.steal("w").unwrap());
    let stored = rig.state().records[&("w".to_owned(), 0)].stored.clone();
    assert_eq!((stored.generation, stored.owner), (5, 0));
    assert!(!rig.direct.steal("w").unwrap(), "no owner has it");

    // Removed: an owner takes the disk before.
    before(|pool, cluster| own(cluster, pool, "w", 6));
    assert!(matches!(rig.through.delete("w", false), Err(Error::Refused(_))));
    assert!(rig.state().disks.contains_key("w"));
    rig.direct.delete("w", true).unwrap();
}

#[test]
fn a_pool_is_made_once_also_by_two() {
    let Some(servers) = Servers::start("two", 1) else { return };
    let proxy = Proxy::of(&servers.urls[0]);
    let settings = Settings { endpoints: vec![proxy.url.clone()], ..servers.settings() };
    let through = Access::new(Cluster::new(&settings).unwrap(), "p").unwrap();
    let direct = Arc::new(Access::new(servers.client(), "p").unwrap());
    assert!(matches!(direct.state(), Err(Error::NoPool(_))));
    let first = direct.clone();
    proxy.before_next(move || drop(first.init().unwrap()));
    assert!(matches!(through.init(), Err(Error::Exists(_))));
    direct.state().unwrap();
}

#[test]
fn a_copy_of_an_opened_disk_stays_until_its_owner_has_another() {
    let Some(rig) = Rig::new("stay", &[40, 39, 38]) else { return };
    rig.direct.create("d", &new(4, 2, 1)).unwrap();
    own(&rig.cluster, &rig.direct, "d", 1);
    let replaced = rig.direct.replace("d", "b", None).unwrap();
    assert_eq!((replaced[0].to.as_str(), replaced[0].done), ("c", false));
    assert_eq!(rig.direct.replace("d", "b", None).unwrap(), [], "it is under way already");
    let state = rig.state();
    let (set, _) = state.disks["d"].sets().next().unwrap();
    let copies: Vec<_> =
        set.copies.iter().map(|c| (c.server.as_str(), c.member, c.leaves)).collect();
    assert_eq!(copies, [("a", 0, false), ("b", 1, true), ("c", 2, false)]);
    // The record is its owner's.
    let record = &state.records[&("d".to_owned(), 0)].stored;
    assert_eq!((record.owner, &record.in_sync), (77, &[0, 1].into()));
    assert!(matches!(rig.direct.replace("d", "a", None), Err(Error::Room(_))));
    // It stays in the map while the record has it.
    assert!(!rig.direct.retire("d", 0, 1).unwrap());
    let stored = Stored { generation: 1, owner: 77, ..Stored::new([0, 2]) };
    put(&rig.cluster, &rig.direct, "records/d/0", serde_json::to_vec(&stored).unwrap());
    assert!(!rig.direct.retire("d", 0, 0).unwrap(), "no copy replaces it");
    assert!(rig.direct.retire("d", 0, 1).unwrap());
    assert_eq!(rig.servers_of("d"), ["ac"]);
    assert_eq!(rig.state().removed[0].server, "b");
    assert!(!rig.direct.retire("d", 0, 1).unwrap(), "it is gone");
}

#[test]
fn a_key_with_something_else_is_named_and_nothing_is_placed_meanwhile() {
    let Some(rig) = Rig::new("odd", &[40, 39]) else { return };
    rig.direct.create("d", &new(4, 1, 1)).unwrap();
    for (key, bad) in [
        ("disks/e", "{}"),
        ("disks/e", "[1"),
        ("servers/x", r#"{"address":"nowhere","free":1,"total":1,"boot":""}"#),
        ("records/d/0", r#"{"generation":1,"owner":1,"in_sync":[],"out":[],"nonce":1}"#),
        ("records/d/0", r#"{"generation":-1,"owner":1,"in_sync":[0],"out":[],"nonce":1}"#),
    ] {
        let full = format!("ferrite/{}/{key}", rig.state().pool.id);
        let good = rig.cluster.get(&full).unwrap();
        rig.put(key, bad.into());
        let state = rig.state();
        assert_eq!(state.odd.len(), 1, "{bad}");
        assert!(state.odd[0].0.ends_with(key));
        assert!(matches!(rig.direct.create("f", &new(1, 1, 1)), Err(Error::Odd { .. })), "{bad}");
        match good {
            Some(entry) => rig.put(key, entry.value),
            None => {
                let revision = rig.cluster.get(&full).unwrap().unwrap().revision;
                rig.cluster.commit(&Transaction::when(&full, revision).delete(&full)).unwrap();
            }
        }
    }
    rig.direct.create("f", &new(1, 1, 1)).unwrap();
}
