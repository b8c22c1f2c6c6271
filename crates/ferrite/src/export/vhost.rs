//! `ferrite export vhost-user`: one disk for a guest of another virtual-machine monitor.

use std::ffi::OsStr;
use std::iter;

use ferrite_serve::counters::Counters;
use ferrite_serve::tuning::Tuning;
use ferrite_serve::vhost::{ID_BYTES, Options, serve};

use super::args::VhostArgs;
use super::listen::{Listening, listen};
use super::{close_all, open, serve_commands};
use crate::exit::Failure;
use crate::serve::{TAKE_OVER_WAIT, stop_on_signals};
use crate::store::owner::Place;
use crate::store::reading;
use crate::user_state;

/// Serves a disk until a signal comes.
pub(super) fn run(args: &VhostArgs) -> Result<(), Failure> {
    let stop = stop_on_signals()?;
    let socket = listen(args.socket.as_deref(), false)?;
    let may_follow = socket.as_ref().is_none_or(Listening::may_follow_another);
    let commands = Place::of(iter::once(args.image.as_os_str()));
    if args.open.read_only {
        reading::through_owners();
    }
    let wait = may_follow.then_some(TAKE_OVER_WAIT);
    let state = user_state::to_serve(args.open.read_only)?;
    let opened = match open(&args.open, false, String::new(), args.image.clone(), wait, &state) {
        Ok(opened) => vec![opened],
        Err(failure) => {
            commands.into_iter().for_each(Place::give_up);
            return Err(failure);
        }
    };
    let commands: Vec<_> =
        commands.into_iter().filter_map(|place| serve_commands(place, &opened)).collect();
    let mut served = Ok(());
    if let Some(socket) = &socket {
        tracing::info!("listening at {}", socket.place(args.socket.as_deref()));
        let options = Options {
            read_only: args.open.read_only,
            queues: args.queues,
            memory: args.memory,
            id: id(args),
            engine: opened[0].engine.clone(),
            tuning: Tuning { merge: !args.open.no_merge, ..Tuning::default() },
            counters: Some(Counters::default()),
        };
        served = serve(&opened[0].device, &options, socket.listener(), &stop);
    }
    drop(commands);
    // The image is closed before the socket is removed: a program that waits for the socket to go finds it complete.
    let closed = close_all(&opened);
    drop((opened, socket));
    served.map_err(|e| {
        let help = "check the limits of this process (ulimit -a), then run the same command again";
        Failure::new("cannot serve the guest", e, help)
    })?;
    closed
}

/// The name that the guest sees: the one that was given, or the image's without its folder and its extension.
fn id(args: &VhostArgs) -> [u8; ID_BYTES] {
    let image = args.image.to_string_lossy();
    let last = image.rsplit(['/', '#', ':']).next().unwrap_or_default();
    let stem = std::path::Path::new(OsStr::new(last)).file_stem().unwrap_or_default();
    let stem = stem.to_string_lossy();
    let name = args.serial.as_deref().unwrap_or(&stem);
    let mut id = [0; ID_BYTES];
    let graphic = name.bytes().filter(u8::is_ascii_graphic);
    id.iter_mut().zip(graphic).for_each(|(to, byte)| *to = byte);
    id
}
