//! Images that name others.

use std::os::unix::net::UnixListener;

use ferrite_disk::{Format, MAX_LAYERS};
use ferrite_hostile_inputs::images::Sketch;
use ferrite_hostile_inputs::images::vhd::{self, Dynamic, Parent};
use ferrite_hostile_inputs::images::{qcow2, qcow2::Image};

use super::{Den, Verdict};

/// An image of its own identity on a parent of another, in the same directory.
fn child(format: Format, own: u16, parent: u16, name: &str) -> Sketch {
    let uuid = |n: u16| {
        let mut uuid = [0; 16];
        uuid[..2].copy_from_slice(&n.to_be_bytes());
        uuid
    };
    match format {
        Format::Vhd => {
            let parent = Some(Parent::beside(uuid(parent), name));
            Dynamic { uuid: uuid(own), parent, ..vhd::small() }.build()
        }
        _ => {
            let kind = if name.ends_with("qcow2") { "qcow2" } else { "raw" };
            let backing = Some((name.to_owned(), Some(kind.to_owned())));
            Image { backing, ..qcow2::small() }.build()
        }
    }
}

const FORMATS: [Format; 2] = [Format::Vhd, Format::Qcow2];

#[test]
fn an_image_on_itself_is_refused() {
    let den = Den::new();
    for format in FORMATS {
        let image = child(format, 1, 1, &format!("image.{format}"));
        den.refuses_image(format, &image, "itself");
    }
}

#[test]
fn circles_are_refused() {
    let den = Den::new();
    for format in FORMATS {
        for length in [2, 3, 17] {
            for i in 0..length {
                let next = (i + 1) % length;
                let image = child(format, i + 1, next + 1, &format!("{next}.{format}"));
                den.put(&format!("{i}.{format}"), &image);
            }
            // An opening for writing fails because of the child that stands on the image, before the loop is found.
            let why = [(true, "itself or one of its children"), (false, "stands on it")];
            for (read_only, why) in why {
                let path = den.path(&format!("0.{format}"));
                match den.judge(&path, format, read_only) {
                    Verdict::Refused(e) => super::check_text(&e, why),
                    other => panic!("{why:?} was expected, and it {other}"),
                }
            }
        }
    }
}

#[test]
fn a_circle_by_other_names_is_refused() {
    let den = Den::new();
    for format in FORMATS {
        let link = den.path(&format!("link.{format}"));
        std::os::unix::fs::symlink(format!("image.{format}"), link).unwrap();
        let image = child(format, 1, 1, &format!("link.{format}"));
        den.refuses_image(format, &image, "itself");
        let image = child(format, 1, 1, &format!("././/image.{format}"));
        den.refuses_image(format, &image, "itself");
    }
}

#[test]
fn a_chain_of_a_thousand_is_refused() {
    let den = Den::new();
    for format in FORMATS {
        for i in 0..1000u16 {
            let image = child(format, i + 1, i + 2, &format!("{}.{format}", i + 1));
            den.put(&format!("{i}.{format}"), &image);
        }
        let end = match format {
            Format::Vhd => Dynamic { uuid: [0; 16], ..vhd::small() }.build(),
            _ => qcow2::small().build(),
        };
        den.put(&format!("1000.{format}"), &end);
        den.refuses(&den.path(&format!("0.{format}")), format, &MAX_LAYERS.to_string());
    }
}

#[test]
fn the_longest_chain_is_read_and_one_that_is_longer_refused() {
    let den = Den::new();
    let last = MAX_LAYERS as u16;
    for i in 0..=last {
        let name = format!("{i}.vhd");
        let image = match i {
            0 => Dynamic { uuid: [0; 16], ..vhd::small() }.build(),
            _ => child(Format::Vhd, i, i - 1, &format!("{}.vhd", i - 1)),
        };
        den.put(&name, &image);
    }
    den.refuses(&den.path(&format!("{last}.vhd")), Format::Vhd, "number 256 of its chain");
    let longest = den.path(&format!("{}.vhd", last - 1));
    let verdict = den.judge(&longest, Format::Vhd, true);
    assert!(matches!(verdict, Verdict::Reads(_)), "it {verdict}");
}

#[test]
fn a_parent_that_is_gone_or_replaced_is_refused() {
    let den = Den::new();
    let image = child(Format::Vhd, 2, 1, "parent.vhd");
    den.refuses_image(Format::Vhd, &image, "is not at");
    den.put("parent.vhd", &Dynamic { uuid: [3; 16], ..vhd::small() }.build());
    den.refuses_image(Format::Vhd, &image, "but the image was made on");
}

#[test]
fn a_place_that_two_locators_lead_to_is_named_once() {
    let den = Den::new();
    let mut parent = Parent::beside([1; 16], "parent.vhd");
    parent.locators.push((*b"MacX", format!("file://{}", den.path("parent.vhd").display()).into()));
    let image = Dynamic { uuid: [2; 16], parent: Some(parent), ..vhd::small() }.build();
    let path = den.put("image.vhd", &image);
    let Verdict::Refused(e) = den.judge(&path, Format::Vhd, true) else { panic!("it opens") };
    let place = format!("is not at {:?}", den.path("parent.vhd"));
    assert!(e.to_string().ends_with(&place), "{e}");
}

#[test]
fn parents_that_are_no_files_are_refused() {
    let den = Den::new();
    std::fs::create_dir(den.path("dir")).unwrap();
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, den.path("fifo"), fifo, 0o600.into(), 0).unwrap();
    let _socket = UnixListener::bind(den.path("socket")).unwrap();
    for name in ["dir", "fifo", "socket", "/dev/null", "/dev/zero", "/dev/tty"] {
        for format in FORMATS {
            // A raw parent, so that the kind of file is all that is wrong with it.
            let image = match format {
                Format::Vhd => {
                    let url = if name.starts_with('/') { name.into() } else { format!("./{name}") };
                    let parent = Some(Parent::url([0; 16], &url));
                    Dynamic { parent, ..vhd::small() }.build()
                }
                _ => child(format, 1, 2, name),
            };
            den.refuses_image(format, &image, "");
        }
    }
}

/// Tables of a chain add up: this one asks for 32 MiB an image. Chains of large disks that are in
/// order need more than one hostile image is given.
#[test]
fn a_chain_of_large_tables_is_refused() {
    let den = Den::new();
    for i in 0..40u16 {
        let name = format!("{}.qcow2", i + 1);
        let mut image = child(Format::Qcow2, 1, 2, &name);
        image.put_u64(qcow2::field::SIZE, 128 << 30).put_u32(qcow2::field::L1_ENTRIES, 4 << 20);
        image.put_u64(qcow2::field::L1_AT, 1 << 20);
        image.set_bytes((1 << 20) + (32 << 20));
        den.put(&format!("{i}.qcow2"), &image);
    }
    den.put("40.qcow2", &qcow2::small().build());
    let verdict = den.judge_within(&den.path("0.qcow2"), Format::Qcow2, true, 384 << 10);
    assert!(matches!(verdict, Verdict::Refused(_)), "it {verdict}");
}
