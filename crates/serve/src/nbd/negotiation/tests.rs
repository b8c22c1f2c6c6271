use super::*;

const EXPORT: Export =
    Export { bytes: 1 << 30, read_only: false, trims: true, preferred_bytes: 4096 };

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

/// What is said, what is agreed upon, and what is left, if the bytes come in pieces of that length.
fn negotiate(bytes: &[u8], piece: usize) -> (Vec<u8>, Next, Vec<u8>) {
    let (mut out, mut input, mut next) = (Vec::new(), Vec::new(), Next::More);
    let offer = Offer { name: String::new(), export: EXPORT };
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
        let (mut out, offer) = (Vec::new(), Offer { name: String::new(), export: EXPORT });
        let mut negotiation = Negotiation::new(vec![offer], manners, &mut out);
        let list = [&0u32.to_be_bytes()[..], &0u32.to_be_bytes()].concat();
        let rest = [
            option(option::EXTENDED_HEADERS, b""),
            option(option::LIST_META_CONTEXT, &list),
            option(option::INFO, &[0; 6]),
        ];
        let mut input = [&3u32.to_be_bytes()[..], relay, &rest.concat()].concat();
        assert_eq!(negotiation.go_on(&mut input, &mut out), Next::More);
        let depth = out.windows(DEPTH_CONTEXT.len()).any(|part| part == DEPTH_CONTEXT.as_bytes());
        // Behind the size.
        let at = out.windows(8).position(|part| part == EXPORT.bytes.to_be_bytes()).unwrap() + 8;
        (depth, u16::from_be_bytes([out[at], out[at + 1]]), negotiation.agreed.form)
    };
    assert_eq!(said(b""), (false, 0x16d, Form::Simple));
    assert_eq!(said(&option(option::RELAYED, b"")), (true, 0xded, Form::Extended));
}
