//! `ferrite export nbd`: one disk for clients of NBD, in the foreground.

mod listen;

use std::iter;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, OpenOptions, Session};
use ferrite_host::clock::SystemClock;
use ferrite_serve::blkif::lifecycle::close;
use ferrite_serve::nbd::{COURTESY, EngineFactory, Options, Server};
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;

use crate::cli::{ExportArgs, ExportCommand, NbdArgs};
use crate::engine::{choose, engines};
use crate::exit::Failure;
use crate::serve::{RECOVERY_ENTRIES, TAKE_OVER_WAIT, stop_on_signals};
use crate::store::owner::Place;
use crate::user_state;

/// Exports a disk until a signal comes.
pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    match &args.command {
        ExportCommand::Nbd(args) => nbd(args),
    }
}

fn nbd(args: &NbdArgs) -> Result<(), Failure> {
    let stop = stop_on_signals()?;
    // A killed server's I/O may still be in flight, and its socket may still exist.
    let socket = listen::listen(args.socket.as_deref())?;
    let commands = Place::of(iter::once(args.image.as_os_str()));
    let disk = open(args, socket.may_follow_another().then_some(TAKE_OVER_WAIT))?;
    tracing::info!("opened {disk}");
    let kind = choose(args.engine, false, &disk)?;
    let device = Arc::new(Device::new(disk, SystemClock::shared()).on_full(args.on_full));
    let engine = engines(kind);
    recover(&device, &engine).map_err(|e| {
        let what = format!(
            "{} cannot be completed with the writes that a killed backend had answered",
            args.image.display()
        );
        let help =
            "make room for it, or bring it into the parent (ferrite image repair --force PARENT)";
        Failure::new(what, e, help)
    })?;
    let options = Options {
        read_only: args.read_only,
        max_clients: args.clients as usize,
        client_bytes: args.memory,
        greeting: COURTESY,
        goodbye: COURTESY,
        at_stop: COURTESY,
        engine: engine.clone(),
        tuning: Tuning { merge: !args.no_merge, ..Tuning::default() },
        counters: None,
        keeps_all: false,
        traces: None,
    };
    let commands: Vec<_> = commands.into_iter().filter_map(|place| place.serve(&engine)).collect();
    tracing::info!("listening at {}", socket.place(args.socket.as_deref()));
    let served = Server::new(device.clone(), options, stop).run(socket.listener());
    drop(commands);
    // The image is closed before the socket is removed: a program that waits for the socket to go finds the image
    // complete.
    let closed = close(&device, &engine);
    let flushed = !device.flush_has_failed();
    drop((device, socket));
    served.map_err(|e| {
        let help = "check the limits of this process (ulimit -a), then run the same command again";
        Failure::new(format!("cannot serve {}", args.image.display()), e, help)
    })?;
    closed.map_err(|e| {
        let help = "answered writes are kept on this host: remove the cause and run the same command \
                    again, or open it with ferrite image check, or of a volume ferrite store check";
        Failure::new(format!("cannot close {}", args.image.display()), e, help)
    })?;
    match flushed {
        true => Ok(()),
        false => Err(Failure::new(
            format!("{} may lack writes", args.image.display()),
            "a flush has failed, and all writes after it",
            "check the storage (dmesg) and the image (ferrite image check, or of a volume ferrite store \
             check), then run the same command again",
        )),
    }
}

fn open(args: &NbdArgs, wait_for_lock: Option<Duration>) -> Result<Disk, Failure> {
    let state = user_state::to_serve(args.read_only)?;
    let options = OpenOptions {
        read_only: args.read_only,
        keep_allocated: args.keep_allocated,
        odd_size: true,
        wait_for_lock,
        unseen_state: state.unseen,
        state_dir: state.folder,
        parents: args.parents.allowed()?,
        ..OpenOptions::default()
    };
    Ok(Disk::open(&args.image, &args.store.give(options))?)
}

/// Copies writes of a killed backend to an image that is now a parent into the leaf.
fn recover(device: &Device, engine: &EngineFactory) -> std::io::Result<()> {
    let disk = device.disk()?;
    if disk.is_unrecovered() {
        Session::new(disk, |arena| engine(arena, RECOVERY_ENTRIES))?.recover_parents()?;
        tracing::warn!("writes that a killed backend had answered were copied from a parent");
    }
    Ok(())
}
