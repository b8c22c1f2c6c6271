//! Log messages go to standard error. Each caller limits its own rate.

use std::fmt;
use std::io;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// The beginning of a line: the time, and the disk that the whole process serves. Workers of many disks write to one
/// log.
struct Stamp(Option<String>);

impl FormatTime for Stamp {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        SystemTime.format_time(writer)?;
        self.0.iter().try_for_each(|disk| write!(writer, " disk {disk}"))
    }
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
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| EnvFilter::new(default)))
        .with_writer(io::stderr)
        .with_timer(Stamp(disk))
        // It would panic if a message cannot be written, and a server must outlive the reader of its log.
        .log_internal_errors(false)
        .init();
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
