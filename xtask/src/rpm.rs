//! The RPM for control domains of XCP-ng and XenServer, from the files of the other packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use ferrite_xenhost::steps::{self, output, run_logged};

/// A release of the RPM of the same version of the program.
const RELEASE: &str = "1";

/// Packs the files below `root`, which are in their installed places. The control domain of XCP-ng 8 has rpm 4.11: it
/// reads payloads of xz, and not of zstd.
pub(crate) fn pack(root: &Path, to: &Path, version: &str, log: &Path) -> Result<PathBuf> {
    let folder = to.join("rpm");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    let spec = folder.join("ferrite.spec");
    fs::write(&spec, spec_of(root, version)?)?;
    let mut build = Command::new("rpmbuild");
    build.args(["-bb", "--target", "x86_64-linux"]);
    for define in [
        format!("_topdir {}", folder.display()),
        "_binary_payload w6.xzdio".to_owned(),
        // SHA-256.
        "_binary_filedigest_algorithm 8".to_owned(),
        "_build_id_links none".to_owned(),
        "source_date_epoch_from_changelog 0".to_owned(),
        // The files are as they are to be: nothing is stripped or compressed again.
        "__os_install_post %{nil}".to_owned(),
        "debug_package %{nil}".to_owned(),
    ] {
        build.arg("--define").arg(define);
    }
    run_logged(build.arg(&spec), log)?;
    let made = folder.join(format!("RPMS/x86_64/ferrite-{version}-{RELEASE}.x86_64.rpm"));
    let rpm = to.join(made.file_name().context("a file has a name")?);
    fs::rename(&made, &rpm).with_context(|| format!("rpmbuild made no {}", made.display()))?;
    fs::remove_dir_all(&folder)?;
    Ok(rpm)
}

/// The description for rpmbuild, with a list of all files.
fn spec_of(root: &Path, version: &str) -> Result<String> {
    let root = root.canonicalize()?;
    let mut found = Command::new("find");
    found
        .arg(&root)
        .args(["-name", "DEBIAN", "-prune", "-o", "!", "-type", "d", "-printf", "/%P\n"]);
    let mut files: Vec<String> = output(&mut found)?.lines().map(str::to_owned).collect();
    files.sort();
    let listed = files.iter().map(|file| match file.starts_with("/etc/") {
        true => format!("%config(noreplace) \"{file}\"\n"),
        false => format!("\"{file}\"\n"),
    });
    let script = |name: &str| -> Result<String> {
        let text = fs::read_to_string(steps::repository().join("dist").join(name))?;
        // rpm calls its scripts with a number: of the versions that are installed afterwards.
        Ok(text.replacen("#!/bin/sh\n", "", 1).replace('%', "%%"))
    };
    Ok(format!(
        "Name: ferrite\nVersion: {version}\nRelease: {RELEASE}\nLicense: Apache-2.0\n\
         Summary: Xen virtual-disk backend in user space\nAutoReqProv: no\n\
         %description\nServes raw, VHD and qcow2 images to guests, and makes, copies, merges and checks such images.\n\
         %install\nmkdir -p %{{buildroot}}\ncp -a '{root}/.' %{{buildroot}}\nrm -rf %{{buildroot}}/DEBIAN\n\
         %post\nset -- configure\n{post}\
         %preun\nif [ \"$1\" = 0 ]; then set -- remove; else set -- upgrade; fi\n{preun}\
         %postun\nif [ \"$1\" = 0 ]; then set -- remove; else set -- upgrade; fi\n{postun}\
         %files\n{files}",
        root = root.display(),
        post = script("postinst")?,
        preun = script("prerm")?,
        postun = script("postrm")?,
        files = listed.collect::<String>(),
    ))
}

/// Installs it in an empty folder, without what it depends on, and runs its program.
pub(crate) fn try_out(rpm: &Path, log: &Path) -> Result<()> {
    let root = rpm.with_file_name("rpm-root");
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root)?;
    let mut install = Command::new("rpm");
    install.arg("--root").arg(root.canonicalize()?);
    install
        .args(["--force-debian", "--nodeps", "--noscripts", "--ignoreos", "--install"])
        .arg(rpm.canonicalize()?);
    run_logged(&mut install, log)?;
    run_logged(Command::new(root.join("usr/bin/ferrite")).arg("--version"), log)?;
    let payload =
        output(Command::new("rpm").args(["-qp", "--qf", "%{PAYLOADCOMPRESSOR} %{ARCH}"]).arg(rpm))?;
    if payload.trim() != "xz x86_64" {
        bail!("the RPM is {payload}, not xz x86_64");
    }
    let kept = output(Command::new("rpm").args(["-qpc"]).arg(rpm))?;
    let scripts = "/etc/xen/scripts/block-ferrite\n/etc/xen/scripts/vif-ferrite";
    if kept.trim() != format!("/etc/ferrite/ferrite.toml\n{scripts}") {
        bail!("the RPM keeps these files of the administrator, and no others:\n{kept}");
    }
    Ok(())
}
