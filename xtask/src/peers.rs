//! Programs of others against `ferrite export nbd`: what is installed of them, on a disk of each kind.
//!
//! Each check is a script with a new export. It has `$URI` and `$SOCKET`, `$DATA` (random bytes, a number that is no
//! multiple of 512), and a folder of its own.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::outcome::{Outcome, check};
use crate::programs::Programs;
use ferrite_xenhost::packages::find;
use ferrite_xenhost::steps::{fresh_log, run_logged, say};

/// Bytes of `$DATA`.
const DATA_BYTES: u64 = (9 << 20) + 1234;
/// The longest start or end of an export.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest script, in seconds.
const LIMIT_S: &str = "300";
/// The disks that are exported: file names, of which the last part is the format.
const DISKS: [&str; 2] = ["disk.img", "disk.qcow2"];

/// A check.
struct Peer {
    name: &'static str,
    /// The commands and files that it needs.
    needs: &'static [&'static str],
    script: &'static str,
}

/// Copies `$DATA` through a filter of nbdkit and back past it, and the other way round.
macro_rules! filter {
    ($filter:literal, $options:literal) => {
        Peer {
            name: concat!("nbdkit-", $filter),
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
        needs: &["nbdinfo"],
        script: r#"
            nbdinfo "$URI"
            nbdinfo --json "$URI" > info.json
            nbdinfo --list "$URI"
            test "$(nbdinfo --size "$URI")" = 67108864
            nbdinfo --map "$URI"
            nbdinfo --map --totals "$URI"
            for can in connect flush fua multi-conn structured-reply trim zero write; do nbdinfo --can $can "$URI"; done
        "#,
    },
    Peer {
        name: "nbdcopy",
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
            PATH=/usr/bin:/bin nbdsh -u "$URI" -c - < model.py
        "#,
    },
    Peer {
        name: "nbdfuse",
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
        needs: &["qemu-nbd", "nbdcopy"],
        script: r#"
            qemu-nbd -f raw -k "$PWD/its.sock" --persistent --fork --pid-file=pid "$URI"
            trap 'kill $(cat pid)' EXIT
            nbdcopy "$DATA" "nbd+unix:///?socket=$PWD/its.sock"
            nbdcopy "$URI" past
            cmp -n $(stat -c %s "$DATA") "$DATA" past
        "#,
    },
    // It fails unless what is written is what is there.
    Peer {
        name: "nbdkit-checkwrite",
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

/// Runs all checks; each is added to `cases`. What is not installed is named, and is no failure.
///
/// # Errors
/// The number of checks that failed.
pub(crate) fn test(cases: &mut Vec<Outcome>) -> Result<()> {
    let ferrite = Programs::build(&["--test", "nbd_started"])?.binary("ferrite", "ferrite")?;
    // The path of a socket has at most 107 bytes.
    let dir = std::env::temp_dir().join(format!("ferrite-peers-{}", std::process::id()));
    fs::create_dir_all(&dir)?;
    let data = dir.join("data");
    let mut random = File::open("/dev/urandom")?.take(DATA_BYTES);
    std::io::copy(&mut random, &mut File::create(&data)?)?;
    let (mut ran, mut failed) = (0, 0);
    for peer in PEERS {
        let missing: Vec<_> = peer.needs.iter().filter(|need| !is_here(need)).copied().collect();
        if !missing.is_empty() {
            say(format!("{}: left out, not installed: {}", peer.name, missing.join(", ")));
            continue;
        }
        for disk in DISKS {
            let name = format!("peers-{}-{disk}", peer.name);
            let outcome = check(&name, || in_export(&ferrite, &dir.join(&name), disk, &data, peer));
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

/// Whether there is a command, a file (a path), or a filter of nbdkit (`nbdkit:NAME`).
fn is_here(need: &str) -> bool {
    if let Some(filter) = need.strip_prefix("nbdkit:") {
        let mut ask = Command::new("nbdkit");
        let ask = ask.args([&format!("--filter={filter}"), "null", "--dump-plugin"]);
        return ask.output().is_ok_and(|output| output.status.success());
    }
    if need.starts_with('/') { Path::new(need).exists() } else { find(need).is_some() }
}

/// Runs a script in a new folder, with a new disk exported.
fn in_export(ferrite: &Path, dir: &Path, disk: &str, data: &Path, peer: &Peer) -> Result<()> {
    fs::create_dir_all(dir)?;
    let (image, socket) = (dir.join(disk), dir.join("nbd.sock"));
    let log = fresh_log(&format!("peers-{}-{disk}", peer.name))?;
    run_logged(Command::new(ferrite).args(["image", "create"]).arg(&image).arg("64M"), &log)?;
    let mut export = Export::start(ferrite, &image, &socket, &log)?;
    let mut script = Command::new("timeout");
    script.args(["--kill-after=10", LIMIT_S, "bash", "-euo", "pipefail", "-c", peer.script]);
    script.env("URI", format!("nbd+unix:///?socket={}", socket.display()));
    script.env("SOCKET", &socket).env("DATA", data).current_dir(dir);
    run_logged(&mut script, &log)?;
    export.end()?;
    run_logged(Command::new(ferrite).args(["image", "check"]).arg(&image), &log)?;
    Ok(fs::remove_dir_all(dir)?)
}

/// A running export, killed when it is dropped.
struct Export(Child);

impl Export {
    fn start(ferrite: &Path, image: &Path, socket: &PathBuf, log: &Path) -> Result<Export> {
        let log = File::options().append(true).open(log)?;
        let mut command = Command::new(ferrite);
        command.args(["export", "nbd"]).arg(image).arg("--socket").arg(socket);
        command.args(["--clients", "64"]).stdin(Stdio::null()).stderr(log);
        let mut export = Export(command.spawn()?);
        let began = Instant::now();
        while !fs::symlink_metadata(socket).is_ok_and(|there| there.file_type().is_socket()) {
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
