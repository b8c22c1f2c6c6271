//! Exports of images by NBD, and images on servers of NBD, with other programs' clients and servers.

mod by_tls;
mod contexts;
mod disks;
#[path = "../tls/disturbers.rs"]
mod disturbers;
mod docs;
mod exports;
#[path = "../images/mod.rs"]
mod images;
mod names;
#[path = "../tls/others.rs"]
mod others;
#[path = "../pages/mod.rs"]
mod pages;
#[path = "../served/mod.rs"]
mod served;
mod started;
#[path = "../tls/mod.rs"]
mod tls;
