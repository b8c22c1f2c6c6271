//! Certificates and keys, from the files' bytes to what TLS needs.
//!
//! A session is never resumed: each client is asked for its certificate, so one that was revoked or whose signer was
//! taken out of `ca-cert.pem` has no way back.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_host::tunnel::{
    CA, CLIENT_CERTIFICATE, CLIENT_KEY, Files, REVOKED, SERVER_CERTIFICATE, SERVER_KEY,
};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime,
};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, ClientConfig, Error, RootCertStore, ServerConfig};

use crate::Fault;

/// The longest file. A chain of certificates has some thousand bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// How certificates are made.
const MANUAL: &str = "docs/access.md says how to make it";

/// The bytes of the files.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct Contents(Vec<(&'static str, Vec<u8>)>);

impl Contents {
    /// Reads files that were just opened.
    pub(crate) fn read(files: &Files) -> Result<Contents, Fault> {
        let read = |(name, file): (&'static str, &File)| {
            let mut bytes = Vec::new();
            // Each was opened for this, and `lseek` is no call of a tunnel's.
            let done = file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes);
            done.map_err(|e| Fault::new(name, e, "check the storage of that file"))?;
            if bytes.len() as u64 > MAX_FILE_BYTES {
                return Err(Fault::new(name, "it has more than 1 MiB", MANUAL));
            }
            Ok((name, bytes))
        };
        Ok(Contents(files.iter().map(read).collect::<Result<_, _>>()?))
    }

    fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(other, _)| *other == name).map(|(_, bytes)| bytes.as_slice())
    }

    /// The certificates of a file, at least one. Without the file there are none.
    fn certificates(&self, name: &str) -> Result<Vec<CertificateDer<'static>>, Fault> {
        let Some(bytes) = self.get(name) else { return Ok(Vec::new()) };
        let all = CertificateDer::pem_slice_iter(bytes).collect::<Result<Vec<_>, _>>();
        let all = all.map_err(|e| no_pem(name, &e))?;
        match all.is_empty() {
            true => Err(Fault::new(name, "there is no certificate in it", MANUAL)),
            false => Ok(all),
        }
    }

    fn key(&self, name: &str) -> Result<PrivateKeyDer<'static>, Fault> {
        let bytes = self.get(name).unwrap_or_default();
        PrivateKeyDer::from_pem_slice(bytes).map_err(|e| match e {
            pem::Error::NoItemsFound => Fault::new(
                name,
                "there is no key in it, or one with a passphrase",
                "store the key without a passphrase, readable by its owner only",
            ),
            e => no_pem(name, &e),
        })
    }

    fn roots(&self) -> Result<RootCertStore, Fault> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates(CA)? {
            roots.add(certificate).map_err(|e| unfit(CA, &e))?;
        }
        Ok(roots)
    }

    fn revoked(&self) -> Result<Vec<CertificateRevocationListDer<'static>>, Fault> {
        let Some(bytes) = self.get(REVOKED) else { return Ok(Vec::new()) };
        let lists = CertificateRevocationListDer::pem_slice_iter(bytes);
        lists.collect::<Result<_, _>>().map_err(|e| no_pem(REVOKED, &e))
    }
}

fn no_pem(name: &str, e: &pem::Error) -> Fault {
    Fault::new(name, format!("it is no PEM file: {e:?}"), MANUAL)
}

fn unfit(name: &str, e: &Error) -> Fault {
    Fault::new(name, format!("it is not usable: {e}"), MANUAL)
}

/// Why a certificate and a key are not accepted together.
fn unfit_pair(certificate: &str, key: &str, e: &Error) -> Fault {
    match e {
        Error::InconsistentKeys(_) => Fault::new(
            key,
            format!("it is not the key of {certificate}"),
            format!("put the key here with which the request for {certificate} was made"),
        ),
        Error::General(_) => {
            Fault::new(key, e, "use a key of RSA, ECDSA P-256 or P-384, or Ed25519")
        }
        e => unfit(certificate, e),
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// A server's TLS settings for its clients. Unless it `verifies`, they need no certificates.
pub(crate) fn server(contents: &Contents, verifies: bool) -> Result<Arc<ServerConfig>, Fault> {
    let chain = contents.certificates(SERVER_CERTIFICATE)?;
    let key = contents.key(SERVER_KEY)?;
    let roots = contents.roots()?;
    check_own(&chain, &roots)?;
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| unfit(SERVER_CERTIFICATE, &e))?;
    let builder = match verifies {
        false => builder.with_no_client_auth(),
        true => {
            let mut verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider());
            let revoked = contents.revoked()?;
            if !revoked.is_empty() {
                // Only the signers in the list have said anything.
                verifier = verifier.with_crls(revoked).allow_unknown_revocation_status();
            }
            let verifier = verifier.build().map_err(|e| {
                let name = if contents.get(REVOKED).is_some() { REVOKED } else { CA };
                Fault::new(name, format!("it is not usable: {e}"), MANUAL)
            })?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(chain, key)
        .map_err(|e| unfit_pair(SERVER_CERTIFICATE, SERVER_KEY, &e))?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// Checks that a client's certificate is of one of these hosts, by its alternative names. Without hosts any is right.
pub(crate) fn check_peer(
    chain: Option<&[CertificateDer<'_>]>,
    peers: &[String],
) -> Result<(), Fault> {
    if peers.is_empty() {
        return Ok(());
    }
    let own = chain.and_then(<[_]>::first).and_then(|own| ParsedCertificate::try_from(own).ok());
    let is_of = |parsed: &ParsedCertificate<'_>, peer: &String| {
        ServerName::try_from(peer.as_str())
            .is_ok_and(|name| verify_server_name(parsed, &name).is_ok())
    };
    match own.is_some_and(|parsed| peers.iter().any(|peer| is_of(&parsed, peer))) {
        true => Ok(()),
        false => Err(Fault::new(
            "the client's certificate is refused",
            "its names (subjectAltName) are those of no host that may come",
            "add its host to from below [migration] in ferrite.toml, or use that host's certificate",
        )),
    }
}

/// Refuses a certificate of our own that each client would refuse. Clients, not this check, judge its signer.
fn check_own(chain: &[CertificateDer<'_>], roots: &RootCertStore) -> Result<(), Fault> {
    let checked = check_at(SERVER_CERTIFICATE, chain, roots, UnixTime::now())?;
    use CertificateError as E;
    match checked {
        Err(Error::InvalidCertificate(e)) => match e {
            E::Expired | E::ExpiredContext { .. } => Err(Fault::new(
                SERVER_CERTIFICATE,
                "it has expired",
                "renew it, or set the clock of this host",
            )),
            E::NotValidYet | E::NotValidYetContext { .. } => Err(Fault::new(
                SERVER_CERTIFICATE,
                "it is not valid yet",
                "set the clock of this host",
            )),
            E::InvalidPurpose | E::InvalidPurposeContext { .. } => Err(Fault::new(
                SERVER_CERTIFICATE,
                "it is not made for a server (its extended key usage)",
                "make it with the purpose serverAuth",
            )),
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// The verdict of clients on a server's certificate at this time.
fn check_at(
    name: &'static str,
    chain: &[CertificateDer<'_>],
    roots: &RootCertStore,
    at: UnixTime,
) -> Result<Result<(), Error>, Fault> {
    let Some((own, between)) = chain.split_first() else { return Ok(Ok(())) };
    let parsed = ParsedCertificate::try_from(own).map_err(|e| unfit(name, &e))?;
    let algorithms = provider().signature_verification_algorithms.all;
    Ok(verify_server_cert_signed_by_trust_anchor(&parsed, roots, between, at, algorithms))
}

/// A client's TLS settings for a server.
pub(crate) fn client(contents: &Contents) -> Result<Arc<ClientConfig>, Fault> {
    let roots = contents.roots()?;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|e| unfit(CA, &e))?
        .with_root_certificates(roots);
    let chain = contents.certificates(CLIENT_CERTIFICATE)?;
    let mut config = match chain.is_empty() {
        true => builder.with_no_client_auth(),
        false => builder
            .with_client_auth_cert(chain, contents.key(CLIENT_KEY)?)
            .map_err(|e| unfit_pair(CLIENT_CERTIFICATE, CLIENT_KEY, &e))?,
    };
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Checks that a folder has what a server needs. Unless it `verifies`, clients need no certificates.
///
/// # Errors
/// The file that is missing or unfit, why, and what to do.
pub fn check_server(folder: &Path, verifies: bool) -> Result<(), Fault> {
    let files = Files::of_server(folder, verifies).map_err(|e| missing(&e))?;
    server(&Contents::read(&files)?, verifies).map(drop).map_err(|fault| in_folder(folder, fault))
}

/// Checks that a folder has what a client needs.
///
/// # Errors
/// As [`check_server`].
pub fn check_client(folder: &Path) -> Result<(), Fault> {
    let files = Files::of_client(folder).map_err(|e| missing(&e))?;
    client(&Contents::read(&files)?).map(drop).map_err(|fault| in_folder(folder, fault))
}

/// The side whose certificate of a folder is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Clients connect to it.
    Server,
    /// It connects to servers.
    Client,
}

/// The name of a folder's certificate that will have expired when this time is over. `None`: it will not, or it
/// cannot be read.
pub fn expires_within(folder: &Path, side: Side, time: Duration) -> Option<&'static str> {
    let (files, name) = match side {
        Side::Server => (Files::of_server(folder, false), SERVER_CERTIFICATE),
        Side::Client => (Files::of_client(folder), CLIENT_CERTIFICATE),
    };
    let contents = Contents::read(&files.ok()?).ok()?;
    let (chain, roots) = (contents.certificates(name).ok()?, contents.roots().ok()?);
    let then = Duration::from_secs(UnixTime::now().as_secs()) + time;
    let checked = check_at(name, &chain, &roots, UnixTime::since_unix_epoch(then));
    let is_over = |e: &Error| {
        matches!(
            e,
            Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. }
            )
        )
    };
    checked.ok()?.is_err_and(|e| is_over(&e)).then_some(name)
}

fn missing(e: &std::io::Error) -> Fault {
    let help = "give --tls the folder of ca-cert.pem, server-cert.pem and server-key.pem; \
                docs/access.md says how to make them";
    Fault::new("a file for TLS cannot be opened", e, help)
}

fn in_folder(folder: &Path, fault: Fault) -> Fault {
    Fault { what: folder.join(&fault.what).display().to_string(), ..fault }
}
