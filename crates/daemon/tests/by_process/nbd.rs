//! NBD clients of disks that the daemon serves, beside the guest's rings on the same disk.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use ferrite_loopback::front::Frontend;
use ferrite_loopback::machine::DiskPaths;
use ferrite_serve::trace;
use ferrite_testkit::nbd::{Client, command, is_closed};
use ferrite_testkit::{PATIENCE, wait_until};
use ferrite_xen::abi::{OP_FLUSH, OP_WRITE};

use crate::host::{self, Host};
use crate::roles::{attach, end, keeper, kill};

/// The path of the socket, as the toolstack finds it.
fn socket(host: &Host, disk: &DiskPaths) -> PathBuf {
    let key = format!("{}/physical-device-path", disk.backend);
    host.store().read_string(&key).unwrap().expect("the socket is named").into()
}

fn stream(host: &Host, disk: &DiskPaths) -> UnixStream {
    UnixStream::connect(socket(host, disk)).expect("a process listens")
}

/// A client that has finished its handshake.
fn client(host: &Host, disk: &DiskPaths) -> Client {
    let mut client = Client::over(stream(host, disk));
    client.go(true);
    client
}

/// Reads a block by the guest's ring.
fn read(front: &mut Frontend, block: u64) -> Vec<u8> {
    let buffer = front.space().buffer(1).unwrap();
    let queue = &mut front.queues[0];
    queue.read(block * 8, &buffer, 0, 4096).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
    let mut data = vec![0; 4096];
    buffer.read(0, &mut data);
    data
}

fn write(front: &mut Frontend, block: u64, stamp: u8) {
    let buffer = front.space().buffer(1).unwrap();
    buffer.write(0, &[stamp; 4096]);
    let queue = &mut front.queues[0];
    queue.write(block * 8, &buffer, 0, 4096).unwrap();
    assert!(queue.next_reply(PATIENCE).unwrap().is_ok());
}

#[test]
fn a_disk_has_its_socket_before_its_guest_and_as_long_as_it_is_attached() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let disk = attach(&host, 1);
    wait_until("an offer", || host.backend_state(&disk) >= 2);
    // The socket that QEMU is given.
    let socket = socket(&host, &disk);
    let mut client = client(&host, &disk);
    client.write(0, &[1; 4096]);
    client.flush();
    // The worker has no rights, and yet its trace records what it did.
    let run_dir = host.paths().run.join(host::id(&disk).file_name());
    let records = trace::read::read(&run_dir.join(trace::client_file(0))).unwrap();
    assert!(records.iter().map(|record| record.operation).eq([OP_WRITE, OP_FLUSH]));
    assert_eq!(host.show(&disk).unwrap().nbd, Some(socket.to_str().unwrap().to_owned()));
    let mut front = host.connect(&disk);
    assert_eq!(read(&mut front, 0), [1; 4096]);
    write(&mut front, 1, 2);
    assert_eq!(client.read(4096, 4096), [2; 4096]);
    front.close(PATIENCE).unwrap();
    // The client writes between two guests, as in a reboot.
    client.write(8192, &[3; 4096]);
    let mut front = host.connect(&disk);
    assert_eq!(read(&mut front, 2), [3; 4096]);
    front.close(PATIENCE).unwrap();
    let keepers = [keeper(&host, &disk)];
    // Clients that stay connected keep no disk from its end, also one that reads no replies.
    let mut stalled = self::client(&host, &disk);
    for _ in 0..8 {
        stalled.send(command::READ, 0, 0, 4 << 20, &[]);
    }
    end(&host, &[disk], &keepers);
    assert!(client.is_closed() && !socket.exists());
    kill(daemon);
}

#[test]
fn clients_may_do_what_the_toolstack_allows_the_guest() {
    let host = Host::new(3);
    let daemon = host.spawn(None);
    let image = host.make_image("a.img", 4 << 20);
    let params = format!("aio:{}", image.display());
    let disks = [
        host.attach_with(1, 0, &params, &[("mode", "r")]),
        attach(&host, 2),
        host.attach_with(
            3,
            0,
            &format!("aio:{}", host.make_image("c.img", 4 << 20).display()),
            &[("discard-enable", "0")],
        ),
    ];
    let (read_only, trims) = (1 << 1, 1 << 5);
    for (disk, expected) in disks.iter().zip([read_only, trims, 0]) {
        wait_until("an offer", || host.backend_state(disk) >= 2);
        let mut client = Client::over(stream(&host, disk));
        let (bytes, flags) = client.go(true);
        assert_eq!((bytes, flags & (read_only | trims)), (4 << 20, expected));
        let written = client.call(command::WRITE, 0, 0, 512, &[1; 512]).error;
        assert_eq!(written == 0, expected != read_only);
        if expected != read_only {
            assert_eq!(client.call(command::TRIM, 0, 0, 4096, &[]).error, 0);
            let kept = client.read(0, 512) == [1; 512];
            assert_eq!(kept, expected == 0);
        }
    }
    let keepers: Vec<i32> = disks.iter().map(|disk| keeper(&host, disk)).collect();
    end(&host, &disks, &keepers);
    kill(daemon);
}

#[test]
fn one_client_too_many_is_turned_away_and_a_place_comes_free() {
    let host = Host::new(1);
    let daemon = host.spawn(None);
    let disk = attach(&host, 1);
    wait_until("an offer", || host.backend_state(&disk) >= 2);
    let mut clients: Vec<Client> = (0..16).map(|_| client(&host, &disk)).collect();
    assert!(is_closed(&stream(&host, &disk)));
    clients[15].write(0, &[4; 512]);
    drop(clients.remove(3));
    wait_until("a place", || {
        let mut next = stream(&host, &disk);
        next.set_read_timeout(Some(PATIENCE)).unwrap();
        std::io::Read::read(&mut next, &mut [0; 18]).is_ok_and(|bytes| bytes > 0)
    });
    let keepers = [keeper(&host, &disk)];
    end(&host, &[disk], &keepers);
    assert!(clients.iter_mut().all(Client::is_closed));
    kill(daemon);
}
