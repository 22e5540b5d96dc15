//! `check-layers`: a crate depends only on crates on lower floors.

use std::path::Path;

use cargo_metadata::{DependencyKind, Metadata};

use crate::failure::Failure;
use crate::workspace;

/// Where a crate stands in the house.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// A floor of the product: may use every floor below.
    Floor(u8),
    /// Help for tests: may use floors 0 and 1, and is itself only a dev-dependency of the product.
    Testkit,
    /// What is run in the source tree: may use everything but another tool, and nothing may use it.
    Tool,
}

use Place::{Floor, Testkit, Tool};

/// The highest floor that the testkit may use: above it are the transports, and none may know another.
const TESTKIT_CEILING: u8 = 1;

/// The table of the house; `docs/src/architecture.md` says why each stands where it stands.
const HOUSE: &[(&str, Place)] = &[
    ("posthorse-core", Floor(0)),
    ("posthorse-segment", Floor(1)),
    ("posthorse-buffer", Floor(1)),
    ("posthorse-memory", Floor(1)),
    ("posthorse-tcp", Floor(2)),
    ("posthorse-shm", Floor(2)),
    ("posthorse-rdma", Floor(2)),
    ("posthorse-file", Floor(2)),
    ("posthorse-cuda", Floor(2)),
    ("posthorse-engine", Floor(3)),
    ("posthorse-omni", Floor(4)),
    ("posthorse", Floor(5)),
    ("posthorse-cli", Floor(6)),
    ("posthorse-capi", Floor(6)),
    ("posthorse-python", Floor(6)),
    ("posthorse-testkit", Testkit),
    ("posthorse-benches", Tool),
    ("xtask", Tool),
];

/// One crate of the workspace using another in its product code (not only in its tests).
#[derive(Debug, Clone, PartialEq, Eq)]
struct Edge {
    from: String,
    to: String,
    manifest: String,
}

/// Runs the command.
pub(crate) fn run(manifest: Option<&Path>) -> Result<(), Failure> {
    let metadata = workspace::load(manifest)?;
    let faults = check(&metadata);
    if !faults.is_empty() {
        return Err(Failure::Check(faults.join("\nerror: ")));
    }
    println!("{} crates, each uses only crates on lower floors", metadata.packages.len());
    Ok(())
}

/// Every fault in the workspace, a line each.
pub(crate) fn check(metadata: &Metadata) -> Vec<String> {
    let crates: Vec<(String, String)> =
        metadata.packages.iter().map(|p| (p.name.to_string(), p.manifest_path.to_string())).collect();
    let mut edges = Vec::new();
    for package in &metadata.packages {
        for dependency in &package.dependencies {
            let known = crates.iter().any(|(name, _)| *name == dependency.name);
            if known && dependency.kind != DependencyKind::Development {
                edges.push(Edge {
                    from: package.name.to_string(),
                    to: dependency.name.clone(),
                    manifest: package.manifest_path.to_string(),
                });
            }
        }
    }
    faults(&crates, &edges)
}

/// The rule itself: the faults among `crates` (name, Cargo.toml) that use each other along `edges`.
fn faults(crates: &[(String, String)], edges: &[Edge]) -> Vec<String> {
    let unknown = crates.iter().filter(|(name, _)| place(name).is_none()).map(|(name, manifest)| {
        format!("{name} ({manifest}) has no floor: give it one in the table HOUSE of xtask/src/layers.rs")
    });
    let misplaced = edges.iter().filter_map(|edge| {
        let (from, to) = (place(&edge.from)?, place(&edge.to)?);
        let why = objection(from, to)?;
        let Edge { from: user, to: used, manifest } = edge;
        Some(format!(
            "{user} ({}) depends on {used} ({}): {why}; remove it from {manifest}",
            words(from),
            words(to)
        ))
    });
    unknown.chain(misplaced).collect()
}

fn place(name: &str) -> Option<Place> {
    HOUSE.iter().find(|(known, _)| *known == name).map(|(_, place)| *place)
}

fn words(place: Place) -> String {
    match place {
        Floor(floor) => format!("floor {floor}"),
        Testkit => "test support".into(),
        Tool => "a tool".into(),
    }
}

/// Why a crate at `from` may not use one at `to`, if it may not.
fn objection(from: Place, to: Place) -> Option<&'static str> {
    match (from, to) {
        (Floor(from), Floor(to)) if to > from => Some("an upward edge"),
        (Floor(from), Floor(to)) if to == from => Some("a sideways edge"),
        (Floor(_), Testkit) => Some("test support may only be a dev-dependency"),
        (Testkit, Floor(to)) if to > TESTKIT_CEILING => {
            Some("an upward edge, test support may use floors 0 and 1")
        }
        (_, Tool) => Some("nothing may use a tool"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults_of(edges: &[(&str, &str)]) -> Vec<String> {
        let edges: Vec<Edge> = edges
            .iter()
            .map(|(from, to)| Edge {
                from: (*from).into(),
                to: (*to).into(),
                manifest: format!("{from}/Cargo.toml"),
            })
            .collect();
        let crates: Vec<_> = HOUSE.iter().map(|(name, _)| ((*name).into(), "Cargo.toml".into())).collect();
        faults(&crates, &edges)
    }

    #[test]
    fn edges_downward_and_tools_above_everything_are_fine() {
        assert_eq!(
            faults_of(&[
                ("posthorse-omni", "posthorse-engine"),
                ("posthorse-cli", "posthorse"),
                ("posthorse-tcp", "posthorse-core"),
                ("posthorse-testkit", "posthorse-buffer"),
                ("posthorse-benches", "posthorse-testkit"),
                ("xtask", "posthorse-cli"),
            ]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn an_upward_edge_names_both_crates_their_floors_and_the_manifest() {
        let found = faults_of(&[("posthorse-core", "posthorse-engine")]);
        assert_eq!(found.len(), 1);
        for part in [
            "posthorse-core (floor 0)",
            "posthorse-engine (floor 3)",
            "an upward edge",
            "posthorse-core/Cargo.toml",
        ] {
            assert!(found[0].contains(part), "{part} is missing in {}", found[0]);
        }
    }

    #[test]
    fn a_sideways_edge_is_refused() {
        let found = faults_of(&[("posthorse-tcp", "posthorse-shm"), ("posthorse-cli", "posthorse-capi")]);
        assert_eq!(found.len(), 2);
        assert!(found.iter().all(|fault| fault.contains("a sideways edge")), "{found:?}");
    }

    #[test]
    fn test_support_and_tools_stay_out_of_the_product() {
        for (edge, why) in [
            (("posthorse-cli", "posthorse-testkit"), "only be a dev-dependency"),
            (("posthorse-testkit", "posthorse-tcp"), "an upward edge"),
            (("posthorse-cli", "posthorse-benches"), "nothing may use a tool"),
            (("posthorse-benches", "xtask"), "nothing may use a tool"),
        ] {
            let found = faults_of(&[edge]);
            assert!(found.len() == 1 && found[0].contains(why), "{edge:?}: {found:?}");
        }
    }

    #[test]
    fn a_crate_without_a_floor_is_a_fault_that_names_the_table() {
        let found = faults(&[("posthorse-novel".into(), "novel/Cargo.toml".into())], &[]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("posthorse-novel") && found[0].contains("HOUSE of xtask/src/layers.rs"));
    }
}
