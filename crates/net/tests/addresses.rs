//! Which interfaces a network serves, and when: by their script, and one at a time for each address.

mod common;

use std::time::Duration;

use common::{KIND, LONG, Rig, answer, frame, mac, options, packet};
use ferrite_loopback::machine::Vif;
use ferrite_loopback::netfront::{NetFront, NetOptions, SendOptions};
use ferrite_loopback::{GuestOptions, Machine};
use ferrite_net::{Network, Options};
use ferrite_xen::hypervisor::DomId;
use ferrite_xen::netif::RSP_OKAY;

const SHORT: Duration = Duration::from_millis(300);

/// A machine with so many guests, without an interface.
fn machine(count: usize) -> (Rig, Vec<DomId>) {
    let mut machine = Machine::new().unwrap();
    let guest = |_| machine.add_guest(GuestOptions::default()).unwrap();
    let domids = (0..count).map(guest).collect();
    (Rig { machine, network: None, fronts: Vec::new(), paths: Vec::new() }, domids)
}

/// Gives a guest an interface with this address and script.
fn attach(rig: &mut Rig, domid: DomId, number: usize, script: &str) {
    let mac = mac(number).map(|byte| format!("{byte:02x}")).join(":");
    let backend_keys = vec![("script", format!("/etc/xen/scripts/{script}"))];
    let vif = Vif { handle: 0, mac, kind: KIND.into(), backend_keys };
    rig.paths.push(rig.machine.attach_vif(domid, &vif).unwrap());
    rig.fronts.push(NetFront::new(rig.machine.guest(domid).unwrap(), 0).unwrap());
}

/// Guests with these addresses and scripts.
fn rig(interfaces: &[(usize, &str)]) -> Rig {
    let (mut rig, domids) = machine(interfaces.len());
    for (domid, (number, script)) in domids.into_iter().zip(interfaces) {
        attach(&mut rig, domid, *number, script);
    }
    rig
}

#[test]
fn interfaces_of_another_script_are_left_to_others() {
    let mut rig = rig(&[(0, "vif-ferrite"), (1, "vif-bridge"), (2, "vif-ferrite")]);
    let script = Some("vif-ferrite".to_owned());
    rig.network = Some(Network::start(Options { script, ..options(&rig.machine) }).unwrap());
    for front in [0, 2] {
        rig.fronts[front].connect(&NetOptions::default(), LONG).unwrap();
    }
    let bytes = frame(mac(2), mac(0), 1, 3000);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
    assert_eq!(packet(rig.queue(2)).frame, bytes);
    let paths = rig.paths[1].clone();
    rig.machine.wait_for_backend(&paths, &[1], SHORT).unwrap();
}

/// Nothing is below the directory of interfaces then, which may not be there at all.
#[test]
fn a_network_starts_on_a_host_without_interfaces_and_takes_the_first_ones() {
    let (mut rig, domids) = machine(2);
    rig.start();
    std::thread::sleep(SHORT);
    assert!(!rig.network.as_ref().unwrap().has_ended());
    for (number, domid) in domids.into_iter().enumerate() {
        attach(&mut rig, domid, number, "vif-ferrite");
        rig.fronts[number].connect(&NetOptions::default(), LONG).unwrap();
    }
    let bytes = frame(mac(1), mac(0), 1, 3000);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
    assert_eq!(packet(rig.queue(1)).frame, bytes);
}

/// A guest that migrates within its host is two domains with one address, for a moment.
#[test]
fn an_address_goes_to_the_next_interface_when_the_first_has_gone() {
    let mut rig = rig(&[(0, "a"), (1, "a"), (1, "a")]);
    rig.start();
    for front in [0, 1] {
        rig.fronts[front].connect(&NetOptions::default(), LONG).unwrap();
    }
    assert!(rig.fronts[2].connect(&NetOptions::default(), SHORT).is_err(), "it has to wait");
    let bytes = frame(mac(1), mac(0), 1, 3000);
    assert_eq!(rig.send(0, &bytes, &SendOptions::default()).status, RSP_OKAY);
    assert_eq!(packet(rig.queue(1)).frame, bytes);
    let domid = rig.fronts[1].domid();
    rig.machine.destroy(domid).unwrap();
    let paths = rig.paths[2].clone();
    rig.machine.wait_for_backend(&paths, &[4], LONG).unwrap();
    let queue = rig.queue(0);
    queue.send(&bytes, &SendOptions::default()).unwrap();
    queue.push().unwrap();
    assert_eq!(answer(queue).status, RSP_OKAY);
    assert_eq!(packet(rig.queue(2)).frame, bytes);
}
