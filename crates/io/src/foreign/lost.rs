//! SIGBUS at foreign memory whose file was made shorter.
//!
//! The access that faulted cannot be skipped, so the handler gives it something to access: it marks the memory as lost and
//! puts zeros in its place, and the access goes on. The accessor looks at the mark afterwards, and does not use what it
//! has read ([`Memory`](super::Memory)). All of the memory is replaced and not the page alone: parts of huge pages
//! cannot be.
//!
//! The mark is set before the pages are replaced. So a thread that has read a replaced page finds the mark.
//!
//! A SIGBUS anywhere else ends the process as before.

use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Most foreign memories of a process. A front end gives eight, and tables of requests beside them.
const SLOTS: usize = 512;

/// One foreign memory, for the handler. `base` 0: none.
struct Slot {
    base: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

static SLOTS_OF_ALL: [Slot; SLOTS] = [const {
    Slot { base: AtomicUsize::new(0), len: AtomicUsize::new(0), lost: AtomicBool::new(false) }
}; SLOTS];

/// Which slots are in use. The handler does not look here.
static IN_USE: Mutex<[bool; SLOTS]> = Mutex::new([false; SLOTS]);

/// The process's action at a SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// One memory that is watched.
pub(super) struct Watch(usize);

impl Watch {
    /// A watch of nothing yet.
    ///
    /// # Errors
    /// All slots are in use, or the handler cannot be installed.
    pub(super) fn new() -> io::Result<Watch> {
        install()?;
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = in_use.iter().position(|used| !used) else {
            let why = format!("this process has {SLOTS} foreign memories, and watches no more");
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, why));
        };
        in_use[index] = true;
        SLOTS_OF_ALL[index].lost.store(false, Ordering::SeqCst);
        Ok(Watch(index))
    }

    /// Begins to watch this mapping, which lives until [`end`](Self::end).
    pub(super) fn begin(&self, base: usize, len: usize) {
        let slot = &SLOTS_OF_ALL[self.0];
        slot.len.store(len, Ordering::SeqCst);
        slot.base.store(base, Ordering::SeqCst);
    }

    /// Ends it, before the mapping goes.
    pub(super) fn end(&self) {
        SLOTS_OF_ALL[self.0].base.store(0, Ordering::SeqCst);
    }

    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        SLOTS_OF_ALL[self.0].lost.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.end();
        IN_USE.lock().unwrap_or_else(PoisonError::into_inner)[self.0] = false;
    }
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if *installed {
        return Ok(());
    }
    let mut before = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: asks for the present action, and writes it to our own memory, which is large enough.
    if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all of it was zero, which is a valid value, and the kernel has written it.
    let _ = BEFORE.set(unsafe { before.assume_init() });
    // SAFETY: zeros are a valid value.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handle as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for, and calls what is async-signal-safe only.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    *installed = true;
    Ok(())
}

/// The slot whose mapping has this address, and that mapping.
fn find(address: usize) -> Option<(&'static Slot, usize, usize)> {
    SLOTS_OF_ALL.iter().find_map(|slot| {
        let base = slot.base.load(Ordering::SeqCst);
        let len = slot.len.load(Ordering::SeqCst);
        // Another thread may just have given the slot to another mapping.
        let same = slot.base.load(Ordering::SeqCst) == base;
        let inside = base != 0 && same && address.wrapping_sub(base) < len;
        inside.then_some((slot, base, len))
    })
}

/// Runs at a SIGBUS on the thread that has made the access. It must not allocate, lock or panic.
extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid structure, and a SIGBUS has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    if let Some((slot, base, len)) = find(address) {
        // First the mark, then the zeros.
        slot.lost.store(true, Ordering::SeqCst);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the range is a mapping of a `Memory`, which lives: this thread is accessing it. Its pages are replaced by
        // others with the same rights. The call is async-signal-safe, as a system call, and sets errno on failure only.
        let replaced = unsafe { libc::mmap(base as *mut libc::c_void, len, prot, flags, -1, 0) };
        if replaced != libc::MAP_FAILED {
            return;
        }
    }
    // Not ours: the access is repeated, with what the process did before.
    let before = BEFORE.get().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: a valid action of before, or a null pointer, which changes nothing and was never seen.
    unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
}
