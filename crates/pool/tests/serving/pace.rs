//! The time that the copy to a returning member leaves to the user's requests.

use std::collections::{BTreeMap, BTreeSet};

use ferrite_pool::{
    Blocks, ConnId, Effect, Event, Io, OpId, Owner, Region, Reply, Request, RequestId, Revision,
    Said, Wanted,
};

use crate::{REGION, SECOND, serving, serving_with};

const MILLISECOND: u64 = SECOND / 1000;
/// How long a member takes for a piece, and for anything else.
const COPY: u64 = MILLISECOND;
const OTHER: u64 = MILLISECOND / 10;
/// Regions that the member has missed.
const MISSED: u64 = 8;

/// A return, until both members are in sync.
#[derive(Default)]
struct Seen {
    /// Copies under way together, at most.
    most: usize,
    /// Blocks of the largest piece.
    largest: u64,
    /// Time with a copy under way, and all.
    copying: u64,
    all: u64,
    /// Requests that were answered.
    answered: u64,
}

struct World {
    owner: Owner,
    /// The coming events, by time and number; whether each is the end of a copy.
    ahead: BTreeMap<(u64, u64), (Event, bool)>,
    number: u64,
    under_way: usize,
    asks: bool,
    seen: Seen,
}

impl World {
    fn at(&mut self, time: u64, event: Event, is_copy: bool) {
        self.number += 1;
        self.ahead.insert((time, self.number), (event, is_copy));
    }

    fn ask(&mut self, now: u64) {
        // Behind what is copied, so that no request waits for a copy of its own blocks.
        let start = (MISSED + 1) * REGION;
        let wanted = Wanted::Write(Blocks { start, end: start + 8 });
        self.number += 1;
        let id = RequestId(self.number);
        self.at(now, Event::Request(id, wanted), false);
    }

    fn carry_out(&mut self, now: u64, effect: Effect) {
        match effect {
            Effect::Transact { compare, .. } => {
                let won = Event::Said(Said::Won(Revision(compare.0 + 1)));
                self.at(now + OTHER, won, false);
            }
            Effect::Connect(member) => {
                let conn = ConnId(member.0.into());
                self.at(now + OTHER, Event::Connected(member, conn), false);
            }
            Effect::Send(conn, Request::Open { .. }) => {
                let dirty = (0..MISSED).map(Region).collect();
                let opened = Reply::Opened { incomplete: false, dirty };
                self.at(now + OTHER, Event::Reply(conn, opened), false);
            }
            Effect::Send(conn, Request::Io { op, io }) => {
                let is_copy = matches!(io, Io::Read { .. } | Io::Repair { .. });
                if let Io::Read { blocks } = io {
                    self.seen.largest = self.seen.largest.max(blocks.end - blocks.start);
                }
                self.under_way += usize::from(is_copy);
                self.seen.most = self.seen.most.max(self.under_way);
                let reply = match io {
                    Io::Bits => Reply::Bits { op, dirty: BTreeSet::new() },
                    _ => Reply::Done { op },
                };
                let takes = if is_copy { COPY } else { OTHER };
                self.at(now + takes, Event::Reply(conn, reply), is_copy);
            }
            Effect::Answer(_) => {
                self.seen.answered += 1;
                if self.asks {
                    self.ask(now);
                }
            }
            _ => {}
        }
    }
}

/// Has a member return, with a request under way all the time or none.
fn a_return(asks: bool) -> Seen {
    let owner = serving(1, 1);
    let (ahead, seen) = (BTreeMap::new(), Seen::default());
    let mut world = World { owner, ahead, number: 0, under_way: 0, asks, seen };
    world.at(MILLISECOND, Event::Tick, false);
    if asks {
        world.ask(MILLISECOND);
    }
    let (mut before, mut begun) = (0, None);
    while let Some(((now, _), (event, is_copy))) = world.ahead.pop_first() {
        if world.under_way > 0 {
            world.seen.copying += now - before;
            begun = begun.or(Some(before));
        }
        before = now;
        world.under_way -= usize::from(is_copy);
        if matches!(event, Event::Tick) {
            world.at(now + SECOND / 10, Event::Tick, false);
        }
        for effect in world.owner.handle(now, event) {
            world.carry_out(now, effect);
        }
        if world.owner.record().is_some_and(|(_, record)| record.out.is_empty()) {
            world.seen.all = now - begun.unwrap_or(now);
            return world.seen;
        }
        assert!(now < 60 * SECOND, "it does not return");
    }
    unreachable!("time goes on")
}

#[test]
fn a_copy_beside_requests_takes_half_of_the_time_and_small_pieces() {
    let seen = a_return(true);
    assert_eq!((seen.most, seen.largest), (1, REGION / 8));
    // Behind the last piece nothing waits.
    let all = seen.all + 2 * COPY;
    assert!(seen.copying * 2 <= all, "{} of {all}", seen.copying);
    // It does not starve either.
    assert!(seen.copying * 5 >= seen.all * 2, "{} of {}", seen.copying, seen.all);
    assert!(seen.answered > 100, "{}", seen.answered);
}

#[test]
fn a_copy_without_requests_uses_all_of_the_time() {
    let seen = a_return(false);
    assert_eq!((seen.most, seen.largest, seen.answered), (2, REGION, 0));
    assert!(seen.copying * 10 >= seen.all * 9, "{} of {}", seen.copying, seen.all);
    // Each region is read and written, two at a time.
    assert!(seen.all < MISSED * 2 * COPY);
}

/// The reads of copies among these: their connections, operations and blocks.
fn reads(effects: &[Effect]) -> Vec<(ConnId, OpId, Blocks)> {
    let reads = effects.iter().filter_map(|effect| match effect {
        Effect::Send(conn, Request::Io { op, io: Io::Read { blocks } }) => {
            Some((*conn, *op, *blocks))
        }
        _ => None,
    });
    reads.collect()
}

#[test]
fn what_a_read_waits_for_is_copied_at_once() {
    let (mut owner, begun) = serving_with(2, 0, MISSED);
    let begun = reads(&begun);
    assert_eq!(begun.len(), 2, "no request has come yet");
    // The guest writes, and the copies under way end.
    let far = Wanted::Write(Blocks { start: 99 * REGION, end: 99 * REGION + 8 });
    owner.handle(2, Event::Request(RequestId(1), far));
    for (conn, op, _) in begun {
        let written = owner.handle(COPY, Event::Reply(conn, Reply::Done { op }));
        for effect in written {
            if let Effect::Send(conn, Request::Io { op, io: Io::Repair { .. } }) = effect {
                let next = owner.handle(2 * COPY, Event::Reply(conn, Reply::Done { op }));
                assert_eq!(reads(&next), []);
            }
        }
    }
    let start = (MISSED - 1) * REGION;
    let wanted = Wanted::Read(Blocks { start, end: start + 8 });
    let effects = owner.handle(2 * COPY + 1, Event::Request(RequestId(2), wanted));
    let copies: Vec<Blocks> = reads(&effects).into_iter().map(|(_, _, blocks)| blocks).collect();
    assert_eq!(copies, [Blocks { start, end: start + REGION }]);
}
