//! Disks that are paused: their images are closed, and guests and NBD clients wait, whichever
//! process ends meanwhile. They go on with the same image or another one.

use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use ferrite_daemon::Step;
use ferrite_daemon::control::client::ClientError;
use ferrite_daemon::control::protocol::{Attached, PhaseName, Upgraded};
use ferrite_keeper::nbd_socket;
use ferrite_loopback::machine::DiskPaths;
use ferrite_testkit::nbd::{Client, command};
use ferrite_testkit::{PATIENCE, images, wait_until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;

use crate::host::{self, Host, works};
use crate::load::Load;
use crate::roles::{self, MIB, attach, end, is_alive, keeper, kill, kill_pid, worker};

fn pause(host: &Host, disk: &DiskPaths) -> Result<Attached, ClientError> {
    host.call("disk.pause", &json!({ "disk": host::id(disk), "by": "a test" }))
}

fn resume(host: &Host, disk: &DiskPaths, image: Option<&str>) -> Result<Attached, ClientError> {
    host.call("disk.resume", &json!({ "disk": host::id(disk), "image": image }))
}

/// Whether one of these processes has the file open.
fn has_open(pid: i32, image: &Path) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.filter_map(|fd| std::fs::read_link(fd.path()).ok()).any(|file| file == image)
}

fn is_readable(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
}

/// Checks that the disk is paused, and that no process has its image or a journal of it.
fn is_paused(host: &Host, disk: &DiskPaths, image: &Path) {
    let listed = host.wait_for_phase(disk, PhaseName::Paused);
    let pause = listed.paused.expect("its pause");
    assert_eq!((pause.by.as_str(), pause.is_step), ("a test", false));
    let keeper = listed.pid.map(|pid| pid as i32);
    for pid in keeper.into_iter().chain(keeper.and_then(worker)) {
        assert!(!has_open(pid, image), "process {pid} has {}", image.display());
    }
    let journals = std::fs::read_dir(host.paths().run.join("images")).into_iter().flatten();
    assert_eq!(journals.count(), 0, "a journal is left");
    images::check(image);
}

fn qcow2(host: &Host) -> PathBuf {
    let folder = host.image("qcow2");
    std::fs::create_dir(&folder).unwrap();
    images::make(&folder, "qcow2", 4 * MIB)
}

fn wait_for_daemon(host: &Host) {
    wait_until("the daemon", || host.status().is_ok_and(|status| status.xen && status.disks == 1));
}

#[test]
fn a_paused_disk_stays_paused_whichever_process_ends_and_goes_on_without_a_loss() {
    let host = Host::new(1);
    let image = qcow2(&host);
    let mut daemon = host.spawn(None);
    let disk = host.attach(1, 0, &format!("qcow2:{}", image.display()));
    let load = Load::start(&host, &disk);
    load.wait_for_progress();
    let socket = nbd_socket(&host.paths().run.join(host::id(&disk).file_name()));
    let stream = UnixStream::connect(socket).unwrap();
    let mut client = Client::over(stream.try_clone().unwrap());
    client.go(true);
    let kept = keeper(&host, &disk);
    assert!(has_open(worker(kept).unwrap(), &image));
    pause(&host, &disk).unwrap();
    is_paused(&host, &disk, &image);
    // A request that comes now waits, and so does one of a client.
    let cookie = client.send(command::READ, 0, 2 * MIB, 4096, &[]);
    let mut stream = Some(stream);
    pause(&host, &disk).unwrap();
    let own = std::env::current_exe().unwrap();
    for victim in ["worker", "daemon", "upgrade", "keeper", "all"] {
        let listed = host.wait_for_phase(&disk, PhaseName::Paused);
        let keeper = listed.pid.unwrap() as i32;
        match victim {
            "worker" => {
                let old = worker(keeper).unwrap();
                kill_pid(old);
                wait_until("the next worker", || worker(keeper).is_some_and(|next| next != old));
            }
            "keeper" => kill_pid(keeper),
            "upgrade" => {
                let done: Upgraded = host.call("upgrade", &json!({ "binary": own })).unwrap();
                assert_eq!(done.upgraded, [host::id(&disk)], "{:?}", done.failed);
            }
            _ => {
                kill(daemon);
                if victim == "daemon" {
                    // Without a daemon, too, the next worker leaves the image alone.
                    let old = worker(keeper).unwrap();
                    kill_pid(old);
                    wait_until("the next worker", || {
                        worker(keeper).is_some_and(|next| next != old)
                    });
                    let next = worker(keeper).unwrap();
                    for _ in 0..30 {
                        assert!(!has_open(next, &image), "a worker has opened a paused image");
                        std::thread::sleep(Duration::from_millis(10));
                    }
                }
                if victim == "all" && is_alive(keeper) {
                    kill_pid(keeper);
                }
                daemon = host.spawn(None);
                wait_for_daemon(&host);
            }
        }
        is_paused(&host, &disk, &image);
        // A keeper that ends takes its clients of NBD with it.
        if let Some(stream) = stream.take_if(|_| victim == "upgrade") {
            assert!(!is_readable(&stream), "a client was answered");
            resume(&host, &disk, None).unwrap();
            let reply = client.reply();
            assert_eq!((reply.cookie, reply.error), (cookie, 0));
            load.wait_for_progress();
            pause(&host, &disk).unwrap();
            is_paused(&host, &disk, &image);
        }
    }
    let e = host.call::<Attached>("disk.resume", &json!({ "disk": host::id(&disk) }));
    assert_eq!(e.unwrap().disk.phase, PhaseName::Served);
    load.wait_for_progress();
    assert!(resume(&host, &disk, None).unwrap_err().to_string().contains("not paused"));
    load.end();
    let keepers = [keeper(&host, &disk)];
    end(&host, &[disk], &keepers);
    images::check(&image);
    kill(daemon);
}

#[test]
fn a_disk_goes_on_with_another_image_that_fits_and_with_no_other() {
    let host = Host::new(1);
    let mut daemon = host.spawn(None);
    let disk = attach(&host, 1);
    let load = Load::start(&host, &disk);
    load.wait_for_progress();
    let old = host.image("1.img");
    pause(&host, &disk).unwrap();
    let small = host.make_image("small.img", MIB);
    let bad = host.image("bad.qcow2");
    std::fs::write(&bad, [7; 4096]).unwrap();
    let elsewhere = host.dir.path().join("elsewhere.img");
    std::fs::copy(&old, &elsewhere).unwrap();
    for (image, why) in [
        (format!("aio:{}", small.display()), "cannot shrink in use"),
        (format!("qcow2:{}", bad.display()), "bad.qcow2"),
        (format!("aio:{}", host.image("missing.img").display()), "missing.img"),
        (format!("aio:{}", elsewhere.display()), "none of the folders"),
        ("vmdk:/x".to_owned(), "vmdk"),
        ("aio:x.img".to_owned(), "absolute"),
    ] {
        let e = resume(&host, &disk, Some(&image)).unwrap_err().to_string();
        assert!(e.contains(why), "{image}: {e}");
        let listed = host.wait_for_phase(&disk, PhaseName::Paused);
        assert_eq!(listed.image.as_deref(), old.to_str(), "{image}");
        is_paused(&host, &disk, &old);
    }
    // The next one is larger, and has another format.
    let next = host.image("next.img");
    std::fs::copy(&old, &next).unwrap();
    std::fs::File::options().write(true).open(&next).unwrap().set_len(6 * MIB).unwrap();
    let done = resume(&host, &disk, Some(&format!("raw:{}", next.display()))).unwrap();
    assert_eq!((done.disk.phase, done.disk.image.as_deref()), (PhaseName::Served, next.to_str()));
    load.wait_for_progress();
    let sectors = || host.store().read_string(&format!("{}/sectors", disk.backend)).unwrap();
    wait_until("the new size", || sectors().as_deref() == Some("12288"));
    // The next daemon and the next worker know that image only.
    kill(daemon);
    std::fs::remove_file(&old).unwrap();
    daemon = host.spawn(None);
    wait_for_daemon(&host);
    kill_pid(worker(keeper(&host, &disk)).unwrap());
    load.wait_for_progress();
    load.end();
    let keepers = [keeper(&host, &disk)];
    end(&host, &[disk], &keepers);
    kill(daemon);
}

/// The daemon dies when the image is closed, and when the next image is open.
#[test]
fn a_daemon_killed_at_a_step_of_a_pause_is_followed_by_one_that_finds_one_image() {
    for step in [Step::Paused, Step::Served] {
        let host = Host::new(1);
        let daemon = host.spawn(None);
        let disk = attach(&host, 1);
        let load = Load::start(&host, &disk);
        load.wait_for_progress();
        kill(daemon);
        let mut daemon: Child;
        let next = host.image("next.img");
        if step == Step::Paused {
            daemon = host.spawn(Some(step));
            wait_for_daemon(&host);
            host.wait_for_phase(&disk, PhaseName::Served);
            assert!(pause(&host, &disk).is_err());
            assert_eq!(daemon.wait().unwrap().signal(), Some(9));
            daemon = host.spawn(None);
            wait_for_daemon(&host);
            is_paused(&host, &disk, &host.image("1.img"));
        } else {
            daemon = host.spawn(None);
            wait_for_daemon(&host);
            pause(&host, &disk).unwrap();
            kill(daemon);
            std::fs::copy(host.image("1.img"), &next).unwrap();
            daemon = host.spawn(Some(step));
            wait_for_daemon(&host);
            // The daemon may have answered before it dies.
            let _ = resume(&host, &disk, Some(&format!("raw:{}", next.display())));
            assert_eq!(daemon.wait().unwrap().signal(), Some(9));
            // The guest goes on with the next image, by its worker alone or with the next daemon.
            std::fs::remove_file(host.image("1.img")).unwrap();
            daemon = host.spawn(None);
            wait_for_daemon(&host);
            host.wait_for_phase(&disk, PhaseName::Served);
        }
        if step == Step::Paused {
            resume(&host, &disk, None).unwrap();
        }
        load.wait_for_progress();
        load.end();
        let keepers = [keeper(&host, &disk)];
        end(&host, &[disk], &keepers);
        kill(daemon);
    }
}

#[test]
fn a_paused_disk_can_be_detached_and_attached_again() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let disk = attach(&host, 1);
    let mut front = host.connect(&disk);
    works(&mut front, 1);
    let keeper = keeper(&host, &disk);
    pause(&host, &disk).unwrap();
    host.machine().unplug(&disk).unwrap();
    front.close(PATIENCE).unwrap();
    end(&host, &[disk], &[keeper]);
    let disk = attach(&host, 1);
    let mut front = host.connect(&disk);
    works(&mut front, 2);
    front.close(PATIENCE).unwrap();
    let keepers = [roles::keeper(&host, &disk)];
    end(&host, &[disk], &keepers);
    kill(daemon);
}
