//! The machine and date of a measurement.

use std::process::Command;

/// One line: date, processors, kernel, load, fio.
pub(crate) fn describe() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let shown = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).output();
        output.map_or_else(|_| String::new(), |o| String::from_utf8_lossy(&o.stdout).into_owned())
    };
    let cpuinfo = read("/proc/cpuinfo");
    let loadavg = read("/proc/loadavg");
    format!(
        "{}, {} x {}, Linux {}, {}; load over the last 15 minutes {}",
        shown("date", "+%F").trim(),
        ferrite_xenhost::steps::cpus(),
        model(&cpuinfo),
        read("/proc/sys/kernel/osrelease").trim(),
        shown("fio", "--version").trim(),
        loadavg.split_whitespace().nth(2).unwrap_or("unknown"),
    )
}

fn model(cpuinfo: &str) -> &str {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"));
    line.and_then(|line| line.split_once(": ")).map_or("processors", |(_, name)| name.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_has_a_name() {
        assert_eq!(model("processor\t: 0\nmodel name\t: Some CPU 7\nflags\t: x\n"), "Some CPU 7");
        assert_eq!(model(""), "processors");
    }
}
