//! Which devices are near which memory.

mod near;

use std::collections::BTreeMap;
use std::path::Path;

use posthorse_core::{Error, ErrorKind, Location, Result};
use serde::{Deserialize, Serialize};

use crate::sysfs::devices;

pub use near::pci_distance;

/// The longest text that is parsed.
const TEXT_LIMIT: usize = 1 << 20;

/// Names of devices: those near some memory, and the others that reach it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Reach(
    /// Those to use.
    pub Vec<String>,
    /// Those to use when none of the former works.
    pub Vec<String>,
);

/// Which devices are near which memory: what descriptors of segments call `priority_matrix`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Topology {
    matrix: BTreeMap<Location, Reach>,
}

impl Topology {
    /// That of the host whose sysfs is mounted at `root` (`/sys` as a rule), of the devices in `only`; of all when it is
    /// empty. Devices on a node are near its memory; one without node is near none.
    pub fn from_sysfs(root: &Path, only: &[String]) -> Self {
        let mut found = devices(root);
        found.retain(|device| only.is_empty() || only.contains(&device.name));
        let place = |node: u16| {
            let (near, far): (Vec<_>, Vec<_>) =
                found.iter().partition(|device| device.numa_node == Some(node));
            let names = |devices: Vec<&crate::sysfs::SysfsDevice>| {
                devices.into_iter().map(|device| device.name.clone()).collect()
            };
            (Location::Cpu(node), Reach(names(near), names(far)))
        };
        Self { matrix: near::nodes(root).into_iter().map(place).collect() }
    }

    /// Parses `{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}`.
    ///
    /// # Errors
    /// `Malformed` for text that is not of this form, and for a location that is none.
    pub fn from_json(text: &str) -> Result<Self> {
        const ACCEPTED: &str = "an object such as {\"cpu:0\": [[\"mlx5_0\"], [\"mlx5_1\"]]}";
        let malformed = |why: &dyn std::fmt::Display| {
            Error::new(ErrorKind::Malformed, format!("priority_matrix: {why}; accepted: {ACCEPTED}"))
        };
        if text.len() > TEXT_LIMIT {
            return Err(malformed(&format_args!("{} bytes, more than {TEXT_LIMIT}", text.len())));
        }
        let parsed: BTreeMap<String, Reach> =
            serde_json::from_str(text).map_err(|error| malformed(&error))?;
        let entry = |(key, reach): (String, Reach)| {
            let location = key.parse().map_err(|error| malformed(&error))?;
            Ok((location, reach))
        };
        Ok(Self { matrix: parsed.into_iter().map(entry).collect::<Result<_>>()? })
    }

    /// As JSON, in the form that `from_json` parses.
    pub fn to_json(&self) -> String {
        let matrix: BTreeMap<String, &Reach> =
            self.matrix.iter().map(|(location, reach)| (location.to_string(), reach)).collect();
        // Text as keys and lists of text always have a form.
        serde_json::to_string(&matrix).unwrap_or_default()
    }

    /// The devices for memory at a location. For `*`, and for a location that the matrix lacks, those near any memory are
    /// near, and the others of all are available.
    pub fn devices_for(&self, location: &Location) -> Reach {
        if let Some(reach) = self.matrix.get(location) {
            return reach.clone();
        }
        let mut all = Reach::default();
        for name in self.matrix.values().flat_map(|reach| &reach.0) {
            if !all.0.contains(name) {
                all.0.push(name.clone());
            }
        }
        for name in self.matrix.values().flat_map(|reach| &reach.1) {
            if !all.0.contains(name) && !all.1.contains(name) {
                all.1.push(name.clone());
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn devices_are_near_the_memory_of_their_node() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("class/infiniband/rxe0/fw_ver", "");
        assert_eq!(Topology::from_sysfs(root.path(), &[]).to_json(), r#"{"cpu:0":[[],["rxe0"]]}"#);
        write("devices/system/node/node0/x", "");
        write("devices/system/node/node1/x", "");
        write("class/infiniband/mlx5_0/device/numa_node", "1\n");
        let topology = Topology::from_sysfs(root.path(), &[]);
        let json = r#"{"cpu:0":[[],["mlx5_0","rxe0"]],"cpu:1":[["mlx5_0"],["rxe0"]]}"#;
        assert_eq!(topology.to_json(), json);
        assert_eq!(topology.devices_for(&Location::Cpu(1)), Reach(names(&["mlx5_0"]), names(&["rxe0"])));
        assert_eq!(topology.devices_for(&Location::Any), Reach(names(&["mlx5_0"]), names(&["rxe0"])));
        let one = Topology::from_sysfs(root.path(), &names(&["rxe0"]));
        assert_eq!(one.devices_for(&Location::Cuda(3)), Reach(names(&[]), names(&["rxe0"])));
    }

    #[test]
    fn what_is_no_matrix_is_named() {
        for text in ["", "[]", r#"{"cpu:0":[]}"#, r#"{"gpu:0":[[],[]]}"#, r#"{"cpu:0":[["a"],[1]]}"#] {
            let error = Topology::from_json(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed, "{text}");
            assert!(error.to_string().contains("accepted: an object"), "{error}");
        }
        let error = Topology::from_json(r#"{"gpu:0":[[],[]]}"#).unwrap_err().to_string();
        assert!(error.contains("gpu:0") && error.contains("cuda:N"), "{error}");
        assert!(Topology::from_json(&" ".repeat(TEXT_LIMIT + 1)).is_err());
    }

    proptest! {
        #[test]
        fn a_matrix_survives_being_written(
            rows in prop::collection::btree_map(any::<u16>(), any::<(Vec<String>, Vec<String>)>(), 0..4),
        ) {
            let place = |(node, (near, far))| (Location::Cpu(node), Reach(near, far));
            let topology = Topology { matrix: rows.into_iter().map(place).collect() };
            prop_assert_eq!(Topology::from_json(&topology.to_json()).unwrap(), topology);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,80}", at in 0_usize..40, with: char) {
            let _ = Topology::from_json(&text);
            let mut damaged: Vec<char> = r#"{"cpu:0":[["mlx5_0"],["mlx5_1"]]}"#.chars().collect();
            damaged.insert(at.min(damaged.len()), with);
            let _ = Topology::from_json(&damaged.into_iter().collect::<String>());
        }
    }
}
