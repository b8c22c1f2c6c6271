//! The commands of docs/images.md, as printed there, and the names in their JSON.

use std::collections::BTreeSet;
use std::fs;

use crate::images::{MIB, Place, json, qemu_img};
use crate::pages::{self, add_names, quoted};

const PAGE: &str = include_str!("../../../../docs/images.md");

#[test]
fn the_commands_in_the_documentation_work() {
    let script = pages::commands(PAGE);
    for command in ["create", "info", "snapshot", "clone", "convert", "check", "repair", "resize"]
        .into_iter()
        .chain(["coalesce", "rebase", "map", "compare", "du", "dirty"])
    {
        assert!(script.contains(&format!("ferrite image {command} ")), "{command} has no example");
    }
    pages::run(&script);
}

/// All field names of the commands' output, on images of every kind.
fn printed() -> BTreeSet<String> {
    let place = Place::new();
    place.pattern("a.img", 4 * MIB, &[(MIB, MIB)]);
    place.ok(&["convert", "a.img", "a.qcow2"]);
    let _ = qemu_img(&["bitmap", "--add", &place.path("a.qcow2"), "changes"]);
    place.ok(&["create", "damaged.vhd", "4M"]);
    // Its second footer.
    let file = fs::File::options().write(true).open(place.path("damaged.vhd")).unwrap();
    file.set_len(file.metadata().unwrap().len() - 512).unwrap();
    place.ok(&["dirty", "add", "a.img", "nightly"]);
    for end in ["", ".ferrite-dirty"] {
        fs::copy(place.path(&format!("a.img{end}")), place.path(&format!("copy.img{end}")))
            .unwrap();
    }
    let mut names = BTreeSet::new();
    for command in [
        &["dirty", "list", "copy.img"][..],
        &["dirty", "show", "a.img", "nightly"],
        &["clone", "a.img", "leaf.vhd"][..],
        &["convert", "a.img", "b.vhd"],
        &["resize", "b.vhd", "8M"],
        &["snapshot", "b.vhd", "c.vhd"],
        &["coalesce", "b.vhd"],
        &["info", "leaf.vhd"],
        &["info", "a.qcow2"],
        &["du", "leaf.vhd"],
        &["map", "leaf.vhd"],
        &["check", "--chain", "leaf.vhd"],
        &["check", "damaged.vhd"],
        &["repair", "--force", "damaged.vhd"],
        &["compare", "a.img", "leaf.vhd"],
        &["snapshot", "-c", "first", "a.qcow2"],
        &["info", "a.qcow2"],
    ] {
        add_names(&json(&place.ok(&[command, &["--json"]].concat())), &mut names);
    }
    add_names(&json(&place.ok(&["measure", "a.img", "--json"])), &mut names);
    let differ = place.image(&["compare", "a.img", "a.qcow2", "-s", "--json"]);
    add_names(&json(&String::from_utf8(differ.stdout).unwrap()), &mut names);
    let size = fs::metadata(place.path("b.vhd")).unwrap().len();
    fs::File::options()
        .write(true)
        .open(place.path("b.vhd"))
        .unwrap()
        .set_len(size - 4096)
        .unwrap();
    let salvaged = place.image(&["convert", "--salvage", "b.vhd", "saved.img", "--json"]);
    add_names(&json(&String::from_utf8(salvaged.stdout).unwrap()), &mut names);
    fs::remove_file(place.path("a.img")).unwrap();
    let chain = place.image(&["info", "leaf.vhd", "--json"]);
    add_names(&json(&String::from_utf8(chain.stdout).unwrap()), &mut names);
    names
}

#[test]
fn the_table_of_json_names_is_complete_and_has_nothing_else() {
    let rows = pages::rows(PAGE, "JSON");
    let mut table: BTreeSet<String> = rows.iter().flat_map(|row| quoted(row[0])).collect();
    let mut of_snapshots = BTreeSet::new();
    for list in ["snapshots", "bitmaps"] {
        let row = rows.iter().find(|row| row[0].contains(&format!("`{list}`"))).unwrap();
        of_snapshots.extend(quoted(row[2]));
        of_snapshots.insert(list.to_owned());
    }
    table.extend(of_snapshots.clone());
    let printed = printed();
    let missing: Vec<_> = printed.difference(&table).collect();
    assert!(missing.is_empty(), "not in docs/images.md: {missing:?}");
    let mut unused: Vec<_> = table.difference(&printed).collect();
    if !printed.contains("snapshots") {
        // There is no QEMU here to make one.
        unused.retain(|name| !of_snapshots.contains(*name));
    }
    assert!(unused.is_empty(), "in docs/images.md and never printed: {unused:?}");
}
