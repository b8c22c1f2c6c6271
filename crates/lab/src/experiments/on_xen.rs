//! The experiments that need a hypervisor: a real Xen host in the emulator, which `cargo xtask bench` boots.

use super::{Experiment, How};

/// One processor executes an instruction a nanosecond there, and knows no caches.
pub(super) const EXPERIMENTS: &[Experiment] = &[Experiment {
    name: "xen",
    shows: "What the kernel's blkback, QEMU's qdisk and Ferrite make of one RAM disk for one guest, on one Xen host.",
    source: "tapdisk3 (XenServer, 2014) and SPDK as a blkif backend (XCP-ng, 2023) compare backends on hosts of their own; \
                 neither names figures of these peers on one host.",
    differs: "The emulator counts instructions of guest, hypervisor and control domain alike, one a nanosecond: caches and \
                  flushes of the address translation cost nothing, and no two processors run at once.",
    how: How::OnXen { part: "xen" },
}];
