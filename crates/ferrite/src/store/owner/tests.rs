use std::io::{Read as _, Write as _};

use ferrite_disk::{Disk, OpenOptions};
use ferrite_io::engines::test_engine;
use ferrite_store::journal::Name;
use ferrite_testkit::{stores, wait_until};
use serde_json::json;
use tempfile::TempDir;

use super::*;

struct World {
    dir: TempDir,
    serving: Option<Serving>,
    key: StoreKey,
}

impl World {
    /// A store that this process may open, and its socket in a folder of its own.
    fn new() -> World {
        let dir = TempDir::new().unwrap();
        let store = dir.path().join("s");
        stores::create(&store, stores::SMALLEST, &[("a", 16)]);
        let key = StoreKey::at(&store).unwrap();
        let place = Place::make_in(&dir.path().join("stores"), key).unwrap();
        let engine: EngineFactory = Arc::new(|arena, entries| test_engine().open(arena, entries));
        World { dir, serving: place.serve(&engine), key }
    }

    fn socket(&self) -> &Path {
        &self.serving.as_ref().unwrap().path
    }

    fn open(&self) -> Disk {
        let name = format!("store:{}#a", self.dir.path().join("s").display());
        Disk::open(&name, &OpenOptions { ..stores::options() }).unwrap()
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.socket()).unwrap()
    }

    fn ask(&self, line: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(line.as_bytes()).unwrap();
        stream.write_all(b"\n").unwrap();
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        said
    }

    fn question(&self, what: &Value) -> String {
        json!({ "version": 1, "store": self.key, "path": "s", "what": what }).to_string()
    }
}

#[test]
fn a_socket_is_this_users_only_and_goes_with_its_owner() {
    let mut world = World::new();
    let path = world.socket().to_owned();
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    world.serving = None;
    assert!(!path.exists());
}

#[test]
fn what_a_killed_owner_has_left_is_removed_and_what_another_listens_at_stays() {
    let world = World::new();
    let folder = world.dir.path().join("stores");
    let left = folder.join("1-2.3");
    drop(UnixListener::bind(&left).unwrap());
    // This one is about to be listened at.
    let coming = folder.join("new.4");
    drop(UnixListener::bind(&coming).unwrap());
    let other = Place::make_in(&folder, StoreKey(9, 9)).unwrap();
    assert!(!left.exists() && coming.exists());
    assert!(world.socket().exists() && other.path.exists());
}

#[test]
fn a_store_that_is_not_open_here_is_left_to_others() {
    let world = World::new();
    let list = world.question(&json!("list"));
    assert_eq!(world.ask(&list).trim(), r#""not-open""#);
    let disk = world.open();
    assert!(world.ask(&list).contains(r#""name":"a""#));
    let other = json!({ "version": 1, "store": [1, 2], "path": "s", "what": "list" }).to_string();
    assert_eq!(world.ask(&other).trim(), r#""not-open""#);
    drop(disk);
    assert_eq!(world.ask(&list).trim(), r#""not-open""#);
}

#[test]
fn what_makes_no_sense_is_answered_with_a_failure() {
    let world = World::new();
    let _disk = world.open();
    let long = "x".repeat(MAX_QUESTION + 1);
    let strange = world.question(&json!({ "frob": 1 }));
    let bad_name = json!({ "change": { "volume": "../a", "change": "delete" } });
    let bad_name = world.question(&bad_name);
    let newer = world.question(&json!("list")).replace(r#""version":1"#, r#""version":2"#);
    for bad in ["", "x", "[]", "{}", "\0\u{1}", &strange, &bad_name, &newer, &long] {
        let said = world.ask_roughly(bad);
        assert!(said.contains("cannot understand"), "{said:?} to {} bytes", bad.len());
    }
    let said = world.ask_roughly(&newer);
    let both = "speaks version 2 of commands on a store, and this one 1";
    assert!(said.contains(both), "{said}");
    // The server goes on.
    assert!(world.ask(&world.question(&json!("list"))).contains("begun"));
}

impl World {
    /// Sends a line. The other end may close before all is sent.
    fn ask_roughly(&self, line: &str) -> String {
        let mut stream = self.connect();
        let _ = stream.write_all(line.as_bytes()).and_then(|()| stream.write_all(b"\n"));
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        String::from_utf8(said).unwrap()
    }
}

#[test]
fn who_says_nothing_holds_nobody_up_and_at_the_bound_is_told_of_it() {
    let world = World::new();
    let _disk = world.open();
    let list = world.question(&json!("list"));
    let silent: Vec<_> = (1..MAX_COMMANDS).map(|_| world.connect()).collect();
    assert!(world.ask(&list).contains("begun"));
    let one_more = world.connect();
    wait_until("all places are taken", || world.ask_roughly(&list).contains("try again"));
    // They have sent nothing for too long, or have closed.
    drop((silent, one_more));
    wait_until("a place is free", || world.ask_roughly(&list).contains("begun"));
}

#[test]
fn a_volume_that_a_disk_uses_is_not_deleted_or_rolled_back() {
    let world = World::new();
    let disk = world.open();
    let change = |volume: &str, change: &Value| {
        world.ask(&world.question(&json!({ "change": { "volume": volume, "change": change } })))
    };
    assert!(change("a", &json!({ "snapshot": "s1" })).contains(r#""done":"snapshot""#));
    assert!(change("a", &json!({ "clone": "b" })).contains(r#""done":"cloned""#));
    for refused in [json!("delete"), json!({ "rollback": "s1" })] {
        let said = change("a", &refused);
        assert!(said.contains(r#""code":4"#) && said.contains("a disk uses it"), "{said}");
    }
    for done in [json!({ "rollback": "s1" }), json!("delete")] {
        let said = change("b", &done);
        assert!(said.contains(r#""done":{"#), "{said}");
    }
    let again = change("a", &json!({ "snapshot": "s1" }));
    assert!(again.contains("there is a volume of that name"), "{again}");
    let missing = change("a", &json!({ "rollback": "s9" }));
    drop(disk);
    assert!(missing.contains("a disk uses it"), "{missing}");
    assert!(Name::new("s9").is_some());
}
