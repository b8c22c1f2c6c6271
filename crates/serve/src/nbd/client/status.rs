//! Answers to BLOCK_STATUS: where a range has data, in each of the client's contexts.

use ferrite_disk::{Allocation, SECTOR_BYTES};
use ferrite_nbd::wire::{
    CONTEXT_ID, DEPTH_CONTEXT_ID, Form, HOLE_AND_ZERO, RawRequest, flag, push_extent,
    push_long_extent,
};

use super::Client;
use super::output::Reply;
use super::requests::Slot;
use super::steps::Part;

impl Client {
    /// Queues a chunk for each context of the client. The last one ends the answer.
    pub(super) fn answer_status(&mut self, slot: Slot, part: Part, found: &[Allocation]) {
        let raw = self.requests.get(slot).raw;
        let chosen = self.agreed.contexts;
        if chosen.allocation {
            let state = |found: &Allocation| if found.zeros { HOLE_AND_ZERO } else { 0 };
            let extents = extents(&raw, part, found, state);
            self.answer_context(&raw, CONTEXT_ID, &extents, (!chosen.depth).then_some(slot));
        }
        if chosen.depth {
            let extents = extents(&raw, part, found, |found| found.depth);
            self.answer_context(&raw, DEPTH_CONTEXT_ID, &extents, Some(slot));
        }
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

/// The lengths and states of the extents of a request's part, of which neighbours differ.
fn extents(
    raw: &RawRequest,
    part: Part,
    found: &[Allocation],
    state: impl Fn(&Allocation) -> u32,
) -> Vec<(u64, u32)> {
    let mut extents: Vec<(u64, u32)> = Vec::new();
    // The sectors around the request were looked up.
    let (mut before, mut left) = ((raw.offset + part.at) % SECTOR_BYTES, part.len);
    for one in found {
        let outside = before.min(one.len);
        let len = (one.len - outside).min(left);
        (before, left) = (before - outside, left - len);
        let state = state(one);
        match extents.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.1 == state => last.0 += len,
            Some(_) if raw.has(flag::REQ_ONE) => break,
            _ => extents.push((len, state)),
        }
    }
    extents
}
