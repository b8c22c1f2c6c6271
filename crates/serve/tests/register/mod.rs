//! Checks concurrent writes and reads of several clients to places of a disk.
//!
//! Each place is a register: its writes and reads must look as if each had happened at one time between its begin and
//! its answer. All writes of a place differ, so a read identifies its write. For these there is a simple test (Gibbons
//! and Korach, "Testing shared memories", 1997). The value of a write was present from the first end to the last begin,
//! of this write and its reads. If the former is before the latter, no other value can have been present in between.

use std::collections::HashMap;

/// An operation on a register, with its times by a clock that all clients share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) register: u64,
    /// The written or read value; 0 is the initial one.
    pub(crate) value: u64,
    pub(crate) is_write: bool,
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

/// The time in which a write's value was certainly present.
#[derive(Clone, Copy, Debug)]
struct Zone {
    /// The begin of the write.
    begin: u64,
    first_end: u64,
    last_begin: u64,
}

impl Zone {
    /// Whether it was present from the one time to the other.
    fn is_forward(&self) -> bool {
        self.first_end < self.last_begin
    }
}

/// The reason why no register can behave like this.
pub(crate) fn wrong(events: &[Event]) -> Option<String> {
    let mut zones: HashMap<(u64, u64), Zone> = HashMap::new();
    let mut sorted = events.to_vec();
    // Writes first: each makes its zone.
    sorted.sort_by_key(|e| !e.is_write);
    for e in &sorted {
        let at_first = Zone { begin: 0, first_end: 0, last_begin: 0 };
        let zone = match e.is_write {
            true => {
                let own = Zone { begin: e.begin, first_end: e.end, last_begin: e.begin };
                zones.insert((e.register, e.value), own);
                continue;
            }
            false if e.value == 0 => zones.entry((e.register, 0)).or_insert(at_first),
            false => match zones.get_mut(&(e.register, e.value)) {
                Some(zone) => zone,
                None => return Some(format!("{e:?}: that was never written")),
            },
        };
        if e.end < zone.begin {
            return Some(format!("{e:?}: it was not written yet"));
        }
        zone.first_end = zone.first_end.min(e.end);
        zone.last_begin = zone.last_begin.max(e.begin);
    }
    let all: Vec<_> = zones.into_iter().collect();
    for ((register, value), a) in all.iter().filter(|(_, a)| a.is_forward()) {
        for ((other, another), b) in &all {
            let is_other = register == other && value != another;
            // Two forward zones overlap, or a backward one lies within a forward one.
            if is_other && a.first_end < b.last_begin && b.first_end < a.last_begin {
                return Some(format!(
                    "register {register}: {value:#x} was there {a:?}, and {another:#x} {b:?}"
                ));
            }
        }
    }
    None
}

#[test]
fn a_history_that_no_register_has_is_found() {
    let event = |value, is_write, begin, end| Event { register: 1, value, is_write, begin, end };
    let (one, two) = (event(1, true, 1, 20), event(2, true, 4, 5));
    let read = |value, begin, end| event(value, false, begin, end);
    // The first is in flight all the time: it may be present before, or after.
    assert_eq!(wrong(&[one, two, read(2, 6, 7), read(1, 21, 22)]), None);
    assert_eq!(wrong(&[one, two, read(1, 2, 3), read(2, 6, 7)]), None);
    assert_eq!(wrong(&[one, two, read(0, 2, 3), read(2, 6, 7), read(2, 21, 22)]), None);
    // But not twice, as if it was repeated.
    assert!(wrong(&[one, two, read(1, 2, 3), read(2, 6, 7), read(1, 21, 22)]).is_some());
    assert!(wrong(&[two, read(0, 6, 7)]).is_some());
    assert!(wrong(&[two, read(2, 1, 3)]).is_some());
    assert!(wrong(&[read(3, 1, 3)]).is_some());
}
