//! Long steps: one line at the beginning, one with the seconds at the end, and the tail of the log after a failure.

use anyhow::{Context, Result, bail};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

/// Lines of a failed step's log that are shown.
const LOG_TAIL_LINES: usize = 40;
/// Failed tests that are shown, and lines of each.
const SHOWN_PANICS: usize = 6;
const LINES_OF_A_PANIC: usize = 4;

static START: OnceLock<Instant> = OnceLock::new();

/// Starts the clock of progress lines.
pub fn start_clock() {
    START.get_or_init(Instant::now);
}

/// Seconds since the program was started.
pub fn elapsed_s() -> f64 {
    START.get_or_init(Instant::now).elapsed().as_secs_f64()
}

/// Prints one progress line: seconds since the start, then the text.
pub fn say(text: impl AsRef<str>) {
    let mut out = std::io::stdout().lock();
    // A closed standard output must not end the run: the exit code remains.
    let _ = writeln!(out, "[{:6.1} s] {}", elapsed_s(), text.as_ref());
    let _ = out.flush();
}

/// Runs `work` between two progress lines.
pub fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    say(format!("{what} ..."));
    let began = Instant::now();
    let result = work().with_context(|| what.to_owned());
    let seconds = began.elapsed().as_secs_f64();
    match &result {
        Ok(_) => say(format!("{what}: done in {seconds:.1} s")),
        Err(_) => say(format!("{what}: FAILED after {seconds:.1} s")),
    }
    result
}

/// An error with its causes, the outermost first, without a backtrace.
pub fn chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).collect::<Vec<_>>().join("\n  because: ")
}

/// The lines of a long text that are kept at its beginning and at its end.
const KEPT_LINES: (usize, usize) = (24, 48);
/// Characters of a line that are kept.
const KEPT_COLUMNS: usize = 500;

/// Shortens a text to a bounded length.
pub fn shorten(text: &str) -> String {
    let (first, last) = KEPT_LINES;
    let mut lines: Vec<String> = text.lines().map(shorten_line).collect();
    let held_back = lines.len().saturating_sub(first + last);
    if held_back > 1 {
        lines.splice(first..first + held_back, [format!("[{held_back} lines: see above]")]);
    }
    lines.join("\n")
}

fn shorten_line(line: &str) -> String {
    match line.char_indices().nth(KEPT_COLUMNS) {
        Some((end, _)) => format!("{} [...]", &line[..end]),
        None => line.to_owned(),
    }
}

/// Runs a command with its output appended to `log`, and shows the log's tail on failure.
pub fn run_logged(command: &mut Command, log: &Path) -> Result<()> {
    let shown = describe(command);
    let out = File::options()
        .create(true)
        .append(true)
        .open(log)
        .with_context(|| format!("cannot write the log {}", log.display()))?;
    let status = command
        .stdin(Stdio::null())
        .stderr(out.try_clone()?)
        .stdout(out)
        .status()
        .with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        let (panics, log_name) = (panics(log), log.display());
        bail!("`{shown}` ended with {status}{panics}; end of {log_name}:\n{}", tail(log));
    }
    Ok(())
}

/// The panics of the first failed tests in a log, which also has other tests' output after them.
fn panics(log: &Path) -> String {
    let Ok(file) = File::open(log) else { return String::new() };
    let (mut text, mut panics, mut follow) = (String::new(), 0, 0);
    for line in BufReader::new(file).split(b'\n').map_while(Result::ok) {
        let line = clean(&line);
        if line.contains("panicked at ") && panics < SHOWN_PANICS {
            (panics, follow) = (panics + 1, LINES_OF_A_PANIC);
        }
        if follow > 0 && !line.is_empty() {
            text = text + "\n    " + &line;
            follow -= 1;
        }
    }
    text
}

/// An empty log in the build folder.
pub fn fresh_log(name: &str) -> Result<PathBuf> {
    let dir = target_dir().join("logs");
    std::fs::create_dir_all(&dir)?;
    let log = dir.join(format!("{name}.log"));
    std::fs::write(&log, "")?;
    Ok(log)
}

/// Runs a command with its output shown.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = describe(command);
    let status =
        command.stdin(Stdio::null()).status().with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` ended with {status}");
    }
    Ok(())
}

/// Runs a command; returns its standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = describe(command);
    let out =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{shown}`"))?;
    if !out.status.success() {
        bail!("`{shown}` ended with {}: {}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// The last lines of a log, for an error message.
pub fn tail(log: &Path) -> String {
    let Ok(file) = File::open(log) else { return format!("(no log at {})", log.display()) };
    let mut last = std::collections::VecDeque::with_capacity(LOG_TAIL_LINES);
    for line in BufReader::new(file).split(b'\n').map_while(Result::ok) {
        if last.len() == LOG_TAIL_LINES {
            last.pop_front();
        }
        last.push_back(format!("    {}", clean(&line)));
    }
    Vec::from(last).join("\n")
}

/// A console line without carriage returns and control characters.
fn clean(line: &[u8]) -> String {
    String::from_utf8_lossy(line).chars().filter(|c| !c.is_control() || *c == '\t').collect()
}

/// The command line, for messages.
fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}

/// The repository's root folder, which has the lock file of the running package.
pub fn repository() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let top = manifest.ancestors().find(|folder| folder.join("Cargo.lock").is_file());
    top.map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Cargo's build folder.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| repository().join("target"), |dir| repository().join(PathBuf::from(dir)))
}

/// `cargo`, in the repository.
pub fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(repository());
    command
}

/// The number of processors that this process may use.
pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_keeps_its_first_and_last_lines_and_a_short_one_all() {
        let text = |lines: std::ops::Range<u32>| {
            lines.map(|line| line.to_string()).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(shorten(&text(0..73)), text(0..73));
        let kept = format!("{}\n[928 lines: see above]\n{}", text(0..24), text(952..1000));
        assert_eq!(shorten(&text(0..1000)), kept);
        assert_eq!(shorten(&"ß".repeat(1000)), format!("{} [...]", "ß".repeat(500)));
    }

    #[test]
    fn what_a_failed_test_said_is_shown_whatever_came_after_it() {
        let log = tempfile::NamedTempFile::new().unwrap();
        let later = "test result: ok\n".repeat(1000);
        let text = format!("running\nthread 'a' panicked at b.rs:1:\nleft: 1\nright: 2\n{later}");
        std::fs::write(log.path(), text).unwrap();
        let mut fails = Command::new("false");
        let error = run_logged(&mut fails, log.path()).unwrap_err().to_string();
        assert!(error.contains("\n    thread 'a' panicked at b.rs:1:\n    left: 1\n"), "{error}");
        assert!(error.lines().count() <= LOG_TAIL_LINES + LINES_OF_A_PANIC + 1, "{error}");
    }
}
