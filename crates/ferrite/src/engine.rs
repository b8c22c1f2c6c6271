//! The engine that a disk is served with.

use std::sync::Arc;

use ferrite_disk::Disk;
use ferrite_io::engines::{EngineChoice, EngineKind};
use ferrite_serve::blkif::lifecycle::EngineFactory;

use crate::exit::Failure;

/// Chooses the engine for all queues and all later connections.
///
/// # Errors
/// This kernel or the disk does not support the engine or the polling.
pub fn choose(
    choice: EngineChoice,
    poll_storage: bool,
    disk: &Disk,
) -> Result<EngineKind, Failure> {
    let chosen = choice.decide().map_err(|e| {
        let what = format!("no engine for disk I/O (--engine {choice})");
        Failure::new(what, e, "ferrite doctor shows what this kernel offers")
    })?;
    let kind = match (chosen.kind, poll_storage) {
        (EngineKind::Uring, polled) if disk.passthrough() => EngineKind::Nvme { polled },
        (EngineKind::Uring, true) => EngineKind::UringPolled,
        (kind, false) if !disk.passthrough() => kind,
        (kind, _) => {
            let why = format!("only io_uring can, and the engine is {}", kind.name());
            let help = "leave --poll-storage out and name a block device (/dev/nvmeXnY); ferrite \
                        doctor shows what this kernel offers";
            return Err(Failure::new("cannot poll storage or send NVMe commands", why, help));
        }
    };
    match chosen.without_uring {
        Some(why) => tracing::info!("disk I/O goes through {}: {why}", kind.name()),
        None => tracing::info!("disk I/O goes through {}", kind.name()),
    }
    Ok(kind)
}

/// A factory that makes one engine for each queue.
pub fn engines(kind: EngineKind) -> EngineFactory {
    Arc::new(move |arena, entries| kind.open(arena, entries))
}
