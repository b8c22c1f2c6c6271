//! Serves disks with threads of the test's process.

use std::sync::{Arc, Mutex};

use ferrite_daemon::state::DiskId;
use ferrite_daemon::{Assignment, Failure, Serving};
use ferrite_disk::{Disk, OpenOptions};
use ferrite_host::clock::SystemClock;
use ferrite_loopback::Loopback;
use ferrite_loopback::machine::DiskPaths;
use ferrite_serve::blkif::lifecycle::{Outcome, close, serve};
use ferrite_serve::path::device::Device;
use ferrite_serve::waker::Waker;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::rig::config;
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::Store;

/// Serves disks with threads of this process.
pub struct InProcess {
    pub loopback: Arc<Loopback>,
    /// The disks whose removal the daemon has requested.
    pub removed: Mutex<Vec<DiskId>>,
}

impl Serving for InProcess {
    fn serve(
        &self,
        disk: &Assignment<'_>,
        store: &mut Store,
        stop: &Waker,
    ) -> Result<Outcome, Failure> {
        let why = |e: &dyn std::fmt::Display| Failure { why: e.to_string(), help: "-".to_owned() };
        let options = OpenOptions {
            wait_for_lock: Some(PATIENCE),
            state_dir: Some(disk.run_dir().join("images")),
            qemu_first: disk.qemu_first,
            ..OpenOptions::default()
        };
        let opened = Disk::open(&disk.image.name(), &options).map_err(|e| why(&e))?;
        let device = Arc::new(Device::new(opened, SystemClock::shared()));
        disk.set_keeper(std::process::id(), None, None);
        disk.set_served();
        let paths = DiskPaths::new(DomId(disk.id.domid), disk.id.devid);
        let mut config = config(&paths, disk.run_dir().join(disk.id.file_name()));
        config.follow.attached = disk.attached.clone();
        let outcome = serve(store, &*self.loopback, &device, &config, stop).map_err(|e| why(&e))?;
        if outcome == Outcome::Stopped {
            close(&device, &config.engine).map_err(|e| why(&e))?;
        }
        Ok(outcome)
    }

    fn serve_beside(
        &self,
        _: &Assignment<'_>,
        _: DiskId,
        _: &mut Store,
        _: &Waker,
    ) -> Result<Outcome, Failure> {
        Err(Failure { why: "there is no keeper here".to_owned(), help: "-".to_owned() })
    }

    fn part(&self, _: DiskId, _: DiskId) -> Result<(), Failure> {
        Ok(())
    }

    fn remove(&self, disk: DiskId) {
        self.removed.lock().unwrap().push(disk);
    }

    fn remove_older(&self, _: DiskId) -> Result<(), Failure> {
        Ok(())
    }

    fn kept_disks(&self) -> Vec<DiskId> {
        Vec::new()
    }
}
