//! `--control DIR` of `ferrite serve` and `ferrite export nbd`: keeper and worker serve the disk, as they do the
//! daemon's disks. All commands of `ferrite disk` and `ferrite job` work on it by `--run-dir DIR`.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use ferrite_daemon::config::{self, Config, DiskOptions};
use ferrite_daemon::control::protocol::ExportParams;
use ferrite_daemon::jobs::Means;
use ferrite_daemon::keepers::Keepers;
use ferrite_daemon::state::{DiskId, States};
use ferrite_daemon::{Daemon, Paths, Standalone};
use ferrite_serve::waker::Waker;
use ferrite_xen::store::Store;

use crate::daemon::Ours;
use crate::disk::attach;
use crate::exit::{Code, Failure};
use crate::parents::ParentsArgs;
use crate::serve::{IMAGES, MAP_BUDGET, MEMORY_BUDGET, POLL_BUDGET, RUN_DIR, tell_of_processors};

/// The folder by which a running disk is changed.
#[derive(Debug, Args)]
pub(crate) struct ControlArgs {
    /// Make DIR, with a control socket by which the running disk is paused, snapshot, merged, resized, switched and
    /// limited: ferrite disk COMMAND tap/0 --run-dir DIR. Its processes outlive this one if it is killed; the same command
    /// goes on with them. DIR has to be on tmpfs.
    #[arg(long, value_name = "DIR")]
    pub(crate) control: Option<PathBuf>,
}

/// A disk that is served with a control socket.
pub(crate) struct Controlled<'a> {
    pub(crate) control: &'a Path,
    pub(crate) image: &'a OsStr,
    pub(crate) read_only: bool,
    pub(crate) options: DiskOptions,
    pub(crate) parents: &'a ParentsArgs,
    /// The guest's disk that it is.
    pub(crate) guest: Option<DiskId>,
    /// How others than programs of this host reach it.
    pub(crate) export: Option<ExportParams>,
    /// The path of its NBD socket.
    pub(crate) socket: Option<&'a Path>,
}

impl Controlled<'_> {
    /// Serves the disk until a signal comes or its guest has left it.
    pub(crate) fn run(self, stop: &Waker) -> Result<(), Failure> {
        let what = format!("cannot serve {} with --control", self.image.display());
        if !rustix::process::geteuid().is_root() {
            let why = "its processes give up rights that only root has";
            return Err(Failure::new(what, why, "run it as root, or leave --control out"));
        }
        let absolute = |path: &Path| {
            std::path::absolute(path)
                .map_err(|e| Failure::new(&what, e, "name the path from the root folder on"))
        };
        let run = absolute(self.control)?;
        let disk = Standalone {
            image: attach::image("cannot serve", self.image)?,
            read_only: self.read_only,
            guest: self.guest,
            export: self.export.clone(),
            socket: self.socket.map(absolute).transpose()?,
        };
        let failed = |e: ferrite_daemon::Failure| Failure::new(&what, e.why, e.help);
        disk.prepare(&run).map_err(failed)?;
        let served = self.serve(&disk, &run, stop, &what);
        // The states of disks that are served on, or that a guest waits for, stay for the next process.
        if States::peek_all(&Paths { run: run.clone() }.states()).is_empty() {
            fs::remove_dir_all(&run).unwrap_or_else(|e| {
                tracing::warn!("cannot remove {}: {e}", run.display());
            });
        }
        served
    }

    fn serve(
        &self,
        disk: &Standalone,
        run: &Path,
        stop: &Waker,
        what: &str,
    ) -> Result<(), Failure> {
        let cannot = |e: &std::io::Error| {
            Failure::new(what, format!("{}: {e}", run.display()), "name another folder")
                .with_code(Code::FAILED)
        };
        let not_begun = |e: &std::io::Error| match e.kind() {
            std::io::ErrorKind::AddrInUse => {
                let why = format!("another process serves it, with {}", run.display());
                Failure::new(what, why, "stop that one first").with_code(Code::BUSY)
            }
            _ => cannot(e),
        };
        share(run).map_err(|e| cannot(&e))?;
        let ours = Ours { config: PathBuf::from(config::PATH) };
        let keepers = Arc::new(Keepers::new(run, Box::new(ours.clone())));
        let end = Arc::new(Waker::new().map_err(|e| cannot(&e))?);
        let paths = Paths { run: run.to_owned() };
        let daemon =
            Daemon::new(self.config(disk, run), paths, keepers, Box::new(Store::open), end)
                .map_err(|e| not_begun(&e))?
                .with_jobs(Means::default().with_tools(Arc::new(ours)));
        if disk.guest.is_some() {
            tell_of_processors(run);
        }
        let ready = |id: DiskId, places: &[String]| {
            tracing::info!(
                "serving {} as {id}; to change it: ferrite disk --help, with --run-dir {}",
                self.image.display(),
                run.display()
            );
            let socket = disk.socket.iter().map(|socket| socket.display().to_string());
            socket
                .chain(places.iter().cloned())
                .for_each(|place| tracing::info!("listening at {place}"));
        };
        daemon.run_standalone(disk, stop, &ready).map_err(|e| Failure::new(what, e.why, e.help))
    }

    fn config(&self, disk: &Standalone, run: &Path) -> Config {
        let of_image = disk.image.file().parent().map(Path::to_owned);
        Config {
            image_folders: of_image.into_iter().chain(self.parents.named().to_vec()).collect(),
            parent_folders: self.parents.named().to_vec(),
            state_folder: run.join("state"),
            disks: self.options.clone(),
            ..Config::default()
        }
    }
}

/// Links the host's journals into this folder, which the next process that opens an image looks for, and the budgets of
/// all disks together.
fn share(run: &Path) -> std::io::Result<()> {
    let host = Path::new(RUN_DIR);
    ferrite_host::names::create_dir_all(host.join(IMAGES), rustix::fs::Mode::RWXU)?;
    for name in [IMAGES, MAP_BUDGET, POLL_BUDGET, MEMORY_BUDGET] {
        match symlink(host.join(name), run.join(name)) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
    }
    Ok(())
}
