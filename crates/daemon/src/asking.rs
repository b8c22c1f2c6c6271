//! Questions to a worker about what it has open: the headers of an image, which a tool changes or
//! reads while the disk is in use, or a volume of a store.
//!
//! A question waits in the disk's entry. The disk's thread is woken, asks the worker as soon as the
//! image is known to be open, and records the reply. A worker that dies meanwhile leaves the
//! old state or the new one, and the daemon asks the next worker again.

use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use ferrite_serve::blkif::lifecycle::{
    ChainImage, Change, ImageOrder, ImageReply, ServeError, VolumeOrder, VolumeReply, ask_of_chain,
    ask_of_image, ask_of_volume,
};
use ferrite_serve::waker::Waker;

use crate::params::Format;
use crate::state::DiskId;
use crate::table::{Entry, Phase, WakeReason};
use crate::{Assignment, Failure, Shared};

/// How long a disk that is being opened is waited for, and how long its worker may take.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long a worker may take to tell what it has in memory.
const AT_ONCE: Duration = Duration::from_secs(1);
/// How often a disk is tried to be served again that was served when its worker was asked.
const TRIES: u64 = 3;
/// Workers that may die while they are asked one question.
const MOST_DEATHS: u32 = 3;

/// The questions to a disk's worker.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    last: u64,
    all: Vec<Question>,
}

/// The subject of a question to a worker.
#[derive(Clone, Debug)]
enum About {
    Image(ImageOrder),
    Volume(VolumeOrder),
    Chain,
}

/// The reply of a worker.
#[derive(Clone, Debug)]
enum Told {
    Image(ImageReply),
    Volume(VolumeReply),
    Chain(Vec<ChainImage>),
}

impl About {
    fn ask(&self, line: BorrowedFd<'_>, stop: &Waker) -> Result<Told, ServeError> {
        match self {
            About::Image(order) => ask_of_image(line, stop, order).map(Told::Image),
            About::Volume(order) => ask_of_volume(line, stop, order).map(Told::Volume),
            About::Chain => ask_of_chain(line, stop).map(Told::Chain),
        }
    }

    /// The next try may find what an earlier one has done.
    fn note_try(&mut self) {
        if let About::Volume(VolumeOrder::Snapshot { again, .. }) = self {
            *again = true;
        }
    }
}

#[derive(Debug)]
struct Question {
    number: u64,
    about: About,
    deaths: u32,
    reply: Option<Result<Told, Failure>>,
}

impl Questions {
    fn add(&mut self, about: About) -> u64 {
        self.last += 1;
        self.all.push(Question { number: self.last, about, deaths: 0, reply: None });
        self.last
    }

    /// The next question without a reply, which is asked now.
    fn next(&mut self) -> Option<(u64, About)> {
        let question = self.all.iter_mut().find(|question| question.reply.is_none())?;
        let next = (question.number, question.about.clone());
        question.about.note_try();
        Some(next)
    }

    fn of(&mut self, number: u64) -> Option<&mut Question> {
        self.all.iter_mut().find(|question| question.number == number)
    }

    fn reply(&self, number: u64) -> Option<Result<Told, Failure>> {
        self.all.iter().find(|question| question.number == number)?.reply.clone()
    }

    fn remove(&mut self, number: u64) {
        self.all.retain(|question| question.number != number);
    }
}

impl Assignment<'_> {
    /// Passes waiting questions to the worker, which has opened the image.
    ///
    /// # Errors
    /// [`ServeError::Left`]: the thread was woken for another reason, and `stop` is woken still.
    /// [`ServeError::WorkerLost`].
    pub(crate) fn ask_worker(&self, line: BorrowedFd<'_>, stop: &Waker) -> Result<(), ServeError> {
        let next = || {
            let mut next = None;
            self.shared.table.change(self.id, |entry| next = entry.questions.next());
            next
        };
        while let Some((number, about)) = next() {
            let reply = match about.ask(line, stop) {
                Ok(reply) => Ok(reply),
                // Another question has come: this one is asked again, which changes nothing more.
                Err(ServeError::Left) if self.wake_reason() == WakeReason::Nothing => continue,
                Err(ServeError::Left) => {
                    stop.wake();
                    return Err(ServeError::Left);
                }
                Err(e @ ServeError::WorkerLost(_)) => {
                    self.note_death(number);
                    return Err(e);
                }
                Err(e) => Err(Failure {
                    why: e.to_string(),
                    help: "serve the disk by this version first: ferrite upgrade".to_owned(),
                }),
            };
            self.answer(number, reply);
        }
        Ok(())
    }

    fn answer(&self, number: u64, reply: Result<Told, Failure>) {
        self.shared.table.change(self.id, |entry| {
            if let Some(question) = entry.questions.of(number) {
                question.reply = Some(reply);
            }
        });
    }

    /// A question that workers die of is not asked for ever: the guest waits.
    fn note_death(&self, number: u64) {
        self.shared.table.change(self.id, |entry| {
            let Some(question) = entry.questions.of(number) else { return };
            question.deaths += 1;
            if question.deaths >= MOST_DEATHS {
                question.reply = Some(Err(Failure {
                    why: format!("{MOST_DEATHS} workers have ended while they did it"),
                    help: "the daemon's log has more".to_owned(),
                }));
            }
        });
    }
}

/// Has the worker that writes to the file at this path change its headers, or tell them. `None`: no
/// disk writes to it now, so the caller may do that itself. No worker writes to an image that is
/// only read, as a parent.
///
/// # Errors
/// The disk's worker cannot be asked, or gives no reply: the change may have been made.
pub(crate) fn ask(
    shared: &Shared,
    path: &Path,
    change: Option<&Change>,
) -> Result<Option<ImageReply>, Failure> {
    let Ok(real) = path.canonicalize() else { return Ok(None) };
    let Ok(meta) = real.metadata() else { return Ok(None) };
    let file = if meta.rdev() == 0 { (meta.dev(), meta.ino()) } else { (meta.rdev(), 0) };
    let end = Instant::now() + TIMEOUT;
    let id = loop {
        match found(shared, &real) {
            Some((id, Phase::Served)) => break id,
            Some((id, Phase::Starting)) => {
                let left = end.saturating_duration_since(Instant::now());
                let is_known = shared.table.wait_for(left, |disks| {
                    let phase = disks.get(&id).map(|entry| &entry.phase);
                    (phase != Some(&Phase::Starting)).then_some(())
                });
                is_known.ok_or_else(|| no_reply("the image is still being opened"))?;
            }
            _ => return Ok(None),
        }
    };
    let order = ImageOrder { file, change: change.cloned() };
    match reply_of(shared, id, About::Image(order), TIMEOUT) {
        Some(Ok(Told::Image(ImageReply::NotMine))) | None => Ok(None),
        Some(Ok(Told::Image(reply))) => Ok(Some(reply)),
        Some(Ok(_)) => Err(no_reply("the worker has replied to another question")),
        Some(Err(failure)) => Err(failure),
    }
}

/// Has the worker of a served disk change its volume, or tell its size. Returns the size in bytes.
///
/// # Errors
/// The disk is not served; the change is refused; or the worker gives no reply: then it may have been made.
pub(crate) fn ask_of_disk(shared: &Shared, id: DiskId, order: VolumeOrder) -> Result<u64, Failure> {
    match reply_of(shared, id, About::Volume(order), TIMEOUT) {
        Some(Ok(Told::Volume(VolumeReply::Done(bytes)))) => Ok(bytes),
        Some(Ok(Told::Volume(VolumeReply::Refused { why, help }))) => Err(Failure { why, help }),
        Some(Ok(_)) => Err(no_reply("the worker has replied to another question")),
        Some(Err(failure)) => Err(failure),
        None => Err(Failure {
            why: "it is not served now".to_owned(),
            help:
                "ferrite disk show has its phase; ferrite store works on a volume that no disk uses"
                    .to_owned(),
        }),
    }
}

/// The images that the worker of a served disk has open, the leaf first; none if the disk has no chain. `None`: it is not
/// served, or its worker does not tell at once.
pub(crate) fn chain_of(shared: &Shared, id: DiskId) -> Option<Vec<ChainImage>> {
    match reply_of(shared, id, About::Chain, AT_ONCE)? {
        Ok(Told::Chain(images)) => Some(images),
        _ => None,
    }
}

/// The disk that has this image, and may write to it. The table is not locked while names are
/// looked up.
fn found(shared: &Shared, real: &Path) -> Option<(DiskId, Phase)> {
    let of_entry = |(id, entry): (&DiskId, &Entry)| {
        let is_vhd = entry.image.as_ref().is_some_and(|image| image.format == Format::Vhd);
        let may_write = matches!(entry.phase, Phase::Served | Phase::Starting);
        let path = entry.file().filter(|_| is_vhd && may_write && entry.beside.is_none())?;
        Some((*id, entry.phase.clone(), path.to_owned(), entry.real.is_some()))
    };
    let mut disks: Vec<_> = shared.table.read(|disks| disks.iter().filter_map(of_entry).collect());
    disks.retain(|(_, _, path, is_real)| match is_real {
        true => path == real,
        false => path.canonicalize().is_ok_and(|path| path == real),
    });
    let served = disks.iter().position(|disk| disk.1 == Phase::Served).unwrap_or(0);
    let (id, phase, ..) = disks.into_iter().nth(served)?;
    Some((id, phase))
}

/// The reply of a disk's worker. `None`: its image is not open any more.
fn reply_of(
    shared: &Shared,
    id: DiskId,
    about: About,
    within: Duration,
) -> Option<Result<Told, Failure>> {
    let (mut number, mut given_up_at) = (0, 0);
    shared.table.change(id, |entry| {
        number = entry.questions.add(about);
        // The death of a keeper or worker may make the disk fail for a moment.
        let may_come_again = matches!(entry.phase, Phase::Served | Phase::Starting);
        given_up_at = entry.starts + if may_come_again { TRIES } else { 0 };
        entry.wake();
    });
    let reply = shared.table.wait_for(within, |disks| {
        let Some(entry) = disks.get(&id) else { return Some(None) };
        match (entry.questions.reply(number), &entry.phase) {
            (Some(reply), _) => Some(Some(reply)),
            (None, Phase::Empty | Phase::Resting(_) | Phase::Paused | Phase::Suspended) => {
                Some(None)
            }
            (None, Phase::Failed(failure)) if entry.starts >= given_up_at => {
                Some(Some(Err(failure.clone())))
            }
            (None, Phase::Failed(_)) => None,
            (None, Phase::Starting | Phase::Served) => None,
        }
    });
    shared.table.change(id, |entry| entry.questions.remove(number));
    reply.unwrap_or_else(|| Some(Err(no_reply("the disk's worker does not answer"))))
}

fn no_reply(why: &str) -> Failure {
    let help = "check its storage (ferrite disk show); a change may be repeated";
    Failure { why: why.to_owned(), help: help.to_owned() }
}
