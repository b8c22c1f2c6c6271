//! Against real clusters: each kind of request, also when it loses, and servers that stop.

mod peers;

use std::path::Path;
use std::process::Command;

use ferrite_etcd::{
    Change, Cluster, Failure, Revision, Said, Settings, Settled, TlsFiles, Transaction,
};
use peers::{Next, Proxy, Servers, answering, until};
use tempfile::TempDir;

fn won(said: Result<Said, Failure>) -> Revision {
    match said {
        Ok(Said::Won(revision)) => revision,
        other => panic!("not won: {other:?}"),
    }
}

/// The values of the compared keys.
fn lost(said: Result<Said, Failure>) -> Vec<Option<Vec<u8>>> {
    match said {
        Ok(Said::Lost(entries)) => entries.into_iter().map(|e| e.map(|e| e.value)).collect(),
        other => panic!("not lost: {other:?}"),
    }
}

fn value(cluster: &Cluster, key: &str) -> Option<Vec<u8>> {
    cluster.get(key).unwrap().map(|entry| entry.value)
}

/// A value with a number.
fn numbered(number: u64) -> Vec<u8> {
    format!("content {number}").into_bytes()
}

fn number_of(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.strip_prefix("content ")?.parse().ok()
}

/// Attempts until it is settled, with the numbers from `first` on.
fn settle(change: &mut Change<'_>, cluster: &Cluster, first: u64) -> Settled {
    let mut number = first;
    let mut settled = Settled::Unknown(String::new());
    until("settled change", || {
        settled =
            change.attempt(cluster, number).unwrap_or_else(|e| Settled::Unknown(e.to_string()));
        number += 1;
        !matches!(settled, Settled::Unknown(_))
    });
    settled
}

#[test]
fn each_kind_of_transaction_is_carried_out_or_loses_whole() {
    let Some(servers) = Servers::start("kinds", 1) else { return };
    let cluster = servers.client();
    let make = |text: &str| Transaction::when("a", Revision::ABSENT).put("a", text.into());
    let first = won(cluster.commit(&make("one")));
    assert_eq!(lost(cluster.commit(&make("two"))), [Some(b"one".to_vec())]);
    assert_eq!(cluster.get("a").unwrap().unwrap().revision, first);

    // An older revision loses, whatever follows.
    let second = won(cluster.commit(&Transaction::when("a", first).put("a", b"three".into())));
    let lease = cluster.grant(60).unwrap();
    for kind in [
        Transaction::when("a", first).put("b", b"x".into()),
        Transaction::when("a", first).put_leased("b", b"x".into(), lease),
        Transaction::when("a", first).delete("a"),
        Transaction::when("a", Revision::ABSENT).delete("a"),
        Transaction::when("a", Revision(second.0 + 1)).delete("a"),
    ] {
        assert_eq!(lost(cluster.commit(&kind)), [Some(b"three".to_vec())], "{kind:?}");
    }
    // All comparisons have to hold, wherever the false one stands.
    let both = Transaction::when("a", second).and_when("b", Revision(1)).put("a", b"x".into());
    assert_eq!(lost(cluster.commit(&both)), [Some(b"three".to_vec()), None]);
    let both = Transaction::when("b", Revision(1)).and_when("a", second).put("a", b"x".into());
    assert_eq!(lost(cluster.commit(&both)), [None, Some(b"three".to_vec())]);
    assert_eq!((value(&cluster, "a"), value(&cluster, "b")), (Some(b"three".to_vec()), None));

    // Empty values and all bytes; several keys have one revision.
    let all: Vec<u8> = (0..=255).collect();
    let several = Transaction::when("a", second).delete("a").put("b", all.clone()).put("c", vec![]);
    let third = won(cluster.commit(&several));
    assert_eq!(value(&cluster, "a"), None);
    let (b, c) = (cluster.get("b").unwrap().unwrap(), cluster.get("c").unwrap().unwrap());
    assert_eq!((b.value, c.value), (all, vec![]));
    assert_eq!((b.revision, c.revision), (third, third));
}

#[test]
fn a_list_has_all_keys_of_one_moment() {
    let Some(servers) = Servers::start("list", 1) else { return };
    let cluster = servers.client();
    let key = |i: usize| format!("map/{i:04}");
    let large = vec![7; 64 << 10];
    for i in 0..40 {
        let one = Transaction::when(&key(i), Revision::ABSENT).put(&key(i), large.clone());
        won(cluster.commit(&one));
    }
    won(cluster.commit(&Transaction::when("map0", Revision::ABSENT).put("map0", vec![])));
    let mut seen = Vec::new();
    let at = cluster.list("map/", |entry| {
        if seen.is_empty() {
            // Between two pages: a key that is written now is not in the list, and one that is removed now is.
            let gone = cluster.get(&key(39)).unwrap().unwrap().revision;
            let late = Transaction::when(&key(39), gone).delete(&key(39)).put("map/late", vec![]);
            won(cluster.commit(&late));
        }
        assert_eq!(entry.value, large);
        seen.push(entry.key);
    });
    assert_eq!(seen, (0..40).map(key).collect::<Vec<_>>());
    assert!(at.unwrap() < cluster.get("map/late").unwrap().unwrap().revision);
}

#[test]
fn a_leased_key_goes_with_its_lease() {
    let Some(servers) = Servers::start("lease", 1) else { return };
    let cluster = servers.client();
    let put = |key: &str, lease| {
        let txn = Transaction::when(key, Revision::ABSENT).put_leased(key, vec![1], lease);
        won(cluster.commit(&txn));
    };
    let (kept, ended, short) =
        (cluster.grant(60).unwrap(), cluster.grant(60).unwrap(), cluster.grant(1).unwrap());
    put("kept", kept);
    put("ended", ended);
    put("short", short);
    assert!(cluster.keep(kept).unwrap() && cluster.keep(ended).unwrap());
    cluster.revoke(ended).unwrap();
    cluster.revoke(ended).unwrap();
    assert!(!cluster.keep(ended).unwrap());
    assert_eq!(value(&cluster, "ended"), None);
    until("end of a lease that is not kept", || value(&cluster, "short").is_none());
    assert!(!cluster.keep(short).unwrap());
    assert!(value(&cluster, "kept").is_some());
    let with_old = Transaction::when("new", Revision::ABSENT).put_leased("new", vec![], ended);
    assert!(matches!(cluster.commit(&with_old), Err(Failure::Refused { code: 5, .. })));
}

#[test]
fn a_change_whose_answer_is_lost_is_settled_and_happens_once() {
    let Some(servers) = Servers::start("settle", 3) else { return };
    let cluster = servers.client();
    let first =
        won(cluster.commit(&Transaction::when("disk", Revision::ABSENT).put("disk", numbered(0))));

    // Without a quorum the outcome of an attempt is unknown, and nothing can be read.
    let leader = servers.leader();
    let others = [(leader + 1) % 3, (leader + 2) % 3];
    others.iter().for_each(|i| servers.stop(*i));
    let none = |_: u64| Transaction::default();
    let mut change = Change::new("disk", first, &numbered, &number_of, none(0));
    assert!(matches!(change.attempt(&cluster, 1), Ok(Settled::Unknown(_))));
    assert!(
        matches!(cluster.get("disk"), Err(Failure::Unavailable(reasons)) if reasons.len() == 3)
    );
    others.iter().for_each(|i| servers.go_on(*i));
    let Settled::Won(second) = settle(&mut change, &cluster, 100) else { panic!("it is ours") };
    let entry = cluster.get("disk").unwrap().unwrap();
    assert_eq!(entry.revision, second);
    assert!(number_of(&entry.value).is_some_and(|n| n == 1 || n >= 100));

    // A leader that stops with the change in its hands, and goes on after it was settled.
    let leader = servers.leader();
    let to_leader =
        Settings { endpoints: vec![servers.urls[leader].clone()], ..servers.settings() };
    let to_leader = answering(Cluster::new(&to_leader).unwrap());
    servers.stop(leader);
    let mut change = Change::new("disk", second, &numbered, &number_of, none(0));
    assert!(matches!(change.attempt(&to_leader, 1000), Ok(Settled::Unknown(_))));
    let Settled::Won(third) = settle(&mut change, &cluster, 2000) else { panic!("it is ours") };
    servers.go_on(leader);
    until("answer of the old leader", || to_leader.get("disk").is_ok());
    let entry = cluster.get("disk").unwrap().unwrap();
    assert_eq!(entry.revision, third, "an attempt of before the settlement was carried out");
    assert_ne!(number_of(&entry.value), Some(1000));

    // Another client's change of the same revision.
    let fourth =
        won(cluster.commit(&Transaction::when("disk", third).put("disk", b"another's".into())));
    let mut change = Change::new("disk", third, &numbered, &number_of, none(0));
    let Settled::Lost(Some(entry)) = settle(&mut change, &cluster, 3000) else { panic!("lost") };
    assert_eq!((entry.value, entry.revision), (b"another's".to_vec(), fourth));
}

#[test]
fn an_attempt_that_was_carried_out_unseen_is_recognised() {
    let Some(servers) = Servers::start("unseen", 1) else { return };
    let direct = servers.client();
    let proxy = Proxy::of(&servers.urls[0]);
    let settings = Settings { endpoints: vec![proxy.url.clone()], ..servers.settings() };
    let cluster = Cluster::new(&settings).unwrap();
    let mut change =
        Change::new("k", Revision::ABSENT, &numbered, &number_of, Transaction::default());
    proxy.next(Next::SwallowsTheAnswer);
    assert!(matches!(change.attempt(&cluster, 1), Ok(Settled::Unknown(_))));
    let first = direct.get("k").unwrap().unwrap();
    assert_eq!(change.attempt(&cluster, 2), Ok(Settled::Won(first.revision)));
    assert_eq!(direct.get("k").unwrap().unwrap(), first);
}

/// A read in the place of the second attempt would say that the first was lost.
#[test]
fn an_attempt_that_arrives_after_the_settlement_changes_nothing() {
    let Some(servers) = Servers::start("late", 1) else { return };
    let direct = servers.client();
    let first = won(direct.commit(&Transaction::when("k", Revision::ABSENT).put("k", numbered(0))));
    let proxy = Proxy::of(&servers.urls[0]);
    let settings = Settings { endpoints: vec![proxy.url.clone()], ..servers.settings() };
    let cluster = Cluster::new(&settings).unwrap();
    let mut change = Change::new("k", first, &numbered, &number_of, Transaction::default());
    proxy.next(Next::Keeps);
    assert!(matches!(change.attempt(&cluster, 1), Ok(Settled::Unknown(_))));
    assert_eq!(value(&direct, "k"), Some(numbered(0)), "it is under way still");
    let Ok(Settled::Won(second)) = change.attempt(&cluster, 2) else { panic!("not settled") };
    let answers = proxy.pass_what_was_kept();
    assert!(answers.len() == 1 && !answers[0].contains("succeeded"), "{answers:?}");
    let entry = direct.get("k").unwrap().unwrap();
    assert_eq!((entry.value, entry.revision), (numbered(2), second));
}

/// Another key that must not be there may be removed again, and an attempt that is under way still would hold then.
#[test]
fn a_change_is_not_lost_while_an_attempt_may_hold_again() {
    let Some(servers) = Servers::start("again", 1) else { return };
    let direct = servers.client();
    let proxy = Proxy::of(&servers.urls[0]);
    let settings = Settings { endpoints: vec![proxy.url.clone()], ..servers.settings() };
    let cluster = Cluster::new(&settings).unwrap();
    let first = won(direct.commit(&Transaction::when("k", Revision::ABSENT).put("k", numbered(0))));
    let others = Transaction::when("other", Revision::ABSENT).put("other", vec![]);
    let mut change = Change::new("k", first, &numbered, &number_of, others);
    proxy.next(Next::Keeps);
    assert!(matches!(change.attempt(&cluster, 1), Ok(Settled::Unknown(_))));
    let made =
        won(direct.commit(&Transaction::when("other", Revision::ABSENT).put("other", vec![])));
    assert!(matches!(change.attempt(&cluster, 2), Ok(Settled::Unknown(_))));
    won(direct.commit(&Transaction::when("other", made).delete("other")));
    proxy.pass_what_was_kept();
    let Ok(Settled::Won(_)) = change.attempt(&cluster, 3) else { panic!("it was carried out") };
    assert_eq!(value(&direct, "k"), Some(numbered(1)));
}

#[test]
fn an_endpoint_of_another_cluster_gets_nothing() {
    let Some(servers) = Servers::start("own", 1) else { return };
    let Some(foreign) = Servers::start("foreign", 1) else { return };
    let (own, other) = (servers.client(), foreign.client());
    let id = own.identifier();
    let settings = Settings {
        endpoints: vec![foreign.urls[0].clone(), servers.urls[0].clone()],
        cluster: id,
        ..servers.settings()
    };
    let mixed = Cluster::new(&settings).unwrap();
    won(mixed.commit(&Transaction::when("k", Revision::ABSENT).put("k", b"v".into())));
    assert_eq!(value(&mixed, "k"), Some(b"v".to_vec()));
    assert_eq!((value(&own, "k"), value(&other, "k")), (Some(b"v".to_vec()), None));
    let alone = Settings { endpoints: foreign.urls.clone(), cluster: id, ..servers.settings() };
    let alone = Cluster::new(&alone).unwrap();
    let put = Transaction::when("k", Revision::ABSENT).put("k", vec![]);
    let refused = alone.commit(&put).unwrap_err().to_string();
    assert!(refused.contains("it belongs to the cluster"), "{refused}");
    assert_eq!(value(&other, "k"), None);
}

#[test]
fn a_killed_server_is_passed_over() {
    let Some(mut servers) = Servers::start("killed", 3) else { return };
    let cluster = servers.client();
    servers.kill(0);
    let mut change =
        Change::new("k", Revision::ABSENT, &numbered, &number_of, Transaction::default());
    assert!(matches!(settle(&mut change, &cluster, 1), Settled::Won(_)));
    let status = cluster.status();
    assert_eq!(status.iter().filter(|(_, version)| version.is_ok()).count(), 2, "{status:?}");
}

/// An authority with certificates for `127.0.0.1` and for a client, in a folder each.
fn certificates(folder: &Path) {
    let script = r#"
        set -e
        openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca-key.pem -out ca-cert.pem
        for who in server client; do
            openssl req -newkey rsa:2048 -nodes -subj /CN=$who -keyout $who-key.pem -out $who.csr
            printf 'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n' > ext
            openssl x509 -req -days 2 -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -extfile ext \
                -out $who-cert.pem
        done
        mkdir full bare other
        cp ca-cert.pem client-cert.pem client-key.pem full
        cp ca-cert.pem bare
        cp client-cert.pem other/ca-cert.pem"#;
    let made = Command::new("sh").args(["-c", script]).current_dir(folder).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

#[test]
fn by_tls_with_the_operators_authority_and_a_certificate_of_the_client() {
    let folder = TempDir::new().unwrap();
    certificates(folder.path());
    let file = |name: &str| folder.path().join(name).display().to_string();
    let (cert, key, ca) = (file("server-cert.pem"), file("server-key.pem"), file("ca-cert.pem"));
    let options =
        ["--cert-file", &cert, "--key-file", &key, "--client-cert-auth", "--trusted-ca-file", &ca];
    let Some(servers) = Servers::start_with("tls", 1, "https", &options) else { return };
    let with = |folder_name: &str| {
        let tls = Some(TlsFiles(folder.path().join(folder_name)));
        Settings { tls, plain: false, ..servers.settings() }
    };
    let cluster = answering(Cluster::new(&with("full")).unwrap());
    let put = Transaction::when("k", Revision::ABSENT).put("k", b"v".into());
    won(cluster.commit(&put));
    assert_eq!(value(&cluster, "k"), Some(b"v".to_vec()));
    for (folder, why) in [("bare", "certificate"), ("other", "certificate")] {
        let refused = Cluster::new(&with(folder)).unwrap().get("k").unwrap_err().to_string();
        assert!(refused.to_lowercase().contains(why), "{folder}: {refused}");
    }
    let no_folder = Cluster::new(&with("none")).unwrap_err().to_string();
    assert!(no_folder.contains("cannot read") && no_folder.contains("ca-cert.pem"), "{no_folder}");
    for (endpoint, why) in [
        ("http://h:1", "without TLS only if"),
        ("https://h", "it has no port"),
        ("h:1", "it is no address"),
        ("https://:1", "it has no port"),
    ] {
        let settings = Settings { endpoints: vec![endpoint.to_owned()], ..with("full") };
        let refused = Cluster::new(&settings).unwrap_err().to_string();
        assert!(refused.contains(why), "{endpoint}: {refused}");
    }
}
