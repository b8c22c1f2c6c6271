//! A Linux guest of QEMU whose disk is an export by vhost-user. The export is ours, which is killed again and again, or
//! a daemon's, whose worker is killed. That of qemu-storage-daemon shows that the script is right. The guest's kernel
//! and programs are those of the Xen host.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};
use ferrite_xenhost::root::{self, TRIXIE};
use ferrite_xenhost::steps::{self, fresh_log, run_logged, say, step};

use crate::outcome::{Outcome, check};
use crate::programs::Programs;

const INIT: &str = include_str!("vhost/init.sh");
const RUN: &str = include_str!("vhost/run.sh");

/// The runs: the server, the format, how often it is killed, and how long the guest writes.
const RUNS: [(&str, &str, u32, u32); 4] = [
    ("peer", "raw", 0, 1),
    ("ours", "raw", 10, 12),
    ("ours", "qcow2", 10, 12),
    ("daemon", "qcow2", 10, 12),
];

/// Runs all of them, each as a case.
pub(crate) fn test(cases: &mut Vec<Outcome>) -> Result<()> {
    let root = root::ensure(TRIXIE)?;
    let ferrite = Programs::build_ferrite()?;
    let mut failed = 0;
    for (server, format, kills, rounds) in RUNS {
        let name = format!("vhost-{server}-{format}");
        let case = check(&name, || {
            let work = steps::target_dir().join("vhost").join(&name);
            if work.exists() {
                fs::remove_dir_all(&work)?;
            }
            fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
            let init = work.join("init.sh");
            fs::write(&init, INIT)?;
            let log = fresh_log(&name)?;
            let mut shell = Command::new("sh");
            shell.args(["-c", RUN]).env("DIR", &work).env("INIT", &init);
            shell.env("SERVER", server).env("FORMAT", format).env("FERRITE", &ferrite);
            shell.env("KILLS", kills.to_string()).env("ROUNDS", rounds.to_string());
            shell.env("KERNEL", root.kernel()).env("INITRD", root.initrd());
            shell.env("BASE", root.guest_base());
            say(format!("{name}: {}", log.display()));
            step(&name, || run_logged(&mut shell, &log))
        });
        failed += usize::from(case.failure.is_some());
        cases.push(case);
    }
    anyhow::ensure!(failed == 0, "{failed} of the runs have failed: see above");
    Ok(())
}
