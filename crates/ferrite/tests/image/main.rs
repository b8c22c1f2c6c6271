//! `ferrite image` and what stands on it, each command a process.

mod basics;
mod chains;
mod docs;
mod full;
mod habits;
mod hostile;
#[path = "../images/mod.rs"]
mod images;
mod inner;
mod journal;
#[path = "../pages/mod.rs"]
mod pages;
mod qemu_img;
mod rebase;
mod refusals;
mod salvage;
mod stretches;
