//! NBD as its clients see it: the negotiation, the results of requests, and the errors.

use ferrite_testkit::bytes::runs;
use ferrite_testkit::nbd::{
    ACK, Client, Served, command, contexts, info, option, options, request,
};

const MIB: u64 = 1 << 20;
const BYTES: u64 = 64 * MIB;
const INVALID_OPTION: u32 = 1 << 31 | 3;
const UNSUPPORTED: u32 = 1 << 31 | 1;
const EPERM: u32 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;

fn raw() -> Served {
    Served::new("raw", BYTES, options())
}

#[test]
fn an_export_is_told_with_its_size_its_blocks_and_what_it_can() {
    let served = raw();
    for name in ["", "any name", "\u{fffd}"] {
        let mut client = served.connect();
        let answers = client.option(option::INFO, &info(name));
        // HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, MULTI_CONN, CACHE, FAST_ZERO.
        let export = [&[0, 0][..], &BYTES.to_be_bytes(), &[0xd, 0x6d]].concat();
        let blocks = [1u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
        let blocks = [&[0, 3][..], &blocks].concat();
        assert_eq!(answers, [(3, export), (3, blocks), (ACK, vec![])]);
        assert_eq!(client.option(option::LIST, &[]), [(2, vec![0; 4]), (ACK, vec![])]);
        // With chunks there is DF.
        assert_eq!(client.go(true), (BYTES, 0xded));
        client.write(0, &[7; 512]);
        assert_eq!(client.read(0, 1024), [[7; 512], [0; 512]].concat());
    }
}

#[test]
fn the_oldest_way_to_an_export_still_leads_there() {
    let served = raw();
    let mut client = served.connect();
    client.ask(option::EXPORT_NAME, b"whatever");
    let export = client.bytes(10);
    assert_eq!((&export[..8], &export[8..]), (&BYTES.to_be_bytes()[..], &[0xd, 0x6d][..]));
    client.write(512, &[3; 4096]);
    assert_eq!(client.read(512, 4096), [3; 4096]);
}

#[test]
fn options_that_are_unknown_or_make_no_sense_are_refused_and_the_client_may_go_on() {
    let served = raw();
    let mut client = served.connect();
    for unknown in [0, 5, 12, 99, u32::MAX] {
        assert_eq!(client.option(unknown, b"data"), [(UNSUPPORTED, vec![])]);
    }
    let broken: [(u32, &[u8]); 9] = [
        (option::LIST, b"x"),
        (option::STRUCTURED_REPLY, b"x"),
        (option::EXTENDED_HEADERS, b"x"),
        (option::GO, b""),
        (option::GO, &[0, 0, 0, 9, b'x', 0, 0]),
        (option::INFO, &[0, 0, 0, 0, 0, 2, 0, 3]),
        (option::INFO, &[0, 0, 0, 0, 0, 0, 0]),
        (option::LIST_META_CONTEXT, &[0, 0, 0, 0, 0, 0, 0, 9]),
        (option::SET_META_CONTEXT, &[0xff; 12]),
    ];
    for (option, data) in broken {
        assert_eq!(client.option(option, data), [(INVALID_OPTION, vec![])], "{option}");
    }
    // Without chunks there are no contexts.
    let queries = contexts("", &["base:allocation"]);
    assert_eq!(client.option(option::SET_META_CONTEXT, &queries), [(INVALID_OPTION, vec![])]);
    let much = vec![0; 1 << 20];
    assert_eq!(client.option(77, &much), [(1 << 31 | 9, vec![])]);
    client.go(true);
    client.flush();
}

#[test]
fn contexts_are_listed_and_set_for_the_export_that_they_were_asked_for() {
    let served = raw();
    let mut client = served.connect();
    client.option(option::STRUCTURED_REPLY, &[]);
    let of = |id: u8, name: &str| (4, [&[0, 0, 0, id][..], name.as_bytes()].concat());
    let (base, depth) = ("base:allocation", "qemu:allocation-depth");
    for (queries, names) in [
        (&[][..], &[base, depth][..]),
        (&["base:"], &[base]),
        (&[base, "other:thing"], &[base]),
        (&["qemu:"], &[depth]),
        (&[depth, "base:"], &[base, depth]),
    ] {
        let mut answers = client.option(option::LIST_META_CONTEXT, &contexts("a", queries));
        assert_eq!(answers.pop(), Some((ACK, vec![])));
        assert_eq!(answers, names.iter().map(|name| of(0, name)).collect::<Vec<_>>());
    }
    for queries in [&[][..], &["base:"], &["qemu:"], &["other:thing", "base:allocation "]] {
        let answers = client.option(option::SET_META_CONTEXT, &contexts("a", queries));
        assert_eq!(answers, [(ACK, vec![])], "{queries:?}");
    }
    let set = client.option(option::SET_META_CONTEXT, &contexts("a", &[depth, base, base]));
    assert_eq!(set, [of(1, base), of(2, depth), (ACK, vec![])]);
    client.option(option::GO, &info("b"));
    assert_eq!(client.call(command::BLOCK_STATUS, 0, 0, 512, &[]).error, EINVAL);
}

#[test]
fn a_client_that_aborts_or_breaks_the_negotiation_is_let_go() {
    let served = raw();
    let mut client = served.connect();
    assert_eq!(client.option(option::ABORT, &[]), [(ACK, vec![])]);
    assert!(client.is_closed());
    let mut client = served.connect();
    client.say(b"no option, but sixteen bytes");
    assert!(client.is_closed());
}

#[test]
fn what_was_written_is_read_in_one_piece_or_in_many() {
    for structured in [true, false] {
        let served = raw();
        let mut client = served.connect();
        client.go(structured);
        let data = runs(32 << 20, 512, |n| (n % 251) as u8);
        client.write(MIB - 512, &data);
        assert!(client.read(MIB - 512, 32 << 20) == data, "structured: {structured}");
        assert_eq!(client.read(0, 512), [0; 512]);
        // Many concurrent requests are answered, each with its own data, in any order.
        let cookies: Vec<u64> =
            (0..300u64).map(|i| client.send(command::READ, 0, MIB + i * 512, 512, &[])).collect();
        let mut seen: Vec<u64> = (0..300)
            .map(|_| {
                let reply = client.reply();
                let i = (reply.cookie - cookies[0]) as usize;
                assert_eq!((reply.error, &reply.data[..]), (0, &data[(i + 1) * 512..][..512]));
                reply.cookie
            })
            .collect();
        seen.sort_unstable();
        assert_eq!(seen, cookies);
    }
}

#[test]
fn requests_that_are_wrong_get_their_error_and_the_next_is_served() {
    let served = raw();
    let mut client = served.client();
    let cases = [
        // Length 0, and more than the limit.
        (command::READ, 0, 0, 0, EINVAL),
        (command::READ, 0, 0, (32 << 20) + 512, EINVAL),
        (command::TRIM, 0, 0, 0, EINVAL),
        (command::WRITE_ZEROES, 0, 100, 0, EINVAL),
        (command::BLOCK_STATUS, 0, 0, 0, EINVAL),
        // Past the end.
        (command::READ, 0, BYTES, 512, EINVAL),
        (command::READ, 0, BYTES - 1, 2, EINVAL),
        (command::READ, 0, u64::MAX - 511, 512, EINVAL),
        (command::TRIM, 0, BYTES - 512, 1024, EINVAL),
        (command::WRITE_ZEROES, 0, BYTES - 512, 1024, ENOSPC),
        (command::BLOCK_STATUS, 0, BYTES, 512, EINVAL),
        (command::CACHE, 0, 0, 0, EINVAL),
        (command::CACHE, 0, BYTES, 512, EINVAL),
        // Unknown.
        (8, 0, 0, 512, EINVAL),
        (u16::MAX, 0, 0, 512, EINVAL),
        (command::READ, 1 << 1, 0, 512, EINVAL),
        (command::READ, 1 << 15, 0, 512, EINVAL),
        (command::WRITE_ZEROES, 1 << 3, 0, 512, EINVAL),
        (command::WRITE, 1 << 5, 0, 0, EINVAL),
        (command::CACHE, 1 << 1, 0, 512, EINVAL),
        (command::FLUSH, 1 << 2, 0, 0, EINVAL),
        // The limit of a single chunk.
        (command::READ, 1 << 2, 0, 2 << 20, EOVERFLOW),
    ];
    for (command, flags, offset, len, error) in cases {
        let reply = client.call(command, flags, offset, len, &[]);
        assert_eq!(reply.error, error, "{command} {flags} {offset} {len}");
    }
    // The data of a refused write are not parsed as requests.
    let data = [&request(command::DISCONNECT, 0, 0, 0, 0)[..], &[0; 1004]].concat();
    for (offset, len, error) in [
        (BYTES - 1, 1032, ENOSPC),
        (BYTES - 1030, 1031, ENOSPC),
        (BYTES - 512, 1024, ENOSPC),
        (BYTES, 512, ENOSPC),
    ] {
        let data = &data[..len.min(data.len())];
        let reply = client.call(command::WRITE, 0, offset, len as u32, data);
        assert_eq!(reply.error, error, "{offset} {len}");
    }
    let much = vec![0x25; (32 << 20) + 512];
    assert_eq!(client.call(command::WRITE, 0, 0, much.len() as u32, &much).error, EINVAL);
    assert_eq!(client.read(0, 4096), [0; 4096]);
    client.write(0, &[9; 512]);
    assert_eq!(client.call(command::READ, 1 << 2, 0, 64 << 10, &[]).chunks, 1);
}

/// While a client sends data, it does not expect an answer to that request.
#[test]
fn a_write_that_is_refused_is_answered_when_its_data_have_come_and_not_without_them() {
    let served = raw();
    let mut client = served.client();
    let (flush, write) = (0x51, 0x52);
    let much = (32 << 20) + 512;
    for (offset, len, error) in
        [(BYTES, 1024, ENOSPC), (BYTES - 1, 1024, ENOSPC), (0, much, EINVAL)]
    {
        let heads = [
            request(command::FLUSH, 0, flush, 0, 0),
            request(command::WRITE, 0, write, offset, len),
        ];
        client.say(&[&heads.concat()[..], &[7; 512]].concat());
        assert_eq!(client.reply().cookie, flush, "{offset} {len}");
        client.say(&vec![7; len as usize - 512]);
        let reply = client.reply();
        assert_eq!((reply.cookie, reply.error), (write, error), "{offset} {len}");
    }
    client.say(&[&request(command::WRITE, 0, write, BYTES, 1024)[..], &[7; 512]].concat());
    client.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(client.is_closed());
}

#[test]
fn a_request_without_its_magic_ends_the_stream_and_what_came_before_is_answered() {
    let served = raw();
    let mut client = served.client();
    let cookie = client.send(command::WRITE, 0, 0, 512, &[5; 512]);
    client.say(&[0; 28]);
    assert_eq!(client.reply().cookie, cookie);
    assert!(client.is_closed());
    let mut client = served.client();
    let cookie = client.send(command::READ, 0, 0, 512, &[]);
    client.send(command::DISCONNECT, 0, 0, 0, &[]);
    let reply = client.reply();
    assert_eq!((reply.cookie, reply.data), (cookie, vec![5; 512]));
    assert!(client.is_closed());
}

#[test]
fn a_disk_that_is_only_read_refuses_changes_and_says_so_before() {
    let served =
        Served::new("raw", BYTES, ferrite_serve::nbd::Options { read_only: true, ..options() });
    let mut client = served.connect();
    // READ_ONLY; neither TRIM nor WRITE_ZEROES.
    assert_eq!(client.go(true), (BYTES, 0x58f));
    assert_eq!(client.call(command::WRITE, 0, 0, 512, &[1; 512]).error, EPERM);
    assert_eq!(client.call(command::TRIM, 0, 0, 512, &[]).error, EPERM);
    assert_eq!(client.call(command::WRITE_ZEROES, 0, 0, 512, &[]).error, EPERM);
    client.flush();
    assert_eq!(client.read(0, 512), [0; 512]);
}

fn extents(client: &mut Client, flags: u16, offset: u64, len: u32) -> Vec<(u32, u32)> {
    let reply = client.call(command::BLOCK_STATUS, flags, offset, len, &[]);
    assert_eq!(reply.error, 0);
    reply.extents
}

#[test]
fn the_status_of_blocks_says_where_data_are_in_every_format() {
    const HOLE: u32 = 3;
    for format in ["raw"].into_iter().chain(ferrite_testkit::images::FORMATS) {
        let served = Served::new(format, BYTES, options());
        let mut client = served.client();
        assert_eq!(extents(&mut client, 0, 0, BYTES as u32), [(BYTES as u32, HOLE)], "{format}");
        client.write(8 * MIB, &vec![1; 2 << 20]);
        let here = 2 * MIB as u32;
        let all = extents(&mut client, 0, 6 * MIB, 6 << 20);
        assert_eq!(all, [(here, HOLE), (here, 0), (here, HOLE)], "{format}");
        assert_eq!(extents(&mut client, 1 << 3, 6 * MIB, 6 << 20), [(here, HOLE)]);
        assert_eq!(extents(&mut client, 0, 8 * MIB, 512), [(512, 0)]);
    }
}

#[test]
fn zeros_take_space_if_they_are_to_and_are_zeros_in_every_format() {
    for format in ["raw"].into_iter().chain(ferrite_testkit::images::FORMATS) {
        let served = Served::new(format, BYTES, options());
        let mut client = served.client();
        client.write(0, &vec![1; 6 << 20]);
        // FUA, and odd ends.
        assert_eq!(client.call(command::WRITE_ZEROES, 1, 512, (4 << 20) - 1024, &[]).error, 0);
        let read = client.read(0, 6 << 20);
        let at = |byte: &u8| read.iter().position(|b| b == byte).unwrap();
        assert_eq!((at(&0), read.iter().rposition(|b| *b == 0)), (512, Some((4 << 20) - 513)));
        assert_eq!(client.call(command::WRITE_ZEROES, 2, 8 * MIB, 2 << 20, &[]).error, 0);
        assert_eq!(client.read(8 * MIB, 2 << 20), vec![0; 2 << 20], "{format}");
        assert_eq!(extents(&mut client, 0, 8 * MIB, 2 << 20), [(2 << 20, 0)], "{format}");
        // All of it, in parts.
        assert_eq!(client.call(command::WRITE_ZEROES, 0, 0, BYTES as u32, &[]).error, 0);
        assert_eq!(client.call(command::TRIM, 1, 0, BYTES as u32, &[]).error, 0);
        assert_eq!(client.read(0, 6 << 20), vec![0; 6 << 20], "{format}");
    }
}

#[test]
fn a_long_read_behind_a_durable_write_waits_for_it_and_is_answered() {
    let served = raw();
    let mut client = served.connect();
    client.go(false);
    let mut bytes = request(command::WRITE, 1, 101, 0, 512).to_vec();
    bytes.extend([6; 512]);
    bytes.extend(request(command::FLUSH, 0, 102, 0, 0));
    client.say(&bytes);
    let read = client.send(command::READ, 0, 0, 4 << 20, &[]);
    let mut replies: Vec<_> = (0..3).map(|_| client.reply()).collect();
    replies.sort_by_key(|reply| (reply.data.len(), reply.cookie));
    assert!(replies.iter().all(|reply| reply.error == 0));
    assert_eq!(
        (replies[2].cookie, &replies[2].data[..1024]),
        (read, &[[6; 512], [0; 512]].concat()[..])
    );
}

#[test]
fn neighbouring_writes_that_come_together_go_each_where_it_belongs() {
    let served = raw();
    let mut client = served.client();
    for order in [[3u64, 2, 1, 0], [1, 3, 0, 2]] {
        let write = |at: &u64| {
            let head = request(command::WRITE, 0, *at + 100, at * 4096, 4096);
            [&head[..], &[*at as u8 + 1; 4096]].concat()
        };
        client.say(&order.iter().flat_map(write).collect::<Vec<_>>());
        order.iter().for_each(|_| assert_eq!(client.reply().error, 0));
        let read = client.read(0, 4 * 4096);
        let right = |(i, page): (usize, &[u8])| page.iter().all(|byte| *byte == i as u8 + 1);
        assert!(read.chunks(4096).enumerate().all(right), "{order:?}");
    }
}
