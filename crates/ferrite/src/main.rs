//! `ferrite`: a Xen virtual-disk backend. See `ferrite --help`.

#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    ferrite::main()
}
