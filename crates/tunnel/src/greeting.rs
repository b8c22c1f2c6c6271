//! The handshake of NBD up to the option STARTTLS (nbd-rules.md 7).
//!
//! Each message is read to its last byte and no further: the bytes behind STARTTLS are TLS, and never an option in
//! clear.

use ferrite_nbd::restriction::{RESTRICT, Restriction};
use ferrite_nbd::wire::{
    FIXED_NEWSTYLE, Fields, NO_ZEROES, OPTION_MAGIC, OPTION_REPLY_MAGIC, SERVER_MAGIC, option,
    push_option_reply, reply,
};

use crate::faults::one_line;
use crate::stream::Timed;
use crate::{End, Fault};

/// The longest option that is read before TLS, and the longest text of a server.
const MAX_OPTION_BYTES: usize = 32 << 10;
/// Most options before STARTTLS.
const MAX_OPTIONS: usize = 64;
/// Bytes of the head of an option: magic number, option, length.
pub(crate) const OPTION_HEAD_BYTES: usize = 16;
/// The text for a client that has not asked for TLS.
const NEEDS_TLS: &str = "this server speaks TLS only: use nbds:// with certificates";

/// Says to a client what a server says first.
pub(crate) fn greet(client: &Timed<'_>, flags: u16) -> Result<(), End> {
    let mut greeting = Vec::with_capacity(18);
    greeting.extend(SERVER_MAGIC.to_be_bytes());
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend(flags.to_be_bytes());
    client.write_all(&greeting)
}

/// Reads what a server says first: its flags.
pub(crate) fn greeted(server: &Timed<'_>) -> Result<u16, End> {
    let no_newstyle = |why: &str| {
        let help = "check that the port is that of a current NBD server";
        Fault::new("the server does not speak NBD with options", why, help)
    };
    let mut bytes = [0; 18];
    // An old server says something else in the first sixteen bytes.
    server.read_exact(&mut bytes[..16])?;
    let mut fields = Fields(&bytes);
    if fields.u64() != Some(SERVER_MAGIC) {
        return Err(no_newstyle("its first bytes are not those of NBD").into());
    }
    if fields.u64() != Some(OPTION_MAGIC) {
        return Err(no_newstyle("it is of the old style, which has no TLS").into());
    }
    server.read_exact(&mut bytes[16..])?;
    let flags = u16::from_be_bytes([bytes[16], bytes[17]]);
    match flags & FIXED_NEWSTYLE {
        0 => Err(no_newstyle("it is of the first newstyle, which has no TLS").into()),
        _ => Ok(flags),
    }
}

/// Reads the flags of a client.
pub(crate) fn flags_of(client: &Timed<'_>) -> Result<u32, End> {
    let flags = u32::from_be_bytes(client.read()?);
    let known = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
    match flags & !known == 0 && flags & u32::from(FIXED_NEWSTYLE) != 0 {
        true => Ok(flags),
        false => Err(Fault::new(
            "the client does not speak fixed newstyle NBD",
            format!("its flags are {flags:#x}"),
            "use a newer client",
        )
        .into()),
    }
}

/// An option of a client, whose data were read and dropped.
pub(crate) struct Asked {
    pub(crate) option: u32,
    pub(crate) bytes: usize,
}

/// Reads the head of an option.
pub(crate) fn read_head(client: &Timed<'_>) -> Result<([u8; OPTION_HEAD_BYTES], Asked), End> {
    let head = client.read::<OPTION_HEAD_BYTES>()?;
    let mut fields = Fields(&head);
    let magic = fields.u64();
    let (option, len) = (fields.u32().unwrap_or(0), fields.u32().unwrap_or(0));
    let len = len as usize;
    if magic != Some(OPTION_MAGIC) || len > MAX_OPTION_BYTES {
        let why = "an option of it has no magic number, or is too long";
        return Err(Fault::new("the client does not speak NBD", why, "check that program").into());
    }
    Ok((head, Asked { option, bytes: len }))
}

fn read_option(client: &Timed<'_>) -> Result<Asked, End> {
    let (_, asked) = read_head(client)?;
    client.skip(asked.bytes)?;
    Ok(asked)
}

fn answer(client: &Timed<'_>, option: u32, kind: u32, text: &str) -> Result<(), End> {
    let mut out = Vec::new();
    push_option_reply(&mut out, option, kind, &[text.as_bytes()]);
    client.write_all(&out)
}

/// Does a server's handshake with a client until it has asked for TLS. Returns its flags.
pub(crate) fn until_tls(client: &Timed<'_>) -> Result<u32, End> {
    greet(client, FIXED_NEWSTYLE | NO_ZEROES)?;
    let flags = flags_of(client)?;
    let mut refused = false;
    for _ in 0..MAX_OPTIONS {
        let asked = match read_option(client) {
            // It has heard why, and goes.
            Err(End::Left) if refused => return Err(without_tls()),
            asked => asked?,
        };
        match asked.option {
            option::STARTTLS if asked.bytes == 0 => {
                answer(client, option::STARTTLS, reply::ACK, "")?;
                return Ok(flags);
            }
            option::STARTTLS => {
                answer(client, option::STARTTLS, reply::INVALID, "STARTTLS has no data")?;
            }
            option::ABORT => {
                answer(client, option::ABORT, reply::ACK, "")?;
                return Err(if refused { without_tls() } else { End::Left });
            }
            // It has no error but the end of the connection.
            option::EXPORT_NAME => return Err(without_tls()),
            other => {
                refused = true;
                answer(client, other, reply::TLS_REQUIRED, NEEDS_TLS)?;
            }
        }
    }
    Err(without_tls())
}

/// Does the beginning of a server's handshake with a client in clear. Returns its flags.
pub(crate) fn in_clear(client: &Timed<'_>) -> Result<u32, End> {
    greet(client, FIXED_NEWSTYLE | NO_ZEROES)?;
    flags_of(client)
}

fn without_tls() -> End {
    let why = "this server serves no client in clear";
    Fault::new("the client has not asked for TLS", why, "use nbds:// with certificates there")
        .into()
}

/// Does a client's handshake with a server of this host, whose client has these flags.
pub(crate) fn join(server: &Timed<'_>, flags: u32) -> Result<(), End> {
    let offered = greeted(server)?;
    let wanted = if flags & u32::from(NO_ZEROES) != 0 { NO_ZEROES } else { 0 };
    if offered & wanted != wanted {
        let why = "it does not offer what the client has chosen already (NO_ZEROES)";
        return Err(Fault::new("the inner server is refused", why, "use another server").into());
    }
    server.write_all(&flags.to_be_bytes())
}

/// Tells a server of this host what its client may do. One that does not know the option would let it do anything.
pub(crate) fn restrict(server: &Timed<'_>, restriction: &Restriction) -> Result<(), End> {
    let data = restriction.to_bytes();
    let mut ask = Vec::with_capacity(OPTION_HEAD_BYTES + data.len());
    ask.extend(OPTION_MAGIC.to_be_bytes());
    ask.extend(RESTRICT.to_be_bytes());
    ask.extend((data.len() as u32).to_be_bytes());
    ask.extend(data);
    server.write_all(&ask)?;
    let head = server.read::<20>()?;
    let mut fields = Fields(&head);
    let (magic, option, kind, len) = (fields.u64(), fields.u32(), fields.u32(), fields.u32());
    let is_done = (magic, option) == (Some(OPTION_REPLY_MAGIC), Some(RESTRICT))
        && (kind, len) == (Some(reply::ACK), Some(0));
    match is_done {
        true => Ok(()),
        false => Err(Fault::new(
            "a client was turned away",
            "the program that serves the disk is too old to limit what clients may do",
            "run ferrite upgrade",
        )
        .into()),
    }
}

/// Asks a server for TLS.
pub(crate) fn ask_for_tls(server: &Timed<'_>) -> Result<(), End> {
    let mut ask = Vec::with_capacity(OPTION_HEAD_BYTES);
    ask.extend(OPTION_MAGIC.to_be_bytes());
    ask.extend(option::STARTTLS.to_be_bytes());
    ask.extend(0u32.to_be_bytes());
    server.write_all(&ask)?;
    let head = server.read::<20>()?;
    let mut fields = Fields(&head);
    let (magic, option) = (fields.u64(), fields.u32());
    let (kind, len) = (fields.u32().unwrap_or(0), fields.u32().unwrap_or(0) as usize);
    if (magic, option) != (Some(OPTION_REPLY_MAGIC), Some(option::STARTTLS))
        || len > MAX_OPTION_BYTES
    {
        let why = "its answer to STARTTLS is malformed";
        return Err(Fault::new("the server does not speak NBD", why, "check that server").into());
    }
    let mut text = vec![0; len];
    server.read_exact(&mut text)?;
    let said = one_line(&String::from_utf8_lossy(&text));
    let said = if said.is_empty() { format!("reply {kind:#x}") } else { said };
    match kind {
        reply::ACK => Ok(()),
        reply::UNSUPPORTED => Err(Fault::new(
            "the server has no TLS",
            said,
            "start it with TLS, or use nbd:// where only trusted hosts can read the network",
        )
        .into()),
        _ => Err(Fault::new("the server refuses TLS", said, "see what that server logs").into()),
    }
}

/// Answers each option of a client of this host by this fault, until it goes. `pending` has been read already.
pub(crate) fn refuse(client: &Timed<'_>, pending: Option<u32>, fault: &Fault) -> Result<(), End> {
    let text = fault.to_string();
    if let Some(option) = pending {
        answer(client, option, reply::POLICY, &text)?;
    }
    for _ in 0..MAX_OPTIONS {
        let asked = read_option(client)?;
        match asked.option {
            option::ABORT => return answer(client, option::ABORT, reply::ACK, ""),
            option::EXPORT_NAME => return Ok(()),
            other => answer(client, other, reply::POLICY, &text)?,
        }
    }
    Ok(())
}
