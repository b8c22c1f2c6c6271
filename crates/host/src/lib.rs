//! Services of the host: processes, names, rights, and what processes share.
//!
//! * [`helper`]: starts the processes that have disks on a Ceph cluster or a pool of servers open.
//! * [`names`]: opens files by their names, in this process or through its keeper.
//! * [`naming`]: identifies a file by any of its names, and a file system.
//! * [`place`]: identifies a file or a device in words that outlive the process.
//! * [`nbd_device`]: block devices of the kernel's NBD client.
//! * [`nvme`]: the properties of an NVMe namespace, and the commands for it.
//! * [`directory`]: changes directory entries, which a crash may undo before a sync.
//! * [`fence`]: the reservation of a LUN that several hosts see.
//! * [`frames`]: bounded messages between processes, and the rule for their versions.
//! * [`process`]: starts processes with chosen descriptors, which end together.
//! * [`processors`]: counts the processors that this process may use.
//! * [`sandbox`]: gives up all rights that a worker does not need.
//! * [`byte_locks`] and [`shares`]: locks on bytes of files, and the shares of a host that processes claim by them.
//! * [`lock_file`]: a locked file, which proves that its owner lives.
//! * [`log_limit`]: bounds log lines that a guest or a client can cause.
//! * [`tap`]: network interfaces whose frames a process reads and writes.
//! * [`tunnel`]: starts the process that speaks TLS, and names its files.
//! * [`shm`]: memory that outlives the process (files on tmpfs).
//! * [`volatile`]: copies to and from memory that other parties change meanwhile.
//! * [`clock`]: time and randomness; no other module of Ferrite asks the system for either.

pub mod byte_locks;
pub mod clock;
pub mod directory;
pub mod fence;
pub mod frames;
pub mod helper;
pub mod listen;
pub mod lock_file;
pub mod log_limit;
pub mod names;
pub mod naming;
pub mod nbd_device;
pub mod nvme;
pub mod place;
pub mod process;
pub mod processors;
pub mod sandbox;
pub mod shares;
pub mod shm;
pub mod tap;
pub mod tunnel;
pub mod volatile;
