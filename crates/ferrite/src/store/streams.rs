//! `ferrite store send` and `receive`: streams at standard output and input.

use std::ffi::OsStr;
use std::io::{self, BufWriter, IsTerminal as _, Read};

use ferrite_disk::size::Human;
use ferrite_image_tools::ImageTools;
use ferrite_image_tools::stores::{Receive, Send, Sent};
use ferrite_store::journal::Name;
use ferrite_store::name::StoreName;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::args::{ReceiveArgs, SendArgs, VolumeArg};
use super::{entry, of_volume, text};
use crate::exit::{Code, Failure};
use crate::image::Out;

/// Bytes of a stream that are written at a time.
const BUFFER_BYTES: usize = 256 << 10;
/// How often a wait for the stream looks whether it is still wanted.
const LOOK_AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

pub(super) fn send(tools: &ImageTools<'_>, args: &SendArgs) -> Result<(), Failure> {
    let (store, snapshot) = of_volume(&args.snapshot)?;
    let how = Send { base: optional(args.from.as_deref())?, start: args.resume };
    let to = io::stdout();
    refuse_terminal(
        &args.snapshot,
        "send",
        to.is_terminal(),
        "> FILE, or | ssh HOST ferrite store receive PATH#NAME",
    )?;
    let mut to = BufWriter::with_capacity(BUFFER_BYTES, to.lock());
    let sent = tools.send(&store, &snapshot, &how, &mut to)?;
    let Sent { virtual_bytes, sent_bytes } = sent;
    tracing::info!("{} of data sent, of {}", Human(sent_bytes), Human(virtual_bytes));
    Ok(())
}

pub(super) fn receive(
    tools: &ImageTools<'_>,
    out: &Out,
    args: &ReceiveArgs,
) -> Result<(), Failure> {
    let (StoreName { path, .. }, name) = of_volume(&args.snapshot)?;
    let base = optional(args.base.as_deref())?;
    let how = Receive { base, resume: args.resume, force: args.force };
    refuse_terminal(&args.snapshot, "receive", io::stdin().is_terminal(), "< FILE")?;
    out.confirm(&tools.receive(&path, &name, &how, &mut Input::new(&|| false))?, text::done)
}

fn optional(name: Option<&OsStr>) -> Result<Option<Name>, Failure> {
    name.map(entry).transpose()
}

fn refuse_terminal(
    of: &VolumeArg,
    verb: &str,
    is_terminal: bool,
    instead: &str,
) -> Result<(), Failure> {
    match is_terminal {
        false => Ok(()),
        true => {
            let what = format!("cannot {verb} {}", of.volume.display());
            let why = "the stream is no text, and this is a terminal";
            Err(Failure::new(what, why, format!("say {instead}")).with_code(Code::USAGE))
        }
    }
}

/// Standard input. While nothing comes, a read asks at times whether it goes on; if not, it ends with `Interrupted`.
pub(crate) struct Input<'a> {
    from: io::Stdin,
    goes_on: &'a dyn Fn() -> bool,
}

impl<'a> Input<'a> {
    pub(crate) fn new(goes_on: &'a dyn Fn() -> bool) -> Input<'a> {
        Input { from: io::stdin(), goes_on }
    }
}

impl Read for Input<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        loop {
            // The end and errors are ready, too.
            let mut fds = [PollFd::new(&self.from, PollFlags::IN)];
            match poll(&mut fds, Some(&LOOK_AGAIN)) {
                Ok(0) | Err(Errno::INTR) if (self.goes_on)() => {}
                Ok(0) => return Err(io::ErrorKind::Interrupted.into()),
                // Without the buffer of the standard library, which a poll does not see.
                Ok(_) => return Ok(rustix::io::read(&self.from, to)?),
                Err(e) => return Err(e.into()),
            }
        }
    }
}
