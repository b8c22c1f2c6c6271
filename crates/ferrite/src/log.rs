//! Log messages go to standard error; whoever emits them keeps their rate down.

use std::io;

use tracing_subscriber::EnvFilter;

/// Sets up logging: from `RUST_LOG` if it is set, else from the number of `-v`; without one, as
/// `quiet` says.
pub fn set_up(verbose: u8, quiet: &str) {
    let default = match verbose {
        0 => quiet,
        1 => "debug",
        _ => "trace",
    };
    let chosen = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let filter = EnvFilter::try_new(chosen.as_deref().unwrap_or(default));
    let understood = filter.is_ok();
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| EnvFilter::new(default)))
        .with_writer(io::stderr)
        // It would panic where a message cannot be written, and serving outlives those who read them.
        .log_internal_errors(false)
        .init();
    if !understood {
        tracing::warn!(
            "RUST_LOG is not understood and ignored; an example: RUST_LOG=ferrite=debug"
        );
    }
}
