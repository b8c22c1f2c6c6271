use super::*;

fn header(base: Option<&str>, start: u64) -> Header {
    Header {
        name: Name::new("s2").unwrap(),
        base: base.map(|name| Name::new(name).unwrap()),
        bytes: 1 << 20,
        start,
        before: [7; HASH_BYTES],
    }
}

fn stream(header: &Header) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = StreamWriter::begin(&mut bytes, header).unwrap();
    writer.data(8192, &[1; 8192]).unwrap();
    writer.zeros(16384, 4096).unwrap();
    writer.data(65536, &[2; 4096]).unwrap();
    assert_eq!(writer.data_bytes, 12288);
    writer.end(1 << 20, [9; HASH_BYTES]).unwrap();
    bytes
}

/// The header, and the records as text, or the error.
fn read(mut bytes: &[u8]) -> io::Result<(Header, Vec<String>)> {
    let mut reader = StreamReader::begin(&mut bytes, &|| true)?;
    let mut all = Vec::new();
    loop {
        let record = match reader.next()? {
            Record::Data(at, data) => format!("data {at} {}x{}", data.len(), data[0]),
            Record::Zeros(at, len) => format!("zeros {at} {len}"),
            Record::End(hash) => {
                assert_eq!(hash, [9; HASH_BYTES]);
                return Ok((reader.header, all));
            }
        };
        assert!(reader.data.capacity() <= MAX_DATA_BYTES);
        all.push(record);
    }
}

#[test]
fn a_stream_is_read_as_it_was_written() {
    for (base, start) in [(None, 0), (Some("s1"), 0), (None, 8192), (Some("a.b-c_d"), 4096)] {
        let header = header(base, start);
        let (again, records) = read(&stream(&header)).unwrap();
        assert_eq!(again, header);
        assert_eq!(records, ["data 8192 8192x1", "zeros 16384 4096", "data 65536 4096x2"]);
    }
}

#[test]
fn a_stream_that_is_cut_off_anywhere_says_so() {
    let bytes = stream(&header(Some("s1"), 0));
    for len in (0..bytes.len()).step_by(61) {
        let e = read(&bytes[..len]).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof, "{len}: {e}");
    }
}

#[test]
fn a_bit_that_is_turned_anywhere_is_found() {
    let bytes = stream(&header(Some("s1"), 0));
    for at in (0..bytes.len()).step_by(13).chain(0..600) {
        let mut bytes = bytes.clone();
        bytes[at] ^= 0x10;
        let e = read(&bytes).expect_err(&format!("byte {at}"));
        // A length may be more than there is.
        let kinds = [io::ErrorKind::InvalidData, io::ErrorKind::UnexpectedEof];
        assert!(kinds.contains(&e.kind()), "{at}: {e}");
    }
}

/// The hashes are right, as in a stream that an attacker has made.
#[test]
fn what_makes_no_sense_is_refused_and_takes_no_memory() {
    let with = |change: fn(&mut Header)| {
        let mut header = header(None, 0);
        change(&mut header);
        read(&stream(&header)).unwrap_err()
    };
    for change in [
        (|header| header.bytes = 0) as fn(&mut Header),
        |header| header.bytes = 4097,
        |header| header.start = 1,
        |header| header.start = 2 << 20,
        // Records lie behind the end, or before the start.
        |header| header.bytes = 8192,
        |header| header.start = 16384,
    ] {
        assert_eq!(with(change).kind(), io::ErrorKind::InvalidData);
    }
    let records: [fn(&mut StreamWriter<'_>) -> io::Result<()>; 8] = [
        |to| to.record(DATA, 0, 0, &[]),
        |to| to.record(DATA, u32::MAX.into(), 0, &[]),
        |to| to.record(DATA, 257, 0, &[]),
        |to| to.record(ZEROS, 0, 0, &[]),
        |to| to.record(ZEROS, 257, 0, &[]),
        |to| to.record(ZEROS, 1, u64::MAX - 4095, &[]),
        |to| to.record(END, 0, 0, &[9; 32]),
        |to| to.record(4, 1, 0, &[]),
    ];
    for record in records {
        let mut bytes = Vec::new();
        record(&mut StreamWriter::begin(&mut bytes, &header(None, 0)).unwrap()).unwrap();
        assert_eq!(read(&bytes).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
    let mut newer = header(None, 0).encode();
    newer[8] = 2;
    let hash = *blake3::hash(&newer[..HEADED_BYTES]).as_bytes();
    newer[HEADED_BYTES..].copy_from_slice(&hash);
    assert_eq!(read(&newer).unwrap_err().kind(), io::ErrorKind::Unsupported);
}

#[test]
fn content_is_told_by_its_blocks_and_their_places_and_zeros_are_nothing() {
    let hash = |parts: &[(u64, &[u8])]| {
        let mut content = ContentOf::default();
        parts.iter().for_each(|(at, data)| content.add(*at, data));
        content.hash()
    };
    let (block, zeros) = ([1; 4096], [0; 8192]);
    assert_eq!(hash(&[(8192, &block)]), hash(&[(0, &zeros), (8192, &block), (65536, &zeros)]));
    assert_eq!(hash(&[(0, &[block, block].concat())]), hash(&[(0, &block), (4096, &block)]));
    assert_ne!(hash(&[(0, &block)]), hash(&[(4096, &block)]));
}
