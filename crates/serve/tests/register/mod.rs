//! Places of a disk that several clients write and read at once, and what they may see there.
//!
//! Each place is a register: its writes and reads must look as if each had happened at one moment between
//! its begin and its answer. All writes of a place differ, so a read says which write it has seen. For
//! these there is a simple test (Gibbons and Korach, "Testing shared memories", 1997). What a write has left
//! was there from the first end to the last begin, of this write and its reads. Where the one is before the
//! other, nothing else can have been there meanwhile.

use std::collections::HashMap;

/// What was done with a register, and when by a clock that all clients share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) register: u64,
    /// Written or read; 0 is what was there at first.
    pub(crate) value: u64,
    pub(crate) is_write: bool,
    pub(crate) begin: u64,
    pub(crate) end: u64,
}

/// The time in which a write was what the register held, as far as that is known.
#[derive(Clone, Copy, Debug)]
struct Zone {
    /// The write's own.
    begin: u64,
    first_end: u64,
    last_begin: u64,
}

impl Zone {
    /// It was there from the one to the other.
    fn is_forward(&self) -> bool {
        self.first_end < self.last_begin
    }
}

/// Why no register can have done this.
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
                None => return Some(format!("{e:?}: nobody has written that")),
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
            // Two that were there for a time overlap, or one that was there for a moment lies within.
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
    // The first is under way all the time: it may be there before, or after.
    assert_eq!(wrong(&[one, two, read(2, 6, 7), read(1, 21, 22)]), None);
    assert_eq!(wrong(&[one, two, read(1, 2, 3), read(2, 6, 7)]), None);
    assert_eq!(wrong(&[one, two, read(0, 2, 3), read(2, 6, 7), read(2, 21, 22)]), None);
    // But not twice, as of one that was done again.
    assert!(wrong(&[one, two, read(1, 2, 3), read(2, 6, 7), read(1, 21, 22)]).is_some());
    assert!(wrong(&[two, read(0, 6, 7)]).is_some());
    assert!(wrong(&[two, read(2, 1, 3)]).is_some());
    assert!(wrong(&[read(3, 1, 3)]).is_some());
}
