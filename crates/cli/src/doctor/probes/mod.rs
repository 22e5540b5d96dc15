//! What is looked at. Each probe reads a few files, waits for nothing, and needs no rights.

mod gpu;
mod memory;
mod network;
mod process;
mod rdma;

use super::host::Host;
use super::report::Check;

/// All checks, in the order of their areas.
pub(super) fn all(host: &Host) -> Vec<Check> {
    let areas = [rdma::PROBES, memory::PROBES, process::PROBES, gpu::PROBES, network::PROBES];
    areas.into_iter().flatten().map(|probe| probe(host)).collect()
}

/// Looks at one thing.
type Probe = fn(&Host) -> Check;

/// Bytes in the largest binary unit that they fill.
fn size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::host::tests::fake;
    use super::super::report::State;
    use super::*;

    #[test]
    fn a_host_that_says_nothing_is_looked_at_to_the_end() {
        let checks = all(&fake(&[]).host);
        assert!(checks.iter().all(|check| check.state != State::Limited), "{checks:#?}");
        let mut names: Vec<_> = checks.iter().map(|check| check.name).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all, "names are for --require");
    }

    #[test]
    fn the_book_has_every_check_in_order() {
        let book = include_str!("../../../../../docs/src/doctor.md");
        let (_, table) = book.split_once("<!-- table: doctor checks -->").unwrap();
        let rows =
            table.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
        let found: Vec<String> =
            rows.skip(2).map(|row| row.split('|').nth(1).unwrap().trim().replace('`', "")).collect();
        let names: Vec<&str> = all(&fake(&[]).host).iter().map(|check| check.name).collect();
        assert_eq!(found, names);
    }

    #[test]
    fn sizes_have_a_unit() {
        assert_eq!([size(0), size(8 << 20), size(3 << 29)], ["0 B", "8.0 MiB", "1.5 GiB"]);
    }
}
