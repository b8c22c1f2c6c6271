//! Diagrams of a recording: one page of HTML without references to other files.
//!
//! The page contains its data, so these are bounded: the first requests one by one, and the whole recording as counts.

use std::collections::BTreeMap;
use std::io::{self, Write};

use ferrite_serve::trace::{Doing, Metadata, Noticed, Record};
use serde::Serialize;

use super::export::lines;
use super::model::{Fit, fits};
use super::{Line, STAGES, Trace, latency_ns, operation, stages};

/// The requests that are shown one by one.
const SHOWN: usize = 4000;
/// The spans that are shown one by one.
const SHOWN_SPANS: usize = 16_000;
/// Columns of the diagrams over time.
const COLUMNS: usize = 120;
/// Rows of the heat map for each doubling, from a microsecond on.
const ROWS_A_DOUBLING: u32 = 2;
const ROWS: usize = 52;
/// The most bars of sizes, and of numbers of pieces.
const BARS: usize = 64;

const PARTS: [&str; 6] = [
    include_str!("page/head.html"),
    include_str!("page/uplot/uPlot.min.css"),
    include_str!("page/page.css"),
    include_str!("page/body.html"),
    include_str!("page/uplot/uPlot.iife.min.js"),
    include_str!("page/page.js"),
];

/// Writes the page.
///
/// # Errors
/// The writer's.
pub fn html(trace: &Trace, mut to: impl Write) -> io::Result<()> {
    let [head, plots_css, css, body, plots, script] = PARTS;
    // JSON without this character cannot end the script.
    let data = serde_json::to_string(&Data::of(trace))?.replace('<', "\\u003c");
    let title = format!("<title>{}</title>", escaped(&format!("{}: trace", trace.disk)));
    for part in [head, &title, "<style>", plots_css, css, "</style></head>\n", body] {
        to.write_all(part.as_bytes())?;
    }
    for part in ["<script type=\"application/json\" id=\"data\">", &data, "</script>\n<script>"] {
        to.write_all(part.as_bytes())?;
    }
    for part in [plots, "</script>\n<script>", script, "</script>\n</body></html>\n"] {
        to.write_all(part.as_bytes())?;
    }
    to.flush()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The data of the page. Times are in microseconds; those of single requests in nanoseconds since the beginning.
#[derive(Serialize)]
struct Data<'a> {
    disk: &'a str,
    image: &'a str,
    began_unix_ms: u64,
    seconds: f64,
    requests: usize,
    lost_requests: u64,
    lost_spans: u64,
    /// Numbers and names of queues and clients.
    lines: Vec<(u16, String)>,
    stage_names: [&'static str; 5],
    operations: Vec<Latencies>,
    stages: Vec<Latencies>,
    /// The time from a request's answer to its consumption by the guest.
    unnoticed: Option<Latencies>,
    fits: Vec<Fit>,
    over_time: OverTime,
    /// Numbers of reads and writes by KiB.
    sizes: Vec<(f64, u64, u64)>,
    /// Numbers of requests by the pieces of their operation.
    sharing: Vec<(u16, u64)>,
    noticed: Vec<(String, usize)>,
    hits: usize,
    misses: usize,
    notified: usize,
    errors: usize,
    shown: Vec<Shown>,
    spans: Vec<(u16, u8, u64, u64)>,
}

/// Times of many requests.
#[derive(Serialize)]
struct Latencies {
    operation: &'static str,
    stage: &'static str,
    n: usize,
    bytes: u64,
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
}

#[derive(Serialize)]
struct OverTime {
    column_s: f64,
    per_s: Vec<f64>,
    mb_per_s: Vec<f64>,
    p50_us: Vec<Option<f64>>,
    p99_us: Vec<Option<f64>>,
    /// Microseconds at which rows of `heat` begin.
    rows_us: Vec<f64>,
    /// Numbers of requests by column and row.
    heat: Vec<Vec<u32>>,
}

/// A request: queue, operation, when it was taken, its stages, bytes, sector, segments, status, noticed, metadata,
/// operation of storage, pieces that shared it, notified, and the interval in which the guest consumed the answer.
#[derive(Serialize)]
struct Shown(
    u16,
    &'static str,
    u64,
    [Option<u64>; 5],
    u32,
    String,
    u16,
    i16,
    String,
    String,
    u32,
    u16,
    bool,
    Option<(u64, u64)>,
);

impl<'a> Data<'a> {
    fn of(trace: &'a Trace) -> Data<'a> {
        let records = || trace.requests.iter().map(|(_, record)| record);
        let count = |is: &dyn Fn(&Record) -> bool| records().filter(|record| is(record)).count();
        let consumed = consumed(trace);
        let since = |ns: u64| ns.saturating_sub(trace.from_ns);
        let late = records().zip(&consumed).filter_map(|(record, seen)| {
            seen.map(|(_, by_ns)| by_ns.saturating_sub(record.stages.answered_ns))
        });
        let shown: Vec<_> = trace.requests.iter().zip(&consumed).take(SHOWN).collect();
        let until_ns = shown.iter().map(|((_, r), _)| r.stages.answered_ns).max().unwrap_or(0);
        Data {
            disk: &trace.disk,
            image: &trace.image,
            began_unix_ms: trace.began_unix_ns / 1_000_000,
            seconds: since(trace.until_ns) as f64 / 1e9,
            requests: trace.requests.len(),
            lost_requests: trace.lost_requests,
            lost_spans: trace.lost_spans,
            lines: lines(trace).into_iter().map(|n| (n, Line::of(n).to_string())).collect(),
            stage_names: STAGES,
            operations: by_operation(trace),
            stages: by_stage(trace),
            unnoticed: Latencies::of("", "unnoticed", 0, late.collect()),
            fits: fits(trace),
            over_time: over_time(trace),
            sizes: sizes(trace),
            sharing: sharing(trace),
            noticed: Noticed::ALL
                .iter()
                .map(|noticed| (noticed.to_string(), count(&|r| r.noticed == *noticed)))
                .collect(),
            hits: count(&|r| r.metadata == Metadata::Hit),
            misses: count(&|r| r.metadata == Metadata::Miss),
            notified: count(&|r| r.notified),
            errors: count(&|r| r.status != 0),
            shown: shown.into_iter().map(|((q, r), seen)| Shown::of(*q, r, *seen, since)).collect(),
            spans: spans(trace, until_ns),
        }
    }
}

impl Shown {
    fn of(queue: u16, r: &Record, seen: Option<(u64, u64)>, since: impl Fn(u64) -> u64) -> Shown {
        Shown(
            queue,
            operation(r),
            since(r.stages.taken_ns),
            stages(r),
            r.bytes,
            // JavaScript has no numbers of 64 bits.
            r.sector.to_string(),
            r.segments,
            r.status,
            r.noticed.to_string(),
            r.metadata.to_string(),
            r.transfer,
            r.sharing,
            r.notified,
            seen.map(|(from, by)| (since(from), since(by))),
        )
    }
}

impl Latencies {
    fn of(
        operation: &'static str,
        stage: &'static str,
        bytes: u64,
        mut ns: Vec<u64>,
    ) -> Option<Latencies> {
        ns.sort_unstable();
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |part: f64| us(ns[((ns.len() as f64 * part) as usize).min(ns.len() - 1)]);
        let max_us = us(*ns.last()?);
        let mean_us = ns.iter().map(|ns| us(*ns)).sum::<f64>() / ns.len() as f64;
        let (p50_us, p99_us, p999_us) = (at(0.5), at(0.99), at(0.999));
        let n = ns.len();
        Some(Latencies { operation, stage, n, bytes, mean_us, p50_us, p99_us, p999_us, max_us })
    }
}

fn by_operation(trace: &Trace) -> Vec<Latencies> {
    let mut all: BTreeMap<&'static str, (u64, Vec<u64>)> = BTreeMap::new();
    for (_, record) in &trace.requests {
        let (bytes, ns) = all.entry(operation(record)).or_default();
        *bytes = bytes.saturating_add(u64::from(record.bytes));
        ns.push(latency_ns(record));
    }
    all.into_iter()
        .filter_map(|(name, (bytes, ns))| Latencies::of(name, "all", bytes, ns))
        .collect()
}

fn by_stage(trace: &Trace) -> Vec<Latencies> {
    let mut all: BTreeMap<(&'static str, usize), Vec<u64>> = BTreeMap::new();
    for (_, record) in &trace.requests {
        for (i, took) in stages(record).into_iter().enumerate() {
            if let Some(ns) = took {
                all.entry((operation(record), i)).or_default().push(ns);
            }
        }
    }
    let of = |((name, i), ns)| Latencies::of(name, STAGES[i], 0, ns);
    all.into_iter().filter_map(of).collect()
}

/// For each request, the interval in which the guest consumed its answer (docs/internals/trace.md 1, rule 9).
fn consumed(trace: &Trace) -> Vec<Option<(u64, u64)>> {
    let mut seen = vec![None; trace.requests.len()];
    for queue in lines(trace) {
        let mut spans = trace.spans.iter().filter(|(q, _)| *q == queue).filter_map(|(_, span)| {
            match span.doing {
                Doing::Consumed(answers) => Some((answers, span.from_ns, span.to_ns)),
                _ => None,
            }
        });
        let mut here: Vec<usize> =
            (0..trace.requests.len()).filter(|i| trace.requests[*i].0 == queue).collect();
        here.sort_by_key(|i| trace.requests[*i].1.stages.answered_ns);
        let mut span = spans.next();
        for i in here {
            let record = &trace.requests[i].1;
            let answered_ns = record.stages.answered_ns;
            while let Some((answers, _, to_ns)) = span
                && ((answers.wrapping_sub(record.answer) as i32) < 0 || to_ns < answered_ns)
            {
                span = spans.next();
            }
            seen[i] = span.map(|(_, from_ns, to_ns)| (from_ns.max(answered_ns), to_ns));
        }
    }
    seen
}

fn over_time(trace: &Trace) -> OverTime {
    let all_ns = trace.until_ns.saturating_sub(trace.from_ns).max(1);
    let column_ns = all_ns.div_ceil(COLUMNS as u64);
    let column_s = column_ns as f64 / 1e9;
    let mut columns: Vec<(u64, Vec<u64>)> = vec![Default::default(); COLUMNS];
    let mut heat = vec![vec![0_u32; ROWS]; COLUMNS];
    for (_, record) in &trace.requests {
        let at_ns = record.stages.answered_ns.saturating_sub(trace.from_ns);
        let column = usize::try_from(at_ns / column_ns).unwrap_or(COLUMNS).min(COLUMNS - 1);
        let latency_ns = latency_ns(record);
        columns[column].0 = columns[column].0.saturating_add(u64::from(record.bytes));
        columns[column].1.push(latency_ns);
        heat[column][row(latency_ns)] += 1;
    }
    let per_s = columns.iter().map(|(_, ns)| ns.len() as f64 / column_s).collect();
    let mb_per_s = columns.iter().map(|(bytes, _)| *bytes as f64 / 1e6 / column_s).collect();
    let latencies: Vec<_> =
        columns.into_iter().map(|(_, ns)| Latencies::of("", "all", 0, ns)).collect();
    let rows_us = (0..ROWS).map(|n| 2_f64.powf(n as f64 / f64::from(ROWS_A_DOUBLING)));
    OverTime {
        column_s,
        per_s,
        mb_per_s,
        p50_us: latencies.iter().map(|l| l.as_ref().map(|l| l.p50_us)).collect(),
        p99_us: latencies.iter().map(|l| l.as_ref().map(|l| l.p99_us)).collect(),
        rows_us: rows_us.collect(),
        heat,
    }
}

/// The row in the heat map.
fn row(ns: u64) -> usize {
    let doublings = (ns as f64 / 1e3).max(1.0).log2();
    ((doublings * f64::from(ROWS_A_DOUBLING)) as usize).min(ROWS - 1)
}

fn sizes(trace: &Trace) -> Vec<(f64, u64, u64)> {
    let mut all: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for (_, record) in &trace.requests {
        let (reads, writes) = all.entry(record.bytes).or_default();
        match operation(record) {
            "read" => *reads += 1,
            "write" | "barrier" => *writes += 1,
            _ => {}
        }
    }
    let data = all.into_iter().filter(|(_, (reads, writes))| reads + writes > 0);
    let mut bars: Vec<_> =
        data.map(|(bytes, (reads, writes))| (f64::from(bytes) / 1024.0, reads, writes)).collect();
    // The most frequent ones, in order of size.
    bars.sort_by_key(|(_, reads, writes)| std::cmp::Reverse(reads + writes));
    bars.truncate(BARS);
    bars.sort_by(|a, b| a.0.total_cmp(&b.0));
    bars
}

fn sharing(trace: &Trace) -> Vec<(u16, u64)> {
    let mut all: BTreeMap<u16, u64> = BTreeMap::new();
    for (_, record) in trace.requests.iter().filter(|(_, record)| record.transfer != 0) {
        *all.entry(record.sharing.min(BARS as u16)).or_default() += 1;
    }
    all.into_iter().collect()
}

/// The activities of threads until then: queue, kind, from, to.
fn spans(trace: &Trace, until_ns: u64) -> Vec<(u16, u8, u64, u64)> {
    let since = |ns: u64| ns.saturating_sub(trace.from_ns);
    let shown = trace.spans.iter().filter(|(_, span)| span.from_ns <= until_ns);
    let of_threads = shown.filter_map(|(queue, span)| {
        let kind = match span.doing {
            Doing::Polled(false) => 0,
            Doing::Polled(true) => 1,
            Doing::Slept => 2,
            Doing::WokenByEvent => 3,
            // It belongs to the requests.
            Doing::Consumed(_) => return None,
        };
        Some((*queue, kind, since(span.from_ns), since(span.to_ns)))
    });
    of_threads.take(SHOWN_SPANS).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::trace;
    use super::*;

    fn page(trace: &Trace) -> String {
        let mut page = Vec::new();
        html(trace, &mut page).unwrap();
        String::from_utf8(page).unwrap()
    }

    fn data(page: &str) -> serde_json::Value {
        let rest = page.split_once("id=\"data\">").unwrap().1;
        serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
    }

    #[test]
    fn a_page_has_all_that_it_shows_and_no_name_ends_its_script() {
        let trace = trace(100);
        let page = page(&trace);
        let data = data(&page);
        assert_eq!((&data["disk"], &data["image"]), (&trace.disk.into(), &trace.image.into()));
        assert_eq!((data["requests"].as_u64(), data["hits"].as_u64()), (Some(100), Some(75)));
        assert_eq!(data["shown"].as_array().unwrap().len(), 100);
        assert_eq!(data["spans"].as_array().unwrap().len(), 200);
        let heat = data["over_time"]["heat"].as_array().unwrap();
        let counts = heat.iter().flat_map(|rows| rows.as_array().unwrap());
        assert_eq!(counts.map(|n| n.as_u64().unwrap()).sum::<u64>(), 100);
        assert_eq!(data["sizes"].as_array().unwrap().len(), 8);
        assert_eq!(data["sharing"], serde_json::json!([[2, 100]]));
    }

    /// Addresses are only in comments and namespaces, and the page's policy forbids requests.
    #[test]
    fn a_page_asks_nobody_for_anything() {
        let page = page(&trace(10));
        assert!(page.contains("default-src 'none'"));
        for sign in ["src=\"http", "href=\"http", "@import", "url(http", "fetch(", "XMLHttp"] {
            assert!(!page.contains(sign), "{sign}");
        }
    }

    #[test]
    fn a_page_of_a_long_recording_is_bounded() {
        let (short, long) = (page(&trace(SHOWN as u64)), page(&trace(3 * SHOWN as u64)));
        assert!(long.len() < short.len() + short.len() / 10, "{} {}", short.len(), long.len());
        assert_eq!(data(&long)["requests"], 3 * SHOWN);
        assert_eq!(data(&page(&Trace::default()))["requests"], 0);
    }

    #[test]
    fn an_answer_is_consumed_when_the_guest_was_first_seen_to_have_it() {
        let mut trace = trace(4);
        assert_eq!(consumed(&trace)[0], Some((1_025_400, 1_030_400)));
        // The first reading finds both of the queue's answers consumed.
        trace.spans.retain(|(_, span)| span.doing != Doing::Consumed(1));
        let [first, _, second, _] = consumed(&trace)[..] else { panic!() };
        assert_eq!((first.unwrap().1, first.unwrap()), (second.unwrap().1, second.unwrap()));
        // There are no readings.
        trace.spans.clear();
        assert_eq!(consumed(&trace), [None; 4]);
    }
}
