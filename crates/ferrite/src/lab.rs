//! `ferrite lab`: runs the measuring program. That is a separate program, so that servers do not link it.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use crate::cli::LabArgs;
use crate::exit::{Code, Failure};

const PROGRAM: &str = "ferrite-lab";

/// Executes that program: the one beside this, or else one in PATH.
pub(crate) fn run(args: &LabArgs) -> Result<(), Failure> {
    let mut command = Command::new(beside().unwrap_or_else(|| PROGRAM.into()));
    let error = command.args(&args.words).exec();
    let what = format!("cannot start {PROGRAM}");
    match error.kind() {
        io::ErrorKind::NotFound => {
            let why = "it is not beside this program, and not in PATH";
            let help =
                "build it from Ferrite's source: cargo build --release --package ferrite-lab";
            Err(Failure::new(what, why, help).with_code(Code::NOT_FOUND))
        }
        _ => Err(Failure::new(what, error, "check the rights of the file")),
    }
}

fn beside() -> Option<PathBuf> {
    let path = std::env::current_exe().ok()?.with_file_name(PROGRAM);
    path.is_file().then_some(path)
}
