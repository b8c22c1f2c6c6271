//! The options of the linker for the program.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Without optimisation the program has 1.5 MiB of addresses that the loader would write at each start: 400 page
    // faults for each keeper, worker and command of the tests. At a fixed address there are none. Shipped programs
    // stay where the kernel puts them.
    let is = |name: &str, value: &str| std::env::var(name).as_deref() == Ok(value);
    if is("PROFILE", "debug")
        && is("CARGO_CFG_TARGET_OS", "linux")
        && is("CARGO_CFG_TARGET_ENV", "gnu")
    {
        println!("cargo:rustc-link-arg-bin=ferrite=-no-pie");
    }
}
