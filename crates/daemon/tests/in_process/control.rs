//! Clients of the control socket, hostile ones among them.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;

use ferrite_daemon::control::protocol::{MAX_LINE, code};
use ferrite_host::clock::SplitMix64;
use ferrite_testkit::{PATIENCE, wait_until};
use serde_json::{Value, json};

use crate::host::Host;

fn stream(host: &Host) -> UnixStream {
    let stream = UnixStream::connect(host.paths().control()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends a line, and returns the response.
fn say(stream: &UnixStream, line: &[u8]) -> Value {
    let mut to = stream;
    to.write_all(line).unwrap();
    to.write_all(b"\n").unwrap();
    let mut answer = String::new();
    // A new reader loses nothing: the next response comes after the next request only.
    BufReader::new(stream).read_line(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

fn code_of(answer: &Value) -> i64 {
    assert_eq!(answer["jsonrpc"], "2.0", "{answer}");
    assert!(answer.get("result").is_none(), "{answer}");
    answer["error"]["code"].as_i64().unwrap()
}

#[test]
fn errors_are_those_of_the_specification() {
    let mut host = Host::new(0);
    host.start();
    let stream = stream(&host);
    for (line, expected) in [
        ("{", code::PARSE),
        ("hello", code::PARSE),
        ("\u{0}", code::PARSE),
        ("1", code::INVALID_REQUEST),
        ("null", code::INVALID_REQUEST),
        ("[]", code::INVALID_REQUEST),
        ("{}", code::INVALID_REQUEST),
        (r#"{"jsonrpc":"1.0","method":"disk.list","id":1}"#, code::INVALID_REQUEST),
        (r#"{"jsonrpc":"2.0","method":7,"id":1}"#, code::INVALID_REQUEST),
        (r#"{"jsonrpc":"2.0","method":"disk.list","id":[1]}"#, code::INVALID_REQUEST),
        (r#"{"jsonrpc":"2.0","method":"disk.list","params":1,"id":1}"#, code::INVALID_REQUEST),
        (r#"{"jsonrpc":"2.0","method":"disk.lists","id":1}"#, code::NO_METHOD),
        (r#"{"jsonrpc":"2.0","method":"disk.list","params":[1],"id":1}"#, code::INVALID_PARAMS),
        (r#"{"jsonrpc":"2.0","method":"disk.list","params":{"a":1},"id":1}"#, code::INVALID_PARAMS),
        (r#"{"jsonrpc":"2.0","method":"disk.show","id":1}"#, code::INVALID_PARAMS),
        (
            r#"{"jsonrpc":"2.0","method":"disk.show","params":{"disk":{"domid":70000,"devid":1}},"id":1}"#,
            code::INVALID_PARAMS,
        ),
        (
            r#"{"jsonrpc":"2.0","method":"disk.show","params":{"disk":{"domid":1,"devid":1}},"id":1}"#,
            code::NO_DISK,
        ),
        (
            r#"{"jsonrpc":"2.0","method":"attach.wait","params":{"backend":"/etc"},"id":1}"#,
            code::INVALID_PARAMS,
        ),
        (
            r#"{"jsonrpc":"2.0","method":"attach.wait","params":{"backend":"backend/vbd3/1/2","timeout_s":0},"id":1}"#,
            code::TIMEOUT,
        ),
    ] {
        assert_eq!(code_of(&say(&stream, line.as_bytes())), expected, "{line}");
    }
    let meant = say(&stream, br#"{"jsonrpc":"2.0","method":"disk.lists","id":"x"}"#);
    assert_eq!(meant["id"], "x");
    assert_eq!(meant["error"]["data"]["help"], "did you mean disk.list?");
    // The client is still served.
    let good = say(&stream, br#"{"jsonrpc":"2.0","method":"disk.list","id":null}"#);
    assert_eq!(good["result"], json!({ "disks": [] }));
}

#[test]
fn notifications_are_not_answered_and_batches_are_as_one() {
    let mut host = Host::new(0);
    host.start();
    let stream = stream(&host);
    let request = |id: &str| format!(r#"{{"jsonrpc":"2.0","method":"daemon.status"{id}}}"#);
    let (silent, said) = (request(""), request(r#","id":5"#));
    (&stream).write_all(format!("{silent}\n\n  \n[{silent},{silent}]\n").as_bytes()).unwrap();
    assert_eq!(say(&stream, said.as_bytes())["id"], 5);
    let answers = say(&stream, format!("[{said},{silent},1,{said}]").as_bytes());
    let answers = answers.as_array().unwrap();
    assert_eq!(answers.len(), 3);
    assert_eq!(code_of(&answers[1]), code::INVALID_REQUEST);
    let many = vec![said; 17].join(",");
    assert_eq!(code_of(&say(&stream, format!("[{many}]").as_bytes())), code::INVALID_REQUEST);
}

#[test]
fn a_line_without_end_is_refused_and_its_client_is_left() {
    let mut host = Host::new(0);
    host.start();
    let stream = stream(&host);
    (&stream).write_all(&vec![b'x'; MAX_LINE]).unwrap();
    let mut answer = String::new();
    BufReader::new(&stream).read_line(&mut answer).unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(code_of(&answer), code::INVALID_REQUEST);
    assert_eq!((&stream).read(&mut [0; 8]).unwrap(), 0);
    // The longest valid line.
    let stream = self::stream(&host);
    let line = vec![b' '; MAX_LINE - 2];
    let line = [&line[..], b"1"].concat();
    assert_eq!(code_of(&say(&stream, &line)), code::INVALID_REQUEST);
    assert!(host.status().is_ok());
}

#[test]
fn clients_that_stall_cost_nobody_anything() {
    let mut host = Host::new(0);
    host.start();
    // Silent clients: some stop in the middle of a line, and some read no responses.
    let half = br#"{"jsonrpc":"2.0","meth"#;
    let stalled: Vec<UnixStream> = (0..60)
        .map(|i| {
            let stream = stream(&host);
            if i % 2 == 0 {
                (&stream).write_all(half).unwrap();
            }
            stream
        })
        .collect();
    for _ in 0..20 {
        assert!(host.status().is_ok());
    }
    // Clients that were replaced by others read the end.
    let mut ended = 0;
    for stream in &stalled {
        stream.set_nonblocking(true).unwrap();
        let mut to = stream;
        ended += usize::from(matches!(to.read(&mut [0; 8]), Ok(0)));
    }
    assert!(ended >= 40, "{ended}");
    drop(stalled);
    let mut deaf = stream(&host);
    deaf.set_nonblocking(true).unwrap();
    let request = b"{\"jsonrpc\":\"2.0\",\"method\":\"daemon.status\",\"id\":1}\n".repeat(100);
    // The buffers of the socket fill up, since the client reads no responses.
    while deaf.write(&request).is_ok() {}
    assert!(host.status().is_ok());
}

#[test]
fn random_bytes_harm_nobody() {
    use ferrite_host::clock::Random as _;
    let mut host = Host::new(0);
    host.start();
    let mut random = SplitMix64::new(7);
    let valid = br#"[{"jsonrpc":"2.0","method":"disk.show","params":{"disk":{"domid":1,"devid":1}},"id":1}]"#;
    for round in 0..2000 {
        let mut bytes = valid.to_vec();
        for _ in 0..1 + random.below(8) {
            let at = random.below(bytes.len() as u64) as usize;
            match random.below(3) {
                0 => bytes[at] = random.below(256) as u8,
                1 => bytes.truncate(at.max(1)),
                _ => bytes.extend_from_within(at..),
            }
        }
        bytes.push(b'\n');
        if round % 50 == 0 {
            let stream = stream(&host);
            (&stream).write_all(&bytes).unwrap();
        } else if let Ok(stream) = UnixStream::connect(host.paths().control()) {
            // The next client may have replaced this one already.
            let _ = (&stream).write_all(&bytes);
        }
    }
    assert!(host.status().is_ok());
}

#[test]
fn the_socket_is_its_owners_alone_and_a_dead_daemons_is_replaced() {
    let mut host = Host::new(0);
    std::fs::create_dir_all(host.paths().run).unwrap();
    drop(std::os::unix::net::UnixListener::bind(host.paths().control()).unwrap());
    host.start();
    let mode = std::fs::metadata(host.paths().control()).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let stream = stream(&host);
    // A response shows that the daemon has accepted the connection.
    say(&stream, b"1");
    host.stop();
    assert_eq!((&stream).read(&mut [0; 8]).unwrap(), 0);
    wait_until("no daemon", || host.status().is_err());
}
