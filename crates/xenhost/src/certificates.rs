//! Certificates of an authority, a server and a client of this host, for two days.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::steps;

/// Makes them with openssl in a new folder, by the names that QEMU, nbdkit, libnbd and Ferrite know. The server is
/// `localhost`, and 127.0.0.1.
///
/// # Errors
/// The folder is there already, or openssl fails.
pub fn make(folder: &Path) -> Result<()> {
    std::fs::create_dir(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let openssl = |kind: &str, more: &[&str]| {
        let mut command = Command::new("openssl");
        command.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]);
        command.args(["-noenc", "-days", "2", "-subj", &format!("/CN={kind}")]).args(more);
        command.args(["-keyout", &format!("{kind}-key.pem"), "-out", &format!("{kind}-cert.pem")]);
        steps::output(command.current_dir(folder))
    };
    openssl("ca", &[])?;
    for (kind, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let usage = format!("extendedKeyUsage={usage}");
        let names = "subjectAltName=DNS:localhost,IP:127.0.0.1";
        let extensions = ["basicConstraints=critical,CA:FALSE", names, &usage];
        let extensions = extensions.into_iter().flat_map(|extension| ["-addext", extension]);
        let signed = ["-CA", "ca-cert.pem", "-CAkey", "ca-key.pem"].into_iter().chain(extensions);
        openssl(kind, &signed.collect::<Vec<_>>())?;
    }
    Ok(())
}
