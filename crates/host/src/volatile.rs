//! Copies to and from memory that others may change meanwhile: the kernel, a hypervisor, another
//! process. Volatile, so that the compiler assumes nothing about the bytes and reads or writes
//! each exactly once (XSA-155); by words where the address allows. Where the processor copies or sets words
//! by one instruction long ones are that: a copy takes less than half of the time.

const WORD: usize = size_of::<u64>();
/// Words from which on that instruction takes less time than a loop.
#[cfg(target_arch = "x86_64")]
const MANY: usize = 64;

/// Copies words by one instruction, each once. `false`: they are few, or the processor has none.
///
/// # Safety
/// So many words from `from` on must be readable, and from `to` on writable, and they must not overlap.
unsafe fn copy_many(from: *const u8, to: *mut u8, words: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if words >= MANY {
        // SAFETY: as the caller vouches. The direction flag is clear by the ABI. The compiler takes the
        // instruction for one that may read and write all memory.
        unsafe {
            std::arch::asm!(
                "rep movsq",
                inout("rcx") words => _,
                inout("rsi") from => _,
                inout("rdi") to => _,
                options(nostack, preserves_flags)
            );
        }
        return true;
    }
    let _ = (from, to, words);
    false
}

/// Sets words by one instruction, each once. `false`: they are few, or the processor has none.
///
/// # Safety
/// So many words from `to` on must be writable.
unsafe fn fill_many(to: *mut u64, word: u64, words: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    if words >= MANY {
        // SAFETY: as in `copy_many`.
        unsafe {
            std::arch::asm!(
                "rep stosq",
                inout("rcx") words => _,
                in("rax") word,
                inout("rdi") to => _,
                options(nostack, preserves_flags)
            );
        }
        return true;
    }
    let _ = (to, word, words);
    false
}

/// Bytes before the first word boundary, and how many whole words follow.
fn split(at: *const u8, len: usize) -> (usize, usize) {
    let head = at.align_offset(WORD).min(len);
    (head, (len - head) / WORD)
}

/// Copies `to.len()` bytes from `from`.
///
/// # Safety
/// `from` must be mapped readable memory of that length, and must not overlap `to`.
pub unsafe fn copy_out(from: *const u8, to: &mut [u8]) {
    let (head, words) = split(from, to.len());
    let (first, rest) = to.split_at_mut(head);
    // SAFETY: every access below is inside from..from+to.len(); words are aligned by `split`.
    unsafe {
        bytes_out(from, first);
        let from = from.add(head);
        if copy_many(from, rest.as_mut_ptr(), words) {
            return bytes_out(from.add(words * WORD), &mut rest[words * WORD..]);
        }
        let mut chunks = rest.chunks_exact_mut(WORD);
        for (i, chunk) in chunks.by_ref().enumerate() {
            chunk.copy_from_slice(&from.cast::<u64>().add(i).read_volatile().to_ne_bytes());
        }
        bytes_out(from.add(words * WORD), chunks.into_remainder());
    }
}

/// Copies `from` to `to`.
///
/// # Safety
/// `to` must be mapped writable memory of `from.len()` bytes, and must not overlap `from`.
pub unsafe fn copy_in(to: *mut u8, from: &[u8]) {
    let (head, words) = split(to, from.len());
    let (first, rest) = from.split_at(head);
    // SAFETY: every access below is inside to..to+from.len(); words are aligned by `split`.
    unsafe {
        bytes_in(to, first);
        let to = to.add(head);
        if copy_many(rest.as_ptr(), to, words) {
            return bytes_in(to.add(words * WORD), &rest[words * WORD..]);
        }
        let mut chunks = rest.chunks_exact(WORD);
        for (i, chunk) in chunks.by_ref().enumerate() {
            let mut word = [0u8; WORD];
            word.copy_from_slice(chunk);
            to.cast::<u64>().add(i).write_volatile(u64::from_ne_bytes(word));
        }
        bytes_in(to.add(words * WORD), chunks.remainder());
    }
}

/// Copies `len` bytes from one such memory to another.
///
/// # Safety
/// `from` must be mapped readable and `to` mapped writable memory of that length, and they must not overlap.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let (head, words) = split(to, len);
    // Where the two are aligned alike, words of both are.
    let alike = (from as usize ^ to as usize).is_multiple_of(WORD);
    let (head, words) = if alike { (head, words) } else { (len, 0) };
    let tail = head + words * WORD;
    // SAFETY: every access is inside of the two ranges; words are aligned by `split`.
    unsafe {
        let byte = |i: usize| to.add(i).write_volatile(from.add(i).read_volatile());
        (0..head).for_each(byte);
        if !copy_many(from.add(head), to.add(head), words) {
            let (from, to) = (from.add(head).cast::<u64>(), to.add(head).cast::<u64>());
            (0..words).for_each(|i| to.add(i).write_volatile(from.add(i).read_volatile()));
        }
        (tail..len).for_each(byte);
    }
}

/// Sets `len` bytes from `to` on.
///
/// # Safety
/// `to` must be mapped writable memory of that length.
pub unsafe fn fill(to: *mut u8, len: usize, byte: u8) {
    let (head, words) = split(to, len);
    let word = u64::from_ne_bytes([byte; WORD]);
    // SAFETY: every access below is inside to..to+len; words are aligned by `split`.
    unsafe {
        for i in (0..head).chain(head + words * WORD..len) {
            to.add(i).write_volatile(byte);
        }
        let middle = to.add(head).cast::<u64>();
        if !fill_many(middle, word, words) {
            (0..words).for_each(|i| middle.add(i).write_volatile(word));
        }
    }
}

/// # Safety
/// As [`copy_out`].
unsafe fn bytes_out(from: *const u8, to: &mut [u8]) {
    for (i, byte) in to.iter_mut().enumerate() {
        // SAFETY: i is below the length that the caller vouches for.
        *byte = unsafe { from.add(i).read_volatile() };
    }
}

/// # Safety
/// As [`copy_in`].
unsafe fn bytes_in(to: *mut u8, from: &[u8]) {
    for (i, byte) in from.iter().enumerate() {
        // SAFETY: i is below the length that the caller vouches for.
        unsafe { to.add(i).write_volatile(*byte) };
    }
}

/// Whether all of `len` bytes from `from` on are zero.
///
/// # Safety
/// `from` must be mapped readable memory of that length.
pub unsafe fn is_zero(from: *const u8, len: usize) -> bool {
    let (head, words) = split(from, len);
    let tail = head + words * WORD;
    // SAFETY: every access is inside from..from+len; words are aligned by `split`.
    unsafe {
        let edges = (0..head).chain(tail..len).all(|i| from.add(i).read_volatile() == 0);
        let from = from.add(head).cast::<u64>();
        edges && (0..words).all(|i| from.add(i).read_volatile() == 0)
    }
}
