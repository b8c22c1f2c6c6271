//! Commands on a store that a program of an older commit serves, and the other way round.
//!
//! `cargo xtask nightly --only upgrade` builds the older program, and runs these tests.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// The environment variable with the older `ferrite`.
const OLD: &str = "FERRITE_TEST_OLD_FERRITE";

/// The older program.
fn old() -> PathBuf {
    let named = std::env::var_os(OLD).unwrap_or_else(|| panic!("{OLD} names no program"));
    let found = std::fs::canonicalize(&named);
    found.unwrap_or_else(|e| panic!("{OLD} is {}: {e}", named.display()))
}

fn new() -> PathBuf {
    env!("CARGO_BIN_EXE_ferrite").into()
}

/// A folder with a store.
struct World(TempDir);

/// An export of a volume, which a test that fails does not leave behind.
struct Owner(Child);

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl World {
    fn new() -> World {
        let world = World(TempDir::new().unwrap());
        world.ok(&new(), &["create", "s", "--size", "64M"]);
        world.ok(&new(), &["create", "s#a", "8M"]);
        world
    }

    fn command(&self, program: &PathBuf) -> Command {
        let mut command = Command::new(program);
        // Where sockets are if this is not root.
        command.current_dir(self.0.path()).env("XDG_RUNTIME_DIR", self.0.path());
        command.env_remove("RUST_LOG");
        command
    }

    #[track_caller]
    fn ok(&self, program: &PathBuf, args: &[&str]) -> String {
        let output = self.command(program).arg("store").args(args).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Has `program` export the volume, and so own the store.
    fn owner(&self, program: &PathBuf) -> Owner {
        let mut command = self.command(program);
        command.args(["export", "nbd", "store:s#a", "--socket", "nbd.sock"]);
        command.args(["--index-memory", "1M"]);
        let mut owner = Owner(command.stderr(Stdio::piped()).spawn().unwrap());
        let mut log = BufReader::new(owner.0.stderr.take().unwrap());
        let mut said = String::new();
        while !said.contains("listening at") {
            assert!(log.read_line(&mut said).unwrap() > 0, "it does not start: {said}");
        }
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        owner
    }
}

#[test]
#[ignore = "needs an older program: cargo xtask nightly --only upgrade"]
fn commands_on_a_store_work_between_the_older_program_and_this_one_in_both_directions() {
    for (owner, command) in [(old(), new()), (new(), old())] {
        let world = World::new();
        let _owner = world.owner(&owner);
        assert_eq!(world.ok(&command, &["snapshot", "s#a", "s1"]), "s#s1: snapshot of a, 8 MiB\n");
        assert_eq!(world.ok(&command, &["clone", "s#s1", "b"]), "s#b: clone of s1, 8 MiB\n");
        assert!(world.ok(&command, &["list", "s"]).contains("s1"));
        assert!(world.ok(&command, &["delete", "s#b"]).contains("is deleted"));
        for long in ["gc", "stats", "scrub", "check"] {
            world.ok(&command, &[long, "s"]);
        }
        assert!(!world.ok(&owner, &["list", "s"]).contains(" b "));
    }
}
