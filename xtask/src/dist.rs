//! `cargo xtask dist`: the files for a host, as a tar and as a Debian package.
//!
//! The package is written with dpkg-deb, which every Debian machine has. cargo-deb would have to be built first, needs
//! as many lines of description, and makes the same layout.

use crate::installed;
use crate::libc_free;
use crate::needs;
use crate::programs::Programs;
use crate::rpm;
use crate::unpacked;
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
const PAGES: [&str; 31] = [
    "operations.md",
    "watching.md",
    "serve.md",
    "images.md",
    "store.md",
    "nbd.md",
    "network.md",
    "access.md",
    "backup.md",
    "distributed.md",
    "xapi.md",
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
    "internals/backups.md",
    "internals/dirty-map.md",
    "internals/migration.md",
    "internals/mirror.md",
    "internals/processes.md",
    "internals/formats.md",
    "internals/send-stream.md",
    "internals/store.md",
    "internals/trace.md",
];

/// The program of XAPI's plug-ins.
const PLUGIN: &str = "plugin.py";
/// XAPI's plug-ins, by their folders below dist/xapi and below XAPI's own.
const PLUGINS: [&str; 2] = ["datapath/ferrite", "volume/org.xen.xapi.storage.ferrite"];

/// The helper for disks on Ceph. Its package, too.
pub(crate) const HELPER: &str = "ferrite-rbd";

/// The packages that were made.
pub(crate) struct Made {
    pub(crate) tar: PathBuf,
    pub(crate) deb: PathBuf,
    /// The package with the program's debug information, if it has any.
    pub(crate) debug: Option<PathBuf>,
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
    step("try the package", || unpacked::try_out(&made, is_static))?;
    step("install and remove the package", || {
        installed::try_out(&made.deb, &fresh_log("dist-installed")?)
    })?;
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
    // The helper opens librbd at run time: a static program cannot.
    build.args((!is_static).then_some(["--package", HELPER]).into_iter().flatten());
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
    let program = Programs::build_ferrite()?;
    let to = steps::target_dir().join("dist-check");
    let made = pack(&program, &to, Squeeze::Little)?;
    if made.debug.is_none() {
        bail!("{} has no debug information", program.display());
    }
    unpacked::try_out(&made, false)?;
    installed::try_out(&made.deb, &fresh_log("dist-installed")?)?;
    rpm_of(&to).map(drop)
}

/// Packs the files that [`pack`] has staged as an RPM, and tests it.
fn rpm_of(to: &Path) -> Result<PathBuf> {
    let log = fresh_log("rpm")?;
    let made = rpm::pack(&to.join("root"), to, VERSION, &log)?;
    rpm::try_out(&made, &log)?;
    Ok(made)
}

/// Whether a program has debug information.
pub(crate) fn has_debug_information(program: &Path) -> Result<bool> {
    let sections = output(Command::new("readelf").args(["-W", "-S"]).arg(program))?;
    Ok(sections.contains(".debug_info"))
}

/// Where debuggers look for the debug information of a program: by its build ID, if it has one, otherwise by its path.
pub(crate) fn debug_path(program: &Path) -> Result<String> {
    let notes = output(Command::new("readelf").args(["-W", "-n"]).arg(program))?;
    let id = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: "));
    Ok(match id.and_then(|id| id.trim().split_at_checked(2)) {
        Some((first, rest)) => format!("usr/lib/debug/.build-id/{first}/{rest}.debug"),
        None => "usr/lib/debug/usr/bin/ferrite.debug".to_owned(),
    })
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
    fs::create_dir_all(to)?;
    // A static build has none.
    let helper = Some(program.with_file_name(HELPER)).filter(|helper| helper.exists());
    let (program, debug) = split(program, to, &log)?;
    let program = &program;
    stage(program, &root, to, &log)?;
    if let Some(helper) = helper {
        run_logged(
            Command::new("strip").arg("-o").arg(root.join("usr/bin").join(HELPER)).arg(helper),
            &log,
        )?;
    }
    let (_, day) = newest_version()?;
    let day = output(Command::new("date").args(["-u", "+%s", "-d", &day]))?;
    let day = day.trim();
    let name = format!("ferrite-{VERSION}-x86_64");
    let tar = to.join(format!("{name}.tar.xz"));
    let mut pack = Command::new("tar");
    pack.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    pack.arg(format!("--mtime=@{day}"));
    pack.arg("--transform").arg(format!("s,^\\.,{name},")).arg("-cJf").arg(&tar);
    pack.env("XZ_OPT", format!("-{}", squeeze.level()));
    run_logged(pack.arg("-C").arg(&root).arg("."), &log)?;
    let deb = to.join(format!("ferrite_{VERSION}_amd64.deb"));
    control(program, &root)?;
    let build = |root: &Path, deb: &Path| {
        let mut pack = Command::new("dpkg-deb");
        pack.args(["--root-owner-group", "-Zxz"]).arg(format!("-z{}", squeeze.level()));
        pack.arg("--build").arg(root).arg(deb);
        run_logged(pack.env("SOURCE_DATE_EPOCH", day), &log)
    };
    build(&root, &deb)?;
    let debug = debug.map(|debug| -> Result<PathBuf> {
        let root = to.join("root-debug");
        let place = root.join(debug_path(program)?);
        fs::create_dir_all(place.parent().context("a file has a folder")?)?;
        fs::rename(&debug, &place)?;
        fs::set_permissions(&place, fs::Permissions::from_mode(0o644))?;
        stage_debug_package(&root)?;
        let deb = to.join(format!("ferrite-dbgsym_{VERSION}_amd64.deb"));
        build(&root, &deb)?;
        Ok(deb)
    });
    Ok(Made { tar, deb, debug: debug.transpose()? })
}

/// The program without what only debuggers read, and that in a file of its own, if there is any.
fn split(program: &Path, to: &Path, log: &Path) -> Result<(PathBuf, Option<PathBuf>)> {
    let stripped = to.join("ferrite");
    if !has_debug_information(program)? {
        run_logged(Command::new("strip").arg("-o").arg(&stripped).arg(program), log)?;
        return Ok((stripped, None));
    }
    let name = debug_path(program)?;
    let debug = to.join(Path::new(&name).file_name().context("a file has a name")?);
    let mut keep = Command::new("objcopy");
    run_logged(keep.arg("--only-keep-debug").arg(program).arg(&debug), log)?;
    let mut strip = Command::new("objcopy");
    strip.arg("--strip-unneeded").arg(format!("--add-gnu-debuglink={}", debug.display()));
    run_logged(strip.arg(program).arg(&stripped), log)?;
    Ok((stripped, Some(debug)))
}

/// The files of the package with debug information, besides that itself.
fn stage_debug_package(root: &Path) -> Result<()> {
    let folder = root.join("usr/share/doc");
    fs::create_dir_all(&folder)?;
    // It is installed with the package of the same version only, whose folder has licence and changes.
    std::os::unix::fs::symlink("ferrite", folder.join("ferrite-dbgsym"))?;
    fs::create_dir_all(root.join("DEBIAN"))?;
    let text = format!(
        "Package: ferrite-dbgsym\nVersion: {VERSION}\nArchitecture: amd64\nSection: debug\n\
         Priority: optional\nAuto-Built-Package: debug-symbols\n\
         Maintainer: the Ferrite authors <ferrite@localhost>\n\
         Depends: ferrite (= {VERSION})\nDescription: debug symbols for ferrite\n"
    );
    fs::write(root.join("DEBIAN/control"), text)?;
    Ok(())
}

/// The names of tapdisk's tools, as links to the program. xl's scripts search bin first.
const TOOLS: [(&str, &str); 5] = [
    ("ferrite", "usr/bin/tap-ctl"),
    ("../bin/ferrite", "usr/sbin/tap-ctl"),
    ("ferrite", "usr/bin/vhd-util"),
    ("../bin/ferrite", "usr/sbin/td-util"),
    ("../bin/ferrite", "usr/sbin/cbt-util"),
];

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
    // XAPI's storage manager calls these by their whole paths.
    fs::create_dir_all(root.join("usr/sbin"))?;
    for (target, link) in TOOLS {
        std::os::unix::fs::symlink(target, root.join(link))?;
    }
    for plugin in PLUGINS {
        stage_plugin(plugin, root)?;
    }
    put(&ours("ferrite@.service"), "usr/lib/systemd/system/ferrite@.service", 0o644)?;
    put(&ours("ferrite.service"), "usr/lib/systemd/system/ferrite.service", 0o644)?;
    put(&ours("ferrite-pool@.service"), "usr/lib/systemd/system/ferrite-pool@.service", 0o644)?;
    put(&ours("tmpfiles.conf"), "usr/lib/tmpfiles.d/ferrite.conf", 0o644)?;
    put(&ours("modules-load.conf"), "usr/lib/modules-load.d/ferrite.conf", 0o644)?;
    put(&ours("ferrite.toml"), "etc/ferrite/ferrite.toml", 0o644)?;
    put(&ours("block-ferrite"), "etc/xen/scripts/block-ferrite", 0o755)?;
    put(&ours("vif-ferrite"), "etc/xen/scripts/vif-ferrite", 0o755)?;
    put(&ours("copyright"), "usr/share/doc/ferrite/copyright", 0o644)?;
    put(&ours("lintian-overrides"), "usr/share/lintian/overrides/ferrite", 0o644)?;
    put(&ours("grafana-ferrite.json"), "usr/share/doc/ferrite/grafana-ferrite.json", 0o644)?;
    let changes = scratch.join("changelog");
    fs::write(&changes, changelog()?)?;
    run_logged(Command::new("gzip").args(["-9nkf"]).arg(&changes), log)?;
    let packed = scratch.join("changelog.gz");
    put(&packed, "usr/share/doc/ferrite/changelog.gz", 0o644)?;
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
        let (_, section) = name.rsplit_once('.').context("a page has a section")?;
        put(&packed, &format!("usr/share/man/man{section}/{name}.gz"), 0o644)?;
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

/// One of XAPI's plug-ins: a file, which is the same for both, and links to it by the names of its calls.
fn stage_plugin(plugin: &str, root: &Path) -> Result<()> {
    let from = steps::repository().join("dist/xapi").join(plugin);
    let to = root.join("var/lib/xapi/storage-scripts").join(plugin);
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(&from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        match fs::read_link(&from) {
            Ok(target) if target == Path::new(PLUGIN) => std::os::unix::fs::symlink(target, &to)?,
            _ => {
                fs::copy(&from, &to)?;
                fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
            }
        }
    }
    Ok(())
}

/// The newest version that has a day in CHANGELOG.md, with its changes, and the day.
fn newest_version() -> Result<(String, String)> {
    let text = fs::read_to_string(steps::repository().join("CHANGELOG.md"))?;
    // Changes that are not released yet have no day.
    let dated = |part: &&str| part.lines().next().is_some_and(|title| title.contains(" - "));
    let newest = text.split("\n## ").skip(1).find(dated);
    let newest = newest.context("CHANGELOG.md has no version with a day")?;
    let title = newest.lines().next().unwrap_or_default();
    let (_, day) = title.split_once(" - ").context("a version in CHANGELOG.md has no day")?;
    Ok((newest.to_owned(), day.trim().to_owned()))
}

/// The changes of the newest version, from CHANGELOG.md, in Debian's form.
fn changelog() -> Result<String> {
    let (newest, day) = newest_version()?;
    let (title, rest) = newest.split_once('\n').context("CHANGELOG.md has a version alone")?;
    let (version, _) = title.split_once(" - ").context("a version in CHANGELOG.md has no day")?;
    // `date` makes the form of a day that Debian wants.
    let mut date = Command::new("date");
    let day = output(date.env("LC_ALL", "C").args(["-u", "-R", "-d", day.trim()]))?;
    let mut items: Vec<String> = Vec::new();
    for line in rest.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        match (line.strip_prefix("- "), items.last_mut()) {
            (None, Some(item)) => *item += &format!(" {}", line.trim_start()),
            (change, _) => items.push(change.unwrap_or(line).to_owned()),
        }
    }
    let changes: String = items.iter().map(|item| wrapped(item)).collect();
    let by = " -- the Ferrite authors <ferrite@localhost>";
    Ok(format!("ferrite ({version}) unstable; urgency=medium\n\n{changes}\n{by}  {}\n", day.trim()))
}

/// An item of Debian's changelog, whose lines have at most 80 characters.
fn wrapped(item: &str) -> String {
    const WIDTH: usize = 80;
    let (mut text, mut line) = (String::new(), "  *".to_owned());
    for word in item.split_whitespace() {
        if line.len() + 1 + word.len() > WIDTH {
            text += &format!("{line}\n");
            line = "   ".to_owned();
        }
        line += &format!(" {word}");
    }
    format!("{text}{line}\n")
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
         Suggests: librbd1\n\
         Conflicts: blktap, blktap-utils\n\
         Description: Xen virtual-disk backend in user space\n \
         Serves raw, VHD and qcow2 images to guests, and makes, copies, merges and\n \
         checks such images.\n"
    );
    fs::write(folder.join("control"), text)?;
    let kept =
        "/etc/xen/scripts/block-ferrite\n/etc/xen/scripts/vif-ferrite\n/etc/ferrite/ferrite.toml\n";
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
    fn a_plug_in_is_packed_as_a_program_and_a_link_for_each_call() {
        let root = tempfile::tempdir().unwrap();
        for (plugin, calls) in PLUGINS.iter().zip([15, 21]) {
            stage_plugin(plugin, root.path()).unwrap();
            let folder = root.path().join("var/lib/xapi/storage-scripts").join(plugin);
            let entries = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            let (links, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_symlink());
            assert_eq!((links.len(), files.len()), (calls, 1), "{plugin}");
            for path in links {
                let mode = fs::metadata(&path).unwrap().permissions().mode();
                assert_eq!(mode & 0o777, 0o755, "{}", path.display());
            }
        }
    }

    #[test]
    fn the_changelog_of_the_package_has_debians_form() {
        let text = changelog().unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].starts_with("ferrite (") && lines[0].ends_with("; urgency=medium"),
            "{text}"
        );
        assert!(lines.last().is_some_and(|line| line.starts_with(" -- ")), "{text}");
        let item = |line: &&str| line.starts_with("  * ") || line.starts_with("    ");
        assert!(lines[2..lines.len() - 2].iter().all(item), "{text}");
        assert!(lines.len() > 10 && lines.iter().all(|line| line.len() <= 80), "{text}");
        assert_eq!(wrapped(&"abcdefghi ".repeat(9)).lines().count(), 2);
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
