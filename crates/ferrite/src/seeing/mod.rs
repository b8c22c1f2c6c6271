//! Statistics of the disks that are served on this host.

pub(crate) mod args;
pub(crate) mod stat;
mod table;
pub(crate) mod top;
pub(crate) mod trace;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use ferrite_seeing::folder::{Folder, Sample};
use ferrite_seeing::rates::Rates;
use ferrite_serve::blkif::lifecycle::run_dir_name;

use crate::disk::pause::{PausedDisk, paused_disks};
use crate::disk::vbd;
use crate::exit::{Code, Failure};
use crate::guests::Names;
use crate::plain::one_line;
use crate::vdev::Vbd;

/// Reads the counters repeatedly: what each disk has done since the last reading.
struct Watch {
    folder: Folder,
    /// Only these disks; empty: all.
    wanted: Vec<Vbd>,
    before: BTreeMap<String, Sample>,
    names: Names,
}

/// One reading.
struct Look {
    rates: Vec<Rates>,
    /// Problems, each of which is reported once.
    problems: Vec<String>,
}

impl Watch {
    fn new(args: &args::Watched) -> Result<Watch, Failure> {
        let wanted = args.disks.iter().map(|disk| disk.find()).collect::<Result<_, _>>()?;
        let folder = Folder::new(&args.stats);
        Ok(Watch { folder, wanted, before: BTreeMap::new(), names: Names::default() })
    }

    fn look(&mut self) -> Result<Look, Failure> {
        let seen = self.folder.look().map_err(|e| self.cannot(e))?;
        self.names.refresh();
        let mut now = BTreeMap::new();
        let mut rates = Vec::new();
        for sample in seen.disks {
            let file = &sample.snapshot.disk;
            let Ok(disk) = file.parse::<Vbd>() else { continue };
            if self.wanted.is_empty() || self.wanted.contains(&disk) {
                let between = Rates::between(self.before.get(file), &sample);
                rates.push(Rates { name: self.names.disk(disk), ..between });
                now.insert(file.clone(), sample);
            }
        }
        self.before = now;
        Ok(Look { rates, problems: seen.problems })
    }

    fn cannot(&self, e: io::Error) -> Failure {
        let what = format!("cannot look at {}", self.folder.path().display());
        Failure::new(what, e, "counters of guests' disks are for root")
    }

    /// The disks that are paused, of those that were asked for. The daemon's folder has their states beside the counters.
    fn paused(&self) -> Vec<PausedDisk> {
        let run = self.folder.path().parent().unwrap_or(Path::new("."));
        let mut paused = paused_disks(run, &self.names);
        paused.retain(|it| self.wanted.is_empty() || self.wanted.contains(&vbd(it.disk)));
        paused
    }

    /// The disks that were asked for and have no counters.
    fn missing(&self, look: &Look) -> Vec<String> {
        let name = |disk: &Vbd| run_dir_name(disk.domain, disk.device);
        let there = |disk: &&Vbd| look.rates.iter().any(|rates| rates.disk == name(disk));
        let missing = self.wanted.iter().filter(|disk| !there(disk));
        missing.map(|disk| self.names.disk(*disk)).collect()
    }

    fn is_missing(&self, names: &[String]) -> Failure {
        let what = format!("{} cannot be shown", names.join(", "));
        let why = format!("there are no counters of it in {}", self.folder.path().display());
        let help =
            "a disk has counters from its guest's first connection on; ferrite stat shows all";
        Failure::new(what, why, help).with_code(Code::NOT_FOUND)
    }
}

/// Reports problems on standard error. A closed standard error is no reason to end.
fn tell(problems: &[String]) {
    use io::Write as _;
    let mut stderr = io::stderr().lock();
    for problem in problems {
        let _ = writeln!(stderr, "ferrite: {}; it is skipped", one_line(problem));
    }
}
