//! Programs of others that have TLS 1.2 only, or that ask for each option and each error.

use std::fs::{self, File};
use std::process::Command;

use ferrite_testkit::bytes;
use ferrite_testkit::programs::{installed, peer};

use crate::tls::{Export, Outward, Peer, Pki, ferrite, ok};

/// GnuTLS's words for all but TLS 1.3.
const OLDER: &str = "NORMAL:-VERS-TLS1.3";

#[test]
fn programs_with_tls_1_2_only_are_served_and_serve() {
    let Some(pki) = Pki::new() else { return };
    let export = Export::new(&pki, &[]);
    let data = pki.path("data");
    let bytes = bytes::runs(8 << 20, 509, |n| (n * 5 + 1) as u8);
    fs::write(&data, &bytes).unwrap();
    let credentials = |end: &str, folder: &str| {
        let folder = pki.path(folder);
        let folder = folder.display();
        format!("tls-creds-x509,id=t,endpoint={end},dir={folder},verify-peer=yes,priority={OLDER}")
    };
    let object = credentials("client", "client");
    let disk = format!("driver=nbd,host=localhost,port={},tls-creds=t", export.port);
    let into = ["convert", "-n", "--object", &object, "-f", "raw", data.to_str().unwrap()];
    if peer("qemu-img", &[&into[..], &["--target-image-opts", &disk]].concat()).is_none() {
        return;
    }
    let copy = pki.path("copy");
    let from = ["convert", "--object", &object, "--image-opts", &disk, "-O", "raw"];
    peer("qemu-img", &[&from[..], &[copy.to_str().unwrap()]].concat());
    assert_eq!(fs::read(&copy).unwrap()[..bytes.len()], bytes);
    let object = credentials("server", "server");
    let image = pki.path("theirs.raw");
    File::create_new(&image).unwrap().set_len(8 << 20).unwrap();
    let args = ["--object", &object, "--tls-creds", "t", "-p", "PORT", "-t", "-f", "raw"];
    let args = [&args[..], &[image.to_str().unwrap()]].concat();
    let Some(server) = Peer::start("qemu-nbd", &args) else { return };
    let mut outward = Outward::to(&pki, "client", "localhost", server.1);
    assert_eq!(outward.client.go(true).0, 8 << 20);
    outward.client.write(0, &bytes);
    assert!(outward.client.read(0, bytes.len() as u32) == bytes);
}

/// What libnbd's shell asks, in clear and by TLS: `URI` and `TLS` are set.
const SCRIPT: &str = r#"
import errno, os
uri, tls = os.environ["URI"], os.environ["TLS"] == "yes"
SIZE = 64 << 20

def new(flags=0):
    n = nbd.NBD()
    n.set_uri_allow_local_file(True)
    n.set_strict_mode(flags)
    return n

def fails(code, what, *args):
    try:
        what(*args)
    except nbd.Error as e:
        assert e.errnum == code, (what, args[:2], e.string)
        return
    raise AssertionError(("no error", what, args[:2]))

# Options.
n = new()
n.set_opt_mode(True)
n.set_request_structured_replies(True)
n.add_meta_context("base:allocation")
n.connect_uri(uri)
assert n.aio_is_negotiating() and n.get_tls_negotiated() == tls
assert n.get_structured_replies_negotiated() and n.get_protocol() == "newstyle-fixed"
names = []
n.opt_list(lambda name, text: names.append(name))
contexts = []
n.opt_list_meta_context(lambda name: contexts.append(name))
assert "base:allocation" in contexts, contexts
n.set_export_name("there is none of this name")
fails(errno.ENOENT, n.opt_info)
fails(errno.ENOENT, n.opt_go)
n.set_export_name("")
n.opt_info()
assert n.get_size() == SIZE
n.opt_go()
assert n.aio_is_ready() and n.get_size() == SIZE and not n.is_read_only()
assert n.can_flush() and n.can_fua() and n.can_trim() and n.can_zero() and n.can_multi_conn()
assert n.can_meta_context("base:allocation")
assert n.get_block_size(nbd.SIZE_MINIMUM) == 1 and n.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20

# Requests.
data = os.urandom(3 << 20)
n.pwrite(data, 12345, nbd.CMD_FLAG_FUA)
assert n.pread(len(data), 12345) == data
pieces = []
got = n.pread_structured(len(data), 12345, lambda piece, at, kind, error: pieces.append(len(piece)))
assert got == data and sum(pieces) == len(data)
n.zero(1 << 20, 1 << 20)
n.zero(4096, 0, nbd.CMD_FLAG_NO_HOLE)
n.trim(1 << 20, 2 << 20)
n.flush()
assert n.pread(1 << 20, 1 << 20) == bytes(1 << 20)
extents = []
n.block_status(SIZE, 0, lambda name, at, entries, error: extents.extend(entries))
assert sum(extents[::2]) <= SIZE and len(extents) >= 2
extents.clear()
n.block_status(SIZE, 0, lambda name, at, entries, error: extents.extend(entries), nbd.CMD_FLAG_REQ_ONE)
assert len(extents) == 2

# Errors, and the connection goes on behind each.
fails(errno.EINVAL, n.pread, 4096, SIZE - 1)
fails(errno.EINVAL, n.pread, 4096, 1 << 62)
fails(errno.ENOSPC, n.pwrite, bytes(4096), SIZE - 1)
fails(errno.ENOSPC, n.zero, 4096, SIZE)
fails(errno.EINVAL, n.trim, 4096, SIZE)
fails(errno.EINVAL, n.block_status, 4096, SIZE, lambda *rest: 0)
fails(errno.EINVAL, n.pread, (32 << 20) + 1, 0)
fails(errno.EINVAL, n.pwrite, bytes((32 << 20) + 1), 0)
fails(errno.EINVAL, n.pwrite, bytes(512), 0, 1 << 9)
fails(errno.EINVAL, n.trim, 0, 0)
assert n.pread(4096, 12345) == data[:4096]
n.shutdown()

# The end before an export is chosen.
n = new()
n.set_opt_mode(True)
n.connect_uri(uri)
n.opt_abort()

# Without structured replies there are no contexts.
n = new()
n.set_request_structured_replies(False)
n.connect_uri(uri)
assert not n.get_structured_replies_negotiated() and n.pread(512, 5 << 20) == bytes(512)
fails(errno.EINVAL, n.block_status, 4096, 0, lambda *rest: 0)
n.shutdown()
print("all of it was asked")
"#;

#[test]
fn each_option_and_error_is_as_libnbd_has_it_in_clear_and_by_tls() {
    let Some(pki) = Pki::new() else { return };
    let script = pki.path("script.py");
    fs::write(&script, SCRIPT).unwrap();
    let image = pki.path("plain.qcow2");
    ok(&mut ferrite(&["image", "create", image.to_str().unwrap(), "64M"]));
    let plain = ["export", "nbd", image.to_str().unwrap(), "--plain", "--listen", "127.0.0.1:0"];
    let plain = Export::of(ferrite(&plain));
    let by_tls = Export::new(&pki, &[]);
    let in_clear = format!("nbd://localhost:{}/", plain.port);
    for (uri, tls) in [(in_clear, "no"), (by_tls.uri(&pki, "localhost", "client"), "yes")] {
        // The system's Python has the module.
        let mut shell = Command::new("nbdsh");
        shell.env("PATH", "/usr/bin:/bin").env("URI", uri).env("TLS", tls).args(["-c", "-"]);
        shell.stdin(File::open(&script).unwrap());
        let Some(output) = installed("nbdsh", shell.output()) else { return };
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("all of it"), "tls {tls}: {output:?}");
    }
    assert!(plain.end() && by_tls.end());
    ok(&mut ferrite(&["image", "check", image.to_str().unwrap()]));
}
