//! A LUN in memory, and in a file for processes: what SPC-4 says of registrations, the reservation Write Exclusive, Registrants
//! Only, and of a target that starts again. For tests.

#[cfg(feature = "testing")]
use std::io;

#[cfg(feature = "testing")]
use super::lun::Lun;
use super::lun::{Abilities, Outcome, Reservation};

/// The state of a LUN.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    /// Registrations: the port, its key.
    registered: Vec<(u32, u64)>,
    /// The port that has the reservation.
    holder: Option<u32>,
    /// Whether reservations outlive the target's restart.
    pub persists: bool,
}

impl Model {
    /// A LUN that no host has reserved.
    pub fn new(persists: bool) -> Model {
        Model { persists, ..Model::default() }
    }

    fn key_of(&self, port: u32) -> Option<u64> {
        self.registered.iter().find(|(of, _)| *of == port).map(|(_, key)| *key)
    }

    /// Whether a write by this port is executed.
    pub fn executes_write(&self, port: u32) -> bool {
        self.holder.is_none() || self.key_of(port).is_some()
    }

    /// The key of the reservation's holder.
    pub fn holder(&self) -> Option<u64> {
        self.key_of(self.holder?)
    }

    /// The keys of all registrations.
    pub fn keys(&self) -> Vec<u64> {
        self.registered.iter().map(|(_, key)| *key).collect()
    }

    /// The target starts again.
    pub fn restart(&mut self) {
        if !self.persists {
            self.registered.clear();
            self.holder = None;
        }
    }

    fn remove(&mut self, port: u32) {
        self.registered.retain(|(of, _)| *of != port);
        // The reservation ends with its holder's registration.
        self.holder = self.holder.filter(|holder| *holder != port);
    }

    /// REGISTER, and with `old` `None` REGISTER AND IGNORE EXISTING KEY.
    pub fn register(&mut self, port: u32, old: Option<u64>, new: u64) -> Outcome {
        if old.is_some_and(|old| self.key_of(port).unwrap_or(0) != old) {
            return Outcome::Conflict;
        }
        if new == 0 {
            self.remove(port);
            return Outcome::Done;
        }
        match self.registered.iter_mut().find(|(of, _)| *of == port) {
            Some((_, key)) => *key = new,
            None => self.registered.push((port, new)),
        }
        Outcome::Done
    }

    /// RESERVE.
    pub fn reserve(&mut self, port: u32, key: u64) -> Outcome {
        let is_free = self.holder.is_none_or(|holder| holder == port);
        if self.key_of(port) != Some(key) || !is_free {
            return Outcome::Conflict;
        }
        self.holder = Some(port);
        Outcome::Done
    }

    /// RELEASE.
    pub fn release(&mut self, port: u32, key: u64) -> Outcome {
        if self.key_of(port) != Some(key) {
            return Outcome::Conflict;
        }
        self.holder = self.holder.filter(|holder| *holder != port);
        Outcome::Done
    }

    /// PREEMPT AND ABORT.
    pub fn preempt(&mut self, port: u32, own: u64, victim: u64) -> Outcome {
        if self.key_of(port) != Some(own) || !self.keys().contains(&victim) {
            return Outcome::Conflict;
        }
        let takes = self.holder().is_some_and(|key| key == victim);
        self.registered.retain(|(of, key)| *of == port || *key != victim);
        if takes {
            self.holder = Some(port);
        }
        Outcome::Done
    }

    pub(super) fn abilities(&self) -> Abilities {
        Abilities { has_type: true, can_persist: self.persists, persists: self.persists }
    }

    pub(super) fn reservation(&self) -> Option<Reservation> {
        self.holder().map(|key| Reservation { key, is_ours_by_type: true })
    }

    #[cfg(feature = "testing")]
    fn to_text(&self) -> String {
        let lines = self.registered.iter().map(|(port, key)| format!("{port} {key:x}\n"));
        let holder = self.holder.map_or_else(|| "-".to_owned(), |port| port.to_string());
        format!("{} {holder}\n{}", self.persists, lines.collect::<String>())
    }

    #[cfg(feature = "testing")]
    fn parse(text: &str) -> Option<Model> {
        let mut lines = text.lines();
        let (persists, holder) = lines.next()?.split_once(' ')?;
        let registered: Option<Vec<(u32, u64)>> = lines
            .map(|line| {
                let (port, key) = line.split_once(' ')?;
                Some((port.parse().ok()?, u64::from_str_radix(key, 16).ok()?))
            })
            .collect();
        let holder = holder.parse().ok();
        Some(Model { registered: registered?, holder, persists: persists == "true" })
    }
}

/// A LUN that several processes have, each by a port of its own. An image file is one if the file beside it with the end
/// `.lun` is there, and the environment says which port this process has.
#[cfg(feature = "testing")]
#[derive(Debug)]
pub struct FileLun {
    path: std::path::PathBuf,
    port: u32,
}

#[cfg(feature = "testing")]
impl FileLun {
    /// The variable of the process's port.
    pub const PORT: &str = "FERRITE_TEST_PORT";

    /// That of an open file, if it is one.
    pub fn of(file: std::os::fd::BorrowedFd<'_>) -> Option<FileLun> {
        let port = std::env::var(FileLun::PORT).ok()?.parse().ok()?;
        let image = crate::names::of_open(file).ok()?;
        let mut path = image.into_os_string();
        path.push(".lun");
        let path = std::path::PathBuf::from(path);
        path.is_file().then_some(FileLun { path, port })
    }

    /// The LUN of an image, as this port has it.
    pub fn at(image: &std::path::Path, port: u32) -> FileLun {
        let mut path = image.as_os_str().to_owned();
        path.push(".lun");
        FileLun { path: path.into(), port }
    }

    /// Makes an image a LUN.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn make(&self, model: &Model) -> io::Result<()> {
        std::fs::write(&self.path, model.to_text())
    }

    /// Its name, which is the same for all ports.
    pub fn identity(&self) -> String {
        use std::os::unix::fs::MetadataExt as _;
        format!("test.lun-{}", std::fs::metadata(&self.path).map_or(0, |found| found.ino()))
    }

    /// The file that this port's processes lock in place of the image, which is that of all ports.
    pub(super) fn lock_file(&self) -> std::path::PathBuf {
        self.path.with_extension(format!("port{}", self.port))
    }

    /// Does a write as the LUN judges it.
    pub(super) fn writing<T>(&self, write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let port = self.port;
        self.with(|lun| match lun.executes_write(port) {
            true => write(),
            false => Err(io::Error::from_raw_os_error(libc::EBADE)),
        })?
    }

    /// Looks at the state, or changes it.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn with<T>(&self, what: impl FnOnce(&mut Model) -> T) -> io::Result<T> {
        let lock = std::fs::File::open(&self.path)?;
        lock.lock()?;
        let text = std::fs::read_to_string(&self.path)?;
        let mut model = Model::parse(&text).ok_or(io::ErrorKind::InvalidData)?;
        let done = what(&mut model);
        std::fs::write(&self.path, model.to_text())?;
        Ok(done)
    }
}

#[cfg(feature = "testing")]
impl Lun for FileLun {
    fn abilities(&self) -> io::Result<Abilities> {
        self.with(|lun| lun.abilities())
    }

    fn reservation(&self) -> io::Result<Option<Reservation>> {
        self.with(|lun| lun.reservation())
    }

    fn keys(&self) -> io::Result<Vec<u64>> {
        self.with(|lun| lun.keys())
    }

    fn register(&self, old: Option<u64>, new: u64) -> io::Result<Outcome> {
        self.with(|lun| lun.register(self.port, old, new))
    }

    fn reserve(&self, key: u64) -> io::Result<Outcome> {
        self.with(|lun| lun.reserve(self.port, key))
    }

    fn release(&self, key: u64) -> io::Result<Outcome> {
        self.with(|lun| lun.release(self.port, key))
    }

    fn preempt(&self, own: u64, victim: u64) -> io::Result<Outcome> {
        self.with(|lun| lun.preempt(self.port, own, victim))
    }
}
