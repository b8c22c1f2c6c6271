//! The interfaces that Xen offers to this domain.

use ferrite_io::pool::LENT_PAGES;
use ferrite_xen::real::{self, APART, Probe};
use ferrite_xen::store::Store;

use super::{Check, State};

const HYPERVISOR: &str = "hypervisor";
const GRANTS: &str = "grant device";
const COPY: &str = "grant copy";
const EVENTS: &str = "event channels";
const STORE: &str = "xenstore";

/// The interfaces that are needed to serve a guest.
pub(super) const REQUIRED: [&str; 5] = [HYPERVISOR, GRANTS, COPY, EVENTS, STORE];

pub(super) fn checks() -> Vec<Check> {
    let mut checks = of_probe(&real::probe());
    checks.push(store());
    checks
}

fn check(name: &'static str, state: State, found: String, means: impl Into<String>) -> Check {
    Check { area: "xen", name, state, found, means: means.into() }
}

fn of_probe(probe: &Probe) -> Vec<Check> {
    let mut checks = vec![
        hypervisor(probe),
        domain(probe),
        device(GRANTS, &probe.gntdev, "there", "the way to guests' memory"),
        device(COPY, &probe.grant_copy, "available", "moves all data between guest and buffers"),
        own_grants(probe),
        processors(probe, ferrite_host::processors::count()),
        device(EVENTS, &probe.evtchn, "there", "one descriptor a queue wakes its thread"),
    ];
    if probe.evtchn.is_ok() {
        checks.push(restriction(&probe.evtchn_restrict));
    }
    checks
}

/// The most pages that an active disk takes.
const OWN_PAGES: u64 = LENT_PAGES as u64;

fn own_grants(probe: &Probe) -> Check {
    let name = "own grants";
    match (&probe.own_grants, probe.own_grants_limit) {
        (Ok(()), Some(limit)) => check(
            name,
            State::Ok,
            format!("{limit} pages for all disks"),
            format!(
                "copies cost less; enough for {} disks with large requests. For more: options \
                 xen-gntalloc limit=N in /etc/modprobe.d",
                limit / OWN_PAGES
            ),
        ),
        (Ok(()), None) => check(
            name,
            State::Ok,
            "available".into(),
            "copies cost less for the first disks at work",
        ),
        (Err(why), _) => {
            check(name, State::Warn, why.clone(), "data is copied at a higher cost, and as safely")
        }
    }
}

/// The host's processors, besides `ours`.
fn processors(probe: &Probe, ours: usize) -> Check {
    let name = "processors";
    let [before, now] = match &probe.processors {
        Ok(times) => times,
        Err(why) => {
            let means = match ours {
                1 => "no disk polls (--poll-us auto), as this domain has one processor",
                _ => "disks poll (--poll-us auto) by what they see of this domain's processors",
            };
            return check(
                name,
                State::Warn,
                format!("Xen does not report the host's processors: {why}"),
                means,
            );
        }
    };
    let idle = f64::from(now.idle_milli(before, APART.as_nanos() as u64)) / 1000.0;
    let found = format!("{} in the host, {idle:.1} of them idle; {ours} in this domain", now.cpus);
    let means = match now.cpus {
        1 => "no disk polls (--poll-us auto), as the host has one processor",
        _ => "disks poll (--poll-us auto) while some of the host's are idle",
    };
    check(name, State::Ok, found, means)
}

fn restriction(result: &Result<(), String>) -> Check {
    match result {
        Ok(()) => check(
            "restriction",
            State::Ok,
            "event channels can be bound to one guest".into(),
            "a server can reach the event channels of no other guest",
        ),
        Err(why) => check(
            "restriction",
            State::Warn,
            why.clone(),
            "a server could reach other guests' event channels; use a newer kernel",
        ),
    }
}

fn hypervisor(probe: &Probe) -> Check {
    match probe.hypervisor.as_deref() {
        Some("xen") => {
            let version = probe.version.as_deref().unwrap_or("of unknown version");
            check(HYPERVISOR, State::Ok, format!("Xen {version}"), "")
        }
        other => check(
            HYPERVISOR,
            State::No,
            match other {
                Some(other) => format!("{other:?}, not Xen"),
                None => "this is not a Xen domain".into(),
            },
            "serving guests takes a Xen control or driver domain",
        ),
    }
}

fn domain(probe: &Probe) -> Check {
    let kind = probe.guest_type.as_deref().unwrap_or("unknown type");
    match (&probe.capabilities, probe.is_control_domain()) {
        (_, true) => check("domain", State::Ok, format!("control domain, {kind}"), ""),
        (Ok(_), false) => check(
            "domain",
            State::Ok,
            format!("not a control domain, {kind}"),
            "serves the guests whose devices name it as their backend",
        ),
        (Err(why), false) => check("domain", State::Warn, why.clone(), "what it may do is unknown"),
    }
}

fn device(name: &'static str, result: &Result<(), String>, found: &str, used_for: &str) -> Check {
    match result {
        Ok(()) => check(name, State::Ok, found.into(), used_for),
        Err(why) => check(name, State::No, why.clone(), ""),
    }
}

/// Asks xenstore for this domain's number: a cheap request that needs all of the connection.
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
        Err(e) => check(STORE, State::No, e.to_string(), ""),
    }
}

#[cfg(test)]
mod tests {
    use ferrite_xen::hypervisor::HostTimes;

    use super::*;

    /// The findings of domain 0 where everything works.
    fn good() -> Probe {
        Probe {
            hypervisor: Some("xen".into()),
            version: Some("4.20.1".into()),
            guest_type: Some("PV".into()),
            features: Some(0),
            capabilities: Ok("control_d".into()),
            gntdev: Ok(()),
            grant_copy: Ok(()),
            gntdev_limit: None,
            own_grants: Ok(()),
            own_grants_limit: Some(1024),
            processors: Ok([0, 310].map(|ms| HostTimes { cpus: 4, idle_ns: ms * 1_000_000 })),
            evtchn: Ok(()),
            evtchn_restrict: Ok(()),
            xenbus: Ok(()),
            xenstored: Ok(()),
        }
    }

    fn state_of(probe: &Probe, name: &str) -> State {
        of_probe(probe).into_iter().find(|c| c.name == name).unwrap().state
    }

    #[test]
    fn a_complete_control_domain_is_fine() {
        let checks = of_probe(&good());
        assert!(checks.iter().all(|c| c.state == State::Ok), "{checks:?}");
        assert_eq!(checks[0].found, "Xen 4.20.1");
    }

    #[test]
    fn the_limit_of_own_grants_is_told_in_disks() {
        for (limit, disks) in [(1024, "2 disks"), (511, "0 disks")] {
            let probe = Probe { own_grants_limit: Some(limit), ..good() };
            let check = of_probe(&probe).into_iter().find(|c| c.name == "own grants").unwrap();
            assert!(check.means.contains(disks), "{check:?}");
        }
        let probe = Probe { own_grants_limit: None, ..good() };
        assert_eq!(state_of(&probe, "own grants"), State::Ok);
    }

    #[test]
    fn the_hosts_processors_are_told_beside_our_own() {
        let check = processors(&good(), 1);
        assert_eq!(check.found, "4 in the host, 3.1 of them idle; 1 in this domain");
        assert!(check.means.contains("while some"));
        let probe = Probe { processors: Err("not asked".into()), ..good() };
        let [one, two] = [1, 2].map(|ours| processors(&probe, ours));
        assert_eq!((one.state, two.state), (State::Warn, State::Warn));
        assert!(one.means.contains("no disk polls") && two.means.contains("by what they see"));
    }

    #[test]
    fn only_xen_is_xen() {
        for hypervisor in [None, Some("kvm".to_owned())] {
            assert_eq!(state_of(&Probe { hypervisor, ..good() }, HYPERVISOR), State::No);
        }
    }

    #[test]
    fn what_is_missing_is_said_with_its_reason() {
        let probe = Probe { grant_copy: Err("too old".into()), ..good() };
        let checks = of_probe(&probe);
        let check = checks.iter().find(|c| c.name == COPY).unwrap();
        assert_eq!((check.state, check.found.as_str()), (State::No, "too old"));
        assert_eq!(state_of(&probe, GRANTS), State::Ok);
    }

    #[test]
    fn what_is_not_required_is_a_warning() {
        let probe = Probe { evtchn_restrict: Err("old".into()), ..good() };
        assert_eq!(state_of(&probe, "restriction"), State::Warn);
        let probe = Probe { own_grants: Err("no module".into()), ..good() };
        assert_eq!(state_of(&probe, "own grants"), State::Warn);
        let probe = Probe { capabilities: Err("no xenfs".into()), ..good() };
        assert_eq!(state_of(&probe, "domain"), State::Warn);
    }
}
