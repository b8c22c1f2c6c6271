//! `scan`: a line for each of many images, in files or in logical volumes.
//!
//! A broken image is a line, too. The exit status is that of the last one, or 0 with `-c`: the storage manager asks a
//! second time with that.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use ferrite_daemon::control::protocol::Facts as Served;
use ferrite_image_tools::vhd::{SeenVolume, Uuid};
use rustix::io::Errno;

use super::lvm::{self, Volume};
use super::query::{found, negative, open, with_footer};
use super::{Given, Stop, Verb, glob, say, shown};
use crate::compat::{Refusal, served};

pub(in super::super) const SCAN: Verb = Verb {
    name: "scan",
    letters: "m:fcl:pav",
    usage: "[-m PATTERN] [-f parents by their names alone] [-c exit status 0] [-l VG: its logical \
            volumes] [-a also the parents] [-p as a tree] [-v whole paths] [FILE...]",
    run: scan,
};

/// The text of a line about an image that cannot be read.
const BROKEN: &str = "opening file";
/// The text of a line about a name that leads to none.
const MISSING: &str = "failure scanning target";
/// The least bytes of a segment: all headers are in them.
const LEAST_BYTES: u64 = 4096;
/// More blanks before an image than before its parent.
const INDENT: usize = 3;

/// The properties of an image.
struct Facts {
    capacity: u64,
    size: u64,
    hidden: u8,
    parent: Option<Parent>,
}

#[derive(Clone)]
struct Parent {
    name: PathBuf,
    is_raw: bool,
}

/// A line of the output.
struct Line {
    name: PathBuf,
    /// Or the reason why the image cannot be read, and its text.
    found: Result<Facts, (Errno, &'static str)>,
}

/// The lines so far.
struct Scan<'a> {
    given: &'a Given,
    lines: Vec<Line>,
    /// The last refusal, for the exit status.
    last: Option<Refusal>,
    /// What workers tell of images that they write to.
    served: HashMap<PathBuf, Served>,
}

fn scan(given: &Given, out: &mut Vec<u8>) -> Result<(), Stop> {
    if given.value('m').is_none() && given.words.is_empty() {
        return Err(Stop::Usage("-m is missing".to_owned()));
    }
    let mut scan = Scan { given, lines: Vec::new(), last: None, served: HashMap::new() };
    match given.value('l') {
        None => scan.files()?,
        Some(group) => scan.volumes(group)?,
    }
    match given.has('p') {
        true => scan.print_tree(out),
        false => scan.lines.iter().for_each(|line| scan.print(line, 0, "", out)),
    }
    match scan.last {
        Some(refusal) if !given.has('c') => Err(refusal.into()),
        _ => Ok(()),
    }
}

impl Scan<'_> {
    fn add(&mut self, name: &Path, found: Result<Facts, Refusal>) {
        self.add_as(name, found, BROKEN);
    }

    fn add_as(&mut self, name: &Path, found: Result<Facts, Refusal>, text: &'static str) {
        let found = found.map_err(|refusal| {
            let errno = refusal.errno;
            self.last = Some(refusal);
            (errno, text)
        });
        self.lines.push(Line { name: name.to_owned(), found });
    }

    /// A parent that is not there does not make the scan fail: its child is not what was asked for, or has a line.
    fn add_missing_parent(&mut self, name: &Path) {
        self.lines.push(Line { name: name.to_owned(), found: Err((Errno::NOENT, MISSING)) });
    }

    /// Whether names of parents are taken from the header, without a look at the parent.
    fn is_fast(&self) -> bool {
        self.given.has('f') && !self.given.has('p')
    }

    /// Asks the workers that write to images what is not on the medium yet.
    fn ask(&mut self, names: &[PathBuf]) -> Result<(), Refusal> {
        let paths: Vec<&Path> = names.iter().map(PathBuf::as_path).collect();
        let told = served::query_all(&served::run_dir(), &paths)?;
        let known = names.iter().cloned().zip(told);
        self.served = known.filter_map(|(name, facts)| Some((name, facts?))).collect();
        Ok(())
    }

    fn files(&mut self) -> Result<(), Refusal> {
        let mut names = Vec::new();
        if let Some(pattern) = self.given.value('m') {
            match glob::paths(pattern) {
                Ok(paths) => names = paths,
                Err(e) => self.add_as(Path::new(pattern), Err(not_found(pattern, &e)), MISSING),
            }
        }
        names.extend(self.given.words.iter().map(PathBuf::from));
        self.ask(&names)?;
        let mut scanned: HashSet<_> = names.iter().map(|name| last(name).to_owned()).collect();
        let mut left: VecDeque<_> = names.into_iter().map(|name| (name, false)).collect();
        while let Some((name, is_raw)) = left.pop_front() {
            if is_raw {
                self.add(&name, raw_file(&name));
                continue;
            }
            let (facts, way) = match self.file(&name) {
                Ok((facts, way)) => (Ok(facts), way),
                Err(refusal) => (Err(refusal), None),
            };
            let parent = facts.as_ref().ok().and_then(|facts| facts.parent.clone());
            self.add(&name, facts);
            let Some(parent) = parent.filter(|_| self.given.has('a')) else { continue };
            match way {
                Some(way) if scanned.insert(last(&way).to_owned()) => {
                    left.push_back((way, parent.is_raw));
                }
                Some(_) => {}
                None => self.add_missing_parent(&parent.name),
            }
        }
        Ok(())
    }

    /// The properties of an image in a file, and the path of its parent if that was looked for.
    fn file(&self, path: &Path) -> Result<(Facts, Option<PathBuf>), Refusal> {
        let seen = open(path, false)?;
        let now = self.served.get(path);
        let facts = Facts {
            capacity: now.map_or(seen.footer().current_size, |now| now.bytes),
            size: now.map_or_else(|| seen.used_bytes_at_once(), |now| Ok(with_footer(now.end)))?,
            hidden: now.map_or(seen.footer().hidden, |now| now.hidden),
            parent: None,
        };
        let Some(uuid) = seen.parent_uuid() else { return Ok((facts, None)) };
        let looked_for = !self.is_fast() || self.given.has('a');
        let way = if looked_for { found(&seen).ok() } else { None };
        let by_header = seen.tables().map(|tables| tables.parent_name);
        let by_header = by_header.filter(|name| !name.is_empty() && self.is_fast());
        let name =
            by_header.map(PathBuf::from).or_else(|| way.clone()).or_else(|| seen.parent_name());
        let name = name.ok_or_else(|| Refusal {
            errno: Errno::INVAL,
            why: format!("{} does not name its parent", path.display()),
        })?;
        let parent = Some(Parent { name, is_raw: uuid == Uuid::NIL });
        Ok((Facts { parent, ..facts }, way))
    }

    fn volumes(&mut self, group: &OsStr) -> Result<(), Refusal> {
        let all = lvm::volumes(group)?;
        let patterns = self.given.value('m').into_iter();
        let patterns: Vec<&OsStr> =
            patterns.chain(self.given.words.iter().map(|word| word.as_os_str())).collect();
        let is_meant = |volume: &&Volume| {
            patterns.iter().any(|pattern| glob::matches(pattern.as_bytes(), volume.name.as_bytes()))
        };
        let mut left: VecDeque<_> =
            all.iter().filter(is_meant).map(|volume| (volume, false)).collect();
        let mut scanned: HashSet<&str> =
            left.iter().map(|(volume, _)| volume.name.as_str()).collect();
        while let Some((volume, is_raw)) = left.pop_front() {
            let facts = if is_raw { Ok(raw(volume.bytes)) } else { facts_of(volume) };
            let parent = facts.as_ref().ok().and_then(|facts| facts.parent.clone());
            self.add(Path::new(&volume.name), facts);
            let Some(parent) = parent.filter(|_| self.given.has('a')) else { continue };
            match all.iter().find(|volume| Path::new(&volume.name) == parent.name) {
                Some(found) if scanned.insert(&found.name) => {
                    left.push_back((found, parent.is_raw));
                }
                Some(_) => {}
                None => self.add_missing_parent(&parent.name),
            }
        }
        Ok(())
    }

    fn print(&self, line: &Line, indent: usize, suffix: &str, out: &mut Vec<u8>) {
        out.extend(std::iter::repeat_n(b' ', indent));
        let short = |path: &Path| match self.given.has('v') {
            true => shown(path),
            false => shown(Path::new(last(path))),
        };
        out.extend_from_slice(b"vhd=");
        match &line.found {
            Err((errno, text)) => {
                out.extend_from_slice(&shown(&line.name));
                let errno = negative(*errno);
                say(out, format_args!(" scan-error={errno} error-message='{text}'"));
            }
            Ok(Facts { capacity, size, hidden, parent }) => {
                out.extend_from_slice(&short(&line.name));
                let numbers = format!(" capacity={capacity} size={size} hidden={hidden} parent=");
                out.extend_from_slice(numbers.as_bytes());
                match parent {
                    Some(parent) => out.extend_from_slice(&short(&parent.name)),
                    None => out.extend_from_slice(b"none"),
                }
                say(out, suffix);
            }
        }
    }

    /// Prints each image below its parent. First come chains whose first image is hidden, then the others.
    fn print_tree(&self, out: &mut Vec<u8>) {
        let parent_of = |line: &Line| {
            let parent = line.found.as_ref().ok()?.parent.as_ref()?;
            self.lines.iter().position(|other| last(&other.name) == last(&parent.name))
        };
        let mut children = vec![Vec::new(); self.lines.len()];
        let (mut hidden, mut others) = (Vec::new(), Vec::new());
        for (i, line) in self.lines.iter().enumerate() {
            match parent_of(line) {
                Some(parent) => children[parent].push(i),
                None if line.found.as_ref().is_ok_and(|facts| facts.hidden != 0) => hidden.push(i),
                None => others.push(i),
            }
        }
        // Images that stand on each other in a circle are below none, so they come last.
        let mut printed = vec![false; self.lines.len()];
        for first in { hidden }.into_iter().chain(others).chain(0..self.lines.len()) {
            let mut left = vec![(first, 0)];
            while let Some((i, depth)) = left.pop() {
                if std::mem::replace(&mut printed[i], true) {
                    continue;
                }
                let line = &self.lines[i];
                let has_parent = line.found.as_ref().is_ok_and(|facts| facts.parent.is_some());
                let is_lost = has_parent && parent_of(line).is_none();
                let suffix = if is_lost { " (not found in scan)" } else { "" };
                self.print(line, depth * INDENT, suffix, out);
                left.extend(children[i].iter().rev().map(|child| (*child, depth + 1)));
            }
        }
    }
}

/// The last part of a path.
fn last(path: &Path) -> &OsStr {
    path.file_name().unwrap_or(path.as_os_str())
}

fn not_found(pattern: &OsStr, e: &io::Error) -> Refusal {
    let errno = match e.kind() {
        io::ErrorKind::InvalidInput => Errno::INVAL,
        _ => Errno::from_io_error(e).unwrap_or(Errno::NOENT),
    };
    Refusal { errno, why: format!("cannot find {}: {e}", pattern.display()) }
}

/// A raw image is there as a parent alone.
fn raw(bytes: u64) -> Facts {
    Facts { capacity: bytes, size: bytes, hidden: 1, parent: None }
}

fn raw_file(path: &Path) -> Result<Facts, Refusal> {
    // The end, as metadata have no size of a device.
    let bytes = File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0)));
    bytes.map(raw).map_err(|e| not_found(path.as_os_str(), &e))
}

/// The properties of an image in a logical volume. Its size is that of the volume, and the volume need not be active.
fn facts_of(volume: &Volume) -> Result<Facts, Refusal> {
    let refused =
        |errno, why: &str| Refusal { errno, why: format!("volume {}: {why}", volume.name) };
    let first = volume.first.as_ref();
    let first = first.ok_or_else(|| refused(Errno::NOSYS, "its first segment is not linear"))?;
    if first.bytes < LEAST_BYTES {
        return Err(refused(Errno::INVAL, "it is too small for an image"));
    }
    let seen = SeenVolume::read(&first.device, first.start)?;
    let parent = match seen.parent {
        Some(name) => {
            let name =
                volume_of(&name).ok_or_else(|| refused(Errno::INVAL, "its parent has no name"))?;
            Some(Parent { name: name.into(), is_raw: seen.is_on_raw })
        }
        None => None,
    };
    Ok(Facts { capacity: seen.bytes, size: volume.bytes, hidden: seen.hidden, parent })
}

/// The name of a volume by that of its device: `VG-LV`, with each dash of either name doubled. A name with more than
/// one single dash is that of a volume.
fn volume_of(device: &str) -> Option<String> {
    const DASH: &str = "\0";
    let name = device.rsplit('/').next().filter(|name| !name.is_empty())?;
    let marked = name.replace("--", DASH);
    let volume = match marked.split('-').collect::<Vec<_>>().as_slice() {
        [_, volume] => volume.replace(DASH, "-"),
        _ => name.to_owned(),
    };
    Some(volume).filter(|volume| !volume.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_known_by_the_name_of_its_device() {
        for (device, volume) in [
            ("VG_XenStorage--1--2-VHD--3--4", Some("VHD-3-4")),
            ("./vg-LV--1", Some("LV-1")),
            ("/dev/mapper/vg-lv", Some("lv")),
            ("/dev/vg/lv", Some("lv")),
            ("/dev/vg/VHD-1-2-3", Some("VHD-1-2-3")),
            ("vg-", None),
            ("", None),
        ] {
            assert_eq!(volume_of(device).as_deref(), volume, "{device}");
        }
    }
}
