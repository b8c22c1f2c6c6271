//! The file of a disk's dirty maps.

use ferrite_disk::dirty::Content;

/// [`Content::parse`]: memory follows from the length of the input, and what is read is written and read again.
pub(crate) fn dirty_map(input: &[u8]) {
    let Ok(content) = Content::parse(input) else { return };
    let words: usize = content.maps.iter().map(|map| map.bits.len()).sum();
    assert!(words * 8 <= input.len(), "{words} words of {} bytes", input.len());
    let again = Content::parse(&content.to_bytes()).expect("what was read can be read again");
    assert_eq!((again.head, again.identity), (content.head, content.identity));
    assert_eq!((again.maps, again.damaged), (content.maps, 0));
}
