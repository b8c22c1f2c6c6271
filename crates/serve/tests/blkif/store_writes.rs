//! The writes of a backend to xenstore in a disk's life: these nodes, in this order, and in one transaction where they
//! must change together. Toolstacks and frontends rely on this order.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use ferrite_loopback::CopyWith;
use ferrite_loopback::front::{FrontOptions, Frontend};
use ferrite_serve::blkif::lifecycle::Outcome;
use ferrite_testkit::PATIENCE;
use ferrite_testkit::rig::{Plan, Rig};
use ferrite_xen::store::Store;
use ferrite_xen::store::wire::{Decoder, Message, MessageType, NO_TRANSACTION, strings};

const BYTES: u64 = 1 << 20;

/// The nodes of an offer, which are written together with the state after them.
const OFFER: &str = "feature-max-indirect-segments multi-queue-max-queues max-ring-page-order \
                     max-ring-pages feature-flush-cache feature-barrier feature-persistent \
                     feature-discard discard-granularity discard-alignment discard-secure removable sectors \
                     sector-size physical-sector-size info";

/// The observed writes of a connection to the store.
#[derive(Default)]
struct Writes {
    /// Writes of open transactions.
    open: HashMap<u32, Vec<String>>,
    /// Writes of transactions that are about to end, by the request that ends them.
    ending: HashMap<u32, Vec<String>>,
    done: Vec<String>,
}

impl Writes {
    fn asked(&mut self, message: &Message) {
        let (header, payload) = (message.header, &message.payload);
        let path = || strings(&payload[..]).map_or_else(String::new, |s| s[0].to_owned());
        let said = match header.kind().unwrap() {
            MessageType::Write => {
                let at = payload.iter().position(|b| *b == 0).unwrap();
                let path = String::from_utf8_lossy(&payload[..at]).into_owned();
                let value = String::from_utf8_lossy(&payload[at + 1..]).into_owned();
                match path.rsplit('/').next().unwrap() {
                    key @ ("state" | "error") => format!("{key}={value}"),
                    key => key.to_owned(),
                }
            }
            MessageType::Rm => format!("rm {}", path()),
            MessageType::Mkdir | MessageType::SetPerms => format!("other {}", path()),
            MessageType::TransactionEnd => {
                let writes = self.open.remove(&header.transaction_id).unwrap_or_default();
                if payload.starts_with(b"T") && !writes.is_empty() {
                    self.ending.insert(header.request_id, writes);
                }
                return;
            }
            _ => return,
        };
        match header.transaction_id {
            NO_TRANSACTION => self.done.push(said),
            id => self.open.entry(id).or_default().push(said),
        }
    }

    fn answered(&mut self, message: &Message) {
        if let Some(writes) = self.ending.remove(&message.header.request_id)
            && message.header.kind() != Ok(MessageType::Error)
        {
            self.done.push(format!("[{}]", writes.join(" ").replace(OFFER, "OFFER")));
        }
    }
}

/// A backend, and its writes.
fn start(rig: &mut Rig) -> Arc<Mutex<Writes>> {
    let writes = Arc::new(Mutex::new(Writes::default()));
    let (theirs, client) = UnixStream::pair().unwrap();
    let server: OwnedFd = rig.machine.backend().unwrap().store;
    let server = UnixStream::from(server);
    server.set_nonblocking(false).unwrap();
    let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    let (up, down) = (writes.clone(), writes.clone());
    std::thread::spawn(move || forward(from, to, |message| up.lock().unwrap().asked(message)));
    std::thread::spawn(move || forward(server, client, |m| down.lock().unwrap().answered(m)));
    let hypervisor = rig.machine.loopback(CopyWith::Memcpy).unwrap();
    rig.start_with(Store::from_fd(theirs.into()), Box::new(hypervisor));
    writes
}

fn forward(mut from: UnixStream, mut to: UnixStream, see: impl Fn(&Message)) {
    let mut decoder = Decoder::new();
    let mut bytes = [0; 4096];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        decoder.push(&bytes[..n]);
        while let Some(message) = decoder.next_message().unwrap() {
            see(&message);
        }
        if to.write_all(&bytes[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

fn rig() -> Rig {
    Rig::without_backend(Plan { bytes: BYTES, pool_bytes: 4 << 20, ..Plan::default() })
}

fn works(front: &mut Frontend) {
    let buffer = front.space().buffer(1).unwrap();
    front.queues[0].write(8, &buffer, 0, 4096).unwrap();
    assert!(front.queues[0].next_reply(PATIENCE).unwrap().is_ok());
}

/// The frontend sees a write before the observer sees its answer, so the last one may still be on its way.
#[track_caller]
fn expect(writes: &Arc<Mutex<Writes>>, expected: &[&str]) {
    let end = std::time::Instant::now() + PATIENCE;
    while writes.lock().unwrap().done.len() < expected.len() && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    let done = std::mem::take(&mut writes.lock().unwrap().done);
    assert_eq!(done, expected, "{done:#?}");
}

#[test]
fn a_disks_life_is_these_writes_in_this_order() {
    let mut rig = rig();
    let writes = start(&mut rig);
    let mut front = rig.frontend();
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    works(&mut front);
    front.close(PATIENCE).unwrap();
    expect(&writes, &["[OFFER state=2]", "[OFFER state=4]", "[state=5]", "[state=6]"]);

    // Another driver, and one more that has not closed.
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    works(&mut front);
    front.connect(&FrontOptions::windows(), PATIENCE).unwrap();
    works(&mut front);
    expect(&writes, &["[OFFER state=2]", "[OFFER state=4]"].repeat(2));

    // A driver that reconnects with other rings (blkif.md 3.8).
    front.offer(&FrontOptions::default()).unwrap();
    works(&mut front);
    front.finish(PATIENCE).unwrap();
    expect(&writes, &["[OFFER state=4]"]);

    // The toolstack detaches it.
    rig.machine.unplug(&rig.disk.clone()).unwrap();
    works(&mut front);
    front.close(PATIENCE).unwrap();
    assert_eq!(rig.join().unwrap(), Outcome::Unplugged);
    expect(&writes, &["[state=6]"]);
}

#[test]
fn a_refused_driver_is_told_why_and_the_next_one_takes_that_back() {
    let mut rig = rig();
    let writes = start(&mut rig);
    let mut front = rig.frontend();
    front.wait_for_backend(&[2], PATIENCE).unwrap();
    front.read_features().unwrap();
    front.offer_edited(&FrontOptions::default(), |keys| keys.set("event-channel", "no")).unwrap();
    front.wait_for_backend(&[5], PATIENCE).unwrap();
    let why = "error=1 the frontend's event-channel is \"no\", not a number from 0 to 4294967295";
    expect(&writes, &["[OFFER state=2]", why, "[state=5]"]);
    front.close(PATIENCE).unwrap();
    front.connect(&FrontOptions::default(), PATIENCE).unwrap();
    works(&mut front);
    let error = format!("error/backend/vbd3/{}", rig.domid);
    let removed = format!("[rm {error}/{} rm {error}]", rig.disk.devid);
    let removed = removed.replace("rm error", "rm /local/domain/0/error");
    expect(&writes, &["[state=6]", "[OFFER state=2]", &removed, "[OFFER state=4]"]);
    front.close(PATIENCE).unwrap();
}

/// blkif.md 3.9: a guest that sees 5 or 6 closes its disk.
#[test]
fn nothing_is_written_when_a_backend_stops_and_its_successor_takes_over() {
    let mut rig = rig();
    let writes = start(&mut rig);
    let mut front = rig.connect(&FrontOptions::default());
    expect(&writes, &["[OFFER state=2]", "[OFFER state=4]"]);
    for _ in 0..3 {
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        expect(&writes, &[]);
        let writes = start(&mut rig);
        works(&mut front);
        assert_eq!(front.backend_state().unwrap(), 4);
        assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
        expect(&writes, &[]);
        start(&mut rig);
        works(&mut front);
    }
    front.close(PATIENCE).unwrap();
}

#[test]
fn a_successor_takes_back_what_was_reported_of_the_disk() {
    let mut rig = rig();
    let _ = start(&mut rig);
    let mut front = rig.connect(&FrontOptions::default());
    assert_eq!(rig.stop().unwrap(), Outcome::Stopped);
    let error = format!("error/backend/vbd3/{}", rig.domid);
    let mut store = rig.machine.store().unwrap();
    let node = format!("{error}/{}/error", rig.disk.devid);
    store.write(&node, b"1 the image cannot be opened").unwrap();
    let writes = start(&mut rig);
    works(&mut front);
    let removed = format!("[rm {error}/{} rm {error}]", rig.disk.devid);
    expect(&writes, &[&removed.replace("rm error", "rm /local/domain/0/error")]);
    assert!(store.read(&error).unwrap().is_none());
    front.close(PATIENCE).unwrap();
}
