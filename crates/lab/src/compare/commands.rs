//! Compares `ferrite image` with qemu-img: the same commands on the same images.

use super::Setup;
use super::image;
use super::result::{Measurement, Target};
use super::rounds::{Plan, Sample};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::steps::{self, step};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

const PART: &str = "commands";
const MIB: u64 = 1 << 20;
/// The size of the images that are not thin.
const DISK: u64 = 1024 * MIB;
/// The unit of the fragmented images: a cluster of qcow2.
const CLUSTER: u64 = 64 << 10;

/// The formats: the name's extension, and qemu-img's name.
const FORMATS: [(&str, &str); 3] = [("raw", "raw"), ("vhd", "vpc"), ("qcow2", "qcow2")];

/// The content of the images.
#[derive(Clone, Copy, PartialEq)]
enum Case {
    /// Every block is written.
    Full,
    /// Every other 4 MiB is written.
    HalfEmpty,
    /// Every other 64 KiB is written, in random order: no two neighbours of the disk are neighbours in the file.
    Fragmented,
    /// A MiB in each of 64 places of 32 GiB is written.
    Thin,
}

impl Case {
    const ALL: [Case; 4] = [Case::Full, Case::HalfEmpty, Case::Fragmented, Case::Thin];

    fn name(self) -> &'static str {
        match self {
            Case::Full => "full",
            Case::HalfEmpty => "half-empty",
            Case::Fragmented => "fragmented",
            Case::Thin => "thin",
        }
    }

    fn bytes(self) -> u64 {
        if self == Case::Thin { 32 * DISK } else { DISK }
    }

    /// The writes: their places and lengths, in their order.
    fn writes(self) -> Vec<(u64, u64)> {
        let every =
            |step: u64, len: u64| (0..self.bytes() / step).map(|i| (i * step, len)).collect();
        match self {
            Case::Full => every(MIB, MIB),
            Case::HalfEmpty => every(8 * MIB, 4 * MIB),
            Case::Thin => every(512 * MIB, MIB),
            Case::Fragmented => {
                let mut all: Vec<(u64, u64)> = every(2 * CLUSTER, CLUSTER);
                // Each run has this order of writes: a multiplier that has no divisor in common with the number of writes.
                let count = all.len() as u64;
                all.sort_by_key(|(at, _)| (at / (2 * CLUSTER)).wrapping_mul(40_503) % count);
                all
            }
        }
    }
}

/// The commands that are compared. `None`: qemu-img has no such command for this format.
fn lines(command: &str, extension: &str, format: &str) -> Option<[Vec<String>; 2]> {
    let (ours, theirs) = match command {
        "info" | "map" => (
            format!("{command} --output=json a.{extension}"),
            format!("{command} --output=json -f {format} a.{extension}"),
        ),
        "check" if format == "qcow2" => {
            (format!("check a.{extension}"), format!("check -f {format} a.{extension}"))
        }
        "compare" => {
            let (other, of) = if format == "raw" { FORMATS[2] } else { FORMATS[0] };
            (
                format!("compare a.{extension} a.{other}"),
                format!("compare -T none -f {format} -F {of} a.{extension} a.{other}"),
            )
        }
        "convert" => {
            let (other, to) = if format == "raw" { FORMATS[2] } else { FORMATS[0] };
            (
                format!("convert a.{extension} ours.{other}"),
                format!("convert -T none -t none -f {format} -O {to} a.{extension} theirs.{other}"),
            )
        }
        _ => return None,
    };
    let words = |line: String| line.split(' ').map(str::to_owned).collect();
    Some([words(ours), words(theirs)])
}

/// Runs all measurements, in the build folder's file system.
pub(super) fn run(setup: &Setup) -> Result<Vec<Measurement>> {
    let parent = steps::target_dir().join("bench");
    let mut rows = Vec::new();
    for case in Case::ALL {
        let path = parent.join(format!("ferrite-bench-commands-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let set = Set { setup, case, dir: Folder(path) };
        step(&format!("make images: {}", case.name()), || set.make())?;
        for (extension, format) in FORMATS {
            for command in ["info", "map", "check", "compare", "convert"] {
                if let Some(lines) = lines(command, extension, format) {
                    rows.push(set.race(command, extension, lines)?);
                }
            }
        }
    }
    Ok(rows)
}

/// A folder of this program, removed at the end.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder that cannot be removed stays.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The images of a case: the same content in each format.
struct Set<'a> {
    setup: &'a Setup,
    case: Case,
    dir: Folder,
}

impl Set<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.0.join(name)
    }

    fn make(&self) -> Result<()> {
        if self.case == Case::Full {
            image::filled(&self.path("a.raw"), usize::try_from(DISK / MIB)?).map(drop)?;
            for (extension, _) in &FORMATS[1..] {
                self.image(&["convert", "a.raw", &format!("a.{extension}")])?;
            }
            return Ok(());
        }
        for (extension, format) in FORMATS {
            let name = format!("a.{extension}");
            self.image(&["create", &name, &self.case.bytes().to_string()])?;
            self.write(&name, format)?;
        }
        Ok(())
    }

    /// Runs `ferrite image`.
    fn image(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.setup.ferrite.program());
        steps::output(command.arg("image").args(arguments).current_dir(&self.dir.0))
    }

    fn write(&self, name: &str, format: &str) -> Result<()> {
        let mut script = String::new();
        for (i, (at, len)) in self.case.writes().iter().enumerate() {
            writeln!(script, "write -P {} {at} {len}", 1 + i % 255)?;
        }
        let path = self.path("script");
        fs::write(&path, script + "flush\n")?;
        let mut command = Command::new("qemu-io");
        command.args(["-f", format, name]).current_dir(&self.dir.0);
        let done = command.stdin(File::open(path)?).stdout(Stdio::null()).status()?;
        if !done.success() {
            bail!("qemu-io: {done}");
        }
        Ok(())
    }

    /// The time of a command, beside that of qemu-img.
    fn race(
        &self,
        command: &str,
        extension: &str,
        [ours, theirs]: [Vec<String>; 2],
    ) -> Result<Measurement> {
        let title = format!("{}, {extension}: {command}", self.case.name());
        let program = self.setup.ferrite.program();
        let rounds = Plan::new(title.clone())
            .add("ferrite", || self.timed(Command::new(program).arg("image").args(&ours)))
            .add("qemu-img", || self.timed(Command::new("qemu-img").args(&theirs)))
            .run(self.setup.runs)?;
        let ms = |of: &str| rounds.each(|r| 1e3 / r.of(of).iops);
        let most = match (command, self.case) {
            ("convert", Case::Full | Case::Fragmented) => 0.5,
            _ => 1.0,
        };
        let row = Measurement::of_runs(PART, title, "ms", &ms("ferrite"));
        Ok(row.against_runs("qemu-img", &ms("qemu-img")).target(Target::AtMost(most)))
    }

    /// Runs a program, in runs per second.
    fn timed(&self, command: &mut Command) -> Result<Sample> {
        for name in ["ours.raw", "ours.qcow2", "theirs.raw", "theirs.qcow2"] {
            remove(&self.path(name))?;
        }
        command.current_dir(&self.dir.0).stdout(Stdio::null());
        let began = Instant::now();
        let ended = command.status().with_context(|| format!("cannot start {command:?}"))?;
        let seconds = began.elapsed().as_secs_f64();
        if !ended.success() {
            bail!("{command:?}: {ended}");
        }
        Ok(Sample { iops: 1.0 / seconds, ..Sample::UNKNOWN })
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_fragmented_image_has_every_other_cluster_once_and_no_neighbours_in_order() {
        let writes = Case::Fragmented.writes();
        let places: BTreeSet<u64> = writes.iter().map(|(at, _)| *at).collect();
        let all: BTreeSet<u64> = (0..DISK).step_by(2 * CLUSTER as usize).collect();
        assert_eq!(places, all);
        let in_order = writes.windows(2).filter(|pair| pair[1].0 == pair[0].0 + 2 * CLUSTER);
        assert!(in_order.count() < writes.len() / 100);
    }
}
