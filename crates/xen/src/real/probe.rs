//! The parts of Xen that are here, for `ferrite doctor`. Changes nothing and binds nothing.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::time::Duration;

use ferrite_host::names;

use super::own_pages::{self, PageDevice};
use super::{EVTCHN, GNTALLOC, GNTDEV, HostProcessors, events, grants};
use crate::hypervisor::{DomId, HostTimes};

/// `XENFEAT_auto_translated_physmap`: pages are translated by hardware (PVH, HVM), not by
/// page-table writes that the hypervisor checks (PV).
const AUTO_TRANSLATED: u64 = 1 << 2;
/// A guest's number that the kernel accepts for a restriction; nothing is done to that guest.
const SOME_GUEST: DomId = DomId(1);

/// The interfaces of this domain and its kernel. Errors are for people: what is missing, what to do.
#[derive(Clone, Debug)]
pub struct Probe {
    /// /sys/hypervisor/type, as in `xen`.
    pub hypervisor: Option<String>,
    /// As in `4.20.1`.
    pub version: Option<String>,
    /// /sys/hypervisor/guest_type: what this domain itself is, as in `PV`.
    pub guest_type: Option<String>,
    /// /sys/hypervisor/properties/features, the bits of `XENFEAT_*`.
    pub features: Option<u64>,
    /// /proc/xen/capabilities; `control_d` in domain 0.
    pub capabilities: Result<String, String>,
    /// Whether /dev/xen/gntdev can be opened.
    pub gntdev: Result<(), String>,
    /// Whether it can copy grants; old kernels cannot.
    pub grant_copy: Result<(), String>,
    /// Most grants of one map request: xen-gntdev's parameter `limit`.
    pub gntdev_limit: Option<u64>,
    /// Whether this domain can grant pages to itself, and copies between grants work.
    pub own_grants: Result<(), String>,
    /// Most pages that all processes of this domain grant so: xen-gntalloc's parameter `limit`.
    pub own_grants_limit: Option<u64>,
    /// Whether /dev/xen/evtchn can be opened.
    pub evtchn: Result<(), String>,
    /// Whether event channels can be restricted to one guest.
    pub evtchn_restrict: Result<(), String>,
    /// The host's processors at two moments, [`APART`].
    pub processors: Result<[HostTimes; 2], String>,
    /// Whether /dev/xen/xenbus is there.
    pub xenbus: Result<(), String>,
    /// Whether xenstored's socket is there: it is where xenstored runs in this domain.
    pub xenstored: Result<(), String>,
}

/// Looks.
pub fn probe() -> Probe {
    probe_at(Path::new("/"))
}

fn probe_at(root: &Path) -> Probe {
    let text = |path: &str| read(root, path).ok();
    let number = |t: String, radix| u64::from_str_radix(&t, radix).ok();
    let version = ["major", "minor", "extra"].map(|n| text(&format!("sys/hypervisor/version/{n}")));
    let gntdev = open(root, GNTDEV, "xen-gntdev", grants::open);
    let evtchn = open(root, EVTCHN, "xen-evtchn", events::open);
    Probe {
        hypervisor: text("sys/hypervisor/type"),
        version: match version {
            [Some(major), Some(minor), extra] => {
                Some(format!("{major}.{minor}{}", extra.unwrap_or_default()))
            }
            _ => None,
        },
        guest_type: text("sys/hypervisor/guest_type"),
        features: text("sys/hypervisor/properties/features").and_then(|t| number(t, 16)),
        capabilities: read(root, CAPABILITIES)
            .map_err(|e| format!("/proc/xen/capabilities: {e}; mount xenfs on /proc/xen")),
        grant_copy: gntdev.as_ref().map_err(Clone::clone).and_then(|device| {
            grants::can_copy(device).map_err(|e| format!("this kernel does not copy grants: {e}"))
        }),
        own_grants: gntdev.as_ref().map_err(Clone::clone).and_then(|device| {
            if !is_control_domain(root) {
                return Err("only a control domain uses them".to_owned());
            }
            let pages = PageDevice::new(open(root, GNTALLOC, "xen-gntalloc", own_pages::open)?);
            try_own(device, &pages).map_err(|e| format!("cannot copy between own pages: {e}"))
        }),
        own_grants_limit: text("sys/module/xen_gntalloc/parameters/limit")
            .and_then(|t| number(t, 10)),
        gntdev: gntdev.map(drop),
        gntdev_limit: text("sys/module/xen_gntdev/parameters/limit").and_then(|t| number(t, 10)),
        evtchn_restrict: evtchn.as_ref().map_err(Clone::clone).and_then(|device| {
            events::restrict(device, SOME_GUEST)
                .map_err(|e| format!("this kernel does not restrict event channels: {e}"))
        }),
        evtchn: evtchn.map(drop),
        processors: processors(root).map_err(|e| e.to_string()),
        xenbus: exists(root, "dev/xen/xenbus"),
        xenstored: exists(root, "run/xenstored/socket"),
    }
}

/// Between two questions for processors.
pub const APART: Duration = Duration::from_millis(100);

fn processors(root: &Path) -> io::Result<[HostTimes; 2]> {
    let mut xen = HostProcessors::open_at(root)?;
    let before = xen.ask()?;
    std::thread::sleep(APART);
    Ok([before, xen.ask()?])
}

/// Copies within a page that is made for it.
fn try_own(device: &OwnedFd, pages: &PageDevice) -> io::Result<()> {
    let (index, refs) = pages.alloc(1)?;
    let copied = grants::copy_within(device, refs[0]);
    pages.free(index, 1);
    copied
}

/// The file in which xenfs describes this domain.
pub(super) const CAPABILITIES: &str = "proc/xen/capabilities";

/// Whether this is a control domain, as far as that says.
pub(super) fn is_control_domain(root: &Path) -> bool {
    names::read_to_string(root.join(CAPABILITIES)).is_ok_and(|c| c.contains("control_d"))
}

impl Probe {
    /// Whether this is domain 0, or another control domain.
    pub fn is_control_domain(&self) -> bool {
        self.capabilities.as_ref().is_ok_and(|c| c.contains("control_d"))
    }

    /// Whether this domain's own page tables are paravirtualised, so that mapping a grant takes
    /// two operations of the hypervisor (blkif.md 4.2).
    pub fn is_paravirtual(&self) -> Option<bool> {
        self.features.map(|f| f & AUTO_TRANSLATED == 0)
    }

    /// Whether disks can be served to guests from here.
    ///
    /// # Errors
    /// The first reason why not, and what to do.
    pub fn usable(&self) -> Result<(), String> {
        if self.hypervisor.as_deref() != Some("xen") {
            return Err("this is not a Xen domain (/sys/hypervisor/type is not xen); \
                        boot the machine with Xen"
                .to_owned());
        }
        self.gntdev.clone()?;
        self.grant_copy.clone()?;
        self.evtchn.clone()?;
        match (&self.xenstored, &self.xenbus) {
            (Err(socket), Err(device)) => Err(format!("no way to xenstore: {socket}; {device}")),
            _ => Ok(()),
        }
    }
}

/// A small file's text, without the newline.
fn read(root: &Path, path: &str) -> io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    File::open(root.join(path))?.take(4096).read_to_string(&mut text)?;
    Ok(text.trim_end().to_owned())
}

fn open<T>(
    root: &Path,
    path: &str,
    module: &str,
    open: impl Fn(&Path) -> io::Result<T>,
) -> Result<T, String> {
    open(&root.join(path)).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => format!("/{path} is not there; run: modprobe {module}"),
        io::ErrorKind::PermissionDenied => format!("/{path}: permission denied; run as root"),
        _ => format!("/{path}: {e}"),
    })
}

fn exists(root: &Path, path: &str) -> Result<(), String> {
    match fs::metadata(root.join(path)) {
        Ok(m) if m.file_type().is_socket() || m.file_type().is_char_device() => Ok(()),
        Ok(_) => Err(format!("/{path} is neither a socket nor a device")),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(format!("/{path} is not there")),
        Err(e) => Err(format!("/{path}: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;

    struct Root(PathBuf);

    impl Root {
        fn new(name: &str) -> Root {
            let path = std::env::temp_dir().join(format!("ferrite-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Root(path)
        }
        fn file(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_machine_without_xen_says_so_first() {
        let root = Root::new("none");
        let p = probe_at(&root.0);
        assert!(p.usable().unwrap_err().contains("not a Xen domain"));
        assert!(p.gntdev.unwrap_err().contains("modprobe xen-gntdev"));
        assert_eq!((p.version, p.features, p.gntdev_limit), (None, None, None));
    }

    #[test]
    fn what_is_there_is_read_and_what_is_wrong_is_named() {
        let root = Root::new("some");
        root.file("sys/hypervisor/type", "xen\n");
        root.file("sys/hypervisor/version/major", "4\n");
        root.file("sys/hypervisor/version/minor", "20\n");
        root.file("sys/hypervisor/version/extra", ".1-pre\n");
        root.file("sys/hypervisor/properties/features", "0000a705\n");
        root.file("sys/module/xen_gntdev/parameters/limit", "65536\n");
        root.file("proc/xen/capabilities", "control_d\n");
        root.file(GNTDEV, "");
        root.file(EVTCHN, "");
        let mut p = probe_at(&root.0);
        assert_eq!(p.version.as_deref(), Some("4.20.1-pre"));
        assert_eq!((p.features, p.gntdev_limit), (Some(0xa705), Some(65536)));
        assert_eq!(p.is_paravirtual(), Some(false));
        assert!(p.is_control_domain());
        assert!(p.gntdev.is_ok() && p.usable().unwrap_err().contains("does not copy grants"));
        p.grant_copy = Ok(());
        assert!(p.usable().unwrap_err().contains("no way to xenstore"));
        fs::create_dir_all(root.0.join("run/xenstored")).unwrap();
        let _socket = UnixListener::bind(root.0.join("run/xenstored/socket")).unwrap();
        p.xenstored = probe_at(&root.0).xenstored;
        assert_eq!(p.usable(), Ok(()));
    }
}
