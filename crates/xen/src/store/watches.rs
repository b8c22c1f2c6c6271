//! Watch events that wait for their reader: at most one a watch, or as many as its reader has asked
//! for, however often a guest writes a watched node (XSA-349, threats.md T3).

use std::collections::{BTreeSet, HashMap, VecDeque};

/// Something at or below a watched path may have changed. Events can be spurious, and one event
/// can stand for many changes: look at the nodes, not at the count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchEvent {
    /// The node that changed; the watched path itself if more nodes below it have than the reader
    /// has asked for.
    pub path: String,
    /// Which watch.
    pub token: String,
}

struct Watched {
    path: String,
    /// The nodes of the events that wait.
    pending: BTreeSet<String>,
    /// Most events that wait. More become one, of the watched path.
    most: usize,
}

/// The watches of a connection. Memory is bounded by their number: an event whose token is not
/// registered is dropped.
#[derive(Default)]
pub(super) struct Watches {
    by_token: HashMap<String, Watched>,
    /// Tokens with events pending, oldest first, each at most once.
    order: VecDeque<String>,
}

impl Watches {
    pub(super) fn len(&self) -> usize {
        self.by_token.len()
    }

    pub(super) fn contains(&self, token: &str) -> bool {
        self.by_token.contains_key(token)
    }

    /// Whether this very watch is registered.
    pub(super) fn is_on(&self, path: &str, token: &str) -> bool {
        self.by_token.get(token).is_some_and(|w| w.path == path)
    }

    pub(super) fn add(&mut self, path: &str, token: &str, most: usize) {
        let watched = Watched { path: path.to_owned(), pending: BTreeSet::new(), most };
        self.by_token.insert(token.to_owned(), watched);
    }

    pub(super) fn remove(&mut self, token: &str) {
        self.by_token.remove(token);
        self.order.retain(|t| t != token);
    }

    /// An event arrived.
    pub(super) fn fired(&mut self, path: &str, token: &str) {
        let Some(watched) = self.by_token.get_mut(token) else { return };
        if watched.pending.is_empty() {
            self.order.push_back(token.to_owned());
        } else if watched.pending.len() >= watched.most && !watched.pending.contains(path) {
            watched.pending = BTreeSet::from([watched.path.clone()]);
            return;
        }
        watched.pending.insert(path.to_owned());
    }

    /// Takes the oldest event.
    pub(super) fn take(&mut self) -> Option<WatchEvent> {
        let token = self.order.front()?.clone();
        let watched = self.by_token.get_mut(&token)?;
        let path = watched.pending.pop_first()?;
        if watched.pending.is_empty() {
            self.order.pop_front();
        }
        Some(WatchEvent { path, token })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(path: &str, token: &str) -> Option<WatchEvent> {
        Some(WatchEvent { path: path.to_owned(), token: token.to_owned() })
    }

    #[test]
    fn a_flood_of_one_node_is_one_event() {
        let mut w = Watches::default();
        w.add("/a", "t", 1);
        for _ in 0..1000 {
            w.fired("/a/state", "t");
        }
        assert_eq!(w.order.len(), 1);
        assert_eq!(w.take(), event("/a/state", "t"));
        assert_eq!(w.take(), None);
        w.fired("/a/state", "t");
        assert_eq!(w.take(), event("/a/state", "t"), "a taken event makes room for the next");
    }

    #[test]
    fn changes_of_several_nodes_merge_into_the_watched_path() {
        let mut w = Watches::default();
        w.add("/a", "t", 1);
        w.add("/b", "u", 1);
        w.fired("/a/x", "t");
        w.fired("/b", "u");
        w.fired("/a/y", "t");
        assert_eq!(w.take(), event("/a", "t"));
        assert_eq!(w.take(), event("/b", "u"));
    }

    #[test]
    fn a_reader_gets_as_many_nodes_as_it_has_asked_for_and_not_more() {
        let mut w = Watches::default();
        w.add("/a", "t", 3);
        for node in ["/a/z", "/a/x", "/a/z", "/a/y", "/a/x"] {
            w.fired(node, "t");
        }
        let nodes = ["/a/x", "/a/y", "/a/z"];
        assert_eq!(nodes.map(|node| w.take() == event(node, "t")), [true; 3]);
        assert_eq!(w.take(), None);
        (0..1000).for_each(|i| w.fired(&format!("/a/{i}"), "t"));
        let waiting: Vec<_> = std::iter::from_fn(|| w.take()).collect();
        assert!(waiting.len() <= 3 && waiting.contains(&event("/a", "t").unwrap()), "{waiting:?}");
    }

    #[test]
    fn events_of_unknown_and_removed_watches_are_dropped() {
        let mut w = Watches::default();
        w.fired("/a", "t");
        w.add("/a", "t", 1);
        w.fired("/a", "t");
        w.remove("t");
        w.fired("/a", "t");
        assert_eq!(w.take(), None);
        assert!(w.order.is_empty() && w.len() == 0);
    }
}
