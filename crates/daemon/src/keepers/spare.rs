//! Keepers without a disk: XAPI starts a tap's process before it names the tap, and the tap before
//! it names the image.

use std::io;
use std::path::PathBuf;
use std::sync::PoisonError;

use ferrite_keeper::{DiskSpec, Keeper, remove_leftovers, socket_name};

use super::{Keepers, failure, has_no_listener};
use crate::Failure;
use crate::state::DiskId;

/// The beginning of the names of keepers without a disk. A number follows.
const SPARE: &str = "spare-";

/// The keeper's process number.
pub(super) fn process_of(keeper: &Keeper) -> io::Result<u32> {
    keeper.line(None).map(|line| line.keeper.cast_unsigned())
}

impl Keepers {
    /// The names of all keepers without a disk, by their files.
    fn spare_names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.names().filter(|name| name.starts_with(SPARE)).collect();
        names.sort();
        names.dedup();
        names
    }

    fn spare_paths(&self, name: &str) -> (PathBuf, PathBuf) {
        (self.folder().join(socket_name(name)), self.run.join(name))
    }

    /// Living keepers without a disk, with their process numbers. Files of dead ones are removed.
    pub(super) fn live_spares(&self) -> Vec<(u32, Keeper)> {
        let mut found = Vec::new();
        for name in self.spare_names() {
            let (socket, run_dir) = self.spare_paths(&name);
            match Keeper::connect(&socket) {
                Ok(keeper) => found.extend(process_of(&keeper).ok().map(|pid| (pid, keeper))),
                Err(e) if has_no_listener(&e) => {
                    if let Err(e) = remove_leftovers(&socket, &run_dir) {
                        tracing::debug!("cannot remove what keeper {name} has left: {e}");
                    }
                }
                Err(e) => tracing::debug!("cannot reach keeper {name}: {e}"),
            }
        }
        found
    }

    /// Starts a keeper without a disk. Returns its process number.
    pub(super) fn spawn_spare(&self) -> Result<u32, Failure> {
        let _one = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        // Names of dead keepers are free again.
        self.live_spares();
        let taken = self.spare_names();
        let name = (0..).map(|n| format!("{SPARE}{n}")).find(|name| !taken.contains(name));
        let (socket, run_dir) = self.spare_paths(&name.unwrap_or_default());
        let spec = DiskSpec::idle(socket, run_dir, None);
        let command = self.programs.keeper(DiskId::tap(0), &spec);
        let started = spec.start(command).and_then(|()| Keeper::connect(&spec.socket));
        started
            .and_then(|keeper| process_of(&keeper))
            .map_err(|e| failure("start a keeper without a disk", &e))
    }

    fn idle_spec(&self, disk: DiskId) -> DiskSpec {
        let run_dir = self.run.join(disk.file_name());
        DiskSpec::idle(self.socket(disk), run_dir, Some(self.public_socket(disk)))
    }

    /// Gives this keeper the tap. `false`: no keeper without a disk has this process number.
    pub(super) fn give_spare(&self, pid: u32, disk: DiskId) -> Result<bool, Failure> {
        let spare = self.live_spares().into_iter().find(|(found, _)| *found == pid);
        let Some((_, keeper)) = spare else { return Ok(false) };
        let spec = self.idle_spec(disk);
        keeper.become_keeper_of(&spec).map_err(|e| failure("give the keeper its tap", &e))?;
        Ok(true)
    }

    /// Takes the image from the keeper of a tap. Its worker has closed it. Returns the process number of the tap's
    /// keeper if that is another one now: the keeper of a store stays with the store's other disks.
    pub(super) fn empty_keeper(&self, disk: DiskId) -> Result<Option<u32>, Failure> {
        let spec = self.idle_spec(disk);
        let keeper = match Keeper::connect(&spec.socket) {
            Err(e) if has_no_listener(&e) => return Ok(None),
            keeper => keeper,
        };
        let empty = |keeper: Keeper| {
            if keeper.spec()?.group.is_none() {
                return keeper.change(&spec).map(|()| None);
            }
            keeper.leave()?;
            let _one = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
            spec.start(self.programs.keeper(disk, &spec))?;
            Keeper::connect(&spec.socket).and_then(|keeper| process_of(&keeper)).map(Some)
        };
        keeper.and_then(empty).map_err(|e| failure("take the image from the keeper", &e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_keepers_without_a_disk_are_no_disks() {
        assert_eq!(crate::state::id_of_name(&format!("{SPARE}3")), None);
        assert_eq!(ferrite_keeper::name_of("spare-3.sock"), Some("spare-3"));
    }
}
