//! `ferrite-rbd`: has an image of a Ceph cluster open for its starter, and answers NBD on streams that this one gives it
//! (docs/internals/processes.md 16). A process of its own, since librbd makes threads, sockets and files, which a disk's worker may
//! not have. librbd and librados are opened at run time, and never linked.
//!
//! * [`ffi`]: the two libraries. The only unsafe code.
//! * [`open`]: from a name to an open image; [`lock`]: whose it is.
//! * [`serve`]: the image as the medium of a helper; `ferrite_helper` takes streams, and speaks NBD on each.

#![deny(unsafe_code)]

mod ffi;
mod lock;
mod log;
mod open;
mod serve;

use std::process::ExitCode;

use ferrite_helper::Fault;
use ferrite_host::helper::{READ_ONLY, SERVE};
use ferrite_nbd::uri::rbd::{Image, SCHEME};

const USAGE: &str = "ferrite-rbd: the helper process of images of Ceph clusters, which ferrite starts

ferrite-rbd steal rbd:POOL/IMAGE?conf=FILE&id=NAME   take the lock of an image from a host that has it,
                                                     and shut that client out of the cluster
ferrite-rbd --version";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        [SERVE, READ_ONLY, name] => serve::run(name, true),
        [SERVE, name] => serve::run(name, false),
        ["steal", name] => ended(steal(name)),
        ["--version"] => {
            println!("ferrite-rbd {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        ["--help"] => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn steal(name: &str) -> Result<(), Fault> {
    let image = Image::parse(name.strip_prefix(SCHEME).unwrap_or(name))
        .map_err(|e| Fault::lasting(e.why, e.help))?;
    match open::steal(&image)? {
        Some(owner) => println!("{}: the client {owner} is shut out", image.short()),
        None => println!("{}: no client has its lock", image.short()),
    }
    Ok(())
}

fn ended(done: Result<(), Fault>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            log::log(3, &fault.to_string());
            ExitCode::FAILURE
        }
    }
}
