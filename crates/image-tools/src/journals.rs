//! The journals of killed backends.

use ferrite_disk_base::journal::{self, Kept};
use ferrite_disk_base::{DiskError, ErrorKind, ImageName};

use super::{ImageTools, JournalInfo, JournalState, refused};

/// The properties of a journal.
fn info(kept: &Kept) -> JournalInfo {
    JournalInfo {
        name: kept.name.clone(),
        format: kept.format.map(|format| format.name()),
        path: kept.path.display().to_string(),
        records: kept.records,
        state: kept.state,
    }
}

impl ImageTools<'_> {
    /// All journals of this host.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn journals(&self) -> Result<Vec<JournalInfo>, DiskError> {
        Ok(self.kept()?.iter().map(info).collect())
    }

    /// The error for a journal that its image needs. Its help is what works: an image that was changed since cannot get
    /// the journal's writes any more.
    fn needed(&self, kept: &Kept, what: String) -> DiskError {
        let path = kept.path.display();
        let name = kept.format.map(|format| ImageName { format, path: kept.path.clone() });
        let repaired = name.map(|name| self.repair(&name, false));
        if let Some(Err(e)) = repaired {
            let why = format!("{path} is there, and does not get the writes in it: {}", e.why());
            let help = "mend that first if it can be mended; --force gives the writes up";
            return refused(what, why, help);
        }
        let why = format!("{path} is there, and writes that were answered would be lost to it");
        let help = format!(
            "ferrite image repair --force {path} brings them into the image; --force gives them up"
        );
        refused(what, why, &help)
    }

    fn kept(&self) -> Result<Vec<Kept>, DiskError> {
        self.state_dir.as_deref().map_or_else(|| Ok(Vec::new()), journal::all)
    }

    /// Drops the journals with these names; with `stale`, all journals whose images are gone. A journal that an
    /// existing image needs is dropped only with `force`. Either all are dropped or none.
    ///
    /// # Errors
    /// No journal has a given name; it is in use; `Refused`.
    pub fn drop_journals(
        &self,
        names: &[String],
        stale: bool,
        force: bool,
    ) -> Result<Vec<JournalInfo>, DiskError> {
        let all = self.kept()?;
        let mut dropped: Vec<&Kept> = Vec::new();
        for name in names {
            let what = format!("cannot drop {name}");
            let Some(kept) = all.iter().find(|kept| kept.name == *name) else {
                let help = "ferrite image journal list shows all there are";
                return Err(DiskError::new(
                    ErrorKind::NotFound,
                    what,
                    "there is no such journal",
                    help,
                ));
            };
            match kept.state {
                JournalState::InUse => {
                    let why = format!("a process has {} open", kept.path.display());
                    let help = "stop what uses the image first";
                    return Err(DiskError::new(ErrorKind::InUse, what, why, help));
                }
                JournalState::Kept if kept.records > 0 && !force => {
                    return Err(self.needed(kept, what));
                }
                JournalState::Foreign if !force => {
                    let why = "another version of this program has left it, and answered writes may be in it";
                    let help = "open its image with that version once, which brings them into the \
                                image; --force gives them up";
                    return Err(refused(what, why, help));
                }
                JournalState::Kept
                | JournalState::Foreign
                | JournalState::Away
                | JournalState::Stale => {
                    if !dropped.iter().any(|other| other.name == kept.name) {
                        dropped.push(kept);
                    }
                }
            }
        }
        let is_stale = |kept: &&Kept| stale && kept.state == JournalState::Stale;
        dropped.extend(all.iter().filter(|kept| is_stale(kept) && !names.contains(&kept.name)));
        if let Some(dir) = &self.state_dir {
            journal::drop_kept(dir, &dropped)?;
        }
        Ok(dropped.into_iter().map(info).collect())
    }
}
