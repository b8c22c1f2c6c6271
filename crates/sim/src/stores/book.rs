//! The volumes of a store in the model, and the allowed contents of each.

use std::collections::{BTreeMap, BTreeSet};

use ferrite_host::clock::{Random, SplitMix64};

use crate::model::{After, Change, Model, Ticket};
use crate::stamp::Value;

/// The most volumes and snapshots.
const MOST: usize = 8;

/// A volume, or a snapshot.
pub(super) struct Entry {
    pub(super) model: Model,
    /// The other possible contents: a rollback was not answered.
    other: Option<Model>,
    pub(super) domain: u16,
    pub(super) is_snapshot: bool,
    /// Requests and operations in flight.
    pub(super) uses: usize,
    /// An operation is about to delete or change it, or has failed to: no new use begins.
    pub(super) is_held: bool,
}

/// An operation on whole volumes. `name`: its volume, or the one that it makes.
#[derive(Clone, Debug)]
pub(super) enum Deed {
    Create { name: String, sectors: u64, domain: u16 },
    Share { name: String, of: String, is_snapshot: bool },
    Rollback { name: String, to: String },
    Delete { name: String },
}

impl Deed {
    pub(super) fn name(&self) -> &String {
        match self {
            Deed::Create { name, .. }
            | Deed::Share { name, .. }
            | Deed::Rollback { name, .. }
            | Deed::Delete { name } => name,
        }
    }

    /// Whether its volume must not be in use.
    pub(super) fn is_alone(&self) -> bool {
        matches!(self, Deed::Rollback { .. } | Deed::Delete { .. })
    }

    /// The volume that it only reads.
    fn source(&self) -> Option<&String> {
        match self {
            Deed::Share { of, .. } => Some(of),
            Deed::Rollback { to, .. } => Some(to),
            Deed::Create { .. } | Deed::Delete { .. } => None,
        }
    }
}

/// An operation that may or may not be done: it was not answered, or has failed.
struct Pending {
    deed: Deed,
    /// The time of its issue, by the clock of its source's model.
    issued: u64,
    /// Set if it has failed: the volume that it would have made.
    failed: Option<Option<Entry>>,
}

/// See the module text.
#[derive(Default)]
pub(super) struct Book {
    pub(super) entries: BTreeMap<String, Entry>,
    pending: Vec<Pending>,
    names: u64,
}

impl Entry {
    fn new(model: Model, domain: u16, is_snapshot: bool) -> Entry {
        Entry { model, other: None, domain, is_snapshot, uses: 0, is_held: false }
    }

    /// The sectors that were ever changed.
    pub(super) fn touched(&self) -> impl Iterator<Item = u64> + '_ {
        [Some(&self.model), self.other.as_ref()].into_iter().flatten().flat_map(Model::touched)
    }

    /// Checks the contents of all sectors that were read, and stores them.
    pub(super) fn examine(
        &mut self,
        after: After,
        sectors: u64,
        found: &[(u64, Result<Value, String>)],
    ) -> Result<(), String> {
        let check = |model: &Model| {
            if model.sectors() != sectors {
                return Err(format!("it has {sectors} sectors, and not {}", model.sectors()));
            }
            found.iter().try_for_each(|(sector, found)| model.check_after(after, *sector, found))
        };
        if let Err(e) = check(&self.model) {
            match self.other.take() {
                Some(other) if check(&other).is_ok() => self.model = other,
                Some(_) => return Err(format!("neither before a rollback nor after it: {e}")),
                None => return Err(e),
            }
        }
        self.other = None;
        // A snapshot is never written, and was durable before it existed.
        let after = if self.is_snapshot { After::Close } else { after };
        for (sector, found) in found {
            if let Ok(value) = found {
                self.model.observe(after, *sector, *value);
            }
        }
        Ok(())
    }
}

impl Book {
    /// Any volume that can be used now.
    pub(super) fn any(
        &self,
        random: &mut SplitMix64,
        good: impl Fn(&Entry) -> bool,
    ) -> Option<String> {
        let free = self.entries.iter().filter(|(_, e)| !e.is_held && good(e));
        let names: Vec<&String> = free.map(|(name, _)| name).collect();
        if names.is_empty() {
            return None;
        }
        Some(names[random.below(names.len() as u64) as usize].clone())
    }

    /// The entry of this name.
    ///
    /// # Panics
    /// If there is none.
    pub(super) fn entry(&mut self, name: &str) -> &mut Entry {
        self.entries.get_mut(name).unwrap_or_else(|| panic!("the book has no {name}"))
    }

    /// Chooses an operation that can be executed now.
    pub(super) fn choose(&mut self, random: &mut SplitMix64, sizes: &[u64]) -> Option<Deed> {
        let has_room = self.entries.len() + self.pending.len() < MOST;
        let written = self.entries.values().filter(|e| !e.is_snapshot && !e.is_held).count();
        let kind = random.below(12);
        self.names += 1;
        let number = self.names;
        match kind {
            0 if has_room => {
                let sectors = sizes[random.below(sizes.len() as u64) as usize];
                let domain = random.below(u64::from(super::medium::DOMAINS)) as u16;
                Some(Deed::Create { name: format!("v{number}"), sectors, domain })
            }
            1..4 if has_room => {
                let of = self.any(random, |_| true)?;
                Some(Deed::Share { name: format!("s{number}"), of, is_snapshot: true })
            }
            4..6 if has_room => {
                let of = self.any(random, |_| true)?;
                Some(Deed::Share { name: format!("c{number}"), of, is_snapshot: false })
            }
            6..9 => {
                let to = self.any(random, |e| e.is_snapshot)?;
                let domain = self.entry(&to).domain;
                let name = self.any(random, |e| !e.is_snapshot && e.domain == domain)?;
                Some(Deed::Rollback { name, to })
            }
            _ => {
                let name = self.any(random, |e| e.is_snapshot || written > 1)?;
                Some(Deed::Delete { name })
            }
        }
    }

    /// Issues an operation.
    pub(super) fn issue(&mut self, deed: &Deed) {
        let clock = deed.source().unwrap_or(deed.name()).clone();
        let issued = self.entries.get_mut(&clock).map_or(0, |e| e.model.issue_flush());
        self.pending.push(Pending { deed: deed.clone(), issued, failed: None });
    }

    /// Blocks new uses that the operation excludes, or releases them.
    pub(super) fn hold(&mut self, deed: &Deed, holds: bool) {
        if let Some(source) = deed.source()
            && let Some(entry) = self.entries.get_mut(source)
        {
            entry.uses = if holds { entry.uses + 1 } else { entry.uses - 1 };
        }
        if deed.is_alone()
            && let Some(entry) = self.entries.get_mut(deed.name())
        {
            entry.is_held = holds;
        }
    }

    fn made_by(&self, deed: &Deed, issued: u64) -> Option<Entry> {
        match deed {
            Deed::Create { sectors, domain, .. } => {
                Some(Entry::new(Model::new(*sectors), *domain, false))
            }
            Deed::Share { of, is_snapshot, .. } => {
                let of = self.entries.get(of)?;
                Some(Entry::new(of.model.shared(issued), of.domain, *is_snapshot))
            }
            Deed::Rollback { to, .. } => {
                let to = self.entries.get(to)?;
                Some(Entry::new(to.model.shared(issued), to.domain, false))
            }
            Deed::Delete { .. } => None,
        }
    }

    /// Answers an operation.
    pub(super) fn answer(&mut self, deed: &Deed, ok: bool) {
        let is_it = |p: &Pending| p.failed.is_none() && p.deed.name() == deed.name();
        let Some(at) = self.pending.iter().position(is_it) else { return };
        let made = self.made_by(deed, self.pending[at].issued);
        if !ok {
            self.pending[at].failed = Some(made);
            return;
        }
        self.pending.remove(at);
        self.has_gone_on(deed.name());
        self.enter(deed, made);
    }

    fn enter(&mut self, deed: &Deed, made: Option<Entry>) {
        match (deed, made) {
            (Deed::Delete { name }, _) => drop(self.entries.remove(name)),
            (Deed::Rollback { name, .. }, Some(made)) => {
                let entry = self.entry(name);
                entry.model = made.model.behind(&entry.model);
            }
            (_, Some(made)) => drop(self.entries.insert(deed.name().clone(), made)),
            (_, None) => {}
        }
    }

    /// New content of a volume, or an operation on it, was answered. So a checkpoint is later than all earlier
    /// failures, and none of these operations comes back.
    pub(super) fn has_gone_on(&mut self, name: &str) {
        let is_over =
            |p: &Pending| p.failed.is_some() && p.deed.is_alone() && p.deed.name() == name;
        self.pending.retain(|p| !is_over(p));
    }

    /// The names that a new process finds tell which operations were done; for a rollback the contents will.
    pub(super) fn reconcile(&mut self, found: &BTreeSet<String>) -> Result<(), String> {
        for pending in std::mem::take(&mut self.pending) {
            let Pending { deed, issued, failed } = pending;
            let made = failed.unwrap_or_else(|| self.made_by(&deed, issued));
            let is_there = found.contains(deed.name());
            match (&deed, made) {
                (Deed::Rollback { name, .. }, Some(made)) => {
                    if let Some(entry) = self.entries.get_mut(name) {
                        entry.other = Some(made.model);
                    }
                }
                (Deed::Delete { .. }, made) if !is_there => self.enter(&deed, made),
                (Deed::Create { .. } | Deed::Share { .. }, made) if is_there => {
                    self.enter(&deed, made);
                }
                _ => {}
            }
        }
        for entry in self.entries.values_mut() {
            (entry.uses, entry.is_held) = (0, false);
        }
        let known: BTreeSet<String> = self.entries.keys().cloned().collect();
        if known == *found {
            return Ok(());
        }
        Err(format!("the store has the volumes {found:?}, and should have {known:?}"))
    }

    /// Issues a flush of all volumes: a sync covers all of them.
    pub(super) fn issue_flush(&mut self) -> Vec<(String, u64)> {
        self.entries.iter_mut().map(|(name, e)| (name.clone(), e.model.issue_flush())).collect()
    }

    /// Answers it successfully.
    pub(super) fn flushed(&mut self, flush: &[(String, u64)]) {
        for (name, issued) in flush {
            if let Some(entry) = self.entries.get_mut(name) {
                entry.model.flushed(*issued);
            }
        }
    }

    /// Issues a write: each of its blocks has a number of its own, so that blocks repeat and writes do not.
    pub(super) fn issue_write(
        &mut self,
        name: &str,
        first: u64,
        sectors: u64,
        number: u64,
    ) -> Vec<Ticket> {
        let model = &mut self.entry(name).model;
        parts(first, sectors, number)
            .map(|(at, len, n)| model.issue(at, len, Change::Write(n)))
            .collect()
    }
}

/// The parts of a write by block, and the numbers of their contents.
pub(super) fn parts(
    first: u64,
    sectors: u64,
    number: u64,
) -> impl Iterator<Item = (u64, u64, u64)> {
    let end = first + sectors;
    (first / 8..end.div_ceil(8)).map(move |block| {
        let (from, to) = ((8 * block).max(first), (8 * block + 8).min(end));
        (from, to - from, number + (block - first / 8))
    })
}
