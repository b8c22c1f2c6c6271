//! VHDs on logical volumes of a real LVM, as XAPI's storage manager has them. Only LVM's metadata are LVM's: the kernel
//! need not have device mapper, so a loop device on the same bytes is the volume while it is active. It needs root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ferrite_testkit::devices::Loop;
use ferrite_testkit::programs::{installed, run, skipped};

mod tapped;

use tapped::{Daemon, MIB, read, write};

const GROUP: &str = "VG_XenStorage-37";

/// A volume group in a file.
struct Group {
    dir: tempfile::TempDir,
    device: Loop,
}

impl Group {
    /// `None`: this machine has no LVM or no loop devices.
    fn new() -> Option<Group> {
        installed("lvm", Command::new("lvm").arg("version").output())?;
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        if !has_nodes(dir.path()) {
            skipped("no device nodes in /dev/shm for this user");
            return None;
        }
        let file = dir.path().join("pv");
        fs::File::create(&file).unwrap().set_len(192 * MIB).unwrap();
        let device = Loop::attach(&file, 512)?;
        let configuration = format!(
            "devices {{ filter=[\"a|^{}$|\",\"r|.*|\"] use_devicesfile=0 obtain_device_list_from_udev=0 }}\n\
             global {{ event_activation=0 }}\n\
             activation {{ udev_sync=0 udev_rules=0 monitoring=0 }}\n\
             backup {{ backup=0 archive=0 }}\n",
            device.0.display()
        );
        fs::create_dir(dir.path().join("etc")).unwrap();
        fs::write(dir.path().join("etc/lvm.conf"), configuration).unwrap();
        let group = Group { dir, device };
        let device = group.device.0.display().to_string();
        group.lvm(&["pvcreate", &device]);
        // As XAPI makes them.
        group.lvm(&["vgcreate", "--metadatasize", "10M", GROUP, &device]);
        Some(group)
    }

    fn in_group(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LVM_SYSTEM_DIR", self.dir.path().join("etc"));
        command.env("LVM_SUPPRESS_FD_WARNINGS", "1").env_remove("RUST_LOG");
        command
    }

    fn lvm(&self, args: &[&str]) -> String {
        let mut command = self.in_group("lvm");
        let done = command.arg(args[0]).args(["--driverloaded", "n"]).args(&args[1..]).output();
        let done = done.unwrap();
        assert!(done.status.success(), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap()
    }

    fn create(&self, name: &str, bytes: u64) {
        let size = format!("{bytes}b");
        self.lvm(&["lvcreate", "-an", "-Zn", "-Wn", "-n", name, "-L", &size, GROUP]);
    }

    /// The device of a volume that is active until this is dropped. It has the name of device mapper.
    fn activate(&self, name: &str) -> Active {
        let of = format!("{GROUP}/{name}");
        let columns = ["--noheadings", "--nosuffix", "--units=b", "-o", "lv_size,devices"];
        let place = self.lvm(&[&["lvs"][..], &columns, &[&of]].concat());
        let [bytes, place] = place.split_whitespace().collect::<Vec<_>>()[..] else {
            panic!("{name} is not in one piece: {place}");
        };
        let extent: u64 = place.rsplit_once('(').unwrap().1.trim_end_matches(')').parse().unwrap();
        let start =
            self.lvm(&["vgs", "--noheadings", "--nosuffix", "--units=b", "-o", "pe_start", GROUP]);
        let start = start.trim().parse::<u64>().unwrap() + extent * 4 * MIB;
        let file = self.dir.path().join("pv");
        let (start, file) = (start.to_string(), file.to_str().unwrap());
        let args = ["--find", "--show", "--offset", &start, "--sizelimit", bytes, file];
        let device = Loop(run("losetup", &args).unwrap().into());
        let numbers = fs::read_to_string(
            Path::new("/sys/block").join(device.0.file_name().unwrap()).join("dev"),
        );
        let numbers = numbers.unwrap();
        let (major, minor) = numbers.trim().split_once(':').unwrap();
        let mapped = format!("{}-{}", GROUP.replace('-', "--"), name.replace('-', "--"));
        let node = self.dir.path().join(mapped);
        run("mknod", &[node.to_str().unwrap(), "b", major, minor]).unwrap();
        Active { node, _device: device }
    }

    fn vhd_util(&self, args: &[&str]) -> Output {
        let mut command = self.in_group(env!("CARGO_BIN_EXE_ferrite"));
        command
            .args(["compat", "vhd-util"])
            .args(args)
            .current_dir(self.dir.path())
            .output()
            .unwrap()
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) -> String {
        let done = self.vhd_util(args);
        assert!(done.status.success(), "{args:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    }

    fn scan(&self) -> String {
        self.ok(&["scan", "-f", "-c", "-m", "VHD-*", "-l", GROUP])
    }
}

fn has_nodes(folder: &Path) -> bool {
    let node = folder.join("null");
    let made = run("mknod", &[node.to_str().unwrap(), "c", "1", "3"]);
    made.is_some() && fs::read(&node).is_ok()
}

struct Active {
    node: PathBuf,
    _device: Loop,
}

impl Active {
    fn name(&self) -> &str {
        self.node.to_str().unwrap()
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.node);
    }
}

/// Writes this byte by a guest of a tap, after it has read `before`.
fn used(daemon: &Daemon, volume: &Active, before: u8, byte: u8) {
    daemon.says("allocate", &format!("{}/tapdisk/tapdisk-0\n", daemon.blktap().display()));
    let pid = daemon.spawn();
    daemon.says(&format!("attach -p {pid} -m 0"), "");
    daemon.says(&format!("open -p {pid} -m 0 -a vhd:{}", volume.name()), "");
    let mut client = daemon.client(pid, 0);
    assert_eq!(read(&mut client), [before; 4096]);
    write(&mut client, byte);
    drop(client);
    for verb in ["close", "detach"] {
        daemon.says(&format!("{verb} -p {pid} -m 0"), "");
    }
    daemon.says("free -m 0", "");
}

#[test]
#[ignore = "it needs LVM: cargo xtask nightly --only taps"]
fn vhds_on_volumes_of_lvm_are_made_used_scanned_while_inactive_merged_and_resized() {
    let Some(group) = Group::new() else { return };
    // Below /dev/mapper they are allowed without that.
    let daemon = Daemon::with(&format!("parent_folders = [{:?}]\n", group.dir.path()));
    group.create("MGT", 4 * MIB);
    group.create("VHD-base", 24 * MIB);
    group.create("VHD-leaf", 8 * MIB);
    {
        let base = group.activate("VHD-base");
        group.ok(&["create", "-n", base.name(), "-s", "16", "-S", "1024"]);
        used(&daemon, &base, 0, 1);
        let leaf = group.activate("VHD-leaf");
        group.ok(&["snapshot", "-n", leaf.name(), "-p", base.name(), "-S", "1024"]);
        group.ok(&["set", "-n", base.name(), "-f", "hidden", "-v", "1"]);
        let parent = group.ok(&["query", "-p", "-n", leaf.name()]);
        assert_eq!(parent, format!("{}\n", base.name()));
        used(&daemon, &leaf, 1, 2);
        group.ok(&["check", "-n", leaf.name()]);
    }
    // No volume is active: the images are read by LVM's metadata.
    let base = "vhd=VHD-base capacity=16777216 size=25165824 hidden=1 parent=none\n";
    let leaf = "vhd=VHD-leaf capacity=16777216 size=8388608 hidden=0 parent=VHD-base\n";
    assert_eq!(group.scan(), [base, leaf].concat());
    {
        let (base, leaf) = (group.activate("VHD-base"), group.activate("VHD-leaf"));
        assert_eq!(group.ok(&["coalesce", "-n", leaf.name()]), "Coalesced 8 sectors");
        used(&daemon, &base, 2, 3);
        used(&daemon, &leaf, 2, 4);
    }
    // A larger volume: the footer moves to its end, then the disk grows.
    let size = format!("{}b", 16 * MIB);
    group.lvm(&["lvresize", "-f", "-L", &size, &format!("{GROUP}/VHD-leaf")]);
    {
        let (_base, leaf) = (group.activate("VHD-base"), group.activate("VHD-leaf"));
        group.ok(&["modify", "-n", leaf.name(), "-s", &(16 * MIB).to_string()]);
        group.ok(&["check", "-n", leaf.name()]);
        group.ok(&["resize", "-n", leaf.name(), "-s", "64", "-f"]);
        let journal = group.dir.path().join("journal").display().to_string();
        group.ok(&["resize", "-n", leaf.name(), "-s", "4096", "-j", &journal]);
        assert_eq!(group.ok(&["query", "-v", "-n", leaf.name()]), "4096\n");
        group.ok(&["check", "-n", leaf.name()]);
        used(&daemon, &leaf, 4, 5);
    }
    let leaf = "vhd=VHD-leaf capacity=4294967296 size=16777216 hidden=0 parent=VHD-base\n";
    assert_eq!(group.scan(), [base, leaf].concat());
    // A volume without an image, and one of two pieces, whose first one has the headers.
    group.create("VHD-none", 4 * MIB);
    let size = format!("{}b", 28 * MIB);
    group.lvm(&["lvresize", "-f", "-L", &size, &format!("{GROUP}/VHD-base")]);
    let base = base.replace("25165824", "29360128");
    let none = "vhd=VHD-none scan-error=-22 error-message='opening file'\n";
    assert_eq!(group.scan(), [&base, leaf, none].concat());
    let failed = group.vhd_util(&["scan", "-f", "-m", "VHD-*", "-l", GROUP]);
    assert_eq!(failed.status.code(), Some(22));
    let chain = group.ok(&["scan", "-f", "-a", "-m", "VHD-leaf", "-l", GROUP]);
    assert_eq!(chain, [leaf, &base].concat());
}
