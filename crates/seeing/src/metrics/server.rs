//! The server of metrics: a thread per client, few clients, each for a short time. A thread holds no lock meanwhile,
//! and keeps no state.

use std::fmt;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use ferrite_serve::waker::Waker;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::http::{self, Asked, MAX_HEAD};
use super::{Everything, Host, write};

/// The most clients at a time.
pub(super) const MAX_CLIENTS: usize = 4;
/// The time limit of a client, from its connection to the end of its answer.
const CLIENT: Duration = Duration::from_secs(10);
/// Bytes that are buffered for a client.
const BUFFER: usize = 16 << 10;
/// The pause after the kernel gave no descriptor for a client.
const EXHAUSTED: Duration = Duration::from_millis(100);
/// The kernel's backlog of clients.
const BACKLOG: i32 = 16;

/// Returns the daemon's state, for each answer.
type Ask = Box<dyn Fn() -> Host + Send + Sync>;

/// The socket of the metrics.
pub struct Server {
    stop: Arc<Waker>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

/// The state that all clients share.
struct Shared {
    folder: PathBuf,
    ask: Ask,
    clients: AtomicUsize,
    patience: Duration,
}

/// Answers `GET /metrics` on this socket, which only this user can connect to, with the counters in `folder`.
///
/// # Errors
/// The socket cannot be made, or the path is another file.
pub fn serve_metrics(socket: &Path, folder: &Path, ask: Ask) -> io::Result<Server> {
    serve_for(socket, folder, ask, CLIENT)
}

fn serve_for(socket: &Path, folder: &Path, ask: Ask, patience: Duration) -> io::Result<Server> {
    let listener = listen(socket)?;
    let stop = Arc::new(Waker::new()?);
    let clients = AtomicUsize::new(0);
    let shared = Arc::new(Shared { folder: folder.to_owned(), ask, clients, patience });
    let end = stop.clone();
    let accept = move || accept(&shared, &listener, &end);
    let thread = Builder::new().name("metrics".to_owned()).spawn(accept)?;
    Ok(Server { stop, socket: socket.to_owned(), thread: Some(thread) })
}

/// Makes a socket that no other user can ever connect to: its file has its mode from the beginning.
fn listen(path: &Path) -> io::Result<UnixListener> {
    match std::fs::symlink_metadata(path) {
        // A dead daemon's socket.
        Ok(there) if there.file_type().is_socket() => std::fs::remove_file(path)?,
        Ok(_) => return Err(io::Error::other("there is a file that is no socket")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::fs::fchmod(&socket, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            // The thread panics only by a bug here.
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener, stop: &Waker) {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(stop.fd(), PollFlags::IN),
        ];
        let waited = poll(&mut fds, None);
        if !fds[1].revents().is_empty() {
            return;
        }
        let greeted = waited
            .map_err(io::Error::from)
            .and_then(|_| listener.accept())
            .and_then(|(stream, _)| greet(shared, stream));
        match greeted {
            Err(e) if !matches!(e.kind(), io::ErrorKind::WouldBlock) => {
                let pause = Timespec { tv_sec: 0, tv_nsec: EXHAUSTED.subsec_nanos().into() };
                let _ = poll(&mut fds[1..], Some(&pause));
            }
            _ => {}
        }
    }
}

fn greet(shared: &Arc<Shared>, stream: UnixStream) -> io::Result<()> {
    let place = Place(shared.clone());
    if shared.clients.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
        stream.set_nonblocking(true)?;
        // An error concerns only this client.
        let _ = (&stream).write_all(http::BUSY.whole().as_bytes());
        return Ok(());
    }
    stream.set_nonblocking(false)?;
    let end = Instant::now() + shared.patience;
    let client = move || {
        // An error concerns only this client.
        let _ = serve(&place.0, &mut Client { stream, end });
    };
    Builder::new().name("scrape".to_owned()).spawn(client).map(drop)
}

/// A client's slot, which is freed at its end.
struct Place(Arc<Shared>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A client, and the end of its time.
struct Client {
    stream: UnixStream,
    end: Instant,
}

impl Client {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl io::Read for Client {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(into)
    }
}

impl io::Write for Client {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn serve(shared: &Shared, client: &mut Client) -> io::Result<()> {
    let asked = hear(client)?;
    if asked != Asked::Metrics {
        return client.write_all(asked.whole().as_bytes());
    }
    let everything = Everything::look(&shared.folder, (shared.ask)());
    let mut to = io::BufWriter::with_capacity(BUFFER, client);
    to.write_all(asked.head().as_bytes())?;
    let mut text = Text(to);
    write(everything, &mut text).map_err(io::Error::other)?;
    text.0.flush()
}

/// Reads its request.
fn hear(client: &mut Client) -> io::Result<Asked> {
    let mut head = vec![0; MAX_HEAD];
    let mut len = 0;
    while len < MAX_HEAD {
        let seen = len;
        match client.read(&mut head[len..])? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            more => len += more,
        }
        if http::is_complete(&head[..len], seen) {
            return Ok(http::understand(&head[..len]));
        }
    }
    Ok(http::TOO_LONG)
}

/// Sends text as it is produced, so that an answer of any length takes little memory.
struct Text<W>(W);

impl<W: io::Write> fmt::Write for Text<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write_all(text.as_bytes()).map_err(|_| fmt::Error)
    }
}

#[cfg(test)]
mod tests;
