//! The end of a coalesce: the parent replaces the child.
//!
//! The merge itself copies the child's data into the parent, as any write; that is not done here. Meanwhile the child
//! shadows all of it, so it may stop at any moment. When the data are durable the parent gets the child's identity, and
//! can then be renamed over the child. The child's children find in it the image that they were made on. Between the
//! two steps the chain is valid: a child whose parent has the child's own identity is opened (see
//! [`Vhd::accepts_parent`]).

use std::io;

use ferrite_disk_base::{Port, Rare};

use super::footers::replace_footers;
use super::format::footer::Footer;
use super::meta::FooterAt;
use super::pieces::write_bytes;
use super::{Body, Vhd};
use crate::image::format::ImageFormat as _;

impl Vhd {
    /// Gives this image the child's identity, and closes it. This image is the parent: it has all data of the child and
    /// a disk at least as large. Its file is file 0 of the port.
    ///
    /// # Errors
    /// Those of the kernel; the identity is the old or the new one.
    pub async fn take_identity(self, port: &Port, child: &Vhd) -> io::Result<()> {
        self.close(port).await?;
        let footer =
            Footer { uuid: child.footer.uuid, hidden: child.footer.hidden, ..self.footer.clone() };
        match (&self.body, self.footer_at) {
            (Body::Sparse(sparse), _) => {
                let end = sparse.blocks.end_of_file();
                sparse.blocks.mend_copy(port).await?;
                replace_footers(port, &self.commits, &self.raw, &self.footer, &footer, end).await?;
                Rare::IdentityTaken.taken();
                Ok(())
            }
            // A fixed image has only this one, in a single sector. There may be space between the disk and it.
            (Body::Fixed, FooterAt::End(at)) => {
                write_bytes(port, port.files[0], &[(at, &footer.bytes())]).await?;
                self.commits.sync(port).await
            }
            (Body::Fixed, FooterAt::Start | FooterAt::Taken(_)) => {
                Err(io::ErrorKind::InvalidData.into())
            }
        }
    }
}
