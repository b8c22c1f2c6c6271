//! A client of the daemon's control socket.

use std::fmt;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::protocol::{RpcError, VERSION, code};

/// The longest response. It may describe all disks of a host.
const MAX_ANSWER: u64 = 64 << 20;

/// Why there is no result.
#[derive(Debug)]
pub enum ClientError {
    /// No daemon listens.
    Unreachable(io::Error),
    /// The daemon did not respond, or the response is malformed.
    Broken(io::Error),
    /// The daemon responded with an error.
    Refused(RpcError),
}

impl fmt::Display for ClientError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClientError::Unreachable(e) => write!(f, "the daemon cannot be reached: {e}"),
            ClientError::Broken(e) => write!(f, "the daemon did not answer: {e}"),
            ClientError::Refused(e) => f.write_str(&e.message),
        }
    }
}

impl std::error::Error for ClientError {}

impl ClientError {
    /// The next step for the user.
    pub fn help(&self) -> String {
        match self {
            ClientError::Unreachable(_) => {
                "start it (systemctl start ferrite), and run this as root".to_owned()
            }
            ClientError::Broken(_) => "look at its log (journalctl -u ferrite)".to_owned(),
            ClientError::Refused(e) => e.data.as_ref().map_or_else(
                || "look at the daemon's log (journalctl -u ferrite)".to_owned(),
                |data| data.help.clone(),
            ),
        }
    }

    /// Whether the error says that there is no such job.
    pub fn is_no_job(&self) -> bool {
        matches!(self, ClientError::Refused(e) if e.code == code::NO_JOB)
    }

    /// Whether the error says that a job changes the disk already.
    pub fn is_in_use(&self) -> bool {
        matches!(self, ClientError::Refused(e) if e.code == code::IN_USE)
    }

    /// Whether the error says that the method did not end in time.
    pub fn is_timeout(&self) -> bool {
        matches!(self, ClientError::Refused(e) if e.code == code::TIMEOUT)
    }

    /// Whether the error says that there is no such disk.
    pub fn is_no_disk(&self) -> bool {
        matches!(self, ClientError::Refused(e) if e.code == code::NO_DISK)
    }
}

/// A [`Response`](super::protocol::Response) whose result is of a known type: a list of all disks is read once.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer<T> {
    #[serde(rename = "jsonrpc")]
    _version: String,
    result: Option<T>,
    #[serde(default)]
    error: Option<RpcError>,
    #[serde(rename = "id")]
    _id: Value,
}

/// Calls a method of the daemon at this socket, and waits for the response for `timeout` at most.
///
/// # Errors
/// See [`ClientError`].
pub fn call<T: DeserializeOwned>(
    socket: &Path,
    method: &str,
    params: &impl Serialize,
    timeout: Duration,
) -> Result<T, ClientError> {
    let stream = UnixStream::connect(socket).map_err(ClientError::Unreachable)?;
    let broken = |e: io::Error| match e.kind() {
        io::ErrorKind::WouldBlock => ClientError::Broken(io::ErrorKind::TimedOut.into()),
        _ => ClientError::Broken(e),
    };
    stream.set_read_timeout(Some(timeout)).map_err(broken)?;
    stream.set_write_timeout(Some(timeout)).map_err(broken)?;
    let request = json!({ "jsonrpc": VERSION, "id": 1, "method": method, "params": params });
    (&stream).write_all(format!("{request}\n").as_bytes()).map_err(broken)?;
    let mut answer = String::new();
    BufReader::new((&stream).take(MAX_ANSWER)).read_line(&mut answer).map_err(broken)?;
    if answer.is_empty() {
        return Err(broken(io::ErrorKind::UnexpectedEof.into()));
    }
    match serde_json::from_str(&answer).map_err(|e| broken(e.into()))? {
        Answer { error: Some(error), .. } => Err(ClientError::Refused(error)),
        Answer { result: Some(result), .. } => Ok(result),
        Answer { .. } => serde_json::from_value(Value::Null).map_err(|e| broken(e.into())),
    }
}
