//! Chains of images whose contents are known.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ferrite_disk::{Disk, DiskError, ErrorKind, Format, ImageName, OpenOptions, Session};
use ferrite_image_tools::{MergeCopy, NewImage, Stretch, Verdict};
use ferrite_simio::SimWorld;
use ferrite_testkit::bytes::first_difference;
use tempfile::TempDir;

use crate::common::vhd::at;
use crate::common::{MIB, Queue, dir_in_memory, work};

pub(crate) const BYTES: u64 = 8 * MIB;
pub(crate) const SMALL: u64 = 512 << 10;

/// A chain, the base first, each image with data of its own, and the content of its leaf.
pub(crate) struct Chain {
    pub(crate) dir: TempDir,
    pub(crate) images: Vec<ImageName>,
    pub(crate) model: Vec<u8>,
}

impl Chain {
    /// A chain of so many images with these extensions from the base on; the last one counts for the rest.
    pub(crate) fn new(formats: &[&str], count: usize) -> Chain {
        Chain::with(formats, count, |_| NewImage { bytes: Some(BYTES), ..NewImage::default() })
    }

    pub(crate) fn with(formats: &[&str], count: usize, new: impl Fn(usize) -> NewImage) -> Chain {
        let dir = dir_in_memory();
        let mut chain = Chain { dir, images: Vec::new(), model: Vec::new() };
        for i in 0..count {
            let format = formats.get(i).or(formats.last()).unwrap();
            let name = chain.name(&format!("i{i}.{format}"));
            let new = NewImage { parent: chain.images.last().cloned(), ..new(i) };
            work(None, |tools| tools.create(&name, &new)).unwrap();
            chain.model.resize(new.bytes.unwrap_or(BYTES) as usize, 0);
            chain.images.push(name);
            let mut queue = chain.queue();
            chain.fill(&mut queue, i as u64);
            queue.close().unwrap();
        }
        chain
    }

    /// A copy of all files in another folder.
    pub(crate) fn copied(&self) -> Chain {
        let dir = dir_in_memory();
        let copy = |name: &ImageName| {
            let path = dir.path().join(name.path.file_name().unwrap());
            fs::copy(&name.path, &path).unwrap();
            ImageName { path, ..name.clone() }
        };
        let images = self.images.iter().map(copy).collect();
        Chain { dir, images, model: self.model.clone() }
    }

    pub(crate) fn name(&self, file: &str) -> ImageName {
        ImageName::parse(at(&self.dir, file).to_str().unwrap()).unwrap()
    }

    pub(crate) fn leaf(&self) -> &ImageName {
        self.images.last().unwrap()
    }

    pub(crate) fn queue(&self) -> Queue {
        let options = OpenOptions { thin: true, ..OpenOptions::default() };
        Queue::new(Disk::open_image(self.leaf(), &options).unwrap())
    }

    /// Data that only this image has, data over those of the one below, and zeros over data.
    pub(crate) fn fill(&mut self, queue: &mut Queue, i: u64) {
        // In sixteenths of the disk.
        let part = self.model.len() as u64 / 16;
        for (at, len) in [(i * part + 512, 70_000), (8 * part + i * 4096, 8192), (12 * part, 4096)]
        {
            self.put(queue, at, &vec![i as u8 + 1; len / 512 * 512]);
        }
        if i > 0 && self.leaf().format != Format::Raw {
            let at = (i - 1) * part + 4096;
            queue.write_zeroes(at, 8192).unwrap();
            self.model[at as usize..at as usize + 8192].fill(0);
        }
    }

    pub(crate) fn put(&mut self, queue: &mut Queue, at: u64, bytes: &[u8]) {
        queue.write(at, bytes).unwrap();
        self.model[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn stretch(&self, from: usize, to: usize) -> Stretch {
        let [from, to] = [from, to].map(|i| self.images[i].clone());
        Stretch { leaf: self.leaf().clone(), from, to }
    }

    /// Checks what the leaf reads as, and that all images of its chain are in order.
    #[track_caller]
    pub(crate) fn reads_right(&self) {
        self.reads_the_model();
        let checked = work(None, |tools| tools.check_strictly(self.leaf(), true)).unwrap();
        assert_eq!(checked.verdict, Verdict::InOrder, "{checked:?}");
    }

    /// The same after a crash: other programs may want a repair first, and space may be lost.
    #[track_caller]
    pub(crate) fn reads_right_in_spite(&self) {
        self.reads_the_model();
        let checked = patiently(|| work(None, |tools| tools.check(self.leaf(), true))).unwrap();
        assert!(checked.usable && checked.verdict <= Verdict::Leaks, "{checked:?}");
    }

    #[track_caller]
    pub(crate) fn reads_the_model(&self) {
        let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
        let disk = patiently(|| Disk::open_image(self.leaf(), &read_only)).unwrap();
        let engine = |arena| Ok(SimWorld::new(0).engine(arena));
        let mut session = Session::new(Arc::new(disk), engine).unwrap();
        let mut found = vec![0; self.model.len()];
        for (i, part) in found.chunks_mut(MIB as usize / 2).enumerate() {
            session.read(i as u64 * MIB / 2, part).unwrap();
        }
        assert_eq!(first_difference(&found, &self.model), None);
    }

    /// The files of the folder.
    pub(crate) fn files(&self) -> Vec<String> {
        let names = fs::read_dir(self.dir.path()).unwrap();
        let mut names: Vec<String> =
            names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Checks that these images of the chain are all that is left.
    #[track_caller]
    pub(crate) fn is_left_with(&self, images: &[usize]) {
        let name =
            |i: &usize| self.images[*i].path.file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(self.files(), images.iter().map(name).collect::<Vec<_>>());
        let layers = patiently(|| Disk::open_image(self.leaf(), &OpenOptions::default())).unwrap();
        assert_eq!(layers.media().len(), images.len());
    }

    pub(crate) fn coalesce(
        &self,
        stretch: &Stretch,
        force: bool,
    ) -> Result<Vec<String>, DiskError> {
        let Stretch { leaf, from, to } = stretch;
        let done = work(None, |t| t.coalesce_stretch(leaf, Some(from), Some(to), force));
        done.map(|done| done.notes)
    }
}

#[track_caller]
pub(crate) fn reads(queue: &mut Queue, model: &[u8]) {
    for (i, part) in model.chunks(MIB as usize).enumerate() {
        let found = queue.read(i as u64 * MIB, part.len()).unwrap();
        assert_eq!(first_difference(&found, part).map(|at| at as u64 + i as u64 * MIB), None);
    }
}

pub(crate) fn copy(stretch: &Stretch) -> Result<Vec<String>, DiskError> {
    work(None, |tools| tools.merge_copy(stretch, &MergeCopy::default())).map(|done| done.notes)
}

pub(crate) fn relink(stretch: &Stretch) -> Result<Vec<String>, DiskError> {
    work(None, |tools| tools.merge_relink(stretch)).map(|done| done.notes)
}

pub(crate) fn clean(stretch: &Stretch) -> Result<Vec<String>, DiskError> {
    work(None, |tools| tools.merge_clean(stretch)).map(|done| done.notes)
}

/// Does something with an image as soon as it is free. Processes that other tests start have this one's files open for a
/// moment, and so the locks of a merge that has ended.
pub(crate) fn patiently<T>(open: impl Fn() -> Result<T, DiskError>) -> Result<T, DiskError> {
    for _ in 0..100 {
        match open() {
            Err(e) if e.kind() == ErrorKind::InUse => thread::sleep(Duration::from_millis(10)),
            done => return done,
        }
    }
    open()
}
