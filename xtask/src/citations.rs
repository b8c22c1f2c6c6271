//! Checks citations in the code: each cited page exists, and each number on it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The folders of pages that a comment may name by their file names.
const FOLDERS: [&str; 3] = ["", "docs", "docs/internals"];

/// The folders of the citing code.
const CODE: [&str; 3] = ["crates", "xtask/src", "fuzz"];

fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Texts of all pages by their file names.
fn pages() -> BTreeMap<String, String> {
    let mut pages = BTreeMap::new();
    for folder in FOLDERS {
        for entry in fs::read_dir(top().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                pages.insert(name, fs::read_to_string(&path).unwrap());
            }
        }
    }
    pages
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.ends_with("target") {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// A file's comments as running text: a citation may continue on the next line.
fn comments(code: &str) -> String {
    let mut text = String::new();
    for line in code.lines() {
        match line.split_once("//") {
            Some((_, comment)) => {
                text += comment.trim_start_matches(['/', '!']).trim();
                text.push(' ');
            }
            None => text.push('\n'),
        }
    }
    text
}

/// Each page that a text names, and the text after the name.
fn citations(text: &str) -> Vec<(&str, &str)> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let cite = |(at, _): (usize, &str)| {
        let begin = text[..at].rfind(|c| !is_name(c)).map_or(0, |i| i + 1);
        let rest = &text[at + 3..];
        // Files that tasks write are not pages.
        let is_made = text[..begin].ends_with("target/bench/");
        let is_whole = begin < at && !rest.starts_with(is_name) && !is_made;
        is_whole.then_some((&text[begin..at + 3], rest))
    };
    text.match_indices(".md").filter_map(cite).collect()
}

/// The numbers at the beginning of a text, joined by commas, `and` or `to`, and the rest.
fn numbers<'a>(mut text: &'a str, prefix: &str) -> (Vec<&'a str>, &'a str) {
    let mut found = Vec::new();
    loop {
        let mut next = text.trim_start();
        if !found.is_empty() {
            let joined = [", ", "and ", "to "].iter().find_map(|word| next.strip_prefix(word));
            let Some(joined) = joined else { return (found, text) };
            next = joined;
        }
        let Some(digits) = next.strip_prefix(prefix) else { return (found, text) };
        let end = digits.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(digits.len());
        let number = digits[..end].trim_end_matches('.');
        if number.is_empty() {
            return (found, text);
        }
        found.push(number);
        text = &digits[number.len()..];
    }
}

/// The fault of one citation.
fn fault(page: &str, text: &str, rest: &str) -> Option<String> {
    let (sections, rest) = match page {
        "blkif.md" | "sources.md" => numbers(rest, ""),
        "threats.md" => numbers(rest, "T"),
        _ => return None,
    };
    let mark = if page == "threats.md" { "T" } else { "" };
    let heading = |section: &&str| {
        let is_one = |line: &str| {
            let line = line.trim_start_matches('#').trim_start();
            let after = line.strip_prefix(&format!("{mark}{section}"));
            after.is_some_and(|after| after.starts_with(' ') || after.starts_with(". "))
        };
        text.lines().any(|line| line.starts_with('#') && is_one(line))
    };
    if let Some(missing) = sections.iter().find(|section| !heading(section)) {
        return Some(format!("{page} has no heading {mark}{missing}"));
    }
    let rules = rest.strip_prefix(", rule")?;
    let (rules, _) = numbers(rules.strip_prefix('s').unwrap_or(rules), "");
    let missing = rules.iter().find(|rule| !text.contains(&format!("\n{rule}. ")));
    missing.map(|rule| format!("{page} has no rule {rule}"))
}

#[test]
fn what_the_code_cites_is_there() {
    let pages = pages();
    let mut files = Vec::new();
    CODE.iter().for_each(|folder| sources(&top().join(folder), &mut files));
    let mut faults = Vec::new();
    let mut seen = 0;
    for file in files.iter().filter(|file| !file.ends_with("citations.rs")) {
        let text = comments(&fs::read_to_string(file).unwrap());
        for (page, rest) in citations(&text) {
            seen += 1;
            let fault = match pages.get(page) {
                Some(text) => fault(page, text, rest),
                None => Some(format!("there is no page {page}")),
            };
            faults.extend(fault.map(|fault| format!("{}: {fault}", file.display())));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(seen > 100, "only {seen} citations were found");
}

#[test]
fn a_citation_of_what_is_not_there_is_found() {
    let page = "# X\n## 2. Operations\n5. **[MUST]** Five\n### 3.9 Restart\n### T4 States\n";
    let told = |name: &str, rest: &str| fault(name, page, rest);
    assert_eq!(told("blkif.md", " 3.9): x"), None);
    assert_eq!(told("blkif.md", " 2, rule 5)"), None);
    assert_eq!(told("threats.md", " T4)"), None);
    assert_eq!(told("blkif.md", " 3.9 and 4.1)").unwrap(), "blkif.md has no heading 4.1");
    assert_eq!(told("blkif.md", " 2, rules 5 and 6)").unwrap(), "blkif.md has no rule 6");
    assert_eq!(told("threats.md", " T4, T24)").unwrap(), "threats.md has no heading T24");
    let code = "/// see (blkif.md\n/// 2, rule 9) and nothing.md\nlet a = 1;\n";
    let text = comments(code);
    let names: Vec<_> = citations(&text).into_iter().map(|(page, _)| page).collect();
    assert_eq!(names, ["blkif.md", "nothing.md"]);
}
