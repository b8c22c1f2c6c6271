//! Statistics of the disks that are served on this host.

pub(crate) mod args;
pub(crate) mod stat;
mod table;
pub(crate) mod top;
pub(crate) mod trace;

use std::collections::BTreeMap;
use std::io;

use ferrite_seeing::folder::{Folder, Sample};
use ferrite_seeing::rates::Rates;

use crate::exit::{Code, Failure};
use crate::plain::one_line;

/// Reads the counters repeatedly: what each disk has done since the last reading.
struct Watch {
    folder: Folder,
    /// Only these disks; empty: all.
    wanted: Vec<String>,
    before: BTreeMap<String, Sample>,
}

/// One reading.
struct Look {
    rates: Vec<Rates>,
    /// Problems, each of which is reported once.
    problems: Vec<String>,
}

impl Watch {
    fn new(args: &args::Watched) -> Watch {
        Watch {
            folder: Folder::new(&args.stats),
            wanted: args.disks.iter().map(|disk| disk.0.clone()).collect(),
            before: BTreeMap::new(),
        }
    }

    fn look(&mut self) -> Result<Look, Failure> {
        let seen = self.folder.look().map_err(|e| self.cannot(e))?;
        let mut now = BTreeMap::new();
        let mut rates = Vec::new();
        for sample in seen.disks {
            let name = &sample.snapshot.disk;
            if self.wanted.is_empty() || self.wanted.contains(name) {
                rates.push(Rates::between(self.before.get(name), &sample));
                now.insert(name.clone(), sample);
            }
        }
        self.before = now;
        Ok(Look { rates, problems: seen.problems })
    }

    fn cannot(&self, e: io::Error) -> Failure {
        let what = format!("cannot look at {}", self.folder.path().display());
        Failure::new(what, e, "counters of guests' disks are for root")
    }

    /// The disks that were asked for and have no counters.
    fn missing(&self, look: &Look) -> Vec<&str> {
        let there = |name: &str| look.rates.iter().any(|rates| rates.disk == name);
        self.wanted.iter().map(String::as_str).filter(|name| !there(name)).collect()
    }

    fn is_missing(&self, names: &[&str]) -> Failure {
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
