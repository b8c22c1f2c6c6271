//! Instructions of a request of the export's own code, by valgrind: those of its queue's thread, beside those of a queue of a
//! Xen ring with copied data. The front end is a simulated one, and takes the same steps each time.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use ferrite_loopback::vhost::{Ask, Driver, FrontEnd, Guest};
use ferrite_xenhost::release;
use ferrite_xenhost::steps::say;
use tempfile::TempDir;

use super::super::instructions::{Images, by_ring, number};
use super::super::result::{Measurement, Target};
use super::super::rounds::{Plan, Sample};
use super::{PART, Process};

/// Requests of a step, and the steps of the short run and of the longer one.
const DEPTH: u16 = 32;
const STEPS: (u32, u32) = (200, 1000);
/// Entries of the ring: three for each request.
const ENTRIES: u16 = 128;
/// The sectors of a request.
const SECTORS: u64 = 8;
/// The most instructions a request, as a part of those of a Xen ring.
const MOST: f64 = 1.0;

/// A row for each kind of image.
pub(super) fn rows(rounds: u32) -> Result<Vec<Measurement>> {
    // The same code on every machine, whatever its processor supports.
    let ferrite = release::build_ferrite()?.file;
    let bench = ferrite.with_file_name("ferrite-bench");
    let images = Images::make(&ferrite)?;
    let mut rows = Vec::new();
    for (name, image) in images.all() {
        let title = format!("{name}, 4 KiB randread, depth 32: instructions a request");
        let rounds = Plan::new(&title)
            .add("vhost", || by_vhost(&ferrite, &image))
            .add("ring", || by_ring(&bench, &image, &[]))
            .run(rounds)?;
        let of = |name: &str| rounds.each(|round| round.of(name).instructions);
        say(format!("  by vhost-user {:.0?}, by a Xen ring {:.0?}", of("vhost"), of("ring")));
        let row = Measurement::of_runs(PART, title, "", &of("vhost"));
        rows.push(row.against_runs("Xen ring by copy", &of("ring")).target(Target::AtMost(MOST)));
    }
    Ok(rows)
}

/// A short and a longer run differ only in the number of requests: beginning and end are in both.
fn by_vhost(ferrite: &Path, image: &str) -> Result<Sample> {
    let [short, long] = [count(ferrite, image, STEPS.0)?, count(ferrite, image, STEPS.1)?];
    // The queue's thread is the one that most of the work is in.
    let more = |(thread, total): (&String, &u64)| {
        total.saturating_sub(short.get(thread).copied().unwrap_or_default())
    };
    let most = long.iter().map(more).max().context("valgrind wrote no total")?;
    ensure!(most > 0, "the longer run has no more instructions than the shorter one");
    let requests = f64::from(STEPS.1 - STEPS.0) * f64::from(DEPTH);
    Ok(Sample { instructions: most as f64 / requests, ..Sample::UNKNOWN })
}

/// The instructions of each thread of an export, by the number that valgrind gives it.
fn count(ferrite: &Path, image: &str, steps: u32) -> Result<BTreeMap<String, u64>> {
    let dir = TempDir::new().context("cannot make a folder for the counts")?;
    let (socket, log) = (dir.path().join("vhost.sock"), dir.path().join("log"));
    let counts = dir.path().join("counts");
    fs::create_dir(&counts)?;
    // On one processor no queue polls.
    let mut command = Command::new("taskset");
    command.args(["--cpu-list", &processor()?.to_string(), "valgrind", "--tool=callgrind"]);
    command.args(["--quiet", "--fair-sched=yes", "--separate-threads=yes"]);
    command.arg(format!("--callgrind-out-file={}", counts.join("counts").display()));
    command.arg(ferrite).args(["export", "vhost-user", image, "--engine", "aio", "--queues", "1"]);
    command.arg("--socket").arg(&socket);
    let mut server = Process::start(&mut command, &log)?;
    server.listens(&socket, &log)?;
    // The front end panics where the export does not do what it has to.
    let drove = std::thread::scope(|scope| scope.spawn(|| drive(&socket, steps)).join());
    ensure!(drove.is_ok(), "the front end has stopped: {}", fs::read_to_string(&log)?);
    server.end()?;
    let mut totals = BTreeMap::new();
    for file in fs::read_dir(&counts)? {
        let file = file?;
        let thread = file.file_name().to_string_lossy().into_owned();
        if let Some(total) = number(&fs::read_to_string(file.path())?, ("\ntotals: ", "\n")) {
            totals.insert(thread, total as u64);
        }
    }
    let said = fs::read_to_string(&log).unwrap_or_default();
    ensure!(!totals.is_empty(), "valgrind wrote no totals: {said}");
    Ok(totals)
}

/// A processor that this process may run on.
fn processor() -> Result<usize> {
    let allowed = rustix::thread::sched_getaffinity(None)?;
    (0..rustix::thread::CpuSet::MAX_CPU)
        .find(|cpu| allowed.is_set(*cpu))
        .context("there is no processor")
}

/// Random reads of 4 KiB, so many steps of them.
fn drive(socket: &Path, steps: u32) {
    let front = FrontEnd::connect(socket);
    let guest = Guest::new(Driver::memory_bytes(1, ENTRIES));
    let features = front.agree(0);
    front.give(&guest);
    let mut driver = Driver::new(&guest, 0, ENTRIES, features);
    driver.indirect = true;
    assert!(front.start(&driver, 0), "the queue starts");
    let blocks = (super::super::instructions::IMAGE_MIB as u64) << 8;
    let mut seed = 1u64;
    for _ in 0..steps {
        let heads: Vec<u16> = (0..usize::from(DEPTH))
            .map(|slot| {
                seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let block = (seed >> 33) % blocks;
                driver.prepare(slot, &Ask::read(block * SECTORS, 4096))
            })
            .collect();
        driver.step(&heads);
        for slot in 0..usize::from(DEPTH) {
            assert_eq!(driver.status(slot), 0, "a read succeeds");
        }
    }
    front.stop(0);
}
