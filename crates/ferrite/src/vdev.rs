//! A guest's virtual block device: `DOMID/DEVID`, or other forms of its name.
//!
//! A device number gives the guest's name of the disk (blkif.md 3.1):
//! `xvd`: `202 << 8 | disk << 4 | partition`, from the 17th disk or 16th partition on
//! `1 << 28 | disk << 8 | partition`; `hd`: majors 3 and 22, 6 bits of partition; `sd`: major 8.

use std::fmt;
use std::str::FromStr;

use ferrite_xen::hypervisor::DomId;

/// Domain numbers from here on are the hypervisor's own (`DOMID_FIRST_RESERVED`).
const FIRST_RESERVED_DOMAIN: u16 = 0x7FF0;

/// The directory of a disk; the home of the backend's domain may precede it.
const DIRECTORY: &str = "backend/vbd3/";

const EXTENDED: u32 = 1 << 28;
const MAX_EXTENDED_DISK: u32 = (1 << 20) - 1;

/// One virtual block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Vbd {
    /// The guest.
    pub(crate) domain: DomId,
    /// `virtual-device`, the last part of the device's xenstore paths.
    pub(crate) device: u32,
}

impl fmt::Display for Vbd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.domain {
            DomId::NONE => write!(f, "tap/{}", self.device),
            domain => write!(f, "{domain}/{}", self.device),
        }
    }
}

impl FromStr for Vbd {
    type Err = String;

    /// `tap/7` for the tap of minor 7; `3/xvda`, `3/51712`, `vbd-3-51712` as its files are called, or its directory in xenstore.
    fn from_str(text: &str) -> Result<Vbd, String> {
        if let Some(minor) = text.strip_prefix("tap/").or_else(|| text.strip_prefix("tap-")) {
            let device = number(minor).ok_or_else(|| format!("{minor:?} is not a tap's minor"))?;
            return Ok(Vbd { domain: DomId::NONE, device });
        }
        let of_file = text.strip_prefix("vbd-").and_then(|ids| ids.split_once('-'));
        let of_directory = || text.split_once(DIRECTORY)?.1.split_once('/');
        let (domain, device) = of_file
            .or_else(of_directory)
            .or_else(|| text.split_once('/'))
            .ok_or("write DOMID/DEVID, for example 3/xvda or 3/51712")?;
        let domain = number(domain)
            .and_then(|n| u16::try_from(n).ok())
            .filter(|n| *n < FIRST_RESERVED_DOMAIN)
            .ok_or_else(|| format!("{domain:?} is not a domain number (xl list shows them)"))?;
        Ok(Vbd { domain: DomId(domain), device: device_number(device)? })
    }
}

/// The number of a device that is given as a number, or as `xvda`, `hda`, `sda`.
///
/// # Errors
/// It is neither.
pub(crate) fn device_number(text: &str) -> Result<u32, String> {
    number(text).or_else(|| named(text)).ok_or_else(|| {
        format!("{text:?} is neither a device number nor a name such as xvda, hda or sda")
    })
}

/// The device's name, which [`device_number`] takes; the number, if it has none.
pub(crate) fn device_name(device: u32) -> String {
    let (bus, disk, partition) = match device >> 8 {
        202 => ("xvd", device >> 4 & 0xF, device & 0xF),
        3 => ("hd", device >> 6 & 3, device & 0x3F),
        22 => ("hd", 2 + (device >> 6 & 3), device & 0x3F),
        8 => ("sd", device >> 4 & 0xF, device & 0xF),
        _ => ("xvd", device >> 8 & MAX_EXTENDED_DISK, device & 0xFF),
    };
    let partition = if partition == 0 { String::new() } else { partition.to_string() };
    let name = format!("{bus}{}{partition}", letters(disk));
    match named(&name) == Some(device) {
        true => name,
        false => device.to_string(),
    }
}

/// 0 is `a`, 25 is `z`, 26 is `aa`.
fn letters(index: u32) -> String {
    let last = char::from(b'a' + (index % 26) as u8);
    let before = (index / 26).checked_sub(1).map(letters).unwrap_or_default();
    format!("{before}{last}")
}

/// Decimal digits only: no sign, no spaces.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok())?
}

/// The number of a device that is given by name, with or without a partition.
fn named(text: &str) -> Option<u32> {
    let split = text.find(|c: char| c.is_ascii_digit()).unwrap_or(text.len());
    let (name, partition) = text.split_at(split);
    let partition = match partition {
        "" => 0,
        digits if digits.starts_with('0') => return None,
        digits => number(digits)?,
    };
    let (bus, letters) =
        ["xvd", "hd", "sd"].iter().find_map(|bus| Some((*bus, name.strip_prefix(bus)?)))?;
    let disk = disk_index(letters)?;
    match bus {
        "xvd" if disk < 16 && partition < 16 => Some(202 << 8 | disk << 4 | partition),
        "xvd" if partition < 256 => Some(EXTENDED | disk << 8 | partition),
        "hd" if disk < 2 && partition < 64 => Some(3 << 8 | disk << 6 | partition),
        "hd" if disk < 4 && partition < 64 => Some(22 << 8 | (disk - 2) << 6 | partition),
        "sd" if disk < 16 && partition < 16 => Some(8 << 8 | disk << 4 | partition),
        _ => None,
    }
}

/// `a` is 0, `z` 25, `aa` 26.
fn disk_index(letters: &str) -> Option<u32> {
    let mut index = 0u32;
    for letter in letters.bytes() {
        if !letter.is_ascii_lowercase() || index > MAX_EXTENDED_DISK {
            return None;
        }
        index = index * 26 + u32::from(letter - b'a') + 1;
    }
    index.checked_sub(1).filter(|index| *index <= MAX_EXTENDED_DISK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_the_numbers_that_guests_expect() {
        for (name, device) in [
            ("xvda", 51712),
            ("xvda1", 51713),
            ("xvdb", 51728),
            ("xvdp15", 51967),
            ("xvda16", EXTENDED | 16),
            ("xvdq", EXTENDED | 16 << 8),
            ("xvdaa", EXTENDED | 26 << 8),
            ("hda", 768),
            ("hdb1", 833),
            ("hdc", 5632),
            ("hdd", 5696),
            ("sda", 2048),
            ("sdb2", 2066),
            ("51712", 51712),
        ] {
            let vbd: Vbd = format!("7/{name}").parse().unwrap();
            assert_eq!((vbd.domain, vbd.device), (DomId(7), device), "{name}");
            let is_number = name.starts_with(|c: char| c.is_ascii_digit());
            assert_eq!(device_name(device), if is_number { "xvda" } else { name });
        }
    }

    #[test]
    fn what_a_device_is_called_is_its_number_again() {
        let extended = |n| EXTENDED | n;
        let numbers = (0..1 << 16).chain((0..1 << 14).map(extended));
        let odd = [u32::MAX, EXTENDED | MAX_EXTENDED_DISK << 8 | 255, EXTENDED << 1, 202 << 16];
        for device in numbers.chain(odd) {
            assert_eq!(device_number(&device_name(device)), Ok(device));
        }
        assert_eq!(device_name(1), "1");
    }

    #[test]
    fn a_disk_is_meant_by_each_name_that_it_has() {
        for name in ["vbd-7-51712", "backend/vbd3/7/51712", "/local/domain/0/backend/vbd3/7/51712"]
        {
            assert_eq!(name.parse(), "7/xvda".parse::<Vbd>(), "{name}");
        }
    }

    #[test]
    fn what_names_no_device_is_refused() {
        for text in [
            "vbd-7",
            "vbd-7-",
            "vbd7-51712",
            "backend/vbd3/7",
            "backend/vbd/7/51712",
            "backend/vbd3/7/51712/state",
            "",
            "7",
            "7/",
            "/xvda",
            "7/xvd",
            "7/xvdA",
            "7/vda",
            "7/xvda256",
            "7/xvda01",
            "7/hde",
            "7/hda64",
            "7/sdq",
            "7/sda16",
            "-1/xvda",
            "+1/xvda",
            "32752/xvda",
            "65536/xvda",
            "7/4294967296",
            "7/0x10",
            "7/-1",
            "7/xvdzzzzz",
            "7/xvdzzzzzzzzzz",
            "7/xvda/",
            "dom/xvda",
        ] {
            assert!(text.parse::<Vbd>().is_err(), "{text}");
        }
    }

    #[test]
    fn it_is_shown_as_in_xenstore_paths() {
        assert_eq!("7/xvda".parse::<Vbd>().unwrap().to_string(), "7/51712");
    }
}
