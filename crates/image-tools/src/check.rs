//! Checks and repairs of images.

use ferrite_disk::Disk;
use ferrite_disk_base::{
    Class, DiskError, ErrorKind, Format, ImageName, is_something_else, journal,
};
use ferrite_images::{Image, Layer, open_as_far, open_medium, open_raw};

use super::formats::Rules;
use super::io_context::IoContext;
use super::{
    CheckReport, Checked, Finding, ImageTools, Repaired, broken, formats, refused, unsuitable,
};

impl ImageTools<'_> {
    /// Checks an image, and with `chain` its parents. Nothing is written.
    ///
    /// # Errors
    /// It cannot be read, or is in use. Damage is in the report.
    pub fn check(&self, name: &ImageName, chain: bool) -> Result<CheckReport, DiskError> {
        self.check_by(name, chain, false)
    }

    /// Checks also by the rules of other programs, which refuse images that are valid here: of `vhd-util check`, which
    /// XAPI runs before it coalesces.
    ///
    /// # Errors
    /// Those of [`check`](Self::check).
    pub fn check_strictly(&self, name: &ImageName, chain: bool) -> Result<CheckReport, DiskError> {
        self.check_by(name, chain, true)
    }

    fn check_by(
        &self,
        name: &ImageName,
        chain: bool,
        strict: bool,
    ) -> Result<CheckReport, DiskError> {
        let (layers, end) = match name.format.is_layered() {
            false => (Vec::new(), self.open(name, true).err()),
            true => match open_as_far(name, &self.options(true)) {
                Ok(found) => found,
                Err(e) => (Vec::new(), Some(e)),
            },
        };
        let below = |i: usize| layers.get(i + 1).map(|layer| layer.medium().path());
        let rules = |i| if strict { Rules::Theirs(below(i)) } else { Rules::Ours };
        let mut images = vec![self.check_one(name, rules(0))?];
        for (i, layer) in layers.iter().enumerate().skip(1).filter(|_| chain) {
            let path = layer.medium().path().to_owned();
            images.push(self.check_one(&ImageName { format: layer.format(), path }, rules(i))?);
        }
        // Findings are reported even if the rest cannot be checked.
        let is_sound = images.iter().all(Checked::is_usable);
        match end {
            None => {}
            Some(e) if is_sound && matches!(e.kind(), ErrorKind::InUse | ErrorKind::Io) => {
                return Err(e);
            }
            // A parent that is not allowed is not checked.
            Some(e) if e.kind() == ErrorKind::Parent && chain && is_sound => return Err(e),
            Some(e) if e.kind() == ErrorKind::Parent => {
                let why = format!("not looked at: {} ({})", e.why(), e.help());
                images[0].add_last(of_chain(why, Class::Harmless));
            }
            // For example, a missing parent.
            Some(e) if is_sound && e.kind() == ErrorKind::Unsuitable => return Err(e),
            Some(e) if is_sound => match layers.last() {
                // The image itself is intact, and its parent is not.
                Some(child) => images.push(self.check_unusable(child, e)?),
                None => {
                    let why = format!("{} ({})", e.why(), e.help());
                    images[0].add_first(of_chain(why, Class::Damage));
                }
            },
            Some(_) => {}
        }
        Ok(CheckReport::of(images))
    }

    /// The finding about an image's parent that cannot be opened.
    fn check_unusable(&self, child: &Layer, e: DiskError) -> Result<Checked, DiskError> {
        let names = child.parents()?.map_or(Vec::new(), |parents| parents.candidates);
        let Some(parent) = names.into_iter().find(|name| name.path.exists()) else {
            return Err(e);
        };
        let mut checked = self.check_one(&parent, Rules::Ours)?;
        if checked.is_usable() {
            let why = format!("{} ({})", e.why(), e.help());
            checked.add_first(of_chain(why, Class::Damage));
        }
        Ok(checked)
    }

    fn check_one(&self, name: &ImageName, rules: Rules<'_>) -> Result<Checked, DiskError> {
        let options = self.medium_options(true);
        let open = if name.format.is_layered() { open_medium } else { open_raw };
        let raw = open(&name.path, &options)?;
        if let Some(other) = is_something_else(&raw, name.format) {
            return Err(other);
        }
        let journal = journal::any_at(self.readable_state(), &raw)?;
        let mut checked = Checked { journal, ..formats::check(&raw, name.format, rules)? };
        if journal {
            checked.expect_journal();
        }
        Ok(checked)
    }

    /// Repairs what can be repaired without guessing, if `force` is set; otherwise only reports these repairs, or the
    /// error with which `force` would fail. The journal of a killed backend is written into the image first.
    ///
    /// # Errors
    /// It cannot be read or written, or is in use.
    pub fn repair(&self, name: &ImageName, force: bool) -> Result<Repaired, DiskError> {
        let what = || format!("cannot repair {}", name.path.display());
        if name.format == Format::Raw {
            let help = "the guest's file system has tools for what is in it";
            return Err(unsuitable(what(), "a raw image has nothing that could be mended", help));
        }
        let before = self.check_one(name, Rules::Ours)?;
        let (journal, unusable) = self.replay(name, force)?;
        let options = ImageTools::even_parents(self.medium_options(!force));
        let raw = open_medium(&name.path, &options)?;
        match unusable {
            // The journal may have data in blocks that the image takes for unused.
            Some(e) if journal::any_at(self.readable_state(), &raw)? => return Err(e),
            _ => {}
        }
        let mendable = formats::is_repairable(&raw, name.format)?;
        if !force {
            let after = before.clone();
            return Ok(Repaired { done: false, journal, mendable, before, after });
        }
        let mut context = IoContext::new(self, 0).map_err(|e| broken(what(), e))?;
        let port = context.port_of(raw.files()).map_err(|e| broken(what(), e))?;
        let mended = context.run(async { Ok(formats::repair(&port, &raw, name.format).await) });
        mended.map_err(|e| broken(what(), e))??;
        let after = formats::check(&raw, name.format, Rules::Ours)?;
        Ok(Repaired { done: true, journal, mendable, before, after })
    }

    /// Writes the journal of a killed backend into an image, with `force`. Returns whether there is one with answered
    /// writes, and the error if the image must be repaired before it can be opened.
    fn replay(
        &self,
        name: &ImageName,
        force: bool,
    ) -> Result<(bool, Option<DiskError>), DiskError> {
        // Its parents are not opened: they may be missing. A reader finds the journal, and leaves it unchanged.
        let options = ImageTools::even_parents(self.options(true));
        let readable = Image::open_alone(name, &options).and_then(|image| {
            let leaf = &image.layers()[0];
            let journal = leaf.has_journal(self.readable_state())?;
            leaf.check_writable().map(|()| journal)
        });
        let replayed = readable.and_then(|journal| {
            if force {
                let options = ImageTools::even_parents(self.options(false));
                let image = Image::open_alone(name, &options)?;
                self.close(&Disk::Image(image), &name.path)?;
            }
            Ok(journal)
        });
        match replayed {
            Ok(journal) => Ok((journal, None)),
            // The damage that keeps it from being opened may be repairable.
            Err(e) if matches!(e.kind(), ErrorKind::Unsuitable | ErrorKind::Damaged) => {
                Ok((false, Some(e)))
            }
            Err(e) => Err(e),
        }
    }
}

/// A finding about the chain.
fn of_chain(why: String, class: Class) -> Finding {
    let kind = "chain".into();
    let harmless = class.is_harmless();
    Finding { offset_bytes: None, kind, why, class, harmless, mendable: false }
}

impl Repaired {
    /// Whether findings are mended: with `force`, or by that.
    pub fn is_mended(&self) -> bool {
        self.mendable && self.before.counts.mendable > 0
    }

    /// The findings for which `force` was needed and not given, as an error.
    ///
    /// # Errors
    /// There is something to repair.
    pub fn or_refused(&self) -> Result<(), DiskError> {
        let what = format!("cannot repair {}", self.after.path);
        if !self.done && (self.is_mended() || self.journal) {
            let help = "--force does it; take a copy of the file first if you can";
            return Err(refused(what, "metadata would be overwritten", help));
        }
        if self.after.is_usable() {
            return Ok(());
        }
        if self.after.counts.damage == 0 {
            let help = "use the program that made it, or convert it with that";
            return Err(unsuitable(what, "it has features that are not supported here", help));
        }
        let help = "what is not mendable needs a backup";
        let why = "there is damage that nothing is known to mend";
        Err(DiskError::new(ErrorKind::Damaged, what, why, help))
    }
}
