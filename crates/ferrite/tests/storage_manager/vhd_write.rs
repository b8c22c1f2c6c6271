//! The verbs of `vhd-util` and `td-util` that change images, as XAPI's storage manager calls them.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output};

use crate::images::{self, MIB, Place, qemu_img};
use crate::pages;

const PAGE: &str = include_str!("../../../../docs/xapi.md");
/// The section of these verbs.
const SECTION: &str = "\n## vhd-util and td-util: changing\n";

/// A folder with images and the programs.
struct Tools {
    place: Place,
    programs: tempfile::TempDir,
}

impl Tools {
    fn new() -> Tools {
        let programs = tempfile::tempdir().unwrap();
        for name in ["vhd-util", "td-util"] {
            symlink(env!("CARGO_BIN_EXE_ferrite"), programs.path().join(name)).unwrap();
        }
        Tools { place: Place::new(), programs }
    }

    fn run(&self, program: &str, args: &[&str]) -> Output {
        let mut command = Command::new(self.programs.path().join(program));
        command.args(args).current_dir(self.place.path(".")).env_remove("RUST_LOG");
        command.output().unwrap()
    }

    /// Runs `vhd-util`, which has to succeed without output on standard error; returns standard output.
    #[track_caller]
    fn vhd(&self, line: &str) -> String {
        let output = self.run("vhd-util", &line.split(' ').collect::<Vec<_>>());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && text.is_empty(), "{line}: {:?} {text}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `vhd-util`, which has to end with this `errno` and a text on standard error.
    #[track_caller]
    fn fails(&self, errno: i32, line: &str) {
        let output = self.run("vhd-util", &line.split(' ').collect::<Vec<_>>());
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(errno), "{line}: {text}");
        assert!(text.starts_with("vhd-util: ") && text.lines().count() == 1, "{line}: {text:?}");
    }

    /// A property of an image, by `ferrite image info`.
    #[track_caller]
    fn info(&self, name: &str, property: &str) -> serde_json::Value {
        images::json(&self.place.ok(&["info", "--json", name]))["chain"][0][property].clone()
    }

    fn bytes(&self, name: &str) -> u64 {
        self.info(name, "virtual_bytes").as_u64().unwrap()
    }

    /// The file names of the chain below an image.
    fn parents(&self, name: &str) -> Vec<String> {
        let info = images::json(&self.place.ok(&["info", "--json", name]));
        let layers = info["chain"].as_array().unwrap().iter().skip(1);
        let names = layers.map(|layer| Path::new(layer["path"].as_str().unwrap()).file_name());
        names.map(|name| name.unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[track_caller]
    fn are_valid(&self, names: &[&str]) {
        for name in names {
            self.place.ok(&["check", "--strict", name]);
        }
    }

    fn hidden(&self, name: &str) -> [u8; 2] {
        let bytes = fs::read(self.place.path(name)).unwrap();
        [bytes[85], bytes[bytes.len() - 512 + 85]]
    }

    fn mode(&self, name: &str) -> u32 {
        fs::metadata(self.place.path(name)).unwrap().mode() & 0o777
    }

    fn raw(&self, name: &str) -> Vec<u8> {
        let raw = format!("{name}.raw");
        self.place.ok(&["convert", "--force", name, &raw]);
        fs::read(self.place.path(&raw)).unwrap()
    }
}

#[test]
fn created_images_are_valid_and_have_the_size_that_was_asked_for() {
    let tools = Tools::new();
    tools.vhd("create --debug -n a.vhd -s 64");
    tools.vhd("create -n room.vhd -s 64 -S 1024");
    tools.vhd("create -n fixed.vhd -r -s 8");
    tools.vhd("create -n odd.vhd -s 5");
    let output = tools.run("td-util", &["create", "vhd", "64", "of td.vhd"]);
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    let all = ["a.vhd", "room.vhd", "fixed.vhd", "odd.vhd", "of td.vhd"];
    tools.are_valid(&all);
    for (name, mib) in all.into_iter().zip([64, 64, 8, 6, 64]) {
        assert_eq!(tools.bytes(name), mib * MIB, "{name}");
        let Some(text) = qemu_img(&["info", "-f", "vpc", &tools.place.path(name)]) else {
            continue;
        };
        assert!(text.contains(&format!("({} bytes)", mib * MIB)), "{text}");
    }
    assert_eq!(tools.mode("a.vhd"), 0o644);
    assert_eq!(tools.info("fixed.vhd", "kind"), "fixed");
}

#[test]
fn create_overwrites_what_is_there_and_keeps_its_place() {
    let tools = Tools::new();
    fs::write(tools.place.path("a.vhd"), "something else").unwrap();
    let inode = fs::metadata(tools.place.path("a.vhd")).unwrap().ino();
    tools.vhd("create -n a.vhd -s 8");
    tools.place.write("a.vhd", &[(0, 8 * MIB)]);
    tools.vhd("create -n a.vhd -s 4");
    assert_eq!(tools.bytes("a.vhd"), 4 * MIB);
    assert!(tools.raw("a.vhd").iter().all(|byte| *byte == 0));
    assert_eq!(fs::metadata(tools.place.path("a.vhd")).unwrap().ino(), inode);
    tools.place.has_no_leftovers();
}

#[test]
fn what_cannot_be_created_ends_with_the_number_of_its_reason() {
    let tools = Tools::new();
    tools.fails(22, "create -n a.vhd");
    tools.fails(22, "create -n a.vhd -s 0");
    tools.fails(22, "create -n a.vhd -s many");
    tools.fails(22, "create -n a.vhd -s 64 -S 32");
    tools.fails(22, "create -n a.vhd -s 2088961");
    tools.fails(2, "create -n none/a.vhd -s 64");
    tools.fails(2, "snapshot -n b.vhd -p none.vhd");
    fs::write(tools.place.path("garbage.vhd"), vec![b'x'; 65536]).unwrap();
    tools.fails(22, "snapshot -n b.vhd -p garbage.vhd");
    for name in ["a.vhd", "b.vhd"] {
        assert!(!Path::new(&tools.place.path(name)).exists(), "{name}");
    }
}

/// The paths that libvhd writes, and reads again.
#[test]
fn a_snapshot_names_its_parent_on_three_platforms_and_leaves_it_alone() {
    let tools = Tools::new();
    tools.vhd("create -n base.vhd -s 64");
    let before = fs::read(tools.place.path("base.vhd")).unwrap();
    let output = tools.run("td-util", &["snapshot", "vhd", "leaf.vhd", "base.vhd"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(tools.parents("leaf.vhd"), ["base.vhd"]);
    let bytes = fs::read(tools.place.path("leaf.vhd")).unwrap();
    let locator = |i: usize| {
        let entry = &bytes[512 + 576 + i * 24..][..24];
        let number = |at: usize| u32::from_be_bytes(entry[at..at + 4].try_into().unwrap());
        let (len, at) = (number(8) as usize, number(20) as usize);
        (entry[..4].to_vec(), number(4), bytes[at..at + len].to_vec())
    };
    let wide: Vec<u8> = ".\\base.vhd".encode_utf16().flat_map(u16::to_le_bytes).collect();
    assert_eq!(locator(0), (b"MacX".to_vec(), 512, b"file://./base.vhd".to_vec()));
    assert_eq!(locator(1), (b"W2ku".to_vec(), 512, wide.clone()));
    assert_eq!(locator(2), (b"W2ru".to_vec(), 512, wide));
    assert!(fs::read(tools.place.path("base.vhd")).unwrap() == before);
    assert_eq!(tools.mode("base.vhd"), 0o644);
    let entries = fs::read_dir(tools.place.path(".")).unwrap();
    assert_eq!(entries.count(), 2, "there is a list of children");
    tools.fails(32, "snapshot -n leaf.vhd -p base.vhd");
    assert!(fs::read(tools.place.path("leaf.vhd")).unwrap() == bytes);
}

#[test]
fn a_snapshot_of_an_empty_image_stands_on_what_is_below_unless_it_is_told_not_to() {
    let tools = Tools::new();
    tools.vhd("create -n base.vhd -s 64");
    tools.vhd("snapshot -n middle.vhd -p base.vhd");
    tools.vhd("resize -n middle.vhd -s 80 -j journal");
    tools.vhd("snapshot -n one.vhd -p middle.vhd");
    tools.vhd("snapshot -n two.vhd -p middle.vhd -e");
    assert_eq!(tools.parents("one.vhd"), ["base.vhd"]);
    assert_eq!(tools.parents("two.vhd"), ["middle.vhd", "base.vhd"]);
    assert_eq!([tools.bytes("one.vhd"), tools.bytes("two.vhd")], [80 * MIB; 2]);
    // Images with others on them are not written here.
    fs::remove_file(tools.place.path("two.vhd")).unwrap();
    tools.place.write("middle.vhd", &[(0, 4096)]);
    tools.vhd("snapshot -n three.vhd -p middle.vhd -S 1024");
    assert_eq!(tools.parents("three.vhd"), ["middle.vhd", "base.vhd"]);
    tools.vhd("resize -n three.vhd -s 1024 -f");
    tools.fails(28, "snapshot -n four.vhd -p three.vhd -e -l 3");
    tools.are_valid(&["base.vhd", "middle.vhd", "one.vhd", "three.vhd"]);
}

#[test]
fn a_raw_parent_is_read_below_its_child() {
    let tools = Tools::new();
    tools.place.pattern("raw", 4 * MIB + 512, &[(0, 4 * MIB)]);
    tools.vhd("snapshot -n leaf.vhd -p raw -m");
    assert_eq!(tools.bytes("leaf.vhd"), 4 * MIB + 512);
    assert!(tools.raw("leaf.vhd") == fs::read(tools.place.path("raw")).unwrap());
    tools.place.write("leaf.vhd", &[(8192, 4096)]);
    let expected = tools.raw("leaf.vhd");
    assert_eq!(tools.vhd("coalesce -n leaf.vhd"), "Coalesced 8 sectors");
    assert!(fs::read(tools.place.path("raw")).unwrap() == expected);
    // An empty child of a raw image is left out, too.
    tools.vhd("snapshot -n empty.vhd -p raw -m");
    tools.vhd("snapshot -n next.vhd -p empty.vhd");
    assert_eq!(tools.parents("next.vhd"), ["raw"]);
}

#[test]
fn a_mark_is_in_both_footers_and_the_parent_of_others_gets_it() {
    let tools = Tools::new();
    tools.vhd("create -n base.vhd -s 64");
    tools.vhd("create -n fixed.vhd -s 2 -r");
    tools.vhd("snapshot -n leaf.vhd -p base.vhd -e");
    for name in ["base.vhd", "fixed.vhd"] {
        tools.vhd(&format!("set -n {name} -f hidden -v 1"));
    }
    assert_eq!(tools.hidden("base.vhd"), [1, 1]);
    assert_eq!(tools.hidden("fixed.vhd"), [0, 1]);
    tools.vhd("set -n base.vhd -f hidden -v 0");
    assert_eq!(tools.hidden("base.vhd"), [0, 0]);
    tools.vhd("set -n base.vhd -f marker -v 7");
    tools.are_valid(&["base.vhd", "fixed.vhd", "leaf.vhd"]);
    tools.fails(22, "set -n base.vhd -f visible -v 1");
    tools.fails(22, "set -n base.vhd -f hidden -v 256");
    tools.fails(2, "set -n none.vhd -f hidden -v 1");
}

/// Another process of ours that reads the image has it locked.
#[test]
fn an_image_that_another_process_reads_is_changed_all_the_same() {
    let tools = Tools::new();
    tools.vhd("create -n base.vhd -s 8 -S 64");
    tools.place.write("base.vhd", &[(0, 4096)]);
    tools.vhd("snapshot -n middle.vhd -p base.vhd");
    tools.place.write("middle.vhd", &[(4096, 4096)]);
    tools.vhd("snapshot -n leaf.vhd -p middle.vhd");
    let name = ferrite_disk::ImageName::parse(&tools.place.path("leaf.vhd")).unwrap();
    let options = ferrite_disk::OpenOptions { read_only: true, ..Default::default() };
    let reader = ferrite_disk::Disk::open_image(&name, &options).unwrap();
    tools.vhd("set -n base.vhd -f hidden -v 1");
    tools.vhd("resize -n base.vhd -s 64 -f");
    assert_eq!(tools.vhd("coalesce -n middle.vhd"), "Coalesced 8 sectors");
    tools.vhd("modify -n leaf.vhd -p base.vhd");
    tools.vhd("repair -n base.vhd");
    drop(reader);
    assert_eq!(tools.parents("leaf.vhd"), ["base.vhd"]);
}

#[test]
fn another_parent_is_named_at_the_place_of_the_old_one() {
    let tools = Tools::new();
    tools.vhd("create -n a.vhd -s 8");
    tools.vhd("create -n b.vhd -s 8");
    tools.vhd("snapshot -n leaf.vhd -p a.vhd -e");
    tools.vhd("modify -p b.vhd -n leaf.vhd");
    assert_eq!(tools.parents("leaf.vhd"), ["b.vhd"]);
    tools.place.pattern("raw", 8 * MIB, &[]);
    tools.vhd("modify -p raw -m -n leaf.vhd");
    assert_eq!(tools.parents("leaf.vhd"), ["raw"]);
    tools.are_valid(&["leaf.vhd"]);
    tools.fails(22, "modify -p b.vhd -n a.vhd");
    tools.fails(2, "modify -p none.vhd -n leaf.vhd");
    tools.fails(22, "modify -p raw -n leaf.vhd");
    assert_eq!(tools.parents("leaf.vhd"), ["raw"]);
}

/// Another process may read the blocks that would have to make room.
#[test]
fn no_block_is_moved_for_a_path_that_does_not_fit() {
    let tools = Tools::new();
    let deep = ["d"; 20].map(|name| name.repeat(100)).join("/");
    fs::create_dir_all(tools.place.path(&deep)).unwrap();
    tools.vhd("create -n a.vhd -s 8");
    tools.vhd(&format!("create -n {deep}/b.vhd -s 8"));
    tools.vhd("snapshot -n leaf.vhd -p a.vhd -e");
    tools.place.write("leaf.vhd", &[(0, 4096)]);
    let before = fs::read(tools.place.path("leaf.vhd")).unwrap();
    tools.fails(22, &format!("modify -n leaf.vhd -p {deep}/b.vhd"));
    assert!(fs::read(tools.place.path("leaf.vhd")).unwrap() == before);
}

#[test]
fn the_footer_goes_to_the_end_of_what_is_left_to_the_image() {
    let tools = Tools::new();
    tools.vhd("create -n a.vhd -s 8");
    tools.place.write("a.vhd", &[(0, 3 * MIB)]);
    let before = tools.raw("a.vhd");
    let size = |bytes: u64| tools.vhd(&format!("modify -s {bytes} -n a.vhd"));
    let len = || fs::metadata(tools.place.path("a.vhd")).unwrap().len();
    size(16 * MIB);
    assert_eq!(len(), 16 * MIB);
    assert!(tools.raw("a.vhd") == before);
    size(8 * MIB);
    assert_eq!(len(), 8 * MIB);
    tools.fails(22, &format!("modify -s {} -n a.vhd", 2 * MIB));
    tools.fails(22, &format!("modify -s {} -n a.vhd", 8 * MIB + 1));
    tools.vhd("set -n a.vhd -f hidden -v 1");
    assert!(len() < 5 * MIB);
    assert!(tools.raw("a.vhd") == before);
    tools.are_valid(&["a.vhd"]);
}

#[test]
fn all_data_of_an_image_are_forgotten() {
    let tools = Tools::new();
    tools.vhd("create -n base.vhd -s 8");
    tools.place.write("base.vhd", &[(0, 4096)]);
    tools.vhd("snapshot -n leaf.vhd -p base.vhd");
    tools.place.write("leaf.vhd", &[(4096, 5 * MIB)]);
    tools.vhd("modify -z -n leaf.vhd");
    assert_eq!(tools.info("leaf.vhd", "allocated_bytes"), 0);
    assert!(tools.raw("leaf.vhd") == tools.raw("base.vhd"));
    assert!(fs::metadata(tools.place.path("leaf.vhd")).unwrap().len() < 8192);
    tools.are_valid(&["leaf.vhd"]);
    fs::remove_file(tools.place.path("leaf.vhd")).unwrap();
    tools.vhd("modify -z -n base.vhd");
    tools.place.write("base.vhd", &[(3 * MIB, 512)]);
    assert_eq!(tools.raw("base.vhd").iter().filter(|byte| **byte != 0).count(), 512);
    tools.are_valid(&["base.vhd"]);
    tools.vhd("create -n fixed.vhd -s 2 -r");
    tools.fails(38, "modify -z -n fixed.vhd");
}

#[test]
fn a_disk_grows_within_its_table_and_not_beyond() {
    let tools = Tools::new();
    tools.vhd("create -n a.vhd -s 64 -S 256");
    tools.place.write("a.vhd", &[(0, 4096), (63 * MIB, MIB)]);
    tools.vhd("resize -n a.vhd -s 256 -f");
    assert_eq!(tools.bytes("a.vhd"), 256 * MIB);
    tools.place.write("a.vhd", &[(255 * MIB, 4096)]);
    tools.are_valid(&["a.vhd"]);
    tools.fails(22, "resize -n a.vhd -s 257 -f");
    tools.fails(38, "resize -n a.vhd -s 64 -f");
    tools.fails(38, "resize -n a.vhd -s 64 -j journal");
    tools.fails(22, "resize -n a.vhd -s 512");
    tools.fails(22, "resize -n a.vhd -s 512 -f -j journal");
    assert!(!Path::new(&tools.place.path("journal")).exists());
    // libvhd cuts off parts of a block.
    let after = tools.raw("a.vhd");
    assert_eq!(after.iter().filter(|byte| **byte != 0).count() as u64, 4096 + MIB + 4096);
}

/// Its last block is larger than the disk was, and anything may be there.
#[test]
fn what_was_behind_the_end_of_a_disk_reads_as_zeros_when_it_grows() {
    let tools = Tools::new();
    for (name, how) in [("a.vhd", "-f"), ("b.vhd", "-j journal")] {
        tools.place.image(&["create", name, "5M"]);
        tools.place.write(name, &[(4 * MIB, 4096)]);
        let path = tools.place.path(name);
        let mut bytes = fs::read(&path).unwrap();
        let sector = u32::from_be_bytes(bytes[1536 + 8..1536 + 12].try_into().unwrap());
        let data = (sector as usize + 1) * 512;
        bytes[data + (1 << 20)..data + (2 << 20)].fill(7);
        fs::write(&path, bytes).unwrap();
        tools.vhd(&format!("resize -n {name} -s 6 {how}"));
        let content = tools.raw(name);
        assert_eq!(content.len() as u64, 6 * MIB);
        assert_eq!(content.iter().filter(|byte| **byte != 0).count(), 4096, "{how}");
        tools.are_valid(&[name]);
    }
}

#[test]
fn a_disk_grows_beyond_its_table_with_a_journal_that_is_gone_then() {
    let tools = Tools::new();
    tools.vhd("create -n a.vhd -s 64");
    tools.place.write("a.vhd", &[(0, 4096), (63 * MIB, 4096)]);
    let before = tools.raw("a.vhd");
    tools.vhd("resize -n a.vhd -s 40960 -j journal");
    assert_eq!(tools.bytes("a.vhd"), 40960 * MIB);
    tools.are_valid(&["a.vhd"]);
    tools.fails(2, "revert -n a.vhd -j journal");
    fs::write(tools.place.path("journal"), "of something else").unwrap();
    tools.fails(17, "resize -n a.vhd -s 81920 -j journal");
    tools.fails(22, "revert -n a.vhd -j journal");
    assert_eq!(tools.bytes("a.vhd"), 40960 * MIB);
    fs::remove_file(tools.place.path("journal")).unwrap();
    tools.vhd("resize -n a.vhd -s 40960 -j journal");
    tools.place.write("a.vhd", &[(40959 * MIB, 4096)]);
    let map = tools.place.ok(&["map", "a.vhd"]);
    assert!(map.lines().count() >= 4, "{map}");
    let mut session_end = before;
    session_end.truncate(64 << 20);
    assert!(session_end.iter().filter(|byte| **byte != 0).count() == 8192);
}

#[test]
fn a_chain_is_merged_in_the_order_of_the_storage_manager() {
    let tools = Tools::new();
    tools.vhd("create -n a.vhd -s 64");
    tools.place.write("a.vhd", &[(0, 65536), (8 * MIB, 8192)]);
    tools.vhd("snapshot -n b.vhd -p a.vhd");
    tools.place.write("b.vhd", &[(4096, 4096), (32 * MIB, 4096)]);
    tools.vhd("snapshot -n leaf.vhd -p b.vhd");
    tools.place.write("leaf.vhd", &[(8192, 512)]);
    let (expected, upper) = (tools.raw("leaf.vhd"), fs::read(tools.place.path("b.vhd")).unwrap());
    assert_eq!(tools.vhd("coalesce -n b.vhd --debug"), "Coalesced 16 sectors");
    assert!(fs::read(tools.place.path("b.vhd")).unwrap() == upper);
    assert!(tools.raw("leaf.vhd") == expected);
    tools.vhd("modify -p a.vhd -n leaf.vhd");
    tools.vhd("set -n a.vhd -f hidden -v 1");
    fs::remove_file(tools.place.path("b.vhd")).unwrap();
    assert!(tools.raw("leaf.vhd") == expected);
    tools.are_valid(&["a.vhd", "leaf.vhd"]);
    tools.fails(22, "coalesce -n a.vhd");
    fs::remove_file(tools.place.path("a.vhd")).unwrap();
    tools.fails(2, "coalesce -n leaf.vhd");
}

/// The image below the parent is not needed, and may be another one by now.
#[test]
fn an_image_is_merged_although_what_is_below_its_parent_is_missing() {
    let tools = Tools::new();
    tools.vhd("create -n base.vhd -s 8");
    tools.place.write("base.vhd", &[(0, 8 * MIB)]);
    tools.vhd("snapshot -n a.vhd -p base.vhd");
    tools.place.write("a.vhd", &[(0, 512)]);
    tools.vhd("snapshot -n b.vhd -p a.vhd");
    tools.place.write("b.vhd", &[(MIB, 512)]);
    let expected = tools.raw("b.vhd");
    fs::rename(tools.place.path("base.vhd"), tools.place.path("away.vhd")).unwrap();
    assert_eq!(tools.vhd("coalesce -n b.vhd"), "Coalesced 1 sectors");
    fs::rename(tools.place.path("away.vhd"), tools.place.path("base.vhd")).unwrap();
    assert!(tools.raw("a.vhd") == expected);
}

#[test]
fn a_larger_image_is_merged_if_its_parent_can_grow_to_that() {
    let tools = Tools::new();
    tools.vhd("create -n room.vhd -s 8 -S 64");
    tools.place.write("room.vhd", &[(0, 512)]);
    tools.vhd("snapshot -n of-room.vhd -p room.vhd");
    tools.vhd("create -n full.vhd -s 8");
    tools.place.write("full.vhd", &[(0, 512)]);
    tools.vhd("snapshot -n of-full.vhd -p full.vhd");
    for leaf in ["of-room.vhd", "of-full.vhd"] {
        tools.vhd(&format!("resize -n {leaf} -s 16 -j journal"));
        tools.place.write(leaf, &[(15 * MIB, 512)]);
    }
    let expected = tools.raw("of-room.vhd");
    tools.vhd("coalesce -n of-room.vhd");
    assert!(tools.raw("room.vhd") == expected);
    tools.fails(22, "coalesce -n of-full.vhd");
    assert!(tools.raw("of-full.vhd") == expected);
}

/// What a process that was killed leaves: no footer at the end.
#[test]
fn a_repair_puts_the_footers_back() {
    let tools = Tools::new();
    tools.vhd("create -n a.vhd -s 8");
    tools.place.write("a.vhd", &[(0, 4096)]);
    let (path, before) = (tools.place.path("a.vhd"), tools.raw("a.vhd"));
    let good = fs::read(&path).unwrap();
    let mut bytes = good.clone();
    bytes.extend(vec![0; 8192]);
    fs::write(&path, &bytes).unwrap();
    tools.vhd("repair -n a.vhd");
    assert!(fs::read(&path).unwrap() == good);
    let mut bytes = good.clone();
    bytes[..512].fill(0);
    fs::write(&path, &bytes).unwrap();
    tools.vhd("repair -n a.vhd -b");
    assert!(fs::read(&path).unwrap() == good);
    assert!(tools.raw("a.vhd") == before);
    fs::write(&path, [0; 65536]).unwrap();
    tools.fails(22, "repair -n a.vhd");
}

#[test]
fn the_hash_of_a_key_is_kept_and_inherited() {
    let tools = Tools::new();
    let (hash, nonce) = ("ab".repeat(32), "0C".repeat(32));
    tools.vhd("create -n a.vhd -s 8");
    assert_eq!(tools.vhd("key -p -n a.vhd"), "none\n");
    tools.fails(22, "key -s -n a.vhd -H abcd");
    tools.fails(22, &format!("key -s -n a.vhd -H {}", "xy".repeat(32)));
    tools.fails(22, "key -s -n a.vhd");
    tools.fails(22, "key -n a.vhd");
    tools.vhd(&format!("key -s -n a.vhd -H {hash}"));
    assert_eq!(tools.vhd("key -p -n a.vhd"), format!("{} {hash}\n", "00".repeat(32)));
    tools.vhd("snapshot -n b.vhd -p a.vhd -e");
    tools.vhd(&format!("key -s -n a.vhd -N {nonce} -H {hash}"));
    assert_eq!(tools.vhd("key -p -n a.vhd"), format!("{} {hash}\n", nonce.to_lowercase()));
    assert_eq!(tools.vhd("key -p -n b.vhd"), format!("{} {hash}\n", "00".repeat(32)));
    // The data of an encrypted image are not interpreted.
    tools.vhd("set -n b.vhd -f hidden -v 1");
    tools.vhd("coalesce -n b.vhd");
    tools.vhd("modify -n b.vhd -p a.vhd");
    tools.place.fails(1, &["info", "b.vhd"]);
    tools.vhd("create -n full.vhd -s 8");
    tools.place.write("full.vhd", &[(0, 512)]);
    tools.fails(22, &format!("key -s -n full.vhd -H {hash}"));
    tools.vhd("create -n fixed.vhd -s 2 -r");
    tools.fails(22, &format!("key -s -n fixed.vhd -H {hash}"));
    tools.fails(95, "key -s -n a.vhd -k file");
}

#[test]
fn names_may_have_blanks_and_colons() {
    let tools = Tools::new();
    let long = format!("{}.vhd", "n".repeat(200));
    for (base, leaf) in [("a b:c.vhd", "vhd: d.vhd"), ("raw:x.vhd", &*long)] {
        let run = |args: &[&str]| {
            let output = tools.run("vhd-util", args);
            assert!(output.status.success(), "{args:?}: {output:?}");
        };
        run(&["create", "-n", base, "-s", "8"]);
        run(&["snapshot", "-n", leaf, "-p", base, "-e"]);
        run(&["modify", "-n", leaf, "-p", base]);
        run(&["coalesce", "-n", leaf]);
        run(&["resize", "-n", leaf, "-s", "16", "-j", "a journal"]);
        let path = format!("vhd:{}", tools.place.path(leaf));
        assert_eq!(tools.parents(&path), [base]);
    }
}

#[test]
fn the_commands_in_the_documentation_work() {
    let (_, section) = PAGE.split_once(SECTION).unwrap();
    let script = pages::commands(section.split("\n## ").next().unwrap());
    for verb in ["create", "snapshot", "set", "modify", "resize", "coalesce", "repair", "key"] {
        assert!(script.contains(&format!("ferrite compat vhd-util {verb} ")), "{verb}");
    }
    for verb in ["create", "snapshot"] {
        assert!(script.contains(&format!("ferrite compat td-util {verb} ")), "{verb}");
    }
    pages::run(&script);
}

#[test]
fn a_snapshot_says_that_dirty_maps_do_not_go_on_with_it() {
    let tools = Tools::new();
    tools.vhd("create -n leaf.vhd -s 4");
    tools.place.ok(&["dirty", "add", "leaf.vhd", "nightly"]);
    // As the storage manager does: the leaf gets a second name, and the new image the first one's later.
    fs::hard_link(tools.place.path("leaf.vhd"), tools.place.path("parent.vhd")).unwrap();
    for (leaf, parent) in [("leaf.vhd.new", "parent.vhd"), ("other.vhd", "leaf.vhd")] {
        let output = tools.run("vhd-util", &["snapshot", "-n", leaf, "-p", parent]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && text.contains("leaf.vhd.ferrite-dirty"), "{text:?}");
    }
    tools.vhd("snapshot -n third.vhd -p parent.vhd");
}
