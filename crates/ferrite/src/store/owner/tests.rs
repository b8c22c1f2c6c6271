use std::io::{Read as _, Write as _};

use ferrite_disk::elsewhere::{Answer, Kind, Request};
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
    assert!(again.contains("there is a snapshot of that name: s1"), "{again}");
    let missing = change("a", &json!({ "rollback": "s9" }));
    drop(disk);
    assert!(missing.contains("a disk uses it"), "{missing}");
    assert!(Name::new("s9").is_some());
}

impl World {
    /// A stream on which volume `a` is read, and the first line of the answer that is no `begun`.
    fn read(&self) -> (UnixStream, String) {
        let mut stream = self.connect();
        let ask = self.question(&json!({ "read": { "volume": "a", "process": 7 } }));
        stream.write_all(format!("{ask}\n").as_bytes()).unwrap();
        let mut line = || {
            let mut line = Vec::new();
            while line.last() != Some(&b'\n') {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                line.push(byte[0]);
            }
            String::from_utf8(line).unwrap()
        };
        let first = line();
        let said = if first.contains("begun") { line() } else { first };
        (stream, said)
    }

    /// Opens the store, and no disk that writes to the volume.
    fn open_to_read(&self) -> Disk {
        let name = format!("store:{}#a", self.dir.path().join("s").display());
        Disk::open(&name, &OpenOptions { read_only: true, ..stores::options() }).unwrap()
    }
}

fn request(kind: Kind, offset: u64, len: u64) -> [u8; Request::BYTES] {
    Request { kind, offset, len }.encode()
}

#[test]
fn a_reader_gets_what_the_volume_has_and_an_error_for_what_it_has_not() {
    let world = World::new();
    let _disk = world.open_to_read();
    let (mut stream, said) = world.read();
    assert_eq!(said.trim(), r#"{"done":{"bytes":65536,"snapshot":false}}"#);
    let mut ask = |asked: &[u8]| {
        stream.write_all(asked).unwrap();
        let mut head = [0; Answer::BYTES];
        stream.read_exact(&mut head).unwrap();
        let answer = Answer::decode(&head).unwrap();
        let mut data = Vec::new();
        if let (Answer::Data(len), [1, ..]) = (&answer, asked) {
            data.resize(*len as usize, 0xEE);
            stream.read_exact(&mut data).unwrap();
        }
        (answer, data)
    };
    let (answer, data) = ask(&request(Kind::Read, 512, 4096));
    assert!(matches!(answer, Answer::Data(4096)) && data == [0; 4096]);
    assert!(matches!(ask(&request(Kind::Look, 0, 65536)).0, Answer::Zeros(65536)));
    let outside =
        [(0, 0), (65536, 512), (65024, 1024), (u64::MAX, 512), (0, 2 << 20), (0, u64::MAX)];
    for (offset, len) in outside {
        for kind in [Kind::Read, Kind::Look] {
            let (answer, _) = ask(&request(kind, offset, len));
            assert!(matches!(answer, Answer::Failed(_)), "{kind:?} {offset}+{len}: {answer:?}");
        }
    }
    assert!(matches!(ask(&request(Kind::Read, 0, 65536)).0, Answer::Data(65536)));
}

#[test]
fn readers_that_read_nothing_or_send_nonsense_hold_up_nobody_and_have_a_bound() {
    let mut world = World::new();
    let _disk = world.open_to_read();
    let mut readers: Vec<UnixStream> = (0..reading::MAX_READERS).map(|_| world.read().0).collect();
    // None of these reads its answers.
    for reader in &mut readers {
        reader.set_nonblocking(true).unwrap();
        while reader.write(&request(Kind::Read, 0, 65536)).is_ok() {}
    }
    let (_, said) = world.read();
    assert!(said.contains(r#""code":4"#) && said.contains("16 streams to readers"), "{said}");
    // Commands are not in their number.
    assert!(world.ask(&world.question(&json!("list"))).contains(r#""name":"a""#));
    let delete = world.question(&json!({ "change": { "volume": "a", "change": "delete" } }));
    assert!(world.ask(&delete).contains("process 7 reads it"));
    // One that ends, or makes no sense, makes room for another one.
    drop(readers.pop());
    wait_until("there is room", || world.read().1.contains("done"));
    let (mut bad, _) = loop {
        let (stream, said) = world.read();
        if said.contains("done") {
            break (stream, said);
        }
    };
    bad.write_all(&[0xFF; Request::BYTES]).unwrap();
    assert_eq!(bad.read(&mut [0]).unwrap_or(0), 0);
    // The end of the server waits for none of them: each sees the end behind what it has not read.
    world.serving = None;
    for mut reader in readers {
        let mut left = Vec::new();
        if let Err(e) = reader.read_to_end(&mut left) {
            assert_eq!(e.kind(), io::ErrorKind::ConnectionReset);
        }
    }
}
