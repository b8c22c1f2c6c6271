//! An export, as all threads share it.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferrite_disk_base::{
    DiscardLimits, DiskError, ErrorKind, GrowthWatch, OpenOptions, READ_ONLY, SECTOR_BYTES,
};
use ferrite_host::names::connect;
use ferrite_io::reactor::Io;
use ferrite_io::remote::{Remote, RemoteFactory};
use ferrite_io::scratch::Scratch;
use ferrite_nbd::address::Address;
use ferrite_nbd::client::{Export, Refusal, Session as SessionName, Wanted};
use ferrite_nbd::uri::{BadUri, Uri};
use ferrite_nbd::wire::can;
use rustix::event::{EventfdFlags, eventfd};

use crate::client::Identity;
use crate::link::{self, Link, Waiting, run_here};
use crate::session::Session;

/// Connections of one process to one export, at most.
const MAX_SESSIONS: u32 = 64;
/// How long opening waits for the server.
const PATIENCE: Duration = Duration::from_secs(10);
/// Lines of the log that a lost server may cause in a [`WINDOW`].
const LINES: u32 = 20;
const WINDOW: Duration = Duration::from_secs(60);
/// The blocks that guests may have.
const BLOCKS: [u32; 2] = [512, 4096];

/// An open export: the facts that a disk needs, and the factory of sessions.
#[derive(Debug)]
pub struct RemoteExport {
    shared: Arc<Shared>,
}

/// The state that sessions share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The name as the user wrote it.
    pub(crate) text: String,
    pub(crate) uri: Uri,
    pub(crate) address: Address,
    /// As it was when it was opened, but for its size.
    pub(crate) export: Export,
    /// The size in bytes, as the last connection has it.
    bytes: AtomicU64,
    /// Is added to when the size has grown. `None`: it never grows.
    grown: Option<Arc<OwnedFd>>,
    read_only: bool,
    user: [u8; 16],
    process: u64,
    /// A predecessor was killed. A server that does not end its connections may still execute that one's requests.
    pub(crate) drains_first: bool,
    pub(crate) opened: Instant,
    state: Mutex<State>,
    /// The export is not what it was: no request succeeds any more.
    has_failed: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// The numbers of connections in use, a bit each.
    taken: u64,
    /// The connection of [`RemoteExport::open`], until a session takes it.
    first: Option<Link>,
    /// The begin of the present minute, and the lines that were logged in it.
    window: Option<Instant>,
    lines: u32,
}

impl RemoteExport {
    /// Connects to the server and looks at the export.
    ///
    /// # Errors
    /// `Usage`: the name is invalid. `NotFound`: the server has no such export. `Io`: it cannot be reached.
    /// `Permission`: the export is read-only. `Unsuitable`: its sizes are those of no disk.
    pub fn open(text: &str, options: &OpenOptions) -> Result<RemoteExport, DiskError> {
        let what = || format!("cannot open {text}");
        let uri = Uri::parse(text)
            .map_err(|BadUri { why, help }| DiskError::new(ErrorKind::Usage, what(), why, help))?;
        let address = address_of(&uri, options.read_only);
        let Identity { user, process, is_lasting } = Identity::of(&uri, options).map_err(|e| {
            let help = "check the kernel's random numbers (/dev/urandom)";
            DiskError::new(ErrorKind::Io, what(), e.to_string(), help)
        })?;
        let session = Some(SessionName { user, process, connection: 0 });
        let wanted =
            Wanted { export: uri.export.clone(), allocation: true, session, ..Wanted::default() };
        let link = connect_here(&address, &wanted).map_err(|refusal| {
            let Refusal { why, help, passes } = refusal;
            let kind = if passes { ErrorKind::Io } else { ErrorKind::NotFound };
            DiskError::new(kind, what(), why, help)
        })?;
        let export = link.export.clone();
        check(&export, options.read_only)
            .map_err(|(kind, why, help)| DiskError::new(kind, what(), why, help))?;
        // Other servers have nothing by which they could tell it.
        let grown = matches!(address, Address::Helped { .. })
            .then(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok())
            .flatten()
            .map(Arc::new);
        // The server knows the user, and has ended the predecessor's connections.
        let is_fenced = export.fenced && is_lasting;
        let drains_first = options.taken_over && !options.read_only && !is_fenced;
        let state = State { first: Some(link), ..State::default() };
        let shared = Shared {
            text: text.to_owned(),
            uri,
            address,
            bytes: AtomicU64::new(export.bytes),
            grown,
            export,
            read_only: options.read_only,
            user,
            process,
            drains_first,
            opened: Instant::now(),
            state: Mutex::new(state),
            has_failed: AtomicBool::new(false),
        };
        Ok(RemoteExport { shared: Arc::new(shared) })
    }

    /// The name by which it was opened.
    pub fn name(&self) -> &str {
        &self.shared.text
    }

    /// The size in sectors of 512 bytes. That of a helper's disk may grow.
    pub fn sectors(&self) -> u64 {
        self.shared.bytes.load(Ordering::Relaxed) / SECTOR_BYTES
    }

    /// A watch that notifies when [`sectors`](Self::sectors) has grown.
    pub fn growth_watch(&self) -> GrowthWatch {
        self.shared.grown.clone().map_or_else(GrowthWatch::never, GrowthWatch::told)
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.shared.read_only
    }

    /// Whether the server allows no client to write.
    pub fn is_write_protected(&self) -> bool {
        self.shared.export.can(can::READ_ONLY)
    }

    /// Offsets and lengths are multiples of this: 512 or 4096.
    pub fn block_bytes(&self) -> u32 {
        block_bytes(&self.shared.export)
    }

    /// The server's preferred block.
    pub fn physical_block_bytes(&self) -> u32 {
        self.shared.export.preferred_block_bytes.clamp(4096, 64 << 10)
    }

    /// The limits of discards to publish.
    pub fn discard_limits(&self) -> Option<DiscardLimits> {
        let offers = self.shared.export.can(can::TRIM) && !self.shared.read_only;
        let granularity_bytes = self.physical_block_bytes();
        offers.then_some(DiscardLimits { granularity_bytes, alignment_bytes: 0 })
    }

    /// Whether only one thread may use it at a time. A server that does not offer several connections would not flush what
    /// came by another one.
    pub fn one_queue(&self) -> bool {
        self.shared.is_single()
    }

    /// The factory that reactors register.
    pub fn factory(&self) -> Arc<dyn RemoteFactory> {
        Arc::new(Factory(self.shared.clone()))
    }
}

impl Shared {
    /// Whether only one connection may be used.
    fn is_single(&self) -> bool {
        !self.read_only && !self.export.can(can::MULTI_CONN)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a connection, and that of the opening if it is left.
    fn take_number(&self) -> io::Result<(u32, Option<Link>)> {
        let mut state = self.state();
        if self.is_single() && state.taken != 0 {
            let text = "the server allows one connection to an export that is written";
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
        let number = state.taken.trailing_ones();
        if number >= MAX_SESSIONS {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "it has too many connections"));
        }
        state.taken |= 1 << number;
        let first = state.first.take().filter(|_| number == 0);
        Ok((number, first))
    }

    /// The options that the connection with this number asks for.
    pub(crate) fn wanted(&self, connection: u32) -> Wanted {
        let session = SessionName { user: self.user, process: self.process, connection };
        let allocation = self.export.allocation.is_some();
        let (export, session) = (self.uri.export.clone(), Some(session));
        Wanted { export, allocation, session, ..Wanted::default() }
    }

    /// Gives a number back, with what is left of its connection.
    pub(crate) fn give_back(&self, number: u32) {
        self.state().taken &= !(1 << number);
    }

    /// Whether no request succeeds any more.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    /// Whether a line of the log may be written: [`LINES`] in a minute.
    pub(crate) fn may_log(&self) -> bool {
        let (now, mut state) = (Instant::now(), self.state());
        if state.window.is_none_or(|begin| now.duration_since(begin) >= WINDOW) {
            (state.window, state.lines) = (Some(now), 0);
        }
        state.lines += 1;
        state.lines <= LINES
    }

    /// From now on all requests of all threads fail.
    pub(crate) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Whether this is still the same disk. Otherwise in what it differs.
    pub(crate) fn compare(&self, now: &Export) -> Result<(), String> {
        let then = &self.export;
        let needed = can::FLUSH | can::TRIM | can::WRITE_ZEROES | can::MULTI_CONN;
        // A helper's disk may grow: the helper ends the connections then.
        let may_grow = matches!(self.address, Address::Helped { .. });
        let known = self.bytes.load(Ordering::Relaxed);
        if now.bytes < known || (now.bytes > known && !may_grow) {
            return Err(format!("it has {} bytes, and had {known}", now.bytes));
        }
        self.bytes.fetch_max(now.bytes, Ordering::Relaxed);
        if let Some(grown) = self.grown.as_ref().filter(|_| now.bytes > known) {
            // Without it the size counts when the disk is opened again.
            let _ = rustix::io::write(grown, &1_u64.to_ne_bytes());
        }
        if !self.read_only && now.can(can::READ_ONLY) {
            return Err("it has become read-only".into());
        }
        if then.flags & needed & !now.flags != 0 || now.min_block_bytes > then.min_block_bytes {
            return Err("the server can do less than before".into());
        }
        Ok(())
    }
}

/// Makes the sessions of reactors.
#[derive(Debug)]
struct Factory(Arc<Shared>);

impl RemoteFactory for Factory {
    fn connect(&self, io: Io, scratch: Scratch) -> io::Result<Rc<dyn Remote>> {
        let (number, link) = self.0.take_number()?;
        Ok(Session::begin(self.0.clone(), number, link, io, scratch.arena().clone()))
    }
}

fn connect_here(address: &Address, wanted: &Wanted) -> Result<Link, Refusal> {
    let end = Instant::now() + PATIENCE;
    let mut attempt = 0;
    loop {
        let link = run_here(link::open(&Waiting::Here, address, attempt, wanted.clone(), end));
        attempt += 1;
        match link {
            // A name may have several addresses.
            Err(refusal) if refusal.passes && attempt < 2 && Instant::now() < end => {}
            done => return done,
        }
    }
}

/// The server of an export, with the addresses that its name has now. It may wait for the host's resolver. `None`: this
/// names no export. `read_only`: nothing will be written.
pub fn server_of(name: &str, read_only: bool) -> Option<connect::Server> {
    let uri = Uri::parse(name).ok()?;
    let address = address_of(&uri, read_only);
    let resolved = match &address {
        Address::Unix(_) | Address::Helped { .. } => Vec::new(),
        Address::Tcp { host, port } | Address::Tls { host, port, .. } => {
            connect::resolve(host, *port).unwrap_or_default()
        }
    };
    Some(connect::Server { address, resolved })
}

/// Where connections go. A helper is told whether its disk is only read.
fn address_of(uri: &Uri, read_only: bool) -> Address {
    let mut address = uri.server.clone();
    if let Address::Helped { read_only: only_read, .. } = &mut address {
        *only_read |= read_only;
    }
    address
}

fn block_bytes(export: &Export) -> u32 {
    BLOCKS.into_iter().find(|block| *block >= export.min_block_bytes).unwrap_or(BLOCKS[1])
}

/// Whether this can be a disk.
fn check(export: &Export, read_only: bool) -> Result<(), (ErrorKind, String, String)> {
    if export.min_block_bytes > BLOCKS[1] {
        let why = format!(
            "the server's smallest block is {} bytes, and a disk's at most {}",
            export.min_block_bytes, BLOCKS[1]
        );
        let help = "have the server accept smaller blocks (nbdkit: --filter=blocksize)";
        return Err((ErrorKind::Unsuitable, why, help.into()));
    }
    let block = u64::from(block_bytes(export));
    if !export.bytes.is_multiple_of(block) {
        let why = format!("the export has {} bytes, no multiple of {block}", export.bytes);
        let help = "round it up at the server (nbdkit: --filter=truncate round-up=4096)";
        return Err((ErrorKind::Unsuitable, why, help.into()));
    }
    if !read_only && export.can(can::READ_ONLY) {
        return Err((ErrorKind::Permission, "the export is read-only".into(), READ_ONLY.into()));
    }
    Ok(())
}
