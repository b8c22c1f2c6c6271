//! A loopback host whose guests have disks on servers of NBD, and these servers.

use std::fs::{self, File};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use ferrite_daemon::config::CONFIGURED_BY;
use ferrite_daemon::keepers::Keepers;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::programs::installed;
use ferrite_testkit::wait_until;
use rustix::process::{Pid, Signal, kill_process};

use crate::deep::{self, Deep};
use crate::host::{self, CONFIG, Host, NBD_SERVERS, RBD};
use crate::roles::{self, Roles};

/// Runs a daemon, if the environment asks for one.
pub(crate) fn be_a_daemon() {
    host::be_a_daemon_with(|run| Arc::new(Keepers::new(run, Box::new(Roles))));
}

// A keeper starts tunnels from its own program, which is this one in a test.
ferrite_loopback::before_main!(be_a_tunnel);

fn be_a_tunnel() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == "tunnel") {
        let failed =
            Command::new(env!("CARGO_BIN_EXE_ferrite")).arg("tunnel").args(arguments).exec();
        eprintln!("tunnel: {failed}");
        std::process::exit(1);
    }
}

/// The host, with a daemon that is a process.
pub(crate) struct Far {
    pub(crate) host: Host,
    daemon: Option<Child>,
    servers: String,
    /// The pools of a Ceph cluster that disks may be in, and behind a bar the folder of its files.
    pub(crate) rbd: Option<String>,
    /// The configuration file whose pools disks may be in.
    pub(crate) config: Option<PathBuf>,
    /// The program that is the daemon, if it is not this one.
    pub(crate) program: Option<PathBuf>,
}

impl Far {
    /// A host with one guest whose disks may be on these servers.
    pub(crate) fn new(servers: &[&str]) -> Far {
        let mut far = Far::of(servers);
        far.start();
        far
    }

    /// A host as that of [`Far::new`], without a daemon yet.
    pub(crate) fn of(servers: &[&str]) -> Far {
        let host = Host::new(1);
        let folder = host.dir.path().to_str().unwrap().to_owned();
        let servers = [&[folder.as_str()], servers].concat().join(",");
        Far { host, daemon: None, servers, rbd: None, config: None, program: None }
    }

    pub(crate) fn start(&mut self) {
        let program = self.program.clone().unwrap_or_else(|| std::env::current_exe().unwrap());
        let mut command = self.host.daemon_of(&program);
        command.env(NBD_SERVERS, &self.servers);
        command.envs(self.rbd.as_ref().map(|rbd| (RBD, rbd)));
        for name in [CONFIG, CONFIGURED_BY] {
            command.envs(self.config.as_ref().map(|file| (name, file)));
        }
        self.daemon = Some(command.spawn().unwrap());
        wait_until("xenstore", || self.host.status().is_ok_and(|status| status.xen));
    }

    /// Kills the daemon, and starts the next one.
    pub(crate) fn restart(&mut self) {
        roles::kill(self.daemon.take().unwrap());
        self.start();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.host.dir.path().join(name)
    }

    /// A raw image that is zeros, of a size that a guest's load fits into.
    pub(crate) fn image(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(deep::BYTES).unwrap();
        path
    }

    /// The name of the export at the socket `name`.
    pub(crate) fn uri(&self, name: &str, settings: &str) -> String {
        format!("nbd+unix:///?socket={}{settings}", self.path(name).display())
    }

    /// Attaches an export, and connects a guest that works on it.
    pub(crate) fn load(&self, uri: &str) -> (DiskPaths, Deep) {
        let disk = self.host.attach(1, 0, &format!("aio:{uri}"));
        let load = Deep::start(self.host.connect(&disk));
        load.wait_for_progress();
        (disk, load)
    }

    /// Kills the worker, and waits until the next one serves.
    pub(crate) fn kill_worker(&self, disk: &DiskPaths) {
        let keeper = roles::keeper(&self.host, disk);
        roles::kill_pid(roles::worker(keeper).unwrap());
    }

    pub(crate) fn kill_keeper(&self, disk: &DiskPaths) {
        roles::kill_keeper(roles::keeper(&self.host, disk));
    }

    /// Kills the tunnels of the disk's keeper. How many there were.
    pub(crate) fn kill_tunnels(&self, disk: &DiskPaths) -> usize {
        let keeper = roles::keeper(&self.host, disk);
        let tunnels = children(keeper, "tunnel");
        tunnels.iter().for_each(|pid| {
            let _ = kill_process(Pid::from_raw(*pid).unwrap(), Signal::KILL);
        });
        tunnels.len()
    }

    /// Ends the guest and its disk.
    #[track_caller]
    pub(crate) fn end(mut self, disk: &DiskPaths, load: Deep) {
        load.end();
        self.host.detach(disk);
        self.host.wait_for_no_disks();
        roles::kill(self.daemon.take().unwrap());
    }
}

/// The children of a process whose first argument is this.
pub(crate) fn children(parent: i32, role: &str) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let all: Vec<i32> = lists
        .flat_map(|list| list.split(' ').filter_map(|n| n.parse().ok()).collect::<Vec<_>>())
        .collect();
    let is_so = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).nth(1) == Some(role.as_bytes())
    };
    all.into_iter().filter(is_so).collect()
}

/// A server, killed when this is dropped.
pub(crate) struct Server {
    child: Child,
}

/// Where a server listens.
#[derive(Clone, Copy)]
pub(crate) enum At<'a> {
    Socket(&'a Path),
    Port(&'a str, u16),
    /// A port that is reached from this network namespace.
    From(&'a str, &'a str, u16),
}

impl At<'_> {
    fn answers(&self) -> bool {
        match self {
            At::Socket(path) => UnixStream::connect(path).is_ok(),
            At::Port(host, port) => TcpStream::connect((*host, *port)).is_ok(),
            At::From(namespace, host, port) => {
                let probe = format!("exec 3<>/dev/tcp/{host}/{port}");
                let mut bash = inside(namespace, "bash");
                bash.args(["-c", &probe]).stderr(Stdio::null());
                bash.status().unwrap().success()
            }
        }
    }
}

impl Server {
    /// Starts a server, and waits until it listens. `None`: it is not installed.
    #[track_caller]
    pub(crate) fn start(mut command: Command, at: At<'_>) -> Option<Server> {
        let name = command.get_program().to_str().unwrap().to_owned();
        installed(&name, Command::new(&name).arg("--version").output())?;
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = Server { child: child.spawn().unwrap() };
        wait_until(&format!("{name} listens"), || {
            assert!(server.child.try_wait().unwrap().is_none(), "{command:?} has ended");
            at.answers()
        });
        Some(server)
    }

    /// nbdkit at a Unix socket.
    #[track_caller]
    pub(crate) fn nbdkit(socket: &Path, args: &[&str]) -> Option<Server> {
        let _ = fs::remove_file(socket);
        let mut command = Command::new("nbdkit");
        command.args(["-f", "--unix", socket.to_str().unwrap()]).args(args);
        Server::start(command, At::Socket(socket))
    }

    /// Our own export of a disk.
    #[track_caller]
    pub(crate) fn ours(disk: &Path, at: At<'_>, more: &[&str]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrite"));
        command.args(["export", "nbd", disk.to_str().unwrap()]).args(more);
        match at {
            At::Socket(path) => command.args(["--socket", path.to_str().unwrap()]),
            At::Port(host, port) | At::From(_, host, port) => {
                command.args(["--listen", &format!("{host}:{port}")])
            }
        };
        Server::start(command, at).unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn pid(&self) -> i32 {
        Pid::from_child(&self.child).as_raw_nonzero().get()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program in a network namespace. It has the process number of what is started.
pub(crate) fn inside(namespace: &str, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.args([&format!("--net=/run/netns/{namespace}"), program]);
    command
}

/// A TCP port of this host that is free now.
pub(crate) fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
