//! The recipes of docs/access.md that need a daemon and a guest. Those with images alone are run by `clients/by_tls.rs` and
//! `clients/disks.rs`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Child, Command, Stdio};

use ferrite_nbd::wire::{option, reply};
use ferrite_testkit::nbd::info;
use ferrite_testkit::{PATIENCE, wait_until};

use crate::far::{At, Server, free_port};
use crate::host::{self, Host, works};
use crate::roles;
use crate::tls::{self, Pki};

const PAGE: &str = include_str!("../../../../docs/access.md");

/// The blocks of this kind below a title.
#[track_caller]
fn blocks(title: &str, kind: &str) -> Vec<String> {
    let (_, section) = PAGE.split_once(&format!("\n### {title}\n")).unwrap();
    let section = section.split("\n## ").next().unwrap().split("\n### ").next().unwrap();
    let begin = format!("```{kind}\n");
    let blocks = section.split(&begin).skip(1);
    blocks.map(|block| block.split("```").next().unwrap().to_owned()).collect()
}

/// A host whose guest `web1` has no disk yet, and a daemon.
struct Site {
    host: Host,
    daemon: Child,
}

impl Site {
    fn new(environment: &[(&str, &str)]) -> Site {
        let host = Host::new(1);
        host.store().write("/local/domain/1/name", b"web1").unwrap();
        let daemon = host.spawn_with(None, environment);
        wait_until("the daemon", || host.status().is_ok_and(|status| status.xen));
        Site { host, daemon }
    }

    /// A command of the page, with this host's daemon.
    fn command(&self, line: &str) -> Command {
        let words = line.split_whitespace().map(|word| word.trim_matches('\'').to_owned());
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(words.skip(1)).arg("--run-dir").arg(self.host.paths().run);
        command.env_remove("RUST_LOG").env("XENSTORED_PATH", self.host.store_socket());
        command
    }

    fn end(mut self) {
        self.host.end_processes();
        let _ = self.daemon.wait();
    }
}

#[test]
fn the_recipe_for_a_running_disk_works() {
    let Some(pki) = Pki::new() else { return };
    let site = Site::new(&[(roles::PROGRAM, env!("CARGO_BIN_EXE_ferrite"))]);
    let disk = roles::attach(&site.host, 1);
    let mut front = site.host.connect(&disk);
    works(&mut front, 6);
    let port = free_port();
    let lines = blocks("Give a running disk", "text").remove(0);
    let lines = lines
        .replace("192.0.2.5:10809", &format!("127.0.0.1:{port}"))
        .replace("/etc/ferrite/tls", pki.path("server").to_str().unwrap());
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!(lines.len(), 3);
    assert!(tls::ok(&mut site.command(lines[0])).contains(&format!("127.0.0.1:{port}")));
    let listed = tls::ok(&mut site.command(lines[1]));
    assert!(listed.contains("web1/xvda") && listed.contains("known"), "{listed}");
    // The export is called as the image's file.
    let mut outward = tls::Outward::to(&pki, "client", "localhost", port);
    let answers = outward.client.option(option::INFO, &info("1"));
    assert_eq!(answers.last().unwrap().0, reply::ACK, "{answers:?}");
    assert_eq!(outward.client.go(true).0, 4 << 20);
    assert_eq!(outward.client.read(4096, 4096), [6; 4096]);
    tls::ok(&mut site.command(lines[2]));
    assert!(outward.client.is_closed());
    assert!(tls::ok(&mut site.command(lines[1])).lines().count() == 1);
    site.end();
}

/// Writes down its last word, and waits until the test has attached the disk.
const XL: &str = "#!/bin/sh
test \"$1\" = block-attach || exit 0
for word do :; done
echo \"$word\" >\"$XL/new\" && mv \"$XL/new\" \"$XL/disk\"
while ! test -e \"$XL/attached\"; do sleep 0.1; done
";

#[test]
fn the_recipe_for_a_guests_disk_on_another_host_works() {
    let Some(pki) = Pki::new() else { return };
    let (port, folder) = (free_port(), pki.path("client"));
    let image = pki.path("remote.qcow2");
    tls::ok(&mut tls::ferrite(&["image", "create", image.to_str().unwrap(), "4M"]));
    let certificates = pki.path("server");
    let more = ["--tls", certificates.to_str().unwrap()];
    let _server = Server::ours(&image, At::Port("127.0.0.1", port), &more);
    let here = |text: &str| {
        text.replace("storage.example", &format!("localhost:{port}"))
            .replace("/etc/ferrite/client", folder.to_str().unwrap())
    };
    let toml = pki.path("ferrite.toml");
    fs::write(&toml, here(&blocks("Attach it to a guest", "toml")[0])).unwrap();
    let site = Site::new(&[(host::CONFIG, toml.to_str().unwrap())]);
    let lines = here(&blocks("Attach it to a guest", "text")[0]);
    let lines: Vec<&str> = lines.lines().collect();
    // xl has the daemon's script run, and writes the target into the disk's parameters.
    let target = |disk: &str| {
        assert!(disk.contains("format=raw") && disk.contains("script=block-ferrite"), "{disk}");
        format!(
            "aio:{}",
            disk.split_once("target=").unwrap().1.trim_end_matches(['"', ']', ' ', '\n'])
        )
    };
    let serves = |index: u32, disk: &str| {
        let disk = site.host.attach(1, index, &target(disk));
        let mut front = site.host.connect(&disk);
        works(&mut front, 7 + index as u8);
        front.close(PATIENCE).unwrap();
        disk
    };
    assert!(lines[0].starts_with("disk = "));
    site.host.detach(&serves(0, lines[0]));
    site.host.wait_for_no_disks();
    let bin = pki.path("bin");
    fs::create_dir(&bin).unwrap();
    fs::write(bin.join("xl"), XL).unwrap();
    fs::set_permissions(bin.join("xl"), fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let mut attach = site.command(lines[1]);
    let attach = attach.env("XL", &bin).env("PATH", path).stdout(Stdio::piped()).spawn().unwrap();
    wait_until("xl", || bin.join("disk").exists());
    serves(1, &fs::read_to_string(bin.join("disk")).unwrap());
    fs::write(bin.join("attached"), "").unwrap();
    let output = attach.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && said.contains("disk web1/xvdb is attached"), "{said}");
    site.end();
}
