//! The Debian package, installed, upgraded, removed and purged by dpkg. Its scripts run in a folder that has a shell.
//! Programs in place of systemd's and the kernel's record there how they are called.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use ferrite_xenhost::packages::{self, as_root};
use ferrite_xenhost::steps::{output, run_logged};

use crate::needs;

/// The programs that the scripts call, besides the shell's own.
const RECORDED: [&str; 3] = ["systemctl", "systemd-tmpfiles", "modprobe"];
/// The programs that they need besides a shell. busybox's own shell would not call [`RECORDED`].
const APPLETS: [&str; 2] = ["rm", "rmdir"];
/// Where `systemctl enable` has put a link.
const WANTED: &str = "etc/systemd/system/multi-user.target.wants/ferrite.service";

const RELOAD: &str = "systemctl daemon-reload";
const TMPFILES: &str = "systemd-tmpfiles --create /usr/lib/tmpfiles.d/ferrite.conf";
const STOP: &str = "systemctl --no-reload disable --now ferrite.service";

/// The folder that dpkg takes for a machine.
struct Machine {
    root: PathBuf,
    log: PathBuf,
}

/// Tries a package out.
pub(crate) fn try_out(deb: &Path, log: &Path) -> Result<()> {
    packages::ensure(&[needs::INSTALLED])?;
    let machine = Machine { root: deb.with_file_name("machine"), log: log.to_owned() };
    machine.make()?;
    machine.dpkg(&["--install"], deb)?;
    let loaded: Vec<String> =
        ["xen-gntdev", "xen-evtchn", "xen-gntalloc", "xen-privcmd"].map(load).to_vec();
    let begun = [vec![TMPFILES.to_owned(), RELOAD.to_owned()], loaded].concat();
    machine.expect("install", &begun)?;
    let config = machine.root.join("etc/ferrite/ferrite.toml");
    fs::write(&config, "[disks]\nqueues = 2\n")?;
    let link = machine.root.join(WANTED);
    fs::create_dir_all(machine.root.join("etc/systemd/system/multi-user.target.wants"))?;
    symlink("/usr/lib/systemd/system/ferrite.service", &link)?;
    // The daemon and its link stay, and so does what the administrator has written.
    machine.dpkg(&["--install"], deb)?;
    machine.expect("upgrade", &[vec![RELOAD.to_owned()], begun].concat())?;
    machine.holds("upgrade", &[(&config, true), (&link, true)])?;
    machine.dpkg(&["--remove"], Path::new("ferrite"))?;
    machine.expect("remove", &[STOP.to_owned(), RELOAD.to_owned()])?;
    let program = machine.root.join("usr/bin/ferrite");
    machine.holds("remove", &[(&config, true), (&link, false), (&program, false)])?;
    machine.dpkg(&["--purge"], Path::new("ferrite"))?;
    machine.expect("purge", &[RELOAD.to_owned()])?;
    machine.holds("purge", &[(&config, false), (&machine.root.join("etc/ferrite"), false)])?;
    fs::remove_dir_all(&machine.root)?;
    Ok(())
}

fn load(module: &str) -> String {
    format!("modprobe -q {module}")
}

impl Machine {
    /// A machine that systemd has started, and that is a control domain.
    fn make(&self) -> Result<()> {
        let _ = fs::remove_dir_all(&self.root);
        for folder in [
            "usr/bin",
            "run/systemd/system",
            "proc/xen",
            "var/lib/dpkg/info",
            "var/lib/dpkg/updates",
            "tmp",
        ] {
            fs::create_dir_all(self.root.join(folder))?;
        }
        for (link, to) in [("bin", "usr/bin"), ("sbin", "usr/bin")] {
            symlink(to, self.root.join(link))?;
        }
        symlink("bin", self.root.join("usr/sbin"))?;
        fs::write(self.root.join("var/lib/dpkg/status"), "")?;
        fs::write(self.root.join("proc/xen/capabilities"), "control_d\n")?;
        let busybox = output(Command::new("sh").args(["-c", "command -v busybox"]))?;
        fs::copy(busybox.trim(), self.root.join("usr/bin/busybox"))?;
        self.copy_shell()?;
        for applet in APPLETS {
            symlink("busybox", self.root.join("usr/bin").join(applet))?;
        }
        for name in RECORDED {
            let path = self.root.join("usr/bin").join(name);
            fs::write(&path, format!("#!/bin/sh\necho \"{name} $*\" >>/calls\n"))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// The shell of this machine, with its libraries.
    fn copy_shell(&self) -> Result<()> {
        const SHELL: &str = "/bin/sh";
        let libraries = output(Command::new("ldd").arg(SHELL))?;
        let libraries = libraries.split_whitespace().filter(|word| word.starts_with('/'));
        for path in libraries.chain([SHELL]) {
            let to = self.root.join(path.trim_start_matches('/'));
            if let Some(folder) = to.parent() {
                fs::create_dir_all(folder)?;
            }
            fs::copy(path, &to).with_context(|| format!("cannot copy {path}"))?;
        }
        Ok(())
    }

    /// Runs dpkg on the machine, without what the package depends on.
    fn dpkg(&self, verb: &[&str], what: &Path) -> Result<()> {
        let mut dpkg = as_root("dpkg");
        dpkg.arg(format!("--root={}", self.root.canonicalize()?.display()));
        dpkg.args(["--force-depends", "--force-confold", "--force-unsafe-io"]).args(verb).arg(what);
        run_logged(&mut dpkg, &self.log)
    }

    /// Compares what the scripts have called since the last time.
    fn expect(&self, step: &str, expected: &[String]) -> Result<()> {
        let file = self.root.join("calls");
        let calls = fs::read_to_string(&file).unwrap_or_default();
        let _ = fs::remove_file(&file);
        if calls.lines().ne(expected.iter().map(String::as_str)) {
            bail!("{step}: the package's scripts called\n{calls}and not\n{}", expected.join("\n"));
        }
        Ok(())
    }

    /// Whether these paths exist, as said.
    fn holds(&self, step: &str, paths: &[(&Path, bool)]) -> Result<()> {
        for (path, is) in paths {
            if path.symlink_metadata().is_ok() != *is {
                bail!("{step}: {} is {}", path.display(), if *is { "gone" } else { "still there" });
            }
        }
        Ok(())
    }
}
