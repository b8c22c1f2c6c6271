//! A server of a pool as a process, and owners that keep to the rules of `docs/internals/pool.md`, or do not.

mod peers;

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::process::Command;

use ferrite_pool::wire::{Header, Kind, MAX_PAYLOAD};
use peers::{Owner, Process, extent};
use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// Not a test by itself: the server's process.
#[test]
fn a_server_process() {
    peers::be_server();
}

/// A server with the copy `d` of 64 MiB.
fn server() -> (TempDir, Process) {
    let folder = TempDir::new().unwrap();
    let server = Process::start(folder.path());
    let made = Owner::create(&server, "d", 64 * MIB);
    assert_eq!(made.header.kind, Kind::Done, "{}", made.text());
    (folder, server)
}

#[test]
fn what_an_owner_writes_is_a_raw_image_and_hashes_are_those_of_its_data() {
    let (folder, server) = server();
    let (mut owner, opened) = Owner::open(&server, "d", 1, 7);
    assert_eq!(
        (opened.header.kind, opened.header.start, opened.header.len),
        (Kind::Opened, 0, MIB)
    );
    let data: Vec<u8> = (0..MAX_PAYLOAD).map(|i| (i * 7 % 251) as u8).collect();
    owner.done(Kind::Write, 3 * MIB + 4096, 0, &data);
    owner.done(Kind::Write, 0, 0, &[9; 512]);
    owner.done(Kind::Zero, 0, 512, &[]);
    owner.done(Kind::Flush, 0, 0, &[]);
    assert_eq!(owner.done(Kind::Read, 3 * MIB + 4096, MIB, &[]), data);
    assert_eq!(owner.dirty(), [0, 3, 4]);
    let mut image = vec![0; 64 * MIB as usize];
    image[3 * MIB as usize + 4096..][..data.len()].copy_from_slice(&data);
    let hashes = owner.done(Kind::Hash, 2 * MIB, 2 * MIB + 512, &[]);
    let wanted = [&image[2 << 20..3 << 20], &image[3 << 20..4 << 20], &image[4 << 20..][..512]];
    let wanted: Vec<u8> = wanted.iter().flat_map(|piece| *blake3::hash(piece).as_bytes()).collect();
    assert_eq!(hashes, wanted);
    let file = folder.path().join("d.raw");
    assert!(std::fs::read(&file).unwrap() == image);
    let thin = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&file).unwrap());
    assert!(thin * 512 < 4 * MIB, "it is not thin");
    if let Ok(info) =
        Command::new("qemu-img").args(["info", "-U", "--output=json"]).arg(&file).output()
    {
        assert!(String::from_utf8_lossy(&info.stdout).contains("\"virtual-size\": 67108864"));
    }
    // Equal data get no bit, others do.
    owner.regions(Kind::Clear, &[0, 3, 4]);
    owner.done(Kind::Repair, 3 * MIB + 4096, 0, &data);
    assert!(owner.dirty().is_empty());
    owner.done(Kind::Repair, 9 * MIB, 0, &[1; 512]);
    assert_eq!(owner.dirty(), [9]);
}

#[test]
fn nothing_of_an_earlier_owner_lands_after_a_later_session() {
    let (folder, server) = server();
    let (mut old, _) = Owner::open(&server, "d", 1, 7);
    old.done(Kind::Write, 0, 0, &[1; 512]);
    // The server is stopped while the old owner's writes are in its socket, and goes on with the new one's session.
    kill_process(server.pid(), Signal::STOP).unwrap();
    let address = server.address.clone();
    let taken = std::thread::scope(|scope| {
        let new = scope.spawn(|| {
            let mut new = Owner::greet(&address, "a").unwrap();
            let opened = new.ask(Kind::Open, 2, 8, &extent("d").to_bytes());
            (new, opened)
        });
        for _ in 0..200 {
            old.send(Kind::Write, MIB, 0, &[1; 512]);
        }
        kill_process(server.pid(), Signal::CONT).unwrap();
        new.join().unwrap()
    });
    let (mut new, opened) = taken;
    assert_eq!(opened.header.kind, Kind::Opened);
    new.done(Kind::Write, MIB, 0, &[2; 512]);
    // A message of the old owner from now on ends its connection. Answers that it has not read yet are from before.
    let _ = old.stream.write_all(
        &[
            &Header { kind: Kind::Write, op: 999, start: MIB, len: 0, payload: 512 }.to_bytes()[..],
            &[1; 512],
        ]
        .concat(),
    );
    while let Some(answer) = old.answer() {
        assert!(answer.header.op != 999, "a write of an old generation was answered");
    }
    assert_eq!(new.done(Kind::Read, MIB, 512, &[]), [2; 512]);
    let (_, refused) = Owner::open(&server, "d", 1, 7);
    assert_eq!((refused.header.kind, refused.header.start), (Kind::Refused, 2));
    let (_, refused) = Owner::open(&server, "d", 2, 9);
    assert_eq!(refused.header.kind, Kind::Refused, "another owner of the same generation");
    // The generation is durable: the server's death changes nothing.
    drop(server);
    let server = Process::start(folder.path());
    let (_, refused) = Owner::open(&server, "d", 1, 7);
    assert_eq!((refused.header.kind, refused.header.start), (Kind::Refused, 2));
    let (_, opened) = Owner::open(&server, "d", 2, 8);
    assert_eq!(
        (opened.header.kind, opened.header.start),
        (Kind::Opened, 0),
        "the system still runs"
    );
}

#[test]
fn a_killed_server_has_a_bit_for_all_that_it_has() {
    let (folder, mut server) = server();
    for round in 0..8u64 {
        let (mut owner, _) = Owner::open(&server, "d", 1, 7);
        owner.regions(Kind::Clear, &(0..64).collect::<Vec<_>>());
        owner.done(Kind::Flush, 0, 0, &[]);
        // A mark is answered when the whole state is durable, so the earlier clearing is, too.
        owner.regions(Kind::Mark, &[63]);
        let image = || std::fs::read(folder.path().join("d.raw")).unwrap();
        let before = image();
        for region in 0..40 {
            owner.send(Kind::Write, region * MIB, 0, &[round as u8 + 1; 4096]);
        }
        for _ in 0..round {
            owner.answer().unwrap();
        }
        drop(server);
        let after = image();
        server = Process::start(folder.path());
        let (_, opened) = Owner::open(&server, "d", 1, 7);
        let dirty = opened.regions();
        for region in 0..64usize {
            let of = |image: &[u8]| image[region << 20..][..4096].to_vec();
            let changed = of(&before) != of(&after);
            assert!(!changed || dirty.contains(&(region as u64)), "round {round}, region {region}");
        }
        assert!(dirty.contains(&63));
    }
}

#[test]
fn a_restart_of_the_system_makes_a_copy_incomplete_until_it_is_said_to_be_whole() {
    let (folder, server) = server();
    let (_, opened) = Owner::open(&server, "d", 1, 7);
    assert_eq!(opened.header.start, 0);
    drop(server);
    let boot = folder.path().with_extension("boot");
    std::fs::write(&boot, "11111111-2222-3333-4444-555555555555\n").unwrap();
    let script = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
    let other = ["unshare", "-m", "sh", "-c", script, boot.to_str().unwrap()];
    let start = || Process::try_start(folder.path(), &other).unwrap();
    let server = start();
    let (_, opened) = Owner::open(&server, "d", 2, 7);
    assert_eq!((opened.header.kind, opened.header.start), (Kind::Opened, 1));
    drop(server);
    // It stays so.
    let server = start();
    let (mut owner, opened) = Owner::open(&server, "d", 2, 7);
    assert_eq!(opened.header.start, 1);
    owner.done(Kind::Complete, 0, 0, &[]);
    let (_, opened) = Owner::open(&server, "d", 2, 7);
    assert_eq!(opened.header.start, 0);
    std::fs::remove_file(&boot).unwrap();
}

#[test]
fn files_that_are_not_the_copys_are_refused_by_name() {
    let (folder, server) = server();
    Owner::create(&server, "e", 64 * MIB);
    let (mut owner, _) = Owner::open(&server, "d", 1, 7);
    owner.done(Kind::Write, 0, 0, &[1; 512]);
    let path = |name: &str| folder.path().join(name);
    let refused = |why: &str| {
        let (_, answer) = Owner::open(&server, "d", 2, 7);
        assert_eq!(answer.header.kind, Kind::Failed);
        assert!(answer.text().contains("the copy d"), "{}", answer.text());
        assert!(answer.text().contains(why), "{}", answer.text());
    };
    // From a backup: the same bytes in another file, also with a state from it.
    std::fs::rename(path("d.raw"), path("kept")).unwrap();
    std::fs::copy(path("kept"), path("d.raw")).unwrap();
    refused("such as one from a backup");
    std::fs::remove_file(path("d.raw")).unwrap();
    refused("its data have gone");
    std::fs::rename(path("kept"), path("d.raw")).unwrap();
    OpenOptions::new().write(true).open(path("d.raw")).unwrap().set_len(4096).unwrap();
    refused("its data are shorter, 4096 of 67108864 bytes");
    OpenOptions::new().write(true).open(path("d.raw")).unwrap().set_len(64 * MIB).unwrap();
    // The state of another disk.
    std::fs::rename(path("d.state"), path("kept")).unwrap();
    std::fs::copy(path("e.state"), path("d.state")).unwrap();
    refused("its state is that of another copy, e");
    std::fs::write(path("d.state"), [7; 8192]).unwrap();
    refused("its state is damaged");
    std::fs::remove_file(path("d.state")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", path("d.state")).unwrap();
    let (_, answer) = Owner::open(&server, "d", 2, 7);
    assert_eq!(answer.header.kind, Kind::Failed, "a link was followed");
    std::fs::remove_file(path("d.state")).unwrap();
    refused("this server has none");
    // Data without a state may be another program's.
    let before = std::fs::metadata(path("d.raw")).unwrap().blocks();
    let made = Owner::create(&server, "d", 64 * MIB);
    assert_eq!(made.header.kind, Kind::Failed);
    assert!(made.text().contains("move that file away"), "{}", made.text());
    assert_eq!(std::fs::metadata(path("d.raw")).unwrap().blocks(), before);
    std::fs::rename(path("kept"), path("d.state")).unwrap();
    let (_, opened) = Owner::open(&server, "d", 2, 7);
    assert_eq!(opened.header.kind, Kind::Opened);
}

#[test]
fn a_server_is_one_process_of_one_pool_and_knows_when_another_is_meant() {
    let (folder, server) = server();
    let second = Process::try_start(folder.path(), &[]).err().unwrap();
    assert!(second.contains("end the other ferrite pool serve"), "{second}");
    let other = Owner::greet(&server.address, "b").err().unwrap();
    assert!(other.contains("it is server a of pool 0101"), "{other}");
    drop(server);
    let identity = folder.path().join("identity");
    std::fs::write(
        &identity,
        std::fs::read_to_string(&identity).unwrap().replace("server a", "server b"),
    )
    .unwrap();
    let other = Process::try_start(folder.path(), &[]).err().unwrap();
    assert!(other.contains("server b"), "{other}");
    let foreign = TempDir::new().unwrap();
    std::fs::write(foreign.path().join("letter"), "x").unwrap();
    let other = Process::try_start(foreign.path(), &[]).err().unwrap();
    assert!(other.contains("give an empty folder"), "{other}");
}

#[test]
fn a_removed_copy_never_comes_back_and_only_its_owner_removes_it() {
    let (folder, server) = server();
    let (mut old, _) = Owner::open(&server, "d", 1, 7);
    let (mut new, _) = Owner::open(&server, "d", 2, 7);
    let header = Header { kind: Kind::Delete, op: 1, start: 0, len: 0, payload: 0 };
    let _ = old.stream.write_all(&header.to_bytes());
    assert!(old.answer().is_none_or(|answer| answer.header.kind == Kind::Failed));
    assert!(folder.path().join("d.raw").exists());
    new.done(Kind::Delete, 0, 0, &[]);
    assert!(!folder.path().join("d.raw").exists());
    let again = Owner::create(&server, "d", 64 * MIB);
    assert_eq!(again.header.kind, Kind::Failed);
    assert!(again.text().contains("was removed"), "{}", again.text());
    let (_, gone) = Owner::open(&server, "d", 3, 7);
    assert!(gone.text().contains("this server has none"), "{}", gone.text());
}

#[test]
fn a_full_disk_is_an_error_of_the_write_and_the_copy_works_again() {
    let folder = TempDir::new().unwrap();
    let script = "mount -t tmpfs -o size=2m,mode=700 none \"$0\" && exec \"$@\"";
    let full = ["unshare", "-m", "sh", "-c", script, folder.path().to_str().unwrap()];
    let server = Process::try_start(folder.path(), &full).unwrap();
    Owner::create(&server, "d", 64 * MIB);
    let (mut owner, _) = Owner::open(&server, "d", 1, 7);
    owner.done(Kind::Write, 0, 0, &[1; 1 << 20]);
    let answer = owner.ask(Kind::Write, 8 * MIB, 0, &[1; 1 << 20]);
    assert_eq!(answer.header.kind, Kind::Failed);
    assert_eq!(
        answer.header.start,
        rustix::io::Errno::NOSPC.raw_os_error() as u64,
        "{}",
        answer.text()
    );
    assert!(owner.answer().is_none(), "the session ends");
    let (mut owner, opened) = Owner::open(&server, "d", 1, 7);
    assert!(opened.regions().contains(&8));
    owner.done(Kind::Zero, 0, 16 * MIB, &[]);
    owner.done(Kind::Write, 8 * MIB, 0, &[1; 1 << 20]);
}

#[test]
fn hostile_clients_end_their_own_connections_only() {
    let (_folder, server) = server();
    let (mut good, _) = Owner::open(&server, "d", 1, 7);
    Owner::create(&server, "x", MIB);
    let header = |kind, start, len, payload| Header { kind, op: 1, start, len, payload };
    let mut cases: Vec<Vec<u8>> = vec![vec![0xff; 36], vec![0; 100]];
    for bad in [
        header(Kind::Read, 0, u64::MAX, 0),
        header(Kind::Read, u64::MAX - 511, 512, 0),
        header(Kind::Read, MIB, 512, 0),
        header(Kind::Read, 0, 0, 0),
        header(Kind::Read, 1, 512, 0),
        header(Kind::Hash, 0, 1 << 40, 0),
        header(Kind::Zero, 512, MIB, 0),
        header(Kind::Done, 0, 0, 0),
        header(Kind::Open, 9, 9, 0),
    ] {
        cases.push(bad.to_bytes().to_vec());
    }
    let regions = header(Kind::Mark, 0, 0, 8).to_bytes();
    cases.push([&regions[..], &[0xff; 8]].concat());
    cases.push([&header(Kind::Clear, 0, 0, 7).to_bytes()[..], &[0; 7]].concat());
    cases.push([&header(Kind::Flush, 0, 0, 8).to_bytes()[..], &[0; 8]].concat());
    for (i, case) in cases.iter().enumerate() {
        let (mut bad, opened) = Owner::open(&server, "x", 1, 7);
        assert_eq!(opened.header.kind, Kind::Opened);
        bad.stream.write_all(case).unwrap();
        let answer = bad.answer().unwrap_or_else(|| panic!("case {i} has no answer"));
        assert_eq!(answer.header.kind, Kind::Failed, "case {i}");
        assert!(bad.answer().is_none(), "case {i}");
    }
    // No session, and no copy: nothing is done.
    let mut none = Owner::connect(&server);
    assert_eq!(none.ask(Kind::Read, 0, 512, &[]).header.kind, Kind::Failed);
    let sizes = [0, 511, u64::MAX, 1 << 63];
    for size in sizes {
        assert_eq!(Owner::create(&server, "y", size).header.kind, Kind::Failed, "{size}");
    }
    let traversal = [&[1; 16][..], b"../../tmp/x"].concat();
    assert_eq!(
        Owner::connect(&server).ask(Kind::Create, 0, MIB, &traversal).header.kind,
        Kind::Failed
    );
    good.done(Kind::Confirm, 0, 0, &[]);
}

/// Resident bytes of a process that are no files of it.
fn resident(server: &Process) -> u64 {
    let path = format!("/proc/{}/status", server.child.id());
    let status = std::fs::read_to_string(path).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() << 10
}

#[test]
fn a_client_that_takes_no_answers_takes_no_memory() {
    let (_folder, server) = server();
    let flood = |generation| {
        let (mut bad, _) = Owner::open(&server, "d", generation, 7);
        bad.stream.set_write_timeout(Some(std::time::Duration::from_millis(500))).unwrap();
        for op in 0..100_000 {
            let read = Header { kind: Kind::Read, op, start: 0, len: MIB, payload: 0 };
            if bad.stream.write_all(&read.to_bytes()).is_err() {
                break;
            }
        }
        bad
    };
    let _bad: Vec<_> = (1..4).map(flood).collect();
    let bytes = resident(&server);
    assert!(bytes < 64 << 20, "{bytes}");
    let (mut good, _) = Owner::open(&server, "d", 9, 7);
    good.done(Kind::Write, 0, 0, &[1; 512]);
}

#[test]
fn a_hundred_disks_in_use_take_less_than_64_mib() {
    let folder = TempDir::new().unwrap();
    let server = Process::start(folder.path());
    let mut owners: Vec<_> = (0..100)
        .map(|i| {
            let name = format!("d{i}");
            Owner::create(&server, &name, 64 << 30);
            Owner::open(&server, &name, 1, 7).0
        })
        .collect();
    for round in 0..4u64 {
        for owner in &mut owners {
            for i in 0..4 {
                owner.send(Kind::Write, (round * 4 + i) << 24, 0, &[1; 65536]);
            }
        }
        for owner in &mut owners {
            for _ in 0..4 {
                assert_eq!(owner.answer().unwrap().header.kind, Kind::Done);
            }
        }
    }
    let bytes = resident(&server);
    println!("100 disks: {} KiB", bytes >> 10);
    assert!(bytes < 64 << 20, "{bytes}");
}

#[test]
fn a_cut_state_makes_the_copy_incomplete() {
    let (folder, server) = server();
    let (mut owner, _) = Owner::open(&server, "d", 1, 7);
    owner.done(Kind::Write, 0, 0, &[1; 512]);
    drop(server);
    let state = OpenOptions::new().write(true).open(folder.path().join("d.state")).unwrap();
    state.write_all_at(&[0; 2048], 2048).unwrap();
    let server = Process::start(folder.path());
    let (_, opened) = Owner::open(&server, "d", 1, 7);
    assert_eq!((opened.header.kind, opened.header.start), (Kind::Opened, 1));
}
