//! The endpoints of a cluster, and calls to them.
//!
//! A call has two seconds. For reads and leases the next endpoint follows a failed one. A transaction that may have
//! been received is sent once: its outcome is unknown then, and [`Change`](crate::Change) settles it.
//!
//! **Whose cluster.** An endpoint that belongs to another cluster would take a transaction that holds there, too. So each
//! endpoint says its cluster before the first transaction, and again after each failure of it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Timeout};

use crate::answers::{self, Head};
use crate::requests::{self, Transaction, Unfit};
use crate::{Entry, Lease, Revision};

/// How long a call takes at most, with the connection to the endpoint.
pub const CALL_TIME: Duration = Duration::from_secs(2);
/// The longest answer in bytes. A larger one is an error.
pub const MAX_ANSWER_BYTES: u64 = 2 << 20;
/// Keys of a page. With the largest values that Ferrite writes (64 KiB) a page is half of the longest answer.
const PAGE_KEYS: usize = 12;
/// The most pages of a list: more than any pool has.
const MAX_PAGES: usize = 100_000;
/// The most bytes of a response's header.
const MAX_HEADER_BYTES: usize = 16 << 10;

/// The client's certificate, in the folder of the files of TLS.
const OWN_CERTIFICATE: &str = "client-cert.pem";

/// Files of TLS in one folder, by the names that QEMU, nbdkit and libnbd give them: `ca-cert.pem`, `client-cert.pem`,
/// `client-key.pem`. Without the last two the client shows no certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles(pub PathBuf);

/// Where a cluster is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Addresses as `https://HOST:PORT`, or `http://` with `plain`.
    pub endpoints: Vec<String>,
    /// Certificates for `https`.
    pub tls: Option<TlsFiles>,
    /// Whether `http` is allowed.
    pub plain: bool,
    /// The cluster's identifier, if it is known. Without it the first answer counts.
    pub cluster: Option<u64>,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The settings make no sense.
    #[error("{0}")]
    Settings(String),
    /// No endpoint has answered: a text for each.
    #[error("etcd does not answer: {}", .0.join("; "))]
    Unavailable(Vec<String>),
    /// The cluster refuses the request.
    #[error("etcd refuses a request: {text} (code {code})")]
    Refused {
        /// Of gRPC: 3 a malformed request, 5 no such lease, 7 and 16 no permission, 9 it is there already.
        code: i32,
        /// Its text.
        text: String,
    },
    /// The transaction was not sent.
    #[error(transparent)]
    Unfit(#[from] Unfit),
}

/// The known outcome of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// It was carried out; its keys have this revision.
    Won(Revision),
    /// A key had another revision. The values of the compared keys, in the order of the comparisons.
    Lost(Vec<Option<Entry>>),
    /// It was carried out, or is going to be, or never; and why that is not known. A read proves nothing.
    Unknown(String),
}

/// A cluster. It may be used by several threads.
pub struct Cluster {
    agent: Agent,
    endpoints: Vec<Endpoint>,
    /// The one that is asked first.
    first: AtomicUsize,
    /// 0: not known yet.
    cluster: AtomicU64,
    /// Whether there is TLS without a certificate of the client.
    is_nameless: bool,
}

struct Endpoint {
    url: String,
    /// The cluster that it said last. None: it has failed since.
    is_of: Mutex<Option<u64>>,
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let urls: Vec<_> = self.endpoints.iter().map(|endpoint| &endpoint.url).collect();
        f.debug_struct("Cluster").field("endpoints", &urls).finish_non_exhaustive()
    }
}

/// The failure of one call.
enum Failed {
    /// The endpoint has not got the request.
    NotSent(String),
    /// It may have got it.
    NoAnswer(String),
    /// It refuses it.
    Refused(i32, String),
}

impl Failed {
    fn text(self) -> String {
        match self {
            Failed::NotSent(text) | Failed::NoAnswer(text) | Failed::Refused(_, text) => text,
        }
    }
}

impl Cluster {
    /// Reads the certificates. Nothing is asked yet.
    ///
    /// # Errors
    /// There is no endpoint, one is no address, or the certificates cannot be read.
    pub fn new(settings: &Settings) -> Result<Cluster, Failure> {
        if settings.endpoints.is_empty() {
            return Err(Failure::Settings("no endpoint of etcd is given".to_owned()));
        }
        let endpoints = settings.endpoints.iter().map(|url| endpoint(url, settings));
        let endpoints = endpoints.collect::<Result<_, _>>()?;
        let own = |TlsFiles(folder): &TlsFiles| !folder.join(OWN_CERTIFICATE).exists();
        Ok(Cluster {
            agent: agent(settings.tls.as_ref())?,
            is_nameless: settings.tls.as_ref().is_some_and(own),
            endpoints,
            first: AtomicUsize::new(0),
            cluster: AtomicU64::new(settings.cluster.unwrap_or(0)),
        })
    }

    /// The cluster's identifier, once an endpoint has said it.
    pub fn identifier(&self) -> Option<u64> {
        Some(self.cluster.load(Relaxed)).filter(|id| *id != 0)
    }

    /// The version of each endpoint's server, or why it does not answer.
    pub fn status(&self) -> Vec<(String, Result<String, String>)> {
        let of = |endpoint: &Endpoint| {
            let version = self.look_at(endpoint).map_err(Failed::text);
            (endpoint.url.clone(), version)
        };
        self.endpoints.iter().map(of).collect()
    }

    /// A key's value, as a quorum has it.
    ///
    /// # Errors
    /// [`Failure::Unavailable`], [`Failure::Refused`].
    pub fn get(&self, key: &str) -> Result<Option<Entry>, Failure> {
        let page = self.ask("kv/range", &requests::get(key), |body| {
            let page = answers::page(body)?;
            let is_one =
                page.entries.iter().all(|entry| entry.key == key) && page.entries.len() < 2;
            let odd = || format!("other keys than {key}");
            is_one.then_some((page.head, page.entries)).ok_or_else(odd)
        })?;
        Ok(page.into_iter().next())
    }

    /// Calls with all keys that begin with `prefix`, in order, as they were at one moment. Returns the revision of that.
    ///
    /// # Errors
    /// As [`get`](Cluster::get).
    pub fn list(&self, prefix: &str, mut each: impl FnMut(Entry)) -> Result<Revision, Failure> {
        let end = requests::end_of(prefix.as_bytes());
        let end = end.ok_or_else(|| Failure::Settings("a prefix without an end".to_owned()))?;
        let (mut from, mut at) = (prefix.as_bytes().to_vec(), Revision(0));
        for _ in 0..MAX_PAGES {
            let request = requests::page(&from, &end, PAGE_KEYS, at);
            let (entries, more, revision) = self.ask("kv/range", &request, |body| {
                let page = answers::page(body)?;
                check_page(&page.entries, &from, &end)?;
                let revision = page.head.revision;
                Ok((page.head, (page.entries, page.more, revision)))
            })?;
            if at == Revision(0) {
                at = revision;
            }
            // The next page begins behind the last key.
            let Some(last) = entries.last().filter(|_| more) else {
                entries.into_iter().for_each(&mut each);
                return Ok(at);
            };
            from = [last.key.as_bytes(), &[0]].concat();
            entries.into_iter().for_each(&mut each);
        }
        Err(Failure::Unavailable(vec![format!("the list of {prefix} has no end")]))
    }

    /// Sends a transaction, once. Endpoints that cannot be connected to are passed over.
    ///
    /// # Errors
    /// It was not carried out, and never will be: [`Failure::Unfit`], [`Failure::Refused`], and
    /// [`Failure::Unavailable`] if no endpoint has got it.
    pub fn commit(&self, transaction: &Transaction) -> Result<Said, Failure> {
        let request = transaction.to_json()?;
        let compared: Vec<&str> = transaction.compares.iter().map(|(key, _)| &key[..]).collect();
        let mut reasons = Vec::new();
        for (index, endpoint) in self.in_turn() {
            let sent = self.known(endpoint).and_then(|()| self.call(endpoint, "kv/txn", &request));
            match sent {
                Ok(body) => return Ok(self.said(endpoint, index, &body, &compared)),
                Err(Failed::NotSent(text)) => reasons.push(text),
                Err(Failed::NoAnswer(text)) => {
                    // The next attempt begins with another endpoint.
                    self.first.store((index + 1) % self.endpoints.len(), Relaxed);
                    return Ok(Said::Unknown(text));
                }
                Err(Failed::Refused(code, text)) => return Err(Failure::Refused { code, text }),
            }
        }
        Err(Failure::Unavailable(reasons))
    }

    fn said(&self, endpoint: &Endpoint, index: usize, body: &[u8], compared: &[&str]) -> Said {
        let read = answers::transaction(body, compared);
        let read = read.and_then(|carried| self.is_ours(endpoint, carried.head).map(|()| carried));
        match read {
            Ok(carried) => {
                self.first.store(index, Relaxed);
                carried.lost.map_or(Said::Won(carried.head.revision), Said::Lost)
            }
            Err(why) => Said::Unknown(format!("{}: {why}", endpoint.url)),
        }
    }

    /// Makes a lease of so many seconds; etcd makes it at least 2.
    ///
    /// # Errors
    /// As [`get`](Cluster::get).
    pub fn grant(&self, seconds: u32) -> Result<Lease, Failure> {
        self.ask("lease/grant", &requests::grant(seconds), |body| {
            let (head, lease, seconds) = answers::lease(body)?;
            let fits = seconds.is_some() && lease.0 != 0;
            fits.then_some((head, lease)).ok_or_else(|| "a lease without a number".to_owned())
        })
    }

    /// Keeps a lease for its time again. False: it is gone, and so are its keys.
    ///
    /// # Errors
    /// As [`get`](Cluster::get).
    pub fn keep(&self, lease: Lease) -> Result<bool, Failure> {
        self.ask("lease/keepalive", &requests::of_lease(lease), |body| {
            let (head, _, seconds) = answers::lease(body)?;
            Ok((head, seconds.is_some()))
        })
    }

    /// Ends a lease; its keys go with it. One that is gone is no error.
    ///
    /// # Errors
    /// As [`get`](Cluster::get).
    pub fn revoke(&self, lease: Lease) -> Result<(), Failure> {
        let gone = self.ask("lease/revoke", &requests::of_lease(lease), |body| {
            answers::lease(body).map(|(head, ..)| (head, ()))
        });
        match gone {
            Err(Failure::Refused { code: 5, .. }) => Ok(()),
            gone => gone,
        }
    }

    /// Asks one endpoint after the other, until one answers.
    fn ask<T>(
        &self,
        what: &str,
        request: &str,
        read: impl Fn(&[u8]) -> Result<(Head, T), String>,
    ) -> Result<T, Failure> {
        let mut reasons = Vec::new();
        for (index, endpoint) in self.in_turn() {
            let body = match self.call(endpoint, what, request) {
                Ok(body) => body,
                Err(Failed::Refused(code, text)) => return Err(Failure::Refused { code, text }),
                Err(failed) => {
                    reasons.push(failed.text());
                    continue;
                }
            };
            let answer = read(&body)
                .and_then(|(head, answer)| self.is_ours(endpoint, head).map(|()| answer));
            match answer {
                Ok(answer) => {
                    self.first.store(index, Relaxed);
                    return Ok(answer);
                }
                Err(why) => reasons.push(format!("{}: {why}", endpoint.url)),
            }
        }
        Err(Failure::Unavailable(reasons))
    }

    /// All endpoints, beginning with the one that answered last.
    fn in_turn(&self) -> impl Iterator<Item = (usize, &Endpoint)> {
        let count = self.endpoints.len();
        let first = self.first.load(Relaxed) % count;
        (0..count).map(move |i| (first + i) % count).map(|i| (i, &self.endpoints[i]))
    }

    /// Has the endpoint say which cluster it belongs to, if it has not, or has failed since.
    fn known(&self, endpoint: &Endpoint) -> Result<(), Failed> {
        if endpoint.said().is_some() {
            return Ok(());
        }
        // Nothing was sent yet that changes anything.
        self.look_at(endpoint).map(drop).map_err(|failed| Failed::NotSent(failed.text()))
    }

    fn look_at(&self, endpoint: &Endpoint) -> Result<String, Failed> {
        let body = self.call(endpoint, "maintenance/status", "{}")?;
        let read = answers::status(&body);
        let read = read.and_then(|(head, version)| self.is_ours(endpoint, head).map(|()| version));
        read.map_err(|why| Failed::NoAnswer(format!("{}: {why}", endpoint.url)))
    }

    /// Checks that an answer is this cluster's. The first one that answers decides which that is.
    fn is_ours(&self, endpoint: &Endpoint, head: Head) -> Result<(), String> {
        let known = self.cluster.compare_exchange(0, head.cluster, Relaxed, Relaxed);
        match known.err().filter(|known| *known != head.cluster) {
            None => {
                endpoint.say(Some(head.cluster));
                Ok(())
            }
            Some(known) => {
                endpoint.say(None);
                Err(format!("it belongs to the cluster {:x}, and not to {known:x}", head.cluster))
            }
        }
    }

    /// One call. The connection is not kept: a request on an old one that was closed meanwhile might be sent twice.
    fn call(&self, endpoint: &Endpoint, what: &str, request: &str) -> Result<Vec<u8>, Failed> {
        let url = format!("{}/v3/{what}", endpoint.url);
        let sent = self.agent.post(&url).content_type("application/json").send(request);
        let failed = |e: ureq::Error| {
            endpoint.say(None);
            // A server that refuses a client without a certificate may have closed before its reason is read.
            let hint = match self.is_nameless && matches!(e, ureq::Error::Io(_)) {
                true => {
                    "; it may want a certificate of the client: client-cert.pem, client-key.pem"
                }
                false => "",
            };
            let text = format!("{}: {}{hint}", endpoint.url, in_words(&e));
            if was_not_sent(&e) { Failed::NotSent(text) } else { Failed::NoAnswer(text) }
        };
        let mut response = sent.map_err(failed)?;
        let body = response.body_mut().with_config().limit(MAX_ANSWER_BYTES).read_to_vec();
        let status = response.status().as_u16();
        match (status, body) {
            (200, Ok(body)) => Ok(body),
            // The header was here, so it was sent.
            (200, Err(e)) => Err(Failed::NoAnswer(format!("{}: {}", endpoint.url, in_words(&e)))),
            (status, body) => {
                let (code, text) = answers::error(&body.unwrap_or_default());
                let text = format!("{}: {text} (HTTP {status})", endpoint.url);
                match status {
                    400..=499 if status != 408 && status != 429 => Err(Failed::Refused(code, text)),
                    _ => Err(Failed::NoAnswer(text)),
                }
            }
        }
    }
}

impl Endpoint {
    fn said(&self) -> Option<u64> {
        *self.is_of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, cluster: Option<u64>) {
        *self.is_of.lock().unwrap_or_else(PoisonError::into_inner) = cluster;
    }
}

/// Checks that a page has keys of its range alone, in order: otherwise the next page could be the same again.
fn check_page(entries: &[Entry], from: &[u8], end: &[u8]) -> Result<(), String> {
    let keys = || entries.iter().map(|entry| entry.key.as_bytes());
    let in_range = keys().all(|key| from <= key && key < end);
    let in_order = keys().zip(keys().skip(1)).all(|(a, b)| a < b);
    match in_range && in_order && entries.len() <= PAGE_KEYS {
        true => Ok(()),
        false => Err("a list with other keys than those that were asked for".to_owned()),
    }
}

fn endpoint(url: &str, settings: &Settings) -> Result<Endpoint, Failure> {
    let url = url.trim_end_matches('/');
    let refuse = |why: &str| Err(Failure::Settings(format!("the endpoint {url:?} of etcd: {why}")));
    let host = match url.split_once("://") {
        Some(("https", _)) if settings.tls.is_none() => {
            return refuse("its certificates are missing: name their folder");
        }
        Some(("http", _)) if !settings.plain => {
            return refuse("without TLS only if that is allowed in so many words (plain)");
        }
        Some(("https" | "http", host)) => host,
        _ => return refuse("it is no address: write https://HOST:PORT"),
    };
    match host.rsplit_once(':') {
        Some((name, port))
            if !name.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0) =>
        {
            Ok(Endpoint { url: url.to_owned(), is_of: Mutex::new(None) })
        }
        _ => refuse("it has no port: write https://HOST:PORT"),
    }
}

fn agent(tls: Option<&TlsFiles>) -> Result<Agent, Failure> {
    let mut config = Agent::config_builder()
        .timeout_global(Some(CALL_TIME))
        .http_status_as_error(false)
        .max_redirects(0)
        .proxy(None)
        .max_idle_connections(0)
        .max_response_header_size(MAX_HEADER_BYTES);
    if let Some(TlsFiles(folder)) = tls {
        config = config.tls_config(certificates(folder)?);
    }
    Ok(config.build().new_agent())
}

fn certificates(folder: &Path) -> Result<TlsConfig, Failure> {
    let roots = chain(&folder.join("ca-cert.pem"))?;
    let (own, key) = (folder.join(OWN_CERTIFICATE), folder.join("client-key.pem"));
    let client = match own.exists() || key.exists() {
        true => Some(ClientCert::new_with_certs(&chain(&own)?, private_key(&key)?)),
        false => None,
    };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = TlsConfig::builder().root_certs(RootCerts::new_with_certs(&roots));
    Ok(config.client_cert(client).unversioned_rustls_crypto_provider(provider).build())
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path)
        .map_err(|e| Failure::Settings(format!("cannot read {}: {e}", path.display())))
}

fn chain(path: &Path) -> Result<Vec<Certificate<'static>>, Failure> {
    let mut all = Vec::new();
    for item in parse_pem(&read(path)?) {
        match item {
            Ok(PemItem::Certificate(certificate)) => all.push(certificate),
            Ok(_) => {}
            Err(e) => return Err(Failure::Settings(format!("{}: {e}", path.display()))),
        }
    }
    match all.is_empty() {
        true => Err(Failure::Settings(format!("{} has no certificate", path.display()))),
        false => Ok(all),
    }
}

fn private_key(path: &Path) -> Result<PrivateKey<'static>, Failure> {
    PrivateKey::from_pem(&read(path)?)
        .map_err(|e| Failure::Settings(format!("{} has no key: {e}", path.display())))
}

/// Whether nothing of a request can have reached the endpoint.
fn was_not_sent(e: &ureq::Error) -> bool {
    match e {
        ureq::Error::Io(e) => e.kind() == io::ErrorKind::ConnectionRefused,
        ureq::Error::Timeout(timeout) => matches!(timeout, Timeout::Resolve | Timeout::Connect),
        ureq::Error::HostNotFound | ureq::Error::ConnectionFailed | ureq::Error::BadUri(_) => true,
        // Of the handshake; later errors are of kind Io.
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => true,
        _ => false,
    }
}

fn in_words(e: &ureq::Error) -> String {
    match e {
        ureq::Error::Timeout(_) => format!("no answer within {} s", CALL_TIME.as_secs()),
        ureq::Error::BodyExceedsLimit(limit) => format!("an answer of more than {limit} bytes"),
        e => e.to_string(),
    }
}
