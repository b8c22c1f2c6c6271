//! The names under which images are exported.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

use ferrite_disk::ImageName;

use super::MAX_EXPORTS;
use crate::exit::{Code, Failure};

/// The longest name in bytes.
const MAX_NAME_BYTES: usize = 255;

/// The name and the image of each argument: `NAME=IMAGE`, or an image that is called as its file without the extension,
/// or as the volume. A single image without a name has the empty one, and so any.
///
/// # Errors
/// Two have the same name, one cannot have any, or there are too many.
pub(super) fn of(args: &[OsString]) -> Result<Vec<(String, OsString)>, Failure> {
    if args.len() > MAX_EXPORTS {
        let why =
            format!("there are {}, and one process exports at most {MAX_EXPORTS}", args.len());
        return Err(usage(
            "cannot export these images",
            why,
            "start a second process for the others",
        ));
    }
    let mut taken = BTreeSet::new();
    let mut all = Vec::new();
    for arg in args {
        let (name, image) = match said(arg) {
            Some((name, image)) => (name.to_owned(), image.to_owned()),
            None if args.len() == 1 => (String::new(), arg.clone()),
            None => (derived(arg)?, arg.clone()),
        };
        if !taken.insert(name.clone()) {
            let what = format!("cannot export {}", image.display());
            let why = format!("another image is exported as {name}");
            return Err(usage(what, why, "give each a name of its own: NAME=IMAGE"));
        }
        all.push((name, image));
    }
    Ok(all)
}

/// The parts of `NAME=IMAGE`. A name has letters, digits and `-`, `_`, `.`, so an image whose own path has a `=` in its
/// first part is named with `./` before it.
fn said(arg: &OsStr) -> Option<(&str, &OsStr)> {
    let bytes = arg.as_bytes();
    let at = bytes.iter().position(|byte| *byte == b'=')?;
    let (name, image) = (&bytes[..at], &bytes[at + 1..]);
    let good = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    let is_name = !name.is_empty() && name.len() <= MAX_NAME_BYTES && name.iter().all(good);
    let name = std::str::from_utf8(name).ok().filter(|_| is_name && !image.is_empty())?;
    Some((name, OsStr::from_bytes(image)))
}

/// The name of an image without one.
fn derived(image: &OsStr) -> Result<String, Failure> {
    if let Some(rest) = image.as_bytes().strip_prefix(b"null:") {
        return Ok(["null", &String::from_utf8_lossy(rest)].concat());
    }
    let parsed = ImageName::parse(image)?;
    if parsed.export().is_some() {
        let what = format!("cannot export {}", image.display());
        return Err(usage(
            what,
            "an export of another server has no name here",
            "give it one: NAME=IMAGE",
        ));
    }
    let name = match parsed.volume() {
        Some((_, volume)) => Some(volume.to_owned()),
        None => parsed.path.file_stem().and_then(OsStr::to_str).map(str::to_owned),
    };
    let fits = |name: &String| name.len() <= MAX_NAME_BYTES && !name.contains(char::is_control);
    name.filter(fits).ok_or_else(|| {
        let what = format!("cannot export {}", image.display());
        usage(what, "no name can be made of its file's", "give it one: NAME=IMAGE")
    })
}

fn usage(what: impl Into<String>, why: impl std::fmt::Display, help: &str) -> Failure {
    Failure::new(what, why, help).with_code(Code::USAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(args: &[&str]) -> Result<Vec<(String, String)>, String> {
        let args: Vec<OsString> = args.iter().map(OsString::from).collect();
        let named = of(&args).map_err(|failure| failure.to_string())?;
        let text = |image: OsString| image.into_string().unwrap();
        Ok(named.into_iter().map(|(name, image)| (name, text(image))).collect())
    }

    fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
        all.iter().map(|(name, image)| ((*name).to_owned(), (*image).to_owned())).collect()
    }

    #[test]
    fn an_image_has_the_name_that_it_is_given_or_that_of_its_file_or_volume() {
        assert_eq!(names(&["a.qcow2"]).unwrap(), pairs(&[("", "a.qcow2")]));
        assert_eq!(names(&["x=a.qcow2"]).unwrap(), pairs(&[("x", "a.qcow2")]));
        let several = ["/d/a.qcow2", "x=/d/a=b.raw", "store:/p#web", "raw:disk", "null:1M"];
        let found = names(&several).unwrap();
        let called: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(called, ["a", "x", "web", "disk", "null1M"]);
        assert_eq!(found[1].1, "/d/a=b.raw");
    }

    #[test]
    fn what_is_before_a_equals_sign_in_a_path_is_no_name() {
        for image in ["./a=b.raw", "/d/a=b.raw", "store:/p=q#v", "raw:a=b", "=a.raw", "a="] {
            assert_eq!(names(&[image]).unwrap(), pairs(&[("", image)]));
        }
    }

    #[test]
    fn two_images_of_one_name_are_refused() {
        let said = names(&["/a/disk.raw", "/b/disk.vhd"]).unwrap_err();
        assert!(said.contains("another image is exported as disk"), "{said}");
        names(&["/a/disk.raw", "second=/b/disk.vhd"]).unwrap();
        assert!(names(&["a=x.raw", "a=y.raw"]).is_err());
        let many: Vec<String> = (0..=MAX_EXPORTS).map(|i| format!("{i}.raw")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(names(&many).unwrap_err().contains("at most 64"));
        names(&many[1..]).unwrap();
    }
}
