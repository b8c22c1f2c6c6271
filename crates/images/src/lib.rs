//! Disks in images with metadata.
//!
//! * [`Image`]: a chain of layers, the leaf first. [`Layer`]: one of them, whatever its format is.
//! * [`ImageFormat`]: the interface of a format. [`vhd`] and [`qcow2`] are the formats.
//! * [`children`]: the children of an image, which must not be written while it has any.
//! * [`open_raw`], [`open_medium`], [`open_store`]: open and lock a disk's file or device.

#![forbid(unsafe_code)]

pub mod children;
mod image;
pub mod qcow2;
#[cfg(test)]
mod testing;
pub mod vhd;

pub use image::{
    Backing, Image, ImageFormat, Layer, Mapping, ParentNames, Unrecovered, open_as_far,
    open_medium, open_raw, open_store,
};
