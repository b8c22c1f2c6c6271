//! `ferrite disk device` and `devices`: disks as block devices of this host.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use clap::Args;
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{
    AddDeviceParams, CleanedDevices, DeviceKind, DeviceRow, DeviceRows, Nothing, RemoveDeviceParams,
};
use ferrite_disk::size::Human;

use super::{call, id, not_answered, pause, tell, vbd};
use crate::cli::RunDirArgs;
use crate::exit::{Code, Failure};
use crate::guests::{GuestDisk, Names};
use crate::plain::one_line;

/// Making a device opens its image first, and removing one closes it.
const CHANGE: Duration = Duration::from_secs(130);

/// The help of `disk device` after its options.
pub(crate) const HELP: &str = "\
It prints the device's name. The kernel's ublk driver makes the device if it is loaded (module ublk_drv, Linux 6.5), otherwise its
NBD client (module nbd). It stays until it is removed, also when the daemon ends. To mount what a running guest has mounted, even for reading only, needs care:
docs/access.md.";

/// A driver of the kernel that makes devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Driver {
    /// The kernel's NBD client.
    Nbd,
    /// The driver whose requests the disk's worker serves itself.
    Ublk,
}

impl Driver {
    fn kind(self) -> DeviceKind {
        match self {
            Driver::Nbd => DeviceKind::Nbd,
            Driver::Ublk => DeviceKind::Ublk,
        }
    }

    /// The faster one where its driver is loaded.
    fn chosen() -> Driver {
        match ferrite_io::ublk::Control::open() {
            Ok(_) => Driver::Ublk,
            Err(_) => Driver::Nbd,
        }
    }

    fn module(self) -> &'static str {
        match self {
            Driver::Nbd => "nbd",
            Driver::Ublk => "ublk_drv",
        }
    }
}

/// `ferrite disk device`.
#[derive(Debug, Args)]
pub(crate) struct DeviceArgs {
    /// A disk that the daemon serves (web1/xvda, tap/0), or an image that is not in use: FORMAT:PATH, or a path with a /
    /// in front or an extension.
    #[arg(
        value_name = "DISK|IMAGE",
        required_unless_present = "remove",
        conflicts_with = "remove"
    )]
    pub(crate) disk: Option<OsString>,

    /// Remove this device: /dev/nbdN or /dev/ublkbN. One that is mounted stays.
    #[arg(long, value_name = "DEVICE")]
    pub(crate) remove: Option<String>,

    /// Make a device for reading only, and open an image read-only.
    #[arg(long)]
    pub(crate) read_only: bool,

    /// Let this host write to the disk of a guest that may write, too.
    #[arg(long, conflicts_with = "read_only")]
    pub(crate) shared: bool,

    /// Which driver of the kernel makes the device: by default ublk if it is loaded, otherwise nbd. ferrite doctor says which there are.
    #[arg(long, value_name = "DRIVER")]
    pub(crate) by: Option<Driver>,

    /// Connections of the device, or queues by ublk. With more than one connection, requests that are under way when the disk's keeper is killed wait
    /// for 30 days.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=4))]
    pub(crate) connections: u32,

    /// Load the kernel's module first, if it is not loaded: nbd, or ublk_drv with --by ublk.
    #[arg(long)]
    pub(crate) load: bool,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// `ferrite disk devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Remove devices that are not in use, and those that a killed daemon has left.
    #[arg(long)]
    pub(crate) clean: bool,

    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

pub(super) fn device(args: &DeviceArgs) -> Result<(), Failure> {
    let run = &args.places.run_dir;
    if let Some(device) = &args.remove {
        let asked = RemoveDeviceParams { device: device.clone() };
        let done: DeviceRow = call(run, "device.remove", &asked, CHANGE)
            .map_err(|e| failed(&format!("cannot remove {}", one_line(device)), &e))?;
        return tell(args.json, &done, || println!("{} is removed", done.device));
    }
    let name = args.disk.as_deref().unwrap_or_default();
    let what = format!("cannot make a device of {}", one_line(&name.to_string_lossy()));
    let mut by = args.by.unwrap_or_else(Driver::chosen);
    let mut asked = AddDeviceParams {
        disk: None,
        image: None,
        read_only: args.read_only,
        shared: args.shared,
        connections: args.connections,
        // A daemon of the version before knows no other.
        by: Some(by.kind()).filter(|by| *by != DeviceKind::default()),
    };
    match as_disk(name) {
        Some(disk) => asked.disk = Some(id(disk.find()?)),
        None => asked.image = Some(pause::named("cannot make a device of", name)?),
    }
    if args.load {
        load(by)?;
    }
    let mut added = call::<DeviceRow>(run, "device.add", &asked, CHANGE);
    if let (Err(ClientError::Refused(_)), Driver::Ublk, None) = (&added, by, args.by) {
        // A worker of before does not know this driver, nor has each kernel's all features. Why both refuse, the first says.
        asked.by = None;
        by = Driver::Nbd;
        added = call(run, "device.add", &asked, CHANGE).or(added);
    }
    let done = added.map_err(|e| failed(&what, &e))?;
    if by == Driver::Ublk {
        show_partitions(&done.device);
    }
    tell(args.json, &done, || println!("{}", done.device))
}

/// The disk of this name. `None`: it is that of an image.
fn as_disk(name: &OsStr) -> Option<GuestDisk> {
    let is_image = name.as_bytes().starts_with(b"/")
        || name.as_bytes().contains(&b':')
        || Path::new(name).exists();
    name.to_str().filter(|_| !is_image)?.parse().ok()
}

/// Has the kernel show the partitions of a device, as it does by itself for other drivers: a ublk device whose server has no
/// rights is not searched. A device without partitions has none to show, and a host without partx shows them by hand.
fn show_partitions(device: &str) {
    let _ = Command::new("partx").args(["--update", device]).output();
}

fn load(driver: Driver) -> Result<(), Failure> {
    let module = driver.module();
    let failed = |why: String| {
        let help = match driver {
            Driver::Nbd => {
                "install the kernel's modules, or use a kernel that has this one (ferrite doctor)"
            }
            Driver::Ublk => "--by nbd does the same; ferrite doctor says what this kernel has",
        };
        Failure::new(format!("cannot load the module {module}"), why, help)
    };
    let done = Command::new("modprobe").arg(module).output();
    let done = done.map_err(|e| failed(format!("modprobe: {e}")))?;
    match done.status.success() {
        true => Ok(()),
        false => Err(failed(one_line(String::from_utf8_lossy(&done.stderr).trim()).into_owned())),
    }
}

pub(super) fn devices(args: &DevicesArgs) -> Result<(), Failure> {
    let run = &args.places.run_dir;
    if args.clean {
        let done: CleanedDevices = call(run, "device.clean", &Nothing {}, CHANGE)
            .map_err(|e| failed("cannot remove devices", &e))?;
        return tell(args.json, &done, || {
            done.removed.iter().for_each(|device| println!("{device} is removed"));
        });
    }
    let rows: DeviceRows = call(run, "device.list", &Nothing {}, super::ANSWER)
        .map_err(|e| failed("cannot list the devices", &e))?;
    tell(args.json, &rows, || print!("{}", table(&rows.devices)))
}

fn table(devices: &[DeviceRow]) -> String {
    let names = Names::read();
    let mut text = format!("{:<12}{:<16}{:<10}{:<6}IMAGE\n", "DEVICE", "DISK", "SIZE", "MODE");
    for row in devices {
        let (disk, size) = (names.disk(vbd(row.disk)), Human(row.bytes).to_string());
        let mode = if row.read_only { "r" } else { "w" };
        let image = one_line(row.image.as_deref().unwrap_or("-"));
        text += &format!("{:<12}{disk:<16}{size:<10}{mode:<6}{image}\n", row.device);
        for user in &row.users {
            text += &format!("    {}\n", one_line(user));
        }
    }
    text
}

fn failed(what: &str, e: &ClientError) -> Failure {
    let failure = not_answered(what, e, e.to_string());
    match e.is_in_use() {
        true => failure.with_code(Code::BUSY),
        false => failure,
    }
}
