//! The commands of the documentation, extracted from it, so that the printed commands are tested.

/// A page of the documentation.
pub(crate) struct Page(&'static str);

pub(crate) const README: Page = Page(include_str!("../../README.md"));
pub(crate) const SERVE: Page = Page(include_str!("../../docs/serve.md"));
pub(crate) const ACCESS: Page = Page(include_str!("../../docs/access.md"));

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

    /// The pages in these folders, with their texts.
    fn pages_in(folders: &[&str]) -> Vec<(PathBuf, String)> {
        let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let files = folders.iter().map(|folder| std::fs::read_dir(top.join(folder)).unwrap());
        let files = files.flatten().map(|entry| entry.unwrap().path());
        let pages = files.filter(|path| path.extension().is_some_and(|e| e == "md"));
        let read = |path: PathBuf| (path.clone(), std::fs::read_to_string(path).unwrap());
        pages.map(read).collect()
    }

    /// Names and texts of the pages for users and contributors.
    fn pages() -> Vec<(String, String)> {
        let pages = pages_in(&["", "docs"]).into_iter();
        pages.map(|(path, text)| (path.display().to_string(), text)).collect()
    }

    /// The targets of all links in a text, outside of code.
    fn links(text: &str) -> Vec<&str> {
        let prose = text.split("```").step_by(2);
        let targets = prose.flat_map(|prose| prose.split("](").skip(1));
        targets.filter_map(|rest| rest.split(')').next()).collect()
    }

    /// The anchors of all headings in a text, as on sites that show Markdown.
    fn anchors(text: &str) -> Vec<String> {
        let prose = text.split("```").step_by(2);
        let headings = prose.flat_map(str::lines).filter(|line| line.starts_with('#'));
        let anchor = |heading: &str| {
            let heading = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        };
        headings.map(anchor).collect()
    }

    /// The fault of a link on a page.
    fn fault(page: &Path, text: &str, link: &str) -> Option<String> {
        if link.starts_with("http") {
            return None;
        }
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = page.with_file_name(file);
        if !file.is_empty() && !target.exists() {
            return Some(format!("{}: there is no {link}", page.display()));
        }
        let text = match file {
            "" => text.to_owned(),
            _ if anchor.is_empty() => return None,
            _ => std::fs::read_to_string(&target).unwrap(),
        };
        let is_there = anchors(&text).iter().any(|found| found == anchor);
        (!is_there).then(|| format!("{}: no heading for {link}", page.display()))
    }

    #[test]
    fn every_relative_link_leads_to_a_file_and_a_heading() {
        let pages = pages_in(&["", "docs", "docs/internals", "docs/journal"]);
        let mut seen = 0;
        let mut faults = Vec::new();
        for (page, text) in &pages {
            for link in links(text) {
                seen += 1;
                faults.extend(fault(page, text, link));
            }
        }
        assert!(faults.is_empty(), "{}", faults.join("\n"));
        assert!(seen > 150, "only {seen} links were found");
    }

    #[test]
    fn a_link_to_nothing_is_found() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
        let text = "# A b: `c`\n[x](no.md) [y](#a-b-c) [z](#d)\n```sh\n# e\n[i](no)\n```\n";
        let faults: Vec<_> =
            links(text).iter().filter_map(|link| fault(&page, text, link)).collect();
        assert_eq!(faults.len(), 2, "{faults:?}");
        assert!(faults[0].ends_with("there is no no.md"), "{faults:?}");
        assert!(faults[1].ends_with("no heading for #d"), "{faults:?}");
    }

    #[test]
    fn the_readme_has_at_most_900_words() {
        let words = README.0.split_whitespace().count();
        assert!(words <= 900, "{words} words: move some to a page of docs/");
    }

    #[test]
    fn the_readme_attaches_a_disk_as_the_manual_does() {
        let blocks = README.commands("First disk by xl");
        let line = blocks.iter().flat_map(|block| block.lines());
        let line = line.filter_map(|line| line.strip_prefix("xl block-attach g ")).next();
        let line = line.expect("the README attaches a disk to a guest g");
        let (words, image) = line.split_once("qcow2:").expect("a qcow2 image");
        assert!(blocks[0].contains(&format!("ferrite image create {image} ")), "{blocks:?}");
        // The guest's name for the disk may differ.
        let words = words.replace("vdev=xvdb", "vdev=xvda");
        let manual = include_str!("../../docs/operations.md");
        assert!(manual.contains(&format!("\"{words}qcow2:/srv/")), "{words}");
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
