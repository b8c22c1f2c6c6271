//! Contents, and comparisons of contents, by pieces. Programs of tests are compiled with little optimisation: loops over
//! single bytes took a third of the time of some of them.

/// `len` bytes, of which each `run` is full of the byte that its number has.
pub fn runs(len: usize, run: usize, byte: impl Fn(usize) -> u8) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes.chunks_mut(run).enumerate().for_each(|(n, part)| part.fill(byte(n)));
    bytes
}

/// `len` bytes from the place `from` on of a content that is `period` again and again.
pub fn again(period: &[u8], from: usize, len: usize) -> Vec<u8> {
    let skipped = from % period.len();
    let bytes = period.repeat((skipped + len).div_ceil(period.len()));
    bytes[skipped..skipped + len].to_vec()
}

/// `count` words, each as often as `times` says, in their order.
pub fn words(words: impl Iterator<Item = u64>, times: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    words.for_each(|word| bytes.extend_from_slice(&word.to_le_bytes().repeat(times)));
    bytes
}

/// Whether all bytes are this one.
pub fn are_all(bytes: &[u8], byte: u8) -> bool {
    bytes.first().is_none_or(|first| *first == byte && bytes[1..] == bytes[..bytes.len() - 1])
}

/// Where two contents differ first.
pub fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b {
        return None;
    }
    let differs = a.iter().zip(b).position(|(a, b)| a != b);
    differs.or(Some(a.len().min(b.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_what_a_loop_over_their_bytes_makes() {
        let each = |byte: &dyn Fn(usize) -> u8| (0..1000).map(byte).collect::<Vec<u8>>();
        assert_eq!(runs(1000, 7, |n| n as u8), each(&|i| (i / 7) as u8));
        let period: Vec<u8> = (1..=251).collect();
        assert_eq!(again(&period, 300, 1000), each(&|i| ((i + 300) % 251) as u8 + 1));
        assert_eq!(
            words([1, 2].into_iter(), 2)[..24],
            *b"\x01\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"
        );
    }

    #[test]
    fn one_byte_that_differs_is_found_wherever_it_is() {
        for at in 0..9 {
            let mut bytes = [7; 9];
            assert!(are_all(&bytes, 7) && !are_all(&bytes, 8));
            bytes[at] = 8;
            assert!(!are_all(&bytes, 7) && !are_all(&bytes, 8));
            assert_eq!(first_difference(&bytes, &[7; 9]), Some(at));
        }
        assert_eq!(
            (first_difference(b"ab", b"ab"), first_difference(b"ab", b"abc")),
            (None, Some(2))
        );
        assert!(are_all(&[], 1));
    }
}
