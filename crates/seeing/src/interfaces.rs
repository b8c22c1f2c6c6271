//! The counters of guests' network interfaces: a file for each switch, `NAME.json`, which `ferrite net serve` writes.
//!
//! A file may have any content: what is no switch is a problem, and the rest is shown.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

/// The most files that are looked at, and the largest one: far more than a host has.
const FILES_MAX: usize = 1000;
const BYTES_MAX: u64 = 1 << 20;

/// The state of a switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switch {
    /// Its name.
    pub switch: String,
    /// The TAP device that is the way out.
    #[serde(default)]
    pub uplink: Option<String>,
    /// The connected interfaces.
    pub interfaces: Vec<Interface>,
}

/// An interface. Sent and received are the guest's view.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// The guest's domain number.
    pub domid: u16,
    /// The interface's number.
    pub handle: u32,
    /// Its counts by their names.
    pub counts: BTreeMap<String, u64>,
}

impl Interface {
    /// A count; 0 if the process does not count that.
    pub fn count(&self, name: &str) -> u64 {
        self.counts.get(name).copied().unwrap_or(0)
    }

    /// The interface's name, `vifDOMID.HANDLE`.
    pub fn name(&self) -> String {
        format!("vif{}.{}", self.domid, self.handle)
    }
}

/// All switches of a folder, by name, and what is no switch, in words. A folder that is not there has none.
///
/// # Errors
/// The folder cannot be read.
pub fn read(folder: &Path) -> io::Result<(Vec<Switch>, Vec<String>)> {
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
        entries => entries?,
    };
    let (mut switches, mut problems) = (Vec::new(), Vec::new());
    for entry in entries.take(FILES_MAX) {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        match read_one(&path) {
            Ok(switch) => switches.push(switch),
            // It has ended meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => problems.push(format!("{}: {e}", path.display())),
        }
    }
    switches.sort_by(|a, b| a.switch.cmp(&b.switch));
    Ok((switches, problems))
}

fn read_one(path: &Path) -> io::Result<Switch> {
    // Not a link, and not a pipe that nobody writes to.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let mut text = String::new();
    file.take(BYTES_MAX).read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_no_switch_are_problems_and_the_rest_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let whole =
            r#"{"switch":"lan","interfaces":[{"domid":3,"handle":1,"counts":{"starved":9}}]}"#;
        file("lan.json", whole);
        file("lan.new", "{");
        file("cut.json", &whole[..20]);
        std::os::unix::fs::symlink("lan.json", folder.path().join("link.json")).unwrap();
        let (switches, problems) = read(folder.path()).unwrap();
        assert_eq!(switches.len(), 1);
        let interface = &switches[0].interfaces[0];
        assert_eq!((interface.name().as_str(), interface.count("starved")), ("vif3.1", 9));
        assert_eq!(interface.count("other"), 0);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert_eq!(read(&folder.path().join("none")).unwrap(), (vec![], vec![]));
    }
}
