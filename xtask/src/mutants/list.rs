//! The list of mutants, and the check whether it fits the code.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::proof::Proof;
use ferrite_xenhost::steps;

const LIST: &str = "xtask/mutants.toml";

/// The most lines between a test's attribute and its name: comments and other attributes.
const ATTRIBUTE_LINES: usize = 8;

/// A mutant, and the test that must fail.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Mutant {
    pub(super) name: String,
    /// The promise that it breaks.
    pub(super) breaks: String,
    /// The path of the file in the repository.
    pub(super) file: String,
    /// Lines of that file that occur once. Indentation does not count.
    line: String,
    /// The replacement.
    with: String,
    /// The test: package, target, name.
    test: Option<String>,
    /// Stories of the simulator instead of a test: its arguments.
    stories: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    mutant: Vec<Mutant>,
}

/// Reads all mutants.
pub(super) fn read() -> Result<Vec<Mutant>> {
    let path = steps::repository().join(LIST);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let list: List = toml::from_str(&text).with_context(|| LIST.to_owned())?;
    Ok(list.mutant)
}

/// Reports mutants that do not fit the code any more.
pub(super) fn check(mutants: &[Mutant]) -> Result<()> {
    let (mut names, mut bad) = (BTreeSet::new(), Vec::new());
    for mutant in mutants {
        if !names.insert(&mutant.name) {
            bad.push(format!("{}: there are two of this name", mutant.name));
        }
        if let Err(error) = mutant.check() {
            bad.push(format!("{}: {}", mutant.name, steps::chain(&error)));
        }
    }
    let help = "put the line that does its work now into xtask/mutants.toml";
    ensure!(bad.is_empty(), "{}\n{help}", bad.join("\n"));
    Ok(())
}

impl Mutant {
    /// The proof that must fail.
    pub(super) fn proof(&self) -> Result<Proof> {
        match (&self.test, &self.stories) {
            (Some(test), None) => Proof::test(test),
            (None, Some(arguments)) => Ok(Proof::stories(arguments)),
            _ => bail!("it has one of `test` and `stories`"),
        }
    }

    fn check(&self) -> Result<()> {
        let path = steps::repository().join(&self.file);
        self.mutate(&fs::read_to_string(&path).with_context(|| path.display().to_string())?)?;
        match self.proof()? {
            Proof::Test { package, target, name } => exists(&package, &target, &name),
            Proof::Stories(_) => Ok(()),
        }
    }

    /// The file's text with the mutant.
    pub(super) fn mutate(&self, text: &str) -> Result<String> {
        let wanted: Vec<&str> = self.line.trim().lines().map(str::trim).collect();
        let lines: Vec<&str> = text.lines().collect();
        let is_there = |at: &usize| {
            let here = lines[*at..].iter().take(wanted.len());
            here.map(|line| line.trim()).eq(wanted.iter().copied())
        };
        let places: Vec<usize> = (0..lines.len()).filter(is_there).collect();
        let [at] = places[..] else {
            bail!("its line is {} times in {}: {}", places.len(), self.file, self.line.trim());
        };
        let with: Vec<&str> = self.with.trim().lines().map(str::trim).collect();
        ensure!(with != wanted, "it changes nothing");
        let after = &lines[at + wanted.len()..];
        Ok([&lines[..at], &with, after].concat().join("\n") + "\n")
    }
}

/// Whether a package has a test of this name.
fn exists(package: &str, target: &[String], name: &str) -> Result<()> {
    let folder = steps::repository().join(match package.strip_prefix("ferrite-") {
        Some(short) => format!("crates/{short}"),
        None if package == "ferrite" => "crates/ferrite".into(),
        None => package.into(),
    });
    let mut files = Vec::new();
    match target {
        [kind, file] if kind == "--test" => {
            let tests = folder.join("tests");
            files.push(tests.join(format!("{file}.rs")));
            sources(&tests.join(file), &mut files)?;
        }
        _ => sources(&folder.join("src"), &mut files)?,
    }
    let function = format!("fn {}(", name.rsplit("::").next().unwrap_or(name));
    for file in files.iter().filter(|file| file.exists()) {
        let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let found = lines.iter().position(|line| line.contains(&function));
        if let Some(at) = found {
            let before = &lines[at.saturating_sub(ATTRIBUTE_LINES)..at];
            ensure!(before.contains(&"#[test]"), "{name} in {} is no test", file.display());
            return Ok(());
        }
    }
    bail!("{package} {} has no test {name}", target.join(" "))
}

/// The Rust files of a folder, if it exists.
fn sources(folder: &Path, to: &mut Vec<PathBuf>) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => sources(&path, to)?,
            false if path.extension().is_some_and(|e| e == "rs") => to.push(path),
            false => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mutant(line: &str, with: &str) -> Mutant {
        let own = |text: &str| text.to_owned();
        Mutant {
            name: own("name"),
            breaks: own("something"),
            file: own("file.rs"),
            line: own(line),
            with: own(with),
            test: None,
            stories: None,
        }
    }

    #[test]
    fn a_line_is_replaced_where_it_stands_with_its_neighbours() {
        let text = "a;\n    sync();\nb;\n    sync();\n";
        let mutated = mutant("sync();\nb;", "b;").mutate(text).unwrap();
        assert_eq!(mutated, "a;\nb;\n    sync();\n");
    }

    #[test]
    fn a_line_that_is_not_there_once_is_out_of_date() {
        for line in ["sync();", "gone();"] {
            let bad = mutant(line, "").mutate("sync();\nsync();\n").unwrap_err();
            assert!(bad.to_string().contains("times in file.rs"), "{bad}");
        }
        assert!(mutant("sync();", " sync();").mutate("sync();\n").is_err());
    }

    #[test]
    fn the_test_of_a_mutant_has_to_exist() {
        let lib = ["--bin".to_owned(), "xtask".to_owned()];
        exists("xtask", &lib, "mutants::list::tests::the_test_of_a_mutant_has_to_exist").unwrap();
        assert!(exists("xtask", &lib, "there_is_no_test_of_this_name").is_err());
        assert!(exists("xtask", &lib, "exists").is_err());
    }
}
