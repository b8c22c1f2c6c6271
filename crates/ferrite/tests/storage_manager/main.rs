//! The programs and the plug-in that XAPI's storage manager calls.

mod cbt_util;
#[path = "../images/mod.rs"]
mod images;
#[path = "../pages/mod.rs"]
mod pages;
mod smapi;
mod smapi_data;
mod tap_ctl;
#[path = "../tapped/mod.rs"]
mod tapped;
mod taps;
mod taps_beside;
mod vhd_read;
mod vhd_write;
#[path = "../xapi/mod.rs"]
mod xapi;
