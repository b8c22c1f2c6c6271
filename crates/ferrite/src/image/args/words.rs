//! Options that users of qemu-img have in their scripts: `-o KEY=VALUE`, and those that change nothing here.

use std::ffi::{OsStr, OsString};

use clap::Args;
use clap::builder::PossibleValuesParser;
use ferrite_disk::Format;

use super::{FormatName, bytes};
use crate::exit::{Code, Failure};

/// The modes of a cache that qemu-img knows.
const CACHES: [&str; 5] = ["none", "writeback", "writethrough", "directsync", "unsafe"];

/// The option for properties of a new image.
#[derive(Debug, Args)]
pub(crate) struct OptionArgs {
    /// Properties of the new image as KEY=VALUE, with commas between them: cluster_size=SIZE and extended_l2=on (qcow2),
    /// subformat=fixed or dynamic (VHD), preallocation=falloc (raw) or off, compat=1.1. Others are refused.
    #[arg(short = 'o', value_name = "KEY=VALUE,...")]
    pub(crate) options: Vec<String>,
}

/// Options of `qemu-img convert` that are accepted and change nothing: its caches, and how many requests are in flight.
#[derive(Debug, Args)]
#[allow(dead_code)]
pub(crate) struct IgnoredArgs {
    /// Accepted, and changes nothing: the copy is made durable before it gets its name.
    #[arg(short = 't', value_name = "CACHE", value_parser = PossibleValuesParser::new(CACHES))]
    cache: Option<String>,

    /// Accepted, and changes nothing: SOURCE is read in one way only.
    #[arg(short = 'T', value_name = "CACHE", value_parser = PossibleValuesParser::new(CACHES))]
    source_cache: Option<String>,

    /// Accepted, and changes nothing: several requests are always in flight, in any order.
    #[arg(short = 'W')]
    out_of_order: bool,

    /// Accepted, and changes nothing: 16 requests are in flight.
    #[arg(short = 'm', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    in_flight: Option<u32>,

    /// Not supported: see `compressed`.
    #[arg(short = 'c', hide = true)]
    pub(crate) compressed: bool,
}

impl IgnoredArgs {
    /// Refuses what would change the copy.
    pub(crate) fn check(&self, destination: &OsStr) -> Result<(), Failure> {
        if !self.compressed {
            return Ok(());
        }
        let what = format!("cannot compress {}", destination.display());
        let why = "this program reads compressed clusters, and does not write them (-c)";
        let help = "leave -c out; a store can compress (ferrite store create --compress), or use \
                    qemu-img convert -c";
        Err(Failure::new(what, why, help).with_code(Code::USAGE))
    }
}

/// What the properties say of a new image.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// All space at once.
    pub(crate) fixed: bool,
    /// The unit of allocation.
    pub(crate) unit_bytes: Option<u32>,
    /// L2 entries with a bitmap of subclusters.
    pub(crate) extended_l2: bool,
    /// The parent and its format.
    pub(crate) parent: Option<OsString>,
    pub(crate) parent_format: Option<FormatName>,
}

impl OptionArgs {
    /// Understands the properties, for an image in this format.
    pub(crate) fn wanted(&self, format: Format, image: &OsStr) -> Result<Wanted, Failure> {
        let mut wanted = Wanted::default();
        for option in self.options.iter().flat_map(|text| text.split(',')) {
            let (key, value) = option.split_once('=').unwrap_or((option, "on"));
            wanted.take(format, key, value).map_err(|(why, help)| {
                let what = format!("cannot make {} with -o {option}", image.display());
                Failure::new(what, why, help).with_code(Code::USAGE)
            })?;
        }
        Ok(wanted)
    }
}

type Refusal = (String, &'static str);

impl Wanted {
    fn take(&mut self, format: Format, key: &str, value: &str) -> Result<(), Refusal> {
        let only = |is: &str, help| Err((format!("only {key}={is} is supported"), help));
        match (format, key, value) {
            (_, "backing_file", path) => self.parent = Some(path.into()),
            (_, "backing_fmt", "raw") => self.parent_format = Some(FormatName::Raw),
            (_, "backing_fmt", "qcow2") => self.parent_format = Some(FormatName::Qcow2),
            (_, "backing_fmt", "vpc" | "vhd") => self.parent_format = Some(FormatName::Vhd),
            (Format::Qcow2, "cluster_size", size) => self.unit_bytes = Some(cluster(size)?),
            (Format::Qcow2 | Format::Raw, "preallocation", "off")
            | (Format::Qcow2, "compat", "1.1" | "v3")
            | (Format::Qcow2, "lazy_refcounts" | "encryption", "off")
            | (Format::Qcow2, "refcount_bits", "16")
            | (Format::Qcow2, "compression_type", "zlib")
            | (Format::Vhd, "force_size", "on")
            | (Format::Vhd, "subformat", "dynamic") => {}
            (Format::Qcow2, "extended_l2", "on" | "off") => self.extended_l2 = value == "on",
            (Format::Qcow2, "extended_l2", _) => return only("on", "say on or off"),
            (Format::Vhd, "subformat", "fixed") | (Format::Raw, "preallocation", "falloc") => {
                self.fixed = true;
            }
            (Format::Qcow2, "compat", _) => {
                return only("1.1", "leave it out: version 3 is made");
            }
            (Format::Qcow2, "preallocation", _) => {
                return only("off", "take a raw disk or a VHD with --fixed");
            }
            (Format::Raw, "preallocation", _) => {
                return only("falloc", "falloc, or --fixed, takes all space at once");
            }
            (Format::Qcow2, "lazy_refcounts" | "encryption", _) => {
                return only("off", "leave it out, or use qemu-img create");
            }
            (Format::Qcow2, "refcount_bits", _) => {
                return only("16", "leave it out, or use qemu-img create");
            }
            (Format::Qcow2, "compression_type", _) => {
                return only("zlib", "leave it out, or use qemu-img create");
            }
            (Format::Vhd, "force_size", _) => {
                return only("on", "leave it out: a VHD has the size that was given");
            }
            (_, "backing_fmt", _) => return only("raw, vpc or qcow2", "name one of these formats"),
            _ => {
                let why = format!("a new image in format {format} has no option {key}");
                return Err((
                    why,
                    "leave it out: ferrite image create --help names those there are",
                ));
            }
        }
        Ok(())
    }
}

fn cluster(text: &str) -> Result<u32, Refusal> {
    let bytes = bytes(text).ok().and_then(|bytes| u32::try_from(bytes).ok());
    bytes.filter(|bytes| bytes.is_power_of_two()).ok_or_else(|| {
        (format!("{text:?} is no size of a cluster"), "give a power of two from 512 to 2M")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(format: Format, text: &str) -> Result<Wanted, Failure> {
        OptionArgs { options: vec![text.into()] }.wanted(format, "a".as_ref())
    }

    #[test]
    fn properties_are_taken_for_the_format_that_has_them() {
        let of = wanted(Format::Qcow2, "cluster_size=128k,compat=1.1,backing_fmt=vpc").unwrap();
        assert_eq!((of.unit_bytes, of.parent_format), (Some(128 << 10), Some(FormatName::Vhd)));
        assert!(wanted(Format::Vhd, "subformat=fixed").unwrap().fixed);
        assert!(!wanted(Format::Vhd, "subformat=dynamic,force_size").unwrap().fixed);
        assert!(wanted(Format::Raw, "preallocation=falloc").unwrap().fixed);
    }

    #[test]
    fn a_property_that_would_not_hold_is_refused_with_what_would() {
        for (format, text, why) in [
            (Format::Qcow2, "preallocation=metadata", "only preallocation=off"),
            (Format::Raw, "preallocation=full", "only preallocation=falloc"),
            (Format::Qcow2, "compat=0.10", "only compat=1.1"),
            (Format::Qcow2, "lazy_refcounts", "only lazy_refcounts=off"),
            (Format::Qcow2, "cluster_size=3k", "no size of a cluster"),
            (Format::Vhd, "cluster_size=64k", "has no option cluster_size"),
            (Format::Raw, "subformat=fixed", "has no option subformat"),
        ] {
            let refused = wanted(format, text).unwrap_err();
            assert_eq!(refused.code, Code::USAGE);
            assert!(refused.why.contains(why), "{refused}");
        }
    }
}
