//! The rules that a test may leave out, to see that it finds that.

use std::time::Duration;

/// T: for so long an owner relies on a confirmed generation (R5). Tests of the state machines have their own.
pub const TRUST: Duration = Duration::from_secs(2);
/// 2 % of it: two clocks that differ by 1 % each.
pub const DRIFT: Duration = Duration::from_millis(40);

/// A rule, or a part of one (`docs/internals/pool.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// R1: a member refuses older generations and operations outside of its session.
    Fence,
    /// R1: a member waits for the end of older I/O before it answers OPEN.
    Drain,
    /// R1: a connection of the same owner ends the one before it.
    LateConnection,
    /// R2 and R3: nothing is answered before the record is without the member that missed it.
    DropFirst,
    /// R3: nothing is read from a member that may have left.
    ReadSettled,
    /// R4: after a take-over that could not reach all members nothing is answered for a time.
    Wait,
    /// R5: reads are answered if every member has confirmed the generation lately.
    Proof,
    /// R6: bits are durable before data.
    BitsFirst,
    /// R6: bits are cleared only after a flush that was begun while all members were in sync.
    ClearLate,
    /// R7: no read of a region before it is equal on all members.
    EqualFirst,
    /// R8: a member that returns is copied to.
    Copy,
    /// R8: regions that only the returning member has marked are copied, too.
    OwnBits,
    /// R8: the returning member's bits become the union: regions that are copied to it are marked, and those that were
    /// equal already.
    Union,
    /// R9: overlapping requests wait for each other.
    Order,
    /// R10: a member that was restarted is not taken up as it is.
    Incomplete,
    /// R10: an incomplete member stays so until the owner says otherwise.
    StaysIncomplete,
    /// R11: an unknown outcome is settled by writing.
    Settle,
    /// LUNs: an owner whose generation is lower than that on the LUN does not take it.
    LunLookBefore,
    /// LUNs: the state that counts is read behind the reservation.
    LunLookBehind,
    /// LUNs: the generation is on the LUN before the wait for the owner before.
    LunClaim,
    /// LUNs: after a LUN is taken from another host, its copies are not open for T.
    LunWait,
    /// LUNs: a LUN that this host has reserved is still another host's for T, if that one was the last to open the copy.
    LunLastOwner,
}

/// The rules that are kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rules {
    #[cfg(feature = "leave-out")]
    without: Option<Rule>,
}

impl Rules {
    /// All but one.
    #[cfg(feature = "leave-out")]
    pub fn without(rule: Rule) -> Rules {
        Rules { without: Some(rule) }
    }

    /// Whether a rule is kept.
    #[cfg(feature = "leave-out")]
    pub(crate) fn keep(self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    /// Whether a rule is kept.
    #[cfg(not(feature = "leave-out"))]
    #[expect(clippy::unused_self, reason = "tests can leave one out")]
    pub(crate) fn keep(self, _: Rule) -> bool {
        true
    }
}
