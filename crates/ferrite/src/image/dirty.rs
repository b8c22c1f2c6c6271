//! `ferrite image dirty`: the maps of what has changed on a disk.

use std::fmt::Write as _;

use ferrite_disk::ImageName;
use ferrite_disk::size::Human;
use ferrite_image_tools::{DirtyMap, DirtyMaps, ImageTools, MapChange};

use super::args::{ChangeArgs, DirtyCommand, ShowArgs, existing};
use super::{Out, text};
use crate::exit::{Code, Failure};
use crate::plain::one_line;

/// Runs one command.
pub(super) fn run(
    tools: &ImageTools<'_>,
    out: &Out<'_>,
    command: &DirtyCommand,
) -> Result<(), Failure> {
    match command {
        DirtyCommand::Add(it) => change(tools, out, it, MapChange::Begin(it.map.clone())),
        DirtyCommand::Remove(it) => change(tools, out, it, MapChange::End(it.map.clone())),
        DirtyCommand::Clear(it) => change(tools, out, it, MapChange::Clear(it.map.clone())),
        DirtyCommand::Copy(it) => {
            let (from, to) = (existing(&it.from, None)?, existing(&it.to, None)?);
            out.confirm(&tools.copy_maps(&from, &to, it.begin_map.as_deref())?, text::made)
        }
        DirtyCommand::Pack(it) => {
            let packed = tools.pack_maps(&it.named.name()?)?;
            std::fs::write(&it.file, packed).map_err(|e| {
                let what = format!("cannot write {}", it.file.display());
                Failure::new(what, e, "make room there, or name another file")
            })
        }
        DirtyCommand::Adopt(it) => {
            let packed = std::fs::read(&it.file).map_err(|e| {
                Failure::new(format!("cannot read {}", it.file.display()), e, "name a packed file")
            })?;
            let name = existing(&it.image, None)?;
            out.confirm(&tools.adopt_maps(&packed, &name, &it.path)?, text::made)
        }
        DirtyCommand::List(it) => {
            let name = it.named.name()?;
            out.say(&tools.dirty_maps(&name)?, |maps| list(&name, maps))
        }
        DirtyCommand::Show(it) => show(tools, out, it),
    }
}

fn change(
    tools: &ImageTools<'_>,
    out: &Out<'_>,
    args: &ChangeArgs,
    change: MapChange,
) -> Result<(), Failure> {
    out.confirm(&tools.change_maps(&args.named.name()?, &change)?, text::made)
}

fn list(name: &ImageName, maps: &DirtyMaps) -> String {
    let path = name.path.display().to_string();
    let Some(file) = &maps.path else {
        return format!("{}: no dirty maps\n", one_line(&path));
    };
    let mut out = String::new();
    if let Some(why) = &maps.void {
        let file = one_line(file);
        let _ =
            writeln!(out, "{file} is void, and everything counts as changed: {}", one_line(why));
    }
    for map in &maps.maps {
        let changed = Human(map.changed_bytes);
        let since = text::date(map.begun_s);
        let _ = writeln!(out, "{:<24} {changed:>12} changed since {since}", map.name);
    }
    out
}

/// Prints the ranges of a map.
fn show(tools: &ImageTools<'_>, out: &Out<'_>, args: &ShowArgs) -> Result<(), Failure> {
    let name = args.one.named.name()?;
    let DirtyMaps { void, maps, .. } = tools.dirty_maps(&name)?;
    let what = || format!("cannot show what has changed on {}", name.path.display());
    if let Some(why) = void {
        let help = "make a full backup, and begin the map anew (ferrite image dirty add)";
        let why = format!("its dirty maps are void, and everything counts as changed: {why}");
        return Err(Failure::new(what(), why, help));
    }
    let Some(map) = maps.into_iter().find(|map| map.name == args.map) else {
        let help = "ferrite image dirty list shows the maps that there are";
        let why = format!("there is no map {:?}", args.map);
        return Err(Failure::new(what(), why, help).with_code(Code::NOT_FOUND));
    };
    out.say(&map, ranges)
}

fn ranges(map: &DirtyMap) -> String {
    let mut out = format!("{:>18} {:>16}\n", "offset", "length");
    for part in &map.changed {
        let _ = writeln!(out, "{:>18} {:>16}", part.start_bytes, part.length_bytes);
    }
    out
}
