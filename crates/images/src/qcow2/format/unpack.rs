//! Compressed clusters: raw deflate or one zstd frame of just a cluster, and never more than a cluster of output.

use std::io;

use flate2::{Decompress, FlushDecompress, Status};
use zstd_safe::{DCtx, find_frame_compressed_size, get_error_name};

/// The compression of an image's clusters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Compression {
    /// Deflate without a zlib header; what qemu calls `zlib`.
    #[default]
    Deflate,
    /// One zstd frame per cluster.
    Zstd,
}

/// Unpacks one cluster of exactly `to.len()` bytes; further bytes of `packed` are ignored.
///
/// # Errors
/// `InvalidData`, with the reason.
pub(crate) fn unpack(how: Compression, packed: &[u8], to: &mut [u8]) -> io::Result<()> {
    match how {
        Compression::Deflate => inflate(packed, to),
        Compression::Zstd => zstd(packed, to),
    }
}

fn inflate(packed: &[u8], to: &mut [u8]) -> io::Result<()> {
    let mut stream = Decompress::new(false);
    let status = stream
        .decompress(packed, to, FlushDecompress::Finish)
        .map_err(|e| damaged(&e.to_string()))?;
    let all = stream.total_out() == to.len() as u64;
    match status {
        Status::Ok | Status::BufError | Status::StreamEnd if all => Ok(()),
        _ => Err(damaged("the deflate stream ends too early")),
    }
}

fn zstd(packed: &[u8], to: &mut [u8]) -> io::Result<()> {
    let damaged = |code| damaged(&format!("the zstd frame: {}", get_error_name(code)));
    let bytes = find_frame_compressed_size(packed).map_err(damaged)?;
    // Into one buffer: no window is allocated, whatever the frame asks for.
    match DCtx::create().decompress(to, &packed[..bytes]).map_err(damaged)? {
        all if all == to.len() => Ok(()),
        _ => Err(self::damaged("the zstd frame ends too early")),
    }
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a compressed cluster is damaged: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compress, FlushCompress};
    use proptest::prelude::*;

    fn deflate(bytes: &[u8]) -> Vec<u8> {
        let mut packed = Vec::with_capacity(bytes.len() + 1024);
        let mut stream = Compress::new(flate2::Compression::default(), false);
        stream.compress_vec(bytes, &mut packed, FlushCompress::Finish).unwrap();
        packed
    }

    #[test]
    fn a_deflated_cluster_comes_back_whatever_follows_it() {
        let bytes: Vec<u8> = (0..65536u32).map(|i| (i / 97) as u8).collect();
        let mut packed = deflate(&bytes);
        packed.extend_from_slice(&[0xAA; 300]);
        let mut out = vec![0; bytes.len()];
        unpack(Compression::Deflate, &packed, &mut out).unwrap();
        assert_eq!(out, bytes);
    }

    #[test]
    fn a_cluster_that_is_too_short_is_damaged() {
        let packed = deflate(&[7; 1000]);
        let mut out = vec![0; 4096];
        let e = unpack(Compression::Deflate, &packed, &mut out).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::InvalidData);
    }

    /// Frames of one raw block each, as the format's specification has them (RFC 8878).
    fn zstd_frame(window: u8, bytes: &[u8]) -> Vec<u8> {
        let mut packed = vec![0x28, 0xB5, 0x2F, 0xFD, 0x00, window];
        packed.extend_from_slice(&((bytes.len() as u32) << 3 | 1).to_le_bytes()[..3]);
        packed.extend_from_slice(bytes);
        packed
    }

    #[test]
    fn a_zstd_cluster_comes_back_whatever_follows_it() {
        let bytes: Vec<u8> = (0..65536u32).map(|i| (i / 97) as u8).collect();
        let mut packed = zstd_frame(10 << 3, &bytes);
        packed.extend_from_slice(&[0xAA; 300]);
        let mut out = vec![0; bytes.len()];
        unpack(Compression::Zstd, &packed, &mut out).unwrap();
        assert_eq!(out, bytes);
    }

    #[test]
    fn a_zstd_frame_of_another_length_than_a_cluster_is_damaged() {
        let packed = zstd_frame(10 << 3, &[7; 4096]);
        for bytes in [4095, 4097] {
            let e = unpack(Compression::Zstd, &packed, &mut vec![0; bytes]).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::InvalidData, "{bytes}");
        }
        for cut in 0..packed.len() {
            assert!(unpack(Compression::Zstd, &packed[..cut], &mut [0; 4096]).is_err(), "{cut}");
        }
    }

    #[test]
    fn a_frame_that_wants_too_much_memory_is_refused() {
        // Magic, descriptor without single segment, window of 2^(10+30).
        let packed = [0x28, 0xB5, 0x2F, 0xFD, 0x00, 30 << 3, 0, 0, 0, 0];
        assert!(unpack(Compression::Zstd, &packed, &mut [0; 512]).is_err());
    }

    proptest! {
        #[test]
        fn noise_is_refused_or_gives_a_cluster(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let mut out = vec![0; 512];
            let _ = unpack(Compression::Deflate, &bytes, &mut out);
            let mut frame = vec![0x28, 0xB5, 0x2F, 0xFD];
            frame.extend_from_slice(&bytes);
            let _ = unpack(Compression::Zstd, &frame, &mut out);
        }
    }
}
