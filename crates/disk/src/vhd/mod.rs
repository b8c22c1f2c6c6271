//! VHD.
#![allow(dead_code)]

mod format;
