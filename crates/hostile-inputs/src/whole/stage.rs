//! A directory in memory with the image of each input in turn, and parents that it may name.

use std::cell::RefCell;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ferrite_disk::{Disk, DiskError, Format, ImageName, OnDamage, OpenOptions};
use tempfile::TempDir;

use crate::images::{Sketch, qcow2, vhd};

/// Small limits, which inputs of a few KiB can exceed.
const METADATA_BYTES: usize = 1 << 20;
/// Files are compared by their first bytes, so many, and by their allocation.
const COMPARED_BYTES: u64 = 256 << 10;

/// See the module text. It belongs to one thread.
pub(super) struct Stage {
    dir: TempDir,
    parents: Vec<PathBuf>,
    /// Empty journals, with their names.
    templates: RefCell<Vec<(Format, (String, Sketch))>>,
}

/// Size, allocation, and beginning of a file.
type Fingerprint = (u64, u64, Vec<u8>);

thread_local! {
    static STAGE: Stage = Stage::new().expect("a directory on /dev/shm");
}

impl Stage {
    pub(super) fn with(work: impl FnOnce(&Stage)) {
        STAGE.with(work);
    }

    fn new() -> std::io::Result<Stage> {
        let dir = TempDir::new_in("/dev/shm")?;
        let at = |name: &str| dir.path().join(name);
        let over = |name: &str| vhd::Dynamic {
            uuid: [8; 16],
            present: vec![1],
            parent: Some(vhd::Parent::beside([7; 16], name)),
            ..vhd::small()
        };
        let backed = |path: &str, format: &str| qcow2::Image {
            present: vec![1],
            backing: Some((path.into(), Some(format.into()))),
            ..qcow2::small()
        };
        let parents = [
            ("raw", Sketch::new(8 << 10)),
            ("parent.vhd", vhd::small().build()),
            ("middle.vhd", over("parent.vhd").build()),
            ("loop.vhd", over("image.vhd").build()),
            ("parent.qcow2", qcow2::small().build()),
            ("middle.qcow2", backed("parent.qcow2", "qcow2").build()),
            ("loop.qcow2", backed("image.qcow2", "qcow2").build()),
        ];
        let mut paths = Vec::new();
        for (name, sketch) in parents {
            sketch.save(&at(name))?;
            paths.push(at(name));
        }
        std::fs::create_dir(at("dir"))?;
        std::fs::create_dir(at("state"))?;
        Ok(Stage { dir, parents: paths, templates: RefCell::default() })
    }

    /// The path of that format's image.
    pub(super) fn path(&self, format: Format) -> PathBuf {
        self.dir.path().join(format!("image.{format}"))
    }

    /// The folder of journals.
    pub(super) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// The empty journal of that format's image, if it was made already.
    pub(super) fn template(&self, format: Format) -> Option<(String, Sketch)> {
        let templates = self.templates.borrow();
        templates.iter().find(|(of, _)| *of == format).map(|(_, journal)| journal.clone())
    }

    pub(super) fn set_template(&self, format: Format, journal: &(String, Sketch)) {
        self.templates.borrow_mut().push((format, journal.clone()));
    }

    pub(super) fn put_image(&self, format: Format, sketch: &Sketch) {
        sketch.save(&self.path(format)).expect("room on /dev/shm");
    }

    pub(super) fn open(
        &self,
        format: Format,
        read_only: bool,
        state_dir: Option<PathBuf>,
    ) -> Result<Disk, DiskError> {
        let options = OpenOptions {
            read_only,
            state_dir,
            metadata_bytes: METADATA_BYTES,
            ..OpenOptions::default()
        };
        Disk::open_image(&ImageName { format, path: self.path(format) }, &options)
    }

    /// Opens an image that may be damaged, for reading.
    pub(super) fn open_in_spite(
        &self,
        format: Format,
        on_damage: OnDamage,
    ) -> Result<Disk, DiskError> {
        let options = OpenOptions {
            read_only: true,
            on_damage,
            metadata_bytes: METADATA_BYTES,
            ..OpenOptions::default()
        };
        Disk::open_image(&ImageName { format, path: self.path(format) }, &options)
    }

    /// A value that changes when a file does.
    pub(super) fn fingerprint(&self) -> Vec<Fingerprint> {
        let images = Format::ALL.map(|format| self.path(format));
        images
            .iter()
            .filter(|path| path.exists())
            .map(|path| fingerprint(path))
            .chain(self.parents())
            .collect()
    }

    pub(super) fn parents(&self) -> Vec<Fingerprint> {
        self.parents.iter().map(|path| fingerprint(path)).collect()
    }
}

fn fingerprint(path: &Path) -> Fingerprint {
    let file = File::open(path).expect("a file of the stage");
    let meta = file.metadata().expect("its size");
    let mut bytes = Vec::new();
    file.take(COMPARED_BYTES).read_to_end(&mut bytes).expect("its bytes");
    (meta.len(), meta.blocks(), bytes)
}
