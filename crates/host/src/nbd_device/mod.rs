//! Block devices of Linux' own NBD client (`/dev/nbdN`), made and removed by generic netlink.
//!
//! The caller connects to the server and chooses the export. The kernel gets the sockets and does the rest. A device
//! stays when the process that has made it ends.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};

mod messages;
#[cfg(test)]
mod tests;

pub use messages::Connection;
use messages::{Message, Said};

/// The name of the family.
const FAMILY: &str = "nbd";
/// The kernel answers at once; a device whose queue is frozen may take its time.
const PATIENCE: Duration = Duration::from_secs(20);
/// More than any answer: a list has 20 bytes for each device.
const ANSWER_BYTES: usize = 64 << 10;
/// Datagrams that are read for one answer.
const MAX_DATAGRAMS: usize = 64;

/// A connection to the kernel's NBD client.
#[derive(Debug)]
pub struct Devices {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

impl Devices {
    /// Asks the kernel for its NBD client.
    ///
    /// # Errors
    /// `NotFound`: the module `nbd` is not loaded.
    pub fn open() -> io::Result<Devices> {
        let kind = SocketType::RAW;
        let socket =
            socket_with(AddressFamily::NETLINK, kind, SocketFlags::CLOEXEC, Some(GENERIC))?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        let mut devices = Devices { socket, family: 0, sequence: 0 };
        let answers = devices.ask(|sequence, _| messages::get_family(FAMILY, sequence))?;
        let id = answers.iter().find_map(|answer| messages::family_id(answer));
        devices.family = id.ok_or(io::ErrorKind::NotFound)?;
        Ok(devices)
    }

    /// Makes a device, and returns its index. The kernel takes the first that is free, or makes one more.
    ///
    /// # Errors
    /// `PermissionDenied`: the caller has no `CAP_SYS_ADMIN`. Others of the kernel.
    pub fn connect(&mut self, wanted: &Connection<'_>) -> io::Result<u32> {
        let answers = self.ask(|sequence, family| messages::connect(family, sequence, wanted))?;
        let index = answers.iter().find_map(|answer| messages::index(answer));
        index.ok_or_else(|| io::Error::other("the kernel does not say which device it has made"))
    }

    /// Gives a device these connections in the place of dead ones. Those that it does not need are closed.
    ///
    /// # Errors
    /// The kernel's; `InvalidInput` if the device has another identifier.
    pub fn reconnect(&mut self, index: u32, wanted: &Connection<'_>) -> io::Result<()> {
        self.ask(|sequence, family| messages::reconfigure(family, sequence, index, wanted))
            .map(drop)
    }

    /// Removes a device. Requests that it has fail. One that is mounted stays as a device that fails.
    ///
    /// # Errors
    /// The kernel's.
    pub fn disconnect(&mut self, index: u32) -> io::Result<()> {
        self.ask(|sequence, family| messages::disconnect(family, sequence, index)).map(drop)
    }

    /// The indices of all devices that are connected, by whatever program.
    ///
    /// # Errors
    /// The kernel's.
    pub fn connected(&mut self) -> io::Result<Vec<u32>> {
        let answers = self.ask(|sequence, family| messages::status(family, sequence))?;
        let all = answers.iter().flat_map(|answer| messages::devices(answer));
        Ok(all.filter_map(|(index, connected)| connected.then_some(index)).collect())
    }

    /// Asks one question, and returns its answers.
    fn ask(&mut self, question: impl FnOnce(u32, u16) -> Message) -> io::Result<Vec<Vec<u8>>> {
        self.sequence = self.sequence.wrapping_add(1);
        let bytes = question(self.sequence, self.family).done();
        send(&self.socket, &bytes, SendFlags::empty())?;
        let (mut answers, mut buf) = (Vec::new(), vec![0; ANSWER_BYTES]);
        for _ in 0..MAX_DATAGRAMS {
            let (bytes, _) = recv(&self.socket, &mut buf, RecvFlags::empty())?;
            for said in messages::parse(&buf[..bytes], self.sequence) {
                match said {
                    Said::Ended(Ok(())) => return Ok(answers),
                    Said::Ended(Err(errno)) => return Err(io::Error::from_raw_os_error(errno)),
                    Said::Answer(answer) => answers.push(answer),
                }
            }
        }
        Err(io::Error::other("the kernel's answer has no end"))
    }
}

/// The name of a device.
pub fn path(index: u32) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{index}"))
}

/// The identifier that a connected device was made with. `None`: it has none, or the kernel is older than 5.14 and does
/// not tell it.
pub fn identifier(index: u32) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/block/nbd{index}/backend")).ok()?;
    Some(text.trim_end().to_owned())
}

/// The users of a block device (`nbd0`, or that of another driver) or of a partition of it, for people: mount points,
/// swap space, devices that stand on it, programs that have it open. Those in other mount namespaces are seen, too, if
/// they have it by its usual name.
///
/// # Errors
/// The lists of the kernel cannot be read.
pub fn users(name: &str) -> io::Result<Vec<String>> {
    let folder = PathBuf::from("/sys/block").join(name);
    let partition = format!("{name}p");
    let mut parts = vec![(name.to_owned(), folder.clone())];
    for entry in fs::read_dir(&folder)? {
        let entry = entry?;
        if let Some(part) = entry.file_name().to_str().filter(|part| part.starts_with(&partition)) {
            parts.push((part.to_owned(), entry.path()));
        }
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let swaps = fs::read_to_string("/proc/swaps").unwrap_or_default();
    let mut users = Vec::new();
    for (name, folder) in parts {
        let number = fs::read_to_string(folder.join("dev")).unwrap_or_default();
        users.extend(mounted(&mounts, number.trim()));
        let device = format!("/dev/{name}");
        let is_swap = |line: &str| line.split_whitespace().next() == Some(&device);
        users.extend(swaps.lines().any(is_swap).then(|| format!("swap space on {device}")));
        for holder in fs::read_dir(folder.join("holders")).into_iter().flatten().flatten() {
            users.push(format!("the device {}", holder.file_name().to_string_lossy()));
        }
        users.extend(openers(Path::new(&device)));
    }
    Ok(users)
}

/// The programs that have a file open, for people. Programs that this process may not look into are left out.
fn openers(path: &Path) -> Vec<String> {
    // The link's text is compared: a look at the file itself could wait for a server that does not answer.
    let has_it = |process: &Path| {
        let fds = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        fds.into_iter().any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == path))
    };
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok())
        else {
            continue;
        };
        if has_it(&process.path()) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            found.push(format!("open in process {pid} ({})", name.trim_end().escape_debug()));
        }
    }
    found
}

/// The places where the device `MAJOR:MINOR` is mounted (proc(5), mountinfo).
fn mounted(mountinfo: &str, number: &str) -> Vec<String> {
    let place = |line: &str| {
        let mut fields = line.split(' ');
        let is_it = fields.nth(2)? == number;
        fields.nth(1).filter(|_| is_it).map(|place| format!("mounted at {place}"))
    };
    mountinfo.lines().filter_map(place).collect()
}
