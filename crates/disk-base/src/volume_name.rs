//! The syntax of a volume's name.

use serde::{Deserialize, Serialize};

const NAME_BYTES: usize = 63;

/// The name of a volume or domain: 1 to 63 letters, digits, and `-`, `_`, `.`; the first is a letter or digit.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct VolumeName(String);

impl TryFrom<String> for VolumeName {
    type Error = &'static str;

    fn try_from(name: String) -> Result<VolumeName, &'static str> {
        VolumeName::new(&name).ok_or("it is no name of a volume, snapshot or domain")
    }
}

impl VolumeName {
    /// This name, if it is valid.
    pub fn new(name: &str) -> Option<VolumeName> {
        let good = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        let begins = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
        let is_one = begins && name.len() <= NAME_BYTES && name.bytes().all(good);
        is_one.then(|| VolumeName(name.to_owned()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
