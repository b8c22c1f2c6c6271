//! A disk that is parked and exchanged while a guest works, and backends that are killed at every step: the guest sees
//! pauses. No error, no lost or wrong byte, no request without an answer.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferrite_disk::{Disk, DiskIdentity, Session};
use ferrite_io::engines::test_engine;
use ferrite_loopback::CopyWith;
use ferrite_loopback::front::FrontOptions;
use ferrite_serve::blkif::inflight::ImageName;
use ferrite_serve::blkif::lifecycle::TABLE;
use ferrite_serve::path::device::{Device, Successor};
use ferrite_testkit::{PATIENCE, images, scale};
use rustix::process::{Signal, getpid, kill_process};

use ferrite_testkit::processes::{RUN_DIR, World, be_a_backend, env, open, under_load};

/// The steps of a change: a backend may be killed before one.
const STEPS: [&str; 4] = ["park", "close", "open", "go on"];

/// The point of a backend's death, as `STEP ROUND`; without it the backend parks and does not die.
const DIES: &str = "FERRITE_TEST_DIES";
/// The image that replaces the disk, once; without it, the image stays.
const NEXT: &str = "FERRITE_TEST_NEXT";
/// The steps of such an exchange. A backend killed before one of them is followed by one with the old image. In `named`
/// only the table knows which image it is, and after that it is the new one.
const EXCHANGE: [&str; 7] = ["park", "close", "make", "open", "go on", "named", "gone on"];
const NAMED: &str = "named";
/// How often a backend parks.
const ROUNDS: &str = "FERRITE_TEST_ROUNDS";

/// Not a test: the backend, if this program was started again with that environment.
#[test]
fn process_backend() {
    be_a_backend(|device, image, counters| match std::env::var(NEXT) {
        Ok(next) => {
            // Before it serves, the table is not up to date.
            while counters.counts().requests == 0 {
                std::thread::sleep(Duration::from_micros(200));
            }
            exchange(device, image, next.as_ref());
        }
        Err(_) => park_again_and_again(device, image),
    });
}

/// The file of a backend's pauses.
fn report_in(run_dir: &Path) -> PathBuf {
    run_dir.join("pauses")
}

fn die() {
    kill_process(getpid(), Signal::KILL).unwrap();
}

/// Closes a disk for good.
fn close(disk: Disk) {
    let engine = |arena| test_engine().open(arena, 32);
    Session::new(Arc::new(disk), engine).unwrap().close().unwrap();
}

/// Dies when the frontends are told of an image, after some of them.
struct DiesNamed;

impl Successor for DiesNamed {
    fn serves(&self, _: &DiskIdentity) {
        die();
    }
}

/// Exchanges the disk once, at a random time, and dies before the given step.
fn exchange(device: &Arc<Device>, image: &Path, next: &Path) {
    let dies = std::env::var(DIES).unwrap_or_default();
    let step = |step: &str| {
        if dies == step {
            die();
        }
    };
    let heir = Arc::new(DiesNamed);
    if dies == NAMED {
        device.add_successor(&heir);
    }
    std::thread::sleep(Duration::from_micros(u64::from(std::process::id()) * 997 % 40_000));
    step("park");
    let (disk, away) = device.park(PATIENCE).unwrap();
    step("close");
    close(disk);
    step("make");
    images::make_next(image, next);
    step("open");
    let disk = open(next);
    step("go on");
    away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
    if dies == NAMED {
        // The queues were not told.
        std::process::exit(2);
    }
    // Its guest is writing, or has not begun.
    std::thread::sleep(Duration::from_micros(u64::from(std::process::id()) * 991 % 40_000));
    step("gone on");
}

fn park_again_and_again(device: &Arc<Device>, image: &Path) {
    let rounds: usize = std::env::var(ROUNDS).unwrap_or_default().parse().unwrap_or(0);
    let dies = std::env::var(DIES).unwrap_or_default();
    let mut pauses = Vec::new();
    for round in 0..rounds {
        let step = |step: &str| {
            if dies == format!("{step} {round}") {
                die();
            }
        };
        step("park");
        let start = Instant::now();
        let (disk, away) = device.park(PATIENCE).unwrap();
        step("close");
        // A disk that is put back unchanged, one that was closed, and one that was left as by a death.
        let disk = match round % 3 {
            0 => disk,
            1 => {
                close(disk);
                step("open");
                open(image)
            }
            _ => {
                drop(disk);
                step("open");
                open(image)
            }
        };
        step("go on");
        away.go_on_with(disk).map_err(|refused| refused.unfit).unwrap();
        pauses.push(start.elapsed());
        std::thread::sleep(Duration::from_micros(500 * (round as u64 % 5)));
    }
    pauses.sort_unstable();
    if let [.., longest] = pauses[..] {
        let at = |percent: usize| pauses[(pauses.len() - 1) * percent / 100];
        let report = format!("median {:?}, p99 {:?}, longest {longest:?}", at(50), at(99));
        std::fs::write(report_in(env(RUN_DIR).as_ref()), report).unwrap();
    }
}

/// Kills backends before each step, in each kind of round; the last one parks `rounds` times.
fn parked_under_load(world: World, rounds: usize, seed: u64) {
    let options = FrontOptions { queues: 2, max_indirect: 64, ..FrontOptions::default() };
    under_load(world, options, seed, |world, _| {
        for step in STEPS {
            for round in 3..6 {
                // A disk that is put back is not opened.
                if (step, round % 3) == ("open", 0) {
                    continue;
                }
                let dies = format!("{step} {round}");
                let mut child = world.spawn_with(&[(DIES, &dies), (ROUNDS, "100")]);
                assert_eq!(child.wait().unwrap().signal(), Some(9), "{dies}");
            }
        }
        let rounds = rounds.to_string();
        let last = world.spawn_with(&[(ROUNDS, &rounds)]);
        let (report, end) = (report_in(world.run_dir()), Instant::now() + 10 * PATIENCE);
        while !report.exists() {
            assert!(Instant::now() < end, "{rounds} rounds take too long");
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("{rounds} pauses: {}", std::fs::read_to_string(&report).unwrap());
        last
    });
}

/// The image that the table names.
fn named(world: &World) -> PathBuf {
    ImageName::open(&world.run_dir().join(TABLE)).unwrap().unwrap().get().path.into()
}

/// A backend with this image ends with a reason.
fn is_refused(world: &World, image: &Path) {
    let served = world.image();
    world.serve_from(image.to_owned());
    let mut child = world.spawn();
    assert_eq!(child.wait().unwrap().code(), Some(101), "{} is served", image.display());
    world.serve_from(served);
}

/// Kills backends before each step of an exchange for another image. Each time the next one serves the image in the
/// table: the old image before the exchange, and the new one after it.
fn exchanged_under_load(world: World, extension: &str, rounds: usize, seed: u64) {
    let options = FrontOptions { queues: 2, max_indirect: 64, ..FrontOptions::default() };
    under_load(world, options, seed, |world, _| {
        for (round, step) in (0..rounds).flat_map(|round| EXCHANGE.map(|step| (round, step))) {
            let old = world.image();
            let next = old.with_file_name(format!("next-{round}-{step}.{extension}"));
            let to = [(DIES, step), (NEXT, next.to_str().unwrap())];
            let mut child = world.spawn_with(&to);
            assert_eq!(child.wait().unwrap().signal(), Some(9), "{step}");
            let serves = named(world);
            match step {
                NAMED => assert!([&old, &next].contains(&&serves), "{serves:?}"),
                "gone on" => assert_eq!(serves, next),
                _ => assert_eq!(serves, old),
            }
            let other = if serves == old { next } else { old };
            if other.exists() {
                is_refused(world, &other);
            }
            if serves == world.image() {
                // The prepared image, without writes.
                let _ = std::fs::remove_file(&other);
                // Its parent was made read-only for it.
                std::fs::set_permissions(&serves, Permissions::from_mode(0o600)).unwrap();
            }
            world.serve_from(serves);
        }
        world.spawn()
    });
}

#[test]
fn after_an_exchange_for_another_image_that_one_is_served_and_before_it_the_old_one() {
    let rounds = scale() as usize;
    exchanged_under_load(World::new(CopyWith::Memcpy), "img", rounds, 30);
    for (i, format) in ["vhd", "qcow2"].into_iter().enumerate() {
        exchanged_under_load(World::with_format(format), format, rounds, 31 + i as u64);
    }
}

#[test]
fn a_disk_that_is_exchanged_at_any_moment_is_a_pause() {
    parked_under_load(World::new(CopyWith::Memcpy), 40 * scale() as usize, 1);
}

#[test]
fn images_that_are_exchanged_at_any_moment_have_what_was_answered() {
    for (i, format) in images::FORMATS.into_iter().enumerate() {
        parked_under_load(World::with_format(format), 40 * scale() as usize, 10 + i as u64);
    }
}
