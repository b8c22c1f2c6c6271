//! The server of the control socket: one thread for each client, with a bounded number of clients
//! and a bounded length of lines.
//!
//! A silent client costs a thread and one of the places, and loses both when another client needs
//! the place. A client that does not read its responses is disconnected after a while. No client
//! holds a lock meanwhile.

use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::methods;
use super::protocol::{MAX_LINE, RpcError, VERSION, code};
use crate::Shared;
use crate::wait::wait_for;
use ferrite_serve::waker::Waker;

/// Most clients at a time.
pub(super) const MAX_CLIENTS: usize = 16;
/// Most requests of one batch.
const MAX_BATCH: usize = 16;
/// How long the write of a response may block.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failed `accept`, such as for want of descriptors.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The control socket. Dropping it disconnects all clients.
pub(crate) struct Server {
    path: PathBuf,
    stop: Arc<Waker>,
    clients: Arc<Clients>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Clients(Mutex<Vec<Arc<Client>>>);

struct Client {
    stream: UnixStream,
    /// The time of the last request or response.
    last_active: Mutex<Instant>,
    /// Whether it waits for a response.
    is_waiting: AtomicBool,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a client. If all places are taken, it replaces the one that has been silent for
    /// longest. `None`: all clients wait for responses.
    fn insert(&self, stream: &UnixStream) -> io::Result<Option<Arc<Client>>> {
        let stream = stream.try_clone()?;
        let last_active = Mutex::new(Instant::now());
        let client = Arc::new(Client { stream, last_active, is_waiting: AtomicBool::new(false) });
        let mut clients = self.lock();
        if clients.len() >= MAX_CLIENTS {
            let silent = clients.iter().enumerate();
            let silent = silent.filter(|(_, client)| !client.is_waiting.load(Ordering::Acquire));
            let Some((at, _)) = silent.min_by_key(|(_, client)| client.last_active()) else {
                return Ok(None);
            };
            // The thread of the replaced client reads the end, and ends.
            let _ = clients.swap_remove(at).stream.shutdown(std::net::Shutdown::Both);
        }
        clients.push(client.clone());
        Ok(Some(client))
    }

    fn remove(&self, client: &Arc<Client>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, client));
    }
}

impl Client {
    fn last_active(&self) -> Instant {
        *self.last_active.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touch(&self) {
        *self.last_active.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

impl Server {
    pub(crate) fn start(shared: &Arc<Shared>) -> io::Result<Server> {
        let path = shared.paths.control();
        // This daemon has the lock, so a socket that is there is a dead daemon's.
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        // Only root can enter the directory, so no other user connects between these two steps.
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        let (stop, clients) = (Arc::new(Waker::new()?), Arc::<Clients>::default());
        let (shared, all, end) = (shared.clone(), clients.clone(), stop.clone());
        let accept = move || accept(&shared, &listener, &all, &end);
        let thread = std::thread::Builder::new().name("control".to_owned()).spawn(accept)?;
        Ok(Server { path, stop, clients, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // No client can connect from here on. The lock is still held, so the socket is no other
        // daemon's.
        let _ = std::fs::remove_file(&self.path);
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was logged already.
            let _ = thread.join();
        }
        for client in self.clients.lock().drain(..) {
            let _ = client.stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener, clients: &Arc<Clients>, stop: &Waker) {
    use std::os::fd::AsFd as _;
    loop {
        let [_, stopped] = wait_for([listener.as_fd(), stop.fd()], None);
        if stopped {
            return;
        }
        let started =
            listener.accept().and_then(|(stream, _)| start_client(shared, stream, clients));
        match started {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => {
                tracing::debug!("cannot take a client of the control socket: {e}");
                wait_for([stop.fd()], Some(RETRY_PAUSE));
            }
            _ => {}
        }
    }
}

fn start_client(
    shared: &Arc<Shared>,
    stream: UnixStream,
    clients: &Arc<Clients>,
) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let Some(client) = clients.insert(&stream)? else {
        let message = format!("{MAX_CLIENTS} clients wait for responses already");
        let error = RpcError::new(code::BUSY, message, "try again");
        let answer = line(&respond(Value::Null, Err(error)));
        return (&stream).write_all(&answer);
    };
    let (shared, all, entered) = (shared.clone(), clients.clone(), client.clone());
    let spawned = std::thread::Builder::new().name("client".to_owned()).spawn(move || {
        // A broken connection concerns this client only.
        let _ = serve(&shared, &stream, &client);
        all.remove(&client);
    });
    if spawned.is_err() {
        clients.remove(&entered);
    }
    spawned.map(drop)
}

/// Serves a client until it disconnects.
fn serve(shared: &Arc<Shared>, stream: &UnixStream, client: &Client) -> io::Result<()> {
    let mut reader = BufReader::new(stream);
    let mut text = Vec::new();
    loop {
        text.clear();
        let read = reader.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut text)?;
        if read == 0 {
            return Ok(());
        }
        if read == MAX_LINE && text.last() != Some(&b'\n') {
            let message = format!("a line has at most {MAX_LINE} bytes");
            let error = RpcError::new(code::INVALID_REQUEST, message, "");
            // The beginning of the next request is unknown, so the client has to connect anew.
            return (&*stream).write_all(&line(&respond(Value::Null, Err(error))));
        }
        client.touch();
        client.is_waiting.store(true, Ordering::Release);
        let answer = answer(shared, &text);
        let written = answer.map_or(Ok(()), |answer| (&*stream).write_all(&line(&answer)));
        client.is_waiting.store(false, Ordering::Release);
        client.touch();
        written?;
    }
}

fn line(answer: &Value) -> Vec<u8> {
    let mut line = answer.to_string().into_bytes();
    line.push(b'\n');
    line
}

/// The response to a line. `None` for notifications and empty lines.
pub(super) fn answer(shared: &Arc<Shared>, text: &[u8]) -> Option<Value> {
    if text.trim_ascii().is_empty() {
        return None;
    }
    let invalid =
        |why: &str| Some(respond(Value::Null, Err(RpcError::new(code::INVALID_REQUEST, why, ""))));
    match serde_json::from_slice(text) {
        Err(e) => {
            let error = RpcError::new(code::PARSE, format!("the line is not JSON: {e}"), "");
            Some(respond(Value::Null, Err(error)))
        }
        Ok(Value::Array(batch)) if batch.is_empty() => invalid("a batch of no requests"),
        Ok(Value::Array(batch)) if batch.len() > MAX_BATCH => {
            invalid(&format!("a batch has at most {MAX_BATCH} requests"))
        }
        Ok(Value::Array(batch)) => {
            let answers = batch.into_iter().filter_map(|request| answer_one(shared, request));
            let answers: Vec<Value> = answers.collect();
            (!answers.is_empty()).then_some(Value::Array(answers))
        }
        Ok(request) => answer_one(shared, request),
    }
}

fn answer_one(shared: &Arc<Shared>, request: Value) -> Option<Value> {
    let invalid = |id: Value, why: &str| {
        Some(respond(id, Err(RpcError::new(code::INVALID_REQUEST, why, ""))))
    };
    let Value::Object(mut request) = request else {
        return invalid(Value::Null, "a request is an object");
    };
    let id = request.remove("id");
    if id
        .as_ref()
        .is_some_and(|id| !matches!(id, Value::Null | Value::String(_) | Value::Number(_)))
    {
        return invalid(Value::Null, "an id is a number, a string or null");
    }
    let shown = id.clone().unwrap_or_default();
    if request.remove("jsonrpc") != Some(Value::String(VERSION.to_owned())) {
        return invalid(shown, "jsonrpc has to be \"2.0\"");
    }
    let Some(Value::String(method)) = request.remove("method") else {
        return invalid(shown, "method has to be a string");
    };
    let params = request.remove("params").unwrap_or_default();
    if !matches!(params, Value::Null | Value::Object(_) | Value::Array(_)) {
        return invalid(shown, "params have to be an object");
    }
    let result = methods::call(shared, &method, params);
    id.map(|id| respond(id, result))
}

fn respond(id: Value, result: Result<Value, RpcError>) -> Value {
    let (name, content) = match result {
        Ok(result) => ("result", result),
        Err(error) => ("error", serde_json::to_value(error).unwrap_or_default()),
    };
    // A `Response`. The result is moved and not copied: a list of all disks is long.
    let fields = [("jsonrpc", VERSION.into()), (name, content), ("id", id)];
    fields.into_iter().map(|(name, value): (&str, Value)| (name.to_owned(), value)).collect()
}
