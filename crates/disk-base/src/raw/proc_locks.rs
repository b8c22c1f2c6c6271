//! The holder of a lock, by the kernel's list.

use ferrite_host::names;

/// How often /proc/locks is read until a lock is believed not to be in it.
const LOCK_READINGS: usize = 5;

/// Searches /proc/locks for a `flock` on a file. It finds no locks of file systems whose device number there differs
/// from `stat`'s, nor holders in other process namespaces.
///
/// The kernel returns the list page by page and finds its position again by counting. A lock that is released in
/// between hides one after it, so one reading without a holder proves nothing.
pub(crate) fn flock_holder((major, minor): (u32, u32), inode: u64) -> Option<u32> {
    let inode = format!("{major:02x}:{minor:02x}:{inode}");
    let locks = || names::read_to_string("/proc/locks").ok();
    (0..LOCK_READINGS).find_map(|_| holder_in(&locks()?, &inode))
}

/// The holder by one reading. Lines are `1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF`; waiters have `->` after the
/// number.
fn holder_in(locks: &str, inode: &str) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        if words.next()? != "FLOCK" {
            return None;
        }
        let mut words = words.skip(2);
        let pid: u32 = words.next()?.parse().ok()?;
        (pid != 0 && words.next()? == inode).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_flock_is_found_among_other_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 fe:00:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 12 fe:00:78 0 EOF\n\
                     3: FLOCK  ADVISORY  READ 13 fe:00:77 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 14 fe:00:77 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 0 fe:00:79 0 EOF\n";
        assert_eq!(holder_in(locks, "fe:00:77"), Some(13));
        assert_eq!(holder_in(locks, "fe:00:78"), Some(12));
        assert_eq!(holder_in(locks, "fe:00:79"), None);
        assert_eq!(holder_in("", "fe:00:77"), None);
        assert_eq!(holder_in("FLOCK\n\n1:\n1: FLOCK ADVISORY WRITE", "fe:00:77"), None);
    }
}
