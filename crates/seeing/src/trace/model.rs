//! The cost of requests as a constant and a cost per KiB, by stage: time = X + Y x size, by least squares, with 95 %
//! intervals (sources.md 4).

use ferrite_serve::trace::Record;
use serde::Serialize;

use super::{STAGES, Trace, latency_ns, operation, stages};

/// One fit: a stage of reads or of writes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// `read` or `write`.
    pub operation: &'static str,
    /// One of [`STAGES`], or `all`.
    pub stage: &'static str,
    /// The number of requests.
    pub n: u64,
    /// Their mean time, in microseconds.
    pub mean_us: f64,
    /// The time of a request of size 0, in microseconds. `None` if all have one size.
    pub x_us: Option<f64>,
    /// Half the width of its 95 % interval.
    pub x_ci95_us: Option<f64>,
    /// The time per KiB, in microseconds.
    pub y_us_per_kib: Option<f64>,
    /// Half the width of its 95 % interval.
    pub y_ci95_us_per_kib: Option<f64>,
    /// The share of the variance that size explains.
    pub r2: Option<f64>,
}

/// The fits of all present stages, of successful reads and writes.
pub fn fits(trace: &Trace) -> Vec<Fit> {
    let mut fits = Vec::new();
    for name in ["read", "write"] {
        let mut sums = [Sums::default(); STAGES.len() + 1];
        let is_meant =
            |record: &&Record| operation(record) == name && record.status == 0 && record.bytes > 0;
        for record in trace.requests.iter().map(|(_, record)| record).filter(is_meant) {
            let kib = f64::from(record.bytes) / 1024.0;
            let took = stages(record).into_iter().chain([Some(latency_ns(record))]);
            for (sum, ns) in sums.iter_mut().zip(took) {
                if let Some(ns) = ns {
                    sum.add(kib, ns as f64 / 1e3);
                }
            }
        }
        let names = STAGES.into_iter().chain(["all"]);
        fits.extend(names.zip(sums).filter(|(_, sum)| sum.n > 0).map(|(s, sum)| sum.fit(name, s)));
    }
    fits
}

/// Means and squares, summed without loss of precision for large numbers.
#[derive(Clone, Copy, Default)]
struct Sums {
    n: u64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
    yy: f64,
}

impl Sums {
    fn add(&mut self, x: f64, y: f64) {
        self.n += 1;
        let (dx, dy) = (x - self.x, y - self.y);
        self.x += dx / self.n as f64;
        self.y += dy / self.n as f64;
        self.xx += dx * (x - self.x);
        self.xy += dx * (y - self.y);
        self.yy += dy * (y - self.y);
    }

    fn fit(&self, operation: &'static str, stage: &'static str) -> Fit {
        let mut fit = Fit {
            operation,
            stage,
            n: self.n,
            mean_us: self.y,
            x_us: None,
            x_ci95_us: None,
            y_us_per_kib: None,
            y_ci95_us_per_kib: None,
            r2: None,
        };
        if self.n < 3 || self.xx <= 0.0 {
            return fit;
        }
        let slope = self.xy / self.xx;
        let left = (self.yy - slope * self.xy).max(0.0);
        let freedom = self.n - 2;
        let variance = left / freedom as f64;
        let t = student_95(freedom);
        fit.x_us = Some(self.y - slope * self.x);
        fit.x_ci95_us =
            Some(t * (variance * (1.0 / self.n as f64 + self.x * self.x / self.xx)).sqrt());
        fit.y_us_per_kib = Some(slope);
        fit.y_ci95_us_per_kib = Some(t * (variance / self.xx).sqrt());
        fit.r2 = (self.yy > 0.0).then(|| 1.0 - left / self.yy);
        fit
    }
}

/// The 95 % quantile of Student's t with so many degrees of freedom.
fn student_95(freedom: u64) -> f64 {
    const FIRST: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
        2.052, 2.048, 2.045, 2.042,
    ];
    if let Some(t) = usize::try_from(freedom).ok().and_then(|n| FIRST.get(n.max(1) - 1)) {
        return *t;
    }
    // Cornish and Fisher's series, whose next term is below 0.0001 from here on.
    let (z, n) = (1.959_964_f64, freedom as f64);
    z + (z.powi(3) + z) / (4.0 * n)
        + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * n * n)
}

/// All fits as a table.
pub fn text(fits: &[Fit]) -> String {
    let mut out = format!(
        "{:<6} {:<9} {:>9} {:>11} {:>22} {:>26} {:>6}\n",
        "", "stage", "requests", "mean", "X (us)", "Y (us a KiB)", "r2"
    );
    let with = |value: Option<f64>, ci95: Option<f64>| match (value, ci95) {
        (Some(value), Some(ci95)) => format!("{value:.3} +-{ci95:.3}"),
        _ => "-".to_owned(),
    };
    let fine = |value: Option<f64>, ci95: Option<f64>| match (value, ci95) {
        (Some(value), Some(ci95)) => format!("{value:.5} +-{ci95:.5}"),
        _ => "-".to_owned(),
    };
    for fit in fits {
        out += &format!(
            "{:<6} {:<9} {:>9} {:>9.3}us {:>22} {:>26} {:>6}\n",
            fit.operation,
            fit.stage,
            fit.n,
            fit.mean_us,
            with(fit.x_us, fit.x_ci95_us),
            fine(fit.y_us_per_kib, fit.y_ci95_us_per_kib),
            fit.r2.map_or("-".to_owned(), |r2| format!("{r2:.3}")),
        );
    }
    if fits.is_empty() {
        out += "no read and no write was done\n";
    } else if fits.iter().all(|fit| fit.x_us.is_none()) {
        out += "X and Y take three requests of two sizes\n";
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::trace;
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-3, "{a} {b}");
    }

    fn of(points: &[(f64, f64)]) -> Fit {
        let mut sums = Sums::default();
        points.iter().for_each(|(x, y)| sums.add(*x, *y));
        sums.fit("read", "all")
    }

    #[test]
    fn what_lies_on_a_line_is_found_exactly() {
        let fit = of(&[(4.0, 351.0), (64.0, 591.0), (512.0, 2383.0)]);
        near(fit.x_us.unwrap(), 335.0);
        near(fit.y_us_per_kib.unwrap(), 4.0);
        near(fit.x_ci95_us.unwrap(), 0.0);
        near(fit.r2.unwrap(), 1.0);
    }

    /// By hand: n 5, slope 1.99, intercept 0.05, s 0.18886, t(3) 3.182.
    #[test]
    fn intervals_are_students() {
        let fit = of(&[(1.0, 2.1), (2.0, 3.9), (3.0, 6.2), (4.0, 7.8), (5.0, 10.1)]);
        near(fit.y_us_per_kib.unwrap(), 1.99);
        near(fit.x_us.unwrap(), 0.05);
        near(fit.y_ci95_us_per_kib.unwrap(), 3.182 * 0.059_722);
        near(fit.x_ci95_us.unwrap(), 3.182 * 0.198_074);
        near(student_95(31), 2.0395);
        near(student_95(100), 1.9840);
        near(student_95(u64::MAX), 1.96);
    }

    #[test]
    fn each_stage_of_reads_and_writes_has_its_line() {
        let fits = fits(&trace(80));
        let names: Vec<_> = fits.iter().map(|fit| (fit.operation, fit.stage, fit.n)).collect();
        let expected = [
            ("read", "start", 40),
            ("read", "storage", 40),
            ("read", "copy out", 40),
            ("read", "answer", 40),
            ("read", "all", 40),
            ("write", "copy in", 40),
            ("write", "start", 40),
            ("write", "storage", 40),
            ("write", "answer", 40),
            ("write", "all", 40),
        ];
        assert_eq!(names, expected);
        let storage = &fits[1];
        near(storage.x_us.unwrap(), 20.0);
        near(storage.y_us_per_kib.unwrap(), 1.0);
        assert!(text(&fits).lines().count() == 11 && text(&fits).contains("20.000 +-0.000"));
    }

    #[test]
    fn one_size_has_a_mean_and_no_line_and_errors_are_left_out() {
        let mut trace = trace(30);
        trace.requests.retain(|(_, record)| record.bytes == 4096);
        trace.requests.last_mut().unwrap().1.status = -1;
        let fits = fits(&trace);
        let all = fits.last().unwrap();
        assert_eq!((all.n, all.x_us, all.r2), (3, None, None));
        near(all.mean_us, 25.4);
        assert!(text(&fits).ends_with("X and Y take three requests of two sizes\n"));
        assert!(text(&[]).ends_with("no read and no write was done\n"));
    }
}
