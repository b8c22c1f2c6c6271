//! The identity of a user of a disk on another server.

use std::io;
use std::path::Path;
use std::sync::OnceLock;

use ferrite_disk_base::OpenOptions;
use ferrite_host::clock::secret;
use ferrite_nbd::uri::Uri;

/// A random number of the kernel's, which it has from one boot of the host to the next.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The user of a disk whose processes have this run directory, one after the other. `None`: the kernel does not tell which
/// boot this is. No other host has the same user, and neither has this one after it was started again.
///
/// The first call in a process has to come before its sandbox: a worker may not read what the kernel says.
pub fn client_of(run_dir: &Path) -> Option<[u8; 16]> {
    static BOOT: OnceLock<Option<String>> = OnceLock::new();
    let boot = BOOT.get_or_init(|| std::fs::read_to_string(BOOT_ID).ok()).as_deref()?;
    Some(hashed(&[boot.trim(), "/"], run_dir.as_os_str().as_encoded_bytes()))
}

/// A user and a process as a server is told.
pub(crate) struct Identity {
    pub(crate) user: [u8; 16],
    pub(crate) process: u64,
    /// Processes that follow each other have this user.
    pub(crate) is_lasting: bool,
}

impl Identity {
    /// The identity of the process that opens an export with these options. A reader has a user of its own: it must not
    /// end the connections of a writer, and nothing of it can come late.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub(crate) fn of(uri: &Uri, options: &OpenOptions) -> io::Result<Identity> {
        let process = u64::from_ne_bytes(secret()?);
        let export = uri.export.as_bytes();
        let user = match (&uri.session, options.client) {
            _ if options.read_only => None,
            (Some(name), _) => Some(hashed(&[name, "/"], export)),
            (None, Some(client)) => {
                let client = u128::from_be_bytes(client).to_string();
                // No session's name begins so: it would have to have this client's number.
                Some(hashed(&["client ", &client, "/"], export))
            }
            (None, None) => None,
        };
        let is_lasting = user.is_some();
        let user = match user {
            Some(user) => user,
            None => secret()?,
        };
        Ok(Identity { user, process, is_lasting })
    }
}

fn hashed(begin: &[&str], end: &[u8]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    begin.iter().for_each(|part| {
        hasher.update(part.as_bytes());
    });
    let mut user = [0; 16];
    user.copy_from_slice(&hasher.update(end).finalize().as_bytes()[..16]);
    user
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uri: &str, options: &OpenOptions) -> ([u8; 16], bool) {
        let identity = Identity::of(&Uri::parse(uri).unwrap(), options).unwrap();
        (identity.user, identity.is_lasting)
    }

    #[test]
    fn processes_that_follow_each_other_are_one_user_and_readers_are_none() {
        let (a, b) = ("nbd+unix:///a?socket=/s", "nbd+unix:///b?socket=/s");
        let run = Path::new("/run/ferrite/vbd-1-51712");
        let here = OpenOptions { client: client_of(run), ..OpenOptions::default() };
        assert!(here.client.is_some());
        let first = user(a, &here);
        assert_eq!(first, user(a, &here));
        assert!(first.1);
        let beside = OpenOptions { client: client_of(&run.with_extension("2")), ..here.clone() };
        assert_ne!(first, user(a, &beside));
        assert_ne!(first, user(b, &here));
        let named = format!("{a}&session=vm");
        assert_eq!(user(&named, &here), user(&named, &OpenOptions::default()));
        assert_ne!(user(&named, &here).0, first.0);
        let reader = OpenOptions { read_only: true, ..here.clone() };
        for alone in [&OpenOptions::default(), &reader] {
            let (user_now, is_lasting) = user(a, alone);
            assert!(!is_lasting && user_now != first.0 && user_now != user(a, alone).0);
        }
        assert!(!user(&named, &reader).1);
    }
}
