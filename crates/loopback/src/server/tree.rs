//! The nodes, their permissions, and atomic changes of them.
//!
//! Every request works on a [`Draft`] over the [`Tree`]: a single request's is committed at once, a transaction's at
//! its end. A draft records the generation of each node that it read. If one has changed by then, the commit is
//! refused, and the client begins again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::wire::{ErrorName, Permission};

/// The largest node of a guest in bytes (xenstored's `quota-maxentity`).
pub(super) const VALUE_MAX: usize = 2048;
/// The most nodes that a guest may own (xenstored's `quota-nodes`).
pub(super) const NODES_MAX: i64 = 1000;
/// The most nodes that a guest's transaction may read.
const SEEN_MAX: usize = 1024;
/// The most entries of a node's permissions.
const PERMISSIONS_MAX: usize = 16;

/// One node. Shared between the tree and drafts; never changed in place.
#[derive(Clone, Debug)]
struct Node {
    value: Vec<u8>,
    permissions: Vec<Permission>,
    children: BTreeSet<String>,
    generation: u64,
}

impl Node {
    fn owner(&self) -> DomId {
        self.permissions[0].1
    }

    fn allows(&self, caller: DomId, wanted: Wanted) -> bool {
        if caller == DomId(0) || caller == self.owner() {
            return true;
        }
        let listed = self.permissions[1..].iter().find(|(_, domid)| *domid == caller);
        let letter = listed.map_or(self.permissions[0].0, |(letter, _)| *letter);
        match wanted {
            Wanted::Read => matches!(letter, 'r' | 'b'),
            Wanted::Write => matches!(letter, 'w' | 'b'),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Read,
    Write,
}

/// The event that watchers get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) path: String,
    /// Removed with its parent: only for watches of this very node.
    pub(super) exact: bool,
}

/// All nodes by their absolute paths.
#[derive(Debug)]
pub(super) struct Tree {
    nodes: HashMap<String, Arc<Node>>,
    generation: u64,
    /// The number of nodes of each owner.
    owned: HashMap<DomId, i64>,
}

impl Tree {
    /// A tree with only the root, owned by dom0.
    pub(super) fn new() -> Tree {
        let root = Node {
            value: Vec::new(),
            permissions: vec![('n', DomId(0))],
            children: BTreeSet::new(),
            generation: 0,
        };
        Tree {
            nodes: HashMap::from([("/".to_owned(), Arc::new(root))]),
            generation: 0,
            owned: HashMap::new(),
        }
    }

    /// Whether `caller` may learn of a change at `path`: it may read the node, or, if that is removed, the nearest one
    /// above it (XSA-115).
    pub(super) fn is_visible(&self, caller: DomId, path: &str) -> bool {
        let mut at = path;
        loop {
            match self.nodes.get(at) {
                Some(node) => return node.allows(caller, Wanted::Read),
                None => at = parent(at),
            }
        }
    }

    /// Makes the changes of `draft`; returns the changes for watches.
    ///
    /// # Errors
    /// `Again`: a node that the draft has read was changed.
    pub(super) fn commit(&mut self, draft: Draft) -> Result<Vec<Change>, ErrorName> {
        let unchanged = |(path, generation): (&String, &Option<u64>)| {
            self.nodes.get(path).map(|n| n.generation) == *generation
        };
        if draft.changed.is_empty() {
            return Ok(Vec::new());
        }
        if !draft.seen.iter().all(unchanged) {
            return Err(ErrorName::Again);
        }
        for (path, node) in draft.changed {
            self.generation += 1;
            match node {
                Some(mut node) => {
                    Arc::make_mut(&mut node).generation = self.generation;
                    self.nodes.insert(path, node);
                }
                None => drop(self.nodes.remove(&path)),
            }
        }
        for (domid, more) in draft.owned {
            *self.owned.entry(domid).or_default() += more;
        }
        self.owned.retain(|_, count| *count > 0);
        Ok(draft.fires)
    }

    /// A node's generation, which changes with the node.
    pub(super) fn generation(&self, path: &str) -> u64 {
        self.nodes.get(path).map_or(0, |n| n.generation)
    }
}

/// Uncommitted changes.
#[derive(Debug, Default)]
pub(super) struct Draft {
    changed: BTreeMap<String, Option<Arc<Node>>>,
    seen: HashMap<String, Option<u64>>,
    owned: HashMap<DomId, i64>,
    fires: Vec<Change>,
}

type Outcome<T> = Result<T, ErrorName>;

/// A caller's view of the tree through its draft. Paths are absolute and well-formed.
pub(super) struct View<'a> {
    pub(super) tree: &'a Tree,
    pub(super) draft: &'a mut Draft,
    pub(super) caller: DomId,
}

impl View<'_> {
    fn find(&mut self, path: &str) -> Outcome<Option<Arc<Node>>> {
        if let Some(node) = self.draft.changed.get(path) {
            return Ok(node.clone());
        }
        let node = self.tree.nodes.get(path).cloned();
        if !self.draft.seen.contains_key(path) {
            if self.caller != DomId(0) && self.draft.seen.len() >= SEEN_MAX {
                return Err(ErrorName::NoSpc);
            }
            self.draft.seen.insert(path.to_owned(), node.as_ref().map(|n| n.generation));
        }
        Ok(node)
    }

    /// The node, if the caller has this permission. Only its parents' permissions decide whether the caller learns that
    /// the node exists.
    fn get(&mut self, path: &str, wanted: Wanted) -> Outcome<Arc<Node>> {
        match self.find(path)? {
            Some(node) if node.allows(self.caller, wanted) => Ok(node),
            Some(_) => Err(ErrorName::Acces),
            None => {
                let (_, above) = self.nearest(path)?;
                let may_look = above.allows(self.caller, wanted);
                Err(if may_look { ErrorName::NoEnt } else { ErrorName::Acces })
            }
        }
    }

    /// The nearest existing node above `path`; the root always exists.
    fn nearest(&mut self, path: &str) -> Outcome<(String, Arc<Node>)> {
        let mut at = parent(path);
        loop {
            if let Some(node) = self.find(at)? {
                return Ok((at.to_owned(), node));
            }
            at = parent(at);
        }
    }

    fn put(&mut self, path: &str, node: Option<Node>) -> Outcome<()> {
        if let Some(old) = self.find(path)? {
            *self.draft.owned.entry(old.owner()).or_default() -= 1;
        }
        if let Some(node) = &node {
            let owner = node.owner();
            let more = self.draft.owned.entry(owner).or_default();
            *more += 1;
            let all = *more + self.tree.owned.get(&owner).copied().unwrap_or_default();
            if self.caller != DomId(0) && all > NODES_MAX {
                return Err(ErrorName::NoSpc);
            }
        }
        self.draft.changed.insert(path.to_owned(), node.map(Arc::new));
        Ok(())
    }

    fn fire(&mut self, path: &str, exact: bool) {
        let change = Change { path: path.to_owned(), exact };
        if !self.draft.fires.contains(&change) {
            self.draft.fires.push(change);
        }
    }

    pub(super) fn read(&mut self, path: &str) -> Outcome<Vec<u8>> {
        Ok(self.get(path, Wanted::Read)?.value.clone())
    }

    pub(super) fn list(&mut self, path: &str) -> Outcome<BTreeSet<String>> {
        Ok(self.get(path, Wanted::Read)?.children.clone())
    }

    pub(super) fn permissions(&mut self, path: &str) -> Outcome<Vec<Permission>> {
        Ok(self.get(path, Wanted::Read)?.permissions.clone())
    }

    pub(super) fn write(&mut self, path: &str, value: &[u8]) -> Outcome<()> {
        if self.caller != DomId(0) && value.len() > VALUE_MAX {
            return Err(ErrorName::NoSpc);
        }
        match self.find(path)? {
            Some(node) if !node.allows(self.caller, Wanted::Write) => return Err(ErrorName::Acces),
            Some(node) => {
                self.put(path, Some(Node { value: value.to_vec(), ..(*node).clone() }))?;
            }
            None => self.create(path, value)?,
        }
        self.fire(path, false);
        Ok(())
    }

    pub(super) fn mkdir(&mut self, path: &str) -> Outcome<()> {
        match self.find(path)? {
            Some(node) if node.allows(self.caller, Wanted::Write) => Ok(()),
            Some(_) => Err(ErrorName::Acces),
            None => {
                self.create(path, &[])?;
                self.fire(path, false);
                Ok(())
            }
        }
    }

    /// Makes the node and missing ones above it, with the permissions of the nearest existing one; a guest owns the
    /// nodes that it makes.
    fn create(&mut self, path: &str, value: &[u8]) -> Outcome<()> {
        let (mut at, mut above) = self.nearest(path)?;
        if !above.allows(self.caller, Wanted::Write) {
            return Err(ErrorName::Acces);
        }
        let mut permissions = above.permissions.clone();
        if self.caller != DomId(0) {
            permissions[0].1 = self.caller;
        }
        let mut rest = path[at.len()..].trim_start_matches('/');
        while !rest.is_empty() {
            let (name, below) = rest.split_once('/').unwrap_or((rest, ""));
            let mut changed = (*above).clone();
            changed.children.insert(name.to_owned());
            self.put(&at, Some(changed))?;
            at = join(&at, name);
            let node = Node {
                value: if below.is_empty() { value.to_vec() } else { Vec::new() },
                permissions: permissions.clone(),
                children: BTreeSet::new(),
                generation: 0,
            };
            self.put(&at, Some(node.clone()))?;
            above = Arc::new(node);
            rest = below;
        }
        Ok(())
    }

    /// Removes a node. A missing node counts as removed, if its parent exists.
    pub(super) fn remove(&mut self, path: &str) -> Outcome<()> {
        if path == "/" {
            return Err(ErrorName::Inval);
        }
        let Some(node) = self.find(path)? else {
            let above = self.get(parent(path), Wanted::Write);
            return above.map(drop);
        };
        if !node.allows(self.caller, Wanted::Write) {
            return Err(ErrorName::Acces);
        }
        let above = parent(path);
        if let Some(node) = self.find(above)? {
            let mut changed = (*node).clone();
            changed.children.remove(name(path));
            self.put(above, Some(changed))?;
        }
        self.fire(path, false);
        let mut gone = vec![path.to_owned()];
        while let Some(at) = gone.pop() {
            let Some(node) = self.find(&at)? else { continue };
            gone.extend(node.children.iter().map(|child| join(&at, child)));
            self.put(&at, None)?;
            if at != path {
                self.fire(&at, true);
            }
        }
        Ok(())
    }

    /// Sets permissions. Only the owner and dom0 may change them, and only dom0 may change the owner.
    pub(super) fn set_permissions(
        &mut self,
        path: &str,
        permissions: Vec<Permission>,
    ) -> Outcome<()> {
        let node = self.get(path, Wanted::Write)?;
        let privileged = self.caller == DomId(0);
        if permissions.is_empty() || permissions.len() > PERMISSIONS_MAX {
            return Err(ErrorName::Inval);
        }
        if !privileged && (node.owner() != self.caller || permissions[0].1 != self.caller) {
            return Err(ErrorName::Perm);
        }
        self.put(path, Some(Node { permissions, ..(*node).clone() }))?;
        self.fire(path, false);
        Ok(())
    }
}

/// The path above; the root's is the root.
fn parent(path: &str) -> &str {
    match path.rfind('/') {
        None | Some(0) => "/",
        Some(at) => &path[..at],
    }
}

fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or_default()
}

fn join(path: &str, name: &str) -> String {
    if path == "/" { format!("/{name}") } else { format!("{path}/{name}") }
}

/// Whether `path` is `above` or below it.
pub(super) fn is_at_or_below(path: &str, above: &str) -> bool {
    above == "/"
        || path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOM0: DomId = DomId(0);
    const GUEST: DomId = DomId(5);

    fn run<T>(
        tree: &mut Tree,
        caller: DomId,
        f: impl FnOnce(&mut View<'_>) -> Outcome<T>,
    ) -> Outcome<T> {
        let mut draft = Draft::default();
        let value = f(&mut View { tree, draft: &mut draft, caller })?;
        tree.commit(draft)?;
        Ok(value)
    }

    fn tree() -> Tree {
        let mut tree = Tree::new();
        run(&mut tree, DOM0, |v| {
            v.write("/local/domain/5/name", b"guest")?;
            v.set_permissions("/local/domain/5", vec![('n', GUEST), ('r', DomId(6))])
        })
        .unwrap();
        tree
    }

    #[test]
    fn a_node_belongs_to_the_guest_that_makes_it() {
        let mut tree = tree();
        run(&mut tree, GUEST, |v| v.write("/local/domain/5/a/b", b"x")).unwrap();
        assert_eq!(
            run(&mut tree, GUEST, |v| v.permissions("/local/domain/5/a/b")),
            Ok(vec![('n', GUEST), ('r', DomId(6))])
        );
        assert_eq!(run(&mut tree, DomId(6), |v| v.read("/local/domain/5/a/b")), Ok(b"x".to_vec()));
        assert_eq!(
            run(&mut tree, DomId(7), |v| v.read("/local/domain/5/a/b")),
            Err(ErrorName::Acces)
        );
    }

    #[test]
    fn strangers_cannot_write_and_owners_cannot_give_away() {
        let mut tree = tree();
        let path = "/local/domain/5/name";
        assert_eq!(run(&mut tree, DomId(6), |v| v.write(path, b"y")), Err(ErrorName::Acces));
        assert_eq!(run(&mut tree, DomId(6), |v| v.remove(path)), Err(ErrorName::Acces));
        assert_eq!(
            run(&mut tree, GUEST, |v| v.set_permissions("/local/domain/5", vec![('n', DomId(6))])),
            Err(ErrorName::Perm)
        );
        assert_eq!(
            run(&mut tree, GUEST, |v| v.write("/local/domain/6/x", b"")),
            Err(ErrorName::Acces)
        );
    }

    #[test]
    fn a_missing_node_is_told_only_to_those_who_may_look() {
        let mut tree = tree();
        let path = "/local/domain/5/none/such";
        assert_eq!(run(&mut tree, GUEST, |v| v.read(path)), Err(ErrorName::NoEnt));
        assert_eq!(run(&mut tree, DomId(7), |v| v.read(path)), Err(ErrorName::Acces));
    }

    #[test]
    fn removing_takes_everything_below_and_tells_its_watchers() {
        let mut tree = tree();
        run(&mut tree, DOM0, |v| v.write("/local/domain/5/a/b", b"")).unwrap();
        let mut draft = Draft::default();
        View { tree: &tree, draft: &mut draft, caller: DOM0 }.remove("/local/domain/5/a").unwrap();
        let changes = tree.commit(draft).unwrap();
        assert_eq!(
            changes,
            [
                Change { path: "/local/domain/5/a".into(), exact: false },
                Change { path: "/local/domain/5/a/b".into(), exact: true },
            ]
        );
        assert_eq!(run(&mut tree, DOM0, |v| v.read("/local/domain/5/a/b")), Err(ErrorName::NoEnt));
        assert_eq!(
            run(&mut tree, DOM0, |v| v.list("/local/domain/5")),
            Ok(BTreeSet::from(["name".to_owned()]))
        );
        assert_eq!(run(&mut tree, DOM0, |v| v.remove("/local/domain/5/a")), Ok(()));
        assert_eq!(run(&mut tree, DOM0, |v| v.remove("/no/such/thing")), Err(ErrorName::NoEnt));
    }

    #[test]
    fn a_draft_that_rests_on_something_changed_is_refused() {
        let mut tree = tree();
        let name = "/local/domain/5/name";
        let mut draft = Draft::default();
        let mut view = View { tree: &tree, draft: &mut draft, caller: DOM0 };
        view.read(name).unwrap();
        view.write("/copy", b"guest").unwrap();
        run(&mut tree, DOM0, |v| v.write(name, b"other")).unwrap();
        assert_eq!(tree.commit(draft), Err(ErrorName::Again));
        assert_eq!(run(&mut tree, DOM0, |v| v.read("/copy")), Err(ErrorName::NoEnt));

        // A guest that only reads gets no conflict, and it sees its own changes.
        let mut draft = Draft::default();
        let mut view = View { tree: &tree, draft: &mut draft, caller: DOM0 };
        view.write("/mine", b"1").unwrap();
        assert_eq!(view.read("/mine"), Ok(b"1".to_vec()));
        assert_eq!(tree.commit(draft).map(|c| c.len()), Ok(1));
    }

    #[test]
    fn a_guest_is_held_to_its_quotas() {
        let mut tree = tree();
        let long = vec![0; VALUE_MAX + 1];
        let path = "/local/domain/5/x";
        assert_eq!(run(&mut tree, GUEST, |v| v.write(path, &long)), Err(ErrorName::NoSpc));
        let make = |i: i64| format!("/local/domain/5/{i}");
        // It owns its directory already.
        for i in 1..NODES_MAX {
            run(&mut tree, GUEST, |v| v.write(&make(i), b"")).unwrap();
        }
        let one_more = make(NODES_MAX);
        assert_eq!(run(&mut tree, GUEST, |v| v.write(&one_more, b"")), Err(ErrorName::NoSpc));
        run(&mut tree, GUEST, |v| v.remove(&make(1))).unwrap();
        assert_eq!(run(&mut tree, GUEST, |v| v.write(&one_more, b"")), Ok(()));
        let look = |v: &mut View<'_>| {
            (0..5000).try_for_each(|i| match v.read(&format!("/local/domain/5/none{i}")) {
                Err(ErrorName::NoEnt) => Ok(()),
                other => other.map(drop),
            })
        };
        assert_eq!(run(&mut tree, GUEST, look), Err(ErrorName::NoSpc));
    }
}
