//! A pool by TLS: its etcd, and its servers through their tunnels.

mod pooled;
#[allow(dead_code, reason = "a module of several tests, not all of which use all")]
mod tls;

use pooled::peers::Servers;
use pooled::{Pool, pattern, write_file};
use tls::Pki;

const MIB: usize = 1 << 20;

#[test]
fn a_disk_is_on_servers_by_tls_and_who_has_no_certificate_gets_nothing() {
    let Some(pki) = Pki::new() else { return };
    let names = "IP:127.0.0.1,IP:127.0.0.2";
    pki.server("server", "ca", "365", names);
    // etcd is a client of itself.
    let more = [&format!("subjectAltName={names}"), "extendedKeyUsage=serverAuth,clientAuth"];
    pki.sign("etcd", "ca", "365", "server", &more);
    let file = |name: &str| pki.path(name).display().to_string();
    let (cert, key, ca) =
        (file("etcd/server-cert.pem"), file("etcd/server-key.pem"), file("ca/ca-cert.pem"));
    let options =
        ["--cert-file", &cert, "--key-file", &key, "--client-cert-auth", "--trusted-ca-file", &ca];
    let Some(etcd) = Servers::start_with("tls", 1, "https", &options) else { return };
    let mut pool = Pool::with(etcd, Some([file("server"), file("client")]), &["a", "b"]);
    let name = pool.create("web1", "16M", &[]);
    let data = pattern(16 * MIB, 7);
    let image = write_file(pool.dir.path(), "first", &data);
    pool.ok(&["image", "convert", "-n", &image, &name]);
    assert!(pool.copy("a") == data && pool.copy("b") == data, "a copy has something else");
    pool.kill("b");
    pool.ok(&["image", "compare", &image, &name]);
    // Certificates of another authority.
    pki.client("stranger", "other", "365");
    let table = std::fs::read_to_string(pool.config()).unwrap();
    std::fs::write(pool.config(), table.replace(&file("client"), &file("stranger"))).unwrap();
    let said = pool.refused(&["image", "info", &name]);
    assert!(said.contains("etcd"), "{said}");
}
