//! Writes what the fuzzer begins with into `fuzz/corpus`: small valid inputs of every kind.
//! `cargo run -p ferrite-hostile-inputs --example seeds`; images of QEMU's take its `qemu-img`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use ferrite_daemon::params::{Format, Image};
use ferrite_daemon::state::{DiskId, DiskState, States};
use ferrite_hostile_inputs::Recipe;
use ferrite_hostile_inputs::images::{Sketch, qcow2, vhd};
use ferrite_nbd::client::SESSION;
use ferrite_nbd::wire::{
    CONTEXT, CONTEXT_ID, FIXED_NEWSTYLE, Head, NO_ZEROES, OPTION_MAGIC, SERVER_MAGIC, can, option,
    push_extent, push_option_reply, reply,
};
use ferrite_seeing::trace::{Trace, file};
use ferrite_serve::counters::{Counters, stats_file};
use ferrite_serve::trace::{Doing, Record, Span, Stages, TraceRing};
use ferrite_store::content::{ContentHash, DomainKey};
use ferrite_store::journal::{Filling, Name, NewContent, Record as Change};
use ferrite_store::layout::Layout;
use ferrite_store::page::{Packing, Pointer, Whereabouts};
use ferrite_store::space::{Bits, Kind, SpacePage};
use ferrite_store::superblock::{Roots, Superblock};
use ferrite_xen::abi::{IndirectOp, Message, PlainOp, Protocol, RawSegment, Request};
use ferrite_xen::hypervisor::GrantRef;
use ferrite_xen::store::wire;

/// Bytes at the end of a file that stay behind the hole.
const TAIL_BYTES: usize = 512;

fn main() -> io::Result<()> {
    text()?;
    servers()?;
    tunnels()?;
    guests()?;
    store()?;
    seen()?;
    vhds()?;
    qcow2s()?;
    journals()?;
    dedup()?;
    qemu()
}

fn put(target: &str, name: &str, bytes: &[u8]) -> io::Result<()> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join(format!("seed-{name}")), bytes)
}

fn text() -> io::Result<()> {
    for (i, text) in ["512", "16M", "1GiB", "8191p", "9223372036854775807"].iter().enumerate() {
        put("size", &i.to_string(), text.as_bytes())?;
    }
    let names = ["/srv/a.img", "vhd:/dev/vg/lv", "a.VHD", "qcow2:b", "raw:/a/b.vhd", "./a:b"];
    for (i, text) in names.iter().enumerate() {
        put("image_name", &i.to_string(), text.as_bytes())?;
    }
    Ok(())
}

/// Clients and servers that speak NBD with a tunnel, and what they say first of TLS.
fn tunnels() -> io::Result<()> {
    let (client, server, in_tls) = (&[0u8][..], &[1u8][..], 2u8);
    let option = |kind: u8, data: &[u8]| -> Vec<u8> {
        [b"IHAVEOPT\0\0\0".as_slice(), &[kind, 0, 0, 0, data.len() as u8], data].concat()
    };
    let asks = [option(3, b""), option(7, &[0; 6]), option(5, b"x"), option(5, b"")].concat();
    put("tunnel", "client", &[client, &[0, 0, 0, 3], &asks].concat())?;
    put("tunnel", "client-abort", &[client, &[0, 0, 0, 3], &asks[..16], &option(2, b"")].concat())?;
    put("tunnel", "client-flags", &[client, &[0, 0, 1, 3]].concat())?;
    let greeting = b"NBDMAGICIHAVEOPT\0\x03";
    let refusal = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\x80\0\0\x01\0\0\0\x06no TLS";
    put("tunnel", "server-refuses", &[server, greeting, refusal].concat())?;
    let lines = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\x80\0\0\x02\0\0\0\x0cno\nTLS\x1b[2J\r\n";
    put("tunnel", "server-in-lines", &[server, greeting, lines].concat())?;
    put(
        "tunnel",
        "server-old",
        &[server, b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53".as_slice()].concat(),
    )?;
    // The head of a record, and of a ClientHello or ServerHello with its version and random bytes.
    let hello = |kind: u8| {
        [&[22, 3, 1, 0, 43, kind, 0, 0, 39, 3, 3], &[7; 32][..], &[0, 0, 2, 0x13, 1]].concat()
    };
    put("tunnel", "client-hello", &[&[in_tls], &hello(1)[..]].concat())?;
    put("tunnel", "server-hello", &[&[in_tls | 1], &hello(2)[..]].concat())?;
    for (name, who) in [("client", in_tls), ("server", in_tls | 1)] {
        put("tunnel", &format!("{name}-alert"), &[who, 21, 3, 3, 0, 2, 2, 40])?;
        put("tunnel", &format!("{name}-clear"), &[&[who], &asks[..]].concat())?;
    }
    Ok(())
}

/// A handshake with all that a server of ours knows, and replies to reads.
fn servers() -> io::Result<()> {
    let mut greeting = [SERVER_MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()].concat();
    greeting.extend((FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
    let flags = can::HAS_FLAGS | can::FLUSH | can::TRIM;
    let export = [&[0, 0][..], &(1u64 << 30).to_be_bytes(), &flags.to_be_bytes()].concat();
    let sizes = [&[0, 3][..], &[1u32, 4096, 32 << 20].map(u32::to_be_bytes).concat()].concat();
    let context = [&CONTEXT_ID.to_be_bytes()[..], CONTEXT.as_bytes()].concat();
    let mut said = [&[1][..], &greeting].concat();
    push_option_reply(&mut said, SESSION, reply::ACK, &[]);
    push_option_reply(&mut said, option::STRUCTURED_REPLY, reply::ACK, &[]);
    push_option_reply(&mut said, option::SET_META_CONTEXT, reply::META_CONTEXT, &[&context]);
    push_option_reply(&mut said, option::SET_META_CONTEXT, reply::ACK, &[]);
    push_option_reply(&mut said, option::GO, reply::INFO, &[&export]);
    push_option_reply(&mut said, option::GO, reply::INFO, &[&sizes]);
    push_option_reply(&mut said, option::GO, reply::ACK, &[]);
    // The places and numbers of the target's requests.
    let cookie = |slot: u64| (slot + 1) << 16 | slot;
    let mut replies = Head::data(cookie(0), false, (1 << 20) + 4096, 4096).bytes().to_vec();
    replies.extend([7; 4096]);
    replies.extend(Head::hole(cookie(0), true, 1 << 20, 4096).bytes());
    replies.extend(Head::status(cookie(1), 2).bytes());
    push_extent(&mut replies, 4096, 3);
    push_extent(&mut replies, 4096, 0);
    replies.extend(Head::error(cookie(2), 28).bytes());
    replies.extend(Head::simple(cookie(3), 0).bytes());
    put("nbd_client", "all", &[&said[..], &replies].concat())?;
    put("nbd_replies", "structured", &[&[1][..], &replies].concat())?;
    let simple = [Head::simple(cookie(4), 0).bytes(), &[7; 512]].concat();
    put("nbd_replies", "simple", &[&[0][..], &simple].concat())?;
    let names = [
        "nbd+unix:///e%20f?socket=/run/s&session=vm-1&drain_s=0",
        "nbd://[::1]:10809/e?plain=yes&reconnect_s=0",
        "nbds://host.example/e?tls-certificates=/etc/pki&deadline_s=5",
    ];
    for (i, text) in names.iter().enumerate() {
        put("nbd_uri", &i.to_string(), text.as_bytes())?;
    }
    Ok(())
}

fn guests() -> io::Result<()> {
    let segment = RawSegment { gref: 9, first_sect: 0, last_sect: 7 };
    let plain = |op| Message::Plain { op, nr_segments: 11, sector: 8, segments: [segment; 11] };
    let indirect = Message::Indirect {
        op: IndirectOp::Write,
        nr_segments: 32,
        sector: 8,
        pages: [GrantRef(7); 8],
    };
    let messages = [
        ("read", plain(PlainOp::Read)),
        ("write", plain(PlainOp::Write)),
        ("barrier", plain(PlainOp::Barrier)),
        ("flush", plain(PlainOp::Flush)),
        ("discard", Message::Discard { sector: 8, nr_sectors: 800, flag: 1 }),
        ("indirect", indirect),
    ];
    for protocol in [Protocol::X86_64, Protocol::X86_32] {
        for (name, message) in &messages {
            let request = Request { id: 0x1122_3344_5566_7788, response_op: 0, message: *message };
            let mut input = request.encode(protocol).0.to_vec();
            input.extend(4096u64.to_be_bytes());
            input.extend([2, 0, 0, 1]);
            (0..32).for_each(|_| input.extend(segment.encode()));
            put("ring", &format!("{name}-{}", protocol.key()), &input)?;
        }
    }
    Ok(())
}

fn store() -> io::Result<()> {
    use wire::MessageType as T;
    let mut stream = vec![5];
    let message = |kind, id, tx, payload: &[u8]| wire::Message::new(kind, id, tx, payload).encode();
    let replies = [
        message(T::Read, 1, 0, b"value"),
        message(T::Directory, 2, 0, b"a\0b\0"),
        message(T::WatchEvent, 0, 0, b"/a/b\0token\0"),
        message(T::GetPerms, 3, 0, b"n0\0r1\0"),
        message(T::Watch, 4, 0, wire::OK_PAYLOAD),
        message(T::TransactionStart, 5, 0, b"7\0"),
        message(T::Error, 6, 7, b"ENOENT\0"),
        message(T::Error, 7, 7, b"EAGAIN\0"),
        message(T::WatchEvent, 0, 0, b"/a\0token\0"),
    ];
    stream.extend(replies.concat());
    put("store_wire", "session", &stream)?;
    put("store_client", "session", &stream[1..])?;
    let keys: [(&str, &[&str]); 4] = [
        ("plain", &["x86_64-abi", "-", "-", "-", "8", "9", "1"]),
        ("ring-of-2", &["x86_32-abi", "1", "1", "8", "9", "10", "0"]),
        ("two-queues", &["-", "2", "0", "8", "9", "10", "11", "1"]),
        ("ring-pages", &["x86_64-abi", "-", "-", "4", "1", "2", "3", "4", "5", "-"]),
    ];
    for (name, lines) in keys {
        put("store_keys", name, lines.join("\n").as_bytes())?;
    }
    Ok(())
}

/// As an input, read only and written to.
fn image(target: &str, name: &str, file: &Sketch) -> io::Result<()> {
    let bytes = file.get(0, file.bytes() as usize);
    let flags = if target == "vhd" { Recipe::SEAL_FOOTERS | Recipe::SEAL_HEADER } else { 0 };
    let same = if target == "vhd" { Recipe::SAME_FOOTERS } else { 0 };
    let read = Recipe { flags: flags | same, hole_at: 0, hole: 0, bytes };
    put(target, name, &read.encode())?;
    let write = Recipe { flags: flags | Recipe::WRITE | Recipe::REPAIR, ..read };
    put(target, &format!("{name}-written"), &write.encode())
}

/// Counters with a queue that has worked, traces, and states of both kinds of disks.
fn seen() -> io::Result<()> {
    let dir = tempfile::tempdir()?;
    let run_dir = dir.path().join("vbd-3-51712");
    Counters::default().keep_in(&run_dir, "/srv/a.vhd");
    let mut file = fs::read(stats_file(&run_dir))?;
    put("counters", "none", &file)?;
    // The number of queues, and a queue's words.
    file[16] = 1;
    file.extend((0..512u64).flat_map(|word| (word * word).to_ne_bytes()));
    put("counters", "a-queue", &file)?;
    traces(dir.path())?;
    let states = States::open(&dir.path().join("disks"))?;
    let id = DiskId { domid: 3, devid: 51712 };
    let image = Image { format: Format::Vhd, path: "/srv/a.vhd".into() };
    let later = DiskId { domid: 4, ..id };
    for (name, rests_for) in [("served", None), ("resting", Some(later))] {
        states.write(&DiskState::new(id, &image, 1).resting_for(rests_for))?;
        let file = dir.path().join(format!("disks/{}.json", id.file_name()));
        put("state", name, &fs::read(file)?)?;
    }
    Ok(())
}

/// A recording of a few requests, and the beginning of a queue's trace of the same.
fn traces(dir: &Path) -> io::Result<()> {
    let mut trace = Trace { disk: "vbd-3-51712".to_owned(), ..Trace::default() };
    let mut ring = TraceRing::create(&dir.join("trace-0"))?;
    for n in 1..=5_u64 {
        let (taken_ns, answered_ns) = (1000 * n, 1000 * n + 700);
        let stages = Stages {
            taken_ns,
            submitted_ns: taken_ns + 100,
            completed_ns: taken_ns + 400 + n,
            answered_ns,
            ..Stages::default()
        };
        let (bytes, operation) = (512 << n, (n % 2) as u8);
        let record =
            Record { id: n, bytes, operation, answer: n as u32, stages, ..Record::default() };
        let doing = Doing::Consumed(n as u32);
        let span = Span { doing, from_ns: answered_ns, to_ns: answered_ns + 50 };
        trace.requests.push((0, record));
        trace.spans.push((0, span));
        ring.push(&record);
    }
    trace.until_ns = 10_000;
    let mut file = Vec::new();
    file::write(&trace, &mut file)?;
    put("trace", "recording", &file)?;
    // No span was written, so nothing behind the records is read.
    put("trace", "ring", &fs::read(dir.join("trace-0"))?[..64 + 5 * 72])
}

fn vhds() -> io::Result<()> {
    let small = vhd::small();
    image("vhd", "small", &small.build())?;
    image("vhd", "fixed", &vhd::fixed(4096, [7; 16], 1))?;
    let parents = [
        ("on-vhd", vhd::Parent::beside([7; 16], "parent.vhd")),
        ("on-two", vhd::Parent::beside([8; 16], "middle.vhd")),
        ("on-itself", vhd::Parent::url([9; 16], "./image.vhd")),
        ("on-a-loop", vhd::Parent::url([8; 16], "./loop.vhd")),
        ("on-raw", vhd::Parent::url([0; 16], "./raw")),
        ("on-directory", vhd::Parent::url([0; 16], "./dir")),
    ];
    for (name, parent) in parents {
        let child = vhd::Dynamic { uuid: [9; 16], parent: Some(parent), ..small.clone() };
        image("vhd", name, &child.build())?;
    }
    let batmap = include_batmap();
    image("vhd", "batmap", &batmap)
}

/// A disk of libvhd's with a batmap, all blocks of the usual size and none there.
fn include_batmap() -> Sketch {
    let disk = vhd::Dynamic {
        disk_bytes: 16 << 20,
        block_bytes: 2 << 20,
        present: vec![],
        ..vhd::small()
    };
    let mut file = disk.build();
    let at = vhd::TABLE_AT + 512;
    for footer_at in [0, at] {
        vhd::Sealed::Footer.forge(&mut file, footer_at, 28, b"tap\0\0\x01\0\x03");
    }
    let footer = file.get(0, 512);
    let mut header = b"tdbatmap".to_vec();
    header.extend((at + 512).to_be_bytes());
    header.extend(1u32.to_be_bytes());
    header.extend(0x0001_0002u32.to_be_bytes());
    header.extend(u32::MAX.to_be_bytes());
    header.resize(512, 0);
    file.put(at, &header).put(at + 512, &[0; 512]).put(at + 1024, &footer);
    file
}

fn qcow2s() -> io::Result<()> {
    let small = qcow2::small();
    image("qcow2", "small", &small.build())?;
    image(
        "qcow2",
        "version-2",
        &qcow2::Image { version: 2, zeros: vec![], ..small.clone() }.build(),
    )?;
    let backings = [
        ("on-qcow2", "parent.qcow2", Some("qcow2")),
        ("on-two", "middle.qcow2", Some("qcow2")),
        ("on-itself", "image.qcow2", Some("qcow2")),
        ("on-a-loop", "loop.qcow2", Some("qcow2")),
        ("on-raw", "raw", Some("raw")),
        ("on-vhd", "parent.vhd", Some("vpc")),
        ("on-unknown", "raw", None),
    ];
    for (name, path, format) in backings {
        let backing = Some((path.to_owned(), format.map(str::to_owned)));
        image("qcow2", name, &qcow2::Image { backing, ..small.clone() }.build())?;
    }
    Ok(())
}

fn journals() -> io::Result<()> {
    let record = |words: &[u64]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    for (format, name) in [(0, "vhd"), (1, "qcow2")] {
        for (mode, how) in [(0, "written"), (2, "read"), (4, "header")] {
            let mut input = vec![format | mode];
            // Key plus one, then words, for records of three and of more words.
            input.extend(record(&[1, 0x8000_0000_0000_0400, 0, 0, 6, 0, 3, 0, 2, 24, 0xFF, 0xFF]));
            put("journal", &format!("{name}-{how}"), &input)?;
        }
    }
    Ok(())
}

/// A new store's four pages, a journal with each kind of record, and entries of each kind.
fn dedup() -> io::Result<()> {
    let layout = Layout::of(64 << 20).expect("a store");
    let place = layout.first_place(2) + 9;
    let pointer = Some(Pointer { place, checksum: 7, born: 1 });
    let page = |home: usize, checkpoint| {
        let superblock = Superblock {
            id: [3; 16],
            layout,
            checkpoint,
            replay_from: 1,
            generation: 2,
            numbers_end: 9,
            roots: Roots { p2m: pointer, ..Roots::default() },
            packing: None,
            has_times: true,
        };
        superblock.encode(home)[..256].to_vec()
    };
    let pages = [page(0, 0), page(0, 1), page(1, 0), page(1, 1)].concat();
    let mut input = [vec![0xF], pages].concat();
    put("dedup_superblock", "new", &input)?;
    // More segments than there is room for, in all four.
    (0..4).for_each(|page| input[1 + page * 256 + 72 + 1] = 0xFF);
    put("dedup_superblock", "too-long", &input)?;

    let name = || Name::new("web-1").expect("a name");
    let (volume, number, block, count) = (1, 5, 2, 3);
    let hash = ContentHash([6; 32]);
    let new = NewContent { volume, block, number, place, checksum: 5, domain: 0, hash };
    let records = [
        Change::Domain { domain: 0, key: DomainKey([9; 32]), name: name() },
        Change::Create { volume, blocks: 100, domain: 0, name: name() },
        Change::New(new),
        Change::Same { volume, block, number, count },
        Change::Zeros { volume, block, count: 9 },
        Change::Share { volume: 2, of: volume, snapshot: true, name: name() },
        Change::Rollback { volume, to: 2 },
        Change::Delete { volume: 2 },
    ];
    let mut input = vec![1];
    let mut block = |number, synced, records: &[Change]| {
        let mut filling = Filling::default();
        assert!(records.iter().all(|record| filling.add(record)));
        let bytes = filling.finish(&[3; 16], number, synced);
        let length = 512_u16;
        input.extend((length | 0x8000).to_le_bytes());
        input.extend(&bytes[..usize::from(length)]);
    };
    [(1, 1), (2, 1), (3, 2)].iter().for_each(|(number, synced)| block(*number, *synced, &records));
    // One that vouches for itself, and one with more steps than its bytes are worth.
    block(5, 6, &records);
    block(6, 3, &[Change::Same { volume, block: 0, number: 1, count: 10_000 }]);
    put("dedup_journal", "some", &input)?;

    let packing = Packing::Zstandard;
    let entries = [
        Pointer::encode(pointer),
        Whereabouts::Plain { place, checksum: 3 }.encode(),
        Whereabouts::SameAs { number: 1 }.encode(),
        Whereabouts::Packed { place, checksum: 3, packing, places: 4, index: 15 }.encode(),
    ];
    put("dedup_pages", "entries", &entries.concat())?;
    let last = place + layout.segment_blocks - 10;
    let bad = [
        Whereabouts::SameAs { number: 1 }.encode(),
        Whereabouts::SameAs { number: 1 }.encode(),
        Whereabouts::Packed { place: last, checksum: 3, packing, places: 4, index: 1 }.encode(),
        Whereabouts::Plain { place: 3, checksum: 3 }.encode(),
        Pointer::encode(Some(Pointer { place: 3, checksum: 7, born: 1 })),
        [0xFF; 16],
    ];
    put("dedup_pages", "bad", &bad.concat())?;
    let bits = Bits::all(true, layout.segment_blocks);
    let page = SpacePage { checkpoint: 9, kind: Kind::Metadata, bits };
    put("dedup_pages", "space", &page.encode(&[3; 16], 3, 1))
}

/// Images that are not ours, where there is a `qemu-img`: their zeros become the hole.
fn qemu() -> io::Result<()> {
    let dir = tempfile::tempdir()?;
    let data = dir.path().join("data");
    let mut content = vec![0; 64 << 10];
    content[..4096].fill(0x5A);
    content[40 << 10..41 << 10]
        .copy_from_slice(&(0..1024).map(|i| (i * i) as u8).collect::<Vec<_>>());
    fs::write(&data, content)?;
    let kinds: [(&str, &str, &str, &[&str]); 8] = [
        ("vhd", "qemu-dynamic", "vpc", &["-o", "subformat=dynamic,force_size=on"]),
        ("vhd", "qemu-fixed", "vpc", &["-o", "subformat=fixed,force_size=on"]),
        ("qcow2", "qemu-512", "qcow2", &["-o", "cluster_size=512"]),
        ("qcow2", "qemu-4096", "qcow2", &["-o", "cluster_size=4096"]),
        ("qcow2", "qemu-deflate", "qcow2", &["-c", "-o", "cluster_size=4096"]),
        ("qcow2", "qemu-zstd", "qcow2", &["-c", "-o", "cluster_size=4096,compression_type=zstd"]),
        ("qcow2", "qemu-refcounts-of-1", "qcow2", &["-o", "cluster_size=4096,refcount_bits=1"]),
        ("qcow2", "qemu-refcounts-of-64", "qcow2", &["-o", "cluster_size=512,refcount_bits=64"]),
    ];
    for (target, name, format, options) in kinds {
        let out = dir.path().join(name);
        let Some(()) = convert(&data, &out, format, options) else { continue };
        if target == "qcow2" && name == "qemu-512" {
            let _ = Command::new("qemu-img").args(["snapshot", "-c", "one"]).arg(&out).status();
        }
        let bytes = fs::read(&out)?;
        let flags = if target == "vhd" { Recipe::SEAL_FOOTERS | Recipe::SEAL_HEADER } else { 0 };
        let recipe = squeezed(&bytes, flags);
        put(target, name, &recipe.encode())?;
        let written = Recipe { flags: flags | Recipe::WRITE, ..recipe };
        put(target, &format!("{name}-written"), &written.encode())?;
    }
    Ok(())
}

fn convert(from: &PathBuf, to: &PathBuf, format: &str, options: &[&str]) -> Option<()> {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw", "-O", format]).args(options).arg(from).arg(to);
    match command.status() {
        Ok(status) if status.success() => Some(()),
        _ => {
            eprintln!("left out: {}", to.display());
            None
        }
    }
}

/// The file with its longest stretch of zero sectors taken out.
fn squeezed(bytes: &[u8], flags: u8) -> Recipe {
    let sectors: Vec<bool> = bytes.chunks(512).map(|s| s.iter().all(|b| *b == 0)).collect();
    let (mut best, mut run) = ((0, 0), (0, 0));
    for (i, zero) in sectors.iter().enumerate().take(bytes.len().saturating_sub(TAIL_BYTES) / 512) {
        run = if *zero { (run.0, run.1 + 1) } else { (i + 1, 0) };
        if run.1 > best.1 {
            best = run;
        }
    }
    let mut left = bytes.to_vec();
    left.drain(best.0 * 512..(best.0 + best.1) * 512);
    Recipe { flags, hole_at: best.0 as u16, hole: best.1 as u32, bytes: left }
}
