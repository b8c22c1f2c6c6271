//! A server as a process of its own, and an owner that speaks with it.

// Each test program uses some of it.
#![allow(dead_code)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ferrite_member::Server;
use ferrite_pool::Region;
use ferrite_pool::wire::{
    Extent, Greeting, HEADER_BYTES, Header, Kind, OPTION, regions_from_bytes, regions_to_bytes,
};

pub(crate) const POOL: [u8; 16] = [1; 16];
const FOLDER: &str = "FERRITE_TEST_FOLDER";

/// Is the server, if this process was started as one.
pub(crate) fn be_server() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let server = match Server::new(Path::new(&folder), POOL, "a") {
        Ok(server) => server,
        Err(fault) => return println!("\nrefused: {fault}"),
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("\nready: {}", listener.local_addr().unwrap());
    loop {
        let (socket, peer) = listener.accept().unwrap();
        socket.set_nodelay(true).unwrap();
        server.connect(socket.into(), peer.to_string());
    }
}

/// A server's process. It is killed with this.
pub(crate) struct Process {
    pub(crate) child: Child,
    pub(crate) address: String,
}

impl Process {
    pub(crate) fn start(folder: &Path) -> Process {
        Process::try_start(folder, &[]).unwrap()
    }

    /// The error is what the server says.
    pub(crate) fn try_start(folder: &Path, before: &[&str]) -> Result<Process, String> {
        let own = std::env::current_exe().unwrap();
        let mut words =
            before.iter().map(|word| (*word).into()).collect::<Vec<std::ffi::OsString>>();
        words.extend([
            own.into(),
            "a_server_process".into(),
            "--exact".into(),
            "--nocapture".into(),
        ]);
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .env(FOLDER, folder)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        for line in output.lines() {
            let line = line.unwrap();
            if let Some(address) = line.strip_prefix("ready: ") {
                return Ok(Process { child, address: address.to_owned() });
            }
            if let Some(why) = line.strip_prefix("refused: ") {
                child.wait().unwrap();
                return Err(why.to_owned());
            }
        }
        let ended = child.wait().unwrap();
        panic!("the server has ended: {ended}");
    }

    pub(crate) fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

pub(crate) fn extent(name: &str) -> Extent {
    let mut id = [0; 16];
    id[..name.len().min(16)].copy_from_slice(&name.as_bytes()[..name.len().min(16)]);
    Extent { id, name: name.to_owned() }
}

/// An owner's connection.
pub(crate) struct Owner {
    pub(crate) stream: TcpStream,
    number: u64,
}

/// An answer.
pub(crate) struct Answer {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

impl Answer {
    pub(crate) fn regions(&self) -> Vec<u64> {
        regions_from_bytes(&self.payload).unwrap().into_iter().map(|Region(n)| n).collect()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.payload).into_owned()
    }
}

impl Owner {
    /// Connects, and names the server that it means. The error is the server's text.
    pub(crate) fn greet(address: &str, server: &str) -> Result<Owner, String> {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.set_nodelay(true).unwrap();
        let mut hello = [0; 18];
        stream.read_exact(&mut hello).unwrap();
        assert_eq!(&hello[..16], b"NBDMAGICIHAVEOPT");
        let data = Greeting { pool: POOL, server: server.to_owned() }.to_bytes();
        let mut ask = 3u32.to_be_bytes().to_vec();
        ask.extend(b"IHAVEOPT");
        ask.extend(OPTION.to_be_bytes());
        ask.extend((data.len() as u32).to_be_bytes());
        ask.extend(data);
        stream.write_all(&ask).unwrap();
        let mut reply = [0; 20];
        stream.read_exact(&mut reply).unwrap();
        let mut text = vec![0; u32::from_be_bytes(reply[16..].try_into().unwrap()) as usize];
        stream.read_exact(&mut text).unwrap();
        match reply[12..16] {
            [0, 0, 0, 1] => Ok(Owner { stream, number: 0 }),
            _ => Err(String::from_utf8(text).unwrap()),
        }
    }

    pub(crate) fn connect(server: &Process) -> Owner {
        Owner::greet(&server.address, "a").unwrap()
    }

    /// Connects, and asks for a session.
    pub(crate) fn open(server: &Process, name: &str, generation: u64, id: u64) -> (Owner, Answer) {
        let mut owner = Owner::connect(server);
        let answer = owner.ask(Kind::Open, generation, id, &extent(name).to_bytes());
        (owner, answer)
    }

    /// Makes a copy.
    pub(crate) fn create(server: &Process, name: &str, size: u64) -> Answer {
        Owner::connect(server).ask(Kind::Create, 0, size, &extent(name).to_bytes())
    }

    pub(crate) fn send(&mut self, kind: Kind, start: u64, len: u64, payload: &[u8]) -> u64 {
        self.number += 1;
        let header = Header { kind, op: self.number, start, len, payload: payload.len() as u32 };
        self.stream.write_all(&[&header.to_bytes()[..], payload].concat()).unwrap();
        self.number
    }

    /// The next answer. None: the server has ended the connection.
    pub(crate) fn answer(&mut self) -> Option<Answer> {
        let mut bytes = [0; HEADER_BYTES];
        match self.stream.read_exact(&mut bytes) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => panic!("no answer"),
            Err(_) => return None,
        }
        let header = Header::from_bytes(&bytes).unwrap();
        let mut payload = vec![0; header.payload as usize];
        self.stream.read_exact(&mut payload).ok()?;
        Some(Answer { header, payload })
    }

    pub(crate) fn ask(&mut self, kind: Kind, start: u64, len: u64, payload: &[u8]) -> Answer {
        self.send(kind, start, len, payload);
        self.answer().expect("an answer")
    }

    /// A request that has to be done.
    pub(crate) fn done(&mut self, kind: Kind, start: u64, len: u64, payload: &[u8]) -> Vec<u8> {
        let answer = self.ask(kind, start, len, payload);
        assert_eq!(answer.header.kind, Kind::Done, "{}", answer.text());
        answer.payload
    }

    pub(crate) fn regions(&mut self, kind: Kind, regions: &[u64]) {
        self.done(kind, 0, 0, &regions_to_bytes(regions.iter().map(|n| Region(*n))));
    }

    pub(crate) fn dirty(&mut self) -> Vec<u64> {
        let answer = self.ask(Kind::Bits, 0, 0, &[]);
        assert_eq!(answer.header.kind, Kind::Dirty);
        answer.regions()
    }
}
