//! Giving up all rights that a worker does not need (threats.md T27).
//!
//! A worker parses images of untrusted users, and takes requests of guests. An attacker that gets to run
//! code in it shall find: another user without a capability, an empty folder for the file system, an empty
//! network, no system call that opens, connects or executes anything.
//!
//! A restriction that this kernel does not have is left out and reported: Linux 4.19 has no landlock. One
//! that it has and refuses is an error, and nothing is served.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::processors;

mod calls;
mod filter;
mod rights;

pub use calls::Means;

/// How a process is locked down.
#[derive(Clone, Debug)]
pub struct Lockdown {
    /// User and group, which no other program has.
    pub user: u32,
    /// A folder with nothing in it, which becomes the root of the file system.
    pub root: PathBuf,
    /// The means of this worker besides those of all workers.
    pub means: Means,
}

/// The restrictions that a lock-down had to leave out here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lacking(Vec<String>);

impl Lacking {
    /// Nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Lacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

/// The user of the worker of one disk. Two disks of one guest have the same at worst.
///
/// No distribution and no systemd gives these numbers to a user.
pub fn user_of(domid: u16, devid: u32) -> u32 {
    const FIRST: u32 = 0x7100_0000;
    // Of xvda and its likes, which have 16 minor numbers each, or 256 in the extended scheme.
    let index = if devid >> 28 == 1 { devid >> 8 } else { devid >> 4 };
    FIRST | u32::from(domid) << 8 | (index & 0xff)
}

/// The user of the worker of a disk that has no domain of its own, by its number below 2^20.
pub fn user_of_tap(minor: u32) -> u32 {
    const FIRST: u32 = 0x7300_0000;
    FIRST | (minor & 0xf_ffff)
}

/// The user of the worker of all disks of one store, by the store's device and inode. No disk and no other
/// program has it; two stores have the same at worst.
pub fn user_of_store(device: u64, inode: u64) -> u32 {
    const FIRST: u32 = 0x7200_0000;
    let mixed = inode ^ device.rotate_left(11);
    FIRST | ((mixed ^ mixed >> 23 ^ mixed >> 46) as u32 & 0x7f_ffff)
}

/// The user of a tunnel that is no disk's, by the number of the process that it belongs to.
pub fn user_of_tunnel(process: u32) -> u32 {
    const FIRST: u32 = 0x7400_0000;
    FIRST | (process & 0x3f_ffff)
}

/// Denies this process all names, and all system calls but those of `means`, for good: what a process
/// can give up that is not root's. The process has one thread.
///
/// # Errors
/// It is not locked down: it has to end.
pub fn deny_names_and_calls(means: &Means) -> io::Result<Lacking> {
    rights::one_thread()?;
    let mut lacking = Lacking::default();
    processors::remember();
    rights::one_arena();
    step("refuse new rights", rights::no_new_rights())?;
    deny(&mut lacking, means)?;
    Ok(lacking)
}

/// Denies this process, for good, to change or execute any file by name, and to listen on a TCP port: what a library
/// that connects to servers and reads its configuration does not need. The process has one thread; later ones are as it is.
///
/// # Errors
/// It is not locked down: it has to end.
pub fn deny_changes() -> io::Result<Lacking> {
    rights::one_thread()?;
    let mut lacking = Lacking::default();
    step("refuse new rights", rights::no_new_rights())?;
    step("deny changes of files", filter::deny_changes(&mut lacking.0))?;
    Ok(lacking)
}

/// Denies this process, for good, to make, change or remove any file by name but in `folder` and below. Its open files
/// stay open, and processes that it starts are denied the same. The process has one thread; later ones are as it is.
///
/// # Errors
/// There is no such folder, or the process is not locked down: it has to end.
pub fn change_only(folder: &Path) -> io::Result<Lacking> {
    rights::one_thread()?;
    let mut lacking = Lacking::default();
    step("refuse new rights", rights::no_new_rights())?;
    step("keep to its folder", filter::change_only(folder, &mut lacking.0))?;
    Ok(lacking)
}

/// Leaves this process, for good, only what it opens below these folders: it may make, read, write and remove files
/// there, and use devices. It executes nothing, listens on no TCP port and connects to none, and has no capability. It
/// remains root's, whose files these are. The process has one thread; later ones are as it is.
///
/// # Errors
/// It is not locked down: it has to end.
pub fn keep_folders(folders: &[&Path]) -> io::Result<Lacking> {
    rights::one_thread()?;
    let mut lacking = Lacking::default();
    processors::remember();
    rights::one_arena();
    step("lock memory at will", rights::lock_memory_at_will(&mut lacking.0))?;
    step("refuse new rights", rights::no_new_rights())?;
    step("give up capabilities", rights::leave_capabilities())?;
    step("deny other names", filter::keep_folders(folders, &mut lacking.0))?;
    Ok(lacking)
}

/// Makes a process of root with several threads one of this user, without a capability.
///
/// # Errors
/// It still has rights of root: it has to end.
pub fn leave_root(user: u32) -> io::Result<()> {
    step("become another user", rights::leave_root(user))
}

/// The user of a helper for Ceph, by its own number as a process.
pub fn user_of_helper(process: u32) -> u32 {
    const FIRST: u32 = 0x7440_0000;
    FIRST | (process & 0x3f_ffff)
}

fn deny(lacking: &mut Lacking, means: &Means) -> io::Result<()> {
    step("deny all names", filter::deny_names(&mut lacking.0))?;
    step("deny system calls", filter::allow(&calls::allowed(means)))
}

impl Lockdown {
    /// Gives it all up, for good. The process has one thread, as root. All that it will ever open by
    /// itself is open.
    ///
    /// # Errors
    /// It is not locked down: it has to end.
    pub fn enter(&self) -> io::Result<Lacking> {
        rights::one_thread()?;
        let (mut lacking, root) = (Lacking::default(), self.root.display());
        // Both look into files when they are asked first.
        processors::remember();
        rights::one_arena();
        step("lock memory at will", rights::lock_memory_at_will(&mut lacking.0))?;
        step("leave the networks", rights::leave_networks(&mut lacking.0))?;
        step(&format!("have {root} as its root"), rights::leave_files(&self.root))?;
        step("become another user", rights::leave_user(self.user))?;
        deny(&mut lacking, &self.means)?;
        Ok(lacking)
    }
}

fn step(what: &str, done: io::Result<()>) -> io::Result<()> {
    done.map_err(|e| io::Error::new(e.kind(), format!("it cannot {what}: {e}")))
}

#[cfg(test)]
mod tests {
    use super::{user_of, user_of_store};

    #[test]
    fn disks_of_different_guests_have_different_users() {
        let all = [(1, 51712), (1, 51728), (2, 51712), (32751, 51712), (1, (1 << 28) | (20 << 8))];
        let mut users = all.map(|(domid, devid)| user_of(domid, devid)).to_vec();
        users.sort_unstable();
        users.dedup();
        assert_eq!(users.len(), all.len());
        assert!(users.iter().all(|user| (0x7100_0000..0x7180_0000).contains(user)));
    }
    #[test]
    fn a_stores_user_is_no_disks_and_no_relays_and_neighbours_differ() {
        let users = [(0x801, 12), (0x801, 13), (0x802, 12), (u64::MAX, u64::MAX), (0xca00, 0)];
        let mut users = users.map(|(device, inode)| user_of_store(device, inode)).to_vec();
        users.sort_unstable();
        users.dedup();
        assert_eq!(users.len(), 5);
        assert!(users.iter().all(|user| (0x7200_0000..0x7280_0000).contains(user)));
    }
}
