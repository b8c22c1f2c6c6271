//! The end of a coalesce: the parent replaces the child.
//!
//! The merge itself copies the child's data into the parent, as any write; that is not done here. Meanwhile the child
//! shadows all of it, so it may stop at any moment. When the data are durable the parent gets the child's identity, and
//! can then be renamed over the child. The child's children find in it the image that they were made on. Between the
//! two steps the chain is valid: a child whose parent has the child's own identity is opened (see
//! [`Vhd::accepts_parent`]).

use std::io;

use ferrite_disk_base::{Port, Rare};

use super::format::footer::Footer;
use super::{Body, Vhd};

impl Vhd {
    /// Gives this image the child's identity, and closes it. This image is the parent: it has all data of the child and
    /// a disk at least as large. Its file is file 0 of the port.
    ///
    /// # Errors
    /// Those of the kernel; the identity is the old or the new one.
    pub async fn take_identity(self, port: &Port, child: &Vhd) -> io::Result<()> {
        let (uuid, hidden) = (child.footer.uuid, child.footer.hidden);
        let footer = Footer { uuid, hidden, ..self.footer.clone() };
        self.close_with(port, &footer).await?;
        if let Body::Sparse(_) = &self.body {
            Rare::IdentityTaken.taken();
        }
        Ok(())
    }
}
