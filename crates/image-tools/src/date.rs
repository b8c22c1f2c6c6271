//! Dates of UTC.

/// Year, month, day, hour, minute, second of a time in seconds since 1970.
pub fn parts(unix_s: u64) -> [u64; 6] {
    let (days, s) = (unix_s / 86_400, unix_s % 86_400);
    // Years of the proleptic Gregorian calendar, from 1 March of the year 0 on: the leap day is a year's last.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month < 3);
    [year, month, day, s / 3600, s / 60 % 60, s % 60]
}

/// As in `20260228T235959Z`.
pub(super) fn compact(unix_s: u64) -> String {
    let [year, month, day, h, m, s] = parts(unix_s);
    format!("{year:04}{month:02}{day:02}T{h:02}{m:02}{s:02}Z")
}
