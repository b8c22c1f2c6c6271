//! The tunnel, `ferrite tunnel`: the process that speaks TLS, seen from those who start it
//! (docs/internals/processes.md 14). It has TLS on one side, and on the other the same bytes in clear on a Unix
//! stream. It opens nothing: its starter gives it sockets, and the files of certificates and keys.
//!
//! The files have the names that QEMU, nbdkit and libnbd know, so one folder serves all of them.

use std::ffi::CString;
use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::process::Pid;

use crate::process::{FIRST_GIVEN, Program, environment_without, spawn};

/// The certificates of those who sign the other side's.
pub const CA: &str = "ca-cert.pem";
/// Certificates that the signers have revoked.
pub const REVOKED: &str = "ca-crl.pem";
/// A server's certificate, with those between it and its signer's behind it.
pub const SERVER_CERTIFICATE: &str = "server-cert.pem";
/// The key of [`SERVER_CERTIFICATE`].
pub const SERVER_KEY: &str = "server-key.pem";
/// A client's certificate.
pub const CLIENT_CERTIFICATE: &str = "client-cert.pem";
/// The key of [`CLIENT_CERTIFICATE`].
pub const CLIENT_KEY: &str = "client-key.pem";

/// The command, and its two directions.
pub const COMMAND: &str = "tunnel";
/// Clients come by TLS, and their bytes go to a server on this host.
pub const INWARD: &str = "in";
/// A client of this host goes by TLS to a server elsewhere.
pub const OUTWARD: &str = "out";

/// Descriptor of an inward tunnel's socket to its starter, or of an outward one's TCP connection.
pub const FIRST_FD: RawFd = FIRST_GIVEN;
/// Descriptor of an outward tunnel's inner stream.
pub const INNER_FD: RawFd = FIRST_GIVEN + 1;
/// Descriptors of an outward tunnel's [`CA`], [`CLIENT_CERTIFICATE`], [`CLIENT_KEY`].
pub const CLIENT_FILES_FD: [RawFd; 3] = [FIRST_GIVEN + 2, FIRST_GIVEN + 3, FIRST_GIVEN + 4];

/// The letters of a server's files in messages.
const LETTERS: [(&str, char); 4] =
    [(SERVER_CERTIFICATE, 'c'), (SERVER_KEY, 'k'), (CA, 'a'), (REVOKED, 'r')];

/// User and root directory of a tunnel that root starts. Others start it as themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelUser {
    /// User and group, which no other program has.
    pub user: u32,
    /// A directory with nothing in it; it is made if it is missing.
    pub root: PathBuf,
}

/// How an inward tunnel serves its clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inward {
    /// They speak TLS; with certificates, if that is said.
    Tls {
        /// Whether clients need certificates.
        verifies: bool,
    },
    /// They speak in clear.
    Plain,
}

/// The limits of a client, as an inward tunnel reports them to the server. The client may do no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportLimits {
    /// The name of the export.
    pub name: String,
    /// Whether changes are refused.
    pub read_only: bool,
    /// Whether clients are not told the name.
    pub hides_names: bool,
    /// The hosts of which a client's certificate has to be one. Empty: any that the authority has signed.
    pub peers: Vec<String>,
}

impl ExportLimits {
    fn arguments(&self) -> Vec<String> {
        let mut arguments = vec!["--export".to_owned(), self.name.clone()];
        arguments.extend(self.read_only.then(|| "--read-only".to_owned()));
        arguments.extend(self.hides_names.then(|| "--no-list".to_owned()));
        arguments.extend(self.peers.iter().flat_map(|peer| ["--peer".to_owned(), peer.clone()]));
        arguments
    }
}

/// The open files of a folder, by their names there.
#[derive(Debug, Default)]
pub struct Files(Vec<(&'static str, File)>);

impl Files {
    /// Opens what a server needs: its certificate and key, and the certificates of those who sign its clients'.
    /// Without `verifies` there may be none of these.
    ///
    /// # Errors
    /// The text names the file that is missing or cannot be opened.
    pub fn of_server(folder: &Path, verifies: bool) -> io::Result<Files> {
        let mut files = Files::default();
        files.add(folder, SERVER_CERTIFICATE, true)?;
        files.add(folder, SERVER_KEY, true)?;
        files.add(folder, CA, verifies)?;
        files.add(folder, REVOKED, false)?;
        Ok(files)
    }

    /// Opens what a client needs: the certificates of those who sign servers', and its own certificate and key, if
    /// it has any.
    ///
    /// # Errors
    /// As [`of_server`](Self::of_server).
    pub fn of_client(folder: &Path) -> io::Result<Files> {
        let mut files = Files::default();
        files.add(folder, CA, true)?;
        files.add(folder, CLIENT_CERTIFICATE, false)?;
        // A certificate is of no use without its key.
        files.add(folder, CLIENT_KEY, files.get(CLIENT_CERTIFICATE).is_some())?;
        Ok(files)
    }

    fn add(&mut self, folder: &Path, name: &'static str, needed: bool) -> io::Result<()> {
        let path = folder.join(name);
        let opened = File::open(&path).and_then(|file| match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no file")),
        });
        match opened {
            Ok(file) => self.0.push((name, file)),
            Err(e) if !needed && e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => {
                return Err(io::Error::new(e.kind(), format!("{}: {e}", path.display())));
            }
        }
        Ok(())
    }

    /// Files that are open already, by their names.
    pub fn of(files: Vec<(&'static str, File)>) -> Files {
        Files(files)
    }

    /// A server's files, from the descriptors that came with a message and the word that [`letters`](Self::letters)
    /// gave it. `None`: they do not belong together.
    pub fn from_letters(letters: &str, files: Vec<OwnedFd>) -> Option<Files> {
        let of = |letter| LETTERS.iter().find(|(_, known)| *known == letter);
        let names: Option<Vec<_>> = letters.chars().map(of).collect();
        let names = names.filter(|names| names.len() == files.len())?;
        let files = files.into_iter().map(File::from);
        Some(Files(names.into_iter().map(|(name, _)| *name).zip(files).collect()))
    }

    /// A letter for each file, in their order.
    pub fn letters(&self) -> String {
        let letter = |name| LETTERS.iter().find(|(known, _)| *known == name);
        self.iter().filter_map(|(name, _)| letter(name)).map(|(_, letter)| *letter).collect()
    }

    /// The file of this name.
    pub fn get(&self, name: &str) -> Option<&File> {
        self.iter().find(|(other, _)| *other == name).map(|(_, file)| file)
    }

    /// All files.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &File)> {
        self.0.iter().map(|(name, file)| (*name, file))
    }
}

/// Starts an outward tunnel. `program` is `ferrite`, opened. `server` is the name or address that the server's certificate has to have, `outside` a
/// connection to it, `inside` a stream whose other end its client has. The client is greeted as by the server. If
/// there is no TLS, each of its options is answered by an error whose text says why.
///
/// The process ends with either stream, or with this thread.
///
/// # Errors
/// The process cannot be started.
pub fn start_outward(
    program: BorrowedFd<'_>,
    server: &str,
    files: &Files,
    outside: BorrowedFd<'_>,
    inside: BorrowedFd<'_>,
    user: Option<&TunnelUser>,
) -> io::Result<Pid> {
    let more = ["--server".to_owned(), server.to_owned()];
    let mut given = vec![Some(outside), Some(inside)];
    let names = [CA, CLIENT_CERTIFICATE, CLIENT_KEY];
    given.extend(names.map(|name| files.get(name).map(File::as_fd)));
    start(program, OUTWARD, &more, &given, user)
}

/// Starts an inward tunnel with its socket to this process ([`frames::TUNNEL`](crate::frames::TUNNEL)). The process
/// ends with this thread.
///
/// # Errors
/// The process cannot be started.
pub fn start_inward(
    program: BorrowedFd<'_>,
    socket: BorrowedFd<'_>,
    how: &Inward,
    limits: Option<&ExportLimits>,
    user: Option<&TunnelUser>,
) -> io::Result<Pid> {
    let how = match how {
        Inward::Tls { verifies: true } => None,
        Inward::Tls { verifies: false } => Some("--any-client"),
        Inward::Plain => Some("--plain"),
    };
    let mut more: Vec<String> = how.iter().map(|how| (*how).to_owned()).collect();
    more.extend(limits.map(ExportLimits::arguments).unwrap_or_default());
    start(program, INWARD, &more, &[Some(socket)], user)
}

fn start(
    program: BorrowedFd<'_>,
    direction: &str,
    more: &[String],
    given: &[Option<BorrowedFd<'_>>],
    user: Option<&TunnelUser>,
) -> io::Result<Pid> {
    let mut arguments: Vec<String> = ["ferrite", COMMAND, direction].map(str::to_owned).into();
    arguments.extend_from_slice(more);
    if let Some(TunnelUser { user, root }) = user {
        DirBuilder::new().recursive(true).mode(0o755).create(root)?;
        let root =
            root.to_str().ok_or_else(|| io::Error::other("its root has no text as a name"))?;
        arguments.extend(["--user", &user.to_string(), "--root", root].map(str::to_owned));
    }
    let arguments = arguments.into_iter().map(CString::new).collect::<Result<_, _>>()?;
    // A backtrace would open files.
    let mut environment = environment_without("RUST_BACKTRACE");
    environment.push(c"RUST_BACKTRACE=0".into());
    spawn(&Program { file: program, arguments, environment }, given, &[])
}
