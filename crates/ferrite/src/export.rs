//! `ferrite export`: disks for clients of NBD, or for a guest by vhost-user, in the foreground.

pub(crate) mod args;
mod listen;
mod names;
pub(crate) mod network;
mod vhost;

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferrite_daemon::config::DiskOptions;
use ferrite_disk::{Disk, OnDamage, OpenOptions, Session, StoreKey};
use ferrite_host::clock::SystemClock;
use ferrite_serve::blkif::lifecycle::close;
use ferrite_serve::nbd::{COURTESY, EngineFactory, Exported, Options, Server, Source};
use ferrite_serve::path::device::Device;
use ferrite_serve::tuning::Tuning;
use ferrite_serve::waker::Waker;

use crate::controlled::Controlled;
use crate::daemon;
use crate::engine::{choose, engines};
use crate::exit::{Code, Failure};
use crate::serve::{RECOVERY_ENTRIES, TAKE_OVER_WAIT, stop_on_signals};
use crate::store::owner::{Place, Serving};
use crate::store::reading;
use crate::user_state::{self, State};
use args::{ExportArgs, ExportCommand, NbdArgs, OpenArgs};
use listen::Listening;
use network::Clients;

/// Exports disks until a signal comes.
pub(crate) fn run(args: &ExportArgs) -> Result<(), Failure> {
    match &args.command {
        ExportCommand::Nbd(args) => nbd(args),
        ExportCommand::VhostUser(args) => vhost::run(args),
    }
}

/// The most images of one process: each client looks at all of them.
const MAX_EXPORTS: usize = 64;

/// An open image that is exported.
struct Opened {
    image: OsString,
    name: String,
    device: Arc<Device>,
    engine: EngineFactory,
    /// The store that it is a volume of, if this process has that open.
    store: Option<StoreKey>,
}

fn nbd(args: &NbdArgs) -> Result<(), Failure> {
    let stop = stop_on_signals()?;
    let images = names::of(&args.images)?;
    if let Some(control) = &args.control.control {
        return controlled(args, &images, control, &stop);
    }
    // A killed server's I/O may still be in flight, and its socket may still exist.
    let socket = listen::listen(args.socket.as_deref(), !args.network.listen.is_empty())?;
    let network = network::listen(&args.network)?;
    // A port does not say who had it before.
    let may_follow = socket.as_ref().is_none_or(Listening::may_follow_another);
    let commands = Place::of(images.iter().map(|(_, image)| image.as_os_str()));
    if args.open.read_only {
        reading::through_owners();
    }
    let opened = match open_all(args, images, may_follow.then_some(TAKE_OVER_WAIT)) {
        Ok(opened) => opened,
        Err(failure) => {
            commands.into_iter().for_each(Place::give_up);
            return Err(failure);
        }
    };
    let commands: Vec<_> =
        commands.into_iter().filter_map(|place| serve_commands(place, &opened)).collect();
    let place = socket.iter().map(|socket| socket.place(args.socket.as_deref()));
    let places = network.iter().flat_map(|network| network.places.iter().cloned());
    place.chain(places).for_each(|place| tracing::info!("listening at {place}"));
    let options = options(args, opened[0].engine.clone());
    let exports = opened.iter().map(Opened::exported).collect();
    let mut sources: Vec<_> = socket.iter().map(|socket| Source::Unix(socket.listener())).collect();
    match network.as_ref().map(|network| &network.clients) {
        Some(Clients::Plain(listeners)) => sources.extend(listeners.iter().map(Source::Tcp)),
        Some(Clients::Tls(tunnel)) => sources.push(Source::Channel(&tunnel.channel)),
        None => {}
    }
    let served = Server::of(exports, options, stop).run_all(&sources);
    drop(commands);
    // The images are closed before the socket is removed: a program that waits for the socket to go finds the images
    // complete.
    let closed = close_all(&opened);
    drop((opened, socket, network));
    served.map_err(|e| {
        let help = "check the limits of this process (ulimit -a), then run the same command again";
        Failure::new("cannot serve clients", e, help)
    })?;
    closed
}

/// Exports the image with a control socket.
fn controlled(
    args: &NbdArgs,
    images: &[(String, OsString)],
    control: &Path,
    stop: &Waker,
) -> Result<(), Failure> {
    let refuse = |what: &str, why: &str, help: &str| {
        Err(Failure::new(what, why, help).with_code(Code::USAGE))
    };
    let [(name, image)] = images else {
        let what = "cannot export several images with one --control";
        let help = "start one ferrite export nbd for each, each with a folder of its own";
        return refuse(what, "a control folder is that of one disk", help);
    };
    if args.socket.is_none() && args.network.listen.is_empty() {
        let help = "name one: --socket PATH or --listen ADDRESS:PORT";
        return refuse("there is nowhere to listen", "no socket is named", help);
    }
    let open = &args.open;
    Controlled {
        control,
        image,
        read_only: open.read_only,
        options: DiskOptions {
            engine: open.engine,
            on_full: open.on_full,
            keep_allocated: open.keep_allocated,
            fence: open.fence.fence,
            merge: !open.no_merge,
            metadata_memory_mib: daemon::mib(open.store.metadata_memory),
            index_memory_mib: daemon::mib(open.store.index_memory),
            ..DiskOptions::default()
        },
        parents: &open.parents,
        guest: None,
        export: network::as_asked(&args.network, name, open.read_only, args.no_list)?,
        socket: args.socket.as_deref(),
    }
    .run(stop)
}

fn open_all(
    args: &NbdArgs,
    images: Vec<(String, OsString)>,
    wait_for_lock: Option<Duration>,
) -> Result<Vec<Opened>, Failure> {
    let state = user_state::to_serve(args.open.read_only)?;
    let mut opened = Vec::new();
    for (name, image) in images {
        match open(&args.open, true, name, image, wait_for_lock, &state) {
            Ok(one) => opened.push(one),
            Err(failure) => {
                // Nothing was written. An image that is closed leaves no journal.
                let _ = close_all(&opened);
                return Err(failure);
            }
        }
    }
    Ok(opened)
}

fn options(args: &NbdArgs, engine: EngineFactory) -> Options {
    Options {
        read_only: args.open.read_only,
        max_clients: args.clients as usize,
        client_bytes: args.memory,
        greeting: COURTESY,
        goodbye: COURTESY,
        at_stop: COURTESY,
        engine,
        tuning: Tuning { merge: !args.open.no_merge, ..Tuning::default() },
        counters: None,
        keeps_all: false,
        traces: None,
        hides_names: args.no_list,
        relayed: false,
    }
}

/// Serves commands on a store. A store that another process has open has its socket there.
fn serve_commands(place: Place, opened: &[Opened]) -> Option<Serving> {
    match opened.iter().find(|one| one.store == Some(place.key())) {
        Some(one) => place.serve(&one.engine),
        None => {
            place.give_up();
            None
        }
    }
}

/// Opens an image. With `odd_size` it may end within a sector.
fn open(
    args: &OpenArgs,
    odd_size: bool,
    name: String,
    image: OsString,
    wait_for_lock: Option<Duration>,
    state: &State,
) -> Result<Opened, Failure> {
    let disk = open_disk(args, odd_size, &image, wait_for_lock, state)?;
    tracing::info!("opened {disk}");
    let store = match &disk {
        Disk::Store(volume) => StoreKey::at(volume.medium().path()).ok(),
        _ => None,
    };
    let kind = choose(args.engine, false, &disk)?;
    let device = Arc::new(Device::new(disk, SystemClock::shared()).on_full(args.on_full));
    let engine = engines(kind);
    recover(&device, &engine).map_err(|e| {
        let what = format!(
            "{} cannot be completed with the writes that a killed backend had answered",
            image.display()
        );
        let help =
            "make room for it, or bring it into the parent (ferrite image repair --force PARENT)";
        Failure::new(what, e, help)
    })?;
    Ok(Opened { image, name, device, engine, store })
}

impl Opened {
    fn exported(&self) -> Exported {
        let Opened { name, device, engine, .. } = self;
        Exported { name: name.clone(), device: device.clone(), engine: engine.clone() }
    }

    fn close(&self) -> Result<(), Failure> {
        let image = self.image.display();
        close(&self.device, &self.engine).map_err(|e| {
            let help = "answered writes are kept on this host: remove the cause and run the same command \
                        again, or open it with ferrite image check, or of a volume ferrite store check";
            Failure::new(format!("cannot close {image}"), e, help)
        })?;
        match self.device.flush_has_failed() {
            false => Ok(()),
            true => Err(Failure::new(
                format!("{image} may lack writes"),
                "a flush has failed, and all writes after it",
                "check the storage (dmesg) and the image (ferrite image check, or of a volume ferrite store \
                 check), then run the same command again",
            )),
        }
    }
}

/// Closes all images, also after one has failed. The first failure counts, and the others are logged.
fn close_all(opened: &[Opened]) -> Result<(), Failure> {
    let mut first = Ok(());
    for failure in opened.iter().filter_map(|one| one.close().err()) {
        match first {
            Ok(()) => first = Err(failure),
            Err(_) => tracing::error!("{}: {}", failure.what, failure.why),
        }
    }
    first
}

fn open_disk(
    args: &OpenArgs,
    odd_size: bool,
    image: &OsStr,
    wait_for_lock: Option<Duration>,
    state: &State,
) -> Result<Disk, Failure> {
    let options = OpenOptions {
        read_only: args.read_only,
        keep_allocated: args.keep_allocated,
        fence: args.fence.terms(),
        odd_size,
        wait_for_lock,
        unseen_state: state.unseen,
        state_dir: state.folder.clone(),
        parents: args.parents.allowed()?,
        // Counts where it is only read.
        on_damage: OnDamage::Serve,
        ..OpenOptions::default()
    };
    Ok(Disk::open(image, &args.store.give(options))?)
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
