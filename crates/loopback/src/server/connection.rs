//! One client of the store: its requests, watches, transactions, and unsent messages.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::tree::{Change, Draft, Tree, View, is_at_or_below};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::wire::{
    Decoder, ErrorName, Message, MessageType, NO_TRANSACTION, OK_PAYLOAD, PAYLOAD_MAX,
    decode_permissions, encode_permissions, is_node_path, nul_terminated, split_string,
};
use rustix::event::epoll::EventFlags;

/// The most watches of a guest (xenstored's `quota-watches`).
const WATCHES_MAX: usize = 128;
/// The most open transactions of a guest (xenstored's `quota-transactions`).
const TRANSACTIONS_MAX: usize = 10;
/// The longest token of a watch, in bytes.
const TOKEN_MAX: usize = 256;
/// The most unsent bytes of a client with which its next request is still read.
const UNSENT_MAX: usize = 64 << 10;

struct Watch {
    /// The absolute path, or a special one that begins with `@`.
    path: String,
    /// The path as the client wrote it.
    given: String,
    token: String,
}

/// A message that is not sent yet.
struct Unsent {
    bytes: Vec<u8>,
    is_event: bool,
}

pub(super) struct Connection {
    domid: DomId,
    socket: OwnedFd,
    /// The number of its requests.
    requests: Arc<AtomicU64>,
    decoder: Decoder,
    watches: Vec<Watch>,
    transactions: BTreeMap<u32, Draft>,
    next_transaction: u32,
    unsent: VecDeque<Unsent>,
    /// Bytes in `unsent`, and the bytes of its first message that were sent.
    unsent_bytes: usize,
    sent_of_first: usize,
    /// Events in `unsent`: one that waits already is not queued again (XSA-326).
    waiting_events: HashSet<Vec<u8>>,
    waited_for: EventFlags,
}

/// The connection is closed.
pub(super) struct Closed;

type Outcome = Result<Vec<u8>, ErrorName>;

impl Connection {
    pub(super) fn new(domid: DomId, socket: OwnedFd, requests: Arc<AtomicU64>) -> Connection {
        Connection {
            domid,
            socket,
            requests,
            decoder: Decoder::new(),
            watches: Vec::new(),
            transactions: BTreeMap::new(),
            next_transaction: 1,
            unsent: VecDeque::new(),
            unsent_bytes: 0,
            sent_of_first: 0,
            waiting_events: HashSet::new(),
            waited_for: EventFlags::IN,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The events that the connection waits for.
    pub(super) fn interest(&self) -> EventFlags {
        let input = if self.wants_input() { EventFlags::IN } else { EventFlags::empty() };
        let output = if self.has_output() { EventFlags::OUT } else { EventFlags::empty() };
        input | output
    }

    /// The events that it waits for from here on, if they have changed.
    pub(super) fn new_interest(&mut self) -> Option<EventFlags> {
        let now = self.interest();
        (std::mem::replace(&mut self.waited_for, now) != now).then_some(now)
    }

    /// Whether to read from the client: not from one that does not read its replies.
    fn wants_input(&self) -> bool {
        self.unsent_bytes < UNSENT_MAX
    }

    fn has_output(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Reads once, and executes the requests; returns the changes for other clients' watches.
    pub(super) fn receive(&mut self, tree: &mut Tree) -> Result<Vec<Change>, Closed> {
        let mut bytes = [0; PAYLOAD_MAX];
        match rustix::io::read(&self.socket, &mut bytes) {
            Ok(0) => return Err(Closed),
            Ok(n) => self.decoder.push(&bytes[..n]),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(_) => return Err(Closed),
        }
        let mut changes = Vec::new();
        while let Some(message) = self.decoder.next_message().map_err(|_| Closed)? {
            self.answer(tree, &message, &mut changes);
        }
        Ok(changes)
    }

    /// Sends as much as the socket accepts.
    pub(super) fn send(&mut self) -> Result<(), Closed> {
        while let Some(first) = self.unsent.front() {
            let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, &first.bytes[self.sent_of_first..], flags) {
                Ok(n) => self.sent(n),
                Err(rustix::io::Errno::AGAIN) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(Closed),
            }
        }
        Ok(())
    }

    fn sent(&mut self, bytes: usize) {
        self.sent_of_first += bytes;
        if self.unsent.front().is_some_and(|m| m.bytes.len() == self.sent_of_first)
            && let Some(message) = self.unsent.pop_front()
        {
            self.unsent_bytes -= message.bytes.len();
            self.sent_of_first = 0;
            if message.is_event {
                self.waiting_events.remove(&message.bytes);
            }
        }
    }

    fn queue(&mut self, message: &Message, is_event: bool) {
        let bytes = message.encode();
        if is_event && !self.waiting_events.insert(bytes.clone()) {
            return;
        }
        self.unsent_bytes += bytes.len();
        self.unsent.push_back(Unsent { bytes, is_event });
    }

    fn answer(&mut self, tree: &mut Tree, request: &Message, changes: &mut Vec<Change>) {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let outcome = match request.header.kind() {
            Ok(kind) => self.carry_out(tree, kind, request, changes),
            Err(_) => Err(ErrorName::NoSys),
        };
        let reply = match outcome {
            Ok(payload) if payload.len() <= PAYLOAD_MAX => Message::reply(&request.header, payload),
            Ok(_) => Message::error(&request.header, ErrorName::TooBig),
            Err(name) => Message::error(&request.header, name),
        };
        let began = request.header.kind() == Ok(MessageType::Watch)
            && reply.header.number == MessageType::Watch.number();
        self.queue(&reply, false);
        // The first event follows the reply at once.
        if began && let Some(watch) = self.watches.last() {
            let payload = nul_terminated(&[&watch.given, &watch.token]);
            self.queue(&Message::new(MessageType::WatchEvent, 0, 0, payload), true);
        }
    }

    fn carry_out(
        &mut self,
        tree: &mut Tree,
        kind: MessageType,
        request: &Message,
        changes: &mut Vec<Change>,
    ) -> Outcome {
        let payload = &request.payload[..];
        let transaction = request.header.transaction_id;
        match kind {
            MessageType::Watch => self.watch(payload),
            MessageType::Unwatch => self.unwatch(payload),
            MessageType::ResetWatches => {
                self.watches.clear();
                Ok(OK_PAYLOAD.to_vec())
            }
            MessageType::TransactionStart => self.start_transaction(transaction),
            MessageType::TransactionEnd => {
                let draft = self.transactions.remove(&transaction).ok_or(ErrorName::NoEnt)?;
                match payload {
                    b"T\0" => changes.extend(tree.commit(draft)?),
                    b"F\0" => {}
                    _ => return Err(ErrorName::Inval),
                }
                Ok(OK_PAYLOAD.to_vec())
            }
            MessageType::GetDomainPath => Ok(nul_terminated(&[&home(DomId(number(payload)?))])),
            MessageType::IsDomainIntroduced => {
                let home = home(DomId(number(payload)?));
                let known = tree.is_visible(DomId(0), &home) && tree.generation(&home) > 0;
                Ok(nul_terminated(&[if known { "T" } else { "F" }]))
            }
            _ if transaction == NO_TRANSACTION => {
                let mut draft = Draft::default();
                let payload = self.on_nodes(tree, &mut draft, kind, payload)?;
                changes.extend(tree.commit(draft)?);
                Ok(payload)
            }
            _ => {
                let mut draft = self.transactions.remove(&transaction).ok_or(ErrorName::NoEnt)?;
                let outcome = self.on_nodes(tree, &mut draft, kind, payload);
                self.transactions.insert(transaction, draft);
                outcome
            }
        }
    }

    /// Executes the requests on nodes, in a transaction or not.
    fn on_nodes(
        &self,
        tree: &Tree,
        draft: &mut Draft,
        kind: MessageType,
        payload: &[u8],
    ) -> Outcome {
        let (path, rest) = split_string(payload).ok_or(ErrorName::Inval)?;
        let path = self.absolute(path).ok_or(ErrorName::Inval)?;
        let mut view = View { tree, draft, caller: self.domid };
        let done = |outcome: Result<(), ErrorName>| outcome.map(|()| OK_PAYLOAD.to_vec());
        match kind {
            MessageType::Read => view.read(&path),
            MessageType::Write => done(view.write(&path, rest)),
            MessageType::Mkdir => done(view.mkdir(&path)),
            MessageType::Rm => done(view.remove(&path)),
            MessageType::Directory => Ok(names(view.list(&path)?)),
            MessageType::DirectoryPart => {
                let from = number(rest)?;
                part(tree.generation(&path), &names(view.list(&path)?), from)
            }
            MessageType::GetPerms => {
                encode_permissions(&view.permissions(&path)?).ok_or(ErrorName::Io)
            }
            MessageType::SetPerms => {
                let permissions = decode_permissions(rest).ok_or(ErrorName::Inval)?;
                done(view.set_permissions(&path, permissions))
            }
            _ => Err(ErrorName::NoSys),
        }
    }

    /// `path`, which is relative to the caller's own directory if it is not absolute; `None` if it is malformed.
    fn absolute(&self, path: &str) -> Option<String> {
        let absolute = match path.starts_with('/') {
            true => path.to_owned(),
            false => format!("{}/{path}", home(self.domid)),
        };
        is_node_path(path).then_some(absolute)
    }

    fn start_transaction(&mut self, within: u32) -> Outcome {
        if within != NO_TRANSACTION {
            return Err(ErrorName::Busy);
        }
        if self.domid != DomId(0) && self.transactions.len() >= TRANSACTIONS_MAX {
            return Err(ErrorName::NoSpc);
        }
        let id = self.next_transaction;
        self.next_transaction = id.checked_add(1).unwrap_or(1);
        self.transactions.insert(id, Draft::default());
        Ok(nul_terminated(&[&id.to_string()]))
    }

    fn watch(&mut self, payload: &[u8]) -> Outcome {
        let (given, rest) = split_string(payload).ok_or(ErrorName::Inval)?;
        let (token, _) = split_string(rest).ok_or(ErrorName::Inval)?;
        let path = if given.starts_with('@') {
            // Guests must not see which domains come and go.
            let allowed = self.domid == DomId(0);
            allowed.then(|| given.to_owned()).ok_or(ErrorName::Acces)?
        } else {
            self.absolute(given).ok_or(ErrorName::Inval)?
        };
        if token.len() > TOKEN_MAX {
            return Err(ErrorName::NoSpc);
        }
        if self.watches.iter().any(|w| w.given == given && w.token == token) {
            return Err(ErrorName::Exist);
        }
        if self.domid != DomId(0) && self.watches.len() >= WATCHES_MAX {
            return Err(ErrorName::TooBig);
        }
        self.watches.push(Watch { path, given: given.to_owned(), token: token.to_owned() });
        Ok(OK_PAYLOAD.to_vec())
    }

    fn unwatch(&mut self, payload: &[u8]) -> Outcome {
        let (given, rest) = split_string(payload).ok_or(ErrorName::Inval)?;
        let (token, _) = split_string(rest).ok_or(ErrorName::Inval)?;
        let before = self.watches.len();
        self.watches.retain(|w| w.given != given || w.token != token);
        if self.watches.len() == before {
            return Err(ErrorName::NoEnt);
        }
        Ok(OK_PAYLOAD.to_vec())
    }

    /// Queues the events of this client for `change`. Returns whether it has any.
    pub(super) fn tell(&mut self, tree: &Tree, change: &Change) -> bool {
        let path = &change.path;
        let concerns = |w: &&Watch| match change.exact {
            true => *path == w.path,
            false => {
                is_at_or_below(path, &w.path) && path.starts_with('@') == w.path.starts_with('@')
            }
        };
        let event = |w: &Watch| {
            // A relative watch gets relative paths.
            let skip = w.path.len() - w.given.len();
            let payload = nul_terminated(&[&path[skip..], &w.token]);
            (payload.len() <= PAYLOAD_MAX)
                .then(|| Message::new(MessageType::WatchEvent, 0, NO_TRANSACTION, payload))
        };
        let events: Vec<Message> = self.watches.iter().filter(concerns).filter_map(event).collect();
        if events.is_empty() || (!path.starts_with('@') && !tree.is_visible(self.domid, path)) {
            return false;
        }
        events.iter().for_each(|m| self.queue(m, true));
        true
    }
}

/// A domain's own directory.
pub fn home(domid: DomId) -> String {
    format!("/local/domain/{domid}")
}

fn names(children: std::collections::BTreeSet<String>) -> Vec<u8> {
    let names: Vec<&str> = children.iter().map(String::as_str).collect();
    nul_terminated(&names)
}

/// `generation\0`, then whole names from byte `from` on, and one NUL more after the last.
fn part(generation: u64, names: &[u8], from: usize) -> Outcome {
    let mut out = nul_terminated(&[&generation.to_string()]);
    let rest = names.get(from..).ok_or(ErrorName::Inval)?;
    let room = PAYLOAD_MAX - out.len() - 1;
    if rest.len() <= room {
        out.extend_from_slice(rest);
        out.push(0);
    } else {
        let end = rest[..room].iter().rposition(|b| *b == 0).map_or(0, |at| at + 1);
        out.extend_from_slice(&rest[..end]);
    }
    Ok(out)
}

/// A decimal number with its NUL.
fn number<T: FromStr>(payload: &[u8]) -> Result<T, ErrorName> {
    split_string(payload).and_then(|(text, _)| text.parse().ok()).ok_or(ErrorName::Inval)
}
