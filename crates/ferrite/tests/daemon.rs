//! The daemon as a program, on a machine without Xen, and the examples of its documentation.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ferrite_daemon::config::Config;
use ferrite_serve::path::full::OnFull;
use ferrite_testkit::programs::skipped;
use ferrite_testkit::{openmetrics, wait_until};

fn ferrite(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ferrite")).env_remove("RUST_LOG").args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn operations() -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/operations.md");
    fs::read_to_string(page).unwrap()
}

/// The blocks of one language.
fn blocks(language: &str) -> Vec<String> {
    let page = operations();
    let marker = format!("```{language}\n");
    let opened = page.split(&marker).skip(1);
    opened.map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

/// A daemon, which ends with the test.
struct Daemon {
    child: Child,
    dir: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Daemon {
        Daemon::with("")
    }

    /// A daemon with this configuration, in which `RUN` is replaced by its folder.
    fn with(config: &str) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let config = config.replace("RUN", dir.path().join("run").to_str().unwrap());
        fs::write(dir.path().join("ferrite.toml"), config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["daemon", "--run-dir"]).arg(dir.path().join("run")).env_remove("RUST_LOG");
        command.arg("--config").arg(dir.path().join("ferrite.toml"));
        command.stdout(Stdio::null()).stderr(fs::File::create(dir.path().join("log")).unwrap());
        let daemon = Daemon { child: command.spawn().unwrap(), dir };
        wait_until("a control socket", || daemon.run_dir().join("control.sock").exists());
        wait_until("an answer", || !daemon.disk(&["list"]).stdout.is_empty());
        daemon
    }

    fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    fn disk(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.arg("disk").args(args).arg("--run-dir").arg(self.run_dir());
        command.env_remove("RUST_LOG").output().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether this machine is a Xen host: its daemon would serve real guests.
fn has_xen() -> bool {
    Path::new("/proc/xen/capabilities").exists() || Path::new("/dev/xen/xenbus").exists()
}

#[test]
fn without_xen_it_runs_answers_and_says_so() {
    if has_xen() {
        return;
    }
    let mut daemon = Daemon::start();
    // An empty list must not look like a host without disks.
    let listed = daemon.disk(&["list"]);
    assert_eq!((listed.status.code(), text(&listed.stdout).contains("DISK")), (Some(1), true));
    let said = text(&listed.stderr);
    assert!(said.starts_with("ferrite: cannot tell which disks are attached: no Xen: "), "{said}");
    wait_until("a line in the log", || daemon.log().contains("no Xen"));
    let listed = daemon.disk(&["list", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!((listed.status.code(), &json["disks"]), (Some(1), &serde_json::json!([])));
    assert!(json["no_xen"].is_string(), "{json}");
    let second = ferrite(&["daemon", "--run-dir", daemon.run_dir().to_str().unwrap()]);
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("another ferrite daemon"));
    let pid = rustix::process::Pid::from_child(&daemon.child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.child.wait().unwrap().success());
    let output = daemon.disk(&["list"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("systemctl start ferrite"));
}

#[test]
fn a_disk_has_the_same_names_for_all_commands_and_they_say_what_failed() {
    if has_xen() {
        return;
    }
    let daemon = Daemon::start();
    for name in ["3/xvdb", "3/51728", "vbd-3-51728", "backend/vbd3/3/51728"] {
        for (verb, code, said) in [
            ("show", 3, "ferrite: cannot show disk 3/51728: it is not attached\nhelp: "),
            ("detach", 3, "ferrite: cannot detach disk 3/51728: it is not attached\nhelp: "),
            ("wait", 1, "ferrite: disk 3/51728 is not served: it was not attached in time\nhelp: "),
        ] {
            let more = ["--timeout", "0"].map(str::to_owned);
            let more = if verb == "show" { &[][..] } else { &more };
            let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
            command.args(["disk", verb, name, "--run-dir"]).arg(daemon.run_dir()).args(more);
            let output = command.env_remove("RUST_LOG").output().unwrap();
            let text = text(&output.stderr);
            assert!(text.starts_with(said), "{verb} {name}: {text}");
            // People do not speak JSON-RPC.
            assert!(
                text.contains("ferrite disk list shows") && !text.contains("disk.list"),
                "{text}"
            );
            assert_eq!(output.status.code(), Some(code), "{verb} {name}");
        }
    }
    let run_dir = daemon.run_dir();
    let upgrade = |more: &[&str]| {
        let all = [&["upgrade", "--run-dir", run_dir.to_str().unwrap()], more].concat();
        ferrite(&all)
    };
    assert_eq!(text(&upgrade(&[]).stdout), "no disk is served\n");
    // The upgrade does not begin.
    for (binary, why) in [("/nothere", "No such file"), ("/etc/passwd", "not an executable file")] {
        let output = upgrade(&["--binary", binary]);
        let said = text(&output.stderr);
        let expected = format!("ferrite: cannot upgrade disks: cannot run {binary}: ");
        assert!(said.starts_with(&expected) && said.contains(why), "{said}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    }
}

#[test]
fn a_wrong_configuration_is_named_and_the_daemon_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ferrite.toml");
    let (path, run) = (file.to_str().unwrap(), dir.path().join("run"));
    fs::write(&file, "[disks]\nqueue = 2\n").unwrap();
    for args in [
        &["daemon", "--config", path, "--check-config"][..],
        &["daemon", "--config", path, "--run-dir", run.to_str().unwrap()],
    ] {
        let output = ferrite(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let said = text(&output.stderr);
        for word in [path, "disks.queue", "there is no such key", "did you mean queues?"] {
            assert!(said.contains(word), "{word}: {said}");
        }
    }
    assert!(!run.exists());
    fs::write(&file, "[disks]\nqueues = 2\n").unwrap();
    let output = ferrite(&["daemon", "--config", path, "--check-config"]);
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("is right"));
    // Probable mistakes are reported; storage may appear later, so they are accepted.
    fs::write(&file, "image_folders = [\"/nothere\"]\n[images.\"/not/there.vhd\"]\n").unwrap();
    let output = ferrite(&["daemon", "--config", path, "--check-config"]);
    assert!(output.status.success());
    assert!(text(&output.stdout).ends_with("can be used; warnings: 2\n"));
    let said = text(&output.stderr);
    for key in ["image_folders: cannot find /nothere: ", "images.\"/not/there.vhd\": cannot find"] {
        assert!(said.contains(&format!("ferrite: warning: {path}: {key}")), "{said}");
    }
    // Without a file that was asked for, the daemon takes the defaults.
    if !Path::new("/etc/ferrite/ferrite.toml").exists() {
        let none = ferrite(&["daemon", "--check-config"]);
        assert!(none.status.success(), "{none:?}");
        let said = "there is no /etc/ferrite/ferrite.toml: every key has its default\n";
        assert_eq!(text(&none.stdout), said);
    }
    let missing = ferrite(&["daemon", "--check-config", "--config", "/nonexistent"]);
    assert_eq!(missing.status.code(), Some(2));
}

#[test]
fn the_configuration_that_is_shown_is_right_and_has_every_default() {
    let shown = blocks("toml");
    let parse = |text: &String| Config::parse(text, Path::new("operations.md")).unwrap();
    let [config, full, _] = &shown.iter().map(parse).collect::<Vec<_>>()[..] else {
        panic!("the configuration, what there is for a full disk, and a limit: {shown:?}")
    };
    let waits = full.images.values().map(|disk| disk.on_full).collect::<Vec<_>>();
    assert_eq!((full.disks.on_full, waits), (OnFull::Error, vec![OnFull::Wait]));
    let defaults = Config::default();
    assert_eq!(config.image_folders, defaults.image_folders);
    assert!(config.metrics_socket.is_some() && defaults.metrics_socket.is_none());
    let mut disks = config.disks.clone();
    // It has no default value.
    disks.cpu = None;
    assert_eq!(disks, defaults.disks);
    assert_eq!(config.host.map_budget, defaults.host.map_budget);
    assert_eq!(config.images.len(), 1);
}

/// The command in watching.md, run with a daemon.
fn shown_scrape(daemon: &Daemon) -> Output {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/watching.md");
    let page = fs::read_to_string(page).unwrap();
    let line = page.lines().find(|line| line.starts_with("curl ")).unwrap();
    let line = line.replace("/run/ferrite", daemon.run_dir().to_str().unwrap());
    Command::new("sh").args(["-ec", &line]).output().unwrap()
}

#[test]
fn metrics_are_there_where_the_configuration_says_so() {
    if Command::new("curl").arg("-V").output().is_err() {
        return skipped("curl is not installed");
    }
    let daemon = Daemon::with("metrics_socket = \"RUN/metrics.sock\"");
    fs::create_dir_all(daemon.run_dir().join("stats")).unwrap();
    fs::write(daemon.run_dir().join("stats/vbd-1-1"), "torn").unwrap();
    let scraped = shown_scrape(&daemon);
    assert!(scraped.status.success(), "{scraped:?}");
    let families = openmetrics::parse(&text(&scraped.stdout)).unwrap();
    let value = |name: &str| {
        let samples = families.iter().flat_map(|family| &family.samples);
        samples.filter(|sample| sample.name == name).map(|sample| sample.value).next()
    };
    assert_eq!(value("ferrite_skipped_files"), Some(1.0));
    assert!(value("ferrite_daemon_cpu_seconds_total").is_some());
    assert!(value("ferrite_daemon_start_time_seconds") > Some(1e9));
    drop(daemon);
    // Off by default; and a socket that cannot be made does not prevent serving disks.
    let daemon = Daemon::start();
    assert!(!shown_scrape(&daemon).status.success());
    drop(daemon);
    let daemon = Daemon::with("metrics_socket = \"/proc/none/metrics.sock\"");
    assert!(daemon.log().contains("there are no metrics on /proc/none/metrics.sock"));
}

#[test]
fn the_commands_that_are_shown_work() {
    if has_xen() {
        return;
    }
    let daemon = Daemon::start();
    let program = Path::new(env!("CARGO_BIN_EXE_ferrite")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut seen = 0;
    for line in blocks("sh").iter().flat_map(|block| block.lines()) {
        let run_dir = daemon.run_dir();
        let line = line.replace("/run/ferrite", run_dir.to_str().unwrap());
        let line = match line.starts_with("ferrite ") {
            true => format!("{line} --run-dir {}", run_dir.display()),
            false => line,
        };
        if line.contains("socat") && Command::new("socat").arg("-V").output().is_err() {
            continue;
        }
        let output = Command::new("sh").args(["-ec", &line]).env("PATH", &path).output().unwrap();
        // The listing reports that there is no Xen.
        let error = text(&output.stderr);
        let says =
            error.contains("cannot tell which disks are attached") && error.contains("no Xen");
        assert!(output.status.success() || says, "{line}: {}", text(&output.stderr));
        assert!(!output.stdout.is_empty(), "{line}");
        seen += 1;
    }
    assert!(seen >= 2);
    // The lines that name a disk, or the system's files, are commands.
    for line in ["disk show 3/xvdb", "disk detach 3/51728", "daemon --check-config"] {
        let args: Vec<&str> = line.split(' ').chain(["--help"]).collect();
        assert!(ferrite(&args).status.success(), "{line}");
    }
}

/// The script with replacements for xenstore's programs and the daemon's.
fn script(dir: &Path, waited: &str, with_daemon: bool) -> (Output, String) {
    use std::os::unix::fs::PermissionsExt as _;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist/block-ferrite");
    let socket = dir.join("control.sock");
    let source = fs::read_to_string(source).unwrap();
    assert!(source.contains("/run/ferrite/control.sock"));
    let source = source.replace("/run/ferrite/", &format!("{}/", dir.display()));
    let written = dir.join("written");
    let _ = fs::remove_file(&written);
    for (name, body) in [
        ("block-ferrite", source),
        ("xenstore-write", format!("#!/bin/sh\nprintf '%s\\n' \"$@\" >>{}\n", written.display())),
        (
            "ferrite",
            format!(
                "#!/bin/sh\n[ \"$*\" = 'disk wait backend/vbd3/3/51728' ] || exit 9\n{waited}\n"
            ),
        ),
    ] {
        fs::write(dir.join(name), body).unwrap();
        fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }
    let _socket = with_daemon.then(|| std::os::unix::net::UnixListener::bind(&socket).unwrap());
    let path = format!("{}:{}", dir.display(), std::env::var("PATH").unwrap());
    let output = Command::new("sh")
        .arg(dir.join("block-ferrite"))
        .arg("add")
        .env("PATH", path)
        .env("XENBUS_PATH", "backend/vbd3/3/51728")
        .output()
        .unwrap();
    let _ = fs::remove_file(&socket);
    (output, fs::read_to_string(&written).unwrap_or_default())
}

#[test]
fn the_script_connects_what_is_served_and_says_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let connected = "backend/vbd3/3/51728/hotplug-status\nconnected\n";
    let (output, written) = script(dir.path(), "exit 0", true);
    assert!(output.status.success());
    assert_eq!(written, connected);
    let (output, written) = script(dir.path(), "echo 'ferrite: no image' >&2; exit 1", true);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr).trim(), "ferrite: no image");
    let expected = "backend/vbd3/3/51728/hotplug-error\nferrite: no image \n\
                    backend/vbd3/3/51728/hotplug-status\nerror\n";
    assert_eq!(written, expected);
    // A disk that is served by hand is offered already.
    let (output, written) = script(dir.path(), "exit 1", false);
    assert!(output.status.success());
    assert_eq!(written, connected);
    // A disk that a daemon has begun to serve is asked for, also during a restart of the daemon.
    fs::create_dir(dir.path().join("disks")).unwrap();
    fs::write(dir.path().join("disks/vbd-3-51728.json"), "{}").unwrap();
    let (output, _) = script(dir.path(), "exit 1", false);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_disk_is_waited_for_while_its_daemon_is_started_again_and_not_where_none_was() {
    use std::io::{BufRead as _, BufReader, Write as _};
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().to_str().unwrap().to_owned();
    let wait = ["disk", "wait", "backend/vbd3/3/51728", "--timeout", "60", "--run-dir", &run];
    // No daemon has begun to serve it.
    assert!(!ferrite(&wait).status.success());
    fs::create_dir(dir.path().join("disks")).unwrap();
    fs::write(dir.path().join("disks/vbd-3-51728.json"), "{}").unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| ferrite(&wait));
        let socket = dir.path().join("control.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // A daemon that ends before it answers, and is killed later.
        drop(listener.accept().unwrap());
        drop(listener);
        std::thread::sleep(std::time::Duration::from_millis(300));
        fs::remove_file(&socket).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
        let disk =
            r#"{"disk":{"domid":3,"devid":51728},"phase":"served","since":0,"minor":0,"starts":1}"#;
        let answer = format!(r#"{{"jsonrpc":"2.0","id":1,"result":{{"disk":{disk}}}}}"#);
        stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
        let output = waiting.join().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
    });
}
