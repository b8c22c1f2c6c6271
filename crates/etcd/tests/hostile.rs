//! Servers that are no etcd, or a broken one. Nothing that they say counts as a transaction that was carried out, or as a
//! value; a call ends in its time, and its answer is bounded.

mod peers;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use ferrite_etcd::{Cluster, Failure, MAX_ANSWER_BYTES, Revision, Said, Settings, Transaction};
use peers::read_request;

const HEADER: &str = r#""header":{"cluster_id":"17","revision":"7"}"#;

/// A server that says its status as etcd does, and answers all else by `answer`. Returns a client of it.
fn server(answer: impl Fn(&mut TcpStream) + Send + Sync + 'static) -> Cluster {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, answer) = (stream.unwrap(), answer.clone());
            std::thread::spawn(move || {
                if read_request(&mut stream).starts_with(b"POST /v3/maintenance/status") {
                    let _ = stream.write_all(with_length(200, &format!("{{{HEADER}}}")).as_bytes());
                } else {
                    answer(&mut stream);
                }
            });
        }
    });
    Cluster::new(&Settings { endpoints: vec![url], tls: None, plain: true, cluster: None }).unwrap()
}

fn with_length(status: u16, body: &str) -> String {
    format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn put() -> Transaction {
    Transaction::when("k", Revision::ABSENT).put("k", b"v".into())
}

fn one_answer(text: String) -> Cluster {
    server(move |stream| drop(stream.write_all(text.as_bytes())))
}

#[test]
fn what_is_no_answer_of_etcd_leaves_the_outcome_unknown() {
    let won = format!(r#"{{{HEADER},"succeeded":true}}"#);
    // The control: this one is an answer.
    let said = one_answer(with_length(200, &won)).commit(&put());
    assert_eq!(said, Ok(Said::Won(Revision(7))));
    let other = won.replace("\"17\"", "\"18\"");
    let huge = format!(
        "{}{}",
        won.trim_end_matches('}'),
        ",\"x\":\"".to_owned() + &"x".repeat(3 << 20) + "\"}"
    );
    for (what, text) in [
        ("nothing", String::new()),
        ("no HTTP", "garbage\r\n\r\n".to_owned()),
        ("a cut body", format!("HTTP/1.1 200 X\r\ncontent-length: 99\r\n\r\n{won}")),
        ("a web page", with_length(200, "<html></html>")),
        ("another cluster", with_length(200, &other)),
        ("without succeeded", with_length(200, &format!("{{{HEADER}}}"))),
        ("no leader", with_length(503, r#"{"error":"etcdserver: leader changed","code":14}"#)),
        ("too late", with_length(504, r#"{"code":4, "message":"context deadline exceeded"}"#)),
        ("too late, 3.4", with_length(500, r#"{"error":"context deadline exceeded","code":2}"#)),
        (
            "elsewhere",
            "HTTP/1.1 302 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
                .to_owned(),
        ),
        ("more than is read", with_length(200, &huge)),
    ] {
        let cluster = one_answer(text);
        let said = cluster.commit(&put());
        assert!(matches!(said, Ok(Said::Unknown(_))), "{what}: {said:?}");
        // For a read that one is an answer: there is no such key.
        if what != "without succeeded" {
            assert!(matches!(cluster.get("k"), Err(Failure::Unavailable(_))), "{what}");
        }
    }
    assert!(huge.len() as u64 > MAX_ANSWER_BYTES);
}

#[test]
fn a_refusal_is_no_unknown_outcome() {
    let refused = with_length(400, r#"{"error":"etcdserver: duplicate key","code":3}"#);
    let said = one_answer(refused).commit(&put());
    assert!(
        matches!(&said, Err(Failure::Refused { code: 3, text }) if text.contains("duplicate")),
        "{said:?}"
    );
}

/// Without limits these would not end.
#[test]
fn a_server_that_does_not_come_to_an_end_is_left() {
    let silent = server(|stream| {
        let _ = stream.read(&mut [0; 1]);
    });
    assert!(matches!(silent.commit(&put()), Ok(Said::Unknown(_))));
    let slow = server(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 X\r\ncontent-length: 1000\r\n\r\n");
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    });
    assert!(matches!(slow.commit(&put()), Ok(Said::Unknown(_))));
    let endless = server(|stream| {
        let _ = stream.write_all(b"HTTP/1.1 200 X\r\n");
        while stream.write_all(b"x: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n").is_ok() {}
    });
    assert!(matches!(endless.commit(&put()), Ok(Said::Unknown(_))));
}

#[test]
fn a_list_that_repeats_itself_or_has_other_keys_is_refused() {
    let key = |k: &str| format!(r#"{{"key":"{k}","mod_revision":"1"}}"#);
    // "YS8x" is a/1, "YS8y" is a/2, "Yg==" is b.
    for kvs in [[key("YS8x"), key("YS8x")], [key("YS8y"), key("YS8x")], [key("YS8x"), key("Yg==")]]
    {
        let body = format!(r#"{{{HEADER},"more":true,"kvs":[{}]}}"#, kvs.join(","));
        let said = one_answer(with_length(200, &body)).list("a/", |_| ());
        assert!(matches!(said, Err(Failure::Unavailable(_))), "{kvs:?}: {said:?}");
    }
    // Always the same page.
    let body = format!(r#"{{{HEADER},"more":true,"kvs":[{}]}}"#, key("YS8x"));
    let mut seen = 0;
    let said = one_answer(with_length(200, &body)).list("a/", |_| seen += 1);
    assert!(matches!(said, Err(Failure::Unavailable(_))), "{said:?}");
    assert_eq!(seen, 1);
}

#[test]
fn nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let settings = Settings { endpoints: vec![url], tls: None, plain: true, cluster: None };
    // Nothing was sent, so nothing is unknown.
    let said = Cluster::new(&settings).unwrap().commit(&put());
    assert!(matches!(said, Err(Failure::Unavailable(_))), "{said:?}");
}
