//! Which operations meet which fault.

use std::ops::Range;
use std::time::Duration;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_io::engine::{FileId, Op};

/// What an engine is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A read, in one piece or several.
    Read,
    /// A write, likewise.
    Write,
    /// A sync.
    Sync,
    /// A range is given back.
    PunchHole,
    /// A range becomes zeros.
    ZeroRange,
    /// A range gets space.
    Allocate,
    /// A file gets another length.
    SetLen,
    /// A device is told that a range is unused.
    Discard,
    /// A descriptor or a time is waited for.
    Wakeup,
    /// The engine is built.
    Make,
    /// It takes a file.
    AddFile,
    /// It hands operations to the kernel without waiting.
    Submit,
    /// The same, and waits.
    Wait,
}

impl Kind {
    /// How many there are.
    pub(super) const COUNT: usize = Kind::Wait as usize + 1;

    /// Those that do something to a file.
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

    /// Those that move data.
    pub const TRANSFERS: [Kind; 2] = [Kind::Read, Kind::Write];

    /// That of an operation.
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
            Op::Readable { .. } | Op::Timer { .. } => Kind::Wakeup,
        }
    }

    /// Whether it does something to a file.
    pub(super) fn is_storage(self) -> bool {
        Kind::STORAGE.contains(&self)
    }
}

/// What becomes of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The kernel does it.
    None,
    /// It fails with this error number.
    Errno(i32),
    /// The kernel does at most so many bytes of a transfer, from its first, and all of anything else.
    Short(usize),
    /// Half of its bytes, likewise.
    Half,
    /// Any number of its bytes, from 512 on; all of one that has no more.
    Part,
    /// It ends without having done anything, and without an error.
    Nothing,
    /// Its thread waits until the test lets go of [`Faults::hold`](super::Faults::hold). Then the
    /// kernel does it, or it fails with this error number.
    Held(Option<i32>),
    /// It is begun after this time, while its engine goes on with others.
    Late(Duration),
    /// The same after any time below that.
    LateBelow(Duration),
}

/// Where in a file.
#[derive(Clone, Debug)]
enum Place {
    Anywhere,
    /// It begins at this byte.
    At(u64),
    /// It has a byte of this range.
    Touching(Range<u64>),
}

/// Some of the operations on storage, or calls to the engine.
#[derive(Clone, Debug)]
pub struct Ops {
    kinds: Vec<Kind>,
    file: Option<FileId>,
    place: Place,
}

impl Ops {
    /// All on storage.
    pub fn storage() -> Ops {
        Ops::among(&Kind::STORAGE)
    }

    /// Those of these kinds.
    pub fn among(kinds: &[Kind]) -> Ops {
        Ops { kinds: kinds.to_vec(), file: None, place: Place::Anywhere }
    }

    /// On this file only.
    pub fn on(mut self, file: FileId) -> Ops {
        self.file = Some(file);
        self
    }

    /// Those only that begin at this byte.
    pub fn at(mut self, offset: u64) -> Ops {
        self.place = Place::At(offset);
        self
    }

    /// Those only that have a byte of this range.
    pub fn touching(mut self, range: Range<u64>) -> Ops {
        self.place = Place::Touching(range);
        self
    }

    /// Meets this whenever it is its turn.
    pub fn meet(self, fault: Fault) -> Rule {
        let draw = Draw::Always(fault);
        Rule { ops: self, after: 0, times: u64::MAX, matched: 0, draw }
    }

    /// Fails with this error number.
    pub fn fail(self, errno: i32) -> Rule {
        self.meet(Fault::Errno(errno))
    }

    /// Each meets one of these, as the seed says.
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

/// What an engine is asked for, as the rules look at it.
pub(super) struct Asked {
    pub(super) kind: Kind,
    file: Option<FileId>,
    offset: u64,
    bytes: u64,
}

impl Asked {
    /// An operation; of a vectored one the first span stands in it, and `bytes` are all of it.
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
            Op::Readable { .. } | Op::Timer { .. } => (None, 0, 0),
        };
        Asked { kind: Kind::of(op), file, offset, bytes: bytes.unwrap_or(len) }
    }

    /// A call to the engine itself.
    pub(super) fn call(kind: Kind) -> Asked {
        Asked { kind, file: None, offset: 0, bytes: 0 }
    }
}

/// Which fault it is.
#[derive(Clone, Debug)]
enum Draw {
    Always(Fault),
    Any(SplitMix64, Vec<Fault>),
}

/// Some operations, and what they meet. The first rule of a script that has something to say says it.
#[derive(Clone, Debug)]
pub struct Rule {
    ops: Ops,
    after: u64,
    times: u64,
    matched: u64,
    draw: Draw,
}

impl Rule {
    /// So many of its operations go by before.
    pub fn after(self, operations: u64) -> Rule {
        Rule { after: operations, ..self }
    }

    /// No more than so many of them.
    pub fn times(self, times: u64) -> Rule {
        Rule { times, ..self }
    }

    /// The next one only.
    pub fn once(self) -> Rule {
        self.times(1)
    }

    /// What it has to say; it counts all operations that are its own.
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
