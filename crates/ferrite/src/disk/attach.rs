//! `ferrite disk attach`: has xl attach an image to a guest, in the words that xl has for disks of this daemon.
//!
//! xl writes the disk to xenstore, and its script waits until the daemon serves it. So all of xl's rules for a guest
//! hold, and `xl block-list` and `xl block-detach` know the disk. An attachment that xl would refuse is
//! refused before, with the next step.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Output};

use clap::Args;
use ferrite_daemon::control::protocol::{Attached, Details, Nothing, ShowParams, Status};
use ferrite_daemon::directory;
use ferrite_daemon::params::{Image, Params};
use ferrite_disk::ImageName;
use ferrite_xen::store::Store;

use super::{ANSWER, call, id, not_answered, tell, wait};
use crate::cli::RunDirArgs;
use crate::exit::{Code, Failure};
use crate::guests::{Guest, Names};
use crate::plain::one_line;
use crate::vdev::{Vbd, device_name, device_number};

/// The toolstack's program.
const XL: &str = "xl";
/// The most characters of xl's text in an error. It has the text of its script, too.
const MOST_SAID: usize = 600;
/// How long the daemon may take to answer for a disk that xl has attached: its script has waited already.
const SERVED_S: u32 = 10;

/// `ferrite disk attach`.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// The guest: its name, UUID or number.
    #[arg(value_name = "GUEST")]
    pub(crate) guest: Guest,

    /// The guest's name of the new disk: xvdb, say.
    #[arg(value_name = "DEV", value_parser = device_number)]
    pub(crate) device: u32,

    /// A disk image (vhd:PATH, qcow2:PATH, raw:PATH, or a path whose extension says it) or block
    /// device; store:PATH#NAME for a volume of a store.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: OsString,

    /// Let the guest only read, and open the image read-only.
    #[arg(long)]
    pub(crate) read_only: bool,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// Attaches the image.
pub(super) fn run(args: &AttachArgs) -> Result<(), Failure> {
    let image = image("cannot attach", &args.image)?;
    let run_dir = &args.places.run_dir;
    let disk = Vbd { domain: args.guest.domain()?, device: args.device };
    let what = format!("cannot attach {}/{}", args.guest, device_name(args.device));
    must_follow_xenstore(&what, run_dir)?;
    must_be_free(&what, args, disk)?;
    let attached = xl(&what, "block-attach", disk, &[words(&image, disk, args.read_only)])?;
    if !attached.status.success() {
        return Err(not_attached(what, run_dir, disk, &attached));
    }
    let done: Attached = wait::until_served(run_dir, disk, SERVED_S)?;
    let name = Names::read().disk(disk);
    tell(args.json, &done, || println!("disk {name} is attached: {}", shown(&image.name())))
}

fn shown(text: &OsStr) -> String {
    one_line(&text.to_string_lossy()).into_owned()
}

/// The image, with an absolute path, as the daemon will understand xl's words.
pub(crate) fn image(what: &str, text: &OsStr) -> Result<Image, Failure> {
    let what = format!("{what} {}", text.display());
    let named = ImageName::of_existing(text, None)?;
    let refuse = |why: &str, help: &str| Failure::new(&what, why, help).with_code(Code::USAGE);
    let path = match named.format {
        // The name of an export is no path.
        format if format.is_remote() => named.path.clone(),
        _ => std::path::absolute(&named.path)
            .map_err(|e| Failure::new(&what, e, "name the image by its absolute path"))?,
    };
    // xl reads the words up to the end of a line, and takes commas off the end.
    let is_whole = path.to_str().is_some_and(|path| {
        !path.contains(char::is_control) && path.trim_end_matches([',', ' ']) == path
    });
    if !is_whole {
        let why = "xl cannot be told this name: it ends in a comma or space, has a control character, or is not UTF-8";
        return Err(refuse(why, "rename the image, or link it under another name"));
    }
    let named = ImageName { path, ..named };
    let file = named.volume().map_or(named.path.as_path(), |(store, _)| store);
    match std::fs::metadata(file) {
        // Whether its server is there, its worker finds out.
        _ if named.format.is_remote() => {}
        Ok(meta) if meta.is_dir() => {
            return Err(refuse("it is a directory", "name a file or block device"));
        }
        Ok(_) => {}
        Err(e) => {
            let is_missing = e.kind() == io::ErrorKind::NotFound;
            let help = "ferrite image create makes an image, and ferrite store create a volume";
            let failure = Failure::new(&what, format!("{}: {e}", file.display()), help);
            return Err(if is_missing { failure.with_code(Code::NOT_FOUND) } else { failure });
        }
    }
    let path = named.path.as_os_str().as_bytes();
    let params = match named.format.is_remote() {
        // Its scheme says what it is.
        true => path.to_owned(),
        false => [named.format.name().as_bytes(), b":", path].concat(),
    };
    match Params::parse(&params) {
        Params::Image(image) => Ok(image),
        Params::Invalid(why) => Err(refuse(&why, "name an image")),
        Params::Empty | Params::Tap => Err(refuse("it names no image", "name an image")),
    }
}

/// xl's words for the disk. xl knows raw images and VHD, and hands any other target on as it is, so that says its format
/// itself. The target is the last word: xl takes all that follows for its name.
fn words(image: &Image, disk: Vbd, read_only: bool) -> OsString {
    let bare = image.path.as_os_str();
    let is_clear = |format: &str| {
        let params = [format.as_bytes(), b":", bare.as_bytes()].concat();
        Params::parse(&params) == Params::Image(image.clone())
    };
    let (format, target) = match image.format.tapdisk_word() {
        "vhd" => ("vhd", bare.to_owned()),
        // A raw image that has the name of another format is refused by its path alone.
        "aio" if is_clear("aio") => ("raw", bare.to_owned()),
        _ => ("raw", image.name()),
    };
    let device = device_name(disk.device);
    let access = if read_only { "r" } else { "w" };
    let mut words = OsString::from(format!(
        "format={format},vdev={device},access={access},backendtype=tap,script=block-ferrite,target="
    ));
    words.push(target);
    words
}

/// Refuses a disk that no daemon would serve: xl would wait for the daemon, and leave the disk in xenstore.
fn must_follow_xenstore(what: &str, run_dir: &Path) -> Result<(), Failure> {
    let status: Status = call(run_dir, "daemon.status", &Nothing {}, ANSWER)
        .map_err(|e| not_answered(what, &e, e.to_string()))?;
    match status.no_xen {
        None => Ok(()),
        Some(why) => Err(Failure::new(
            what,
            format!("the daemon has no Xen: {why}"),
            "ferrite doctor shows what is missing",
        )),
    }
}

/// Refuses a device that the guest has already, and a guest that does not exist.
fn must_be_free(what: &str, args: &AttachArgs, disk: Vbd) -> Result<(), Failure> {
    let guest = format!("/local/domain/{}", disk.domain);
    let failed = |e| Failure::new(what, e, "ferrite doctor shows what is missing");
    let mut store = Store::open().map_err(failed)?;
    if store.read(&guest).map_err(failed)?.is_none() {
        let help = "xl list shows the guests";
        let failure = Failure::new(what, format!("there is no guest {}", args.guest), help);
        return Err(failure.with_code(Code::NOT_FOUND));
    }
    let taken = store.read(&format!("{guest}/device/vbd/{}", disk.device)).map_err(failed)?;
    if taken.is_some() {
        let help = format!(
            "name another device (xl block-list {} shows those in use), or detach that disk first: \
             ferrite disk detach {}/{}",
            disk.domain,
            args.guest,
            device_name(disk.device)
        );
        let why = format!("the guest has a disk {} already", device_name(disk.device));
        return Err(Failure::new(what, why, help).with_code(Code::BUSY));
    }
    Ok(())
}

/// Runs xl on the disk's guest, by its number: a name may be another guest's by now.
fn xl(what: &str, verb: &str, disk: Vbd, words: &[OsString]) -> Result<Output, Failure> {
    let mut command = Command::new(XL);
    command.arg(verb).arg(disk.domain.to_string()).args(words);
    command.output().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => Failure::new(
            what,
            "there is no program xl, which attaches disks to guests",
            "install it (xen-utils) and run this in the control domain; another toolstack attaches \
             disks by its own commands (docs/operations.md)",
        ),
        _ => Failure::new(what, format!("cannot run xl: {e}"), "run this as root"),
    })
}

/// Why xl has not attached the disk. The daemon knows that best, if the disk got as far. xl leaves such a disk in
/// xenstore: it is removed, so that the command can be repeated.
fn not_attached(what: String, run_dir: &Path, disk: Vbd, said: &Output) -> Failure {
    let text = String::from_utf8_lossy(&said.stderr);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let words: String = words.chars().take(MOST_SAID).collect();
    let shown = call::<Details>(run_dir, "disk.show", &ShowParams { disk: id(disk) }, ANSWER);
    let reason = shown.ok().and_then(|shown| shown.disk.why.zip(shown.disk.help));
    let (why, help) = reason.unwrap_or_else(|| {
        let help = "xl before 4.19 attaches no such disks (xl info shows its version); \
                    /var/log/xen/xen-hotplug.log has the script's output";
        (format!("xl ended with {}: {words}", said.status), help.to_owned())
    });
    match left_behind(disk) {
        false => Failure::new(what, why, help),
        true => {
            let number = OsString::from(disk.device.to_string());
            let removed = xl(&what, "block-detach", disk, &[number]);
            let is_removed = removed.is_ok_and(|output| output.status.success());
            let then = match is_removed {
                true => String::new(),
                false => format!("; before: xl block-detach {} {}", disk.domain, disk.device),
            };
            Failure::new(what, why, format!("{help}{then}"))
        }
    }
}

/// Whether the disk is in xenstore.
fn left_behind(disk: Vbd) -> bool {
    let of_guest = format!("/local/domain/{}/device/vbd/{}", disk.domain, disk.device);
    let Ok(mut store) = Store::open() else { return false };
    [of_guest, directory::path(id(disk))]
        .iter()
        .any(|path| store.read(path).is_ok_and(|value| value.is_some()))
}
