//! Tables of the program's own that are looked at anywhere.
//!
//! With pages of 4 KiB most looks miss the processor's table of pages, too; in a virtual machine that costs more than the
//! look itself.

use std::mem::MaybeUninit;

use rustix::mm::{Advice, madvise};

/// The unit of advice to the kernel.
const PAGE_BYTES: usize = 4096;

/// A table in huge pages, as far as the kernel has them.
pub fn table<T>(entries: impl ExactSizeIterator<Item = T>) -> Box<[T]> {
    let mut table = Vec::with_capacity(entries.len());
    prefer_huge_pages(table.spare_capacity_mut());
    table.extend(entries);
    table.into_boxed_slice()
}

/// Has to come before anything is put there: a page gets its size when it is touched first.
fn prefer_huge_pages<T>(memory: &mut [MaybeUninit<T>]) {
    let (base, len) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory));
    let before = base.align_offset(PAGE_BYTES);
    let inside = len.saturating_sub(before) / PAGE_BYTES * PAGE_BYTES;
    if inside > 0 {
        // SAFETY: whole pages of memory that is the caller's alone. The advice changes how it is backed, and not what
        // it has. It is best effort: without it only the time is lost.
        let _ = unsafe { madvise(base.wrapping_add(before).cast(), inside, Advice::LinuxHugepage) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_any_size_has_its_entries() {
        for count in [0, 1, 511, 512, 513, 1 << 20] {
            let table = table((0..count).map(|i| i as u64 * 3));
            assert_eq!(table.len(), count);
            assert!(table.iter().zip(0..).all(|(entry, i)| *entry == i * 3));
        }
        assert_eq!(table((0..9).map(|_| ())).len(), 9);
    }

    /// The kernel says which of a process's memory was advised so, if it has such pages at all.
    #[test]
    fn a_large_table_is_to_be_in_huge_pages() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return;
        }
        let table = table((0..1u32 << 20).map(u64::from));
        let at = table.as_ptr().addr() + (table.len() * 4);
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_its = false;
        let flags = smaps.lines().find_map(|line| {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let range = range.map(|(a, b)| [a, b].map(|hex| usize::from_str_radix(hex, 16)));
            if let Some([Ok(from), Ok(to)]) = range {
                is_its = (from..to).contains(&at);
            }
            line.strip_prefix("VmFlags:").filter(|_| is_its)
        });
        assert!(flags.unwrap().contains(" hg"), "{flags:?}");
    }
}
