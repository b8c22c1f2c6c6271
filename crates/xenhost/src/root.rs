//! The Xen host's root image: a small Debian with Xen, built once for each recipe and cached.

use crate::packages::as_root;
use crate::steps::{self, run_logged, step};
use crate::{bootdisk, initramfs};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// A Debian release with its Xen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suite {
    /// The release's code name, as for debootstrap.
    pub name: &'static str,
    /// Its Xen version, part of package and folder names.
    pub xen: &'static str,
}

/// Debian 13: Xen 4.20, Linux 6.12.
pub const TRIXIE: Suite = Suite { name: "trixie", xen: "4.20" };
/// Debian 12: Xen 4.17, Linux 6.1.
pub const BOOKWORM: Suite = Suite { name: "bookworm", xen: "4.17" };

impl Suite {
    /// The suite with this name.
    pub fn by_name(name: &str) -> Result<Suite> {
        match [TRIXIE, BOOKWORM].into_iter().find(|suite| suite.name == name) {
            Some(suite) => Ok(suite),
            None => bail!("no such suite: {name}; there are trixie and bookworm"),
        }
    }

    fn packages(self) -> Vec<String> {
        let xen = self.xen;
        let mut list = vec![format!("xen-hypervisor-{xen}-amd64"), format!("xen-utils-{xen}")];
        list.extend(
            [
                "linux-image-amd64",
                "xenstore-utils",
                "fio",
                "e2fsprogs",
                "xfsprogs",
                "fdisk",
                "strace",
                "nbd-client",
                "qemu-utils",
            ]
            .map(String::from),
        );
        // The device model of HVM guests, which is also the backend qdisk.
        list.extend(["qemu-system-xen", "seabios"].map(String::from));
        list.extend(bootdisk::PACKAGES.map(String::from));
        if self == TRIXIE {
            // dm-vdo, which this release's kernel has: the peer of a store.
            list.extend(["vdo", "dmsetup"].map(String::from));
            // A client of NBD with lengths of 64 bits.
            list.push("python3-libnbd".into());
            // Disks on several hosts: iSCSI's initiator and a target besides the kernel's, multipath, volumes, DRBD.
            let shared =
                ["tgt", "open-iscsi", "multipath-tools", "sg3-utils", "lvm2", "drbd-utils"];
            list.extend(shared.map(String::from));
        }
        list
    }
}

/// Packages of the first stage of debootstrap: those of the second stage need them.
const BASE_PACKAGES: &str =
    "kmod,udev,iproute2,procps,util-linux,busybox-static,zstd,ca-certificates,initramfs-tools";

/// dom0's initial RAM disk has only the modules to find the root: half the size, seconds less to boot.
const INITRD_MODULES: &str = "virtio_pci\nvirtio_blk\next4\n";

/// Excluded from the image: manuals.
const DPKG_CONF: &str = "force-unsafe-io
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/man/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/info/*
";

/// The root's own init only starts the boot's payload, which is not cached.
const HANDOVER: &str = "#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t devtmpfs dev /dev 2>/dev/null
mount -t ext4 /dev/vdb /lab && exec /lab/init
echo 'lab: no payload on /dev/vdb'
sleep 1000000
";

/// Size of the root file system; a sparse file.
const ROOT_BYTES: &str = "3G";

/// A finished root: everything that a boot reads. It is never written.
#[derive(Clone, Debug)]
pub struct Root {
    dir: PathBuf,
    suite: Suite,
}

impl Root {
    /// The hypervisor, unpacked, because QEMU's multiboot loader does not unpack it.
    pub fn xen(&self) -> PathBuf {
        self.dir.join("xen")
    }
    /// dom0's kernel; guests boot the same.
    pub fn kernel(&self) -> PathBuf {
        self.dir.join("vmlinuz")
    }
    /// dom0's initial RAM disk.
    pub fn initrd(&self) -> PathBuf {
        self.dir.join("initrd")
    }
    /// dom0's root file system.
    pub fn image(&self) -> PathBuf {
        self.dir.join("root.ext4")
    }
    /// The programs and modules of the guests' initial RAM disk, packed.
    pub fn guest_base(&self) -> PathBuf {
        self.dir.join("guest.cpio.gz")
    }
    /// The release of the root.
    pub fn suite(&self) -> Suite {
        self.suite
    }
}

/// The folder of roots and built tools: outside of the build folder, since they do not change with the code. Each has a
/// name with its recipe.
pub fn cache_dir() -> PathBuf {
    let given =
        |name: &str| std::env::var_os(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    given("FERRITE_LAB_CACHE")
        .or_else(|| given("XDG_CACHE_HOME").map(|dir| dir.join("ferrite")))
        .or_else(|| given("HOME").map(|dir| dir.join(".cache/ferrite")))
        .unwrap_or_else(|| steps::target_dir().join("lab"))
}

/// The root for `suite`: the cached one, or a new one.
pub fn ensure(suite: Suite) -> Result<Root> {
    let cache = cache_dir();
    std::fs::create_dir_all(&cache)
        .with_context(|| format!("cannot make the Xen host's cache {}", cache.display()))?;
    let cache = cache.canonicalize()?;
    let dir = cache.join(format!("{}-{:016x}", suite.name, recipe_hash(suite)));
    let root = Root { dir: dir.clone(), suite };
    if dir.is_dir() {
        return Ok(root);
    }
    // Only a complete root gets the name, so that an interrupted build is never used.
    let building = cache.join(format!("building-{}-{}", suite.name, std::process::id()));
    remove_leftovers(&cache)?;
    std::fs::create_dir(&building)?;
    step(&format!("root of the Xen host ({}, Xen {}; once)", suite.name, suite.xen), || {
        build(suite, &building)
    })?;
    match std::fs::rename(&building, &dir) {
        Ok(()) => Ok(root),
        // Another run finished the same root first.
        Err(_) if dir.is_dir() => {
            std::fs::remove_dir_all(&building)?;
            Ok(root)
        }
        Err(error) => Err(error).context("cannot give the finished root its name"),
    }
}

/// Removes interrupted builds: those whose process has ended.
fn remove_leftovers(cache: &Path) -> Result<()> {
    for entry in std::fs::read_dir(cache)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(pid) = name.strip_prefix("building-").and_then(|n| n.rsplit('-').next()) else {
            continue;
        };
        if !Path::new("/proc").join(pid).exists() {
            steps::run(as_root("rm").arg("-rf").arg("--").arg(entry.path()))?;
        }
    }
    Ok(())
}

/// A hash of everything that decides the content of the root; a change gives another cache entry.
fn recipe_hash(suite: Suite) -> u64 {
    let guest =
        initramfs::PROGRAMS.join(" ") + &initramfs::MODULES.join(" ") + &initramfs::RECIPE.concat();
    let parts = [
        suite.name,
        suite.xen,
        &suite.packages().join(" "),
        BASE_PACKAGES,
        INITRD_MODULES,
        DPKG_CONF,
        HANDOVER,
        ROOT_BYTES,
        &guest,
        bootdisk::RECIPE,
    ];
    fnv1a(parts.join("\0").as_bytes())
}

/// FNV-1a: the standard hasher's values may change from one Rust version to the next.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn build(suite: Suite, dir: &Path) -> Result<()> {
    let tree = dir.join("tree");
    let log = dir.join("build.log");
    let mirror = mirror()?;
    step(&format!("debootstrap {}", suite.name), || {
        let mut command = as_root("debootstrap");
        command.args(["--variant=minbase", &format!("--include={BASE_PACKAGES}"), suite.name]);
        run_logged(command.arg(&tree).arg(&mirror), &log)
    })?;
    step("install Xen and Linux into the root", || install(suite, &tree, &mirror, &log))?;
    step("images of the Xen host", || make_images(suite, dir, &tree, &log))
}

/// Runs a shell line in the new root.
fn in_root(tree: &Path, line: &str, log: &Path) -> Result<()> {
    run_logged(as_root("chroot").arg(tree).args(["/bin/sh", "-ec", line]), log)
}

fn install(suite: Suite, tree: &Path, mirror: &str, log: &Path) -> Result<()> {
    let put = |path: &str, text: &str| put_file(&tree.join(path), text, log);
    put("etc/dpkg/dpkg.cfg.d/lab", DPKG_CONF)?;
    put("etc/initramfs-tools/conf.d/lab", "MODULES=list\nCOMPRESS=zstd\n")?;
    put("etc/initramfs-tools/modules", INITRD_MODULES)?;
    put("etc/apt/sources.list", &format!("deb {mirror} {} main\n", suite.name))?;
    put("etc/fstab", "")?;
    put("lab-init", HANDOVER)?;
    // The root uses the machine's network settings while it is built.
    run_logged(
        as_root("cp").args(["-rL", "/etc/resolv.conf"]).arg(tree.join("etc/resolv.conf")),
        log,
    )?;
    run_logged(
        as_root("cp").args(["-r", "/etc/apt/apt.conf.d/."]).arg(tree.join("etc/apt/apt.conf.d")),
        log,
    )?;
    let packages = suite.packages().join(" ");
    in_root(
        tree,
        &format!(
            "export DEBIAN_FRONTEND=noninteractive LC_ALL=C
             apt-get update
             apt-get install -y --no-install-recommends {packages}
             apt-get clean
             rm -rf /var/lib/apt/lists/* /etc/resolv.conf
             mkdir -p /lab /proc /sys
             chmod 755 /lab-init"
        ),
        log,
    )
}

/// Writes a file inside the root, which may need root's permission.
fn put_file(path: &Path, text: &str, log: &Path) -> Result<()> {
    let parent = path.parent().context("a file in the root has no folder")?;
    run_logged(as_root("mkdir").arg("-p").arg(parent), log)?;
    let mut command = as_root("sh");
    command.args(["-c", "printf %s \"$1\" >\"$2\"", "put", text]).arg(path);
    run_logged(&mut command, log)
}

fn make_images(suite: Suite, dir: &Path, tree: &Path, log: &Path) -> Result<()> {
    let kernel = kernel_release(tree)?;
    let xen = tree.join(format!("boot/xen-{}-amd64.gz", suite.xen));
    let mut shell = as_root("sh");
    shell.args([
        "-ec",
        "umask 022
        gzip -dc \"$1\" >\"$4/xen\"
        cp \"$2\" \"$4/vmlinuz\"
        cp \"$3\" \"$4/initrd\"
        cp \"$2\" \"$5/boot/guest-vmlinuz\"
        chmod 644 \"$4/xen\" \"$4/vmlinuz\" \"$4/initrd\"",
        "images",
    ]);
    shell.arg(&xen);
    shell.arg(tree.join(format!("boot/vmlinuz-{kernel}")));
    shell.arg(tree.join(format!("boot/initrd.img-{kernel}")));
    shell.arg(dir).arg(tree);
    run_logged(&mut shell, log).context("cannot take the boot files out of the root")?;
    let base = dir.join("guest.cpio.gz");
    initramfs::make_base(tree, &kernel, &base, log)?;
    bootdisk::make(tree, &base, log)?;

    let image = dir.join("root.ext4");
    run_logged(std::process::Command::new("truncate").args(["-s", ROOT_BYTES]).arg(&image), log)?;
    let mut mkfs = as_root("mkfs.ext4");
    mkfs.args(["-q", "-F", "-L", "lab", "-d"]).arg(tree).arg(&image);
    run_logged(&mut mkfs, log)?;
    run_logged(as_root("rm").arg("-rf").arg(tree), log)
}

/// The kernel release in the root's /boot.
fn kernel_release(tree: &Path) -> Result<String> {
    let boot = tree.join("boot");
    for entry in std::fs::read_dir(&boot).with_context(|| format!("no {}", boot.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(release) = name.strip_prefix("vmlinuz-") {
            return Ok(release.to_owned());
        }
    }
    bail!("no kernel in {}", boot.display())
}

/// The machine's Debian mirror, from its apt sources; $FERRITE_LAB_MIRROR overrides it.
fn mirror() -> Result<String> {
    if let Ok(mirror) = std::env::var("FERRITE_LAB_MIRROR") {
        return Ok(mirror);
    }
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let field = |key: &str| {
        let value = release.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        value.unwrap_or_default().trim_matches('"').to_owned()
    };
    if field("ID") == "debian" {
        let codename = field("VERSION_CODENAME");
        let found = apt_sources().iter().find_map(|text| mirror_in(text, &codename));
        if let Some(mirror) = found {
            return Ok(mirror);
        }
    }
    bail!(
        "no Debian mirror in this machine's apt sources: set FERRITE_LAB_MIRROR to the address \
         of one and run again"
    )
}

/// The texts of apt's source lists.
fn apt_sources() -> Vec<String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = std::fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.filter_map(Result::ok).map(|entry| entry.path()));
    }
    files.sort();
    files.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect()
}

/// The mirror of suite `codename`, component main, in one source list of either form.
fn mirror_in(text: &str, codename: &str) -> Option<String> {
    one_line_form(text, codename).or_else(|| stanza_form(text, codename))
}

/// `deb [options] URI SUITE COMPONENT...`
fn one_line_form(text: &str, codename: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let rest = line.trim().strip_prefix("deb ")?.trim_start();
        let rest = match rest.strip_prefix('[') {
            Some(options) => options.split_once(']')?.1,
            None => rest,
        };
        let mut words = rest.split_whitespace();
        let uri = words.next()?;
        let fits = words.next() == Some(codename) && words.any(|word| word == "main");
        fits.then(|| uri.to_owned())
    })
}

/// Paragraphs of `Types:`, `URIs:`, `Suites:`, `Components:`.
fn stanza_form(text: &str, codename: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).find_map(|stanza| {
        let words = |key: &str| -> Vec<&str> {
            let line = stanza.iter().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
            line.unwrap_or_default().split_whitespace().collect()
        };
        let fits = words("Types").contains(&"deb")
            && words("Suites").contains(&codename)
            && words("Components").contains(&"main");
        fits.then(|| words("URIs").first().map(|uri| (*uri).to_owned())).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_found_in_stanzas_and_foreign_ones_are_passed_over() {
        let text = "Types: deb\nURIs: http://other.example/x\nSuites: nodistro\nComponents: main\n\n\
                    Types: deb\n# a comment\nURIs: http://mirror.example/debian\n\
                    Suites: bookworm bookworm-updates\nComponents: main contrib\n";
        assert_eq!(mirror_in(text, "bookworm").as_deref(), Some("http://mirror.example/debian"));
        assert_eq!(mirror_in(text, "trixie"), None);
    }

    #[test]
    fn the_mirror_is_found_in_one_line_lists_with_options() {
        let text = "# deb http://no.example/debian bookworm main\n\
                    deb [signed-by=/x arch=amd64] http://mirror.example/debian bookworm main\n";
        assert_eq!(mirror_in(text, "bookworm").as_deref(), Some("http://mirror.example/debian"));
        assert_eq!(mirror_in(text, "bookworm-security"), None);
    }

    #[test]
    fn another_suite_is_another_recipe() {
        assert_ne!(recipe_hash(TRIXIE), recipe_hash(BOOKWORM));
    }
}
