//! The client against xenstored, by its socket and by the kernel's device.

use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError, WatchEvent};

use crate::own_domain::is_readable;

/// A client, another one that interferes, and a directory of the test's own.
struct Scene {
    store: Store,
    other: Store,
    base: String,
}

/// Runs `test` over both transports, the other client always on the other one.
fn each_way(name: &str, test: fn(&mut Scene)) {
    let socket = || Store::open_socket(Path::new("/run/xenstored/socket")).unwrap();
    let device = || Store::open_device(Path::new("/dev/xen/xenbus")).unwrap();
    for (store, other) in [(socket(), device()), (device(), socket())] {
        let mut scene = Scene { store, other, base: format!("/ferrite-test-{name}") };
        scene.store.remove(&scene.base).unwrap();
        test(&mut scene);
        assert!(!scene.store.is_dead() && !scene.other.is_dead());
        scene.store.remove(&scene.base).unwrap();
    }
}

impl Scene {
    fn path(&self, leaf: &str) -> String {
        format!("{}/{leaf}", self.base)
    }

    /// The next event, waited for by the descriptor as the daemon does.
    fn event(&mut self, within: Duration) -> Option<WatchEvent> {
        let start = Instant::now();
        loop {
            if let Some(event) = self.store.poll_event().unwrap() {
                return Some(event);
            }
            let left = within.checked_sub(start.elapsed())?;
            is_readable(self.store.fd(), left);
        }
    }
}

const SOON: Duration = Duration::from_secs(5);
const NEVER: Duration = Duration::from_millis(300);

#[test]
#[ignore = "needs a Xen control domain"]
fn nodes_keep_what_is_written() {
    each_way("nodes", |s| {
        let (dir, empty, bytes) = (s.path("d"), s.path("d/a"), s.path("d/b"));
        assert_eq!(s.store.read(&dir).unwrap(), None);
        assert!(matches!(s.store.list(&dir), Err(StoreError::NotFound { .. })));
        s.store.write(&empty, b"").unwrap();
        s.store.write(&bytes, b"x\0y").unwrap();
        assert_eq!(s.other.read(&empty).unwrap().as_deref(), Some(b"".as_slice()));
        assert_eq!(s.other.read(&bytes).unwrap().as_deref(), Some(b"x\0y".as_slice()));
        assert!(matches!(s.other.read_string(&bytes), Err(StoreError::Invalid { .. })));
        let mut names = s.store.list(&dir).unwrap();
        names.sort();
        assert_eq!(names, ["a", "b"]);
        s.store.remove(&dir).unwrap();
        s.store.remove(&dir).unwrap();
        assert_eq!(s.other.read(&bytes).unwrap(), None);
        assert!(matches!(s.store.write("/no spaces!", b""), Err(StoreError::Refused { .. })));
    });
}

#[test]
#[ignore = "needs a Xen control domain"]
fn the_largest_message_passes_and_a_larger_one_is_refused_here() {
    each_way("large", |s| {
        let path = s.path("v");
        let fits = |value: &[u8], store: &mut Store| store.write(&path, value).is_ok();
        let room = 4096 - path.len() - 1;
        // The device counts the header, too.
        let largest = [room, room - 16].into_iter().find(|n| fits(&vec![7; *n], &mut s.store));
        let largest = largest.unwrap();
        assert!(!fits(&vec![7; largest + 1], &mut s.store));
        assert_eq!(s.store.read(&path).unwrap(), Some(vec![7; largest]));
    });
}

#[test]
#[ignore = "needs a Xen control domain"]
fn a_directory_larger_than_a_message_is_listed_whole() {
    each_way("list", |s| {
        let name = |i: usize| format!("{}-{i:03}", "n".repeat(40));
        for i in 0..200 {
            s.store.write(&s.path(&name(i)), b"").unwrap();
        }
        let mut names = s.store.list(&s.base).unwrap();
        names.sort();
        assert!(names.into_iter().eq((0..200).map(name)));
    });
}

#[test]
#[ignore = "needs a Xen control domain"]
fn permissions_are_kept() {
    each_way("permissions", |s| {
        let path = s.path("p");
        s.store.write(&path, b"").unwrap();
        let permissions = [('r', DomId(0)), ('b', DomId(0))];
        s.store.set_permissions(&path, &permissions).unwrap();
        assert_eq!(s.other.get_permissions(&path).unwrap(), permissions);
        let missing = s.store.set_permissions(&s.path("none"), &permissions);
        assert!(matches!(missing, Err(StoreError::NotFound { .. })));
    });
}

#[test]
#[ignore = "needs a Xen control domain"]
fn a_watch_fires_at_once_then_at_changes_and_a_flood_is_few_events() {
    each_way("watch", |s| {
        let (dir, leaf) = (s.path("d"), s.path("d/x"));
        s.store.write(&leaf, b"0").unwrap();
        s.store.watch(&dir, "token").unwrap();
        let event = |path: &str| WatchEvent { path: path.to_owned(), token: "token".to_owned() };
        assert_eq!(s.event(SOON), Some(event(&dir)));
        assert_eq!(s.event(NEVER), None);
        s.other.write(&leaf, b"1").unwrap();
        assert_eq!(s.event(SOON), Some(event(&leaf)));

        for i in 0..500 {
            s.other.write(&leaf, i.to_string().as_bytes()).unwrap();
        }
        let events = std::iter::from_fn(|| s.event(NEVER)).count();
        assert!((1..50).contains(&events), "{events} events");

        s.store.watch("@releaseDomain", "release").unwrap();
        assert_eq!(s.event(SOON).map(|e| e.token).as_deref(), Some("release"));
        s.store.unwatch(&dir, "token").unwrap();
        s.other.write(&leaf, b"2").unwrap();
        assert_eq!(s.event(NEVER), None);
    });
}

#[test]
#[ignore = "needs a Xen control domain"]
fn a_transaction_is_done_again_until_nobody_interferes() {
    each_way("conflict", |s| {
        let (node, second) = (s.path("n"), s.path("second"));
        s.store.write(&node, b"0").unwrap();
        let mut runs = 0;
        let other = &mut s.other;
        let read = s.store.transaction(|t| {
            runs += 1;
            let value = t.read_string(&node)?.unwrap_or_default();
            if runs <= 3 {
                other.write(&node, runs.to_string().as_bytes())?;
            }
            t.write(&second, b"in")?;
            t.write(&node, format!("{value}+1").as_bytes())?;
            Ok(value)
        });
        assert_eq!((read.unwrap().as_str(), runs), ("3", 4));
        assert_eq!(s.other.read_string(&node).unwrap().as_deref(), Some("3+1"));
    });
}

#[test]
#[ignore = "needs a Xen control domain"]
fn a_failed_transaction_leaves_nothing_and_uses_nothing_up() {
    each_way("abandon", |s| {
        let node = s.path("n");
        s.store.write(&node, b"before").unwrap();
        for _ in 0..100 {
            let result = s.store.transaction(|t| {
                t.write(&node, b"after")?;
                t.list("/none").map(drop)
            });
            assert!(matches!(result, Err(StoreError::NotFound { .. })), "{result:?}");
        }
        assert_eq!(s.store.read(&node).unwrap().as_deref(), Some(b"before".as_slice()));
    });
}
