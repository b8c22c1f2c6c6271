//! The messages between a worker and its keeper: one message, one answer.
//!
//! A request is `what` (one byte, three zeros), its number, `flags`, `mode`, the lengths of two texts
//! (32 bits each) and the texts. An answer is the number of its request, an errno or 0, a result, and a
//! text. Descriptors go along with both. Numbers are in the machine's order: both ends are on one machine.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::io::Errno;

use crate::frames::Protocol;

/// A name with its end, at most: the kernel's `PATH_MAX`.
pub const MAX_NAME_BYTES: usize = 4095;
/// Messages in both directions. Keeper and worker are one program, so there is one version.
pub const NAMES: Protocol = Protocol {
    name: "the socket for names",
    max_bytes: HEAD_BYTES + 2 * MAX_NAME_BYTES,
    max_files: 2,
};
/// The folder of a process's own descriptors.
pub const OWN_DESCRIPTORS: &str = "/proc/self/fd/";

const HEAD_BYTES: usize = 24;
const ANSWER_HEAD_BYTES: usize = 12;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum What {
    /// To open what `first` names, as `flags` and `mode` say. Without a name: the file that goes along.
    Open = 1,
    /// The name of that without links.
    Canonical,
    /// The target of a link; of a file that goes along, where it is.
    ReadLink,
    /// To make a folder and those above it.
    CreateDirs,
    /// To take a name away.
    RemoveFile,
    /// To remove an empty folder.
    RemoveDir,
    /// To rename `first` to `second`.
    Rename,
    /// The file with the handle `first` on the file system of the folder that goes along.
    ByHandle,
    /// To watch the second file that goes along by the first one, which is inotify's.
    Watch,
    /// A socket with the kernel's events of devices.
    DeviceEvents,
    /// To hold the image that goes along no longer: it was closed in good order.
    Release,
    /// To begin a connection to the server that `first` names, at the address with the number `flags`.
    Connect,
    /// To take, give back or look at the reservation of the LUN that goes along, as `flags` say.
    Fence,
}

impl What {
    const ALL: [What; 13] = [
        What::Open,
        What::Canonical,
        What::ReadLink,
        What::CreateDirs,
        What::RemoveFile,
        What::RemoveDir,
        What::Rename,
        What::ByHandle,
        What::Watch,
        What::DeviceEvents,
        What::Release,
        What::Connect,
        What::Fence,
    ];
}

/// A request without the descriptors that go along with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Its kind.
    pub what: What,
    /// Those of `open`.
    pub flags: u32,
    /// That of a new file or folder.
    pub mode: u32,
    /// A name, or a handle.
    pub first: &'a [u8],
    /// The other name.
    pub second: &'a [u8],
}

impl<'a> Request<'a> {
    /// One about a name.
    pub fn of(what: What, path: &'a Path) -> Request<'a> {
        Request { what, flags: 0, mode: 0, first: path.as_os_str().as_bytes(), second: &[] }
    }

    /// As a message. The answer has the same number.
    ///
    /// # Errors
    /// `NAMETOOLONG`, `INVAL` for a name that has its end in its middle.
    pub fn to_bytes(&self, asked: u32) -> rustix::io::Result<Vec<u8>> {
        let names = [self.first, self.second];
        if names.iter().any(|name| name.len() > MAX_NAME_BYTES) {
            return Err(Errno::NAMETOOLONG);
        }
        if self.what != What::ByHandle && names.iter().any(|name| name.contains(&0)) {
            return Err(Errno::INVAL);
        }
        let mut bytes = vec![self.what as u8, 0, 0, 0];
        let lens = names.map(|name| name.len() as u32);
        for number in [asked, self.flags, self.mode, lens[0], lens[1]] {
            bytes.extend_from_slice(&number.to_ne_bytes());
        }
        Ok([&bytes, self.first, self.second].concat())
    }

    /// From a message, with its number; none: no worker that keeps to the rules has sent it.
    pub fn parse(bytes: &'a [u8]) -> Option<(u32, Request<'a>)> {
        let (head, names) = bytes.split_first_chunk::<HEAD_BYTES>()?;
        let number = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| head[at + i]));
        let what = What::ALL.into_iter().find(|what| *what as u8 == head[0])?;
        let lens = [number(16), number(20)].map(|len| len as usize);
        let fits = head[1..4] == [0; 3]
            && lens.iter().all(|len| *len <= MAX_NAME_BYTES)
            && lens[0] + lens[1] == names.len();
        let (first, second) = names.split_at_checked(lens[0]).filter(|_| fits)?;
        let is_whole = what == What::ByHandle || !names.contains(&0);
        let request = Request { what, flags: number(8), mode: number(12), first, second };
        is_whole.then_some((number(4), request))
    }
}

/// An answer.
#[derive(Debug, Default)]
pub struct Answer {
    /// Of a watch.
    pub number: i32,
    /// A name.
    pub text: Vec<u8>,
    /// The opened file.
    pub file: Option<OwnedFd>,
}

impl Answer {
    /// The opened file.
    ///
    /// # Errors
    /// There is none.
    pub fn file(self) -> rustix::io::Result<OwnedFd> {
        self.file.ok_or(Errno::PROTO)
    }

    /// As a message to who has asked under this number; the file goes along.
    pub fn to_bytes(answer: &Result<Answer, Errno>, asked: u32) -> Vec<u8> {
        let (errno, number, text) = match answer {
            Ok(answer) => (0, answer.number, &answer.text[..]),
            Err(e) => (e.raw_os_error(), 0, &[][..]),
        };
        [&asked.to_ne_bytes()[..], &errno.to_ne_bytes(), &number.to_ne_bytes(), text].concat()
    }

    /// From a message and what has gone along with it: the number of its request, and what came of
    /// that. None: it is no answer.
    pub fn parse(bytes: &[u8], file: Option<OwnedFd>) -> Option<(u32, rustix::io::Result<Answer>)> {
        let (head, text) = bytes.split_first_chunk::<ANSWER_HEAD_BYTES>()?;
        let word = |at: usize| std::array::from_fn(|i| head[at + i]);
        let result = match i32::from_ne_bytes(word(4)) {
            0 => Ok(Answer { number: i32::from_ne_bytes(word(8)), text: text.to_vec(), file }),
            errno => Err(Errno::from_raw_os_error(errno)),
        };
        Some((u32::from_ne_bytes(word(0)), result))
    }
}
