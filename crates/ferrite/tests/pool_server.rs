//! `ferrite pool serve`: what its process may do.

#[allow(dead_code, reason = "a module of another crate's tests, which use all of it")]
#[path = "../../member/tests/peers/mod.rs"]
mod peers;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use ferrite_pool::wire::Kind;
use peers::{Owner, Process};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// The program as a server.
fn serve(folder: &Path) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
    let pool: String = peers::POOL.iter().map(|byte| format!("{byte:02x}")).collect();
    command.args(["pool", "serve", "--experimental", "--plain", "--name", "a", "--pool", &pool]);
    command.args(["--listen", "127.0.0.1:0"]).arg(folder);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    let address = ready.strip_prefix("ready: ").unwrap().trim().to_owned();
    Process { child, address }
}

#[test]
fn a_server_changes_files_of_its_folder_alone() {
    let dir = TempDir::new().unwrap();
    let (own, other) = (dir.path().join("own"), dir.path().join("other"));
    for folder in [&own, &other] {
        fs::create_dir(folder).unwrap();
    }
    let server = serve(&own);
    for name in ["d", "e"] {
        assert_eq!(Owner::create(&server, name, MIB).header.kind, Kind::Done);
    }
    let remove = |name| {
        let (mut owner, _) = Owner::open(&server, name, 1, 7);
        owner.ask(Kind::Delete, 0, 0, &[])
    };
    assert_eq!(remove("d").header.kind, Kind::Done);
    // A place in its folder now leads out of it.
    fs::remove_dir_all(own.join("gone")).unwrap();
    symlink(&other, own.join("gone")).unwrap();
    let said = remove("e");
    assert_eq!(fs::read_dir(&other).unwrap().count(), 0, "a file was made outside of the folder");
    assert!(said.header.kind == Kind::Failed && said.text().contains("denied"), "{}", said.text());
}
