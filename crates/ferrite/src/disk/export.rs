//! `ferrite disk export`, `unexport` and `exports`: disks of the daemon for clients of other hosts.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use clap::Args;
use ferrite_daemon::control::protocol::{
    ExportParams, ExportRow, ExportRows, Nothing, UnexportParams,
};
use ferrite_daemon::state::DiskId;

use super::{ANSWER, call, id, not_answered, of_disk, tell, vbd};
use crate::cli::{DiskArg, RunDirArgs};
use crate::exit::{Code, Failure};
use crate::export::network::NetworkArgs;
use crate::guests::Names;
use crate::plain::one_line;

/// The help of `disk export` after its options.
pub(crate) const HELP: &str = "\
It prints where it listens: for clients of NBD, or for a guest of QEMU (--vhost-user). The export goes on when the daemon or the disk's worker ends, until it is removed
(ferrite disk unexport) or the disk is detached. Certificates: docs/access.md.";

/// `ferrite disk export`.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    #[command(flatten)]
    pub(crate) network: NetworkArgs,

    /// Listen at this socket for a guest of QEMU (vhost-user-blk) in place of clients of NBD. The socket is accessible
    /// to the daemon's user only.
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["listen", "no_list"])]
    pub(crate) vhost_user: Option<PathBuf>,

    /// Queues that this guest is offered; it uses up to one a processor.
    #[arg(long, value_name = "N", requires = "vhost_user",
          value_parser = clap::value_parser!(u16).range(1..=16))]
    pub(crate) queues: Option<u16>,

    /// The name by which clients choose the disk, or that the guest of QEMU sees as its serial. Without it, that of the
    /// image's file without extension, or of the volume. The empty name chooses it, too.
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,

    /// Let clients only read. A guest's disk needs it, or --shared.
    #[arg(long)]
    pub(crate) read_only: bool,

    /// Let clients write to the disk of a guest that may write, too.
    #[arg(long, conflicts_with = "read_only")]
    pub(crate) shared: bool,

    /// Do not tell clients the name: a client that asks for the list gets an error.
    #[arg(long)]
    pub(crate) no_list: bool,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// `ferrite disk unexport`.
#[derive(Debug, Args)]
pub(crate) struct UnexportArgs {
    #[command(flatten)]
    pub(crate) disk: DiskArg,

    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

/// `ferrite disk exports`.
#[derive(Debug, Args)]
pub(crate) struct ExportsArgs {
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) places: RunDirArgs,
}

pub(super) fn export(args: &ExportArgs) -> Result<(), Failure> {
    let usage = |what: &str, why: &str, help: &str| {
        Failure::new(what.to_owned(), why, help).with_code(Code::USAGE)
    };
    if let Some(socket) = &args.vhost_user {
        return export_by_vhost(args, socket);
    }
    if args.network.listen.is_empty() {
        let help = "name one: --listen ADDRESS:PORT, or --vhost-user SOCKET for a guest of QEMU";
        return Err(usage("cannot export the disk", "no address is named", help));
    }
    if args.network.tls.is_none() && !args.network.plain {
        let help = "give --tls DIR with certificates (docs/access.md), or --plain where all who reach the port may read";
        return Err(usage("cannot export the disk", "it is not said how clients are known", help));
    }
    let disk = args.disk.disk.find()?;
    let folder = args.network.tls.as_ref().map(std::path::absolute).transpose();
    let folder = folder
        .ok()
        .map(|folder| folder.map(|folder| folder.into_os_string().into_string()).transpose());
    let Some(Ok(tls)) = folder else {
        let help = "rename the folder of certificates";
        return Err(usage("cannot export the disk", "a name is not UTF-8", help));
    };
    let asked = ExportParams {
        disk: id(disk),
        listen: args.network.listen.iter().map(ToString::to_string).collect(),
        vhost_user: None,
        queues: None,
        tls,
        any_client: args.network.tls_any_client,
        plain: args.network.plain,
        name: args.name.clone(),
        read_only: args.read_only,
        shared: args.shared,
        no_list: args.no_list,
    };
    let done: ExportRow = call(&args.places.run_dir, "disk.export", &asked, ANSWER)
        .map_err(|e| of_disk("cannot export disk", disk, &e))?;
    tell(args.json, &done, || done.listen.iter().for_each(|place| println!("{place}")))
}

fn export_by_vhost(args: &ExportArgs, socket: &Path) -> Result<(), Failure> {
    let disk = args.disk.disk.find()?;
    let socket = std::path::absolute(socket).ok();
    let Some(Ok(socket)) = socket.map(|path| path.into_os_string().into_string()) else {
        let help = "name another place";
        return Err(Failure::new("cannot export the disk", "the socket's name is not UTF-8", help)
            .with_code(Code::USAGE));
    };
    let asked = ExportParams {
        disk: id(disk),
        listen: Vec::new(),
        vhost_user: Some(socket),
        queues: args.queues,
        tls: None,
        any_client: false,
        plain: false,
        name: args.name.clone(),
        read_only: args.read_only,
        shared: args.shared,
        no_list: false,
    };
    let done: ExportRow = call(&args.places.run_dir, "disk.export", &asked, ANSWER)
        .map_err(|e| of_disk("cannot export disk", disk, &e))?;
    tell(args.json, &done, || done.vhost_user.iter().for_each(|socket| println!("{socket}")))
}

pub(super) fn unexport(args: &UnexportArgs) -> Result<(), Failure> {
    let disk = args.disk.disk.find()?;
    let asked = UnexportParams { disk: id(disk) };
    let done: ExportRow = call(&args.places.run_dir, "disk.unexport", &asked, ANSWER)
        .map_err(|e| of_disk("cannot end the export of disk", disk, &e))?;
    tell(args.json, &done, || println!("disk {disk} is not exported any more"))
}

pub(super) fn exports(args: &ExportsArgs) -> Result<(), Failure> {
    let rows: ExportRows = call(&args.places.run_dir, "disk.exports", &Nothing {}, ANSWER)
        .map_err(|e| not_answered("cannot list the exports", &e, e.to_string()))?;
    tell(args.json, &rows, || print!("{}", table(&rows.exports)))
}

/// Says which exports go on by another program than this: an upgrade leaves their processes, which have clients.
pub(super) fn say_which_are_old(run: &Path, disk: Option<DiskId>, binary: &Path) {
    // A daemon that knows no exports has none.
    let Ok(rows) = call::<ExportRows>(run, "disk.exports", &Nothing {}, ANSWER) else { return };
    let file = |path: &Path| fs::metadata(path).ok().map(|seen| (seen.dev(), seen.ino()));
    let new = file(binary);
    for row in rows.exports.iter().filter(|row| disk.is_none_or(|disk| disk == row.disk)) {
        let Some(pid) = row.pid else { continue };
        let old = file(Path::new(&format!("/proc/{pid}/exe")));
        if old.is_some() && old != new {
            let disk = row.disk;
            eprintln!(
                "the export of disk {disk} goes on by the program before, and its clients stay connected; to have it \
                 upgraded: ferrite disk unexport {disk}, then ferrite disk export again"
            );
        }
    }
}

fn table(exports: &[ExportRow]) -> String {
    let names = Names::read();
    let mut text = format!("{:<16}{:<16}{:<6}{:<7}LISTEN\n", "DISK", "NAME", "MODE", "TLS");
    for row in exports {
        let (disk, name) = (names.disk(vbd(row.disk)), one_line(&row.name));
        let mode = if row.read_only { "r" } else { "w" };
        let tls = match (&row.tls, row.any_client) {
            (None, _) => "-",
            (Some(_), true) => "any",
            (Some(_), false) => "known",
        };
        let places = row.listen.iter().chain(&row.vhost_user).map(|place| one_line(place));
        let places = places.collect::<Vec<_>>().join(" ");
        text += &format!("{disk:<16}{name:<16}{mode:<6}{tls:<7}{places}\n");
        if let Some(why) = &row.why {
            text += &format!("    {}\n", one_line(why));
        }
    }
    text
}
