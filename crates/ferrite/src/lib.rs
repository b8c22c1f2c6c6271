//! The program, and the parts that other programs share with it: exit codes, signals, logs, options.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::ExitCode;

mod backup;
mod cli;
mod compat;
mod controlled;
mod daemon;
mod disk;
mod doctor;
pub mod engine;
pub mod exit;
mod export;
mod fence;
pub mod generate;
mod guests;
mod image;
mod job;
mod lab;
pub mod log;
mod migrate;
mod net;
mod one;
pub mod options;
mod pairs;
pub mod parents;
mod plain;
mod pool;
mod seeing;
mod serve;
mod served_raw;
pub mod signals;
mod store;
mod tunnel;
mod user_state;
mod vdev;
mod worker;

/// The log level of a server. Other commands log problems only.
const SERVER_LOG: &str = "warn,ferrite=info,ferrite_serve=info,ferrite_daemon=info,ferrite_net=info,ferrite_tunnel=info,ferrite_member=info,ferrite_pool_owner=info";

/// The internal commands, which have no options.
const KEEPER: &str = "keeper";
const RELAY: &str = "relay";
const EXPORTER: &str = "exporter";

/// The whole program `ferrite`.
pub fn main() -> ExitCode {
    name_process();
    // Keepers come before anything that takes memory: there is one for each disk.
    match std::env::args_os().nth(1) {
        Some(command) if command == KEEPER => return keeper(),
        Some(command) if command == RELAY => return relay(),
        Some(command) if command == EXPORTER => return exporter(),
        _ => {}
    }
    if let Some((tool, args)) = compat::asked_for(std::env::args_os()) {
        return tool.main(args);
    }
    let words: Vec<_> = std::env::args_os().collect();
    if let Some(worker) = worker::Words::parse_if_worker(&words) {
        return worker.map_or_else(|e| cli::refuse(&e), worker::main);
    }
    let cli = match cli::Cli::of_script(&words).map_or_else(|| pairs::parse(words), Ok) {
        Ok(cli) => cli,
        Err(e) => return cli::refuse(&pairs::without_hidden(e, &cli::definition())),
    };
    let json = cli.is_json();
    let is_server = matches!(
        cli.command,
        cli::Command::Serve(_)
            | cli::Command::Daemon(_)
            | cli::Command::Export(_)
            | cli::Command::Net(_)
            | cli::Command::Tunnel(_)
            | cli::Command::Pool(_)
    );
    if is_server {
        ferrite_serve::counters::remember_process();
    }
    let usual = match (cli.global.quiet, is_server) {
        (true, _) => "error",
        (false, true) => SERVER_LOG,
        (false, false) => "warn",
    };
    log::set_up(cli.global.verbose, usual, None);
    let done = match &cli.command {
        cli::Command::Serve(args) => serve::run(args),
        cli::Command::Daemon(args) => daemon::run(args),
        cli::Command::Disk(args) => disk::run(args),
        cli::Command::Job(args) => job::run(args),
        cli::Command::Mirror(args) => job::mirror::run(args),
        cli::Command::Migrate(args) => migrate::run(args),
        cli::Command::Export(args) => export::run(args),
        cli::Command::Tunnel(args) => tunnel::run(args),
        cli::Command::Upgrade(args) => disk::upgrade(args),
        cli::Command::Doctor(args) => doctor::run(args),
        cli::Command::Image(args) => image::run(args),
        cli::Command::Store(args) => store::run(args),
        cli::Command::Pool(args) => pool::run(args),
        cli::Command::Fence(args) => fence::run(args, json),
        cli::Command::Backup(args) => backup::run(args),
        cli::Command::Stat(args) => seeing::stat::run(args),
        cli::Command::Top(args) => seeing::top::run(args),
        cli::Command::Lab(args) => lab::run(args),
        cli::Command::Trace(args) => seeing::trace::run(args),
        cli::Command::Net(args) => net::run(args, json),
        cli::Command::Compat(args) => compat::unknown(args),
        cli::Command::Generate(args) => {
            let programs = [cli::definition(), compat::tap_ctl::definition()];
            generate::run_for_package(programs, &args.directory)
        }
    };
    // The next command, also that of another host, finds their disks free.
    ferrite_host::helper::end_helpers();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report_as(json),
    }
}

/// Names the process `ferrite`. A program that is run by a descriptor would have the descriptor's number as its name. A
/// process started by a link with another name keeps that name.
fn name_process() {
    let called = std::env::args_os().next();
    if called.as_deref().and_then(|name| Path::new(name).file_name()) == Some("ferrite".as_ref()) {
        // The name is only for `ps`, so a failure is ignored.
        let _ = rustix::thread::set_name(c"ferrite");
    }
}

/// The keeper: the parent of a disk's worker.
fn keeper() -> ExitCode {
    match ferrite_keeper::run(&[]) {
        Ok(never) => match never {},
        Err(e) => {
            let help = "the daemon starts it; ferrite serve serves a disk by hand";
            exit::Failure::new("cannot be a keeper", e, help).report()
        }
    }
}

/// The exporter: the process that listens for a disk's clients on other hosts.
fn exporter() -> ExitCode {
    let check = |folder: &Path, verifies| {
        ferrite_tunnel::check_server(folder, verifies)
            .map_err(|fault| (format!("{}: {}", fault.what, fault.why), fault.help))
    };
    match ferrite_keeper::run_exporter(check) {
        Ok(never) => match never {},
        Err(e) => {
            let help = "see the answer of ferrite disk export; ferrite export nbd exports an image";
            exit::Failure::new("cannot export a disk", e, help).report()
        }
    }
}

/// The relay: the process that clients of a disk's NBD socket connect to.
fn relay() -> ExitCode {
    let relayed =
        ferrite_keeper::become_relay().and_then(|keeper| ferrite_serve::nbd::relay(&keeper));
    match relayed {
        Ok(never) => match never {},
        Err(e) => {
            let help = "a keeper starts it; ferrite export serves a disk by hand";
            exit::Failure::new("cannot relay clients of NBD", e, help).report()
        }
    }
}
