//! The results of the experiments as a Markdown table, a row each, with all missed targets.

use std::fmt::Write as _;

use anyhow::{Result, ensure};

use crate::compare::result::Target;
use crate::compare::table::figure;
use crate::experiments::findings::{Outcome, Row};

/// The table is between these two lines of a document.
pub(crate) const BEGIN: &str = "<!-- figures of the lab: begin -->\n";
pub(crate) const END: &str = "<!-- figures of the lab: end -->";

/// The most misses of one experiment in the table.
const MISSES: usize = 6;

/// The document, whose table is replaced by that of these results.
///
/// # Errors
/// It has no such lines.
pub(crate) fn replaced(document: &str, outcomes: &[Outcome]) -> Result<String> {
    let places = document.find(BEGIN).zip(document.find(END));
    let places = places.map(|(begin, end)| (begin + BEGIN.len(), end));
    let (begin, end) = places.filter(|(begin, end)| begin <= end).unwrap_or((0, 0));
    ensure!(end > 0, "it lacks the lines {} and {END}", BEGIN.trim_end());
    Ok(format!("{}{}{}", &document[..begin], table(outcomes), &document[end..]))
}

fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::from(
        "| experiment | a figure of it | ours | published | targets met | missed |\n|---|---|---|---|---|---|\n",
    );
    for outcome in outcomes {
        let Some(row) = headline(&outcome.rows) else { continue };
        let targets = outcome.rows.iter().filter(|row| row.met.is_some()).count();
        let missed: Vec<&Row> = outcome.rows.iter().filter(|row| row.met == Some(false)).collect();
        let met = match targets {
            0 => String::new(),
            _ => format!("{} of {targets}", targets - missed.len()),
        };
        let more = missed.len().saturating_sub(MISSES);
        let mut missed: Vec<String> = missed.into_iter().take(MISSES).map(miss).collect();
        missed.extend((more > 0).then(|| format!("{more} more in the report")));
        let _ = writeln!(
            text,
            "| `{}` | {} | {} {} ± {} | {} | {met} | {} |",
            cell(&outcome.experiment),
            cell(&row.name),
            figure(row.mean),
            row.unit,
            figure(row.ci95),
            row.published.map_or_else(String::new, figure),
            missed.join("; ")
        );
    }
    text
}

/// The row with a published figure, else one with a target, else a ratio, else any.
fn headline(rows: &[Row]) -> Option<&Row> {
    let first = |fits: fn(&&Row) -> bool| rows.iter().find(fits);
    first(|row| row.published.is_some())
        .or_else(|| first(|row| row.target.is_some()))
        .or_else(|| first(|row| row.unit == "times"))
        .or_else(|| rows.first())
}

fn miss(row: &Row) -> String {
    let bound = match row.target {
        Some(Target::AtLeast(bound)) => format!("≥ {bound}"),
        Some(Target::AtMost(bound)) => format!("≤ {bound}"),
        None => String::new(),
    };
    format!("{} {} ({bound})", cell(&row.name), figure(row.mean))
}

/// Escapes text for a cell.
fn cell(text: &str) -> String {
    text.replace('|', "/").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::HERE;
    use crate::experiments::findings::Findings;

    #[test]
    fn a_document_gets_the_table_of_these_results_with_their_misses() {
        let rows = vec![
            Row::new("a | b", "IOPS", &[7.0]),
            Row::new("gain", "times", &[2.0]).published(2.5).target(Target::AtLeast(1.5)),
            Row::new("loss", "times", &[0.5]).target(Target::AtLeast(0.9)),
        ];
        let findings = Findings { rows, ..Findings::default() };
        let outcome = Outcome::new(&HERE[0], findings, "2 x 486".into(), false);
        let document = format!("before\n{BEGIN}old\n{END}\nafter\n");
        let text = replaced(&document, &[outcome]).unwrap();
        let name = HERE[0].name;
        let row = format!(
            "| `{name}` | gain | 2.00 times ± 0.00 | 2.50 | 1 of 2 | loss 0.50 (≥ 0.9) |\n"
        );
        assert!(text.contains(&row) && !text.contains("old"), "{text}");
        assert!(text.starts_with("before\n") && text.ends_with(&format!("{END}\nafter\n")));
    }

    #[test]
    fn an_experiment_that_misses_a_lot_says_how_much() {
        let row = Row::new("a", "times", &[0.5]).target(Target::AtLeast(0.9));
        let findings = Findings { rows: vec![row; MISSES + 2], ..Findings::default() };
        let text = table(&[Outcome::new(&HERE[0], findings, String::new(), false)]);
        assert_eq!(text.matches("a 0.50 (≥ 0.9)").count(), MISSES);
        assert!(text.ends_with("; 2 more in the report |\n"), "{text}");
    }

    #[test]
    fn a_document_without_a_place_for_it_is_left_alone() {
        for document in ["no place", &format!("{END}{BEGIN}")] {
            assert!(replaced(document, &[]).is_err());
        }
    }
}
