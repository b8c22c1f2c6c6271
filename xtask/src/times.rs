//! The time of each test program: the slowest are shown, all are in a file of the build folder.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};

use ferrite_xenhost::steps::{self, say};

/// Programs that the summary shows.
const SHOWN: usize = 12;
/// The file with all times, in the build folder.
const FILE: &str = "test-times.txt";

static TIMES: Mutex<Vec<(String, Duration)>> = Mutex::new(Vec::new());

/// Records the time of one run of a test program.
pub(crate) fn add(name: &str, time: Duration) {
    TIMES.lock().unwrap_or_else(PoisonError::into_inner).push((name.to_owned(), time));
}

/// Writes all times to the file, the longest first, and shows the first ones.
pub(crate) fn show() -> Result<()> {
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner).clone();
    times.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
    let line = |(name, time): &(String, Duration)| format!("{:7.1} s  {name}", time.as_secs_f64());
    let lines: Vec<String> = times.iter().map(line).collect();
    let file = steps::target_dir().join(FILE);
    std::fs::write(&file, lines.join("\n") + "\n")
        .with_context(|| format!("cannot write {}", file.display()))?;
    let shown = lines.iter().take(SHOWN).map(|line| format!("\n  {line}")).collect::<String>();
    say(format!("the slowest of {} runs of test programs:{shown}", lines.len()));
    Ok(())
}
