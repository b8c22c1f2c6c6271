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
    Experiment {
        name: "stripes",
        shows: "A guest's disk on one and two servers, each behind a link of 28 MiB/s: stripes and mirrors of a pool by its own servers and \
                by LUNs of the kernel's iSCSI, beside a local disk of that rate; and mirrors beside DRBD's, without limits.",
        source: "Impacts on the I/O performance of the virtual disk in Xen (UBC, 2012): two servers in parallel by iSCSI beat the local disk. \
                 The published ratios are not its own, and are over one server: a trial for this project, by tgt and libiscsi without Xen, had behind links \
                 of 112 MiB/s 116.5 MB/s from one server, 222 and 220 written and read by two stripes, 111.5 and 224 by a mirror.",
        differs: "All hosts are one emulated processor, an instruction a nanosecond, which does the work of guest, disk and servers in turn. \
                  At 112 MiB/s it would be the limit and not the links, so these have a quarter of that. Without limits a mirror's \
                  copies are made one after the other, by DRBD, too.",
        how: How::OnXen { part: "stripes" },
    },
];
