use super::messages::{self, Connection, Said};
use super::*;

#[test]
fn mounts_are_found_by_the_number_of_the_device() {
    let mounts = "36 35 43:0 / /mnt/a rw,noatime - ext4 /dev/nbd0 rw\n\
                  37 35 43:1 / /mnt/b rw - ext4 /dev/nbd1 rw\n\
                  38 35 43:0 /sub /mnt/c rw - ext4 /dev/nbd0 rw\nshort\n";
    assert_eq!(mounted(mounts, "43:0"), ["mounted at /mnt/a", "mounted at /mnt/c"]);
    assert!(mounted(mounts, "43:2").is_empty());
}

#[test]
fn answers_to_other_questions_and_cut_off_ones_are_left_out() {
    let own = messages::status(30, 7).done();
    let other = messages::status(30, 8).done();
    let both = [other, own.clone()].concat();
    assert_eq!(messages::parse(&both, 7), [Said::Answer(Vec::new())]);
    for end in 0..own.len() {
        assert!(messages::parse(&own[..end], 7).is_empty(), "{end}");
    }
    // A length of zero would be read for ever.
    assert!(messages::parse(&[0; 64], 7).is_empty());
}

#[test]
fn a_connection_is_written_as_the_kernel_reads_it() {
    let wanted = Connection {
        sockets: &[5, 6],
        bytes: 1 << 20,
        block_bytes: 512,
        server_flags: 0x2d,
        timeout_s: 0,
        dead_timeout_s: 9,
        identifier: "ferrite-1",
    };
    let bytes = messages::connect(30, 1, &wanted).done();
    assert_eq!(bytes.len() % 4, 0);
    assert_eq!(bytes[..4], (bytes.len() as u32).to_ne_bytes());
    // The last 28 bytes: SOCKETS, with two items of one descriptor each.
    let item = (1u16 | 0x8000).to_ne_bytes();
    let tail = &bytes[bytes.len() - 28..];
    assert_eq!(tail[..2], 28u16.to_ne_bytes());
    assert_eq!(tail[2..4], (7u16 | 0x8000).to_ne_bytes());
    assert_eq!((&tail[4..6], &tail[6..8]), (&12u16.to_ne_bytes()[..], &item[..]));
    assert_eq!(tail[12..16], 5i32.to_ne_bytes());
    assert_eq!(tail[24..28], 6i32.to_ne_bytes());
}

#[test]
fn a_program_that_has_a_file_open_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().canonicalize().unwrap().join("device");
    assert!(openers(&path).is_empty());
    let file = std::fs::File::create(&path).unwrap();
    let found = openers(&path);
    assert_eq!(found.len(), 1, "{found:?}");
    let own = format!("open in process {} (", std::process::id());
    assert!(found[0].starts_with(&own), "{found:?}");
    drop(file);
    assert!(openers(&path).is_empty());
}
