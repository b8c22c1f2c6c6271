//! `ferrite net`: the network interfaces of guests, and a switch between them. Experimental.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use ferrite_net::packet::Uplink;
use ferrite_net::tap::TapUplink;
use ferrite_net::{Network, Options};
use ferrite_xen::hypervisor::Hypervisor;
use ferrite_xen::real::Xen;
use ferrite_xen::store::Store;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::exit::{Code, Failure};
use crate::signals;

#[cfg(test)]
mod tests;

/// The kind of backend below `backend` in xenstore: not `vif`, so the kernel's netback leaves it alone.
const BACKEND_KIND: &str = "vif-ferrite";
/// How often changed counters are written, and a signal is looked for.
const INTERVAL: Duration = Duration::from_millis(500);
/// The most switches that are listed, and the largest file of one: far more than a host has.
const MOST: usize = 1000;
const BYTES_MAX: u64 = 1 << 20;

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
    #[command(flatten)]
    folder: FolderArgs,
}

#[derive(Debug, Args)]
struct FolderArgs {
    /// The folder of the switches' counters.
    #[arg(long, value_name = "DIR", default_value = "/run/ferrite/net")]
    counters: PathBuf,
}

/// The state of a switch, in the file `NAME.json` of the folder.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Switch {
    switch: String,
    #[serde(default)]
    uplink: Option<String>,
    interfaces: Vec<Interface>,
}

/// An interface. Sent and received are the guest's view.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Interface {
    domid: u16,
    handle: u32,
    counts: BTreeMap<String, u64>,
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
        NetCommand::Stat(args) => stat(args, is_json),
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
    let file = Counted::claim(&args.folder.counters, &args.switch)?;
    let mut options = Options::new(BACKEND_KIND, hypervisor, store);
    options.queues = args.queues;
    if let Some(name) = &args.uplink {
        let uplink = TapUplink::open(name).map_err(|e| {
            let help = "ip link shows the interfaces of this host, and TAP devices need root";
            Failure::new(format!("cannot open the TAP device {name}"), e, help)
        })?;
        options.uplink = Some(Box::new(uplink) as Box<dyn Uplink>);
    }
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

fn look(args: &NetServeArgs, network: &Network) -> Switch {
    let interfaces = network.counters().into_iter().map(|(id, counts)| Interface {
        domid: id.domid,
        handle: id.handle,
        counts: counts.named().map(|(name, count)| (name.to_owned(), count)).collect(),
    });
    let (switch, uplink) = (args.switch.clone(), args.uplink.clone());
    Switch { switch, uplink, interfaces: interfaces.collect() }
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
    }
}

/// All switches of the folder, by name. A file that is none is a problem.
fn read(folder: &Path) -> io::Result<(Vec<Switch>, Vec<String>)> {
    use io::Read as _;
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        entries => entries?,
    };
    let (mut switches, mut problems) = (Vec::new(), Vec::new());
    for entry in entries.take(MOST) {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let mut text = String::new();
        let read = std::fs::File::open(&path)
            .and_then(|file| file.take(BYTES_MAX).read_to_string(&mut text))
            .and_then(|_| Ok(serde_json::from_str::<Switch>(&text)?));
        match read {
            Ok(switch) => switches.push(switch),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => problems.push(format!("{}: {e}", path.display())),
        }
    }
    switches.sort_by(|a, b| a.switch.cmp(&b.switch));
    Ok((switches, problems))
}

fn stat(args: &NetStatArgs, is_json: bool) -> Result<(), Failure> {
    let folder = &args.folder.counters;
    let (switches, problems) = read(folder).map_err(|e| {
        let what = format!("cannot look at {}", folder.display());
        Failure::new(what, e, "counters of guests' interfaces are for root")
    })?;
    for problem in problems {
        let _ = writeln!(io::stderr().lock(), "ferrite: {problem}; it is skipped");
    }
    let text = match is_json {
        true => serde_json::json!({ "schema": 1, "switches": switches }).to_string() + "\n",
        false => table(&switches),
    };
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|e| {
            Failure::new("cannot print the report", e, "check where standard output goes")
        }),
    }
}

/// Titles, and one line for each interface.
fn table(switches: &[Switch]) -> String {
    let titles = ["sent", "bytes", "received", "bytes", "dropped", "starved", "refused"];
    let mut out = format!("{:<14} {:<14}", "interface", "switch");
    titles.iter().for_each(|title| out += &format!(" {title:>14}"));
    out.push('\n');
    for switch in switches {
        for interface in &switch.interfaces {
            let count = |name: &str| interface.counts.get(name).copied().unwrap_or(0);
            let refused = ["spoofed", "malformed", "failed", "unsupported"].map(count);
            let name = format!("vif{}.{}", interface.domid, interface.handle);
            let shown = crate::plain::one_line(&switch.switch);
            out += &format!("{name:<14} {shown:<14}");
            for name in ["sent_packets", "sent_bytes", "received_packets", "received_bytes"] {
                out += &format!(" {:>14}", count(name));
            }
            let refused = refused.iter().fold(0_u64, |sum, n| sum.saturating_add(*n));
            for n in [count("dropped"), count("starved"), refused] {
                out += &format!(" {n:>14}");
            }
            out.push('\n');
        }
    }
    out
}
