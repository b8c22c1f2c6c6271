//! A guest whose disk driver is the upstream Linux blkfront.

use crate::XenHost;
use crate::channel::{Output, escape, quote};
use anyhow::{Context, Result, bail};
use std::time::Instant;

/// The virtualisation of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    /// Without hardware virtualisation.
    #[default]
    Pv,
    /// With hardware virtualisation, on a host that has [`Processor::Amd`](crate::qemu::Processor).
    Pvh,
    /// As PVH, with firmware and a device model: it boots from its disk.
    Hvm,
}

/// The properties of a guest; blkfront's parameters decide its connection to the backend.
#[derive(Clone, Copy, Debug)]
pub struct GuestOptions {
    /// The virtualisation.
    pub kind: Kind,
    /// Virtual processors; Linux asks for one queue for each, up to `queues`.
    pub vcpus: u32,
    /// blkfront's `max_queues`.
    pub queues: Option<u32>,
    /// blkfront's `max_ring_page_order`.
    pub ring_order: Option<u32>,
    /// blkfront's `max_indirect_segments`; up to 11 means no indirect requests.
    pub indirect: Option<u32>,
    /// Its memory without that for its disks, in MiB.
    pub base_mib: u32,
    /// Whether it reads the host's time stamp counter itself, so that its times compare with dom0's. To Xen an emulated
    /// host's counter is not reliable, so without this each look at a PVH or HVM guest's clock is an exit: half of such a
    /// guest's time. On real hosts it is none.
    pub host_time: bool,
}

impl Default for GuestOptions {
    /// An unmodified guest with two processors.
    fn default() -> Self {
        GuestOptions {
            kind: Kind::Pv,
            vcpus: 2,
            queues: None,
            ring_order: None,
            indirect: None,
            base_mib: GUEST_MEMORY_MIB,
            host_time: false,
        }
    }
}

impl GuestOptions {
    /// An unmodified PVH guest, whose clock is as quick as on a real host.
    pub fn pvh() -> Self {
        GuestOptions { kind: Kind::Pvh, host_time: true, ..GuestOptions::default() }
    }

    /// An unmodified HVM guest, with one processor, whose clock is as quick as on a real host.
    pub fn hvm() -> Self {
        GuestOptions { kind: Kind::Hvm, vcpus: 1, host_time: true, ..GuestOptions::default() }
    }

    /// The guest's configuration for the toolstack.
    fn config(&self, name: &str, arguments: &str, disks: &[String]) -> String {
        let kind = match self.kind {
            Kind::Pv => "pv",
            Kind::Pvh => "pvh",
            Kind::Hvm => "hvm",
        };
        let boots = match self.kind {
            // With the default IDE disk no guest booted within three minutes.
            Kind::Hvm => {
                "boot=\"c\"\nhdtype=\"ahci\"\nvga=\"none\"\nnographic=1\nvnc=0\nusb=0\n".to_owned()
            }
            _ => format!(
                "kernel=\"/boot/guest-vmlinuz\"\nramdisk=\"/lab/guest.img\"\n\
                 extra=\"{arguments}\"\n"
            ),
        };
        let time = if self.host_time { "tsc_mode=\"native\"\n" } else { "" };
        let reboot = if disks.is_empty() { "destroy" } else { "restart" };
        let disks = disks.iter().map(|disk| format!("'{disk}'")).collect::<Vec<_>>().join(",");
        format!(
            "name=\"{name}\"\ntype=\"{kind}\"\n{boots}{time}memory={}\nvcpus={}\ndisk=[{disks}]\n\
             on_poweroff=\"destroy\"\non_reboot=\"{reboot}\"\non_crash=\"destroy\"\n",
            self.memory_mib(),
            self.vcpus,
        )
    }

    fn module_parameters(&self) -> String {
        let given = [
            ("max_queues", self.queues),
            ("max_ring_page_order", self.ring_order),
            ("max_indirect_segments", self.indirect),
        ];
        let set = given.iter().filter_map(|(name, value)| Some(format!("{name}={}", (*value)?)));
        set.collect::<Vec<_>>().join(",")
    }

    /// With persistent grants blkfront has a page for each segment of each slot of its rings: a gigabyte for two of the
    /// largest rings.
    fn memory_mib(&self) -> u32 {
        let slots = self.queues.unwrap_or(self.vcpus) * (32 << self.ring_order.unwrap_or(0));
        let segments = self.indirect.unwrap_or(32).max(11) + 1;
        self.base_mib + slots * segments / 256
    }
}

/// Memory of a guest without that for its disks; with less memory its kernel boots faster.
const GUEST_MEMORY_MIB: u32 = 256;
/// The most processor time of the emulator, in seconds, from a guest's start to its agent. The clock of a busy machine
/// does not distinguish a slow guest from one that hangs. 4 s when nothing else runs, ten times that on a machine with
/// ten times the work.
const START_LIMIT_CPU_S: f64 = 180.0;
/// The limit by the clock: a guest that hangs takes almost no processor time.
const START_LIMIT_S: u64 = 600;
/// The time limit of the toolstack for making a guest: with a device model it takes 15 s.
const CREATE_LIMIT_S: u64 = 180;
/// How long one of dom0's commands waits for the guest.
const START_CHECK_S: u64 = 30;

/// Messages of blkfront about a breach of the protocol by the backend, or a failed request.
const BLKFRONT_COMPLAINTS: &[&str] = &[
    "disabled for further use",
    "blkfront: xvd.*error",
    "vbd.*xenbus_dev_error",
    "backed has not unmapped grant",
    "attempting to free an in use",
];

/// A guest, running or paused.
#[derive(Clone, Debug)]
pub struct Guest {
    name: String,
    domid: u32,
    tty: String,
    log: String,
    next_id: u64,
    /// Bytes of the console's log that have been read.
    seen: usize,
    /// The offset of its last boot in the log.
    starts_at: usize,
}

/// The ways in which a guest becomes another domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow {
    /// By a reboot.
    Booted,
    /// From a file.
    Restored,
    /// By a migration from another host, which may be the same one.
    Migrated,
}

/// A command that runs in a guest concurrently.
#[derive(Debug)]
#[must_use]
pub struct Job {
    id: String,
    command: String,
    limit_s: u64,
    /// The offset in the console's log from which its answer is searched.
    from: usize,
}

impl Guest {
    /// Makes a guest without a disk and leaves it paused.
    pub fn create(xenhost: &mut XenHost, options: &GuestOptions) -> Result<Guest> {
        Self::create_with(xenhost, options, &[])
    }

    /// Makes a guest with disks that the toolstack attaches, in its own words, and leaves it paused. Such a guest may
    /// reboot.
    pub fn create_with(
        xenhost: &mut XenHost,
        options: &GuestOptions,
        disks: &[String],
    ) -> Result<Guest> {
        let name = xenhost.next_guest();
        let config = options.config(&name, &kernel_arguments(xenhost, options), disks);
        let mut guest = Guest {
            domid: 0,
            tty: String::new(),
            log: format!("/var/log/xen/console/guest-{name}.log"),
            name,
            next_id: 1,
            seen: 0,
            starts_at: 0,
        };
        let name = &guest.name;
        xenhost.sh_for(
            &format!(
                "printf %s {} >/tmp/{name}.cfg && xl create -p -q /tmp/{name}.cfg",
                quote(&config)
            ),
            CREATE_LIMIT_S,
        )?;
        guest.find(xenhost)?;
        Ok(guest)
    }

    /// Finds the guest's domain by its name, and its console.
    fn find(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let name = &self.name;
        let found = xenhost.sh(&format!(
            "id=$(xl domid {name}) && tty=$(xenstore-read /local/domain/$id/console/tty) && \
             stty -F $tty raw -echo && echo $id $tty"
        ))?;
        let last = found.lines().last().unwrap_or_default();
        let (domid, tty) = last.split_once(' ').with_context(|| format!("odd answer: {found}"))?;
        self.domid = domid.parse().with_context(|| format!("odd domain id: {found}"))?;
        tty.clone_into(&mut self.tty);
        Ok(())
    }

    /// Continues with the guest as another domain, after `how` has made it one: a reboot, a restore. The log of a
    /// restored domain begins anew or continues the old one, depending on the domain's name when its console is opened.
    pub fn follow(&mut self, xenhost: &mut XenHost, how: Follow) -> Result<()> {
        let old = self.domid;
        let name = &self.name;
        xenhost.wait_until(
            "the guest as another domain",
            &format!(
                "id=$(xl domid {name}) && [ $id != {old} ] && \
                 xenstore-exists /local/domain/$id/console/tty"
            ),
            CREATE_LIMIT_S,
        )?;
        match how {
            Follow::Booted => self.starts_at = self.seen,
            Follow::Restored => {}
            Follow::Migrated => {
                self.log = format!("/var/log/xen/console/guest-{name}--incoming.log");
                self.seen = 0;
            }
        }
        self.find(xenhost)
    }

    /// Makes a guest without a disk and waits until it accepts commands.
    pub fn start(xenhost: &mut XenHost, options: &GuestOptions) -> Result<Guest> {
        let mut guest = Self::create(xenhost, options)?;
        guest.unpause(xenhost)?;
        guest.wait_ready(xenhost)?;
        Ok(guest)
    }

    /// The domain's number.
    pub fn domid(&self) -> u32 {
        self.domid
    }

    /// The domain's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets a paused guest run.
    pub fn unpause(&self, xenhost: &mut XenHost) -> Result<()> {
        xenhost.sh(&format!("xl unpause {}", self.domid)).map(drop)
    }

    /// Waits until the guest accepts commands.
    pub fn wait_ready(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let (began, began_cpu_s) = (Instant::now(), xenhost.cpu_s());
        let patience = xenhost.pace().patience();
        loop {
            let begin = self.starts_at;
            let console = xenhost.dom0(&read_to(&self.log, begin, "@@ready"), START_CHECK_S)?;
            if console.status == 0 {
                self.seen = begin + console.stdout.len();
                return Ok(());
            }
            let (elapsed_s, cpu_s) = (began.elapsed().as_secs(), xenhost.cpu_s() - began_cpu_s);
            if cpu_s > START_LIMIT_CPU_S * f64::from(patience)
                || elapsed_s > START_LIMIT_S * u64::from(patience)
            {
                bail!(
                    "guest {} did not come up in {elapsed_s} s, of which the emulator ran for \
                     {cpu_s:.0} s:\n{}",
                    self.name,
                    self.standstill(xenhost)
                );
            }
        }
    }

    /// The end of the guest's console, and the domains.
    fn console(&self, xenhost: &mut XenHost) -> String {
        let command = format!("tail -n 60 {}; xl list", self.log);
        xenhost.dom0(&command, 20).map_or_else(|error| error.to_string(), |output| output.stdout)
    }

    /// The state of a guest that does not answer, in few lines: its disks, its processors, and the end of its console,
    /// where its kernel is made to list waiting tasks.
    fn standstill(&self, xenhost: &mut XenHost) -> String {
        let (domid, log) = (self.domid, &self.log);
        let command = format!(
            "d=/local/domain/{domid}/device/vbd; for n in $(xenstore-list $d 2>/dev/null); do \
             echo \"disk $n: frontend $(xenstore-read $d/$n/state), backend \
             $(xenstore-read $(xenstore-read $d/$n/backend)/state)\"; done; xl vcpu-list {domid}; \
             echo 'its console ends:'; tail -n 6 {log}; \
             for key in 9 w; do xl sysrq {domid} $key; sleep 2; done"
        );
        xenhost.dom0(&command, 40).map_or_else(|error| error.to_string(), |output| output.stdout)
    }

    /// The domain and its console, as evidence for a failure.
    pub fn describe(&self, xenhost: &mut XenHost) -> String {
        format!("guest {}:\n{}\n", self.name, self.console(xenhost).trim_end())
    }

    /// A shell line for dom0 that gives a command to the guest, and the job.
    fn submit(&mut self, command: &str, limit_s: u64) -> (String, Job) {
        // The nanoseconds make a marker that no output has by chance.
        let salt = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.subsec_nanos());
        let id = format!("{}-{salt:08x}", self.next_id);
        self.next_id += 1;
        let line = format!("{id} {}", escape(command));
        let send = format!("printf '%s\\n' {} >{}", quote(&line), self.tty);
        (send, Job { id, command: command.to_owned(), limit_s, from: self.seen })
    }

    /// Starts a shell command in the guest.
    pub fn begin(&mut self, xenhost: &mut XenHost, command: &str, limit_s: u64) -> Result<Job> {
        let (send, job) = self.submit(command, limit_s);
        xenhost
            .sh(&send)
            .with_context(|| format!("cannot reach the console of guest {}", self.name))?;
        Ok(job)
    }

    /// Waits for a command that was begun before.
    ///
    /// # Errors
    /// The guest does not answer within the command's time and a margin.
    pub fn finish(&mut self, xenhost: &mut XenHost, job: &Job) -> Result<Output> {
        self.collect(xenhost, "true", job)
    }

    /// Runs a shell command in the guest.
    pub fn run(&mut self, xenhost: &mut XenHost, command: &str, limit_s: u64) -> Result<Output> {
        let (send, job) = self.submit(command, limit_s);
        self.collect(xenhost, &send, &job)
    }

    /// Runs `before` in dom0, then reads the guest's console up to the job's end.
    fn collect(&mut self, xenhost: &mut XenHost, before: &str, job: &Job) -> Result<Output> {
        let end = format!("@@{} end", job.id);
        // A command that was begun before a migration ends in another log.
        let from = job.from.min(self.seen);
        let command = format!("{before}; {}", read_to(&self.log, from, &end));
        let console = xenhost.dom0(&command, job.limit_s + 10)?;
        match cut_answer(&console.stdout, &format!("@@{} ", job.id), &end) {
            Some(output) => {
                self.seen = self.seen.max(from + console.stdout.len());
                Ok(output)
            }
            None => bail!(
                "guest {} did not answer to `{}` in {} s:\n{}",
                self.name,
                job.command,
                job.limit_s,
                self.standstill(xenhost)
            ),
        }
    }

    /// Waits for a command that must succeed; returns its trimmed output.
    pub fn finish_ok(&mut self, xenhost: &mut XenHost, job: &Job) -> Result<String> {
        let output = self.finish(xenhost, job)?;
        self.expect_success(xenhost, &job.command, &output)
    }

    /// Runs a shell command in the guest that must succeed; returns its trimmed output.
    pub fn sh(&mut self, xenhost: &mut XenHost, command: &str, limit_s: u64) -> Result<String> {
        let output = self.run(xenhost, command, limit_s)?;
        self.expect_success(xenhost, command, &output)
    }

    fn expect_success(
        &mut self,
        xenhost: &mut XenHost,
        command: &str,
        output: &Output,
    ) -> Result<String> {
        if output.status != 0 {
            let kernel = self.kernel_log(xenhost, 15).unwrap_or_else(|error| error.to_string());
            bail!(
                "guest {}: `{command}` ended with {}:\n{}\nkernel log:\n{}",
                self.name,
                output.status,
                output.stdout.trim_end(),
                kernel
            );
        }
        Ok(output.stdout.trim().to_owned())
    }

    /// The last lines of the guest's kernel log.
    pub fn kernel_log(&mut self, xenhost: &mut XenHost, lines: u32) -> Result<String> {
        Ok(self.run(xenhost, &format!("dmesg | tail -n {lines}"), 20)?.stdout)
    }

    /// The messages of blkfront about its disks.
    pub fn blkfront_log(&mut self, xenhost: &mut XenHost) -> Result<String> {
        let output = self.run(xenhost, "dmesg | grep -E 'blkfront|vbd|xvd' | cut -c1-300", 20)?;
        Ok(output.stdout.trim().to_owned())
    }

    /// Fails if blkfront has complained about the backend.
    pub fn check_blkfront(&mut self, xenhost: &mut XenHost) -> Result<()> {
        let pattern = BLKFRONT_COMPLAINTS.join("|");
        let command = format!("dmesg | grep -E {}", quote(&pattern));
        let output = self.run(xenhost, &command, 30)?;
        match output.status {
            1 => Ok(()),
            0 => bail!("blkfront complained in guest {}:\n{}", self.name, output.stdout.trim()),
            other => bail!("cannot read the kernel log of guest {}: status {other}", self.name),
        }
    }

    /// Ends the guest at once, as `xl destroy` does.
    pub fn destroy(&self, xenhost: &mut XenHost) -> Result<()> {
        xenhost.sh_for(&format!("xl destroy {}", self.domid), 90).map(drop)
    }
}

/// The arguments of a guest's kernel, from the toolstack or the boot loader.
pub(crate) fn kernel_arguments(xenhost: &XenHost, options: &GuestOptions) -> String {
    format!(
        "console=hvc0 rdinit=/init quiet panic=-1 {} lab.blkfront={}",
        xenhost.pace().linux_arguments(),
        options.module_parameters()
    )
}

/// A shell line for dom0 that prints the console's log from a byte on, up to the line that begins with `marker`. tail
/// ends once sed has closed the pipe.
fn read_to(log: &str, from: usize, marker: &str) -> String {
    let log = quote(log);
    format!(
        "until [ -e {log} ]; do sleep 0.1; done; tail -c +{} -f {log} | sed '/^{marker}/q'",
        from + 1
    )
}

/// The part of a console between the two markers, and the status in the first.
fn cut_answer(console: &str, begin: &str, end: &str) -> Option<Output> {
    let start = console.rfind(begin)?;
    // The marker at the end of an answer begins like the one at its beginning: take the one before.
    let start =
        if console[start..].starts_with(end) { console[..start].rfind(begin)? } else { start };
    let (status, rest) = console[start + begin.len()..].split_once('\n')?;
    let stdout = &rest[..rest.rfind(end)?];
    let stdout = stdout.strip_suffix('\n').unwrap_or(stdout);
    Some(Output { status: status.trim().parse().ok()?, stdout: stdout.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_cut_out_of_the_console() {
        let console = "boot\n@@ready\n@@1-a 0\nold\n@@1-a end\n@@2-b 3\ntwo\nlines\n\n@@2-b end\n";
        let output = cut_answer(console, "@@2-b ", "@@2-b end").expect("an answer");
        assert_eq!(output, Output { status: 3, stdout: "two\nlines\n".into() });
        assert_eq!(cut_answer(console, "@@3-c ", "@@3-c end"), None);
    }

    #[test]
    fn only_given_parameters_reach_the_module() {
        let options = GuestOptions { ring_order: Some(4), indirect: Some(0), ..Default::default() };
        assert_eq!(options.module_parameters(), "max_ring_page_order=4,max_indirect_segments=0");
        assert_eq!(GuestOptions::default().module_parameters(), "");
    }
}
