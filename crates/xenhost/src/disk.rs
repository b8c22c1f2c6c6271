//! Disks of guests: xenstore directories as a toolstack writes them, and their backends.

use crate::XenHost;
use crate::channel::quote;
use crate::guest::Guest;
use anyhow::{Result, bail};

/// The backend of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// `ferrite serve`, kind vbd3.
    Ferrite,
    /// The kernel's blkback, kind vbd: shows that a test passes with another backend.
    Blkback,
    /// QEMU's backend, kind qdisk, a process for each guest.
    Qdisk,
}

impl Backend {
    fn kind(self) -> &'static str {
        match self {
            Backend::Ferrite => "vbd3",
            Backend::Blkback => "vbd",
            Backend::Qdisk => "qdisk",
        }
    }
}

/// The options of a disk.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The image file or block device in dom0.
    pub image: String,
    /// The guest's name for it, xvda to xvdp.
    pub name: &'static str,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Further arguments of `ferrite serve`.
    pub arguments: String,
}

impl DiskOptions {
    /// A writable disk.
    pub fn new(image: &str, name: &'static str) -> DiskOptions {
        DiskOptions { image: image.into(), name, read_only: false, arguments: String::new() }
    }
}

/// A disk's place in xenstore, with its backend.
#[derive(Clone, Debug)]
pub struct Disk {
    options: DiskOptions,
    backend: Backend,
    domid: u32,
    devid: u32,
    /// The loop device of an image file: blkback accepts block devices only.
    device: Option<String>,
    /// The number of starts of the backend, which is part of its log's name.
    starts: u32,
    pid: Option<u32>,
}

/// The time limit of a backend's change of state.
const STATE_LIMIT_S: u64 = 60;

/// A shell condition: the process has ended. A zombie holds nothing.
pub fn ended(pid: u32) -> String {
    format!("! grep -qs '^State:[[:space:]]*[^ZX[:space:]]' /proc/{pid}/status")
}

/// The device number of xvda to xvdp: major 202, sixteen minors per disk.
fn devid(name: &str) -> Result<u32> {
    match name.strip_prefix("xvd").map(str::as_bytes) {
        Some([letter @ b'a'..=b'p']) => Ok((202 << 8) | (u32::from(letter - b'a') << 4)),
        _ => bail!("not a disk's name: {name}"),
    }
}

impl Disk {
    fn new(guest: &Guest, backend: Backend, options: DiskOptions) -> Result<Disk> {
        let devid = devid(options.name)?;
        let domid = guest.domid();
        Ok(Disk { options, backend, domid, devid, device: None, starts: 0, pid: None })
    }

    /// Writes the disk's directories and starts its backend, without waiting for the guest.
    pub fn attach(
        xenhost: &mut XenHost,
        guest: &Guest,
        backend: Backend,
        options: DiskOptions,
    ) -> Result<Disk> {
        let mut disk = Self::new(guest, backend, options)?;
        if backend == Backend::Blkback {
            disk.device = Some(disk.block_device(xenhost)?);
        }
        // The backend waits for its directory: either may come first.
        disk.start_backend(xenhost)?;
        disk.write_directories(xenhost)?;
        Ok(disk)
    }

    /// Writes the directories of a disk that another disk's process also serves: see [`Disk::of_serve`].
    pub fn attach_beside(
        xenhost: &mut XenHost,
        guest: &Guest,
        options: DiskOptions,
    ) -> Result<Disk> {
        let disk = Self::new(guest, Backend::Ferrite, options)?;
        disk.write_directories(xenhost)?;
        Ok(disk)
    }

    /// The arguments of `ferrite serve` for this disk. After the arguments of another one, one process serves both.
    pub fn of_serve(&self) -> String {
        format!("{} --xen {}/{}", quote(&self.options.image), self.domid, self.devid)
    }

    /// Starts `ferrite serve` for a disk whose directories the toolstack will write.
    pub fn serve(xenhost: &mut XenHost, guest: &Guest, options: DiskOptions) -> Result<Disk> {
        let mut disk = Self::new(guest, Backend::Ferrite, options)?;
        disk.start_backend(xenhost)?;
        Ok(disk)
    }

    /// A disk that the toolstack attaches, and that the daemon or another process serves.
    pub fn of_toolstack(guest: &Guest, options: DiskOptions) -> Result<Disk> {
        Self::new(guest, Backend::Ferrite, options)
    }

    /// Continues with the domain that the guest has become.
    pub fn follow(&mut self, guest: &Guest) {
        self.domid = guest.domid();
    }

    /// The disk's node in the guest.
    pub fn node(&self) -> String {
        format!("/dev/{}", self.options.name)
    }

    /// The image in dom0.
    pub fn image(&self) -> &str {
        &self.options.image
    }

    /// The frontend's directory.
    pub fn frontend(&self) -> String {
        format!("/local/domain/{}/device/vbd/{}", self.domid, self.devid)
    }

    /// The backend's directory.
    pub fn backend_dir(&self) -> String {
        format!("/local/domain/0/backend/{}/{}/{}", self.backend.kind(), self.domid, self.devid)
    }

    /// Writes both directories as libxl does: each owned by its end, readable by the other. The backend's state comes
    /// last: the kernel's backend takes a frontend without a state for a removed one.
    fn write_directories(&self, xenhost: &mut XenHost) -> Result<()> {
        let (front, back, domid) = (self.frontend(), self.backend_dir(), self.domid);
        let mode = if self.options.read_only { "r" } else { "w" };
        let mut write = format!(
            "xenstore-write {back}/frontend {front} {back}/frontend-id {domid} {back}/online 1 \
             {back}/removable 0 {back}/bootable 1 {back}/dev {} {back}/device-type disk \
             {back}/mode {mode} {back}/discard-enable 1",
            self.options.name
        );
        if let Some(device) = &self.device {
            write += &format!(
                " {back}/type phy {back}/params {device} {back}/physical-device \
                 $(stat -c %t:%T {device})"
            );
        } else if self.backend == Backend::Qdisk {
            let params = quote(&format!("aio:{}", self.options.image));
            write += &format!(" {back}/type qdisk {back}/params {params} {back}/direct-io-safe 0");
        } else {
            write += &format!(" {back}/type aio {back}/params {}", quote(&self.options.image));
        }
        xenhost
            .sh(&format!(
                "set -e; xenstore-write {front} '' {back} ''; \
             xenstore-chmod {front} n{domid} r0; xenstore-chmod {back} n0 r{domid}; {write}; \
             xenstore-write {front}/backend {back} {front}/backend-id 0 \
             {front}/virtual-device {} {front}/device-type disk {front}/trusted 1; \
             xenstore-write {front}/state 1; xenstore-write {back}/state 1",
                self.devid
            ))
            .map(drop)
    }

    /// The block device for blkback: the image itself or a loop device of it.
    fn block_device(&self, xenhost: &mut XenHost) -> Result<String> {
        let image = quote(&self.options.image);
        xenhost.sh(&format!(
            "if [ -b {image} ]; then echo {image}; else losetup --direct-io=on -f --show {image}; fi"
        ))
    }

    /// Starts the backend's process in the background; blkback is always running.
    pub fn start_backend(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let process = match self.backend {
            Backend::Blkback => return Ok(()),
            Backend::Ferrite => format!(
                "ferrite serve {} {} {}",
                self.of_serve(),
                xenhost.serve_arguments,
                self.options.arguments,
            ),
            // The command line of a toolstack.
            Backend::Qdisk => format!(
                "$(ls /usr/libexec/xen-qemu-system-i386 /usr/lib/xen-*/bin/qemu-system-i386 \
                 2>/dev/null | head -n 1) -xen-domid {} -xen-attach -name qdisk -machine xenpv \
                 -m 1 -nodefaults -no-user-config -display none -monitor none -serial none",
                self.domid
            ),
        };
        self.starts += 1;
        let log = self.log();
        let pid = xenhost.sh(&format!("setsid {process} </dev/null >{log} 2>&1 & echo $!"))?;
        self.pid = Some(pid.parse()?);
        Ok(())
    }

    /// The log of the backend's last start.
    fn log(&self) -> String {
        format!("/tmp/backend-{}-{}.{}.log", self.domid, self.devid, self.starts)
    }

    /// The logs of all its starts, as a shell pattern.
    fn logs(&self) -> String {
        format!("/tmp/backend-{}-{}.*.log", self.domid, self.devid)
    }

    /// The lines of the backend's log since its last start.
    pub fn backend_log(&self, xenhost: &mut XenHost) -> Result<String> {
        if self.backend == Backend::Blkback {
            return Ok(String::new());
        }
        Ok(xenhost.dom0(&format!("tail -n 60 {}", self.log()), 20)?.stdout)
    }

    /// The guest's domain.
    pub fn domid(&self) -> u32 {
        self.domid
    }

    /// The process that serves the disk.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Waits until both ends are connected.
    pub fn wait_connected(&self, xenhost: &mut XenHost) -> Result<()> {
        let condition = format!(
            "[ \"$(xenstore-read {}/state {}/state | tr '\\n' ' ')\" = '4 4 ' ]",
            self.backend_dir(),
            self.frontend()
        );
        self.wait(xenhost, "connecting", &condition)
    }

    /// Waits until the backend's state is `state`.
    pub fn wait_backend_state(&self, xenhost: &mut XenHost, state: u32) -> Result<()> {
        let condition = format!("[ \"$(xenstore-read {}/state)\" = {state} ]", self.backend_dir());
        self.wait(xenhost, &format!("backend state {state}"), &condition)
    }

    fn wait(&self, xenhost: &mut XenHost, what: &str, condition: &str) -> Result<()> {
        let Err(error) = xenhost.wait_until(what, condition, STATE_LIMIT_S) else { return Ok(()) };
        let (front, back) = (self.frontend(), self.backend_dir());
        let command = format!("for d in {front} {back}; do xenstore-read $d/state 2>&1; done");
        let states = xenhost.dom0(&command, 20).map_or_else(|e| e.to_string(), |o| o.stdout);
        let states = states.lines().collect::<Vec<_>>().join(", ");
        Err(error.context(format!(
            "{what} of {}; states of frontend and backend: {states}",
            self.options.name
        )))
    }

    /// The logs of the backend's starts and both directories, as evidence for a failure.
    pub fn describe(&self, xenhost: &mut XenHost) -> String {
        let (front, back, logs) = (self.frontend(), self.backend_dir(), self.logs());
        let command = format!(
            "tail -n 60 {logs} /dev/null; echo xenstore:; xenstore-ls -f {front}; xenstore-ls -f {back}"
        );
        let told = xenhost.dom0(&command, 20).map_or_else(|error| error.to_string(), |o| o.stdout);
        format!("backend of {}:\n{}\n", self.options.name, told.trim_end())
    }

    /// Unplugs as a toolstack does: writes online=0 and state=5, waits for 6, removes the directories.
    pub fn unplug(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let back = self.backend_dir();
        xenhost.sh(&format!("xenstore-write {back}/online 0 {back}/state 5"))?;
        if self.backend == Backend::Qdisk {
            // qdisk removes its directory itself, and its process belongs to the guest.
            self.wait(xenhost, "the backend's end", &format!("! xenstore-exists {back}/state"))?;
            self.forget(xenhost)?;
            return self.stop_backend(xenhost);
        }
        self.wait_backend_state(xenhost, 6)?;
        self.forget(xenhost)?;
        self.wait_backend_gone(xenhost)
    }

    /// Removes the directories and blkback's resources, without waiting.
    fn forget(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let (front, back) = (self.frontend(), self.backend_dir());
        xenhost.sh(&format!(
            "xenstore-rm {front} 2>/dev/null; xenstore-rm {back} 2>/dev/null; true"
        ))?;
        if let Some(device) = self.device.take() {
            xenhost.sh(&format!("case {device} in /dev/loop*) losetup -d {device};; esac"))?;
        }
        Ok(())
    }

    /// Waits until the serving process has ended by itself.
    pub fn wait_backend_gone(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let Some(pid) = self.pid.take() else { return Ok(()) };
        let condition = ended(pid);
        self.wait(xenhost, "the backend ending by itself", &condition)
    }

    /// Removes a disk whose guest has ended. Ferrite detects that itself; blkback needs the toolstack's steps. The
    /// directories of a disk that the toolstack has attached may be removed already.
    pub fn remove_after_destroy(&mut self, xenhost: &mut XenHost) -> Result<()> {
        match self.backend {
            Backend::Ferrite => self.wait_backend_gone(xenhost)?,
            Backend::Blkback | Backend::Qdisk => {
                let back = self.backend_dir();
                xenhost.sh(&format!("xenstore-write {back}/online 0 {back}/state 5"))?;
            }
        }
        let directory = format!("{}/state", self.backend_dir());
        let closed =
            format!("! xenstore-exists {directory} || [ \"$(xenstore-read {directory})\" = 6 ]");
        self.wait(xenhost, "the backend's end without its guest", &closed)?;
        // The daemon removes its state of the disk when the image is closed.
        let known = format!("! [ -e /run/ferrite/disks/vbd-{}-{}.json ]", self.domid, self.devid);
        self.wait(xenhost, "the daemon without the disk", &known)?;
        self.forget(xenhost)
    }

    /// Asks the serving process to end, as for an upgrade.
    pub fn stop_backend(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let Some(pid) = self.pid.take() else { bail!("no backend process to stop") };
        xenhost.sh(&format!("kill -TERM {pid}"))?;
        self.wait(xenhost, "the backend's end after SIGTERM", &ended(pid))
    }

    /// Removes the rest of the disk after its guest has ended, in any way.
    pub fn sweep(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let (front, back) = (self.frontend(), self.backend_dir());
        xenhost.sh(&format!(
            "if xenstore-exists {back}/state && [ \"$(xenstore-read {back}/state)\" != 6 ]; then \
             xenstore-write {back}/online 0 {back}/state 5; \
             for n in $(seq 50); do [ \"$(xenstore-read {back}/state)\" = 6 ] && break; sleep 0.1; \
             done; fi; xenstore-rm {front} 2>/dev/null; xenstore-rm {back} 2>/dev/null; \
             sleep 0.3; pkill -9 -x ferrite; losetup -D; true"
        ))
        .map(drop)
    }

    /// Kills the serving process as a crash would, and waits until it is reaped.
    pub fn crash_backend(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let Some(pid) = self.pid.take() else { bail!("no backend process to kill") };
        xenhost.sh(&format!("kill -9 {pid}"))?;
        xenhost.wait_until("the killed backend's end", &ended(pid), STATE_LIMIT_S)
    }

    /// A shell line that prints the process that serves a disk of the daemon.
    pub fn worker(&self) -> String {
        format!(
            "for pid in $(cat /proc/$(xenstore-read {}/kthread-pid)/task/*/children); do \
             grep -qxzE 'worker|store-worker' /proc/$pid/cmdline && echo $pid; done; true",
            self.backend_dir()
        )
    }

    /// Kills that process, and waits for its successor.
    pub fn kill_worker(&self, xenhost: &mut XenHost) -> Result<()> {
        let worker = self.worker();
        let old = xenhost.sh(&worker)?;
        xenhost.sh(&format!("kill -9 {old}"))?;
        let next = format!("new=$({worker}); [ -n \"$new\" ] && [ $new != {old} ]");
        self.wait(xenhost, "the next worker", &next)
    }

    /// Tells blkback that its medium has grown; Ferrite detects that itself.
    pub fn notice_growth(&self, xenhost: &mut XenHost) -> Result<()> {
        match &self.device {
            Some(device) => xenhost.sh(&format!("losetup -c {device}")).map(drop),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_names_give_the_numbers_linux_uses() {
        assert_eq!(devid("xvda").ok(), Some(51712));
        assert_eq!(devid("xvdb").ok(), Some(51728));
        assert!(devid("xvdaa").is_err());
        assert!(devid("sda").is_err());
    }
}
