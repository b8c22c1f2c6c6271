//! Tests on a real Xen host: an upstream Linux blkfront against the backend.

mod changes;
mod deaths;
mod devices;
mod discard;
mod engines;
mod exported;
mod fenced;
mod filesystem;
mod fio;
mod full;
pub(crate) mod guests;
mod host;
mod hvm;
mod images;
pub(crate) mod krbd;
mod lifecycle;
mod media;
mod net;
mod nvme;
mod own_grants;
pub(crate) mod pooled;
mod pooled_lun;
mod processors;
mod recovery;
pub(crate) mod remotes;
mod runner;
mod shared;
mod store;
mod toolstack;
mod xapi;
mod xl;

pub(crate) use runner::{Selection, run};

use anyhow::{Context, Result, bail};
use ferrite_xenhost::XenHost;
use ferrite_xenhost::disk::{Backend, Disk, DiskOptions, ended};
use ferrite_xenhost::guest::{Follow, Guest, GuestOptions, Kind};
use ferrite_xenhost::qemu::Processor;
use ferrite_xenhost::steps;

/// The backends of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Applies {
    /// Any backend: the kernel's validates the test itself.
    Any,
    /// Features of Ferrite only.
    Ferrite,
}

/// The tests that run by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tests {
    /// The tests of each commit.
    OfCommits,
    /// All tests, as in the nightly run.
    All,
}

/// The tests of each commit: a guest of each kind, each process of a store's disk killed, and storage that is full.
/// All others are left to the night.
const OF_COMMITS: [&str; 7] = [
    "hvm/raw-boots-by-qemu-and-is-ours-when-the-driver-comes",
    "pvh/migrated-under-verify",
    "deaths/each-process-and-all-at-once-under-verify",
    "full/a-qcow2-fails-a-vhd-waits-and-other-guests-go-on",
    "fio/2-queues-order-4-indirect-256",
    "docs/the-first-disk-of-the-readme-as-printed",
    "host/grants-channels-and-xenstore",
];

/// One test.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    /// `group/name`.
    pub(crate) name: &'static str,
    applies: Applies,
    processor: Processor,
    run: fn(&mut Bench<'_>) -> Result<()>,
}

impl Case {
    /// Whether it is a test of each commit.
    fn is_of_commits(&self) -> bool {
        OF_COMMITS.contains(&self.name)
    }

    /// The test on a host that has PVH and HVM guests.
    const fn on_amd(self) -> Case {
        Case { processor: Processor::Amd, ..self }
    }
}

const fn any(name: &'static str, run: fn(&mut Bench<'_>) -> Result<()>) -> Case {
    Case { name, applies: Applies::Any, processor: Processor::Plain, run }
}

const fn ferrite(name: &'static str, run: fn(&mut Bench<'_>) -> Result<()>) -> Case {
    Case { applies: Applies::Ferrite, ..any(name, run) }
}

/// Every test, in the order in which they run: the longest first, so that two hosts end at about the same time.
pub(crate) fn all() -> Vec<Case> {
    [
        hvm::CASES,
        guests::CASES,
        fio::CASES,
        recovery::CASES,
        store::CASES,
        changes::CASES,
        xapi::CASES,
        deaths::CASES,
        full::CASES,
        images::CASES,
        engines::CASES,
        nvme::CASES,
        own_grants::CASES,
        filesystem::CASES,
        lifecycle::CASES,
        processors::CASES,
        toolstack::CASES,
        xl::CASES,
        exported::CASES,
        remotes::CASES,
        shared::CASES,
        fenced::CASES,
        pooled_lun::CASES,
        devices::CASES,
        media::CASES,
        net::CASES,
        discard::CASES,
        host::CASES,
    ]
    .concat()
}

/// The host of a test. It records what the test has made, to check and remove it afterwards.
pub(crate) struct Bench<'a> {
    /// The host.
    pub(crate) xenhost: &'a mut XenHost,
    /// The backend of the disks.
    pub(crate) backend: Backend,
    guests: Vec<Guest>,
    disks: Vec<Disk>,
    images: u32,
    /// The process of `ferrite daemon`.
    daemon: Option<u32>,
    /// Guests that were started again, since the host had hung.
    started_again: u32,
}

impl<'a> Bench<'a> {
    pub(crate) fn new(xenhost: &'a mut XenHost, backend: Backend) -> Bench<'a> {
        Bench {
            xenhost,
            backend,
            guests: Vec::new(),
            disks: Vec::new(),
            images: 0,
            daemon: None,
            started_again: 0,
        }
    }

    /// Makes a sparse image of `mib` MiB in dom0.
    fn image(&mut self, mib: u32) -> Result<String> {
        self.images += 1;
        let path = format!("/lab/image{}.raw", self.images);
        self.xenhost.sh(&format!("rm -f {path}; truncate -s {mib}M {path}"))?;
        Ok(path)
    }

    /// Makes a paused guest, so that its disks are there when it starts.
    fn paused_guest(&mut self, options: &GuestOptions) -> Result<Guest> {
        let guest = Guest::create(self.xenhost, options)?;
        self.guests.push(guest.clone());
        Ok(guest)
    }

    /// Attaches a disk to a guest, without waiting for the connection.
    fn attach(&mut self, guest: &Guest, options: DiskOptions) -> Result<Disk> {
        let disk = Disk::attach(self.xenhost, guest, self.backend, options)?;
        self.disks.push(disk.clone());
        Ok(disk)
    }

    /// Attaches a disk that another disk's process also serves.
    fn attach_beside(&mut self, guest: &Guest, options: DiskOptions) -> Result<Disk> {
        let disk = Disk::attach_beside(self.xenhost, guest, options)?;
        self.disks.push(disk.clone());
        Ok(disk)
    }

    /// Serves a disk whose directories the toolstack will write.
    fn serve(&mut self, guest: &Guest, options: DiskOptions) -> Result<Disk> {
        let disk = Disk::serve(self.xenhost, guest, options)?;
        self.disks.push(disk.clone());
        Ok(disk)
    }

    /// Plugs a disk into a running guest.
    fn plug(&mut self, guest: &mut Guest, options: DiskOptions) -> Result<Disk> {
        let disk = self.attach(guest, options)?;
        disk.wait_connected(self.xenhost)?;
        wait_for_node(self.xenhost, guest, &disk)?;
        Ok(disk)
    }

    /// Starts a guest with one disk, as a toolstack does. If the host hangs meanwhile, the guest is started once more.
    fn guest_with(&mut self, options: &GuestOptions, disk: DiskOptions) -> Result<(Guest, Disk)> {
        let stood = self.standstills(options)?;
        match self.try_guest_with(options, disk.clone()) {
            Err(error) if self.standstills(options)? > stood => {
                self.give_up_guest(&error)?;
                self.try_guest_with(options, disk)
            }
            done => done,
        }
    }

    /// How often the host has hung, if it is one that may.
    fn standstills(&mut self, options: &GuestOptions) -> Result<u32> {
        if options.kind == Kind::Pv { Ok(0) } else { self.xenhost.standstills() }
    }

    /// Removes the last guest, and its disk.
    fn give_up_guest(&mut self, error: &anyhow::Error) -> Result<()> {
        self.started_again += 1;
        steps::say(format!("the host stood still, the guest is started again: {error}"));
        if let Some(guest) = self.guests.pop() {
            guest.destroy(self.xenhost)?;
        }
        match self.disks.pop() {
            Some(mut disk) => disk.remove_after_destroy(self.xenhost),
            None => Ok(()),
        }
    }

    fn try_guest_with(
        &mut self,
        options: &GuestOptions,
        disk: DiskOptions,
    ) -> Result<(Guest, Disk)> {
        let mut guest = self.paused_guest(options)?;
        let disk = self.attach(&guest, disk)?;
        guest.unpause(self.xenhost)?;
        guest.wait_ready(self.xenhost)?;
        disk.wait_connected(self.xenhost)?;
        wait_for_node(self.xenhost, &mut guest, &disk)?;
        Ok((guest, disk))
    }

    /// Starts the daemon: it serves each disk that the toolstack attaches.
    pub(crate) fn start_daemon(&mut self) -> Result<()> {
        self.start_daemon_with("")
    }

    /// Starts the daemon with these tables of its configuration.
    pub(crate) fn start_daemon_with(&mut self, tables: &str) -> Result<()> {
        self.daemon = Some(self.xenhost.start_daemon(tables)?);
        Ok(())
    }

    /// Ends the daemon when all disks are gone; one that remains is an error.
    fn stop_daemon(&mut self) -> Result<()> {
        let Some(pid) = self.daemon.take() else { return Ok(()) };
        let gone = "[ -z \"$(ls /run/ferrite/disks)\" ]";
        let waited = self.xenhost.wait_until("the daemon's disks gone", gone, 60);
        self.xenhost.sh(&format!("kill -TERM {pid}"))?;
        self.xenhost.wait_until("the daemon's end", &ended(pid), 60)?;
        self.xenhost.sh(
            "rm -rf /etc/ferrite /run/ferrite/disks /run/ferrite/jobs /run/ferrite/names /run/ferrite/daemon.lock \
             /run/ferrite/control.sock /tmp/daemon.log",
        )?;
        waited
    }

    /// Starts a guest with a disk that xl attaches.
    fn guest_of_xl(&mut self, options: &GuestOptions, image: &str) -> Result<(Guest, Disk)> {
        let words = format!("format=raw,script=block-ferrite,access=w,target={image}");
        self.guest_of_words(options, image, &words, |_, _| Ok(()))
    }

    /// Starts a guest with a disk of another configuration. `early` is called when the guest has begun to boot.
    pub(crate) fn guest_of_words(
        &mut self,
        options: &GuestOptions,
        image: &str,
        words: &str,
        early: impl Fn(&mut Bench<'_>, &Disk) -> Result<()>,
    ) -> Result<(Guest, Disk)> {
        let stood = self.standstills(options)?;
        match self.try_guest_of_words(options, image, words, &early) {
            Err(error) if self.standstills(options)? > stood => {
                self.give_up_guest(&error)?;
                self.try_guest_of_words(options, image, words, &early)
            }
            done => done,
        }
    }

    fn try_guest_of_words(
        &mut self,
        options: &GuestOptions,
        image: &str,
        words: &str,
        early: impl Fn(&mut Bench<'_>, &Disk) -> Result<()>,
    ) -> Result<(Guest, Disk)> {
        let spec = format!("vdev=xvda,backendtype=tap,{words}");
        let mut guest = Guest::create_with(self.xenhost, options, &[spec])?;
        self.guests.push(guest.clone());
        let disk = Disk::of_toolstack(&guest, DiskOptions::new(image, "xvda"))?;
        self.disks.push(disk.clone());
        guest.unpause(self.xenhost)?;
        early(self, &disk)?;
        guest.wait_ready(self.xenhost)?;
        disk.wait_connected(self.xenhost)?;
        wait_for_node(self.xenhost, &mut guest, &disk)?;
        Ok((guest, disk))
    }

    /// Continues with a guest that has become another domain, with its disk.
    fn follow(&mut self, guest: &mut Guest, disk: &mut Disk, how: Follow) -> Result<()> {
        guest.follow(self.xenhost, how)?;
        disk.follow(guest);
        if how == Follow::Booted {
            guest.wait_ready(self.xenhost)?;
        }
        self.guests.retain(|other| other.name() != guest.name());
        self.guests.push(guest.clone());
        self.disks.push(disk.clone());
        disk.wait_connected(self.xenhost)?;
        wait_for_node(self.xenhost, guest, disk)
    }

    /// Starts a guest with a disk on a new image.
    fn guest_with_image(
        &mut self,
        options: &GuestOptions,
        image_mib: u32,
    ) -> Result<(Guest, Disk)> {
        let image = self.image(image_mib)?;
        self.guest_with(options, DiskOptions::new(&image, "xvda"))
    }

    /// Starts an unmodified guest with a disk on a new image.
    fn default_guest(&mut self, image_mib: u32) -> Result<(Guest, Disk)> {
        self.guest_with_image(&GuestOptions::default(), image_mib)
    }

    /// A guest that the test has destroyed.
    fn forget(&mut self, guest: &Guest) {
        self.guests.retain(|other| other.name() != guest.name());
    }

    /// Checks that blkfront in a running guest has not complained.
    fn check_guests(&mut self) -> Result<()> {
        for guest in &mut self.guests {
            let alive = self.xenhost.dom0(&format!("xl list {}", guest.domid()), 30)?.status == 0;
            if alive {
                guest.check_blkfront(self.xenhost)?;
            }
        }
        Ok(())
    }

    /// The evidence for a failed test besides the reason: the guests' consoles, logs and xenstore of the disks, dom0's
    /// kernel.
    fn evidence(&mut self) -> String {
        let mut text = String::new();
        for guest in &self.guests {
            text += &guest.describe(self.xenhost);
        }
        for disk in &self.disks {
            text += &disk.describe(self.xenhost);
        }
        let daemon = self.xenhost.dom0("tail -n 60 /tmp/daemon.log 2>/dev/null", 20);
        text += &daemon.map(|output| output.stdout).unwrap_or_default();
        let kernel = self.xenhost.dom0("dmesg | tail -n 8", 20).map(|output| output.stdout);
        text + "dom0's kernel:\n" + &kernel.unwrap_or_default() + "\n"
    }

    /// Removes all guests and disks; anything that remains is an error.
    fn clean_up(&mut self) -> Result<()> {
        // By the present list: guests become other domains.
        let destroy =
            "for id in $(xl list | awk 'NR > 2 {print $2}'); do xl destroy $id; done 2>&1; true";
        self.xenhost.sh_for(destroy, 180)?;
        self.xenhost
            .wait_until("every guest gone, no zombie", "[ $(xl list | wc -l) = 2 ]", 60)
            .with_context(|| "a domain stays: its memory is still in use")?;
        self.stop_daemon()?;
        // Backends end by themselves after their guests.
        let ended = self.xenhost.dom0(&format!("timeout 20 sh -c '{ENDED}'"), 30)?.status == 0;
        for disk in &mut self.disks {
            disk.sweep(self.xenhost)?;
        }
        let left = self.xenhost.sh(LEFT)?;
        self.xenhost
            .sh("for dir in /lab/full-*/; do mountpoint -q $dir && umount $dir; done; \
             rm -rf /lab/full-* /lab/image*.raw /lab/*.store /lab/*.save /tmp/backend-*.log /tmp/g*.cfg; rm -rf /run/ferrite; \
             xenstore-rm /local/domain/0/error 2>/dev/null; true")?;
        if !ended {
            bail!("a backend is still there when all guests are gone");
        }
        if !left.is_empty() {
            bail!("these are left when all disks are gone:\n{left}");
        }
        // The complaint precedes the trace, and its place is in the trace.
        let broken = "dmesg | grep -E -B8 -A24 'BUG:|Oops|general protection|Call Trace' | \
                      grep -vE '  \\? |^--$' | head -48 | grep .";
        let said = self.xenhost.dom0(broken, 30)?;
        if said.status == 0 {
            bail!("the dom0's kernel complained:\n{}", said.stdout.trim());
        }
        Ok(())
    }
}

/// Waits for the end of all backends.
const ENDED: &str = "while pgrep -x ferrite >/dev/null; do sleep 0.2; done";

/// Prints remains of disks (threats.md T22): files in memory, and errors in xenstore. The folders and the files of the
/// budgets belong to the host.
const LEFT: &str = "find /run/ferrite /dev/shm -mindepth 1 ! -path /run/ferrite/images \
     ! -path /run/ferrite/stats ! -path /run/ferrite/keepers ! -path /run/ferrite/empty ! -path /run/ferrite/stores \
     ! -path /run/ferrite/mirrors ! -path /run/ferrite/map-budget ! -path /run/ferrite/poll-budget \
     ! -path /run/ferrite/memory-budget \
     ! -path '/run/ferrite/processors*' 2>/dev/null; \
     find /run/blktap-control -mindepth 1 2>/dev/null; \
     xenstore-ls -f /local/domain/0/error/backend/vbd3 2>/dev/null; true";

/// Waits until the guest has made the disk's node.
fn wait_for_node(xenhost: &mut XenHost, guest: &mut Guest, disk: &Disk) -> Result<()> {
    let node = disk.node();
    guest
        .sh(xenhost, &format!("until [ -b {node} ]; do sleep 0.2; done"), 60)
        .map(drop)
        .with_context(|| format!("{node} does not appear in the guest"))
}

/// Fails with both values if they differ.
fn expect_eq<T: PartialEq + std::fmt::Debug>(what: &str, got: &T, want: &T) -> Result<()> {
    if got != want {
        bail!("{what}: {got:?} instead of {want:?}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tests_of_each_commit_exist() {
        let found = all().iter().filter(|case| case.is_of_commits()).count();
        assert_eq!(found, OF_COMMITS.len());
    }
}
