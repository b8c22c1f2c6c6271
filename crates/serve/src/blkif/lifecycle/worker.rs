//! The half of a backend that serves: it owns rings, disk and run directory, does what it is told
//! ([`Order`]), and reports ([`Report`]). It knows nothing of xenstore.
//!
//! The images, their parents and the journal are open when it begins. What it opens by name is in
//! the run directory, and all those names are in [`RunFiles`](super::run_dir::RunFiles).

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ferrite_disk::{Disk, GrowthWatch};
use ferrite_io::names;
use ferrite_xen::hypervisor::{DomId, Hypervisor};

use super::attached::{Attached, EngineFactory, Means};
use super::carrier::Carrier;
use super::closing::{self, Closing};
use super::config::WorkConfig;
use super::error::ServeError;
use super::heir::TableHeir;
use super::messages::{Failure, Order, Reply, Report, Rings};
use super::run_dir::{RunFiles, TABLE, second};
use crate::blkif::connection::largest_request;
use crate::blkif::inflight::Table;
use crate::blkif::negotiate::DiskFacts;
use crate::log_limit::limited;
use crate::nbd::{COURTESY, Clients, Options};
use crate::path::device::Device;
use crate::path::gate::Side;
use crate::trace::clients::ClientTraces;
use crate::waker::Waker;

/// How often the medium is asked whether it has grown, while the guest is at work.
const RESIZE_CHECK: Duration = Duration::from_secs(1);

/// Clients of NBD beside the frontend, and the memory for the data of each.
const MAX_CLIENTS: usize = 16;
const CLIENT_BYTES: usize = 4 << 20;

/// The worker of one disk.
pub(super) struct Worker<'a> {
    means: Means<'a>,
    /// No other guest has the disk: it is closed when it is unplugged.
    closes: bool,
    /// The frontend that is served.
    attached: Option<Attached>,
    /// The image is being closed.
    closing: Option<Closing>,
    /// Clients beside the frontend, from the first one on.
    clients: Option<Clients>,
    /// They may not give space back.
    keeps_all: bool,
    /// It is known what a predecessor has left, and that it is this disk's.
    has_begun: bool,
    /// Tells of a medium that may have grown.
    growth: GrowthWatch,
    /// Of which disk.
    watched: Weak<Disk>,
    /// Of that disk, as far as its guest was told.
    sectors: u64,
    /// Answered when the size was last asked for.
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
        // What a predecessor has left of either guest is done before the other's requests.
        let second = second(&config.run_dir).join(TABLE);
        for (table, side) in [(files.table(), Side::First), (second, Side::Second)] {
            if Table::has_unanswered(&table) {
                device.keep_for(side);
            }
        }
        let image = disk(device)?.identity().map_or(String::new(), |image| image.path);
        config.counters.place(&config.run_dir, &image);
        let means = means(hypervisor, device, (domid, Side::First), files, config, engine)?;
        Worker::with(means, config.closes)
    }

    /// Of the stub domain of this one's guest, on the same disk.
    pub(super) fn second(&self, domid: DomId, config: &WorkConfig) -> Result<Worker<'a>, Failure> {
        let files = RunFiles::new(&second(&config.run_dir));
        let Means { hypervisor, device, engine, .. } = &self.means;
        let means = means(*hypervisor, device, (domid, Side::Second), files, config, engine)?;
        // It is closed by the first.
        Worker::with(means, false)
    }

    fn with(means: Means<'a>, closes: bool) -> Result<Worker<'a>, Failure> {
        let disk = disk(&means.device)?;
        Ok(Worker {
            closes,
            attached: None,
            closing: None,
            clients: None,
            keeps_all: false,
            has_begun: false,
            growth: disk.growth_watch(),
            watched: Arc::downgrade(&disk),
            sectors: disk.sectors(),
            requests: u64::MAX,
            means,
        })
    }

    /// Whether clients may give space back: as the toolstack has it for the guest.
    pub(super) fn keep_all(&mut self, keeps_all: bool) {
        self.keeps_all = keeps_all;
    }

    /// One more client of the same disk. It is sent away where that cannot be.
    pub(super) fn admit(&mut self, client: UnixStream) {
        let device = self.means.device.clone();
        let told = |why: &str| {
            let (limit, now_ns) = (&device.log_limits.connections, device.clock.now_ns());
            limited!(warn, limit, now_ns, "a client was turned away: {why}");
        };
        // What they write may be lost by a flush that fails, too, and is nothing that QEMU knows of.
        if let Err(e) = self.shut_out_qemu().and_then(|()| self.enter()) {
            return told(&ServeError::from(e).to_string());
        }
        if self.clients.is_none() {
            let stop = match Waker::new() {
                Ok(stop) => Arc::new(stop),
                Err(e) => return told(&e.to_string()),
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
            // Whoever stops us waits, and does not wait for them.
            at_stop: Duration::ZERO,
            engine: self.means.engine.clone(),
            tuning: self.means.tuning,
            counters: Some(self.means.counters.clone()),
            keeps_all: self.keeps_all,
            traces: Some(ClientTraces::new(self.means.files.path())),
        }
    }

    /// Ends all clients: what the disk works on for them is done when this returns.
    pub(super) fn end_clients(&mut self) {
        self.clients.take().map(Clients::end);
    }

    fn facts(&self) -> Result<DiskFacts, Failure> {
        let disk = disk(&self.means.device)?;
        Ok(DiskFacts {
            sectors: disk.sectors(),
            read_only: disk.read_only(),
            physical_block_bytes: disk.physical_block_bytes(),
            discard: disk.discard_limits().filter(|_| !disk.read_only()),
            max_segments: largest_request(&disk),
        })
    }

    /// Whether others than the first guest are served now: clients, and its stub domain. Before the first
    /// order that touches the run directory nobody knows whether a failed flush is remembered there.
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// What a predecessor has left of this side's requests is nobody's any more.
    fn expects_nothing(&self) {
        self.means.device.expects(self.means.side, 0);
    }

    fn remember(&self) -> Result<(), Failure> {
        let latch = self.means.files.latch();
        if !names::exists(&latch) {
            return Ok(());
        }
        let device = &self.means.device;
        device.remember_in(&latch).map_err(|e| Failure::host("remember failed flushes", e))
    }

    fn enter(&mut self) -> Result<(), Failure> {
        self.means.files.enter()?;
        self.means
            .device
            .remember_in(&self.means.files.latch())
            .map_err(|e| Failure::run_dir("make room to remember failed flushes", e))
    }

    /// Before anybody has anything written by us: the device model has closed the image when the guest's
    /// driver connects. While somebody of QEMU's has it open, the guest waits.
    fn shut_out_qemu(&self) -> Result<(), Failure> {
        match disk(&self.means.device)?.shut_out_qemu() {
            true => Ok(()),
            false => Err(Failure::RunDir {
                what: "take the image over from the device model".to_owned(),
                why: "QEMU, or one of its tools, has it open: the guest's emulated disk is still \
                      plugged (xen_emul_unplug), or fuser -v shows who else has it"
                    .to_owned(),
            }),
        }
    }

    fn connect(&mut self, rings: Rings) -> Result<Reply, Failure> {
        // Of a half that has ended before it could say so. Rings have one user.
        self.attached.take().map_or(Ok(()), Attached::stop)?;
        self.shut_out_qemu()?;
        let attached = Attached::connect(&self.means, rings)?;
        self.expects_nothing();
        let how = attached.describe();
        self.attached = Some(attached);
        Ok(Reply::Connected { how, undone: 0 })
    }

    fn take_over(&mut self, rings: Rings, told_sectors: Option<u64>) -> Result<Reply, Failure> {
        let indirect = rings.max_indirect_segments;
        if indirect > largest_request(&*disk(&self.means.device)?) {
            let why = format!("it was offered requests of {indirect} segments");
            return Err(Failure::Refused(why));
        }
        self.compare_size(told_sectors)?;
        // What it has grown by since then is published as if it grew now.
        self.sectors = told_sectors.unwrap_or(self.sectors);
        // The other half may have ended while this one served on.
        if let Some(attached) = &self.attached
            && attached.serves(&rings)
        {
            return Ok(Reply::Connected { how: attached.describe(), undone: 0 });
        }
        self.attached.take().map_or(Ok(()), Attached::stop)?;
        self.shut_out_qemu()?;
        let (attached, undone) = Attached::take_over(&self.means, rings)?;
        let how = attached.describe();
        self.attached = Some(attached);
        Ok(Reply::Connected { how, undone })
    }

    /// The guest goes on with the size that it was told last. An image may have grown meanwhile; a
    /// shorter one is not the one that the guest knows.
    fn compare_size(&self, told_sectors: Option<u64>) -> Result<(), Failure> {
        let disk = disk(&self.means.device)?;
        let sectors = disk.sectors();
        match told_sectors {
            Some(told) if told > sectors => Err(Failure::WrongImage(format!(
                "its disk has {told} sectors, and {disk} has only {sectors}. Serve the image that \
                 it was served from, or detach the disk and attach it again"
            ))),
            _ => Ok(()),
        }
    }

    /// Asks for the medium's size, and says when to ask again: soon, while the guest is at work;
    /// when we are told, while it is not.
    fn check_size(&mut self) -> Result<Reply, Failure> {
        let device = &self.means.device;
        let disk = device.disk_now().map_err(|e| Failure::host("serve the disk", e))?;
        // Who is parked can be stopped. The disk's return is told (`heir.rs`).
        let Some(disk) = disk else { return Ok(Reply::Size { grown: None, ask_again: None }) };
        if !std::ptr::eq(self.watched.as_ptr(), &*disk) {
            self.growth = disk.growth_watch();
            self.watched = Arc::downgrade(&disk);
        }
        let requests = self.means.counters.counts().requests;
        let idle = std::mem::replace(&mut self.requests, requests) == requests;
        self.growth.ignore();
        let told = idle && self.growth.listen();
        // After listening has begun: what comes later than this is told.
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

impl Carrier for Worker<'_> {
    fn carry_out(&mut self, order: Order) -> Result<Reply, Failure> {
        match order {
            Order::Describe => return Ok(Reply::Facts(self.facts()?)),
            Order::Remember => {
                self.remember()?;
                self.has_begun = true;
            }
            Order::Forget => {
                self.means.files.forget();
                self.expects_nothing();
                self.has_begun = true;
            }
            Order::Enter => self.enter()?,
            Order::Connect(rings) => return self.connect(rings),
            Order::TakeOver { rings, told_sectors } => return self.take_over(rings, told_sectors),
            Order::Detach => self.attached.take().map_or(Ok(()), Attached::detach)?,
            Order::Stop => self.attached.take().map_or(Ok(()), Attached::stop)?,
            Order::Hurry => {
                if let Some(attached) = &self.attached {
                    attached.hurry(self.means.device.clock.now_ns());
                }
            }
            Order::Save => {
                // No frontend is connected: there is nobody to do what one had under way again for.
                if self.attached.is_none() {
                    self.expects_nothing();
                }
                closing::save(&self.means.device, &self.means.engine);
            }
            Order::CheckSize => return self.check_size(),
            Order::Close if self.closes => {
                let clients = self.clients.take();
                let closing = Closing::begin(&self.means.device, &self.means.engine, clients)?;
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
        self.means.control.fd()
    }

    fn clear_reports(&mut self) -> Result<(), Failure> {
        self.means.control.clear();
        Ok(())
    }

    fn report(&mut self) -> Option<Report> {
        self.attached.as_mut().and_then(Attached::report)
    }

    fn has_news(&self) -> bool {
        false
    }

    fn growth_fd(&self) -> Option<BorrowedFd<'_>> {
        self.growth.fd()
    }

    fn outlives_us(&self) -> bool {
        false
    }
}

/// What connections of a guest are made of.
fn means<'a>(
    hypervisor: &'a dyn Hypervisor,
    device: &Arc<Device>,
    (domid, side): (DomId, Side),
    files: RunFiles,
    config: &WorkConfig,
    engine: &EngineFactory,
) -> Result<Means<'a>, Failure> {
    let control = Arc::new(Waker::new().map_err(|e| Failure::host("make an eventfd", e))?);
    let heir = device.with_disk(|disk| {
        let counters = config.counters.clone();
        let heir = TableHeir::new(&files.table(), disk, counters, control.clone());
        let heir = Arc::new(heir);
        device.add_heir(&heir);
        heir
    });
    Ok(Means {
        hypervisor,
        domid,
        device: device.clone(),
        side,
        files,
        heir: heir.map_err(|e| Failure::host("serve the disk", e))?,
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

/// The disk that is served now. Not to be kept: whoever parks it waits for that.
fn disk(device: &Device) -> Result<Arc<Disk>, Failure> {
    device.disk().map_err(|e| Failure::host("serve the disk", e))
}
