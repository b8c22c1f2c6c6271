//! Rates as columns of text.

use std::cmp::Ordering;

use ferrite_seeing::rates::Rates;

use crate::plain::one_line;

/// A column: its title, its width, and its values.
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) width: usize,
    text: fn(&Rates) -> String,
    value: fn(&Rates) -> f64,
}

const fn column(
    title: &'static str,
    width: usize,
    text: fn(&Rates) -> String,
    value: fn(&Rates) -> f64,
) -> Column {
    Column { title, width, text, value }
}

/// All columns but the first, which is the disk's name. Narrow terminals cut the last ones off.
pub(super) const COLUMNS: [Column; 16] = [
    column("r/s", 8, |r| whole(r.read.per_s), |r| r.read.per_s),
    column("w/s", 8, |r| whole(r.write.per_s), |r| r.write.per_s),
    column("rMB/s", 8, |r| tenth(r.read.bytes_per_s / 1e6), |r| r.read.bytes_per_s),
    column("wMB/s", 8, |r| tenth(r.write.bytes_per_s / 1e6), |r| r.write.bytes_per_s),
    column("err", 6, |r| r.errors.to_string(), |r| r.errors as f64),
    column("p50", 7, |r| time(r.data.p50_us), |r| known(r.data.p50_us)),
    column("p99", 7, |r| time(r.data.p99_us), |r| known(r.data.p99_us)),
    column("p99.9", 7, |r| time(r.data.p999_us), |r| known(r.data.p999_us)),
    column("depth", 6, |r| tenth(r.queue_depth), |r| r.queue_depth),
    column("now", 5, |r| in_flight(r).to_string(), |r| in_flight(r) as f64),
    column("fl/s", 7, |r| whole(r.flush.per_s), |r| r.flush.per_s),
    column("disc/s", 7, |r| whole(r.discard.per_s), |r| r.discard.per_s),
    column("miss%", 6, |r| percent(r.metadata_miss_percent), |r| known(r.metadata_miss_percent)),
    column("poll%", 6, |r| percent(r.poll_hit_percent), |r| known(r.poll_hit_percent)),
    column("cpu%", 6, |r| percent(r.cpu_percent), |r| known(r.cpu_percent)),
    column("lim%", 6, |r| percent(r.limit_waits_percent), |r| known(r.limit_waits_percent)),
];

/// The least width of names.
pub(super) const NAME_WIDTH: usize = 14;

impl Column {
    /// The column's text for this disk.
    pub(super) fn cell(&self, rates: &Rates) -> String {
        (self.text)(rates)
    }

    /// Compares two disks by this column, the larger one first.
    pub(super) fn order(&self, a: &Rates, b: &Rates) -> Ordering {
        (self.value)(b).total_cmp(&(self.value)(a))
    }
}

/// Titles, and one line per disk.
pub(super) fn table(rates: &[Rates]) -> String {
    let name = |rates: &Rates| one_line(&rates.name).into_owned();
    let width = rates.iter().map(|rates| name(rates).chars().count()).max().unwrap_or(0);
    let width = width.max(NAME_WIDTH);
    let mut out = format!("{:<width$}", "disk");
    COLUMNS.iter().for_each(|c| out += &format!(" {:>w$}", c.title, w = c.width));
    out.push('\n');
    for rates in rates {
        out += &format!("{:<width$}", name(rates));
        COLUMNS.iter().for_each(|c| out += &format!(" {:>w$}", c.cell(rates), w = c.width));
        out.push('\n');
    }
    out
}

fn in_flight(rates: &Rates) -> u64 {
    let kinds = [&rates.read, &rates.write, &rates.flush, &rates.discard];
    kinds.iter().fold(0, |n, kind| n.saturating_add(kind.in_flight))
}

fn known(value: Option<f64>) -> f64 {
    value.unwrap_or(-1.0)
}

/// A number in at most seven characters.
fn whole(value: f64) -> String {
    match value {
        v if v > 0.0 && v < 9.95 => format!("{v:.1}"),
        v if v < 1e7 => format!("{v:.0}"),
        v if v < 1e12 => format!("{:.0}M", v / 1e6),
        v => format!("{v:.0e}"),
    }
}

fn tenth(value: f64) -> String {
    match value {
        v if v < 1e5 => format!("{v:.1}"),
        v if v < 1e7 => format!("{v:.0}"),
        v => format!("{v:.0e}"),
    }
}

fn percent(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), tenth)
}

/// Microseconds with a unit.
fn time(us: Option<f64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us) if us < 99.95 => format!("{us:.1}us"),
        Some(us) if us < 999.5 => format!("{us:.0}us"),
        Some(us) if us < 99_950.0 => format!("{:.1}ms", us / 1e3),
        Some(us) if us < 999_500.0 => format!("{:.0}ms", us / 1e3),
        Some(us) => format!("{:.1}s", us / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_any_size_fit_into_their_columns() {
        for value in [0.0, 0.01, 9.94, 9.96, 99_999.9, 9_999_999.4, 1e7, 9.9e11, 1e15, 1e300] {
            assert!(whole(value).len() <= 7, "{}", whole(value));
            assert!(tenth(value).len() <= 8, "{}", tenth(value));
        }
        for us in [0.1, 99.94, 99.96, 999.4, 999.6, 99_949.0, 99_951.0, 999_499.0, 34e6] {
            assert!(time(Some(us)).len() <= 7, "{}", time(Some(us)));
        }
        assert_eq!((whole(0.0), whole(2.04)), ("0".to_owned(), "2.0".to_owned()));
        assert_eq!((time(None), time(Some(1234.0))), ("-".to_owned(), "1.2ms".to_owned()));
    }
}
