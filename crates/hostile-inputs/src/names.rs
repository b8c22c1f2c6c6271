//! Texts from users and images.

use ferrite_disk::size::{self, Human};
use ferrite_disk::{Format, ImageName};

/// [`ImageName::parse`]: a name that it accepts is also accepted with the format as its prefix.
pub(crate) fn image_name(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match ImageName::parse(text) {
        Ok(name) => {
            let path = name.path.to_str().expect("it was text");
            assert!(text.ends_with(path), "{text:?} names {path:?}");
            if !path.is_empty() {
                let again = ImageName::parse(&format!("{}:{path}", name.format));
                assert_eq!(again.ok(), Some(name.clone()));
            }
            let unprefixed = name.path.as_os_str().len() == text.len();
            let by_path = Format::of_path(&name.path) == name.format;
            assert!(!unprefixed || by_path || name.export().is_some());
        }
        Err(e) => assert!(!e.why().is_empty() && !e.help().is_empty()),
    }
}

/// [`size::parse`]: no overflow, and no wrong value.
pub(crate) fn size(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    match size::parse(text) {
        Ok(bytes) => {
            assert!(bytes <= i64::MAX as u64);
            assert_eq!(size::parse(&bytes.to_string()), Ok(bytes));
            assert!(Human(bytes).to_string().len() < 32);
        }
        Err(e) => assert!(e.to_string().len() < 400, "{e}"),
    }
}
