//! Suggestions for misspelled words.

/// The known word that is nearest to `word`, if it is near enough to suggest.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distances = known.into_iter().map(|name| (distance(word, name), name));
    let (distance, name) = distances.min()?;
    (distance <= 1 + name.len() / 3).then_some(name)
}

/// The edit distance: letters to change, remove or insert.
fn distance(a: &str, b: &str) -> usize {
    // No known word is longer, and `a` may have any length.
    let a: Vec<char> = a.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let changed = diagonal + usize::from(*x != y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.chars().count()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_word_is_what_was_meant_or_nothing_is() {
        let known = ["queues", "ring_order", "image_folders", "cpu"];
        for (written, meant) in [
            ("queue", Some("queues")),
            ("ring-order", Some("ring_order")),
            ("image_folder", Some("image_folders")),
            ("cpus", Some("cpu")),
            ("", None),
            ("colour", None),
            ("something else", None),
        ] {
            assert_eq!(nearest(written, known), meant, "{written}");
        }
        assert_eq!(nearest(&"x".repeat(100_000), known), None);
    }
}
