//! Memory: pages, nodes, limits.

use super::{Probe, size};
use crate::doctor::host::Host;
use crate::doctor::report::{Check, State};

const AREA: &str = "Memory";

pub(super) const PROBES: &[Probe] = &[huge_pages, thp, shared_thp, numa, cgroup_memory, dev_shm];

const THP: &str = "sys/kernel/mm/transparent_hugepage";

/// Programs that share memory by name want more than the 64 MiB that containers have unasked.
const SHM_LEAST: u64 = 1 << 30;

fn huge_pages(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "huge_pages", state, found);
    let number = |key: &str| host.field("proc/meminfo", key)?.parse::<u64>().ok();
    let (Some(total), Some(free)) = (number("HugePages_Total"), number("HugePages_Free")) else {
        return check(State::Unknown, "/proc/meminfo does not say".to_owned());
    };
    let page = host.field("proc/meminfo", "Hugepagesize").unwrap_or_default();
    let found = format!("{free} of {total} free, {page} each");
    let state = match (total, free) {
        (0, _) => return check(State::Absent, "none reserved".to_owned())
            .costs("regions with reserved huge pages are refused; transparent ones serve as well where they are on")
            .mend("sysctl vm.nr_hugepages=512"),
        (_, 0) => State::Limited,
        _ => return check(State::Ok, found),
    };
    check(state, found)
        .costs("regions with reserved huge pages are refused")
        .mend("sysctl vm.nr_hugepages=512")
}

/// The word in brackets of `always [madvise] never`.
fn chosen(host: &Host, file: &str) -> Option<String> {
    let text = host.text(format!("{THP}/{file}"))?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

fn thp(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "thp", state, found);
    match chosen(host, "enabled") {
        Some(word) if word == "never" => check(State::Limited, word)
            .costs("memory is mapped in base pages: copies and registration are slower")
            .mend(format!("echo madvise > /{THP}/enabled")),
        Some(word) => check(State::Ok, word),
        None if host.has("sys/kernel/mm") => check(State::Absent, "the kernel has none".to_owned())
            .costs("memory is mapped in base pages: copies and registration are slower"),
        None => check(State::Unknown, "the kernel does not say".to_owned()),
    }
}

fn shared_thp(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "shared_thp", state, found);
    match chosen(host, "shmem_enabled") {
        // From 6.1 on a process asks for huge pages by MADV_COLLAPSE, whatever is chosen but this.
        Some(word) if word == "deny" || word == "never" && host.kernel() < Some((6, 1)) => {
            check(State::Limited, word)
                .costs("shared memory is mapped in base pages: copies between processes are slower")
                .mend(format!("echo advise > /{THP}/shmem_enabled"))
        }
        Some(word) => check(State::Ok, word),
        None => check(State::Unknown, "the kernel does not say".to_owned()),
    }
}

fn numa(host: &Host) -> Check {
    match host.text("sys/devices/system/node/online") {
        Some(nodes) => Check::new(AREA, "numa", State::Ok, format!("nodes {nodes}")),
        None => Check::new(AREA, "numa", State::Unknown, "the kernel does not say")
            .costs("memory and devices cannot be kept near each other"),
    }
}

/// Limit and use of the control group of this process: of the second version, then of the first. `None` for the limit
/// is none.
fn group(host: &Host) -> Option<(Option<u64>, u64)> {
    let groups = host.text("proc/self/cgroup").unwrap_or_default();
    let path = |is_ours: &dyn Fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            is_ours(controllers).then(|| path.to_owned())
        })
    };
    let second = path(&str::is_empty).unwrap_or_default();
    let first = path(&|names| names.split(',').any(|name| name == "memory")).unwrap_or_default();
    let places = [
        // A container sees its own group at the root, under whatever path.
        (format!("sys/fs/cgroup{second}"), "memory.max", "memory.current"),
        ("sys/fs/cgroup".to_owned(), "memory.max", "memory.current"),
        (format!("sys/fs/cgroup/memory{first}"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("sys/fs/cgroup/memory".to_owned(), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ];
    places.into_iter().find_map(|(folder, limit, used)| {
        let limit = match &*host.text(format!("{folder}/{limit}"))? {
            "max" => None,
            // The first version's way to say so.
            number => Some(number.parse().ok()?).filter(|bytes: &u64| *bytes < 1 << 60),
        };
        Some((limit, host.text(format!("{folder}/{used}"))?.parse().ok()?))
    })
}

fn cgroup_memory(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "cgroup_memory", state, found);
    match group(host) {
        None => check(State::Unknown, "no limit is shown".to_owned()),
        Some((None, used)) => check(State::Ok, format!("no limit, {} used", size(used))),
        Some((Some(limit), used)) => {
            let found = format!("{} of {} used", size(used), size(limit));
            // What caches hold counts as used, and is given back when it is needed.
            match used >= limit - limit / 10 {
                true => check(State::Limited, found)
                    .costs("large regions may end the process")
                    .mend("a higher memory.max of the group (container: --memory)"),
                false => check(State::Ok, found),
            }
        }
    }
}

fn dev_shm(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "dev_shm", state, found);
    let mounts = host.text("proc/self/mounts").unwrap_or_default();
    // The last mount at a place covers those before.
    let mount = mounts.lines().rev().find(|line| line.split(' ').nth(1) == Some("/dev/shm"));
    let Some(options) = mount.and_then(|line| line.split(' ').nth(3)) else {
        let state = if mounts.is_empty() { State::Unknown } else { State::Absent };
        return check(state, "not mounted".to_owned())
            .costs("programs that share memory by name cannot; Posthorse shares its own by descriptor");
    };
    match options.split(',').find_map(|option| bytes(option.strip_prefix("size=")?)) {
        None => check(State::Ok, "half of the memory".to_owned()),
        Some(bytes) if bytes < SHM_LEAST => check(State::Limited, size(bytes))
            .costs(
                "programs that share memory by name have too little; Posthorse shares its own by descriptor",
            )
            .mend("mount -o remount,size=16G /dev/shm (container: --shm-size=16g)"),
        Some(bytes) => check(State::Ok, size(bytes)),
    }
}

/// The bytes of `65536k`.
fn bytes(text: &str) -> Option<u64> {
    let (number, shift) = match text.as_bytes().last()? {
        b'k' => (&text[..text.len() - 1], 10),
        b'm' => (&text[..text.len() - 1], 20),
        b'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::host::tests::fake;

    fn state(probe: Probe, files: &[(&str, &str)]) -> State {
        probe(&fake(files).host).state
    }

    #[test]
    fn pages() {
        let reserved = |text| state(huge_pages, &[("proc/meminfo", text)]);
        assert_eq!(state(huge_pages, &[]), State::Unknown);
        assert_eq!(reserved("HugePages_Total: 0\nHugePages_Free: 0\n"), State::Absent);
        assert_eq!(reserved("HugePages_Total: 8\nHugePages_Free: 0\n"), State::Limited);
        assert_eq!(reserved("HugePages_Total: 8\nHugePages_Free: 3\n"), State::Ok);

        const ENABLED: &str = "sys/kernel/mm/transparent_hugepage/enabled";
        assert_eq!(state(thp, &[]), State::Unknown);
        assert_eq!(state(thp, &[("sys/kernel/mm/other", "")]), State::Absent);
        assert_eq!(state(thp, &[(ENABLED, "always madvise [never]")]), State::Limited);
        assert_eq!(state(thp, &[(ENABLED, "always [madvise] never")]), State::Ok);

        let shared = |word, kernel| {
            let files = [
                ("sys/kernel/mm/transparent_hugepage/shmem_enabled", word),
                ("proc/sys/kernel/osrelease", kernel),
            ];
            state(shared_thp, &files)
        };
        assert_eq!(state(shared_thp, &[]), State::Unknown);
        assert_eq!(
            (shared("[never]", "5.15.0"), shared("[deny]", "6.18.0")),
            (State::Limited, State::Limited)
        );
        assert_eq!((shared("[never]", "6.1.0"), shared("[advise]", "5.4.0")), (State::Ok, State::Ok));
    }

    #[test]
    fn nodes() {
        assert_eq!(state(numa, &[]), State::Unknown);
        assert_eq!(numa(&fake(&[("sys/devices/system/node/online", "0-1\n")]).host).found, "nodes 0-1");
    }

    #[test]
    fn the_limit_of_the_group() {
        assert_eq!(state(cgroup_memory, &[]), State::Unknown);
        let second = |max, used| {
            let files = [
                ("proc/self/cgroup", "0::/a/b\n"),
                ("sys/fs/cgroup/a/b/memory.max", max),
                ("sys/fs/cgroup/a/b/memory.current", used),
            ];
            state(cgroup_memory, &files)
        };
        assert_eq!(
            (second("max", "5"), second("100", "89"), second("100", "95")),
            (State::Ok, State::Ok, State::Limited)
        );
        let first = |limit| {
            let files = [
                ("proc/self/cgroup", "4:cpu,memory:/x\n0::/\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", limit),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "95"),
            ];
            state(cgroup_memory, &files)
        };
        assert_eq!((first("9223372036854771712"), first("100")), (State::Ok, State::Limited));
    }

    #[test]
    fn the_folder_of_shared_memory() {
        let with = |options: &str| {
            state(
                dev_shm,
                &[("proc/self/mounts", &format!("a / ext4 rw 0 0\nb /dev/shm tmpfs {options} 0 0\n"))],
            )
        };
        assert_eq!(state(dev_shm, &[]), State::Unknown);
        assert_eq!(state(dev_shm, &[("proc/self/mounts", "a / ext4 rw 0 0\n")]), State::Absent);
        assert_eq!(
            (with("rw,size=65536k"), with("rw,size=8g"), with("rw")),
            (State::Limited, State::Ok, State::Ok)
        );
        assert_eq!(
            (bytes("1k"), bytes(""), bytes("99999999999999999999k"), bytes("é")),
            (Some(1024), None, None, None)
        );
    }
}
