//! An image that is served raw stays raw as long as its guest is connected.
//!
//! An image whose name says no format is refused if it looks like one of another format. A guest may
//! write such a thing into its raw disk at any time, and must not keep its own backend from coming
//! back by that. So it is noted in the device's run directory which file was opened as raw disk, when
//! it did not look like anything else, and a successor takes it for raw again. The note counts only
//! together with the in-flight table, so while the guest has been connected ever since.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;

use ferrite_disk::{Format, ImageName, medium_at};
use ferrite_serve::blkif::lifecycle::{SERVED_RAW, STOPPED};

/// The table of a guest that is connected.
const TABLE: &str = "inflight";

/// Whether a predecessor was killed: its guest is connected, and it has not ended by itself.
pub(crate) fn was_killed(run_dir: &Path) -> bool {
    run_dir.join(TABLE).exists() && !run_dir.join(STOPPED).exists()
}

/// The image's name, with a prefix if a predecessor has served it raw to the guest that is connected.
pub(crate) fn name<'a>(run_dir: &Path, image: &'a OsStr) -> Cow<'a, OsStr> {
    let served = || {
        Some(fs::read_to_string(run_dir.join(SERVED_RAW)).ok()? == medium_at(image.as_ref()).ok()?)
    };
    match says_nothing(image) && run_dir.join(TABLE).exists() && served() == Some(true) {
        true => Cow::Owned([OsStr::new("raw:"), image].into_iter().collect::<OsString>()),
        false => Cow::Borrowed(image),
    }
}

/// The note about an image that is open, made when its guest is connected.
pub(crate) fn note(image: &OsStr) -> Option<String> {
    if !says_nothing(image) {
        return None;
    }
    let noted = medium_at(image.as_ref());
    if let Err(e) = &noted {
        let image = image.display();
        tracing::warn!(
            "it cannot be noted that {image} is served raw ({e}): if its guest writes what looks like \
             an image, the next start takes raw:{image}",
        );
    }
    noted.ok()
}

/// Whether it is raw because nothing says otherwise.
fn says_nothing(image: &OsStr) -> bool {
    !ImageName::says_format(image) && Format::of_path(image.as_ref()) == Format::Raw
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_served_raw_to_a_connected_guest_is_raw_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).into_os_string();
        let (image, other, vhd) = (at("disk.img"), at("other.img"), at("disk.vhd"));
        for path in [&image, &other, &vhd] {
            fs::write(path, "").unwrap();
        }
        fs::write(at(TABLE), "").unwrap();
        assert_eq!(name(dir.path(), &image), image);
        let serve = |image: &OsStr| fs::write(at(SERVED_RAW), note(image).unwrap()).unwrap();
        serve(&image);
        assert_eq!(name(dir.path(), &image), OsString::from(format!("raw:{}", image.display())));
        assert_eq!(name(dir.path(), &other), other);
        assert_eq!(name(dir.path(), &vhd), vhd);
        // Another file under the same name.
        fs::rename(&other, &image).unwrap();
        assert_eq!(name(dir.path(), &image), image);
        serve(&image);
        // The guest has let it go.
        fs::remove_file(at(TABLE)).unwrap();
        assert_eq!(name(dir.path(), &image), image);
    }

    #[test]
    fn what_was_served_in_a_format_that_was_said_is_not_noted() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("lv").into_os_string();
        fs::write(&image, "").unwrap();
        assert_eq!(note(OsStr::new(&format!("vhd:{}", image.display()))), None);
        assert!(note(&image).is_some());
    }
}
