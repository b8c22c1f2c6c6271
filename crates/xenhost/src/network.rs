//! The parts that guests need for network interfaces, beside those that all guests have.

use crate::XenHost;
use anyhow::Result;

/// The module and `ip` as `iproute2`, once in a boot: the shell of guests takes its own `ip`, which knows little.
const ADD: &str = "set -e; [ ! -e /tmp/net ] || exit 0; lib=usr/lib/x86_64-linux-gnu; \
     mkdir -p /tmp/net/usr/lib/modules /tmp/net/$lib /tmp/net/bin; cd /tmp/net; \
     module=$(modinfo -n xen-netfront); \
     case $module in *.xz) busybox xzcat $module ;; *) cat $module ;; esac >usr/lib/modules/xen-netfront.ko; \
     cp -L $(command -v ip) bin/iproute2; \
     for library in $(ldd bin/iproute2 | grep -o '/[^ ]*' | grep -vE 'libc\\.so|ld-linux'); do \
     cp -L $library $lib/; done; \
     find usr/lib bin/iproute2 -type f | busybox cpio -o -H newc | gzip -1 >>/lab/guest.img";

/// Adds the network driver, and `iproute2`, to the RAM disk of guests that start from now on: guests of other tests have no
/// network, and boot faster. A guest loads it by [`LOAD`].
///
/// # Errors
/// dom0's commands fail.
pub fn add_to_guests(xenhost: &mut XenHost) -> Result<()> {
    xenhost.sh_for(ADD, 240).map(drop)
}

/// A command of a guest that loads the driver. Without IPv6 no packets are sent but those of tests.
pub const LOAD: &str = "echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; \
     insmod /lib/modules/xen-netfront.ko";
