//! A reader of Chrome's trace events, in the JSON form that Perfetto imports. It follows the rules of the format only,
//! and refuses a file that breaks one.

use std::collections::BTreeMap;

use serde_json::Value;

/// An asynchronous slice, with those in it.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) thread: String,
    pub(super) name: String,
    pub(super) from_ns: u64,
    pub(super) stages: Vec<(String, u64)>,
}

/// The content of a file. Slices of threads: name, beginning, length.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) process: String,
    pub(super) requests: Vec<Request>,
    pub(super) threads: BTreeMap<String, Vec<(String, u64, u64)>>,
}

type Told<T> = Result<T, String>;

fn text<'a>(event: &'a Value, field: &str) -> Told<&'a str> {
    event[field].as_str().filter(|text| !text.is_empty()).ok_or(format!("no {field}: {event}"))
}

/// Times are microseconds, with nanoseconds after the point.
fn ns(event: &Value, field: &str) -> Told<u64> {
    let us = event[field].as_f64().filter(|us| *us >= 0.0 && *us < 1e12);
    us.map(|us| (us * 1e3).round() as u64).ok_or(format!("no {field}: {event}"))
}

fn number(event: &Value, field: &str) -> Told<u64> {
    event[field].as_u64().ok_or(format!("no {field}: {event}"))
}

pub(super) fn read(bytes: &[u8]) -> Told<Read> {
    let json: Value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    if !["ms", "ns"].contains(&text(&json, "displayTimeUnit")?) {
        return Err("displayTimeUnit is ms or ns".to_owned());
    }
    let events = json["traceEvents"].as_array().ok_or("no traceEvents")?;
    let mut read = Read::default();
    // Names may be anywhere in a file.
    let mut names: BTreeMap<u64, String> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "M") {
        let name = text(&event["args"], "name")?.to_owned();
        match text(event, "name")? {
            "process_name" => read.process = name,
            "thread_name" => {
                if names.insert(number(event, "tid")?, name).is_some() {
                    return Err(format!("a thread has two names: {event}"));
                }
            }
            _ => return Err(format!("unknown metadata: {event}")),
        }
    }
    let thread = |event: &Value| {
        let name = names.get(&number(event, "tid")?).cloned();
        name.ok_or(format!("a thread without a name: {event}"))
    };
    let mut open: BTreeMap<String, Vec<(String, u64)>> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] != "M") {
        if event["pid"] != 1 {
            return Err(format!("another process: {event}"));
        }
        let (name, thread, ts) = (text(event, "name")?, thread(event)?, ns(event, "ts")?);
        match text(event, "ph")? {
            "X" => {
                // Slices of a thread nest or follow one another: those of a recording follow.
                let slices = read.threads.entry(thread).or_default();
                if slices.last().is_some_and(|(_, from, took)| from + took > ts) {
                    return Err(format!("slices overlap: {event}"));
                }
                slices.push((name.to_owned(), ts, ns(event, "dur")?));
            }
            // Events of one category and id are a stack, in the order of their times.
            phase @ ("b" | "e") => {
                let id = format!("{} {}", text(event, "cat")?, event["id"]);
                if event["id"].is_null() {
                    return Err(format!("no id: {event}"));
                }
                let stack = open.entry(id).or_default();
                asynchronous(&mut read.requests, stack, phase, (name, thread, ts))?;
            }
            _ => return Err(format!("an unknown phase: {event}")),
        }
    }
    match open.into_iter().find(|(_, stack)| !stack.is_empty()) {
        Some((id, _)) => Err(format!("{id} does not end")),
        None => Ok(read),
    }
}

fn asynchronous(
    requests: &mut Vec<Request>,
    stack: &mut Vec<(String, u64)>,
    phase: &str,
    (name, thread, ts): (&str, String, u64),
) -> Told<()> {
    if phase == "b" {
        if stack.last().is_some_and(|(_, from)| *from > ts) {
            return Err(format!("{name} begins before what it is in"));
        }
        if stack.is_empty() {
            let (name, stages) = (name.to_owned(), Vec::new());
            requests.push(Request { thread, name, from_ns: ts, stages });
        }
        stack.push((name.to_owned(), ts));
        return Ok(());
    }
    let (began, from) = stack.pop().ok_or(format!("{name} ends and has not begun"))?;
    if began != name || ts < from {
        return Err(format!("{name} ends in the middle of {began}, or before its beginning"));
    }
    match requests.last_mut() {
        Some(request) if !stack.is_empty() => request.stages.push((began, ts - from)),
        _ => {}
    }
    Ok(())
}

#[test]
fn a_file_that_breaks_a_rule_is_refused() {
    let with = |events: &str| {
        let names = r#"{"ph":"M","name":"thread_name","pid":1,"tid":1,"args":{"name":"t"}}"#;
        let file = format!(r#"{{"displayTimeUnit":"ns","traceEvents":[{names}{events}]}}"#);
        read(file.as_bytes())
    };
    let event = |ph: &str, tid: u32, ts: &str, more: &str| {
        format!(r#",{{"ph":"{ph}","pid":1,"tid":{tid},"ts":{ts},"name":"n"{more}}}"#)
    };
    let id = r#","cat":"c","id":1"#;
    let good = event("b", 1, "1", id) + &event("e", 1, "2.5", id);
    assert_eq!(with(&good).unwrap().requests.len(), 1);
    let bad = [
        event("b", 1, "1", id),
        event("e", 1, "1", id),
        event("b", 1, "3", id) + &event("e", 1, "2", id),
        event("b", 1, "1", r#","cat":"c""#) + &event("e", 1, "2", r#","cat":"c""#),
        event("X", 1, "1", ""),
        event("X", 2, "1", r#","dur":1"#),
        event("X", 1, "-1", r#","dur":1"#),
        event("X", 1, "1", r#","dur":2"#) + &event("X", 1, "2", r#","dur":2"#),
        event("Q", 1, "1", ""),
    ];
    for events in bad {
        assert!(with(&events).is_err(), "{events}");
    }
}
