//! The kernel's two filters: of system calls (seccomp), and of names (landlock).

use std::io;
use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible as _, PathBeneath,
    PathFd, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _, RulesetStatus,
};
use seccompiler::{BackendError, BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use super::calls::Rules;

/// Whatever is added is allowed, until this program has asked for it to be denied.
const KNOWN: ABI = ABI::V5;

/// No name leads anywhere, also those that io_uring follows and seccomp does not see.
pub(super) fn deny_names(lacking: &mut Vec<String>) -> io::Result<()> {
    let denied = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(KNOWN)))
        .and_then(|rules| rules.create()?.restrict_self())
        .map_err(io::Error::other)?;
    if denied.ruleset == RulesetStatus::NotEnforced {
        lacking.push("no landlock (Linux 5.13, and lsm=... has to name it)".into());
    }
    Ok(())
}

/// No file can be made, changed or executed by name, and no TCP port listened on. Names can be read.
pub(super) fn deny_changes(lacking: &mut Vec<String>) -> io::Result<()> {
    let denied = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_write(KNOWN) | AccessFs::Execute)
        .and_then(|rules| rules.handle_access(AccessNet::BindTcp))
        .and_then(|rules| rules.create()?.restrict_self())
        .map_err(io::Error::other)?;
    if denied.ruleset == RulesetStatus::NotEnforced {
        lacking.push("no landlock (Linux 5.13, and lsm=... has to name it)".into());
    }
    Ok(())
}

/// Files can be made, changed and removed by name in this folder and below only. Names can be read and executed.
pub(super) fn change_only(folder: &Path, lacking: &mut Vec<String>) -> io::Result<()> {
    let changes = AccessFs::from_write(KNOWN);
    let rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
    let rules = rules.handle_access(changes).map_err(io::Error::other)?;
    restrict(rules, changes, &[folder], lacking)
}

/// Names below these folders can be used, but not executed; no others, and no TCP port.
pub(super) fn keep_folders(folders: &[&Path], lacking: &mut Vec<String>) -> io::Result<()> {
    let all = AccessFs::from_all(KNOWN);
    let rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)
        .and_then(|rules| rules.handle_access(AccessNet::from_all(KNOWN)))
        .map_err(io::Error::other)?;
    restrict(rules, all & !AccessFs::Execute, folders, lacking)
}

/// Denies what `rules` handle, but for the accesses `kept` below these folders.
fn restrict(
    rules: Ruleset,
    kept: BitFlags<AccessFs>,
    folders: &[&Path],
    lacking: &mut Vec<String>,
) -> io::Result<()> {
    let mut rules = rules.create().map_err(io::Error::other)?;
    for folder in folders {
        let below = PathBeneath::new(PathFd::new(folder).map_err(io::Error::other)?, kept);
        rules = rules.add_rule(below).map_err(io::Error::other)?;
    }
    let denied = rules.restrict_self().map_err(io::Error::other)?;
    if denied.ruleset == RulesetStatus::NotEnforced {
        lacking.push("no landlock (Linux 5.13, and lsm=... has to name it)".into());
    }
    Ok(())
}

/// From now on these calls are the only ones: the kernel kills the process at once if it tries another
/// one. It holds for all threads.
pub(super) fn allow(rules: &Result<Rules, BackendError>) -> io::Result<()> {
    let rules = rules.as_ref().map_err(|e| io::Error::other(e.to_string()))?;
    install(&program(rules.clone()).map_err(|e| io::Error::other(e.to_string()))?)
}

fn program(rules: Rules) -> Result<BpfProgram, BackendError> {
    let architecture: TargetArch = std::env::consts::ARCH.try_into()?;
    let killed = SeccompAction::KillProcess;
    let filter = SeccompFilter::new(rules, killed, SeccompAction::Allow, architecture)?;
    let filter: BpfProgram = filter.try_into()?;
    // Before all of it, which jumps by distances: `clone3` is not there. The C library takes `clone`
    // then, whose flags can be seen.
    let no_clone3 = [
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_clone3 as u32),
        (libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ];
    let line = |(code, jt, jf, k)| seccompiler::sock_filter { code: code as u16, jt, jf, k };
    Ok(no_clone3.into_iter().map(line).chain(filter).collect())
}

fn install(program: &BpfProgram) -> io::Result<()> {
    let lines: Vec<libc::sock_filter> = program
        .iter()
        .map(|line| libc::sock_filter { code: line.code, jt: line.jt, jf: line.jf, k: line.k })
        .collect();
    let program =
        libc::sock_fprog { len: lines.len() as u16, filter: lines.as_ptr().cast_mut().cast() };
    // The second one: this process runs no untrusted code beside its own secrets. Without it, kernels
    // before 5.16 make each of its branches slow.
    let flags = libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the kernel copies the program, whose lines outlive the call.
    let done = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    };
    match done {
        0 => Ok(()),
        // Of a thread that has other filters.
        1.. => Err(io::Error::other("one of its threads cannot be locked down")),
        _ => Err(io::Error::last_os_error()),
    }
}
