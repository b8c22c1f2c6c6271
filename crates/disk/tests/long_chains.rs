//! Chains that are as long as they may be, and longer. By themselves: the memory of the process is measured.

mod common;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ferrite_disk::{Disk, ErrorKind, Format, ImageName, MAX_LAYERS, OpenOptions};
use ferrite_image_tools::{Convert, NewImage};

use crate::common::work;
use ferrite_hostile_inputs::images::Sketch;
use ferrite_hostile_inputs::images::vhd::{self, Dynamic, Parent};
use ferrite_hostile_inputs::images::{qcow2, qcow2::Image};
use ferrite_testkit::proc::Memory;
use tempfile::TempDir;

const FORMATS: [Format; 2] = [Format::Vhd, Format::Qcow2];

fn name(dir: &Path, number: usize, format: Format) -> ImageName {
    ImageName { format, path: dir.join(format!("{number}.{format}")) }
}

/// An image with its number as its identity, on the one before.
fn image(number: usize, format: Format) -> Sketch {
    let uuid = |n: usize| {
        let mut uuid = [1; 16];
        uuid[..8].copy_from_slice(&n.to_be_bytes());
        uuid
    };
    let below = number.checked_sub(1);
    match format {
        Format::Vhd => {
            let parent = below.map(|n| Parent::beside(uuid(n), &format!("{n}.vhd")));
            Dynamic { uuid: uuid(number), parent, ..vhd::small() }.build()
        }
        _ => {
            let backing = below.map(|n| (format!("{n}.qcow2"), Some("qcow2".into())));
            Image { backing, ..qcow2::small() }.build()
        }
    }
}

/// One test at a time, since the memory of the whole process is measured.
static ALONE: Mutex<()> = Mutex::new(());

/// A chain of so many images as other programs make them, and its leaf.
fn chain(layers: usize, format: Format) -> (TempDir, ImageName) {
    let dir = crate::common::dir_in_memory();
    for number in 0..layers {
        image(number, format).save(&name(dir.path(), number, format).path).unwrap();
    }
    let leaf = name(dir.path(), layers - 1, format);
    (dir, leaf)
}

fn serve(leaf: &ImageName) -> Result<Disk, ferrite_disk::DiskError> {
    Disk::open_image(leaf, &OpenOptions::default())
}

#[test]
fn no_chain_is_made_that_cannot_be_served() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for format in FORMATS {
        let (dir, leaf) = chain(MAX_LAYERS - 1, format);
        let path = |file: &str| dir.path().join(format!("{file}.{format}"));
        let named = |path: PathBuf| ImageName { format, path };
        work(None, |tools| tools.snapshot(&leaf, &named(path("last")))).unwrap();
        assert_eq!(work(None, |tools| tools.info(&leaf)).unwrap().chain.len(), MAX_LAYERS);
        drop(serve(&leaf).unwrap());
        let before = std::fs::metadata(&leaf.path).unwrap().permissions();
        let on = NewImage { parent: Some(leaf.clone()), ..NewImage::default() };
        let errors = [
            work(None, |tools| tools.snapshot(&leaf, &named(path("more")))).unwrap_err(),
            work(None, |tools| tools.create(&named(path("more")), &on)).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Unsuitable, "{error}");
            assert!(error.to_string().contains("257 images, and may have 256"), "{error}");
            assert!(error.help().contains("ferrite image coalesce"), "{}", error.help());
        }
        assert!(!path("more").exists());
        assert_eq!(std::fs::metadata(&leaf.path).unwrap().permissions(), before);
        drop(serve(&leaf).unwrap());
    }
}

#[test]
fn a_chain_that_is_too_long_is_read_and_made_shorter() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for format in FORMATS {
        let layers = MAX_LAYERS + 6;
        let (dir, leaf) = chain(layers, format);
        let error = serve(&leaf).unwrap_err();
        assert!(error.help().contains("ferrite image coalesce"), "{}", error.help());
        work(None, |tools| {
            let info = tools.info(&leaf).unwrap();
            assert_eq!(info.chain.len(), layers);
            let mut mapped = 0;
            let count = |extent: &ferrite_image_tools::Extent| {
                mapped += extent.length_bytes;
                true
            };
            tools.map(&leaf, count).unwrap();
            assert_eq!(mapped, info.virtual_bytes);
            let flat = ImageName { format: Format::Raw, path: dir.path().join("flat") };
            tools.convert(&leaf, &flat, &Convert::default()).unwrap();
            for _ in MAX_LAYERS..layers {
                tools.coalesce(&leaf, false).unwrap();
            }
            assert_eq!(tools.info(&leaf).unwrap().chain.len(), MAX_LAYERS);
            assert!(tools.compare(&leaf, &flat, false).unwrap().identical, "{format}");
        });
        drop(serve(&leaf).unwrap());
    }
}

/// Tables and caches of a thousand images.
#[test]
fn the_longest_chain_that_is_read_takes_little_memory() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    for format in FORMATS {
        let (_dir, leaf) = chain(1000, format);
        let memory = Memory::watch();
        assert_eq!(work(None, |tools| tools.info(&leaf)).unwrap().chain.len(), 1000);
        let taken = memory.taken_kib();
        assert!(taken < 128 << 10, "{format}: {taken} KiB");
    }
}
