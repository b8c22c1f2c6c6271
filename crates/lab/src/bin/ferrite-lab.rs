//! `ferrite-lab`: see the library.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    ferrite_lab::experiment()
}
