//! Files of disks that other programs read: counters and traces, which a worker writes, recordings, and states.

use std::io::Write as _;
use std::sync::OnceLock;
use std::time::Instant;

use ferrite_daemon::state::{DiskId, States};
use ferrite_seeing::folder::Sample;
use ferrite_seeing::metrics::{Host, text_of};
use ferrite_seeing::rates::Rates;
use ferrite_seeing::trace::{export, file, model, report};
use ferrite_serve::counters::snapshot::{Process, of, parse};
use ferrite_serve::trace::read::Reader;

/// A file of counters: read, and shown as rates and as metrics.
pub(crate) fn counters(input: &[u8]) {
    let parsed = parse(input);
    let mut file = tempfile::tempfile().expect("there is room");
    file.write_all(input).expect("there is room");
    let read = of(&file);
    // Bytes of a file after its last queue are ignored, as in a longer text.
    assert_eq!(read.as_ref().ok(), parsed.as_ref().ok());
    let Ok(snapshot) = parsed else { return };
    let process = Some(Process { started: snapshot.started, cpu_ticks: u64::MAX });
    let (at, age_s) = (Instant::now(), 0.0);
    let now = Sample { snapshot, process, at, age_s, process_age_s: 0.0 };
    let mut before = now.clone();
    before.snapshot.reads.histogram.rotate_left(1);
    before.snapshot.counts.requests /= 2;
    for before in [None, Some(&before)] {
        let rates = Rates::between(before, &now);
        assert!(rates.read.per_s.is_finite() && rates.queue_depth.is_finite());
        assert!(rates.cpu_percent.is_none_or(f64::is_finite));
    }
    // No name and no number makes another line. The tests of `seeing` check the whole format: that takes too long here.
    static LINES: OnceLock<usize> = OnceLock::new();
    let lines = |disk: Sample| text_of(Host::default(), vec![disk]).matches('\n').count();
    let plain = || {
        let mut plain = now.clone();
        plain.snapshot.disk = "vbd-3-51712".to_owned();
        lines(plain)
    };
    let expected = *LINES.get_or_init(plain);
    assert_eq!(lines(now), expected);
}

/// A recording, with a correct checksum, or a queue's trace: read, and exported in all forms.
pub(crate) fn trace(input: &[u8]) {
    let mut traced = tempfile::tempfile().expect("there is room");
    traced.write_all(input).expect("there is room");
    if let Ok(mut reader) = Reader::of(traced)
        && let Ok(news) = reader.look()
    {
        assert!(news.records.len() <= 1024 && news.spans.len() <= 1024);
        let _ = reader.look();
    }
    let Ok(trace) = file::parse(&file::with_sum(input)) else { return };
    let mut again = Vec::new();
    file::write(&trace, &mut again).expect("there is memory");
    assert_eq!(file::parse(&again).ok().as_ref(), Some(&trace));
    for fit in model::fits(&trace) {
        assert!(fit.mean_us.is_finite() && fit.x_us.is_none_or(f64::is_finite));
    }
    let mut text = Vec::new();
    export::csv(&trace, &mut text).expect("there is memory");
    text.clear();
    export::perfetto(&trace, &mut text).expect("there is memory");
    text.clear();
    report::html(&trace, &mut text).expect("there is memory");
}

/// The state file of a disk: a state that was read and written again reads the same.
pub(crate) fn state(input: &[u8]) {
    let folder = tempfile::tempdir().expect("there is room");
    let states = States::open(folder.path()).expect("it is ours");
    let id = DiskId { domid: 3, devid: 51712 };
    let path = folder.path().join(format!("{}.json", id.file_name()));
    std::fs::write(&path, input).expect("there is room");
    let all = states.all();
    let read = || states.read(id).expect("it can be read");
    assert_eq!(all.first(), read().as_ref());
    let Some(state) = all.first() else {
        assert!(!path.exists() && path.with_extension("odd").exists());
        return;
    };
    assert_eq!(state.id, id);
    states.write(state).expect("there is room");
    assert_eq!(read().as_ref(), Some(state));
}
