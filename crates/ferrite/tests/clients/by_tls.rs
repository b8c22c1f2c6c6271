//! NBD by TLS: `ferrite export nbd --listen --tls` with usual clients, and clients and servers that are refused.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use ferrite_testkit::nbd::{Client, option};
use ferrite_testkit::programs::peer;
use ferrite_testkit::{PATIENCE, bytes, places};
use rustix::process::{Signal, kill_process};

use crate::tls::{Export, Outward, Peer, Pki, ferrite, ok, s_client, start_tls};

const PAGE: &str = include_str!("../../../../docs/access.md");

#[test]
fn nbdinfo_and_nbdcopy_read_and_write_a_disk_by_tls() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    export.serves(&pki, "client");
    let (data, copy) = (pki.path("data"), pki.path("copy"));
    let bytes = bytes::runs(48 << 20, 509, |n| n as u8);
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
    let bytes = bytes::runs(8 << 20, 511, |n| (n * 3 + 1) as u8);
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
    // Other programs may have that port. The kernel gives a port of this range only to a program that names it.
    let first = 20_000 + (std::process::id() % 10_000) as u16;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let port = (first..32_000).find(is_free).unwrap();
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
    export.says("it was signed by an authority whose certificate is not in our ca-cert.pem");
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
    let silent: Vec<TcpStream> = (0..200).map(|_| export.connect()).collect();
    export.serves(&pki, "client");
    // None of them had to wait for the end of its time, so this client did not, either.
    assert!(!export.log.lock().unwrap().contains("has not finished its handshake"));
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
        let data = bytes::runs(3 << 20, 255, |n| n as u8);
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
        .refused("signed by an authority whose certificate is not in our ca-cert.pem");
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
