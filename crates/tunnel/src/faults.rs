//! Errors of TLS, in words that name the next step.

use ferrite_host::tunnel::{CA, CLIENT_CERTIFICATE, CLIENT_KEY, SERVER_CERTIFICATE};
use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error};

use crate::Fault;

/// The most characters that a certificate's names take of a line.
const MAX_NAMES: usize = 200;

/// The other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Client,
    Server,
}

impl Peer {
    fn name(self) -> &'static str {
        match self {
            Peer::Client => "client",
            Peer::Server => "server",
        }
    }

    /// The file that holds its certificate.
    fn certificate(self) -> &'static str {
        match self {
            Peer::Client => CLIENT_CERTIFICATE,
            Peer::Server => SERVER_CERTIFICATE,
        }
    }

    fn other(self) -> Peer {
        match self {
            Peer::Client => Peer::Server,
            Peer::Server => Peer::Client,
        }
    }
}

/// Why TLS has failed with this peer.
pub(crate) fn fault(e: &Error, peer: Peer) -> Fault {
    let name = peer.name();
    match e {
        Error::InvalidCertificate(e) => certificate(e, peer),
        Error::AlertReceived(alert) => alerted(*alert, peer),
        Error::NoCertificatesPresented => Fault::new(
            format!("the {name} has no certificate"),
            format!("this server wants one that was signed by one of its {CA}"),
            format!(
                "give it {CLIENT_CERTIFICATE} and {CLIENT_KEY} of that CA, or start the server with --tls-any-client"
            ),
        ),
        Error::PeerIncompatible(e) => Fault::new(
            format!("the {name} speaks another TLS"),
            one_line(&format!("{e:?}")),
            "it needs TLS 1.2 or 1.3 with usual ciphers: use a newer program there",
        ),
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } => Fault::new(
            format!("the {name} does not speak TLS after STARTTLS"),
            one_line(&e.to_string()),
            "check that it is a program of NBD with TLS",
        ),
        _ => Fault::new(
            format!("TLS with the {name} has failed"),
            one_line(&e.to_string()),
            "check that program, and the network between",
        ),
    }
}

/// The error of the peer's certificate.
fn certificate(e: &CertificateError, peer: Peer) -> Fault {
    use CertificateError as E;
    let (name, file) = (peer.name(), peer.certificate());
    let what = format!("the {name}'s certificate is refused");
    match e {
        E::Expired => Fault::new(what, "it has expired", format!("renew {file} there")),
        E::ExpiredContext { time, not_after } => {
            let why = format!("it has expired {} ago", between(*not_after, *time));
            Fault::new(what, why, format!("renew {file} there, or set the clocks"))
        }
        E::NotValidYet => Fault::new(what, "it is not valid yet", "set the clocks of both hosts"),
        E::NotValidYetContext { time, not_before } => {
            let why = format!("it is valid in {} only", between(*time, *not_before));
            Fault::new(what, why, "set the clocks of both hosts")
        }
        E::Revoked => Fault::new(
            what,
            "its signer has revoked it (ca-crl.pem)",
            format!("make a new {file} for that {name}"),
        ),
        E::UnknownIssuer => Fault::new(
            what,
            format!("it was signed by an authority whose certificate is not in our {CA}"),
            format!("sign {file} there with that CA, or add its own CA's certificate to our {CA}"),
        ),
        E::NotValidForName => {
            Fault::new(what, "it is of another host", "use the name that is in the certificate")
        }
        E::NotValidForNameContext { expected, presented } => Fault::new(
            what,
            format!(
                "it is of {} and not of {}",
                one_line(&presented.join(", ")),
                one_line(&expected.to_str())
            ),
            format!("use a name that is in the certificate, or make {file} with this one"),
        ),
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => Fault::new(
            what,
            format!("it is not made for a {name} (its extended key usage)"),
            format!("make {file} with the purpose {name}Auth"),
        ),
        E::BadSignature => Fault::new(
            what,
            format!("a signature of it is false, as of another key than the one in {CA}"),
            format!("sign {file} there again, and copy {CA} from the host that has signed it"),
        ),
        _ => Fault::new(
            what,
            one_line(&e.to_string()),
            format!("make a new {file} (X.509 version 3, RSA or ECDSA with SHA-256)"),
        ),
    }
}

/// Why the peer has ended TLS.
fn alerted(alert: AlertDescription, peer: Peer) -> Fault {
    use AlertDescription as A;
    let (name, ours) = (peer.name(), peer.other().certificate());
    let what = format!("the {name} refuses our certificate");
    match alert {
        A::CertificateRequired | A::NoCertificate => Fault::new(
            format!("the {name} wants a certificate"),
            "we have sent none",
            format!("put {CLIENT_CERTIFICATE} and {CLIENT_KEY} beside {CA}"),
        ),
        A::UnknownCA => Fault::new(
            what,
            format!("it does not know who has signed {ours}"),
            format!("copy the certificate of that CA to its {CA}"),
        ),
        A::CertificateExpired => {
            Fault::new(what, "it has expired", format!("renew {ours}, or set the clocks"))
        }
        A::CertificateRevoked => {
            Fault::new(what, "it has been revoked", format!("make a new {ours}"))
        }
        A::BadCertificate | A::CertificateUnknown | A::UnsupportedCertificate | A::AccessDenied => {
            Fault::new(
                what,
                format!("it says {alert:?}"),
                format!("check {ours}: its names, its dates, and that the {name} has its CA"),
            )
        }
        A::ProtocolVersion | A::HandshakeFailure | A::InsufficientSecurity => Fault::new(
            format!("the {name} speaks another TLS"),
            format!("it says {alert:?}"),
            "it needs TLS 1.2 or 1.3 with usual ciphers: use a newer program there",
        ),
        _ => Fault::new(
            format!("the {name} has ended TLS"),
            format!("it says {alert:?}"),
            format!("see what that {name} logs"),
        ),
    }
}

/// The time between two moments, in words.
fn between(from: UnixTime, to: UnixTime) -> String {
    let seconds = to.as_secs().saturating_sub(from.as_secs());
    match seconds {
        0..7200 => format!("{} minutes", seconds / 60),
        7200..172_800 => format!("{} hours", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// Text of the other side for one line of the log: bounded, and without control characters.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().take(MAX_NAMES).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_of_a_certificate_says_what_why_and_what_to_do() {
        let time = |seconds| UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
        let expired = CertificateError::ExpiredContext { time: time(864_000), not_after: time(0) };
        let text = fault(&Error::InvalidCertificate(expired), Peer::Client).to_string();
        assert_eq!(
            text,
            "the client's certificate is refused: it has expired 10 days ago; renew client-cert.pem there, or set \
             the clocks"
        );
        let text = fault(&Error::AlertReceived(AlertDescription::UnknownCA), Peer::Client);
        assert!(text.to_string().contains("who has signed server-cert.pem"), "{text}");
    }

    #[test]
    fn what_a_certificate_says_stays_on_one_short_line() {
        let text = one_line(&format!("a\nb\u{1b}[31m{}", "x".repeat(10_000)));
        assert!(text.starts_with("a b [31mx") && text.chars().count() == MAX_NAMES);
    }
}
