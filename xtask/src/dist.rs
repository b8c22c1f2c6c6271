//! `cargo xtask dist`: the files for a host, as a tar and as a Debian package.
//!
//! The package is written with dpkg-deb, which every Debian machine has. cargo-deb would have to be built first, needs
//! as many lines of description, and makes the same layout.

use crate::libc_free;
use crate::needs;
use crate::programs::Programs;
use crate::rpm;
use anyhow::{Context, Result, bail};
use ferrite_xenhost::packages;
use ferrite_xenhost::steps::{self, cargo, fresh_log, output, run_logged, step};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Options of `cargo xtask dist`.
#[derive(clap::Args)]
pub(crate) struct DistArguments {
    /// Link everything into the program, for hosts with another or an older libc, and make an RPM as well (XCP-ng).
    #[arg(long = "static")]
    is_static: bool,
}

/// The pages of the documentation that hosts get. Links of these lead only to pages of this list.
const PAGES: [&str; 21] = [
    "operations.md",
    "watching.md",
    "serve.md",
    "images.md",
    "store.md",
    "nbd.md",
    "install.md",
    "control.schema.json",
    "engines.md",
    "bench.md",
    "lab.md",
    "lab-report.html",
    "pictures/aggregate.svg",
    "pictures/polling.svg",
    "support.md",
    "trace.md",
    "performance.md",
    "internals/processes.md",
    "internals/formats.md",
    "internals/send-stream.md",
    "internals/store.md",
    "internals/trace.md",
];

/// The packages that were made.
pub(crate) struct Made {
    pub(crate) tar: PathBuf,
    pub(crate) deb: PathBuf,
}

/// Builds the program and packs it.
pub(crate) fn dist(arguments: &DistArguments) -> Result<()> {
    let made = make(arguments.is_static, "dist", Squeeze::Well)?;
    steps::say(format!("made {} and {}", made.tar.display(), made.deb.display()));
    Ok(())
}

/// Makes and tests the packages with a statically linked program.
pub(crate) fn check_static() -> Result<()> {
    make(true, "dist-static", Squeeze::Little).map(drop)
}

fn make(is_static: bool, folder: &str, squeeze: Squeeze) -> Result<Made> {
    packages::ensure(&[needs::DIST])?;
    if is_static {
        packages::ensure(&[needs::RPM])?;
    }
    let program = build(is_static)?;
    let to = steps::target_dir().join(folder);
    let made = step("pack", || pack(&program, &to, squeeze))?;
    step("try the package", || try_out(&made, is_static))?;
    if is_static {
        step("pack and try the RPM", || rpm_of(&to))?;
    }
    Ok(made)
}

fn build(is_static: bool) -> Result<PathBuf> {
    // Hosts may have old processors.
    let flags = "-C target-cpu=x86-64";
    let mut folder = steps::target_dir().join("lab-build");
    let mut build = if is_static {
        libc_free::build(flags)?
    } else {
        let mut build = cargo();
        build.arg("build").env("RUSTFLAGS", flags);
        build
    };
    build.args(["--locked", "--release", "--package", "ferrite"]);
    build.env("CARGO_TARGET_DIR", &folder);
    if is_static {
        folder.push(libc_free::TARGET);
    }
    let log = fresh_log("dist-build")?;
    step("build ferrite (release)", || run_logged(&mut build, &log))?;
    Ok(folder.join("release/ferrite"))
}

/// Packs the program of the tests, and tests the packages.
pub(crate) fn check() -> Result<()> {
    packages::ensure(&[needs::DIST, needs::RPM])?;
    let program = Programs::build(&[])?.binary("ferrite", "ferrite")?;
    let to = steps::target_dir().join("dist-check");
    try_out(&pack(&program, &to, Squeeze::Little)?, false)?;
    rpm_of(&to).map(drop)
}

/// Packs the files that [`pack`] has staged as an RPM, and tests it.
fn rpm_of(to: &Path) -> Result<PathBuf> {
    let log = fresh_log("rpm")?;
    let made = rpm::pack(&to.join("root"), to, VERSION, &log)?;
    rpm::try_out(&made, &log)?;
    Ok(made)
}

/// Unpacks the package and runs its program.
fn try_out(made: &Made, is_static: bool) -> Result<()> {
    let log = fresh_log("dist-try")?;
    let folder = made.deb.with_file_name("unpacked");
    run_logged(Command::new("dpkg-deb").arg("-x").arg(&made.deb).arg(&folder), &log)?;
    let program = folder.join("usr/bin/ferrite");
    let told = output(Command::new("readelf").args(["-W", "-d"]).arg(&program))?;
    if is_static && told.contains("(NEEDED)") {
        bail!("the program is not linked statically:\n{told}");
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
        "etc/xen/scripts/block-ferrite",
        "etc/ferrite/ferrite.toml",
        "usr/lib/systemd/system/ferrite.service",
        "usr/share/doc/ferrite/changelog.Debian.gz",
        "usr/share/doc/ferrite/grafana-ferrite.json",
        "man1/ferrite-daemon.1.gz",
        "man1/ferrite-serve.1.gz",
    ] {
        if !listed.contains(path) || !(path.starts_with("man1") || folder.join(path).is_file()) {
            bail!("{path} is not in the packages:\n{listed}");
        }
    }
    Ok(())
}

/// Has systemd verify the units, if it is installed: it reports unknown keys and missing programs.
fn verify_units(root: &Path, log: &Path) -> Result<()> {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return Ok(());
    }
    for unit in ["ferrite.service", "ferrite@.service"] {
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

/// The compression level: a package for a test need not be small.
#[derive(Clone, Copy)]
pub(crate) enum Squeeze {
    Little,
    Well,
}

impl Squeeze {
    /// The option of both xz and dpkg-deb.
    fn level(self) -> &'static str {
        match self {
            Squeeze::Little => "0",
            Squeeze::Well => "6",
        }
    }
}

/// Puts all files in their places below a folder, and packs that.
pub(crate) fn pack(program: &Path, to: &Path, squeeze: Squeeze) -> Result<Made> {
    let log = fresh_log("dist")?;
    let _ = fs::remove_dir_all(to);
    let root = to.join("root");
    stage(program, &root, to, &log)?;
    let name = format!("ferrite-{VERSION}-x86_64");
    let tar = to.join(format!("{name}.tar.xz"));
    let mut pack = Command::new("tar");
    pack.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]);
    pack.arg("--transform").arg(format!("s,^\\.,{name},")).arg("-cJf").arg(&tar);
    pack.env("XZ_OPT", format!("-{}", squeeze.level()));
    run_logged(pack.arg("-C").arg(&root).arg("."), &log)?;
    let deb = to.join(format!("ferrite_{VERSION}_amd64.deb"));
    control(program, &root)?;
    let mut pack = Command::new("dpkg-deb");
    pack.args(["--root-owner-group", "-Zxz"]).arg(format!("-z{}", squeeze.level()));
    pack.arg("--build").arg(&root).arg(&deb);
    run_logged(pack.env("SOURCE_DATE_EPOCH", "0"), &log)?;
    Ok(Made { tar, deb })
}

/// The files in their installed places.
fn stage(program: &Path, root: &Path, scratch: &Path, log: &Path) -> Result<()> {
    let put = |from: &Path, path: &str, mode: u32| -> Result<()> {
        let to = root.join(path);
        fs::create_dir_all(to.parent().context("a file has a folder")?)?;
        fs::copy(from, &to).with_context(|| format!("cannot read {}", from.display()))?;
        fs::set_permissions(&to, fs::Permissions::from_mode(mode))?;
        Ok(())
    };
    let ours = |name: &str| steps::repository().join("dist").join(name);
    put(program, "usr/bin/ferrite", 0o755)?;
    // tapdisk's own is in sbin. xl's scripts search this folder first.
    std::os::unix::fs::symlink("ferrite", root.join("usr/bin/tap-ctl"))?;
    put(&ours("ferrite@.service"), "usr/lib/systemd/system/ferrite@.service", 0o644)?;
    put(&ours("ferrite.service"), "usr/lib/systemd/system/ferrite.service", 0o644)?;
    put(&ours("tmpfiles.conf"), "usr/lib/tmpfiles.d/ferrite.conf", 0o644)?;
    put(&ours("modules-load.conf"), "usr/lib/modules-load.d/ferrite.conf", 0o644)?;
    put(&ours("ferrite.toml"), "etc/ferrite/ferrite.toml", 0o644)?;
    put(&ours("block-ferrite"), "etc/xen/scripts/block-ferrite", 0o755)?;
    put(&ours("copyright"), "usr/share/doc/ferrite/copyright", 0o644)?;
    put(&ours("grafana-ferrite.json"), "usr/share/doc/ferrite/grafana-ferrite.json", 0o644)?;
    let changes = scratch.join("changelog.Debian");
    fs::write(&changes, changelog()?)?;
    run_logged(Command::new("gzip").args(["-9nkf"]).arg(&changes), log)?;
    let packed = scratch.join("changelog.Debian.gz");
    put(&packed, "usr/share/doc/ferrite/changelog.Debian.gz", 0o644)?;
    for page in PAGES {
        let from = steps::repository().join("docs").join(page);
        put(&from, &format!("usr/share/doc/ferrite/{page}"), 0o644)?;
    }
    let generated = scratch.join("generated");
    fs::create_dir_all(&generated)?;
    run_logged(Command::new(program).arg("generate").arg(&generated), log)?;
    for page in fs::read_dir(generated.join("man"))? {
        let page = page?.path();
        run_logged(Command::new("gzip").args(["-9n"]).arg(&page), log)?;
        let name = page.file_name().unwrap_or_default().to_string_lossy();
        let packed = page.with_file_name(format!("{name}.gz"));
        put(&packed, &format!("usr/share/man/man1/{name}.gz"), 0o644)?;
    }
    for (file, path) in [
        ("ferrite.bash", "bash-completion/completions/ferrite"),
        ("_ferrite", "zsh/vendor-completions/_ferrite"),
        ("ferrite.fish", "fish/vendor_completions.d/ferrite.fish"),
    ] {
        put(&generated.join(file), &format!("usr/share/{path}"), 0o644)?;
    }
    Ok(())
}

/// The changes of the newest version, from CHANGELOG.md, in Debian's form.
fn changelog() -> Result<String> {
    let file = steps::repository().join("CHANGELOG.md");
    let text = fs::read_to_string(&file)?;
    let newest = text.split("\n## ").nth(1).context("CHANGELOG.md has no version")?;
    let (title, rest) = newest.split_once('\n').context("CHANGELOG.md has a version alone")?;
    let (version, day) = title.split_once(" - ").context("a version in CHANGELOG.md has no day")?;
    // `date` makes the form of a day that Debian wants.
    let mut date = Command::new("date");
    let day = output(date.env("LC_ALL", "C").args(["-u", "-R", "-d", day.trim()]))?;
    let mut changes = String::new();
    for line in rest.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match line.strip_prefix("- ") {
            Some(change) => changes += &format!("  * {change}\n"),
            None => changes += &format!("    {}\n", line.trim_start()),
        }
    }
    let by = " -- the Ferrite authors <ferrite@localhost>";
    Ok(format!("ferrite ({version}) unstable; urgency=medium\n\n{changes}\n{by}  {}\n", day.trim()))
}

/// The files for dpkg, besides those of the package.
fn control(program: &Path, root: &Path) -> Result<()> {
    let folder = root.join("DEBIAN");
    fs::create_dir_all(&folder)?;
    let needs = needs(&output(Command::new("readelf").args(["-W", "-d", "-V"]).arg(program))?);
    let needs = needs.map(|needs| format!("Depends: {needs}\n")).unwrap_or_default();
    let text = format!(
        "Package: ferrite\nVersion: {VERSION}\nArchitecture: amd64\nSection: admin\n\
         Priority: optional\nMaintainer: the Ferrite authors <ferrite@localhost>\n{needs}\
         Recommends: xen-utils-common\n\
         Conflicts: blktap, blktap-utils\n\
         Description: Xen virtual-disk backend in user space\n \
         Serves raw, VHD and qcow2 images to guests, and makes, copies, merges and\n \
         checks such images.\n"
    );
    fs::write(folder.join("control"), text)?;
    let kept = "/etc/xen/scripts/block-ferrite\n/etc/ferrite/ferrite.toml\n";
    fs::write(folder.join("conffiles"), kept)?;
    for name in ["postinst", "prerm", "postrm"] {
        let script = folder.join(name);
        fs::copy(steps::repository().join("dist").join(name), &script)?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// The libraries that a program needs, by their Debian names, from the output of readelf; none if it is linked
/// statically.
fn needs(dynamic: &str) -> Option<String> {
    dynamic.contains("(NEEDED)").then(|| {
        let versions = dynamic.split("Name: GLIBC_").skip(1).filter_map(|rest| {
            let mut numbers = rest.split_whitespace().next()?.split('.');
            let (major, minor) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
            Some((major, minor))
        });
        let (major, minor): (u32, u32) = versions.max().unwrap_or((2, 0));
        format!("libc6 (>= {major}.{minor}), libgcc-s1")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Except the journal, which is not for hosts.
    #[test]
    fn every_page_that_a_packaged_one_names_is_packaged() {
        let docs = steps::repository().join("docs");
        let mut seen = 0;
        for page in PAGES.iter().filter(|page| page.ends_with(".md")) {
            let text = fs::read_to_string(docs.join(page)).unwrap();
            let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
            let is_page = |link: &&str| !link.is_empty() && !link.starts_with("http");
            for link in links.filter(is_page).filter(|link| !link.starts_with("journal/")) {
                let named = match (page.split_once('/'), link.strip_prefix("../")) {
                    (Some(_), Some(up)) => up.to_owned(),
                    (Some((folder, _)), None) => format!("{folder}/{link}"),
                    (None, _) => link.to_owned(),
                };
                assert!(PAGES.contains(&named.as_str()), "{page} names {link}");
                seen += 1;
            }
        }
        assert!(seen > 20, "{seen}");
    }

    #[test]
    fn a_package_needs_the_newest_libc_that_the_program_names() {
        let text = " 0x0001 (NEEDED)  Shared library: [libc.so.6]\n\
                    0x0010:   Name: GLIBC_2.9  Flags: none  Version: 5\n\
                    0x0020:   Name: GLIBC_2.34  Flags: none  Version: 4\n\
                    0x0030:   Name: GLIBC_2.2.5  Flags: none  Version: 3\n";
        assert_eq!(needs(text).as_deref(), Some("libc6 (>= 2.34), libgcc-s1"));
        assert_eq!(needs("There is no dynamic section in this file.\n"), None);
    }
}
