//! The packages of [`dist`](crate::dist), unpacked and tried out.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};
use ferrite_xenhost::steps::{fresh_log, output, run_logged};

use crate::dist::{HELPER, Made, debug_path, has_debug_information};

/// Unpacks the package and runs its program.
pub(crate) fn try_out(made: &Made, is_static: bool) -> Result<()> {
    let log = fresh_log("dist-try")?;
    let folder = made.deb.with_file_name("unpacked");
    run_logged(Command::new("dpkg-deb").arg("-x").arg(&made.deb).arg(&folder), &log)?;
    let program = folder.join("usr/bin/ferrite");
    let told = output(Command::new("readelf").args(["-W", "-d"]).arg(&program))?;
    if is_static && told.contains("(NEEDED)") {
        bail!("the program is not linked statically:\n{told}");
    }
    let helper = folder.join("usr/bin").join(HELPER);
    if is_static == helper.exists() {
        bail!("{} is in the static package, or lacks in the other", helper.display());
    }
    if !is_static {
        run_logged(Command::new(&helper).arg("--version"), &log)?;
    }
    if has_debug_information(&program)? {
        bail!("{} is not stripped", program.display());
    }
    if let Some(debug) = &made.debug {
        try_debug(debug, &program, &log)?;
    }
    verify_units(&folder, &log)?;
    let images = made.deb.with_file_name("images");
    fs::create_dir_all(&images)?;
    for line in [
        "--version",
        "image create --force a.vhd 64M",
        "image convert --force a.vhd b.qcow2",
        "image compare a.vhd b.qcow2",
        "image check a.vhd",
        "image check b.qcow2",
    ] {
        let mut command = Command::new(&program);
        run_logged(command.args(line.split(' ')).current_dir(&images), &log)?;
    }
    let listed = output(Command::new("tar").arg("-tJf").arg(&made.tar))?;
    for path in [
        "usr/bin/ferrite",
        "usr/bin/tap-ctl",
        "usr/sbin/tap-ctl",
        "usr/bin/vhd-util",
        "usr/sbin/td-util",
        "usr/sbin/cbt-util",
        "etc/xen/scripts/block-ferrite",
        "etc/xen/scripts/vif-ferrite",
        "etc/ferrite/ferrite.toml",
        "var/lib/xapi/storage-scripts/datapath/ferrite/Datapath.attach",
        "var/lib/xapi/storage-scripts/volume/org.xen.xapi.storage.ferrite/SR.ls",
        "usr/lib/systemd/system/ferrite.service",
        "usr/lib/systemd/system/ferrite-pool@.service",
        "usr/share/doc/ferrite/changelog.gz",
        "usr/share/doc/ferrite/grafana-ferrite.json",
        "usr/share/lintian/overrides/ferrite",
        "usr/share/man/man1/ferrite-serve.1.gz",
        "usr/share/man/man1/tap-ctl.1.gz",
        "usr/share/man/man5/ferrite.toml.5.gz",
        "usr/share/man/man8/ferrite-daemon.8.gz",
    ] {
        if !listed.contains(path) || !folder.join(path).is_file() {
            bail!("{path} is not in the packages:\n{listed}");
        }
    }
    Ok(())
}

/// The package of debug information has it for this program, by the name that the program links to.
fn try_debug(package: &Path, program: &Path, log: &Path) -> Result<()> {
    let folder = package.with_file_name("unpacked-debug");
    run_logged(Command::new("dpkg-deb").arg("-x").arg(package).arg(&folder), log)?;
    let path = folder.join(debug_path(program)?);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let link = output(Command::new("readelf").args(["-p", ".gnu_debuglink"]).arg(program))?;
    if !has_debug_information(&path)? || !link.contains(&*name) {
        bail!("{} is not the debug information of {}:\n{link}", path.display(), program.display());
    }
    Ok(())
}

/// Has systemd verify the units, if it is installed: it reports unknown keys and missing programs.
fn verify_units(root: &Path, log: &Path) -> Result<()> {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return Ok(());
    }
    for unit in ["ferrite.service", "ferrite@.service", "ferrite-pool@.service"] {
        let path = root.join("usr/lib/systemd/system").join(unit);
        let text = fs::read_to_string(&path)?;
        // The program is not installed, so it is used from where it was unpacked; other units are not checked.
        let program = root.join("usr/bin/ferrite");
        let text = text.replace("/usr/bin/ferrite", &program.display().to_string());
        let text = text.lines().filter(|line| !line.starts_with("Documentation="));
        let text = text.collect::<Vec<_>>().join("\n");
        let copy = root.with_file_name(unit);
        fs::write(&copy, text + "\n")?;
        let mut verify = Command::new("systemd-analyze");
        verify.args(["verify", "--man=no", "--recursive-errors=no"]).arg(&copy);
        run_logged(&mut verify, log)?;
    }
    Ok(())
}
