//! The counters of guests' network interfaces: a file for each switch, `NAME.json`, which `ferrite net serve` writes.
//!
//! A file may have any content: a file that is no switch is a problem, and the rest is shown.

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

/// The counts of all interfaces a second, over the `seconds` since `before`. A count that has gone back began anew.
pub fn per_second(now: &[Switch], before: &[Switch], seconds: f64) -> Vec<Switch> {
    let old = |switch: &Switch, interface: &Interface, name: &str| {
        let same = before.iter().find(|old| old.switch == switch.switch)?;
        let same = same.interfaces.iter().find(|old| old.name() == interface.name())?;
        Some(same.count(name))
    };
    let mut rates = now.to_vec();
    for switch in &mut rates {
        let whole = switch.clone();
        for interface in &mut switch.interfaces {
            let was = interface.clone();
            for (name, count) in &mut interface.counts {
                let old = old(&whole, &was, name).filter(|old| *old <= *count).unwrap_or(0);
                *count = ((*count - old) as f64 / seconds).round() as u64;
            }
        }
    }
    rates
}

fn read_one(path: &Path) -> io::Result<Switch> {
    // Not a link, and no wait for a pipe without a writer.
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
    fn rates_are_of_what_came_since_and_of_all_after_a_new_begin() {
        let switch = |sent: u64, starved: u64| {
            let counts = [("sent_packets".to_owned(), sent), ("starved".to_owned(), starved)];
            let interfaces = vec![Interface { domid: 3, handle: 0, counts: counts.into() }];
            vec![Switch { switch: "lan".into(), uplink: None, interfaces }]
        };
        assert_eq!(per_second(&switch(500, 7), &switch(100, 9), 2.0), switch(200, 4));
        assert_eq!(per_second(&switch(500, 0), &[], 2.0), switch(250, 0));
    }

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
