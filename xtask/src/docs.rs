//! The commands that the documentation shows, taken from it, so that what is tested is what is
//! printed.

/// A page of the documentation.
pub(crate) struct Page(&'static str);

pub(crate) const SERVE: Page = Page(include_str!("../../docs/serve.md"));
pub(crate) const README: Page = Page(include_str!("../../README.md"));

impl Page {
    /// The blocks of shell commands below a heading, up to the next one.
    pub(crate) fn commands(&self, heading: &str) -> Vec<String> {
        let marker = format!("\n## {heading}\n");
        let section = self.0.split_once(marker.as_str()).map_or("", |(_, rest)| rest);
        blocks(section.split_once("\n## ").map_or(section, |(section, _)| section))
    }
}

/// The blocks of shell commands in a text.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut block: Option<String> = None;
    for line in text.lines() {
        match (line.trim(), &mut block) {
            ("```sh", _) => block = Some(String::new()),
            ("```", Some(_)) => blocks.extend(block.take()),
            (_, Some(block)) => *block += &format!("{line}\n"),
            _ => {}
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use clap::Parser;

    use super::*;

    /// Names and texts of all pages.
    fn pages() -> Vec<(String, String)> {
        let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let files = ["", "docs"].map(|dir| std::fs::read_dir(top.join(dir)).unwrap());
        let files = files.into_iter().flatten().map(|entry| entry.unwrap().path());
        let pages = files.filter(|path| path.extension().is_some_and(|e| e == "md"));
        let read =
            |path: PathBuf| (path.display().to_string(), std::fs::read_to_string(&path).unwrap());
        pages.map(read).collect()
    }

    #[test]
    fn every_task_in_the_documentation_is_one_with_these_arguments() {
        let mut seen = 0;
        for (page, text) in pages() {
            for line in blocks(&text).iter().flat_map(|block| block.lines()) {
                let command = line.split(" #").next().unwrap_or(line).trim();
                let Some(arguments) = command.strip_prefix("cargo xtask ") else { continue };
                let words = arguments.split('"').enumerate().flat_map(|(i, part)| match i % 2 {
                    0 => part.split_whitespace().map(str::to_owned).collect(),
                    _ => vec![part.to_owned()],
                });
                let words = std::iter::once("cargo xtask".to_owned()).chain(words);
                let parsed = crate::Arguments::try_parse_from(words);
                assert!(parsed.is_ok(), "{page}: {line}: {}", parsed.err().unwrap());
                seen += 1;
            }
        }
        assert!(seen > 10, "only {seen} tasks were found");
    }

    #[test]
    fn the_commands_below_a_heading_are_those_up_to_the_next() {
        let text = "\n## A\n```text\nx\n```\n```sh\none\ntwo\n```\n\n## B\n ```sh\n three\n ```\n";
        let page = Page(text);
        assert_eq!(page.commands("A"), ["one\ntwo\n"]);
        assert_eq!(page.commands("B"), [" three\n"]);
        assert!(page.commands("C").is_empty());
    }
}
