//! One qcow2 image.

use std::future::{Future as _, poll_fn};
use std::task::Poll;

use ferrite_disk::{Disk, Format, OpenOptions};
use ferrite_hostile_inputs::images::Sketch;
use ferrite_hostile_inputs::images::qcow2::{self, COMPRESSED, COPIED, Image, field};

use super::common::Queue;
use super::{Den, LIMIT_KIB, Memory, Verdict, open, read_some};

fn refuses(den: &Den, image: &Sketch, why: &str) {
    den.refuses_image(Format::Qcow2, image, why);
}

fn with_u32(at: u64, value: u32) -> Sketch {
    let mut image = qcow2::small().build();
    image.put_u32(at, value);
    image
}

fn with_u64(at: u64, value: u64) -> Sketch {
    let mut image = qcow2::small().build();
    image.put_u64(at, value);
    image
}

#[test]
fn an_undamaged_image_is_read() {
    let den = Den::new();
    for version in [2, 3] {
        let zeros = if version == 3 { vec![7] } else { vec![] };
        let image = Image { version, zeros, ..qcow2::small() };
        let bytes = den.reads(Format::Qcow2, &image.build());
        assert_eq!((bytes.len(), bytes[511], bytes[512], bytes[5 * 512]), (16 << 10, 1, 0, 6));
    }
}

#[test]
fn a_raw_image_that_looks_like_qcow2_is_raw() {
    let den = Den::new();
    let image =
        Image { backing: Some(("/etc/passwd".into(), Some("raw".into()))), ..qcow2::small() };
    let file = image.build();
    let path = den.put("disk.img", &file);
    let options = OpenOptions::default();
    let disk = Disk::open(&format!("raw:{}", path.display()), &options).unwrap();
    assert_eq!(disk.sectors() * 512, file.bytes());
    assert_eq!(read_some(disk).unwrap(), file.get(0, file.bytes() as usize));
    // Neither as a parent: this one says that it is raw.
    let backing = Some(("disk.img".to_owned(), Some("raw".to_owned())));
    let child = Image { backing, present: vec![], zeros: vec![], ..qcow2::small() };
    let bytes = den.reads(Format::Qcow2, &child.build());
    assert_eq!(bytes[..file.bytes() as usize], file.get(0, file.bytes() as usize));
    assert!(bytes[file.bytes() as usize..].iter().all(|b| *b == 0));
}

#[test]
fn what_is_cut_off_is_refused() {
    let den = Den::new();
    for bytes in [0, 1, 71, 72, 103, 104, 511, 512, 1024, 1536] {
        let mut image = qcow2::small().build();
        image.set_bytes(bytes);
        refuses(&den, &image, "");
    }
}

#[test]
fn what_is_not_known_is_refused() {
    let den = Den::new();
    for (at, value, why) in [
        (0, 0x5146_49FA, "no qcow2 image"),
        (field::VERSION, 1, "version 1"),
        (field::VERSION, 4, "version 4"),
        (field::CRYPT, 1, "encryption"),
        (field::CRYPT, 2, "encryption"),
        (field::CRYPT, u32::MAX, "encryption"),
        (field::REFCOUNT_ORDER, 7, "refcount order"),
        (field::REFCOUNT_ORDER, u32::MAX, "refcount order"),
        (field::HEADER_BYTES, 0, "header length"),
        (field::HEADER_BYTES, 1 << 20, "header length"),
        (field::HEADER_BYTES, u32::MAX, "header length"),
    ] {
        refuses(&den, &with_u32(at, value), why);
    }
    for bit in (2..64).filter(|bit| ![3, 4].contains(bit)) {
        refuses(&den, &with_u64(field::INCOMPATIBLE, 1 << bit), "not supported");
    }
    // Subclusters of less than 512 bytes.
    refuses(&den, &with_u64(field::INCOMPATIBLE, 1 << 4), "clusters of less than 16 KiB");
    // Compression of another kind, which the header is too short to name.
    refuses(&den, &with_u64(field::INCOMPATIBLE, 1 << 3), "compression");
}

#[test]
fn an_image_that_is_marked_is_only_read() {
    let den = Den::new();
    for bit in [0, 1] {
        let path = den.put("image.qcow2", &with_u64(field::INCOMPATIBLE, 1 << bit));
        assert!(matches!(den.judge(&path, Format::Qcow2, true), Verdict::Reads(_)));
        assert!(matches!(den.judge(&path, Format::Qcow2, false), Verdict::Refused(_)));
    }
}

#[test]
fn absurd_sizes_and_places_are_refused() {
    let den = Den::new();
    for bits in [0, 8, 22, 31, 32, 63, 64, u32::MAX] {
        refuses(&den, &with_u32(field::CLUSTER_BITS, bits), "clusters of");
    }
    for size in [0, 1, 1 << 20, 1 << 50, 1 << 63, u64::MAX - 511, u64::MAX] {
        refuses(&den, &with_u64(field::SIZE, size), "");
    }
    for entries in [0, 1 << 10, 1 << 22, 1 << 23, u32::MAX] {
        refuses(&den, &with_u32(field::L1_ENTRIES, entries), "L1 table");
    }
    for clusters in [0, 1 << 10, 1 << 20, u32::MAX] {
        refuses(&den, &with_u32(field::REFTABLE_CLUSTERS, clusters), "refcount table");
    }
    for at in [1, 100, 1 << 40, 1 << 56, 1 << 63, u64::MAX - 511, u64::MAX] {
        refuses(&den, &with_u64(field::L1_AT, at), "the L1 table");
        refuses(&den, &with_u64(field::REFTABLE_AT, at), "the refcount table");
    }
    for (at, why) in [(0, ""), (512, "overlaps")] {
        refuses(&den, &with_u64(field::L1_AT, at), why);
    }
}

#[test]
fn snapshot_tables_without_end_are_refused() {
    let den = Den::new();
    for (snapshots, at) in [(u32::MAX, 0x1000), (65537, 0x1000), (1, 1 << 40), (1, 1), (1, 512)] {
        let mut image = with_u32(field::SNAPSHOTS, snapshots);
        image.put_u64(field::SNAPSHOTS_AT, at);
        refuses(&den, &image, "snapshot");
    }
    // As many as there may be, where the file has no room for them: they are not needed to read.
    let mut image = with_u32(field::SNAPSHOTS, 65536);
    let at = image.bytes();
    image.put_u64(field::SNAPSHOTS_AT, at).put(at, &[0xFF; 4096]);
    let path = den.put("image.qcow2", &image);
    den.judge(&path, Format::Qcow2, true);
    den.judge(&path, Format::Qcow2, false);
}

#[test]
fn tables_that_point_at_tables_are_refused() {
    let den = Den::new();
    let plan = qcow2::small();
    let (l1, l2) = (plan.l1_at(), plan.l2_at());
    for target in [0, plan.reftable_at(), l1] {
        refuses(&den, &with_u64(l1, target | COPIED), "");
    }
    for target in [1 << 40, u64::MAX, 3, l2 + 8] {
        refuses(&den, &with_u64(l1, target), "L1 entry 0");
    }
    // A reader needs no refcounts.
    for target in [0x200, 0x400 + 8, l1, l2, 1 << 40, u64::MAX] {
        let image = with_u64(plan.reftable_at(), target);
        let path = den.put("image.qcow2", &image);
        let verdict = den.judge(&path, Format::Qcow2, false);
        assert!(matches!(verdict, Verdict::Refused(_)), "{target:#x}: it {verdict}");
        den.judge(&path, Format::Qcow2, true);
    }
}

#[test]
fn clusters_that_cannot_be_are_errors_for_who_reads_them() {
    let den = Den::new();
    let plan = qcow2::small();
    let entry = plan.l2_at();
    for target in [0, plan.reftable_at(), plan.l1_at(), plan.l2_at()] {
        if target > 0 {
            den.fails(Format::Qcow2, &with_u64(entry, target | COPIED));
        }
    }
    for target in [1 << 40, plan.data_at() + 8, !COMPRESSED, (1 << 56) | COPIED] {
        den.fails(Format::Qcow2, &with_u64(entry, target));
    }
    for target in [plan.data_at(), 1 << 40, u64::MAX, 0, plan.l2_at()] {
        den.fails(Format::Qcow2, &with_u64(entry, COMPRESSED | target));
    }
}

#[test]
fn a_large_l1_table_is_read_within_bounds() {
    let den = Den::new();
    // 4 Mi entries of 32 KiB each.
    let mut image = qcow2::small().build();
    image.put_u64(field::SIZE, 128 << 30).put_u32(field::L1_ENTRIES, 4 << 20);
    image.put_u64(field::L1_AT, 1 << 20);
    image.set_bytes((1 << 20) + (32 << 20));
    let path = den.put("image.qcow2", &image);
    for read_only in [true, false] {
        den.judge(&path, Format::Qcow2, read_only);
    }
}

/// As long as an entry can say, which is two clusters of the largest size, and as many at once as
/// four queues of one page can have.
#[test]
fn compressed_clusters_that_are_asked_for_all_at_once_are_read_a_few_at_a_time() {
    const CLUSTERS: u64 = 128;
    let den = Den::new();
    let disk_bytes = CLUSTERS << 21;
    let small = qcow2::small();
    let plan = Image { cluster_bits: 21, disk_bytes, present: vec![], zeros: vec![], ..small };
    let mut image = plan.build();
    for guest in 0..CLUSTERS {
        let entry = COMPRESSED | 0x1FFF << 49 | (plan.data_at() + guest * 512);
        image.put_u64(plan.l2_at() + 8 * guest, entry);
    }
    image.set_bytes(plan.data_at() + (8 << 20));
    let path = den.put("image.qcow2", &image);
    let mut queue = Queue::new(open(&path, Format::Qcow2, true).unwrap());
    let buffer = queue.buffer(CLUSTERS as usize * 512);
    let (disk, port) = (queue.disk.clone(), queue.port());
    let memory = Memory::watch();
    let mut reads: Vec<_> = (0..CLUSTERS)
        .map(|guest| {
            let span = buffer.span().slice(guest as usize * 512, 512);
            let (disk, port) = (&disk, &port);
            Box::pin(async move { disk.read(port, guest << 21, span).await })
        })
        .collect();
    let mut failed = 0;
    let all = poll_fn(|cx| {
        reads.retain_mut(|read| match read.as_mut().poll(cx) {
            Poll::Pending => true,
            Poll::Ready(done) => {
                failed += u64::from(done.is_err());
                false
            }
        });
        if reads.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    });
    queue.reactor.block_on(all).unwrap();
    // Zeros are no deflate stream.
    assert_eq!(failed, CLUSTERS);
    assert!(memory.taken_kib() < LIMIT_KIB, "{} KiB", memory.taken_kib());
}

#[test]
fn extensions_and_names_of_backing_files_are_bounded() {
    let den = Den::new();
    let backed = |path: &str, format: Option<&str>| {
        let backing = Some((path.to_owned(), format.map(str::to_owned)));
        Image { backing, cluster_bits: 12, ..qcow2::small() }.build()
    };
    for length in [9u32, 4096, 1 << 20, u32::MAX] {
        let mut image = qcow2::small().build();
        image.put_u32(104, 0x6803_F857).put_u32(108, length);
        if length > 9 {
            refuses(&den, &image, "");
        } else {
            den.reads(Format::Qcow2, &image);
        }
    }
    for (at, bytes) in
        [(120, 1024), (120, u32::MAX), (1 << 40, 4), (u64::MAX, 4), (4090, 40), (8, 4)]
    {
        let mut image = backed("x", Some("raw"));
        image.put_u64(field::BACKING_AT, at).put_u32(field::BACKING_BYTES, bytes);
        refuses(&den, &image, "");
    }
    den.put("raw.img", &Sketch::new(512));
    refuses(&den, &backed("raw.img", None), "format");
    refuses(&den, &backed("raw.img", Some("vmdk")), "vmdk");
    for name in ["nbd:localhost:10809", "http://localhost/x", "fat:rw:/etc"] {
        refuses(&den, &backed(name, Some("raw")), "not named by a path");
    }
    let deep = format!("json:{}", "[".repeat(1000));
    for (name, why) in [
        ("json:{}", "names no file"),
        (&deep, "is no JSON"),
        (r#"json:{"file":{"driver":"nbd","path":"/x"}}"#, "by nbd"),
        (r#"json:{"driver":"qcow2","file.filename":"raw.img"}"#, "\"raw\", and \"qcow2\""),
    ] {
        refuses(&den, &backed(name, Some("raw")), why);
    }
    refuses(&den, &backed("nowhere", Some("raw")), "nowhere");
}

/// An image with extended L2 entries, of which the first has these halves.
fn extended(entry: u64, bitmap: u64) -> Sketch {
    let image = Image { cluster_bits: 14, present: vec![], zeros: vec![], ..qcow2::small() };
    let mut sketch = image.build();
    sketch.put_u64(field::INCOMPATIBLE, 1 << 4);
    sketch.put(image.refblock_at() + 2 * 5, &1u16.to_be_bytes());
    sketch.put(image.data_at(), &[7; 16 << 10]);
    sketch.put_u64(image.l2_at(), entry).put_u64(image.l2_at() + 8, bitmap);
    sketch
}

#[test]
fn bitmaps_of_subclusters_are_read_or_are_damage() {
    let den = Den::new();
    let place = 5 << 14 | COPIED;
    for (entry, bitmap, bytes) in [
        (place, 1, [7, 0, 0]),
        (place, 0b101 | 0b010 << 32, [7, 0, 7]),
        (place, 0xffff_ffff, [7, 7, 7]),
        (place, 0xffff_ffff << 32, [0, 0, 0]),
        (place, 0, [0, 0, 0]),
        (0, 1 << 32, [0, 0, 0]),
    ] {
        let read = den.reads(Format::Qcow2, &extended(entry, bitmap));
        assert_eq!([read[0], read[512], read[1024]], bytes, "{entry:#x} {bitmap:#x}");
    }
    for (entry, bitmap) in [
        (place, 1 | 1 << 32),
        (place, u64::MAX),
        (0, 1),
        (COPIED, 1 << 32),
        (place | 1, 0xffff_ffff),
        (place | 2, 1),
        (1 << 40 | COPIED, 1),
        (COMPRESSED | 5 << 14, 1),
    ] {
        let path = den.put("image.qcow2", &extended(entry, bitmap));
        let judged = den.judge(&path, Format::Qcow2, false);
        assert!(matches!(judged, Verdict::Fails(_)), "{entry:#x} {bitmap:#x}: {judged}");
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        let raw = ferrite_disk::open_medium(&path, &options).unwrap();
        let report = ferrite_images::qcow2::check(&raw).unwrap();
        assert!(report.counts.damage > 0, "{entry:#x} {bitmap:#x}: {report:?}");
    }
}
