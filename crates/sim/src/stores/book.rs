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
    /// The other possible contents: a rollback or resize was not answered, or a resize has failed.
    others: Vec<Model>,
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
    Rename { name: String, to: String },
    Resize { name: String, sectors: u64 },
}

impl Deed {
    pub(super) fn name(&self) -> &String {
        match self {
            Deed::Create { name, .. }
            | Deed::Share { name, .. }
            | Deed::Rollback { name, .. }
            | Deed::Delete { name }
            | Deed::Rename { name, .. }
            | Deed::Resize { name, .. } => name,
        }
    }

    /// Whether it is done by a checkpoint, and not by a record.
    pub(super) fn is_alteration(&self) -> bool {
        matches!(self, Deed::Rename { .. } | Deed::Resize { .. })
    }

    /// Whether its volume must not be in use.
    pub(super) fn is_alone(&self) -> bool {
        self.is_alteration() || matches!(self, Deed::Rollback { .. } | Deed::Delete { .. })
    }

    /// The volume that it only reads.
    fn source(&self) -> Option<&String> {
        match self {
            Deed::Share { of, .. } => Some(of),
            Deed::Rollback { to, .. } => Some(to),
            Deed::Create { .. }
            | Deed::Delete { .. }
            | Deed::Rename { .. }
            | Deed::Resize { .. } => None,
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
        Entry { model, others: Vec::new(), domain, is_snapshot, uses: 0, is_held: false }
    }

    /// The sectors that were ever changed.
    pub(super) fn touched(&self) -> impl Iterator<Item = u64> + '_ {
        [&self.model].into_iter().chain(&self.others).flat_map(Model::touched)
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
            let others = std::mem::take(&mut self.others);
            let (has_others, is_other) = (!others.is_empty(), |other: &Model| check(other).is_ok());
            match others.into_iter().find(is_other) {
                Some(other) => self.model = other,
                None if has_others => {
                    return Err(format!("neither before a rollback or resize nor after it: {e}"));
                }
                None => return Err(e),
            }
        }
        self.others.clear();
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

    /// Chooses an operation that can be executed now. `alters`: volumes may get other names and sizes.
    pub(super) fn choose(
        &mut self,
        random: &mut SplitMix64,
        sizes: &[u64],
        alters: bool,
    ) -> Option<Deed> {
        let has_room = self.entries.len() + self.pending.len() < MOST;
        let written = self.entries.values().filter(|e| !e.is_snapshot && !e.is_held).count();
        let kind = random.below(if alters { 18 } else { 12 });
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
            12..14 => {
                let name = self.any(random, |_| true)?;
                Some(Deed::Rename { name, to: format!("r{number}") })
            }
            14.. => {
                let name = self.any(random, |e| !e.is_snapshot)?;
                let sectors = sizes[random.below(sizes.len() as u64) as usize];
                Some(Deed::Resize { name, sectors })
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
            Deed::Resize { name, sectors } => {
                let entry = self.entries.get(name)?;
                Some(Entry::new(entry.model.resized(*sectors), entry.domain, false))
            }
            Deed::Delete { .. } | Deed::Rename { .. } => None,
        }
    }

    /// The name that the volume of an operation has now.
    pub(super) fn name_of<'a>(&self, deed: &'a Deed) -> &'a String {
        match deed {
            Deed::Rename { to, .. } if self.entries.contains_key(to) => to,
            _ => deed.name(),
        }
    }

    /// A rename or resize has failed. If memory has it all the same, the medium has it when the next checkpoint has
    /// ended well, and perhaps before.
    pub(super) fn fail_alteration(&mut self, deed: &Deed, is_in_memory: bool) {
        let is_it = |p: &Pending| p.failed.is_none() && p.deed.name() == deed.name();
        let Some(at) = self.pending.iter().position(is_it) else { return };
        if !is_in_memory {
            self.pending.remove(at);
            return;
        }
        let before = self.entries.get(deed.name()).map(|e| e.model.resized(e.model.sectors()));
        let made = self.made_by(deed, self.pending[at].issued);
        self.enter(deed, made);
        match deed {
            Deed::Resize { name, .. } => {
                self.pending.remove(at);
                self.entry(name).others.extend(before);
            }
            _ => self.pending[at].failed = Some(None),
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
        if deed.is_alteration() {
            self.has_gone_on(&self.name_of(deed).clone());
        }
    }

    fn enter(&mut self, deed: &Deed, made: Option<Entry>) {
        match (deed, made) {
            (Deed::Delete { name }, _) => drop(self.entries.remove(name)),
            (Deed::Rollback { name, .. } | Deed::Resize { name, .. }, Some(made)) => {
                let entry = self.entry(name);
                entry.model = made.model.behind(&entry.model);
            }
            (Deed::Rename { name, to }, _) => self.is_called(name, to),
            (_, Some(made)) => drop(self.entries.insert(deed.name().clone(), made)),
            (_, None) => {}
        }
    }

    /// The volume of one name has another one.
    fn is_called(&mut self, name: &str, to: &str) {
        if let Some(mut entry) = self.entries.remove(name) {
            entry.is_held = false;
            self.entries.insert(to.to_owned(), entry);
        }
    }

    /// New content of a volume, or an operation on it, was answered. So a checkpoint is later than all earlier
    /// failures, and none of these operations comes back.
    pub(super) fn has_gone_on(&mut self, name: &str) {
        let is_of_it = |deed: &Deed| match deed {
            Deed::Rename { to, .. } => to == name,
            deed => deed.name() == name,
        };
        let is_over = |p: &Pending| p.failed.is_some() && p.deed.is_alone() && is_of_it(&p.deed);
        self.pending.retain(|p| !is_over(p));
        if let Some(entry) = self.entries.get_mut(name) {
            entry.others.clear();
        }
    }

    /// The names that a new process finds tell which operations were done; of a rollback or resize the contents and sizes do.
    pub(super) fn reconcile(&mut self, found: &BTreeSet<String>) -> Result<(), String> {
        for pending in std::mem::take(&mut self.pending) {
            let Pending { deed, issued, failed } = pending;
            let made = failed.unwrap_or_else(|| self.made_by(&deed, issued));
            let is_there = found.contains(deed.name());
            match (&deed, made) {
                (Deed::Rollback { name, .. } | Deed::Resize { name, .. }, Some(made)) => {
                    if let Some(entry) = self.entries.get_mut(name) {
                        entry.others.push(made.model);
                    }
                }
                (Deed::Rename { name, to }, _) if found.contains(to) => self.is_called(name, to),
                (Deed::Rename { name, to }, _) if is_there => self.is_called(to, name),
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
