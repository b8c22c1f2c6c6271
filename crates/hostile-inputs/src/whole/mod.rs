//! Whole files: images and journals, opened as a disk, read, and written to if the input asks for it.

mod journal;
mod recipe;
mod stage;

use std::path::Path;

use ferrite_disk::open_medium;
use ferrite_disk::pieces::{Found, Piece, look_in_spite};
use ferrite_disk::{
    Disk, DiskError, Extent, Format, OnDamage, OpenOptions, Port, ProblemKind, Session,
};
use ferrite_images::{qcow2, vhd};
use ferrite_io::pool::Pool;
use ferrite_io::reactor::Reactor;
use ferrite_io::scratch::Scratch;
use ferrite_simio::SimWorld;

pub(crate) use journal::journal;
pub use recipe::Recipe;
use stage::Stage;

/// The limits of the work with an image: mapped ranges, and bytes of a read.
const MAPPED_RANGES: usize = 48;
const READ_BYTES: usize = 4096;

/// A VHD and its parents.
pub(crate) fn vhd_image(input: &[u8]) {
    image(Format::Vhd, input);
}

/// A qcow2 image and its backing files.
pub(crate) fn qcow2_image(input: &[u8]) {
    image(Format::Qcow2, input);
}

fn image(format: Format, input: &[u8]) {
    let Some(recipe) = Recipe::decode(input) else { return };
    Stage::with(|stage| {
        stage.put_image(format, &recipe.file(format));
        let before = stage.fingerprint();
        let readable = opened(stage.open(format, true, None));
        check(stage, format, readable.is_some());
        let opens = readable.is_some();
        if let Some(disk) = readable {
            read_around(disk);
        }
        for on_damage in [OnDamage::Serve, OnDamage::Salvage] {
            let damaged = opened(stage.open_in_spite(format, on_damage));
            assert!(
                damaged.is_some() || !opens,
                "an image that opens is refused if it may be damaged"
            );
            if let Some(disk) = damaged {
                look_around(&disk);
                read_around(disk);
            }
        }
        // Opening for writing and dropping writes nothing, either.
        let writable = opened(stage.open(format, false, None));
        assert_eq!(stage.fingerprint(), before, "opening or reading has changed a file");
        if let Some(disk) = writable.filter(|_| recipe.writes()) {
            let parents = stage.parents();
            write_around(disk);
            assert_eq!(stage.parents(), parents, "a parent was written to");
            let again = stage.open(format, true, None);
            read_around(again.expect("an image that was closed in good order opens again"));
        }
        if recipe.repairs() {
            repair(stage, format);
        }
    });
}

/// An image that opens, or an error with a text.
fn opened(result: Result<Disk, DiskError>) -> Option<Disk> {
    match result {
        Ok(disk) => Some(disk),
        Err(e) => {
            let text = format!("{e} {}", e.help());
            assert!(!e.why().is_empty() && !e.help().is_empty() && text.len() < 16 << 10, "{text}");
            None
        }
    }
}

fn session(disk: Disk) -> Session {
    let world = SimWorld::new(1);
    Session::new(disk.into(), |arena| Ok(world.engine(arena))).expect("a session")
}

/// An image with unusable damage must not open.
fn check(stage: &Stage, format: Format, opens: bool) {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let raw = open_medium(&stage.path(format), &options).expect("a regular file");
    // All reasons, and those that make the image unusable.
    let (all, fatal): (Vec<String>, Vec<String>) = match format {
        Format::Vhd => {
            use vhd::Problem::{Footers, Header, Overlap, Place};
            look(&stage.path(format));
            let Ok(report) = vhd::check(&raw) else { return };
            let fatal = |f: &&vhd::Finding| matches!(f.problem, Footers | Header | Place | Overlap);
            let fatal = report.findings.iter().filter(fatal).map(|f| f.why.clone()).collect();
            (report.findings.into_iter().map(|f| f.why).collect(), fatal)
        }
        _ => {
            let Ok(report) = qcow2::check(&raw) else { return };
            let fatal = |f: &&qcow2::Finding| f.problem == qcow2::Problem::Header;
            let fatal = report.findings.iter().filter(fatal).map(|f| f.why.clone()).collect();
            (report.findings.into_iter().map(|f| f.why).collect(), fatal)
        }
    };
    assert!(!opens || fatal.is_empty(), "it opens, and the check says {fatal:?}");
    assert!(all.iter().all(|why| !why.is_empty() && why.len() < 4096));
}

/// Reads a VHD as the stand-in of vhd-util does.
fn look(path: &Path) {
    for from_copy in [false, true] {
        let Ok(seen) = vhd::Seen::read(path, from_copy) else { continue };
        let _ = (seen.tables(), seen.locators(), seen.parent_name(), seen.parent_path());
        let (table, bytes) = (seen.allocated(), seen.used_bytes());
        assert_eq!(table.is_ok(), bytes.is_ok(), "{table:?} {bytes:?}");
        if let (Ok(Some(table)), Ok(bytes)) = (table, bytes) {
            assert_eq!(table.end + 512, bytes);
        }
        let _ = (seen.used_bytes_at_once(), vhd::SeenVolume::read(path, 0));
    }
    for ignored in [false, true] {
        let how = vhd::Verify {
            ignore_footer: ignored,
            ignore_parent: ignored,
            ignore_times: ignored,
            overlaps: !ignored,
        };
        let report = vhd::verify(path, how);
        let found = report.map(|report| report.findings).unwrap_or_default();
        assert!(found.iter().all(|f| !f.why.is_empty() && f.why.len() < 4096));
    }
}

/// A repair repairs everything that it can, and a second one finds nothing more.
fn repair(stage: &Stage, format: Format) {
    let Ok(raw) = open_medium(&stage.path(format), &OpenOptions::default()) else { return };
    let pool = Pool::with_scratch(1 << 20, 1, 256 << 10).expect("memory");
    let mut reactor = Reactor::new(SimWorld::new(1).engine(pool.arena().clone()));
    let files = raw.files().into_iter().map(|f| reactor.add_file(f).expect("a file")).collect();
    let scratch = Scratch::new(pool.arena().clone(), pool.scratch(0));
    let port = Port { io: reactor.io(), files, scratch };
    let left = |mendable: bool, why: &str| {
        assert!(!mendable, "still to be mended after a repair: {why}");
    };
    match format {
        Format::Vhd => {
            let done = reactor.block_on(vhd::repair(&port, &raw)).expect("a reactor");
            let before = done.ok().filter(|r| r.findings.iter().all(|f| f.problem.is_mendable()));
            if let (Some(_), Ok(after)) = (before, vhd::check(&raw)) {
                after.findings.iter().for_each(|f| left(f.problem.is_mendable(), &f.why));
            }
        }
        _ => {
            let done = reactor.block_on(qcow2::repair(&port, &raw)).expect("a reactor");
            let before = done.ok().filter(|r| r.findings.iter().all(|f| f.problem.is_mendable()));
            if let (Some(_), Ok(after)) = (before, qcow2::check(&raw)) {
                after.findings.iter().for_each(|f| left(f.problem.is_mendable(), &f.why));
            }
        }
    }
}

/// Maps the whole disk, range by range, and reads some of each.
fn read_around(disk: Disk) {
    let mut session = session(disk);
    let end = session.disk().sectors() * 512;
    let files = session.disk().files().len();
    // From the beginning, and again from later places, where tables end.
    for start in [0, end / 3, end.saturating_sub(64 << 10)].map(whole_sectors) {
        let mut at = start;
        for _ in 0..MAPPED_RANGES / 3 {
            if at >= end {
                break;
            }
            let extent = session.disk().map(at, end - at);
            let (Extent::Data { len, .. } | Extent::Zeros { len } | Extent::Slow { len }) = extent;
            assert!(len > 0 && len <= end - at, "{extent:?} at {at} of {end}");
            if let Extent::Data { file, offset, len } = extent {
                assert!(file < files && offset.checked_add(len).is_some(), "{extent:?}");
            }
            let piece = len.min(READ_BYTES as u64) as usize;
            let mut bytes = vec![0xEE; piece];
            if session.read(at, &mut bytes).is_err() {
                // The data are lost: invalid metadata, or a truncated file.
                at += piece as u64;
                continue;
            }
            at += match extent {
                Extent::Slow { .. } => piece as u64,
                Extent::Data { .. } | Extent::Zeros { .. } => len,
            };
        }
    }
}

/// Finds the places of a damaged disk, as its salvage does.
fn look_around(disk: &Disk) {
    let end = disk.sectors() * 512;
    let mut at = 0;
    let world = SimWorld::new(1);
    let pool = Pool::with_scratch(1 << 20, 1, 256 << 10).expect("memory");
    let mut reactor = Reactor::new(world.engine(pool.arena().clone()));
    let files = disk.files().into_iter().map(|f| reactor.add_file(f).expect("a file")).collect();
    let scratch = Scratch::new(pool.arena().clone(), pool.scratch(0));
    let port = Port { io: reactor.io(), files, scratch };
    for _ in 0..MAPPED_RANGES {
        if at >= end {
            break;
        }
        let found = reactor.block_on(look_in_spite(disk, &port, at, end - at)).expect("a reactor");
        let (Found::Piece(Piece { len, .. }) | Found::Damaged { len, .. }) =
            found.expect("no error but damage");
        assert!(len > 0 && len <= end - at, "{len} bytes at {at} of {end}");
        at += len;
    }
}

/// Writes to some ranges, and checks that they read the same.
fn write_around(disk: Disk) {
    let mut session = session(disk);
    let end = session.disk().sectors() * 512;
    for (i, at) in [0, whole_sectors(end / 2), end - 512].into_iter().enumerate() {
        let bytes = vec![i as u8 + 0xA0; READ_BYTES.min((end - at) as usize)];
        if session.write(at, &bytes).is_ok() {
            let mut read = vec![0; bytes.len()];
            let done = session.read(at, &mut read);
            assert!(done.is_ok() && read == bytes, "{at}: {done:?}, not what was written");
        }
    }
    let _ = session.flush();
    let _ = session.discard(0, (64 << 10).min(end));
    let _ = session.write_zeroes(0, 512.min(end));
    let _ = session.close();
}

fn whole_sectors(bytes: u64) -> u64 {
    bytes & !511
}
