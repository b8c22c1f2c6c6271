//! Identities of media: the same one under another number, and another one under the same.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ferrite_disk::{Disk, DiskIdentity, Format, ImageName, OpenOptions};
use ferrite_image_tools::NewImage;

use crate::common::{Loop, MIB, Queue, dir_in_memory, dir_on_disk, run, skipped, work};

/// A file that QEMU serves under another name, by FUSE. Its number is 1, and the time of its making is unknown.
struct Export {
    at: PathBuf,
    server: Child,
}

impl Export {
    fn new(file: &Path, at: &Path) -> Option<Export> {
        fs::File::create(at).unwrap();
        let (file, mount) = (file.display(), at.display());
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!("file,node-name=n,filename={file}"));
        let export = format!("fuse,id=e,node-name=n,mountpoint={mount},writable=on");
        let pid = at.with_extension("pid");
        let _ = fs::remove_file(&pid);
        command.arg("--export").arg(export).arg("--pidfile").arg(&pid).stderr(Stdio::null());
        let Ok(server) = command.spawn() else {
            skipped("there is no qemu-storage-daemon here");
            return None;
        };
        let mut export = Export { at: at.to_owned(), server };
        // It writes the file once it serves.
        while !pid.exists() {
            if export.server.try_wait().unwrap().is_some() {
                skipped("there is no FUSE here");
                return None;
            }
            std::thread::yield_now();
        }
        Some(export)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        run("umount", &[self.at.to_str().unwrap()]);
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn create(path: &Path, format: Format) {
    let new = NewImage { bytes: Some(8 * MIB), ..NewImage::default() };
    let image = ImageName { format, path: path.to_owned() };
    work(None, |tools| tools.create(&image, &new)).unwrap();
}

fn serve(path: &Path, format: Format, state: &Path) -> Queue {
    let options = OpenOptions { state_dir: Some(state.to_owned()), ..OpenOptions::default() };
    let image = ImageName { format, path: path.to_owned() };
    Queue::new(Disk::open_image(&image, &options).unwrap())
}

#[test]
fn images_on_two_file_systems_without_identifiers_leave_each_others_journals_alone() {
    for format in [Format::Vhd, Format::Qcow2] {
        let (dir, state) = (dir_on_disk(), dir_in_memory());
        let at = |name: &str| dir.path().join(name);
        let export = |name: &str| {
            let file = at(&format!("{name}.{format}"));
            create(&file, format);
            Export::new(&file, &at(name))
        };
        let (Some(a), Some(b)) = (export("a"), export("b")) else { return };
        let number = |export: &Export| fs::metadata(&export.at).unwrap().ino();
        assert_eq!(number(&a), number(&b));
        let mut first = serve(&a.at, format, state.path());
        let second = serve(&b.at, format, state.path());
        assert_eq!(fs::read_dir(state.path()).unwrap().count(), 2);
        first.write(MIB, &[5; 512]).unwrap();
        drop((first, second));
        // As after kill -9: another image is opened before the one with the answered write.
        drop(serve(&b.at, format, state.path()));
        assert!(serve(&a.at, format, state.path()).read(MIB, 512).unwrap() == [5; 512]);
    }
}

#[test]
fn a_file_on_a_file_system_that_is_mounted_again_under_another_number_is_the_same() {
    let dir = dir_on_disk();
    let at = |name: &str| dir.path().join(name);
    fs::File::create(at("file")).unwrap().set_len(MIB).unwrap();
    fs::File::create(at("other")).unwrap().set_len(MIB).unwrap();
    let look =
        || (fs::metadata(at("a")).unwrap().dev(), DiskIdentity::raw_at(&at("a")).unwrap().key);
    // Other tests mount file systems meanwhile, and may get the number that comes free.
    for _ in 0..10 {
        let Some(before) = Export::new(&at("file"), &at("a")) else { return };
        let (number, medium) = look();
        drop(before);
        // Another file system gets the number.
        let others: Vec<_> =
            ["b", "c", "d"].map(|name| Export::new(&at("other"), &at(name))).into();
        let _again = Export::new(&at("file"), &at("a")).unwrap();
        if look().0 == number {
            continue;
        }
        assert_eq!(look().1, medium);
        for other in others.iter().flatten() {
            assert_ne!(DiskIdentity::raw_at(&other.at).unwrap().key, medium);
        }
        return;
    }
    skipped("the kernel gave the number to none of three");
}

#[test]
fn another_volume_under_a_devices_number_is_another_disk_and_the_same_one_elsewhere_is_not() {
    let dir = dir_on_disk();
    let at = |name: &str| dir.path().join(name);
    for name in ["a", "b"] {
        fs::File::create(at(name)).unwrap().set_len(MIB).unwrap();
    }
    let Some(device) = Loop::attach(&at("a"), 512) else { return };
    let key = |path: &Path| {
        let image = ImageName { format: Format::Raw, path: path.to_owned() };
        let disk = Disk::open_image(&image, &OpenOptions::default()).unwrap();
        (disk.identity().unwrap().key, DiskIdentity::raw_at(path).unwrap().key)
    };
    let first = key(&device.0);
    let elsewhere = Loop::attach(&at("a"), 512).unwrap();
    assert_eq!(key(&elsewhere.0), first);
    drop(elsewhere);
    // It grows while it is served.
    fs::File::options().write(true).open(at("a")).unwrap().set_len(2 * MIB).unwrap();
    run("losetup", &["-c", device.0.to_str().unwrap()]).unwrap();
    assert_eq!(key(&device.0), first);
    let name = device.0.to_str().unwrap().to_owned();
    run("losetup", &["--detach", &name]).unwrap();
    if run("losetup", &[&name, at("b").to_str().unwrap()]).is_none() {
        std::mem::forget(device);
        return skipped("another process has taken the loop device");
    }
    let second = key(&device.0);
    assert!(second.0 != first.0 && second.1 != first.1, "{second:?}");
}
