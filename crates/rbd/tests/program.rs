//! The program without a cluster: each error says what to do.

use std::fs;
use std::path::Path;
use std::process::Command;

/// The program's error with the libraries of this folder before those of the system.
fn refused_with(libraries: &Path, name: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-rbd"));
    command.env("LD_LIBRARY_PATH", libraries);
    let output = command.args(["steal", name]).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

fn refused(name: &str) -> String {
    refused_with(Path::new("/nonexistent"), name)
}

#[test]
fn an_error_says_what_to_install_or_to_write() {
    assert!(refused("rbd:p").contains("write rbd:POOL/IMAGE"));
    let said = refused("rbd:p/i?conf=/nonexistent/ceph.conf");
    // The first where librbd is missing, the second where it is installed.
    let expected = ["apt install librbd1", "/nonexistent/ceph.conf: No such file"];
    assert!(expected.iter().any(|text| said.contains(text)), "{said}");
}

#[test]
fn a_library_that_is_not_there_or_too_old_is_told_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let name = "rbd:p/i?conf=/nonexistent/ceph.conf";
    for library in ["librados.so.2", "librbd.so.1"] {
        fs::write(dir.path().join(library), "no library").unwrap();
    }
    let said = refused_with(dir.path(), name);
    assert!(said.contains("librados.so.2 cannot be loaded"), "{said}");
    assert!(said.contains("apt install librbd1"), "{said}");
    // Libraries without a function.
    for library in ["librados.so.2", "librbd.so.1"] {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(dir.path().join(library));
        assert!(cc.status().unwrap().success());
    }
    let said = refused_with(dir.path(), name);
    assert!(said.contains("librados.so.2 is too old: it lacks rados_"), "{said}");
}
