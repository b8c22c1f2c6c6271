//! A strict reader of OpenMetrics 1.0 text.

use std::collections::{BTreeMap, BTreeSet};

/// A line with a value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Its whole name, with the suffix.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its value.
    pub value: f64,
}

/// A metric with all its samples.
#[derive(Clone, Debug, Default)]
pub struct Family {
    /// Its name, without suffixes.
    pub name: String,
    /// `counter`, `gauge`, `histogram` or `info`.
    pub kind: String,
    /// Its unit.
    pub unit: String,
    /// Its help text.
    pub help: String,
    /// Its samples, in order.
    pub samples: Vec<Sample>,
}

/// Reads a whole exposition.
///
/// # Errors
/// The invalid line, and why.
pub fn parse(text: &str) -> Result<Vec<Family>, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("it does not end with # EOF")?;
    let mut families: Vec<Family> = Vec::new();
    for line in body.split_inclusive('\n') {
        take(&mut families, line).map_err(|why| format!("{why}: {line:?}"))?;
    }
    let mut names = BTreeSet::new();
    for family in &families {
        check(family).map_err(|why| format!("{}: {why}", family.name))?;
        if !names.insert(&family.name) {
            return Err(format!("{} is there twice", family.name));
        }
    }
    Ok(families)
}

fn take(families: &mut Vec<Family>, line: &str) -> Result<(), String> {
    let line = line.strip_suffix('\n').ok_or("a line has no end")?;
    let Some(meta) = line.strip_prefix("# ") else {
        let family = families.last_mut().ok_or("a sample before all metrics")?;
        family.samples.push(sample(line)?);
        return Ok(());
    };
    let (word, rest) = meta.split_once(' ').ok_or("metadata without a name")?;
    let (name, value) = rest.split_once(' ').ok_or("metadata without a value")?;
    if !is_name(name) {
        return Err("a bad name".to_owned());
    }
    if families.last().is_none_or(|family| family.name != name) {
        families.push(Family { name: name.to_owned(), ..Family::default() });
    }
    let Some(family) = families.last_mut() else { return Err("no family".to_owned()) };
    if !family.samples.is_empty() {
        return Err("metadata behind samples".to_owned());
    }
    let place = match word {
        "TYPE" => &mut family.kind,
        "UNIT" => &mut family.unit,
        "HELP" => &mut family.help,
        _ => return Err("a comment".to_owned()),
    };
    if !place.is_empty() || value.is_empty() {
        return Err("metadata twice, or empty".to_owned());
    }
    *place = value.to_owned();
    Ok(())
}

fn is_name(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}

fn sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    if !is_name(name) {
        return Err("a bad name".to_owned());
    }
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        while !rest.starts_with('}') {
            let (label, value, behind) = label(rest)?;
            if labels.insert(label, value).is_some() {
                return Err("a label twice".to_owned());
            }
            rest = match behind.strip_prefix(',') {
                Some(more) if !more.starts_with('}') => more,
                _ if behind.starts_with('}') => behind,
                _ => return Err("labels without an end".to_owned()),
            };
        }
        rest = &rest[1..];
    }
    let number = rest.strip_prefix(' ').ok_or("no space before the value")?;
    Ok(Sample { name: name.to_owned(), labels, value: value(number)? })
}

/// A number by the specification: no spaces, only these words.
fn value(text: &str) -> Result<f64, String> {
    match text {
        "+Inf" => return Ok(f64::INFINITY),
        "-Inf" => return Ok(f64::NEG_INFINITY),
        "NaN" => return Ok(f64::NAN),
        _ => {}
    }
    let is_number = !text.is_empty() && text.bytes().all(|b| b"0123456789.+-eE".contains(&b));
    text.parse().ok().filter(|_| is_number).ok_or_else(|| format!("{text:?} is no number"))
}

fn label(text: &str) -> Result<(String, String, &str), String> {
    let (name, rest) = text.split_once("=\"").ok_or("a label without a value")?;
    if !is_name(name) {
        return Err("a bad label".to_owned());
    }
    let mut value = String::new();
    let mut chars = rest.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Ok((name.to_owned(), value, &rest[at + 1..])),
            '\\' => value.push(match chars.next() {
                Some((_, 'n')) => '\n',
                Some((_, c @ ('"' | '\\'))) => c,
                _ => return Err("an unknown escape".to_owned()),
            }),
            c => value.push(c),
        }
    }
    Err("a label's value without an end".to_owned())
}

/// Checks the rules for a family as a whole.
fn check(family: &Family) -> Result<(), String> {
    if !family.unit.is_empty() && !family.name.ends_with(&format!("_{}", family.unit)) {
        return Err("the name does not end with the unit".to_owned());
    }
    let suffixes: &[&str] = match family.kind.as_str() {
        "counter" => &["_total"],
        "gauge" => &[""],
        "info" => &["_info"],
        "histogram" => &["_bucket", "_sum", "_count"],
        kind => return Err(format!("the type {kind:?}")),
    };
    let mut seen = BTreeSet::new();
    for sample in &family.samples {
        let suffix = sample.name.strip_prefix(&family.name).unwrap_or("?");
        if !suffixes.contains(&suffix) {
            return Err(format!("{} in a {}", sample.name, family.kind));
        }
        if !seen.insert((&sample.name, &sample.labels)) {
            return Err(format!("{} {:?} twice", sample.name, sample.labels));
        }
        let bad = match family.kind.as_str() {
            "gauge" => false,
            "info" => sample.value != 1.0,
            _ => sample.value.is_nan() || sample.value < 0.0,
        };
        if bad {
            return Err(format!("{} is {}", sample.name, sample.value));
        }
    }
    if family.kind == "histogram" { histograms(family) } else { Ok(()) }
}

/// Checks histograms: buckets grow, the last one has all values, and histograms follow one another.
fn histograms(family: &Family) -> Result<(), String> {
    let mut of: Vec<(BTreeMap<String, String>, Vec<&Sample>)> = Vec::new();
    for sample in &family.samples {
        let mut labels = sample.labels.clone();
        labels.remove("le");
        match of.iter().position(|(other, _)| *other == labels) {
            None => of.push((labels, vec![sample])),
            Some(at) if at + 1 == of.len() => of[at].1.push(sample),
            Some(_) => return Err("a histogram is torn apart".to_owned()),
        }
    }
    for (labels, samples) in of {
        let of_suffix = |suffix: &str| {
            let samples = samples.iter().filter(|sample| sample.name.ends_with(suffix));
            samples.copied().collect::<Vec<_>>()
        };
        let (buckets, counts) = (of_suffix("_bucket"), of_suffix("_count"));
        let [count] = counts[..] else { return Err(format!("{labels:?} has no one count")) };
        if of_suffix("_sum").len() != 1 {
            return Err(format!("{labels:?} has no one sum"));
        }
        let mut before = (f64::NEG_INFINITY, 0.0);
        for bucket in buckets {
            let le = bucket.labels.get("le").ok_or("a bucket without its end")?;
            let now = (value(le)?, bucket.value);
            if now.0 <= before.0 || now.1 < before.1 {
                return Err(format!("{labels:?} goes back at {le}"));
            }
            before = now;
        }
        if before != (f64::INFINITY, count.value) {
            return Err(format!("the last bucket of {labels:?} has not all"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_allowed_is_refused() {
        let good = "# HELP a_seconds x\n# TYPE a_seconds histogram\n# UNIT a_seconds seconds\n\
                    a_seconds_sum 1.5\na_seconds_count 2\na_seconds_bucket{le=\"1\"} 1\n\
                    a_seconds_bucket{le=\"+Inf\"} 2\n# TYPE b counter\nb_total{x=\"\\\"y\\n\"} 3\n# EOF\n";
        let families = parse(good).unwrap();
        assert_eq!((families.len(), families[0].samples.len()), (2, 4));
        assert_eq!(families[1].samples[0].labels["x"], "\"y\n");
        for (old, new) in [
            ("# EOF\n", ""),
            ("# EOF\n", "# EOF\n\n"),
            ("b_total", "b"),
            ("le=\"1\"} 1", "le=\"1\"} 3"),
            ("le=\"+Inf\"} 2", "le=\"2\"} 2"),
            ("a_seconds_count 2", "a_seconds_count 3"),
            ("# UNIT a_seconds seconds", "# UNIT a_seconds bytes"),
            ("} 3", "} -3"),
            ("} 3", "} 3x"),
            ("} 3", "}3"),
            ("\\n", "\\t"),
            ("# TYPE b counter", "# TYPE b stateset"),
            ("# TYPE b counter", "# TYPE a_seconds counter"),
            ("a_seconds_sum 1.5\n", ""),
        ] {
            let bad = good.replacen(old, new, 1);
            assert!(bad != good && parse(&bad).is_err(), "{bad}");
        }
    }
}
