//! Log messages go to standard error. Each caller limits its own rate.
//!
//! Where standard error is systemd's journal, each line begins with its priority (sd-daemon(3)). The journal has the
//! time and the program.

use std::fmt::{self, Write as _};
use std::io;

use rustix::net::{SocketAddrUnix, getpeername};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The socket of the journal that systemd connects standard error to.
const JOURNAL: &[u8] = b"/run/systemd/journal/stdout";

/// The beginning of a line: the time, and the disk that the whole process serves. Workers of many disks write to one
/// log.
struct Stamp(Option<String>);

impl FormatTime for Stamp {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        SystemTime.format_time(writer)?;
        self.0.iter().try_for_each(|disk| write!(writer, " disk {disk}"))
    }
}

/// Lines for the journal, with the disk that the whole process serves.
struct JournalLines(Option<String>);

impl<S, N> FormatEvent<S, N> for JournalLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = String::new();
        self.0.iter().try_for_each(|disk| write!(text, "disk {disk}: "))?;
        context.format_fields(Writer::new(&mut text), event)?;
        let priority = priority(*event.metadata().level());
        // The journal makes an entry of each line.
        text.lines().try_for_each(|line| writeln!(writer, "<{priority}>{line}"))
    }
}

/// The priority in syslog(3).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

/// Whether standard error is a connection to the journal. A worker has no environment to tell it.
fn is_in_journal() -> bool {
    let Ok(Some(peer)) = getpeername(io::stderr()) else { return false };
    SocketAddrUnix::try_from(peer).is_ok_and(|peer| peer.path_bytes() == Some(JOURNAL))
}

/// Sets up logging: from `RUST_LOG` if it is set, else from the number of `-v`; without one, as
/// `quiet` says. Each line names the `disk`, if there is one.
pub fn set_up(verbose: u8, quiet: &str, disk: Option<String>) {
    let default = match verbose {
        0 => quiet,
        1 => "debug",
        _ => "trace",
    };
    let chosen = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let filter = EnvFilter::try_new(chosen.as_deref().unwrap_or(default));
    let understood = filter.is_ok();
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| EnvFilter::new(default)))
        .with_writer(io::stderr)
        // It would panic if a message cannot be written, and a server must outlive the reader of its log.
        .log_internal_errors(false);
    if is_in_journal() {
        lines.with_ansi(false).event_format(JournalLines(disk)).init();
    } else {
        lines.with_timer(Stamp(disk)).init();
    }
    if !understood {
        tracing::warn!(
            "RUST_LOG is not understood and ignored; an example: RUST_LOG=ferrite=debug"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_a_worker_names_its_disk_behind_the_time() {
        let stamp = |disk| {
            let mut text = String::new();
            Stamp(disk).format_time(&mut Writer::new(&mut text)).unwrap();
            text
        };
        assert!(stamp(Some("1/51712".to_owned())).ends_with("Z disk 1/51712"));
        assert!(stamp(None).ends_with('Z'));
    }
}
