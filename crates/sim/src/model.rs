//! The allowed contents of a disk: for each sector, every write to it that may still, or again, be read.
//!
//! Time here is a count of events: each request is given one number when it is issued and one
//! when it is answered. A write *supersedes* another one if it was issued after that one's answer.
//! * A read shows no value that was superseded by a write answered before the read was issued.
//! * The death of the process leaves no value that was superseded by an answered write.
//! * A power cut leaves no value that was superseded by a durable write, one that was answered
//!   before a successful flush was issued.

use std::collections::{BTreeMap, BTreeSet};

use crate::stamp::Value;

/// The change of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Written, by the write of this number.
    Write(u64),
    /// Made zeros.
    Zero,
    /// Discarded: it reads as before, as zeros, or as the layers below.
    Discard,
}

/// A request that was issued, to be answered.
#[derive(Clone, Copy, Debug)]
pub struct Ticket {
    first: u64,
    sectors: u64,
    issued: u64,
    changes: bool,
}

impl Ticket {
    /// The sectors of the request.
    pub fn range(&self) -> std::ops::Range<u64> {
        self.first..self.first + self.sectors
    }
}

#[derive(Clone, Copy, Debug)]
struct Record {
    value: Value,
    issued: u64,
    answered: Option<u64>,
    /// It may be there, and supersedes nothing: a discard, or a failed request.
    weak: bool,
    durable: bool,
}

impl Record {
    fn superseded_by(&self, other: &Record) -> bool {
        !other.weak && self.answered.is_some_and(|at| at < other.issued)
    }
}

/// The event before the disk is examined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The process died; the kernel has all writes that it was given.
    Death,
    /// The power was cut.
    PowerCut,
    /// It was closed, which promises as much as a flush.
    Close,
}

/// The model of one disk; see the module text.
#[derive(Default)]
pub struct Model {
    now: u64,
    sectors: u64,
    history: BTreeMap<u64, Vec<Record>>,
    /// The sectors that a flush may change the state of.
    open: BTreeSet<u64>,
    /// The contents that layers below the leaf may have, besides zeros: everything that a snapshot has ever put there,
    /// since merging a layer reveals the layers below it.
    below: BTreeMap<u64, Vec<Value>>,
    reads: usize,
}

impl Model {
    /// A new disk: zeros.
    pub fn new(sectors: u64) -> Model {
        Model { sectors, ..Model::default() }
    }

    /// Its size.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Enlarges the disk; the new part is zeros.
    pub fn grow(&mut self, sectors: u64) {
        self.sectors = self.sectors.max(sectors);
    }

    /// Moves the present contents below a new leaf. Only after [`observe`](Model::observe).
    pub fn snapshot(&mut self) {
        for (sector, records) in &self.history {
            let below = self.below.entry(*sector).or_default();
            if let Some(last) = records.last().filter(|last| !below.contains(&last.value)) {
                below.push(last.value);
            }
        }
    }

    /// As [`snapshot`](Model::snapshot), if the present contents are not durable: earlier ones may be below, too.
    pub fn overlay(&mut self) {
        for (sector, records) in &self.history {
            let below = self.below.entry(*sector).or_default();
            for record in records {
                if !below.contains(&record.value) {
                    below.push(record.value);
                }
            }
        }
    }

    /// The model of a copy that an operation has made of this disk. The operation was issued as the flush `issued` and
    /// ends now: the copy has all writes that were answered before, durably, and perhaps those that were in flight then
    /// or came since.
    pub fn shared(&self, issued: u64) -> Model {
        let now = self.now + 1;
        let mut history = self.history.clone();
        for record in history.values_mut().flatten() {
            if record.answered.is_some_and(|at| at < issued) {
                record.durable = true;
            } else {
                (record.answered, record.weak) = (Some(now), true);
            }
        }
        let (sectors, open) = (self.sectors, self.open.clone());
        Model { now, sectors, history, open, ..Model::default() }
    }

    /// The model of this disk with another size, when no request is in flight: sectors behind a smaller one are gone,
    /// and sectors that a larger one adds are zeros.
    pub fn resized(&self, sectors: u64) -> Model {
        let history = self.history.range(..sectors);
        let history = history.map(|(sector, records)| (*sector, records.clone())).collect();
        let open = self.open.range(..sectors).copied().collect();
        Model { now: self.now, sectors, history, open, ..Model::default() }
    }

    /// The model of a disk that replaces another one: requests from now on are later than all of the other's.
    pub fn behind(self, other: &Model) -> Model {
        Model { now: self.now.max(other.now), ..self }
    }

    /// Issues a read.
    pub fn issue_read(&mut self, first: u64, sectors: u64) -> Ticket {
        self.now += 1;
        self.reads += 1;
        Ticket { first, sectors, issued: self.now, changes: false }
    }

    /// Issues a change.
    pub fn issue(&mut self, first: u64, sectors: u64, change: Change) -> Ticket {
        self.now += 1;
        let issued = self.now;
        self.open.extend(first..first + sectors);
        for sector in first..first + sectors {
            let below = self.below.get(&sector).map_or(&[][..], Vec::as_slice);
            let records = self.history.entry(sector).or_insert_with(|| vec![initial(Value::Zeros)]);
            let mut push = |value, weak| {
                records.push(Record { value, issued, answered: None, weak, durable: false });
            };
            match change {
                Change::Write(number) => push(Value::Written(number), false),
                Change::Zero => push(Value::Zeros, false),
                Change::Discard => {
                    push(Value::Zeros, true);
                    below.iter().for_each(|value| push(*value, true));
                }
            }
        }
        Ticket { first, sectors, issued, changes: true }
    }

    /// Answers a change.
    pub fn answer(&mut self, ticket: Ticket, ok: bool) {
        assert!(ticket.changes, "a read is answered with what it found");
        self.now += 1;
        for sector in ticket.range() {
            for record in self.history.entry(sector).or_default() {
                if record.issued == ticket.issued {
                    record.answered = Some(self.now);
                    record.weak |= !ok;
                }
            }
        }
    }

    /// Answers a read: `found` for each of its sectors, or no answer at all.
    ///
    /// # Errors
    /// The first sector with content that is not allowed.
    pub fn answer_read(
        &mut self,
        ticket: Ticket,
        found: Option<&[Result<Value, String>]>,
    ) -> Result<(), String> {
        self.now += 1;
        self.reads -= 1;
        let Some(found) = found else { return Ok(()) };
        for (sector, found) in ticket.range().zip(found) {
            let counts = |r: &Record| r.answered.is_some_and(|at| at < ticket.issued);
            self.check(sector, found, "a read", counts)?;
        }
        Ok(())
    }

    /// Issues a flush.
    pub fn issue_flush(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Answers the flush that was issued as `flush`, successfully.
    pub fn flushed(&mut self, flush: u64) {
        self.now += 1;
        let prune = self.reads == 0;
        self.open.retain(|sector| {
            let Some(records) = self.history.get_mut(sector) else { return false };
            for record in records.iter_mut() {
                record.durable |= record.answered.is_some_and(|at| at < flush);
            }
            if prune && records.len() > 1 {
                let all = records.clone();
                records.retain(|r| !all.iter().any(|o| o.durable && r.superseded_by(o)));
            }
            records.len() > 1 || !records.iter().all(|r| r.durable)
        });
    }

    /// Checks one sector of a disk that was opened again.
    ///
    /// # Errors
    /// Its content is not allowed.
    pub fn check_after(
        &self,
        after: After,
        sector: u64,
        found: &Result<Value, String>,
    ) -> Result<(), String> {
        match after {
            After::Death => {
                self.check(sector, found, "the death of the process", |r| r.answered.is_some())
            }
            After::PowerCut => self.check(sector, found, "a power cut", |r| r.durable),
            After::Close => self.check(sector, found, "closing", |r| r.answered.is_some()),
        }
    }

    /// Makes the content that was found the only one of the sector: unanswered requests no longer matter. After a power
    /// cut or closing, it is durable.
    pub fn observe(&mut self, after: After, sector: u64, found: Value) {
        self.now += 2;
        let now = self.now;
        let Some(records) = self.history.get_mut(&sector) else { return };
        if after != After::Death {
            *records = vec![Record { issued: now, answered: Some(now), ..initial(found) }];
            return;
        }
        for record in records.iter_mut().filter(|r| r.answered.is_none()) {
            record.answered = Some(now - 1);
            record.weak = true;
        }
        let durable = false;
        self.open.insert(sector);
        records.push(Record {
            value: found,
            issued: now,
            answered: Some(now),
            weak: false,
            durable,
        });
    }

    /// The sectors that were ever changed.
    pub fn touched(&self) -> impl Iterator<Item = u64> + '_ {
        self.history.keys().copied()
    }

    /// `counts`: the records that supersede others.
    fn check(
        &self,
        sector: u64,
        found: &Result<Value, String>,
        what: &str,
        counts: impl Fn(&Record) -> bool,
    ) -> Result<(), String> {
        let untouched = [initial(Value::Zeros)];
        let records = self.history.get(&sector).map_or(&untouched[..], |r| r);
        let allowed = |r: &&Record| !records.iter().any(|o| counts(o) && r.superseded_by(o));
        if let Ok(found) = found
            && records.iter().filter(allowed).any(|r| r.value == *found)
        {
            return Ok(());
        }
        let mut values: Vec<Value> = records.iter().filter(allowed).map(|r| r.value).collect();
        values.sort();
        values.dedup();
        let values: Vec<String> = values.iter().map(ToString::to_string).collect();
        let found = found.as_ref().map_or_else(String::clone, ToString::to_string);
        let values = values.join(", ");
        Err(format!("sector {sector} after {what}: allowed: {values}; found: {found}"))
    }
}

fn initial(value: Value) -> Record {
    Record { value, issued: 0, answered: Some(0), weak: false, durable: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(model: &Model, after: After, value: Value) -> bool {
        model.check_after(after, 3, &Ok(value)).is_ok()
    }

    const W1: Value = Value::Written(1);
    const W2: Value = Value::Written(2);

    #[test]
    fn a_power_cut_leaves_what_was_flushed_or_anything_written_since() {
        let mut model = Model::new(10);
        let first = model.issue(3, 1, Change::Write(1));
        assert!(found(&model, After::PowerCut, W1) && found(&model, After::PowerCut, Value::Zeros));
        model.answer(first, true);
        let flush = model.issue_flush();
        let second = model.issue(3, 1, Change::Write(2));
        model.answer(second, true);
        model.flushed(flush);
        assert!(found(&model, After::PowerCut, W1) && found(&model, After::PowerCut, W2));
        assert!(!found(&model, After::PowerCut, Value::Zeros));
        assert!(!found(&model, After::Death, W1) && found(&model, After::Death, W2));
        assert!(model.check_after(After::PowerCut, 3, &Err("torn".into())).is_err());
    }

    #[test]
    fn writes_at_the_same_time_leave_either() {
        let mut model = Model::new(10);
        let first = model.issue(3, 1, Change::Write(1));
        let second = model.issue(3, 1, Change::Write(2));
        model.answer(second, true);
        model.answer(first, true);
        assert!(found(&model, After::Death, W1) && found(&model, After::Death, W2));
        assert!(!found(&model, After::Death, Value::Zeros));
    }

    #[test]
    fn a_failed_write_and_a_discard_may_have_happened_or_not() {
        let mut model = Model::new(10);
        let first = model.issue(3, 1, Change::Write(1));
        model.answer(first, true);
        let second = model.issue(3, 1, Change::Write(2));
        model.answer(second, false);
        let flush = model.issue_flush();
        model.flushed(flush);
        assert!(found(&model, After::PowerCut, W1) && found(&model, After::PowerCut, W2));
        assert!(!found(&model, After::PowerCut, Value::Zeros));
        let discard = model.issue(3, 1, Change::Discard);
        model.answer(discard, true);
        let values = [W1, W2, Value::Zeros];
        assert!(values.iter().all(|v| found(&model, After::Death, *v)));
    }

    #[test]
    fn a_read_shows_what_was_answered_before_it_was_issued_or_later() {
        let mut model = Model::new(10);
        let write = model.issue(3, 1, Change::Write(1));
        let early = model.issue_read(3, 1);
        model.answer(write, true);
        let late = model.issue_read(3, 1);
        assert!(model.answer_read(early, Some(&[Ok(Value::Zeros)])).is_ok());
        let text = model.answer_read(late, Some(&[Ok(Value::Zeros)])).unwrap_err();
        assert_eq!(text, "sector 3 after a read: allowed: write 1; found: zeros");
    }

    #[test]
    fn what_is_made_of_a_disk_has_what_was_answered_before_and_perhaps_what_was_under_way() {
        let mut model = Model::new(10);
        let first = model.issue(3, 1, Change::Write(1));
        model.answer(first, true);
        let second = model.issue(3, 1, Change::Write(2));
        let made = model.issue_flush();
        let third = model.issue(3, 1, Change::Write(3));
        model.answer(second, true);
        model.answer(third, true);
        let mut other = model.shared(made);
        for value in [W1, W2, Value::Written(3)] {
            assert!(found(&other, After::PowerCut, value));
        }
        assert!(!found(&other, After::PowerCut, Value::Zeros));
        let write = other.issue(3, 1, Change::Write(4));
        other.answer(write, true);
        assert!(!found(&other, After::Death, W1) && found(&other, After::Death, Value::Written(4)));
        assert!(found(&model, After::Death, Value::Written(3)));
    }

    #[test]
    fn what_is_seen_after_a_death_is_not_durable_yet() {
        let mut model = Model::new(10);
        let write = model.issue(3, 1, Change::Write(1));
        model.answer(write, true);
        model.observe(After::Death, 3, W1);
        assert!(found(&model, After::PowerCut, Value::Zeros) && found(&model, After::PowerCut, W1));
        assert!(!found(&model, After::Death, Value::Zeros));
        model.observe(After::PowerCut, 3, Value::Zeros);
        assert!(!found(&model, After::PowerCut, W1));
    }
}
