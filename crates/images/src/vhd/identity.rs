//! The end of a coalesce: the parent takes the child's place.
//!
//! Merging is copying what the child has into the parent, as any write; that is not done here.
//! Meanwhile the child shadows all of it, so it may stop at any moment. When the data is durable
//! the parent gets the child's identity, and can then be renamed over the child, whose children
//! find in it what they were made on. Between the two the chain is whole: a child whose parent has
//! its own identity is opened all the same (see [`Vhd::accepts_parent`]).

use std::io;

use ferrite_disk_base::{Port, Rare};

use super::footers::replace_footers;
use super::format::footer::Footer;
use super::meta::FooterAt;
use super::pieces::write_bytes;
use super::{Body, Vhd};
use crate::image::format::ImageFormat as _;

impl Vhd {
    /// Gives this image, a parent that has all data of the child and a disk at least as large, the
    /// identity of the child. It is closed by that. Its file is file 0 of the port.
    ///
    /// # Errors
    /// The kernel's; the identity is the old or the new one.
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
            // Its only one: a single sector. There may be space between the disk and that.
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
