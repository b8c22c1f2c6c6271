//! The largest VHD, with every block allocated: the time to open it.

use super::super::Setup;
use super::super::result::{Measurement, Target};
use super::super::rounds::Plan;
use super::{PART, file};
use anyhow::{Context, Result};
use ferrite_xenhost::steps::{self, step};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

/// A block of 2 MiB with its bitmap, and the space that aligns its data to 4096 bytes.
const BLOCK_SECTORS: u64 = 4096 + 8;

/// Measures the time of opening, and the memory of the process.
pub(super) fn open(setup: &Setup, dir: &Path) -> Result<Vec<Measurement>> {
    let image = file(dir, "huge.vhd");
    step("make a full VHD of 2,040 GiB, sparse", || {
        let mut command = Command::new(setup.ferrite.program());
        steps::output(command.args(["image", "create", &image, "2040G"]))?;
        fill_table(&image)
    })?;
    let run = || setup.ferrite.bench(&image, "--depth 1");
    let rounds = Plan::new("disk: a full VHD of 2,040 GiB").add("open", run).run(setup.runs)?;
    let ms = rounds.each(|r| r.of("open").open_us / 1000.0);
    let mib = rounds.each(|r| r.of("open").idle_rss_kib / 1024.0);
    let row = |name, unit, values: &[f64], most| {
        Measurement::of_runs(PART, name, unit, values).target(Target::AtMost(most))
    };
    Ok(vec![
        row("disk, opening a full VHD of 2,040 GiB", "ms", &ms, 100.0),
        row("disk, resident with it open and connected", "MiB", &mib, 16.0),
    ])
}

/// Gives every block of an empty dynamic VHD a place without data: a sparse file of full size, which takes no space.
/// The footer is written to the new end.
fn fill_table(path: &str) -> Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let number = |at: u64, bytes: usize| -> Result<u64> {
        let mut buf = [0; 8];
        file.read_exact_at(&mut buf[8 - bytes..], at)?;
        Ok(u64::from_be_bytes(buf))
    };
    let header = number(16, 8)?;
    let (table, entries) = (number(header + 16, 8)?, number(header + 28, 4)?);
    let end = file.metadata()?.len();
    let mut footer = [0; 512];
    file.read_exact_at(&mut footer, 0)?;
    let first = end.next_multiple_of(4096) / 512 + 7;
    let place = |i: u64| u32::try_from(first + i * BLOCK_SECTORS).context("too large for a VHD");
    let bat: Vec<u8> =
        (0..entries).map(|i| Ok(place(i)?.to_be_bytes())).collect::<Result<Vec<_>>>()?.concat();
    file.write_all_at(&bat, table)?;
    file.write_all_at(&footer, (first + entries * BLOCK_SECTORS) * 512)?;
    Ok(())
}
