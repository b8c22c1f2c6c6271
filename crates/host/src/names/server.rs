//! The answering end: a keeper opens for its worker what the policy allows.
//!
//! The file that a name leads to is opened for its path first, which waits for no other process and
//! changes nothing. The kernel gives the type and the place of that file, and the policy judges them. Then the same file
//! is opened with the access that the worker asked for. So a link that is swapped meanwhile has no effect.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ferrite_nbd::address::Address;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, fcntl_getfl, fcntl_setfl, fstat, inotify, major,
    minor, mkdirat, openat, readlinkat, renameat, unlinkat,
};
use rustix::io::{Errno, retry_on_intr};

use super::policy::{Access, Policy, Right, Rule, is_text};
use super::wire::{Answer, NAMES, Request, What};
use super::{connect, fence};
use super::{device_events, of_descriptor};
use crate::frames::Frame;
use crate::naming::Handle;
use crate::nvme::block_device;
use crate::place::Place;

/// Flags of `open` that a worker may set. No worker may set `TMPFILE` and others.
const FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::WRONLY)
    .union(OFlags::RDWR)
    .union(OFlags::CREATE)
    .union(OFlags::EXCL)
    .union(OFlags::TRUNC)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::DIRECTORY)
    .union(OFlags::PATH)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::DIRECT)
    .union(OFlags::LARGEFILE)
    .union(OFlags::CLOEXEC);

/// Images that were opened for writing, at most.
const MAX_KEPT: usize = 4;

/// The outcome of one look at the socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Served {
    /// There was nothing to do.
    Nothing,
    /// One request was answered.
    Answered,
    /// This name was refused by the policy; the caller's log says so now and then.
    Refused(PathBuf),
    /// The worker is gone.
    Ended,
}

/// One worker's way to names.
#[derive(Debug)]
pub struct Server {
    socket: OwnedFd,
    policy: Policy,
    /// The process that asks.
    worker: u32,
    /// Whether a thread asks the image's LUN.
    fences: Arc<AtomicBool>,
}

/// The images that a keeper holds for its workers, one after the other.
#[derive(Debug, Default)]
pub struct Images(Vec<(Key, OwnedFd)>);

/// A file and how it was opened: file system, number, device, flags.
type Key = (u64, u64, u64, u32);

/// Something that was found by its name, open for its path only.
struct Found {
    file: OwnedFd,
    stat: Stat,
    /// Without links.
    place: PathBuf,
}

impl Found {
    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }
}

impl Images {
    /// This one was.
    fn release(&mut self, image: &Stat) {
        let file = (image.st_dev, image.st_ino, image.st_rdev);
        self.0.retain(|((device, number, node, _), _)| (*device, *number, *node) != file);
    }

    /// How many are held.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

impl Server {
    /// By a socket of the kind `SEQPACKET`. It never waits for the worker.
    pub fn new(socket: OwnedFd, policy: Policy, worker: u32) -> Server {
        Server { socket, policy, worker, fences: Arc::default() }
    }

    /// From now on the worker may have this, and no longer what it might before.
    pub fn allow(&mut self, policy: Policy) {
        self.policy = policy;
    }

    /// Readable when there is something to do.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Answers one request, if there is one.
    ///
    /// # Errors
    /// The worker does not keep to the rules: it sends nonsense, or does not read its answers. It is
    /// to be ended.
    pub fn serve_one(&self, images: &mut Images) -> io::Result<Served> {
        let Frame { bytes, files } = match NAMES.try_receive(&self.socket) {
            Ok(None) => return Ok(Served::Nothing),
            Ok(Some(frame)) => frame,
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(Served::Ended),
            Err(e) => return Err(e),
        };
        let (asked, request) = Request::parse(&bytes)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it asks for nonsense"))?;
        let answer = match request.what {
            What::Fence => match self.fence((request.flags, asked), files) {
                // Its thread answers.
                Ok(()) => return Ok(Served::Answered),
                Err(e) => {
                    self.send(&Err(e), asked)?;
                    return Ok(Served::Answered);
                }
            },
            _ => self.answer(&request, &files, images),
        };
        // A worker that has let go of an image may count on that when it is told so.
        drop(files);
        self.send(&answer, asked)?;
        Ok(match answer {
            Err(Errno::ACCESS) => Served::Refused(path_of(request.first).to_owned()),
            _ => Served::Answered,
        })
    }

    fn send(&self, answer: &Result<Answer, Errno>, asked: u32) -> io::Result<()> {
        let bytes = Answer::to_bytes(answer, asked);
        let file = answer.as_ref().ok().and_then(|answer| answer.file.as_ref());
        let files: Vec<BorrowedFd<'_>> = file.iter().map(|file| file.as_fd()).collect();
        let Err(e) = NAMES.try_send(&self.socket, &bytes, &files) else { return Ok(()) };
        match Errno::from_io_error(&e) {
            Some(Errno::AGAIN | Errno::TOOMANYREFS) => {
                let text = "it does not read its answers";
                Err(io::Error::new(io::ErrorKind::InvalidData, text))
            }
            // Seen at the next look.
            Some(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            _ => Err(e),
        }
    }

    fn answer(
        &self,
        request: &Request<'_>,
        files: &[OwnedFd],
        images: &mut Images,
    ) -> Result<Answer, Errno> {
        let name = path_of(request.first);
        let of_file = name.as_os_str().is_empty();
        let found = |flags| match (of_file, files) {
            (true, [file]) => Found::of(file.try_clone().map_err(|_| Errno::MFILE)?),
            (false, []) => find(name, flags),
            _ => Err(Errno::INVAL),
        };
        match request.what {
            What::Open => self.open(request, name, found, images),
            What::Canonical => {
                let found = self.hidden(name, found(OFlags::empty()))?;
                self.judge(&found, Access::Look)?;
                Ok(Answer { text: found.place.into_os_string().into_vec(), ..Answer::default() })
            }
            // It has it open, and may know where that is.
            What::ReadLink if of_file => {
                let text = found(OFlags::empty())?.place.into_os_string().into_vec();
                Ok(Answer { text, ..Answer::default() })
            }
            What::ReadLink => self.read_link(name),
            What::CreateDirs => self.create_dir(name, Mode::from_raw_mode(request.mode)),
            What::RemoveFile => self.remove(name, Access::Replace, AtFlags::empty()),
            What::RemoveDir => self.remove(name, Access::ReplaceFolder, AtFlags::REMOVEDIR),
            What::Rename => self.rename(name, path_of(request.second)),
            What::ByHandle => self.by_handle(request.first, files),
            What::Watch => match files {
                [notify, file] => {
                    let mask = inotify::WatchFlags::MODIFY;
                    let number = inotify::add_watch(notify, of_descriptor(file.as_fd()), mask)?;
                    Ok(Answer { number, ..Answer::default() })
                }
                _ => Err(Errno::INVAL),
            },
            What::DeviceEvents => file(device_events()?),
            // Answered before.
            What::Fence => Err(Errno::INVAL),
            What::Connect => self.connect(request, files),
            What::Release => match files {
                [image] => {
                    images.release(&fstat(image)?);
                    Ok(Answer::default())
                }
                _ => Err(Errno::INVAL),
            },
        }
    }

    /// Begins to ask the image's LUN. The file is the worker's, and has to be that image.
    fn fence(&self, what: (u32, u32), files: Vec<OwnedFd>) -> Result<(), Errno> {
        let (Some(terms), Some(image)) = (&self.policy.fence, self.policy.written()) else {
            return Err(Errno::ACCESS);
        };
        let [lun] = <[OwnedFd; 1]>::try_from(files).map_err(|_| Errno::INVAL)?;
        let (stat, image) = (fstat(&lun)?, rustix::fs::stat(image)?);
        let identity = |stat: &Stat| (stat.st_dev, stat.st_ino, stat.st_rdev);
        match identity(&stat) == identity(&image) {
            true => fence::begin(self.socket.as_fd(), lun, terms, what, &self.fences),
            false => Err(Errno::ACCESS),
        }
    }

    /// Begins a connection to a server of this disk. The worker waits for it, and not this process.
    fn connect(&self, request: &Request<'_>, files: &[OwnedFd]) -> Result<Answer, Errno> {
        let address = Address::parse(request.first, request.second).filter(|_| files.is_empty());
        let address = address.ok_or(Errno::INVAL)?;
        let server = self.policy.servers.iter().find(|server| server.address == address);
        let user = self.policy.tunnel.as_ref();
        file(connect::begin_to(server.ok_or(Errno::ACCESS)?, request.flags, user)?)
    }

    fn open(
        &self,
        request: &Request<'_>,
        name: &Path,
        found: impl FnOnce(OFlags) -> Result<Found, Errno>,
        images: &mut Images,
    ) -> Result<Answer, Errno> {
        let flags = OFlags::from_bits_retain(request.flags);
        if !FLAGS.contains(flags) {
            return Err(Errno::INVAL);
        }
        let mode = Mode::from_raw_mode(request.mode) & (Mode::RWXU | Mode::RGRP);
        let writes = flags.intersects(OFlags::WRONLY | OFlags::RDWR);
        if is_text(name, self.worker) && !writes && !flags.intersects(OFlags::CREATE) {
            return file(retry_on_intr(|| rustix::fs::open(name, flags, Mode::empty()))?);
        }
        if flags.intersects(OFlags::CREATE | OFlags::TRUNC) && !flags.contains(OFlags::PATH) {
            return self.make(name, flags, mode);
        }
        let found = self.hidden(name, found(flags & OFlags::NOFOLLOW))?;
        let judged = self.judge(&found, if writes { Access::Change } else { Access::Look });
        if flags.contains(OFlags::PATH) && (judged.is_ok() || found.is_loops_file()) {
            return file(found.file);
        }
        judged?;
        if found.kind() == FileType::Symlink {
            return Err(Errno::LOOP);
        }
        let stat = &found.stat;
        let key = (stat.st_dev, stat.st_ino, stat.st_rdev, (flags - OFlags::NONBLOCK).bits());
        let is_kept = writes && (self.is_image(&found.place) || self.is_claim(&found));
        if let Some((_, kept)) = images.0.iter().find(|(of, _)| is_kept && *of == key) {
            return file(kept.try_clone().map_err(|_| Errno::MFILE)?);
        }
        let opened = again(&found.file, flags)?;
        if is_kept {
            images.0.truncate(MAX_KEPT - 1);
            images.0.insert(0, (key, opened.try_clone().map_err(|_| Errno::MFILE)?));
        }
        file(opened)
    }

    /// Opens a file that may have to be made, or emptied: in folders of ours only, where no other program
    /// makes links. They are not followed all the same.
    fn make(&self, name: &Path, flags: OFlags, mode: Mode) -> Result<Answer, Errno> {
        let (folder, last) = self.entry(name, Access::Make)?;
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = openat(&folder.file, &last, flags - OFlags::TRUNC, mode)?;
        if FileType::from_raw_mode(fstat(&opened)?.st_mode) != FileType::RegularFile {
            return Err(Errno::ACCESS);
        }
        if flags.contains(OFlags::TRUNC) {
            rustix::fs::ftruncate(&opened, 0)?;
        }
        file(opened)
    }

    fn read_link(&self, name: &Path) -> Result<Answer, Errno> {
        let found = self.hidden(name, find(name, OFlags::NOFOLLOW))?;
        self.judge(&found, Access::Look)?;
        let text = readlinkat(&found.file, c"", Vec::new())?.into_bytes();
        Ok(Answer { text, ..Answer::default() })
    }

    fn create_dir(&self, name: &Path, mode: Mode) -> Result<Answer, Errno> {
        // A folder with files of the worker's is there already, and is not the worker's own.
        let holds = |folder: &Path| {
            self.any_rule(|rule| {
                rule.place.parent() == Some(folder)
                    || rule.right == Right::Journals && rule.place == folder
            })
        };
        if find(name, OFlags::DIRECTORY).is_ok_and(|folder| holds(&folder.place)) {
            return Ok(Answer::default());
        }
        let (folder, last) = self.entry(name, Access::ReplaceFolder)?;
        match mkdirat(&folder.file, &last, mode & Mode::RWXU) {
            Err(Errno::EXIST) => {}
            made => made?,
        }
        Ok(Answer::default())
    }

    fn remove(&self, name: &Path, access: Access, flags: AtFlags) -> Result<Answer, Errno> {
        let (folder, last) = self.entry(name, access)?;
        unlinkat(&folder.file, &last, flags)?;
        Ok(Answer::default())
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<Answer, Errno> {
        let (from, old) = self.entry(from, Access::Replace)?;
        let (to, new) = self.entry(to, Access::Replace)?;
        renameat(&from.file, &old, &to.file, &new)?;
        Ok(Answer::default())
    }

    fn by_handle(&self, handle: &[u8], files: &[OwnedFd]) -> Result<Answer, Errno> {
        let (Some(handle), [folder]) = (Handle::from_bytes(handle), files) else {
            return Err(Errno::INVAL);
        };
        let asked = handle.ask_on(folder.as_fd());
        let found = Found::of(asked.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?)?;
        self.judge(&found, Access::Look)?;
        file(found.file)
    }

    /// The folder of an entry and its name in there, if what is done to it is allowed.
    fn entry(&self, name: &Path, access: Access) -> Result<(Found, PathBuf), Errno> {
        let last = match name.components().next_back() {
            Some(Component::Normal(last)) => PathBuf::from(last),
            _ => return Err(Errno::ACCESS),
        };
        let folder = find(name.parent().ok_or(Errno::ACCESS)?, OFlags::DIRECTORY);
        let folder = self.hidden(name, folder)?;
        let kind = match access {
            Access::ReplaceFolder => FileType::Directory,
            _ => FileType::RegularFile,
        };
        match self.allows(&folder.place.join(&last), kind, access) {
            true => Ok((folder, last)),
            false => Err(Errno::ACCESS),
        }
    }

    fn judge(&self, found: &Found, access: Access) -> Result<(), Errno> {
        let number = (major(found.stat.st_rdev), minor(found.stat.st_rdev));
        let allowed = match found.kind() {
            // Whatever has this name, it is no namespace.
            FileType::CharacterDevice if block_device(number).is_none() => false,
            kind if self.allows(&found.place, kind, access) => true,
            FileType::BlockDevice if self.is_claim(found) => true,
            FileType::BlockDevice => {
                access == Access::Look && is_volume_of(&self.resolved(), found)
            }
            _ => false,
        };
        if allowed { Ok(()) } else { Err(Errno::ACCESS) }
    }

    /// A missing file, in a place that the worker may not know of, is refused as one that is there.
    fn hidden(&self, name: &Path, found: Result<Found, Errno>) -> Result<Found, Errno> {
        let has_dots = name.components().any(|part| part == Component::ParentDir);
        let is_known = |name: &Path| {
            let kinds = [FileType::RegularFile, FileType::Directory, FileType::Symlink];
            let knows =
                |policy: &Policy| kinds.iter().any(|kind| policy.allows(name, *kind, Access::Look));
            knows(&self.policy) || knows(&self.resolved())
        };
        match found {
            Err(_) if has_dots || !is_known(name) => Err(Errno::ACCESS),
            found => found,
        }
    }

    fn is_image(&self, place: &Path) -> bool {
        self.any_rule(|rule| rule.right == Right::Write && rule.place == place)
    }

    /// Whether a rule is so, with its place as it was written or as it is resolved.
    fn any_rule(&self, is_so: impl Fn(&Rule) -> bool) -> bool {
        self.policy.rules.iter().any(&is_so) || self.resolved().rules.iter().any(is_so)
    }

    /// [`Policy::allows`], by the places that the rules' names lead to now.
    ///
    /// The names as they were written come first: a place has no links, so a rule's name that it begins with has
    /// none, and needs no system calls.
    fn allows(&self, place: &Path, kind: FileType, access: Access) -> bool {
        self.policy.allows(place, kind, access)
            || self.resolved_for(access).allows(place, kind, access)
    }

    /// Whether it is the block device of the image, which is that of an NVMe namespace for commands.
    /// Its writer claims it, so that it cannot be mounted.
    fn is_claim(&self, found: &Found) -> bool {
        let image = self.policy.written().and_then(|image| rustix::fs::stat(image).ok());
        let device = image.and_then(|image| {
            let is_device = FileType::from_raw_mode(image.st_mode) == FileType::CharacterDevice;
            let number = (major(image.st_rdev), minor(image.st_rdev));
            is_device.then(|| block_device(number)).flatten()
        });
        device.is_some_and(|name| found.place == Path::new("/dev").join(name))
    }

    /// With what has to be looked up for this: which journals are the image's own.
    fn resolved_for(&self, access: Access) -> Policy {
        let mut policy = self.resolved();
        if access != Access::Look && policy.rules.iter().any(|rule| rule.right == Right::Journals) {
            let place = self.policy.written().and_then(|image| Place::at(image).ok());
            policy.journal_end = place.map(|place| place.journal_end());
        }
        policy
    }

    /// The policy by the places that its names lead to now. One that leads nowhere is as it was
    /// written.
    fn resolved(&self) -> Policy {
        let resolved = |rule: &Rule| {
            let place = fs::canonicalize(&rule.place).ok().or_else(|| {
                let folder = fs::canonicalize(rule.place.parent()?).ok()?;
                Some(folder.join(rule.place.file_name()?))
            });
            Rule { place: place.unwrap_or_else(|| rule.place.clone()), ..*rule }
        };
        let rules = self.policy.rules.iter().map(resolved).collect();
        Policy { rules, ..Policy::default() }
    }
}

impl Found {
    fn of(file: OwnedFd) -> Result<Found, Errno> {
        let stat = fstat(&file)?;
        let place = readlinkat(CWD, of_descriptor(file.as_fd()), Vec::new())?.into_bytes();
        let place: PathBuf = OsString::from_vec(place).into();
        Ok(Found { file, stat, place })
    }

    /// Whether a loop device is on it. Such a device is called by its file's number and date
    /// ([`Place`]), so each worker may examine that file. That gives it no right to open the file.
    fn is_loops_file(&self) -> bool {
        let devices = fs::read_dir("/sys/block").into_iter().flatten().filter_map(Result::ok);
        let mut files =
            devices.filter_map(|device| fs::read(device.path().join("loop/backing_file")).ok());
        self.kind() == FileType::RegularFile
            && files.any(|file| file.strip_suffix(b"\n") == Some(self.place.as_os_str().as_bytes()))
    }
}

/// Opens what a name leads to, for its path only.
fn find(name: &Path, flags: OFlags) -> Result<Found, Errno> {
    if !name.is_absolute() {
        return Err(Errno::ACCESS);
    }
    let flags = flags | OFlags::PATH | OFlags::CLOEXEC;
    Found::of(retry_on_intr(|| rustix::fs::open(name, flags, Mode::empty()))?)
}

/// Opens what is open for its path. It is no pipe and no terminal, and no lease on it is waited for.
fn again(found: &OwnedFd, flags: OFlags) -> Result<OwnedFd, Errno> {
    let name = of_descriptor(found.as_fd());
    let at_once = (flags - OFlags::NOFOLLOW) | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = retry_on_intr(|| rustix::fs::open(&name, at_once, Mode::empty()))?;
    if !flags.contains(OFlags::NONBLOCK) {
        fcntl_setfl(&opened, fcntl_getfl(&opened)? - OFlags::NONBLOCK)?;
    }
    Ok(opened)
}

/// Whether a folder of devices that may be read names this one: volumes have links as names
/// (/dev/VG/LV), and lie elsewhere.
fn is_volume_of(policy: &Policy, found: &Found) -> bool {
    let of_devices = |rule: &&Rule| rule.is_folder && rule.place.starts_with("/dev");
    policy.rules.iter().filter(of_devices).any(|rule| {
        let names = fs::read_dir(&rule.place).into_iter().flatten().filter_map(Result::ok);
        names.filter_map(|name| rustix::fs::stat(name.path()).ok()).any(|stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice
                && stat.st_rdev == found.stat.st_rdev
        })
    })
}

fn path_of(name: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(name))
}

fn file(file: OwnedFd) -> Result<Answer, Errno> {
    Ok(Answer { file: Some(file), ..Answer::default() })
}
