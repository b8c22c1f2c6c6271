//! One front end: its messages, and the queues that it has set up.
//!
//! A queue runs while it has an address, a size, a kick and the memory, and is enabled. A message that changes any of these
//! stops it before, with all requests answered, and lets it go on behind the last one.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ferrite_disk::GrowthWatch;
use ferrite_io::pool::Pool;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fcntl_setfl, fstat};
use rustix::io::write;

use super::Options;
use super::config::{Told, feature, protocol};
use super::inflight::{self, Inflight, QueueTable};
use super::memory::{SharedTable, Table};
use super::message::{BACKEND_CONFIG_CHANGE, Message, RawAddresses, RawInflight, answer, tell};
use super::queue::{End, Parts, Queue, Rights, SharedEvent};
use super::ring::{MAX_ENTRIES, Ring};
use super::socket::{Ended, Received, Socket, send};
use crate::log_limit::limited;
use crate::path::device::Device;
use crate::path::shared::Shared;
use crate::waker::{Waker, wait_for};

/// Operations that an engine takes at a time.
const ENGINE_ENTRIES: u32 = 256;
/// How often the size of the disk is read while its guest works, or if nothing tells of growth.
const SIZE_CHECK: Duration = Duration::from_secs(1);

/// A queue, as the front end has set it up.
#[derive(Default)]
struct Line {
    entries: u16,
    /// The next entry of the available ring when it begins.
    next_avail: u16,
    addresses: Option<RawAddresses>,
    kick: Option<Arc<OwnedFd>>,
    call: SharedEvent,
    err: SharedEvent,
    enabled: bool,
    running: Option<Running>,
}

struct Running {
    shared: Arc<Shared>,
    /// Set before this session is woken: the thread itself has a moment to live then.
    over: Arc<AtomicBool>,
    thread: JoinHandle<End>,
}

/// A front end, on the thread that has its socket.
pub(super) struct Session<'a> {
    socket: Socket,
    device: &'a Arc<Device>,
    options: &'a Options,
    pool: Arc<Pool>,
    /// Identifies the disk in tables of requests in flight.
    identity: String,
    told: Told,
    features: u64,
    protocol: u64,
    memory: Option<SharedTable>,
    inflight: Option<Arc<Inflight>>,
    /// Where a new table is made. Without it this process makes memory.
    table_memory: Option<OwnedFd>,
    lines: Vec<Line>,
    /// Where the front end is told of changes.
    back: Option<OwnedFd>,
    /// Wakes this thread when a queue has ended by itself.
    ended: Arc<Waker>,
    growth: GrowthWatch,
    /// The number of requests at the last check of the size.
    requests: u64,
}

impl<'a> Session<'a> {
    pub(super) fn new(
        stream: UnixStream,
        device: &'a Arc<Device>,
        options: &'a Options,
        pool: Arc<Pool>,
    ) -> io::Result<Session<'a>> {
        let disk = device.disk()?;
        let told = Told::of(&disk, options.read_only, options.queues);
        Ok(Session {
            socket: Socket::new(stream)?,
            device,
            options,
            pool,
            identity: disk.identity()?.key,
            told,
            // Until they are set, the queues of the oldest front ends are enabled at once.
            features: 0,
            protocol: 0,
            memory: None,
            inflight: None,
            table_memory: None,
            lines: (0..options.queues).map(|_| Line::default()).collect(),
            back: None,
            ended: Arc::new(Waker::new()?),
            growth: disk.growth_watch(),
            requests: 0,
        })
    }

    /// Has a new table of requests in flight made in this memory.
    pub(super) fn with_table_memory(self, memory: Option<OwnedFd>) -> Session<'a> {
        Session { table_memory: memory, ..self }
    }

    /// Serves the front end until it disconnects, does what makes no sense, or `stop` is woken. All requests that were
    /// taken are answered then.
    pub(super) fn run(mut self, stop: &Waker) -> io::Result<()> {
        let served = self.serve(stop);
        let stopped = self.stop_all();
        served.and(stopped)
    }

    fn serve(&mut self, stop: &Waker) -> io::Result<()> {
        let mut timeout = self.check_size()?;
        loop {
            let growth = self.growth.fd().filter(|_| timeout.is_none());
            let fds = [self.socket.fd(), stop.fd(), self.ended.fd(), growth.unwrap_or(stop.fd())];
            let [message, stopped, ended, grown] = wait_for(fds, timeout)?;
            if stopped {
                return Ok(());
            }
            if ended {
                self.ended.clear();
                self.check_queues()?;
            }
            if message && !self.messages()? {
                return Ok(());
            }
            if grown || !(message || ended) {
                timeout = self.check_size()?;
            }
        }
    }

    /// Carries out the messages that have come. `false`: the front end has gone.
    fn messages(&mut self) -> io::Result<bool> {
        loop {
            match self.socket.receive() {
                Ok(Some(received)) => self.one(received)?,
                Ok(None) => return Ok(true),
                Err(Ended::Closed) => return Ok(false),
                Err(Ended::Malformed(malformed)) => return Err(refused(malformed)),
                Err(Ended::System(e)) => return Err(e),
            }
        }
    }

    fn one(&mut self, received: Received) -> io::Result<()> {
        let Received { header, body, files } = received;
        let (message, [least, most]) = Message::decode(header.request, &body).map_err(refused)?;
        let number = header.request;
        if !(least..=most).contains(&files.len()) {
            let why = format!("message {number} has {} descriptors instead of {most}", files.len());
            return Err(refused(why));
        }
        let done = self.carry_out(message, files);
        let acknowledges = header.need_reply && self.protocol & protocol::REPLY_ACK != 0;
        match done {
            Ok(Reply::Bytes(bytes)) => self.socket.send(&answer(number, &bytes), None),
            Ok(Reply::File(bytes, file)) => {
                self.socket.send(&answer(number, &bytes), Some(file.as_fd()))
            }
            Ok(Reply::None) if acknowledges => self.socket.send(&answer(number, &[0; 8]), None),
            Ok(Reply::None) => Ok(()),
            Err(e) => {
                if acknowledges {
                    // It is let go in any case.
                    let _ = self.socket.send(&answer(number, &1u64.to_le_bytes()), None);
                }
                Err(e)
            }
        }
    }

    fn carry_out(&mut self, message: Message, mut files: Vec<OwnedFd>) -> io::Result<Reply> {
        let file = files.pop();
        match message {
            Message::GetFeatures => return Ok(Reply::number(self.told.features())),
            Message::SetFeatures(features) => {
                let unknown = features & !self.told.features();
                if unknown != 0 {
                    return Err(refused(format!("features {unknown:#x} were not offered")));
                }
                self.stop_all()?;
                self.features = features;
            }
            Message::SetOwner => {}
            Message::ResetOwner => {
                self.stop_all()?;
                self.lines.iter_mut().for_each(|line| line.enabled = false);
            }
            Message::SetMemTable(regions) => {
                files.extend(file);
                self.stop_all()?;
                // The old one goes first: both may be large.
                self.memory = None;
                self.memory = Some(Arc::new(Table::map(&regions, &files).map_err(refused)?));
            }
            Message::SetVringNum { queue, value } => {
                let fits = value.is_power_of_two() && value <= MAX_ENTRIES.into();
                if !fits {
                    return Err(refused(format!("a queue of {value} entries is not possible")));
                }
                self.stopped(queue)?.entries = value as u16;
            }
            Message::SetVringAddr { queue, addresses } => {
                self.stopped(queue)?.addresses = Some(addresses);
            }
            Message::SetVringBase { queue, value } => {
                let value = u16::try_from(value).map_err(refused)?;
                self.stopped(queue)?.next_avail = value;
            }
            Message::GetVringBase { queue } => {
                let line = self.stopped(queue)?;
                line.kick = None;
                let state = [queue, line.next_avail.into()].map(u32::to_le_bytes).concat();
                return Ok(Reply::Bytes(state));
            }
            Message::SetVringKick { queue } => {
                let kick = event(file)?;
                self.stopped(queue)?.kick = kick.map(Arc::new);
            }
            Message::SetVringCall { queue } => set(&self.line(queue)?.call, event(file)?),
            Message::SetVringErr { queue } => set(&self.line(queue)?.err, event(file)?),
            Message::GetProtocolFeatures => return Ok(Reply::number(protocol::ALL)),
            Message::SetProtocolFeatures(features) => {
                let unknown = features & !protocol::ALL;
                if unknown != 0 {
                    return Err(refused(format!(
                        "protocol features {unknown:#x} were not offered"
                    )));
                }
                self.protocol = features;
            }
            Message::GetQueueNum => return Ok(Reply::number(self.options.queues.into())),
            Message::SetVringEnable { queue, enabled } => self.stopped(queue)?.enabled = enabled,
            Message::SetBackendReqFd => self.back = file,
            Message::GetConfig { offset, size, flags } => {
                return Ok(Reply::Bytes(self.config(offset, size, flags)));
            }
            // The cache's mode was not offered, and nothing else can be written.
            Message::SetConfig => return Err(refused("the configuration cannot be changed")),
            Message::GetInflight(raw) => {
                let (queues, memory) = (self.options.queues, self.table_memory.as_ref());
                let made = inflight::create(&raw, queues, &self.identity, memory);
                let (file, raw) = made.map_err(refused)?;
                return Ok(Reply::File(raw.encode(), file));
            }
            Message::SetInflight(raw) => self.set_inflight(&raw, file)?,
        }
        self.start_all()?;
        Ok(Reply::None)
    }

    fn set_inflight(&mut self, raw: &RawInflight, file: Option<OwnedFd>) -> io::Result<()> {
        self.stop_all()?;
        self.inflight = None;
        let Some(file) = file else { return Ok(()) };
        let table = Inflight::open(raw, &file, self.options.queues, &self.identity);
        self.inflight = Some(Arc::new(table.map_err(refused)?));
        Ok(())
    }

    /// The answer to a question for the configuration space.
    fn config(&self, offset: u32, size: u32, flags: u32) -> Vec<u8> {
        let space = self.told.space();
        let (from, len) = (offset as usize, size as usize);
        match space.get(from..from.saturating_add(len)) {
            Some(part) => {
                [&[offset, size, flags].map(u32::to_le_bytes).concat()[..], part].concat()
            }
            // Without bytes: it is an error.
            None => [offset, 0, flags].map(u32::to_le_bytes).concat(),
        }
    }

    fn line(&mut self, queue: u32) -> io::Result<&mut Line> {
        let most = self.options.queues;
        let line = self.lines.get_mut(queue as usize);
        line.ok_or_else(|| refused(format!("there is no queue {queue}: the disk has {most}")))
    }

    /// A queue that does not run.
    fn stopped(&mut self, queue: u32) -> io::Result<&mut Line> {
        let line = self.line(queue)?;
        line.stop()?;
        Ok(line)
    }

    fn stop_all(&mut self) -> io::Result<()> {
        // All of them are told before the first is waited for.
        let running = self.lines.iter().filter_map(|line| line.running.as_ref());
        running.for_each(|running| running.shared.stop());
        let mut result = Ok(());
        for line in &mut self.lines {
            let stopped = line.stop();
            result = result.and(stopped);
        }
        result
    }

    /// Ends the connection if a queue has ended by itself.
    fn check_queues(&mut self) -> io::Result<()> {
        let has_ended = |line: &&mut Line| {
            line.running.as_ref().is_some_and(|running| running.over.load(Ordering::Acquire))
        };
        self.lines.iter_mut().filter(has_ended).try_for_each(Line::stop)
    }

    /// Starts all queues that can run.
    fn start_all(&mut self) -> io::Result<()> {
        let Some(memory) = self.memory.clone() else { return Ok(()) };
        for number in 0..self.lines.len() {
            let line = &self.lines[number];
            let enabled = line.enabled || self.features & feature::PROTOCOL == 0;
            let (Some(addresses), Some(kick)) = (line.addresses, line.kick.clone()) else {
                continue;
            };
            if !enabled || line.entries == 0 || line.running.is_some() {
                continue;
            }
            self.start(number as u16, memory.clone(), addresses, kick)?;
        }
        Ok(())
    }

    fn start(
        &mut self,
        number: u16,
        memory: SharedTable,
        addresses: RawAddresses,
        kick: Arc<OwnedFd>,
    ) -> io::Result<()> {
        let line = &mut self.lines[usize::from(number)];
        let event_index = self.features & feature::EVENT_INDEX != 0;
        let ring = Ring::new(memory, line.entries, addresses, line.next_avail, event_index);
        let Some(mut ring) = ring.map_err(refused)? else {
            return Err(refused(format!(
                "queue {number} is outside of the memory, or not aligned"
            )));
        };
        let mut replay = Vec::new();
        let mut table = None;
        if let Some(inflight) = &self.inflight {
            let resumed = QueueTable::resume(inflight.clone(), number, line.entries, ring.told);
            let resumed = resumed.map_err(refused)?;
            if let Some(left) = resumed.left {
                // First the requests that a predecessor has taken and not answered, and behind them those that it had
                // not taken.
                ring.next_avail = ring.told.wrapping_add(left.len() as u16);
                replay = left;
            }
            table = Some(resumed.table);
        }
        if !replay.is_empty() {
            tracing::info!(
                "queue {number} has {} requests that a killed server has left",
                replay.len()
            );
        }
        let rights = Rights {
            read_only: self.told.read_only,
            discards: self.features & feature::DISCARD != 0,
            indirect: self.features & feature::INDIRECT != 0,
            // A guest that knows no flush takes a write that is answered for one that is kept.
            writes_through: self.features & feature::FLUSH == 0,
            id: self.options.id,
        };
        let counters = self.options.counters.clone().unwrap_or_default();
        let (device, tuning) = (self.device.clone(), self.options.tuning);
        let shared = Shared::new(device, self.pool.clone(), 1, tuning, Arc::default(), counters)?;
        let shared = Arc::new(shared.with_queues_from(number.into()));
        let (engine, arena) = (self.options.engine.clone(), self.pool.arena().clone());
        let (call, err) = (line.call.clone(), line.err.clone());
        let (served, ended) = (shared.clone(), self.ended.clone());
        let over = Arc::new(AtomicBool::new(false));
        let (next_avail, told) = (ring.next_avail, over.clone());
        let run = move || {
            let parts = Parts {
                shared: served,
                ring,
                kick,
                call,
                err,
                inflight: table,
                replay,
                rights,
                number,
            };
            let made = engine(arena, ENGINE_ENTRIES).and_then(|engine| Queue::new(parts, engine));
            let end = match made {
                Ok(queue) => queue.run(),
                Err(e) => End { next_avail, result: Err(e) },
            };
            told.store(true, Ordering::Release);
            ended.wake();
            end
        };
        let thread = std::thread::Builder::new().name(format!("vhost-{number}")).spawn(run)?;
        line.running = Some(Running { shared, over, thread });
        Ok(())
    }

    /// Reads the disk's size, and tells the front end if it has grown. Returns when to read it again; `None`: growth is
    /// told.
    fn check_size(&mut self) -> io::Result<Option<Duration>> {
        let Some(disk) = self.device.disk_now()? else { return Ok(Some(SIZE_CHECK)) };
        let requests =
            self.options.counters.as_ref().map_or(0, |counters| counters.counts().requests);
        let idle = std::mem::replace(&mut self.requests, requests) == requests;
        self.growth.ignore();
        let told = idle && self.options.counters.is_some() && self.growth.listen();
        // The size is read after the watch has begun, so no change is missed.
        if let Err(e) = disk.refresh_size() {
            let now_ns = self.device.clock.now_ns();
            limited!(
                warn,
                self.device.log_limits.storage,
                now_ns,
                "cannot ask for the size of the image: {e}"
            );
        }
        let sectors = disk.sectors();
        if sectors > self.told.sectors {
            tracing::info!("the image has grown to {sectors} sectors");
            self.told.sectors = sectors;
            let agreed = protocol::BACKEND_REQ | protocol::CONFIG;
            if let Some(back) = &self.back
                && self.protocol & agreed == agreed
            {
                send(back, &tell(BACKEND_CONFIG_CHANGE), None)?;
            }
        }
        Ok((!told).then_some(SIZE_CHECK))
    }
}

impl Line {
    /// Stops the queue with all requests answered. It goes on behind the last one that was taken.
    fn stop(&mut self) -> io::Result<()> {
        let Some(Running { shared, thread, .. }) = self.running.take() else { return Ok(()) };
        shared.stop();
        let end = thread.join().map_err(|_| {
            io::Error::other("a queue's thread has panicked: this is a bug in ferrite")
        })?;
        self.next_avail = end.next_avail;
        end.result
    }
}

/// The reply to a message.
enum Reply {
    None,
    Bytes(Vec<u8>),
    File(Vec<u8>, OwnedFd),
}

impl Reply {
    fn number(value: u64) -> Reply {
        Reply::Bytes(value.to_le_bytes().to_vec())
    }
}

fn set(event: &SharedEvent, to: Option<OwnedFd>) {
    *event.lock().unwrap_or_else(PoisonError::into_inner) = to;
}

/// An event descriptor that does not block. Other descriptors could: they are refused. A worker has no procfs to look at, so
/// it is told by what it does: of all that has no type of a file, only an eventfd takes a number, and 0 changes nothing.
fn event(file: Option<OwnedFd>) -> io::Result<Option<OwnedFd>> {
    let Some(file) = file else { return Ok(None) };
    let is_nameless = FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::Unknown;
    if is_nameless {
        fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::NONBLOCK)?;
    }
    match is_nameless && write(&file, &0u64.to_ne_bytes()) == Ok(8) {
        true => Ok(Some(file)),
        false => Err(refused("a descriptor for events is no eventfd")),
    }
}

/// The front end is let go for this.
fn refused(why: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_string())
}
