//! The configuration's keys, right and wrong.

use std::path::Path;

use ferrite_io::engines::{EngineChoice, EngineKind};
use ferrite_serve::memory::DataMemory;
use ferrite_serve::path::full::OnFull;
use ferrite_serve::polling::PollWindow;
use ferrite_xen::mover::Mover;

use super::*;

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(text, Path::new("/etc/ferrite/ferrite.toml"))
}

/// A file that sets each key to another value than its default.
const ALL: &str = r#"
image_folders = ["/srv/images", "/dev/vg"]
parent_folders = ["/srv/templates"]
state_folder = "/srv/state"
metrics_socket = "/run/m.sock"

[host]
map_budget = 1000
poll_processors = 0
memory_mib = 512

[disks]
queues = 2
ring_order = 0
indirect = 32
engine = "aio"
poll_storage = true
mover = "persistent"
own_grants = false
map_budget = 100
on_full = "wait"
keep_allocated = true
fence = "reservation"
memory_mib = 16
metadata_memory_mib = 64
index_memory_mib = 2048
poll_us = 50
poll_cpu = 20
cpu = 150
merge = false
limit = "iops_read=500,bytes=1048576:8388608"

[nbd]
servers = ["storage.example:7", "/run/nbd"]
certificate_folders = ["/etc/tls"]

[migration]
listen = "192.0.2.5:10810"
certificates = "/etc/tls"
folder = "/srv/in"
from = ["a.example"]
ports = [5, 7]
bases = ["golden.qcow2"]
hosts = { b = "b.example:10810" }

[rbd]
pools = ["vm", "vm/tenant"]
folders = ["/srv/ceph"]

[pool.lab]
etcd = ["http://a:1", "http://b:1"]
plain = true
experimental = true

[pool.prod]
etcd = ["https://a:1"]
tls = "/etc/tls"

[images."/srv/images/db:1.vhd"]
queues = 8
poll_us = "auto"
"#;

#[test]
fn each_key_goes_to_its_place() {
    let config = parse(ALL).unwrap();
    let disks = DiskOptions {
        queues: 2,
        ring_order: 0,
        indirect: 32,
        engine: EngineChoice::Only(EngineKind::Aio),
        poll_storage: true,
        mover: Mover::Persistent,
        own_grants: false,
        map_budget: 100,
        on_full: OnFull::Wait,
        keep_allocated: true,
        fence: Fencing::Reservation,
        memory: DataMemory::Bytes(16 << 20),
        metadata_memory_mib: 64,
        index_memory_mib: 2048,
        poll: PollWindow::Fixed(50),
        poll_cpu: 20,
        cpu: Some(150),
        merge: false,
        limits: "iops_read=500,bytes=1048576:8388608".parse().unwrap(),
    };
    let image = DiskOptions { queues: 8, poll: PollWindow::Auto, ..disks.clone() };
    let lab = PoolOptions {
        etcd: ["http://a:1", "http://b:1"].map(str::to_owned).to_vec(),
        plain: true,
        experimental: true,
        tls: None,
    };
    let expected = Config {
        image_folders: ["/srv/images", "/dev/vg"].map(PathBuf::from).to_vec(),
        parent_folders: vec!["/srv/templates".into()],
        state_folder: "/srv/state".into(),
        metrics_socket: Some("/run/m.sock".into()),
        nbd: NbdOptions {
            servers: vec![
                NbdServer::Port { host: "storage.example".into(), port: 7 },
                NbdServer::Socket("/run/nbd".into()),
            ],
            certificate_folders: vec!["/etc/tls".into()],
        },
        migration: MigrationOptions {
            listen: Some("192.0.2.5:10810".parse().unwrap()),
            certificates: Some("/etc/tls".into()),
            folder: Some("/srv/in".into()),
            from: vec!["a.example".into()],
            ports: (5, 7),
            bases: vec!["golden.qcow2".into()],
            hosts: [("b".into(), "b.example:10810".into())].into(),
        },
        rbd: RbdOptions {
            pools: vec![
                RbdPool { name: "vm".into(), namespace: String::new() },
                RbdPool { name: "vm".into(), namespace: "tenant".into() },
            ],
            folders: vec!["/srv/ceph".into()],
        },
        pools: [
            ("lab".into(), lab),
            (
                "prod".into(),
                PoolOptions {
                    etcd: vec!["https://a:1".into()],
                    tls: Some("/etc/tls".into()),
                    ..PoolOptions::default()
                },
            ),
        ]
        .into(),
        host: HostOptions { map_budget: 1000, poll_processors: Some(0), memory_mib: Some(512) },
        disks,
        images: [("/srv/images/db:1.vhd".into(), image)].into(),
    };
    assert_eq!(config, expected);
    assert_eq!(config.of_image(Path::new("/srv/images/db:1.vhd")).queues, 8);
    assert_eq!(config.of_image(Path::new("/srv/images/other.vhd")).queues, 2);
    for name in keys::names() {
        assert!(ALL.contains(name), "{name} is not tried here");
    }
}

#[test]
fn an_empty_file_and_none_are_the_defaults() {
    assert_eq!(parse("# nothing\n").unwrap(), Config::default());
    let missing = Path::new("/nonexistent/ferrite.toml");
    assert_eq!(Config::load(missing, false).unwrap(), Config::default());
    let error = Config::load(missing, true).unwrap_err().to_string();
    assert!(error.starts_with("/nonexistent/ferrite.toml: it cannot be read"), "{error}");
}

/// Its comments without their sign are a configuration, with every key.
#[test]
fn the_example_of_the_package_has_no_effect_and_every_key() {
    const EXAMPLE: &str = include_str!("../../../../dist/ferrite.toml");
    assert_eq!(parse(EXAMPLE).unwrap(), Config::default());
    let (_, keys) = EXAMPLE.split_once("\n\n").unwrap();
    let keys: String = keys.lines().map(|line| line.replacen('#', "", 1) + "\n").collect();
    let config = parse(&keys).unwrap();
    assert_eq!(config.disks, DiskOptions { cpu: Some(200), ..DiskOptions::default() });
    assert_eq!(config.image_folders, Config::default().image_folders);
    for name in keys::names() {
        assert!(keys.contains(name), "{name} is not in the example");
    }
}

#[test]
fn a_folder_may_be_named_by_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().canonicalize().unwrap();
    let (real, link) = (base.join("real"), base.join("link"));
    std::fs::create_dir(&real).unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let config = Config { image_folders: vec![link.clone()], ..Config::default() };
    assert!(config.allows(&real.join("a.vhd")) && !config.allows(&base.join("a.vhd")));
    std::fs::remove_file(link).unwrap();
    assert!(!config.allows(&real.join("a.vhd")));
}

#[test]
fn what_is_wrong_is_named_with_its_file_its_key_and_what_may_stand_there() {
    for (text, key, says) in [
        ("image_folder = []", "image_folder", "did you mean image_folders?"),
        (
            "colour = 1",
            "colour",
            "there are image_folders, metrics_socket, parent_folders, state_folder",
        ),
        ("metrics_socket = true", "metrics_socket", "an absolute path"),
        ("metrics_socket = \"metrics.sock\"", "metrics_socket", "an absolute path"),
        ("metrics_socket = \"/a\\u0000b\"", "metrics_socket", "an absolute path"),
        ("image_folders = \"/srv\"", "image_folders", "a list of absolute paths"),
        ("image_folders = [\"srv\"]", "image_folders", "a list of absolute paths"),
        ("image_folders = [\"/srv/../etc\"]", "image_folders", "a list of absolute paths"),
        ("state_folder = \"a\"", "state_folder", "an absolute path"),
        ("parent_folders = [1]", "parent_folders", "a list of absolute paths"),
        ("disks = 3", "disks", "write [disks], and its keys below"),
        ("[disk]\nqueues = 1", "disk", "did you mean disks?"),
        ("[disks]\nqueue = 1", "disks.queue", "did you mean queues?"),
        ("[disks]\nqueues = 0", "disks.queues", "a number from 1 to 64"),
        ("[disks]\nqueues = 65", "disks.queues", "a number from 1 to 64"),
        ("[disks]\nqueues = -1", "disks.queues", "a number from 1 to 64"),
        ("[disks]\nqueues = 4294967297", "disks.queues", "a number from 1 to 64"),
        ("[disks]\nqueues = \"4\"", "disks.queues", "a number from 1 to 64"),
        ("[disks]\nqueues = 1.5", "disks.queues", "a number from 1 to 64"),
        ("[disks]\nring_order = 5", "disks.ring_order", "from 0 to 4"),
        ("[disks]\nindirect = 257", "disks.indirect", "from 0 to 256"),
        ("[disks]\nengine = \"io_uring\"", "disks.engine", "\"auto\", \"uring\" or \"aio\""),
        ("[disks]\npoll_storage = \"no\"", "disks.poll_storage", "true or false"),
        ("[disks]\nmover = \"steal\"", "disks.mover", "\"copy\", \"map\" or \"persistent\""),
        ("[disks]\nmap_budget = -1", "disks.map_budget", "a number of pages"),
        ("[disks]\nmemory_mib = 0", "disks.memory_mib", "from 1 to 2048"),
        ("[disks]\nindex_memory_mib = 0", "disks.index_memory_mib", "from 1 to 65536"),
        ("[disks]\nmemory_mib = 4096", "disks.memory_mib", "from 1 to 2048"),
        ("[disks]\nmemory_mib = \"more\"", "disks.memory_mib", "\"auto\", or a number"),
        ("[host]\nmemory_mib = \"auto\"", "host.memory_mib", "a number of MiB"),
        ("[disks]\npoll_us = \"often\"", "disks.poll_us", "\"auto\", or a number"),
        ("[disks]\npoll_us = [1]", "disks.poll_us", "\"auto\", or a number"),
        ("[disks]\npoll_cpu = 6401", "disks.poll_cpu", "from 0 to 6400"),
        ("[disks]\ncpu = 0", "disks.cpu", "from 1 to 6400"),
        ("[disks]\nown_grants = \"no\"", "disks.own_grants", "true or false"),
        ("[disks]\nmerge = 1", "disks.merge", "true or false"),
        ("[host]\nmap_budget = true", "host.map_budget", "a number of pages"),
        ("[host]\npoll_processors = 5000", "host.poll_processors", "from 0 to 4096"),
        ("[host]\nqueues = 1", "host.queues", "write it below [disks]"),
        ("[host]\nxyzzy = 1", "host.xyzzy", "there are map_budget, poll_processors, memory_mib"),
        ("queues = 1", "queues", "write it below [disks]"),
        ("map_budget = 1", "map_budget", "write it below [host]"),
        ("poll_processors = 1", "poll_processors", "write it below [host]"),
        ("[disks]\nimage_folders = []", "disks.image_folders", "before the first table"),
        ("pool = 1", "pool", "write [pool], and its keys below"),
        ("[pool]\netcd = []", "pool.etcd", "write [pool.etcd], and its keys below"),
        ("[pool.Lab]\netcd = [\"http://a\"]\nplain = true", "pool.Lab", "a-z"),
        ("[pool.lab]\netcd = [\"http://a\"]", "pool.lab", "add tls = "),
        ("[pool.lab]\nplain = true", "pool.lab", "1 to 9 addresses"),
        ("[pool.lab]\netcd = [\"http://a\"]\ntls = \"/t\"", "pool.lab", "https://"),
        ("[pool.lab]\netcd = \"http://a\"", "pool.lab.etcd", "a list of addresses"),
        ("[pool.lab]\ntls = \"t\"", "pool.lab.tls", "an absolute path"),
        ("[pool.lab]\nplain = \"yes\"", "pool.lab.plain", "true or false"),
        ("[pool.lab]\nexperimental = 1", "pool.lab.experimental", "true or false"),
        ("[images.\"disk.vhd\"]\n", "images.\"disk.vhd\"", "write [images."),
        ("[images]\n\"/a\" = 1", "images.\"/a\"", "write [images.\"/a\"]"),
        ("[images.\"/a\"]\ncpus = 1", "images.\"/a\".cpus", "did you mean cpu?"),
    ] {
        let error = parse(text).unwrap_err();
        assert_eq!(error.key.as_deref(), Some(key), "{text}: {error}");
        assert!(error.allowed.contains(says), "{text}: {error}");
        let told = error.to_string();
        assert!(told.starts_with(&format!("/etc/ferrite/ferrite.toml: {key}: ")), "{told}");
        assert!(!told.contains('\n') && told.len() < 400, "{told}");
    }
}

#[test]
fn what_is_no_toml_says_where() {
    for (text, place) in [
        ("[disks]\nqueues =", "line 2, column 9: "),
        ("[disks\n", "line 1, column 7: "),
        ("[disks]\nqueues = 1\nqueues = 2\n", "line 3, column 1: "),
        ("\0", "line 1, column 2: "),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.key.is_none() && error.why.contains(place), "{error}");
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

#[test]
fn images_are_served_from_the_folders_and_below_by_whole_names() {
    let config = parse("image_folders = [\"/srv/images\"]").unwrap();
    assert!(config.allows(Path::new("/srv/images/a/b.vhd")));
    for path in ["/srv/images2/b.vhd", "/srv/b.vhd", "/etc/shadow", "srv/images/b.vhd"] {
        assert!(!config.allows(Path::new(path)), "{path}");
    }
}

#[test]
fn settings_say_where_they_come_from() {
    let config = "[disks]\nqueues = 2\ncpu = 50\n[images.\"/srv/a\"]\ncpu = 70\n";
    let config = parse(config).unwrap();
    let image = Path::new("/srv/a");
    let older = DiskOptions { on_full: OnFull::Wait, ..config.of_image(image).clone() };
    let settings = config.settings(image, &older);
    let named: Vec<&str> = settings.iter().map(|setting| setting.key.as_str()).collect();
    assert_eq!(named, keys::of_disks());
    for (key, value, from) in [
        ("queues", "2", Source::Disks),
        ("cpu", "70", Source::Image),
        ("on_full", "wait", Source::Earlier),
        ("memory_mib", "auto", Source::Default),
        ("merge", "true", Source::Default),
    ] {
        let setting = Setting { key: key.to_owned(), value: value.to_owned(), from };
        assert!(settings.contains(&setting), "{setting:?}: {settings:?}");
    }
}

#[test]
fn what_is_probably_not_meant_is_told_and_taken() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    std::fs::create_dir(at("images")).unwrap();
    for name in ["images/a", "b"] {
        std::fs::write(at(name), "").unwrap();
    }
    let text = format!(
        "image_folders = [\"/run/sr-mount\", {:?}, {:?}]\nparent_folders = [{:?}, {:?}]\n\
         metrics_socket = {:?}\n[images.{:?}]\n[images.{:?}]\n[images.{:?}]\n",
        at("images"),
        at("image"),
        at("parents"),
        at("b"),
        at("none/m.sock"),
        at("images/a"),
        at("images/c"),
        at("b"),
    );
    let config = parse(&text).unwrap();
    let warnings = config.warnings(Path::new("f"), Path::new("/run/ferrite"));
    let told: Vec<String> = warnings.iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), 6, "{told:#?}");
    for (told, words) in told.iter().zip([
        ["f: image_folders: ", "image: No such file"],
        ["f: parent_folders: ", "parents: No such file"],
        ["f: parent_folders: ", "b is not a folder"],
        ["f: metrics_socket: ", "none: No such file"],
        ["/b\": ", "in none of the folders"],
        ["/images/c\": ", "images/c: No such file"],
    ]) {
        assert!(words.iter().all(|word| told.contains(word)), "{words:?}: {told}");
    }
    // The daemon creates its own directory.
    assert_eq!(config.warnings(Path::new("f"), &dir.path().join("none")).len(), 5);
    assert!(Config::default().warnings(Path::new("f"), Path::new("/run/ferrite")).is_empty());
}
