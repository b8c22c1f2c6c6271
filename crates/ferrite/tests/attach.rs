//! `ferrite disk attach`, and guests' names in commands: a program in place of xl, the loopback's xenstore, and a
//! daemon that serves disks in this process.

#[path = "../../daemon/tests/host/mod.rs"]
mod host;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use ferrite_daemon::control::protocol::PhaseName;
use ferrite_testkit::wait_until;
use host::Host;
use serde_json::Value;

/// Records its words, and ends as it is told in the file `answer`.
const XL: &str = "#!/bin/sh
printf '%s\\n' \"$@\" >>\"$XL/words.new\"
case $1 in
block-attach) cp \"$XL/words.new\" \"$XL/words\"; read -r code text <\"$XL/answer\"; echo \"$text\" >&2; exit \"$code\" ;;
esac
";

/// A host with a guest and a daemon, and a folder with the program in place of xl.
struct Lab {
    host: Host,
    xl: PathBuf,
}

impl Lab {
    fn new() -> Lab {
        let mut host = Host::new(2);
        host.start();
        let xl = host.dir.path().join("bin");
        fs::create_dir(&xl).unwrap();
        fs::write(xl.join("xl"), XL).unwrap();
        fs::set_permissions(xl.join("xl"), fs::Permissions::from_mode(0o755)).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, xl.join("answer"), rustix::fs::Mode::RWXU).unwrap();
        Lab { host, xl }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(args).env_remove("RUST_LOG");
        command.env("XENSTORED_PATH", self.host.store_socket()).env("XL", &self.xl);
        command.env("PATH", format!("{}:{}", self.xl.display(), std::env::var("PATH").unwrap()));
        command.current_dir(self.host.image(""));
        command
    }

    /// A command on disks, with this daemon.
    fn disk(&self, args: &[&str]) -> Command {
        let mut command = self.command(&["disk"]);
        command.args(args).arg("--run-dir").arg(self.host.paths().run);
        command
    }

    fn out(&self, args: &[&str]) -> Output {
        self.disk(args).output().unwrap()
    }

    /// Starts `disk attach`, and waits until xl has been called. Returns xl's words.
    fn attach(&self, args: &[&str]) -> (Child, Vec<String>) {
        let mut command = self.disk(&[&["attach"], args].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let words = self.xl.join("words");
        wait_until("xl", || words.exists() || child.try_wait().unwrap().is_some());
        let said = self.words();
        assert!(!said.is_empty(), "xl was not called: {:?}", child.wait_with_output());
        fs::remove_file(words).unwrap();
        (child, said)
    }

    /// The words of all calls of xl since the last time.
    fn words(&self) -> Vec<String> {
        let said = fs::read_to_string(self.xl.join("words.new")).unwrap_or_default();
        let _ = fs::remove_file(self.xl.join("words.new"));
        said.lines().map(str::to_owned).collect()
    }

    /// xl ends with this code and text.
    fn answer(&self, text: &str) {
        fs::write(self.xl.join("answer"), format!("{text}\n")).unwrap();
    }

    fn name(&self, domain: u16, name: &str) {
        let path = format!("/local/domain/{domain}/name");
        self.host.store().write(&path, name.as_bytes()).unwrap();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The words that xl gets for a disk.
fn words(format: &str, access: &str, target: &str) -> Vec<String> {
    let disk = format!(
        "format={format},vdev=xvdb,access={access},backendtype=tap,script=block-ferrite,target={target}"
    );
    ["block-attach", "1", &disk].map(str::to_owned).to_vec()
}

#[test]
fn an_image_is_attached_by_xl_and_detached_by_the_guests_name() {
    let lab = Lab::new();
    let image = lab.host.make_image("a.img", 1 << 20);
    let uuid = "0A1F3C2E-0000-4000-8000-000000000001";
    lab.host.store().write("/local/domain/1/vm", format!("/vm/{uuid}").as_bytes()).unwrap();
    lab.name(1, "web1");
    for guest in ["web1", &uuid.to_lowercase(), "1"] {
        let (child, said) = lab.attach(&[guest, "xvdb", "a.img"]);
        assert_eq!(said, words("raw", "w", image.to_str().unwrap()));
        let params = format!("aio:{}", image.display());
        let disk = lab.host.attach(1, 1, &params);
        lab.answer("0");
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let said = format!("disk web1/xvdb is attached: raw:{}\n", image.display());
        assert_eq!(text(&output.stdout), said);
        // The name in the list is one that commands take.
        let listed = text(&lab.out(&["list"]).stdout);
        let line: Vec<&str> = listed.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(line[..3], ["1/51728", "web1/xvdb", "served"], "{listed}");
        assert_eq!(line.last(), image.to_str().as_ref());
        let json: Value = serde_json::from_slice(&lab.out(&["list", "--json"]).stdout).unwrap();
        assert_eq!(json["disks"][0]["name"], "web1/xvdb");
        let detached = lab.out(&["detach", &format!("{guest}/xvdb")]);
        assert!(detached.status.success(), "{detached:?}");
        lab.host.wait_for_no_disks();
        drop(disk);
    }
}

/// The first block of the page, with this test's folder, guest and daemon.
#[test]
fn the_recipe_of_the_manual_works_as_printed() {
    let lab = Lab::new();
    lab.name(1, "web1");
    let page = include_str!("../../../docs/operations.md");
    let (_, recipe) = page.split_once("## Attach a disk to a running guest\n\n```text\n").unwrap();
    let folder = lab.host.image("").display().to_string();
    let lines = recipe.split("```").next().unwrap().lines();
    let mut seen = 0;
    for line in lines.map(|line| line.split(" #").next().unwrap().replace("/srv/", &folder)) {
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let output = match &words[..] {
            ["disk", "attach", attach @ ..] => {
                let (child, said) = lab.attach(attach);
                let target = said[2].split_once("target=").unwrap().1.to_owned();
                let disk = lab.host.attach(1, 1, &format!("aio:{target}"));
                lab.host.wait_for_phase(&disk, PhaseName::Served);
                lab.answer("0");
                child.wait_with_output().unwrap()
            }
            ["disk", more @ ..] => lab.out(more),
            more => lab.command(more).output().unwrap(),
        };
        assert!(output.status.success(), "{line}: {output:?}");
        seen += 1;
    }
    assert_eq!(seen, 4);
}

#[test]
fn xl_gets_words_by_which_the_daemon_finds_the_same_image() {
    let lab = Lab::new();
    let program = |args: &[&str]| assert!(lab.command(args).output().unwrap().status.success());
    program(&["image", "create", "a.vhd", "2M"]);
    program(&["image", "create", "a,b.qcow2", "2M"]);
    program(&["store", "create", "s.store", "--size", "64M"]);
    program(&["store", "create", "s.store#v", "2M"]);
    lab.host.make_image("raw.vhdx", 4096);
    let at = |name: &str| lab.host.image(name).display().to_string();
    for (image, format, target) in [
        ("a.vhd", "vhd", at("a.vhd")),
        ("a,b.qcow2", "raw", format!("qcow2:{}", at("a,b.qcow2"))),
        ("store:s.store#v", "raw", format!("store:{}#v", at("s.store"))),
        ("raw:raw.vhdx", "raw", format!("raw:{}", at("raw.vhdx"))),
        ("rbd:p/i?id=a", "raw", "nbd:rbd:p/i?id=a".to_owned()),
    ] {
        let (child, said) = lab.attach(&["guest-1", "xvdb", image, "--read-only"]);
        assert_eq!(said, words(format, "r", &target));
        lab.answer("1 libxl: \u{1b}[31mno");
        let output = child.wait_with_output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1));
        let refused = "ferrite: cannot attach guest-1/xvdb: xl ended with exit status: 1: ";
        assert!(said.starts_with(refused) && said.contains("4.19"), "{said}");
        assert!(said.contains("libxl: \\u{1b}[31mno") && !said.contains('\u{1b}'), "{said}");
    }
}

#[test]
fn a_disk_that_cannot_be_served_is_explained_by_the_daemon_and_removed_again() {
    let lab = Lab::new();
    fs::write(lab.host.image("bad.vhd"), vec![0; 4096]).unwrap();
    let (child, _) = lab.attach(&["1", "xvdb", "bad.vhd"]);
    let params = format!("vhd:{}", lab.host.image("bad.vhd").display());
    let disk = lab.host.attach(1, 1, &params);
    lab.host.wait_for_phase(&disk, PhaseName::Failed);
    lab.answer("1 libxl: error: device hotplug script exited");
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.starts_with("ferrite: cannot attach 1/xvdb: cannot open "), "{said}");
    assert!(said.contains("bad.vhd") && !said.contains("libxl"), "{said}");
    assert_eq!(lab.words(), ["block-detach", "1", "51728"]);
}

#[test]
fn what_stands_against_a_disk_is_said_before_xl_is_called() {
    let mut lab = Lab::new();
    lab.host.make_image("a.img", 1 << 20);
    fs::write(lab.host.image("c.vmdk"), "").unwrap();
    fs::write(lab.host.image("end,"), "").unwrap();
    lab.host.attach(2, 1, "");
    lab.name(1, "twin");
    lab.name(2, "twin");
    for (args, code, said) in [
        (["9", "xvdb", "a.img"], 3, "cannot attach 9/xvdb: there is no guest 9\nhelp: xl list "),
        (["web9", "xvdb", "a.img"], 3, "cannot find guest web9: no guest has this name or UUID\n"),
        (["twin", "xvdb", "a.img"], 1, "cannot find guest twin: 2 guests have it: 1, 2\nhelp: "),
        (["2", "xvdb", "a.img"], 4, "cannot attach 2/xvdb: the guest has a disk xvdb already\n"),
        (["1", "xvdb", "none.img"], 3, "cannot attach none.img: "),
        (["1", "xvdb", "none.vhd"], 3, "cannot attach none.vhd: "),
        (["1", "xvdb", "c.vmdk"], 2, "cannot open c.vmdk: images in format vmdk are not read"),
        (["1", "xvdb", "end,"], 2, "cannot attach end,: xl cannot be told this name"),
        (["1", "xvdb", "."], 2, "cannot attach .: it is a directory\nhelp: name a file"),
    ] {
        let output = lab.out(&[&["attach"][..], &args].concat());
        let told = text(&output.stderr);
        assert!(told.starts_with(&format!("ferrite: {said}")), "{args:?}: {told}");
        assert!(told.contains("\nhelp: "), "{told}");
        assert_eq!(output.status.code(), Some(code), "{args:?}");
    }
    let output = lab.out(&["attach", "1", "sdz99", "a.img"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(lab.words().is_empty());
    // The programs of Debian have no xl on this machine, and the test's is not in this PATH.
    let output = lab.disk(&["attach", "1", "xvdb", "a.img"]).env("PATH", "/nowhere").output();
    let told = text(&output.unwrap().stderr);
    assert!(told.contains("cannot attach 1/xvdb: there is no program xl"), "{told}");
    lab.host.stop();
    let output = lab.out(&["attach", "1", "xvdb", "a.img"]);
    let told = text(&output.stderr);
    assert!(told.contains("the daemon cannot be reached"), "{told}");
    assert!(told.contains("help: start it (systemctl start ferrite)"), "{told}");
}

#[test]
fn names_of_guests_do_not_harm_the_terminal_and_what_is_shown_can_be_typed() {
    let lab = Lab::new();
    lab.host.make_image("a.img", 1 << 20);
    let params = format!("aio:{}", lab.host.image("a.img").display());
    let disk = lab.host.attach(1, 0, &params);
    let _front = lab.host.connect(&disk);
    let counters = lab.host.dir.path().join("run/stats");
    let stat = |more: &[&str]| {
        let mut command = lab.command(&["stat", "--stats"]);
        command.arg(&counters).args(more).output().unwrap()
    };
    let long = "x".repeat(3000);
    for (name, shown) in
        [("db-1", "db-1/xvda"), ("\u{1b}[2J", "1/xvda"), (&long, "1/xvda"), ("7", "1/xvda")]
    {
        lab.name(1, name);
        let listed = text(&lab.out(&["list"]).stdout);
        assert_eq!(listed.split_whitespace().nth(8), Some(shown), "{listed}");
        assert!(lab.out(&["show", shown]).status.success());
        let output = stat(&[]);
        let line = text(&output.stdout);
        assert!(line.lines().nth(1).unwrap().starts_with(&format!("{shown} ")), "{line}");
        let again = stat(&["--json", shown]);
        let json: Value = serde_json::from_slice(&again.stdout).unwrap();
        let disk = &json["disks"][0];
        assert_eq!((&disk["name"], &disk["disk"]), (&shown.into(), &"vbd-1-51712".into()));
    }
    let missing = stat(&["guest-2/xvda"]);
    assert_eq!(missing.status.code(), Some(3));
    assert!(text(&missing.stderr).contains("guest-2/xvda cannot be shown"), "{missing:?}");
}
