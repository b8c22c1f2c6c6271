//! Latencies by size: four buckets for each doubling.
//!
//! A latency's bucket is that of its nanoseconds plus 512 among the numbers with two bits after the
//! first. The offset makes small latencies linear: below 0.5 µs a bucket is 128 ns wide. From 8 µs
//! on a bucket is no wider than 27 % of its latencies. Latencies of 34 seconds or more are in the
//! last.

/// Buckets of a histogram.
pub const BUCKETS: usize = 104;

/// Added to a latency before its bucket is computed; a power of two.
const OFFSET: u64 = 1 << OFFSET_BITS;
const OFFSET_BITS: u32 = 9;
/// Buckets of a doubling, as a power of two.
const STEP_BITS: u32 = 2;

/// The bucket of a latency. A float's exponent and first bits are the number, and a conversion is
/// one instruction.
#[inline]
pub(super) fn bucket(latency_ns: u64) -> usize {
    const MANTISSA: u32 = f64::MANTISSA_DIGITS - 1;
    const FIRST: u64 = ((f64::MAX_EXP as u64 - 1) + OFFSET_BITS as u64) << STEP_BITS;
    // Below 2^62 there is no sign and no overflow.
    let value = (latency_ns.min(1 << 62) + OFFSET) as i64 as f64;
    ((value.to_bits() >> (MANTISSA - STEP_BITS)).saturating_sub(FIRST) as usize).min(BUCKETS - 1)
}

/// The smallest latency of a bucket. For `BUCKETS`: the end of the last one.
pub fn bucket_start_ns(bucket: usize) -> u64 {
    let (doubling, step) = (bucket >> STEP_BITS, (bucket & ((1 << STEP_BITS) - 1)) as u64);
    let base = OFFSET << doubling;
    base + (base >> STEP_BITS) * step - OFFSET
}

/// The latency that this many of a hundred thousand stay below: 99,900 for the percentile 99.9.
/// Within its bucket it is interpolated by rank. `None`: there are no latencies.
pub fn quantile_ns(histogram: &[u64; BUCKETS], of_100_000: u64) -> Option<u64> {
    let all: u128 = histogram.iter().map(|&n| u128::from(n)).sum();
    if all == 0 {
        return None;
    }
    let rank = (all * u128::from(of_100_000)).div_ceil(100_000).clamp(1, all);
    let mut below = 0u128;
    for (bucket, &n) in histogram.iter().enumerate() {
        let n = u128::from(n);
        if below + n >= rank {
            let (start, end) = (bucket_start_ns(bucket), bucket_start_ns(bucket + 1));
            let part = u128::from(end - start) * (2 * (rank - below) - 1) / (2 * n);
            return Some(start + part as u64);
        }
        below += n;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_latency_is_in_the_bucket_that_begins_before_and_ends_behind_it() {
        let mut latencies: Vec<u64> =
            (0..40).flat_map(|bit| [0, 1].map(|n| (1 << bit) - n)).collect();
        latencies.extend((0..BUCKETS).map(bucket_start_ns));
        latencies.extend((1..BUCKETS).map(|b| bucket_start_ns(b) - 1));
        let last = bucket_start_ns(BUCKETS - 1);
        for latency in latencies {
            let at = bucket(latency);
            assert!(bucket_start_ns(at) <= latency, "{latency}");
            assert!(latency >= last || latency < bucket_start_ns(at + 1), "{latency}");
        }
        assert_eq!((bucket(0), bucket_start_ns(0)), (0, 0));
        assert_eq!((bucket(u64::MAX), bucket(1 << 62)), (BUCKETS - 1, BUCKETS - 1));
    }

    #[test]
    fn buckets_are_as_narrow_as_is_told() {
        for at in 0..BUCKETS {
            let (start, end) = (bucket_start_ns(at), bucket_start_ns(at + 1));
            assert!(start >= 8_000 || end - start <= 2_048, "{start}");
            assert!(start < 8_000 || (end - start) as f64 <= 0.27 * start as f64, "{start}");
        }
        assert_eq!(bucket_start_ns(1), 128);
        assert_eq!(bucket_start_ns(BUCKETS) / 1_000_000_000, 34);
    }

    #[test]
    fn quantiles_are_in_the_bucket_of_their_rank() {
        let mut histogram = [0; BUCKETS];
        assert_eq!(quantile_ns(&histogram, 50_000), None);
        let within = |latency: u64, found: Option<u64>| {
            let (at, found) = (bucket(latency), found.unwrap());
            assert_eq!(bucket(found), at, "{latency} {found}");
        };
        histogram[bucket(100_000)] = 990;
        histogram[bucket(5_000_000)] = 9;
        histogram[bucket(800_000_000)] = 1;
        within(100_000, quantile_ns(&histogram, 50_000));
        within(100_000, quantile_ns(&histogram, 99_000));
        within(5_000_000, quantile_ns(&histogram, 99_900));
        within(800_000_000, quantile_ns(&histogram, 100_000));
        within(100_000, quantile_ns(&histogram, 0));
        quantile_ns(&[u64::MAX; BUCKETS], 99_900).unwrap();
    }
}
