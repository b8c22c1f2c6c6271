//! A dead process's files in the state directory, changed by an attacker.

use std::fs;
use std::io::Read;

use ferrite_disk::Format;

use super::stage::Stage;
use super::{opened, read_around, session};
use crate::images::{Sketch, qcow2, vhd};

/// Bytes of a journal's header; the rest are records.
const HEADER_BYTES: usize = 4096;
/// The offset of the image's identifier in the header, which begins with the mark of a qcow2 image, and the offset of
/// the mark in that image.
const ID_AT: u64 = 8;
const MARK_AT: u64 = 88;
/// The offset of the number of words of a record in the header.
const WORDS_AT: usize = 24;

/// The first byte: the format, whether the image is opened for writing, and whether the header is part of the input.
/// Then the records (after the header), as in the file.
pub(crate) fn journal(input: &[u8]) {
    let Some((flags, bytes)) = input.split_first() else { return };
    let format = if flags & 1 == 0 { Format::Vhd } else { Format::Qcow2 };
    let (read_only, own_header) = (flags & 2 != 0, flags & 4 != 0);
    Stage::with(|stage| {
        let mut image = match format {
            Format::Vhd => vhd::small().build(),
            _ => qcow2::small().build(),
        };
        stage.put_image(format, &image);
        let Some((name, mut file)) = template(stage, format) else { return };
        if format == Format::Qcow2 {
            image.put(MARK_AT, &file.get(ID_AT, 8));
            stage.put_image(format, &image);
        }
        let at = if own_header { 0 } else { HEADER_BYTES as u64 };
        let room = (file.bytes() - at) as usize;
        file.put(at, &bytes[..bytes.len().min(room)]);
        clear(stage);
        file.save(&stage.state().join(name)).expect("room on /dev/shm");
        if let Some(disk) = opened(stage.open(format, read_only, Some(stage.state()))) {
            if read_only {
                read_around(disk);
            } else {
                recover(stage, format, disk);
            }
        }
        clear(stage);
    });
}

/// Valid records are written to the image, which must be a valid one after that.
fn recover(stage: &Stage, format: Format, disk: ferrite_disk::Disk) {
    let mut session = session(disk);
    let mut before = vec![0; 4096];
    let read = session.read(0, &mut before).is_ok();
    if session.close().is_err() {
        return;
    }
    let disk = stage.open(format, true, None).expect("what was taken over is a whole image");
    let mut session = super::session(disk);
    let mut after = vec![0; 4096];
    let again = session.read(0, &mut after).is_ok();
    assert!(!read || again && before == after, "what was taken over is lost");
}

/// An empty journal, and its name.
fn template(stage: &Stage, format: Format) -> Option<(String, Sketch)> {
    let made = stage.template(format);
    if made.is_none() {
        drop(stage.open(format, false, Some(stage.state())).ok()?);
        let entry = fs::read_dir(stage.state()).ok()?.next()?.ok()?;
        let mut file = fs::File::open(entry.path()).ok()?;
        let mut header = [0; HEADER_BYTES];
        file.read_exact(&mut header).ok()?;
        assert_ne!(header[WORDS_AT], 0, "the layout of journals has changed");
        let mut out = Sketch::new(file.metadata().ok()?.len());
        out.put(0, &header);
        let journal = (entry.file_name().into_string().ok()?, out);
        stage.set_template(format, &journal);
        return Some(journal);
    }
    made
}

/// Removes the journal, so that the next input finds none.
fn clear(stage: &Stage) {
    let entries = fs::read_dir(stage.state()).expect("the state directory");
    for entry in entries.flatten() {
        let _ = fs::remove_file(entry.path());
    }
}
