//! A store, and the processes that serve it.

// Each test program uses some of it.
#![allow(dead_code)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use ferrite_testkit::nbd::Client;
use rustix::process::{Pid, Signal, kill_process};

use super::images::Place;

/// An export, which is killed when this is dropped, and its log.
pub(crate) struct Owner(pub(crate) Child, Arc<Mutex<String>>);

impl Owner {
    pub(crate) fn log(&self) -> String {
        self.1.lock().unwrap().clone()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A store with an exported volume.
pub(crate) struct World {
    pub(crate) place: Place,
}

impl World {
    pub(crate) fn new() -> World {
        let world = World { place: Place::new() };
        fs::create_dir(world.place.path("own")).unwrap();
        world.ok(&["create", "s", "--size", "64M"]);
        world.ok(&["create", "s#a", "8M"]);
        world
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = self.place.command_of("store", args);
        // The folder of sockets for a user other than root.
        command.env("XDG_RUNTIME_DIR", self.place.path("own"));
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    #[track_caller]
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    pub(crate) fn fails(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    /// Runs `ferrite image` beside the store.
    pub(crate) fn image(&self, args: &[&str]) -> Output {
        let mut command = self.place.command(args);
        command.env("XDG_RUNTIME_DIR", self.place.path("own")).output().unwrap()
    }

    /// Exports the volume; it listens when this returns.
    pub(crate) fn export(&self) -> Owner {
        self.export_as("nbd.sock", &["store:s#a"])
    }

    /// Exports images at a socket; it listens when this returns.
    pub(crate) fn export_as(&self, socket: &str, args: &[&str]) -> Owner {
        let mut child = self.exports(socket, args).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("listening at") {
            assert!(log.read_line(&mut said).unwrap() > 0, "it does not start: {said}");
        }
        let kept = Arc::new(Mutex::new(said));
        let more = kept.clone();
        std::thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                more.lock().unwrap().extend([line.as_str(), "\n"]);
            }
        });
        Owner(child, kept)
    }

    /// The command of an export.
    pub(crate) fn exports(&self, socket: &str, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["export", "nbd", "--socket", socket, "--index-memory", "1M"]).args(args);
        command.current_dir(self.place.path(".")).env_remove("RUST_LOG");
        command.env("XDG_RUNTIME_DIR", self.place.path("own"));
        command
    }

    /// A client of an export.
    pub(crate) fn client(&self, socket: &str) -> Client {
        Client::over(UnixStream::connect(self.place.path(socket)).unwrap())
    }

    /// A volume with 4 MiB of content, half of which is there twice.
    pub(crate) fn fill(&self, name: &str) {
        let block = |i: u32| (i % 768).to_le_bytes().repeat(1024);
        let bytes: Vec<u8> = (1..=1024).flat_map(block).collect();
        fs::write(self.place.path("x.raw"), bytes).unwrap();
        self.place.ok(&["convert", "x.raw", &format!("store:s#{name}")]);
    }

    /// Sockets of this store.
    pub(crate) fn sockets(&self) -> Vec<PathBuf> {
        use std::os::unix::fs::MetadataExt as _;
        let store = fs::metadata(self.place.path("s")).unwrap();
        let prefix = format!("{}-{}.", store.dev(), store.ino());
        let folders = ["/run/ferrite/stores".to_owned(), self.place.path("own/ferrite/stores")];
        let entries = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths
            .filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(&prefix))
            .collect()
    }
}

pub(crate) fn end(mut owner: Owner, signal: Signal) {
    kill_process(Pid::from_child(&owner.0), signal).unwrap();
    let ended = owner.0.wait().unwrap();
    assert_eq!(ended.success(), signal == Signal::TERM, "{ended:?}");
}
