//! xl's operations on disks that the daemon serves.

use super::guests::wait_for_requests;
use super::lifecycle::ENDLESS_IO;
use super::toolstack::{USE, WRITE, running_guest, xl_knows_us};
use super::{Bench, Case, expect_eq, ferrite};
use anyhow::{Context, Result, bail};
use ferrite_xenhost::guest::{Guest, GuestOptions};
use ferrite_xenhost::steps;

pub(super) const CASES: &[Case] = &[
    ferrite("xl/both-scripts-find-every-image-and-say-what-they-do-not", both_scripts),
    ferrite("xl/thirty-disks-of-one-guest-and-what-they-cost", thirty_disks),
    ferrite("xl/held-disks-say-so-save-c-goes-on-and-destroy-ends-all", held_saved_destroyed),
    ferrite("xl/domain-0-mounts-a-guests-disk-beside-it-while-workers-end", mounted_beside),
];

/// In domain 0: a file system on the first half of the disk, with files that fio verifies.
const FILES_BESIDE: &str = "mkfs.ext4 -q /dev/nbd0 64M && mkdir -p /mnt/nbd && \
     mount /dev/nbd0 /mnt/nbd && cd /mnt/nbd && \
     fio --name=beside --directory=. --ioengine=libaio --direct=1 --rw=randrw --bs=4k-64k --size=8m \
     --nrfiles=4 --iodepth=16 --fsync=32 --randrepeat=1 --verify=crc32c --verify_fatal=1 \
     --do_verify=1 --minimal 2>&1 && sha256sum beside* >sums && cd / && umount /mnt/nbd";

/// In the guest: the other half.
const HALF_BESIDE: &str = "until [ -b /dev/xvdb ]; do sleep 0.2; done; \
     fio --name=half --filename=/dev/xvdb --offset=64m --size=32m --ioengine=libaio --direct=1 \
     --rw=randrw --bs=4k-16k --iodepth=8 --randrepeat=1 --verify=crc32c --verify_fatal=1 --do_verify=1 \
     --minimal";

/// The name of the tests' disk in xl and xenstore.
const NAME: &str = "xvdb";
const DEVID: u32 = 51728;

/// xl's configuration of a disk. Without a script xl uses its own block-tap.
fn attach(guest: &Guest, words: &str) -> String {
    format!("xl block-attach {} 'vdev={NAME},backendtype=tap,{words}'", guest.name())
}

fn detach(bench: &mut Bench<'_>, guest: &Guest) -> Result<()> {
    bench.xenhost.sh(&format!("xl block-detach {} {NAME}", guest.name()))?;
    let directory = format!("/local/domain/0/backend/vbd3/{}/{DEVID}", guest.domid());
    bench.xenhost.sh(&format!("! xenstore-exists {directory}"))?;
    let gone = "[ -z \"$(ls /run/ferrite/disks)\" ] && [ -z \"$(ls /run/blktap-control)\" ]";
    bench.xenhost.wait_until("nothing left of the disk", gone, 30)
}

/// The key of the backend's directory.
fn key(bench: &mut Bench<'_>, guest: &Guest, name: &str) -> Result<String> {
    let domid = guest.domid();
    bench.xenhost.sh(&format!("xenstore-read /local/domain/0/backend/vbd3/{domid}/{DEVID}/{name}"))
}

fn both_scripts(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let mut guest = running_guest(bench)?;
    bench
        .xenhost
        .sh("rm -rf /lab/xl; mkdir /lab/xl; cd /lab/xl; truncate -s 64M a.raw a:b.raw && \
         for image in a.vhd a.qcow2 ./a:b.vhd; do ferrite image create $image 64M || exit 1; done")?;
    for (words, kind, image) in [
        ("format=raw,target=/lab/xl/a.raw", "aio", "/lab/xl/a.raw"),
        ("format=vhd,target=/lab/xl/a.vhd", "vhd", "/lab/xl/a.vhd"),
    ] {
        bench.xenhost.sh(&attach(&guest, words))?;
        guest.sh(bench.xenhost, USE, 120)?;
        let socket = found_by_tap_ctl(bench, &guest, kind, image)?;
        seen_by_qemu_io(bench, &mut guest, &socket)?;
        detach(bench, &guest)?;
    }
    for words in [
        "format=raw,target=/lab/xl/a:b.raw",
        "format=vhd,target=/lab/xl/a:b.vhd",
        "format=raw,target=qcow2:/lab/xl/a.qcow2",
    ] {
        bench.xenhost.sh(&attach(&guest, &format!("script=block-ferrite,{words}")))?;
        guest.sh(bench.xenhost, USE, 120)?;
        detach(bench, &guest)?;
    }
    footer_taken(bench, &mut guest)?;
    // The image cannot be opened: each script reports that in its way, and xl prints our message.
    for (words, said) in [
        ("format=raw,target=/lab/xl/none", "tapdisk for disk"),
        ("format=raw,target=/lab/xl/none", "cannot open /lab/xl/none"),
        ("format=raw,script=block-ferrite,target=/lab/xl/none", "cannot open /lab/xl/none"),
    ] {
        let refused = bench.xenhost.dom0(&format!("{} 2>&1", attach(&guest, words)), 90)?;
        if refused.status == 0 || !refused.stdout.contains(said) {
            bail!("{words}: xl ends with {}: {}", refused.status, refused.stdout);
        }
        // xl leaves a disk that it could not attach to its caller.
        detach(bench, &guest)?;
    }
    read_only(bench, &mut guest)?;
    drives(bench, &mut guest)?;
    bench.xenhost.sh("rm -r /lab/xl").map(drop)
}

/// block-tap has written the daemon's properties of the disk, and the path of the socket for QEMU.
fn found_by_tap_ctl(
    bench: &mut Bench<'_>,
    guest: &Guest,
    kind: &str,
    image: &str,
) -> Result<String> {
    let (pid, minor) = (key(bench, guest, "pid")?, key(bench, guest, "minor")?);
    expect_eq("the keeper", &pid, &key(bench, guest, "kthread-pid")?)?;
    let line = format!("pid={pid} minor={minor} state=0 args={kind}:{image}");
    for filter in ["".to_owned(), format!(" -t {kind} -f {image}"), format!(" -p {pid} -m {minor}")]
    {
        let listed = bench.xenhost.sh(&format!("tap-ctl list{filter}"))?;
        expect_eq(&format!("tap-ctl list{filter}"), &listed, &line)?;
    }
    let path = key(bench, guest, "physical-device-path")?;
    expect_eq("the path", &path, &format!("/run/blktap-control/nbd{pid}.{minor}"))?;
    bench.xenhost.sh(&format!("[ -S {path} ] && [ ! -L {path} ]"))?;
    // The script of an attached disk is not run for its end; calling it does no harm.
    let destroy = format!("tap-ctl destroy -p {pid} -m {minor} 2>&1");
    let refused = bench.xenhost.dom0(&destroy, 60)?;
    expect_eq("tap-ctl destroy of an attached disk", &refused.status, &16)?;
    Ok(path)
}

/// QEMU's own client, with libxl's address of the socket. It and the guest, which has the disk, see each other's
/// flushed writes.
fn seen_by_qemu_io(bench: &mut Bench<'_>, guest: &mut Guest, socket: &str) -> Result<()> {
    let qemu_io =
        |commands: &str| format!("qemu-io -f raw {commands} 'nbd+unix:///?socket={socket}' 2>&1");
    bench.xenhost.sh(&qemu_io("-c 'write -P 0x5a 32M 64k' -c flush"))?;
    // In octal 0x5a is 132, and 0xc3 is 303.
    let others = "dd if=/dev/xvdb bs=64k skip=512 count=1 iflag=direct 2>/dev/null | tr -d '\\132' | wc -c; \
                  head -c 65536 /dev/zero | tr '\\0' '\\303' | \
                  dd of=/dev/xvdb bs=64k seek=513 count=1 iflag=fullblock oflag=direct conv=fsync 2>/dev/null";
    let others = guest.sh(bench.xenhost, others, 60)?;
    expect_eq("bytes that are not those of qemu-io", &others.as_str(), &"0")?;
    let read = bench.xenhost.sh(&qemu_io("-c 'read -P 0xc3 33619968 64k'"))?;
    if !read.contains("read 65536/65536") || read.contains("verification failed") {
        bail!("qemu-io does not read what the guest has written:\n{read}");
    }
    Ok(())
}

/// A VHD on a volume that tapdisk had open when its host crashed: xl's configuration vouches for the format, and the
/// image is normal again when it is closed.
fn footer_taken(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    let device =
        bench.xenhost.sh("truncate -s 72M /lab/xl/volume && losetup -f --show /lab/xl/volume")?;
    bench.xenhost.sh(&format!(
        "ferrite image create --force vhd:{device} 64M && head -c 512 /dev/zero | tr '\\0' '\\307' | \
         dd of={device} bs=512 seek=$(($(blockdev --getsz {device}) - 1)) conv=fsync"
    ))?;
    let info = format!("ferrite image info vhd:{device}");
    bench.xenhost.sh(&format!("! {info}"))?;
    let words = format!("format=vhd,script=block-ferrite,target={device}");
    bench.xenhost.sh(&attach(guest, &words))?;
    guest.sh(bench.xenhost, USE, 120)?;
    detach(bench, guest)?;
    bench.xenhost.sh(&format!("{info} && losetup -d {device}")).map(drop)
}

fn read_only(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    let sum = "sha256sum </lab/xl/a.raw";
    let before = bench.xenhost.sh(sum)?;
    for script in ["", "script=block-ferrite,"] {
        let words = format!("format=raw,access=r,{script}target=/lab/xl/a.raw");
        bench.xenhost.sh(&attach(guest, &words))?;
        let told = "until [ -b /dev/xvdb ]; do sleep 0.2; done; blockdev --getro /dev/xvdb";
        expect_eq("read-only flag", &guest.sh(bench.xenhost, told, 60)?.as_str(), &"1")?;
        if guest.run(bench.xenhost, WRITE, 60)?.status == 0 {
            bail!("a write succeeded on a disk that xl has attached with access=r");
        }
        detach(bench, guest)?;
    }
    expect_eq("the image's checksum", &bench.xenhost.sh(sum)?, &before)
}

/// A drive with a medium, whose `params` are rewritten as xl does for another medium. xl itself refuses one without a
/// medium, and leaves nothing behind.
fn drives(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    let words = "format=raw,devtype=cdrom,access=r,script=block-ferrite,target=/lab/xl/a.raw";
    bench.xenhost.sh(&attach(guest, words))?;
    let read = "until [ -b /dev/xvdb ]; do sleep 0.2; done; \
                dd if=/dev/xvdb bs=64k count=4 iflag=direct 2>/dev/null | sha256sum";
    let data = guest.sh(bench.xenhost, read, 60)?;
    let directory = format!("/local/domain/0/backend/vbd3/{}/{DEVID}", guest.domid());
    for params in ["/lab/xl/other.iso", "", "aio:/lab/xl/a.raw"] {
        bench.xenhost.sh(&format!("xenstore-write {directory}/params '{params}'"))?;
        let same =
            guest.sh(bench.xenhost, read, 60).with_context(|| format!("params {params:?}"))?;
        expect_eq("data after other params", &same, &data)?;
    }
    detach(bench, guest)?;
    let empty = "format=raw,devtype=cdrom,access=r,script=block-ferrite,target=";
    let refused = bench.xenhost.dom0(&format!("{} 2>&1", attach(guest, empty)), 60)?;
    if refused.status == 0 || !refused.stdout.contains("no suitable backend") {
        bail!("an empty drive: xl ends with {}: {}", refused.status, refused.stdout);
    }
    bench.xenhost.sh(&format!("! xenstore-exists {directory}")).map(drop)
}

/// Four queues each, as in large guests.
fn thirty() -> GuestOptions {
    GuestOptions { vcpus: 4, ..GuestOptions::default() }
}

/// xvda to xvdz, and xvdaa on.
fn thirty_names() -> impl Iterator<Item = String> {
    let one = ('a'..='z').map(|letter| format!("xvd{letter}"));
    one.chain(('a'..='d').map(|letter| format!("xvda{letter}")))
}

/// The processes of the program: a worker's name is that of the descriptor from which it was started. One `ls`, as each
/// process that an emulated domain 0 starts takes 100 ms.
pub(super) const PROCESSES: &str =
    r"ls -l /proc/[0-9]*/exe 2>/dev/null | sed -n 's|.* /proc/\([0-9]*\)/exe -> .*/ferrite$|\1|p'";

/// The memory of all keepers and workers, in KiB, and their number.
fn memory(bench: &mut Bench<'_>) -> Result<(u32, u32)> {
    let told = bench.xenhost.sh(&format!(
        "for pid in $({PROCESSES}); do \
         tr '\\0' '\\n' </proc/$pid/cmdline | sed -n 2p | grep -qE '^(keeper|worker)$' && \
         awk '/^Pss:/ {{print $2}}' /proc/$pid/smaps_rollup; done | \
         awk '{{sum += $1}} END {{print sum, NR}}'"
    ))?;
    let (kib, processes) = told.split_once(' ').context("two numbers")?;
    Ok((kib.parse()?, processes.parse()?))
}

fn thirty_disks(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    bench.xenhost.sh("rm -rf /lab/xl; mkdir /lab/xl")?;
    let mut specs = Vec::new();
    for name in thirty_names() {
        bench.xenhost.sh(&format!("truncate -s 16M /lab/xl/{name}"))?;
        specs.push(format!(
            "format=raw,vdev={name},backendtype=tap,script=block-ferrite,target=/lab/xl/{name}"
        ));
    }
    // xl gives all disks of a new guest ten seconds together: a slow emulated processor starts fewer than ten in that
    // time. The others are attached one by one.
    let later = specs.split_off(4);
    let mut guest = Guest::create_with(bench.xenhost, &thirty(), &specs)?;
    bench.guests.push(guest.clone());
    guest.unpause(bench.xenhost)?;
    guest.wait_ready(bench.xenhost)?;
    for spec in later {
        bench.xenhost.sh(&format!("xl block-attach {} '{spec}'", guest.name()))?;
    }
    let names = thirty_names().collect::<Vec<_>>().join(" ");
    // Each has its own data, on the image of its name.
    let write = format!(
        "for n in {names}; do until [ -b /dev/$n ]; do sleep 0.2; done; \
         echo this-is-$n | dd of=/dev/$n bs=4k conv=sync oflag=direct 2>/dev/null || exit 1; done"
    );
    guest.sh(bench.xenhost, &write, 300)?;
    bench.xenhost.sh(&format!(
        "for n in {names}; do [ \"$(head -n 1 /lab/xl/$n)\" = this-is-$n ] || exit 1; done; \
         [ $(ferrite disk list | grep -c ' served ') = 30 ]"
    ))?;
    // At rest they have freed the memory for requests.
    bench.xenhost.sh("sleep 8")?;
    let (kib, processes) = memory(bench)?;
    steps::say(format!("30 disks of 4 queues at rest: {kib} KiB (PSS) in {processes} processes"));
    expect_eq("keepers and workers", &processes, &60)?;
    if kib > 30 * DISK_KIB {
        bail!("30 disks at rest take {kib} KiB: more than {DISK_KIB} each");
    }
    guest.destroy(bench.xenhost)?;
    wait_for_none(bench, "the end of all thirty")?;
    bench.xenhost.sh("rm -r /lab/xl").map(drop)
}

/// The most memory of a disk's keeper and worker at rest.
const DISK_KIB: u32 = 3 << 10;

/// Waits until there is no disk, and no process but the daemon.
pub(super) fn wait_for_none(bench: &mut Bench<'_>, what: &str) -> Result<()> {
    let none = format!("[ -z \"$(ls /run/ferrite/disks)\" ] && [ $({PROCESSES} | wc -l) = 1 ]");
    bench.xenhost.wait_until(what, &none, 60)
}

fn held_saved_destroyed(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let image = bench.image(256)?;
    let (mut guest, disk) = bench.guest_of_xl(&GuestOptions::default(), &image)?;
    held(bench, &mut guest)?;
    saved(bench, &mut guest, &disk.backend_dir())?;
    let _endless = guest.begin(bench.xenhost, ENDLESS_IO, 1000)?;
    wait_for_requests(bench, &mut guest, 200)?;
    guest.destroy(bench.xenhost)?;
    wait_for_none(bench, "the end of the destroyed guest's disk")
}

/// A paused guest. xl gives up, the disk shows what it waits for, and is removed when the guest releases it.
fn held(bench: &mut Bench<'_>, guest: &mut Guest) -> Result<()> {
    let second = bench.image(16)?;
    let words = format!("format=raw,script=block-ferrite,target={second}");
    let (name, disk) = (guest.name().to_owned(), format!("{}/{NAME}", guest.domid()));
    bench.xenhost.sh(&attach(guest, &words))?;
    guest.sh(bench.xenhost, USE, 120)?;
    bench.xenhost.sh(&format!("xl pause {name}; ! xl block-detach {name} {NAME} 2>/dev/null"))?;
    let shown = bench.xenhost.sh(&format!("ferrite disk show {disk}"))?;
    let waits = shown.lines().find(|line| line.starts_with("waits for"));
    if !waits.is_some_and(|line| line.contains("the guest, which has not let go")) {
        bail!("a disk whose guest does nothing shows\n{shown}");
    }
    bench.xenhost.sh(&format!("xl unpause {name}"))?;
    bench.xenhost.wait_until("its end", &format!("! ferrite disk show {disk}"), 60)?;
    bench.xenhost.sh(&format!("xl block-detach {name} {NAME}")).map(drop)
}

/// The guest is suspended and saved, and continues with the same rings.
fn saved(bench: &mut Bench<'_>, guest: &mut Guest, directory: &str) -> Result<()> {
    let job = guest.begin(bench.xenhost, VERIFY, 600)?;
    wait_for_requests(bench, guest, 64)?;
    let before = bench.xenhost.sh(PROCESSES)?;
    let name = guest.name().to_owned();
    bench.xenhost.sh_for(&format!("xl save -c {name} /lab/guest.save 2>&1"), 300)?;
    let state = bench.xenhost.sh(&format!("xenstore-read {directory}/state"))?;
    expect_eq("the backend's state", &state.as_str(), &"4")?;
    expect_eq("the processes", &bench.xenhost.sh(PROCESSES)?, &before)?;
    guest.finish_ok(bench.xenhost, &job).context("fio, saved meanwhile").map(drop)
}

/// Writes an area several times, and verifies it.
const VERIFY: &str = "fio --name=verify --ioengine=libaio --direct=1 --rw=randwrite --bs=16k \
     --size=2m --offset=64m --iodepth=32 --randrepeat=1 --verify=crc32c --verify_fatal=1 \
     --do_verify=1 --loops=4 --filename=/dev/xvda --minimal";

/// Guest and domain 0 use halves of one disk; its worker is killed meanwhile. The relay runs as long as domain 0's
/// client.
fn mounted_beside(bench: &mut Bench<'_>) -> Result<()> {
    if !xl_knows_us(bench)? {
        return Ok(());
    }
    bench.start_daemon()?;
    let image = bench.image(128)?;
    let mut guest = running_guest(bench)?;
    bench.xenhost.sh(&attach(&guest, &format!("format=raw,target={image}")))?;
    // The path that block-tap has written for QEMU.
    let socket = key(bench, &guest, "physical-device-path")?;
    let keeper = key(bench, &guest, "kthread-pid")?;
    let relay = format!("pgrep -P {keeper} -f 'ferrite relay'");
    let connect = format!("modprobe nbd && nbd-client -unix {socket} /dev/nbd0 2>&1");
    bench.xenhost.sh(&format!("! {relay}"))?;
    bench.xenhost.sh(&connect)?;
    let of_guest = guest.begin(bench.xenhost, HALF_BESIDE, 600)?;
    let kills = format!(
        "(for i in 1 2 3 4 5; do sleep 3; pkill -KILL -P {keeper} -f 'ferrite worker'; done) & {FILES_BESIDE}"
    );
    bench.xenhost.sh_for(&kills, 600).context("domain 0 works on its half")?;
    guest.finish_ok(bench.xenhost, &of_guest).context("the guest works on its half")?;
    bench.xenhost.sh("nbd-client -d /dev/nbd0 2>&1")?;
    bench.xenhost.wait_until("no relay without clients", &format!("! {relay}"), 30)?;
    let read = "load-ext4; mount /dev/xvdb /mnt && cd /mnt && sha256sum -c -s sums && \
                dd if=/dev/urandom of=more bs=64k count=9 2>/dev/null && sha256sum more >>sums && \
                cd / && sync";
    guest.sh(bench.xenhost, read, 120).context("the guest reads what domain 0 has written")?;
    // As in docs/operations.md, while the guest has it mounted.
    bench.xenhost.sh(&format!("nbd-client -unix {socket} /dev/nbd0 -readonly 2>&1"))?;
    bench.xenhost.sh_for(
        "mount -o ro,noload /dev/nbd0 /mnt/nbd && cd /mnt/nbd && sha256sum -c --status sums && \
         cd / && umount /mnt/nbd && nbd-client -d /dev/nbd0 2>&1 && rmdir /mnt/nbd",
        120,
    )?;
    guest.sh(bench.xenhost, "umount /mnt && blockdev --flushbufs /dev/xvdb", 60)?;
    detach(bench, &guest)
}
