//! The requests of a metrics client: `GET /metrics`, once per connection.

/// The most bytes of a request, up to its empty line.
pub(super) const MAX_HEAD: usize = 8 << 10;

/// The request of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Metrics,
    /// Another request: the status, and the text.
    Other(&'static str, &'static str),
}

/// The answer to clients beyond the limit.
pub(super) const BUSY: Asked = Asked::Other("503 Service Unavailable", "ask again in a second");
/// The answer to clients whose request is too long.
pub(super) const TOO_LONG: Asked =
    Asked::Other("431 Request Header Fields Too Large", "a request has at most 8 KiB");

/// Whether a request is complete: the line and the fields, then an empty line. Up to `seen` it was not.
pub(super) fn is_complete(head: &[u8], seen: usize) -> bool {
    let new = &head[seen.saturating_sub(3)..];
    let has = |end: &[u8]| new.windows(end.len()).any(|window| window == end);
    has(b"\r\n\r\n") || has(b"\n\n")
}

/// Parses a request's first line; its fields are ignored.
pub(super) fn understand(head: &[u8]) -> Asked {
    let bad = Asked::Other("400 Bad Request", "write GET /metrics HTTP/1.1");
    let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line.strip_suffix(b"\r").unwrap_or(line)) else {
        return bad;
    };
    let words: Vec<&str> = line.split(' ').collect();
    let [method, target, version] = words[..] else { return bad };
    if !version.starts_with("HTTP/1.") {
        return bad;
    }
    match (method, target.split('?').next()) {
        ("GET", Some("/metrics")) => Asked::Metrics,
        ("GET", _) => Asked::Other("404 Not Found", "metrics are at /metrics"),
        _ => Asked::Other("405 Method Not Allowed", "metrics are read by GET"),
    }
}

impl Asked {
    /// The answer up to its body, which ends with the connection.
    pub(super) fn head(self) -> String {
        let (status, content) = match self {
            Asked::Metrics => {
                ("200 OK", "application/openmetrics-text; version=1.0.0; charset=utf-8")
            }
            Asked::Other(status, _) => (status, "text/plain; charset=utf-8"),
        };
        let allow = if status.starts_with("405") { "Allow: GET\r\n" } else { "" };
        format!("HTTP/1.1 {status}\r\nContent-Type: {content}\r\n{allow}Connection: close\r\n\r\n")
    }

    /// A complete answer without metrics.
    pub(super) fn whole(self) -> String {
        match self {
            Asked::Metrics => self.head(),
            Asked::Other(_, text) => format!("{}{text}\n", self.head()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_metrics_are_there() {
        for (head, status) in [
            ("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "200 OK"),
            ("GET /metrics?x=1 HTTP/1.0\n\n", "200 OK"),
            ("GET / HTTP/1.1\r\n\r\n", "404 "),
            ("GET /metrics/../x HTTP/1.1\r\n\r\n", "404 "),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", "405 "),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405 "),
            ("GET /metrics\r\n\r\n", "400 "),
            ("GET /metrics HTTP/2\r\n\r\n", "400 "),
            ("GET  /metrics HTTP/1.1\r\n\r\n", "400 "),
            ("PRI * HTTP/2.0\r\n\r\n", "400 "),
            ("\r\n\r\n", "400 "),
        ] {
            assert!(is_complete(head.as_bytes(), 0), "{head}");
            let answer = understand(head.as_bytes()).whole();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{head}: {answer}");
            assert_eq!(answer.contains("Allow: GET"), status == "405 ", "{head}");
        }
        assert_eq!(understand(b"GET /\xff HTTP/1.1\r\n\r\n").whole()[..12], *"HTTP/1.1 400");
        let head = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
        assert!(!is_complete(&head[..head.len() - 1], 0));
        assert!((0..head.len()).all(|seen| is_complete(head, seen)));
    }
}
