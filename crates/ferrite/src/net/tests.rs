use ferrite_seeing::interfaces::read;

use super::stat::table;
use super::*;

fn switch() -> Switch {
    let counts = [("sent_packets", 12), ("spoofed", 2), ("malformed", 3), ("starved", 4)];
    let counts = counts.map(|(name, count)| (name.to_owned(), count)).into();
    let interfaces = vec![Interface { domid: 7, handle: 1, counts }];
    Switch { switch: "lan".into(), uplink: None, interfaces }
}

#[test]
fn the_counters_of_a_switch_are_in_its_file_while_it_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let file = Counted::claim(folder.path(), "lan").unwrap();
    file.write(&switch()).unwrap();
    assert_eq!(read(folder.path()).unwrap(), (vec![switch()], vec![]));
    drop(file);
    assert_eq!(read(folder.path()).unwrap(), (vec![], vec![]));
}

#[test]
fn a_host_has_one_switch() {
    let folder = tempfile::tempdir().unwrap();
    let file = Counted::claim(folder.path(), "lan").unwrap();
    let refused = Counted::claim(folder.path(), "other").err().unwrap();
    assert_eq!(refused.code, Code::BUSY);
    drop(file);
    assert!(Counted::claim(folder.path(), "other").is_ok());
}

#[test]
fn files_of_others_are_problems_and_the_rest_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = Counted::claim(folder.path(), "lan").unwrap();
    file.write(&switch()).unwrap();
    std::fs::write(folder.path().join("bad.json"), "{").unwrap();
    let (switches, problems) = read(folder.path()).unwrap();
    assert_eq!((switches.len(), problems.len()), (1, 1), "{problems:?}");
}

#[test]
fn the_table_has_a_line_for_each_interface() {
    let text = table(&[switch()]);
    let line: Vec<_> = text.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(line, ["vif7.1", "lan", "12", "0", "0", "0", "0", "4", "5"]);
}

#[test]
fn the_name_of_a_switch_is_no_path() {
    assert!(switch_name("lan-1").is_ok());
    for bad in ["", "a/b", "..", "a b", &"a".repeat(33)] {
        assert!(switch_name(bad).is_err(), "{bad:?}");
    }
}
