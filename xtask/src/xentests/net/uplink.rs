//! Guests reach the host by a TAP device.

use super::{Bench, Kind, PINGS, Peer, with_network};
use anyhow::{Context as _, Result, ensure};
use ferrite_xenhost::steps::say;

const DEVICE: &str = "ferrite0";
const HOST: &str = "10.0.0.254";
/// MiB of each stream.
const STREAM_MIB: u32 = 8;

pub(super) fn to_dom0(bench: &mut Bench<'_>) -> Result<()> {
    bench.xenhost.sh_for(
        &format!(
            "modprobe tun; ip tuntap add {DEVICE} mode tap multi_queue; ip address add {HOST}/24 dev {DEVICE}; \
             ip link set {DEVICE} up"
        ),
        60,
    )?;
    let outcome = with_network(bench, "--uplink ferrite0", |bench, _| steps(bench));
    bench.xenhost.sh(&format!("ip link del {DEVICE}"))?;
    outcome
}

fn steps(bench: &mut Bench<'_>) -> Result<()> {
    let mut guest = Peer::start(bench, Kind::Pv, 1)?;
    say("  pings from the guest and from the host");
    let sizes: Vec<_> = PINGS.iter().map(ToString::to_string).collect();
    // Guests' shell has it by itself, domain 0's has only that of busybox.
    let ping = |to: &str| {
        format!(
            "ping() {{ busybox ping \"$@\"; }}; until ping -c 1 -W 1 {to} >/dev/null; do [ $((n=n+1)) -lt 20 ] || exit 1; done; \
             for s in {}; do ping -c 2 -W 5 -s $s {to} >/tmp/ping || {{ cat /tmp/ping; exit 1; }}; done",
            sizes.join(" ")
        )
    };
    guest.sh(bench, &ping(HOST), 200).context("pings of the host")?;
    bench.xenhost.sh_for(&ping(&guest.address.clone()), 200).context("pings of the guest")?;

    say("  streams both ways, with segmentation");
    to_host(bench, &mut guest)?;
    from_host(bench, &mut guest)?;

    say("  streams that the guest segments");
    guest.sh(bench, "iproute2 link set eth0 gso_max_segs 1", 30)?;
    to_host(bench, &mut guest)?;

    let told = bench.xenhost.sh("sleep 1.2; ferrite net stat | tail -n 1")?;
    let odd = told.split_whitespace().skip(6).any(|count| count != "0");
    ensure!(!odd, "packets were lost or refused: {told}");
    let trace = bench.xenhost.sh("ferrite net trace --switch lan")?;
    ensure!(trace.contains("sender answered"), "the trace is: {trace}");
    Ok(())
}

fn to_host(bench: &mut Bench<'_>, guest: &mut Peer) -> Result<()> {
    let data = format!(
        "dd if=/dev/urandom of=/tmp/data bs=1M count={STREAM_MIB} 2>/dev/null; md5sum </tmp/data"
    );
    let sum = guest.sh(bench, &data, 120)?;
    // A listener whose own input ends would end the connection.
    bench.xenhost.sh(
        "rm -f /tmp/sum /tmp/never; mkfifo /tmp/never; exec 9<>/tmp/never; \
         (busybox nc -l -p 9000 <&9 | md5sum >/tmp/sum.new; mv /tmp/sum.new /tmp/sum) >/dev/null 2>&1 & \
         until ss -ltn | grep -q :9000; do sleep 0.1; done",
    )?;
    guest.sh(bench, &format!("busybox nc {HOST} 9000 </tmp/data"), 300)?;
    bench.xenhost.wait_until("the stream's end", "ls /tmp/sum", 60)?;
    let got = bench.xenhost.sh("cat /tmp/sum; rm /tmp/sum /tmp/never")?;
    ensure!(got == sum, "the sum of {STREAM_MIB} MiB to the host is {got} instead of {sum}");
    Ok(())
}

fn from_host(bench: &mut Bench<'_>, guest: &mut Peer) -> Result<()> {
    let data = format!(
        "dd if=/dev/urandom of=/tmp/data bs=1M count={STREAM_MIB} 2>/dev/null; md5sum </tmp/data"
    );
    let sum = bench.xenhost.sh_for(&data, 120)?;
    let listen = "exec 9<>/tmp/never; busybox nc -l -p 9000 <&9 | md5sum";
    let listener = guest.guest.begin(bench.xenhost, listen, 400)?;
    guest.sh(bench, "until netstat -ltn | grep -q :9000; do sleep 0.1; done", 60)?;
    bench.xenhost.sh_for(
        &format!("timeout 200 busybox nc {} 9000 </tmp/data; rm /tmp/data", guest.address),
        300,
    )?;
    let got = guest.guest.finish_ok(bench.xenhost, &listener)?;
    ensure!(got == sum, "the sum of {STREAM_MIB} MiB from the host is {got} instead of {sum}");
    Ok(())
}
