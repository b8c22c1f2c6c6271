//! A guest's grant table: the frames that the backend may access, and those that it accesses now.
//!
//! Each reference is one 64-bit word, changed by compare-and-swap only. It is like version 1 of Xen's tables, but with
//! the number of users. So a frontend that revokes a grant either gets it back for good or learns that it is in use,
//! however many copies run (threats.md T5, T14).
//!
//! | bits | meaning |
//! |---|---|
//! | 0 | the backend may use the frame |
//! | 2 | for reading only |
//! | 3, 4 | the backend is reading, writing it now |
//! | 8..24 | the number of copies and mappings that use it |
//! | 24..40 | the domain that may use it |
//! | 40..64 | frame number |

use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_xen::hypervisor::{DomId, GNTST_BAD_GNTREF, GNTST_GENERAL_ERROR, GrantRef};

/// `GNTST_bad_page`: the grant names a frame that the guest does not have.
pub const GNTST_BAD_PAGE: i16 = -9;

const PERMIT: u64 = 1 << 0;
const READ_ONLY: u64 = 1 << 2;
const READING: u64 = 1 << 3;
const WRITING: u64 = 1 << 4;
const USERS_SHIFT: u32 = 8;
const USERS_MAX: u64 = 0xFFFF;
const USERS: u64 = USERS_MAX << USERS_SHIFT;
const DOMID_SHIFT: u32 = 24;
const FRAME_SHIFT: u32 = 40;
/// Frame numbers are below this: 64 GiB of guest memory.
pub const MAX_FRAMES: u32 = 1 << 24;

/// The backend's access to a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads it: data of writes, indirect pages.
    Read,
    /// Writes it: data of reads, rings.
    Write,
}

/// The backend is using the frame; its grant cannot be revoked now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the backend is still using grant {}", .0.0)]
pub struct InUse(pub GrantRef);

/// The words of a table. They are in the guest's memory, and the guest can write anything there.
#[derive(Clone, Copy)]
pub struct GrantTable<'a>(pub(super) &'a [AtomicU64]);

impl GrantTable<'_> {
    /// The number of references; they run from 0.
    pub fn len(&self) -> u32 {
        self.0.len() as u32
    }

    /// Always `false`.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn entry(&self, gref: GrantRef) -> Option<&AtomicU64> {
        self.0.get(gref.0 as usize)
    }

    /// Grants `domid` the frame `frame`, for the frontend.
    ///
    /// # Panics
    /// If there is no such reference, or the frame number does not fit: a bug of the frontend.
    pub fn grant(&self, gref: GrantRef, domid: DomId, frame: u32, read_only: bool) {
        assert!(frame < MAX_FRAMES, "frame {frame} does not fit in a grant");
        let word = PERMIT
            | if read_only { READ_ONLY } else { 0 }
            | u64::from(domid.0) << DOMID_SHIFT
            | u64::from(frame) << FRAME_SHIFT;
        // Release: the thread that pins the grant sees earlier writes to the frame.
        self.entry(gref).expect("a reference of the table").store(word, Ordering::Release);
    }

    /// Revokes the grant, for the frontend.
    ///
    /// # Errors
    /// [`InUse`]: nothing changed, and the frame must not be reused.
    pub fn revoke(&self, gref: GrantRef) -> Result<(), InUse> {
        let Some(entry) = self.entry(gref) else { return Ok(()) };
        // Acquire: the backend's accesses have ended before the frame is used again.
        entry
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |w| (w & USERS == 0).then_some(0))
            .map(drop)
            .map_err(|_| InUse(gref))
    }

    /// Whether the backend is using the frame now.
    pub fn in_use(&self, gref: GrantRef) -> bool {
        self.entry(gref).is_some_and(|e| e.load(Ordering::Acquire) & USERS != 0)
    }

    /// The raw word; for reports and hostile tests.
    pub fn raw(&self, gref: GrantRef) -> Option<u64> {
        self.entry(gref).map(|e| e.load(Ordering::Acquire))
    }

    /// The frame that a reference names, if it names one.
    pub(super) fn granted_frame(&self, gref: GrantRef) -> Option<u32> {
        self.raw(gref).filter(|word| word & PERMIT != 0).map(|word| (word >> FRAME_SHIFT) as u32)
    }

    /// Writes a raw word, as a hostile frontend does.
    pub fn set_raw(&self, gref: GrantRef, word: u64) {
        if let Some(entry) = self.entry(gref) {
            entry.store(word, Ordering::Release);
        }
    }

    /// Begins a use of the grant by the backend; returns the frame's number, below `frames`.
    ///
    /// # Errors
    /// Xen's status: absent, revoked, another domain's and read-only grants are general errors there.
    /// errors there.
    pub(super) fn pin(
        &self,
        gref: GrantRef,
        by: DomId,
        access: Access,
        frames: u32,
    ) -> Result<u32, i16> {
        let entry = self.entry(gref).ok_or(GNTST_BAD_GNTREF)?;
        let mut word = entry.load(Ordering::Relaxed);
        loop {
            let readable = access == Access::Read || word & READ_ONLY == 0;
            let ours = (word >> DOMID_SHIFT) as u16 == by.0;
            if word & PERMIT == 0 || !readable || !ours || word & USERS == USERS {
                return Err(GNTST_GENERAL_ERROR);
            }
            let frame = (word >> FRAME_SHIFT) as u32;
            if frame >= frames {
                return Err(GNTST_BAD_PAGE);
            }
            let bit = if access == Access::Read { READING } else { WRITING };
            let pinned = (word + (1 << USERS_SHIFT)) | bit;
            match entry.compare_exchange_weak(word, pinned, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(frame),
                Err(now) => word = now,
            }
        }
    }

    /// Ends a use of a pinned grant. A frontend that has overwritten the word meanwhile loses its own count, nothing
    /// else.
    pub(super) fn unpin(&self, gref: GrantRef) {
        let Some(entry) = self.entry(gref) else { return };
        let _ = entry.fetch_update(Ordering::Release, Ordering::Relaxed, |word| {
            let users = (word & USERS) >> USERS_SHIFT;
            let left = users.checked_sub(1)?;
            let bits = if left == 0 { word & !(READING | WRITING) } else { word };
            Some(bits & !USERS | left << USERS_SHIFT)
        });
    }

    /// Clears all uses: the process that had them has ended, and its mappings with it.
    pub(super) fn clear_uses(&self) {
        for entry in self.0 {
            let _ = entry.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |word| {
                (word & USERS != 0).then_some(word & !(USERS | READING | WRITING))
            });
        }
    }

    /// References that the backend is using; 0 when nothing is connected (T7).
    pub fn users(&self) -> u64 {
        self.0.iter().map(|e| (e.load(Ordering::Acquire) & USERS) >> USERS_SHIFT).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACK: DomId = DomId(0);
    const REF: GrantRef = GrantRef(1);

    fn words() -> [AtomicU64; 4] {
        std::array::from_fn(|_| AtomicU64::new(0))
    }

    #[test]
    fn a_grant_can_be_used_until_it_is_taken_back() {
        let words = words();
        let table = GrantTable(&words);
        assert_eq!(table.pin(REF, BACK, Access::Read, 10), Err(GNTST_GENERAL_ERROR));
        table.grant(REF, BACK, 7, false);
        assert_eq!(table.pin(REF, BACK, Access::Write, 10), Ok(7));
        table.unpin(REF);
        assert_eq!(table.revoke(REF), Ok(()));
        assert_eq!(table.pin(REF, BACK, Access::Read, 10), Err(GNTST_GENERAL_ERROR));
    }

    #[test]
    fn each_fault_has_xens_status() {
        let words = words();
        let table = GrantTable(&words);
        assert_eq!(table.pin(GrantRef(4), BACK, Access::Read, 10), Err(GNTST_BAD_GNTREF));
        assert_eq!(table.pin(GrantRef(u32::MAX), BACK, Access::Read, 10), Err(GNTST_BAD_GNTREF));
        table.grant(REF, BACK, 7, true);
        assert_eq!(table.pin(REF, BACK, Access::Write, 10), Err(GNTST_GENERAL_ERROR));
        assert_eq!(table.pin(REF, DomId(3), Access::Read, 10), Err(GNTST_GENERAL_ERROR));
        assert_eq!(table.pin(REF, BACK, Access::Read, 7), Err(GNTST_BAD_PAGE));
        assert_eq!(table.users(), 0, "a refused use is no use");
        assert_eq!(table.pin(REF, BACK, Access::Read, 8), Ok(7));
    }

    #[test]
    fn a_grant_in_use_is_not_given_back_before_its_last_user_is_done() {
        let words = words();
        let table = GrantTable(&words);
        table.grant(REF, BACK, 0, false);
        table.pin(REF, BACK, Access::Read, 1).unwrap();
        table.pin(REF, BACK, Access::Write, 1).unwrap();
        assert_eq!(table.revoke(REF), Err(InUse(REF)));
        table.unpin(REF);
        assert!(table.in_use(REF));
        assert_eq!(table.revoke(REF), Err(InUse(REF)));
        table.unpin(REF);
        assert!(!table.in_use(REF));
        assert_eq!(table.raw(REF).unwrap() & (READING | WRITING), 0);
        assert_eq!(table.revoke(REF), Ok(()));
    }

    #[test]
    fn more_releases_than_uses_do_nothing() {
        let words = words();
        let table = GrantTable(&words);
        table.grant(REF, BACK, 3, false);
        let before = table.raw(REF);
        table.unpin(REF);
        assert_eq!(table.raw(REF), before);
        table.set_raw(REF, u64::MAX);
        assert_eq!(table.pin(REF, BACK, Access::Read, 10), Err(GNTST_GENERAL_ERROR));
    }

    #[test]
    fn a_revoked_grant_is_never_used_afterwards() {
        let words = words();
        let table = GrantTable(&words);
        let owned = AtomicU64::new(0);
        std::thread::scope(|s| {
            s.spawn(|| {
                for _ in 0..20_000 {
                    if table.pin(REF, BACK, Access::Read, 1).is_ok() {
                        // While it is pinned, the frontend must not get it back.
                        assert_eq!(owned.load(Ordering::SeqCst), 0);
                        table.unpin(REF);
                    }
                }
            });
            for _ in 0..20_000 {
                table.grant(REF, BACK, 0, false);
                while table.revoke(REF).is_err() {}
                owned.store(1, Ordering::SeqCst);
                owned.store(0, Ordering::SeqCst);
            }
        });
        assert_eq!(table.users(), 0);
    }
}
