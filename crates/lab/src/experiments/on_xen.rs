//! The experiments that need a hypervisor: a real Xen host in the emulator, which `cargo xtask bench` boots.

use super::{Experiment, How};

/// One processor executes an instruction a nanosecond there, and knows no caches.
pub(super) const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "xen",
        shows: "What the kernel's blkback, QEMU's qdisk and Ferrite make of one RAM disk for one guest, on one Xen host.",
        source: "tapdisk3 (XenServer, 2014) and SPDK as a blkif backend (XCP-ng, 2023) compare backends on hosts of their own; \
                 neither names figures of these peers on one host.",
        differs: "The emulator counts instructions of guest, hypervisor and control domain alike, one a nanosecond: caches and \
                  flushes of the address translation cost nothing, and no two processors run at once.",
        how: How::OnXen { part: "xen" },
    },
    Experiment {
        name: "network",
        shows: "The way of one packet between two guests of a host, hop by hop, until its slot is free again; and the rate by \
                streams. The backend is the kernel's.",
        source: "Keeping up with the hardware (XenServer, 2015): 15 Gb/s by one stream within a host, 33 Gb/s together on two \
                 sockets of 12 cores; a time line of each hop shows how late the completion comes.",
        differs: "One emulated processor does the work of sender, control domain and receiver in turn, an instruction a \
                  nanosecond; the talk's host had 24 at once. A probe costs some thousand instructions: the round trip without \
                  probes says how much of the time line is theirs.",
        how: How::OnXen { part: "network" },
    },
];
