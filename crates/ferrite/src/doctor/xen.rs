//! What Xen offers to this domain.

use std::fs::OpenOptions;

use ferrite_xen::store::Store;

use super::{Check, State, read};

const HYPERVISOR: &str = "hypervisor";
const GRANTS: &str = "grant copy";
const EVENTS: &str = "event channels";
const STORE: &str = "xenstore";

/// What serving a guest takes.
pub(super) const REQUIRED: [&str; 4] = [HYPERVISOR, GRANTS, EVENTS, STORE];

pub(super) fn checks() -> Vec<Check> {
    let grants = "/dev/xen/gntdev";
    let events = "/dev/xen/evtchn";
    vec![
        hypervisor(read("/sys/hypervisor/type").as_deref()),
        device(GRANTS, grants, "moves all data between guest and buffers"),
        device(EVENTS, events, "one channel a queue wakes its thread"),
        store(),
    ]
}

fn check(name: &'static str, state: State, found: String, means: impl Into<String>) -> Check {
    Check { area: "xen", name, state, found, means: means.into() }
}

fn hypervisor(kind: Option<&str>) -> Check {
    match kind {
        Some("xen") => {
            let part = |name| read(&format!("/sys/hypervisor/version/{name}")).unwrap_or_default();
            let version = format!("Xen {}.{}{}", part("major"), part("minor"), part("extra"));
            check(HYPERVISOR, State::Ok, version, "")
        }
        Some(other) => check(
            HYPERVISOR,
            State::No,
            format!("{other:?}, not Xen"),
            "serving guests takes a Xen control or driver domain",
        ),
        None => check(
            HYPERVISOR,
            State::No,
            "this is not a Xen domain".into(),
            "serving guests takes a Xen control or driver domain",
        ),
    }
}

/// Opens the device as a server would, and closes it again.
fn device(name: &'static str, path: &str, used_for: &str) -> Check {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => check(name, State::Ok, format!("{path} can be opened"), used_for),
        Err(e) => {
            let means = match e.kind() {
                std::io::ErrorKind::NotFound => "load the modules xen-gntdev and xen-evtchn",
                _ => "run as root",
            };
            check(name, State::No, format!("{path}: {e}"), means)
        }
    }
}

/// Asks xenstore which domain this is: a question that costs nothing and needs everything.
fn store() -> Check {
    let asked = Store::open().and_then(|mut store| store.read_string("domid"));
    match asked {
        Ok(Some(domain)) => {
            check(STORE, State::Ok, "answers".into(), format!("this is domain {domain}"))
        }
        Ok(None) => check(
            STORE,
            State::Warn,
            "answers, but does not know this domain's number".into(),
            "the toolstack has not set up this domain (xen-init-dom0)",
        ),
        Err(e) => {
            check(STORE, State::No, e.to_string(), "start xenstored, and run as a user who may ask")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_xen_is_xen() {
        assert_eq!(hypervisor(Some("xen")).state, State::Ok);
        assert_eq!(hypervisor(Some("kvm")).state, State::No);
        assert_eq!(hypervisor(None).state, State::No);
    }

    #[test]
    fn a_missing_device_is_a_finding() {
        let check = device(GRANTS, "/nonexistent/gntdev", "all");
        assert_eq!(check.state, State::No);
        assert!(check.found.contains("/nonexistent/gntdev") && check.means.contains("xen-gntdev"));
    }

    #[test]
    fn a_device_that_can_be_opened_is_fine() {
        assert_eq!(device(EVENTS, "/dev/null", "events").state, State::Ok);
    }
}
