//! The parts of manual pages besides a command's own description: examples, files, exit codes, and where to read on.

/// A term and its meaning.
type Terms = &'static [(&'static str, &'static str)];

/// The further sections of a page.
#[derive(Clone, Copy)]
pub(super) struct Topic {
    /// The purpose of a command line, and the line.
    pub(super) examples: Terms,
    pub(super) files: Terms,
    pub(super) environment: Terms,
    /// Exit codes, if they are not those of most commands.
    pub(super) codes: Option<Terms>,
    /// Pages besides those of the same family.
    pub(super) see: &'static [&'static str],
    /// Where the whole manual is.
    pub(super) manual: &'static str,
}

const STATE: (&str, &str) =
    ("/run/ferrite", "The state of disks in use, which the next process goes on with.");
const SOCKET: (&str, &str) = ("/run/ferrite/control.sock", "The daemon's control socket.");
const JOBS: (&str, &str) =
    ("/run/ferrite/jobs", "The state of jobs, which the next daemon goes on with.");
const STATS: (&str, &str) = ("/run/ferrite/stats", "The counters of each disk.");
const JOURNALS: (&str, &str) = (
    "/run/ferrite/images",
    "Journals of killed backends: completed writes that are not in their images yet.",
);
const XENSTORED: (&str, &str) =
    ("XENSTORED_PATH", "The socket of xenstored, as for Xen's own programs.");
const LOG: (&str, &str) = ("RUST_LOG", "Selects log messages more finely than -v.");
const OPERATIONS: &str = "/usr/share/doc/ferrite/operations.md";
const IMAGES: &str = "/usr/share/doc/ferrite/images.md";
const STORE: &str = "/usr/share/doc/ferrite/store.md";
const WATCHING: &str = "/usr/share/doc/ferrite/watching.md";

/// Codes of the checks of images.
const CHECK: Terms = &[
    ("0", "The image is intact."),
    ("1", "It could not be checked, or the command line is wrong."),
    ("2", "It is damaged."),
    ("3", "It is intact, but has space that nothing refers to."),
];
/// Codes of the checks of stores.
const STORE_CHECK: Terms = &[
    ("0", "The store is intact."),
    ("1", "It could not be checked, or the command line is wrong."),
    ("2", "It is damaged."),
];
const COMPARE: Terms = &[
    ("0", "The disks have the same contents."),
    ("1", "They differ."),
    ("2", "They could not be compared, or the command line is wrong."),
];
const TAP_CTL: Terms = &[("0", "Done."), ("other", "The errno(3) of what went wrong.")];

/// The sections of a page by its name.
pub(super) fn of(name: &str) -> Topic {
    let (files, environment, see, manual): (Terms, Terms, &'static [&'static str], _) = match name {
        "ferrite-daemon" => (
            &[
                ("/etc/ferrite/ferrite.toml", "The configuration: ferrite.toml(5)."),
                SOCKET,
                STATE,
                STATS,
            ],
            &[LOG, XENSTORED],
            &["ferrite.toml(5)", "xl(1)"],
            OPERATIONS,
        ),
        name if name.starts_with("ferrite-job") => {
            (&[SOCKET, JOBS], &[XENSTORED], &["ferrite-daemon(8)", "ferrite-disk(1)"], OPERATIONS)
        }
        name if name.starts_with("ferrite-disk") || name == "ferrite-upgrade" => {
            (&[SOCKET], &[XENSTORED], &["ferrite-daemon(8)", "xl(1)"], OPERATIONS)
        }
        "ferrite-serve" => (&[STATE], &[LOG, XENSTORED], &[], "/usr/share/doc/ferrite/serve.md"),
        name if name.starts_with("ferrite-export") => {
            (&[JOURNALS], &[LOG], &["nbd-client(8)", "nbdinfo(1)"], "/usr/share/doc/ferrite/nbd.md")
        }
        name if name.starts_with("ferrite-image") => (&[JOURNALS], &[], &["qemu-img(1)"], IMAGES),
        name if name.starts_with("ferrite-store") => (&[JOURNALS], &[], &[], STORE),
        name if name.starts_with("ferrite-net") => (
            &[("/run/ferrite/net", "The counters of each switch.")],
            &[LOG, XENSTORED],
            &[],
            "/usr/share/doc/ferrite/network.md",
        ),
        name if name.starts_with("ferrite-pool") => (
            &[("/etc/ferrite/ferrite.toml", "Where the etcd of each pool is: ferrite.toml(5).")],
            &[("FERRITE_CONFIG", "The path of that file, if it is another one.")],
            &["etcd(1)", "ferrite.toml(5)"],
            "/usr/share/doc/ferrite/distributed.md",
        ),
        name if name.starts_with("ferrite-fence") => (
            &[("/var/lib/ferrite/fences", "The keys of this host at LUNs.")],
            &[("FERRITE_CONFIG", "The path of ferrite.toml, if it is another one.")],
            &["sg_persist(8)", "ferrite.toml(5)"],
            "/usr/share/doc/ferrite/distributed.md",
        ),
        "ferrite-stat" | "ferrite-top" => (&[STATS], &[XENSTORED], &["ferrite-trace(1)"], WATCHING),
        name if name.starts_with("ferrite-trace") => {
            (&[STATE], &[], &["ferrite-stat(1)"], "/usr/share/doc/ferrite/trace.md")
        }
        "ferrite" => {
            (&[STATE, STATS], &[LOG, XENSTORED], &["ferrite.toml(5)", "tap-ctl(1)"], OPERATIONS)
        }
        "ferrite-doctor" => (&[], &[XENSTORED], &[], "/usr/share/doc/ferrite/support.md"),
        name if name.starts_with("tap-ctl") => {
            (&[SOCKET], &[], &["ferrite-daemon(8)", "ferrite-disk(1)"], OPERATIONS)
        }
        _ => (&[], &[], &[], "/usr/share/doc/ferrite"),
    };
    let codes = match name {
        "ferrite-image-check" => Some(CHECK),
        "ferrite-image-compare" => Some(COMPARE),
        "ferrite-store-check" | "ferrite-store-scrub" => Some(STORE_CHECK),
        name if name.starts_with("tap-ctl") => Some(TAP_CTL),
        _ => None,
    };
    Topic { examples: examples(name), files, environment, codes, see, manual }
}

fn examples(name: &str) -> Terms {
    match name {
        "ferrite" => &[(
            "Make a disk, and attach it to the running guest web1.",
            "ferrite image create /srv/web1.qcow2 10G\nferrite disk attach web1 xvdb /srv/web1.qcow2",
        )],
        "ferrite-serve" => &[
            ("Serve one disk by hand.", "ferrite serve vhd:/srv/a.vhd --xen 3/xvda"),
            (
                "Two disks in one process.",
                "ferrite serve /srv/a.img --xen 3/xvda /srv/b.qcow2 --xen 3/xvdb",
            ),
        ],
        "ferrite-daemon" => &[
            ("Check the configuration.", "ferrite daemon --check-config"),
            ("Run it in the foreground; usually systemd does.", "ferrite daemon"),
        ],
        "ferrite-disk" | "ferrite-disk-list" => {
            &[("Show all attached disks.", "ferrite disk list")]
        }
        "ferrite-disk-attach" => &[
            (
                "Attach an image to the running guest web1.",
                "ferrite disk attach web1 xvdb /srv/data.qcow2",
            ),
            (
                "A volume of a store, which the guest may only read.",
                "ferrite disk attach 3 xvdc store:/srv/pool.store#base --read-only",
            ),
        ],
        "ferrite-disk-show" => {
            &[("Show one disk, and what it waits for.", "ferrite disk show web1/xvdb")]
        }
        "ferrite-disk-detach" => &[
            ("Detach a disk that the guest has unmounted.", "ferrite disk detach web1/xvdb"),
            ("Take it away; unwritten data are lost.", "ferrite disk detach --force web1/xvdb"),
        ],
        "ferrite-mirror" => &[
            (
                "Have all writes of a disk go to a second image, too; it ends when that has all.",
                "ferrite mirror web1/xvda /srv/new.qcow2 --speed 200M",
            ),
            ("Move the disk there at once.", "ferrite mirror web1/xvda /srv/new.qcow2 --switch"),
        ],
        "ferrite-mirror-complete" => {
            &[("Have the disk go on with the second image.", "ferrite mirror complete web1/xvda")]
        }
        "ferrite-disk-device" => &[
            ("An image that no guest uses.", "ferrite disk device --load /srv/web1.vhd"),
            ("A running guest's disk, to look at.", "ferrite disk device web1/xvda --read-only"),
            ("By the ublk driver.", "ferrite disk device --load --by ublk /srv/web1.vhd"),
            ("Remove one.", "ferrite disk device --remove /dev/nbd0"),
        ],
        "ferrite-disk-devices" => &[("All devices of disks.", "ferrite disk devices")],
        "ferrite-migrate" => &[
            (
                "Move a disk to host b; its guest goes on here, with the image there.",
                "ferrite migrate web1/xvda b",
            ),
            (
                "The same, and the guest waits until it is moved, too.",
                "ferrite migrate web1/xvda b --detach",
            ),
        ],
        "ferrite-migrate-prepare" => {
            &[("Have host b make an image for a disk.", "ferrite migrate prepare web1/xvda b")]
        }
        "ferrite-migrate-run" => {
            &[("Copy it, and keep both equal.", "ferrite migrate run web1/xvda --speed 100M")]
        }
        "ferrite-migrate-commit" => {
            &[("Give the disk to that host.", "ferrite migrate commit web1/xvda --detach")]
        }
        "ferrite-migrate-abort" => {
            &[("Keep the disk on this host.", "ferrite migrate abort web1/xvda")]
        }
        "ferrite-migrate-list" => &[("All migrations.", "ferrite migrate list")],
        "ferrite-migrate-status" => &[("One of them.", "ferrite migrate status web1/xvda")],
        "ferrite-migrate-resolve" => &[(
            "The other host is lost for good: the disk is this one's.",
            "ferrite migrate resolve web1/xvda --here",
        )],
        "ferrite-migrate-forget" => {
            &[("Remove the record of one that is over.", "ferrite migrate forget web1/xvda")]
        }
        "ferrite-disk-coalesce" => &[
            (
                "Merge the image below the disk's into its parent, at 50 MiB a second.",
                "ferrite disk coalesce web1/xvdb --speed 50M",
            ),
            (
                "Merge the disk's own image into its parent, which gets its name.",
                "ferrite disk coalesce web1/xvdb --from /srv/web1.vhd",
            ),
            (
                "Merge a stretch, and do not wait for it.",
                "ferrite disk coalesce web1/xvdb --from /srv/tuesday.vhd --to /srv/monday.vhd --background",
            ),
        ],
        "ferrite-job" | "ferrite-job-list" => &[("Show all jobs.", "ferrite job list")],
        "ferrite-job-show" => &[("Show how far a job is.", "ferrite job show 7")],
        "ferrite-job-wait" => &[("Wait for a job, with a progress bar.", "ferrite job wait 7")],
        "ferrite-job-cancel" => &[("Cancel a job.", "ferrite job cancel 7")],
        "ferrite-job-pause" => &[("Let a job rest until the evening.", "ferrite job pause 7")],
        "ferrite-job-resume" => &[("Let it go on.", "ferrite job resume 7")],
        "ferrite-job-limit" => &[
            ("Copy at most 20 MiB a second.", "ferrite job limit 7 20M"),
            ("Copy as fast as the storage allows.", "ferrite job limit 7 none"),
        ],
        "ferrite-disk-pause" => {
            &[("Close a disk's image for another program.", "ferrite disk pause web1/xvdb")]
        }
        "ferrite-disk-resume" => &[
            ("Go on.", "ferrite disk resume web1/xvdb"),
            ("Go on with another image.", "ferrite disk resume web1/xvdb /srv/copy.vhd"),
        ],
        "ferrite-disk-snapshot" => &[(
            "Keep a guest's disk as it is now.",
            "ferrite disk snapshot web1/xvdb /srv/web1-monday.vhd",
        )],
        "ferrite-disk-export" => &[
            (
                "Let a backup host read a running disk.",
                "ferrite disk export web1/xvda --listen 192.0.2.5:10809 --tls /etc/pki/ferrite --read-only",
            ),
            (
                "Let a guest of QEMU have a disk.",
                "ferrite disk export tap/0 --vhost-user /run/disk.sock --queues 2",
            ),
        ],
        "ferrite-disk-unexport" => {
            &[("End the exports of a disk.", "ferrite disk unexport web1/xvda")]
        }
        "ferrite-disk-exports" => &[("List all exports.", "ferrite disk exports")],
        "ferrite-backup" | "ferrite-backup-create" => &[(
            "Back up what has changed since the last time, or all.",
            "ferrite backup create /srv/web1.qcow2 /backups/web1",
        )],
        "ferrite-backup-restore" => &[(
            "Restore the newest backup into a new image.",
            "ferrite backup restore /backups/web1 /srv/web1-new.qcow2",
        )],
        "ferrite-backup-verify" => {
            &[("Compare all backups with their hashes.", "ferrite backup verify /backups/web1")]
        }
        "ferrite-backup-list" => &[("List backups.", "ferrite backup list /backups/web1")],
        "ferrite-backup-prune" => {
            &[("Keep the newest seven.", "ferrite backup prune /backups/web1 --keep 7 --merge")]
        }
        "ferrite-backup-merge" => {
            &[("Make a backup a full one.", "ferrite backup merge /backups/web1 monday")]
        }
        "ferrite-disk-resize" => {
            &[("Make a disk 10 GiB larger.", "ferrite disk resize web1/xvdb +10G")]
        }
        "ferrite-disk-switch" => &[(
            "Serve a disk from its copy.",
            "ferrite disk switch --compare web1/xvdb /fast/web1.vhd",
        )],
        "ferrite-disk-limit" => &[
            (
                "Limit a guest's disk while it runs.",
                "ferrite disk limit web1/xvdb --iops 500 --bytes 20M",
            ),
            ("Limit what it writes.", "ferrite disk limit web1/xvdb --iops 200:write"),
            ("Remove all limits.", "ferrite disk limit web1/xvdb --none"),
        ],
        "ferrite-disk-set" => &[(
            "Have writes wait while the storage is full.",
            "ferrite disk set web1/xvdb on_full=wait",
        )],
        "ferrite-disk-wait" => {
            &[("Wait for a minute at most.", "ferrite disk wait --timeout 60 web1/xvdb")]
        }
        "ferrite-upgrade" => &[
            ("Move all disks to the installed version.", "ferrite upgrade"),
            ("One disk, as a trial.", "ferrite upgrade web1/xvdb"),
        ],
        "ferrite-export" | "ferrite-export-nbd" => &[
            (
                "Export an image to programs on this host.",
                "ferrite export nbd /srv/a.qcow2 --socket /run/a.sock",
            ),
            (
                "So that it can be changed meanwhile: ferrite disk snapshot tap/0 NEW --run-dir /run/a.control.",
                "ferrite export nbd /srv/a.qcow2 --socket /run/a.sock --control /run/a.control",
            ),
        ],
        "ferrite-doctor" => &[("Show what is missing on this host.", "ferrite doctor")],
        "ferrite-stat" => &[
            ("A report each second.", "ferrite stat -i 1"),
            ("One disk, a minute.", "ferrite stat -i 5 -n 12 web1/xvda"),
        ],
        "ferrite-top" => &[("All disks, every five seconds.", "ferrite top -i 5")],
        "ferrite-trace" | "ferrite-trace-record" => {
            &[("Record a disk for ten seconds.", "ferrite trace record web1/xvda -o slow.trace")]
        }
        "ferrite-trace-report" => {
            &[("Draw a recording.", "ferrite trace report slow.trace -o slow.html")]
        }
        "ferrite-trace-export" => {
            &[("A line for each request.", "ferrite trace export slow.trace --format csv")]
        }
        "ferrite-trace-model" => {
            &[("Estimate the cost of a request.", "ferrite trace model slow.trace")]
        }
        "ferrite-lab" => &[("List the experiments.", "ferrite lab list")],
        "tap-ctl" | "tap-ctl-list" => {
            &[("The disks of an image.", "tap-ctl list -t vhd -f /srv/a.vhd")]
        }
        "tap-ctl-destroy" => {
            &[("Wait until a detached disk is closed.", "tap-ctl destroy -p 4711 -m 3")]
        }
        name => examples_of_images(name),
    }
}

fn examples_of_images(name: &str) -> Terms {
    match name {
        "ferrite-image" | "ferrite-image-create" => &[
            ("An empty disk of 10 GiB.", "ferrite image create disk.qcow2 10G"),
            (
                "A VHD on a parent, which becomes read-only.",
                "ferrite image create child.vhd --parent base.vhd",
            ),
        ],
        "ferrite-image-info" => {
            &[("Show an image and its parents.", "ferrite image info disk.qcow2")]
        }
        "ferrite-image-snapshot" => &[(
            "Keep the present state as before.qcow2.",
            "ferrite image snapshot disk.qcow2 before.qcow2",
        )],
        "ferrite-image-clone" => {
            &[("A new disk on a template.", "ferrite image clone template.qcow2 web1.qcow2")]
        }
        "ferrite-image-convert" => {
            &[("Copy a VHD into a qcow2 image.", "ferrite image convert disk.vhd disk.qcow2")]
        }
        "ferrite-image-check" => {
            &[("Check an image and its parents.", "ferrite image check --chain disk.qcow2")]
        }
        "ferrite-image-repair" => &[
            ("Show what could be repaired.", "ferrite image repair disk.vhd"),
            ("Repair it.", "ferrite image repair --force disk.vhd"),
        ],
        "ferrite-image-coalesce" => {
            &[("Merge a child into its parent.", "ferrite image coalesce child.qcow2")]
        }
        "ferrite-image-rebase" => {
            &[("The parent was moved.", "ferrite image rebase -b /srv/new/base.qcow2 child.qcow2")]
        }
        "ferrite-image-resize" => {
            &[("Make a disk 5 GiB larger.", "ferrite image resize disk.qcow2 +5G")]
        }
        "ferrite-image-amend" => {
            &[("Convert to version 3.", "ferrite image amend -o compat=1.1 disk.qcow2")]
        }
        "ferrite-image-map" => {
            &[("Show where each part of a disk is.", "ferrite image map disk.qcow2")]
        }
        "ferrite-image-measure" => {
            &[("The size of a copy as qcow2.", "ferrite image measure -O qcow2 disk.img")]
        }
        "ferrite-image-compare" => {
            &[("Compare a copy with its source.", "ferrite image compare disk.vhd disk.qcow2")]
        }
        "ferrite-image-du" => &[("Show the space of a disk.", "ferrite image du disk.qcow2")],
        "ferrite-image-dirty" | "ferrite-image-dirty-add" => {
            &[("Record changes since a backup.", "ferrite image dirty add disk.qcow2 nightly")]
        }
        "ferrite-image-dirty-copy" => &[(
            "Keep the maps of an image that was moved.",
            "ferrite image dirty copy old.qcow2 new.qcow2",
        )],
        "ferrite-disk-dirty" | "ferrite-disk-dirty-add" => &[(
            "Record changes of a running disk since a backup.",
            "ferrite disk dirty add web1/xvdb nightly",
        )],
        "ferrite-disk-dirty-list" => {
            &[("How much has changed.", "ferrite disk dirty list web1/xvdb")]
        }
        "ferrite-disk-dirty-show" => {
            &[("What has changed.", "ferrite disk dirty show web1/xvdb nightly")]
        }
        "ferrite-disk-dirty-clear" => {
            &[("Begin a map anew.", "ferrite disk dirty clear web1/xvdb nightly")]
        }
        "ferrite-disk-dirty-remove" => {
            &[("End a map.", "ferrite disk dirty remove web1/xvdb nightly")]
        }
        "ferrite-image-dirty-list" => {
            &[("How much has changed.", "ferrite image dirty list disk.qcow2")]
        }
        "ferrite-image-dirty-show" => {
            &[("What has changed.", "ferrite image dirty show disk.qcow2 nightly")]
        }
        "ferrite-image-dirty-clear" => {
            &[("Begin a map anew.", "ferrite image dirty clear disk.qcow2 nightly")]
        }
        "ferrite-image-dirty-remove" => {
            &[("End a map.", "ferrite image dirty remove disk.qcow2 nightly")]
        }
        "ferrite-image-journal" | "ferrite-image-journal-list" => {
            &[("List the journals of killed backends.", "ferrite image journal list")]
        }
        "ferrite-image-journal-drop" => {
            &[("Drop journals of images that are gone.", "ferrite image journal drop --stale")]
        }
        "ferrite-net" | "ferrite-net-serve" => &[(
            "A switch for the guests of this host, and a TAP device as the way out.",
            "ferrite net serve --switch lan --uplink ferrite0",
        )],
        "ferrite-net-stat" => &[
            ("Show the counters of each interface.", "ferrite net stat"),
            ("Show each second what was sent in it.", "ferrite net stat --interval 1"),
        ],
        "ferrite-net-trace" => &[
            ("How long each stage of the last packets took.", "ferrite net trace --switch lan"),
            (
                "The packets of three seconds, as a page.",
                "ferrite net trace --switch lan --seconds 3 --output packets.html",
            ),
        ],
        "ferrite-pool" | "ferrite-pool-init" => &[(
            "Make a pool in an etcd on this host.",
            "ferrite pool init lab --etcd http://127.0.0.1:2379 --etcd-plain --experimental",
        )],
        "ferrite-fence" | "ferrite-fence-status" => {
            &[("Show which host has a LUN.", "ferrite fence status /dev/mapper/mpatha")]
        }
        "ferrite-fence-steal" => {
            &[("Take a LUN whose host is gone.", "ferrite fence steal /dev/mapper/mpatha")]
        }
        "ferrite-fence-release" => {
            &[("Give back a LUN that a host has left.", "ferrite fence release /dev/mapper/mpatha")]
        }
        "ferrite-pool-create" => &[(
            "A disk of 10 GiB with two copies.",
            "ferrite pool create lab/web1 10G --replicas 2",
        )],
        "ferrite-pool-serve" => &[(
            "Serve the copies in a folder, with the certificates of docs/access.md.",
            "ferrite pool serve /srv/copies --name a --pool 0123456789abcdef0123456789abcdef --listen 192.0.2.10:10809 \
             --tls /etc/ferrite/tls --experimental",
        )],
        "ferrite-pool-list" => &[("List the disks.", "ferrite pool list lab")],
        "ferrite-pool-status" => {
            &[("Show servers and copies.", "ferrite pool status lab\nferrite pool status lab/web1")]
        }
        "ferrite-pool-resize" => &[("Make a disk larger.", "ferrite pool resize lab/web1 20G")],
        "ferrite-pool-delete" => &[("Remove a disk.", "ferrite pool delete lab/web1")],
        "ferrite-pool-replace" => {
            &[("Replace the copies on a lost server.", "ferrite pool replace lab/web1 b --by c")]
        }
        "ferrite-pool-repair" => {
            &[("Bring all copies of a disk up to date.", "ferrite pool repair lab/web1")]
        }
        "ferrite-pool-add-lun" => &[(
            "Take a LUN of a storage array into the pool: a disk gets it by ferrite pool create --on san1.",
            "ferrite pool add-lun lab san1 /dev/mapper/san1 --array san",
        )],
        "ferrite-pool-remove-lun" => {
            &[("Take a LUN out of the pool.", "ferrite pool remove-lun lab san1")]
        }
        "ferrite-pool-drain" => {
            &[("Empty a server before it is stopped.", "ferrite pool drain lab b")]
        }
        "ferrite-pool-steal" => {
            &[("Take a disk from a host that is dead.", "ferrite pool steal lab/web1")]
        }
        "ferrite-store" | "ferrite-store-create" => &[(
            "A store of 100 GiB, and a volume in it.",
            "ferrite store create pool.store --size 100G\nferrite store create pool.store#web1 10G",
        )],
        "ferrite-store-list" => &[("List volumes and snapshots.", "ferrite store list pool.store")],
        "ferrite-store-info" => &[("Show one volume.", "ferrite store info pool.store#web1")],
        "ferrite-store-snapshot" => &[(
            "Keep the present state as monday.",
            "ferrite store snapshot pool.store#web1 monday",
        )],
        "ferrite-store-clone" => {
            &[("A new volume from a snapshot.", "ferrite store clone pool.store#monday web2")]
        }
        "ferrite-store-rollback" => {
            &[("Set a volume back.", "ferrite store rollback pool.store#web1 monday")]
        }
        "ferrite-store-delete" => {
            &[("Delete a snapshot.", "ferrite store delete pool.store#monday")]
        }
        "ferrite-store-grow" => &[
            ("A store in a file gets 50 GiB more.", "ferrite store grow pool.store +50G"),
            (
                "A store on a logical volume gets what lvextend has added.",
                "ferrite store grow /dev/vg/pool",
            ),
        ],
        "ferrite-store-check" => &[("Check a store.", "ferrite store check pool.store")],
        "ferrite-store-scrub" => &[("Read all content.", "ferrite store scrub pool.store")],
        "ferrite-store-gc" => &[("Free unused blocks now.", "ferrite store gc pool.store")],
        "ferrite-store-compact" => {
            &[("Compress content.", "ferrite store compact pool.store --compress zstd")]
        }
        "ferrite-store-stats" => &[("Show the use of space.", "ferrite store stats pool.store")],
        "ferrite-store-repair" => {
            &[("Restore metadata from second copies.", "ferrite store repair --force pool.store")]
        }
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use clap::{Command, CommandFactory as _, Parser as _};

    use super::*;
    use crate::cli::Cli;
    use crate::one;

    fn names(command: &Command, to: &mut Vec<String>) {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name());
        to.push(name.to_owned());
        command.get_subcommands().filter(|sub| !sub.is_hide_set()).for_each(|sub| names(sub, to));
    }

    #[test]
    fn each_example_is_understood_and_stands_on_the_page_of_its_command() {
        let mut ferrite = Cli::command().disable_help_subcommand(true);
        ferrite.build();
        let mut all = Vec::new();
        names(&ferrite, &mut all);
        let (mut seen, mut ones, mut faults) = (0, 0, Vec::new());
        for name in &all {
            let lines = examples(name).iter().flat_map(|(_, lines)| lines.lines());
            for line in lines {
                let words = || line.split(' ').map(std::ffi::OsString::from).collect::<Vec<_>>();
                faults.extend(crate::pairs::parse(words()).err().map(|e| format!("{line}: {e}")));
                if let (Some(one), Ok(cli)) = (one::parse(&words()), Cli::try_parse_from(words())) {
                    assert_eq!(format!("{one:?}"), format!("{cli:?}"), "{line}");
                    ones += 1;
                }
                // A command's own name may have such a stroke, too.
                let is_its_own = line.replace(' ', "-").starts_with(name.as_str());
                faults.extend((!is_its_own).then(|| format!("{line}: on the page {name}")));
                seen += 1;
            }
        }
        assert!(faults.is_empty(), "{}", faults.join("\n"));
        assert!(seen > 45 && ones > seen / 2, "{ones} of {seen}");
        let without: Vec<&String> = all.iter().filter(|name| examples(name).is_empty()).collect();
        assert!(without.len() < 8, "{without:?}");
    }
}
