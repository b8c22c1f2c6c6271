//! Statistics of several runs: mean, deviation, and the confidence interval of the mean.

use std::f64::consts::FRAC_2_PI;

/// The confidence of an interval.
const CONFIDENCE: f64 = 0.95;
/// A bound above all quantiles used: with one degree of freedom it is 12.7.
const MAX_QUANTILE: f64 = 1000.0;
/// Halvings of that which leave only the last digit of a number.
const HALVINGS: u32 = 70;

/// Several runs of one subject.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Summary {
    pub(crate) n: u32,
    pub(crate) mean: f64,
    /// The sample's standard deviation; 0 for a single run.
    pub(crate) stddev: f64,
    /// Half the width of the mean's interval with 95 % confidence (Student); 0 for a single run.
    pub(crate) ci95: f64,
}

impl Summary {
    /// Without values, not a number.
    pub(crate) fn of(values: &[f64]) -> Summary {
        let n = values.len();
        let mean = values.iter().sum::<f64>() / n as f64;
        if n < 2 {
            return Summary { n: n as u32, mean, stddev: 0.0, ci95: 0.0 };
        }
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let stddev = (squares / (n - 1) as f64).sqrt();
        let ci95 = student(n as u32 - 1) * stddev / (n as f64).sqrt();
        Summary { n: n as u32, mean, stddev, ci95 }
    }
}

/// The ratios of each run.
pub(crate) fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect()
}

/// The multiple of the standard error that is half the interval of 95 %.
fn student(freedom: u32) -> f64 {
    let (mut low, mut high) = (0.0, MAX_QUANTILE);
    for _ in 0..HALVINGS {
        let middle = f64::midpoint(low, high);
        match within(middle, freedom) < CONFIDENCE {
            true => low = middle,
            false => high = middle,
        }
    }
    f64::midpoint(low, high)
}

/// The probability that a variable of Student's distribution is between -t and t. For a whole number of
/// degrees of freedom it is a finite sum of powers of the cosine of atan(t / sqrt(freedom)).
fn within(t: f64, freedom: u32) -> f64 {
    let angle = (t / f64::from(freedom).sqrt()).atan();
    let (sin, cos) = angle.sin_cos();
    let odd = freedom % 2 == 1;
    // The first power, and the following ones by twos.
    let (mut term, mut at) = if odd { (cos, 1) } else { (1.0, 0) };
    let mut sum = 0.0;
    while at + 2 <= freedom {
        sum += term;
        term *= cos * cos * f64::from(at + 1) / f64::from(at + 2);
        at += 2;
    }
    match odd {
        true => FRAC_2_PI * (angle + sin * sum),
        false => sin * sum,
    }
}

/// The least-squares line through points: its value at 0, and its slope.
pub(crate) fn line(points: &[(f64, f64)]) -> (f64, f64) {
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let above: f64 = points.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    let below: f64 = points.iter().map(|p| (p.0 - x).powi(2)).sum();
    let slope = above / below;
    (y - slope * x, slope)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_printed_tables() {
        for (freedom, printed) in [
            (1, 12.706),
            (2, 4.303),
            (3, 3.182),
            (4, 2.776),
            (5, 2.571),
            (9, 2.262),
            (10, 2.228),
            (29, 2.045),
            (30, 2.042),
            (120, 1.980),
        ] {
            let found = student(freedom);
            assert!((found - printed).abs() < 0.0006, "{freedom}: {found}");
        }
    }

    #[test]
    fn an_interval_is_the_one_worked_by_hand() {
        // Deviations 3, 1, 1, 1, 0, 0, 2, 4 of 5: 32 / 7; 2.365 is the quantile for 7.
        let s = Summary::of(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]);
        assert_eq!((s.n, s.mean), (8, 5.0));
        assert!((s.stddev - 2.138_09).abs() < 1e-5, "{s:?}");
        assert!((s.ci95 - 2.365 * 2.138_09 / 8f64.sqrt()).abs() < 1e-3, "{s:?}");
    }

    #[test]
    fn one_run_has_no_interval_and_none_has_no_mean() {
        assert_eq!(Summary::of(&[7.0]), Summary { n: 1, mean: 7.0, stddev: 0.0, ci95: 0.0 });
        assert!(Summary::of(&[]).mean.is_nan());
    }

    #[test]
    fn a_line_is_found_between_points_that_are_beside_it() {
        let points: Vec<_> = [(4.0, 1.0), (8.0, -1.0), (12.0, -1.0), (16.0, 1.0)]
            .map(|(x, beside)| (x, 335.0 + 4.0 * x + beside))
            .to_vec();
        let (begin, slope) = line(&points);
        assert!((begin - 335.0).abs() < 1e-9 && (slope - 4.0).abs() < 1e-9, "{begin} {slope}");
    }
}
