//! A volume that is read through the process that has its store open, and the messages that this process may send.
//! These tests set how owners are asked, so they have a program of their own.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ferrite_disk::elsewhere::{Access, Answer, Kind, Request, ask_owners};
use ferrite_disk::{Disk, DiskError, ErrorKind, OpenOptions, Session};
use ferrite_io::engines::test_engine;
use ferrite_testkit::stores;
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

const BYTES: u64 = 1 << 20;

/// The access that the next owner grants.
static GRANTED: Mutex<Option<Access>> = Mutex::new(None);
/// One test at a time sets that.
static ALONE: Mutex<()> = Mutex::new(());

fn ask(_: &Path, volume: &str) -> Result<Option<Access>, DiskError> {
    match volume {
        "a" => Ok(GRANTED.lock().unwrap().take()),
        _ => Err(DiskError::new(ErrorKind::NotFound, "no", "the owner says so", "help")),
    }
}

/// An owner that answers each request on each stream as this says.
fn owner(streams: usize, says: impl Fn(Request) -> Vec<u8> + Send + Clone + 'static) -> Access {
    let streams = (0..streams).map(|_| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let says = says.clone();
        let _: JoinHandle<()> = std::thread::spawn(move || {
            let mut bytes = [0; Request::BYTES];
            while theirs.read_exact(&mut bytes).is_ok() {
                let answer = says(Request::decode(&bytes).expect("a request"));
                if answer.is_empty() || theirs.write_all(&answer).is_err() {
                    return;
                }
            }
        });
        ours
    });
    Access { bytes: BYTES, is_snapshot: true, streams: streams.collect() }
}

/// Opens volume `a` of a store that another process seems to have.
fn open(name: &str, granted: Option<Access>) -> Result<Disk, DiskError> {
    static STORE: LazyLock<(TempDir, File)> = LazyLock::new(|| {
        ask_owners(ask);
        let dir = TempDir::new().unwrap();
        let store = dir.path().join("s");
        stores::create(&store, stores::SMALLEST, &[("a", 16)]);
        let locked = File::open(&store).unwrap();
        flock(&locked, FlockOperation::LockExclusive).unwrap();
        (dir, locked)
    });
    let name = format!("store:{}#{name}", STORE.0.path().join("s").display());
    *GRANTED.lock().unwrap() = granted;
    Disk::open(&name, &OpenOptions { read_only: true, ..stores::options() })
}

fn session(granted: Access) -> Session {
    let disk = Arc::new(open("a", Some(granted)).unwrap());
    assert!(disk.read_only() && disk.sectors() * 512 == BYTES);
    Session::new(disk, |arena| test_engine().open(arena, 8)).unwrap()
}

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn content(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(|at| (at / 512) as u8 | 1).collect()
}

/// An answer to a request for so many bytes.
type Says = fn(u64) -> Vec<u8>;

fn honest(request: Request) -> Vec<u8> {
    let Request { kind, offset, len } = request;
    match kind {
        Kind::Read => [&Answer::Data(len).encode()[..], &content(offset, len)].concat(),
        Kind::Look if offset >= 4096 => Answer::Zeros(len).encode().to_vec(),
        Kind::Look => Answer::Data(len.min(4096 - offset)).encode().to_vec(),
    }
}

#[test]
fn data_come_from_the_owner_on_one_stream_or_several() {
    let _alone = alone();
    for streams in [1, 3] {
        let mut session = session(owner(streams, honest));
        let mut bytes = vec![0; BYTES as usize];
        session.read(0, &mut bytes).unwrap();
        assert!(bytes == content(0, BYTES));
        session.read(1536, &mut bytes[..512]).unwrap();
        assert!(bytes[..512] == content(1536, 512));
        let disk = session.disk().clone();
        let port = session.port().clone();
        let found = session.run(disk.allocation(&port, 0, BYTES)).unwrap().unwrap();
        assert_eq!((found.len, found.zeros), (4096, false));
        let found = session.run(disk.allocation(&port, 8192, 512)).unwrap().unwrap();
        assert_eq!((found.len, found.zeros), (512, true));
        assert!(session.write(0, &[1; 512]).is_err());
    }
}

#[test]
fn an_error_of_the_owner_is_that_of_one_read() {
    let _alone = alone();
    let mut session = session(owner(1, |request| match request.offset {
        0 => Answer::Failed(io::Error::from_raw_os_error(28)).encode().to_vec(),
        512 => Answer::Failed(io::ErrorKind::InvalidData.into()).encode().to_vec(),
        _ => honest(request),
    }));
    let mut bytes = [0; 512];
    assert_eq!(session.read(0, &mut bytes).unwrap_err().raw_os_error(), Some(28));
    assert_eq!(session.read(512, &mut bytes).unwrap_err().kind(), io::ErrorKind::InvalidData);
    session.read(1024, &mut bytes).unwrap();
    assert!(bytes[..] == content(1024, 512));
}

#[test]
fn an_owner_is_not_believed_and_a_stream_out_of_step_is_not_used_again() {
    let _alone = alone();
    let nonsense: [(&str, Says); 6] = [
        ("no answer", |_| vec![9; 16]),
        ("too many", |len| Answer::Data(len + 1).encode().to_vec()),
        ("too few", |len| Answer::Data(len - 1).encode().to_vec()),
        ("zeros", |len| Answer::Zeros(len).encode().to_vec()),
        ("half of a head", |len| Answer::Data(len).encode()[..7].to_vec()),
        ("the end", |_| Vec::new()),
    ];
    for (name, says) in nonsense {
        // The half of a head is followed by the end of the stream.
        let mut cut = session(owner(1, move |request| match request.offset {
            0 => says(request.len),
            _ => honest(request),
        }));
        if name == "half of a head" {
            let disk = cut.disk().clone();
            std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                disk.unlock();
            });
        }
        let mut bytes = [0; 512];
        cut.read(0, &mut bytes).expect_err(name);
        let again = cut.read(4096, &mut bytes).expect_err(name);
        assert_eq!(again.kind(), io::ErrorKind::ConnectionReset, "{name}: {again}");
        assert!(again.to_string().contains("has ended"), "{again}");
    }
    for len in [0, 4097] {
        let mut session = session(owner(1, move |_| Answer::Data(len).encode().to_vec()));
        let (disk, port) = (session.disk().clone(), session.port().clone());
        session.run(disk.allocation(&port, 0, 4096)).unwrap().unwrap_err();
    }
}

#[test]
fn one_stream_that_ends_leaves_the_other() {
    let _alone = alone();
    let mut granted = owner(1, honest);
    granted.streams.push(owner(1, |_| Vec::new()).streams.remove(0));
    let mut session = session(granted);
    let mut bytes = [0; 512];
    let read: Vec<bool> = (0..6).map(|_| session.read(0, &mut bytes).is_ok()).collect();
    assert_eq!(read.iter().filter(|done| !**done).count(), 1, "{read:?}");
    assert!(read[2..].iter().all(|done| *done), "{read:?}");
}

#[test]
fn without_an_owner_the_store_is_in_use_and_its_refusal_counts() {
    let _alone = alone();
    let in_use = open("a", None).unwrap_err();
    assert!(in_use.kind() == ErrorKind::InUse && in_use.help().contains("only one process"));
    assert_eq!(open("b", None).unwrap_err().why(), "the owner says so");
    let granted = Access { bytes: 4095, ..owner(1, honest) };
    assert_eq!(open("a", Some(granted)).unwrap_err().kind(), ErrorKind::InUse);
    let granted = Access { streams: Vec::new(), ..owner(1, honest) };
    assert_eq!(open("a", Some(granted)).unwrap_err().kind(), ErrorKind::InUse);
}
