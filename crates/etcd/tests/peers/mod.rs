//! Real clusters of etcd on this machine (packages etcd-server, etcd-client), and a proxy that loses messages.

// Each test program uses some of it.
#![allow(dead_code)]

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferrite_etcd::{Cluster, Settings};
use ferrite_testkit::programs::installed;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long a cluster may take to answer first, and again after a loss of its quorum.
const PATIENCE: Duration = Duration::from_secs(60);

/// Servers of one cluster. They end with it.
pub(crate) struct Servers {
    nodes: Vec<Child>,
    pub(crate) urls: Vec<String>,
    _folder: TempDir,
}

/// Ports that are free now.
fn ports(count: usize) -> Vec<u16> {
    let listen = |_| TcpListener::bind("127.0.0.1:0").unwrap();
    let all: Vec<_> = (0..count).map(listen).collect();
    all.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}

impl Servers {
    /// Starts a cluster of so many servers; it answers. None: etcd is not installed.
    pub(crate) fn start(name: &str, count: usize) -> Option<Servers> {
        Servers::start_with(name, count, "http", &[])
    }

    /// Starts a cluster whose clients connect by `scheme`, with further options of etcd. None: etcd is not installed.
    pub(crate) fn start_with(
        name: &str,
        count: usize,
        scheme: &str,
        options: &[&str],
    ) -> Option<Servers> {
        installed("etcd", Command::new("etcd").arg("--version").output())?;
        // Syncs are no matter here.
        let place = Path::new("/dev/shm");
        let folder = TempDir::new_in(place).unwrap();
        let (clients, peers) = (ports(count), ports(count));
        let peer = |i: usize| format!("http://127.0.0.1:{}", peers[i]);
        let all: Vec<_> = (0..count).map(|i| format!("{name}{i}={}", peer(i))).collect();
        let urls: Vec<_> =
            clients.iter().map(|port| format!("{scheme}://127.0.0.1:{port}")).collect();
        let start = |i: usize| {
            let log = std::fs::File::create(folder.path().join(format!("log{i}"))).unwrap();
            Command::new("etcd")
                .args(["--name", &format!("{name}{i}"), "--data-dir"])
                .arg(folder.path().join(i.to_string()))
                .args(["--listen-client-urls", &urls[i], "--advertise-client-urls", &urls[i]])
                .args(["--listen-peer-urls", &peer(i)])
                .args(["--initial-advertise-peer-urls", &peer(i)])
                .args(["--initial-cluster", &all.join(","), "--initial-cluster-token", name])
                .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
                .args(options)
                .stdout(Stdio::null())
                .stderr(log)
                .spawn()
                .unwrap()
        };
        let nodes = (0..count).map(start).collect();
        Some(Servers { nodes, urls, _folder: folder })
    }

    pub(crate) fn settings(&self) -> Settings {
        Settings { endpoints: self.urls.clone(), tls: None, plain: true, cluster: None }
    }

    /// A client; the cluster answers.
    pub(crate) fn client(&self) -> Cluster {
        answering(Cluster::new(&self.settings()).unwrap())
    }

    /// Stops a server; its connections stay.
    pub(crate) fn stop(&self, i: usize) {
        kill_process(pid(&self.nodes[i]), Signal::STOP).unwrap();
    }

    pub(crate) fn go_on(&self, i: usize) {
        kill_process(pid(&self.nodes[i]), Signal::CONT).unwrap();
    }

    pub(crate) fn kill(&mut self, i: usize) {
        self.nodes[i].kill().unwrap();
        self.nodes[i].wait().unwrap();
    }

    /// The server that leads.
    pub(crate) fn leader(&self) -> usize {
        let leads = |url: &String| {
            let mut etcdctl = Command::new("etcdctl");
            etcdctl.env("ETCDCTL_API", "3").args(["--endpoints", url, "endpoint", "status"]);
            let said = etcdctl.output().unwrap();
            // Endpoint, identifier, version, size, whether it leads, …
            String::from_utf8_lossy(&said.stdout).split(", ").nth(4) == Some("true")
        };
        self.urls.iter().position(leads).expect("a leader")
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for node in &mut self.nodes {
            let _ = node.kill();
            let _ = node.wait();
        }
    }
}

fn pid(child: &Child) -> Pid {
    Pid::from_child(child)
}

/// Waits until it answers.
pub(crate) fn answering(cluster: Cluster) -> Cluster {
    until("an answer of etcd", || cluster.get("no such key").is_ok());
    cluster
}

/// Waits until that is so.
#[track_caller]
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < PATIENCE, "no {what} within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The action of a [`Proxy`] on the next transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// It passes it on, and its answer back.
    Passes,
    /// It passes it on, and closes the connection without an answer.
    SwallowsTheAnswer,
    /// It keeps it, and closes the connection.
    Keeps,
}

/// Between a client and a server, without TLS.
pub(crate) struct Proxy {
    pub(crate) url: String,
    server: String,
    state: Arc<Mutex<(Next, Vec<Vec<u8>>)>>,
    before: Arc<Mutex<Option<Before>>>,
}

/// A step before a transaction is passed on.
type Before = Box<dyn FnOnce() + Send>;

impl Proxy {
    pub(crate) fn of(server: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = server.trim_start_matches("http://").to_owned();
        let state = Arc::new(Mutex::new((Next::Passes, Vec::new())));
        let before = Arc::new(Mutex::new(None));
        let proxy =
            Proxy { url, server: server.clone(), state: state.clone(), before: before.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, server, state) = (stream.unwrap(), server.clone(), state.clone());
                let before = before.clone();
                std::thread::spawn(move || pass(stream, &server, &state, &before));
            }
        });
        proxy
    }

    pub(crate) fn next(&self, next: Next) {
        self.state.lock().unwrap().0 = next;
    }

    /// Does something before it passes the next transaction on: that one was decided on without it.
    pub(crate) fn before_next(&self, before: impl FnOnce() + Send + 'static) {
        *self.before.lock().unwrap() = Some(Box::new(before));
    }

    /// Passes on what was kept, and returns the answers.
    pub(crate) fn pass_what_was_kept(&self) -> Vec<String> {
        let kept = std::mem::take(&mut self.state.lock().unwrap().1);
        let pass = |request: Vec<u8>| String::from_utf8(answer_of(&self.server, &request)).unwrap();
        kept.into_iter().map(pass).collect()
    }
}

fn pass(
    mut client: TcpStream,
    server: &str,
    state: &Mutex<(Next, Vec<Vec<u8>>)>,
    before: &Mutex<Option<Before>>,
) {
    let request = read_request(&mut client);
    if request.starts_with(b"POST /v3/kv/txn")
        && let Some(before) = before.lock().unwrap().take()
    {
        before();
    }
    let next = match request.starts_with(b"POST /v3/kv/txn") {
        true => std::mem::replace(&mut state.lock().unwrap().0, Next::Passes),
        false => Next::Passes,
    };
    match next {
        Next::Passes => drop(client.write_all(&answer_of(server, &request))),
        Next::SwallowsTheAnswer => drop(answer_of(server, &request)),
        Next::Keeps => state.lock().unwrap().1.push(request),
    }
}

/// The server's answer to a request, after which it closes the connection.
fn answer_of(server: &str, request: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(server).unwrap();
    let text = String::from_utf8(request.to_vec()).unwrap();
    let closing = text.replacen("\r\n", "\r\nconnection: close\r\n", 1);
    stream.write_all(closing.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

/// One request of HTTP with its body.
pub(crate) fn read_request(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut byte = [0];
    while !bytes.ends_with(b"\r\n\r\n") && stream.read_exact(&mut byte).is_ok() {
        bytes.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&bytes).to_lowercase();
    let length = head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next());
    let mut body = vec![0; length.and_then(|n| n.trim().parse().ok()).unwrap_or(0)];
    let _ = stream.read_exact(&mut body);
    [bytes, body].concat()
}
