//! How near things are, by their places in sysfs.

use std::fs;
use std::path::Path;

/// How far two PCI devices are from each other, by the paths of their folders in sysfs with links resolved: the steps up to
/// the folder that they share, and down from there. `None` when they share no root complex.
pub fn pci_distance(a: &Path, b: &Path) -> Option<usize> {
    let shared = a.iter().zip(b.iter()).take_while(|(a, b)| a == b);
    let (mut common, mut complex) = (0, false);
    for (part, _) in shared {
        common += 1;
        // Such as `pci0000:3a`.
        complex |= part.to_str().is_some_and(|part| part.starts_with("pci") && part.contains(':'));
    }
    complex.then(|| a.iter().count() + b.iter().count() - 2 * common)
}

/// The NUMA nodes of a host; node 0 alone where it says nothing.
pub(super) fn nodes(root: &Path) -> Vec<u16> {
    let entries = fs::read_dir(root.join("devices/system/node")).into_iter().flatten().take(4096).flatten();
    let number = |name: String| name.strip_prefix("node")?.parse().ok();
    let mut nodes: Vec<u16> =
        entries.filter_map(|entry| number(entry.file_name().into_string().ok()?)).collect();
    nodes.sort_unstable();
    if nodes.is_empty() { vec![0] } else { nodes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_is_counted_in_steps() {
        let distance = |a: &str, b: &str| pci_distance(Path::new(a), Path::new(b));
        let (switch, other) =
            ("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0", "/sys/devices/pci0000:3a/0000:3a:01.0");
        let gpu = format!("{switch}/0000:3d:00.0");
        let (near, far) = (format!("{switch}/0000:3e:00.0"), format!("{other}/0000:40:00.0"));
        assert_eq!(distance(&gpu, &gpu), Some(0));
        assert_eq!(distance(&gpu, &near), Some(2));
        assert_eq!(distance(&gpu, &far), Some(5));
        assert_eq!(distance(&gpu, "/sys/devices/pci0000:80/0000:80:00.0"), None);
        assert_eq!(distance("", ""), None);
    }
}
