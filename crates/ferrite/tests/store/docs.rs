//! The commands of docs/store.md, as printed there, and the names in their JSON.

use std::collections::BTreeSet;
use std::fs;

use ferrite_testkit::is_night;

use crate::images::{Place, json};
use crate::pages::{self, add_names, quoted};

const PAGE: &str = include_str!("../../../../docs/store.md");

#[test]
fn the_commands_in_the_documentation_work() {
    let script = pages::commands(PAGE);
    for command in ["create", "list", "info", "snapshot", "clone", "rollback", "delete"]
        .into_iter()
        .chain(["rename", "resize", "grow", "send", "receive"])
        .chain(["stats", "check", "scrub", "repair", "gc", "compact"])
    {
        assert!(script.contains(&format!("ferrite store {command} ")), "{command} has no example");
    }
    if is_night() {
        return pages::run(&script);
    }
    // The tables of the page's stores take 400 MB, and each command a fifth of a second.
    assert!(script.contains("--size 100G") && script.contains("grow pool.store +20G"));
    pages::run(
        &script.replace("--size 100G", "--size 4G").replace("pool.store +20G", "pool.store +1G"),
    );
}

/// All field names of the commands' output.
fn printed() -> BTreeSet<String> {
    let place = Place::new();
    let mut names = BTreeSet::new();
    for command in [
        &["create", "s", "--size", "64M"][..],
        &["create", "s#a", "1G"],
        &["snapshot", "s#a", "b"],
        &["info", "s"],
        &["info", "s#b"],
        &["list", "s"],
        &["grow", "s", "128M"],
        &["stats", "s"],
        &["gc", "s"],
        &["compact", "s", "--compress", "zstd"],
    ] {
        add_names(&json(&place.store_ok(&[command, &["--json"]].concat())), &mut names);
    }
    let mut bytes = fs::read(place.path("s")).unwrap();
    bytes[100] ^= 1;
    fs::write(place.path("s"), &bytes).unwrap();
    for command in [&["check", "s"][..], &["repair", "--force", "s"]] {
        add_names(&json(&place.store_ok(&[command, &["--json"]].concat())), &mut names);
    }
    names
}

#[test]
fn the_table_of_json_names_is_complete_and_has_nothing_else() {
    let rows = pages::rows(PAGE, "JSON");
    let table: BTreeSet<String> = rows.iter().flat_map(|row| quoted(row[0])).collect();
    let printed = printed();
    let missing: Vec<_> = printed.difference(&table).collect();
    assert!(missing.is_empty(), "not in docs/store.md: {missing:?}");
    let unused: Vec<_> = table.difference(&printed).collect();
    assert!(unused.is_empty(), "in docs/store.md and never printed: {unused:?}");
}
