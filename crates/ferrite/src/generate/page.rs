//! A manual page for each command.

use std::io;
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

use super::examples::{self, Topic};
use super::roff::Roff;

/// The most characters of a line in `apropos` after the page's name.
const MOST_SHORT: usize = 76;

/// The exit codes of most commands.
const CODES: &[(&str, &str)] = &[
    ("0", "Done."),
    ("1", "The operation failed."),
    ("2", "The command line is wrong."),
    ("3", "The named object does not exist."),
    ("4", "It is in use by another process."),
    ("5", "It is damaged."),
    ("130", "Interrupted, as by Ctrl-C."),
];

/// Writes the page of a program, and those of all its commands that are not hidden.
pub(super) fn write_all(command: Command, to: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write(&command, None, to)
}

fn write(command: &Command, parent: Option<&Command>, to: &Path) -> io::Result<()> {
    let shown = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    for sub in shown {
        write(sub, Some(command), to)?;
    }
    let name = name_of(command);
    let text = render(command, parent)?;
    std::fs::write(to.join(format!("{name}.{}", section_of(name))), text)
}

fn name_of(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

/// Daemons are in section 8.
fn section_of(name: &str) -> &'static str {
    if name == "ferrite-daemon" { "8" } else { "1" }
}

fn reference(command: &Command) -> String {
    let name = name_of(command);
    format!("{name}({})", section_of(name))
}

fn render(command: &Command, parent: Option<&Command>) -> io::Result<String> {
    let name = name_of(command);
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut page = Roff::new(name, section_of(name));
    page.section("NAME").text(&format!("{name} - {}", short(&about)));
    page.section("SYNOPSIS").lines(&usage(command));
    page.section("DESCRIPTION").text(&format!("{}.", about.trim_end_matches('.')));
    let man = Man::new(command.clone()).section(section_of(name));
    if command.get_arguments().any(|arg| !arg.is_hide_set()) {
        page.raw(&made(|to| man.render_options_section(to))?);
    }
    let subs: Vec<&Command> = command.get_subcommands().filter(|sub| !sub.is_hide_set()).collect();
    if !subs.is_empty() {
        page.section("COMMANDS");
        for sub in &subs {
            let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
            page.term(&reference(sub), &about);
        }
    }
    if let Some(notes) = command.get_after_help() {
        page.section("NOTES").text(&notes.to_string().replace('\n', " "));
    }
    let topic = examples::of(name);
    more(&mut page, &topic);
    see_also(&mut page, command, parent, &topic);
    Ok(page.end())
}

/// The sections that clap knows nothing of.
fn more(page: &mut Roff, topic: &Topic) {
    let codes = topic.codes.unwrap_or(CODES);
    page.section("EXIT STATUS");
    codes.iter().for_each(|(code, meaning)| {
        page.term(code, meaning);
    });
    for (title, terms) in [("FILES", topic.files), ("ENVIRONMENT", topic.environment)] {
        if !terms.is_empty() {
            page.section(title);
            terms.iter().for_each(|(term, meaning)| {
                page.term(term, meaning);
            });
        }
    }
    if !topic.examples.is_empty() {
        page.section("EXAMPLES");
        for (what, line) in topic.examples {
            page.paragraph().text(what).lines(line);
        }
    }
}

fn see_also(page: &mut Roff, command: &Command, parent: Option<&Command>, topic: &Topic) {
    let siblings = parent.into_iter().flat_map(Command::get_subcommands);
    let siblings =
        siblings.filter(|other| !other.is_hide_set() && name_of(other) != name_of(command));
    let mut pages: Vec<String> = parent.into_iter().map(reference).collect();
    pages.extend(siblings.map(reference));
    pages.extend(topic.see.iter().map(|page| (*page).to_owned()));
    pages.dedup();
    page.section("SEE ALSO");
    if !pages.is_empty() {
        page.text(&pages.join(", ")).paragraph();
    }
    page.text(topic.manual);
}

fn made(render: impl FnOnce(&mut dyn io::Write) -> io::Result<()>) -> io::Result<String> {
    let mut bytes = Vec::new();
    render(&mut bytes)?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

/// The usage of a command, by clap.
fn usage(command: &Command) -> String {
    let usage = command.clone().render_usage().to_string();
    usage.trim_start_matches("Usage: ").replace("\n       ", "\n")
}

/// The first part of a description that says what the command does, for lists of pages.
fn short(about: &str) -> &str {
    let ends = ["; ", ": ", ". ", " ("].iter().filter_map(|end| about.find(end));
    let first = about[..ends.min().unwrap_or(about.len())].trim_end_matches('.');
    match first.char_indices().nth(MOST_SHORT) {
        None => first,
        // The part before the last comma that leaves it short enough.
        Some((at, _)) => first[..at].rfind(", ").map_or(first, |comma| &first[..comma]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_line_is_short() {
        assert_eq!(short("Make a disk. Takes no time."), "Make a disk");
        assert_eq!(short("Look for damage; ends with 2"), "Look for damage");
        assert_eq!(short("By xl 4.19 or later."), "By xl 4.19 or later");
        let long = format!("Serve all of them, {}", "x".repeat(80));
        assert_eq!(short(&long), "Serve all of them");
    }
}
