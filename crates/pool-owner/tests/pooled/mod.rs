//! A pool of real processes: etcd, servers, and the process that has a disk, under a client of NBD.

// Each test program uses some of it.
#![allow(dead_code)]

#[path = "../../../etcd/tests/peers/mod.rs"]
pub(crate) mod peers;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ferrite_etcd::{Revision, Said, Transaction};
use ferrite_helper::Links;
use ferrite_member::Server;
use ferrite_pool_map::{Access, Id, NewDisk, Shape, Stored};
use ferrite_pool_owner::{Name, open};
use ferrite_testkit::nbd_client::{Client, command};
use peers::Servers;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;
/// Bytes that are written at a time.
pub(crate) const BLOCK: usize = 4096;
/// Bytes of a stripe.
pub(crate) const STRIPE: usize = 64 << 10;

/// Says what a process of this program is to be, and with what.
const ROLE: &str = "FERRITE_TEST_ROLE";

/// Is a server, or the process of a disk, if this process was started as one.
pub(crate) fn be_other() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let said = match role.split(' ').collect::<Vec<_>>()[..] {
        ["server", folder, pool, name, address] => be_server(folder, pool, name, address),
        ["owner", url, disk, socket, take_over] => be_owner(url, disk, socket, take_over == "yes"),
        _ => Err("an odd role".to_owned()),
    };
    // The harness may have begun a line.
    let _ = writeln!(std::io::stdout(), "\nended: {said:?}");
    std::process::exit(i32::from(said.is_err()));
}

/// `ferrite pool serve`.
fn be_server(folder: &str, pool: &str, name: &str, address: &str) -> Result<(), String> {
    let pool: Id = pool.parse()?;
    let server = Server::new(Path::new(folder), pool.0, name).map_err(|e| e.to_string())?;
    let listener = TcpListener::bind(address).map_err(|e| e.to_string())?;
    println!("\nready:");
    loop {
        let (socket, peer) = listener.accept().map_err(|e| e.to_string())?;
        socket.set_nodelay(true).unwrap();
        server.connect(socket.into(), peer.to_string());
    }
}

/// `ferrite pool own`: it ends with its input.
fn be_owner(url: &str, disk: &str, socket: &str, take_over: bool) -> Result<(), String> {
    let name = Name {
        etcd: vec![url.to_owned()],
        pool: "lab".to_owned(),
        disk: disk.to_owned(),
        tls: None,
        take_over,
        read_only: false,
        fences: "/nonexistent".into(),
    };
    let disk = open(&name).map_err(|e| e.to_string())?;
    let mut links = Links::new(disk);
    let listener = UnixListener::bind(socket).map_err(|e| e.to_string())?;
    println!("\nready:");
    let served = links.clone();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let thread = std::thread::spawn(move || {
        for stream in listener.incoming() {
            if stopped.load(Ordering::Relaxed) {
                return;
            }
            served.serve(stream.unwrap().into());
        }
    });
    let _ = std::io::stdin().read(&mut [0]);
    stop.store(true, Ordering::Relaxed);
    drop(UnixStream::connect(socket));
    thread.join().unwrap();
    if !links.end(Instant::now() + Duration::from_secs(5)) {
        return Err("requests are under way".to_owned());
    }
    loop {
        match Arc::try_unwrap(links) {
            Ok(last) => {
                last.into_medium().close();
                return Ok(());
            }
            Err(shared) => links = shared,
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A process that is killed with this.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts it, and waits until it is ready. The error is what it says instead.
    fn start(role: &str, log: PathBuf) -> Result<Process, String> {
        let errors = std::fs::OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["another_process", "--exact", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        for line in output.lines() {
            let line = line.unwrap();
            if line == "ready:" {
                return Ok(Process { child, log });
            }
            if let Some(why) = line.strip_prefix("ended: ") {
                child.wait().unwrap();
                return Err(why.to_owned());
            }
        }
        child.wait().unwrap();
        panic!("it has ended: {}", std::fs::read_to_string(&log).unwrap());
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops all its threads, which takes a moment.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.child.id());
        peers::until("stop of all threads", || {
            std::fs::read_dir(&tasks).unwrap().all(|task| {
                let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
                stat.rsplit_once(") ").unwrap().1.starts_with('T')
            })
        });
    }

    /// Resident bytes that are no files.
    pub(crate) fn resident(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() << 10
    }

    /// Ends it as its starter does, and waits for that.
    pub(crate) fn end(mut self) {
        drop(self.child.stdin.take());
        let ended = self.child.wait().unwrap();
        let log = std::fs::read_to_string(&self.log).unwrap();
        assert!(ended.success(), "{ended}: {log}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server of the pool.
pub(crate) struct Member {
    name: String,
    folder: PathBuf,
    address: String,
    process: Option<Process>,
}

/// A pool with servers.
pub(crate) struct Pool {
    pub(crate) etcd: Servers,
    pub(crate) access: Access,
    id: Id,
    pub(crate) members: Vec<Member>,
    folder: TempDir,
}

impl Pool {
    /// The servers a, b, …, each a host of its own. None: etcd is not installed.
    pub(crate) fn new(name: &str, servers: u8) -> Option<Pool> {
        let etcd = Servers::start(name, 1)?;
        let access = Access::new(etcd.client(), "lab").unwrap();
        let id = access.init().unwrap().id;
        // Syncs are no matter here: no test cuts the power.
        let folder = TempDir::new_in("/dev/shm").unwrap();
        let mut pool = Pool { etcd, access, id, members: Vec::new(), folder };
        (0..servers).for_each(|_| pool.add());
        Some(pool)
    }

    /// A further server.
    pub(crate) fn add(&mut self) {
        let number = self.members.len() as u8;
        let name = char::from(b'a' + number).to_string();
        let free = TcpListener::bind(format!("127.0.0.{}:0", number + 1)).unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let folder = self.folder.path().join(&name);
        std::fs::create_dir(&folder).unwrap();
        // The announcement of a server.
        let bytes = 1 << 40;
        let told =
            ferrite_pool_map::Server { address, free: bytes, total: bytes, boot: "1".into() };
        let key = format!("ferrite/{}/servers/{name}", self.id);
        let put = Transaction::when(&key, Revision::ABSENT);
        let put = put.put(&key, serde_json::to_vec(&told).unwrap());
        assert!(matches!(self.etcd.client().commit(&put), Ok(Said::Won(_))));
        self.members.push(Member { name, folder, address: address.to_string(), process: None });
        self.start(usize::from(number));
    }

    /// Starts a server.
    pub(crate) fn start(&mut self, number: usize) {
        let Member { name, folder, address, process } = &mut self.members[number];
        let role = format!("server {} {} {name} {address}", folder.display(), self.id);
        let log = self.folder.path().join(format!("{name}.log"));
        *process = Some(Process::start(&role, log).unwrap());
    }

    /// Kills a server.
    pub(crate) fn kill(&mut self, number: usize) {
        drop(self.members[number].process.take());
    }

    pub(crate) fn signal(&self, number: usize, signal: Signal) {
        self.members[number].process.as_ref().unwrap().signal(signal);
    }

    /// A server's disk is a new one.
    pub(crate) fn lose_files(&self, number: usize) {
        let folder = &self.members[number].folder;
        std::fs::remove_dir_all(folder).unwrap();
        std::fs::create_dir(folder).unwrap();
    }

    /// Makes a disk.
    pub(crate) fn create(&self, disk: &str, bytes: u64, replicas: usize, stripes: usize) {
        let shape = Shape { replicas, stripes, stripe_size: STRIPE as u64 };
        self.access
            .create(disk, &NewDisk { bytes, shape, request: Id::random(), on: Vec::new() })
            .unwrap();
    }

    /// Has a process take a disk. The error is what it says.
    pub(crate) fn own(&self, disk: &str, take_over: bool) -> Result<Owner, String> {
        let number = std::fs::read_dir(self.folder.path()).unwrap().count();
        let socket = self.folder.path().join(format!("{disk}-{number}.sock"));
        let log = self.folder.path().join(format!("{disk}-{number}.log"));
        let take_over = if take_over { "yes" } else { "no" };
        let role = format!("owner {} {disk} {} {take_over}", self.etcd.urls[0], socket.display());
        Process::start(&role, log).map(|process| Owner { process, socket })
    }

    /// The record of a set.
    pub(crate) fn record(&self, disk: &str, set: usize) -> Stored {
        self.access.state().unwrap().records[&(disk.to_owned(), set)].stored.clone()
    }

    /// Waits until all copies of the map, and no others, are in sync.
    pub(crate) fn until_whole(&self, disk: &str) {
        peers::until("copies in sync", || {
            let state = self.access.state().unwrap();
            state.disks[disk].sets().enumerate().all(|(number, (set, _))| {
                let stored = &state.records[&(disk.to_owned(), number)].stored;
                stored.in_sync.iter().eq(set.copies.iter().map(|copy| &copy.member))
            })
        });
    }

    /// The content of the copies of each set of a disk.
    pub(crate) fn files(&self, disk: &str) -> Vec<Vec<Vec<u8>>> {
        let state = self.access.state().unwrap();
        let of_copy = |copy: &ferrite_pool_map::Copy| {
            let mut members = self.members.iter();
            let member = members.find(|member| member.name == copy.server).unwrap();
            std::fs::read(member.folder.join(format!("{}.raw", copy.name))).unwrap()
        };
        state.disks[disk].sets().map(|(set, _)| set.copies.iter().map(of_copy).collect()).collect()
    }

    /// The files have what the disk has, and copies are equal.
    #[track_caller]
    pub(crate) fn files_are(&self, disk: &str, content: &[u8]) {
        let files = self.files(disk);
        let mut columns = vec![Vec::<u8>::new(); files.len()];
        for (number, piece) in content.chunks(STRIPE).enumerate() {
            columns[number % files.len()].extend(piece);
        }
        for (set, (copies, column)) in files.iter().zip(&columns).enumerate() {
            for (number, copy) in copies.iter().enumerate() {
                let at = copy.iter().zip(column).position(|(a, b)| a != b);
                assert_eq!(at, None, "set {set}, copy {number} differs");
                assert_eq!(copy.len(), column.len());
            }
        }
    }
}

/// The process that has a disk.
pub(crate) struct Owner {
    pub(crate) process: Process,
    socket: PathBuf,
}

impl Owner {
    pub(crate) fn client(&self) -> Client {
        let mut client = Client::over(UnixStream::connect(&self.socket).unwrap());
        client.go(false);
        client
    }

    /// A client that is refused nothing, and may connect later.
    pub(crate) fn stream(&self) -> UnixStream {
        UnixStream::connect(&self.socket).unwrap()
    }
}

/// The content that a disk has to have, in blocks that are written as a whole. A block that may have one of two
/// contents has both.
pub(crate) struct Model {
    pub(crate) content: Vec<u8>,
    seed: u64,
    /// Bytes from the disk's start in which it writes.
    pub(crate) within: usize,
    pub(crate) longest: Duration,
}

impl Model {
    pub(crate) fn new(bytes: u64) -> Model {
        Model {
            content: vec![0; bytes as usize],
            seed: 0x9e37_79b9_7f4a_7c15,
            within: bytes as usize,
            longest: Duration::ZERO,
        }
    }

    pub(crate) fn random(&mut self, below: usize) -> usize {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        (self.seed % below as u64) as usize
    }

    /// Writes some random blocks, with others under way, and reads them and others back.
    #[track_caller]
    pub(crate) fn turn(&mut self, client: &mut Client) {
        let blocks = self.within / BLOCK;
        let mut places: Vec<(usize, usize)> = Vec::new();
        for _ in 0..8 {
            let first = self.random(blocks - 64);
            let is_long = self.random(8) == 0;
            let count = 1 + self.random(if is_long { 64 } else { 4 });
            if places.iter().all(|(a, n)| first + count <= *a || a + n <= first) {
                places.push((first, count));
            }
        }
        let began = Instant::now();
        for (first, count) in &places {
            let (at, len) = (first * BLOCK, count * BLOCK);
            let value = self.random(usize::MAX).to_le_bytes();
            let data: Vec<u8> = value.iter().copied().cycle().take(len).collect();
            client.send(command::WRITE, 0, at as u64, len as u32, &data);
            self.content[at..at + len].copy_from_slice(&data);
        }
        for _ in &places {
            assert_eq!(client.reply().error, 0, "a write fails");
        }
        for (first, count) in places {
            let (at, len) = (first * BLOCK, count * BLOCK);
            let found = client.read(at as u64, len as u32);
            assert!(found == self.content[at..at + len], "the read of {len} bytes at {at} differs");
        }
        self.longest = self.longest.max(began.elapsed());
    }

    /// The disk has all of it.
    #[track_caller]
    pub(crate) fn is_on(&self, client: &mut Client) {
        for (i, piece) in self.content.chunks(MIB as usize).enumerate() {
            let found = client.read(i as u64 * MIB, piece.len() as u32);
            let at = found.iter().zip(piece).position(|(a, b)| a != b);
            assert_eq!(at, None, "MiB {i} of the disk differs");
        }
    }
}
