//! ferrite.toml(5), from the example configuration that the package installs.

use super::roff::Roff;

/// Every key as a comment: `## ` begins an explanation, `#` a line that could stand in the file.
const EXAMPLE: &str = include_str!("../../../../dist/ferrite.toml");

const INTRODUCTION: &str = "The daemon reads this file when it starts. Without the file, and for each key that is not \
    in it, the default holds. The file is TOML: keys of a table stand below the line with its name in brackets. \
    ferrite daemon --check-config checks the file, and names the key that is wrong. A change counts after systemctl \
    restart ferrite, for disks that are attached from then on.";

/// The page.
pub(super) fn page() -> String {
    let mut page = Roff::new("ferrite.toml", "5");
    page.section("NAME").text("ferrite.toml - configuration of the Ferrite daemon");
    page.section("SYNOPSIS").lines("/etc/ferrite/ferrite.toml");
    page.section("DESCRIPTION").text(INTRODUCTION);
    page.section("KEYS OF ALL TABLES");
    let mut explained = String::new();
    for line in EXAMPLE.split_once("\n\n").map_or("", |(_, keys)| keys).lines() {
        match line {
            line if line.starts_with("##") => {
                explained = line.trim_start_matches(['#', ' ']).to_owned();
            }
            line if line.starts_with("#[") => {
                let (table, about) = parts(line);
                page.section(&format!("TABLE {}", table.trim_start_matches('#')));
                if !about.is_empty() {
                    page.text(&sentence(about));
                }
            }
            line if line.starts_with('#') => {
                let (key, about) = parts(line);
                let about = if about.is_empty() {
                    std::mem::take(&mut explained)
                } else {
                    about.to_owned()
                };
                page.term(key.trim_start_matches('#'), &sentence(&about));
            }
            _ => {}
        }
    }
    page.section("EXAMPLES").lines(
        "image_folders = [\"/srv\", \"/dev/vg\"]\n\n[disks]\non_full = \"wait\"\n\n[images.\"/srv/db.vhd\"]\ncpu = 400",
    );
    page.section("FILES").term(
        "/etc/ferrite/ferrite.toml",
        "The configuration; the package installs it with every key as a comment.",
    );
    page.section("SEE ALSO").text("ferrite-daemon(8), ferrite-serve(1)").paragraph();
    page.text("/usr/share/doc/ferrite/operations.md has an example with every key.");
    page.end()
}

/// The setting of a line, and what the comment behind it says.
fn parts(line: &str) -> (&str, &str) {
    // No value of the example has a # in it.
    let (setting, about) = line[1..].split_once('#').unwrap_or((&line[1..], ""));
    (setting.trim_end(), about.trim())
}

/// As a sentence of its own.
fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let Some(first) = chars.next() else { return String::new() };
    let end = if text.ends_with('.') { "" } else { "." };
    format!("{}{}{end}", first.to_uppercase(), chars.as_str())
}
