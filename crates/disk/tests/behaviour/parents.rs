//! A backend was killed, and before it came back another program has put an image on the one that
//! it had open: the answered writes are only in the journal of an image that is a parent now.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use ferrite_disk::{Disk, DiskError, ImageName, OpenOptions, Session};
use ferrite_image_tools::{Convert, Extent, Kind, NewImage};

use crate::common::vhd::{at, name, options, peer};
use crate::common::{MIB, Queue, dir_in_memory, dir_on_disk, work};
use ferrite_io::engine::{FileId, Op};
use ferrite_io::engines::test_engine;
use ferrite_testkit::errno::EIO;
use ferrite_testkit::faulty::{self, Fault, Faults, Ops};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;

/// Two images on a third, whose backend was killed.
struct Chain {
    dir: TempDir,
    state: TempDir,
    parent: ImageName,
    children: [ImageName; 2],
}

impl Chain {
    /// The parent's backend has answered writes at these places, of which only the first is
    /// flushed, and was killed. The children were made as other programs do: without a look at the
    /// journal.
    fn new(format: &str, bytes: u64, written: &[u64]) -> Chain {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let image = |file: &str| {
            let path = at(&dir, &format!("{file}.{format}"));
            ImageName::parse(&format!("{format}:{}", name(&path))).unwrap()
        };
        let (parent, children) = (image("parent"), [image("a"), image("b")]);
        let new = NewImage { bytes: Some(bytes), ..NewImage::default() };
        work(None, |tools| tools.create(&parent, &new)).unwrap();
        // While there is nothing in it, our own tools do no more than others.
        for child in &children {
            let new = NewImage { parent: Some(parent.clone()), ..NewImage::default() };
            work(None, |tools| tools.create(child, &new)).unwrap();
        }
        fs::set_permissions(&parent.path, Permissions::from_mode(0o644)).unwrap();
        let chain = Chain { dir, state, parent, children };
        let mut backend = chain.serve(&chain.parent, false).unwrap();
        for (i, at) in written.iter().enumerate() {
            backend.write(*at, &[i as u8 + 1; 512]).unwrap();
            if i == 0 {
                backend.flush().unwrap();
            }
        }
        drop(backend);
        // When it has let go of the file.
        drop(chain.serve(&chain.parent, true).unwrap());
        chain
    }

    /// Opens an image as a backend does.
    fn serve(&self, image: &ImageName, read_only: bool) -> Result<Queue, DiskError> {
        self.open(image, read_only).map(Queue::new)
    }

    fn open(&self, image: &ImageName, read_only: bool) -> Result<Disk, DiskError> {
        let options = OpenOptions {
            read_only,
            // A backend may have been at work before there were children.
            even_parent: true,
            state_dir: Some(self.state.path().into()),
            metadata_bytes: MIB as usize,
            ..options()
        };
        Disk::open_image(image, &options)
    }

    /// The journals, by name.
    fn journals(&self) -> Vec<(String, Vec<u8>)> {
        let entries = fs::read_dir(self.state.path()).unwrap().map(|entry| entry.unwrap());
        let file = |e: fs::DirEntry| (e.file_name().into_string().unwrap(), e.path());
        let mut all: Vec<_> =
            entries.map(file).map(|(name, path)| (name, fs::read(path).unwrap())).collect();
        all.sort();
        all
    }
}

fn holds(queue: &mut Queue, written: &[u64]) {
    for (i, at) in written.iter().enumerate() {
        let found = queue.read(*at, 1024).unwrap();
        assert!(found[..512] == [i as u8 + 1; 512], "byte {at}: {}", found[0]);
        assert!(found[512..] == [0; 512], "behind byte {at}: {}", found[512]);
    }
}

#[test]
fn several_children_at_once_read_what_the_parents_killed_backend_has_answered() {
    for format in ["vhd", "qcow2"] {
        let written = [0, MIB, 5 * MIB + 512];
        let chain = Chain::new(format, 8 * MIB, &written);
        let (journals, file) = (chain.journals(), fs::read(&chain.parent.path).unwrap());
        let mut disks = chain.children.each_ref().map(|c| chain.serve(c, false).unwrap());
        for (disk, byte) in disks.iter_mut().zip([0x71, 0x72]) {
            holds(disk, &written);
            // Beside what is in the parent, and over it.
            disk.write(512, &[byte; 512]).unwrap();
            disk.write(MIB, &[byte; 512]).unwrap();
            disk.flush().unwrap();
        }
        for (disk, byte) in disks.iter_mut().zip([0x71, 0x72]) {
            assert!(disk.read(0, 512).unwrap() == [1; 512], "{format}");
            assert!(disk.read(512, 512).unwrap() == [byte; 512], "{format}");
            assert!(disk.read(MIB, 512).unwrap() == [byte; 512], "{format}");
            disk.close().unwrap();
        }
        drop(disks);
        // No process may write the parent here, and the next child reads its journal.
        assert!(chain.journals() == journals, "{format}");
        assert!(fs::read(&chain.parent.path).unwrap() == file, "{format}");
    }
}

/// Places far apart: each has a table of its own to be kept, and a parent gets little memory.
#[test]
fn a_parent_that_lacks_more_than_its_memory_for_metadata_holds_is_read_with_all_of_it() {
    for format in ["vhd", "qcow2"] {
        let written: Vec<u64> = (0..240).map(|i| i * 33 * MIB).collect();
        let chain = Chain::new(format, 8 * GIB, &written);
        for read_only in [true, false] {
            let mut disk = chain.serve(&chain.children[0], read_only).unwrap();
            holds(&mut disk, &written);
            // The space between was never written, and its tables take memory, too.
            for at in (0..240).map(|i| i * 33 * MIB + 16 * MIB) {
                assert!(disk.read(at, 512).unwrap() == [0; 512], "{format}, byte {at}");
            }
            holds(&mut disk, &written);
        }
        // So is the image by itself.
        holds(&mut chain.serve(&chain.parent, true).unwrap(), &written);
    }
}

#[test]
fn tools_see_a_chain_as_it_is_served() {
    for format in ["vhd", "qcow2"] {
        let written = [0, 4 * MIB];
        let chain = Chain::new(format, 8 * MIB, &written);
        let mut content = vec![0; 8 * MIB as usize];
        content[..512].fill(1);
        content[4 * MIB as usize..][..512].fill(2);
        let raw = |file| {
            let path = at(&chain.dir, file);
            ImageName::parse(&format!("raw:{}", name(&path))).unwrap()
        };
        let (copy, flat) = (raw("copy.img"), raw("flat.img"));
        fs::write(&copy.path, &content).unwrap();
        let child = &chain.children[0];
        work(Some(chain.state.path()), |tools| {
            assert!(tools.compare(child, &copy, false).unwrap().identical, "{format}");
            tools.convert(child, &flat, &Convert::default()).unwrap();
            let mut found = 0;
            let count = |extent: &Extent| {
                let range = extent.start_bytes..extent.start_bytes + extent.length_bytes;
                let theirs = extent.kind == Kind::Data && extent.layer == Some(1);
                found += written.iter().filter(|at| theirs && range.contains(at)).count();
                true
            };
            tools.map(child, count).unwrap();
            assert_eq!(found, written.len(), "{format}");
            assert!(tools.check(child, true).unwrap().usable, "{format}");
            let info = tools.info(child).unwrap();
            let journals: Vec<bool> = info.chain.iter().map(|layer| layer.journal).collect();
            assert_eq!(journals, [false, true], "{format}");
            assert!(info.chain[1].allocated_bytes > Some(0), "{format}");
        });
        assert!(fs::read(&flat.path).unwrap() == content, "{format}");
    }
}

/// The guest was answered, and flushes the disk that it has now.
#[test]
fn what_only_a_parents_journal_has_is_the_leafs_once_that_has_recovered_it() {
    for format in ["vhd", "qcow2"] {
        let written = [0, MIB, 5 * MIB + 512, 8 * MIB - 512];
        let chain = Chain::new(format, 8 * MIB, &written);
        let child = &chain.children[0];
        let mut disk = chain.serve(child, false).unwrap();
        disk.write(MIB + 512, &[9; 512]).unwrap();
        disk.close().unwrap();
        drop(disk);
        let recover = || {
            let disk = Arc::new(chain.open(child, false).unwrap());
            assert!(disk.is_unrecovered(), "{format}");
            let mut session = Session::new(disk, |arena| test_engine().open(arena, 32)).unwrap();
            session.recover_parents().unwrap()
        };
        let copied = recover();
        assert!((3 * 512..=8 * MIB).contains(&copied), "{format}: {copied}");
        assert_eq!(recover(), 0, "{format}");
        assert!(!chain.journals().is_empty());
        let before = fs::read(&chain.parent.path).unwrap();
        // The host goes down.
        drop(chain.serve(child, true).unwrap());
        fs::remove_dir_all(chain.state.path()).unwrap();
        let mut disk = chain.serve(child, true).unwrap();
        for (at, byte) in [(0, 1), (MIB, 2), (MIB + 512, 9), (5 * MIB + 512, 3), (8 * MIB - 512, 4)]
        {
            assert!(disk.read(at, 512).unwrap() == [byte; 512], "{format}, byte {at}");
        }
        assert!(disk.read(4 * MIB, 512).unwrap() == [0; 512]);
        assert!(fs::read(&chain.parent.path).unwrap() == before);
    }
}

/// qemu gives new data the first place that nothing on disk refers to: just where the killed
/// backend had put its own.
#[test]
fn a_parent_that_another_program_has_written_to_since_is_refused_by_all_its_children() {
    for (format, qemu) in [("vhd", "vpc"), ("qcow2", "qcow2")] {
        let chain = Chain::new(format, 16 * MIB, &[0, 4 * MIB]);
        let path = name(&chain.parent.path);
        let Some(_) = peer("qemu-io", &["-f", qemu, "-c", "write -P 3 8M 512", path]) else {
            return;
        };
        for (child, read_only) in chain.children.iter().zip([false, true]) {
            let error = chain.serve(child, read_only).err().expect(format);
            assert!(error.to_string().contains("parent"), "{error}");
            let text = format!("{error}: {}", error.help());
            assert!(text.contains("another program"), "{text}");
        }
        let child = &chain.children[0];
        let report = work(Some(chain.state.path()), |tools| tools.check(child, true));
        assert!(!report.is_ok_and(|report| report.usable), "{format}");
    }
}

/// Where the killed backend only wrote over what was there, nothing else says that it did.
#[test]
fn the_first_flush_of_a_disk_is_one_of_its_parents_too() {
    for format in ["vhd", "qcow2"] {
        let chain = Chain::new(format, 8 * MIB, &[0]);
        let parent = FileId(1);
        let faults = Faults::none();
        faults.list();
        // How often the parent was synced since the last look.
        let syncs = || {
            let list = faults.take_list();
            list.iter().filter(|op| **op == Op::Sync { file: parent }).count()
        };
        let open = || {
            let disk = Arc::new(chain.open(&chain.children[0], false).unwrap());
            Queue::on(disk, |engine| faults.around(engine))
        };
        let mut disk = open();
        disk.write(MIB, &[9; 512]).unwrap();
        assert_eq!(syncs(), 0);
        (0..3).for_each(|_| disk.flush().unwrap());
        assert_eq!(syncs(), 1, "{format}");
        disk.close().unwrap();
        drop(disk);
        // The kernel tells once that something is lost.
        assert_eq!(syncs(), 0, "{format}");
        faults.once(Ops::from(faulty::Kind::Sync).on(parent), Fault::Errno(EIO));
        let mut disk = open();
        (0..3).for_each(|_| assert!(disk.flush().is_err(), "{format}"));
        assert_eq!(syncs(), 1, "{format}");
    }
}
