//! The negotiation with a client before its first request: bytes in, bytes out, no I/O.

use ferrite_nbd::client::{SESSION, Session};
use ferrite_nbd::restriction::{RESTRICT, Restriction};
use ferrite_nbd::wire::{
    FIXED_NEWSTYLE, Fields, Form, NO_ZEROES, OPTION_MAGIC, SERVER_MAGIC, can, info, option,
    push_option_reply, reply,
};

use super::contexts::{Context, Contexts, DirtyContexts};

/// The longest option that is decoded: names have at most 4096 bytes.
pub(super) const MAX_OPTION_BYTES: usize = 32 << 10;
/// The longest name that the protocol allows.
pub(super) const MAX_NAME_BYTES: usize = 4096;
/// Most options of one client.
const MAX_OPTIONS: usize = 512;
/// Bytes of an option before its data.
pub(super) const OPTION_HEAD_BYTES: usize = 16;
/// The padding of the reply to `EXPORT_NAME`, unless the client refuses it.
pub(super) const PADDING: [u8; 124] = [0; 124];

/// The smallest block: any byte is served (nbd-rules.md 3).
const MIN_BLOCK_BYTES: u32 = 1;
/// The largest data of a request.
pub(super) const MAX_REQUEST_BYTES: u32 = 32 << 20;

/// The properties of an export.
#[derive(Clone, Copy, Debug)]
pub(super) struct Export {
    /// Bytes of the disk.
    pub(super) bytes: u64,
    pub(super) read_only: bool,
    pub(super) trims: bool,
    /// The preferred multiple of requests in bytes: a power of two.
    pub(super) preferred_bytes: u32,
}

/// An export that clients may choose by its name.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    pub(super) name: String,
    pub(super) export: Export,
    pub(super) dirty: DirtyContexts,
}

/// The server's options for what clients are told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Manners {
    /// LIST is refused.
    pub(super) hides_names: bool,
    /// A relay is between client and server. It may be of an older version, until it says otherwise (nbd-rules.md 6).
    pub(super) relayed: bool,
}

/// The abilities of the relay between client and server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Understood {
    /// The offer of the first version.
    Least,
    /// Extended heads, `qemu:allocation-depth`, CACHE and FAST_ZERO, too.
    Depth,
    /// The contexts of dirty maps, too.
    Maps,
}

impl Understood {
    fn needed(context: Context) -> Understood {
        match context {
            Context::Allocation => Understood::Least,
            Context::Depth => Understood::Depth,
            Context::Dirty(_) => Understood::Maps,
        }
    }
}

/// The version of what a relay understands, besides the first one, which has no number.
pub(super) const RELAY_VERSION: u32 = 2;

/// The negotiated features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Agreed {
    /// The index of the export.
    pub(super) index: usize,
    /// The form of requests and replies.
    pub(super) form: Form,
    /// The contexts that the client may query.
    pub(super) contexts: Contexts,
    /// The client may not change anything, whatever others may.
    pub(super) read_only: bool,
}

/// The next step of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// More bytes of the client are needed.
    More,
    /// The client's requests follow.
    Requests(Agreed),
    /// The client names its session. The connections that it replaces have to end before
    /// [`session_began`](Negotiation::session_began).
    Session(Session),
    /// The connection is closed after the output is sent.
    Close,
}

/// The negotiation with one client.
pub(super) struct Negotiation {
    offers: Vec<Offer>,
    hides_names: bool,
    relayed: bool,
    /// Nothing else is offered: a relay may not understand it.
    understood: Understood,
    /// The client's flags, which come first.
    flags: Option<u32>,
    agreed: Agreed,
    /// The export for which contexts were negotiated.
    contexts_of: Vec<u8>,
    options: usize,
    /// Bytes of a too long option that are still to come.
    skip: u64,
    /// The client has named its session.
    has_session: bool,
    /// The process before the server has said the client's rights.
    is_restricted: bool,
}

impl Negotiation {
    /// Begins a negotiation about at least one offer, with the greeting in `out`. A single one without a name has any
    /// name (nbd-rules.md 1).
    pub(super) fn new(offers: Vec<Offer>, manners: Manners, out: &mut Vec<u8>) -> Negotiation {
        out.extend(SERVER_MAGIC.to_be_bytes());
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        Negotiation {
            offers,
            hides_names: manners.hides_names,
            relayed: manners.relayed,
            understood: if manners.relayed { Understood::Least } else { Understood::Maps },
            flags: None,
            agreed: Agreed::default(),
            contexts_of: Vec::new(),
            options: 0,
            skip: 0,
            has_session: false,
            is_restricted: false,
        }
    }

    /// Uses the bytes at the front of `input`, and adds the replies to `out`.
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

    /// Nothing of the connections that the client's session replaces is under way any more.
    pub(super) fn session_began(&mut self, out: &mut Vec<u8>) {
        self.has_session = true;
        push_option_reply(out, SESSION, reply::ACK, &[]);
    }

    /// This server cannot end the connections that the client's session replaces: a relay stands before it.
    pub(super) fn session_refused(&mut self, out: &mut Vec<u8>) {
        push_option_reply(out, SESSION, reply::UNSUPPORTED, &[]);
    }

    /// Handles one message. `None`: it is not complete yet.
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
                // This option has no error reply.
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
            option::LIST if data.is_empty() && self.hides_names => answer(reply::POLICY, &[]),
            option::LIST if data.is_empty() => {
                // The default export has the empty name.
                for Offer { name, .. } in &self.offers {
                    let len = name.len() as u32;
                    answer(reply::SERVER, &[&len.to_be_bytes(), name.as_bytes()]);
                }
                answer(reply::ACK, &[]);
            }
            option::INFO | option::GO => {
                let Some((name, wants_name)) = parse_info(data) else {
                    answer(reply::INVALID, &[]);
                    return Next::More;
                };
                let Some(index) = self.find(name) else {
                    answer(reply::UNKNOWN, &[]);
                    return Next::More;
                };
                // The context was negotiated before, unless another export was named since.
                let agreed = self.agreed_for(name, index);
                for part in self.infos(name, wants_name, agreed) {
                    answer(reply::INFO, &[&part]);
                }
                answer(reply::ACK, &[]);
                if option == option::GO {
                    return Next::Requests(agreed);
                }
            }
            option::STRUCTURED_REPLY if data.is_empty() => match self.agreed.form {
                Form::Extended => answer(reply::EXTENDED_REQUIRED, &[]),
                _ => {
                    self.agreed.form = Form::Structured;
                    answer(reply::ACK, &[]);
                }
            },
            RESTRICT => {
                let is_done =
                    Restriction::parse(data).is_some_and(|restriction| self.restrict(restriction));
                answer(if is_done { reply::ACK } else { reply::INVALID }, &[]);
            }
            option::RELAYED if self.relayed && data.is_empty() => {
                self.understood = Understood::Depth;
                answer(reply::ACK, &[]);
            }
            option::RELAYED if self.relayed => {
                // A later version understands all that this one offers.
                self.understood = Understood::Maps;
                answer(reply::ACK, &[&RELAY_VERSION.to_be_bytes()]);
            }
            option::EXTENDED_HEADERS if self.understood == Understood::Least => {
                answer(reply::UNSUPPORTED, &[])
            }
            option::EXTENDED_HEADERS if data.is_empty() => {
                self.agreed.form = Form::Extended;
                answer(reply::ACK, &[]);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(option, data, out);
            }
            SESSION => match Session::parse(data) {
                Some(session) if !self.has_session => return Next::Session(session),
                _ => answer(reply::INVALID, &[]),
            },
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS => {
                answer(reply::INVALID, &[]);
            }
            _ => answer(reply::UNSUPPORTED, &[]),
        }
        Next::More
    }

    /// Takes rights from the client. A second time could give it another name, so there is none.
    fn restrict(&mut self, restriction: Restriction) -> bool {
        let is_first = !std::mem::replace(&mut self.is_restricted, true);
        // A name is for the only export, which has none of its own.
        let only = match &mut self.offers[..] {
            [only] if only.name.is_empty() => Some(only),
            _ => None,
        };
        match only {
            _ if !is_first => return false,
            Some(only) => only.name = restriction.name,
            None if restriction.name.is_empty() => {}
            None => return false,
        }
        self.hides_names |= restriction.hides_names;
        self.agreed.read_only |= restriction.read_only;
        for offer in &mut self.offers {
            offer.export.read_only |= restriction.read_only;
        }
        true
    }

    /// Handles the oldest way to select an export. A wrong name can only be answered by closing, and so is a client
    /// with extended heads: it has GO.
    fn export_name(&self, name: &[u8], out: &mut Vec<u8>) -> Next {
        if name.len() > MAX_NAME_BYTES || self.agreed.form == Form::Extended {
            return Next::Close;
        }
        let Some(index) = self.find(name) else { return Next::Close };
        let (agreed, export) = (self.agreed_for(name, index), &self.offers[index].export);
        out.extend(export.bytes.to_be_bytes());
        out.extend(self.flags(export, agreed.form).to_be_bytes());
        if self.flags.is_some_and(|flags| flags & u32::from(NO_ZEROES) == 0) {
            out.extend(PADDING);
        }
        Next::Requests(agreed)
    }

    /// The index of the export of this name.
    fn find(&self, name: &[u8]) -> Option<usize> {
        match &self.offers[..] {
            [only] if only.name.is_empty() || name.is_empty() => Some(0),
            offers => offers.iter().position(|offer| offer.name.as_bytes() == name),
        }
    }

    /// The agreed features for an export. Contexts are negotiated for one by its name.
    fn agreed_for(&self, name: &[u8], index: usize) -> Agreed {
        let contexts = match self.contexts_of == name {
            true => self.agreed.contexts,
            false => Contexts::default(),
        };
        Agreed { index, contexts, ..self.agreed }
    }

    /// Adds all information about the export, requested or not.
    fn infos(&self, name: &[u8], wants_name: bool, agreed: Agreed) -> Vec<Vec<u8>> {
        let export = self.offers[agreed.index].export;
        let Export { bytes, preferred_bytes, .. } = export;
        let flags = self.flags(&export, agreed.form);
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

    /// An export's flags. A flush makes durable what any client was answered, so there may be several clients
    /// (nbd-rules.md 4). Whether zeroing is fast is answered for each request.
    fn flags(&self, export: &Export, form: Form) -> u16 {
        let mut flags = can::HAS_FLAGS | can::FLUSH | can::FUA | can::MULTI_CONN;
        let mut set = |flag, is| flags |= if is { flag } else { 0 };
        set(can::READ_ONLY, export.read_only);
        set(can::WRITE_ZEROES, !export.read_only);
        set(can::TRIM, !export.read_only && export.trims);
        set(can::DF, form != Form::Simple);
        let all = self.understood > Understood::Least;
        set(can::CACHE, all);
        set(can::FAST_ZERO, all && !export.read_only);
        flags
    }

    fn contexts(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            self.agreed.contexts = Contexts::default();
        }
        let may = self.agreed.form != Form::Simple || !sets;
        let Some((name, queries)) = parse_contexts(data).filter(|_| may) else {
            return push_option_reply(out, option, reply::INVALID, &[]);
        };
        let Some(index) = self.find(name) else {
            return push_option_reply(out, option, reply::UNKNOWN, &[]);
        };
        for (context, number, which) in self.offers[index].dirty.offered() {
            if self.understood < Understood::needed(which) {
                continue;
            }
            // A namespace alone asks for all of its contexts, to list them only.
            let is_space =
                |query: &&[u8]| query.ends_with(b":") && context.as_bytes().starts_with(query);
            let exact = queries.contains(&context.as_bytes());
            let listed = !sets && (queries.is_empty() || queries.iter().any(is_space));
            if !exact && !listed {
                continue;
            }
            let number = if sets { number } else { 0 };
            let parts = [&number.to_be_bytes()[..], context.as_bytes()];
            push_option_reply(out, option, reply::META_CONTEXT, &parts);
            if sets {
                self.agreed.contexts.add(which);
            }
        }
        if sets {
            self.contexts_of = name.to_vec();
        }
        push_option_reply(out, option, reply::ACK, &[]);
    }
}

/// The name in `INFO` and `GO`, and whether it was requested. `None`: the option is malformed.
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

/// The export's name and the queries. `None`: the option is malformed.
fn parse_contexts(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut fields = Fields(data);
    let name = fields.counted().filter(|name| name.len() <= MAX_NAME_BYTES)?;
    let count = fields.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        // Each query has at least four bytes, so this ends with the option.
        queries.push(fields.counted()?);
    }
    fields.0.is_empty().then_some((name, queries))
}

#[cfg(test)]
mod tests;
