//! Commands that make or replace images: from options to what `ferrite_image_tools` does.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use ferrite_disk::{Format, ImageName};
use ferrite_image_tools::{Convert, Done, ImageTools, Inner, Measured, NewImage, Rebase};

use super::args::{
    ConvertArgs, CreateArgs, MeasureArgs, RebaseArgs, SnapshotArgs, existing, existing_disk, name,
    new_disk,
};
use super::{Out, text};
use crate::exit::{Code, Failure};

pub(super) fn create(tools: &ImageTools<'_>, args: &CreateArgs) -> Result<Done, Failure> {
    let image = name(&args.image, args.format)?;
    let wanted = args.options.wanted(image.format, &args.image)?;
    let parent = args.parent.as_ref().or(wanted.parent.as_ref());
    let format = args.parent_format.or(wanted.parent_format);
    let new = NewImage {
        bytes: args.size,
        parent: parent.map(|parent| existing(parent, format)).transpose()?,
        fixed: args.fixed || wanted.fixed,
        unit_bytes: args.unit.block.or(wanted.unit_bytes),
        extended_l2: wanted.extended_l2,
        force: args.force,
        unmarked: args.marking.unmarked,
    };
    if new.fixed && new.parent.is_some() {
        let what = format!("cannot make {}", args.image.display());
        let why = "an image on a parent has no space allocated at once";
        return Err(
            Failure::new(what, why, "leave out the parent, or that option").with_code(Code::USAGE)
        );
    }
    Ok(tools.create(&image, &new)?)
}

pub(super) fn convert(tools: &ImageTools<'_>, args: &ConvertArgs) -> Result<Done, Failure> {
    args.ignored.check(&args.destination)?;
    let from = existing_disk(&args.source, args.from)?;
    if args.existing {
        // A volume is refused there: it has no existing content that another disk's may replace.
        return Ok(tools.convert_over(&from, &existing_disk(&args.destination, args.to)?)?);
    }
    let (to, how, parent) = copy(args)?;
    match parent {
        Some(_) if how.resume || how.fixed => {
            let what = format!("cannot convert to {}", args.destination.display());
            let why = "a copy on a parent cannot be resumed, and has no space allocated at once";
            Err(Failure::new(what, why, "leave out the parent, or that option")
                .with_code(Code::USAGE))
        }
        Some(parent) => Ok(tools.convert_on(&from, &to, &parent, &how)?),
        None => Ok(tools.convert(&from, &to, &how)?),
    }
}

/// The copy that the arguments ask for: its name, how it is made, and its parent.
fn copy(args: &ConvertArgs) -> Result<(ImageName, Convert, Option<ImageName>), Failure> {
    let to = new_disk(&args.destination, args.to)?;
    let wanted = args.options.wanted(to.format, &args.destination)?;
    let how = Convert {
        force: args.force,
        resume: args.resume,
        fixed: args.fixed || wanted.fixed,
        unit_bytes: args.unit.block.or(wanted.unit_bytes),
        extended_l2: wanted.extended_l2,
        snapshot: args.snapshot.as_deref().map(snapshot_of),
        zero_bytes: args.zeros,
    };
    let parent = args.parent.as_ref().or(wanted.parent.as_ref());
    let format = args.parent_format.or(wanted.parent_format);
    let parent = parent.map(|parent| existing(parent, format)).transpose()?;
    Ok((to, how, parent))
}

/// What names a snapshot in `convert -l`, also in qemu-img's longer form.
fn snapshot_of(text: &OsStr) -> Vec<u8> {
    let text = text.as_bytes();
    let long = [&b"snapshot.id="[..], b"snapshot.name="];
    long.iter().find_map(|key| text.strip_prefix(*key)).unwrap_or(text).to_vec()
}

/// Copies a disk that may be damaged, and lists what could not be read. That decides the exit code.
pub(super) fn salvage(
    tools: &ImageTools<'_>,
    out: &Out<'_>,
    args: &ConvertArgs,
) -> Result<(), Failure> {
    args.ignored.check(&args.destination)?;
    let from = existing_disk(&args.source, args.from)?;
    let (to, how, parent) = copy(args)?;
    if parent.is_some() {
        let what = format!("cannot convert to {}", args.destination.display());
        let why = "what is salvaged stands on no parent";
        return Err(Failure::new(what, why, "leave out the parent").with_code(Code::USAGE));
    }
    let salvaged = tools.salvage(&from, &to, &how)?;
    if salvaged.damaged_bytes == 0 {
        return out.confirm(&salvaged, text::salvaged);
    }
    out.say(&salvaged, text::salvaged)?;
    let bytes = salvaged.damaged_bytes;
    Err(Failure::new(
        format!("{} is not all of {}", args.destination.display(), args.source.display()),
        format!("{bytes} bytes could not be read, and are zeros in the copy"),
        "restore these parts from a backup if there is one, and have the guest's file systems checked \
         (fsck) before they are used",
    )
    .with_code(Code::SALVAGED))
}

pub(super) fn rebase(tools: &ImageTools<'_>, args: &RebaseArgs) -> Result<Done, Failure> {
    let how = if args.is_unsafe { Rebase::Unsafe } else { Rebase::Safe };
    let image = args.named.name()?;
    match args.parent.is_empty() {
        true => Ok(tools.rebase_away(&image, how, args.force)?),
        false => {
            let parent = existing(&args.parent, args.parent_format)?;
            Ok(tools.rebase(&image, &parent, how, args.force)?)
        }
    }
}

/// Keeps the present state of a disk, or lists or changes the snapshots inside of its image.
pub(super) fn snapshot(
    tools: &ImageTools<'_>,
    out: &Out<'_>,
    args: &SnapshotArgs,
) -> Result<(), Failure> {
    let leaf = existing(&args.leaf, args.format)?;
    if let Some(parent) = &args.parent {
        let (parent, begin) = (name(parent, args.format)?, args.begin_map.as_deref());
        return out.confirm(&tools.snapshot_and(&leaf, &parent, begin)?, text::made);
    }
    let inner = &args.inner;
    if let Some(name) = &inner.create {
        let Some(name) = name.to_str() else {
            let what = format!("cannot make a snapshot inside of {}", args.leaf.display());
            let why = "its name is no UTF-8";
            return Err(Failure::new(what, why, "choose another name").with_code(Code::USAGE));
        };
        return out.confirm(&tools.inner(&leaf, Inner::Create(name))?, text::inner_made);
    }
    if let Some(text) = &inner.apply {
        let done = tools.inner(&leaf, Inner::Apply(text.as_bytes()))?;
        return out.confirm(&done, text::inner_applied);
    }
    if let Some(text) = &inner.delete {
        let done = tools.inner(&leaf, Inner::Delete(text.as_bytes()))?;
        return out.confirm(&done, text::inner_deleted);
    }
    if leaf.format != Format::Qcow2 {
        let what = format!("cannot list the snapshots inside of {}", args.leaf.display());
        let why = format!("format {} has none", leaf.format);
        let help = "ferrite image info shows the images that it stands on";
        return Err(Failure::new(what, why, help));
    }
    let (info, _) = tools.info_as_far(&leaf)?;
    let all = info.chain.into_iter().next().map(|layer| layer.snapshots).unwrap_or_default();
    out.say(&all, |all| text::inner_snapshots(all))
}

pub(super) fn measure(tools: &ImageTools<'_>, args: &MeasureArgs) -> Result<Measured, Failure> {
    let format = Format::from(args.to);
    let wanted = args.options.wanted(format, format.name().as_ref())?;
    let new = NewImage {
        fixed: args.fixed || wanted.fixed,
        unit_bytes: args.unit.block.or(wanted.unit_bytes),
        extended_l2: wanted.extended_l2,
        ..NewImage::default()
    };
    match (&args.image, args.size) {
        (Some(image), _) => Ok(tools.measure(&existing_disk(image, args.format)?, format, &new)?),
        (None, size) => Ok(Measured::of_empty(size.unwrap_or_default(), format, &new)),
    }
}
