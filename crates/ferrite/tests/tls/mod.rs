//! Certificates, an export by TLS, and its clients.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ferrite_host::tunnel::{Files, start_outward};
use ferrite_testkit::nbd::{Client, option};
use ferrite_testkit::programs::{installed, peer};
use ferrite_testkit::{PATIENCE, places};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub(crate) fn ferrite(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(args).env_remove("RUST_LOG");
    command
}

pub(crate) fn ok(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// An authority, a folder for a server and one for a client.
pub(crate) struct Pki {
    pub(crate) dir: TempDir,
}

impl Pki {
    /// `None`: openssl is not installed.
    pub(crate) fn new() -> Option<Pki> {
        peer("openssl", &["version"])?;
        let pki = Pki { dir: places::dir_in_memory() };
        for authority in ["ca", "other"] {
            fs::create_dir(pki.path(authority)).unwrap();
            let (key, certificate) =
                (format!("{authority}/ca-key.pem"), format!("{authority}/ca-cert.pem"));
            pki.openssl(&["-subj", &format!("/CN={authority}")], &key, &certificate);
        }
        pki.server("server", "ca", "365", "DNS:localhost,IP:127.0.0.1");
        pki.client("client", "ca", "365");
        Some(pki)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn openssl(&self, more: &[&str], key: &str, certificate: &str) {
        let mut command = Command::new("openssl");
        command.args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-noenc",
        ]);
        command.args(more).args(["-keyout", key, "-out", certificate]);
        ok(command.current_dir(self.dir.path()));
    }

    pub(crate) fn sign(
        &self,
        folder: &str,
        authority: &str,
        days: &str,
        kind: &str,
        extensions: &[&str],
    ) {
        fs::create_dir_all(self.path(folder)).unwrap();
        let (of, key) = (format!("{authority}/ca-cert.pem"), format!("{authority}/ca-key.pem"));
        if days == "0" {
            return self.expired(folder, authority, kind, extensions);
        }
        let mut more = vec!["-CA", &of, "-CAkey", &key, "-days", days, "-subj", "/CN=test"];
        more.extend(["-addext", "basicConstraints=critical,CA:FALSE"]);
        extensions.iter().for_each(|extension| more.extend(["-addext", extension]));
        self.openssl(
            &more,
            &format!("{folder}/{kind}-key.pem"),
            &format!("{folder}/{kind}-cert.pem"),
        );
        fs::copy(self.path("ca/ca-cert.pem"), self.path(folder).join("ca-cert.pem")).unwrap();
    }

    /// A certificate that has just expired.
    pub(crate) fn expired(&self, folder: &str, authority: &str, kind: &str, extensions: &[&str]) {
        let (key, request) = (format!("{folder}/{kind}-key.pem"), format!("{folder}/request"));
        let certificate = format!("{folder}/{kind}-cert.pem");
        let mut command = Command::new("openssl");
        command.args(["req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]);
        command.args(["-noenc", "-subj", "/CN=test", "-keyout", &key, "-out", &request]);
        for extension in extensions {
            command.args(["-addext", extension]);
        }
        ok(command.current_dir(self.dir.path()));
        let (of, key) = (format!("{authority}/ca-cert.pem"), format!("{authority}/ca-key.pem"));
        let mut command = Command::new("openssl");
        command.args(["x509", "-req", "-copy_extensions", "copy", "-days", "0", "-in", &request]);
        command.args(["-CA", &of, "-CAkey", &key, "-out", &certificate]);
        ok(command.current_dir(self.dir.path()));
        fs::copy(self.path("ca/ca-cert.pem"), self.path(folder).join("ca-cert.pem")).unwrap();
        self.wait_for_expiry(&certificate);
    }

    pub(crate) fn server(&self, folder: &str, authority: &str, days: &str, names: &str) {
        let names = format!("subjectAltName={names}");
        self.sign(folder, authority, days, "server", &[&names, "extendedKeyUsage=serverAuth"]);
    }

    pub(crate) fn client(&self, folder: &str, authority: &str, days: &str) {
        self.sign(folder, authority, days, "client", &["extendedKeyUsage=clientAuth"]);
    }

    /// A certificate of no days expires within a second.
    pub(crate) fn wait_for_expiry(&self, certificate: &str) {
        let end = Instant::now() + PATIENCE;
        let valid = || {
            let mut command = Command::new("openssl");
            command.args(["x509", "-noout", "-checkend", "0", "-in", certificate]);
            command.current_dir(self.dir.path()).output().unwrap().status.success()
        };
        while valid() {
            assert!(Instant::now() < end);
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        // openssl counts the last second as over, and others do not.
        std::thread::sleep(std::time::Duration::from_millis(1100));
    }
}

/// A running export, with its log.
pub(crate) struct Export {
    pub(crate) child: Child,
    pub(crate) log: Arc<Mutex<String>>,
    pub(crate) port: u16,
}

impl Export {
    /// Of a new disk in memory, at a free port.
    pub(crate) fn new(pki: &Pki, more: &[&str]) -> Export {
        let image = pki.path("disk.qcow2");
        if !image.exists() {
            ok(&mut ferrite(&["image", "create", image.to_str().unwrap(), "64M"]));
        }
        let tls = pki.path("server");
        let mut command =
            ferrite(&["export", "nbd", image.to_str().unwrap(), "--listen", "127.0.0.1:0"]);
        command.args(["--tls", tls.to_str().unwrap()]).args(more);
        Export::of(command)
    }

    pub(crate) fn of(mut command: Command) -> Export {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let listening = "listening at 127.0.0.1:";
        while !said.contains(listening) {
            assert!(lines.read_line(&mut said).unwrap() > 0, "it does not start: {said}");
        }
        let port = said.split_once(listening).unwrap().1.split_once(' ').unwrap().0;
        let port = port.parse().unwrap();
        let log = Arc::new(Mutex::new(said));
        let kept = log.clone();
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                kept.lock().unwrap().extend([line.as_str(), "\n"]);
            }
        });
        Export { child, log, port }
    }

    pub(crate) fn uri(&self, pki: &Pki, host: &str, folder: &str) -> String {
        let folder = pki.path(folder);
        format!("nbds://{host}:{}/?tls-certificates={}", self.port, folder.display())
    }

    /// What nbdinfo says of the disk.
    pub(crate) fn nbdinfo(&self, pki: &Pki, host: &str, folder: &str) -> Option<Output> {
        let uri = self.uri(pki, host, folder);
        installed("nbdinfo", Command::new("nbdinfo").args(["--json", &uri]).output())
    }

    /// Whether a client with these certificates is served.
    #[track_caller]
    pub(crate) fn serves(&self, pki: &Pki, folder: &str) {
        let Some(output) = self.nbdinfo(pki, "localhost", folder) else { return };
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("67108864"), "{output:?}");
    }

    /// Whether a client is refused, and the log says why.
    #[track_caller]
    pub(crate) fn refuses(&self, pki: &Pki, host: &str, folder: &str, why: &str) {
        let Some(output) = self.nbdinfo(pki, host, folder) else { return };
        assert!(!output.status.success(), "{output:?}");
        self.says(why);
    }

    /// Waits for a line of the log.
    #[track_caller]
    pub(crate) fn says(&self, text: &str) {
        let end = Instant::now() + PATIENCE;
        loop {
            let log = self.log.lock().unwrap().clone();
            if log.contains(text) {
                return;
            }
            assert!(Instant::now() < end, "{text:?} is not in {log}");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// The process that speaks TLS.
    pub(crate) fn tunnel(&self) -> Option<Pid> {
        let path = format!("/proc/{}/task", self.child.id());
        let children = fs::read_dir(path)
            .unwrap()
            .filter_map(|task| fs::read_to_string(task.unwrap().path().join("children")).ok());
        let numbers: Vec<i32> = children
            .flat_map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
            .map(|number| number.parse().unwrap())
            .collect();
        numbers.first().and_then(|number| Pid::from_raw(*number))
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A client of TCP that has been greeted.
    pub(crate) fn client(&self) -> Client {
        Client::over(UnixStream::from(std::os::fd::OwnedFd::from(self.connect())))
    }

    pub(crate) fn end(mut self) -> bool {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        self.child.wait().unwrap().success()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The greeting and STARTTLS on a connection, for programs that know TLS and not NBD.
pub(crate) fn start_tls(mut stream: &TcpStream) {
    let mut bytes = [0; 20];
    stream.read_exact(&mut bytes[..18]).unwrap();
    assert_eq!(&bytes[..16], b"NBDMAGICIHAVEOPT");
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream.write_all(b"IHAVEOPT\0\0\0\x05\0\0\0\0").unwrap();
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[8..], [0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0]);
}

/// The output of `openssl s_client` with these options, behind STARTTLS.
pub(crate) fn s_client(export: &Export, pki: &Pki, options: &[&str]) -> String {
    SClient::start(export, pki, options, Stdio::null()).end()
}

/// `openssl s_client` behind STARTTLS, which it does not know.
pub(crate) struct SClient {
    pub(crate) child: Child,
    sockets: [TcpStream; 2],
    threads: [std::thread::JoinHandle<()>; 2],
}

impl SClient {
    pub(crate) fn start(export: &Export, pki: &Pki, options: &[&str], input: Stdio) -> SClient {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place = format!("127.0.0.1:{}", listener.local_addr().unwrap().port());
        let mut command = Command::new("openssl");
        command.args(["s_client", "-connect", &place, "-CAfile", "ca/ca-cert.pem"]);
        command
            .args(["-cert", "client/client-cert.pem", "-key", "client/client-key.pem"])
            .args(options);
        let command = command.current_dir(pki.dir.path()).stdin(input);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (outside, server) = (listener.accept().unwrap().0, export.connect());
        start_tls(&server);
        // It may be longer at it than a read of this test may take.
        server.set_read_timeout(None).unwrap();
        let pass = |from: &TcpStream, to: &TcpStream| {
            let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            })
        };
        let threads = [pass(&outside, &server), pass(&server, &outside)];
        SClient { child, sockets: [outside, server], threads }
    }

    /// Waits for its end. Returns what it has printed.
    pub(crate) fn end(self) -> String {
        let output = self.child.wait_with_output().unwrap();
        self.sockets.iter().for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }
}

/// A client of this host that goes by TLS to a server, with the certificates of a folder.
pub(crate) struct Outward {
    pub(crate) client: Client,
    pub(crate) tunnel: Pid,
}

impl Outward {
    pub(crate) fn to(pki: &Pki, folder: &str, host: &str, port: u16) -> Outward {
        let program = File::open(env!("CARGO_BIN_EXE_ferrite")).unwrap();
        let files = Files::of_client(&pki.path(folder)).unwrap();
        let outside = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let (own, inside) = UnixStream::pair().unwrap();
        let tunnel =
            start_outward(program.as_fd(), host, &files, outside.as_fd(), inside.as_fd(), None);
        let tunnel = tunnel.unwrap();
        drop((outside, inside));
        Outward { client: Client::over(own), tunnel }
    }

    /// The text with which each option is answered.
    #[track_caller]
    pub(crate) fn refused(mut self, why: &str) {
        for _ in 0..2 {
            let answers = self.client.option(option::GO, &ferrite_testkit::nbd::info(""));
            let said = String::from_utf8_lossy(&answers[0].1).into_owned();
            assert!(
                answers[0].0 == (1 << 31 | 2) && said.contains(why),
                "{why}: {answers:?} {said}"
            );
        }
    }
}

impl Drop for Outward {
    fn drop(&mut self) {
        let _ = kill_process(self.tunnel, Signal::KILL);
        let _ = rustix::process::waitpid(Some(self.tunnel), rustix::process::WaitOptions::empty());
    }
}

/// Another program's server, killed at the end.
pub(crate) struct Peer(Child, pub(crate) u16);

impl Peer {
    /// `port` in an argument stands for a free one. `None`: it is not installed.
    pub(crate) fn start(program: &str, args: &[&str]) -> Option<Peer> {
        peer(program, &["--version"])?;
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let args = args.iter().map(|arg| arg.replace("PORT", &port.to_string()));
        let child = Command::new(program).args(args).stderr(Stdio::null()).spawn().unwrap();
        let server = Peer(child, port);
        let end = Instant::now() + PATIENCE;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < end, "{program} does not listen");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Some(server)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
