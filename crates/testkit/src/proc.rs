//! The resources of this process, by the kernel's counts.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

/// A number of KiB of `/proc/self/status`.
pub fn status_kib(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let value = line.unwrap_or_else(|| panic!("the kernel does not say {name}"));
    value.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The growth of this process's memory.
pub struct Memory {
    before_kib: u64,
}

impl Memory {
    /// Watches from now on.
    pub fn watch() -> Memory {
        // Resets the peak to the present use, if the kernel supports that.
        let _ = fs::write("/proc/self/clear_refs", "5");
        Memory { before_kib: status_kib("VmRSS") }
    }

    /// The peak of the growth.
    pub fn taken_kib(&self) -> u64 {
        status_kib("VmHWM").saturating_sub(self.before_kib)
    }
}

/// Whether this process runs the test alone, as tests of memory must. Otherwise it is run in a process of its own, and
/// has to pass there. `test`: its full name.
pub fn runs_alone(test: &str) -> bool {
    const ALONE: &str = "FERRITE_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", test, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && said.contains("1 passed");
    assert!(passed, "{said}{}", String::from_utf8_lossy(&output.stderr));
    false
}

/// The number of open descriptors, including the one that this takes.
pub fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The lines of all mappings.
pub fn mappings() -> Vec<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().map(str::to_owned).collect()
}

/// The numbers of this process's threads.
pub fn threads() -> BTreeSet<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks.map(|task| task.unwrap().file_name().into_string().unwrap()).collect()
}

/// The numbers of threads whose names have this prefix.
pub fn threads_named(prefix: &str) -> BTreeSet<String> {
    let name = |id: &String| fs::read_to_string(format!("/proc/self/task/{id}/comm"));
    let is_named = |id: &String| name(id).is_ok_and(|name| name.starts_with(prefix));
    threads().into_iter().filter(is_named).collect()
}

/// Clock ticks that a thread of this process has used, or `None` if it has ended; an empty name means the calling
/// thread.
pub fn ticks(thread: &str) -> Option<u64> {
    let folder =
        if thread.is_empty() { "thread-self".into() } else { format!("self/task/{thread}") };
    let stat = fs::read_to_string(format!("/proc/{folder}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some(fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?)
}
