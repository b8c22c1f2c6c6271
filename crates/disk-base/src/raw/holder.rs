//! Finds the disk that a locked image is served as, by Ferrite's processes that have it open.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use ferrite_host::names;

/// The disk of this host that the image is served as, if a daemon's keeper or worker has it open. The kernel gives only
/// the number of the process that took the lock, which often has ended.
///
/// This works only with the permission to inspect all processes, which workers lack (threats.md T28).
pub(super) fn disk_of(path: &Path) -> Option<String> {
    if names::are_brokered() {
        return None;
    }
    let path = path.canonicalize().ok()?;
    let processes = fs::read_dir("/proc").ok()?.flatten();
    processes.filter(|process| is_number(&process.file_name())).find_map(|process| {
        let process = process.path();
        let disk = disk_in(&fs::read(process.join("cmdline")).ok()?)?;
        // Only names are read: other processes' files may block.
        let mut open = fs::read_dir(process.join("fd")).ok()?.flatten();
        let has_it = open.any(|fd| fs::read_link(fd.path()).is_ok_and(|name| name == path));
        has_it.then_some(disk)
    })
}

fn is_number(name: &std::ffi::OsStr) -> bool {
    name.as_bytes().iter().all(u8::is_ascii_digit)
}

/// The disk of a keeper or a worker with these arguments.
fn disk_in(arguments: &[u8]) -> Option<String> {
    let mut words = arguments.split(|byte| *byte == 0).map(|word| std::str::from_utf8(word).ok());
    if words.next()?? != "ferrite" {
        return None;
    }
    let disk = match words.next()?? {
        "keeper" => words.next()??,
        "worker" => words.flatten().find_map(|word| word.strip_prefix("--xen="))?,
        _ => return None,
    };
    // Any process can have these arguments.
    let is_disk = disk.bytes().all(|byte| byte.is_ascii_digit() || byte == b'/');
    (is_disk && disk.contains('/')).then(|| disk.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keepers_and_workers_say_which_disk_is_theirs_and_nobody_else_does() {
        assert_eq!(disk_in(b"ferrite\0keeper\x003/51712\0").as_deref(), Some("3/51712"));
        let worker = b"ferrite\0worker\0--run-dir=/run\0--xen=3/51712\0--\0/a\0";
        assert_eq!(disk_in(worker).as_deref(), Some("3/51712"));
        let others: [&[u8]; 7] = [
            b"",
            b"\0\0",
            b"ferrite\0serve\0--xen=3/51712\0",
            b"bash\0keeper\x003/51712\0",
            b"ferrite\0keeper\0",
            b"ferrite\0keeper\x00a\nb/1\0",
            b"ferrite\0keeper\0\xff/1\0",
        ];
        for other in others {
            assert_eq!(disk_in(other), None, "{other:?}");
        }
    }
}
