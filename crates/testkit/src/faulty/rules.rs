//! The rules that assign faults to operations.

use std::ops::Range;
use std::time::Duration;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::engine::{FileId, Op, Transfer};

/// The operations of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A read, in one piece or several.
    Read,
    /// A write, in one piece or several.
    Write,
    /// A sync.
    Sync,
    /// Punching a hole.
    PunchHole,
    /// Zeroing a range.
    ZeroRange,
    /// Allocating a range.
    Allocate,
    /// Changing the length of a file.
    SetLen,
    /// Discarding a range of a device.
    Discard,
    /// Waiting for a descriptor or a time.
    Wakeup,
    /// Sending on a socket.
    Send,
    /// Receiving from a socket.
    Receive,
    /// Building the engine.
    Make,
    /// Registering a file.
    AddFile,
    /// Submitting operations without waiting.
    Submit,
    /// Submitting and waiting.
    Wait,
}

impl Kind {
    /// The number of kinds.
    pub(super) const COUNT: usize = Kind::Wait as usize + 1;

    /// The kinds of operations on files.
    pub const STORAGE: [Kind; 8] = [
        Kind::Read,
        Kind::Write,
        Kind::Sync,
        Kind::PunchHole,
        Kind::ZeroRange,
        Kind::Allocate,
        Kind::SetLen,
        Kind::Discard,
    ];

    /// The kinds that transfer data.
    pub const TRANSFERS: [Kind; 2] = [Kind::Read, Kind::Write];

    /// The kind of an operation.
    pub fn of(op: &Op) -> Kind {
        match op {
            Op::Read { .. } => Kind::Read,
            Op::Write { .. } => Kind::Write,
            Op::Sync { .. } => Kind::Sync,
            Op::PunchHole { .. } => Kind::PunchHole,
            Op::ZeroRange { .. } => Kind::ZeroRange,
            Op::Allocate { .. } => Kind::Allocate,
            Op::SetLen { .. } => Kind::SetLen,
            Op::Discard { .. } => Kind::Discard,
            Op::Readable { .. } | Op::Writable { .. } | Op::Timer { .. } => Kind::Wakeup,
        }
    }

    /// Whether it is an operation on a file.
    pub(super) fn is_storage(self) -> bool {
        Kind::STORAGE.contains(&self)
    }
}

/// The outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The kernel executes it.
    None,
    /// It fails with this error number.
    Errno(i32),
    /// The kernel does at most so many bytes of a transfer, from the first on, and all of any other operation.
    Short(usize),
    /// The kernel does half of the bytes of a transfer.
    Half,
    /// The kernel does any number of the bytes, from 512 on; all of a shorter one.
    Part,
    /// It ends without an effect and without an error.
    Nothing,
    /// Its thread waits until the test drops the result of [`Faults::hold`](super::Faults::hold). Then the kernel
    /// executes it, or it fails with this error number.
    Held(Option<i32>),
    /// It begins after this time, while its engine continues with others.
    Late(Duration),
    /// It begins after a random time below this.
    LateBelow(Duration),
}

/// The place in a file.
#[derive(Clone, Debug)]
enum Place {
    Anywhere,
    /// It begins at this byte.
    At(u64),
    /// It touches a byte of this range.
    Touching(Range<u64>),
}

/// A set of operations on storage, or of calls to the engine.
#[derive(Clone, Debug)]
pub struct Ops {
    kinds: Vec<Kind>,
    file: Option<FileId>,
    place: Place,
}

impl Ops {
    /// All operations on storage.
    pub fn storage() -> Ops {
        Ops::among(&Kind::STORAGE)
    }

    /// Operations of these kinds.
    pub fn among(kinds: &[Kind]) -> Ops {
        Ops { kinds: kinds.to_vec(), file: None, place: Place::Anywhere }
    }

    /// Only those on this file.
    pub fn on(mut self, file: FileId) -> Ops {
        self.file = Some(file);
        self
    }

    /// Only those that begin at this byte.
    pub fn at(mut self, offset: u64) -> Ops {
        self.place = Place::At(offset);
        self
    }

    /// Only those that touch a byte of this range.
    pub fn touching(mut self, range: Range<u64>) -> Ops {
        self.place = Place::Touching(range);
        self
    }

    /// They get this fault.
    pub fn meet(self, fault: Fault) -> Rule {
        let draw = Draw::Always(fault);
        Rule { ops: self, after: 0, times: u64::MAX, matched: 0, draw }
    }

    /// They fail with this error number.
    pub fn fail(self, errno: i32) -> Rule {
        self.meet(Fault::Errno(errno))
    }

    /// Each gets one of these faults, as the seed says.
    pub fn meet_any(self, seed: u64, faults: &[Fault]) -> Rule {
        let draw = Draw::Any(SplitMix64::new(seed), faults.to_vec());
        Rule { draw, ..self.meet(Fault::None) }
    }

    /// Whether a call without a place is one of them.
    fn have_kind(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Whether an operation of so many bytes is one of them.
    pub(super) fn have(&self, asked: &Asked) -> bool {
        let is_there = match &self.place {
            Place::Anywhere => true,
            Place::At(offset) => asked.offset == *offset,
            Place::Touching(range) => {
                asked.offset < range.end && range.start < asked.offset.saturating_add(asked.bytes)
            }
        };
        let is_file = self.file.is_none() || self.file == asked.file;
        is_there && is_file && self.have_kind(asked.kind)
    }
}

impl From<Kind> for Ops {
    fn from(kind: Kind) -> Ops {
        Ops::among(&[kind])
    }
}

/// An operation as the rules see it.
pub(super) struct Asked {
    pub(super) kind: Kind,
    file: Option<FileId>,
    offset: u64,
    bytes: u64,
}

impl Asked {
    /// From an operation; a vectored one has its first span here, and `bytes` are those of all spans.
    pub(super) fn op(op: &Op, bytes: Option<u64>) -> Asked {
        let (file, offset, len) = match *op {
            Op::Read { file, offset, buf } | Op::Write { file, offset, buf } => {
                (Some(file), offset, buf.len() as u64)
            }
            Op::PunchHole { file, offset, len }
            | Op::ZeroRange { file, offset, len }
            | Op::Allocate { file, offset, len, .. }
            | Op::Discard { file, offset, len } => (Some(file), offset, len),
            Op::SetLen { file, len } => (Some(file), len, 0),
            Op::Sync { file } => (Some(file), 0, 0),
            Op::Readable { .. } | Op::Writable { .. } | Op::Timer { .. } => (None, 0, 0),
        };
        Asked { kind: Kind::of(op), file, offset, bytes: bytes.unwrap_or(len) }
    }

    /// From a transfer of so many bytes of a socket.
    pub(super) fn stream(transfer: Transfer, bytes: u64) -> Asked {
        let kind = if transfer == Transfer::Read { Kind::Receive } else { Kind::Send };
        Asked { kind, file: None, offset: 0, bytes }
    }

    /// From a call to the engine itself.
    pub(super) fn call(kind: Kind) -> Asked {
        Asked { kind, file: None, offset: 0, bytes: 0 }
    }
}

/// The choice of the fault.
#[derive(Clone, Debug)]
enum Draw {
    Always(Fault),
    Any(SplitMix64, Vec<Fault>),
}

/// A set of operations, and their fault. The first rule of a list that applies decides.
#[derive(Clone, Debug)]
pub struct Rule {
    ops: Ops,
    after: u64,
    times: u64,
    matched: u64,
    draw: Draw,
}

impl Rule {
    /// Skip so many of its operations first.
    pub fn after(self, operations: u64) -> Rule {
        Rule { after: operations, ..self }
    }

    /// Apply to at most so many of them.
    pub fn times(self, times: u64) -> Rule {
        Rule { times, ..self }
    }

    /// Apply to the next one only.
    pub fn once(self) -> Rule {
        self.times(1)
    }

    /// The fault for an operation, if the rule applies; it counts all of its operations.
    pub(super) fn decide(&mut self, asked: &Asked) -> Option<Fault> {
        if !self.ops.have(asked) {
            return None;
        }
        let number = self.matched;
        self.matched += 1;
        if number < self.after || number - self.after >= self.times {
            return None;
        }
        Some(match &mut self.draw {
            Draw::Always(fault) => *fault,
            Draw::Any(random, faults) => faults[random.below(faults.len() as u64) as usize],
        })
    }
}
