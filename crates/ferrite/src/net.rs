//! `ferrite net`: the network interfaces of guests, and a switch between them. Experimental.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use ferrite_host::sandbox::keep_folders;
use ferrite_net::packet::Uplink;
use ferrite_net::tap::TapUplink;
use ferrite_net::trace::TraceRing;
use ferrite_net::{Network, Options};
use ferrite_seeing::interfaces::{Interface, Switch};
use ferrite_xen::hypervisor::Hypervisor;
use ferrite_xen::real::Xen;
use ferrite_xen::store::Store;
use rustix::fs::{FlockOperation, flock};

use crate::exit::{Code, Failure};
use crate::seeing::args::seconds;
use crate::signals;

mod page;
mod stat;
#[cfg(test)]
mod tests;
mod trace;

/// The kind of backend below `backend` in xenstore: not `vif`, so the kernel's netback leaves it alone.
const BACKEND_KIND: &str = "vif-ferrite";
/// The kind of the interfaces that xl makes. netback serves the same kind.
const XL_KIND: &str = "vif";
/// The script of those interfaces that are ours.
const SCRIPT: &str = "vif-ferrite";
/// It is there while the kernel's netback takes all interfaces that xl makes.
const NETBACK: &str = "/sys/bus/xen-backend/drivers/vif";
/// How often changed counters are written, and a signal is looked for.
const INTERVAL: Duration = Duration::from_millis(500);

/// `ferrite net`.
#[derive(Debug, Args)]
pub(crate) struct NetArgs {
    #[command(subcommand)]
    command: NetCommand,
}

#[derive(Debug, Subcommand)]
enum NetCommand {
    /// Serve the interfaces of guests with script=vif-ferrite, in the foreground, until a signal comes (experimental).
    Serve(NetServeArgs),
    /// Show the interfaces of all switches, and what they have sent and received (experimental).
    Stat(NetStatArgs),
    /// Show the way of each packet through a switch: when it was seen, copied, answered (experimental).
    Trace(trace::NetTraceArgs),
}

/// `ferrite net serve`.
#[derive(Debug, Args)]
struct NetServeArgs {
    /// The name of the switch, which all interfaces are connected to.
    #[arg(long, value_name = "NAME", value_parser = switch_name)]
    switch: String,

    /// The way out: a TAP device of this host, which is made if it is not there.
    #[arg(long, value_name = "TAP")]
    uplink: Option<String>,

    /// Serve the interfaces that xl makes with script=vif-ferrite; netback must not be loaded.
    #[arg(long)]
    xl: bool,

    /// Offer up to this many queues for an interface.
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=16))]
    queues: u32,

    #[command(flatten)]
    folder: FolderArgs,
}

/// `ferrite net stat`.
#[derive(Debug, Args)]
struct NetStatArgs {
    /// Report repeatedly, with so many seconds between: first all counts, then what was done in a second.
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    interval: Option<Duration>,

    /// End after so many reports; by default after one, or never with an interval.
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    #[command(flatten)]
    folder: FolderArgs,
}

#[derive(Debug, Args)]
struct FolderArgs {
    /// The folder of the switches' counters.
    #[arg(long, value_name = "DIR", default_value = "/run/ferrite/net")]
    counters: PathBuf,
}

/// The name is a part of a file's name.
fn switch_name(text: &str) -> Result<String, String> {
    let is_name = (1..=32).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
    match is_name {
        true => Ok(text.to_owned()),
        false => Err("it has 1 to 32 letters, digits, - and _".to_owned()),
    }
}

/// Runs the command.
pub(crate) fn run(args: &NetArgs, is_json: bool) -> Result<(), Failure> {
    match &args.command {
        NetCommand::Serve(args) => {
            let store = Store::open().map_err(|e| {
                let what = format!("cannot serve the switch {}", args.switch);
                Failure::new(what, e, "ferrite doctor shows what is missing")
            });
            serve(args, store?, Arc::new(Xen::new()))
        }
        NetCommand::Stat(args) => stat::run(args, is_json),
        NetCommand::Trace(args) => trace::run(args, is_json),
    }
}

/// Serves until a signal comes.
fn serve(
    args: &NetServeArgs,
    store: Store,
    hypervisor: Arc<dyn Hypervisor>,
) -> Result<(), Failure> {
    let what = format!("cannot serve the switch {}", args.switch);
    let stop = signals::flag()?;
    if args.xl && Path::new(NETBACK).exists() {
        let why = "the kernel's netback is loaded, which takes all interfaces that xl makes";
        let help = "rmmod xen_netback, and keep it from being loaded: docs/network.md";
        return Err(Failure::new(what, why, help).with_code(Code::BUSY));
    }
    let file = Counted::claim(&args.folder.counters, &args.switch)?;
    let kind = if args.xl { XL_KIND } else { BACKEND_KIND };
    let mut options = Options::new(kind, hypervisor, store);
    options.script = args.xl.then(|| SCRIPT.to_owned());
    options.queues = args.queues;
    if let Some(name) = &args.uplink {
        let uplink = TapUplink::open(name).map_err(|e| {
            let help = "ip link shows the interfaces of this host, and TAP devices need root";
            Failure::new(format!("cannot open the TAP device {name}"), e, help)
        })?;
        options.uplink = Some(Box::new(uplink) as Box<dyn Uplink>);
    }
    // Without room for records packets are moved as well.
    options.trace = TraceRing::create(&trace_file(&args.folder.counters, &args.switch))
        .map_err(|e| tracing::warn!("cannot make the records of packets: {e}"))
        .ok();
    lock_down(&what, &args.folder.counters)?;
    let network = Network::start(options)
        .map_err(|e| Failure::new(what.as_str(), e, "ferrite doctor shows what is missing"))?;
    tracing::info!("the switch {} is ready (experimental)", args.switch);
    let mut before = None;
    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
        if network.has_ended() {
            let help = "start it again when xenstored runs: interfaces are taken over";
            return network.wait().map_err(|e| Failure::new(what, e, help));
        }
        let now = look(args, &network);
        if before.as_ref() != Some(&now) {
            if let Err(e) = file.write(&now) {
                tracing::warn!("cannot write the counters of the switch: {e}");
            }
            before = Some(now);
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

/// The folder of the devices that rings and events of guests come from.
const XEN_DEVICES: &str = "/dev/xen";

/// Gives up the rights that the process does not need: guests make the packets, and may use a bug in it.
fn lock_down(what: &str, counters: &Path) -> Result<(), Failure> {
    let folders = [counters, Path::new(XEN_DEVICES)];
    match keep_folders(&folders) {
        Ok(lacking) if lacking.is_empty() => Ok(()),
        Ok(lacking) => {
            tracing::warn!(
                "this kernel has {lacking}: the process keeps more rights than it needs"
            );
            Ok(())
        }
        Err(e) => Err(Failure::new(
            what,
            e,
            "it needs root, and /dev/xen: modprobe xen-gntdev xen-evtchn",
        )),
    }
}

fn look(args: &NetServeArgs, network: &Network) -> Switch {
    let interfaces = network.counters().into_iter().map(|(id, counts)| Interface {
        domid: id.domid,
        handle: id.handle,
        counts: counts.named().map(|(name, count)| (name.to_owned(), count)).collect(),
    });
    let (switch, uplink) = (args.switch.clone(), args.uplink.clone());
    Switch { switch, uplink, interfaces: interfaces.collect() }
}

/// The file of a switch's records.
fn trace_file(folder: &Path, switch: &str) -> PathBuf {
    folder.join(format!("{switch}.trace"))
}

/// The file with the counters of a switch. All switches of a host would serve the same interfaces, so one process has
/// the lock of the folder.
struct Counted {
    path: PathBuf,
    _lock: std::fs::File,
}

impl Counted {
    fn claim(folder: &Path, switch: &str) -> Result<Counted, Failure> {
        let what = "cannot claim the interfaces of this host";
        let help = "the folder of --counters has to be on tmpfs and for root to write";
        let failed = |e: io::Error| Failure::new(what, format!("{}: {e}", folder.display()), help);
        std::fs::create_dir_all(folder).map_err(failed)?;
        let lock = std::fs::File::create(folder.join("lock")).map_err(failed)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|e| {
            let why = match e {
                rustix::io::Errno::WOULDBLOCK => "another ferrite net serve has them".to_owned(),
                e => e.to_string(),
            };
            let help = "a host has one switch: stop the other process first";
            Failure::new(what, why, help).with_code(Code::BUSY)
        })?;
        Ok(Counted { path: folder.join(format!("{switch}.json")), _lock: lock })
    }

    /// Readers see the old content or the new one. It is on tmpfs, so nothing is synced.
    fn write(&self, switch: &Switch) -> io::Result<()> {
        let new = self.path.with_extension("new");
        std::fs::write(&new, serde_json::to_string(switch)? + "\n")?;
        std::fs::rename(&new, &self.path)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // A file that remains shows the last counters of a switch that is not served.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(self.path.with_extension("trace"));
    }
}
