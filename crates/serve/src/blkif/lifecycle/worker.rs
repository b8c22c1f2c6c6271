//! The half of a backend that serves. It owns rings, disk and run directory, carries out each
//! [`Order`], and sends [`Report`]s. It knows nothing of xenstore.
//!
//! The images, their parents and the journal are open when it begins. All files that it opens by
//! name later are in the run directory, and are named in [`RunFiles`].

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferrite_disk::{Disk, GrowthWatch};
use ferrite_host::frames::{Frame, NBD_CLIENT};
use ferrite_host::names;
use ferrite_xen::hypervisor::{DomId, Hypervisor};

use super::chain;
use super::closing::{self, Closing};
use super::config::WorkConfig;
use super::connected::{ConnectedFrontend, ConnectionContext, EngineFactory};
use super::error::ServeError;
use super::in_use;
use super::messages::{Failure, Order, Reply, Report, Rings};
use super::run_dir::{RunFiles, TABLE, second};
use super::successor::TableSuccessor;
use super::volume;
use super::worker_handle::WorkerHandle;
use crate::blkif::connection::largest_request;
use crate::blkif::inflight::Table;
use crate::blkif::negotiate::DiskFacts;
use crate::log_limit::limited;
use crate::nbd::{COURTESY, Clients, Options};
use crate::others::{self, Others};
use crate::path::device::Device;
use crate::path::gate::Side;
use crate::trace::clients::ClientTraces;
use crate::waker::Waker;

/// How often the medium's size is read while the guest works.
const RESIZE_CHECK: Duration = Duration::from_secs(1);

/// Most NBD clients beside the frontend.
const MAX_CLIENTS: usize = 16;
/// Bytes of data memory for each NBD client.
const CLIENT_BYTES: usize = 4 << 20;

/// The worker of one disk.
pub(super) struct Worker<'a> {
    context: ConnectionContext<'a>,
    /// Whether the image is closed when this disk is unplugged. It is not for a disk that another
    /// guest has.
    closes: bool,
    /// Whether the disk stays when its guest is gone.
    stays: bool,
    /// The connected frontend.
    attached: Option<ConnectedFrontend>,
    /// The close of the image that is under way.
    closing: Option<Closing>,
    /// The NBD clients, from the first one on.
    clients: Option<Clients>,
    /// Clients of other kinds, from the first one on.
    others: Option<Others>,
    /// Whether clients are refused discards.
    keeps_all: bool,
    /// Whether the leftovers of a predecessor were read, or removed as an older disk's.
    has_begun: bool,
    /// Watches the medium for growth.
    growth: GrowthWatch,
    /// The disk that `growth` watches.
    watched: Weak<Disk>,
    /// The disk's sectors, as published to its guest.
    sectors: u64,
    /// Requests that were answered when the size was read last.
    requests: u64,
}

impl<'a> Worker<'a> {
    pub(super) fn new(
        hypervisor: &'a dyn Hypervisor,
        device: &Arc<Device>,
        config: &WorkConfig,
        engine: &EngineFactory,
    ) -> Result<Worker<'a>, Failure> {
        let (files, domid) = (RunFiles::new(&config.run_dir), config.domid);
        // A predecessor's requests of either guest are finished before requests of the other one.
        let second = second(&config.run_dir).join(TABLE);
        for (table, side) in [(files.table(), Side::First), (second, Side::Second)] {
            if Table::has_unanswered(&table) {
                device.keep_for(side);
            }
        }
        let image = disk(device)?.identity().map_or(String::new(), |image| image.path);
        match config.stays {
            // Callers find a tap by its worker's number, also before its first client.
            true => config.counters.keep_in(&config.run_dir, &image),
            false => config.counters.place(&config.run_dir, &image),
        }
        device.set_limits(&config.limits);
        config.counters.limit(&config.limits);
        let context = context(hypervisor, device, (domid, Side::First), files, config, engine)?;
        Worker::with(context, config.closes && !config.stays, config.stays)
    }

    /// A worker for the stub domain of this worker's guest, on the same disk.
    pub(super) fn second(&self, domid: DomId, config: &WorkConfig) -> Result<Worker<'a>, Failure> {
        let files = RunFiles::new(&second(&config.run_dir));
        let ConnectionContext { hypervisor, device, engine, .. } = &self.context;
        let context = context(*hypervisor, device, (domid, Side::Second), files, config, engine)?;
        // The first guest's worker closes the image.
        Worker::with(context, false, false)
    }

    fn with(
        context: ConnectionContext<'a>,
        closes: bool,
        stays: bool,
    ) -> Result<Worker<'a>, Failure> {
        let disk = disk(&context.device)?;
        Ok(Worker {
            closes,
            stays,
            attached: None,
            closing: None,
            clients: None,
            others: None,
            keeps_all: false,
            has_begun: false,
            growth: disk.growth_watch(),
            watched: Arc::downgrade(&disk),
            sectors: disk.sectors(),
            requests: u64::MAX,
            context,
        })
    }

    /// Sets whether clients are refused discards, as the toolstack does for the guest.
    pub(super) fn keep_all(&mut self, keeps_all: bool) {
        self.keeps_all = keeps_all;
    }

    /// Serves one more client of the client channel, or closes its connection on failure.
    pub(super) fn accept(&mut self, frame: Frame) {
        if frame.bytes != NBD_CLIENT {
            return self.accept_other(frame);
        }
        // No descriptor may have been free for it.
        if let Some(client) = frame.files.into_iter().next() {
            self.accept_client(client.into());
        }
    }

    /// Serves a client that is none of NBD.
    fn accept_other(&mut self, frame: Frame) {
        if !self.may_have_clients() {
            return;
        }
        let device = self.context.device.clone();
        let ConnectionContext { engine, tuning, counters, .. } = &self.context;
        let others = self.others.get_or_insert_with(|| {
            let (engine, tuning, counters) = (engine.clone(), *tuning, counters.clone());
            let options = others::Options { memory: CLIENT_BYTES, engine, tuning, counters };
            Others::new(device, options)
        });
        others.admit(frame);
    }

    /// Whether the disk may have clients beside its ring. Says why not.
    fn may_have_clients(&mut self) -> bool {
        // A failed flush may lose the clients' writes, too, and QEMU would not see them.
        if let Err(e) = self.shut_out_qemu().and_then(|()| self.enter()) {
            let device = &self.context.device;
            let (limit, now_ns) = (&device.log_limits.connections, device.clock.now_ns());
            limited!(warn, limit, now_ns, "a client was turned away: {}", ServeError::from(e));
            return false;
        }
        true
    }

    /// Serves one more NBD client of the disk, or closes its connection on failure.
    fn accept_client(&mut self, client: UnixStream) {
        let device = self.context.device.clone();
        let reject = |why: &str| {
            let (limit, now_ns) = (&device.log_limits.connections, device.clock.now_ns());
            limited!(warn, limit, now_ns, "a client was turned away: {why}");
        };
        if !self.may_have_clients() {
            return;
        }
        if self.clients.is_none() {
            let stop = match Waker::new() {
                Ok(stop) => Arc::new(stop),
                Err(e) => return reject(&e.to_string()),
            };
            let options = self.client_options();
            self.clients = Some(Clients::new(device.clone(), options, stop));
        }
        if let Some(clients) = &mut self.clients {
            clients.admit(client);
        }
    }

    fn client_options(&self) -> Options {
        Options {
            read_only: false,
            max_clients: MAX_CLIENTS,
            client_bytes: CLIENT_BYTES,
            greeting: COURTESY,
            goodbye: COURTESY,
            // The caller that stops the worker waits, and must not wait for clients.
            at_stop: Duration::ZERO,
            engine: self.context.engine.clone(),
            tuning: self.context.tuning,
            counters: Some(self.context.counters.clone()),
            keeps_all: self.keeps_all,
            traces: Some(ClientTraces::new(self.context.files.path())),
            hides_names: false,
            relayed: true,
        }
    }

    /// Whether there are clients beside the guest.
    pub(super) fn has_clients(&self) -> bool {
        self.clients.as_ref().is_some_and(Clients::are_there)
            || self.others.as_ref().is_some_and(Others::are_there)
    }

    /// Ends all clients. Their requests that the disk works on are done when this returns.
    pub(super) fn end_clients(&mut self) {
        self.clients.take().map(Clients::end);
        if let Some(others) = self.others.take() {
            others.end();
        }
    }

    fn facts(&self) -> Result<DiskFacts, Failure> {
        Ok(facts(&*disk(&self.context.device)?))
    }

    /// Whether NBD clients and the stub domain may be served. The first order that uses the run
    /// directory comes before: until then it is unknown whether a flush has failed.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Drops the requests that a predecessor has left on this side.
    fn drop_expected(&self) {
        self.context.device.expect_replays(self.context.side, 0);
    }

    fn remember(&self) -> Result<(), Failure> {
        let latch = self.context.files.latch();
        if !names::exists(&latch) {
            return Ok(());
        }
        let device = &self.context.device;
        device
            .record_failed_flushes_in(&latch)
            .map_err(|e| Failure::host("record failed flushes", e))
    }

    fn enter(&mut self) -> Result<(), Failure> {
        self.context.files.enter()?;
        self.context
            .device
            .record_failed_flushes_in(&self.context.files.latch())
            .map_err(|e| Failure::run_dir("make room to record failed flushes", e))
    }

    /// Makes sure that QEMU has closed the image, before anything is written. The device model
    /// closes it when the guest's driver connects. Until then the guest waits.
    fn shut_out_qemu(&self) -> Result<(), Failure> {
        match disk(&self.context.device)?.shut_out_qemu() {
            true => Ok(()),
            false => Err(Failure::RunDir {
                what: "take the image over from the device model".to_owned(),
                why: "QEMU or one of its tools has it open: the guest's emulated disk is still \
                      plugged (xen_emul_unplug), or fuser -v shows which process has it"
                    .to_owned(),
            }),
        }
    }

    fn connect(&mut self, rings: Rings) -> Result<Reply, Failure> {
        // A follower that has ended may have left a connection. Rings have one user.
        self.attached.take().map_or(Ok(()), ConnectedFrontend::stop)?;
        self.shut_out_qemu()?;
        let attached = ConnectedFrontend::connect(&self.context, rings)?;
        self.drop_expected();
        let how = attached.describe();
        self.attached = Some(attached);
        Ok(Reply::Connected { how, undone: 0 })
    }

    fn take_over(&mut self, rings: Rings, told_sectors: Option<u64>) -> Result<Reply, Failure> {
        let indirect = rings.max_indirect_segments;
        if indirect > largest_request(&*disk(&self.context.device)?) {
            let why = format!(
                "it was offered requests of {indirect} segments, which this disk does not take"
            );
            return Err(Failure::Refused(why));
        }
        self.compare_size(told_sectors)?;
        // Growth since then is published as if it happened now.
        self.sectors = told_sectors.unwrap_or(self.sectors);
        // The follower may have ended while this worker went on.
        if let Some(attached) = &self.attached
            && attached.serves(&rings)
        {
            return Ok(Reply::Connected { how: attached.describe(), undone: 0 });
        }
        self.attached.take().map_or(Ok(()), ConnectedFrontend::stop)?;
        self.shut_out_qemu()?;
        let (attached, undone) = ConnectedFrontend::take_over(&self.context, rings)?;
        let how = attached.describe();
        self.attached = Some(attached);
        Ok(Reply::Connected { how, undone })
    }

    /// Compares the disk's size with the one that the guest was told last. A larger image has
    /// grown. A shorter one is not the guest's.
    fn compare_size(&self, told_sectors: Option<u64>) -> Result<(), Failure> {
        let disk = disk(&self.context.device)?;
        let sectors = disk.sectors();
        match told_sectors {
            Some(told) if told > sectors => Err(Failure::WrongImage(format!(
                "its disk has {told} sectors, and {disk} has only {sectors}. Serve the image that \
                 it was served from, or detach the disk and attach it again"
            ))),
            _ => Ok(()),
        }
    }

    /// Reads the medium's size, and says when to read it again: soon while the guest works. While
    /// it does not, the growth watch reports changes.
    fn check_size(&mut self) -> Result<Reply, Failure> {
        let device = &self.context.device;
        let disk = device.disk_now().map_err(|e| Failure::host("serve the disk", e))?;
        // A parked guest can wait. The successor wakes the control thread when the disk is back
        // (`successor.rs`).
        let Some(disk) = disk else { return Ok(Reply::Size { grown: None, ask_again: None }) };
        if !std::ptr::eq(self.watched.as_ptr(), &*disk) {
            self.growth = disk.growth_watch();
            self.watched = Arc::downgrade(&disk);
        }
        let requests = self.context.counters.counts().requests;
        let idle = std::mem::replace(&mut self.requests, requests) == requests;
        self.growth.ignore();
        let told = idle && self.growth.listen();
        // The size is read after the watch has begun, so no change is missed.
        if let Err(e) = disk.refresh_size() {
            limited!(
                warn,
                device.log_limits.storage,
                device.clock.now_ns(),
                "cannot ask for the size of the image: {e}"
            );
        }
        let sectors = disk.sectors();
        let grown = (sectors > self.sectors).then_some(sectors);
        self.sectors = sectors;
        if let Some(sectors) = grown {
            tracing::info!("the image has grown to {sectors} sectors");
        }
        Ok(Reply::Size { grown, ask_again: (!told).then_some(RESIZE_CHECK) })
    }
}

impl WorkerHandle for Worker<'_> {
    fn carry_out(&mut self, order: Order) -> Result<Reply, Failure> {
        match order {
            Order::Describe => return Ok(Reply::Facts(self.facts()?)),
            Order::Remember => {
                self.remember()?;
                self.has_begun = true;
            }
            Order::Guest(domid) => self.context.domid = DomId(domid),
            Order::Forget if self.stays => {
                // The memory of failed flushes and the counters are the disk's, not the guest's.
                let removed = self.context.files.remove_table();
                removed
                    .map_err(|e| Failure::run_dir("remove the table of a guest that is gone", e))?;
                self.drop_expected();
                self.has_begun = true;
            }
            Order::Forget => {
                self.context.files.remove();
                self.drop_expected();
                self.has_begun = true;
            }
            Order::Enter => self.enter()?,
            Order::Connect(rings) => return self.connect(rings),
            Order::TakeOver { rings, told_sectors } => return self.take_over(rings, told_sectors),
            Order::Detach => self.attached.take().map_or(Ok(()), ConnectedFrontend::detach)?,
            Order::Stop => self.attached.take().map_or(Ok(()), ConnectedFrontend::stop)?,
            Order::Hurry => {
                if let Some(attached) = &self.attached {
                    attached.hurry(self.context.device.clock.now_ns());
                }
            }
            Order::Tune(tune) => {
                let ConnectionContext { device, processors, counters, .. } = &self.context;
                tune.apply(device, processors, counters);
            }
            Order::Image(order) => {
                let ConnectionContext { device, engine, .. } = &self.context;
                return Ok(Reply::Image(in_use::carry_out(device, engine, &order)));
            }
            Order::Volume(order) => {
                let ConnectionContext { device, engine, .. } = &self.context;
                return Ok(Reply::Volume(volume::carry_out(device, engine, &order)));
            }
            Order::Chain => return Ok(Reply::Chain(chain::images(&self.context.device))),
            Order::Save => {
                // No frontend is connected that could want a predecessor's requests.
                if self.attached.is_none() {
                    self.drop_expected();
                }
                closing::save(&self.context.device, &self.context.engine);
            }
            Order::CheckSize => return self.check_size(),
            Order::Close if self.closes => {
                let clients = (self.clients.take(), self.others.take());
                let closing = Closing::begin(&self.context.device, &self.context.engine, clients)?;
                match closing.wait_a_while() {
                    true => closing.wait()?,
                    false => self.closing = Some(closing),
                }
            }
            Order::Close => {}
            Order::EndClose => self.closing.take().map_or(Ok(()), Closing::wait)?,
        }
        Ok(Reply::Done)
    }

    fn reports_fd(&self) -> BorrowedFd<'_> {
        self.context.control.fd()
    }

    fn clear_reports(&mut self) -> Result<(), Failure> {
        self.context.control.clear();
        Ok(())
    }

    fn report(&mut self) -> Option<Report> {
        self.attached.as_mut().and_then(ConnectedFrontend::report)
    }

    fn has_pending_events(&self) -> bool {
        false
    }

    fn growth_fd(&self) -> Option<BorrowedFd<'_>> {
        self.growth.fd()
    }

    fn is_separate_process(&self) -> bool {
        false
    }
}

/// The facts of a disk, for a frontend.
pub(super) fn facts(disk: &Disk) -> DiskFacts {
    DiskFacts {
        sectors: disk.sectors(),
        read_only: disk.read_only(),
        physical_block_bytes: disk.physical_block_bytes(),
        discard: disk.discard_limits().filter(|_| !disk.read_only()),
        max_segments: largest_request(disk),
        one_queue: disk.one_queue(),
    }
}

/// The parts that a guest's connections are made of.
fn context<'a>(
    hypervisor: &'a dyn Hypervisor,
    device: &Arc<Device>,
    (domid, side): (DomId, Side),
    files: RunFiles,
    config: &WorkConfig,
    engine: &EngineFactory,
) -> Result<ConnectionContext<'a>, Failure> {
    let control = Arc::new(Waker::new().map_err(|e| Failure::host("make an eventfd", e))?);
    let successor = device.with_disk(|disk| {
        let counters = config.counters.clone();
        let successor = TableSuccessor::new(&files.table(), disk, counters, control.clone());
        let successor = Arc::new(successor);
        device.add_successor(&successor);
        successor
    });
    Ok(ConnectionContext {
        hypervisor,
        domid,
        device: device.clone(),
        side,
        files,
        successor: successor.map_err(|e| Failure::host("serve the disk", e))?,
        moving: config.moving.clone(),
        pool_bytes: config.pool_bytes,
        host_memory: config.host_memory.clone(),
        engine: engine.clone(),
        tuning: config.tuning,
        processors: config.processors.clone(),
        counters: config.counters.clone(),
        control,
    })
}

/// The disk that is served now. Do not keep it: parking waits until it is dropped.
fn disk(device: &Device) -> Result<Arc<Disk>, Failure> {
    device.disk().map_err(|e| Failure::host("serve the disk", e))
}
