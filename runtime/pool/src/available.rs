//! The memory that the host can give now: the kernel's available bytes, within the limit of the
//! control group.
//!
//! Linux overcommits memory and kills a process that touches pages it cannot back. Therefore a
//! request is compared with the bytes that can be backed before it is made.

use std::fs;
use std::path::{Path, PathBuf};

/// Requests below this are made without a query: reading the system's files would cost more than it
/// is worth.
pub const WORTH_ASKING: u64 = 64 << 20;

/// Bytes that the host can give without ending a process, swap included; `None` where the system
/// does not report it.
pub fn available() -> Option<u64> {
    let machine = of_machine(&fs::read_to_string("/proc/meminfo").ok()?)?;
    let groups = fs::read_to_string("/proc/self/cgroup").ok();
    let group = groups.and_then(|groups| of_groups(&groups, Path::new("/sys/fs/cgroup")));
    Some(group.map_or(machine, |group| group.min(machine)))
}

/// Available memory and free swap, bytes, from the text of `/proc/meminfo`.
fn of_machine(text: &str) -> Option<u64> {
    let kib = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim_start_matches(':')
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()
    };
    kib("MemAvailable")?
        .checked_add(kib("SwapFree").unwrap_or(0))?
        .checked_mul(1024)
}

/// The least bytes that the control groups of a process leave, from its own up to the root; `None`
/// without a limit.
fn of_groups(text: &str, root: &Path) -> Option<u64> {
    let path = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let inside = path.trim_start_matches('/');
        match controllers {
            "" => Some(root.join(inside)),
            list if list.split(',').any(|c| c == "memory") => {
                Some(root.join("memory").join(inside))
            }
            _ => None,
        }
    };
    let groups: Vec<PathBuf> = text.lines().filter_map(path).collect();
    let folders = groups.iter().flat_map(|group| {
        group
            .ancestors()
            .take_while(|folder| folder.starts_with(root))
    });
    folders.filter_map(of_group).min()
}

/// The bytes that one control group leaves, of either version: its limit less its use, without
/// droppable file pages.
fn of_group(folder: &Path) -> Option<u64> {
    let number = |name: &str| {
        fs::read_to_string(folder.join(name))
            .ok()?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let (limit, used) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?),
        None => (
            number("memory.limit_in_bytes")?,
            number("memory.usage_in_bytes")?,
        ),
    };
    let statistics = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let dropped = statistics.lines().find_map(|line| {
        line.strip_prefix("inactive_file ")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    Some(limit.saturating_sub(used.saturating_sub(dropped.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_memory_of_a_machine_is_read() {
        let text = "MemTotal:       16314408 kB\nMemFree:          200 kB\nMemAvailable:    1000 kB\nSwapFree:          24 kB\n";
        assert_eq!(of_machine(text), Some(1024 * 1024));
        assert_eq!(of_machine("MemTotal: 1 kB\n"), None);
        assert_eq!(of_machine("MemAvailable: many kB\n"), None);
    }

    #[test]
    fn the_least_of_the_groups_above_counts() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("it is made");
            fs::write(path, text).expect("it is written");
        };
        write("a/b/memory.max", "max\n");
        write("a/b/memory.current", "900\n");
        write("a/memory.max", "1000\n");
        write("a/memory.current", "900\n");
        write(
            "a/memory.stat",
            "anon 100\ninactive_file 300\nactive_file 7\n",
        );
        assert_eq!(of_groups("0::/a/b\n", root.path()), Some(400));
        write("memory/job/memory.limit_in_bytes", "500\n");
        write("memory/job/memory.usage_in_bytes", "450\n");
        assert_eq!(
            of_groups("5:cpu,cpuacct:/job\n4:memory:/job\n", root.path()),
            Some(50)
        );
        assert_eq!(of_groups("0::/elsewhere\n", root.path()), None);
    }
}
