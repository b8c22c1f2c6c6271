//! The names of guests, as the toolstack has written them in xenstore: `/local/domain/ID/name`, and the UUID in
//! `/local/domain/ID/vm`.
//!
//! A name is shown only if it can be typed back: one guest has it, and neither a shell nor a terminal takes a part of
//! it for something else. All other guests are shown by their numbers. So no name can harm the reader's terminal.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use ferrite_xen::hypervisor::DomId;
use ferrite_xen::store::{Store, StoreError};

use crate::exit::{Code, Failure};
use crate::vdev::{Vbd, device_name, device_number};

/// The parent of all domains' directories.
const DOMAINS: &str = "/local/domain";
/// How long xenstore may take for one answer. Names are only shown, so a command does not wait long for them.
const ANSWER: Duration = Duration::from_secs(2);
/// The most domains that are asked for: far more than a host has.
const MOST: usize = 4096;
/// The longest name that is shown. A longer one would move all columns behind it.
const LONGEST: usize = 32;
/// The longest name that may be asked for. Names in xenstore have at most 4096 bytes.
const LONGEST_ASKED: usize = 256;
/// How long the names that were read count for a command that shows them repeatedly.
const FRESH: Duration = Duration::from_secs(5);
/// The pause after a failure. A xenstored that does not answer would delay each report.
const AFTER_FAILURE: Duration = Duration::from_secs(60);
/// The most numbers of guests in an error.
const MOST_SHOWN: usize = 8;

/// A guest, as users name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Guest {
    /// By its domain number.
    Number(DomId),
    /// By its name or UUID.
    Name(String),
}

impl FromStr for Guest {
    type Err = String;

    fn from_str(text: &str) -> Result<Guest, String> {
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            // The rules for numbers are those of a disk's name.
            return format!("{text}/0").parse().map(|vbd: Vbd| Guest::Number(vbd.domain));
        }
        let is_name = !text.is_empty()
            && text.len() <= LONGEST_ASKED
            && !text.starts_with(['.', '-'])
            && !text.contains(|c: char| c == '/' || c.is_control());
        match is_name {
            true => Ok(Guest::Name(text.to_owned())),
            false => Err(format!("{text:?} is no guest: name it by its name, UUID or number")),
        }
    }
}

impl fmt::Display for Guest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Guest::Number(number) => number.fmt(f),
            Guest::Name(name) => f.write_str(name),
        }
    }
}

impl Guest {
    /// The domain number. A number is not looked up, so it works without xenstore.
    ///
    /// # Errors
    /// No guest or several guests have this name; xenstore cannot be read.
    pub(crate) fn domain(&self) -> Result<DomId, Failure> {
        let name = match self {
            Guest::Number(number) => return Ok(*number),
            Guest::Name(name) => name,
        };
        let what = format!("cannot find guest {name}");
        let domains = Store::open()
            .and_then(|store| read(&mut store.with_timeout(ANSWER)))
            .map_err(|e| Failure::new(&what, e, "name the guest by its number: 3/xvda"))?;
        let uuid = name.to_ascii_lowercase();
        let is_meant = |domain: &Domain| {
            domain.name.as_deref() == Some(name) || domain.uuid.as_deref() == Some(&uuid)
        };
        let meant: Vec<DomId> =
            domains.iter().filter(|(_, d)| is_meant(d)).map(|(number, _)| *number).collect();
        match meant[..] {
            [number] => Ok(number),
            [] => {
                let help = "xl list shows the guests, and ferrite disk list their disks";
                let why = "no guest has this name or UUID";
                Err(Failure::new(what, why, help).with_code(Code::NOT_FOUND))
            }
            _ => {
                let numbers: Vec<String> =
                    meant.iter().take(MOST_SHOWN).map(DomId::to_string).collect();
                let why = format!("{} guests have it: {}", meant.len(), numbers.join(", "));
                Err(Failure::new(what, why, "name the guest by its number"))
            }
        }
    }
}

/// A disk of a guest, as users name it: `web1/xvda`, or any form of a [`Vbd`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuestDisk {
    guest: Guest,
    device: u32,
}

impl FromStr for GuestDisk {
    type Err = String;

    fn from_str(text: &str) -> Result<GuestDisk, String> {
        let why = match text.parse::<Vbd>() {
            Ok(Vbd { domain, device }) => {
                return Ok(GuestDisk { guest: Guest::Number(domain), device });
            }
            Err(why) => why,
        };
        let Some((guest, device)) = text.split_once('/') else {
            return Err("write GUEST/DEV, for example web1/xvda or 3/xvda".to_owned());
        };
        match guest.parse()? {
            // The number itself is wrong, or the device.
            Guest::Number(_) => Err(why),
            guest => Ok(GuestDisk { guest, device: device_number(device)? }),
        }
    }
}

impl GuestDisk {
    /// The disk by its numbers.
    ///
    /// # Errors
    /// As [`Guest::domain`].
    pub(crate) fn find(&self) -> Result<Vbd, Failure> {
        Ok(Vbd { domain: self.guest.domain()?, device: self.device })
    }
}

/// The facts of a domain in xenstore.
#[derive(Clone, Debug, Default)]
struct Domain {
    name: Option<String>,
    uuid: Option<String>,
}

/// Reads all domains. One that ends meanwhile has no name.
fn read(store: &mut Store) -> Result<BTreeMap<DomId, Domain>, StoreError> {
    let mut domains = BTreeMap::new();
    for entry in store.list(DOMAINS)?.into_iter().take(MOST) {
        let Ok(Guest::Number(number)) = entry.parse() else { continue };
        let mut key = |key: &str| {
            let value = store.read(&format!("{DOMAINS}/{number}/{key}"))?;
            Ok::<_, StoreError>(value.and_then(|value| String::from_utf8(value).ok()))
        };
        let name = key("name")?;
        let uuid = key("vm")?.and_then(|vm| Some(vm.strip_prefix("/vm/")?.to_ascii_lowercase()));
        domains.insert(number, Domain { name, uuid });
    }
    Ok(domains)
}

/// Whether a name stands for itself everywhere: on a terminal, in a shell, and as an argument.
fn is_plain(name: &str) -> bool {
    let is_number = name.bytes().all(|byte| byte.is_ascii_digit());
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.+@".contains(&byte);
    name.len() <= LONGEST
        && !is_number
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.bytes().all(is_safe)
}

/// The names of all guests, for commands that show disks. Without xenstore all guests have numbers only.
#[derive(Debug, Default)]
pub(crate) struct Names {
    of: BTreeMap<DomId, String>,
    next: Option<Instant>,
}

impl Names {
    /// The names at this time.
    pub(crate) fn read() -> Names {
        let mut names = Names::default();
        names.refresh();
        names
    }

    /// Reads the names again, if those at hand are old.
    pub(crate) fn refresh(&mut self) {
        let now = Instant::now();
        if self.next.is_some_and(|next| now < next) {
            return;
        }
        let domains = Store::open().and_then(|store| read(&mut store.with_timeout(ANSWER)));
        self.next = Some(now + if domains.is_ok() { FRESH } else { AFTER_FAILURE });
        self.of = typed_back(domains.unwrap_or_else(|e| {
            tracing::debug!("guests have no names here: {e}");
            BTreeMap::new()
        }));
    }

    /// The disk's name, which commands take as well: `web1/xvda`, or `3/xvda`.
    pub(crate) fn disk(&self, disk: Vbd) -> String {
        if disk.domain == DomId::NONE {
            return disk.to_string();
        }
        let device = device_name(disk.device);
        match self.of.get(&disk.domain) {
            Some(name) => format!("{name}/{device}"),
            None => format!("{}/{device}", disk.domain),
        }
    }
}

/// The names that one guest alone has and that can be typed.
fn typed_back(domains: BTreeMap<DomId, Domain>) -> BTreeMap<DomId, String> {
    let names = domains.into_iter().filter_map(|(number, domain)| Some((number, domain.name?)));
    let plain: Vec<(DomId, String)> = names.filter(|(_, name)| is_plain(name)).collect();
    let mut times = BTreeMap::new();
    plain.iter().for_each(|(_, name)| *times.entry(name.clone()).or_insert(0u32) += 1);
    plain.into_iter().filter(|(_, name)| times.get(name) == Some(&1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(names: &[(u16, &str)]) -> Names {
        let domain = |name: &str| Domain { name: Some(name.to_owned()), uuid: None };
        let domains = names.iter().map(|(number, name)| (DomId(*number), domain(name))).collect();
        Names { of: typed_back(domains), next: None }
    }

    #[test]
    fn a_name_is_shown_if_it_can_be_typed_back_and_is_one_guests() {
        let long = "a".repeat(LONGEST + 1);
        for (name, shown) in [
            ("web1", "web1/xvda"),
            ("Db-2.example+x@y", "Db-2.example+x@y/xvda"),
            ("", "7/xvda"),
            ("12", "7/xvda"),
            ("-rf", "7/xvda"),
            ("a b", "7/xvda"),
            ("a/b", "7/xvda"),
            ("$HOME", "7/xvda"),
            ("x\u{1b}[2J", "7/xvda"),
            ("Größe", "7/xvda"),
            (long.as_str(), "7/xvda"),
            ("twin", "7/xvda"),
        ] {
            let names = named(&[(7, name), (8, "twin")]);
            let disk = names.disk(Vbd { domain: DomId(7), device: 51712 });
            assert_eq!(disk, shown);
            assert!(disk.parse::<GuestDisk>().is_ok(), "{disk}");
        }
    }

    #[test]
    fn a_disk_is_named_by_its_guests_name_and_all_other_texts_are_refused() {
        let number = |domain, device| GuestDisk { guest: Guest::Number(DomId(domain)), device };
        for text in ["3/xvdb", "vbd-3-51728", "backend/vbd3/3/51728"] {
            assert_eq!(text.parse(), Ok(number(3, 51728)), "{text}");
        }
        for name in ["web1", "0a1f3c2e-0000-4000-8000-000000000001", "a b", "Größe", "vbd-3-1"] {
            let disk = GuestDisk { guest: Guest::Name(name.to_owned()), device: 51728 };
            assert_eq!(format!("{name}/xvdb").parse(), Ok(disk));
        }
        for text in [
            "",
            "web1",
            "/xvda",
            "./3/xvda",
            "../xvda",
            "a/b/xvda",
            "-x/xvda",
            "web1/x",
            "web1/",
            "40000/xvda",
            "3/vda",
            "a\u{1b}/xvda",
            "vbd-3",
        ] {
            assert!(text.parse::<GuestDisk>().is_err(), "{text:?}");
        }
        assert!(format!("{}/xvda", "x".repeat(5000)).parse::<GuestDisk>().is_err());
    }
}
