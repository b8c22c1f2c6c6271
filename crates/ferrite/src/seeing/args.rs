//! The options of commands that show disks.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::guests::GuestDisk;

/// The disks to show.
#[derive(Debug, Args)]
pub(crate) struct Watched {
    /// Only these. GUEST is a name, UUID or number, DEV a name or number: web1/xvda, 3/51712.
    #[arg(value_name = "GUEST/DEV")]
    pub(crate) disks: Vec<GuestDisk>,

    /// The folder of the disks' counters.
    #[arg(long, value_name = "DIR", default_value = "/run/ferrite/stats")]
    pub(crate) stats: PathBuf,
}

/// `ferrite stat`.
#[derive(Debug, Args)]
pub(crate) struct StatArgs {
    /// Report repeatedly, with so many seconds between; the first report covers all time since the disk was attached.
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) interval: Option<Duration>,

    /// End after so many reports; by default after one, or never with an interval.
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,

    /// Print each report as one line of JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) watched: Watched,
}

/// `ferrite top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Refresh after so many seconds.
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds, default_value = "1")]
    pub(crate) interval: Duration,

    /// The folder of the counters of guests' network interfaces.
    #[arg(long, value_name = "DIR", default_value = "/run/ferrite/net")]
    pub(crate) interfaces: PathBuf,

    #[command(flatten)]
    pub(crate) watched: Watched,
}

/// From a tenth of a second to a day.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    if (0.1..=86_400.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("it has to be from 0.1 to 86400".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_have_a_sense() {
        assert_eq!(seconds("1"), Ok(Duration::from_secs(1)));
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "nan", "inf", "1e9", "x", ""] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
