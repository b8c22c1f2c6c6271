//! The messages of two daemons on a stream: the greeting of NBD, and private options with their answers.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ferrite_host::names::connect;
use ferrite_nbd::address::Address;
use ferrite_nbd::restriction::RESTRICT;
use ferrite_nbd::wire::{
    FIXED_NEWSTYLE, Fields, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC, option,
    push_option_reply, reply,
};

use super::messages::{Answer, Ask, MAX_BYTES, OPTION, VERSION};
use crate::Failure;

/// How long a peer may take for a part of a message.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the receiver may take for a request: it makes an image, or writes one back.
const ANSWER: Duration = Duration::from_secs(90);
/// Most options of a client.
const MAX_OPTIONS: usize = 64;

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    /// The request may have been done.
    Unknown(Failure),
    /// The receiver refuses it, and has not done it.
    Refused(Failure),
}

impl From<NoAnswer> for Failure {
    fn from(no: NoAnswer) -> Failure {
        match no {
            NoAnswer::Unknown(failure) | NoAnswer::Refused(failure) => failure,
        }
    }
}

/// A connection to the receiver.
pub(crate) struct Peer {
    stream: UnixStream,
    host: String,
}

fn unknown(host: &str, why: impl std::fmt::Display) -> NoAnswer {
    NoAnswer::Unknown(Failure {
        why: format!("{host}: {why}"),
        help: "check that the other daemon runs and listens ([migration] in ferrite.toml), the network between, and \
               the certificates"
            .to_owned(),
    })
}

impl Peer {
    /// Connects by TLS, and agrees on a version.
    pub(crate) fn connect(address: &Address, shown: &str) -> Result<Peer, NoAnswer> {
        let fail = |why: &dyn std::fmt::Display| unknown(shown, why);
        let stream = connect::begin(address, 0).map_err(|e| match e {
            rustix::io::Errno::NOKEY => fail(&"this host's certificates cannot be opened"),
            rustix::io::Errno::HOSTUNREACH => fail(&"its name has no address"),
            e => fail(&io::Error::from(e)),
        })?;
        let stream = UnixStream::from(stream);
        let set = stream.set_nonblocking(false).and_then(|()| timeouts(&stream, PATIENCE));
        set.map_err(|e| fail(&e))?;
        let mut peer = Peer { stream, host: shown.to_owned() };
        peer.greet().map_err(|e| fail(&lost(&e)))?;
        match peer.ask(&Ask::Hello { version: VERSION })? {
            Answer::Hello { version: VERSION } => Ok(peer),
            Answer::Hello { version } => Err(peer.refused(format!(
                "it speaks version {version} of migrations, and this host {VERSION}"
            ))),
            _ => Err(peer.refused("it answers something else than was asked".to_owned())),
        }
    }

    fn refused(&self, why: String) -> NoAnswer {
        let help = "install the same release of ferrite on both hosts".to_owned();
        NoAnswer::Refused(Failure { why: format!("{}: {why}", self.host), help })
    }

    fn greet(&mut self) -> io::Result<()> {
        let mut greeting = [0; 18];
        self.stream.read_exact(&mut greeting)?;
        let mut fields = Fields(&greeting);
        if (fields.u64(), fields.u64()) != (Some(SERVER_MAGIC), Some(OPTION_MAGIC)) {
            return Err(io::Error::other("it does not speak as a server of NBD"));
        }
        self.stream.write_all(&u32::from(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes())
    }

    /// Asks, and waits for the answer.
    pub(crate) fn ask(&mut self, ask: &Ask) -> Result<Answer, NoAnswer> {
        match self.exchange(ask) {
            Ok((reply::ACK, data)) => match serde_json::from_slice(&data) {
                Ok(Answer::Refused { why, help }) => {
                    let why = format!("{}: {why:.1000}", self.host);
                    Err(NoAnswer::Refused(Failure { why, help: help.chars().take(1000).collect() }))
                }
                Ok(answer) => Ok(answer),
                Err(_) => Err(self.refused("its answer is not understood".to_owned())),
            },
            Ok((reply::UNSUPPORTED, _)) => {
                Err(self.refused("it serves disks, and does not take migrations there".to_owned()))
            }
            // The process that speaks TLS says why there is none.
            Ok((_, data)) => {
                let text: String = String::from_utf8_lossy(&data).chars().take(1000).collect();
                Err(unknown(&self.host, text))
            }
            Err(e) => Err(unknown(&self.host, lost(&e))),
        }
    }

    fn exchange(&mut self, ask: &Ask) -> io::Result<(u32, Vec<u8>)> {
        let data = serde_json::to_vec(ask).map_err(io::Error::other)?;
        if data.len() > MAX_BYTES {
            return Err(io::Error::other("the message is too long"));
        }
        let mut out = Vec::with_capacity(16 + data.len());
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend(OPTION.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
        self.stream.write_all(&out)?;
        timeouts(&self.stream, ANSWER)?;
        let mut head = [0; 20];
        self.stream.read_exact(&mut head)?;
        timeouts(&self.stream, PATIENCE)?;
        let mut fields = Fields(&head);
        let (magic, of, kind) = (fields.u64(), fields.u32(), fields.u32().unwrap_or(0));
        let len = fields.u32().unwrap_or(0) as usize;
        if magic != Some(OPTION_REPLY_MAGIC) || of != Some(OPTION) || len > MAX_BYTES {
            return Err(io::Error::other("it does not speak as a server of NBD"));
        }
        Ok((kind, read(&mut self.stream, len)?))
    }
}

fn lost(e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it does not answer".to_owned(),
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionReset => {
            "the connection has ended: its daemon may not run, or does not listen there".to_owned()
        }
        _ => e.to_string(),
    }
}

/// Reads as many bytes as come. Only bytes that have come take memory.
fn read(stream: &mut impl Read, len: usize) -> io::Result<Vec<u8>> {
    let mut data = Vec::new();
    stream.take(len as u64).read_to_end(&mut data)?;
    if data.len() < len { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(data) }
}

fn timeouts(stream: &UnixStream, time: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(time))?;
    stream.set_write_timeout(Some(PATIENCE))
}

/// Serves one client, which the process that speaks TLS has brought, until it leaves.
///
/// # Errors
/// It has left, or does not speak as it should.
pub(super) fn serve(stream: UnixStream, mut answer: impl FnMut(Ask) -> Answer) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    timeouts(&stream, PATIENCE)?;
    let end = Instant::now() + ANSWER * 4;
    let mut stream = stream;
    let mut out = Vec::new();
    out.extend(SERVER_MAGIC.to_be_bytes());
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    stream.write_all(&out)?;
    let mut flags = [0; 4];
    stream.read_exact(&mut flags)?;
    let mut greeted = false;
    for _ in 0..MAX_OPTIONS {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let mut fields = Fields(&head);
        let (magic, asked) = (fields.u64(), fields.u32().unwrap_or(0));
        let len = fields.u32().unwrap_or(0) as usize;
        // Before the version is known nothing long is read.
        let most = if greeted { MAX_BYTES } else { 4096 };
        if magic != Some(OPTION_MAGIC) || len > most || Instant::now() > end {
            return Err(io::Error::other("it does not speak as the daemon of another host"));
        }
        let data = read(&mut stream, len)?;
        out.clear();
        match asked {
            OPTION => {
                let ask = serde_json::from_slice(&data);
                let answered = match ask {
                    Ok(Ask::Hello { .. }) => {
                        greeted = true;
                        Answer::Hello { version: VERSION }
                    }
                    Ok(ask) if greeted => answer(ask),
                    Ok(_) => unread("it says no version first"),
                    Err(_) => unread("the request is not understood"),
                };
                let data = serde_json::to_vec(&answered).map_err(io::Error::other)?;
                push_option_reply(&mut out, asked, reply::ACK, &[&data]);
            }
            // Of the process that speaks TLS.
            RESTRICT => push_option_reply(&mut out, asked, reply::ACK, &[]),
            option::ABORT => {
                push_option_reply(&mut out, asked, reply::ACK, &[]);
                return stream.write_all(&out);
            }
            _ => {
                let text = "this port takes migrations of disks and no clients of disks";
                push_option_reply(&mut out, asked, reply::UNSUPPORTED, &[text.as_bytes()]);
            }
        }
        stream.write_all(&out)?;
        // A sender may pause between its requests.
        stream.set_read_timeout(Some(ANSWER))?;
    }
    Ok(())
}

fn unread(why: &str) -> Answer {
    let help = "install the same release of ferrite on both hosts".to_owned();
    Answer::Refused { why: why.to_owned(), help }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::token::Receiver;
    use super::*;

    #[test]
    fn a_request_is_answered_and_what_is_malformed_ends_the_connection() {
        let (own, other) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || {
            serve(other, |ask| match ask {
                Ask::Look { .. } => Answer::State { state: Some(Receiver::Incoming), note: None },
                _ => Answer::Refused { why: "no".into(), help: "-".into() },
            })
        });
        let mut peer = Peer { stream: own, host: "b".into() };
        peer.greet().unwrap();
        // Without a version nothing is done.
        let look = Ask::Look { id: "5".into() };
        assert!(matches!(peer.ask(&look), Err(NoAnswer::Refused(_))));
        peer.ask(&Ask::Hello { version: 1 }).unwrap();
        let state = Some(Receiver::Incoming);
        assert_eq!(peer.ask(&look), Ok(Answer::State { state, note: None }));
        let abort = Ask::Abort { id: "5".into() };
        let Err(NoAnswer::Refused(why)) = peer.ask(&abort) else { panic!() };
        assert_eq!(why.why, "b: no");
        peer.stream.write_all(&[7; 16]).unwrap();
        assert!(server.join().unwrap().is_err());
        assert!(matches!(peer.ask(&look), Err(NoAnswer::Unknown(_))));
    }

    #[test]
    fn a_long_message_of_a_stranger_is_not_read() {
        let (mut own, other) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || serve(other, |_| unreachable!()));
        own.write_all(&3u32.to_be_bytes()).unwrap();
        own.write_all(&OPTION_MAGIC.to_be_bytes()).unwrap();
        own.write_all(&OPTION.to_be_bytes()).unwrap();
        own.write_all(&u32::MAX.to_be_bytes()).unwrap();
        assert!(server.join().unwrap().is_err());
    }
}
