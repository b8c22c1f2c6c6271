//! Answers to BLOCK_STATUS: the state of a range, in each of the client's contexts.

use ferrite_disk::{Allocation, SECTOR_BYTES};
use ferrite_nbd::wire::{
    CONTEXT_ID, DEPTH_CONTEXT_ID, DIRTY, Form, HOLE_AND_ZERO, RawRequest, flag, push_extent,
    push_long_extent,
};

use super::Client;
use super::output::Reply;
use super::requests::Slot;
use super::steps::Part;
use crate::log_limit::limited;

/// The lengths and states of the extents of a context, whose number is before them.
type Answer = (u32, Vec<(u64, u32)>);

impl Client {
    /// Queues a chunk for each context of the client. The last one ends the answer. `false`: a dirty map that the client
    /// has chosen is not there any more, and nothing is queued.
    pub(super) fn answer_status(&mut self, slot: Slot, part: Part, found: &[Allocation]) -> bool {
        let raw = self.requests.get(slot).raw;
        let chosen = self.agreed.contexts;
        let most = if raw.has(flag::REQ_ONE) { 1 } else { chosen.most_extents() };
        let mut answers = Vec::<Answer>::new();
        if chosen.allocation {
            let state = |found: &Allocation| if found.zeros { HOLE_AND_ZERO } else { 0 };
            answers.push((CONTEXT_ID, extents(&raw, part, found, most, state)));
        }
        if chosen.depth {
            let extents = extents(&raw, part, found, most, |found| found.depth);
            answers.push((DEPTH_CONTEXT_ID, extents));
        }
        if self.add_changes(&raw, part, most, &mut answers).is_none() {
            let now_ns = self.clock.now_ns();
            let limit = &self.shared.device.log_limits.connections;
            limited!(
                warn,
                limit,
                now_ns,
                "a client asks for a dirty map that was ended or begun anew: it gets errors until it connects again"
            );
            return false;
        }
        let last = answers.len();
        for (i, (context, extents)) in answers.into_iter().enumerate() {
            self.answer_context(&raw, context, &extents, (i + 1 == last).then_some(slot));
        }
        true
    }

    /// Adds the answers for the client's dirty maps, as they are now. `None`: one of them is not there any more. The disk
    /// may have been exchanged since the client came.
    fn add_changes(
        &self,
        raw: &RawRequest,
        part: Part,
        most: usize,
        answers: &mut Vec<Answer>,
    ) -> Option<()> {
        let from = raw.offset + part.at;
        let mut dirty = self.dirty.chosen(self.agreed.contexts).peekable();
        if dirty.peek().is_none() {
            return Some(());
        }
        let view = self.path.disk().dirty_view().ok().flatten()?;
        for context in dirty {
            let found = view.stretches(&context.map, from..from + part.len, most)?;
            let extent = |part: ferrite_disk::dirty::Stretch| {
                (part.len, if part.changed { DIRTY } else { 0 })
            };
            answers.push((context.number, found.into_iter().map(extent).collect()));
        }
        Some(())
    }

    fn answer_context(
        &mut self,
        raw: &RawRequest,
        context: u32,
        extents: &[(u64, u32)],
        ends: Option<Slot>,
    ) {
        let to = self.reply_to(raw);
        let mut tail = Vec::with_capacity(extents.len() * 16);
        for (len, state) in extents {
            match to.form {
                Form::Extended => push_long_extent(&mut tail, *len, (*state).into()),
                // All extents together cover one request, whose length has 32 bits.
                _ => push_extent(&mut tail, *len as u32, *state),
            }
        }
        let head = to.status(ends.is_some(), context, extents.len());
        self.output.push(Reply { tail, ..Reply::new(head, ends) });
    }
}

/// The lengths and states of at most `most` extents of a request's part, of which neighbours differ.
fn extents(
    raw: &RawRequest,
    part: Part,
    found: &[Allocation],
    most: usize,
    state: impl Fn(&Allocation) -> u32,
) -> Vec<(u64, u32)> {
    let mut extents: Vec<(u64, u32)> = Vec::new();
    // The sectors around the request were looked up.
    let (mut before, mut left) = ((raw.offset + part.at) % SECTOR_BYTES, part.len);
    for one in found {
        let outside = before.min(one.len);
        let len = (one.len - outside).min(left);
        (before, left) = (before - outside, left - len);
        let (state, is_full) = (state(one), extents.len() == most);
        match extents.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.1 == state => last.0 += len,
            Some(_) if is_full => break,
            _ => extents.push((len, state)),
        }
    }
    extents
}
