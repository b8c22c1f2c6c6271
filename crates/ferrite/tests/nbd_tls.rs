//! NBD by TLS: `ferrite export nbd --listen --tls` with usual clients, and clients and servers that are refused.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ferrite_host::tunnel::{Files, start_outward};
use ferrite_testkit::nbd::{Client, option};
use ferrite_testkit::programs::{installed, peer};
use ferrite_testkit::{PATIENCE, places};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const PAGE: &str = include_str!("../../../docs/access.md");

fn ferrite(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    command.args(args).env_remove("RUST_LOG");
    command
}

fn ok(command: &mut Command) -> String {
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
struct Pki {
    dir: TempDir,
}

impl Pki {
    /// `None`: openssl is not installed.
    fn new() -> Option<Pki> {
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

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn openssl(&self, more: &[&str], key: &str, certificate: &str) {
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

    fn sign(&self, folder: &str, authority: &str, days: &str, kind: &str, extensions: &[&str]) {
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
    fn expired(&self, folder: &str, authority: &str, kind: &str, extensions: &[&str]) {
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

    fn server(&self, folder: &str, authority: &str, days: &str, names: &str) {
        let names = format!("subjectAltName={names}");
        self.sign(folder, authority, days, "server", &[&names, "extendedKeyUsage=serverAuth"]);
    }

    fn client(&self, folder: &str, authority: &str, days: &str) {
        self.sign(folder, authority, days, "client", &["extendedKeyUsage=clientAuth"]);
    }

    /// A certificate of no days expires within a second.
    fn wait_for_expiry(&self, certificate: &str) {
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
struct Export {
    child: Child,
    log: Arc<Mutex<String>>,
    port: u16,
}

impl Export {
    /// Of a new disk in memory, at a free port.
    fn new(pki: &Pki, more: &[&str]) -> Export {
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

    fn of(mut command: Command) -> Export {
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

    fn uri(&self, pki: &Pki, host: &str, folder: &str) -> String {
        let folder = pki.path(folder);
        format!("nbds://{host}:{}/?tls-certificates={}", self.port, folder.display())
    }

    /// What nbdinfo says of the disk.
    fn nbdinfo(&self, pki: &Pki, host: &str, folder: &str) -> Option<Output> {
        let uri = self.uri(pki, host, folder);
        installed("nbdinfo", Command::new("nbdinfo").args(["--json", &uri]).output())
    }

    /// Whether a client with these certificates is served.
    #[track_caller]
    fn serves(&self, pki: &Pki, folder: &str) {
        let Some(output) = self.nbdinfo(pki, "localhost", folder) else { return };
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("67108864"), "{output:?}");
    }

    /// Whether a client is refused, and the log says why.
    #[track_caller]
    fn refuses(&self, pki: &Pki, host: &str, folder: &str, why: &str) {
        let Some(output) = self.nbdinfo(pki, host, folder) else { return };
        assert!(!output.status.success(), "{output:?}");
        self.says(why);
    }

    /// Waits for a line of the log.
    #[track_caller]
    fn says(&self, text: &str) {
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
    fn tunnel(&self) -> Option<Pid> {
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

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// A client of TCP that has been greeted.
    fn client(&self) -> Client {
        Client::over(UnixStream::from(std::os::fd::OwnedFd::from(self.connect())))
    }

    fn end(mut self) -> bool {
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

#[test]
fn nbdinfo_and_nbdcopy_read_and_write_a_disk_by_tls() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    export.serves(&pki, "client");
    let (data, copy) = (pki.path("data"), pki.path("copy"));
    let bytes: Vec<u8> = (0..48u32 << 20).map(|i| (i / 509 + i % 251) as u8).collect();
    fs::write(&data, &bytes).unwrap();
    let uri = export.uri(&pki, "localhost", "client");
    if peer("nbdcopy", &[data.to_str().unwrap(), &uri]).is_none() {
        return;
    }
    peer("nbdcopy", &[&uri, copy.to_str().unwrap()]);
    let copied = fs::read(&copy).unwrap();
    assert!(copied.len() == 64 << 20 && copied[..bytes.len()] == bytes);
    assert!(export.end());
    ok(&mut ferrite(&["image", "check", pki.path("disk.qcow2").to_str().unwrap()]));
}

#[test]
fn qemu_img_converts_a_disk_by_tls_and_verifies_it() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    let (data, copy) = (pki.path("data"), pki.path("copy"));
    let bytes: Vec<u8> = (0..8u32 << 20).map(|i| (i / 511 * 3 + 1) as u8).collect();
    fs::write(&data, &bytes).unwrap();
    let object = format!(
        "tls-creds-x509,id=t,endpoint=client,dir={},verify-peer=yes",
        pki.path("client").display()
    );
    let disk = format!("driver=nbd,host=localhost,port={},tls-creds=t", export.port);
    let into = ["convert", "-n", "--object", &object, "-f", "raw", data.to_str().unwrap()];
    let into = [&into[..], &["--target-image-opts", &disk]].concat();
    if peer("qemu-img", &into).is_none() {
        return;
    }
    let from = ["convert", "--object", &object, "--image-opts", &disk, "-O", "raw"];
    peer("qemu-img", &[&from[..], &[copy.to_str().unwrap()]].concat());
    assert_eq!(fs::read(&copy).unwrap()[..bytes.len()], bytes);
}

/// The commands of docs/access.md about a backup host, as printed there.
#[test]
fn the_recipe_for_a_backup_host_works() {
    for program in ["openssl", "nbdinfo", "qemu-img"] {
        let version = if program == "openssl" { "version" } else { "--version" };
        if peer(program, &[version]).is_none() {
            return;
        }
    }
    let section = PAGE.split_once("\n## Give a disk to a backup host\n").expect("the section").1;
    let section = section.split("\n## ").next().unwrap();
    let blocks = section.split("```sh\n").skip(1);
    let script: String = blocks.map(|block| block.split("```").next().unwrap()).collect();
    assert!(script.contains("--tls server") && script.contains("nbdcopy "));
    // Tests of other programs may have that port.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let script = script.replace("10809", &port.to_string());
    // A server that remains after a failed command would keep this test's pipe open.
    let script = format!("trap 'kill %1 || true' EXIT\n{script}");
    let program = Path::new(env!("CARGO_BIN_EXE_ferrite")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let dir = places::dir_on_disk();
    // It waits for a server that listens.
    let mut bash = Command::new("timeout");
    ok(bash.args(["120", "bash", "-eux", "-c", &script]).current_dir(dir.path()).env("PATH", path));
}

/// The greeting and STARTTLS on a connection, for programs that know TLS and not NBD.
fn start_tls(mut stream: &TcpStream) {
    let mut bytes = [0; 20];
    stream.read_exact(&mut bytes[..18]).unwrap();
    assert_eq!(&bytes[..16], b"NBDMAGICIHAVEOPT");
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream.write_all(b"IHAVEOPT\0\0\0\x05\0\0\0\0").unwrap();
    stream.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[8..], [0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0]);
}

/// The output of `openssl s_client` with these options, behind STARTTLS.
fn s_client(export: &Export, pki: &Pki, options: &[&str]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut command = Command::new("openssl");
    command.args([
        "s_client",
        "-connect",
        &format!("127.0.0.1:{port}"),
        "-CAfile",
        "ca/ca-cert.pem",
    ]);
    command
        .args(["-cert", "client/client-cert.pem", "-key", "client/client-key.pem"])
        .args(options);
    let command = command.current_dir(pki.dir.path()).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (outside, server) = (listener.accept().unwrap().0, export.connect());
    start_tls(&server);
    let pass = |from: &TcpStream, to: &TcpStream| {
        let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        })
    };
    let threads = [pass(&outside, &server), pass(&server, &outside)];
    let output = child.wait_with_output().unwrap();
    let _ = (outside.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn tls_1_2_and_1_3_are_spoken_and_1_1_is_refused() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    for (option, spoken) in [("-tls1_2", "TLSv1.2"), ("-tls1_3", "TLSv1.3")] {
        let said = s_client(&export, &pki, &[option]);
        assert!(said.contains("Verification: OK") && said.contains(spoken), "{option}: {said}");
    }
    let said = s_client(&export, &pki, &["-tls1_1", "-cipher", "DEFAULT@SECLEVEL=0"]);
    assert!(said.contains("no peer certificate available"), "{said}");
    export.says("the client speaks another TLS");
    export.serves(&pki, "client");
}

#[test]
fn a_clients_unfit_certificate_is_named_in_the_log_and_others_are_served() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    pki.client("expired", "ca", "0");
    export.refuses(
        &pki,
        "localhost",
        "expired",
        "the client's certificate is refused: it has expired",
    );
    pki.client("stranger", "other", "365");
    // GnuTLS shows no certificate whose signer the server does not name, and OpenSSL does.
    export.refuses(&pki, "localhost", "stranger", "the client has no certificate");
    let stranger = ["-cert", "stranger/client-cert.pem", "-key", "stranger/client-key.pem"];
    s_client(&export, &pki, &stranger);
    export.says("it was signed by nobody whose certificate is in our ca-cert.pem");
    pki.sign("wrong", "ca", "365", "client", &["extendedKeyUsage=serverAuth"]);
    export.refuses(&pki, "localhost", "wrong", "it is not made for a client");
    fs::create_dir(pki.path("none")).unwrap();
    fs::copy(pki.path("ca/ca-cert.pem"), pki.path("none/ca-cert.pem")).unwrap();
    export.refuses(&pki, "localhost", "none", "the client has no certificate");
    export.serves(&pki, "client");
}

#[test]
fn clients_without_certificates_are_served_if_that_is_said() {
    let Some(pki) = Pki::new() else { return };
    fs::create_dir(pki.path("none")).unwrap();
    fs::copy(pki.path("ca/ca-cert.pem"), pki.path("none/ca-cert.pem")).unwrap();
    fs::remove_file(pki.path("server/ca-cert.pem")).unwrap();
    let export = Export::new(&pki, &["--tls-any-client"]);
    export.serves(&pki, "none");
}

#[test]
fn a_client_refuses_a_server_of_another_name_and_the_log_says_what_to_check() {
    let Some(pki) = Pki::new() else { return };
    pki.server("server", "ca", "365", "DNS:elsewhere.example");
    let export = Export::new(&pki, &[]);
    let Some(output) = export.nbdinfo(&pki, "localhost", "client") else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("certificate"), "{said}");
    pki.server("server", "other", "365", "DNS:localhost");
    let Some(output) = export.nbdinfo(&pki, "localhost", "client") else { return };
    assert!(!output.status.success(), "{output:?}");
}

#[test]
fn files_that_are_missing_or_unfit_refuse_the_start_and_are_named() {
    let Some(pki) = Pki::new() else { return };
    let image = pki.path("disk.raw");
    File::create_new(&image).unwrap().set_len(1 << 20).unwrap();
    let fails = |folder: &str, why: &str| {
        let folder = pki.path(folder);
        let args = ["export", "nbd", image.to_str().unwrap(), "--listen", "127.0.0.1:0", "--tls"];
        let output = ferrite(&args).arg(&folder).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(why), "{why}: {said}");
    };
    fails("nowhere", "server-cert.pem: No such file");
    pki.server("bad", "ca", "365", "DNS:localhost");
    fs::remove_file(pki.path("bad/ca-cert.pem")).unwrap();
    fails("bad", "ca-cert.pem: No such file");
    fs::copy(pki.path("ca/ca-cert.pem"), pki.path("bad/ca-cert.pem")).unwrap();
    fs::copy(pki.path("server/server-key.pem"), pki.path("bad/server-key.pem")).unwrap();
    fails("bad", "server-key.pem");
    fails("bad", "it is not the key of server-cert.pem");
    fs::write(pki.path("bad/server-key.pem"), "nothing").unwrap();
    fails("bad", "there is no key in it");
    fs::write(pki.path("bad/server-cert.pem"), "-----BEGIN CERTIFICATE-----\nAAAA\n").unwrap();
    fails("bad", "server-cert.pem");
    pki.server("bad", "ca", "0", "DNS:localhost");
    fails("bad", "it has expired");
    pki.sign("bad", "ca", "365", "server", &["extendedKeyUsage=clientAuth"]);
    fails("bad", "it is not made for a server");
}

#[test]
fn a_place_to_listen_is_said_whole_and_how_clients_are_known() {
    let dir = places::dir_in_memory();
    let image = places::image(&dir, 1 << 20);
    let fails = |more: &[&str], why: &str| {
        let output =
            ferrite(&["export", "nbd", image.to_str().unwrap()]).args(more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(why), "{more:?}: {said}");
    };
    fails(&["--listen", "127.0.0.1:0"], "--plain where all who reach the port");
    fails(&["--listen", "10809", "--plain"], "0.0.0.0:10809");
    fails(&["--listen", "*:10809", "--plain"], "0.0.0.0:10809");
    fails(&["--listen", "127.0.0.1:0", "--plain", "--tls", "x"], "--tls");
    fails(&["--tls", "x"], "--listen");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = taken.local_addr().unwrap().to_string();
    let args = ["export", "nbd", image.to_str().unwrap(), "--plain", "--listen", &place];
    let output = ferrite(&args).output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
}

#[test]
fn a_disk_is_served_in_clear_at_several_places_beside_its_socket() {
    let dir = places::dir_in_memory();
    let image = places::image(&dir, 64 << 20);
    let socket = dir.path().join("nbd.sock");
    let mut command = ferrite(&["export", "nbd", image.to_str().unwrap(), "--plain", "--socket"]);
    command.arg(&socket).args(["--listen", "127.0.0.1:0", "--listen", "[::1]:0"]);
    let export = Export::of(command);
    export.says("listening at [::1]:");
    let log = export.log.lock().unwrap().clone();
    let port: u16 = log.split_once("[::1]:").unwrap().1.split_once(' ').unwrap().0.parse().unwrap();
    let mut first = export.client();
    first.go(true);
    first.write(4096, &[7; 4096]);
    let second = TcpStream::connect(("::1", port)).unwrap();
    let mut second = Client::over(UnixStream::from(std::os::fd::OwnedFd::from(second)));
    second.go(true);
    let mut third = Client::over(UnixStream::connect(&socket).unwrap());
    third.go(true);
    for client in [&mut second, &mut third] {
        assert_eq!(client.read(4096, 4096), [7; 4096]);
    }
    drop((first, second, third));
    assert!(export.end());
}

#[test]
fn renewed_files_count_for_the_next_client_and_unfit_ones_for_none() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    let serial = || {
        let said = s_client(&export, &pki, &["-tls1_3"]);
        let begin = said.split_once("-----BEGIN CERTIFICATE-----").expect("a certificate").1;
        begin.split_once("-----END").unwrap().0.to_owned()
    };
    let first = serial();
    let old_key = fs::read(pki.path("server/server-key.pem")).unwrap();
    pki.server("next", "ca", "365", "DNS:localhost");
    // The certificate is there, and its key not yet.
    fs::copy(pki.path("next/server-cert.pem"), pki.path("server/server-cert.pem")).unwrap();
    assert_eq!(serial(), first);
    export.says("server-key.pem: it is not the key of server-cert.pem");
    fs::remove_file(pki.path("server/server-key.pem")).unwrap();
    assert_eq!(serial(), first);
    export.says("server-key.pem: No such file");
    fs::copy(pki.path("next/server-key.pem"), pki.path("server/server-key.pem")).unwrap();
    let second = serial();
    assert_ne!(first, second);
    assert_ne!(old_key, fs::read(pki.path("server/server-key.pem")).unwrap());
    // A client whose signer was taken out is refused, also if it was served before.
    fs::copy(pki.path("other/ca-cert.pem"), pki.path("server/ca-cert.pem")).unwrap();
    export.refuses(&pki, "localhost", "client", "the client has no certificate");
}

#[test]
fn a_revoked_certificate_is_refused() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    export.serves(&pki, "client");
    fs::write(pki.path("ca/index"), "").unwrap();
    fs::write(pki.path("ca/number"), "01\n").unwrap();
    let config = "[ca]\ndefault_ca=x\n[x]\ndatabase=ca/index\ncrlnumber=ca/number\ndefault_md=sha256\n\
                  default_crl_days=30\nprivate_key=ca/ca-key.pem\ncertificate=ca/ca-cert.pem\n";
    fs::write(pki.path("ca/config"), config).unwrap();
    for more in
        [&["-revoke", "client/client-cert.pem"][..], &["-gencrl", "-out", "server/ca-crl.pem"]]
    {
        let mut command = Command::new("openssl");
        command.args(["ca", "-config", "ca/config"]).args(more);
        ok(command.current_dir(pki.dir.path()));
    }
    export.refuses(&pki, "localhost", "client", "its signer has revoked it");
    pki.client("another", "ca", "365");
    export.serves(&pki, "another");
}

#[test]
fn before_tls_a_client_hears_that_it_is_needed_and_nothing_of_the_disk() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    let mut client = export.client();
    for asked in [option::LIST, option::GO, option::INFO, option::STRUCTURED_REPLY, 99] {
        let answers = client.option(asked, &[0, 0, 0, 0, 0, 0]);
        assert_eq!(answers.len(), 1);
        assert_eq!(answers[0].0, 1 << 31 | 5, "{asked}");
    }
    // STARTTLS has no data.
    assert_eq!(client.option(5, &[1])[0].0, 1 << 31 | 3);
    assert_eq!(client.option(option::ABORT, &[])[0].0, 1);
    assert!(client.is_closed());
    export.says("the client has not asked for TLS");
    let mut client = export.client();
    client.ask(option::EXPORT_NAME, &[]);
    assert!(client.is_closed());
    // An option in clear that comes along with STARTTLS is no TLS, and ends the client.
    let mut client = export.client();
    let go = [b"IHAVEOPT\0\0\0\x05\0\0\0\0IHAVEOPT\0\0\0\x03\0\0\0\0".as_slice()].concat();
    client.say(&go);
    assert_eq!(client.answer(5), (1, vec![]));
    let mut rest = Vec::new();
    let _ = client.stream.read_to_end(&mut rest);
    // At most an alert of TLS.
    assert!(rest.len() < 16 && !rest.starts_with(&[0, 3, 0xe8, 0x89]), "{rest:?}");
    export.says("the client does not speak TLS after STARTTLS");
    export.serves(&pki, "client");
}

#[test]
fn who_stops_in_the_handshake_ends_and_keeps_nobody_waiting() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    // The beginning of a ClientHello, and nothing more; some that say nothing at all; one that greets and stops.
    let hello = export.connect();
    start_tls(&hello);
    (&hello).write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc]).unwrap();
    let silent: Vec<TcpStream> = (0..40).map(|_| export.connect()).collect();
    export.serves(&pki, "client");
    for mut stream in silent.iter().chain([&hello]) {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    export.says("the client has not finished its handshake");
    export.serves(&pki, "client");
}

#[test]
fn strangers_that_say_nothing_do_not_keep_others_out() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    // More than there are places for handshakes: the oldest make room.
    let silent: Vec<TcpStream> = (0..100).map(|_| export.connect()).collect();
    export.serves(&pki, "client");
    let mut first = &silent[0];
    let _ = first.read_to_end(&mut Vec::new());
    drop(silent);
    export.serves(&pki, "client");
}

#[test]
fn a_killed_tunnel_is_replaced_and_the_disk_stays() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    export.serves(&pki, "client");
    let before = export.tunnel().expect("a tunnel");
    // A client that is connected sees its connection end.
    let client = export.connect();
    start_tls(&client);
    kill_process(before, Signal::KILL).unwrap();
    let _ = (&client).read_to_end(&mut Vec::new());
    export.says("the tunnel has ended, and its clients' connections end");
    export.serves(&pki, "client");
    assert_ne!(export.tunnel(), Some(before));
    // It ends with its export.
    let after = export.tunnel().unwrap();
    assert!(export.end());
    let end = Instant::now() + PATIENCE;
    while Path::new(&format!("/proc/{}", after.as_raw_nonzero())).exists() {
        assert!(Instant::now() < end);
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn the_process_that_speaks_tls_has_no_rights() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    export.serves(&pki, "client");
    let tunnel = export.tunnel().unwrap().as_raw_nonzero();
    let status = fs::read_to_string(format!("/proc/{tunnel}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
        line.trim().to_owned()
    };
    assert_eq!(field("Seccomp:"), "2");
    assert_eq!(field("NoNewPrivs:"), "1");
    assert_eq!(field("CapEff:"), "0000000000000000");
    if rustix::process::geteuid().is_root() {
        let user: u32 = field("Uid:").split_whitespace().next().unwrap().parse().unwrap();
        assert!(user >= 0x7400_0000, "{user}");
        let root = fs::read_link(format!("/proc/{tunnel}/root")).unwrap();
        assert!(root.ends_with("empty"), "{root:?}");
    }
}

/// A client of this host that goes by TLS to a server, with the certificates of a folder.
struct Outward {
    client: Client,
    tunnel: Pid,
}

impl Outward {
    fn to(pki: &Pki, folder: &str, host: &str, port: u16) -> Outward {
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
    fn refused(mut self, why: &str) {
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
struct Peer(Child, u16);

impl Peer {
    /// `port` in an argument stands for a free one. `None`: it is not installed.
    fn start(program: &str, args: &[&str]) -> Option<Peer> {
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

#[test]
fn a_client_of_this_host_reads_and_writes_disks_of_others_servers_by_tls() {
    let Some(pki) = Pki::new() else { return };
    let folder = pki.path("server");
    let certificates = format!("--tls-certificates={}", folder.display());
    let nbdkit =
        ["-f", "-p", "PORT", "--tls=require", "--tls-verify-peer", &certificates, "memory", "8M"];
    let image = pki.path("disk.raw");
    File::create_new(&image).unwrap().set_len(8 << 20).unwrap();
    let object =
        format!("tls-creds-x509,id=t,endpoint=server,dir={},verify-peer=yes", folder.display());
    let qemu =
        ["--object", &object, "--tls-creds", "t", "-p", "PORT", "-t", "-e", "4", "-f", "raw"];
    let qemu = [&qemu[..], &[image.to_str().unwrap()]].concat();
    for (program, args) in [("nbdkit", &nbdkit[..]), ("qemu-nbd", &qemu)] {
        let Some(server) = Peer::start(program, args) else { continue };
        let mut outward = Outward::to(&pki, "client", "localhost", server.1);
        let client = &mut outward.client;
        assert_eq!(client.go(true).0, 8 << 20, "{program}");
        let data: Vec<u8> = (0..3u32 << 20).map(|i| (i / 255) as u8).collect();
        client.write(512, &data);
        client.flush();
        assert!(client.read(512, data.len() as u32) == data, "{program}");
        // An address counts as a name.
        let mut second = Outward::to(&pki, "client", "127.0.0.1", server.1);
        assert_eq!(second.client.go(true).0, 8 << 20, "{program}");
    }
}

#[test]
fn a_server_that_is_not_the_one_is_refused_and_the_client_hears_why() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    Outward::to(&pki, "client", "elsewhere.example", export.port).refused(
        "it is of DnsName(\"localhost\"), IpAddress(127.0.0.1) and not of elsewhere.example",
    );
    pki.client("stranger", "ca", "365");
    fs::copy(pki.path("other/ca-cert.pem"), pki.path("stranger/ca-cert.pem")).unwrap();
    Outward::to(&pki, "stranger", "localhost", export.port)
        .refused("signed by nobody whose certificate is in our ca-cert.pem");
    // The server tells of these in its own way, and behind the handshake of TLS 1.3.
    fs::create_dir(pki.path("none")).unwrap();
    fs::copy(pki.path("ca/ca-cert.pem"), pki.path("none/ca-cert.pem")).unwrap();
    Outward::to(&pki, "none", "localhost", export.port).refused("the server wants a certificate");
    pki.client("expired", "ca", "0");
    Outward::to(&pki, "expired", "localhost", export.port)
        .refused("the server refuses our certificate: it has expired; renew client-cert.pem");
    let plain = places::dir_in_memory();
    let image = places::image(&plain, 1 << 20);
    let args = ["export", "nbd", image.to_str().unwrap(), "--plain", "--listen", "127.0.0.1:0"];
    let plain = Export::of(ferrite(&args));
    Outward::to(&pki, "client", "localhost", plain.port).refused("the server has no TLS");
    // A server that speaks something else.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let thread = std::thread::spawn(move || {
        other.accept().unwrap().0.write_all(b"220 mail.example ESMTP ready\r\n").unwrap();
    });
    Outward::to(&pki, "client", "localhost", port).refused("the server does not speak NBD");
    thread.join().unwrap();
}
