//! `ferrite pool own`: the process of a pool's disk. The user of the disk starts it.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use ferrite_helper::{Fault, Links, refuse_links};
use ferrite_host::helper::CONTROL_FD;
use ferrite_host::process::take_given;
use ferrite_pool_owner::{Disk, Name, open};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::set_parent_process_death_signal;

use super::args::PoolArgs;
use super::settings;
use crate::exit::{Code, Failure};
use crate::serve::stop_on_signals;

/// How long the end may wait for requests under way.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often it is seen whether the disk has grown.
const SIZE_EVERY: Duration = Duration::from_secs(1);

/// The arguments of `ferrite pool own`.
#[derive(Debug, Args)]
pub(crate) struct OwnArgs {
    /// The pool.
    #[arg(long)]
    pool: String,
    /// The disk.
    #[arg(long)]
    disk: String,
    /// A folder with ca-cert.pem, client-cert.pem and client-key.pem, for etcd and the servers.
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
    /// Without TLS.
    #[arg(long, conflicts_with = "tls")]
    plain: bool,
    /// Take the disk from its owner.
    #[arg(long)]
    take_over: bool,
    /// Refuse writes.
    #[arg(long)]
    read_only: bool,
    /// Listen on this socket; without it, streams come through a socket that the starter has given.
    #[arg(long, value_name = "PATH")]
    unix: Option<PathBuf>,
}

/// Serves the disk until its starter or a signal ends it.
pub(super) fn run(of: &PoolArgs, args: &OwnArgs) -> Result<(), Failure> {
    let name =
        settings::of_owner(of, &args.pool, args.tls.as_deref(), args.plain).map(|(etcd, tls)| {
            Name {
                etcd,
                pool: args.pool.clone(),
                disk: args.disk.clone(),
                tls,
                take_over: args.take_over,
                read_only: args.read_only,
                fences: settings::fences(),
            }
        });
    let shown = format!("cannot open pool:{}/{}", args.pool, args.disk);
    let refused = |fault: &Fault| {
        let code = if fault.passes { Code::BUSY } else { Code::FAILED };
        Failure::new(shown.clone(), &fault.why, &fault.help).with_code(code)
    };
    match &args.unix {
        Some(path) => listen(path, &name.map_err(|fault| refused(&fault))?, &shown, &refused),
        None => {
            let control = take_given(CONTROL_FD).map_err(|e| {
                let help = "name the disk where a command takes one; to listen by itself, give --unix PATH";
                Failure::new(shown.clone(), e, help).with_code(Code::USAGE)
            })?;
            // It ends with the control socket, and gives the disk back. To be killed with the starter would leave it owned.
            let _ = set_parent_process_death_signal(None);
            match name.and_then(|name| open(&name)) {
                Ok(disk) => {
                    let links = Links::new(disk);
                    // Without the thread the disk has its new size when it is opened again.
                    let _ = links.follow_size(SIZE_EVERY);
                    links.take_from(&control);
                    end(links);
                    Ok(())
                }
                Err(fault) => {
                    // The starter reports the fault, once: it starts a process for each of its attempts.
                    refuse_links(&control, &fault);
                    std::process::exit(1)
                }
            }
        }
    }
}

fn listen(
    path: &Path,
    name: &Name,
    shown: &str,
    refused: &dyn Fn(&Fault) -> Failure,
) -> Result<(), Failure> {
    let stop = stop_on_signals()?;
    let failed = |e: std::io::Error| Failure::new(shown, e, "choose another path of a socket");
    let disk = open(name).map_err(|fault| refused(&fault))?;
    let listener = UnixListener::bind(path).map_err(failed)?;
    // A signal interrupts the wait, too: then no client has connected.
    listener.set_nonblocking(true).map_err(failed)?;
    println!("ready: {}", path.display());
    let links = Links::new(disk);
    let _ = links.follow_size(SIZE_EVERY);
    loop {
        let (stop, socket) = (stop.fd(), listener.as_fd());
        let mut polled = [stop, socket].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let _ = poll(&mut polled, None);
        if !polled[0].revents().is_empty() {
            break;
        }
        if let Ok((stream, _)) = listener.accept() {
            links.serve(OwnedFd::from(stream));
        }
    }
    let _ = std::fs::remove_file(path);
    end(links);
    Ok(())
}

/// Ends all connections, and gives the disk back if no request is under way.
fn end(mut links: Arc<Links<Disk>>) {
    let until = Instant::now() + PATIENCE;
    if !links.end(until) {
        // The next owner finds it owned by a process of this host that has ended.
        return;
    }
    while Instant::now() < until {
        match Arc::try_unwrap(links) {
            Ok(last) => return last.into_medium().close(),
            Err(shared) => links = shared,
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
