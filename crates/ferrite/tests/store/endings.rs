//! The ends of commands on stores: in use, without space or rights, interrupted, killed.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferrite_testkit::places::dir_on_disk;

use crate::images::{Place, engine, json, listening};

#[test]
fn a_store_in_use_has_the_exit_code_of_an_image_in_use() {
    let place = Place::new();
    place.store_ok(&["create", "s", "--size", "64M"]);
    place.store_ok(&["create", "s#disk", "1G"]);
    let owner = File::open(place.path("s")).unwrap();
    owner.lock().unwrap();
    for args in [
        &["list", "s"][..],
        &["info", "s#disk"],
        &["create", "s#b", "1G"],
        &["snapshot", "s#disk", "b"],
        &["clone", "s#disk", "b"],
        &["rollback", "s#disk", "b"],
        &["delete", "s#disk"],
        &["rename", "s#disk", "b"],
        &["resize", "s#disk", "2G"],
        &["stats", "s"],
        &["gc", "s"],
        &["compact", "s"],
        &["repair", "s"],
        &["create", "s", "--size", "64M", "--force"],
    ] {
        place.store_fails(4, args);
    }
    place.store_fails(1, &["check", "s"]);
    place.store_fails(1, &["scrub", "s"]);
    // Two commands that only read can run at once.
    owner.unlock().unwrap();
    owner.lock_shared().unwrap();
    place.store_ok(&["list", "s"]);
    place.store_ok(&["check", "s"]);
    place.store_fails(4, &["delete", "s#disk"]);
}

/// Runs a script in a file system of 8 MiB of its own; returns the output. `None`: this user cannot mount one.
pub(crate) fn on_a_small_disk(place: &Place, script: &str) -> Option<String> {
    let root = rustix::process::geteuid().is_root();
    let private: &[&str] = if root { &["-m"] } else { &["-r", "-m"] };
    let unshare = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(private).args(["sh", "-ec", script]).current_dir(place.path("."));
        command.env("F", format!("{} store --engine {}", env!("CARGO_BIN_EXE_ferrite"), engine()));
        command.env_remove("RUST_LOG").output()
    };
    fs::create_dir(place.path("small")).unwrap();
    let mount = "mount -t tmpfs -o size=8m tmpfs small; cd small;";
    if !unshare(mount).is_ok_and(|output| output.status.success()) {
        let demanded = std::env::var_os("FERRITE_TEST_REQUIRE_PEERS").is_some();
        assert!(!(demanded && root), "no mounts for root");
        eprintln!("skipped: no mounts for this user");
        return None;
    }
    let output = unshare(&format!("{mount} exec 2>&1; {script}")).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    Some(text)
}

#[test]
fn a_store_that_there_is_no_space_for_is_not_made_and_one_that_is_there_has_some_of_its_own() {
    let place = Place::new();
    let script = "if $F create s --size 100G; then exit 9; fi
                  ls -A
                  echo listed
                  $F create s --size 32M
                  $F create s --size 32M --force --overcommit
                  $F create s#a 1T
                  head -c 9m /dev/zero > filler || true
                  $F rename s#a b
                  $F resize s#b 2T
                  $F resize s#b 1T --shrink
                  $F rename s#b a
                  $F list s
                  $F create s#b 1T
                  $F delete s#a
                  $F gc s
                  $F check s";
    let Some(text) = on_a_small_disk(&place, script) else { return };
    let (failed, rest) = text.split_once("listed\n").unwrap();
    assert!(failed.contains("No space left") || failed.contains("no storage space"), "{text}");
    // There is no store yet that something could be deleted from.
    assert!(
        failed.contains("help: make room on its file system, or choose a smaller store"),
        "{text}"
    );
    let notes = rest.lines().filter(|line| line.starts_with("note: its file system has"));
    assert_eq!(notes.count(), 1, "{text}");
    assert!(failed.lines().count() == 2 && rest.ends_with("s: in order\n"), "{text}");
}

/// Runs as a user without any rights.
fn as_nobody(place: &Place, args: &[&str]) -> Option<(i32, String)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.arg(env!("CARGO_BIN_EXE_ferrite")).args(["store"]).args(args);
    let output = command.current_dir(place.path(".")).env_remove("RUST_LOG").output().ok()?;
    Some((output.status.code()?, String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn without_rights_nothing_is_made_and_nothing_is_shown() {
    let place = Place::new();
    place.store_ok(&["create", "s", "--size", "64M"]);
    fs::set_permissions(place.path("."), PermissionsExt::from_mode(0o755)).unwrap();
    for args in [
        &["create", "t", "--size", "64M"][..],
        &["create", "s#a", "1G"],
        &["list", "s"],
        &["stats", "s"],
    ] {
        let Some((code, text)) = as_nobody(&place, args) else {
            eprintln!("skipped: only root can run a program as another user");
            return;
        };
        if code == 126 || code == 127 || text.contains("setpriv:") {
            eprintln!("skipped: this program is not for others: {text}");
            return;
        }
        assert_eq!(code, 1, "{args:?}: {text}");
        assert!(text.contains("ermission denied") && text.contains("\nhelp: "), "{text}");
    }
    // A user who may read it can inspect it.
    fs::set_permissions(place.path("s"), PermissionsExt::from_mode(0o644)).unwrap();
    assert_eq!(as_nobody(&place, &["list", "s"]).unwrap().0, 0);
    assert_eq!(as_nobody(&place, &["create", "s#a", "1G"]).unwrap().0, 1);
    place.store_ok(&["create", "s#a", "1G"]);
    for args in [&["rename", "s#a", "b"][..], &["resize", "s#a", "2G"]] {
        let (code, text) = as_nobody(&place, args).unwrap();
        assert!(code == 1 && text.contains("ermission denied"), "{args:?}: {text}");
    }
    assert!(place.store_ok(&["list", "s"]).contains("a     volume  1 GiB"));
}

/// A store so large that making it takes a while: its running program.
fn being_made(dir: &Path) -> Child {
    let mut command = listening();
    command.args(["store", "create", "s", "--size", "8T"]).current_dir(dir);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).env_remove("RUST_LOG");
    let child = command.spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while !fs::metadata(dir.join("s.ferrite-new")).is_ok_and(|file| file.len() > 0) {
        assert!(Instant::now() < end, "it does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

fn store(dir: &Path, args: &[&str]) -> String {
    let mut command = listening();
    command.arg("store").args(args).current_dir(dir).env_remove("RUST_LOG");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_signal_ends_the_making_of_a_store_and_leaves_nothing() {
    let dir = dir_on_disk();
    let child = being_made(dir.path());
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn after_a_kill_there_is_no_store_and_the_next_one_takes_its_place() {
    let dir = dir_on_disk();
    let mut child = being_made(dir.path());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!dir.path().join("s").exists());
    store(dir.path(), &["create", "s", "--size", "64M"]);
    store(dir.path(), &["create", "s#a", "1G"]);
    let listed = json(&store(dir.path(), &["list", "s", "--json"]));
    assert_eq!(listed["volumes"][0]["name"], "a");
    let files: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(files, ["s"]);
}
