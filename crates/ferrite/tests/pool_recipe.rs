//! "Two hosts with a witness" of docs/distributed.md, with three addresses of this machine as the three hosts: a host is lost by
//! the death of its processes, and replaced.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output};

use ferrite_testkit::programs::installed;
use ferrite_testkit::wait_until;
use serde_json::Value;
use tempfile::TempDir;

const PAGE: &str = include_str!("../../../docs/distributed.md");
const MIB: usize = 1 << 20;

/// The three hosts, and the page's blocks.
struct Lab {
    dir: TempDir,
    blocks: Vec<String>,
}

/// Processes of one host. They end with it.
#[derive(Default)]
struct Host(Vec<Child>);

impl Drop for Host {
    fn drop(&mut self) {
        for child in &mut self.0 {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Lab {
    fn new() -> Lab {
        // Syncs are no matter here.
        let dir = TempDir::new_in("/dev/shm").unwrap();
        let (_, section) = PAGE.split_once("\n### Two hosts with a witness\n").unwrap();
        let section = section.split("\n## ").next().unwrap();
        // The addresses are this machine's, with free ports.
        let mut text = section.replace("192.0.2.", "127.0.77.");
        for port in [":2379", ":2380", ":10811"] {
            text = text.replace(port, &format!(":{}", free_port()));
        }
        let here = dir.path().display().to_string();
        text = text.replace("/var/lib/", &format!("{here}/$NAME/"));
        text = text.replace("/srv/", &format!("{here}/$NAME/"));
        let (_, toml) = text.split_once("```toml\n").unwrap();
        fs::write(dir.path().join("ferrite.toml"), toml.split("```").next().unwrap()).unwrap();
        let blocks = text.split("```sh\n").skip(1).map(|block| block.split("```").next().unwrap());
        let blocks = blocks.map(str::to_owned).collect();
        for name in ["a", "b", "w", "b2", "c"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Lab { dir, blocks }
    }

    fn shell(&self, script: &str) -> Command {
        let program = Path::new(env!("CARGO_BIN_EXE_ferrite")).parent().unwrap();
        let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("bash");
        shell.args(["-euc", script]).current_dir(self.dir.path()).env("PATH", path);
        shell.env("FERRITE_CONFIG", self.dir.path().join("ferrite.toml")).env_remove("RUST_LOG");
        shell
    }

    fn try_run(&self, script: &str) -> Output {
        self.shell(script).output().unwrap()
    }

    #[track_caller]
    fn run(&self, script: &str) -> String {
        let output = self.try_run(script);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{script}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// A block's last command as a process that stays, on the host with this address.
    fn start(&self, host: &mut Host, (block, last): (usize, &str), ip: u8, edits: &[(&str, &str)]) {
        let mut script = self.blocks[block].clone();
        if let Some((head, rest)) = script.split_once('\n')
            && head.starts_with("NAME=")
        {
            script = rest.to_owned();
        }
        for (from, to) in edits {
            script = script.replace(from, to);
        }
        let (before, command) = script.trim_end().rsplit_once('\n').unwrap_or(("", &script));
        let script = format!("{before}\nexec {} {last}", command.trim_end());
        let log = File::create(self.dir.path().join(format!("log-{block}-{ip}"))).unwrap();
        let mut shell = self.shell(&script);
        shell.env("IP", format!("127.0.77.{ip}")).stderr(log.try_clone().unwrap()).stdout(log);
        host.0.push(shell.spawn().unwrap());
    }

    fn status(&self, of: &str) -> Value {
        serde_json::from_str(&self.run(&format!("ferrite pool status {of} --json"))).unwrap()
    }

    /// The copies of the disk, each with its server and its state.
    fn copies(&self) -> Vec<(String, String)> {
        let status = self.status("lab/web1");
        let copies = status["sets"][0]["copies"].as_array().unwrap().clone();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let of = |copy: &Value| (text(&copy["server"]), text(&copy["state"]));
        let mut all: Vec<_> = copies.iter().map(of).collect();
        all.sort();
        all
    }

    fn image(&self, name: &str, seed: u8) {
        let block = |at: usize| match at % 7 {
            0 => vec![0; 4096],
            _ => [&(at as u64).to_be_bytes()[..], &vec![seed ^ at as u8; 4088]].concat(),
        };
        let mut bytes: Vec<u8> = (0..6 * MIB / 4096).flat_map(block).collect();
        bytes.resize(64 * MIB, 0);
        fs::write(self.dir.path().join("raw"), bytes).unwrap();
        self.run(&format!("ferrite image convert --force raw {name}"));
    }

    /// The file of the disk's copy in a server's folder.
    fn file(&self, server: &str) -> Vec<u8> {
        let folder = self.dir.path().join(server).join("lab");
        let raw = |path: &std::path::PathBuf| path.extension().is_some_and(|it| it == "raw");
        let mut files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        fs::read(files.find(raw).unwrap()).unwrap()
    }
}

#[test]
#[ignore = "ten seconds of etcd's elections: cargo xtask nightly --only pool"]
fn two_hosts_and_a_witness_are_set_up_lose_one_and_replace_it() {
    if installed("etcd", Command::new("etcd").arg("--version").output()).is_none()
        || installed("etcdctl", Command::new("etcdctl").arg("version").output()).is_none()
    {
        return;
    }
    let lab = Lab::new();
    assert_eq!(lab.blocks.len(), 7, "{:#?}", lab.blocks);
    let (mut a, mut b, mut w) = (Host::default(), Host::default(), Host::default());
    for (host, name, ip) in [(&mut a, "a", 1), (&mut b, "b", 2), (&mut w, "w", 3)] {
        lab.start(host, (0, ""), ip, &[("$NAME", name)]);
    }
    let mut made = None;
    wait_until("a quorum", || {
        let output = lab.try_run(&lab.blocks[1]);
        made = output.status.success().then(|| String::from_utf8(output.stdout).unwrap());
        made.is_some()
    });
    let made = made.unwrap();
    let id = made.trim().strip_prefix("pool lab: ").unwrap();
    for (host, name, ip) in [(&mut a, "a", 1), (&mut b, "b", 2)] {
        lab.start(host, (2, ""), ip, &[("$NAME", name), ("--pool ID", &format!("--pool {id}"))]);
    }
    let servers = || lab.status("lab")["servers"].as_array().unwrap().len();
    wait_until("both servers", || servers() == 2);
    lab.image("first.qcow2", 1);
    lab.image("second.qcow2", 77);
    let pair = |first: (&str, &str), second: (&str, &str)| {
        [first, second].map(|(server, state)| (server.to_owned(), state.to_owned())).to_vec()
    };
    lab.run(&lab.blocks[3]);
    assert_eq!(lab.copies(), pair(("a", "in_sync"), ("b", "in_sync")));
    assert!(lab.file("a") == lab.file("b"), "the copies differ");
    drop(b);
    lab.run(&lab.blocks[4]);
    assert_eq!(lab.copies(), pair(("a", "in_sync"), ("b", "out")));
    lab.run(&lab.blocks[5]);
    let mut b = Host::default();
    lab.start(
        &mut b,
        (0, "--initial-cluster-state existing"),
        2,
        &[("$NAME/etcd-lab", "b2/etcd-lab"), ("$NAME", "b")],
    );
    lab.start(&mut b, (2, ""), 2, &[("$NAME", "c"), ("--pool ID", &format!("--pool {id}"))]);
    let has_c = || {
        let status = lab.status("lab");
        let servers = status["servers"].as_array().unwrap().clone();
        servers.iter().any(|server| server["name"] == "c" && !server["address"].is_null())
    };
    wait_until("the new server", has_c);
    lab.run(&lab.blocks[6]);
    // A process that has the disk open has the new copy filled.
    let mut user = Host::default();
    let script = "exec ferrite export nbd pool:lab/web1 --socket s 2>log-user";
    user.0.push(lab.shell(script).spawn().unwrap());
    wait_until("the new copy", || {
        println!("{:?}", lab.copies());
        lab.copies() == pair(("a", "in_sync"), ("c", "in_sync"))
    });
    drop(user);
    lab.run("ferrite image compare second.qcow2 pool:lab/web1");
    assert!(lab.file("a") == lab.file("c"), "the copies differ");
}
