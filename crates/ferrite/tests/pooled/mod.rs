//! A pool on this machine: an etcd and servers as processes.

// Each test program uses some of it.
#![allow(dead_code)]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ferrite_testkit::wait_until;
use serde_json::Value;
use tempfile::TempDir;

#[path = "../../../etcd/tests/peers/mod.rs"]
pub(crate) mod peers;

use peers::Servers;

/// The pool's name.
pub(crate) const POOL: &str = "lab";

/// A pool. Its processes end with it.
pub(crate) struct Pool {
    pub(crate) etcd: Servers,
    servers: Vec<(String, Child)>,
    pub(crate) dir: TempDir,
    id: String,
    /// The folders of certificates: of the servers, and of clients of them and of etcd.
    tls: Option<[String; 2]>,
}

impl Pool {
    /// A pool with these servers, each a host of its own. `None`: etcd is not installed.
    pub(crate) fn start(names: &[&str]) -> Option<Pool> {
        let etcd = Servers::start("pooled", 1)?;
        etcd.client();
        Some(Pool::with(etcd, None, names))
    }

    /// A pool as that of [`start`](Pool::start) in this etcd, by TLS with the certificates of two folders: of the servers, and of
    /// clients.
    pub(crate) fn with(etcd: Servers, tls: Option<[String; 2]>, names: &[&str]) -> Pool {
        // Syncs are no matter here.
        let dir = TempDir::new_in("/dev/shm").unwrap();
        let how = match &tls {
            Some([_, client]) => format!("tls = {client:?}"),
            None => "plain = true".to_owned(),
        };
        let table =
            format!("[pool.{POOL}]\netcd = [{:?}]\n{how}\nexperimental = true\n", etcd.urls[0]);
        let mut pool = Pool { etcd, servers: Vec::new(), dir, id: String::new(), tls };
        fs::write(pool.config(), table).unwrap();
        wait_until("etcd", || pool.run(&["pool", "list", POOL]).status.code() != Some(1));
        let made: Value =
            serde_json::from_str(&pool.ok(&["pool", "init", POOL, "--json"])).unwrap();
        pool.id = made["id"].as_str().unwrap().to_owned();
        names.iter().for_each(|name| pool.serve(name));
        pool
    }

    /// A configuration in which the pool is.
    pub(crate) fn config(&self) -> PathBuf {
        self.dir.path().join("ferrite.toml")
    }

    pub(crate) fn folder(&self, server: &str) -> PathBuf {
        self.dir.path().join(server)
    }

    /// Starts a server, or starts it again.
    pub(crate) fn serve(&mut self, name: &str) {
        let _ = fs::create_dir(self.folder(name));
        // A host is an address.
        let address = format!("127.0.0.{}:0", name.as_bytes()[0] - b'a' + 1);
        let mut command = self.ferrite(&["pool", "serve", "--experimental", "--name", name]);
        command.args(["--pool", &self.id, "--listen", &address, "--etcd", &self.etcd.urls[0]]);
        match &self.tls {
            Some([server, client]) => command.args(["--tls", server, "--etcd-tls", client]),
            None => command.args(["--plain", "--etcd-plain"]),
        };
        command.arg(self.folder(name));
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert!(ready.starts_with("ready: "), "{ready}");
        self.servers.push((name.to_owned(), child));
        wait_until("the server in etcd", || {
            let status = self.json(&["pool", "status", POOL]);
            let servers = status["servers"].as_array().unwrap();
            servers.iter().any(|it| it["name"] == name && !it["address"].is_null())
        });
    }

    pub(crate) fn kill(&mut self, name: &str) {
        let at = self.servers.iter().position(|(known, _)| known == name).unwrap();
        end(&mut self.servers.remove(at).1);
    }

    /// The program, which finds the pool in the configuration.
    pub(crate) fn ferrite(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(args).env("FERRITE_CONFIG", self.config()).env_remove("RUST_LOG");
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.ferrite(args).output().unwrap()
    }

    #[track_caller]
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What a command says that fails.
    #[track_caller]
    pub(crate) fn refused(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(!output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    #[track_caller]
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[args, &["--json"]].concat())).unwrap()
    }

    /// Makes a disk, and gives its name.
    pub(crate) fn create(&self, disk: &str, size: &str, more: &[&str]) -> String {
        let name = format!("{POOL}/{disk}");
        self.ok(&[&["pool", "create", &name, size], more].concat());
        format!("pool:{name}")
    }

    /// The file of a server's only copy.
    pub(crate) fn copy(&self, server: &str) -> Vec<u8> {
        let is_raw = |path: &PathBuf| path.extension().is_some_and(|it| it == "raw");
        let entries = fs::read_dir(self.folder(server)).unwrap();
        let mut files = entries.map(|entry| entry.unwrap().path()).filter(is_raw);
        let file = files.next().unwrap();
        assert!(files.next().is_none(), "{server} has several copies");
        fs::read(file).unwrap()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.servers.iter_mut().for_each(|(_, child)| end(child));
    }
}

pub(crate) fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Bytes of which no two blocks are equal, with holes.
pub(crate) fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    let block = |at: usize| match at % 5 {
        0 => vec![0; 4096],
        _ => [&(at as u64).to_be_bytes()[..], &vec![seed ^ at as u8; 4088]].concat(),
    };
    (0..bytes / 4096).flat_map(block).collect()
}

pub(crate) fn write_file(folder: &Path, name: &str, bytes: &[u8]) -> String {
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}
