//! The experiments that need a hypervisor: a real Xen host in the emulator, which `cargo xtask bench` boots.

use super::{Experiment, How};

/// One processor executes an instruction per nanosecond there, without a model of caches.
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
        name: "xen-persistent",
        shows: "Persistent grants four ways, front and back, for 1 to 15 guests of a Xen host, with pages that are really \
                granted, mapped and unmapped.",
        source: "Persistent grants (Xen Project, 2012), 4 KiB reads of a RAM disk a guest: 340,668 IOPS without and 1,245,575 \
                 with them at 15 guests; they pay from 6 to 7 guests on.",
        differs: "One emulated processor, an instruction a nanosecond, works for all guests in turn. To flush address \
                  translations, which all processors of the source's host waited for at each unmapping, costs nothing here, \
                  and nobody waits for a lock of the grant table.",
        how: How::OnXen { part: "persistent" },
    },
    Experiment {
        name: "xen-aggregate",
        shows: "What 1 to 10 guests of a Xen host read together by the size of their requests, with grant copy, and with pages \
                that are mapped, copied and unmapped as tapdisk2 did.",
        source: "tapdisk3 (XenServer, 2014), 10 guests x 9 SSDs: tapdisk2 at most about 4 GB/s; tapdisk3 about 8 GB/s writing and \
                 10 GB/s reading, up to +100 % and +150 %.",
        differs: "One emulated processor, an instruction a nanosecond, works for guests and control domain in turn: half of the \
                  instructions are the guests' own. Flushes of address translations cost nothing here, and are what mapping \
                  costs on a host of many processors.",
        how: How::OnXen { part: "aggregate" },
    },
    Experiment {
        name: "network",
        shows: "The way of one packet between two guests of a host, hop by hop, until its slot is free again; and the rate by \
                streams. By the kernel's netback and bridge, and by `ferrite net serve`.",
        source: "Keeping up with the hardware (XenServer, 2015): 15 Gb/s by one stream within a host, 33 Gb/s together on two \
                 sockets of 12 cores; a time line of each hop shows how late the completion comes.",
        differs: "One emulated processor does the work of sender, control domain and receiver in turn, an instruction a \
                  nanosecond; the talk's host had 24 at once. The few hundred instructions of a probe \
                  are in each hop.",
        how: How::OnXen { part: "network" },
    },
];
