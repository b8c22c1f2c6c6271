//! Compiles the program for hosts with any libc: everything is linked into it, for a separate target.
//!
//! rustup brings the library of that target with `rustup target add`. Without it Debian's newest compiler (for building
//! browsers) compiles the library from its source, too.

use crate::needs;
use anyhow::{Context, Result};
use ferrite_xenhost::packages;
use ferrite_xenhost::steps::{self, cargo, output};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The target whose programs need only the host's kernel.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-musl";

/// `cargo build` for the target.
///
/// # Errors
/// No compiler for it is installed, nor can be.
pub(crate) fn build(rust_flags: &str) -> Result<Command> {
    let mut build = if has_library()? {
        let mut build = cargo();
        build.arg("build").env("RUSTFLAGS", rust_flags);
        build
    } else {
        packages::ensure(&[needs::LIBC_FREE])
            .with_context(|| format!("and rustup target add {TARGET} was not run, either"))?;
        from_source(rust_flags)?
    };
    build.args(["--target", TARGET]);
    Ok(build)
}

/// Whether the available compiler has its library for the target.
fn has_library() -> Result<bool> {
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]))?;
    Ok(Path::new(sysroot.trim()).join("lib/rustlib").join(TARGET).join("lib").is_dir())
}

fn from_source(rust_flags: &str) -> Result<Command> {
    // LLVM's unwinder is compiled for glibc, but needs only one function that only glibc has: for its message before it
    // aborts.
    let flags = format!(
        "{rust_flags} -C target-feature=+crt-static -C link-self-contained=no -L native={} \
         -C link-arg=-Wl,--defsym=__fprintf_chk=abort",
        unwinder()?.to_str().context("a build folder whose path is not UTF-8")?
    );
    let mut build = Command::new(needs::DEBIANS_CARGO);
    build.current_dir(steps::repository());
    // rustup's libraries are not for Debian's compiler.
    build.env_remove("LD_LIBRARY_PATH");
    build.env("RUSTC", needs::DEBIANS_RUSTC).env("RUSTFLAGS", flags);
    // Building the library needs an unstable flag of the compiler.
    build.env("RUSTC_BOOTSTRAP", "1").args(["build", "-Zbuild-std=std"]);
    build.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_LINKER", "musl-gcc");
    Ok(build)
}

/// A folder with only the library for unwinding: its own folder also has libraries for another libc. (GCC's own
/// unwinder needs more of glibc.)
fn unwinder() -> Result<PathBuf> {
    let folder = steps::target_dir().join("libc-free");
    fs::create_dir_all(&folder)?;
    let name = folder.join("libunwind.a");
    let _ = fs::remove_file(&name);
    symlink(needs::UNWINDER, &name).with_context(|| name.display().to_string())?;
    Ok(folder)
}
