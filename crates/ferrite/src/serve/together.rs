//! Several disks in one process. Each has a thread, a run directory and a connection to xenstore, and ends by itself.

use std::collections::HashMap;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::thread::{Builder, Scope, ScopedJoinHandle, scope};

use ferrite_disk::ImageName;

use crate::cli::ServeArgs;
use crate::exit::{Code, Failure};

/// A disk's thread. A failure has been reported.
type Thread<'scope> = ScopedJoinHandle<'scope, Result<(), Code>>;

/// Refuses contradictory arguments before anything is opened. The images' own locks remain the safeguard: they know a
/// file by all of its names.
pub(super) fn compare(disks: &[&ServeArgs]) -> Result<(), Failure> {
    let mut images = HashMap::new();
    for (i, disk) in disks.iter().enumerate() {
        let before = &disks[..i];
        if before.iter().any(|other| other.xen == disk.xen) {
            let what = format!("cannot serve {}", disk.xen);
            let help = "give each IMAGE a --xen of its own";
            return Err(Failure::new(what, "it is named twice", help).with_code(Code::USAGE));
        }
        let Some(file) = file(disk) else { continue };
        // Read-only disks may share an image.
        let other: Option<&ServeArgs> = images.insert(file, *disk);
        if let Some(other) = other.filter(|other| !(other.read_only && disk.read_only)) {
            let what = format!("cannot serve {} as {}", disk.image.display(), disk.xen);
            let why = format!("{} has the same image, {}", other.xen, other.image.display());
            let help = "one disk writes an image: give each its own (ferrite image clone), or give \
                        both --read-only";
            return Err(Failure::new(what, why, help).with_code(Code::USAGE));
        }
    }
    Ok(())
}

/// The identity of the file or device, and of a volume in it. `None`: there is none, or opening it will report the
/// error.
fn file(disk: &ServeArgs) -> Option<((bool, u64, u64), Option<String>)> {
    let name = ImageName::parse(disk.image.to_str()?).ok()?;
    let of = |meta: Metadata| match meta.file_type().is_block_device() {
        true => (true, meta.rdev(), 0),
        false => (false, meta.dev(), meta.ino()),
    };
    let (path, volume) = match name.volume() {
        Some((store, volume)) => (store, Some(volume.to_owned())),
        None => (name.path.as_path(), None),
    };
    path.metadata().ok().map(|meta| (of(meta), volume))
}

/// Serves each disk on a thread of its own, until the last has ended. Failures are reported at once.
pub(super) fn serve(
    disks: &[&ServeArgs],
    serve: impl Fn(&ServeArgs) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let ends: Vec<Option<Code>> = scope(|scope| {
        // All threads are started before the first is waited for.
        let threads: Vec<_> = disks.iter().map(|disk| start(scope, disk, &serve)).collect();
        threads.into_iter().zip(disks).map(|(thread, disk)| end(disk, thread)).collect()
    });
    let failed: Vec<Code> = ends.iter().flatten().copied().collect();
    let Some(code) = failed.first() else { return Ok(()) };
    let same = failed.iter().all(|other| other == code);
    let what = format!("{} of {} disks ended with a failure", failed.len(), disks.len());
    let names: Vec<_> = disks.iter().zip(&ends).filter(|(_, end)| end.is_some()).collect();
    let names: Vec<_> = names.iter().map(|(disk, _)| disk.xen.to_string()).collect();
    let help = "the messages above tell what to do for each";
    Err(Failure::new(what, names.join(", "), help).with_code(if same {
        *code
    } else {
        Code::FAILED
    }))
}

fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    disk: &'scope ServeArgs,
    serve: &'scope (impl Fn(&ServeArgs) -> Result<(), Failure> + Sync),
) -> io::Result<Thread<'scope>> {
    // All log messages of the thread name the disk.
    let span = tracing::error_span!("disk", id = %disk.xen);
    let body = move || span.in_scope(|| serve(disk)).map_err(|failure| told(disk, failure));
    Builder::new().name(thread_name(disk)).spawn_scoped(scope, body)
}

/// The thread's name. The kernel names the interrupt of an event channel after the thread that opened the device, and
/// makes a folder of that name in /proc. With a slash in it, the kernel warns with a trace in dom0's log.
fn thread_name(disk: &ServeArgs) -> String {
    format!("disk {}", disk.xen).replace('/', "-")
}

/// Waits for the end of a disk's thread; its failure.
fn end(disk: &ServeArgs, thread: io::Result<Thread<'_>>) -> Option<Code> {
    let help = "run the same command again";
    let what = format!("cannot serve {}", disk.xen);
    match thread.map(ScopedJoinHandle::join) {
        Ok(Ok(served)) => served.err(),
        Ok(Err(_)) => {
            Some(told(disk, Failure::new(what, "a panic: this is a bug in ferrite", help)))
        }
        Err(e) => Some(told(disk, Failure::new(what, e, "check the limits of this process"))),
    }
}

/// Reports a failure at once, since other disks may be served for long.
fn told(disk: &ServeArgs, failure: Failure) -> Code {
    let code = failure.code;
    let what = format!("disk {}: {}", disk.xen, failure.what);
    Failure { what, ..failure }.report();
    code
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::cli::Command;

    #[test]
    fn each_disk_has_a_thread_whose_name_can_be_that_of_a_folder() {
        let words = "ferrite serve a.raw --xen 1/51712 b.raw --xen 2/51728".split(' ');
        let cli = crate::pairs::parse(words.map(Into::into).collect()).unwrap();
        let Command::Serve(args) = cli.command else { panic!("another command") };
        let disks: Vec<&ServeArgs> = std::iter::once(&args).chain(&args.others).collect();
        let names = Mutex::new(Vec::new());
        let body = |_: &ServeArgs| {
            names.lock().unwrap().push(std::thread::current().name().unwrap().to_owned());
            Ok(())
        };
        assert!(serve(&disks, body).is_ok());
        let mut names = names.into_inner().unwrap();
        names.sort();
        assert_eq!(names, ["disk 1-51712", "disk 2-51728"]);
    }
}
