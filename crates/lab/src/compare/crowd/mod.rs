//! Many guests of one Xen host, each with a disk of its own in memory, in the emulator's counting mode.

mod aggregate;
mod persistent;

use anyhow::{Context as _, Result, bail};
use ferrite_xenhost::disk::{Backend, Disk, DiskOptions};
use ferrite_xenhost::guest::{Guest, GuestOptions, Job};
use ferrite_xenhost::qemu::{Hardware, Pace};
use ferrite_xenhost::steps::{say, step};
use ferrite_xenhost::{XenHost, packages, release, root};

pub(super) use aggregate::run as aggregate;
pub(super) use persistent::run as persistent;

/// Memory of a guest with one disk: small, so that many of them fit.
const GUEST_MIB: u32 = 128;
/// Memory of the emulated machine, for fifteen guests.
const HOST_MIB: u32 = 4 << 10;
/// Size of each guest's disk.
const DISK_MIB: u32 = 16;
/// Rounds in which the load is measured, each so long, in seconds of the emulated machine.
const ROUNDS: usize = 3;
const ROUND_S: f64 = 0.1;
/// Reports before the rounds: the first covers all time, and during the next some guests may still begin.
const EARLY: usize = 2;
/// How often the activity of a crowd is checked.
const TRIES: u32 = 20;
const LIMIT_S: u64 = 600;

/// The rate of all guests together, in a round.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Rate {
    iops: f64,
    bytes_s: f64,
}

/// A host with guests.
struct Crowd {
    xenhost: XenHost,
    guests: Vec<Guest>,
    disks: Vec<Disk>,
    /// The load of each guest, while there is one.
    loads: Vec<Job>,
    /// The number of guests, from the first on, that are not paused.
    running: usize,
}

impl Crowd {
    /// Boots a host for the largest of these numbers of guests.
    fn boot(counts: &[u32]) -> Result<Crowd> {
        let guests = counts.last().copied().unwrap_or(1);
        packages::ensure(&[packages::XEN_HOST])?;
        let (root, programs) = (root::ensure(root::TRIXIE)?, [release::build_ferrite()?]);
        let hardware =
            Hardware { pace: Pace::Instructions, host_mib: HOST_MIB, ..Hardware::default() };
        let mut xenhost = XenHost::boot_at(hardware, &root, &programs, &[])?;
        let make = format!(
            "modprobe brd rd_nr={guests} rd_size={} && \
             for n in $(seq 0 {}); do head -c {DISK_MIB}M /dev/zero | tr '\\0' f >/dev/ram$n; done",
            DISK_MIB << 10,
            guests - 1
        );
        step("disks in memory", || xenhost.sh_for(&make, 300))?;
        let options = GuestOptions { vcpus: 1, base_mib: GUEST_MIB, ..GuestOptions::default() };
        let start = |n: u32| {
            let what = format!("start guest {n} of {guests}");
            step(&what, || Guest::start(&mut xenhost, &options))
        };
        let guests: Vec<Guest> = (1..=guests).map(start).collect::<Result<_>>()?;
        let running = guests.len();
        Ok(Crowd { xenhost, guests, disks: Vec::new(), loads: Vec::new(), running })
    }

    /// Attaches a disk to each guest, whose front keeps its pages granted or does not.
    fn attach(&mut self, mover: &str, front: bool) -> Result<()> {
        let Crowd { xenhost, guests, disks, .. } = self;
        let keep = format!("echo {front} >/sys/module/xen_blkfront/parameters/feature_persistent");
        let keep = keep.replace("true", "Y").replace("false", "N");
        for (n, guest) in guests.iter_mut().enumerate() {
            guest.sh(xenhost, &keep, LIMIT_S)?;
            let mut options = DiskOptions::new(&format!("/dev/ram{n}"), "xvda");
            options.arguments = format!("--mover {mover}");
            disks.push(Disk::attach(xenhost, guest, Backend::Ferrite, options)?);
        }
        for (disk, guest) in disks.iter().zip(guests) {
            disk.wait_connected(xenhost)?;
            let there = format!("until [ -b {} ]; do sleep 0.1; done", disk.node());
            guest.sh(xenhost, &there, LIMIT_S)?;
        }
        Ok(())
    }

    /// Detaches the disks.
    fn detach(&mut self) -> Result<()> {
        self.disks.drain(..).try_for_each(|mut disk| disk.unplug(&mut self.xenhost))
    }

    /// Starts fio with these options in all guests, until [`stop`](Self::stop). The guests are paused meanwhile: a
    /// running one would take the processor that dom0 needs to start the next.
    fn begin(&mut self, load: &str) -> Result<()> {
        let fio = format!(
            "fio --name=load --filename=/dev/xvda --ioengine=libaio --direct=1 --thread --time_based \
             --runtime=1h {load} >/tmp/fio.log 2>&1; true"
        );
        self.let_run(0)?;
        for guest in &mut self.guests {
            self.loads.push(guest.begin(&mut self.xenhost, &fio, LIMIT_S)?);
        }
        Ok(())
    }

    /// Resumes the first `count` guests, and pauses the others. Xen counts how often a guest is paused.
    fn let_run(&mut self, count: usize) -> Result<()> {
        let (verb, guests) = match count < self.running {
            true => ("pause", &self.guests[count..self.running]),
            false => ("unpause", &self.guests[self.running..count]),
        };
        let line = |guest: &Guest| format!("xl {verb} {} && ", guest.domid());
        let command = guests.iter().map(line).collect::<String>() + "true";
        self.running = count;
        self.xenhost.sh_for(&command, LIMIT_S).map(drop)
    }

    /// The rate of the first `count` guests together, a value per round, while the others are paused.
    fn rates(&mut self, count: u32) -> Result<Vec<Rate>> {
        let count = count as usize;
        self.let_run(count)?;
        let look = format!("ferrite stat --json -i {ROUND_S} -n {}", ROUNDS + EARLY);
        for _ in 0..TRIES {
            let reports = self.xenhost.sh_for(&look, LIMIT_S)?;
            let rounds = reports.lines().skip(EARLY).map(|line| together(line, count));
            if let Some(rates) = rounds.collect::<Result<Option<Vec<Rate>>>>()? {
                return Ok(rates);
            }
        }
        let log = self.guests[count - 1].sh(&mut self.xenhost, "cat /tmp/fio.log", LIMIT_S)?;
        bail!("not all of {count} guests do something; of the last one: {log}")
    }

    /// Stops the load of the guests, one after the other.
    fn stop(&mut self) -> Result<()> {
        self.let_run(0)?;
        for (job, guest) in self.loads.drain(..).zip(&mut self.guests) {
            guest.unpause(&mut self.xenhost)?;
            self.running += 1;
            guest.sh(&mut self.xenhost, "killall fio; true", LIMIT_S)?;
            guest.finish_ok(&mut self.xenhost, &job)?;
        }
        Ok(())
    }
}

/// The sum of a report of `ferrite stat`; `None` if fewer disks were active.
fn together(report: &str, disks: usize) -> Result<Option<Rate>> {
    let odd = || format!("odd report: {report}");
    let report: serde_json::Value = serde_json::from_str(report).with_context(odd)?;
    let all = report["disks"].as_array().with_context(odd)?;
    let of = |name: &str| {
        let values = all.iter().map(|disk| disk["read"][name].as_f64().with_context(odd));
        values.collect::<Result<Vec<f64>>>()
    };
    let (iops, bytes_s) = (of("per_s")?, of("bytes_per_s")?);
    let busy = iops.iter().filter(|iops| **iops > 0.0).count();
    let rate = Rate { iops: iops.iter().sum(), bytes_s: bytes_s.iter().sum() };
    Ok((busy == disks).then_some(rate))
}

/// Prints the result, and returns it.
fn said(what: &str, rates: Vec<Rate>) -> Vec<Rate> {
    let iops: Vec<f64> = rates.iter().map(|rate| rate.iops.round()).collect();
    let mib_s =
        rates.iter().map(|rate| rate.bytes_s).sum::<f64>() / rates.len() as f64 / 1_048_576.0;
    say(format!("  {what}: {iops:?} IOPS, {mib_s:.0} MiB/s"));
    rates
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_counts_when_as_many_disks_have_done_something() {
        let disk =
            |iops: f64| format!(r#"{{"read":{{"per_s":{iops},"bytes_per_s":{}}}}}"#, iops * 512.0);
        let report =
            format!(r#"{{"schema":1,"disks":[{},{},{}]}}"#, disk(2.0), disk(0.0), disk(3.5));
        let sum = Rate { iops: 5.5, bytes_s: 2816.0 };
        assert_eq!(together(&report, 2).unwrap(), Some(sum));
        assert_eq!(together(&report, 3).unwrap(), None);
        assert!(together("{\"disks\":[{}]}", 1).is_err());
    }
}
