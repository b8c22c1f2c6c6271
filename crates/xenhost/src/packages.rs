//! Required commands, and their Debian packages.

use crate::steps;
use anyhow::{Result, bail};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A command and its package.
pub type Need = (&'static str, &'static str);

/// The commands for booting the Xen host.
pub const XEN_HOST: &[Need] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("debootstrap", "debootstrap"),
    ("gpgv", "gpgv"),
    ("mkfs.ext4", "e2fsprogs"),
    ("cpio", "cpio"),
    ("gzip", "gzip"),
    ("xz", "xz-utils"),
    ("setpriv", "util-linux"),
    ("chroot", "coreutils"),
    ("cc", "gcc"),
    ("readelf", "binutils"),
];

/// Finds a command as a root shell does: the system folders count even if PATH lacks them.
pub fn find(command: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].iter().map(PathBuf::from);
    std::env::split_paths(&path).chain(system).map(|dir| dir.join(command)).find(|p| p.is_file())
}

/// Whether this process is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A command that runs as root: directly if this process is root, otherwise through sudo.
pub fn as_root(program: &str) -> Command {
    if is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("sudo");
    if !std::io::stdin().is_terminal() {
        command.arg("-n"); // fail instead of asking for a password: there is no terminal
    }
    command.arg("--").arg(program);
    command
}

/// Whether commands can be run as root without a password.
fn can_be_root() -> bool {
    is_root() || (find("sudo").is_some() && as_root("true").status().is_ok_and(|s| s.success()))
}

/// Installs missing packages with apt-get, or reports in one line what to install.
pub fn ensure(groups: &[&[Need]]) -> Result<()> {
    let needed = groups.iter().flat_map(|group| group.iter());
    let missing: Vec<&Need> = needed.filter(|need| find(need.0).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut packages: Vec<&str> = missing.iter().map(|need| need.1).collect();
    packages.sort_unstable();
    packages.dedup();
    let commands: Vec<&str> = missing.iter().map(|need| need.0).collect();
    let line = format!("apt-get install -y --no-install-recommends {}", packages.join(" "));
    if find("apt-get").is_none() || !can_be_root() {
        bail!(
            "these commands are missing: {}. Install their packages as root, then run again:\n    {line}",
            commands.join(", ")
        );
    }
    steps::say(format!("missing: {}; installing: {}", commands.join(", "), packages.join(" ")));
    std::fs::create_dir_all(steps::target_dir())?;
    let log = steps::target_dir().join("packages.log");
    steps::step("apt-get update", || steps::run_logged(as_root("apt-get").arg("update"), &log))?;
    steps::step(&line, || install(&packages, &log))?;
    if let Some((command, package)) = missing.iter().find(|need| find(need.0).is_none()) {
        bail!("package {package} was installed, yet `{command}` is still not to be found");
    }
    Ok(())
}

fn install(packages: &[&str], log: &Path) -> Result<()> {
    let mut command = as_root("env");
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y"]);
    command.arg("--no-install-recommends").args(packages);
    steps::run_logged(&mut command, log)
}
