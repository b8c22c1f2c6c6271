//! From which member an owner reads.

use ferrite_pool::{
    Blocks, Config, ConnId, Effect, Event, Generation, Io, MemberId, Members, OpId, Owner, OwnerId,
    Record, Reply, Request, RequestId, Revision, Rules, Said, Wanted,
};

const MIB_BLOCKS: u64 = 2048;
const SECOND: u64 = 1_000_000_000;

/// An owner that serves, with these members in sync. The connection of each has its number.
fn serving(members: u8) -> Owner {
    let (mut owner, _) = Owner::start(Config {
        me: OwnerId(1),
        trust: 2 * SECOND,
        drift: SECOND / 25,
        patience: 3 * SECOND,
        grace: SECOND,
        region_blocks: MIB_BLOCKS,
        copy_blocks: MIB_BLOCKS,
        disk_blocks: 1024 * MIB_BLOCKS,
        min: 1,
        rules: Rules::default(),
    });
    let in_sync: Members = (0..members).map(|n| MemberId(n)).collect();
    let (generation, out) = (Generation(1), Members::new());
    let record = Record { generation, owner: OwnerId(0), in_sync: in_sync.clone(), out, nonce: 0 };
    owner.handle(1, Event::Record(Some((Revision(1), record))));
    owner.handle(1, Event::Said(Said::Won(Revision(2))));
    for member in in_sync {
        let conn = ConnId(member.0.into());
        owner.handle(1, Event::Connected(member, conn));
        let opened = Reply::Opened { incomplete: false, dirty: Default::default() };
        for (conn, confirm) in sent(&owner.handle(1, Event::Reply(conn, opened))) {
            owner.handle(1, Event::Reply(conn, Reply::Done { op: confirm }));
        }
    }
    assert!(owner.is_serving());
    owner
}

fn sent(effects: &[Effect]) -> Vec<(ConnId, OpId)> {
    let sent = effects.iter().filter_map(|effect| match effect {
        Effect::Send(conn, Request::Io { op, .. }) => Some((*conn, *op)),
        _ => None,
    });
    sent.collect()
}

/// Asks for a read. The connection that it goes by.
fn read(owner: &mut Owner, id: u64, start: u64, blocks: u64) -> (ConnId, OpId) {
    let wanted = Wanted::Read(Blocks { start, end: start + blocks });
    let effects = owner.handle(1, Event::Request(RequestId(id), wanted));
    let is_read = |effect: &Effect| {
        matches!(effect, Effect::Send(_, Request::Io { io: Io::Read { .. }, .. }))
    };
    let reads: Vec<Effect> = effects.into_iter().filter(is_read).collect();
    assert_eq!(reads.len(), 1, "{reads:?}");
    sent(&reads)[0]
}

#[test]
fn reads_that_are_under_way_together_are_spread_over_all_members() {
    for members in 1..=3 {
        let mut owner = serving(members);
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
    let mut owner = serving(2);
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
