//! The requests of a serving owner to its members, and their times.

mod pace;
mod reads;

use ferrite_pool::{
    Config, ConnId, Effect, Event, Generation, Io, MemberId, Members, OpId, Owner, OwnerId, Record,
    Region, Reply, Request, Revision, Rules, Said,
};

/// Blocks of a region, and of the largest piece that is copied: a MiB.
const REGION: u64 = 2048;
const SECOND: u64 = 1_000_000_000;

/// An owner that serves from the first nanosecond on, with the first members in sync, and others out of it. The connection of
/// each has its number.
fn serving(in_sync: u8, out: u8) -> Owner {
    serving_with(in_sync, out, 0).0
}

/// Such an owner, and its effects. In the first `dirty` regions the owner before has left writes without a flush.
fn serving_with(in_sync: u8, out: u8, dirty: u64) -> (Owner, Vec<Effect>) {
    let (mut owner, _) = Owner::start(Config {
        me: OwnerId(1),
        trust: 2 * SECOND,
        drift: SECOND / 25,
        patience: 3 * SECOND,
        grace: SECOND,
        region_blocks: REGION,
        copy_blocks: REGION,
        disk_blocks: 1024 * REGION,
        min: 1,
        rules: Rules::default(),
    });
    let all = in_sync + out;
    let (out, in_sync): (Members, Members) =
        ((in_sync..all).map(MemberId).collect(), (0..in_sync).map(MemberId).collect());
    let (generation, owner_before) = (Generation(1), OwnerId(0));
    let record =
        Record { generation, owner: owner_before, in_sync: in_sync.clone(), out, nonce: 0 };
    owner.handle(1, Event::Record(Some((Revision(1), record))));
    owner.handle(1, Event::Said(Said::Won(Revision(2))));
    let mut effects = Vec::new();
    for member in in_sync {
        let conn = ConnId(member.0.into());
        owner.handle(1, Event::Connected(member, conn));
        let dirty = (0..dirty).map(Region).collect();
        effects.extend(
            owner.handle(1, Event::Reply(conn, Reply::Opened { incomplete: false, dirty })),
        );
    }
    let is_confirm =
        |effect: &Effect| matches!(effect, Effect::Send(_, Request::Io { io: Io::Confirm, .. }));
    let (confirms, mut others): (Vec<_>, Vec<_>) = effects.into_iter().partition(is_confirm);
    for (conn, op) in ops(&confirms) {
        others.extend(owner.handle(1, Event::Reply(conn, Reply::Done { op })));
    }
    assert!(owner.is_serving());
    (owner, others)
}

/// The operations that are sent, and by which connections.
fn ops(effects: &[Effect]) -> Vec<(ConnId, OpId)> {
    let sent = effects.iter().filter_map(|effect| match effect {
        Effect::Send(conn, Request::Io { op, .. }) => Some((*conn, *op)),
        _ => None,
    });
    sent.collect()
}
