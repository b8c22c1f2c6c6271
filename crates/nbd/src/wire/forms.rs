//! Requests and replies in each form, and the messages with 64-bit lengths.

use super::{
    DONE, EXTENDED_CHUNK_MAGIC, EXTENDED_REQUEST_BYTES, Form, Head, REQUEST_BYTES, RawRequest,
    chunk, command, flag,
};

impl Form {
    /// Bytes of a request, besides its data.
    pub const fn request_bytes(self) -> usize {
        match self {
            Form::Simple | Form::Structured => REQUEST_BYTES,
            Form::Extended => EXTENDED_REQUEST_BYTES,
        }
    }

    /// Parses the request at the front of bytes. `None`: there are too few, or they are not a request, and the rest of
    /// the stream is unusable.
    #[inline]
    pub fn parse(self, bytes: &[u8]) -> Option<RawRequest> {
        match self {
            Form::Simple | Form::Structured => RawRequest::parse(bytes.first_chunk()?),
            Form::Extended => RawRequest::parse_extended(bytes.first_chunk()?),
        }
    }

    /// Bytes of data behind a request of this form. An extended head says whether there are any. A write always has
    /// them: QEMU's client writes without that flag.
    pub fn data_bytes(self, raw: &RawRequest) -> u64 {
        let says_so = self == Form::Extended && raw.has(flag::PAYLOAD_LEN);
        if says_so || raw.command == command::WRITE { raw.len } else { 0 }
    }
}

/// The fields of a request that its reply has. Makes the heads of the reply in the client's form.
#[derive(Clone, Copy, Debug)]
pub struct ReplyTo {
    /// The client's form.
    pub form: Form,
    /// The request's number.
    pub cookie: u64,
    /// The request's first byte.
    pub offset: u64,
}

impl ReplyTo {
    /// The reply to a request that has succeeded and has no data.
    pub fn done(self) -> Head {
        match self.form {
            Form::Simple | Form::Structured => Head::simple(self.cookie, 0),
            Form::Extended => self.extended(chunk::NONE, true, 0, &[]),
        }
    }

    /// The last part of a reply to a request that has failed. `chunks`: other replies to this command are made of
    /// chunks.
    pub fn error(self, error: u32, chunks: bool) -> Head {
        match self.form {
            Form::Structured if chunks => Head::error(self.cookie, error),
            Form::Simple | Form::Structured => Head::simple(self.cookie, error),
            Form::Extended => {
                // No text.
                let mut more = [0; 6];
                more[..4].copy_from_slice(&error.to_be_bytes());
                self.extended(chunk::ERROR, true, 6, &more)
            }
        }
    }

    /// A chunk whose data follow: `len` bytes of the disk from `offset` on. Not for [`Form::Simple`].
    pub fn data(self, done: bool, offset: u64, len: u32) -> Head {
        match self.form {
            Form::Simple | Form::Structured => Head::data(self.cookie, done, offset, len),
            Form::Extended => {
                let bytes = u64::from(len) + 8;
                self.extended(chunk::DATA, done, bytes, &offset.to_be_bytes())
            }
        }
    }

    /// A chunk for a range of zeros. Not for [`Form::Simple`].
    pub fn hole(self, done: bool, offset: u64, len: u32) -> Head {
        match self.form {
            Form::Simple | Form::Structured => Head::hole(self.cookie, done, offset, len),
            Form::Extended => {
                let mut more = [0; 12];
                more[..8].copy_from_slice(&offset.to_be_bytes());
                more[8..].copy_from_slice(&len.to_be_bytes());
                self.extended(chunk::HOLE, done, 12, &more)
            }
        }
    }

    /// A chunk that this number of extents of a context follow. Not for [`Form::Simple`].
    pub fn status(self, done: bool, context: u32, extents: usize) -> Head {
        match self.form {
            Form::Simple | Form::Structured => Head::status_of(self.cookie, done, context, extents),
            Form::Extended => {
                // A request has a bounded number of extents.
                let count = extents as u32;
                let mut more = [0; 8];
                more[..4].copy_from_slice(&context.to_be_bytes());
                more[4..].copy_from_slice(&count.to_be_bytes());
                self.extended(chunk::BLOCK_STATUS_EXT, done, 8 + 16 * u64::from(count), &more)
            }
        }
    }

    fn extended(self, kind: u16, done: bool, len: u64, more: &[u8]) -> Head {
        let flags = if done { DONE } else { 0 };
        let mut fixed = [0; EXTENDED_REQUEST_BYTES];
        fixed[..4].copy_from_slice(&EXTENDED_CHUNK_MAGIC.to_be_bytes());
        fixed[4..6].copy_from_slice(&flags.to_be_bytes());
        fixed[6..8].copy_from_slice(&kind.to_be_bytes());
        fixed[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        fixed[16..24].copy_from_slice(&self.offset.to_be_bytes());
        fixed[24..].copy_from_slice(&len.to_be_bytes());
        Head::new(&[&fixed, more])
    }
}

/// An extent of a [status](ReplyTo::status) with 64-bit lengths.
pub fn push_long_extent(out: &mut Vec<u8>, len: u64, state: u64) {
    out.extend(len.to_be_bytes());
    out.extend(state.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPLY: ReplyTo = ReplyTo { form: Form::Extended, cookie: 1, offset: 512 };

    #[test]
    fn a_request_with_an_extended_head_has_a_long_length() {
        let mut bytes = [0; EXTENDED_REQUEST_BYTES];
        bytes[..8].copy_from_slice(&[0x21, 0xe4, 0x1c, 0x71, 0, 0x20, 0, 1]);
        bytes[8..16].copy_from_slice(&7u64.to_be_bytes());
        bytes[16..24].copy_from_slice(&(1u64 << 40).to_be_bytes());
        bytes[24..].copy_from_slice(&(1u64 << 33).to_be_bytes());
        let request =
            RawRequest { flags: 1 << 5, command: 1, cookie: 7, offset: 1 << 40, len: 1 << 33 };
        assert_eq!(Form::Extended.parse(&bytes), Some(request));
        assert_eq!(Form::Extended.data_bytes(&request), 1 << 33);
        let without = RawRequest { flags: 0, ..request };
        assert_eq!(Form::Extended.data_bytes(&without), 1 << 33);
        assert_eq!(Form::Extended.data_bytes(&RawRequest { command: command::TRIM, ..without }), 0);
        assert_eq!(Form::Structured.parse(&bytes), None);
        assert_eq!(Form::Extended.parse(&bytes[..31]), None);
    }

    #[test]
    fn extended_heads_have_the_lengths_that_the_protocol_gives_them() {
        let heads = [
            (REPLY.done(), 32, 0u64),
            (REPLY.error(5, false), 38, 6),
            (REPLY.data(true, 512, 4096), 40, 4104),
            (REPLY.hole(false, 512, 4096), 44, 12),
            (REPLY.status(true, 2, 3), 40, 56),
        ];
        for (head, bytes, len) in heads {
            let all = head.bytes();
            assert_eq!((all.len(), &all[24..32]), (bytes, &len.to_be_bytes()[..]));
            assert_eq!(all[8..24], [1u64.to_be_bytes(), 512u64.to_be_bytes()].concat());
        }
        assert_eq!(REPLY.status(true, 2, 3).bytes()[32..], [0, 0, 0, 2, 0, 0, 0, 3]);
        assert_eq!(REPLY.error(95, true).bytes()[32..], [0, 0, 0, 95, 0, 0]);
    }
}
