//! Whether the answers are those of one disk: each block is a register, and no two writes have the same value
//! (Gibbons and Korach, Testing Shared Memories, 1997).

use std::collections::BTreeMap;

/// A write or a read of one block. Times are numbers of events.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) block: u64,
    pub(crate) value: u64,
    pub(crate) is_write: bool,
    pub(crate) begun: u64,
    /// `None`: without an answer. Such reads are left out.
    pub(crate) ended: Option<u64>,
}

/// All accesses of one value.
struct Cluster {
    value: u64,
    write_begun: u64,
    first_end: u64,
    last_begin: u64,
}

pub(crate) fn check(accesses: &[Access]) -> Result<(), String> {
    let mut blocks: BTreeMap<u64, BTreeMap<u64, Vec<&Access>>> = BTreeMap::new();
    for access in accesses.iter().filter(|a| a.is_write || a.ended.is_some()) {
        blocks.entry(access.block).or_default().entry(access.value).or_default().push(access);
    }
    for (block, values) in blocks {
        let mut clusters = Vec::new();
        for (value, accesses) in values {
            let first = Access { block, value, is_write: true, begun: 0, ended: Some(0) };
            let write = accesses.iter().find(|a| a.is_write).copied();
            let write = match (value, write) {
                (0, _) => &first,
                (_, Some(write)) => write,
                (_, None) => return Err(format!("block {block}: {value} was never written")),
            };
            let all = || accesses.iter().copied().chain([write]);
            let Some(first_end) = all().filter_map(|a| a.ended).min() else { continue };
            let last_begin = all().map(|a| a.begun).max().unwrap_or(0);
            clusters.push(Cluster { value, write_begun: write.begun, first_end, last_begin });
        }
        check_block(block, &clusters)?;
    }
    Ok(())
}

fn check_block(block: u64, clusters: &[Cluster]) -> Result<(), String> {
    let (mut forward, mut backward) = (Vec::new(), Vec::new());
    for cluster in clusters {
        if cluster.first_end < cluster.write_begun {
            return Err(format!("block {block}: {} was read before its write", cluster.value));
        }
        match cluster.first_end < cluster.last_begin {
            true => forward.push((cluster.first_end, cluster.last_begin, cluster.value)),
            false => backward.push((cluster.last_begin, cluster.first_end, cluster.value)),
        }
    }
    forward.sort_unstable();
    for pair in forward.windows(2) {
        let [(_, end, old), (begin, _, new)] = pair else { continue };
        if begin < end {
            return Err(format!("block {block}: {old} and {new} were read in turns"));
        }
    }
    for (begin, end, value) in backward {
        let inside = forward.iter().find(|(from, to, _)| *from < begin && end < *to);
        if let Some((_, _, other)) = inside {
            return Err(format!("block {block}: {other} was read before and after {value}"));
        }
    }
    Ok(())
}

#[test]
fn a_stale_read_is_found_and_a_late_write_is_none() {
    let write = |value, begun, ended| Access { block: 0, value, is_write: true, begun, ended };
    let read = |value, begun, ended| Access {
        block: 0,
        value,
        is_write: false,
        begun,
        ended: Some(ended),
    };
    let good = [write(1, 1, Some(2)), write(2, 3, None), read(1, 4, 5), read(2, 6, 7)];
    check(&good).unwrap();
    let stale = [write(1, 1, Some(2)), write(2, 3, Some(4)), read(1, 5, 6)];
    check(&stale).unwrap_err();
    let turns = [write(1, 1, Some(2)), write(2, 3, None), read(2, 4, 5), read(1, 6, 7)];
    check(&turns).unwrap_err();
    check(&[read(9, 1, 2)]).unwrap_err();
}
