//! No circle between source files of `images`, `store` and `serve`: what is below can be read and changed without
//! what is above.
//!
//! # What counts
//! A file points at another if its product code names an item that stands there, by `use` or by a
//! path. Re-exports are followed to the file that has the item. A re-export that its own file does
//! not use is a signpost, and no arrow. Tests may point anywhere.
//!
//! Files that share one inherent `impl` are pages of one thing. So a circle whose files are all of one
//! `impl` is none, and any other file in it makes it one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Crates that have no circle.
const CRATES: [&str; 3] = ["images", "store", "serve"];

/// A module's path in its crate, without `crate`.
type Module = Vec<String>;

/// The words of a source file: names, `::`, and single signs. No comments, literals and lifetimes.
fn words(code: &str) -> Vec<String> {
    let chars: Vec<char> = code.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let is_name = |i: usize| at(i).is_alphanumeric() || at(i) == '_';
    let after = |from: usize, end: &dyn Fn(usize) -> bool| {
        (from..chars.len()).find(|i| end(*i)).unwrap_or(chars.len())
    };
    let (mut found, mut i) = (Vec::new(), 0);
    while i < chars.len() {
        i = match at(i) {
            '/' if at(i + 1) == '/' => after(i, &|i| at(i) == '\n'),
            '"' => {
                let mut end = i + 1;
                while end < chars.len() && at(end) != '"' {
                    end += if at(end) == '\\' { 2 } else { 1 };
                }
                end + 1
            }
            'r' if at(i + 1) == '"' || at(i + 1) == '#' && !is_name(i + 2) => {
                let hashes = after(i + 1, &|i| at(i) != '#') - i - 1;
                let is_end = |i: usize| at(i) == '"' && (1..=hashes).all(|n| at(i + n) == '#');
                after(i + hashes + 2, &is_end) + 1 + hashes
            }
            '\'' if at(i + 1) == '\\' => after(i + 3, &|i| at(i) == '\'') + 1,
            '\'' if at(i + 2) == '\'' => i + 3,
            '\'' => after(i + 1, &|i| !is_name(i)),
            _ if is_name(i) => {
                let end = after(i, &|i| !is_name(i));
                found.push(chars[i..end].iter().collect());
                end
            }
            ':' if at(i + 1) == ':' => {
                found.push("::".to_owned());
                i + 2
            }
            c => {
                found.extend((!c.is_whitespace()).then(|| c.to_string()));
                i + 1
            }
        };
    }
    found
}

/// The index behind the bracket that closes the one at `open`.
fn closed(words: &[String], open: usize) -> usize {
    let mut depth = 0;
    for (i, word) in words.iter().enumerate().skip(open) {
        match word.as_str() {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i + 1;
        }
    }
    words.len()
}

/// The index behind the item, field or statement that begins at `begin`.
fn behind_item(words: &[String], begin: usize) -> usize {
    const ITEMS: [&str; 12] = [
        "async",
        "const",
        "enum",
        "fn",
        "impl",
        "macro_rules",
        "mod",
        "static",
        "struct",
        "trait",
        "type",
        "use",
    ];
    let mut i = begin;
    while words[i..].starts_with(&["#".into(), "[".into()]) {
        i = closed(words, i + 1);
    }
    let first = words[i..].iter().find(|word| !["pub", "(", ")", "crate"].contains(&word.as_str()));
    let is_item = first.is_some_and(|word| ITEMS.contains(&word.as_str()));
    while i < words.len() {
        match words[i].as_str() {
            "{" => return closed(words, i),
            ";" => return i + 1,
            "," if !is_item => return i + 1,
            "}" | ")" if !is_item => return i,
            "(" | "[" => i = closed(words, i),
            _ => i += 1,
        }
    }
    i
}

/// Without tests, and without the places that a `pub(...)` names.
fn product(words: &[String]) -> Vec<String> {
    let (mut found, mut i) = (Vec::new(), 0);
    while i < words.len() {
        let is = |n: usize, word: &str| words.get(i + n).is_some_and(|found| found == word);
        if is(0, "#") && is(1, "[") && is(2, "cfg") {
            let end = closed(words, i + 1);
            if words[i..end].iter().any(|word| word == "test") {
                i = behind_item(words, end);
                continue;
            }
        }
        found.push(words[i].clone());
        i = if is(0, "pub") && is(1, "(") { closed(words, i + 1) } else { i + 1 };
    }
    found
}

/// What one file says.
#[derive(Default)]
struct File {
    /// By name: what a `use` brings in.
    imports: BTreeMap<String, Vec<String>>,
    /// Names that only pass through.
    signposts: BTreeSet<String>,
    /// Paths, as they are written, of `use` and in code.
    paths: Vec<Vec<String>>,
    /// Types and other items that stand here.
    items: BTreeSet<String>,
    /// Types with an inherent `impl` here, as they are written.
    impls: Vec<Vec<String>>,
}

impl File {
    fn of(code: &str) -> File {
        let words = product(&words(code));
        let mut file = File::default();
        let (mut rest, mut i) = (BTreeSet::new(), 0);
        let mut signposts = BTreeSet::new();
        while i < words.len() {
            let before = i.checked_sub(1).map_or("", |i| words[i].as_str());
            match words[i].as_str() {
                "use" => {
                    let end = behind_item_of_use(&words, i);
                    let mut names = Vec::new();
                    tree(&words[i + 1..end], &[], &mut names);
                    for (name, path) in names {
                        let posted = before == "pub";
                        signposts.extend(posted.then(|| name.clone()));
                        if !posted {
                            file.paths.push(path.clone());
                        }
                        file.imports.insert(name, path);
                    }
                    i = end + 1;
                    continue;
                }
                "impl" => file.impls.extend(inherent(&words[i + 1..])),
                "struct" | "enum" | "fn" | "trait" | "type" | "const" | "static" | "union" => {
                    file.items.extend(words.get(i + 1).cloned());
                }
                "macro_rules" => file.items.extend(words.get(i + 2).cloned()),
                _ => {}
            }
            let path = path(&words[i..]);
            if path.len() > 1 && before != "::" {
                file.paths.push(path);
            }
            if before != "mod" {
                rest.insert(words[i].clone());
            }
            i += 1;
        }
        for name in signposts {
            match rest.contains(&name) {
                true => file.paths.push(file.imports[&name].clone()),
                false => drop(file.signposts.insert(name)),
            }
        }
        file
    }
}

/// The index of the sign that ends a `use` at `begin`.
fn behind_item_of_use(words: &[String], begin: usize) -> usize {
    words[begin..].iter().position(|word| word == ";").map_or(words.len(), |n| begin + n)
}

/// The names of a tree of `use`, each with its path.
fn tree(words: &[String], prefix: &[String], found: &mut Vec<(String, Vec<String>)>) {
    let path = path(words);
    let after = path.len() * 2 - usize::from(!path.is_empty());
    let full: Vec<String> = prefix.iter().chain(&path).cloned().collect();
    match words.get(after).map(String::as_str) {
        Some("::") if words.get(after + 1).is_some_and(|word| word == "{") => {
            let end = closed(words, after + 1) - 1;
            let mut begin = after + 2;
            while begin < end {
                let mut i = begin;
                while i < end && words[i] != "," {
                    i = if words[i] == "{" { closed(words, i) } else { i + 1 };
                }
                tree(&words[begin..i], &full, found);
                begin = i + 1;
            }
        }
        next => {
            let mut full = full;
            if full.last().is_some_and(|last| last == "self") && full.len() > 1 {
                full.pop();
            }
            let alias = words.get(after + 1).filter(|_| next == Some("as")).cloned();
            let name = alias.or_else(|| full.last().cloned());
            found.extend(name.map(|name| (name, full)));
        }
    }
}

/// The path that words begin with.
fn path(words: &[String]) -> Vec<String> {
    let is_name = |word: &String| word.chars().all(|c| c.is_alphanumeric() || c == '_');
    let mut path = Vec::new();
    for pair in words.chunks(2) {
        if !is_name(&pair[0]) {
            break;
        }
        path.push(pair[0].clone());
        if pair.get(1).is_none_or(|word| word != "::") {
            break;
        }
    }
    path
}

/// The type of an `impl` without a trait; `words` follow that word.
fn inherent(words: &[String]) -> Option<Vec<String>> {
    let mut i = 0;
    if words.first().is_some_and(|word| word == "<") {
        let mut depth = 0;
        for (n, word) in words.iter().enumerate() {
            depth += i32::from(word == "<") - i32::from(word == ">" && words[n - 1] != "-");
            if depth == 0 {
                i = n + 1;
                break;
            }
        }
    }
    let path = path(&words[i..]);
    let head = words[i..].iter().take_while(|word| *word != "{");
    (!path.is_empty() && head.clone().all(|word| word != "for")).then_some(path)
}

/// The files of a crate.
struct Source(BTreeMap<Module, File>);

impl Source {
    /// By paths below `src`.
    fn of<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Source {
        let module = |path: &str| {
            let path = path.strip_suffix(".rs").unwrap_or(path);
            let mut module: Module = path.split('/').map(str::to_owned).collect();
            if ["mod", "lib", "main"].contains(&module[module.len() - 1].as_str()) {
                module.pop();
            }
            module
        };
        Source(files.into_iter().map(|(path, code)| (module(path), File::of(code))).collect())
    }

    /// The file of the item that a path names in a file; none: it is of another crate.
    fn target(&self, from: &Module, path: &[String], depth: u32) -> Option<Module> {
        let (mut module, mut rest) = match path[0].as_str() {
            "crate" => (Vec::new(), &path[1..]),
            "self" => (from.clone(), &path[1..]),
            "super" => (from[..from.len().saturating_sub(1)].to_vec(), &path[1..]),
            first if self.0.contains_key(&child(from, first)) => (from.clone(), path),
            _ => return None,
        };
        while let Some((first, more)) = rest.split_first() {
            match first.as_str() {
                "super" => drop(module.pop()),
                name if self.0.contains_key(&child(&module, name)) => module.push(name.into()),
                _ => break,
            }
            rest = more;
        }
        let file = self.0.get(&module)?;
        let imported = rest.first().filter(|name| !file.items.contains(*name));
        match imported.and_then(|name| file.imports.get(name)) {
            Some(path) if depth < 8 => {
                let path: Vec<String> = path.iter().chain(&rest[1..]).cloned().collect();
                self.target(&module, &path, depth + 1)
            }
            _ => Some(module),
        }
    }

    /// Which files each file points at, and by which names.
    fn arrows(&self) -> BTreeMap<(Module, Module), BTreeSet<String>> {
        let mut arrows: BTreeMap<_, BTreeSet<String>> = BTreeMap::new();
        for (from, file) in &self.0 {
            for path in &file.paths {
                let Some(to) = self.target(from, path, 0).filter(|to| to != from) else { continue };
                let names = arrows.entry((from.clone(), to)).or_default();
                names.insert(path[path.len() - 1].clone());
            }
        }
        arrows
    }

    /// By file: the file by which all of one `impl` are known.
    fn pages(&self) -> BTreeMap<Module, Module> {
        let mut pages: BTreeMap<Module, Module> =
            self.0.keys().map(|module| (module.clone(), module.clone())).collect();
        for (from, file) in &self.0 {
            for path in &file.impls {
                let name = &path[path.len() - 1];
                let path = match path.len() {
                    1 if !file.items.contains(name) => file.imports.get(name),
                    1 => None,
                    _ => Some(path),
                };
                let owner = path.and_then(|path| self.target(from, path, 0));
                if let Some(owner) = owner.filter(|owner| self.0[owner].items.contains(name)) {
                    let (old, new) = (pages[from].clone(), pages[&owner].clone());
                    pages.values_mut().filter(|page| **page == old).for_each(|p| *p = new.clone());
                }
            }
        }
        pages
    }

    /// Circles that count, each with its arrows as text.
    fn circles(&self) -> Vec<(BTreeSet<String>, String)> {
        let (arrows, pages) = (self.arrows(), self.pages());
        let mut reached: BTreeMap<&Module, BTreeSet<&Module>> = BTreeMap::new();
        for start in self.0.keys() {
            let mut todo = vec![start];
            let seen = reached.entry(start).or_default();
            while let Some(from) = todo.pop() {
                let next = arrows.keys().filter(|(a, _)| a == from).map(|(_, to)| to);
                todo.extend(next.filter(|to| seen.insert(to)));
            }
        }
        let mut circles: Vec<BTreeSet<&Module>> = Vec::new();
        for start in self.0.keys().filter(|start| reached[start].contains(start)) {
            let circle: BTreeSet<&Module> =
                reached[start].iter().copied().filter(|to| reached[to].contains(start)).collect();
            let is_new = !circles.contains(&circle);
            let is_one_impl = circle.iter().all(|file| pages[*file] == pages[start]);
            circles.extend((is_new && !is_one_impl).then_some(circle));
        }
        let told = |circle: BTreeSet<&Module>| {
            let inside =
                |arrow: &(Module, Module)| circle.contains(&arrow.0) && circle.contains(&arrow.1);
            let lines = arrows.iter().filter(|(arrow, _)| inside(arrow)).map(|((a, b), names)| {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                format!("  {} -> {}: {}\n", a.join("/"), b.join("/"), names.join(", "))
            });
            (circle.iter().map(|file| file.join("/")).collect(), lines.collect())
        };
        circles.into_iter().map(told).collect()
    }
}

fn child(module: &Module, name: &str) -> Module {
    module.iter().map(String::as_str).chain([name]).map(str::to_owned).collect()
}

/// All source files below a folder, but for tests, by their paths below it.
fn read(folder: &Path, prefix: &str, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{prefix}{}", path.file_name().unwrap().to_string_lossy());
        if name.ends_with("/tests") || name.ends_with("tests.rs") {
            continue;
        }
        if path.is_dir() {
            read(&path, &format!("{name}/"), found);
        } else if name.ends_with(".rs") {
            found.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
}

#[test]
fn no_files_of_disk_and_serve_import_one_another_in_a_circle() {
    let mut faults = String::new();
    for name in CRATES {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates").join(name).join("src");
        let mut files = Vec::new();
        read(&folder, "", &mut files);
        let source = Source::of(files.iter().map(|(path, code)| (path.as_str(), code.as_str())));
        assert!(source.arrows().len() > 100, "only {} arrows in {name}", source.arrows().len());
        for (_, arrows) in source.circles() {
            faults += &format!("a circle in {name}:\n{arrows}");
        }
    }
    assert!(faults.is_empty(), "{faults}");
}

/// The circles of files that are given as texts.
fn circles_of(files: &[(&str, &str)]) -> Vec<String> {
    let circles = Source::of(files.iter().copied()).circles();
    circles.into_iter().map(|(files, _)| files.into_iter().collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn a_circle_is_found_whichever_way_its_arrows_are_written() {
    let lib = ("lib.rs", "mod a; mod b; pub use b::{inner::Deep, B};");
    let found = |a, b| circles_of(&[lib, ("a.rs", a), ("b.rs", b), ("b/inner.rs", "struct Deep;")]);
    assert_eq!(found("use crate::b::B;", "use super::a::A;"), ["a b"]);
    assert_eq!(found("fn a() { crate::b::go() }", "use crate::{a::{self, A as C}};"), ["a b"]);
    // By a signpost, to the file that has the item.
    assert_eq!(found("use crate::B; struct A;", "struct B; use crate::a::A;"), ["a b"]);
    assert!(found("use crate::Deep; struct A;", "struct B; use crate::a::A;").is_empty());
    assert!(found("use crate::b::B;", "// crate::a\nconst X: &str = \"crate::a::A\";").is_empty());
    assert!(found("use crate::b::B;", "#[cfg(test)] mod tests { use crate::a::A; }").is_empty());
    assert!(found("use crate::b::B;", "pub(in crate::a) struct B;").is_empty());
}

#[test]
fn files_of_one_impl_are_no_circle_and_any_other_with_them_is_one() {
    let found = |parent, child, other| {
        circles_of(&[("x/mod.rs", parent), ("x/child.rs", child), ("x/other.rs", other)])
    };
    let parent = "mod child; use child::LEN; struct X;";
    assert!(found(parent, "use super::X; const LEN: u8 = 1; impl X { }", "").is_empty());
    assert_eq!(
        found(parent, "use super::X; const LEN: u8 = 1; impl Clone for X { }", ""),
        ["x x/child"]
    );
    let by_other = "use super::other::O; use super::X; const LEN: u8 = 1; impl<'a> X { }";
    assert_eq!(found(parent, by_other, "use super::X; struct O;"), ["x x/child x/other"]);
}
