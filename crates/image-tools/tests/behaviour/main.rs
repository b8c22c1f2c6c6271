//! What the tools promise, by their public interface. The images, devices and queues that tests share are
//! those of crate `disk`.

mod chain;
#[path = "../../../disk/tests/common/mod.rs"]
mod common;
mod family;

mod check_classes;
mod children;
mod leaves;
mod marks;
mod moved_children;
mod parents_by_name;
mod questions;
mod rehearsed_repairs;
mod relinked;
mod salvage;
mod stretches;
mod tools;
mod tools_files;
mod tools_rights;
mod walks;
