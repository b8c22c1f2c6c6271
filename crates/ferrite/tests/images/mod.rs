//! A directory with images, and helpers that run programs in it.

// Each test program uses some of it.
#![allow(dead_code)]

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, PoisonError, RwLock};

use ferrite_disk::{Disk, ImageName, OpenOptions, Session};
use ferrite_io::engines::{EngineChoice, test_engine};
use ferrite_testkit::programs::installed;
use tempfile::TempDir;

pub(crate) const MIB: u64 = 1 << 20;

/// A process that another test has forked holds the locks of this one's images until it executes its program.
static FORKS: RwLock<()> = RwLock::new(());

/// See the module text.
pub(crate) struct Place(TempDir);

impl Place {
    pub(crate) fn new() -> Place {
        Place(TempDir::new().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// Runs `ferrite image` in the directory.
    pub(crate) fn image(&self, args: &[&str]) -> Output {
        Place::output(self.command(args))
    }

    /// Runs `ferrite store` in the directory.
    pub(crate) fn store(&self, args: &[&str]) -> Output {
        Place::output(self.command_of("store", args))
    }

    /// Runs `ferrite backup` in the directory.
    pub(crate) fn backup(&self, args: &[&str]) -> Output {
        Place::output(self.command_of("backup", args))
    }

    /// Runs `ferrite backup`, which has to succeed without output on standard error; returns standard output.
    #[track_caller]
    pub(crate) fn backup_ok(&self, args: &[&str]) -> String {
        Place::worked(self.backup(args), args)
    }

    /// Runs `ferrite backup`, which has to fail with this code and two lines.
    #[track_caller]
    pub(crate) fn backup_fails(&self, code: i32, args: &[&str]) -> String {
        Place::failed(self.backup(args), code, args)
    }

    fn output(mut command: Command) -> Output {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let spawned = {
            let _no_image_is_open = FORKS.read().unwrap_or_else(PoisonError::into_inner);
            command.spawn()
        };
        spawned.and_then(Child::wait_with_output).expect("ferrite runs")
    }

    /// `ferrite image` in the directory, on the engine of the tests.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        self.command_of("image", args)
    }

    /// `ferrite image`, `ferrite store` or `ferrite backup` in the directory.
    pub(crate) fn command_of(&self, of: &str, args: &[&str]) -> Command {
        let mut command = listening();
        command.args([of, "--engine", &engine()]).args(args);
        command.current_dir(self.0.path()).env_remove("RUST_LOG");
        // Independent of this host's configuration.
        command.env("FERRITE_PARENTS_FILE", self.0.path().join("no-list"));
        command
    }

    /// Runs `ferrite image`, which has to succeed without output on standard error; returns standard output.
    #[track_caller]
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        Place::worked(self.image(args), args)
    }

    /// Runs `ferrite store`, which has to succeed without output on standard error; returns standard output.
    #[track_caller]
    pub(crate) fn store_ok(&self, args: &[&str]) -> String {
        Place::worked(self.store(args), args)
    }

    #[track_caller]
    fn worked(output: Output, args: &[&str]) -> String {
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && text.is_empty(), "{args:?}: {text}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `ferrite image`, which has to fail with this code and two lines.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, args: &[&str]) -> String {
        Place::failed(self.image(args), code, args)
    }

    /// Runs `ferrite store`, which has to fail with this code and two lines.
    #[track_caller]
    pub(crate) fn store_fails(&self, code: i32, args: &[&str]) -> String {
        Place::failed(self.store(args), code, args)
    }

    #[track_caller]
    fn failed(output: Output, code: i32, args: &[&str]) -> String {
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {text}");
        let lines: Vec<&str> = text.lines().collect();
        let form = [lines.first(), lines.last()].map(|line| line.copied().unwrap_or_default());
        assert!(form[0].starts_with("ferrite: ") && form[1].starts_with("help: "), "{text}");
        text
    }

    /// A file of that length with nonzero bytes in these ranges (offset, length).
    pub(crate) fn pattern(&self, name: &str, len: u64, ranges: &[(u64, u64)]) {
        let _ = fs::remove_file(self.path(name));
        let mut file = File::create(self.path(name)).unwrap();
        file.set_len(len).unwrap();
        for (offset, len) in ranges {
            file.seek(SeekFrom::Start(*offset)).unwrap();
            file.write_all(&bytes(*offset, *len)).unwrap();
        }
    }

    /// Writes that pattern into an image, as a guest would.
    pub(crate) fn write(&self, name: &str, ranges: &[(u64, u64)]) {
        let _nobody_forks = FORKS.write().unwrap_or_else(PoisonError::into_inner);
        let path = ImageName::parse(&self.path(name)).unwrap();
        let disk = Disk::open_image(&path, &OpenOptions::default()).unwrap();
        let mut session =
            Session::new(Arc::new(disk), |arena| test_engine().open(arena, 8)).unwrap();
        for (offset, len) in ranges {
            for at in (0..*len).step_by(64 << 10) {
                let len = (len - at).min(64 << 10);
                session.write(offset + at, &bytes(offset + at, len)).unwrap();
            }
        }
        session.close().unwrap();
    }

    /// Whether two files have the same bytes.
    pub(crate) fn same(&self, a: &str, b: &str) -> bool {
        let open = |name| File::open(self.path(name)).unwrap();
        let (mut a, mut b) = (open(a), open(b));
        let (mut x, mut y) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        loop {
            let n = a.read(&mut x).unwrap();
            if n == 0 {
                return b.read(&mut y).unwrap() == 0;
            }
            if b.read_exact(&mut y[..n]).is_err() || x[..n] != y[..n] {
                return false;
            }
        }
    }

    /// Checks that no temporary file is left.
    #[track_caller]
    pub(crate) fn has_no_leftovers(&self) {
        for entry in fs::read_dir(self.0.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(!name.contains("ferrite-new") && !name.contains("partial"), "{name}");
        }
    }
}

/// `ferrite` without ignored signals, which it may inherit from the tests (nohup).
pub(crate) fn listening() -> Command {
    let mut command = Command::new("env");
    command.args(["--default-signal=HUP,INT,TERM", env!("CARGO_BIN_EXE_ferrite")]);
    command
}

/// The value of the option `--engine`.
pub(crate) fn engine() -> String {
    EngineChoice::Only(test_engine()).to_string()
}

fn bytes(offset: u64, len: u64) -> Vec<u8> {
    let period: Vec<u8> = (1..=251).collect();
    ferrite_testkit::bytes::again(&period, offset as usize, len as usize)
}

/// Writes the state file of an interrupted conversion of one file.
pub(crate) fn note(
    path: &str,
    meta: &fs::Metadata,
    format: &str,
    virtual_bytes: u64,
    done_bytes: u64,
) -> serde_json::Value {
    let modified_ns = meta.mtime() * 1_000_000_000 + meta.mtime_nsec();
    serde_json::json!({
        "sources": [{
            "path": fs::canonicalize(path).unwrap(),
            "file_bytes": meta.len(),
            "modified_ns": modified_ns,
            "inode": meta.ino(),
        }],
        "journal": false,
        "format": format,
        "virtual_bytes": virtual_bytes,
        "done_bytes": done_bytes,
    })
}

pub(crate) fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap()
}

/// The output of `qemu-img`; `None` if it is not installed.
#[track_caller]
pub(crate) fn qemu_img(args: &[&str]) -> Option<String> {
    let output = installed("qemu-img", Command::new("qemu-img").args(args).output())?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}
