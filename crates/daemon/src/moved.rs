//! A guest that is moved between this host and another one, with its image on shared storage
//! (attachments.md).
//!
//! The hosts do not know each other: each one sees its own domains, and the image with its lock.

use ferrite_xen::store::Store;

use crate::Failure;
use crate::follow::Follower;
use crate::params::Image;
use crate::siblings::{INCOMING, name};

impl Follower {
    /// Whether the guest comes from another host, which may have the image until the guest runs here.
    ///
    /// The name says so: the toolstack calls only a migration's target by it, until it may run. The
    /// image's lock says less. Locks on block devices are not seen by other hosts; and an image that
    /// another guest uses by mistake is better reported now than when the guest runs.
    pub(crate) fn comes_from_another_host(
        &self,
        store: &mut Store,
        image: &Image,
    ) -> Result<bool, Failure> {
        // A store has one host at a time, and its volumes cannot be looked at from another one.
        if image.volume().is_some() {
            return Ok(false);
        }
        let name = name(store, self.id).map_err(|e| Failure::store(&e))?;
        Ok(name.ends_with(INCOMING))
    }
}
