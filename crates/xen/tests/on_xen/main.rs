//! The real hypervisor and the real xenstored, without a guest: domain 0 grants pages to itself
//! and binds channels to itself. Ignored elsewhere; in a control domain, as root, with xen-gntdev,
//! xen-evtchn and xen-gntalloc loaded and xenstored started, run the binary with `--ignored`.

mod links;
mod movers;
mod own_domain;
mod own_pages;
mod store;

use ferrite_xen::real::probe;

#[test]
#[ignore = "needs a Xen control domain"]
fn the_probe_finds_all_there_is() {
    let p = probe();
    assert_eq!(p.usable(), Ok(()), "{p:#?}");
    assert!(p.is_control_domain(), "{p:#?}");
    assert!(p.version.is_some() && p.features.is_some(), "{p:#?}");
    assert_eq!((&p.evtchn_restrict, &p.xenbus, &p.xenstored), (&Ok(()), &Ok(()), &Ok(())));
}
