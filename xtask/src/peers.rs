//! Programs of others against `ferrite export nbd`: what is installed of them, on a disk of each kind.
//!
//! Each check is a script with a new export. It has `$URI` and `$SOCKET`, `$DATA` (random bytes, a number that is no
//! multiple of 512), and a folder of its own. By TLS there is no socket, and `$CERTIFICATES` is the folder of a client.

use std::fs::{self, File};
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::outcome::{Outcome, check};
use crate::programs::{Programs, run_each};
use ferrite_xenhost::certificates;
use ferrite_xenhost::packages::find;
use ferrite_xenhost::steps::{fresh_log, run_logged, say};

/// Bytes of `$DATA`.
const DATA_BYTES: u64 = (9 << 20) + 1234;
/// The longest start or end of an export.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest script, in seconds.
const LIMIT_S: &str = "300";
/// The disks that are exported: file names, of which the last part is the format, and whether it is by TLS.
const DISKS: [(&str, bool); 3] = [("disk.img", false), ("disk.qcow2", false), ("tls.qcow2", true)];

/// A check.
struct Peer {
    name: &'static str,
    /// Whether it is done by a socket of this host, by TLS, or both.
    ways: Ways,
    /// The commands and files that it needs.
    needs: &'static [&'static str],
    script: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ways {
    Socket,
    Tls,
    Both,
}

impl Ways {
    fn has(self, by_tls: bool) -> bool {
        self == Ways::Both || by_tls == (self == Ways::Tls)
    }
}

/// Copies `$DATA` through a filter of nbdkit and back past it, and the other way round.
macro_rules! filter {
    ($filter:literal, $options:literal) => {
        Peer {
            name: concat!("nbdkit-", $filter),
            ways: Ways::Socket,
            needs: &["nbdkit", "nbdcopy", concat!("nbdkit:", $filter)],
            script: concat!(
                "through() { nbdkit --exit-with-parent -U - --filter=",
                $filter,
                " nbd uri=\"$URI\" ",
                $options,
                " --run \"$1\"; }\n",
                "through 'nbdcopy \"$DATA\" \"$uri\"'\n",
                "nbdcopy \"$URI\" past\n",
                "cmp -n $(stat -c %s \"$DATA\") \"$DATA\" past\n",
                "through 'nbdcopy \"$uri\" through'\n",
                "cmp past through\n",
            ),
        }
    };
}

const PEERS: &[Peer] = &[
    Peer {
        name: "nbdinfo",
        ways: Ways::Both,
        needs: &["nbdinfo"],
        script: r#"
            nbdinfo "$URI"
            nbdinfo --json "$URI" > info.json
            nbdinfo --list "$URI"
            test "$(nbdinfo --size "$URI")" = 67108864
            nbdinfo --map "$URI"
            nbdinfo --map --totals "$URI"
            for can in connect flush fua multi-conn structured-reply trim zero write; do nbdinfo --can $can "$URI"; done
            tls=false
            if test -n "${CERTIFICATES-}"; then tls=true; fi
            grep -q "\"TLS\": $tls" info.json
        "#,
    },
    Peer {
        name: "nbdcopy",
        ways: Ways::Both,
        needs: &["nbdcopy"],
        script: r#"
            bytes=$(stat -c %s "$DATA")
            for options in "" "--synchronous" "--connections=8 --requests=64" "--request-size=4096" "--allocated --flush"
            do
                nbdcopy $options "$DATA" "$URI"
                nbdcopy $options "$URI" copy
                cmp -n $bytes "$DATA" copy
                nbdcopy - "$URI" < "$DATA"
                nbdcopy "$URI" - > copy
                cmp -n $bytes "$DATA" copy
            done
        "#,
    },
    Peer {
        name: "nbdsh",
        ways: Ways::Both,
        needs: &["nbdsh", "/usr/lib/python3/dist-packages/nbd.py"],
        script: r#"
            cat > model.py <<'END'
import random
random.seed(1)
size = 1 << 20
h.zero(size, 0)
model = bytearray(size)
for step in range(3000):
    at = random.randrange(size)
    n = random.randrange(1, min(size - at, 5000 if step % 20 else 200000) + 1)
    what = random.randrange(4)
    if what == 0:
        assert h.pread(n, at) == model[at:at + n], (step, at, n)
    elif what == 1:
        h.zero(n, at, random.choice([0, nbd.CMD_FLAG_NO_HOLE]))
        model[at:at + n] = bytes(n)
    else:
        data = random.randbytes(n)
        h.pwrite(data, at, random.choice([0, 0, nbd.CMD_FLAG_FUA]))
        model[at:at + n] = data
h.flush()
assert h.pread(size, 0) == model
END
            # The system's Python has the module.
            PATH=/usr/bin:/bin nbdsh -c "import os; h.set_uri_allow_local_file(True); h.connect_uri(os.environ['URI'])" \
                -c - < model.py
        "#,
    },
    Peer {
        name: "nbdfuse",
        ways: Ways::Socket,
        needs: &["nbdfuse", "/dev/fuse"],
        script: r#"
            touch file
            nbdfuse -P pid file "$URI" &
            for i in $(seq 100); do test -s pid && break; sleep 0.1; done
            trap 'umount file || fusermount3 -u file; wait' EXIT
            dd if="$DATA" of=file bs=5 count=999 conv=notrunc status=none
            cmp -n 4995 "$DATA" file
            dd if="$DATA" of=file bs=1234567 conv=notrunc status=none
            cmp -n $(stat -c %s "$DATA") "$DATA" file
        "#,
    },
    Peer {
        name: "fsx",
        ways: Ways::Socket,
        needs: &["fsx", "nbdfuse", "/dev/fuse"],
        script: r#"
            touch file
            nbdfuse -P pid file "$URI" &
            for i in $(seq 100); do test -s pid && break; sleep 0.1; done
            trap 'umount file || fusermount3 -u file; wait' EXIT
            fsx -N 3000 -l 67108864 -L -F -H -z -C -I file
        "#,
    },
    Peer {
        name: "fio",
        ways: Ways::Socket,
        needs: &["fio"],
        script: r#"
            if ! fio --enghelp=nbd > engine; then echo "fio has no engine for NBD"; exit 0; fi
            fio --name=bytes --ioengine=nbd --uri="$URI" --rw=write --bs=1237 --size=4m --iodepth=16 \
                --verify=crc32c --verify_fatal=1
            fio --name=blocks --ioengine=nbd --uri="$URI" --rw=randwrite --bs=4k --size=32m --iodepth=64 --numjobs=1 \
                --verify=crc32c --verify_fatal=1 --number_ios=4000
        "#,
    },
    Peer {
        name: "qemu-io",
        ways: Ways::Socket,
        needs: &["qemu-io"],
        script: r#"
            qemu-io -f raw "$URI" -c "write -P 7 5 11" -c "read -P 7 5 11" -c "read -P 0 0 5" -c "read -P 0 16 4000" \
                -c "write -P 8 1048575 70001" -c "read -P 8 1048575 70001" -c "write -z 1048577 65536" \
                -c "read -P 8 1048575 2" -c "read -P 0 1048577 65536" -c "discard 2M 1M" -c "aio_write -P 9 3M 1M" \
                -c "aio_write -P 10 4194303 1M" -c "aio_flush" -c "read -P 9 3M 1048575" -c "read -P 10 4194303 1M" \
                -c "flush" > said
            cat said
            if grep -iE "failed|error" said; then exit 1; fi
        "#,
    },
    Peer {
        name: "qemu-img",
        ways: Ways::Socket,
        needs: &["qemu-img"],
        script: r#"
            truncate -s 64M whole
            dd if="$DATA" of=whole conv=notrunc status=none
            qemu-img convert -n -f raw -O raw whole "$URI"
            qemu-img compare -f raw -F raw whole "$URI"
            qemu-img convert -f raw -O qcow2 -m 16 -W "$URI" copy.qcow2
            qemu-img compare -f qcow2 -F raw copy.qcow2 "$URI"
            qemu-img bench -f raw -t none -c 2000 -d 32 -s 1000 "$URI"
            qemu-img bench -f raw -t none -w -c 2000 -d 32 -s 1000 --pattern 3 "$URI"
        "#,
    },
    Peer {
        name: "qemu-nbd",
        ways: Ways::Socket,
        needs: &["qemu-nbd", "nbdcopy"],
        script: r#"
            qemu-nbd -f raw -k "$PWD/its.sock" --persistent --fork --pid-file=pid "$URI"
            trap 'kill $(cat pid)' EXIT
            nbdcopy "$DATA" "nbd+unix:///?socket=$PWD/its.sock"
            nbdcopy "$URI" past
            cmp -n $(stat -c %s "$DATA") "$DATA" past
        "#,
    },
    // fio's engine takes no certificates, so nbdkit is the client of TLS.
    Peer {
        name: "fio-through-nbdkit",
        ways: Ways::Tls,
        needs: &["fio", "nbdkit"],
        script: r#"
            if ! fio --enghelp=nbd > engine; then echo "fio has no engine for NBD"; exit 0; fi
            cat > load <<'END'
            fio --name=bytes --ioengine=nbd --uri="$uri" --rw=write --bs=1237 --size=4m --iodepth=16 \
                --verify=crc32c --verify_fatal=1
            fio --name=blocks --ioengine=nbd --uri="$uri" --rw=randwrite --bs=4k --size=32m --iodepth=64 --numjobs=1 \
                --verify=crc32c --verify_fatal=1 --number_ios=4000
END
            nbdkit --exit-with-parent -U - nbd hostname=localhost port="$PORT" tls=require \
                tls-certificates="$CERTIFICATES" --run 'export uri; bash -eu load'
        "#,
    },
    Peer {
        name: "qemu-img-1.2",
        ways: Ways::Tls,
        needs: &["qemu-img"],
        script: r#"
            truncate -s 64M whole
            dd if="$DATA" of=whole conv=notrunc status=none
            for priority in NORMAL NORMAL:-VERS-TLS1.3; do
                creds="tls-creds-x509,id=t,endpoint=client,dir=$CERTIFICATES,verify-peer=yes,priority=$priority"
                disk="driver=nbd,host=localhost,port=$PORT,tls-creds=t"
                qemu-img convert -n --object "$creds" -f raw whole --target-image-opts "$disk"
                qemu-img compare --object "$creds" --image-opts driver=raw,file.driver=file,file.filename=whole "$disk"
            done
        "#,
    },
    Peer {
        name: "filesystem",
        ways: Ways::Both,
        needs: &[
            "nbdfuse",
            "/dev/fuse",
            "/dev/loop-control",
            "losetup",
            "mkfs.ext4",
            "e2fsck",
            "unshare",
        ],
        script: r#"
            if test "$(id -u)" != 0; then echo "left out: it mounts, and this user is not root"; exit 0; fi
            cat > mounts <<'END'
            mkdir show files
            touch show/disk
            if test -n "${CERTIFICATES-}"; then
                # nbdfuse takes certificates only from where those of root are.
                mkdir etc
                cp -a /etc/. etc
                mkdir -p etc/pki
                rm -rf etc/pki/libnbd
                cp -r "$CERTIFICATES" etc/pki/libnbd
                mount --bind etc /etc
                URI=nbds://localhost:$PORT/
            fi
            nbdfuse -P pid show/disk "$URI" &
            for i in $(seq 100); do test -s pid && break; sleep 0.1; done
            loop=
            end() {
                umount files 2>&1 || true
                test -z "$loop" || losetup --detach "$loop"
                umount show/disk
                wait
            }
            trap end EXIT
            loop=$(losetup --find --show show/disk)
            mkfs.ext4 -q "$loop"
            mount "$loop" files
            cp "$DATA" files/one
            dd if="$DATA" of=files/two bs=1234567 status=none
            rm files/one
            cp "$DATA" files/three
            umount files
            e2fsck -f -n "$loop"
            mount "$loop" files
            cmp "$DATA" files/two
            cmp "$DATA" files/three
END
            unshare --mount bash -euo pipefail mounts
        "#,
    },
    // It fails unless the data that are written are there already.
    Peer {
        name: "nbdkit-checkwrite",
        ways: Ways::Socket,
        needs: &["nbdkit", "nbdcopy", "nbdkit:checkwrite"],
        script: r#"
            nbdcopy "$DATA" "$URI"
            nbdcopy "$URI" past
            nbdkit --exit-with-parent -U - --filter=checkwrite nbd uri="$URI" --run 'nbdcopy past "$uri"'
        "#,
    },
    filter!("blocksize", "minblock=4096 maxdata=64K"),
    filter!("cache", "cache=writethrough"),
    filter!("cacheextents", ""),
    filter!("fua", "fuamode=force"),
    filter!("multi-conn", "multi-conn-mode=emulate"),
    filter!("nocache", "cachemode=emulate"),
    filter!("noextents", ""),
    filter!("noparallel", ""),
    filter!("nozero", "zeromode=plugin"),
    filter!("offset", "offset=0"),
    filter!("readahead", ""),
    filter!("retry", ""),
    filter!("stats", "statsfile=stats"),
];

/// Runs all checks; each is added to `cases`. A program that is not installed is named, and is no failure.
///
/// # Errors
/// The number of checks that failed.
pub(crate) fn test(cases: &mut Vec<Outcome>) -> Result<()> {
    let programs = Programs::build(&["--test", "clients"])?;
    slow_clients(&programs)?;
    let ferrite = programs.binary("ferrite", "ferrite")?;
    // The path of a socket has at most 107 bytes.
    let dir = std::env::temp_dir().join(format!("ferrite-peers-{}", std::process::id()));
    fs::create_dir_all(&dir)?;
    let data = dir.join("data");
    let mut random = File::open("/dev/urandom")?.take(DATA_BYTES);
    std::io::copy(&mut random, &mut File::create(&data)?)?;
    let certificates = dir.join("certificates");
    certificates::make(&certificates)?;
    let given = Given { ferrite, data, certificates };
    let (mut ran, mut failed) = (0, 0);
    for peer in PEERS {
        let missing: Vec<_> = peer.needs.iter().filter(|need| !is_here(need)).copied().collect();
        if !missing.is_empty() {
            say(format!("{}: left out, not installed: {}", peer.name, missing.join(", ")));
            continue;
        }
        for (disk, by_tls) in DISKS.into_iter().filter(|(_, by_tls)| peer.ways.has(*by_tls)) {
            let name = format!("peers-{}-{disk}", peer.name);
            let outcome = check(&name, || given.in_export(&dir.join(&name), disk, by_tls, peer));
            failed += usize::from(outcome.failure.is_some());
            ran += 1;
            cases.push(outcome);
        }
    }
    fs::remove_dir_all(&dir)?;
    ensure!(ran > 0, "none of the programs is installed");
    ensure!(failed == 0, "{failed} of {ran} checks failed");
    Ok(())
}

/// The tests of clients by TLS that wait for the end of a handshake's time.
fn slow_clients(programs: &Programs) -> Result<()> {
    let all = |test: &mut Command| {
        test.arg("--ignored").env("FERRITE_TEST_REQUIRE_PEERS", "1");
    };
    run_each(programs.some("peers", "ferrite", &["clients"], &all)?, 1)
}

/// Whether there is a command, a file (a path), or a filter of nbdkit (`nbdkit:NAME`).
fn is_here(need: &str) -> bool {
    if let Some(filter) = need.strip_prefix("nbdkit:") {
        let mut ask = Command::new("nbdkit");
        let ask = ask.args([&format!("--filter={filter}"), "null", "--dump-plugin"]);
        return ask.output().is_ok_and(|output| output.status.success());
    }
    if need.starts_with('/') { Path::new(need).exists() } else { find(need).is_some() }
}

/// The arguments of all checks.
struct Given {
    ferrite: PathBuf,
    data: PathBuf,
    certificates: PathBuf,
}

impl Given {
    /// Runs a script in a new folder, with a new disk exported.
    fn in_export(&self, dir: &Path, disk: &str, by_tls: bool, peer: &Peer) -> Result<()> {
        fs::create_dir_all(dir)?;
        let (image, ferrite) = (dir.join(disk), &self.ferrite);
        let log = fresh_log(&format!("peers-{}-{disk}", peer.name))?;
        run_logged(Command::new(ferrite).args(["image", "create"]).arg(&image).arg("64M"), &log)?;
        let mut script = Command::new("timeout");
        script.args(["--kill-after=10", LIMIT_S, "bash", "-euo", "pipefail", "-c", peer.script]);
        let place = match by_tls {
            false => Place::Socket(dir.join("nbd.sock")),
            true => Place::Port(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port()),
        };
        let mut export = Export::start(ferrite, &image, &place, &self.certificates, &log)?;
        match &place {
            Place::Socket(socket) => {
                script.env("URI", format!("nbd+unix:///?socket={}", socket.display()));
                script.env("SOCKET", socket);
            }
            Place::Port(port) => {
                let folder = self.certificates.display();
                let uri = format!("nbds://localhost:{port}/?tls-certificates={folder}");
                script.env("URI", uri).env("PORT", port.to_string());
                script.env("CERTIFICATES", &self.certificates);
            }
        }
        run_logged(script.env("DATA", &self.data).current_dir(dir), &log)?;
        export.end()?;
        run_logged(Command::new(ferrite).args(["image", "check"]).arg(&image), &log)?;
        Ok(fs::remove_dir_all(dir)?)
    }
}

/// Where an export listens.
enum Place {
    Socket(PathBuf),
    /// By TLS.
    Port(u16),
}

impl Place {
    fn listens(&self) -> bool {
        match self {
            Place::Socket(path) => {
                fs::symlink_metadata(path).is_ok_and(|there| there.file_type().is_socket())
            }
            Place::Port(port) => TcpStream::connect(("127.0.0.1", *port)).is_ok(),
        }
    }
}

/// A running export, killed when it is dropped.
struct Export(Child);

impl Export {
    fn start(
        ferrite: &Path,
        image: &Path,
        place: &Place,
        certificates: &Path,
        log: &Path,
    ) -> Result<Export> {
        let log = File::options().append(true).open(log)?;
        let mut command = Command::new(ferrite);
        command.args(["export", "nbd"]).arg(image);
        match place {
            Place::Socket(socket) => command.arg("--socket").arg(socket),
            Place::Port(port) => {
                let listen = format!("--listen=127.0.0.1:{port}");
                command.arg(listen).arg("--tls").arg(certificates)
            }
        };
        command.args(["--clients", "64"]).stdin(Stdio::null()).stderr(log);
        let mut export = Export(command.spawn()?);
        let began = Instant::now();
        while !place.listens() {
            if let Some(status) = export.0.try_wait()? {
                bail!("ferrite export has ended: {status}");
            }
            ensure!(began.elapsed() < PATIENCE, "ferrite export does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(export)
    }

    /// Ends it as a user does. It fails if writes were lost.
    fn end(&mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.0), Signal::TERM)?;
        let status = self.0.wait().context("ferrite export")?;
        ensure!(status.success(), "ferrite export has ended: {status}");
        Ok(())
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
