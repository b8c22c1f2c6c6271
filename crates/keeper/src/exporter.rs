//! The exporter of a disk: the process that listens for NBD clients of other hosts (docs/internals/processes.md 15).
//!
//! It has the listening sockets and the folder of certificates, and starts the tunnel that speaks with clients. For
//! each client it connects to the disk's public socket. It is no child of the daemon, so it outlives that. It reads
//! nothing that clients send.

use std::io::{self, BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use ferrite_host::frames::{self, Protocol};
use ferrite_host::tunnel::ExportLimits;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

mod process;

pub use process::run_exporter;

/// Questions and answers.
pub(crate) const EXPORTER: Protocol =
    Protocol { name: "an exporter's socket", max_bytes: 16 << 10, max_files: 0 };
/// The environment variable that holds an [`ExporterSpec`] as JSON.
pub(crate) const SPEC: &str = "FERRITE_EXPORTER";
/// The longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(20);
/// The longest wait for a new exporter, which reads certificates.
const START: Duration = Duration::from_secs(30);
/// The longest first line of a new exporter.
const MAX_LINE: u64 = 64 << 10;

/// The description of an exporter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExporterSpec {
    /// The path of its own socket. A locked file is beside it, with `.lock` behind its name.
    pub socket: PathBuf,
    /// The disk's public socket.
    pub server: PathBuf,
    /// Where it listens. Port 0 is any free one.
    pub listen: Vec<SocketAddr>,
    /// How clients speak TLS. Without it they speak in clear.
    pub tls: Option<TlsFolder>,
    /// The export's name.
    pub name: String,
    /// Whether clients may not change anything.
    pub read_only: bool,
    /// Whether clients are not told the name.
    pub hides_names: bool,
    /// An empty folder, for the tunnel. It is made if it is missing.
    pub root: PathBuf,
}

/// How clients speak TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TlsFolder {
    /// The folder of certificates.
    pub folder: PathBuf,
    /// Whether clients need certificates.
    pub verifies: bool,
    /// The hosts whose certificates clients may have. Empty: any that the authority has signed.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub peers: Vec<String>,
}

/// The first line of a new exporter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Started {
    /// It listens at these addresses.
    Listening(Vec<SocketAddr>),
    /// It has ended.
    Refused {
        /// The failed step and its reason.
        why: String,
        /// The next step for the administrator.
        help: String,
        /// Whether another program has an address.
        in_use: bool,
    },
}

impl ExporterSpec {
    pub(crate) fn limits(&self) -> ExportLimits {
        let (read_only, hides_names) = (self.read_only, self.hides_names);
        let peers = self.tls.as_ref().map(|tls| tls.peers.clone()).unwrap_or_default();
        ExportLimits { name: self.name.clone(), read_only, hides_names, peers }
    }

    /// Starts the exporter. `command` has to be a program that calls [`run_exporter`]. The exporter is no child of
    /// this process.
    ///
    /// # Errors
    /// It could not be started, or says nothing in time. It ends then.
    pub fn start(&self, mut command: Command) -> io::Result<Started> {
        command.env(SPEC, serde_json::to_string(self)?);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let said = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        // It is the parent of the exporter, and ends at once.
        child.wait()?;
        let mut fds = [PollFd::new(&said, PollFlags::IN)];
        let limit = Timespec { tv_sec: START.as_secs() as i64, tv_nsec: 0 };
        if poll(&mut fds, Some(&limit))? == 0 {
            return Err(io::Error::other(
                "it says nothing: can its folder of certificates be read?",
            ));
        }
        let mut line = String::new();
        BufReader::new(said.take(MAX_LINE)).read_line(&mut line)?;
        if line.is_empty() {
            return Err(io::Error::other("it has ended at once: the daemon's log says why"));
        }
        Ok(serde_json::from_str(&line)?)
    }
}

/// A connection to a running exporter.
#[derive(Debug)]
pub struct Exporter {
    socket: OwnedFd,
    /// Its process number.
    pub pid: u32,
}

impl Exporter {
    /// Connects to the exporter of this socket.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused`: there is none.
    pub fn connect(path: &Path) -> io::Result<Exporter> {
        let mut exporter = Exporter { socket: frames::connect(path, ANSWER)?, pid: 0 };
        let answer = exporter.ask("pid")?;
        exporter.pid = answer.parse().map_err(io::Error::other)?;
        Ok(exporter)
    }

    fn ask(&self, question: &str) -> io::Result<String> {
        EXPORTER.send(&self.socket, question.as_bytes(), &[])?;
        let frame = EXPORTER.receive(&self.socket)?;
        String::from_utf8(frame.bytes).map_err(io::Error::other)
    }

    /// A descriptor that ends with the exporter.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Ends the exporter and its clients' connections. Its addresses are free when this returns.
    ///
    /// # Errors
    /// It does not answer.
    pub fn end(&self) -> io::Result<()> {
        match self.ask("end") {
            // It had ended already.
            Err(e)
                if matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe) =>
            {
                Ok(())
            }
            asked => asked.map(drop),
        }
    }
}
