//! The means of every experiment: programs, images, rounds of runs, and a progress line.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use ferrite_disk::{ImageName, Parents};
use ferrite_host::directory::HostDirectory;
use ferrite_image_tools::{Convert, ImageTools};
use ferrite_io::engines::EngineChoice;
use ferrite_xenhost::steps;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tempfile::TempDir;

use crate::compare::ferrite::Ferrite;
use crate::compare::image;
use crate::compare::rounds::{Plan, Rounds, Sample};

const LINE: &str = "{prefix} {bar:30} {pos}/{len} {eta} left, {wide_msg}";
/// How often a run is repeated in which the machine had no time for a single request.
const TRIES: u32 = 5;
/// Operations in flight while an image is converted.
const ENTRIES: u32 = 128;
/// The size of a store, which is a sparse file.
const STORE_SIZE: &str = "1G";
/// The folder of images on tmpfs.
const TMPFS: &str = "/dev/shm";

/// The settings of experiments.
pub(crate) struct Settings {
    /// How often each subject is measured, in turn.
    pub(crate) rounds: u32,
    /// The duration of each run.
    pub(crate) seconds: f64,
    /// A minimal run to test that it works.
    pub(crate) quick: bool,
    /// The folder of images on a disk.
    pub(crate) disk: PathBuf,
}

/// The settings, and the programs.
pub(crate) struct Lab {
    pub(crate) settings: Settings,
    ferrite: Ferrite,
    stop: Arc<AtomicBool>,
}

/// The medium of an experiment's images.
#[derive(Clone, Copy)]
pub(crate) enum Medium {
    Memory,
    Disk,
}

/// An image, until this is dropped.
pub(crate) struct Image {
    path: PathBuf,
    _folder: TempDir,
}

impl Image {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Lab {
    /// Uses the programs in the folder of this one.
    ///
    /// # Errors
    /// They are not there.
    pub(crate) fn new(settings: Settings, stop: Arc<AtomicBool>) -> Result<Lab> {
        let ferrite = Ferrite::beside(settings.seconds)?;
        Ok(Lab { settings, ferrite, stop })
    }

    /// All values, or the first and the last for a quick run.
    pub(crate) fn some<T: Copy>(&self, values: &[T]) -> Vec<T> {
        match (self.settings.quick, values) {
            (true, [first, .., last]) => vec![*first, *last],
            _ => values.to_vec(),
        }
    }

    /// Makes a raw image in which all of `mib` MiB have been written; at most 64 for a quick run.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn image(&self, medium: Medium, mib: usize) -> Result<Image> {
        let folder = self.folder(medium)?;
        let path = folder.path().join("disk.img");
        let mib = if self.settings.quick { mib.min(64) } else { mib };
        drop(image::filled(&path, mib)?);
        Ok(Image { path, _folder: folder })
    }

    /// Makes a copy in another format, given by the name, with allocation units of so many bytes.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn converted(&self, raw: &Image, name: &str, unit_bytes: u32) -> Result<Image> {
        let folder = TempDir::with_prefix_in(prefix(), parent(raw.path())?)?;
        let path = folder.path().join(name);
        let engine = EngineChoice::Auto.decide()?.kind;
        let tools = ImageTools {
            directory: &HostDirectory,
            engine: &|arena| engine.open(arena, ENTRIES),
            state_dir: None,
            fixed_size: false,
            unlocked: false,
            parents: Parents::default(),
            progress: &|_| self.check().is_ok(),
        };
        let how = Convert { unit_bytes: Some(unit_bytes), ..Convert::default() };
        let done = tools.convert(&ImageName::parse(raw.path())?, &ImageName::parse(&path)?, &how);
        self.check()?;
        done?;
        Ok(Image { path, _folder: folder })
    }

    /// Makes a copy as the volume `disk` of a new store, which has room for several such volumes.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn stored(&self, raw: &Image) -> Result<Image> {
        let folder = TempDir::with_prefix_in(prefix(), parent(raw.path())?)?;
        let store = folder.path().join("disk.store");
        let path = PathBuf::from(format!("store:{}#disk", store.display()));
        let run = |arguments: &[&OsStr]| {
            self.check()?;
            steps::output(Command::new(self.program()?).args(arguments)).map(drop)
        };
        let word = OsStr::new;
        run(&[word("store"), word("create"), store.as_os_str(), word("--size"), word(STORE_SIZE)])?;
        run(&[word("image"), word("convert"), raw.path().as_os_str(), path.as_os_str()])?;
        Ok(Image { path, _folder: folder })
    }

    fn folder(&self, medium: Medium) -> Result<TempDir> {
        let parent = match medium {
            Medium::Memory => Path::new(TMPFS),
            Medium::Disk => &self.settings.disk,
        };
        let cannot = || format!("cannot make a folder in {}", parent.display());
        TempDir::with_prefix_in(prefix(), parent).with_context(cannot)
    }

    /// The program `ferrite`.
    ///
    /// # Errors
    /// It is not beside this program.
    pub(crate) fn program(&self) -> Result<&Path> {
        let program = self.ferrite.program();
        ensure!(program.is_file(), "{} is not there: build or install it", program.display());
        Ok(program)
    }

    /// A run of `ferrite-bench` for a plan, with options separated by spaces.
    pub(crate) fn bench<'a>(
        &'a self,
        image: &'a (impl AsRef<OsStr> + ?Sized),
        options: impl Into<String>,
    ) -> impl Fn() -> Result<Sample> + 'a {
        let options = options.into();
        move || {
            let image = image.as_ref().to_str().context("the image's path is no text")?;
            let mut tries = 1;
            loop {
                match self.ferrite.bench(image, &options) {
                    Err(e) if tries < TRIES && idle(&e) => tries += 1,
                    done => return done,
                }
            }
        }
    }

    /// Measures all of a plan in turn, for the number of rounds in the settings.
    ///
    /// # Errors
    /// A run failed, or a signal asked for the end.
    pub(crate) fn measure(&self, plan: Plan<'_>) -> Result<Rounds> {
        let runs = u64::from(self.settings.rounds) * plan.len() as u64;
        let bar = ProgressBar::with_draw_target(Some(runs), ProgressDrawTarget::stderr());
        let bar = bar.with_style(ProgressStyle::with_template(LINE)?);
        bar.set_prefix(plan.title().to_owned());
        // The remaining time also changes during a run.
        bar.enable_steady_tick(Duration::from_millis(500));
        let mut first = true;
        let measured = plan.measure(self.settings.rounds, |name| {
            self.check()?;
            bar.inc(u64::from(!std::mem::take(&mut first)));
            bar.set_message(name.to_owned());
            Ok(())
        });
        bar.finish_and_clear();
        // Ctrl-C ends the run as well: its error is not the reason.
        self.check().and(measured)
    }

    /// Checks for a signal.
    ///
    /// # Errors
    /// A signal asked for the end.
    pub(crate) fn check(&self) -> Result<()> {
        match self.stop.load(Ordering::Relaxed) {
            true => bail!(Interrupted),
            false => Ok(()),
        }
    }
}

/// A signal asked for the end.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// The prefix of image folders, by which they can be recognised.
fn prefix() -> String {
    format!("ferrite-lab-{}-", std::process::id())
}

fn parent(path: &Path) -> Result<&Path> {
    path.parent().and_then(Path::parent).context("an image is in a folder")
}

/// Whether the machine had no time for a single request.
fn idle(error: &anyhow::Error) -> bool {
    format!("{error:#}").contains("no request ended within")
}
