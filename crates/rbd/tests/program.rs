//! The program without a cluster: each error says what to do.

use std::process::Command;

fn refused(name: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite-rbd"));
    let output = command.args(["steal", name]).output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn an_error_says_what_to_install_or_to_write() {
    assert!(refused("rbd:p").contains("write rbd:POOL/IMAGE"));
    let said = refused("rbd:p/i?conf=/nonexistent/ceph.conf");
    // The first where librbd is missing, the second where it is installed.
    let expected = ["apt install librbd1", "/nonexistent/ceph.conf: No such file"];
    assert!(expected.iter().any(|text| said.contains(text)), "{said}");
}
