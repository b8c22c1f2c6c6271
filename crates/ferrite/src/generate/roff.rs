//! The language of manual pages.

/// A page that is being written.
pub(super) struct Roff(String);

impl Roff {
    /// A page with its title line.
    pub(super) fn new(name: &str, section: &str) -> Roff {
        let version = env!("CARGO_PKG_VERSION");
        let name = escape(name);
        Roff(format!(".TH \"{name}\" {section} \"\" \"ferrite {version}\" \"Ferrite\"\n"))
    }

    /// Begins a section.
    pub(super) fn section(&mut self, title: &str) -> &mut Roff {
        self.0 += &format!(".SH \"{}\"\n", escape(title));
        self
    }

    /// A paragraph.
    pub(super) fn text(&mut self, text: &str) -> &mut Roff {
        self.0 += &format!("{}\n", escape(text));
        self
    }

    /// Separates paragraphs.
    pub(super) fn paragraph(&mut self) -> &mut Roff {
        self.0 += ".PP\n";
        self
    }

    /// A term and its meaning.
    pub(super) fn term(&mut self, term: &str, meaning: &str) -> &mut Roff {
        self.0 += &format!(".TP\n\\fB{}\\fR\n{}\n", escape(term), escape(meaning));
        self
    }

    /// Lines that are to be shown as they are.
    pub(super) fn lines(&mut self, text: &str) -> &mut Roff {
        self.0 += ".PP\n.nf\n.RS 4\n";
        text.lines().for_each(|line| self.0 += &format!("{}\n", escape(line)));
        self.0 += ".RE\n.fi\n";
        self
    }

    /// Text in this language already.
    pub(super) fn raw(&mut self, text: &str) -> &mut Roff {
        self.0 += text;
        self
    }

    pub(super) fn end(self) -> String {
        self.0
    }
}

/// The text as it is to be read: nothing in it is a request or a hyphen.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    if text.starts_with(['.', '\'']) {
        out += "\\&";
    }
    for c in text.chars() {
        match c {
            '\\' => out += "\\e",
            '-' => out += "\\-",
            '"' => out += "\\(dq",
            '\'' => out += "\\(aq",
            '`' => out += "\\(ga",
            '~' => out += "\\(ti",
            '^' => out += "\\(ha",
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_no_request() {
        assert_eq!(escape(".TH x"), "\\&.TH x");
        assert_eq!(escape("a\\fB --b \"c\""), "a\\efB \\-\\-b \\(dqc\\(dq");
    }
}
