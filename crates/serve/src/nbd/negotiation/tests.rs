use ferrite_disk::dirty::KnownMap;
use ferrite_nbd::wire::{DEPTH_CONTEXT, DIRTY_CONTEXT};

use super::*;

const EXPORT: Export =
    Export { bytes: 1 << 30, read_only: false, trims: true, preferred_bytes: 4096 };

/// An export with a dirty map.
fn offer() -> Offer {
    let maps = [KnownMap { name: "m".to_owned(), id: *b"0123456789abcdef" }];
    Offer { name: String::new(), export: EXPORT, dirty: DirtyContexts::of(&maps) }
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let len = data.len() as u32;
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

fn all() -> Vec<u8> {
    [
        3u32.to_be_bytes().to_vec(),
        option(99, b"unknown"),
        option(option::LIST, b""),
        option(7, &vec![0; MAX_OPTION_BYTES + 1]),
        option(option::STRUCTURED_REPLY, b""),
        option(option::GO, &[0, 0, 0, 1, b'x', 0, 1, 0, 1]),
    ]
    .concat()
}

/// The server's bytes, the outcome, and the rest of the input, if the bytes come in pieces of that length.
fn negotiate(bytes: &[u8], piece: usize) -> (Vec<u8>, Next, Vec<u8>) {
    let (mut out, mut input, mut next) = (Vec::new(), Vec::new(), Next::More);
    let offer = offer();
    let mut negotiation = Negotiation::new(vec![offer], Manners::default(), &mut out);
    for piece in bytes.chunks(piece) {
        input.extend_from_slice(piece);
        if next == Next::More {
            next = negotiation.go_on(&mut input, &mut out);
        }
        assert!(next != Next::More || input.len() < MAX_OPTION_BYTES + OPTION_HEAD_BYTES);
    }
    (out, next, input)
}

#[test]
fn options_are_understood_however_their_bytes_come() {
    let bytes = [&all()[..], b"requests"].concat();
    let whole = negotiate(&bytes, bytes.len());
    let agreed = Agreed { form: Form::Structured, ..Agreed::default() };
    assert_eq!((whole.1, &whole.2[..]), (Next::Requests(agreed), &b"requests"[..]));
    for piece in [1, 3, 17, 1000, 40_000] {
        assert!(negotiate(&bytes, piece) == whole, "pieces of {piece}");
    }
}

#[test]
fn a_client_that_goes_on_with_options_for_ever_is_let_go() {
    let flags = 3u32.to_be_bytes();
    let many = |count| [&flags[..], &option(99, b"").repeat(count)].concat();
    assert_eq!(negotiate(&many(MAX_OPTIONS), 4096).1, Next::More);
    assert_eq!(negotiate(&many(MAX_OPTIONS + 1), 4096).1, Next::Close);
}

#[test]
fn a_client_with_flags_that_nobody_knows_is_let_go() {
    assert_eq!(negotiate(&7u32.to_be_bytes(), 4).1, Next::Close);
}

#[test]
fn a_relay_of_an_older_version_hears_of_nothing_that_it_may_not_understand() {
    let manners = Manners { relayed: true, ..Manners::default() };
    let said = |relay: &[u8]| {
        let (mut out, offer) = (Vec::new(), offer());
        let mut negotiation = Negotiation::new(vec![offer], manners, &mut out);
        let list = [&0u32.to_be_bytes()[..], &0u32.to_be_bytes()].concat();
        let rest = [
            option(option::EXTENDED_HEADERS, b""),
            option(option::LIST_META_CONTEXT, &list),
            option(option::INFO, &[0; 6]),
        ];
        let mut input = [&3u32.to_be_bytes()[..], relay, &rest.concat()].concat();
        assert_eq!(negotiation.go_on(&mut input, &mut out), Next::More);
        let has = |name: &str| out.windows(name.len()).any(|part| part == name.as_bytes());
        let contexts = (has(DEPTH_CONTEXT), has(DIRTY_CONTEXT));
        // Behind the size.
        let at = out.windows(8).position(|part| part == EXPORT.bytes.to_be_bytes()).unwrap() + 8;
        (contexts, u16::from_be_bytes([out[at], out[at + 1]]), negotiation.agreed.form)
    };
    assert_eq!(said(b""), ((false, false), 0x16d, Form::Simple));
    assert_eq!(said(&option(option::RELAYED, b"")), ((true, false), 0xded, Form::Extended));
    let ours = option(option::RELAYED, &RELAY_VERSION.to_be_bytes());
    assert_eq!(said(&ours), ((true, true), 0xded, Form::Extended));
}

/// The contexts in the server's reply: their names and numbers.
fn contexts(option_number: u32, queries: &[&[u8]]) -> (Vec<(String, u32)>, Contexts) {
    let mut data = [&0u32.to_be_bytes()[..], &(queries.len() as u32).to_be_bytes()].concat();
    for query in queries {
        data.extend((query.len() as u32).to_be_bytes());
        data.extend(*query);
    }
    let mut out = Vec::new();
    let mut negotiation = Negotiation::new(vec![offer()], Manners::default(), &mut out);
    out.clear();
    let mut input = [
        3u32.to_be_bytes().to_vec(),
        option(option::STRUCTURED_REPLY, b""),
        option(option_number, &data),
    ]
    .concat();
    assert_eq!(negotiation.go_on(&mut input, &mut out), Next::More);
    let mut fields = Fields(&out);
    let mut told = Vec::new();
    while !fields.0.is_empty() {
        let (_, _, kind) = (fields.u64().unwrap(), fields.u32().unwrap(), fields.u32().unwrap());
        let data = fields.counted().unwrap();
        if kind == reply::META_CONTEXT {
            let number = Fields(data).u32().unwrap();
            told.push((String::from_utf8(data[4..].to_vec()).unwrap(), number));
        }
    }
    (told, negotiation.agreed.contexts)
}

fn names(option_number: u32, queries: &[&[u8]]) -> Vec<String> {
    contexts(option_number, queries).0.into_iter().map(|(name, _)| name).collect()
}

#[test]
fn dirty_maps_are_listed_by_namespaces_and_chosen_by_their_names_only() {
    let list = option::LIST_META_CONTEXT;
    let both = ["ferrite:dirty-m", "qemu:dirty-bitmap:m"];
    let all = ["base:allocation", "qemu:allocation-depth", both[0], both[1]];
    assert_eq!(names(list, &[]), all);
    assert_eq!(names(list, &[b"qemu:"]), [all[1], both[1]]);
    assert_eq!(names(list, &[b"qemu:dirty-bitmap:"]), [both[1]]);
    assert_eq!(names(list, &[b"ferrite:", b"base:"]), [all[0], both[0]]);
    for none in [&b"qemu"[..], b"ferrite:dirty-", b"ferrite:dirty-mm", b":", b""] {
        assert_eq!(names(list, &[none]), [""; 0], "{none:?}");
    }
    let set = option::SET_META_CONTEXT;
    for none in [&b"qemu:"[..], b"qemu:dirty-bitmap:", b"ferrite:", b"qemu:dirty-bitmap:n"] {
        assert_eq!(names(set, &[none]), [""; 0], "{none:?}");
    }
    let (told, chosen) = contexts(set, &[b"qemu:dirty-bitmap:m", b"base:allocation"]);
    let number = u32::from_le_bytes(*b"4567");
    let (first, second) = (("base:allocation".to_owned(), 1), (both[1].to_owned(), number));
    assert_eq!(told, [first, second]);
    assert!(chosen.allocation && !chosen.depth);
    assert_eq!(offer().dirty.chosen(chosen).count(), 1);
}

#[test]
fn queries_without_number_and_names_without_end_choose_what_there_is() {
    let long = [b'x'; 4096];
    let short: Vec<&[u8]> = vec![b"q:"; 5000];
    assert_eq!(names(option::SET_META_CONTEXT, &short), [""; 0]);
    let mut many: Vec<&[u8]> = vec![&long; 6];
    many.push(b"ferrite:dirty-m");
    assert_eq!(names(option::SET_META_CONTEXT, &many), ["ferrite:dirty-m"]);
    // 10,000 do not fit into an option.
    assert_eq!(names(option::SET_META_CONTEXT, &vec![&b"ferrite:dirty-m"[..]; 10_000]), [""; 0]);
}
