//! `vhd-util` and `td-util`, as XAPI's storage manager reads VHDs by them.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::process::{Command, Stdio};

use ferrite_disk::{Disk, ImageName, OpenOptions};

use crate::images::{MIB, Place};
use crate::pages;

const PAGE: &str = include_str!("../../../../docs/xapi.md");
/// The section of this program's verbs.
const SECTION: &str = "\n## vhd-util and td-util: reading\n";

/// Byte offset of the block table in images that are made here.
const TABLE_AT: u64 = 1536;

/// A folder with images, in which the programs are called.
struct Tools {
    place: Place,
    bin: tempfile::TempDir,
}

/// What a program has answered.
#[derive(Debug, PartialEq, Eq)]
struct Said {
    code: i32,
    out: Vec<u8>,
    err: String,
}

impl Said {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.out).unwrap()
    }
}

impl Tools {
    fn new() -> Tools {
        let bin = tempfile::tempdir().unwrap();
        for name in ["vhd-util", "td-util"] {
            symlink(env!("CARGO_BIN_EXE_ferrite"), bin.path().join(name)).unwrap();
        }
        Tools { place: Place::new(), bin }
    }

    fn path(&self, name: &str) -> String {
        self.place.path(name)
    }

    fn call(&self, program: &str, args: &[&str]) -> Said {
        let path = format!("{}:{}", self.bin.path().display(), std::env::var("PATH").unwrap());
        let output = Command::new(self.bin.path().join(program))
            .args(args)
            .current_dir(self.path(""))
            .env("PATH", path)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        Said { code: output.status.code().unwrap(), out: output.stdout, err }
    }

    fn vhd_util(&self, args: &[&str]) -> Said {
        self.call("vhd-util", args)
    }

    /// Calls `vhd-util`, which has to succeed without a word on standard error.
    #[track_caller]
    fn ok(&self, args: &[&str]) -> String {
        worked(&self.vhd_util(args))
    }

    /// Calls `vhd-util`, which has to fail with this status, and a line on standard error.
    #[track_caller]
    fn fails(&self, code: i32, args: &[&str]) -> String {
        failed(&self.vhd_util(args), code)
    }

    #[track_caller]
    fn td_ok(&self, args: &[&str]) -> String {
        worked(&self.call("td-util", args))
    }

    #[track_caller]
    fn td_fails(&self, code: i32, args: &[&str]) -> String {
        failed(&self.call("td-util", args), code)
    }

    fn file(&self, name: &str) -> File {
        File::options().read(true).write(true).open(self.path(name)).unwrap()
    }

    /// An empty image and a child of it: `base.vhd`, `leaf.vhd`.
    fn pair(&self) {
        self.place.ok(&["create", "base.vhd", "64M"]);
        self.place.ok(&["clone", "base.vhd", "leaf.vhd"]);
    }

    /// Copies an image under another name.
    fn copy(&self, from: &str, to: &str) {
        fs::copy(self.path(from), self.path(to)).unwrap();
        fs::set_permissions(self.path(to), fs::Permissions::from_mode(0o600)).unwrap();
    }

    /// A program in front of those of the system, which prints a file.
    fn printing(&self, name: &str, text: &str) {
        let text_path = self.bin.path().join(format!("{name}.txt"));
        fs::write(&text_path, text).unwrap();
        let path = self.bin.path().join(name);
        fs::write(&path, format!("#!/bin/sh\ncat '{}'\n", text_path.display())).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

#[track_caller]
fn worked(said: &Said) -> String {
    assert!(said.code == 0 && said.err.is_empty(), "{said:?}");
    said.text().to_owned()
}

#[track_caller]
fn failed(said: &Said, code: i32) -> String {
    assert!(said.code == code && said.err.lines().count() == 1, "{said:?}");
    said.text().to_owned()
}

#[test]
fn lines_of_query_come_in_one_order_whatever_was_asked_first() {
    let tools = Tools::new();
    tools.pair();
    tools.place.write("leaf.vhd", &[(0, 512), (40 * MIB, 512)]);
    let base = tools.path("base.vhd");
    let size = |name| tools.ok(&["query", "-s", "-n", name]).trim().parse::<u64>().unwrap();
    let leaf_bytes = size("leaf.vhd");
    assert!((4 * MIB..5 * MIB).contains(&leaf_bytes), "{leaf_bytes}");
    let all = format!("64\n{leaf_bytes}\n{base}\nhidden: 0\nchain depth: 2\n2\n64\n");
    assert_eq!(tools.ok(&["query", "--debug", "-vspfdaS", "-n", "leaf.vhd"]), all);
    assert_eq!(tools.ok(&["query", "-n", "leaf.vhd", "-S", "-a", "-dfpsv", "--debug"]), all);
    assert_eq!(tools.ok(&["--debug", "query", "-vp", "-nleaf.vhd"]), format!("64\n{base}\n"));
    assert_eq!(tools.ok(&["query", "-up", "-n", "leaf.vhd"]), "./base.vhd\n");
    assert_eq!(
        tools.ok(&["query", "-vspf", "-n", "base.vhd"]).lines().nth(2),
        Some("base.vhd has no parent")
    );
    assert_eq!(tools.ok(&["query", "-d", "-n", "base.vhd"]), "chain depth: 1\n");
    assert_eq!(tools.ok(&["query", "-n", "base.vhd"]), "");
    assert_eq!(tools.ok(&["query", "-bv", "-n", "base.vhd"]), "64\n");
}

#[test]
fn errors_are_numbers_and_texts_that_callers_know() {
    let tools = Tools::new();
    fs::write(tools.path("garbage.vhd"), "garbage\n".repeat(8192)).unwrap();
    fs::write(tools.path("empty.vhd"), "").unwrap();
    tools.place.ok(&["create", "cut.vhd", "64M"]);
    tools.file("cut.vhd").set_len(1000).unwrap();
    fs::create_dir(tools.path("folder.vhd")).unwrap();
    for (name, code) in [
        ("none.vhd", 2),
        ("garbage.vhd", 22),
        ("empty.vhd", 32),
        ("cut.vhd", 22),
        ("folder.vhd", 21),
    ] {
        let text = tools.fails(code, &["query", "-v", "-n", name]);
        assert_eq!(text, format!("error opening {name}: -{code}\n"));
        tools.fails(code, &["read", "-p", "-n", name]);
        assert_eq!(
            tools.td_fails(code, &["query", "vhd", "-v", name]),
            format!("failed opening {name}: -{code}\n")
        );
    }
    assert_eq!(tools.fails(2, &["check", "-n", "none.vhd"]), "");
    for name in ["garbage.vhd", "empty.vhd", "cut.vhd"] {
        assert_eq!(tools.fails(22, &["check", "-n", name]), "");
    }
}

#[test]
fn a_missing_parent_and_a_circle_are_errors_and_the_other_lines_are_there() {
    let tools = Tools::new();
    tools.pair();
    fs::remove_file(tools.path("base.vhd")).unwrap();
    assert_eq!(tools.fails(2, &["query", "-pf", "-n", "leaf.vhd"]), "query failed\nhidden: 0\n");
    assert_eq!(
        tools.fails(2, &["query", "-dv", "-n", "leaf.vhd"]),
        "64\nerror checking chain depth: -2\n"
    );
    assert_eq!(tools.ok(&["query", "-pu", "-n", "leaf.vhd"]), "./base.vhd\n");
    assert_eq!(
        tools.td_fails(2, &["query", "vhd", "-pf", "leaf.vhd"]),
        "failed getting parent: -2\nhidden: 0\n"
    );
    fs::hard_link(tools.path("leaf.vhd"), tools.path("base.vhd")).unwrap();
    assert_eq!(
        tools.fails(40, &["query", "-d", "-n", "leaf.vhd"]),
        "error checking chain depth: -40\n"
    );
    tools.place.ok(&["create", "fixed.vhd", "8M", "--fixed"]);
    assert_eq!(
        tools.fails(22, &["query", "-afv", "-n", "fixed.vhd"]),
        "8\nhidden: 0\nerror reading bat: -22\n"
    );
    assert_eq!(tools.ok(&["query", "-sS", "-n", "fixed.vhd"]), format!("{}\n0\n", 8 * MIB + 512));
}

#[test]
fn names_may_have_blanks_colons_and_200_characters() {
    let tools = Tools::new();
    let (odd, long) = ("a b:c 100%41.vhd", format!("{}.vhd", "n".repeat(200)));
    tools.place.ok(&["create", "base.vhd", "64M"]);
    fs::rename(tools.path("base.vhd"), tools.path(odd)).unwrap();
    tools.place.ok(&["clone", &format!("vhd:{odd}"), &format!("vhd:{long}")]);
    for leaf in [&long, &tools.path(&long)] {
        let said = tools.ok(&["query", "-p", "-n", leaf]);
        assert_eq!(said, format!("{}\n", tools.path(odd)));
        assert_eq!(tools.td_ok(&["query", "vhd", "-p", leaf]), said);
        assert_eq!(tools.ok(&["query", "-up", "-n", leaf]), format!("./{odd}\n"));
    }
    let size = tools.ok(&["query", "-s", "-n", odd]);
    let lines = tools.ok(&["scan", "-f", "-m", &tools.path("*.vhd")]);
    let first = format!("vhd={odd} capacity=67108864 size={} hidden=0 parent=none", size.trim());
    assert_eq!(lines.lines().next(), Some(&*first));
    assert!(
        lines.ends_with(&format!(
            "vhd={long} capacity=67108864 size={} hidden=0 parent={odd}\n",
            size_of(&tools, &long)
        )),
        "{lines}"
    );
    assert_eq!(tools.ok(&["check", "-n", &long]), format!("{long} is valid\n"));
}

fn size_of(tools: &Tools, name: &str) -> String {
    tools.ok(&["query", "-s", "-n", name]).trim().to_owned()
}

#[test]
fn a_parent_is_found_beside_its_child_wherever_both_are_called_from() {
    let tools = Tools::new();
    fs::create_dir(tools.path("sub")).unwrap();
    tools.place.ok(&["create", "sub/base.vhd", "64M"]);
    tools.place.ok(&["clone", "sub/base.vhd", "leaf.vhd"]);
    let base = tools.path("sub/base.vhd");
    assert_eq!(tools.ok(&["query", "-p", "-n", "leaf.vhd"]), format!("{base}\n"));
    fs::create_dir(tools.path("links")).unwrap();
    symlink("../leaf.vhd", tools.path("links/leaf.vhd")).unwrap();
    assert_eq!(tools.ok(&["query", "-p", "-n", "links/leaf.vhd"]), format!("{base}\n"));
    assert_eq!(tools.ok(&["check", "-n", "links/leaf.vhd"]), "links/leaf.vhd is valid\n");
}

#[test]
fn size_is_the_end_of_the_last_block_and_not_of_the_reserve() {
    let tools = Tools::new();
    tools.pair();
    tools.place.write("leaf.vhd", &[(6 * MIB, 512)]);
    let size = size_of(&tools, "leaf.vhd");
    let file = tools.file("leaf.vhd");
    assert_eq!(size, file.metadata().unwrap().len().to_string());
    // A worker that has it open: the footer is gone, and space is set aside behind the last block.
    file.set_len(file.metadata().unwrap().len() + 64 * MIB).unwrap();
    assert_eq!(size_of(&tools, "leaf.vhd"), size);
    let line = format!("vhd=leaf.vhd capacity=67108864 size={size} hidden=0 parent=base.vhd\n");
    assert_eq!(tools.ok(&["scan", "-f", "-m", "leaf.vhd"]), line);
}

#[test]
fn an_image_that_a_process_writes_is_read() {
    let tools = Tools::new();
    tools.pair();
    let expected = tools.ok(&["query", "-vspfdaS", "-n", "leaf.vhd"]);
    let name = ImageName::parse(&tools.path("leaf.vhd")).unwrap();
    let _open = Disk::open_image(&name, &OpenOptions::default()).unwrap();
    tools.place.fails(4, &["resize", "leaf.vhd", "128M"]);
    assert_eq!(tools.ok(&["query", "-vspfdaS", "-n", "leaf.vhd"]), expected);
    for args in [
        &["scan", "-f", "-m", "*.vhd"][..],
        &["read", "-B", "-n", "leaf.vhd"],
        &["check", "-n", "leaf.vhd"],
    ] {
        assert_eq!(tools.vhd_util(args).code, 0, "{args:?}");
    }
    assert_eq!(tools.td_ok(&["query", "vhd", "-vfb", "leaf.vhd"]), "64\nhidden: 0\n");
}

#[test]
fn scan_prints_a_line_for_each_image_and_one_for_each_that_is_broken() {
    let tools = Tools::new();
    tools.pair();
    let (base, leaf) = (size_of(&tools, "base.vhd"), size_of(&tools, "leaf.vhd"));
    let good = format!(
        "vhd=base.vhd capacity=67108864 size={base} hidden=0 parent=none\n\
         vhd=leaf.vhd capacity=67108864 size={leaf} hidden=0 parent=base.vhd\n"
    );
    let pattern = tools.path("*.vhd");
    for args in [
        &["scan", "-f", "-m", &pattern][..],
        &["scan", "-m", "*.vhd"],
        &["scan", "base.vhd", "leaf.vhd"],
    ] {
        assert_eq!(tools.ok(args), good);
    }
    fs::write(tools.path("a.vhd"), "garbage\n".repeat(8192)).unwrap();
    fs::write(tools.path("z.vhd"), "").unwrap();
    let broken = |name: &str, errno| {
        format!("vhd={} scan-error=-{errno} error-message='opening file'\n", tools.path(name))
    };
    let all = format!("{}{good}{}", broken("a.vhd", 22), broken("z.vhd", 32));
    assert_eq!(tools.fails(32, &["scan", "-f", "-m", &pattern]), all);
    assert_eq!(tools.ok(&["scan", "-f", "-m", &pattern, "-c"]), all);
    assert_eq!(tools.ok(&["scan", "-m", "*.none"]), "");
    assert_eq!(tools.ok(&["scan", "-fm", "{leaf,base}.vhd"]), good);
    let missing = "vhd=none/*.vhd scan-error=-2 error-message='failure scanning target'\n";
    assert_eq!(tools.fails(2, &["scan", "-f", "-m", "none/*.vhd"]), missing);
    assert_eq!(tools.ok(&["scan", "-fc", "-m", "none/*.vhd"]), missing);
    tools.fails(22, &["scan", "-f"]);
}

#[test]
fn scan_finds_parents_and_prints_them_as_a_tree() {
    let tools = Tools::new();
    tools.pair();
    tools.place.ok(&["clone", "leaf.vhd", "top.vhd"]);
    let line = |name: &str, parent: &str| {
        let size = size_of(&tools, name);
        format!("vhd={name} capacity=67108864 size={size} hidden=0 parent={parent}")
    };
    let [base, leaf, top] =
        [line("base.vhd", "none"), line("leaf.vhd", "base.vhd"), line("top.vhd", "leaf.vhd")];
    assert_eq!(tools.ok(&["scan", "-fa", "-m", "top.vhd"]), format!("{top}\n{leaf}\n{base}\n"));
    let tree = format!("{base}\n   {leaf}\n      {top}\n");
    assert_eq!(tools.ok(&["scan", "-fp", "-m", "*.vhd"]), tree);
    assert_eq!(tools.ok(&["scan", "-p", "-m", "top.vhd"]), format!("{top} (not found in scan)\n"));
    let whole = tools.ok(&["scan", "-v", "leaf.vhd"]);
    assert!(whole.ends_with(&format!(" parent={}\n", tools.path("base.vhd"))), "{whole}");
    fs::write(tools.path("raw.img"), vec![0; 4 << 20]).unwrap();
    tools.place.ok(&["clone", "raw.img", "on-raw.vhd"]);
    let lines = tools.ok(&["scan", "-fa", "-m", "on-raw.vhd"]);
    let raw = "vhd=raw.img capacity=4194304 size=4194304 hidden=1 parent=none";
    assert_eq!(lines.lines().nth(1), Some(raw));
    assert_eq!(tools.ok(&["query", "-d", "-n", "on-raw.vhd"]), "chain depth: 2\n");
    fs::remove_file(tools.path("raw.img")).unwrap();
    let lost = "vhd=raw.img scan-error=-2 error-message='failure scanning target'";
    assert_eq!(tools.ok(&["scan", "-fa", "-m", "on-raw.vhd"]).lines().nth(1), Some(lost));
}

/// A group with three volumes on one device, none of which is active: a VHD, its child, and one that has none.
fn group(tools: &Tools) {
    tools.pair();
    let device = tools.path("device");
    let pv = File::options().read(true).write(true).create_new(true).open(&device).unwrap();
    pv.set_len(32 * MIB).unwrap();
    for (name, extent) in [("base.vhd", 1), ("leaf.vhd", 3)] {
        let image = fs::read(tools.path(name)).unwrap();
        pv.write_all_at(&image[..image.len().min(16384)], MIB + extent * 4 * MIB).unwrap();
    }
    // The parent as libvhd names it on a volume: the name of its device.
    let header = MIB + 3 * 4 * MIB + 512;
    let mut bytes = [0; 1024];
    pv.read_exact_at(&mut bytes, header).unwrap();
    let name: Vec<u8> = "vg-VHD--base".encode_utf16().flat_map(u16::to_be_bytes).collect();
    bytes[64..576].fill(0);
    bytes[64..64 + name.len()].copy_from_slice(&name);
    bytes[36..40].fill(0);
    let sum = !bytes.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    bytes[36..40].copy_from_slice(&sum.to_be_bytes());
    pv.write_all_at(&bytes, header).unwrap();
    tools.printing("vgs", &format!("  vg 4194304 3 1 {device} 1048576\n"));
    tools.printing(
        "lvs",
        &format!(
            "  VHD-base 8388608 linear 1 0 8388608 {device}(1)\n  \
             VHD-leaf 4194304 linear 1 0 4194304 {device}(3)\n  \
             VHD-none 4194304 linear 1 0 4194304 {device}(4)\n"
        ),
    );
}

#[test]
fn volumes_that_are_not_active_are_scanned_by_the_metadata_of_lvm() {
    let tools = Tools::new();
    group(&tools);
    let base = "vhd=VHD-base capacity=67108864 size=8388608 hidden=0 parent=none\n";
    let leaf = "vhd=VHD-leaf capacity=67108864 size=4194304 hidden=0 parent=VHD-base\n";
    let none = "vhd=VHD-none scan-error=-22 error-message='opening file'\n";
    let all = [base, leaf, none].concat();
    assert_eq!(tools.fails(22, &["scan", "-f", "-m", "VHD-*", "-l", "vg"]), all);
    assert_eq!(tools.ok(&["scan", "-f", "-m", "VHD-*", "-l", "vg", "-c"]), all);
    assert_eq!(tools.ok(&["scan", "-f", "-m", "VHD-leaf", "-l", "vg"]), leaf);
    let chain = tools.ok(&["scan", "-f", "-m", "VHD-leaf", "-l", "vg", "-a"]);
    assert_eq!(chain, [leaf, base].concat());
    tools.printing("vgs", "");
    assert_eq!(tools.fails(22, &["scan", "-f", "-m", "VHD-*", "-l", "vg"]), "");
}

#[test]
fn read_prints_headers_as_text_and_blocks_as_bits() {
    let tools = Tools::new();
    tools.pair();
    tools.place.write("leaf.vhd", &[(6 * MIB, 4096), (40 * MIB, 4096)]);
    let text = tools.ok(&["read", "--debug", "-p", "-n", "leaf.vhd"]);
    let has = |line: &str| assert!(text.lines().any(|found| found == line), "{line}: {text}");
    has("Disk type           : Differencing hard disk");
    has("       decoded name : ./base.vhd");
    has("Parent name         : base.vhd");
    has("Hidden              : 0");
    let text = tools.ok(&["read", "-p", "-n", "base.vhd"]);
    assert!(
        text.contains("Disk type           : Dynamic hard disk\n") && !text.contains("decoded")
    );
    // A bit for 2 MiB, the highest first.
    let bits = tools.vhd_util(&["read", "--debug", "-B", "-n", "leaf.vhd"]);
    assert_eq!((bits.code, &*bits.out), (0, &[0x10, 0, 0x08, 0][..]));
    tools.place.ok(&["create", "fixed.vhd", "8M", "--fixed"]);
    tools.fails(22, &["read", "-B", "-n", "fixed.vhd"]);
    assert!(tools.ok(&["read", "-p", "-n", "fixed.vhd"]).contains(": Fixed hard disk\n"));
    tools.fails(22, &["read", "-n", "base.vhd"]);
}

#[test]
fn check_accepts_what_is_valid_and_names_what_is_not() {
    let tools = Tools::new();
    tools.pair();
    tools.place.write("leaf.vhd", &[(0, 512), (4 * MIB, 512)]);
    for args in [
        &["check", "--debug", "-n", "leaf.vhd"][..],
        &["check", "-n", "leaf.vhd", "-B"],
        &["check", "-in", "leaf.vhd"],
    ] {
        assert_eq!(tools.ok(args), "leaf.vhd is valid\n");
    }
    let chain = format!("leaf.vhd is valid\n{} is valid\n", tools.path("base.vhd"));
    assert_eq!(tools.ok(&["check", "-pn", "leaf.vhd"]), chain);
    // Two blocks in one place.
    tools.copy("leaf.vhd", "over.vhd");
    let file = tools.file("over.vhd");
    let mut entry = [0; 4];
    file.read_exact_at(&mut entry, TABLE_AT).unwrap();
    file.write_all_at(&entry, TABLE_AT + 4).unwrap();
    let said = tools.vhd_util(&["check", "-n", "over.vhd"]);
    assert!(said.code == 22 && said.err.contains(" over one at byte "), "{said:?}");
    assert_eq!(tools.ok(&["check", "-Bn", "over.vhd"]), "over.vhd is valid\n");
    // A block outside of the file.
    file.write_all_at(&0x0010_0000u32.to_be_bytes(), TABLE_AT + 4).unwrap();
    tools.fails(22, &["check", "-Bn", "over.vhd"]);
    // Without its last sector, as while it is open.
    tools.copy("leaf.vhd", "open.vhd");
    let file = tools.file("open.vhd");
    file.set_len(file.metadata().unwrap().len() - 512).unwrap();
    tools.fails(22, &["check", "-n", "open.vhd"]);
    assert_eq!(tools.ok(&["check", "-in", "open.vhd"]), "open.vhd is valid\n");
}

#[test]
fn check_wants_the_parent_that_an_image_was_made_on() {
    let tools = Tools::new();
    tools.pair();
    fs::rename(tools.path("base.vhd"), tools.path("gone.vhd")).unwrap();
    let said = tools.vhd_util(&["check", "-n", "leaf.vhd"]);
    assert!(
        said.code == 2 && said.err.contains("its parent \"base.vhd\" is not there"),
        "{said:?}"
    );
    tools.place.ok(&["create", "base.vhd", "64M"]);
    let said = tools.vhd_util(&["check", "-n", "leaf.vhd"]);
    assert!(said.code == 22 && said.err.contains("base.vhd has the identifier "), "{said:?}");
    assert_eq!(tools.ok(&["check", "-In", "leaf.vhd"]), "leaf.vhd is valid\n");
}

#[test]
fn without_a_verb_there_is_usage_and_wrong_options_are_refused() {
    let tools = Tools::new();
    let usage = tools.ok(&[]);
    assert!(
        usage.starts_with("usage: vhd-util COMMAND [OPTIONS]\nCOMMAND := { create | "),
        "{usage}"
    );
    let unknown = tools.vhd_util(&["frob", "-n", "x"]);
    assert_eq!((unknown.code, unknown.text()), (0, &*usage));
    for verb in ["create", "snapshot", "query", "read", "set", "repair", "resize", "coalesce"]
        .into_iter()
        .chain(["modify", "scan", "check", "revert", "key"])
    {
        let start = format!("usage: vhd-util {verb} ");
        assert!(tools.fails(22, &[verb, "-Z"]).starts_with(&start), "{verb}");
        assert!(tools.fails(22, &[verb]).starts_with(&start), "{verb}");
        assert!(tools.ok(&[verb, "-h"]).starts_with(&start), "{verb}");
    }
    for wrong in [
        &["query", "-n"][..],
        &["query", "-n", "a", "b"],
        &["query", "--version"],
        &["check", "-v"],
    ] {
        tools.fails(22, wrong);
    }
    for wrong in [
        &[][..],
        &["query"],
        &["query", "aio", "x"],
        &["frob", "vhd", "x"],
        &["query", "vhd"],
        &["query", "vhd", "-z", "x"],
        &["query", "vhd", "x", "y"],
        &["create", "vhd", "64"],
        &["snapshot", "vhd", "x"],
    ] {
        assert_eq!(tools.td_fails(22, wrong), "", "{wrong:?}");
    }
}

#[test]
fn td_util_asks_for_any_mix_of_properties() {
    let tools = Tools::new();
    tools.pair();
    let base = tools.path("base.vhd");
    let leaf = tools.path("leaf.vhd");
    assert_eq!(tools.td_ok(&["query", "vhd", "-v", &leaf]), "64\n");
    assert_eq!(tools.td_ok(&["query", "vhd", "-p", &base]), format!("{base} has no parent\n"));
    let all = format!("64\n{base}\nhidden: 0\n");
    assert_eq!(tools.td_ok(&["query", "vhd", "-vpf", &leaf]), all);
    assert_eq!(tools.td_ok(&["query", "vhd", "-vpfb", &leaf]), all);
    assert_eq!(tools.td_ok(&["query", "vhd", &leaf, "-f", "-p", "-v"]), all);
    // The end of an image that is written may be anything.
    let file = tools.file("leaf.vhd");
    let end = file.metadata().unwrap().len();
    let mut footer = [0; 512];
    file.read_exact_at(&mut footer, end - 512).unwrap();
    footer[85] = 1;
    footer[64..68].fill(0);
    let sum = !footer.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    footer[64..68].copy_from_slice(&sum.to_be_bytes());
    file.write_all_at(&footer, end - 512).unwrap();
    assert_eq!(tools.td_ok(&["query", "vhd", "-f", &leaf]), "hidden: 1\n");
    assert_eq!(tools.td_ok(&["query", "vhd", "-fb", &leaf]), "hidden: 0\n");
    assert_eq!(tools.ok(&["query", "-fb", "-n", &leaf]), "hidden: 0\n");
}

#[test]
fn an_encrypted_image_is_read_as_any_other() {
    let tools = Tools::new();
    tools.pair();
    let before = tools.ok(&["query", "-vspfdaS", "-n", "leaf.vhd"]);
    tools.ok(&["key", "-s", "-n", "leaf.vhd", "-H", &"ab".repeat(32)]);
    assert_eq!(tools.ok(&["query", "-vspfdaS", "-n", "leaf.vhd"]), before);
    assert_eq!(tools.ok(&["check", "-n", "leaf.vhd"]), "leaf.vhd is valid\n");
}

#[test]
fn the_commands_in_the_documentation_work() {
    let (_, section) = PAGE.split_once(SECTION).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let script = pages::commands(section);
    for verb in
        ["vhd-util query ", "vhd-util scan ", "vhd-util read ", "vhd-util check ", "td-util query "]
    {
        assert!(script.contains(&format!("ferrite compat {verb}")), "{verb} has no example");
    }
    pages::run(&script);
}
