//! What this process may do.

use super::Probe;
use crate::doctor::host::Host;
use crate::doctor::report::{Check, State};

const AREA: &str = "Process";

pub(super) const PROBES: &[Probe] = &[capabilities, ptrace, seccomp, io_uring, user_namespace, open_files];

/// Each lane and each peer takes descriptors.
const FILES_LEAST: u64 = 4096;

const CAP_SYS_PTRACE: u32 = 19;

/// Those that transfers have to do with (linux/capability.h).
const CAPABILITIES: [(u32, &str); 6] = [
    (12, "CAP_NET_ADMIN"),
    (13, "CAP_NET_RAW"),
    (14, "CAP_IPC_LOCK"),
    (CAP_SYS_PTRACE, "CAP_SYS_PTRACE"),
    (21, "CAP_SYS_ADMIN"),
    (23, "CAP_SYS_NICE"),
];

fn capabilities(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "capabilities", state, found);
    if host.capability(0).is_none() {
        return check(State::Unknown, "no /proc/self/status".to_owned());
    }
    let has = |(number, _): &&(u32, &str)| host.capability(*number) == Some(true);
    let names: Vec<&str> = CAPABILITIES.iter().filter(has).map(|(_, name)| *name).collect();
    match names.is_empty() {
        // None is needed: whatever the lack of one costs, another check says.
        true => check(State::Absent, "none, and none is needed".to_owned()),
        false => check(State::Ok, names.join(" ")),
    }
}

fn ptrace(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "ptrace", state, found);
    let costs =
        "shared memory cannot copy from private memory of another process; sealed memfds are not concerned";
    let capable = host.capability(CAP_SYS_PTRACE) == Some(true);
    match host.text("proc/sys/kernel/yama/ptrace_scope").as_deref() {
        None if host.has("proc/sys/kernel") => {
            check(State::Ok, "no Yama: processes of one user may".to_owned())
        }
        Some("0") => check(State::Ok, "scope 0: processes of one user may".to_owned()),
        Some(scope @ ("1" | "2")) if capable => {
            check(State::Ok, format!("scope {scope}, and CAP_SYS_PTRACE"))
        }
        Some(scope @ ("1" | "2")) => check(State::Limited, format!("scope {scope}"))
            .costs(costs)
            .mend("sysctl kernel.yama.ptrace_scope=0 (container: --cap-add SYS_PTRACE)"),
        // Until the next start of the system nothing lowers it.
        Some("3") => check(State::Limited, "scope 3: nobody may".to_owned()).costs(costs),
        Some(_) | None => check(State::Unknown, "the kernel does not say".to_owned()),
    }
}

fn seccomp(host: &Host) -> Check {
    let check = |state, found: &str| Check::new(AREA, "seccomp", state, found);
    match host.field("proc/self/status", "Seccomp").as_deref() {
        Some("0") => check(State::Ok, "off"),
        Some("1") => check(State::Limited, "strict").costs("no transport works"),
        Some("2") => check(State::Unknown, "a filter, which does not say what it refuses")
            .costs("maybe direct copies between processes, page placement and io_uring"),
        _ => check(State::Unknown, "the kernel does not say"),
    }
}

fn io_uring(host: &Host) -> Check {
    let check = |state, found: &str| Check::new(AREA, "io_uring", state, found);
    let costs = "nothing today: no transport uses it";
    match host.text("proc/sys/kernel/io_uring_disabled").as_deref() {
        Some("0") if host.field("proc/self/status", "Seccomp").as_deref() == Some("2") => {
            check(State::Unknown, "on, unless the seccomp filter refuses it").costs(costs)
        }
        Some("0") => check(State::Ok, "on"),
        Some("1") => check(State::Limited, "for a group alone").costs(costs),
        Some("2") => check(State::Absent, "off").costs(costs),
        _ => check(State::Unknown, "the kernel does not say").costs(costs),
    }
}

fn user_namespace(host: &Host) -> Check {
    let check = |state, found: &str| Check::new(AREA, "user_namespace", state, found);
    match (host.has("proc/self/uid_map"), host.is_first_namespace()) {
        (_, true) => check(State::Ok, "the host's"),
        (true, _) => check(State::Limited, "one of its own")
            .costs("capabilities do not lift limits of the host, such as that of locked memory"),
        (false, _) => check(State::Unknown, "the kernel does not say"),
    }
}

fn open_files(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "open_files", state, found);
    match host.limit("Max open files") {
        None => check(State::Unknown, "no /proc/self/limits".to_owned()),
        Some(None) => check(State::Ok, "no limit".to_owned()),
        Some(Some(files)) if files < FILES_LEAST => check(State::Limited, format!("{files} at most"))
            .costs("many peers or many shared regions meet the limit")
            .mend("ulimit -n 65536 (systemd: LimitNOFILE=65536; container: --ulimit nofile=65536)"),
        Some(Some(files)) => check(State::Ok, format!("{files} at most")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::host::tests::fake;

    fn state(probe: Probe, files: &[(&str, &str)]) -> State {
        probe(&fake(files).host).state
    }

    const PTRACE: (&str, &str) = ("proc/self/status", "CapEff:\t0000000000080000\n");

    #[test]
    fn capabilities_are_named() {
        assert_eq!(state(capabilities, &[]), State::Unknown);
        assert_eq!(
            state(capabilities, &[("proc/self/status", "CapEff:\t0000000000000000\n")]),
            State::Absent
        );
        assert_eq!(capabilities(&fake(&[PTRACE]).host).found, "CAP_SYS_PTRACE");
    }

    #[test]
    fn the_scope_of_ptrace() {
        let scope = |text| ("proc/sys/kernel/yama/ptrace_scope", text);
        assert_eq!(state(ptrace, &[]), State::Unknown);
        assert_eq!(state(ptrace, &[("proc/sys/kernel/osrelease", "")]), State::Ok);
        assert_eq!(state(ptrace, &[scope("0")]), State::Ok);
        assert_eq!(state(ptrace, &[scope("1")]), State::Limited);
        assert_eq!(state(ptrace, &[scope("1"), PTRACE]), State::Ok);
        let check = ptrace(&fake(&[scope("3"), PTRACE]).host);
        assert_eq!((check.state, check.mend), (State::Limited, None));
    }

    #[test]
    fn filters_and_rings() {
        let filter = |mode| ("proc/self/status", mode);
        assert_eq!(state(seccomp, &[]), State::Unknown);
        let states =
            ["Seccomp:\t0", "Seccomp:\t1", "Seccomp:\t2"].map(|mode| state(seccomp, &[filter(mode)]));
        assert_eq!(states, [State::Ok, State::Limited, State::Unknown]);
        let ring = |text| ("proc/sys/kernel/io_uring_disabled", text);
        let states = ["0", "1", "2", "x"].map(|text| state(io_uring, &[ring(text)]));
        assert_eq!(states, [State::Ok, State::Limited, State::Absent, State::Unknown]);
        assert_eq!(state(io_uring, &[ring("0"), filter("Seccomp:\t2")]), State::Unknown);
    }

    #[test]
    fn namespaces_and_files() {
        let map = |text| state(user_namespace, &[("proc/self/uid_map", text)]);
        assert_eq!(state(user_namespace, &[]), State::Unknown);
        assert_eq!((map("0 0 4294967295"), map("0 1000 1")), (State::Ok, State::Limited));
        let files = |text| state(open_files, &[("proc/self/limits", text)]);
        assert_eq!(state(open_files, &[]), State::Unknown);
        assert_eq!(files("Max open files  1024  4096  files"), State::Limited);
        assert_eq!(files("Max open files  65536  65536  files"), State::Ok);
        assert_eq!(files("Max open files  unlimited  unlimited  files"), State::Ok);
    }
}
