//! The lines of guests' network interfaces, below those of disks.

use std::path::{Path, PathBuf};
use std::time::Instant;

use ferrite_seeing::interfaces::{Switch, per_second, read};

use super::view::View;
use crate::plain::one_line;

/// Reads the counters again and again.
pub(super) struct Interfaces {
    folder: PathBuf,
    before: Option<(Vec<Switch>, Instant)>,
}

impl Interfaces {
    pub(super) fn new(folder: &Path) -> Interfaces {
        Interfaces { folder: folder.into(), before: None }
    }

    /// Shows what the interfaces have done in a second since the last look. The first look shows zeros. A user
    /// without rights to the folder is shown none.
    pub(super) fn look(&mut self, view: &mut View) {
        let Ok((switches, problems)) = read(&self.folder) else {
            return view.show_interfaces(Vec::new(), &[]);
        };
        let now = Instant::now();
        let (before, since) = self.before.take().unwrap_or_else(|| (switches.clone(), now));
        let seconds = (now - since).as_secs_f64().max(0.001);
        view.show_interfaces(lines(&per_second(&switches, &before, seconds)), &problems);
        self.before = Some((switches, now));
    }
}

/// Titles, and a line for each interface.
pub(super) fn lines(switches: &[Switch]) -> Vec<String> {
    let titles = ["sent/s", "MB/s", "recv/s", "MB/s", "drop/s", "starv/s", "refus/s"];
    let mut title = format!("{:<14} {:<12}", "interface", "switch");
    titles.iter().for_each(|one| title += &format!(" {one:>9}"));
    let mut lines = vec![title];
    for switch in switches {
        let shown = one_line(&switch.switch);
        for interface in &switch.interfaces {
            let count = |name: &str| interface.count(name);
            let mb = |name: &str| format!("{:.1}", count(name) as f64 / 1e6);
            let refused = ["spoofed", "malformed", "failed", "unsupported"].map(count);
            let refused = refused.iter().fold(0_u64, |sum, n| sum.saturating_add(*n));
            let cells = [
                count("sent_packets").to_string(),
                mb("sent_bytes"),
                count("received_packets").to_string(),
                mb("received_bytes"),
                count("dropped").to_string(),
                count("starved").to_string(),
                refused.to_string(),
            ];
            let mut line = format!("{:<14} {shown:<12}", interface.name());
            cells.iter().for_each(|cell| line += &format!(" {cell:>9}"));
            lines.push(line);
        }
    }
    if lines.len() == 1 { Vec::new() } else { lines }
}
