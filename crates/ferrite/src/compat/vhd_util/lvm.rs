//! The logical volumes of a group, as LVM's own tools tell them: also those that are not active, which have no device.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::io::Errno;

use crate::compat::Refusal;

/// A logical volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Volume {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// Its first segment; `None`: it is not linear, so its bytes are not in order on one device.
    pub(super) first: Option<Segment>,
}

/// A part of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) device: PathBuf,
    pub(super) start: u64,
    pub(super) bytes: u64,
}

/// A group: the size of its extents, and the place of the first one on each of its devices.
#[derive(Debug, Default)]
struct Group {
    extent_bytes: u64,
    devices: Vec<(String, u64)>,
}

/// The volumes of a group.
pub(super) fn volumes(group: &OsStr) -> Result<Vec<Volume>, Refusal> {
    let columns = "vg_name,vg_extent_size,lv_count,pv_count,pv_name,pe_start";
    let known = parse_group(&tell("vgs", group, columns)?).map_err(|line| odd("vgs", line))?;
    let columns = "lv_name,lv_size,segtype,seg_count,seg_start,seg_size,devices";
    let rows = tell("lvs", group, columns)?;
    parse_volumes(&rows, &known).map_err(|line| odd("lvs", line))
}

fn odd(tool: &str, line: String) -> Refusal {
    let why = format!("{tool} told what is not understood: {line:?}");
    Refusal { errno: Errno::INVAL, why }
}

/// Asks one of LVM's tools for a table.
fn tell(tool: &str, group: &OsStr, columns: &str) -> Result<String, Refusal> {
    let refused = |why: String| {
        let why = format!("{tool} does not tell of the group {}: {why}", group.display());
        Refusal { errno: Errno::INVAL, why }
    };
    let told = Command::new(tool)
        .args(["--noheadings", "--nosuffix", "--units=b"])
        .arg(format!("--options={columns}"))
        .arg("--")
        .arg(group)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| refused(e.to_string()))?;
    if !told.status.success() {
        return Err(refused(String::from_utf8_lossy(&told.stderr).trim().to_owned()));
    }
    String::from_utf8(told.stdout).map_err(|e| refused(e.to_string()))
}

/// The columns of each line that is not empty.
fn lines(table: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    let lines = table.lines().filter(|line| !line.trim().is_empty());
    lines.map(|line| (line, line.split_whitespace().collect()))
}

fn parse_group(table: &str) -> Result<Group, String> {
    let mut group = Group::default();
    for (line, columns) in lines(table) {
        let [_, extent, _, _, device, start] = columns.as_slice() else {
            return Err(line.to_owned());
        };
        let (Ok(extent), Ok(start)) = (extent.parse(), start.parse()) else {
            return Err(line.to_owned());
        };
        group.extent_bytes = extent;
        group.devices.push(((*device).to_owned(), start));
    }
    match group.devices.is_empty() {
        true => Err(table.to_owned()),
        false => Ok(group),
    }
}

/// A line is a segment. The first one of each volume counts.
fn parse_volumes(table: &str, group: &Group) -> Result<Vec<Volume>, String> {
    let mut volumes = Vec::new();
    for (line, columns) in lines(table) {
        let [name, bytes, kind, _, seg_start, seg_bytes, devices @ ..] = columns.as_slice() else {
            return Err(line.to_owned());
        };
        let (Ok(bytes), Ok(start), Ok(seg_bytes)) =
            (bytes.parse(), seg_start.parse::<u64>(), seg_bytes.parse())
        else {
            return Err(line.to_owned());
        };
        if start != 0 {
            continue;
        }
        let first = match (*kind, devices) {
            ("linear", [place]) => {
                let (device, start) = place_of(place, group).ok_or_else(|| line.to_owned())?;
                Some(Segment { device: device.into(), start, bytes: seg_bytes })
            }
            _ => None,
        };
        volumes.push(Volume { name: (*name).to_owned(), bytes, first });
    }
    Ok(volumes)
}

/// The device and byte of `DEVICE(EXTENT)`.
fn place_of<'a>(place: &'a str, group: &Group) -> Option<(&'a str, u64)> {
    let (device, extent) = place.strip_suffix(')')?.rsplit_once('(')?;
    let (_, start) = group.devices.iter().find(|(name, _)| name == device)?;
    let extent: u64 = extent.parse().ok()?;
    Some((device, extent.checked_mul(group.extent_bytes)?.checked_add(*start)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_segment_of_a_volume_is_found() {
        let vgs = "  vg 4194304 3 2 /dev/sda 10485760\n  vg 4194304 3 2 /dev/sdb 1048576\n";
        let group = parse_group(vgs).unwrap();
        let lvs = "  MGT 4194304 linear 1 0 4194304 /dev/sda(0)\n\
                   \n  VHD-1 12582912 linear 2 8388608 4194304 /dev/sda(7)\n\
                   \n  VHD-1 12582912 linear 2 0 8388608 /dev/sdb(3)\n\
                   \n  S 8388608 striped 1 0 8388608 /dev/sda(9),/dev/sdb(9)\n";
        let volumes = parse_volumes(lvs, &group).unwrap();
        let first =
            |device: &str, start, bytes| Some(Segment { device: device.into(), start, bytes });
        assert_eq!(volumes.len(), 3);
        assert_eq!(volumes[0].first, first("/dev/sda", 10_485_760, 4_194_304));
        assert_eq!(volumes[1].first, first("/dev/sdb", 1_048_576 + 3 * 4_194_304, 8_388_608));
        assert_eq!((volumes[1].name.as_str(), volumes[1].bytes), ("VHD-1", 12_582_912));
        assert_eq!(volumes[2].first, None);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let group = parse_group("vg 4194304 1 1 /dev/sda 1048576").unwrap();
        for table in ["", "vg 4m 1 1 /dev/sda 0", "vg 4194304 1 1"] {
            assert!(parse_group(table).is_err(), "{table}");
        }
        for table in ["V 1 linear 1 0 1 /dev/sdz(0)", "V 1 linear 1 0 1 /dev/sda", "V one"] {
            assert!(parse_volumes(table, &group).is_err(), "{table}");
        }
        let far = format!("V 1 linear 1 0 1 /dev/sda({})", u64::MAX);
        assert!(parse_volumes(&far, &group).is_err());
    }
}
