//! What a client and we agree upon before its first request: bytes in, bytes out, no I/O.

use super::wire::{
    CONTEXT, CONTEXT_ID, FIXED_NEWSTYLE, Fields, NO_ZEROES, OPTION_MAGIC, SERVER_MAGIC, can, info,
    option, push_option_reply, reply,
};

/// The longest option that is looked at: names have at most 4096 bytes.
pub(super) const MAX_OPTION_BYTES: usize = 32 << 10;
/// The longest name that the protocol allows.
pub(super) const MAX_NAME_BYTES: usize = 4096;
/// Options of one client.
const MAX_OPTIONS: usize = 512;
/// Bytes of an option before its data.
pub(super) const OPTION_HEAD_BYTES: usize = 16;
/// Bytes that fill the answer to `EXPORT_NAME`, unless the client does without them.
pub(super) const PADDING: [u8; 124] = [0; 124];

/// Requests are of whole sectors (nbd-rules.md 3).
pub(super) const MIN_BLOCK_BYTES: u32 = 512;
/// The largest data of a request.
pub(super) const MAX_REQUEST_BYTES: u32 = 32 << 20;

/// What is offered, under any name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Export {
    /// The size of the disk.
    pub(super) bytes: u64,
    pub(super) read_only: bool,
    pub(super) trims: bool,
    /// What requests had better be multiples of; a power of two, [`MIN_BLOCK_BYTES`] at least.
    pub(super) preferred_bytes: u32,
}

/// What a client wants of its requests' answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Agreed {
    /// Reads are answered in chunks.
    pub(super) structured: bool,
    /// It may ask for `base:allocation`.
    pub(super) allocation: bool,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// More bytes of the client's.
    More,
    /// Its requests.
    Requests(Agreed),
    /// Nothing: it is to be closed, once what was said is sent.
    Close,
}

/// One client's; see the module's text.
pub(super) struct Negotiation {
    export: Export,
    /// The flags that the client has sent, first of all.
    flags: Option<u32>,
    agreed: Agreed,
    /// The export that `base:allocation` was agreed upon for.
    context_of: Vec<u8>,
    options: usize,
    /// Bytes of an option that is too long, which are still to come.
    skip: u64,
}

impl Negotiation {
    /// Begins one, with what is said first.
    pub(super) fn new(export: Export, out: &mut Vec<u8>) -> Negotiation {
        out.extend(SERVER_MAGIC.to_be_bytes());
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        Negotiation {
            export,
            flags: None,
            agreed: Agreed::default(),
            context_of: Vec::new(),
            options: 0,
            skip: 0,
        }
    }

    /// Takes what it understands off the front of `input`, and adds the answers to `out`.
    pub(super) fn go_on(&mut self, input: &mut Vec<u8>, out: &mut Vec<u8>) -> Next {
        let mut taken = 0;
        let next = loop {
            match self.step(&input[taken..], out) {
                Some((bytes, Next::More)) => taken += bytes,
                Some((bytes, next)) => {
                    taken += bytes;
                    break next;
                }
                None => break Next::More,
            }
        };
        input.drain(..taken);
        next
    }

    /// One message; `None`: it is not there in full yet.
    fn step(&mut self, input: &[u8], out: &mut Vec<u8>) -> Option<(usize, Next)> {
        if self.skip > 0 {
            let bytes = self.skip.min(input.len() as u64);
            self.skip -= bytes;
            return (bytes > 0).then_some((bytes as usize, Next::More));
        }
        let mut fields = Fields(input);
        if self.flags.is_none() {
            let flags = fields.u32()?;
            let known = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
            self.flags = Some(flags);
            return Some((4, if flags & !known == 0 { Next::More } else { Next::Close }));
        }
        let (magic, option, len) = (fields.u64()?, fields.u32()?, fields.u32()?);
        if magic != OPTION_MAGIC || self.options == MAX_OPTIONS {
            return Some((OPTION_HEAD_BYTES, Next::Close));
        }
        let all = OPTION_HEAD_BYTES + len as usize;
        if len as usize > MAX_OPTION_BYTES {
            if option == option::EXPORT_NAME {
                // It has no other answer.
                return Some((OPTION_HEAD_BYTES, Next::Close));
            }
            push_option_reply(out, option, reply::TOO_BIG, &[]);
            self.options += 1;
            self.skip = u64::from(len);
            return Some((OPTION_HEAD_BYTES, Next::More));
        }
        let data = fields.bytes(len as usize)?;
        self.options += 1;
        Some((all, self.option(option, data, out)))
    }

    fn option(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Next {
        let mut answer = |kind: u32, data: &[&[u8]]| push_option_reply(out, option, kind, data);
        match option {
            option::EXPORT_NAME => return self.export_name(data, out),
            option::ABORT => {
                answer(reply::ACK, &[]);
                return Next::Close;
            }
            option::LIST if data.is_empty() => {
                // The default export, whose name is empty.
                answer(reply::SERVER, &[&0u32.to_be_bytes()]);
                answer(reply::ACK, &[]);
            }
            option::INFO | option::GO => {
                let Some((name, wants_name)) = parse_info(data) else {
                    answer(reply::INVALID, &[]);
                    return Next::More;
                };
                // Agreed before, unless another of the infos comes between.
                let agreed = self.agreed_for(name);
                for part in self.infos(name, wants_name, agreed.structured) {
                    answer(reply::INFO, &[&part]);
                }
                answer(reply::ACK, &[]);
                if option == option::GO {
                    return Next::Requests(agreed);
                }
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.agreed.structured = true;
                answer(reply::ACK, &[]);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(option, data, out);
            }
            option::LIST | option::STRUCTURED_REPLY => answer(reply::INVALID, &[]),
            _ => answer(reply::UNSUPPORTED, &[]),
        }
        Next::More
    }

    /// The oldest way to an export; the only answer to a wrong one is to hang up.
    fn export_name(&self, name: &[u8], out: &mut Vec<u8>) -> Next {
        if name.len() > MAX_NAME_BYTES {
            return Next::Close;
        }
        let agreed = self.agreed_for(name);
        out.extend(self.export.bytes.to_be_bytes());
        out.extend(self.export.flags(agreed.structured).to_be_bytes());
        if self.flags.is_some_and(|flags| flags & u32::from(NO_ZEROES) == 0) {
            out.extend(PADDING);
        }
        Next::Requests(agreed)
    }

    /// A context is agreed upon for an export by name.
    fn agreed_for(&self, name: &[u8]) -> Agreed {
        let allocation = self.agreed.allocation && self.context_of == name;
        Agreed { allocation, ..self.agreed }
    }

    /// All that there is to say about the export, asked for or not.
    fn infos(&self, name: &[u8], wants_name: bool, structured: bool) -> Vec<Vec<u8>> {
        let Export { bytes, preferred_bytes, .. } = self.export;
        let flags = self.export.flags(structured);
        let export =
            [&info::EXPORT.to_be_bytes()[..], &bytes.to_be_bytes(), &flags.to_be_bytes()].concat();
        let sizes = [MIN_BLOCK_BYTES, preferred_bytes, MAX_REQUEST_BYTES];
        let sizes = sizes.map(u32::to_be_bytes).concat();
        let mut infos = vec![export, [&info::BLOCK_SIZE.to_be_bytes()[..], &sizes].concat()];
        if wants_name {
            infos.push([&info::NAME.to_be_bytes()[..], name].concat());
        }
        infos
    }

    fn contexts(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            self.agreed.allocation = false;
        }
        let queries = parse_contexts(data).filter(|_| self.agreed.structured || !sets);
        let Some((name, queries)) = queries else {
            return push_option_reply(out, option, reply::INVALID, &[]);
        };
        let exact = queries.contains(&CONTEXT.as_bytes());
        let listed = !sets && (queries.is_empty() || queries.contains(&&b"base:"[..]));
        if exact || listed {
            let id = if sets { CONTEXT_ID } else { 0 };
            let parts = [&id.to_be_bytes()[..], CONTEXT.as_bytes()];
            push_option_reply(out, option, reply::META_CONTEXT, &parts);
        }
        if sets && exact {
            self.agreed.allocation = true;
            self.context_of = name.to_vec();
        }
        push_option_reply(out, option, reply::ACK, &[]);
    }
}

impl Export {
    /// A flush makes durable what any client was answered, so clients may be several (nbd-rules.md 4).
    fn flags(&self, structured: bool) -> u16 {
        let mut flags = can::HAS_FLAGS | can::FLUSH | can::FUA | can::MULTI_CONN;
        let mut set = |flag, is| flags |= if is { flag } else { 0 };
        set(can::READ_ONLY, self.read_only);
        set(can::WRITE_ZEROES, !self.read_only);
        set(can::TRIM, !self.read_only && self.trims);
        set(can::DF, structured);
        flags
    }
}

/// The name in `INFO` and `GO`, and whether it is to be told. `None`: it makes no sense.
fn parse_info(data: &[u8]) -> Option<(&[u8], bool)> {
    let mut fields = Fields(data);
    let name = fields.counted().filter(|name| name.len() <= MAX_NAME_BYTES)?;
    let count = fields.u16()?;
    let mut wants_name = false;
    for _ in 0..count {
        wants_name |= fields.u16()? == info::NAME;
    }
    fields.0.is_empty().then_some((name, wants_name))
}

/// The export's name and the queries. `None`: it makes no sense.
fn parse_contexts(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut fields = Fields(data);
    let name = fields.counted().filter(|name| name.len() <= MAX_NAME_BYTES)?;
    let count = fields.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        // Each has four bytes at least, so this ends with the option.
        queries.push(fields.counted()?);
    }
    fields.0.is_empty().then_some((name, queries))
}

#[cfg(test)]
mod tests;
