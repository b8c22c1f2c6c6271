//! Deduplicating stores, by the program's commands.

mod commands;
mod disks;
mod docs;
mod endings;
mod from_an_owner;
mod growing;
#[path = "../images/mod.rs"]
mod images;
#[path = "../pages/mod.rs"]
mod pages;
mod read;
mod send;
#[path = "../served/mod.rs"]
mod served;
mod worker;
