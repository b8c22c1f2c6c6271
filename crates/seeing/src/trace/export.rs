//! Recordings for other programs: the JSON of Chrome's trace events, which Perfetto's page loads, and CSV.

use std::io::{self, BufWriter, Write};

use ferrite_serve::trace::{Doing, Record, Span};

use super::{STAGES, Trace, operation, stages};

/// A line a request.
///
/// # Errors
/// The writer's.
pub fn csv(trace: &Trace, to: impl Write) -> io::Result<()> {
    let mut out = BufWriter::new(to);
    writeln!(
        out,
        "queue,operation,id,sector,bytes,segments,status,noticed,metadata,transfer,sharing,\
         notified,answer,taken_ns,copied_in_ns,submitted_ns,completed_ns,copied_out_ns,answered_ns"
    )?;
    for (queue, r) in &trace.requests {
        let s = &r.stages;
        write!(out, "{queue},{},{},{},{},", operation(r), r.id, r.sector, r.bytes)?;
        write!(out, "{},{},{},{},", r.segments, r.status, r.noticed, r.metadata)?;
        write!(out, "{},{},{},{},", r.transfer, r.sharing, u8::from(r.notified), r.answer)?;
        write!(out, "{},{},{},", s.taken_ns, s.copied_in_ns, s.submitted_ns)?;
        writeln!(out, "{},{},{}", s.completed_ns, s.copied_out_ns, s.answered_ns)?;
    }
    out.flush()
}

/// A process with two threads a queue, the worker's and the guest's, and each request with its stages as
/// asynchronous slices, since they overlap.
///
/// # Errors
/// The writer's.
pub fn perfetto(trace: &Trace, to: impl Write) -> io::Result<()> {
    let mut out = BufWriter::new(to);
    write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let name = serde_json::to_string(&format!("{} {}", trace.disk, trace.image))?;
    write!(out, r#"{{"ph":"M","pid":1,"name":"process_name","args":{{"name":{name}}}}}"#)?;
    for queue in queues(trace) {
        for (tid, whose) in [(worker(queue), "worker"), (guest(queue), "guest")] {
            write!(out, ",\n{{\"ph\":\"M\",\"pid\":1,\"tid\":{tid},\"name\":\"thread_name\",")?;
            write!(out, "\"args\":{{\"name\":\"queue {queue} {whose}\"}}}}")?;
        }
    }
    let times = Times { from_ns: trace.from_ns };
    for (n, (queue, record)) in trace.requests.iter().enumerate() {
        request(&mut out, &times, n, *queue, record)?;
    }
    for (queue, span) in &trace.spans {
        doing(&mut out, &times, *queue, span)?;
    }
    writeln!(out, "\n]}}")?;
    out.flush()
}

/// The queues that anything is known of, in their order.
pub(super) fn queues(trace: &Trace) -> Vec<u16> {
    let requests = trace.requests.iter().map(|(queue, _)| *queue);
    let all = requests.chain(trace.spans.iter().map(|(queue, _)| *queue));
    all.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}

fn worker(queue: u16) -> u32 {
    2 * u32::from(queue) + 1
}

fn guest(queue: u16) -> u32 {
    2 * u32::from(queue) + 2
}

struct Times {
    from_ns: u64,
}

impl Times {
    /// In microseconds since the beginning of the recording.
    fn us(&self, at_ns: u64) -> String {
        length(at_ns.saturating_sub(self.from_ns))
    }
}

fn length(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn request(
    out: &mut impl Write,
    times: &Times,
    n: usize,
    queue: u16,
    r: &Record,
) -> io::Result<()> {
    let tid = worker(queue);
    let mut event = |ph: &str, name: &str, at_ns: u64, args: &str| {
        write!(
            out,
            ",\n{{\"ph\":\"{ph}\",\"cat\":\"request\",\"id\":{n},\"pid\":1,\"tid\":{tid},"
        )?;
        write!(out, "\"ts\":{},\"name\":\"{name}\"{args}}}", times.us(at_ns))
    };
    let name = format!("{} {} KiB", operation(r), r.bytes.div_ceil(1024));
    let args = format!(
        r#","args":{{"id":"{:#x}","sector":{},"bytes":{},"segments":{},"status":{},"noticed":"{}","metadata":"{}","operation of storage":{},"pieces that share it":{},"guest notified":{}}}"#,
        r.id,
        r.sector,
        r.bytes,
        r.segments,
        r.status,
        r.noticed,
        r.metadata,
        r.transfer,
        r.sharing,
        r.notified,
    );
    let begin_ns = r.stages.taken_ns;
    event("b", &name, begin_ns, &args)?;
    let mut at_ns = begin_ns;
    for (stage, took) in STAGES.into_iter().zip(stages(r)) {
        if let Some(ns) = took {
            event("b", stage, at_ns, "")?;
            at_ns = at_ns.saturating_add(ns);
            event("e", stage, at_ns, "")?;
        }
    }
    event("e", &name, at_ns, "")
}

fn doing(out: &mut impl Write, times: &Times, queue: u16, span: &Span) -> io::Result<()> {
    let (tid, name) = match span.doing {
        Doing::Polled(true) => (worker(queue), "polled, found something".to_owned()),
        Doing::Polled(false) => (worker(queue), "polled in vain".to_owned()),
        Doing::Slept => (worker(queue), "slept".to_owned()),
        Doing::WokenByEvent => (worker(queue), "slept until an event".to_owned()),
        Doing::Consumed(answers) => (guest(queue), format!("has consumed answer {answers}")),
    };
    // One that began before the recording is cut there.
    let from_ns = span.from_ns.max(times.from_ns);
    let (ts, dur) = (times.us(from_ns), length(span.to_ns.saturating_sub(from_ns)));
    write!(out, ",\n{{\"ph\":\"X\",\"cat\":\"thread\",\"pid\":1,\"tid\":{tid},\"ts\":{ts},")?;
    write!(out, "\"dur\":{dur},\"name\":\"{name}\"}}")
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::super::tests::trace;
    use super::*;

    #[test]
    fn csv_has_a_line_a_request_with_as_many_fields_as_there_are_names() {
        let trace = trace(10);
        let mut text = Vec::new();
        csv(&trace, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(lines.len(), 11);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        let at = |name: &str| lines[0].iter().position(|field| *field == name).unwrap();
        assert_eq!((lines[2][at("operation")], lines[2][at("bytes")]), ("write", "8192"));
        let taken_ns = trace.requests[1].1.stages.taken_ns.to_string();
        assert_eq!(lines[2][at("taken_ns")], taken_ns);
    }

    /// What Perfetto's importer asks of asynchronous slices: they begin before they end, nest, and each end
    /// has its beginning.
    #[test]
    fn trace_events_are_whole_and_nest() {
        let mut trace = trace(20);
        // Before the beginning, and times that go back.
        trace.spans[0].1.from_ns = 0;
        trace.requests[3].1.stages.completed_ns = 1;
        let mut text = Vec::new();
        perfetto(&trace, &mut text).unwrap();
        let json: Value = serde_json::from_slice(&text).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let of = |ph: &str| events.iter().filter(|event| event["ph"] == ph).count();
        assert_eq!((of("M"), of("X")), (5, 60));
        assert!(of("b") == of("e") && of("b") >= 20 * 4);
        let mut open: Vec<(u64, Vec<(String, f64)>)> = Vec::new();
        for event in events.iter().filter(|event| event["cat"] == "request") {
            let (id, ts) = (event["id"].as_u64().unwrap(), event["ts"].as_f64().unwrap());
            let name = event["name"].as_str().unwrap().to_owned();
            if open.last().is_none_or(|(last, _)| *last != id) {
                open.push((id, Vec::new()));
            }
            let stack = &mut open.last_mut().unwrap().1;
            match event["ph"].as_str().unwrap() {
                "b" => stack.push((name, ts)),
                _ => {
                    let (began, at) = stack.pop().unwrap();
                    assert!(began == name && at <= ts);
                }
            }
        }
        assert!(open.len() == 20 && open.iter().all(|(_, stack)| stack.is_empty()));
        assert!(events.iter().filter(|e| e["ph"] == "X").all(|e| e["dur"].as_f64() >= Some(0.0)));
        assert_eq!(events[0]["args"]["name"], "vbd-3-51712 /srv/</script>&.vhd");
    }
}
