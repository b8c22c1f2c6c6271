//! Two guests in one process, storage that is short, fails, is truncated or has holes, and invalid grants (threats.md
//! T18): neither guest gets a byte of the other's, and no page of a failed read has data of an earlier request.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::time::Instant;

use ferrite_host::clock::{Random, SplitMix64};
use ferrite_loopback::front::{Buffer, FrontOptions, Frontend, Tag};
use ferrite_testkit::bytes::are_all;
use ferrite_testkit::devices::Loop;
use ferrite_testkit::errno::{EAGAIN, EIO};
use ferrite_testkit::faulty::{Fault, Faults, Kind, Ops};
use ferrite_testkit::places::dir_in_memory;
use ferrite_testkit::rig::{Plan, Rig, mover};
use ferrite_testkit::{PATIENCE, few_or_all, images, scale};
use ferrite_xen::mover::Mover;

/// Requests in flight of a guest, each with its own part of the disk and of the buffer.
const PARTS: usize = 8;
const PART_BYTES: usize = 128 << 10;
const BYTES: usize = PARTS * PART_BYTES;
/// The offset at which an image is truncated.
const CUT: usize = BYTES / 2 + 5 * 512;
/// Values that a guest writes, and as many with which it marks pages for reading.
const VALUES: u8 = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Read,
    Write(u8),
    Discard,
}

/// A request in flight.
#[derive(Debug)]
struct Asked {
    tag: Tag,
    what: What,
    /// The mark in this part of the buffer.
    mark: u8,
    /// First byte on the disk and in the buffer.
    offset: usize,
    at: usize,
    len: usize,
    /// Its page with an invalid grant.
    bad_page: Option<usize>,
}

/// A guest with a disk.
struct Tenant {
    rig: Rig,
    front: Frontend,
    buffer: Buffer,
    faults: Faults,
    random: SplitMix64,
    /// The contents of its disk.
    model: Vec<u8>,
    /// The first of its values.
    first: u8,
    turn: u8,
    asked: Vec<Asked>,
    /// The numbers of successful and of failed requests.
    results: (usize, usize),
}

/// Whether each byte is `fit`. In most sectors all bytes are equal.
fn each(bytes: &[u8], fit: impl Fn(&u8) -> bool) -> bool {
    let fits = |part: &[u8]| match are_all(part, part[0]) {
        true => fit(&part[0]),
        false => part.iter().all(&fit),
    };
    bytes.chunks(512).all(fits)
}

fn options() -> FrontOptions {
    FrontOptions { order: 1, max_indirect: 64, check_release: false, ..FrontOptions::default() }
}

impl Tenant {
    /// A guest with values from `first` on, and a sparse image of its own or this medium.
    fn new(first: u8, medium: Option<PathBuf>) -> Tenant {
        let faults = Faults::none();
        let plan = Plan {
            bytes: BYTES as u64,
            engine: faults.factory(),
            pool_bytes: 2 << 20,
            image: medium,
            ..Plan::default()
        };
        let rig = Rig::new(plan);
        let front = rig.connect(&options());
        let buffer = front.space().buffer(BYTES / 4096).unwrap();
        let random = SplitMix64::new(first.into());
        let (model, asked) = (vec![0; BYTES], Vec::new());
        Tenant { rig, front, buffer, faults, random, model, first, turn: 0, asked, results: (0, 0) }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound as u64) as usize
    }

    /// Adds random faults of storage.
    fn break_storage(&mut self) {
        let ends = [Fault::Errno(EIO), Fault::Nothing, Fault::Errno(EAGAIN), Fault::Half];
        let others = [Fault::Short(512), Fault::None, Fault::None, Fault::None];
        let seed = self.random.clone().next_u64();
        let faults = [ends, others].concat();
        self.faults.set([Ops::among(&Kind::TRANSFERS).meet_any(seed, &faults)]);
    }

    /// Sends one request for each part; `only_reads` leaves the medium unchanged.
    fn ask(&mut self, only_reads: bool) {
        for part in 0..PARTS {
            self.turn = (self.turn + 1) % VALUES;
            let (value, mark) = (self.first + self.turn, self.first + VALUES + self.turn);
            let base = part * PART_BYTES;
            let sectors = 1 + self.below(if part % 2 == 0 { 200 } else { 12 });
            let spare = PART_BYTES / 512 - sectors;
            let offset = base + self.below(spare + 1) * 512;
            let at = base + self.below(spare + 1) * 512;
            let len = sectors * 512;
            let what = match self.below(8) {
                0 if !only_reads => What::Discard,
                1..=3 if !only_reads => What::Write(value),
                _ => What::Read,
            };
            self.buffer.fill(base, PART_BYTES, mark);
            if let What::Write(value) = what {
                self.buffer.fill(at, len, value);
            }
            let bad_page = self.spoil(what, at, len);
            let sector = (offset / 512) as u64;
            let queue = &mut self.front.queues[0];
            let tag = match what {
                What::Read => queue.read(sector, &self.buffer, at, len),
                What::Write(_) => queue.write(sector, &self.buffer, at, len),
                What::Discard => queue.discard(sector, sectors as u64, false),
            };
            let tag = tag.unwrap();
            self.asked.push(Asked { tag, what, mark, offset, at, len, bad_page });
        }
        self.front.queues[0].push().unwrap();
    }

    /// Revokes the grant of a page, or makes it read-only, for one request in six.
    fn spoil(&mut self, what: What, at: usize, len: usize) -> Option<usize> {
        if what == What::Discard || self.below(6) > 0 {
            return None;
        }
        let (first, last) = (at / 4096, (at + len - 1) / 4096);
        let page = first + self.below(last - first + 1);
        self.buffer.revoke(page).ok()?;
        if what == What::Read && self.below(2) == 0 {
            self.buffer.grant(page, true);
        }
        Some(page)
    }

    /// Reads all answers, and checks all visible bytes.
    fn check(&mut self) {
        let replies = self.front.queues[0].drain(PATIENCE).unwrap();
        let medium = self.rig.sectors(0, BYTES);
        for asked in std::mem::take(&mut self.asked) {
            let reply = replies.iter().find(|reply| reply.tag == asked.tag).unwrap();
            if let Some(page) = asked.bad_page {
                self.buffer.grant(page, false);
                // With persistent grants a guest cannot revoke a page for one request.
                let lent = mover() == Mover::Persistent;
                assert!(!reply.is_ok() || lent, "{asked:?}: OKAY with a bad grant");
            }
            match reply.is_ok() {
                true => self.results.0 += 1,
                false => self.results.1 += 1,
            }
            self.check_buffer(&asked, reply.is_ok());
            if asked.what != What::Read {
                self.check_medium(&asked, reply.is_ok(), &medium);
            }
        }
        assert!(medium == self.model, "the medium has bytes that were never written there");
        let own = |byte: &u8| *byte == 0 || (self.first..=self.last()).contains(byte);
        let all = self.buffer.to_vec(0, BYTES);
        assert!(each(&all, own) && each(&medium, own), "a byte is another's");
    }

    /// The last of its values and marks.
    fn last(&self) -> u8 {
        self.first + (2 * VALUES - 1)
    }

    fn check_buffer(&self, asked: &Asked, is_ok: bool) {
        let base = asked.at / PART_BYTES * PART_BYTES;
        let part = self.buffer.to_vec(base, PART_BYTES);
        let (before, rest) = part.split_at(asked.at - base);
        let (data, after) = rest.split_at(asked.len);
        let marked = |bytes: &[u8]| are_all(bytes, asked.mark);
        assert!(marked(before) && marked(after), "{asked:?}: bytes beside the data");
        let there = &self.model[asked.offset..][..asked.len];
        match (asked.what, is_ok) {
            (What::Read, true) => assert!(data == there, "{asked:?}: other bytes"),
            // Pages before and after the bad one may have been copied, with the requested data.
            (What::Read, false) if asked.bad_page.is_some() => {
                let mut pairs = data.iter().zip(there);
                assert!(pairs.all(|(got, there)| got == there || *got == asked.mark), "{asked:?}");
            }
            (What::Read, false) => assert!(marked(data), "{asked:?}: bytes of a failed read"),
            (What::Write(value), _) => assert!(are_all(data, value)),
            (What::Discard, _) => assert!(marked(data)),
        }
    }

    /// A failed write may have been done in part; so may a successful discard.
    fn check_medium(&mut self, asked: &Asked, is_ok: bool, medium: &[u8]) {
        let range = asked.offset..asked.offset + asked.len;
        let (old, new) = (&mut self.model[range.clone()], &medium[range]);
        let value = match asked.what {
            What::Write(value) => value,
            _ => 0,
        };
        let whole = is_ok && asked.what != What::Discard;
        let fits = |(old, new): (&u8, &u8)| *new == value || *new == *old && !whole;
        let fit = are_all(new, value) || old.iter().zip(new).all(fits);
        assert!(fit, "{asked:?} left other bytes on the medium");
        old.copy_from_slice(new);
    }

    /// Reads of an image that is shorter than its disk, and then has a hole there.
    fn cut(&mut self) {
        let image = OpenOptions::new().write(true).open(&self.rig.image).unwrap();
        image.set_len(CUT as u64).unwrap();
        self.model[CUT..].fill(0);
        self.ask(true);
        let replies = self.front.queues[0].drain(PATIENCE).unwrap();
        for asked in std::mem::take(&mut self.asked) {
            let reply = replies.iter().find(|reply| reply.tag == asked.tag).unwrap();
            let gone = asked.offset + asked.len > CUT;
            assert!(!(gone && reply.is_ok()), "{asked:?}: OKAY for what is not there");
            if let Some(page) = asked.bad_page {
                self.buffer.grant(page, false);
            }
            self.check_buffer(&asked, reply.is_ok());
        }
        image.set_len(BYTES as u64).unwrap();
    }

    /// Makes a new connection, with a new pool.
    fn reconnect(&mut self) {
        self.front.close(PATIENCE).unwrap();
        self.front.connect(&options(), PATIENCE).unwrap();
    }
}

/// Both guests at once, and each in turn, with working and with failing storage.
fn alternate(tenants: &mut [Tenant; 2], rounds: u32) {
    for round in 0..rounds {
        for tenant in tenants.iter_mut() {
            match round % 3 {
                0 => tenant.faults.clear(),
                _ => tenant.break_storage(),
            }
        }
        if round % 4 == 0 {
            for tenant in tenants.iter_mut() {
                tenant.ask(false);
                tenant.check();
            }
        } else {
            tenants.iter_mut().for_each(|tenant| tenant.ask(false));
            tenants.iter_mut().for_each(Tenant::check);
        }
    }
}

fn end(tenants: [Tenant; 2]) {
    for mut tenant in tenants {
        let (good, bad) = tenant.results;
        println!("{good} requests succeeded, {bad} failed");
        assert!(good > bad / 4 && bad > good / 4, "{good} good, {bad} bad: nothing was tried");
        tenant.front.close(PATIENCE).unwrap();
    }
}

#[test]
fn two_guests_see_nothing_of_each_other_or_of_what_was_before() {
    let mut tenants = [Tenant::new(0x40, None), Tenant::new(0x80, None)];
    for round in 0..few_or_all(3, 30) {
        alternate(&mut tenants, 12);
        tenants.iter_mut().for_each(Tenant::cut);
        tenants[round as usize % 2].reconnect();
    }
    end(tenants);
}

/// After a while without requests their buffers are returned to the system, and allocated again.
#[test]
fn buffers_that_were_given_back_and_are_used_again_show_nothing() {
    let mut tenants = [Tenant::new(0x40, None), Tenant::new(0x80, None)];
    alternate(&mut tenants, 12);
    for _ in 0..scale() {
        let released = |tenant: &Tenant| tenant.rig.counters.counts().releases;
        let before = tenants.each_ref().map(released);
        let end = Instant::now() + PATIENCE;
        while tenants.iter().zip(before).any(|(tenant, before)| released(tenant) == before) {
            assert!(Instant::now() < end, "no buffers were given back");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        tenants.iter_mut().for_each(Tenant::cut);
        alternate(&mut tenants, 12);
    }
    end(tenants);
}

/// Reads of ranges that an image has in part: the rest is zeros, whatever the buffer had.
#[test]
fn what_is_nowhere_in_an_image_reads_as_zeros_beside_what_is_there() {
    const CLUSTER: usize = 64 << 10;
    for format in ["qcow2", "chain.qcow2", "vhd", "chain.vhd"] {
        let dir = dir_in_memory();
        let image = images::make(dir.path(), format, 64 << 20);
        let rig = Rig::new(Plan { image: Some(image), pool_bytes: 2 << 20, ..Plan::default() });
        let mut front = rig.connect(&options());
        let buffer = front.space().buffer(64).unwrap();
        let queue = &mut front.queues[0];
        let mut model = vec![0; 64 * CLUSTER];
        let mut random = SplitMix64::new(18);
        for round in 1..=60 {
            let sectors = 1 + random.below(8) as usize;
            let at = random.below((model.len() / 512 - sectors) as u64) as usize;
            buffer.fill(0, sectors * 512, round);
            queue.write(at as u64, &buffer, 0, sectors * 512).unwrap();
            assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
            model[at * 512..(at + sectors) * 512].fill(round);
            // Unwritten parts of buffers have older content of the pool.
            for _ in 0..4 {
                let sectors = 1 + random.below(512) as usize;
                let at = random.below((model.len() / 512 - sectors) as u64) as usize;
                buffer.fill(0, buffer.len(), 0xEE);
                queue.read(at as u64, &buffer, 0, sectors * 512).unwrap();
                assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
                let there = &model[at * 512..(at + sectors) * 512];
                assert!(buffer.to_vec(0, sectors * 512) == there, "{format}: {at}+{sectors}");
            }
        }
        front.close(PATIENCE).unwrap();
    }
}

/// Such a request reads whole blocks, with bytes around its own.
#[test]
fn parts_of_blocks_come_without_what_is_around_them() {
    let dir = dir_in_memory();
    let device = |name: &str| {
        let image = dir.path().join(name);
        std::fs::File::create(&image).unwrap().set_len(BYTES as u64).unwrap();
        Loop::attach(&image, 4096)
    };
    let (Some(a), Some(b)) = (device("a"), device("b")) else { return };
    let mut tenants = [Tenant::new(0x40, Some(a.0.clone())), Tenant::new(0x80, Some(b.0.clone()))];
    alternate(&mut tenants, 24 * scale());
    end(tenants);
}
