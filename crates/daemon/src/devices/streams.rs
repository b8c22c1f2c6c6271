//! Connections to a disk's NBD socket, for the kernel.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ferrite_nbd::client::{Export, Handshake, Wanted};
use ferrite_nbd::wire::can;

use crate::Failure;

/// A worker that lives answers at once. One that is just started opens its image first.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connections to one export, which all say the same of it.
#[derive(Debug)]
pub(super) struct Streams {
    pub(super) streams: Vec<UnixStream>,
    pub(super) export: Export,
}

impl Streams {
    /// Connects `count` times, or once if the export does not take several connections.
    ///
    /// # Errors
    /// The disk is not served now, or does not answer.
    pub(super) fn connect(socket: &Path, count: u32) -> Result<Streams, Failure> {
        let (first, export) = connect(socket)?;
        let count = if export.can(can::MULTI_CONN) { count } else { 1 };
        let mut streams = vec![first];
        for _ in 1..count {
            let (stream, other) = connect(socket)?;
            if other != export {
                let why = "the disk has changed while it was connected to".to_owned();
                return Err(Failure { why, help: "run the same command again".to_owned() });
            }
            streams.push(stream);
        }
        Ok(Streams { streams, export })
    }
}

fn connect(socket: &Path) -> Result<(UnixStream, Export), Failure> {
    let failed = |e: io::Error| {
        let why = format!("the disk's socket {} does not answer: {e}", socket.display());
        let help =
            "ferrite disk list shows whether the disk is served; ferrite doctor what is missing";
        Failure { why, help: help.to_owned() }
    };
    let mut stream = UnixStream::connect(socket).map_err(failed)?;
    timeouts(&stream, Some(PATIENCE)).map_err(failed)?;
    let wanted = Wanted { simple_replies: true, ..Wanted::default() };
    let mut handshake = Handshake::new(wanted).map_err(refused)?;
    let mut out = Vec::new();
    loop {
        let mut bytes = vec![0; handshake.needs()];
        match stream.read_exact(&mut bytes) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(refused(handshake.closed()));
            }
            read => read.map_err(failed)?,
        }
        let export = handshake.take(&bytes, &mut out).map_err(refused)?;
        stream.write_all(&out).map_err(failed)?;
        out.clear();
        if let Some(export) = export {
            // The kernel waits for as long as it takes.
            timeouts(&stream, None).map_err(failed)?;
            return Ok((stream, export));
        }
    }
}

fn timeouts(stream: &UnixStream, timeout: Option<Duration>) -> io::Result<()> {
    stream.set_read_timeout(timeout)?;
    stream.set_write_timeout(timeout)
}

fn refused(refusal: ferrite_nbd::client::Refusal) -> Failure {
    Failure { why: refusal.why, help: refusal.help }
}
