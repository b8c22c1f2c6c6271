//! Tests of behaviour run on every engine.

#![allow(dead_code, unused_macros, unused_imports, reason = "each test binary uses its own part")]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ferrite_io::arena::Arena;
use ferrite_io::engine::Engine;
use ferrite_io::engines::EngineKind;

/// The functions named, which take an [`EngineKind`], as tests: each once with every engine.
macro_rules! on_each_engine {
    ($($(#[$attribute:meta])* $name:ident),* $(,)?) => {
        mod uring {
            $(#[test] $(#[$attribute])* fn $name() {
                super::$name(ferrite_io::engines::EngineKind::Uring);
            })*
        }
        mod aio {
            $(#[test] $(#[$attribute])* fn $name() {
                super::$name(ferrite_io::engines::EngineKind::Aio);
            })*
        }
    };
}
pub(crate) use on_each_engine;

/// One of this kind, on 4 MiB.
pub(crate) fn engine(kind: EngineKind, entries: u32) -> (Box<dyn Engine>, Arc<Arena>) {
    let arena = Arena::new(4 << 20).unwrap();
    (kind.open(arena.clone(), entries).unwrap(), arena)
}

/// A file of so many bytes in memory that refuses to grow, with `EPERM`.
pub(crate) fn full(bytes: u64) -> Arc<OwnedFd> {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let fd = memfd_create("full", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, bytes).unwrap();
    fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
    Arc::new(fd)
}
