use ferrite_seeing::rates::{KindRates, Rates};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;

fn disk(domain: u32, reads: f64, p50_us: Option<f64>) -> Rates {
    let read = KindRates { per_s: reads, bytes_per_s: reads * 4096.0, ..KindRates::default() };
    Rates {
        disk: format!("vbd-{domain}-51712"),
        name: format!("guest{domain}/xvda"),
        image: "/a.vhd".into(),
        pid: 7,
        alive: true,
        seconds: 1.0,
        read,
        write: KindRates::default(),
        flush: KindRates::default(),
        discard: KindRates::default(),
        data: KindRates { p50_us, ..read },
        queue_depth: 0.5,
        metadata_miss_percent: None,
        poll_hit_percent: Some(50.0),
        cpu_percent: Some(12.5),
        limits: [("iops", 300)].into(),
        limit_waits_percent: Some(25.0),
        errors: 0,
    }
}

fn view() -> View {
    let mut view = View::new(Duration::from_secs(1));
    let disks = vec![disk(1, 10.0, None), disk(2, 300.0, Some(20.0)), disk(3, 20.0, Some(90.0))];
    view.show(disks, &[]);
    view
}

/// The lines of a screen of this size.
fn screen(view: &View, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view.draw(frame)).unwrap();
    let buffer = terminal.backend().buffer();
    let cell = |x, y| buffer[(x, y)].symbol().to_owned();
    let line = |y| (0..width).map(|x| cell(x, y)).collect::<String>().trim_end().to_owned();
    (0..height).map(line).collect()
}

/// The disks in the order of their lines.
fn order(view: &View) -> Vec<String> {
    let names = |line: &String| line.strip_prefix("guest").map(|rest| rest[..1].to_owned());
    screen(view, 150, 10).iter().filter_map(names).collect()
}

#[test]
fn a_screen_has_all_disks_and_the_keys() {
    let lines = screen(&view(), 150, 8);
    assert_eq!(lines[0], "3 disks, 330 IO/s, 1.4 MB/s, every 1 s");
    assert!(lines[1].starts_with("disk") && lines[1].ends_with("lim%"), "{lines:#?}");
    assert!(lines[2].starts_with("guest1/xvda "), "{lines:#?}");
    let words: Vec<&str> = lines[3].split_whitespace().collect();
    assert_eq!(words[..7], ["guest2/xvda", "300", "0", "1.2", "0.0", "0", "20.0us"]);
    assert_eq!((lines[5].as_str(), lines[6].as_str()), ("", ""));
    assert!(lines[7].starts_with("q ends"), "{lines:#?}");
}

#[test]
fn a_terminal_of_80_columns_shows_errors_and_no_disks_are_no_requests() {
    assert!(screen(&view(), 80, 8)[1].contains(" err "));
    let none = View::new(Duration::from_secs(1));
    assert_eq!(screen(&none, 80, 8)[0], "0 disks, 0 IO/s, 0.0 MB/s, every 1 s");
}

#[test]
fn columns_sort_and_turn_and_go_round() {
    let mut view = view();
    assert_eq!(order(&view), ["1", "2", "3"]);
    view.follow(Wish::Sort(1));
    assert_eq!(order(&view), ["2", "3", "1"], "by reads");
    view.follow(Wish::Reverse);
    assert_eq!(order(&view), ["1", "3", "2"]);
    view.follow(Wish::Reverse);
    (0..5).for_each(|_| view.follow(Wish::Sort(1)));
    assert_eq!(order(&view), ["3", "2", "1"], "by p50, disks without one last");
    (0..10).for_each(|_| view.follow(Wish::Sort(1)));
    assert_eq!(order(&view), ["1", "2", "3"], "by name again");
    view.follow(Wish::Sort(-1));
    view.follow(Wish::Sort(1));
    assert_eq!(order(&view), ["1", "2", "3"]);
}

#[test]
fn it_scrolls_as_far_as_there_are_disks() {
    let mut view = view();
    view.follow(Wish::Scroll(1));
    assert_eq!(order(&view), ["2", "3"]);
    view.follow(Wish::Scroll(10));
    assert_eq!(order(&view), ["3"]);
    view.show(vec![disk(9, 1.0, None)], &[]);
    assert_eq!(order(&view), ["9"], "the others are gone");
    view.follow(Wish::Scroll(-10));
    assert_eq!(order(&view), ["9"]);
    view.show(Vec::new(), &[]);
    view.follow(Wish::Scroll(1));
    assert!(order(&view).is_empty());
}

#[test]
fn what_is_no_disk_is_named_and_harms_no_terminal() {
    let mut view = view();
    view.show(Vec::new(), &["x\u{1b}[31m: it is no file of counters".into()]);
    let lines = screen(&view, 60, 5);
    assert_eq!(lines[4], "x\\u{1b}[31m: it is no file of counters");
    let mut odd = disk(1, 1.0, None);
    odd.name = "a\u{1b}[2J".into();
    view.show(vec![odd], &[]);
    assert!(screen(&view, 60, 5)[2].starts_with("a\\u{1b}[2J"));
}

#[test]
fn interfaces_are_below_the_disks_with_what_they_did_in_a_second() {
    let folder = tempfile::tempdir().unwrap();
    let write = |sent: u64| {
        let text = format!(
            r#"{{"switch":"lan","interfaces":[{{"domid":3,"handle":1,"counts":{{"sent_packets":{sent},"spoofed":9}}}}]}}"#
        );
        std::fs::write(folder.path().join("lan.json"), text).unwrap();
    };
    let mut view = view();
    let mut interfaces = Interfaces::new(folder.path());
    interfaces.look(&mut view);
    assert!(!screen(&view, 120, 12).iter().any(|line| line.contains("interface")));
    write(1_000_000);
    interfaces.look(&mut view);
    std::thread::sleep(Duration::from_millis(10));
    write(2_000_000);
    interfaces.look(&mut view);
    let lines = screen(&view, 120, 12);
    assert!(lines[8].is_empty() && lines[9].starts_with("interface"), "{lines:#?}");
    let words: Vec<&str> = lines[10].split_whitespace().collect();
    assert_eq!(words[..2], ["vif3.1", "lan"]);
    assert!(words[2].parse::<u64>().unwrap() > 1000 && words.last() == Some(&"0"), "{words:?}");
    assert!(lines[2].starts_with("guest1/xvda"), "{lines:#?}");
    assert!(lines[11].starts_with("q ends"));
    // They leave half of a small screen to the disks.
    assert!(screen(&view, 120, 4)[2].starts_with("guest1"), "{:#?}", screen(&view, 120, 4));
    std::fs::write(folder.path().join("bad.json"), "{").unwrap();
    interfaces.look(&mut view);
    assert!(screen(&view, 120, 12)[11].contains("bad.json"));
}

#[test]
fn any_size_of_screen_will_do() {
    for (width, height) in [(1, 1), (1, 5), (200, 1), (3, 2), (20, 3), (40, 4), (500, 100)] {
        assert_eq!(screen(&view(), width, height).len(), usize::from(height));
    }
}

#[test]
fn keys_are_what_the_last_line_says() {
    let key = |code| wish(KeyEvent::new(code, KeyModifiers::NONE));
    assert_eq!(key(KeyCode::Char('q')), Some(Wish::Quit));
    assert_eq!(key(KeyCode::Char('>')), Some(Wish::Sort(1)));
    assert_eq!(key(KeyCode::Char('r')), Some(Wish::Reverse));
    assert_eq!(key(KeyCode::Up), Some(Wish::Scroll(-1)));
    assert_eq!(key(KeyCode::Char('c')), None);
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(wish(control_c), Some(Wish::Quit));
}

/// Not a test: a program that fails on a terminal.
#[test]
fn process_that_panics() {
    if std::env::var_os(PANICS).is_some() {
        let _screen = super::screen::Screen::enter().unwrap();
        panic!("on purpose");
    }
}

const PANICS: &str = "FERRITE_TEST_PANICS";

#[test]
fn a_panic_is_told_on_the_screen_that_was_there_before() {
    let program = std::env::current_exe().unwrap();
    let name = "seeing::top::tests::process_that_panics";
    let line = format!("stty cols 80 rows 24; {} --exact {name} --nocapture", program.display());
    let mut script = std::process::Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    script.env(PANICS, "1").env("TERM", "xterm").stdin(std::process::Stdio::null());
    let shown = script.output().expect("script(1) of bsdutils runs").stdout;
    let shown = String::from_utf8(shown).unwrap();
    let (enters, leaves) = (shown.find("\u{1b}[?1049h"), shown.find("\u{1b}[?1049l"));
    assert!(enters.is_some() && enters < leaves && leaves < shown.find("on purpose"), "{shown:?}");
}
