//! The commands that tasks need, by task.

use ferrite_xenhost::packages::Need;

/// The commands for the tests outside the Xen host.
pub(crate) const CHECKS: &[Need] = &[
    ("chromium", "chromium"),
    ("curl", "curl"),
    ("fio", "fio"),
    ("valgrind", "valgrind"),
    ("qemu-img", "qemu-utils"),
    ("strace", "strace"),
    ("qemu-storage-daemon", "qemu-system-common"),
    ("vhdiinfo", "libvhdi-utils"),
    ("mkfs.xfs", "xfsprogs"),
    ("nbdcopy", "libnbd-bin"),
    ("nbdsh", "python3-libnbd"),
    ("nbdkit", "nbdkit"),
    ("openssl", "openssl"),
    ("etcd", "etcd-server"),
    ("etcdctl", "etcd-client"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("/usr/lib/python3/dist-packages/prometheus_client/__init__.py", "python3-prometheus-client"),
];

/// etcd, for pools in the Xen host.
pub(crate) const ETCD: &[Need] = &[("etcd", "etcd-server")];

/// The programs of LVM.
pub(crate) const LVM: &[Need] = &[("lvm", "lvm2")];

/// The programs of a Ceph cluster and of its clients.
pub(crate) const CEPH: &[Need] = &[
    ("ceph-mon", "ceph-mon"),
    ("ceph-mgr", "ceph-mgr"),
    ("ceph-osd", "ceph-osd"),
    ("rbd", "ceph-common"),
    ("fio", "fio"),
];

/// The command with which vhdimount mounts for a user other than root. The package has it under both its names, that of
/// FUSE 2 (libvhdi in bookworm) and that of FUSE 3.
pub(crate) const MOUNTS: &[Need] = &[("fusermount", "fuse3"), ("fusermount3", "fuse3")];

/// The commands for building the fuzz targets.
pub(crate) const FUZZ: &[Need] = &[("cc", "gcc"), ("c++", "g++")];

/// The commands for packing.
pub(crate) const DIST: &[Need] = &[
    ("dpkg-deb", "dpkg"),
    ("tar", "tar"),
    ("gzip", "gzip"),
    ("xz", "xz-utils"),
    ("readelf", "binutils"),
    ("objcopy", "binutils"),
];

/// The commands for installing a package in a folder, with a shell there.
pub(crate) const INSTALLED: &[Need] = &[("dpkg", "dpkg"), ("busybox", "busybox-static")];

/// The commands for packing and testing an RPM.
pub(crate) const RPM: &[Need] = &[("rpmbuild", "rpm"), ("rpm", "rpm"), ("find", "findutils")];

/// Debian's newest compiler, independent of PATH.
pub(crate) const DEBIANS_CARGO: &str = "/usr/bin/cargo";
pub(crate) const DEBIANS_RUSTC: &str = "/usr/bin/rustc";

/// LLVM's unwinder.
pub(crate) const UNWINDER: &str = "/usr/lib/llvm-19/lib/libunwind.a";

/// The packages for compiling for any libc if the available compiler cannot.
pub(crate) const LIBC_FREE: &[Need] = &[
    (DEBIANS_CARGO, "cargo-web"),
    (DEBIANS_RUSTC, "rustc-web"),
    ("/usr/lib/rustlib/src/rust/library/std/Cargo.toml", "rust-web-src"),
    ("musl-gcc", "musl-tools"),
    (UNWINDER, "libunwind-19-dev"),
];
