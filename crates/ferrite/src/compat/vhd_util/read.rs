//! `read`: the metadata of an image, as text for people and scripts, or which blocks it has.

use std::path::Path;

use ferrite_image_tools::vhd::{Footer, Kind, Seen, SeenTables};

use super::query::{is_fixed, open};
use super::{Given, Stop, Verb, say, shown};

pub(in super::super) const READ: Verb = Verb {
    name: "read",
    letters: "n:pB",
    usage: "-n FILE (-p headers as text | -B a bit for each block that is in use)",
    run: read,
};

fn read(given: &Given, out: &mut Vec<u8>) -> Result<(), Stop> {
    let path = given.image()?;
    if !given.has('p') && !given.has('B') {
        return Err(Stop::Usage("-p or -B is missing".to_owned()));
    }
    let seen = open(path, false)?;
    if given.has('p') {
        headers(&seen, out);
    }
    if given.has('B') {
        let allocated = seen.allocated()?.ok_or_else(|| is_fixed(&seen))?;
        out.extend_from_slice(&allocated.bitmap);
    }
    Ok(())
}

/// A line of text: the storage manager looks for `Disk type` and `decoded name`.
fn row(out: &mut Vec<u8>, name: &str, value: impl std::fmt::Display) {
    say(out, format_args!("{name:<20}: {value}"));
}

fn headers(seen: &Seen, out: &mut Vec<u8>) {
    footer(seen.footer(), out);
    let Some(tables) = seen.tables() else { return };
    header(&tables, out);
    for locator in seen.locators() {
        say(out, "");
        row(out, "Locator", locator.index);
        row(out, "       code", locator.code);
        row(out, "       space", locator.space);
        row(out, "       length", locator.len);
        row(out, "       offset", locator.offset);
        let name = locator.path.as_deref().unwrap_or(Path::new("?"));
        out.extend_from_slice(b"       decoded name : ");
        out.extend_from_slice(&shown(name));
        out.push(b'\n');
    }
}

fn footer(footer: &Footer, out: &mut Vec<u8>) {
    let kind = match footer.kind {
        Kind::Fixed => "Fixed hard disk",
        Kind::Dynamic => "Dynamic hard disk",
        Kind::Differencing => "Differencing hard disk",
    };
    let (creator, geometry) = (footer.creator, footer.geometry);
    let (major, minor) = (creator.version >> 16, creator.version & 0xffff);
    row(out, "Disk type", kind);
    row(
        out,
        "Current size",
        format_args!("{} MiB ({} bytes)", footer.current_size >> 20, footer.current_size),
    );
    row(
        out,
        "Original size",
        format_args!("{} MiB ({} bytes)", footer.original_size >> 20, footer.original_size),
    );
    row(
        out,
        "Geometry",
        format_args!("{}/{}/{}", geometry.cylinders, geometry.heads, geometry.sectors),
    );
    row(out, "Creator", format_args!("{} {major}.{minor}", creator.app.escape_ascii()));
    row(out, "Created", format_args!("{} s after 2000-01-01 00:00 UTC", footer.timestamp));
    row(out, "UUID", footer.uuid);
    row(out, "Header at", footer.data_offset as i64);
    row(out, "Saved state", if footer.saved_state { "yes" } else { "no" });
    row(out, "Hidden", footer.hidden);
}

fn header(tables: &SeenTables, out: &mut Vec<u8>) {
    say(out, "");
    row(out, "Table at", tables.table_offset);
    row(out, "Table entries", tables.entries);
    row(out, "Block size", tables.block_bytes);
    if let Some((offset, bytes)) = tables.batmap {
        row(out, "Batmap", format_args!("{bytes} bytes at {offset}"));
    }
    out.extend_from_slice(format!("{:<20}: ", "Parent name").as_bytes());
    out.extend_from_slice(&shown(Path::new(&tables.parent_name)));
    out.push(b'\n');
    row(out, "Parent UUID", tables.parent_uuid);
}
