//! An image that is served raw stays raw as long as its guest is connected.
//!
//! An image whose name names no format is refused if its content looks like another format. But a guest may write such
//! content into its raw disk at any time, and that must not keep its backend from restarting. So the image name in the
//! in-flight table counts: if a predecessor has served the image raw to the connected guest, a successor takes it for
//! raw again.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use ferrite_disk::{DiskIdentity, Format, ImageName};
use ferrite_host::names;
use ferrite_serve::blkif::inflight;
use ferrite_serve::blkif::lifecycle::{STOPPED, TABLE};

/// Whether a predecessor was killed: its guest is connected, and it did not end in good order.
pub(crate) fn was_killed(run_dir: &Path) -> bool {
    names::exists(run_dir.join(TABLE)) && !names::exists(run_dir.join(STOPPED))
}

/// The image's name, with the prefix `raw:` if a predecessor has served it raw to the connected guest.
pub(crate) fn name<'a>(run_dir: &Path, image: &'a OsStr) -> Cow<'a, OsStr> {
    match says_nothing(image) && was_served_raw(run_dir, image.as_ref()) {
        true => Cow::Owned([OsStr::new("raw:"), image].into_iter().collect::<OsString>()),
        false => Cow::Borrowed(image),
    }
}

fn was_served_raw(run_dir: &Path, image: &Path) -> bool {
    let table = inflight::ImageName::open(&run_dir.join(TABLE)).ok().flatten();
    let served = table.map(|name| name.get().key);
    served.is_some_and(|served| DiskIdentity::raw_at(image).is_ok_and(|raw| raw.key == served))
}

/// Whether it is raw because neither its name nor a prefix gives a format.
fn says_nothing(image: &OsStr) -> bool {
    !ImageName::says_format(image) && Format::of_path(image.as_ref()) == Format::Raw
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ferrite_disk::{Disk, OpenOptions};
    use ferrite_serve::blkif::inflight::{Identity, Table};
    use ferrite_xen::abi::Protocol;

    use super::*;

    fn serve(run_dir: &Path, name: &str) {
        let image = Disk::open(name, &OpenOptions::default()).unwrap().identity().unwrap();
        let identity = Identity {
            guest: String::new(),
            rings: String::new(),
            image,
            protocol: Protocol::X86_64,
            ring_order: 0,
            queues: 1,
            max_segments: 11,
        };
        Table::create(&run_dir.join(TABLE), identity).unwrap();
    }

    #[test]
    fn what_was_served_raw_to_a_connected_guest_is_raw_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).into_os_string();
        let (image, other, vhd) = (at("disk.img"), at("other.img"), at("disk.vhd"));
        for path in [&image, &other, &vhd] {
            fs::write(path, vec![0; 4096]).unwrap();
        }
        let raw = OsString::from(format!("raw:{}", image.display()));
        assert_eq!(name(dir.path(), &image), image);
        serve(dir.path(), image.to_str().unwrap());
        assert_eq!(name(dir.path(), &image), raw);
        assert_eq!(name(dir.path(), &raw), raw);
        assert_eq!(name(dir.path(), &other), other);
        assert_eq!(name(dir.path(), &vhd), vhd);
        // Another file under the same name.
        fs::rename(&other, &image).unwrap();
        assert_eq!(name(dir.path(), &image), image);
        serve(dir.path(), image.to_str().unwrap());
        assert_eq!(name(dir.path(), &image), raw);
        // The guest has disconnected.
        fs::remove_file(at(TABLE)).unwrap();
        assert_eq!(name(dir.path(), &image), image);
    }
}
