//! From which member an owner reads.

use ferrite_pool::{
    Blocks, ConnId, Effect, Event, Io, OpId, Owner, Reply, Request, RequestId, Wanted,
};

use crate::{ops, serving};

/// Asks for a read. The connection that it goes by.
fn read(owner: &mut Owner, id: u64, start: u64, blocks: u64) -> (ConnId, OpId) {
    let wanted = Wanted::Read(Blocks { start, end: start + blocks });
    let effects = owner.handle(1, Event::Request(RequestId(id), wanted));
    let is_read = |effect: &Effect| {
        matches!(effect, Effect::Send(_, Request::Io { io: Io::Read { .. }, .. }))
    };
    let reads: Vec<Effect> = effects.into_iter().filter(is_read).collect();
    assert_eq!(reads.len(), 1, "{reads:?}");
    ops(&reads)[0]
}

#[test]
fn reads_that_are_under_way_together_are_spread_over_all_members() {
    for members in 1..=3 {
        let mut owner = serving(members, 0);
        let mut of = [0; 3];
        for id in 0..12 {
            // One region, in order.
            let (conn, _) = read(&mut owner, id, id * 8, 8);
            of[conn.0 as usize] += 1;
        }
        let each = 12 / usize::from(members);
        assert!(of[..members.into()].iter().all(|count| *count == each), "{of:?}");
    }
}

#[test]
fn a_member_that_answers_late_gets_fewer_reads() {
    let mut owner = serving(2, 0);
    let mut late = 0;
    for id in 0..32 {
        let (conn, op) = read(&mut owner, id, id * 8, 8);
        match conn {
            ConnId(0) => late += 1,
            _ => drop(owner.handle(1, Event::Reply(conn, Reply::Done { op }))),
        }
    }
    assert!((1..=2).contains(&late), "{late} reads wait for it");
}

#[test]
fn reads_one_after_the_other_are_spread_over_all_members() {
    for members in 2..=3 {
        let mut owner = serving(members, 0);
        let mut of = [0; 3];
        for id in 0..12 {
            let (conn, op) = read(&mut owner, id, id * 8, 8);
            of[conn.0 as usize] += 1;
            owner.handle(1, Event::Reply(conn, Reply::Done { op }));
        }
        let each = 12 / usize::from(members);
        assert!(of[..members.into()].iter().all(|count| *count == each), "{of:?}");
    }
}
