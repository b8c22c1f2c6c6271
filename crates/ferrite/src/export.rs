//! `ferrite export nbd`: one disk for clients of NBD, in the foreground.

use std::iter;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_disk::{Disk, OnDamage, OpenOptions, Session};
use ferrite_host::clock::SystemClock;
use ferrite_image_tools::is_readable;
use ferrite_serve::blkif::lifecycle::close;
use ferrite_serve::nbd::{BindError, COURTESY, EngineFactory, Options, Server, bind};
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;

use crate::cli::{ExportArgs, ExportCommand, NbdArgs};
use crate::engine::{choose, engines};
use crate::exit::{Code, Failure};
use crate::serve::{IMAGES, RECOVERY_ENTRIES, RUN_DIR, TAKE_OVER_WAIT, stop_on_signals};
use crate::store::owner::Place;

/// Exports a disk until a signal comes.
pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    match &args.command {
        ExportCommand::Nbd(args) => nbd(args),
    }
}

fn nbd(args: &NbdArgs) -> Result<(), Failure> {
    let stop = stop_on_signals()?;
    // A killed server's I/O may still be in flight, and its socket may still exist.
    let bound = bind(&args.socket).map_err(|e| no_socket(&args.socket, &e))?;
    let commands = Place::of(iter::once(args.image.as_os_str()));
    let disk = open(args, bound.was_left.then_some(TAKE_OVER_WAIT))?;
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
    tracing::info!("listening at {}", args.socket.display());
    let served = Server::new(device.clone(), options, stop).run(&bound.listener);
    drop(commands);
    // The image is closed before the socket is removed: a program that waits for the socket to go finds the image
    // complete.
    let closed = close(&device, &engine);
    let flushed = !device.flush_has_failed();
    drop((device, bound));
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
    // An image that is only read can be served without this folder.
    let _ = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(RUN_DIR);
    let images = Path::new(RUN_DIR).join(IMAGES);
    let is_seen = is_readable(&images);
    let options = OpenOptions {
        read_only: args.read_only,
        keep_allocated: args.keep_allocated,
        wait_for_lock,
        unseen_state: !is_seen,
        state_dir: (is_seen || !args.read_only).then_some(images),
        parents: args.parents.allowed()?,
        // Counts where it is only read.
        on_damage: OnDamage::Serve,
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

fn no_socket(path: &Path, e: &BindError) -> Failure {
    let what = format!("cannot listen at {}", path.display());
    match e {
        BindError::InUse => {
            let help = "stop that program, or name another socket (--socket)";
            Failure { code: Code::BUSY, ..Failure::new(what, e, help) }
        }
        BindError::NoSocket => {
            Failure::new(what, e, "remove it, or name another socket (--socket)")
        }
        BindError::System(_) => {
            let help =
                "its folder must exist and be yours, and the name must be shorter than 108 bytes";
            Failure::new(what, e, help)
        }
    }
}
