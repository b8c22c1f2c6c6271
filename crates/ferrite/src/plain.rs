//! Makes names of files and texts from images harmless for terminals. The author of a name must not control the
//! reader's terminal, or forge a line.

use std::borrow::Cow;

/// The text as one line, with control characters as escapes.
pub(crate) fn one_line(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_not_sent() {
        assert!(matches!(one_line("Größe \\n.vhd"), Cow::Borrowed("Größe \\n.vhd")));
        assert_eq!(one_line("a\u{1b}[31m\nb\u{9b}"), "a\\u{1b}[31m\\nb\\u{9b}");
    }
}
