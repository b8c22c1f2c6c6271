//! Exports recordings: as the JSON of Chrome's trace events, which Perfetto's page loads, and as CSV.

use std::io::{self, BufWriter, Write};

use ferrite_serve::trace::{Doing, Record};

use super::{Line, STAGES, Stretch, Trace, Whose, operation, stages, stretches};

/// Writes one line per request.
///
/// # Errors
/// The writer's.
pub fn csv(trace: &Trace, to: impl Write) -> io::Result<()> {
    let mut out = BufWriter::new(to);
    writeln!(
        out,
        "frontend,queue,operation,id,sector,bytes,segments,status,noticed,metadata,transfer,sharing,\
         notified,answer,taken_ns,copied_in_ns,submitted_ns,completed_ns,copied_out_ns,answered_ns"
    )?;
    for (line, r) in &trace.requests {
        let (line, s) = (Line::of(*line), &r.stages);
        write!(out, "{},{},", line.frontend(), line.number())?;
        write!(out, "{},{},{},{},", operation(r), r.id, r.sector, r.bytes)?;
        write!(out, "{},{},{},{},", r.segments, r.status, r.noticed, r.metadata)?;
        write!(out, "{},{},{},{},", r.transfer, r.sharing, u8::from(r.notified), r.answer)?;
        write!(out, "{},{},{},", s.taken_ns, s.copied_in_ns, s.submitted_ns)?;
        writeln!(out, "{},{},{}", s.completed_ns, s.copied_out_ns, s.answered_ns)?;
    }
    out.flush()
}

/// Writes one line per stretch of time of a queue's thread, and of its guest.
///
/// # Errors
/// The writer's.
pub fn csv_of_spans(trace: &Trace, to: impl Write) -> io::Result<()> {
    let mut out = BufWriter::new(to);
    writeln!(out, "frontend,queue,whose,doing,event,found,answers,from_ns,to_ns")?;
    for number in lines(trace) {
        let line = Line::of(number);
        for stretch in stretches(trace, number) {
            let (doing, event, found, answers) = match stretch.doing {
                None => ("ran", None, None, None),
                Some(Doing::Polled(found)) => ("polled", None, Some(found), None),
                Some(Doing::Slept) => ("slept", Some(false), None, None),
                Some(Doing::WokenByEvent) => ("slept", Some(true), None, None),
                Some(Doing::Consumed(answers)) => ("consumed", None, None, Some(answers)),
            };
            let whose = match stretch.whose {
                Whose::Worker => "worker",
                Whose::Guest => "guest",
            };
            let word = |known: Option<u32>| known.map(|n| n.to_string()).unwrap_or_default();
            write!(out, "{},{},{whose},{doing},", line.frontend(), line.number())?;
            let [event, found] = [event, found].map(|is| word(is.map(u32::from)));
            write!(out, "{event},{found},{},", word(answers))?;
            writeln!(out, "{},{}", stretch.from_ns, stretch.to_ns)?;
        }
    }
    out.flush()
}

/// Writes a process with two threads per queue, the worker's and the guest's, and each request with its stages as
/// asynchronous slices, since they overlap.
///
/// # Errors
/// The writer's.
pub fn perfetto(trace: &Trace, to: impl Write) -> io::Result<()> {
    let mut out = BufWriter::new(to);
    write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let name = serde_json::to_string(&format!("{} {}", trace.disk, trace.image))?;
    write!(out, r#"{{"ph":"M","pid":1,"name":"process_name","args":{{"name":{name}}}}}"#)?;
    let times = Times { from_ns: trace.from_ns };
    for line in lines(trace) {
        let stretches = stretches(trace, line);
        for (tid, whose, is) in
            [(worker(line), "worker", Whose::Worker), (guest(line), "guest", Whose::Guest)]
        {
            // A client's guest side is unknown, and an empty track would mean that it idled.
            if is == Whose::Worker || stretches.iter().any(|stretch| stretch.whose == is) {
                write!(out, ",\n{{\"ph\":\"M\",\"pid\":1,\"tid\":{tid},\"name\":\"thread_name\",")?;
                write!(out, "\"args\":{{\"name\":\"{} {whose}\"}}}}", Line::of(line))?;
            }
        }
        for stretch in &stretches {
            doing(&mut out, &times, line, stretch)?;
        }
    }
    for (n, (line, record)) in trace.requests.iter().enumerate() {
        request(&mut out, &times, n, *line, record)?;
    }
    writeln!(out, "\n]}}")?;
    out.flush()
}

/// The numbers of the lines with any data, in order.
pub(super) fn lines(trace: &Trace) -> Vec<u16> {
    let requests = trace.requests.iter().map(|(line, _)| *line);
    let all = requests.chain(trace.spans.iter().map(|(line, _)| *line));
    all.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}

fn worker(line: u16) -> u32 {
    2 * u32::from(line) + 1
}

fn guest(line: u16) -> u32 {
    2 * u32::from(line) + 2
}

struct Times {
    from_ns: u64,
}

impl Times {
    /// Microseconds since the beginning of the recording.
    fn us(&self, at_ns: u64) -> String {
        length(at_ns.saturating_sub(self.from_ns))
    }
}

fn length(ns: u64) -> String {
    format!("{}.{:03}", ns / 1000, ns % 1000)
}

fn request(out: &mut impl Write, times: &Times, n: usize, line: u16, r: &Record) -> io::Result<()> {
    let tid = worker(line);
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

fn doing(out: &mut impl Write, times: &Times, line: u16, stretch: &Stretch) -> io::Result<()> {
    let tid = match stretch.whose {
        Whose::Worker => worker(line),
        Whose::Guest => guest(line),
    };
    let (ts, dur) = (times.us(stretch.from_ns), length(stretch.to_ns - stretch.from_ns));
    write!(out, ",\n{{\"ph\":\"X\",\"cat\":\"thread\",\"pid\":1,\"tid\":{tid},\"ts\":{ts},")?;
    write!(out, "\"dur\":{dur},\"name\":\"{}\"", stretch.name())?;
    if let Some(Doing::Consumed(answers)) = stretch.doing {
        write!(out, ",\"args\":{{\"answers\":{answers}}}")?;
    }
    write!(out, "}}")
}

#[cfg(test)]
mod reader;

#[cfg(test)]
mod tests {
    use ferrite_serve::trace::Span;

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

    #[test]
    fn csv_of_spans_says_when_worker_and_guest_ran_polled_and_slept() {
        let mut trace = trace(4);
        trace.requests[1].0 = 64;
        trace.spans.push((64, Span { doing: Doing::Slept, from_ns: 1_000_500, to_ns: 1_000_900 }));
        let mut text = Vec::new();
        csv_of_spans(&trace, &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "frontend,queue,whose,doing,event,found,answers,from_ns,to_ns");
        let expected = [
            "blkif,0,worker,polled,,1,,1001000,1002000",
            "blkif,0,worker,slept,1,,,1002000,1009000",
            "blkif,0,guest,consumed,,,1,1025400,1030400",
            "blkif,0,worker,ran,,,,1009000,1021000",
        ];
        assert_eq!(lines[1..5], expected);
        assert_eq!(*lines.last().unwrap(), "nbd,0,worker,slept,0,,,1000500,1000900");
        assert!(lines.iter().all(|line| line.split(',').count() == 9), "{text}");
    }

    /// Read back by the format's rules, the export has each request with its stages, and the stretches of each thread.
    #[test]
    fn what_a_reader_of_trace_events_finds_is_the_recording() {
        let mut trace = trace(20);
        trace.requests[5].0 = 64;
        // A time before the beginning, and times that go back.
        trace.spans[0].1.from_ns = 0;
        trace.requests[3].1.stages.completed_ns = 1;
        let mut text = Vec::new();
        perfetto(&trace, &mut text).unwrap();
        let read = reader::read(&text).unwrap();
        assert_eq!(read.process, "vbd-3-51712 /srv/</script>&.vhd");
        assert_eq!(read.requests.len(), 20);
        for (found, (line, record)) in read.requests.iter().zip(&trace.requests) {
            assert_eq!(found.thread, format!("{} worker", Line::of(*line)));
            assert_eq!(found.name, format!("{} {} KiB", operation(record), record.bytes / 1024));
            assert_eq!(found.from_ns, record.stages.taken_ns - trace.from_ns);
            let had = STAGES.into_iter().zip(stages(record));
            let had: Vec<_> =
                had.filter_map(|(name, ns)| ns.map(|ns| (name.to_owned(), ns))).collect();
            assert_eq!(found.stages, had);
        }
        for line in lines(&trace) {
            for (is, whose) in [(Whose::Worker, "worker"), (Whose::Guest, "guest")] {
                let had = stretches(&trace, line)
                    .into_iter()
                    .filter(|s| s.whose == is)
                    .map(|s| (s.name().to_owned(), s.from_ns - trace.from_ns, s.to_ns - s.from_ns));
                let name = format!("{} {whose}", Line::of(line));
                let found = read.threads.get(&name).cloned().unwrap_or_default();
                assert_eq!(found, had.collect::<Vec<_>>(), "{name}");
            }
        }
        assert!(!read.threads.contains_key("NBD client 0 guest"), "of a client nothing is known");
    }
}
