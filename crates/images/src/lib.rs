//! Disks whose sectors lie in images with metadata.
//!
//! * [`Image`]: a chain of layers, the leaf first. [`Layer`]: one of them, whatever its format is.
//! * [`ImageFormat`]: the duties of a format. [`vhd`] and [`qcow2`] are the formats.
//! * [`children`]: which images stand on an image, so that nobody writes below them.
//! * [`open_raw`], [`open_medium`], [`open_store`]: what a disk lies in, opened and locked.

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
