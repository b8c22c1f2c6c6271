//! Who may ask how much: a thread a client, a bounded number of them, lines of a bounded length.
//!
//! A client that says nothing costs its thread and its place, and gives both up when another one needs
//! the place. One that does not read its answers is left after a while. None holds a lock meanwhile.

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
use super::protocol::{MAX_LINE, Response, RpcError, VERSION, code};
use crate::Shared;
use crate::wait::wait_for;
use ferrite_serve::waker::Waker;

/// Clients at a time.
pub(super) const MAX_CLIENTS: usize = 16;
/// Requests of one batch.
const MAX_BATCH: usize = 16;
/// How long an answer waits for a client to read.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after the kernel gave no descriptor for a client.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// The control socket, while there is one. Dropping it ends all its clients.
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
    /// When it has last said something.
    heard: Mutex<Instant>,
    /// It waits for us, and not we for it.
    is_asking: AtomicBool,
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Client>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds a place for a client: that of the one that has been silent for longest, if there is
    /// no other.
    fn enter(&self, stream: &UnixStream) -> io::Result<Option<Arc<Client>>> {
        let stream = stream.try_clone()?;
        let heard = Mutex::new(Instant::now());
        let client = Arc::new(Client { stream, heard, is_asking: AtomicBool::new(false) });
        let mut clients = self.lock();
        if clients.len() >= MAX_CLIENTS {
            let silent = clients.iter().enumerate();
            let silent = silent.filter(|(_, client)| !client.is_asking.load(Ordering::Acquire));
            let Some((at, _)) = silent.min_by_key(|(_, client)| client.heard()) else {
                return Ok(None);
            };
            // Its thread reads the end, and ends.
            let _ = clients.swap_remove(at).stream.shutdown(std::net::Shutdown::Both);
        }
        clients.push(client.clone());
        Ok(Some(client))
    }

    fn leave(&self, client: &Arc<Client>) {
        self.lock().retain(|other| !Arc::ptr_eq(other, client));
    }
}

impl Client {
    fn heard(&self) -> Instant {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hears(&self) {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

impl Server {
    pub(crate) fn start(shared: &Arc<Shared>) -> io::Result<Server> {
        let path = shared.places.control();
        // One daemon at a time has the lock: what is there is a dead one's.
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        // Its folder is root's alone, so nobody comes between these two.
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
        // Nobody is to come any more. The lock is ours still, so it is no other daemon's.
        let _ = std::fs::remove_file(&self.path);
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            // It has nothing that could panic but us.
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
        let greeted = listener.accept().and_then(|(stream, _)| greet(shared, stream, clients));
        match greeted {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => {
                tracing::debug!("cannot take a client of the control socket: {e}");
                wait_for([stop.fd()], Some(EXHAUSTED));
            }
            _ => {}
        }
    }
}

fn greet(shared: &Arc<Shared>, stream: UnixStream, clients: &Arc<Clients>) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
    let Some(client) = clients.enter(&stream)? else {
        let message = format!("{MAX_CLIENTS} clients are waiting for answers already");
        let error = RpcError::new(code::BUSY, message, "try again");
        let answer = line(&respond(Value::Null, Err(error)));
        return (&stream).write_all(&answer);
    };
    let (shared, all, entered) = (shared.clone(), clients.clone(), client.clone());
    let spawned = std::thread::Builder::new().name("client".to_owned()).spawn(move || {
        // Its going is its own business.
        let _ = serve(&shared, &stream, &client);
        all.leave(&client);
    });
    if spawned.is_err() {
        clients.leave(&entered);
    }
    spawned.map(drop)
}

/// Answers a client until it goes.
fn serve(shared: &Shared, stream: &UnixStream, client: &Client) -> io::Result<()> {
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
            // Where the next request begins is not known: the client has to begin anew.
            return (&*stream).write_all(&line(&respond(Value::Null, Err(error))));
        }
        client.hears();
        client.is_asking.store(true, Ordering::Release);
        let answer = answer(shared, &text);
        let written = answer.map_or(Ok(()), |answer| (&*stream).write_all(&line(&answer)));
        client.is_asking.store(false, Ordering::Release);
        client.hears();
        written?;
    }
}

fn line(answer: &Value) -> Vec<u8> {
    let mut line = answer.to_string().into_bytes();
    line.push(b'\n');
    line
}

/// What is answered to a line; nothing to notifications, and to empty lines.
pub(super) fn answer(shared: &Shared, text: &[u8]) -> Option<Value> {
    if text.trim_ascii().is_empty() {
        return None;
    }
    let invalid =
        |why: &str| Some(respond(Value::Null, Err(RpcError::new(code::INVALID_REQUEST, why, ""))));
    match serde_json::from_slice(text) {
        Err(e) => {
            let error = RpcError::new(code::PARSE, format!("this is no JSON: {e}"), "");
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

fn answer_one(shared: &Shared, request: Value) -> Option<Value> {
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
    let (result, error) = match result {
        Ok(result) => (Some(result), None),
        Err(error) => (None, Some(error)),
    };
    let response = Response { jsonrpc: VERSION.to_owned(), result, error, id };
    serde_json::to_value(response).unwrap_or_default()
}
